//! Plays the VMM: cuts memory and disk into chunks, asks what is known, writes packs, commits; and restores through a plan.

use crate::error::StoreError;
use crate::{KeyRing, Store, Upload, UploadScope};
use ks_proto::chunk::{CHUNK_BYTES, DomainKey, ObjectKind};
use ks_proto::ids::{CheckpointId, ChunkId, SessionId};
use ks_proto::manifest::{EngineKind, Machine, Manifest, Map, SEGMENT_CHUNKS, decode_segment, encode_segment};
use ks_proto::pack::PackBuilder;
use ks_proto::plan::Plan;
use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

pub fn ring() -> KeyRing {
    KeyRing::new([DomainKey::new(0, [7; 32]), DomainKey::new(1, [9; 32])])
}
pub fn key() -> DomainKey {
    DomainKey::new(1, [9; 32])
}

/// What a checkpoint holds, in plain: chunks by position. Each chunk is described by one number; 0 is zeros.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    pub session: u8,
    pub parent: Option<CheckpointId>,
    pub memory: Vec<u32>,
    pub disk: Vec<u32>,
    pub state: Vec<u8>,
}

pub fn chunk(n: u32) -> Vec<u8> {
    let mut v = vec![0u8; CHUNK_BYTES];
    if n != 0 {
        // Compressible and different for each number.
        v[..4].copy_from_slice(&n.to_le_bytes());
        v[CHUNK_BYTES / 2..][..4].copy_from_slice(&n.to_be_bytes());
    }
    v
}

pub fn image(memory: &[u32], disk: &[u32]) -> Image {
    Image { session: 1, parent: None, memory: memory.to_vec(), disk: disk.to_vec(), state: vec![1, 2, 3] }
}

fn nonce() -> [u8; 24] {
    crate::host::random().unwrap()
}

/// Writes one pack of these objects through the upload, as ks-vmm does.
fn put_pack(up: &Upload, objects: &[(ObjectKind, ChunkId, Vec<u8>)]) -> Result<(), StoreError> {
    if objects.is_empty() {
        return Ok(());
    }
    let file = up.new_pack()?;
    let (mut b, mut bytes) = PackBuilder::start(1);
    for (kind, id, plain) in objects {
        bytes.extend(b.add(&key(), *kind, *id, plain, nonce()));
    }
    let (tail, id, _) = b.finish();
    bytes.extend(tail);
    file.write_all_at(&bytes, 0).map_err(|e| StoreError::io("write", std::path::Path::new("pack"), e))?;
    up.pack_done(id, bytes.len() as u64)
}

fn map(chunks: &[u32], objects: &mut Vec<(ObjectKind, ChunkId, Vec<u8>)>) -> Map {
    let mut segments = Vec::new();
    for part in chunks.chunks(SEGMENT_CHUNKS) {
        let refs: Vec<ChunkId> = part
            .iter()
            .map(|n| {
                let plain = chunk(*n);
                let id = key().name(ObjectKind::Data, &plain);
                if !id.is_zero() {
                    objects.push((ObjectKind::Data, id, plain));
                }
                id
            })
            .collect();
        if refs.iter().all(ChunkId::is_zero) {
            segments.push(ChunkId::ZERO);
            continue;
        }
        let plain = encode_segment(&refs);
        let id = key().name(ObjectKind::Segment, &plain);
        objects.push((ObjectKind::Segment, id, plain));
        segments.push(id);
    }
    Map { bytes: (chunks.len() * CHUNK_BYTES) as u64, segments }
}

