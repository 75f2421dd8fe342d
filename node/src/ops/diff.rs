//! Comparing two checkpoints: both are restored in VMs that are cut off from everything, and their guests list their
//! files. The host never parses a guest's file system.
//!
//! Reading every file would take a minute on a slow engine, so the guests first list sizes, modes, times and inodes
//! only. Both checkpoints are of one disk's history, so a file that is equal in all of these is taken as unchanged: a
//! user program can set mtime but not ctime, unless it may set the clock. Two exceptions to this trust are hashed like
//! all that differs in times only: a file whose inode changed shortly before the earlier checkpoint (see
//! [`SETTLING`]), and files of agents that tell no times. What is left open: a store through a shared mapping into a
//! page that was made dirty before a park, and is still not written back when the session runs again.

use super::verbs::find_checkpoint;
use crate::host::files;
use crate::host::guest::HELLO_RESTORED;
use crate::host::image::image_dir;
use crate::host::upload::Sink;
use crate::host::vm::{LiveVm, Origin, Owned, Spec, launch, store_error};
use crate::node::Node;
use crate::progress::Steps;
use ks_blobs::USER_DOMAIN;
use ks_proto::api::{ApiError, Checkpoint, Diff, DiffEntry, DiffReport};
use ks_proto::control::VmConfig;
use ks_proto::guest::FileEntry;
use ks_proto::{CheckpointId, RunToken, SessionId};
use ks_raft::SessionRecord;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

const LISTING_DEADLINE: Duration = Duration::from_secs(600);
const STEPS: u64 = 3;
/// Until a file has this age, its times may miss a change: a second one in the same tick of the clock, or a store
/// through a shared mapping into a page that is dirty already (Linux writes it back within about 35 s). The rest is
/// for guest clocks that are a little off.
const SETTLING: Duration = Duration::from_secs(120);

/// The files that differ between two checkpoints.
///
/// # Errors
/// If a checkpoint is not there or its guest does not list its files.
pub async fn diff(node: &Arc<Node>, name: &str, d: Diff, steps: &Steps) -> Result<DiffReport, ApiError> {
    let record = node.record(name)?;
    let (from, to) = (find_checkpoint(node, &record, &d.from)?, find_checkpoint(node, &record, &d.to)?);
    let path = if d.path.is_empty() { "/".to_owned() } else { d.path };
    if same_contents(node, &from, &to).await? {
        return Ok(report(BTreeMap::new()));
    }
    steps.step("restoring both in cut-off guests", 0, STEPS);
    let (a, b) = tokio::join!(Side::restore(node, &record, from.id), Side::restore(node, &record, to.id));
    let files = match (&a, &b) {
        (Ok(a), Ok(b)) => differing(a, b, &path, settled_ns(&from, &to), steps).await,
        (Err(e), _) | (_, Err(e)) => Err(e.clone()),
    };
    tokio::join!(end(node, &record, a.ok()), end(node, &record, b.ok()));
    files.map(report)
}

fn report(files: BTreeMap<String, DiffEntry>) -> DiffReport {
    DiffReport { schema: "ks.diff.v1".into(), files: files.into_values().collect() }
}

/// True if nothing can differ. Equal disks alone do not tell: a change may still be in the guest's page cache only,
/// which is memory.
async fn same_contents(node: &Arc<Node>, from: &Checkpoint, to: &Checkpoint) -> Result<bool, ApiError> {
    if from.id == to.id {
        return Ok(true);
    }
    let (store, a, b) = (node.supply.store.clone(), from.id, to.id);
    let read = tokio::task::spawn_blocking(move || {
        let (a, b) = (store.manifest(&a)?, store.manifest(&b)?);
        Ok((a.disk, a.memory) == (b.disk, b.memory))
    });
    let read =
        read.await.map_err(|e| ApiError::new("internal", "a task of the node ended early", e.to_string(), "report this"))?;
    read.map_err(|e| store_error(&e))
}

/// What changed since then may not show in a file's times.
fn settled_ns(from: &Checkpoint, to: &Checkpoint) -> i64 {
    let earlier = Duration::from_millis(from.created_unix_ms.min(to.created_unix_ms));
    i64::try_from(earlier.saturating_sub(SETTLING).as_nanos()).unwrap_or(0)
}

async fn differing(
    a: &Side,
    b: &Side,
    path: &str,
    settled_ns: i64,
    steps: &Steps,
) -> Result<BTreeMap<String, DiffEntry>, ApiError> {
    steps.step("listing files", 1, STEPS);
    let (from, to) = tokio::try_join!(
        a.ask(a.vm.guest.list_files(path, LISTING_DEADLINE)),
        b.ask(b.vm.guest.list_files(path, LISTING_DEADLINE))
    )?;
    let mut seen = compare(from, to, settled_ns);
    let paths: Vec<String> = seen.open.keys().cloned().collect();
    steps.step(format!("comparing the contents of {} files", paths.len()), 2, STEPS);
    if !paths.is_empty() {
        let (guest_a, guest_b) = (&a.vm.guest, &b.vm.guest);
        let (from, to) = tokio::try_join!(
            a.ask(guest_a.hash_files(&paths, LISTING_DEADLINE)),
            b.ask(guest_b.hash_files(&paths, LISTING_DEADLINE))
        )?;
        seen.settle(from, to);
    }
    Ok(seen.changes)
}

