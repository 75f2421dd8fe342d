//! Checkpoints come back as they went in, across restarts; bad uploads are refused.

use super::vmm::*;
use crate::{KeyRing, Store, StoreError};
use ks_proto::chunk::{CHUNK_BYTES, DomainKey, ObjectKind};
use ks_proto::ids::{ChunkId, PackId};
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;

#[test]
fn checkpoints_restore_byte_for_byte_and_share_chunks() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let first = image(&[1, 2, 0, 3, 3], &[4, 0, 1]);
    let a = checkpoint(&store, &first, 3).unwrap();
    let before = store.stats();
    let second = image(&[1, 2, 0, 3, 5], &[4, 0, 1]);
    let b = checkpoint(&store, &second, 100).unwrap();
    let after = store.stats();
    assert_eq!(after.packs, before.packs + 1);
    assert_eq!(after.objects, before.objects + 2, "one chunk and one segment are new");
    assert_eq!(checkpoint(&store, &second, 100).unwrap(), b, "the same manifest again is the same checkpoint");
    for round in 0..2 {
        assert_eq!(restore(&store, &a).unwrap(), first, "round {round}");
        assert_eq!(restore(&store, &b).unwrap(), second);
    }
    assert!(matches!(Store::open(dir.path()), Err(StoreError::Locked { .. })));
    drop(store);
    let store = Store::open(dir.path()).unwrap();
    assert_eq!(store.warnings(), &[] as &[String]);
    assert_eq!(store.stats(), after);
    assert_eq!(restore(&store, &a).unwrap(), first);
    assert_eq!(restore(&store, &b).unwrap(), second);
}

#[test]
fn uploads_that_are_not_what_they_say_are_refused_and_leave_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let up = store.begin_upload(scope());
    let f = up.new_pack().unwrap();
    f.write_all_at(b"not a pack at all, but some forty or ninety bytes of something else entirely, you see", 0).unwrap();
    let len = f.metadata().unwrap().len();
    let hash = |b: &[u8]| PackId(*blake3::hash(b).as_bytes());
    assert!(matches!(up.pack_done(PackId([1; 32]), len), Err(StoreError::Pack { .. })), "another hash");
    let mut bytes = vec![0; usize::try_from(len).unwrap()];
    f.read_exact_at(&mut bytes, 0).unwrap();
    assert!(matches!(up.pack_done(hash(&bytes), len), Err(StoreError::Pack { .. })), "right hash, not a pack");
    let other = DomainKey::new(2, [1; 32]);
    let (mut b, mut bytes) = ks_proto::pack::PackBuilder::start(2);
    bytes.extend(b.add(&other, ObjectKind::Data, other.name(ObjectKind::Data, &[1]), &[1], [0; 24]));
    let (tail, id, _) = b.finish();
    bytes.extend(tail);
    up.new_pack().unwrap().write_all_at(&bytes, 0).unwrap();
    let text = up.pack_done(id, bytes.len() as u64).unwrap_err().to_string();
    assert!(text.contains("domain 2"), "{text}");
    for _ in 0..crate::OPEN_PACKS_MAX {
        up.new_pack().unwrap();
    }
    assert!(matches!(up.new_pack(), Err(StoreError::Refused { .. })));
    drop(up);
    assert_eq!(store.stats().packs, 0);
    assert_eq!(std::fs::read_dir(dir.path().join("incoming")).unwrap().count(), 0);
}

