//! Collection: V9, F10, compaction, and a random walk against a small model of the store.

use super::vmm::*;
use crate::host::{Disk, RealDisk};
use crate::{Store, StoreError};
use ks_proto::chunk::ObjectKind;
use ks_proto::ids::CheckpointId;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

fn later() -> u64 {
    RealDisk.now_ms() + 1_000_000
}

#[test]
fn v9_a_forks_checkpoint_restores_after_its_source_is_collected() {
    let tmp = tempfile::tempdir().unwrap();
    let store = Store::open(tmp.path()).unwrap();
    let source = image(&[1, 2, 3, 4, 5, 6, 7, 8], &[10, 11]);
    let a = checkpoint(&store, &source, 4).unwrap();
    let fork = Image { session: 2, parent: Some(a), memory: vec![1, 2, 30, 4], ..image(&[], &[10, 12]) };
    let b = checkpoint(&store, &fork, 4).unwrap();
    let r = store.gc(&[b], &ring(), 0, later()).unwrap();
    assert_eq!(r.manifests_removed, 1);
    assert!(!store.has_manifest(&a));
    assert_eq!(restore(&store, &b).unwrap(), fork);
    drop(store);
    assert_eq!(restore(&Store::open(tmp.path()).unwrap(), &b).unwrap(), fork);
}

#[test]
fn the_young_stay_and_a_root_that_cannot_be_read_stops_everything() {
    let tmp = tempfile::tempdir().unwrap();
    let store = Store::open(tmp.path()).unwrap();
    let (one, two) = (image(&[1], &[2]), image(&[3], &[4]));
    let a = checkpoint(&store, &one, 9).unwrap();
    let b = checkpoint(&store, &two, 9).unwrap();
    let before = store.stats();
    let r = store.gc(&[], &ring(), 3_600_000, RealDisk.now_ms()).unwrap();
    assert_eq!((r.manifests_removed, r.packs_removed, r.bytes_freed), (0, 0, 0));
    let absent = CheckpointId([9; 32]);
    assert!(matches!(store.gc(&[absent], &ring(), 0, later()), Err(StoreError::NoManifest { id, .. }) if id == absent));
    let locked_out = ring().only(&[0]);
    assert!(matches!(store.gc(&[a], &locked_out, 0, later()), Err(StoreError::NoKey { domain: 1, .. })));
    assert_eq!(store.stats(), before);
    store.gc(&[b], &ring(), 0, later()).unwrap();
    assert_eq!(store.manifests(), [b]);
    assert_eq!(restore(&store, &b).unwrap(), two);
    store.gc(&[], &ring(), 0, later()).unwrap();
    assert_eq!(store.stats(), crate::StoreStats::default());
}

#[test]
fn f10_a_collection_during_an_upload_takes_nothing_that_it_was_told_is_known() {
    let tmp = tempfile::tempdir().unwrap();
    let store = Store::open(tmp.path()).unwrap();
    let old = image(&[1, 2, 3], &[4]);
    let a = checkpoint(&store, &old, 2).unwrap();
    // Known, then the only manifest that refers to it is dropped and collected, then committed.
    let up = store.begin_upload(scope());
    let next = image(&[1, 2, 3, 5], &[4]);
    let bytes = send(&up, &next, 2).unwrap();
    store.gc(&[], &ring(), 0, later()).unwrap();
    assert!(!store.has_manifest(&a));
    let b = up.commit(&bytes).unwrap();
    drop(up);
    assert_eq!(restore(&store, &b).unwrap(), next);
    // A base is relied on without asking.
    let mut on_base = scope();
    on_base.bases = vec![b];
    let up = store.begin_upload(on_base);
    store.gc(&[], &ring(), 0, later()).unwrap();
    up.abort();
    store.gc(&[], &ring(), 0, later()).unwrap();
    assert_eq!(up.commit(&bytes).unwrap(), b, "the whole closure is still here");
    store.gc(&[], &ring(), 0, later()).unwrap();
    assert_eq!(up.commit(&bytes).unwrap(), b, "and after a commit too");
    drop(up);
    assert_eq!(restore(&store, &b).unwrap(), next);
    store.gc(&[], &ring(), 0, later()).unwrap();
    assert_eq!(store.stats().objects, 0, "nothing is pinned for ever");
}

#[test]
fn an_abort_leaves_what_another_upload_relies_on() {
    let tmp = tempfile::tempdir().unwrap();
    let store = Store::open(tmp.path()).unwrap();
    let (one, two) = (image(&[1, 2], &[3]), image(&[1, 2, 7], &[3]));
    let first = store.begin_upload(scope());
    send(&first, &one, 1).unwrap();
    let second = store.begin_upload(scope());
    let bytes = send(&second, &two, 9).unwrap();
    first.abort();
    drop(first);
    let id = second.commit(&bytes).unwrap();
    assert_eq!(restore(&store, &id).unwrap(), two);
}