/// What two listings tell.
#[derive(Debug, Default)]
struct Seen {
    /// Differences that are sure.
    changes: BTreeMap<String, DiffEntry>,
    /// Files that differ if their hashes do.
    open: BTreeMap<String, DiffEntry>,
}

/// Pure: compares two listings by path.
fn compare(from: Vec<FileEntry>, to: Vec<FileEntry>, settled_ns: i64) -> Seen {
    let mut old: BTreeMap<String, FileEntry> = from.into_iter().map(|f| (f.path.clone(), f)).collect();
    let mut seen = Seen::default();
    for n in to {
        let o = old.remove(&n.path);
        let (change, bytes_from) = o.as_ref().map_or(("added", 0), |o| ("changed", o.bytes));
        let entry = DiffEntry { path: n.path.clone(), change: change.into(), bytes_from, bytes_to: n.bytes };
        match o.map_or(Verdict::Changed, |o| verdict(&o, &n, settled_ns)) {
            Verdict::Same => {}
            Verdict::Changed => drop(seen.changes.insert(n.path, entry)),
            Verdict::Open => drop(seen.open.insert(n.path, entry)),
        }
    }
    for (path, o) in old {
        let entry = DiffEntry { path: path.clone(), change: "removed".into(), bytes_from: o.bytes, bytes_to: 0 };
        seen.changes.insert(path, entry);
    }
    seen
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Same,
    Changed,
    Open,
}

/// Pure: see the module.
fn verdict(o: &FileEntry, n: &FileEntry, settled_ns: i64) -> Verdict {
    let times_told = o.ino != 0 && n.ino != 0;
    let hashes_told = !o.hash.is_empty() && !n.hash.is_empty();
    if (o.bytes, o.mode) != (n.bytes, n.mode) {
        Verdict::Changed
    } else if hashes_told || !times_told {
        // An agent that tells no times told all hashes that it could make.
        if o.hash == n.hash { Verdict::Same } else { Verdict::Changed }
    } else if (o.ino, o.mtime_ns, o.ctime_ns) == (n.ino, n.mtime_ns, n.ctime_ns) && n.ctime_ns < settled_ns {
        Verdict::Same
    } else {
        Verdict::Open
    }
}

impl Seen {
    /// Settles what is open by the hashes of both sides. A file that neither side can read counts as unchanged.
    fn settle(&mut self, from: Vec<FileEntry>, to: Vec<FileEntry>) {
        let hashes = |v: Vec<FileEntry>| v.into_iter().map(|f| (f.path, f.hash)).collect::<BTreeMap<_, _>>();
        let (old, new) = (hashes(from), hashes(to));
        let open = std::mem::take(&mut self.open);
        self.changes.extend(open.into_iter().filter(|(path, _)| old.get(path) != new.get(path)));
    }
}

/// One checkpoint, restored in a cut-off VM.
struct Side {
    vm: LiveVm,
    dir: PathBuf,
}

impl Side {
    async fn restore(node: &Arc<Node>, r: &SessionRecord, checkpoint: CheckpointId) -> Result<Self, ApiError> {
        let session = SessionId(files::random());
        let dir = node.layout.run().join(format!("diff-{}", session.short()));
        let image = image_dir(node, &r.params.image_id);
        let config = VmConfig {
            session,
            name: format!("diff of {}", r.name),
            token: RunToken { generation: 0, epoch: 0, run: 1 },
            engine: r.params.engine,
            vcpus: r.params.vcpus,
            memory_bytes: r.params.memory_mib << 20,
            cmdline: String::new(),
            verify_eager: false,
        };
        let origin = Origin::Restore { checkpoint };
        let (kernel, initrd) = (image.join("kernel"), image.join("initrd"));
        let spec = Spec { config, origin, kernel, initrd, write_domain: USER_DOMAIN, owned: Owned::always() };
        let side = match launch(&node.supply, &dir, &spec, Sink::Refuse).await {
            Ok(vm) => Self { vm, dir },
            Err(e) => {
                let _ = std::fs::remove_dir_all(&dir);
                return Err(e);
            }
        };
        let quiet = side.ask(async {
            side.vm.guest.hello(HELLO_RESTORED).await?;
            // Nothing of the past may go on working while it is looked at.
            side.vm.guest.freeze().await
        });
        match quiet.await {
            Ok(()) => Ok(side),
            Err(e) => {
                end(node, r, Some(side)).await;
                Err(e)
            }
        }
    }

