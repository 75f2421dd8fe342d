//! F10, NO-TORN and NO-ROT on the receiving side: whatever interrupts or goes on beside it, a checkpoint from a peer is whole,
//! durable and pinned, or absent; and what had arrived is of use.

use super::crash::{at_every_step, check_all, open};
use super::disk::ModelDisk;
use super::vmm::*;
use crate::host::{Disk, RealDisk};
use crate::{PinKey, Reception, Store, StoreError};
use ks_proto::ids::{CheckpointId, ChunkId, PackId, RunToken, SessionId};
use ks_proto::manifest::Manifest;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const LATER: u64 = 1_000_000;
/// What arrives at once.
const LOT: usize = 1000;

fn pin(upload: u64) -> PinKey {
    PinKey { session: SessionId([1; 16]), token: RunToken { generation: 1, epoch: 1, run: 1 }, upload }
}

/// The packs that a source names for missing objects, with their bytes.
fn located(source: &Store, missing: &[ChunkId]) -> BTreeMap<PackId, Vec<u8>> {
    let places = source.places(missing, 1);
    let packs = places.iter().map(|p| p.first().expect("the source has all").pack);
    packs.map(|id| (id, std::fs::read(source.pack_path(&id)).unwrap())).collect()
}

/// Receives one pack, in lots. Returns how much of it had arrived before.
fn bring(r: &Reception, id: PackId, bytes: &[u8], open: bool) -> Result<u64, StoreError> {
    loop {
        let mut part = r.stage(id, bytes.len() as u64)?;
        let resumed = part.resumed();
        while part.at() < part.bytes() {
            let at = usize::try_from(part.at()).unwrap();
            if let Err(e) = part.write(&bytes[at..bytes.len().min(at + LOT)]) {
                if matches!(e, StoreError::DiskFull { .. }) {
                    part.discard();
                }
                return Err(e);
            }
        }
        if r.adopt(part, open)? {
            return Ok(resumed);
        }
    }
}

/// Plays the fetcher. `between` is called before each pack and before the commit.
fn receive(source: &Store, to: &Arc<Store>, id: &CheckpointId, upload: u64, between: &dyn Fn()) -> Result<u64, StoreError> {
    let (bytes, m) = source.manifest_here(id).unwrap();
    let r = to.receive(ring());
    let mut resumed = 0;
    let done = (|| {
        loop {
            let missing = r.missing(&m)?.objects;
            if missing.is_empty() {
                break;
            }
            for (pack, content) in located(source, &missing) {
                between();
                resumed += bring(&r, pack, &content, true)?;
            }
        }
        between();
        r.commit(&bytes, &pin(upload))
    })();
    if matches!(done, Err(StoreError::DiskFull { .. })) {
        r.abort();
    }
    done.map(|got| assert_eq!(got, *id)).map(|()| resumed)
}

/// A node with one checkpoint of its own, and another with one that shares some of its chunks.
fn two(tmp: &Path) -> ((CheckpointId, Image), Arc<Store>, (CheckpointId, Image)) {
    let (first, second) = (image(&[1, 2, 0, 3], &[4]), image(&[1, 9, 8, 3], &[4, 5]));
    let here = Store::open(&tmp.join("here")).unwrap();
    let a = checkpoint(&here, &first, 2).unwrap();
    let source = Store::open(&tmp.join("source")).unwrap();
    let b = checkpoint(&source, &second, 3).unwrap();
    ((a, first), source, (b, second))
}

#[test]
fn a_crash_anywhere_while_receiving_leaves_the_checkpoint_whole_and_pinned_or_absent() {
    let tmp = tempfile::tempdir().unwrap();
    let (a, source, b) = two(tmp.path());
    let resumed = Cell::new(0);
    let stops = at_every_step(
        &tmp.path().join("here"),
        |s| receive(&source, s, &b.0, 1, &|| ()).map(drop),
        |s, done| {
            check_all(s, std::slice::from_ref(&a));
            assert!(!done || s.has_manifest(&b.0));
            // Whoever was told that it is held finds it pinned, and pins are of nothing else.
            assert_eq!(s.pins(), if s.has_manifest(&b.0) { vec![(b.0, pin(1))] } else { vec![] });
            resumed.set(resumed.get() + receive(&source, s, &b.0, 2, &|| ()).unwrap());
            check_all(s, &[a.clone(), b.clone()]);
            assert_eq!(RealDisk.list(&s.root().join("staging")).unwrap(), []);
            assert!(s.pins().contains(&(b.0, pin(2))));
        },
    );
    assert!(stops > 20, "only {stops} steps: the model does not see the writes");
    assert_eq!(resumed.get() % (16 * 1024), 0);
}

