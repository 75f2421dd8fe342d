//! A small fleet on loopback: each node a store in its own folder and a bulk endpoint; and checkpoints to send about.

use crate::{Bulk, BulkConfig, BulkEvent, BulkLimits, Fetcher, Holder, ImageFiles, Keypair, NoImages, PeerId, PinKey};
use ks_blobs::host::{Disk, RealDisk};
use ks_blobs::{KeyRing, Store, UploadScope};
use ks_proto::chunk::{CHUNK_BYTES, DomainKey, ObjectKind};
use ks_proto::ids::{CheckpointId, ChunkId, RunToken, SessionId};
use ks_proto::manifest::{EngineKind, Machine, Manifest, Map, SEGMENT_CHUNKS, encode_segment};
use ks_proto::pack::PackBuilder;
use rand::rngs::SmallRng;
use rand::{RngCore, SeedableRng};
use std::collections::BTreeSet;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

pub fn ring() -> KeyRing {
    KeyRing::new([DomainKey::new(0, [7; 32]), DomainKey::new(1, [9; 32])])
}
fn key() -> DomainKey {
    DomainKey::new(1, [9; 32])
}
pub fn pin(n: u64) -> PinKey {
    PinKey { session: SessionId([1; 16]), token: RunToken { generation: 1, epoch: 2, run: 3 }, upload: n }
}
pub fn quiet() -> crate::host::fetch::OnProgress {
    Arc::new(|_| ())
}

/// Who is a member, shared by all nodes of a test.
pub type Members = Arc<Mutex<BTreeSet<PeerId>>>;

pub struct Node {
    pub dir: PathBuf,
    pub store: Arc<Store>,
    pub bulk: Bulk,
    pub fetcher: Fetcher,
    pub events: Arc<Mutex<Vec<BulkEvent>>>,
}

/// How a node of a test differs from an ordinary one.
pub struct Setup {
    pub disk: Arc<dyn Disk>,
    pub images: Arc<dyn ImageFiles>,
    pub limits: BulkLimits,
    pub keypair: Keypair,
}
impl Default for Setup {
    fn default() -> Self {
        let keypair = Keypair::generate_ed25519();
        Self { disk: Arc::new(RealDisk), images: Arc::new(NoImages), limits: BulkLimits::default(), keypair }
    }
}

impl Node {
    pub fn start(dir: &Path, members: &Members) -> Self {
        Self::with(dir, members, Setup::default())
    }
    pub fn with(dir: &Path, members: &Members, setup: Setup) -> Self {
        let store = Store::open_on(dir, setup.disk).unwrap();
        members.lock().unwrap().insert(setup.keypair.public().to_peer_id());
        Self::serving(dir, store, members, setup.images, setup.limits, setup.keypair)
    }
    pub fn serving(
        dir: &Path,
        store: Arc<Store>,
        members: &Members,
        images: Arc<dyn ImageFiles>,
        limits: BulkLimits,
        keypair: Keypair,
    ) -> Self {
        let events: Arc<Mutex<Vec<BulkEvent>>> = Arc::default();
        let (told, members) = (events.clone(), members.clone());
        let bulk = Bulk::start(BulkConfig {
            keypair,
            listen: "127.0.0.1:0".parse().unwrap(),
            allow: Arc::new(move |p| members.lock().unwrap().contains(p)),
            store: store.clone(),
            keys: Arc::new(ring),
            images,
            limits,
            events: Arc::new(move |e| told.lock().unwrap().push(e)),
        })
        .unwrap();
        let fetcher = Fetcher::new(bulk.clone());
        Self { dir: dir.to_owned(), store, bulk, fetcher, events }
    }
    pub fn holder(&self) -> Holder {
        Holder { peer: self.bulk.peer_id(), addrs: vec![self.bulk.local_addr().unwrap()] }
    }
}

/// What a checkpoint holds: seeds of its chunks, 0 for zeros.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    pub memory: Vec<u64>,
    pub disk: Vec<u64>,
}

/// Incompressible, different for each seed.
pub fn chunk(seed: u64) -> Vec<u8> {
    let mut v = vec![0u8; CHUNK_BYTES];
    if seed != 0 {
        SmallRng::seed_from_u64(seed).fill_bytes(&mut v);
    }
    v
}

type Object = (ObjectKind, ChunkId, Vec<u8>);

