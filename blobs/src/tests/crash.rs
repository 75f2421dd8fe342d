//! NO-TORN: stopped at every write and sync of uploading, committing and collecting, a reopened store has every earlier
//! checkpoint byte for byte, and the new one whole or not at all.

use super::disk::{Crash, ModelDisk};
use super::vmm::*;
use crate::host::{Disk, RealDisk};
use crate::{Store, StoreError};
use ks_proto::ids::CheckpointId;
use ks_proto::manifest::Manifest;
use std::path::Path;
use std::sync::Arc;

const LATER: u64 = 1_000_000;

fn crashes(seed: u64) -> [Crash; 5] {
    [Crash::KeepAll, Crash::DropUnsynced, Crash::NamesOnly, Crash::Toss(seed), Crash::Toss(seed + 1000)]
}

pub fn open(dir: &Path, disk: &Arc<ModelDisk>) -> Result<Arc<Store>, StoreError> {
    Store::open_on(dir, disk.clone())
}

/// Runs `work` on a copy of the folder `base`, stopping at every step; checks what each kind of crash leaves.
/// Returns how often it stopped.
pub fn at_every_step(
    base: &Path,
    work: impl Fn(&Arc<Store>) -> Result<(), StoreError>,
    check: impl Fn(&Arc<Store>, bool),
) -> u64 {
    let mut stop = 0;
    loop {
        stop += 1;
        let tmp = tempfile::tempdir().unwrap();
        let dir = tmp.path().join("live");
        copy(base, &dir);
        let disk = Arc::new(ModelDisk::new(&dir, Some(stop)));
        let done = open(&dir, &disk).and_then(|s| work(&s));
        assert_eq!(
            done.is_ok(),
            !disk.stopped(),
            "step {stop}: an error that is not the crash, or one that was swallowed: {done:?}"
        );
        for crash in crashes(stop) {
            let after = tmp.path().join("after");
            disk.after_crash(crash, &after);
            let store = Store::open(&after).unwrap_or_else(|e| panic!("step {stop}, {crash:?}: {e}"));
            assert_eq!(store.warnings(), &[] as &[String], "step {stop}, {crash:?}");
            assert_eq!(RealDisk.list(&after.join("incoming")).unwrap(), [], "step {stop}, {crash:?}");
            check(&store, done.is_ok());
            drop(store);
            std::fs::remove_dir_all(&after).unwrap();
        }
        if done.is_ok() {
            return stop;
        }
    }
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for e in std::fs::read_dir(from).unwrap() {
        let e = e.unwrap();
        let to = to.join(e.file_name());
        if e.file_type().unwrap().is_dir() {
            copy(&e.path(), &to);
        } else {
            std::fs::copy(e.path(), to).unwrap();
        }
    }
}

/// Every manifest that is listed restores; those in `must` are listed.
pub fn check_all(store: &Arc<Store>, must: &[(CheckpointId, Image)]) {
    for (id, im) in must {
        assert_eq!(&restore(store, id).unwrap(), im);
    }
    for id in store.manifests() {
        restore(store, &id).unwrap_or_else(|e| panic!("listed but torn: {e}"));
        assert_eq!(store.verify(&id, &ring()).unwrap().faults, []);
    }
}

#[test]
fn a_crash_while_storing_a_checkpoint_leaves_it_whole_or_absent() {
    let base = tempfile::tempdir().unwrap();
    let (first, second) = (image(&[1, 2, 0, 3], &[4]), image(&[1, 9, 8, 3], &[4, 5]));
    let store = Store::open(base.path()).unwrap();
    let a = checkpoint(&store, &first, 2).unwrap();
    drop(store);
    let b = Manifest::id_of(&build(&second).1.encode());
    let stops = at_every_step(
        base.path(),
        |s| checkpoint(s, &second, 2).map(drop),
        |s, done| {
            let mut must = vec![(a, first.clone())];
            if done || s.has_manifest(&b) {
                must.push((b, second.clone()));
            }
            check_all(s, &must);
            // And the store goes on: the same checkpoint again, then everything restores.
            assert_eq!(checkpoint(s, &second, 3).unwrap(), b);
            check_all(s, &[(a, first.clone()), (b, second.clone())]);
        },
    );
    assert!(stops > 15, "only {stops} steps: the model does not see the writes");
}

#[test]
fn a_crash_in_a_new_folder_leaves_a_store_that_opens() {
    let base = tempfile::tempdir().unwrap();
    let im = image(&[1], &[2]);
    at_every_step(
        base.path(),
        |s| checkpoint(s, &im, 9).map(drop),
        |s, done| {
            assert!(!done || s.manifests().len() == 1);
            check_all(s, &[]);
        },
    );
}

