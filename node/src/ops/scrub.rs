//! The slow scrub: one pack after the other is read and checked, so that rot is found before a restore needs the bytes.
//!
//! A pack in which something is damaged is no base for new checkpoints from then on, and what is damaged is stored again by
//! the next checkpoint whose VM still has it changed.

use crate::node::Node;
use ks_blobs::ScrubStep;
use ks_proto::PackId;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Time between two packs: at most 32 MiB are read in each.
const EVERY: Duration = Duration::from_secs(5);

/// Goes round and round for as long as the node lives.
pub async fn run(node: Weak<Node>) {
    let mut after: Option<PackId> = None;
    let mut tick = tokio::time::interval_at(tokio::time::Instant::now() + EVERY, EVERY);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        let Some(node) = node.upgrade() else { return };
        let done = tokio::task::spawn_blocking(move || step(&node, after)).await;
        match done {
            Ok(Ok(s)) => after = s.pack,
            Ok(Err(e)) => tracing::warn!("scrub: {e}"),
            Err(_) => return,
        }
    }
}

/// Checks the pack after `after` and tells of each damaged object.
///
/// # Errors
/// If this machine cannot read at all.
pub fn step(node: &Arc<Node>, after: Option<PackId>) -> Result<ScrubStep, String> {
    let done = node.supply.store.scrub(after, &node.supply.keys).map_err(|e| e.to_string())?;
    for f in &done.faults {
        let file = f.file.as_ref().map_or_else(String::new, |p| format!(" in {}", p.display()));
        let text = format!("chunk {}{file} on {}: {}", f.chunk, f.holder, f.why);
        node.state.event("", "damaged", &text);
    }
    Ok(done)
}
