//! Which packs to fetch whole, and which objects to fetch out of packs that are mostly of no use here. Pure.

use ks_blobs::PackPlace;
use ks_proto::ids::{ChunkId, PackId};
use ks_proto::pack::PackEntry;
use std::collections::{BTreeMap, BTreeSet};

/// Packs of which at least this share is needed are fetched whole, in percent: then both nodes hold the same file, and one
/// can mend the other's.
pub const WHOLE_FROM_PERCENT: u64 = 50;
/// Packs up to this size are fetched whole in any case: finding their objects one by one costs as much.
pub const WHOLE_BELOW_BYTES: u64 = 256 * 1024;
/// Sealed bytes of objects that are fetched together out of one pack.
pub const OBJECTS_BYTES_MAX: u64 = 8 << 20;

/// One thing to fetch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Job {
    /// A pack as it is.
    Whole { pack: PackId, bytes: u64 },
    /// Objects out of a pack, in the order in which they lie there.
    Objects { pack: PackId, bytes: u64, domain: u32, rows: Vec<PackEntry> },
}

impl Job {
    /// The pack.
    pub fn pack(&self) -> PackId {
        match self {
            Self::Whole { pack, .. } | Self::Objects { pack, .. } => *pack,
        }
    }
    /// Bytes to fetch.
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Whole { bytes, .. } => *bytes,
            Self::Objects { rows, .. } => rows.iter().map(|e| u64::from(e.stored_len)).sum(),
        }
    }
}

/// From where one holder says that the missing objects lie: what to fetch from it, and what it does not have. With `alone`
/// only objects are fetched, whatever packs they lie in.
pub fn plan(missing: &[ChunkId], found: &[Vec<PackPlace>], alone: bool) -> (Vec<Job>, Vec<ChunkId>) {
    let mut packs: BTreeMap<PackId, (u64, u32, Vec<PackEntry>)> = BTreeMap::new();
    let mut absent = Vec::new();
    for (id, places) in missing.iter().zip(found) {
        // A pack that is fetched anyway serves it for nothing.
        let chosen = places.iter().find(|p| packs.contains_key(&p.pack)).or_else(|| places.first());
        match chosen {
            Some(p) => packs.entry(p.pack).or_insert_with(|| (p.pack_bytes, p.domain, Vec::new())).2.push(p.entry),
            None => absent.push(*id),
        }
    }
    absent.extend(missing.iter().skip(found.len()));
    let mut jobs = Vec::new();
    for (pack, (bytes, domain, mut rows)) in packs {
        let needed: u64 = rows.iter().map(|e| u64::from(e.stored_len)).sum();
        if !alone && (bytes <= WHOLE_BELOW_BYTES || needed * 100 >= bytes * WHOLE_FROM_PERCENT) {
            jobs.push(Job::Whole { pack, bytes });
            continue;
        }
        rows.sort_unstable_by_key(|e| e.offset);
        let mut part: Vec<PackEntry> = Vec::new();
        let mut size = 0;
        for e in rows {
            if size + u64::from(e.stored_len) > OBJECTS_BYTES_MAX && !part.is_empty() {
                jobs.push(Job::Objects { pack, bytes, domain, rows: std::mem::take(&mut part) });
                size = 0;
            }
            size += u64::from(e.stored_len);
            part.push(e);
        }
        jobs.push(Job::Objects { pack, bytes, domain, rows: part });
    }
    (jobs, absent)
}

/// The verified groups (16 KiB) of a pack that cover these rows, as ranges of bytes, merged, in order.
pub fn groups(rows: &[PackEntry], pack_bytes: u64) -> Vec<(u64, u64)> {
    const GROUP: u64 = 16 * 1024;
    let mut spans: BTreeSet<(u64, u64)> = BTreeSet::new();
    for e in rows {
        let (start, end) = (u64::from(e.offset), u64::from(e.offset) + u64::from(e.stored_len));
        spans.insert((start / GROUP * GROUP, end.div_ceil(GROUP).saturating_mul(GROUP).min(pack_bytes)));
    }
    let mut out: Vec<(u64, u64)> = Vec::new();
    for (start, end) in spans {
        match out.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => out.push((start, end)),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use ks_proto::chunk::{Codec, ObjectKind};

    fn place(pack: u8, bytes: u64, object: u8, offset: u32, len: u32) -> PackPlace {
        let id = ChunkId([object; 32]);
        let entry = PackEntry { id, offset, stored_len: len, plain_len: len, kind: ObjectKind::Data, codec: Codec::Raw };
        PackPlace { pack: PackId([pack; 32]), pack_bytes: bytes, domain: 1, entry }
    }
    fn id(b: u8) -> ChunkId {
        ChunkId([b; 32])
    }

    #[test]
    fn packs_that_are_mostly_needed_or_small_come_whole_and_others_in_parts() {
        let mib = 1 << 20;
        let found = vec![
            vec![place(1, mib, 1, 32, 600 * 1024)],
            vec![place(2, 10 * mib, 2, 40_000, 60_000)],
            vec![],
            vec![place(3, 100_000, 4, 32, 10)],
            // Either pack would do: the one that comes anyway is taken.
            vec![place(9, 10 * mib, 5, 32, 10), place(1, mib, 5, 700_000, 10)],
            vec![place(2, 10 * mib, 6, 32, 100)],
        ];
        let missing: Vec<ChunkId> = (1..=7).map(id).collect();
        let (jobs, absent) = plan(&missing, &found, false);
        assert_eq!(absent, [id(3), id(7)], "one that it says it lacks, one that it did not answer for");
        let rows = vec![place(2, 0, 6, 32, 100).entry, place(2, 0, 2, 40_000, 60_000).entry];
        assert_eq!(
            jobs,
            [
                Job::Whole { pack: PackId([1; 32]), bytes: mib },
                Job::Objects { pack: PackId([2; 32]), bytes: 10 * mib, domain: 1, rows: rows.clone() },
                Job::Whole { pack: PackId([3; 32]), bytes: 100_000 },
            ]
        );
        assert_eq!(jobs[1].bytes(), 60_100);
        assert_eq!(groups(&rows, 10 * mib), [(0, 16_384), (32_768, 114_688)]);
        assert_eq!(groups(&rows, 100_001), [(0, 16_384), (32_768, 100_001)]);
    }

    #[test]
    fn objects_out_of_one_pack_come_in_bounded_parts() {
        let found: Vec<_> = (0..200u8).map(|i| vec![place(1, 32 << 20, i, 32 + u32::from(i) * 65_000, 65_000)]).collect();
        let missing: Vec<ChunkId> = (0..200).map(id).collect();
        let (jobs, absent) = plan(&missing, &found, true);
        assert!(absent.is_empty() && jobs.len() == 2, "{} jobs", jobs.len());
        assert!(jobs.iter().all(|j| j.bytes() <= OBJECTS_BYTES_MAX));
    }
}