#[test]
fn open_files_outlive_compaction_and_a_damaged_pack_is_not_laundered() {
    let tmp = tempfile::tempdir().unwrap();
    let store = Store::open(tmp.path()).unwrap();
    let many: Vec<u32> = (1..30).collect();
    checkpoint(&store, &image(&many, &[]), 99).unwrap();
    let kept = image(&[1, 2], &[]);
    let a = checkpoint(&store, &kept, 99).unwrap();
    let m = store.manifest(&a).unwrap();
    let (plan, files) = store.closure_plan(&a, &ring()).unwrap();
    let r = store.gc(&[a], &ring(), 0, later()).unwrap();
    assert_eq!((r.packs_compacted, r.manifests_removed), (1, 1), "{r:?}");
    assert_eq!(restore_from(&m, &plan, &files), kept, "a VMM that pages from the old packs goes on");
    assert_eq!(restore(&store, &a).unwrap(), kept);
    // Damage in what is to be copied: the pack stays as it is, and the report says so.
    checkpoint(&store, &image(&many[5..], &[]), 99).unwrap();
    let b = checkpoint(&store, &image(&[10, 11], &[]), 99).unwrap();
    let victim = store.locate(&key().name(ObjectKind::Data, &chunk(10)), &ring(), None).unwrap();
    let path = store.pack_path(&victim.pack);
    let f = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&f, &[0xaa; 8], u64::from(victim.entry.offset) + 30).unwrap();
    let r = store.gc(&[a, b], &ring(), 0, later()).unwrap();
    assert_eq!((r.packs_compacted, r.warnings.len()), (0, 1), "{r:?}");
    assert!(r.warnings[0].contains(path.to_str().unwrap()), "{r:?}");
    assert!(path.exists());
    assert!(matches!(restore(&store, &b), Err(StoreError::Lost { .. })));
    assert_eq!(restore(&store, &a).unwrap(), kept);
}

#[test]
fn f10_what_becomes_needed_while_a_pack_is_compacted_stays() {
    let tmp = tempfile::tempdir().unwrap();
    let dir = tmp.path().join("s");
    let disk = Arc::new(super::disk::ModelDisk::new(&dir, None));
    let store = Store::open_on(&dir, disk.clone()).unwrap();
    let many: Vec<u32> = (1..30).collect();
    checkpoint(&store, &image(&many, &[]), 99).unwrap();
    let kept = image(&[1, 2], &[]);
    let a = checkpoint(&store, &kept, 99).unwrap();
    // Chunks 20 and 21 are dead when the collection marks; an upload is told that they are known while it copies.
    let up = Arc::new(store.begin_upload(scope()));
    let late = image(&[20, 21], &[]);
    let sent = Arc::new(std::sync::Mutex::new(Vec::new()));
    let (up2, late2, sent2) = (up.clone(), late.clone(), sent.clone());
    disk.at_next_create(move || *sent2.lock().unwrap() = send(&up2, &late2, 99).unwrap());
    store.gc(&[a], &ring(), 0, later()).unwrap();
    let b = up.commit(&sent.lock().unwrap()).unwrap();
    assert_eq!(restore(&store, &a).unwrap(), kept);
    assert_eq!(restore(&store, &b).unwrap(), late);
}

#[test]
fn many_small_packs_are_merged_once() {
    let tmp = tempfile::tempdir().unwrap();
    let store = Store::open(tmp.path()).unwrap();
    let all: Vec<_> = (1..=40u32).map(|i| image(&[i, i + 1], &[500])).collect();
    let ids: Vec<_> = all.iter().map(|im| checkpoint(&store, im, 99).unwrap()).collect();
    assert_eq!(store.stats().packs, 40);
    let r = store.gc(&ids, &ring(), 0, later()).unwrap();
    assert_eq!((r.packs_compacted, store.stats().packs), (40, 1), "{r:?}");
    let r = store.gc(&ids, &ring(), 0, later()).unwrap();
    assert_eq!((r.packs_compacted, r.packs_removed), (0, 0), "{r:?}");
    for (id, im) in ids.iter().zip(&all) {
        assert_eq!(&restore(&store, id).unwrap(), im);
    }
}

#[test]
fn collections_beside_uploads_in_other_threads_lose_nothing() {
    let tmp = tempfile::tempdir().unwrap();
    let store = Store::open(tmp.path()).unwrap();
    let roots = std::sync::Mutex::new(BTreeMap::<u8, (CheckpointId, Image)>::new());
    let done = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|threads| {
        for t in 1..=2u8 {
            let (store, roots, done) = (&store, &roots, &done);
            threads.spawn(move || {
                for i in 0..25u32 {
                    let im = Image { session: t, ..image(&[i % 5 + 1, i % 3 + 10, u32::from(t) * 100 + i], &[i % 7 + 20]) };
                    let up = store.begin_upload(scope());
                    let bytes = send(&up, &im, 2).unwrap();
                    // The roots change together with the commit, as the node's record does.
                    let mut r = roots.lock().unwrap();
                    let id = up.commit(&bytes).unwrap();
                    r.insert(t, (id, im));
                }
                done.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            });
        }
        let (store, roots, done) = (&store, &roots, &done);
        threads.spawn(move || {
            while done.load(std::sync::atomic::Ordering::SeqCst) < 2 {
                let ids: Vec<_> = roots.lock().unwrap().values().map(|r| r.0).collect();
                match store.gc(&ids, &ring(), 0, later()) {
                    Ok(_) => {}
                    // The roots were read before a commit that replaced one, and the collection before this one took it.
                    Err(StoreError::NoManifest { .. }) => {}
                    Err(e) => panic!("{e}"),
                }
                for (id, im) in roots.lock().unwrap().values() {
                    assert_eq!(&restore(store, id).unwrap(), im);
                }
            }
        });
    });
    drop(store);
    let store = Store::open(tmp.path()).unwrap();
    for (id, im) in roots.lock().unwrap().values() {
        assert_eq!(&restore(&store, id).unwrap(), im);
    }
}

