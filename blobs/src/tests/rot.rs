//! NO-ROT and V11: whatever happens to the bytes on disk, a checkpoint comes back right, from a peer, or not at all.

use super::vmm::*;
use crate::{FetchedObject, PeerSource, Store, StoreError};
use ks_proto::chunk::ObjectKind;
use ks_proto::ids::{CheckpointId, ChunkId, PackId};
use ks_proto::manifest::Manifest;
use ks_proto::pack::{ROW_BYTES, TRAILER_BYTES};
use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A peer that holds everything of one image.
struct Peer {
    objects: BTreeMap<ChunkId, FetchedObject>,
    manifest: Vec<u8>,
}
impl Peer {
    fn of(im: &Image) -> Self {
        let (objects, m) = build(im);
        let seal = |(kind, id, plain): (ObjectKind, ChunkId, Vec<u8>)| {
            let (codec, stored) = key().seal(kind, &id, &plain, [4; 24]);
            (id, FetchedObject { domain: 1, kind, codec, plain_len: u32::try_from(plain.len()).unwrap(), stored })
        };
        Self { objects: objects.into_iter().map(seal).collect(), manifest: m.encode() }
    }
}
impl PeerSource for Peer {
    fn fetch_object(&self, id: &ChunkId) -> Option<FetchedObject> {
        self.objects.get(id).cloned()
    }
    fn fetch_manifest(&self, id: &CheckpointId) -> Option<Vec<u8>> {
        (Manifest::id_of(&self.manifest) == *id).then(|| self.manifest.clone())
    }
}

fn only_pack(dir: &Path) -> PathBuf {
    let mut found = Vec::new();
    for d in std::fs::read_dir(dir.join("packs")).unwrap() {
        found.extend(std::fs::read_dir(d.unwrap().path()).unwrap().map(|f| f.unwrap().path()));
    }
    assert_eq!(found.len(), 1);
    found.remove(0)
}

/// The four outcomes of damage: right bytes, or an error that names what and where. Then a peer mends it.
fn check_damage(dir: &Path, id: &CheckpointId, im: &Image, what: &str) {
    let store = Store::open(dir).unwrap_or_else(|e| panic!("{what}: {e}"));
    let alone = restore_checked(&store, id);
    match &alone {
        Ok(got) => assert_eq!(got, im, "{what}"),
        Err(e) => {
            let text = e.to_string();
            assert!(!text.is_empty(), "{what}");
            match e {
                StoreError::Lost { holder, .. } => assert_eq!(holder, "this node", "{what}"),
                StoreError::Decode { path, .. } | StoreError::NoManifest { path, .. } => assert!(path.starts_with(dir), "{what}"),
                other => panic!("{what}: {other}"),
            }
        }
    }
    store.set_peers(Arc::new(Peer::of(im)));
    assert_eq!(&restore_checked(&store, id).unwrap_or_else(|e| panic!("{what}, with a peer: {e}")), im);
    assert_eq!(store.verify(id, &ring()).unwrap().faults, [], "{what}");
    drop(store);
    let store = Store::open(dir).unwrap();
    assert_eq!(&restore_checked(&store, id).unwrap(), im, "{what}: repaired for good");
}

/// A restore as ks-vmm does it: what the plan's packs cannot give is located again.
fn restore_checked(store: &Arc<Store>, id: &CheckpointId) -> Result<Image, StoreError> {
    let m = store.manifest(id)?;
    let (plan, files) = store.closure_plan(id, &ring())?;
    for row in plan.rows() {
        let mut stored = vec![0; row.entry.stored_len as usize];
        let read = files[row.pack as usize].read_exact_at(&mut stored, u64::from(row.entry.offset));
        if read.is_err() || row.entry.open(ring().get(row.domain).unwrap(), &stored).is_err() {
            store.locate(&row.entry.id, &ring(), None)?;
        }
    }
    let (plan, files) = store.closure_plan(id, &ring())?;
    Ok(restore_from(&m, &plan, &files))
}

fn damaged(name: &str, damage: impl Fn(&Path, &Path)) {
    let tmp = tempfile::tempdir().unwrap();
    let dir = tmp.path().join("s");
    let store = Store::open(&dir).unwrap();
    let im = image(&[1, 2, 0], &[3]);
    let id = checkpoint(&store, &im, 99).unwrap();
    let manifest = store.manifest_path(&id);
    drop(store);
    damage(&only_pack(&dir), &manifest);
    check_damage(&dir, &id, &im, name);
}

fn flip(path: &Path, at: u64) {
    let f = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut b = [0];
    f.read_exact_at(&mut b, at).unwrap();
    f.write_all_at(&[b[0] ^ 0x10], at).unwrap();
}
fn cut(path: &Path, to: u64) {
    std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(to).unwrap();
}
fn len(path: &Path) -> u64 {
    path.metadata().unwrap().len()
}

