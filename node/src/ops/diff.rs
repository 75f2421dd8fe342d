//! Comparing two checkpoints: both are restored in VMs that are cut off from everything, and their guests list their
//! files. The host never parses a guest's file system.

use super::verbs::find_checkpoint;
use crate::host::files;
use crate::host::guest::HELLO_RESTORED;
use crate::host::image::image_dir;
use crate::host::upload::Sink;
use crate::host::vm::{Origin, Spec, launch};
use crate::node::Node;
use crate::progress::Steps;
use ks_blobs::USER_DOMAIN;
use ks_proto::api::{ApiError, Diff, DiffEntry, DiffReport};
use ks_proto::control::VmConfig;
use ks_proto::guest::FileEntry;
use ks_proto::{CheckpointId, RunToken, SessionId};
use ks_raft::SessionRecord;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

const LISTING_DEADLINE: Duration = Duration::from_secs(600);

/// The files that differ between two checkpoints.
///
/// # Errors
/// If a checkpoint is not there or its guest does not list its files.
pub async fn diff(node: &Arc<Node>, name: &str, d: Diff, steps: &Steps) -> Result<DiffReport, ApiError> {
    let record = node.record(name)?;
    let (from, to) = (find_checkpoint(node, &record, &d.from)?, find_checkpoint(node, &record, &d.to)?);
    let path = if d.path.is_empty() { "/".to_owned() } else { d.path };
    steps.step("restoring both in cut-off guests", 0, 2);
    let (a, b) = tokio::join!(listing(node, &record, from.id, &path, steps), listing(node, &record, to.id, &path, steps));
    Ok(DiffReport { schema: "ks.diff.v1".into(), files: compare(a?, b?) })
}

/// Pure: what changed between two listings, by path.
pub fn compare(from: Vec<FileEntry>, to: Vec<FileEntry>) -> Vec<DiffEntry> {
    let map = |v: Vec<FileEntry>| v.into_iter().map(|f| (f.path.clone(), f)).collect::<BTreeMap<_, _>>();
    let (mut old, new) = (map(from), map(to));
    let mut out = BTreeMap::new();
    for (path, n) in new {
        let entry = match old.remove(&path) {
            None => DiffEntry { path: path.clone(), change: "added".into(), bytes_from: 0, bytes_to: n.bytes },
            Some(o) if (&o.hash, o.bytes, o.mode) == (&n.hash, n.bytes, n.mode) => continue,
            Some(o) => DiffEntry { path: path.clone(), change: "changed".into(), bytes_from: o.bytes, bytes_to: n.bytes },
        };
        out.insert(path, entry);
    }
    for (path, o) in old {
        out.insert(path.clone(), DiffEntry { path, change: "removed".into(), bytes_from: o.bytes, bytes_to: 0 });
    }
    out.into_values().collect()
}

async fn listing(
    node: &Arc<Node>,
    r: &SessionRecord,
    checkpoint: CheckpointId,
    path: &str,
    steps: &Steps,
) -> Result<Vec<FileEntry>, ApiError> {
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
    let spec = Spec { config, origin, kernel: image.join("kernel"), initrd: image.join("initrd"), write_domain: USER_DOMAIN };
    let vm = launch(&node.supply, &dir, &spec, Sink::Refuse).await?;
    let work = async {
        vm.guest.hello(HELLO_RESTORED).await?;
        // Nothing of the past may go on working while it is looked at.
        vm.guest.freeze().await?;
        vm.guest.list_files(path, LISTING_DEADLINE).await
    };
    let mut ended = vm.ended.clone();
    let result = tokio::select! {
        r = work => r,
        _ = ended.wait_for(Option::is_some) => {
            let why = vm.ended.borrow().clone().unwrap_or_default();
            Err(ApiError::new("internal", "the cut-off VM ended", why, "try again"))
        }
    };
    if let Err(why) = vm.end().await {
        node.state.event(r.name.as_str(), "process-stays", &why);
    }
    let _ = std::fs::remove_dir_all(&dir);
    steps.step(format!("listed {}", checkpoint.short()), 1, 2);
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, bytes: u64, hash: &str) -> FileEntry {
        FileEntry { path: path.into(), bytes, hash: hash.into(), mode: 0o644 }
    }

    #[test]
    fn added_removed_and_changed_files_are_listed_by_path() {
        let from = vec![file("/b", 1, "x"), file("/c", 5, "same"), file("/d", 2, "old")];
        let to = vec![file("/a", 3, "y"), file("/c", 5, "same"), file("/d", 2, "new")];
        let got: Vec<String> =
            compare(from, to).iter().map(|e| format!("{} {} {}>{}", e.path, e.change, e.bytes_from, e.bytes_to)).collect();
        assert_eq!(got, ["/a added 0>3", "/b removed 1>0", "/d changed 2>2"]);
    }
}
