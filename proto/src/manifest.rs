//! The manifest: what one checkpoint (or one image's disk) is made of. Its BLAKE3 hash is the checkpoint's id.
//!
//! Memory and disk are each a list of segments; a segment is an object of 512 chunk references, so an unchanged
//! segment costs one hash. Source: DESIGN section 5, docs/formats.md.

use crate::bytes::{DecodeError, Reader, Writer};
use crate::chunk::CHUNK_BYTES;
use crate::ids::{CheckpointId, ChunkId, SessionId};

/// The version written.
pub const VERSION: u32 = 1;
/// Chunk references in one segment.
pub const SEGMENT_CHUNKS: usize = 512;
/// Bytes of memory or disk that one segment covers.
pub const SEGMENT_SPAN: u64 = (SEGMENT_CHUNKS * CHUNK_BYTES) as u64;
/// The largest memory: 1 TiB.
pub const MEMORY_BYTES_MAX: u64 = 1 << 40;
/// The largest disk: 16 TiB.
pub const DISK_BYTES_MAX: u64 = 1 << 44;
/// The largest manifest.
pub const MANIFEST_BYTES_MAX: usize = 64 * 1024 * 1024;
const MAGIC: &[u8; 8] = b"KSMANI\r\n";
const WHAT: &str = "manifest";

/// One address space: a length and its segments.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Map {
    /// Bytes covered; a multiple of the chunk size.
    pub bytes: u64,
    /// One object id per [`SEGMENT_SPAN`] bytes; [`ChunkId::ZERO`] is a segment of zeros.
    pub segments: Vec<ChunkId>,
}

impl Map {
    /// Segments that `bytes` need.
    pub fn segments_for(bytes: u64) -> u64 {
        bytes.div_ceil(SEGMENT_SPAN)
    }
    /// Chunks in the whole map.
    pub fn chunks(&self) -> usize {
        (self.bytes / CHUNK_BYTES as u64) as usize
    }
}

/// Which engine ran the VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum EngineKind {
    /// Our own VMM on /dev/kvm.
    Kvm = 1,
    /// A supervised QEMU with TCG.
    Qemu = 2,
}
impl std::fmt::Display for EngineKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Kvm => "kvm",
            Self::Qemu => "qemu",
        })
    }
}

/// The machine that the state belongs to; a restore needs an equal one.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Machine {
    /// Engine.
    pub engine: EngineKind,
    /// CPU profile: `hardware`, `soft` or `tcg`.
    pub profile: String,
    /// QEMU's version line, or ours for kvm. A restore with another refuses.
    pub engine_version: String,
    /// CPU model given to the engine.
    pub cpu_model: String,
    /// CPU features that the host must have, sorted.
    pub features: Vec<String>,
    /// TSC frequency in kHz.
    pub tsc_khz: u32,
    /// Virtual CPUs.
    pub vcpus: u16,
    /// Kernel command line at boot.
    pub cmdline: String,
    /// BLAKE3 of the kernel file (hex) and of the initramfs file ("" when none).
    pub kernel_hash: String,
    /// See `kernel_hash`.
    pub initrd_hash: String,
}

/// A checkpoint's contents by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    /// The session that was captured; all zeros for an image's disk.
    pub session: SessionId,
    /// The checkpoint that this one follows.
    pub parent: Option<CheckpointId>,
    /// Wall clock at the pause, Unix milliseconds.
    pub created_unix_ms: u64,
    /// Position in the gateway's journal in the same pause (0 before the gateway exists).
    pub journal_position: u64,
    /// The machine; None for an image's disk, which has no memory and no state.
    pub machine: Option<Machine>,
    /// Device and vCPU state: objects of kind State whose plain bytes follow one another.
    pub state: Vec<ChunkId>,
    /// Plain length of the state in bytes.
    pub state_bytes: u64,
    /// Guest memory by offset in the memory file.
    pub memory: Map,
    /// Root disk.
    pub disk: Map,
}

