//! Retention and collection: records are thinned by age, then what nothing refers to leaves the disk.

use crate::host::clock;
use crate::node::Node;
use ks_blobs::{Kept, Retention};
use ks_proto::{CheckpointId, SessionId};
use ks_raft::Command;
use std::sync::Arc;
use std::time::Duration;

/// Time between two rounds.
const EVERY: Duration = Duration::from_secs(600);
/// What is younger is left alone by the collection.
const GRACE_MS: u64 = 600_000;

/// Rounds for as long as the node lives.
pub async fn run(node: std::sync::Weak<Node>) {
    let mut tick = tokio::time::interval_at(tokio::time::Instant::now() + EVERY, EVERY);
    loop {
        tick.tick().await;
        let Some(node) = node.upgrade() else { return };
        let done = tokio::task::spawn_blocking(move || round(&node, GRACE_MS)).await;
        if let Ok(Err(e)) = done {
            tracing::warn!("collection: {e}");
        }
    }
}

/// One round: thin, then collect.
///
/// # Errors
/// What the state or the store refused; nothing that is referred to is touched.
pub fn round(node: &Arc<Node>, grace_ms: u64) -> Result<ks_blobs::GcReport, String> {
    thin(node)?;
    let roots: Vec<CheckpointId> = node.state.read().roots().into_iter().collect();
    let report = node.supply.store.gc(&roots, &node.supply.keys, grace_ms, clock::unix_ms()).map_err(|e| e.to_string())?;
    if report.manifests_removed + report.packs_removed + report.packs_compacted > 0 {
        let text = format!(
            "{} manifests and {} packs removed, {} bytes freed",
            report.manifests_removed, report.packs_removed, report.bytes_freed
        );
        node.state.event("", "collected", &text);
    }
    Ok(report)
}

fn thin(node: &Arc<Node>) -> Result<(), String> {
    let now = clock::unix_ms();
    let plans: Vec<(SessionId, Vec<u64>)> = {
        let state = node.state.read();
        let plan = |s: &ks_raft::SessionRecord| {
            let kept = state.kept(s);
            let rows: Vec<Kept> = s
                .checkpoints
                .values()
                .map(|c| Kept {
                    number: c.info.number,
                    created_ms: c.info.created_unix_ms,
                    pinned: c.info.pinned || kept.contains_key(&c.info.number),
                    fork_point: false,
                    latest: false,
                })
                .collect();
            (s.id, Retention::default().to_drop(&rows, now))
        };
        state.sessions.values().filter(|s| !s.tombstone).map(plan).filter(|p| !p.1.is_empty()).collect()
    };
    for (id, numbers) in plans {
        node.state.apply(Command::DropCheckpoints { id, numbers }).map_err(|e| e.to_string())?;
    }
    Ok(())
}