fn map(seeds: &[u64], objects: &mut Vec<Object>) -> Map {
    let mut segments = Vec::new();
    for part in seeds.chunks(SEGMENT_CHUNKS) {
        let mut refs: Vec<ChunkId> = Vec::new();
        for seed in part {
            let plain = chunk(*seed);
            let id = if *seed == 0 { ChunkId::ZERO } else { key().name(ObjectKind::Data, &plain) };
            if !id.is_zero() {
                objects.push((ObjectKind::Data, id, plain));
            }
            refs.push(id);
        }
        let plain = encode_segment(&refs);
        let id = key().name(ObjectKind::Segment, &plain);
        objects.push((ObjectKind::Segment, id, plain));
        segments.push(id);
    }
    Map { bytes: (seeds.len() * CHUNK_BYTES) as u64, segments }
}

/// All objects of a checkpoint and its manifest.
pub fn build(im: &Image) -> (Vec<Object>, Manifest) {
    let mut objects = Vec::new();
    let (memory, disk) = (map(&im.memory, &mut objects), map(&im.disk, &mut objects));
    let state = key().name(ObjectKind::State, b"state");
    objects.push((ObjectKind::State, state, b"state".to_vec()));
    let mut seen = BTreeSet::new();
    objects.retain(|o| seen.insert(o.1));
    let text = String::new;
    let machine = Machine {
        engine: EngineKind::Qemu,
        profile: "tcg".into(),
        engine_version: text(),
        cpu_model: text(),
        features: vec![],
        tsc_khz: 1,
        vcpus: 1,
        cmdline: text(),
        kernel_hash: text(),
        initrd_hash: text(),
    };
    let m = Manifest {
        session: SessionId([1; 16]),
        parent: None,
        created_unix_ms: 5,
        journal_position: 0,
        machine: Some(machine),
        state: vec![state],
        state_bytes: 5,
        memory,
        disk,
    };
    (objects, m)
}

/// Stores a checkpoint as a VMM would, in packs of at most `per_pack` objects.
pub fn checkpoint(store: &Arc<Store>, im: &Image, per_pack: usize) -> CheckpointId {
    let up = store.begin_upload(UploadScope { keys: ring(), write_domain: 1, bases: vec![] });
    let (objects, m) = build(im);
    let known = up.known(&objects.iter().map(|o| o.1).collect::<Vec<_>>());
    let new: Vec<_> = objects.into_iter().zip(known).filter(|(_, k)| !k).map(|(o, _)| o).collect();
    for part in new.chunks(per_pack) {
        let file = up.new_pack().unwrap();
        let (mut b, mut bytes) = PackBuilder::start(1);
        for (kind, id, plain) in part {
            bytes.extend(b.add(&key(), *kind, *id, plain, ks_blobs::host::random().unwrap()));
        }
        let (tail, id, _) = b.finish();
        bytes.extend(tail);
        file.write_all_at(&bytes, 0).unwrap();
        up.pack_done(id, bytes.len() as u64).unwrap();
    }
    up.commit(&m.encode()).unwrap()
}

/// The checkpoint is here, byte for byte.
pub fn assert_whole(store: &Arc<Store>, id: &CheckpointId, im: &Image) {
    assert_eq!(build(im).1, store.manifest_here(id).unwrap().1);
    let report = store.verify(id, &ring()).unwrap();
    assert_eq!((report.faults, report.objects), (vec![], build(im).0.len() as u64));
    for (_, object, plain) in build(im).0 {
        assert_eq!(store.read_object(&object, &ring()).unwrap(), plain);
    }
    assert!(store.closure_plan(id, &ring()).is_ok());
}

pub fn packs(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for d in std::fs::read_dir(dir.join("packs")).unwrap() {
        found.extend(std::fs::read_dir(d.unwrap().path()).unwrap().map(|f| f.unwrap().path()));
    }
    found.sort();
    found
}
pub fn names(dir: &Path) -> Vec<String> {
    let mut out: Vec<String> = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    out.sort();
    out
}
/// Changes one bit in the middle of a file.
pub fn flip(path: &Path) {
    let f = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    let (mut b, at) = ([0], f.metadata().unwrap().len() / 2);
    f.read_exact_at(&mut b, at).unwrap();
    f.write_all_at(&[b[0] ^ 0x10], at).unwrap();
}

/// Short for an id in a test.
pub trait IntoId {
    fn into_id(self) -> CheckpointId;
}
impl IntoId for [u8; 32] {
    fn into_id(self) -> CheckpointId {
        CheckpointId(self)
    }
}

/// Opens a store again once its last user has gone.
pub async fn reopened(dir: &Path) -> Arc<Store> {
    let deadline = tokio::time::Instant::now() + std::time::Duration::from_secs(20);
    loop {
        match Store::open(dir) {
            Ok(store) => return store,
            Err(ks_blobs::StoreError::Locked { .. }) if tokio::time::Instant::now() < deadline => tokio::task::yield_now().await,
            Err(e) => panic!("{e}"),
        }
    }
}
