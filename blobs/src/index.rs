//! The in-memory index: which packs are here and where each object lies. Pure; rebuilt from pack tables at open.
//!
//! An object may lie in several packs. A place that was read and found damaged is not offered again.

use ks_proto::chunk::ObjectKind;
use ks_proto::ids::{ChunkId, PackId};
use ks_proto::pack::{PackEntry, PackIndex};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Number of a pack within this process; never reused.
pub type PackNo = u32;

/// A row of a pack's table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// The pack.
    pub pack: PackNo,
    /// The row.
    pub row: u32,
}

/// One pack.
#[derive(Debug, Clone)]
pub struct PackInfo {
    /// Its name.
    pub id: PackId,
    /// Key domain of its objects.
    pub domain: u32,
    /// File length.
    pub bytes: u64,
    /// When it came here, Unix milliseconds.
    pub since_ms: u64,
    /// The upload that brought it, until some commit or another upload relies on it.
    pub unclaimed_by: Option<u64>,
    /// Its table.
    pub rows: Vec<PackEntry>,
}

/// All packs and objects.
#[derive(Debug, Default)]
pub struct Index {
    packs: BTreeMap<PackNo, PackInfo>,
    by_id: BTreeMap<PackId, PackNo>,
    next: PackNo,
    // A hash map: tens of millions of entries, only ever looked up, never iterated in its own order.
    objects: HashMap<ChunkId, Place>,
    // Invariant: further places of ids in `objects`; no empty lists.
    more: HashMap<ChunkId, Vec<Place>>,
    bad: BTreeSet<Place>,
}

impl Index {
    /// Adds a pack; one that is here already stays as it is.
    pub fn add(&mut self, id: PackId, bytes: u64, since_ms: u64, unclaimed_by: Option<u64>, index: PackIndex) -> PackNo {
        if let Some(no) = self.by_id.get(&id) {
            return *no;
        }
        let no = self.next;
        self.next = no.checked_add(1).expect("fewer than 2^32 packs come and go in one process's life");
        for (row, e) in index.entries.iter().enumerate() {
            let place = Place { pack: no, row: u32::try_from(row).expect("a pack of 32 MiB has fewer than 2^20 rows") };
            if e.id.is_zero() {
                continue; // never stored, so a row that claims it is nobody's
            }
            match self.objects.entry(e.id) {
                std::collections::hash_map::Entry::Vacant(v) => {
                    v.insert(place);
                }
                std::collections::hash_map::Entry::Occupied(_) => self.more.entry(e.id).or_default().push(place),
            }
        }
        self.by_id.insert(id, no);
        self.packs.insert(no, PackInfo { id, domain: index.domain, bytes, since_ms, unclaimed_by, rows: index.entries });
        no
    }

    /// Forgets a pack and its places.
    pub fn remove(&mut self, no: PackNo) -> Option<PackInfo> {
        let info = self.packs.remove(&no)?;
        self.by_id.remove(&info.id);
        for (row, e) in info.rows.iter().enumerate() {
            self.drop_place(&e.id, Place { pack: no, row: u32::try_from(row).unwrap_or(u32::MAX) });
        }
        let keep = self.bad.split_off(&Place { pack: no, row: 0 });
        self.bad.extend(keep.into_iter().filter(|p| p.pack != no));
        Some(info)
    }

    fn drop_place(&mut self, id: &ChunkId, place: Place) {
        if let Some(list) = self.more.get_mut(id) {
            list.retain(|p| *p != place);
            if self.objects.get(id) == Some(&place) && !list.is_empty() {
                self.objects.insert(*id, list.remove(0));
            }
            if list.is_empty() {
                self.more.remove(id);
            }
        }
        if self.objects.get(id) == Some(&place) {
            self.objects.remove(id);
        }
    }

    /// Takes a damaged place out of service. Its pack's file stays.
    pub fn mark_bad(&mut self, place: Place) {
        if let Some(id) = self.row(place).map(|e| e.id) {
            self.drop_place(&id, place);
            self.bad.insert(place);
        }
    }