#[test]
fn what_arrived_of_a_pack_is_gone_on_with_and_not_trusted() {
    let tmp = tempfile::tempdir().unwrap();
    // So many small objects make a pack of several groups.
    let im = image(&(1..400).collect::<Vec<u32>>(), &[]);
    let source = Store::open(&tmp.path().join("source")).unwrap();
    let id = checkpoint(&source, &im, 999).unwrap();
    let (_, m) = source.manifest_here(&id).unwrap();
    for damaged in [false, true] {
        let dir = tmp.path().join(format!("here-{damaged}"));
        let here = Store::open(&dir).unwrap();
        let r = here.receive(ring());
        let (pack, content) = located(&source, &r.missing(&m).unwrap().objects).pop_first().unwrap();
        assert!(content.len() > 40_000, "{}", content.len());
        let mut part = r.stage(pack, content.len() as u64).unwrap();
        part.write(&content[..20_000]).unwrap();
        assert!(matches!(r.stage(pack, content.len() as u64), Err(StoreError::Refused { .. })), "one at a time");
        drop((part, r, here));
        if damaged {
            let path = dir.join("staging").join(format!("{pack}.part"));
            let mut left = std::fs::read(&path).unwrap();
            left[10_000] ^= 1;
            std::fs::write(&path, left).unwrap();
        }
        let here = Store::open(&dir).unwrap();
        let resumed = receive(&source, &here, &id, 1, &|| ()).unwrap();
        assert_eq!(resumed, if damaged { 0 } else { 16 * 1024 });
        check_all(&here, &[(id, im.clone())]);
    }
}

#[test]
fn a_full_disk_while_receiving_is_named_and_leaves_nothing() {
    let tmp = tempfile::tempdir().unwrap();
    let (_, source, b) = two(tmp.path());
    let dir = tmp.path().join("full");
    let disk = Arc::new(ModelDisk::new(&dir, None));
    let here = open(&dir, &disk).unwrap();
    let before = here.stats();
    let mut failures = 0;
    for room in 0.. {
        disk.fill_after(Some(room));
        match receive(&source, &here, &b.0, 1, &|| ()) {
            Ok(_) => break,
            Err(e) => {
                assert!(matches!(e, StoreError::DiskFull { .. }), "{e}");
                failures += 1;
            }
        }
        assert_eq!(here.stats(), before, "nothing of the failed one is left (room {room})");
        for folder in ["incoming", "staging", "pins"] {
            assert_eq!(RealDisk.list(&dir.join(folder)).unwrap(), [], "room {room}");
        }
    }
    disk.fill_after(None);
    assert!(failures > 10, "{failures}");
    check_all(&here, &[b]);
}

#[test]
fn f10_a_collection_at_any_moment_of_a_reception_takes_nothing_that_it_needs() {
    let tmp = tempfile::tempdir().unwrap();
    let (a, source, b) = two(tmp.path());
    let here = Store::open(&tmp.path().join("here")).unwrap();
    let collect = |roots: &[CheckpointId]| here.gc(roots, &ring(), 0, RealDisk.now_ms() + LATER).unwrap();
    // Chunks that only `a` holds are known to the reception when `a` goes.
    let times = Cell::new(0);
    receive(&source, &here, &b.0, 1, &|| {
        collect(&[]);
        times.set(times.get() + 1);
    })
    .unwrap();
    assert!(times.get() > 2);
    assert!(!here.has_manifest(&a.0));
    check_all(&here, std::slice::from_ref(&b));
    // Pinned until decided, and after that until a collection whose roots were listed later.
    collect(&[]);
    check_all(&here, std::slice::from_ref(&b));
    assert!(here.decided(&b.0, &pin(1)).unwrap());
    assert!(!here.decided(&b.0, &pin(1)).unwrap());
    collect(&[]);
    check_all(&here, std::slice::from_ref(&b));
    collect(&[b.0]);
    check_all(&here, &[b]);
    collect(&[]);
    assert_eq!((here.stats().manifests, here.stats().packs), (0, 0));
}

