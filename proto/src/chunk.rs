//! Objects: how plain bytes become a named, compressed, sealed entry of a pack, and back.
//!
//! name = BLAKE3 keyed per domain and kind over the plain bytes; stored = nonce(24) ‖ XChaCha20-Poly1305 of
//! (zstd-1 or raw bytes). The name is checked after opening, so a wrong byte anywhere is never handed on. Source:
//! DESIGN section 5, docs/formats.md.

use crate::bytes::DecodeError;
use crate::ids::ChunkId;
use chacha20poly1305::aead::{Aead, KeyInit, Payload};
use chacha20poly1305::{XChaCha20Poly1305, XNonce};
use std::cell::RefCell;
use zeroize::{Zeroize, ZeroizeOnDrop};
use zstd::bulk::{Compressor, Decompressor};

/// Size of a chunk of memory or disk: 64 KiB, aligned (docs/decisions/0001-chunk-size.md).
pub const CHUNK_BYTES: usize = 64 * 1024;
/// The largest object of any kind.
pub const OBJECT_BYTES_MAX: usize = 4 * 1024 * 1024;
/// Nonce and authentication tag around each stored object.
pub const SEAL_OVERHEAD: usize = 24 + 16;
const WHAT: &str = "object";

/// What an object holds. Each kind is named under its own key, so a segment can never pass as a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum ObjectKind {
    /// 64 KiB of memory or disk.
    Data = 1,
    /// 512 references to data chunks.
    Segment = 2,
    /// Device and vCPU state of one checkpoint.
    State = 3,
}
impl ObjectKind {
    /// The kind with this number.
    pub fn from_u8(v: u8) -> Result<Self, DecodeError> {
        match v {
            1 => Ok(Self::Data),
            2 => Ok(Self::Segment),
            3 => Ok(Self::State),
            _ => Err(DecodeError::Value { what: WHAT, why: format!("unknown object kind {v}") }),
        }
    }
}

/// How the plain bytes are packed before sealing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Codec {
    /// As they are.
    Raw = 0,
    /// One zstd frame, level 1.
    Zstd = 1,
}
impl Codec {
    /// The codec with this number.
    pub fn from_u8(v: u8) -> Result<Self, DecodeError> {
        match v {
            0 => Ok(Self::Raw),
            1 => Ok(Self::Zstd),
            _ => Err(DecodeError::Value { what: WHAT, why: format!("unknown codec {v}") }),
        }
    }
}

/// The secret of one key domain (0: the fleet's images; others: one per user). Wiped when dropped.
#[derive(Clone, Zeroize, ZeroizeOnDrop)]
pub struct DomainKey {
    #[zeroize(skip)]
    domain: u32,
    master: [u8; 32],
    name_keys: [[u8; 32]; 3],
    seal_key: [u8; 32],
}

impl std::fmt::Debug for DomainKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DomainKey({}, secret)", self.domain)
    }
}

impl DomainKey {
    /// Derives the naming and sealing keys of `domain` from its 32-byte master secret.
    pub fn new(domain: u32, master: [u8; 32]) -> Self {
        Self {
            domain,
            name_keys: [
                blake3::derive_key("keepstate 2026-11 object name: data", &master),
                blake3::derive_key("keepstate 2026-11 object name: segment", &master),
                blake3::derive_key("keepstate 2026-11 object name: state", &master),
            ],
            seal_key: blake3::derive_key("keepstate 2026-11 object seal", &master),
            master,
        }
    }
    /// The domain's number.
    pub fn domain(&self) -> u32 {
        self.domain
    }
    /// The master secret, to hand to a process that must open this domain's objects.
    pub fn master(&self) -> &[u8; 32] {
        &self.master
    }

    /// The name of `plain` as an object of `kind`. Data chunks of only zeros are [`ChunkId::ZERO`].
    pub fn name(&self, kind: ObjectKind, plain: &[u8]) -> ChunkId {
        if kind == ObjectKind::Data && is_zeros(plain) {
            return ChunkId::ZERO;
        }
        ChunkId(*blake3::keyed_hash(&self.name_keys[kind as usize - 1], plain).as_bytes())
    }

    /// Compresses and seals. `nonce` must be fresh random bytes for each call.
    pub fn seal(&self, kind: ObjectKind, id: &ChunkId, plain: &[u8], nonce: [u8; 24]) -> (Codec, Vec<u8>) {
        assert!(plain.len() <= OBJECT_BYTES_MAX, "objects are cut to at most {OBJECT_BYTES_MAX} bytes before sealing");
        let packed = packed(plain).filter(|z| z.len() < plain.len());
        let (codec, body) = match &packed {
            Some(z) => (Codec::Zstd, z.as_slice()),
            None => (Codec::Raw, plain),
        };
        let aad = aad(kind, codec, id, plain.len());
        let cipher = XChaCha20Poly1305::new((&self.seal_key).into());
        let sealed =
            cipher.encrypt(&XNonce::from(nonce), Payload { msg: body, aad: &aad }).expect("sealing a bounded buffer cannot fail");
        let mut out = Vec::with_capacity(sealed.len() + 24);
        out.extend_from_slice(&nonce);
        out.extend_from_slice(&sealed);
        (codec, out)
    }