impl Manifest {
    /// The bytes to store.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        w.raw(MAGIC).u32(VERSION).u32(CHUNK_BYTES as u32).raw(&self.session.0);
        w.u8(u8::from(self.parent.is_some())).raw(&self.parent.map_or([0; 32], |p| p.0));
        w.u64(self.created_unix_ms).u64(self.journal_position);
        w.u8(u8::from(self.machine.is_some()));
        if let Some(m) = &self.machine {
            w.u8(m.engine as u8).text(&m.profile).text(&m.engine_version).text(&m.cpu_model);
            w.count(m.features.len());
            for f in &m.features {
                w.text(f);
            }
            w.u32(m.tsc_khz).u16(m.vcpus).text(&m.cmdline).text(&m.kernel_hash).text(&m.initrd_hash);
        }
        w.u64(self.state_bytes).count(self.state.len());
        for id in &self.state {
            w.raw(&id.0);
        }
        for map in [&self.memory, &self.disk] {
            w.u64(map.bytes).count(map.segments.len());
            for id in &map.segments {
                w.raw(&id.0);
            }
        }
        w.finish()
    }

    /// The id of these bytes.
    pub fn id_of(bytes: &[u8]) -> CheckpointId {
        CheckpointId(*blake3::hash(bytes).as_bytes())
    }

    /// Decodes bytes that must be the manifest named `id`.
    pub fn decode_verified(id: &CheckpointId, bytes: &[u8]) -> Result<Self, DecodeError> {
        let computed = Self::id_of(bytes);
        if computed != *id {
            return Err(DecodeError::Hash { what: WHAT, expected: id.to_hex(), computed: computed.to_hex() });
        }
        Self::decode(bytes)
    }

    /// Decodes, checking every length and count before use.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(WHAT, bytes);
        r.magic(MAGIC)?;
        let version = r.u32()?;
        if version != VERSION {
            return Err(DecodeError::Version { what: WHAT, got: version, known: VERSION });
        }
        let chunk = r.u32()?;
        if chunk as usize != CHUNK_BYTES {
            return Err(r.bad(format!("chunk size {chunk} is not {CHUNK_BYTES}")));
        }
        let session = SessionId(r.array()?);
        let has_parent = flag(&mut r)?;
        let parent = r.array()?;
        let (created_unix_ms, journal_position) = (r.u64()?, r.u64()?);
        let machine = if flag(&mut r)? { Some(machine(&mut r)?) } else { None };
        let state_bytes = r.u64()?;
        let state = ids(&mut r)?;
        let memory = map(&mut r, MEMORY_BYTES_MAX)?;
        let disk = map(&mut r, DISK_BYTES_MAX)?;
        r.end()?;
        if machine.is_none() && (memory.bytes > 0 || !state.is_empty()) {
            return Err(r.bad("memory or state without a machine"));
        }
        if machine.is_some() && (memory.bytes == 0 || state.is_empty()) {
            return Err(r.bad("a machine without memory or state"));
        }
        if state_bytes > state.len() as u64 * crate::chunk::OBJECT_BYTES_MAX as u64 {
            return Err(r.bad("state longer than its objects"));
        }
        Ok(Self {
            session,
            parent: has_parent.then_some(CheckpointId(parent)),
            created_unix_ms,
            journal_position,
            machine,
            state,
            state_bytes,
            memory,
            disk,
        })
    }
}

fn flag(r: &mut Reader<'_>) -> Result<bool, DecodeError> {
    match r.u8()? {
        0 => Ok(false),
        1 => Ok(true),
        v => Err(r.bad(format!("flag byte {v}"))),
    }
}

fn machine(r: &mut Reader<'_>) -> Result<Machine, DecodeError> {
    let engine = match r.u8()? {
        1 => EngineKind::Kvm,
        2 => EngineKind::Qemu,
        v => return Err(r.bad(format!("unknown engine {v}"))),
    };
    let (profile, engine_version, cpu_model) = (r.text()?, r.text()?, r.text()?);
    let n = r.count(2)?;
    let features = (0..n).map(|_| r.text()).collect::<Result<Vec<_>, _>>()?;
    Ok(Machine {
        engine,
        profile,
        engine_version,
        cpu_model,
        features,
        tsc_khz: r.u32()?,
        vcpus: r.u16()?,
        cmdline: r.text()?,
        kernel_hash: r.text()?,
        initrd_hash: r.text()?,
    })
}

fn ids(r: &mut Reader<'_>) -> Result<Vec<ChunkId>, DecodeError> {
    let n = r.count(32)?;
    (0..n).map(|_| Ok(ChunkId(r.array()?))).collect()
}

