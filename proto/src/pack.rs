//! Packs: files of at most 32 MiB that hold sealed objects of one key domain, with their own index at the end.
//!
//! header(32) ‖ objects ‖ table(48 each) ‖ trailer(52). A pack without a whole trailer is not a pack: a crash while
//! writing leaves nothing that could be read as one. The pack's name is the BLAKE3 of the whole file.

use crate::bytes::{DecodeError, Reader, Writer};
use crate::chunk::{Codec, DomainKey, OBJECT_BYTES_MAX, ObjectKind, SEAL_OVERHEAD};
use crate::ids::{ChunkId, PackId};

/// A pack is closed before it grows beyond this.
pub const PACK_BYTES_MAX: usize = 32 * 1024 * 1024;
/// Bytes of the header.
pub const HEADER_BYTES: usize = 32;
/// Bytes of one table row.
pub const ROW_BYTES: usize = 48;
/// Bytes of the trailer.
pub const TRAILER_BYTES: usize = 52;
/// The version written.
pub const VERSION: u32 = 1;
const MAGIC: &[u8; 8] = b"KSPACK\r\n";
const END_MAGIC: &[u8; 8] = b"KSPKEND\n";
const WHAT: &str = "pack";

/// Where one object lies in its pack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackEntry {
    /// The object's name.
    pub id: ChunkId,
    /// Byte offset of the stored bytes in the pack file.
    pub offset: u32,
    /// Stored (sealed) length in bytes.
    pub stored_len: u32,
    /// Length of the plain bytes.
    pub plain_len: u32,
    /// What it holds.
    pub kind: ObjectKind,
    /// How it is compressed.
    pub codec: Codec,
}

impl PackEntry {
    /// Opens this entry's stored bytes under `key`, checking the name.
    pub fn open(&self, key: &DomainKey, stored: &[u8]) -> Result<Vec<u8>, DecodeError> {
        key.open(self.kind, self.codec, &self.id, self.plain_len as usize, stored)
    }
}

/// The decoded index of a pack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackIndex {
    /// The key domain of every object in it.
    pub domain: u32,
    /// Its objects in file order.
    pub entries: Vec<PackEntry>,
}

/// Builds one pack in order. The caller writes the returned bytes; nothing is kept but the table and the hash.
pub struct PackBuilder {
    domain: u32,
    at: usize,
    entries: Vec<PackEntry>,
    hash: blake3::Hasher,
}

impl PackBuilder {
    /// Starts a pack of `domain` and returns the header to write first.
    pub fn start(domain: u32) -> (Self, Vec<u8>) {
        let mut w = Writer::new();
        w.raw(MAGIC).u32(VERSION).u32(domain).raw(&[0; 16]);
        let header = w.finish();
        let mut hash = blake3::Hasher::new();
        hash.update(&header);
        (Self { domain, at: HEADER_BYTES, entries: Vec::new(), hash }, header)
    }
    /// True if an object of `plain_len` might take the pack over its limit: finish it and start another.
    pub fn is_full_for(&self, plain_len: usize) -> bool {
        self.at + plain_len + SEAL_OVERHEAD + (self.entries.len() + 1) * ROW_BYTES + TRAILER_BYTES > PACK_BYTES_MAX
    }
    /// Seals `plain` and returns the bytes to append to the file.
    ///
    /// # Panics
    /// If the key is of another domain, or [`Self::is_full_for`] was ignored.
    pub fn add(&mut self, key: &DomainKey, kind: ObjectKind, id: ChunkId, plain: &[u8], nonce: [u8; 24]) -> Vec<u8> {
        assert_eq!(key.domain(), self.domain, "one pack holds objects of one key domain");
        let (codec, stored) = key.seal(kind, &id, plain, nonce);
        let plain_len = u32::try_from(plain.len()).expect("objects are at most 4 MiB");
        self.add_sealed(kind, codec, id, plain_len, &stored);
        stored
    }
    /// Records an object that is sealed already (compaction copies them as they are); the caller appends `stored`.
    ///
    /// # Panics
    /// If [`Self::is_full_for`] was ignored.
    pub fn add_sealed(&mut self, kind: ObjectKind, codec: Codec, id: ChunkId, plain_len: u32, stored: &[u8]) {
        assert!(self.at + stored.len() <= PACK_BYTES_MAX, "a pack is finished before it grows beyond its limit");
        let to_u32 = |n: usize| u32::try_from(n).expect("offsets in a pack are below 32 MiB");
        self.entries.push(PackEntry { id, offset: to_u32(self.at), stored_len: to_u32(stored.len()), plain_len, kind, codec });
        self.at += stored.len();
        self.hash.update(stored);
    }
    /// Bytes so far, without table and trailer.
    pub fn len(&self) -> usize {
        self.at
    }
    /// True if no object was added.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
    /// The table and trailer to append, the pack's name, and its index.
    pub fn finish(mut self) -> (Vec<u8>, PackId, PackIndex) {
        let mut w = Writer::new();
        for e in &self.entries {
            w.raw(&e.id.0).u32(e.offset).u32(e.stored_len).u32(e.plain_len).u8(e.kind as u8).u8(e.codec as u8).u16(0);
        }
        let table = w.finish();
        let table_hash = blake3::hash(&table);
        let mut w = Writer::new();
        w.raw(&table).count(self.entries.len()).u64(self.at as u64).raw(table_hash.as_bytes()).raw(END_MAGIC);
        let tail = w.finish();
        self.hash.update(&tail);
        (tail, PackId(*self.hash.finalize().as_bytes()), PackIndex { domain: self.domain, entries: self.entries })
    }
}

