//! The restore plan: where each object of a manifest's closure lies, in the packs that the receiver was handed.
//!
//! The node writes it into a memfd for `ks-vmm`; rows are sorted by id. Nothing in it is trusted: an object counts
//! only once its bytes hash to its id.

use crate::bytes::{DecodeError, Reader, Writer};
use crate::chunk::{Codec, OBJECT_BYTES_MAX, ObjectKind};
use crate::ids::ChunkId;
use crate::pack::PackEntry;

const MAGIC: &[u8; 8] = b"KSPLAN1\n";
const ROW: usize = 56;
const WHAT: &str = "restore plan";

/// One object and its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanRow {
    /// The object's row in its pack.
    pub entry: PackEntry,
    /// Index of the pack among the files handed over, in order.
    pub pack: u32,
    /// Key domain of that pack.
    pub domain: u32,
}

/// All rows, sorted by id, each id once.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    rows: Vec<PlanRow>,
}

impl Plan {
    /// Sorts and removes repeated ids.
    pub fn new(mut rows: Vec<PlanRow>) -> Self {
        rows.sort_by_key(|r| r.entry.id);
        rows.dedup_by_key(|r| r.entry.id);
        Self { rows }
    }
    /// Where `id` lies, if the plan has it.
    pub fn find(&self, id: &ChunkId) -> Option<&PlanRow> {
        self.rows.binary_search_by_key(id, |r| r.entry.id).ok().map(|i| &self.rows[i])
    }
    /// All rows in id order.
    pub fn rows(&self) -> &[PlanRow] {
        &self.rows
    }
    /// Bytes for the memfd.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        w.raw(MAGIC).count(self.rows.len());
        for r in &self.rows {
            let e = &r.entry;
            w.raw(&e.id.0)
                .u32(r.pack)
                .u32(e.offset)
                .u32(e.stored_len)
                .u32(e.plain_len)
                .u32(r.domain)
                .u8(e.kind as u8)
                .u8(e.codec as u8)
                .u16(0);
        }
        w.finish()
    }
    /// Decodes and checks order and ranges.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(WHAT, bytes);
        r.magic(MAGIC)?;
        let n = r.count(ROW)?;
        let mut rows: Vec<PlanRow> = Vec::with_capacity(n);
        for _ in 0..n {
            let (id, pack, offset, stored_len, plain_len, domain) =
                (ChunkId(r.array()?), r.u32()?, r.u32()?, r.u32()?, r.u32()?, r.u32()?);
            let (kind, codec) = (ObjectKind::from_u8(r.u8()?)?, Codec::from_u8(r.u8()?)?);
            r.u16()?;
            if plain_len as usize > OBJECT_BYTES_MAX || rows.last().is_some_and(|p| p.entry.id >= id) {
                return Err(r.bad("rows out of order or too large"));
            }
            rows.push(PlanRow { entry: PackEntry { id, offset, stored_len, plain_len, kind, codec }, pack, domain });
        }
        r.end()?;
        Ok(Self { rows })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_round_trip_sorted_and_refuse_truncation() {
        let row = |b: u8| PlanRow {
            entry: PackEntry {
                id: ChunkId([b; 32]),
                offset: 32,
                stored_len: 9,
                plain_len: 5,
                kind: ObjectKind::Data,
                codec: Codec::Raw,
            },
            pack: u32::from(b),
            domain: 1,
        };
        let plan = Plan::new(vec![row(3), row(1), row(3), row(2)]);
        assert_eq!(plan.rows().len(), 3);
        assert_eq!(plan.find(&ChunkId([2; 32])).map(|r| r.pack), Some(2));
        assert_eq!(plan.find(&ChunkId([4; 32])), None);
        let bytes = plan.encode();
        assert_eq!(bytes.len(), 12 + 3 * ROW);
        assert_eq!(Plan::decode(&bytes), Ok(plan));
        for n in 0..bytes.len() {
            assert!(Plan::decode(&bytes[..n]).is_err());
        }
    }
}