#[test]
fn a_manifest_without_its_closure_is_not_committed() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let im = image(&[1, 2], &[3]);
    let (objects, m) = build(&im);
    for missing in 0..objects.len() {
        let up = store.begin_upload(scope());
        let file = up.new_pack().unwrap();
        let (mut b, mut bytes) = ks_proto::pack::PackBuilder::start(1);
        for (kind, id, plain) in objects.iter().enumerate().filter(|(i, _)| *i != missing).map(|(_, o)| o) {
            bytes.extend(b.add(&key(), *kind, *id, plain, [3; 24]));
        }
        let (tail, id, _) = b.finish();
        bytes.extend(tail);
        file.write_all_at(&bytes, 0).unwrap();
        up.pack_done(id, bytes.len() as u64).unwrap();
        let e = up.commit(&m.encode()).unwrap_err();
        let named = match &e {
            StoreError::Lost { chunk, .. } => *chunk, // a segment: nobody can say what it would need
            StoreError::Missing { id, .. } => *id,
            other => panic!("{other}"),
        };
        assert_eq!(named, objects[missing].1, "{e}");
        assert!(store.manifests().is_empty());
        drop(up);
        assert_eq!((store.stats().packs, store.stats().uploads), (0, 0));
    }
    let mut wrong = m.clone();
    wrong.state_bytes += 1;
    let up = store.begin_upload(scope());
    send(&up, &im, 9).unwrap();
    assert!(matches!(up.commit(&wrong.encode()), Err(StoreError::Refused { .. })));
    up.commit(&m.encode()).unwrap();
}

#[test]
fn nobody_commits_or_plans_what_their_keys_cannot_open() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let im = image(&[1, 2], &[3]);
    let id = checkpoint(&store, &im, 9).unwrap();
    restore(&store, &id).unwrap();
    let stranger = KeyRing::new([DomainKey::new(2, [5; 32])]);
    assert!(matches!(store.closure_plan(&id, &stranger), Err(StoreError::NoKey { domain: 1, .. })), "cached segments too");
    let up = store.begin_upload(crate::UploadScope { keys: stranger, write_domain: 2, bases: vec![] });
    let (objects, m) = build(&im);
    assert_eq!(up.known(&[objects[0].1, ChunkId::ZERO]), [false, true]);
    assert!(matches!(up.commit(&m.encode()), Err(StoreError::NoKey { domain: 1, .. })));
}

#[test]
fn an_image_is_ingested_sparsely_and_only_once() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(&dir.path().join("store")).unwrap();
    let path = dir.path().join("disk");
    let f = OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
    f.set_len(100 * 1024 * 1024 + 5).unwrap();
    let mut want = std::collections::BTreeMap::new();
    for (at, n) in [(0, 1), (1, 1), (3, 2), (700, 3), (1599, 4)] {
        f.write_all_at(&chunk(n), at * CHUNK_BYTES as u64).unwrap();
        want.insert(usize::try_from(at).unwrap(), chunk(n));
    }
    f.write_all_at(&[9; 5], 100 * 1024 * 1024).unwrap();
    let mut tail = vec![0; CHUNK_BYTES];
    tail[..5].fill(9);
    want.insert(1600, tail);
    let image_key = DomainKey::new(0, [7; 32]);
    let mut last = (0, 0);
    let got = store.ingest_disk(&f, &image_key, &mut |a, b| last = (a, b)).unwrap();
    assert_eq!(last, (100 * 1024 * 1024 + 5, 100 * 1024 * 1024 + 5));
    assert_eq!((got.chunks_new, got.chunks_known, got.chunks_zero), (5, 1, 1601 - 6));
    assert_eq!(got.manifest, store.manifest(&got.id).unwrap());
    for (i, segment) in got.manifest.disk.segments.iter().enumerate() {
        let refs = if segment.is_zero() { vec![ChunkId::ZERO; 512] } else { (*store.segment(segment, &ring()).unwrap()).clone() };
        for (j, id) in refs.iter().enumerate() {
            match want.get(&(i * 512 + j)) {
                Some(plain) => assert_eq!(&store.read_object(id, &ring()).unwrap(), plain),
                None => assert!(id.is_zero()),
            }
        }
    }
    let again = store.ingest_disk(&f, &image_key, &mut |_, _| {}).unwrap();
    assert_eq!((again.id, again.chunks_new, again.stored_bytes), (got.id, 0, 0));
    let empty = tempfile::tempfile().unwrap();
    assert!(matches!(store.ingest_disk(&empty, &image_key, &mut |_, _| {}), Err(StoreError::Refused { .. })));
}
