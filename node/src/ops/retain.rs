//! Retention and collection: records are thinned by age, then what nothing refers to leaves the disk.

use crate::host::clock;
use crate::node::Node;
use ks_blobs::{Kept, Retention};
use ks_proto::{CheckpointId, SessionId};
use ks_raft::Command;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// Time between two rounds.
const EVERY: Duration = Duration::from_secs(600);
/// What is younger is left alone by the collection.
const GRACE_MS: u64 = 600_000;

/// Checkpoints after model calls come every few seconds: of those older than this, the last one of each minute stays.
const CALLS_KEPT_MS: u64 = 120_000;
const MINUTE_MS: u64 = 60_000;

/// Rounds for as long as the node lives.
pub async fn run(node: std::sync::Weak<Node>) {
    let mut tick = tokio::time::interval_at(tokio::time::Instant::now() + EVERY, EVERY);
    loop {
        tick.tick().await;
        let Some(node) = node.upgrade() else { return };
        if let Err(e) = current_round(node, GRACE_MS).await {
            tracing::warn!("collection: {e}");
        }
    }
}

/// A round on a state that is not behind. After a restart the state is older than what this node had applied, and told
/// others, before: copies that it was named for lately would look like nobody's.
async fn current_round(node: Arc<Node>, grace_ms: u64) -> Result<ks_blobs::GcReport, String> {
    node.fleet.consensus().catch_up().await.map_err(|e| format!("put off, for the newest state cannot be had: {e}"))?;
    tokio::task::spawn_blocking(move || round(&node, grace_ms)).await.map_err(|e| e.to_string())?
}

/// One round: thin, then collect.
///
/// # Errors
/// What the state or the store refused; nothing that is referred to is touched.
pub fn round(node: &Arc<Node>, grace_ms: u64) -> Result<ks_blobs::GcReport, String> {
    thin(node)?;
    let roots = roots(node);
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

/// What this node must keep: what the fleet counts on it for, and where its own sessions would start again.
fn roots(node: &Arc<Node>) -> Vec<CheckpointId> {
    let me = node.fleet.number();
    let state = node.state.read();
    let mut roots: BTreeSet<CheckpointId> = BTreeSet::new();
    for s in state.sessions.values() {
        roots.extend(s.checkpoints.values().filter(|c| state.holders(s, c).contains(&me)).map(|c| c.info.id));
    }
    let held = |holders: &[u64]| holders.is_empty() || holders.contains(&me);
    roots.extend(state.golden.iter().filter(|g| held(&g.holders)).map(|g| g.checkpoint));
    roots.extend(state.images.values().chain(state.old_images.values()).filter(|i| held(&i.holders)).map(|i| i.disk));
    // Where own sessions would start again, though others hold it by the records: kept when it is here.
    let heads = state.sessions.values().filter(|s| !s.tombstone && s.owner == me).map(|s| s.head);
    roots.extend(heads.filter(|id| node.supply.store.has_manifest(id)));
    roots.into_iter().collect()
}

fn thin(node: &Arc<Node>) -> Result<(), String> {
    let (now, me) = (clock::unix_ms(), node.fleet.number());
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
            let calls: BTreeSet<u64> =
                s.checkpoints.values().filter(|c| c.info.reason == "call").map(|c| c.info.number).collect();
            let mut drop: BTreeSet<u64> = Retention::default().to_drop(&rows, now).into_iter().collect();
            drop.extend(superseded(&rows, &calls, now));
            (s.id, drop.into_iter().collect::<Vec<u64>>())
        };
        state.sessions.values().filter(|s| !s.tombstone && s.owner == me).map(plan).filter(|p| !p.1.is_empty()).collect()
    };
    for (id, numbers) in plans {
        node.state.apply(Command::DropCheckpoints { id, numbers }).map_err(|e| e.to_string())?;
    }
    Ok(())
}