    /// The row at a place.
    pub fn row(&self, place: Place) -> Option<&PackEntry> {
        self.packs.get(&place.pack)?.rows.get(place.row as usize)
    }
    /// The first place of `id` whose row is of `kind` and whose pack is of a domain that `ours` accepts.
    pub fn find(&self, id: &ChunkId, kind: ObjectKind, ours: impl Fn(u32) -> bool) -> Option<(Place, &PackEntry)> {
        self.places(id).find_map(|p| {
            let pack = self.packs.get(&p.pack).filter(|i| ours(i.domain))?;
            pack.rows.get(p.row as usize).filter(|e| e.kind == kind).map(|e| (p, e))
        })
    }
    /// All places of `id`.
    pub fn places(&self, id: &ChunkId) -> impl Iterator<Item = Place> + '_ {
        self.objects.get(id).into_iter().chain(self.more.get(id).into_iter().flatten()).copied()
    }
    /// A place of `id` that was found damaged, to name it.
    pub fn bad_place(&self, id: &ChunkId) -> Option<Place> {
        self.bad.iter().copied().find(|p| self.row(*p).is_some_and(|e| e.id == *id))
    }
    /// Names of the objects whose place in this pack is damaged.
    pub fn bad_of(&self, no: PackNo) -> impl Iterator<Item = ChunkId> + '_ {
        let range = Place { pack: no, row: 0 }..=Place { pack: no, row: u32::MAX };
        self.bad.range(range).filter_map(|p| self.row(*p)).map(|e| e.id)
    }
    /// The pack with this number.
    pub fn pack(&self, no: PackNo) -> Option<&PackInfo> {
        self.packs.get(&no)
    }
    /// The number of the pack of this name.
    pub fn number(&self, id: &PackId) -> Option<PackNo> {
        self.by_id.get(id).copied()
    }
    /// All packs by number.
    pub fn packs(&self) -> impl Iterator<Item = (PackNo, &PackInfo)> {
        self.packs.iter().map(|(n, p)| (*n, p))
    }
    /// The first pack whose name is above `after`, for walking all packs across restarts.
    pub fn pack_after(&self, after: Option<PackId>) -> Option<(PackId, PackNo)> {
        use std::ops::Bound::{Excluded, Unbounded};
        let from = after.map_or(Unbounded, Excluded);
        self.by_id.range((from, Unbounded)).next().map(|(i, n)| (*i, *n))
    }
    /// Somebody relies on this pack: an abort of the upload that brought it leaves it.
    pub fn claim(&mut self, no: PackNo, except: Option<u64>) {
        if let Some(p) = self.packs.get_mut(&no)
            && (except.is_none() || p.unclaimed_by != except)
        {
            p.unclaimed_by = None;
        }
    }
    /// Packs that only upload `from` brought are from now on those that only `to` brought.
    pub fn hand_over(&mut self, from: u64, to: u64) {
        for p in self.packs.values_mut().filter(|p| p.unclaimed_by == Some(from)) {
            p.unclaimed_by = Some(to);
        }
    }
    /// Numbers of packs that only `upload` brought and nobody relies on.
    pub fn unclaimed(&self, upload: u64) -> Vec<PackNo> {
        self.packs.iter().filter(|(_, p)| p.unclaimed_by == Some(upload)).map(|(n, _)| *n).collect()
    }
    /// Distinct objects.
    pub fn objects(&self) -> usize {
        self.objects.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ks_proto::chunk::Codec;

    fn pack(ids: &[u8]) -> PackIndex {
        let entry = |b: &u8| PackEntry {
            id: ChunkId([*b; 32]),
            offset: 32,
            stored_len: 50,
            plain_len: 10,
            kind: ObjectKind::Data,
            codec: Codec::Raw,
        };
        PackIndex { domain: 1, entries: ids.iter().map(entry).collect() }
    }
    fn at(ix: &Index, b: u8) -> Vec<(u32, u32)> {
        ix.places(&ChunkId([b; 32])).map(|p| (p.pack, p.row)).collect()
    }

    #[test]
    fn objects_move_to_another_place_when_one_goes() {
        let mut ix = Index::default();
        ix.add(PackId([1; 32]), 100, 0, None, pack(&[5, 6]));
        ix.add(PackId([2; 32]), 100, 0, None, pack(&[6, 7, 0]));
        ix.add(PackId([3; 32]), 100, 0, None, pack(&[6]));
        assert_eq!(ix.add(PackId([2; 32]), 100, 0, None, pack(&[9])), 1, "a known pack is not read twice");
        assert_eq!(at(&ix, 6), [(0, 1), (1, 0), (2, 0)]);
        assert_eq!(at(&ix, 0), [], "the zero chunk is never stored");
        ix.mark_bad(Place { pack: 0, row: 1 });
        assert_eq!(at(&ix, 6), [(1, 0), (2, 0)]);
        assert_eq!((ix.bad_of(0).count(), ix.bad_of(1).count()), (1, 0));
        ix.remove(1);
        assert_eq!(at(&ix, 6), [(2, 0)]);
        assert_eq!(at(&ix, 7), []);
        ix.remove(2);
        assert_eq!(at(&ix, 6), []);
        assert_eq!(ix.bad_place(&ChunkId([6; 32])), Some(Place { pack: 0, row: 1 }));
        ix.remove(0);
        assert_eq!((ix.objects(), ix.bad_place(&ChunkId([6; 32]))), (0, None));
    }

    #[test]
    fn an_unclaimed_pack_is_claimed_by_others_only() {
        let mut ix = Index::default();
        let no = ix.add(PackId([1; 32]), 100, 0, Some(7), pack(&[5]));
        ix.claim(no, Some(7));
        assert_eq!(ix.unclaimed(7), [no]);
        ix.claim(no, Some(8));
        assert!(ix.unclaimed(7).is_empty());
    }
}