#[test]
fn a_crash_while_collecting_and_compacting_loses_nothing_that_a_root_reaches() {
    let base = tempfile::tempdir().unwrap();
    let many: Vec<u32> = (1..40).collect();
    let (gone, kept) = (image(&many, &[50, 51]), image(&[1, 2, 0, 30], &[50]));
    let store = Store::open(base.path()).unwrap();
    let old = checkpoint(&store, &gone, 10).unwrap();
    let a = checkpoint(&store, &kept, 10).unwrap();
    let dead = image(&[100, 101, 102], &[103]);
    checkpoint(&store, &dead, 2).unwrap();
    let before = store.stats();
    drop(store);
    let now = RealDisk.now_ms() + LATER;
    at_every_step(
        base.path(),
        |s| {
            let r = s.gc(&[a], &ring(), 0, now)?;
            assert_eq!((r.manifests_removed, r.warnings.len()), (2, 0), "{r:?}");
            assert!(r.packs_removed > 0 && r.packs_compacted > 0, "{r:?}");
            Ok(())
        },
        |s, done| {
            check_all(s, &[(a, kept.clone())]);
            if done {
                // The manifests' end is durable before a pack goes; a pack's own may come back, and is collected again.
                assert!(!s.has_manifest(&old));
            }
            s.gc(&[a], &ring(), 0, RealDisk.now_ms() + LATER).unwrap();
            check_all(s, &[(a, kept.clone())]);
            assert!(s.stats().bytes < before.bytes / 3, "{:?} of {before:?}", s.stats());
            let objects = build(&kept).0.len() as u64;
            assert_eq!((s.stats().objects, s.stats().manifests), (objects, 1), "nothing dead is left");
        },
    );
}

#[test]
fn what_a_killed_process_left_unsynced_is_synced_before_it_is_relied_on() {
    // Process 1 dies between naming a pack and syncing its folder. Process 2 finds the pack, builds upon it, and commits.
    // Then the power fails.
    let (first, second) = (image(&[1, 2, 3], &[4]), image(&[1, 2, 3, 7], &[4]));
    let mut stop = 0;
    loop {
        stop += 1;
        let tmp = tempfile::tempdir().unwrap();
        let dir = tmp.path().join("live");
        let disk = Arc::new(ModelDisk::new(&dir, Some(stop)));
        let done = open(&dir, &disk).and_then(|s| checkpoint(&s, &first, 2)).is_ok();
        disk.restart_process();
        let store = open(&dir, &disk).unwrap();
        let b = checkpoint(&store, &second, 2).unwrap();
        drop(store);
        for crash in [Crash::DropUnsynced, Crash::Toss(stop)] {
            let after = tmp.path().join("after");
            disk.after_crash(crash, &after);
            check_all(&Store::open(&after).unwrap(), &[(b, second.clone())]);
            std::fs::remove_dir_all(&after).unwrap();
        }
        if done {
            break;
        }
    }
}

#[test]
fn v13_a_full_disk_fails_the_checkpoint_by_name_and_the_store_goes_on() {
    let tmp = tempfile::tempdir().unwrap();
    let dir = tmp.path().join("store");
    let disk = Arc::new(ModelDisk::new(&dir, None));
    let store = open(&dir, &disk).unwrap();
    let first = image(&[1, 2, 3], &[4]);
    let a = checkpoint(&store, &first, 2).unwrap();
    let before = store.stats();
    let second = image(&[1, 2, 3, 5, 6], &[4, 7]);
    let mut failures = 0;
    for room in 0.. {
        disk.fill_after(Some(room));
        match checkpoint(&store, &second, 2) {
            Ok(b) => {
                disk.fill_after(None);
                check_all(&store, &[(a, first.clone()), (b, second.clone())]);
                break;
            }
            Err(e) => {
                assert!(matches!(e, StoreError::DiskFull { .. }), "{e}");
                let text = e.to_string();
                assert!(text.contains("disk full at /") && text.contains("free space"), "{text}");
                failures += 1;
            }
        }
        assert_eq!(store.stats(), before, "nothing of the failed one is left (room {room})");
        assert_eq!(RealDisk.list(&dir.join("incoming")).unwrap(), []);
        check_all(&store, &[(a, first.clone())]);
    }
    assert!(failures > 8, "{failures}");
    // A collection needs room to compact. Without it nothing is lost; with it, it works.
    let b = store.manifests().into_iter().find(|id| *id != a).unwrap();
    disk.fill_after(Some(0));
    let _ = store.gc(&[a], &ring(), 0, RealDisk.now_ms() + LATER);
    check_all(&store, &[(a, first.clone())]);
    disk.fill_after(None);
    store.gc(&[a], &ring(), 0, RealDisk.now_ms() + LATER).unwrap();
    check_all(&store, &[(a, first)]);
    assert!(!store.has_manifest(&b));
}