#[test]
fn a_flipped_bit_anywhere_in_a_pack_is_never_handed_out() {
    let total = std::cell::Cell::new(0);
    damaged("nothing", |pack, _| total.set(len(pack)));
    let rows = 6;
    let table = total.get() - (TRAILER_BYTES + rows * ROW_BYTES) as u64;
    let interesting = (0..32)
        .step_by(3)
        .chain((32..table).step_by(usize::try_from(table / 23).unwrap()))
        .chain((table..total.get()).step_by(7));
    for at in interesting {
        damaged(&format!("flip at {at} of {}", total.get()), |pack, _| flip(pack, at));
    }
}

#[test]
fn truncated_lengthened_missing_and_foreign_files_are_survived() {
    for keep in [0, 1, 31, 32, 84, 500] {
        damaged(&format!("pack cut to {keep}"), |pack, _| cut(pack, keep));
        damaged(&format!("pack cut by {keep}"), |pack, _| cut(pack, len(pack).saturating_sub(keep.max(1))));
        damaged(&format!("manifest cut to {keep}"), |_, m| cut(m, keep.min(len(m) - 1)));
    }
    damaged("pack longer", |pack, _| cut(pack, len(pack) + 4096));
    damaged("pack huge", |pack, _| cut(pack, 1 << 40));
    damaged("manifest huge", |_, m| cut(m, 1 << 40));
    damaged("pack gone", |pack, _| std::fs::remove_file(pack).unwrap());
    damaged("manifest gone", |_, m| std::fs::remove_file(m).unwrap());
    damaged("pack of another name", |pack, _| std::fs::rename(pack, pack.with_file_name("x.pack")).unwrap());
    damaged("pack in another folder", |pack, _| {
        let wrong = pack.parent().unwrap().parent().unwrap().join("zz");
        std::fs::create_dir(&wrong).unwrap();
        std::fs::rename(pack, wrong.join(pack.file_name().unwrap())).unwrap();
    });
    for at in 0..40 {
        damaged(&format!("manifest byte {at}"), |_, m| flip(m, at * 5));
    }
}

#[test]
fn a_pack_of_a_newer_version_is_left_alone_and_named() {
    let tmp = tempfile::tempdir().unwrap();
    let store = Store::open(tmp.path()).unwrap();
    let id = checkpoint(&store, &image(&[1], &[2]), 99).unwrap();
    drop(store);
    let pack = only_pack(tmp.path());
    let f = std::fs::OpenOptions::new().write(true).open(&pack).unwrap();
    f.write_all_at(&2u32.to_le_bytes(), 8).unwrap();
    let store = Store::open(tmp.path()).unwrap();
    assert!(pack.exists(), "not quarantined: a newer program can read it");
    assert!(
        store.warnings()[0].contains("version 2") && store.warnings()[0].contains("newer KeepState"),
        "{:?}",
        store.warnings()
    );
    assert!(matches!(restore(&store, &id), Err(StoreError::Lost { .. })));
    store.gc(&[], &ring(), 0, u64::MAX).unwrap();
    assert!(pack.exists(), "not collected either");
    drop(store);
    std::fs::write(tmp.path().join("format"), "keepstate store 2\n").unwrap();
    assert!(matches!(Store::open(tmp.path()), Err(StoreError::Format { .. })));
}

#[test]
fn a_bad_index_is_quarantined_with_a_warning() {
    let tmp = tempfile::tempdir().unwrap();
    let store = Store::open(tmp.path()).unwrap();
    checkpoint(&store, &image(&[1], &[2]), 99).unwrap();
    drop(store);
    let pack = only_pack(tmp.path());
    cut(&pack, len(&pack) - 1);
    let store = Store::open(tmp.path()).unwrap();
    assert_eq!(store.warnings().len(), 1);
    assert!(store.warnings()[0].contains("quarantine"), "{:?}", store.warnings());
    assert!(!pack.exists() && tmp.path().join("quarantine").join(pack.file_name().unwrap()).exists());
    assert_eq!(store.stats().packs, 0);
}

#[test]
fn scrub_and_verify_name_the_chunk_its_file_and_its_holder() {
    let tmp = tempfile::tempdir().unwrap();
    let store = Store::open(tmp.path()).unwrap();
    let im = image(&[1, 2, 3], &[4]);
    let id = checkpoint(&store, &im, 99).unwrap();
    assert_eq!(store.verify(&id, &ring()).unwrap().objects, build(&im).0.len() as u64);
    let pack = only_pack(tmp.path());
    let name: PackId = pack.file_stem().unwrap().to_str().unwrap().parse().unwrap();
    let clean = store.scrub(None, &ring()).unwrap();
    assert_eq!((clean.pack, clean.bytes, clean.faults.len()), (Some(name), len(&pack), 0));
    assert_eq!(store.scrub(Some(name), &ring()).unwrap().pack, None, "the round is over");
    let victim = key().name(ObjectKind::Data, &chunk(2));
    let at = store.locate(&victim, &ring(), None).unwrap().entry;
    flip(&pack, u64::from(at.offset + at.stored_len / 2));
    let step = store.scrub(None, &ring()).unwrap();
    assert_eq!(step.faults.len(), 1, "{step:?}");
    let f = &step.faults[0];
    assert_eq!((f.chunk, f.pack, f.file.as_deref(), f.holder.as_str()), (victim, Some(name), Some(pack.as_path()), "this node"));
    let report = store.verify(&id, &ring()).unwrap();
    assert_eq!((report.faults.len(), report.faults[0].chunk, report.faults[0].pack), (1, victim, Some(name)));
    let e = store.closure_plan(&id, &ring()).unwrap_err();
    assert!(e.to_string().contains(&victim.to_hex()) && e.to_string().contains(pack.to_str().unwrap()), "{e}");
    let up = store.begin_upload(scope());
    assert_eq!(up.known(&[victim]), [false], "what is damaged is stored again");
    let neighbour = key().name(ObjectKind::Data, &chunk(1));
    assert_eq!(up.known(&[neighbour]), [false], "and so is what lies beside it: rot seldom comes alone");
    assert!(store.locate(&neighbour, &ring(), None).is_ok(), "which is still read, being sound");
    drop(up);
    // The VM still has it in memory: its next checkpoint brings it, and the old one is whole again.
    checkpoint(&store, &image(&[1, 2, 3, 9], &[4]), 99).unwrap();
    assert_eq!(restore(&store, &id).unwrap(), im);
    assert_eq!(store.verify(&id, &ring()).unwrap().faults, []);
}