#[derive(Debug, Clone)]
enum Act {
    Commit { memory: Vec<u32>, per_pack: usize },
    Abandon { memory: Vec<u32> },
    Drop { which: usize },
    Collect,
    Reopen,
    Rot { which: usize },
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let memory = || proptest::collection::vec(0u32..12, 1..8);
    proptest::collection::vec(
        prop_oneof![
            4 => (memory(), 1usize..5).prop_map(|(memory, per_pack)| Act::Commit { memory, per_pack }),
            1 => memory().prop_map(|memory| Act::Abandon { memory }),
            2 => any::<usize>().prop_map(|which| Act::Drop { which }),
            2 => Just(Act::Collect),
            1 => Just(Act::Reopen),
            1 => any::<usize>().prop_map(|which| Act::Rot { which }),
        ],
        1..25,
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]
    /// The model: checkpoint id -> image. Whatever happens, each restores equal, or is refused when a byte of its own
    /// was damaged; and after a collection nothing but what they need is stored.
    #[test]
    fn the_store_behaves_like_a_map_of_checkpoints(acts in acts()) {
        let tmp = tempfile::tempdir().unwrap();
        let mut store = Store::open(tmp.path()).unwrap();
        let mut model: BTreeMap<CheckpointId, Image> = BTreeMap::new();
        let mut rotten = false;
        for act in acts {
            match act {
                Act::Commit { memory, per_pack } => {
                    let im = image(&memory, &[memory[0]]);
                    match checkpoint(&store, &im, per_pack) {
                        Ok(id) => drop(model.insert(id, im)),
                        Err(StoreError::Missing { .. } | StoreError::Lost { .. }) if rotten => {}
                        Err(e) => panic!("{e}"),
                    }
                }
                Act::Abandon { memory } => {
                    let before = store.stats();
                    let up = store.begin_upload(scope());
                    send(&up, &image(&memory, &[]), 2).unwrap();
                    drop(up);
                    prop_assert_eq!(store.stats(), before);
                }
                Act::Drop { which } => {
                    if let Some(id) = model.keys().nth(which % model.len().max(1)).copied() {
                        model.remove(&id);
                    }
                }
                Act::Collect => {
                    let roots: Vec<_> = model.keys().copied().collect();
                    match store.gc(&roots, &ring(), 0, later()) {
                        Ok(_) => {
                            prop_assert_eq!(store.manifests(), roots);
                            if !rotten {
                                let needed: BTreeSet<_> = model.values().flat_map(|im| build(im).0).map(|o| o.1).collect();
                                let slack = store.stats().objects - needed.len() as u64;
                                prop_assert!(slack <= needed.len() as u64 * 3 + 12, "{slack} dead beside {}", needed.len());
                            }
                        }
                        Err(StoreError::Lost { .. }) if rotten => {}
                        Err(e) => panic!("{e}"),
                    }
                }
                Act::Reopen => {
                    drop(store);
                    store = Store::open(tmp.path()).unwrap();
                    prop_assert!(store.warnings().is_empty());
                }
                Act::Rot { which } => {
                    let packs: Vec<_> = store.state().index.packs().map(|(_, p)| p.clone()).collect();
                    if let Some(p) = packs.get(which % packs.len().max(1)) {
                        let e = p.rows[which % p.rows.len()];
                        let f = std::fs::OpenOptions::new().write(true).open(store.pack_path(&p.id)).unwrap();
                        std::os::unix::fs::FileExt::write_all_at(&f, &[0x5c; 3], u64::from(e.offset) + 25).unwrap();
                        rotten = true;
                    }
                }
            }
            check_model(&store, &model, rotten);
        }
    }
}

fn check_model(store: &Arc<Store>, model: &BTreeMap<CheckpointId, Image>, rotten: bool) {
    for (id, im) in model {
        let faults = match store.verify(id, &ring()) {
            Ok(r) => r.faults.len(),
            Err(StoreError::Lost { .. }) => 1,
            Err(e) => panic!("{e}"),
        };
        assert!(rotten || faults == 0);
        match restore(store, id) {
            Ok(got) => assert_eq!(&got, im),
            Err(StoreError::Lost { .. }) => assert!(faults > 0),
            Err(e) => panic!("{e}"),
        }
    }
}