fn map(r: &mut Reader<'_>, bytes_max: u64) -> Result<Map, DecodeError> {
    let bytes = r.u64()?;
    if bytes > bytes_max || bytes % CHUNK_BYTES as u64 != 0 {
        return Err(r.bad(format!("a map of {bytes} bytes (the most is {bytes_max}, in whole chunks)")));
    }
    let segments = ids(r)?;
    if segments.len() as u64 != Map::segments_for(bytes) {
        return Err(r.bad(format!("{} segments for {bytes} bytes", segments.len())));
    }
    Ok(Map { bytes, segments })
}

/// The plain bytes of a segment object: exactly 512 references; a short last segment is padded with zeros.
pub fn encode_segment(refs: &[ChunkId]) -> Vec<u8> {
    assert!(refs.len() <= SEGMENT_CHUNKS, "a segment has at most {SEGMENT_CHUNKS} references");
    let mut out = vec![0u8; SEGMENT_CHUNKS * 32];
    for (slot, id) in out.chunks_exact_mut(32).zip(refs) {
        slot.copy_from_slice(&id.0);
    }
    out
}

/// Decodes a segment object.
pub fn decode_segment(bytes: &[u8]) -> Result<Vec<ChunkId>, DecodeError> {
    let mut r = Reader::new("segment", bytes);
    let refs = (0..SEGMENT_CHUNKS).map(|_| Ok(ChunkId(r.array()?))).collect::<Result<Vec<_>, DecodeError>>()?;
    r.end()?;
    Ok(refs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample() -> Manifest {
        Manifest {
            session: SessionId([1; 16]),
            parent: Some(CheckpointId([2; 32])),
            created_unix_ms: 3,
            journal_position: 4,
            machine: Some(Machine {
                engine: EngineKind::Qemu,
                profile: "tcg".into(),
                engine_version: "7.2".into(),
                cpu_model: "max".into(),
                features: vec!["a".into()],
                tsc_khz: 5,
                vcpus: 1,
                cmdline: "quiet".into(),
                kernel_hash: "k".into(),
                initrd_hash: String::new(),
            }),
            state: vec![ChunkId([6; 32])],
            state_bytes: 7,
            memory: Map { bytes: SEGMENT_SPAN + CHUNK_BYTES as u64, segments: vec![ChunkId([8; 32]), ChunkId::ZERO] },
            disk: Map { bytes: CHUNK_BYTES as u64, segments: vec![ChunkId([9; 32])] },
        }
    }

    #[test]
    fn round_trip_and_golden_id() {
        let bytes = sample().encode();
        let id = Manifest::id_of(&bytes);
        assert_eq!(Manifest::decode_verified(&id, &bytes), Ok(sample()));
        assert_eq!(hex::encode(&bytes[..16]), "4b534d414e490d0a0100000000000100", "magic, version and chunk size of version 1");
    }

    #[test]
    fn truncated_flipped_and_foreign_manifests_are_refused() {
        let bytes = sample().encode();
        let id = Manifest::id_of(&bytes);
        for n in 0..bytes.len() {
            assert!(Manifest::decode(&bytes[..n]).is_err(), "{n}");
        }
        for i in 0..bytes.len() {
            let mut b = bytes.clone();
            b[i] ^= 1;
            assert!(Manifest::decode_verified(&id, &b).is_err(), "{i}");
        }
        let mut b = bytes;
        b[8] = 2;
        assert!(matches!(Manifest::decode(&b), Err(DecodeError::Version { got: 2, .. })));
    }

    #[test]
    fn a_claim_of_2_to_the_60_chunks_is_refused_without_allocating() {
        let mut m = sample();
        m.memory.bytes = 1 << 60;
        assert!(matches!(Manifest::decode(&m.encode()), Err(DecodeError::Value { .. })));
        let bytes = sample().encode();
        let at = bytes.len() - 32 - 4;
        let mut b = bytes;
        b[at..at + 4].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(matches!(Manifest::decode(&b), Err(DecodeError::Truncated { .. })));
    }

    proptest! {
        #[test]
        fn hostile_bytes_never_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..300), keep in 0usize..200) {
            let good = sample().encode();
            let keep = keep.min(good.len());
            let mut b = good[..keep].to_vec();
            b.append(&mut bytes);
            let _ = Manifest::decode(&b);
            let _ = decode_segment(&b);
        }
    }
}