/// Pack files in the store's folder.
fn pack_files(dir: &Path) -> usize {
    std::fs::read_dir(dir.join("packs")).unwrap().map(|d| std::fs::read_dir(d.unwrap().path()).unwrap().count()).sum()
}

#[test]
fn many_damaged_objects_are_mended_into_few_packs() {
    let values: Vec<u32> = (1..300).collect();
    // Found by a reader one object at a time, as a paging guest does; by a plan; and by a full check.
    for how in ["locate", "plan", "verify"] {
        let tmp = tempfile::tempdir().unwrap();
        let dir = tmp.path().join("s");
        let store = Store::open(&dir).unwrap();
        let im = image(&values, &[4]);
        let id = checkpoint(&store, &im, 999).unwrap();
        store.set_peers(Arc::new(Peer::of(&im)));
        let pack = only_pack(&dir);
        let rows: Vec<_> = build(&im).0.iter().map(|(_, id, _)| store.locate(id, &ring(), None).unwrap().entry).collect();
        if how == "plan" {
            std::fs::remove_file(&pack).unwrap();
        } else {
            rows.iter().for_each(|e| flip(&pack, u64::from(e.offset + e.stored_len / 2)));
        }
        match how {
            "locate" => build(&im).0.iter().for_each(|(_, id, _)| drop(store.locate(id, &ring(), None).unwrap())),
            "plan" => drop(store.closure_plan(&id, &ring()).unwrap()),
            _ => assert_eq!(store.verify(&id, &ring()).unwrap().faults, []),
        }
        let packs = pack_files(&dir);
        assert!(packs <= 4, "{how}: {} objects came back in {packs} packs", rows.len());
        assert_eq!(restore(&store, &id).unwrap(), im, "{how}");
    }
}

#[test]
fn a_false_accusation_of_a_pack_changes_nothing() {
    let tmp = tempfile::tempdir().unwrap();
    let store = Store::open(tmp.path()).unwrap();
    let id = checkpoint(&store, &image(&[1], &[2]), 99).unwrap();
    let pack: PackId = only_pack(tmp.path()).file_stem().unwrap().to_str().unwrap().parse().unwrap();
    let object = key().name(ObjectKind::Data, &chunk(1));
    assert_eq!(store.locate(&object, &ring(), Some(pack)).unwrap().pack, pack);
    assert_eq!(store.verify(&id, &ring()).unwrap().faults, []);
}

#[test]
fn a_lying_peer_is_refused() {
    let tmp = tempfile::tempdir().unwrap();
    let store = Store::open(tmp.path()).unwrap();
    let im = image(&[1], &[2]);
    let id = checkpoint(&store, &im, 99).unwrap();
    let (a, b) = (key().name(ObjectKind::Data, &chunk(1)), key().name(ObjectKind::Data, &chunk(2)));
    let mut peer = Peer::of(&im);
    let swapped = peer.objects[&b].clone();
    peer.objects.insert(a, swapped);
    store.set_peers(Arc::new(peer));
    std::fs::remove_file(only_pack(tmp.path())).unwrap();
    let e = store.closure_plan(&id, &ring()).map(drop).unwrap_err();
    assert!(matches!(&e, StoreError::Lost { chunk, holder, .. } if *chunk == a && holder == "a peer"), "{e}");
}

#[test]
fn a_manifest_that_claims_too_much_is_refused_before_any_allocation() {
    let tmp = tempfile::tempdir().unwrap();
    let store = Store::open(tmp.path()).unwrap();
    let mut m = build(&image(&[1], &[2])).1;
    m.memory.bytes = 1 << 60;
    let up = store.begin_upload(scope());
    assert!(matches!(up.commit(&m.encode()), Err(StoreError::Manifest { .. })));
    for n in 0..200 {
        assert!(up.commit(&vec![0xff; n]).is_err());
    }
}