#[test]
fn f10_collections_beside_receptions_in_other_threads_lose_nothing() {
    let tmp = tempfile::tempdir().unwrap();
    let source = Store::open(&tmp.path().join("source")).unwrap();
    let images: Vec<Image> = (0..12u32).map(|n| image(&[1, n + 2, n + 3, 50], &[n / 2 + 100])).collect();
    let ids: Vec<CheckpointId> = images.iter().map(|im| checkpoint(&source, im, 2).unwrap()).collect();
    let here = Store::open(&tmp.path().join("here")).unwrap();
    let stop = AtomicBool::new(false);
    let rounds = std::thread::scope(|scope| {
        let gc = scope.spawn(|| {
            let mut rounds = 0;
            while !stop.load(Ordering::Relaxed) {
                here.gc(&[], &ring(), 0, RealDisk.now_ms() + LATER).unwrap();
                rounds += 1;
            }
            rounds
        });
        let receivers: Vec<_> = (0..3usize)
            .map(|t| {
                let (source, here, ids) = (&source, &here, &ids);
                scope.spawn(move || {
                    for id in ids.iter().skip(t * 4).take(4) {
                        // Two receptions may want one pack at the same time: the fetcher merges them, this one tries again.
                        while let Err(e) = receive(source, here, id, 1, &|| ()) {
                            assert!(matches!(e, StoreError::Refused { .. }), "{e}");
                            std::thread::yield_now();
                        }
                    }
                })
            })
            .collect();
        receivers.into_iter().for_each(|r| r.join().unwrap());
        stop.store(true, Ordering::Relaxed);
        gc.join().unwrap()
    });
    assert!(rounds > 1, "{rounds}");
    check_all(&here, &ids.into_iter().zip(images).collect::<Vec<_>>());
}

#[test]
fn a_pack_whose_table_lies_is_refused_and_parts_that_nobody_wants_go() {
    let tmp = tempfile::tempdir().unwrap();
    let here = Store::open(&tmp.path().join("here")).unwrap();
    let r = here.receive(ring());
    // A pack that hashes to its name, and promises a chunk that it does not hold.
    let (mut b, mut bytes) = ks_proto::pack::PackBuilder::start(1);
    bytes.extend(b.add(&key(), ks_proto::chunk::ObjectKind::Data, ChunkId([7; 32]), &chunk(1), [3; 24]));
    let (tail, id, _) = b.finish();
    bytes.extend(tail);
    let e = bring(&r, id, &bytes, true).unwrap_err();
    assert!(matches!(e, StoreError::Pack { .. }), "{e}");
    assert_eq!((here.stats().packs, RealDisk.list(&here.root().join("staging")).unwrap()), (0, vec![]));
    for bytes in [0, 83, 33 << 20] {
        assert!(matches!(r.stage(id, bytes), Err(StoreError::Pack { .. })), "{bytes}");
    }
    let mut part = r.stage(id, 5000).unwrap();
    part.write(&[1; 100]).unwrap();
    here.gc(&[], &ring(), 0, RealDisk.now_ms() + LATER).unwrap();
    assert_eq!(RealDisk.list(&here.root().join("staging")).unwrap().len(), 1, "in use");
    drop(part);
    here.gc(&[], &ring(), 0, RealDisk.now_ms() + LATER).unwrap();
    assert_eq!(RealDisk.list(&here.root().join("staging")).unwrap(), []);
    // A manifest whose closure is not here is not committed, and leaves no pin.
    let m: Manifest = build(&image(&[1], &[])).1;
    let e = r.commit(&m.encode(), &pin(1)).unwrap_err();
    assert!(matches!(e, StoreError::Missing { .. } | StoreError::Lost { .. }), "{e}");
    assert_eq!((here.pins(), here.stats().manifests), (vec![], 0));
}