/// All objects and the manifest of an image.
pub fn build(im: &Image) -> (Vec<(ObjectKind, ChunkId, Vec<u8>)>, Manifest) {
    let mut objects = Vec::new();
    let (memory, disk) = (map(&im.memory, &mut objects), map(&im.disk, &mut objects));
    let state = key().name(ObjectKind::State, &im.state);
    objects.push((ObjectKind::State, state, im.state.clone()));
    let mut seen = BTreeSet::new();
    objects.retain(|o| seen.insert(o.1));
    let m = Manifest {
        session: SessionId([im.session; 16]),
        parent: im.parent,
        created_unix_ms: 5,
        journal_position: 0,
        machine: Some(Machine {
            engine: EngineKind::Qemu,
            profile: "tcg".into(),
            engine_version: "7.2".into(),
            cpu_model: "max".into(),
            features: vec![],
            tsc_khz: 1,
            vcpus: 1,
            cmdline: String::new(),
            kernel_hash: String::new(),
            initrd_hash: String::new(),
        }),
        state: vec![state],
        state_bytes: im.state.len() as u64,
        memory,
        disk,
    };
    (objects, m)
}

/// Uploads what is not known yet, in packs of at most `per_pack` objects. Returns the manifest's bytes.
pub fn send(up: &Upload, im: &Image, per_pack: usize) -> Result<Vec<u8>, StoreError> {
    let (objects, m) = build(im);
    let known = up.known(&objects.iter().map(|o| o.1).collect::<Vec<_>>());
    let new: Vec<_> = objects.into_iter().zip(known).filter(|(_, k)| !k).map(|(o, _)| o).collect();
    for part in new.chunks(per_pack) {
        put_pack(up, part)?;
    }
    Ok(m.encode())
}

pub fn scope() -> UploadScope {
    UploadScope { keys: ring(), write_domain: 1, bases: vec![] }
}

/// One whole checkpoint.
pub fn checkpoint(store: &Arc<Store>, im: &Image, per_pack: usize) -> Result<CheckpointId, StoreError> {
    let up = store.begin_upload(scope());
    let bytes = send(&up, im, per_pack)?;
    up.commit(&bytes)
}

fn read(plan: &Plan, files: &[File], id: &ChunkId, kind: ObjectKind) -> Vec<u8> {
    let row = plan.find(id).unwrap_or_else(|| panic!("{id} is not in the plan"));
    assert_eq!(row.entry.kind, kind);
    let mut stored = vec![0; row.entry.stored_len as usize];
    files[row.pack as usize].read_exact_at(&mut stored, u64::from(row.entry.offset)).unwrap();
    row.entry.open(ring().get(row.domain).unwrap(), &stored).unwrap()
}

fn restore_map(plan: &Plan, files: &[File], m: &Map) -> Vec<u32> {
    let mut out = Vec::new();
    for s in &m.segments {
        let refs = if s.is_zero() {
            vec![ChunkId::ZERO; SEGMENT_CHUNKS]
        } else {
            decode_segment(&read(plan, files, s, ObjectKind::Segment)).unwrap()
        };
        for id in refs {
            if out.len() == m.chunks() {
                break;
            }
            let n = if id.is_zero() {
                0
            } else {
                let plain = read(plan, files, &id, ObjectKind::Data);
                let n = u32::from_le_bytes(plain[..4].try_into().unwrap());
                assert_eq!(plain, chunk(n), "byte for byte");
                n
            };
            out.push(n);
        }
    }
    out
}

/// Restores from what `closure_plan` gives alone, as ks-vmm does.
pub fn restore_from(m: &Manifest, plan: &Plan, files: &[File]) -> Image {
    let state = m.state.iter().flat_map(|s| read(plan, files, s, ObjectKind::State)).collect();
    Image {
        session: m.session.0[0],
        parent: m.parent,
        memory: restore_map(plan, files, &m.memory),
        disk: restore_map(plan, files, &m.disk),
        state,
    }
}

pub fn restore(store: &Arc<Store>, id: &CheckpointId) -> Result<Image, StoreError> {
    let m = store.manifest(id)?;
    let (plan, files) = store.closure_plan(id, &ring())?;
    let plan = Plan::decode(&plan.encode()).unwrap();
    Ok(restore_from(&m, &plan, &files))
}