    /// Does `work` unless the VM ends before.
    async fn ask<T>(&self, work: impl Future<Output = Result<T, ApiError>>) -> Result<T, ApiError> {
        let mut ended = self.vm.ended.clone();
        tokio::select! {
            r = work => r,
            _ = ended.wait_for(Option::is_some) => {
                let why = self.vm.ended.borrow().clone().unwrap_or_default();
                Err(ApiError::new("internal", "the cut-off VM ended", why, "try again"))
            }
        }
    }
}

async fn end(node: &Arc<Node>, r: &SessionRecord, side: Option<Side>) {
    let Some(side) = side else { return };
    if let Err(why) = side.vm.end().await {
        node.state.event(r.name.as_str(), "process-stays", &why);
    }
    let _ = std::fs::remove_dir_all(&side.dir);
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTLED: i64 = 1000;

    fn file(path: &str, bytes: u64) -> FileEntry {
        FileEntry { path: path.into(), bytes, hash: String::new(), mode: 0o644, mtime_ns: 5, ctime_ns: 7, ino: 3 }
    }
    fn hashed(path: &str, hash: &str) -> FileEntry {
        FileEntry { hash: hash.into(), ..file(path, 1) }
    }
    fn words(entries: &BTreeMap<String, DiffEntry>) -> Vec<String> {
        entries.values().map(|e| format!("{} {} {}>{}", e.path, e.change, e.bytes_from, e.bytes_to)).collect()
    }

    #[test]
    fn added_removed_and_resized_files_are_told_without_hashes() {
        let from = vec![file("/b", 1), file("/c", 5), file("/d", 2), file("/e", 4)];
        let to = vec![file("/a", 3), file("/c", 5), file("/d", 9), FileEntry { mode: 0o755, ..file("/e", 4) }];
        let seen = compare(from, to, SETTLED);
        assert_eq!(words(&seen.changes), ["/a added 0>3", "/b removed 1>0", "/d changed 2>9", "/e changed 4>4"]);
        assert!(seen.open.is_empty(), "{seen:?}");
    }

    #[test]
    fn only_a_settled_file_equal_in_everything_is_taken_as_unchanged() {
        let f = file("/f", 4);
        assert_eq!(verdict(&f, &f, SETTLED), Verdict::Same);
        let others =
            [FileEntry { mtime_ns: 6, ..f.clone() }, FileEntry { ctime_ns: 8, ..f.clone() }, FileEntry { ino: 4, ..f.clone() }];
        for other in others {
            assert_eq!(verdict(&f, &other, SETTLED), Verdict::Open, "{other:?}");
        }
        let fresh = FileEntry { ctime_ns: SETTLED, ..f };
        assert_eq!(verdict(&fresh, &fresh, SETTLED), Verdict::Open, "it may have changed again in the same tick");
    }

    #[test]
    fn hashes_settle_what_is_open() {
        let fresh = |path: &str| FileEntry { ctime_ns: SETTLED, ..file(path, 1) };
        let names = ["/changed", "/gone-unreadable", "/touched", "/unreadable"];
        let mut seen = compare(names.map(fresh).into(), names.map(fresh).into(), SETTLED);
        assert_eq!(seen.open.keys().collect::<Vec<_>>(), names.each_ref());
        let from =
            vec![hashed("/changed", "x"), hashed("/gone-unreadable", "x"), hashed("/touched", "z"), hashed("/unreadable", "")];
        let to = vec![hashed("/changed", "y"), hashed("/touched", "z"), hashed("/unreadable", "")];
        seen.settle(from, to);
        assert_eq!(words(&seen.changes), ["/changed changed 1>1", "/gone-unreadable changed 1>1"]);
    }

    #[test]
    fn an_agent_that_tells_no_times_is_taken_by_its_hashes() {
        let old = |hash: &str| FileEntry { mtime_ns: 0, ctime_ns: 0, ino: 0, ..hashed("/f", hash) };
        assert_eq!(verdict(&old("x"), &old("x"), SETTLED), Verdict::Same);
        assert_eq!(verdict(&old("x"), &old("y"), SETTLED), Verdict::Changed);
        assert_eq!(verdict(&old(""), &old(""), SETTLED), Verdict::Same, "asking again would not tell more");
        assert_eq!(verdict(&hashed("/odd", "x"), &hashed("/odd", "y"), SETTLED), Verdict::Changed, "a name that is not UTF-8");
    }

    #[test]
    fn what_settles_counts_from_the_earlier_checkpoint() {
        let at = |ms: u64| {
            let c = serde_json::json!({ "number": 1, "id": "00".repeat(32), "parent": null, "created_unix_ms": ms, "message": "",
                "reason": "demand", "pinned": false, "durability": "durable", "logical_bytes": 0, "stored_bytes": 0,
                "pause_us": 0, "total_us": 0 });
            serde_json::from_value::<Checkpoint>(c).unwrap()
        };
        let (early, late) = (at(1_700_000_000_000), at(1_700_009_000_000));
        assert_eq!(settled_ns(&early, &late), 1_699_999_880_000_000_000);
        assert_eq!(settled_ns(&late, &early), 1_699_999_880_000_000_000);
        assert_eq!(settled_ns(&at(5), &at(6)), 0);
    }
}