/// Checkpoints among `calls` that a later one of the same minute makes useless. The newest of all, and what is kept for a reason, stay.
fn superseded(rows: &[Kept], calls: &BTreeSet<u64>, now: u64) -> Vec<u64> {
    let newest = rows.iter().map(|r| r.number).max();
    let old = |r: &&Kept| r.created_ms.saturating_add(CALLS_KEPT_MS) < now;
    let of_calls: Vec<&Kept> = rows.iter().filter(|r| calls.contains(&r.number)).filter(old).collect();
    let mut last: BTreeMap<u64, u64> = BTreeMap::new();
    for r in &of_calls {
        let number = last.entry(r.created_ms / MINUTE_MS).or_default();
        *number = (*number).max(r.number);
    }
    let stays = |r: &Kept| r.pinned || Some(r.number) == newest || last.get(&(r.created_ms / MINUTE_MS)) == Some(&r.number);
    of_calls.into_iter().filter(|r| !stays(r)).map(|r| r.number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::start::Opening;
    use crate::host::events::EventLog;
    use crate::host::files::Layout;
    use crate::host::state::StateStore;
    use crate::host::vm::Supply;
    use ks_blobs::{KeyFile, Store, USER_DOMAIN};
    use ks_proto::api::Checkpoint;
    use ks_raft::{ImageRecord, Response, SessionParams};
    use serde_json::json;

    const HOUR: u64 = 3_600_000;

    #[test]
    fn of_checkpoints_after_calls_the_last_of_each_minute_stays() {
        let now = 100 * MINUTE_MS;
        let row = |number: u64, s: u64, pinned| Kept {
            number,
            created_ms: 90 * MINUTE_MS + s * 1000,
            pinned,
            fork_point: false,
            latest: false,
        };
        // Two minutes of them, five seconds apart; one is pinned, one was asked for, and the last two minutes are left alone.
        let mut rows: Vec<Kept> = (0..24).map(|n| row(n + 1, n * 5, n == 3)).collect();
        rows.extend([row(25, 9 * 60, false), row(26, 9 * 60 + 5, false)]);
        let calls: BTreeSet<u64> = (1..=26).filter(|n| *n != 6).collect();
        let gone = superseded(&rows, &calls, now);
        let stay: Vec<u64> = (1..=26).filter(|n| !gone.contains(n)).collect();
        assert_eq!(stay, [4, 6, 12, 24, 25, 26]);
        assert_eq!(superseded(&rows[..11], &calls, now), [1, 2, 3, 5, 7, 8, 9, 10], "the newest stays");
        assert!(superseded(&rows, &BTreeSet::new(), now).is_empty());
    }

    struct Setup {
        node: Arc<Node>,
        runtime: tokio::runtime::Runtime,
        _dir: tempfile::TempDir,
    }

    impl Setup {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let layout = Layout::open(dir.path()).unwrap();
            let store = Store::open(&layout.store()).unwrap();
            let keys = KeyFile::in_dir(&layout.root).load_or_create(true).unwrap();
            let (deadline, lease) = tokio::sync::watch::channel(u64::MAX);
            let supply = Supply { store, keys, board: crate::fleet::board::Board::default(), lease };
            let events = EventLog::open(&layout.database()).unwrap();
            let runtime = tokio::runtime::Runtime::new().unwrap();
            let inside = runtime.enter();
            let opening = Opening {
                layout: &layout,
                address: "127.0.0.1:0".parse().ok(),
                limits: ks_bulk::BulkLimits::default(),
                supply: &supply,
                deadline,
                profiles: vec!["tcg".into()],
                earlier: None,
                event: Arc::new(|_, _| {}),
            };
            let (fleet, _mail) = runtime.block_on(crate::fleet::start::open(opening)).unwrap();
            let state = StateStore::new(fleet.consensus().clone(), events);
            let node = Node::new(layout, state, supply, fleet);
            drop(inside);
            Self { node, runtime, _dir: dir }
        }
        /// Something that is really stored, with bytes that nothing else has.
        fn stored(&self, fill: u8) -> CheckpointId {
            let mut file = tempfile::tempfile().unwrap();
            let mut bytes = vec![fill; 300_000];
            bytes.iter_mut().enumerate().for_each(|(i, b)| *b ^= (i / 7) as u8);
            std::io::Write::write_all(&mut file, &bytes).unwrap();
            let key = self.node.supply.keys.get(USER_DOMAIN).unwrap();
            self.node.supply.store.ingest_disk(&file, key, &mut |_, _| {}).unwrap().id
        }
        fn whole(&self, id: &CheckpointId) -> bool {
            self.node.supply.store.closure_plan(id, &self.node.supply.keys).is_ok()
        }
        fn apply(&self, command: Command) -> Response {
            self.node.state.apply(command).unwrap()
        }
    }

    /// A session whose checkpoints are (stored, age in ms, pinned), oldest first.
    fn session(s: &Setup, image: CheckpointId, checkpoints: &[(CheckpointId, u64, bool)]) -> SessionId {
        let image_record: ImageRecord = serde_json::from_value(json!({ "name": "default", "id": "11".repeat(32), "kernel": "k",
            "cmdline": "", "disk_bytes": 1, "disk_used_bytes": 1, "disk": image, "created_unix_ms": 0 }))
        .unwrap();
        let params: SessionParams = serde_json::from_value(json!({ "image": "default", "image_id": image_record.id,
            "memory_mib": 64, "vcpus": 1, "engine": "qemu", "profile": "tcg", "engine_why": "" }))
        .unwrap();
        s.apply(Command::PutImage { image: image_record });
        let id = SessionId([7; 16]);
        let create = json!({ "id": id, "name": "a", "owner": 1, "params": params, "cadence_s": 60, "idle_park_s": 0, "command": null,
            "forked_from": null, "head": image, "now_unix_ms": 1 });
        let create = create.as_object().unwrap().clone();
        s.apply(command("create-session", create));
        let Response::Token { token } =
            s.apply(command("begin-run", json!({ "id": id, "from": image }).as_object().unwrap().clone()))
        else {
            panic!("a token")
        };
        for (checkpoint, age, pinned) in checkpoints {
            let info: Checkpoint = serde_json::from_value(json!({ "number": 0, "id": checkpoint, "parent": null,
                "created_unix_ms": clock::unix_ms() - age, "message": "", "reason": "cadence", "pinned": pinned,
                "durability": "durable", "logical_bytes": 0, "stored_bytes": 0, "pause_us": 0, "total_us": 0 }))
            .unwrap();
            let commit = json!({ "id": id, "token": token, "info": info });
            assert!(matches!(
                s.apply(command("commit-checkpoint", commit.as_object().unwrap().clone())),
                Response::Checkpoint { .. }
            ));
        }
        id
    }

    /// A command as the log has it: fields that it gains later have their defaults.
    fn command(name: &str, mut fields: serde_json::Map<String, serde_json::Value>) -> Command {
        fields.insert("do".into(), name.into());
        serde_json::from_value(fields.into()).unwrap()
    }

    #[test]
    fn a_round_thins_the_records_and_then_frees_what_nothing_refers_to() {
        let s = Setup::new();
        let (image, stray) = (s.stored(1), s.stored(2));
        let ids: Vec<CheckpointId> = (3..8).map(|n| s.stored(n)).collect();
        // Four in one hour that is three hours old, one of them pinned; one now.
        let hour = (clock::unix_ms() / HOUR - 3) * HOUR;
        let age = |minute: u64| clock::unix_ms() - (hour + minute * 60_000);
        let rows = [
            (ids[0], age(1), false),
            (ids[1], age(2), false),
            (ids[2], age(3), true),
            (ids[3], age(4), false),
            (ids[4], 0, false),
        ];
        let id = session(&s, image, &rows);
        let before = s.node.supply.store.stats();
        let report = round(&s.node, 0).unwrap();
        let left: Vec<u64> = s.node.state.read().sessions[&id].checkpoints.keys().copied().collect();
        assert_eq!(left, [1, 3, 5], "the first of its hour, the pinned one and the newest stay");
        for (n, keeps) in [(0, true), (1, false), (2, true), (3, false), (4, true)] {
            assert_eq!(s.whole(&ids[n]), keeps, "c{}", n + 1);
        }
        assert!(s.whole(&image) && !s.whole(&stray));
        assert_eq!(report.manifests_removed, 3, "{report:?}");
        assert!(report.bytes_freed > 0 && s.node.supply.store.stats().manifests == before.manifests - 3);
        // Nothing more to do, and what a young store holds is left alone.
        assert_eq!(round(&s.node, 0).unwrap().manifests_removed, 0);
        let young = s.stored(9);
        assert_eq!(round(&s.node, GRACE_MS).unwrap().manifests_removed, 0);
        assert!(s.whole(&young), "it may be a checkpoint whose record is being written");
    }

    #[test]
    fn while_the_newest_state_cannot_be_had_nothing_is_removed() {
        let s = Setup::new();
        let stray = s.stored(2);
        s.runtime.block_on(s.node.fleet.consensus().shutdown());
        assert!(s.runtime.block_on(current_round(s.node.clone(), 0)).is_err());
        assert!(s.whole(&stray));
    }

    #[test]
    fn with_a_root_that_cannot_be_read_nothing_is_removed() {
        let s = Setup::new();
        let (image, stray) = (s.stored(1), s.stored(2));
        session(&s, image, &[(CheckpointId([0xee; 32]), 0, false)]);
        assert!(round(&s.node, 0).is_err());
        assert!(s.whole(&stray) && s.whole(&image));
    }
}