/// The key domain in a pack's header.
pub fn decode_header(header: &[u8]) -> Result<u32, DecodeError> {
    let mut r = Reader::new(WHAT, header);
    r.magic(MAGIC)?;
    let version = r.u32()?;
    if version != VERSION {
        return Err(DecodeError::Version { what: WHAT, got: version, known: VERSION });
    }
    r.u32()
}

/// From the last [`TRAILER_BYTES`] of a pack of `file_len` bytes: (offset, length) of its table.
pub fn decode_trailer(trailer: &[u8], file_len: u64) -> Result<(u64, usize), DecodeError> {
    let mut r = Reader::new(WHAT, trailer);
    let count = r.u32()? as usize;
    let table_at = r.u64()?;
    r.take(32)?;
    r.magic(END_MAGIC)?;
    let table_len = count.saturating_mul(ROW_BYTES);
    if file_len > PACK_BYTES_MAX as u64 + 1
        || table_at < HEADER_BYTES as u64
        || table_at.saturating_add(table_len as u64).saturating_add(TRAILER_BYTES as u64) != file_len
    {
        return Err(r.bad(format!("a table of {count} rows at {table_at} does not fit a file of {file_len} bytes")));
    }
    Ok((table_at, table_len))
}

/// Decodes the table that [`decode_trailer`] located, checking its hash and every range.
pub fn decode_table(domain: u32, table: &[u8], trailer: &[u8]) -> Result<PackIndex, DecodeError> {
    let (count, end, hash) = {
        let mut r = Reader::new(WHAT, trailer);
        (r.u32()? as usize, r.u64()?, r.array::<32>()?)
    };
    let computed = blake3::hash(table);
    if *computed.as_bytes() != hash {
        return Err(DecodeError::Hash {
            what: "pack table",
            expected: hex::encode(hash),
            computed: computed.to_hex().to_string(),
        });
    }
    let mut r = Reader::new(WHAT, table);
    if table.len() != count.saturating_mul(ROW_BYTES) {
        return Err(r.bad("table length and count differ"));
    }
    let mut entries = Vec::with_capacity(count);
    for _ in 0..count {
        let e = PackEntry {
            id: ChunkId(r.array()?),
            offset: r.u32()?,
            stored_len: r.u32()?,
            plain_len: r.u32()?,
            kind: ObjectKind::from_u8(r.u8()?)?,
            codec: Codec::from_u8(r.u8()?)?,
        };
        r.u16()?;
        let stop = u64::from(e.offset) + u64::from(e.stored_len);
        if (e.offset as usize) < HEADER_BYTES || stop > end || e.plain_len as usize > OBJECT_BYTES_MAX {
            return Err(r.bad(format!("row {} points outside the pack", entries.len())));
        }
        entries.push(e);
    }
    Ok(PackIndex { domain, entries })
}

/// Decodes the index of a whole pack held in memory.
pub fn decode_index(file: &[u8]) -> Result<PackIndex, DecodeError> {
    if file.len() < HEADER_BYTES + TRAILER_BYTES {
        return Err(DecodeError::Truncated { what: WHAT, at: 0, need: HEADER_BYTES + TRAILER_BYTES, have: file.len() });
    }
    let domain = decode_header(&file[..HEADER_BYTES])?;
    let trailer = &file[file.len() - TRAILER_BYTES..];
    let (at, len) = decode_trailer(trailer, file.len() as u64)?;
    let at = at as usize;
    decode_table(domain, &file[at..at + len], trailer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample() -> (Vec<u8>, PackId, PackIndex, DomainKey) {
        let key = DomainKey::new(1, [4; 32]);
        let (mut b, mut file) = PackBuilder::start(1);
        for i in 0..5u8 {
            let plain = vec![i + 1; 500 + usize::from(i)];
            let id = key.name(ObjectKind::Data, &plain);
            file.extend(b.add(&key, ObjectKind::Data, id, &plain, [i; 24]));
        }
        let (tail, id, index) = b.finish();
        file.extend(tail);
        (file, id, index, key)
    }

    #[test]
    fn a_pack_reads_back_and_is_named_by_its_bytes() {
        let (file, id, index, key) = sample();
        assert_eq!(*blake3::hash(&file).as_bytes(), id.0);
        assert_eq!(decode_index(&file), Ok(index.clone()));
        let e = index.entries[3];
        let stored = &file[e.offset as usize..(e.offset + e.stored_len) as usize];
        assert_eq!(e.open(&key, stored), Ok(vec![4; 503]));
    }

    #[test]
    fn every_truncation_is_refused() {
        let (file, ..) = sample();
        for n in 0..file.len() {
            assert!(decode_index(&file[..n]).is_err(), "{n} of {} bytes", file.len());
        }
    }

    #[test]
    fn golden_bytes_of_version_1() {
        let (b, header) = PackBuilder::start(7);
        assert_eq!(hex::encode(&header), "4b535041434b0d0a010000000700000000000000000000000000000000000000");
        let (tail, id, _) = b.finish();
        assert_eq!(
            hex::encode(&tail),
            "000000002000000000000000af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f32624b53504b454e440a"
        );
        assert_eq!(id.to_hex().len(), 64);
    }

    proptest! {
        #[test]
        fn hostile_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) { let _ = decode_index(&bytes); }
        #[test]
        fn a_changed_table_or_trailer_is_refused(at in any::<usize>(), bit in 0u8..8) {
            let (mut file, _, index, _) = sample();
            let table_at = file.len() - TRAILER_BYTES - index.entries.len() * ROW_BYTES;
            let n = file.len() - table_at;
            file[table_at + at % n] ^= 1 << bit;
            prop_assert!(decode_index(&file).is_err());
        }
    }
}