    /// Opens stored bytes and checks the name. Returns exactly `plain_len` bytes, or an error; never other bytes.
    pub fn open(
        &self,
        kind: ObjectKind,
        codec: Codec,
        id: &ChunkId,
        plain_len: usize,
        stored: &[u8],
    ) -> Result<Vec<u8>, DecodeError> {
        if plain_len > OBJECT_BYTES_MAX {
            return Err(DecodeError::Value {
                what: WHAT,
                why: format!("claims {plain_len} bytes, the most is {OBJECT_BYTES_MAX}"),
            });
        }
        if stored.len() < SEAL_OVERHEAD || stored.len() > OBJECT_BYTES_MAX + SEAL_OVERHEAD {
            return Err(DecodeError::Value { what: WHAT, why: format!("{} stored bytes", stored.len()) });
        }
        let mut nonce = [0u8; 24];
        nonce.copy_from_slice(&stored[..24]);
        let aad = aad(kind, codec, id, plain_len);
        let cipher = XChaCha20Poly1305::new((&self.seal_key).into());
        let body = cipher
            .decrypt(&XNonce::from(nonce), Payload { msg: &stored[24..], aad: &aad })
            .map_err(|_| DecodeError::Sealed { what: WHAT })?;
        let plain = match codec {
            Codec::Raw => body,
            Codec::Zstd => {
                unpacked(&body, plain_len).map_err(|e| DecodeError::Value { what: WHAT, why: format!("zstd: {e}") })?
            }
        };
        if plain.len() != plain_len {
            return Err(DecodeError::Value { what: WHAT, why: format!("{} bytes where {plain_len} were promised", plain.len()) });
        }
        let computed = ChunkId(*blake3::keyed_hash(&self.name_keys[kind as usize - 1], &plain).as_bytes());
        if computed != *id {
            return Err(DecodeError::Hash { what: WHAT, expected: id.to_hex(), computed: computed.to_hex() });
        }
        Ok(plain)
    }
}

thread_local! {
    // A context costs more to make than a chunk takes to open: one for each thread, emptied by zstd at each use.
    static PACKER: RefCell<Option<Compressor<'static>>> = const { RefCell::new(None) };
    static UNPACKER: RefCell<Option<Decompressor<'static>>> = const { RefCell::new(None) };
}

/// One frame at level 1; None if zstd cannot (then the bytes are kept raw).
fn packed(plain: &[u8]) -> Option<Vec<u8>> {
    PACKER.with_borrow_mut(|slot| {
        let packer = match slot {
            Some(p) => p,
            None => slot.insert(Compressor::new(1).ok()?),
        };
        packer.compress(plain).ok()
    })
}

/// At most `len` bytes out of one frame.
fn unpacked(frame: &[u8], len: usize) -> std::io::Result<Vec<u8>> {
    UNPACKER.with_borrow_mut(|slot| {
        let unpacker = match slot {
            Some(u) => u,
            None => slot.insert(Decompressor::new()?),
        };
        unpacker.decompress(frame, len)
    })
}

fn aad(kind: ObjectKind, codec: Codec, id: &ChunkId, plain_len: usize) -> [u8; 38] {
    let mut a = [0u8; 38];
    a[..32].copy_from_slice(&id.0);
    a[32] = kind as u8;
    a[33] = codec as u8;
    a[34..].copy_from_slice(&u32::try_from(plain_len).unwrap_or(u32::MAX).to_le_bytes());
    a
}

/// True if every byte is zero.
pub fn is_zeros(b: &[u8]) -> bool {
    let words = b.chunks_exact(16);
    words.remainder().iter().all(|&x| x == 0) && words.into_iter().all(|c| c == [0; 16])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key() -> DomainKey {
        DomainKey::new(1, [9; 32])
    }

    #[test]
    fn a_domain_cannot_read_or_name_anothers() {
        let (a, b) = (key(), DomainKey::new(2, [8; 32]));
        let plain = vec![5u8; 1000];
        let id = a.name(ObjectKind::Data, &plain);
        assert_ne!(id, b.name(ObjectKind::Data, &plain));
        assert_ne!(id, a.name(ObjectKind::Segment, &plain));
        let (codec, stored) = a.seal(ObjectKind::Data, &id, &plain, [1; 24]);
        assert_eq!(a.open(ObjectKind::Data, codec, &id, 1000, &stored), Ok(plain));
        assert_eq!(b.open(ObjectKind::Data, codec, &id, 1000, &stored), Err(DecodeError::Sealed { what: "object" }));
        assert!(a.open(ObjectKind::Segment, codec, &id, 1000, &stored).is_err());
    }

    proptest! {
        #[test]
        fn every_flipped_byte_is_refused(plain in proptest::collection::vec(any::<u8>(), 1..300), at in any::<usize>(), bit in 0u8..8) {
            let k = key();
            let id = k.name(ObjectKind::Segment, &plain);
            let (codec, mut stored) = k.seal(ObjectKind::Segment, &id, &plain, [3; 24]);
            let n = stored.len();
            stored[at % n] ^= 1 << bit;
            prop_assert!(k.open(ObjectKind::Segment, codec, &id, plain.len(), &stored).is_err());
        }
        #[test]
        fn zeros_are_found(n in 0usize..200, at in any::<usize>()) {
            let mut v = vec![0u8; n];
            prop_assert!(is_zeros(&v));
            if n > 0 { v[at % n] = 1; prop_assert!(!is_zeros(&v)); }
        }
    }
}
