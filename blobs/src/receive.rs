//! Receiving a checkpoint from peers: which objects are missing, packs as they come in, and the commit that makes it durable.
//!
//! ```text
//!   missing ──> stage, write, adopt (packs/, pinned) ──> missing … none ──> commit: closure, fsync, pin, manifest ──> held
//! ```
//! While a reception lives, no collection removes what it found or brought. What it brought stays after a failure, so that
//! the next attempt need not fetch it again, unless it is aborted (a full disk).

use crate::error::{At, StoreError};
use crate::keys::KeyRing;
use crate::load::{read_all, read_pack_index};
use crate::pins::PinKey;
use crate::read::Here;
use crate::staging::Part;
use crate::store::Store;
use crate::upload::Upload;
use ks_proto::chunk::ObjectKind;
use ks_proto::ids::{CheckpointId, ChunkId, PackId};
use ks_proto::manifest::{Manifest, decode_segment};
use ks_proto::pack::{self, PACK_BYTES_MAX, PackIndex};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// One checkpoint on its way in. Dropping it leaves the packs that it brought to the next collection.
#[derive(Debug)]
pub struct Reception {
    upload: Upload,
    keys: KeyRing,
    /// Segments that were read ahead of the packs that hold them.
    peeked: Mutex<BTreeMap<ChunkId, Arc<Vec<ChunkId>>>>,
}

/// What is missing of a checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Missing {
    /// Objects that are not here, sorted.
    pub objects: Vec<ChunkId>,
    /// Those of them that are segments whose contents are not known: what they refer to is not among `objects`. To be told by
    /// [`Reception::peek`], so that it is known which packs are worth having whole.
    pub unread: Vec<ChunkId>,
}

impl Store {
    /// Begins to receive a checkpoint whose objects are sealed under `keys`.
    pub fn receive(self: &Arc<Self>, keys: KeyRing) -> Reception {
        Reception { upload: Upload::register(self, keys.clone(), 0), keys, peeked: Mutex::default() }
    }

    /// True if the manifest and its whole closure are here, going by the index; segments are read and verified. Peers are not
    /// asked.
    ///
    /// # Errors
    /// If this machine cannot read, or a key is missing.
    pub fn has_closure(self: &Arc<Self>, id: &CheckpointId, keys: &KeyRing) -> Result<bool, StoreError> {
        match self.manifest_here(id) {
            Ok((_, m)) => Ok(self.receive(keys.clone()).missing(&m)?.objects.is_empty()),
            Err(StoreError::NoManifest { .. } | StoreError::Decode { .. }) => Ok(false),
            Err(e) => Err(e),
        }
    }
}

impl Reception {
    fn store(&self) -> &Arc<Store> {
        self.upload.store()
    }

    /// What `m` needs and is not here; what is here is pinned. Asked again after each round.
    ///
    /// # Errors
    /// If this machine cannot read, or a key is missing.
    pub fn missing(&self, m: &Manifest) -> Result<Missing, StoreError> {
        let segments: BTreeSet<ChunkId> =
            m.memory.segments.iter().chain(&m.disk.segments).filter(|s| !s.is_zero()).copied().collect();
        let mut first: BTreeSet<(ChunkId, ObjectKind)> = m.state.iter().map(|id| (*id, ObjectKind::State)).collect();
        first.extend(segments.iter().map(|id| (*id, ObjectKind::Segment)));
        let mut missing: BTreeSet<ChunkId> = self.pin_known(&first).into_iter().collect();
        let (mut data, mut unread) = (BTreeSet::new(), Vec::new());
        for id in segments {
            let refs = match self.peeked().get(&id).cloned() {
                Some(refs) => Some(refs),
                None if missing.contains(&id) => None,
                None => self.segment_here(&id)?,
            };
            match refs {
                Some(refs) => data.extend(refs.iter().filter(|c| !c.is_zero()).map(|c| (*c, ObjectKind::Data))),
                None => {
                    missing.insert(id);
                    unread.push(id);
                }
            }
        }
        missing.extend(self.pin_known(&data));
        Ok(Missing { objects: missing.into_iter().collect(), unread })
    }

    fn peeked(&self) -> MutexGuard<'_, BTreeMap<ChunkId, Arc<Vec<ChunkId>>>> {
        self.peeked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads segments that came alone. Each must open under its name; nothing of them is stored.
    ///
    /// # Errors
    /// [`StoreError::Lost`] naming one that does not open; a missing key.
    pub fn peek(&self, objects: &[(ChunkId, crate::FetchedObject)]) -> Result<(), StoreError> {
        for (id, got) in objects {
            let lost = |why: String| StoreError::Lost { chunk: *id, pack: None, holder: "a peer".into(), why };
            let domain = got.domain;
            let key = self.keys.get(domain).ok_or_else(|| StoreError::NoKey { domain, what: format!("segment {id}") })?;
            let plain = key.open(ObjectKind::Segment, got.codec, id, got.plain_len as usize, &got.stored);
            let refs = plain.and_then(|plain| decode_segment(&plain)).map_err(|e| lost(e.to_string()))?;
            self.peeked().insert(*id, Arc::new(refs));
        }
        Ok(())
    }

    /// Pins those that are here under keys at hand, and returns the others.
    fn pin_known(&self, needs: &BTreeSet<(ChunkId, ObjectKind)>) -> Vec<ChunkId> {
        let store = self.store();
        let mut s = store.state_mut();
        let (mut missing, mut known, mut packs) = (Vec::new(), Vec::new(), BTreeSet::new());
        for (id, kind) in needs {
            match s.index.find(id, *kind, |d| self.keys.get(d).is_some()) {
                Some((place, _)) => {
                    known.push(*id);
                    packs.insert(place.pack);
                }
                None => missing.push(*id),
            }
        }
        packs.iter().for_each(|no| s.index.claim(*no, Some(self.upload.no())));
        s.pin(self.upload.no(), known.into_iter());
        missing
    }

    fn segment_here(&self, id: &ChunkId) -> Result<Option<Arc<Vec<ChunkId>>>, StoreError> {
        let store = self.store();
        if let Some(refs) = store.segment_cache().get(id) {
            return Ok(Some(refs));
        }
        let Here::Found(found) = store.obtain_here(id, Some(ObjectKind::Segment), &self.keys, None)? else { return Ok(None) };
        let path = store.pack_path(&found.pack);
        let refs = Arc::new(decode_segment(&found.plain).map_err(|source| StoreError::Decode { path, source })?);
        store.segment_cache().put(*id, refs.clone());
        Ok(Some(refs))
    }

    /// Begins, or goes on, to receive a pack.
    ///
    /// # Errors
    /// If no pack has that size, it is being received already, or the disk refuses.
    pub fn stage(&self, id: PackId, bytes: u64) -> Result<Part, StoreError> {
        self.store().stage(id, bytes)
    }

    /// True if this pack is here and none of it was found damaged; then it is kept for this reception.
    pub fn has_pack(&self, id: &PackId) -> bool {
        let mut s = self.store().state_mut();
        let Some(no) = s.index.number(id).filter(|no| s.index.bad_of(*no).next().is_none()) else { return false };
        s.index.claim(no, Some(self.upload.no()));
        let ids: Vec<ChunkId> = s.index.pack(no).map(|p| p.rows.iter().map(|e| e.id).collect()).unwrap_or_default();
        s.pin(self.upload.no(), ids.into_iter());
        true
    }

    /// A pack has arrived: it is synced, named and indexed. Each byte was checked against the pack's name as it came; those of
    /// an earlier attempt are checked here. With `open`, each object whose key is at hand is opened too: then a peer's table
    /// cannot promise what its pack does not hold. The pack's name is durable once the checkpoint is committed.
    ///
    /// False: what an earlier attempt had left of it was damaged; it is removed, and the pack is to be received anew.
    ///
    /// # Errors
    /// [`StoreError::Pack`] if the bytes are not what they should be: the part is removed. Any other is this machine's; then
    /// the part stays, but for a full disk.
    pub fn adopt(&self, part: Part, open: bool) -> Result<bool, StoreError> {
        let done = match self.check(&part, open) {
            Ok(Some(index)) => self.publish(&part, index),
            Ok(None) => {
                part.discard();
                return Ok(false);
            }
            Err(e) => Err(e),
        };
        match done {
            Ok(()) => Ok(true),
            Err(e @ (StoreError::Pack { .. } | StoreError::Decode { .. } | StoreError::DiskFull { .. })) => {
                let id = part.id();
                part.discard();
                match e {
                    StoreError::Decode { source, .. } => Err(StoreError::Pack { id, why: source.to_string() }),
                    e => Err(e),
                }
            }
            Err(e) => Err(e),
        }
    }

    /// The index of a part that is whole and right; None if what an earlier attempt left is not.
    fn check(&self, part: &Part, open: bool) -> Result<Option<PackIndex>, StoreError> {
        let disk = &*self.store().disk;
        let refused = |why: String| StoreError::Pack { id: part.id(), why };
        if part.at() != part.bytes() {
            return Err(refused(format!("{} of {} bytes arrived", part.at(), part.bytes())));
        }
        if !open && part.resumed() == 0 {
            return Ok(Some(read_pack_index(disk, part.file(), part.path())?.1));
        }
        let read;
        let whole = match part.whole() {
            Some(whole) => whole,
            None => {
                read = read_all(disk, part.file(), part.path(), PACK_BYTES_MAX as u64)?;
                &read
            }
        };
        if part.resumed() > 0 && blake3::hash(whole).as_bytes() != &part.id().0 {
            return Ok(None);
        }
        let index = pack::decode_index(whole).map_err(|e| refused(e.to_string()))?;
        if let Some(key) = self.keys.get(index.domain).filter(|_| open) {
            for e in &index.entries {
                let stored = &whole[e.offset as usize..(e.offset + e.stored_len) as usize];
                e.open(key, stored).map_err(|why| refused(format!("object {}: {why}", e.id.short())))?;
            }
        }
        Ok(Some(index))
    }

    fn publish(&self, part: &Part, index: PackIndex) -> Result<(), StoreError> {
        let (store, id) = (self.store(), part.id());
        store.disk.sync(part.file()).at("sync", part.path())?;
        let _names = store.naming();
        store.rename_into(part.path(), &store.pack_path(&id))?;
        let mut s = store.state_mut();
        let ids: Vec<ChunkId> = index.entries.iter().map(|e| e.id).collect();
        // A damaged pack of this name may have been here: the copy that was just verified has replaced its file.
        let old = s.index.number(&id).and_then(|no| s.index.remove(no));
        let unclaimed_by = old.map_or(Some(self.upload.no()), |o| o.unclaimed_by);
        s.index.add(id, part.bytes(), store.disk.now_ms(), unclaimed_by, index);
        s.pin(self.upload.no(), ids.into_iter());
        Ok(())
    }

    /// Stores objects that came alone, out of packs that are mostly of no use here, in packs of our own. Each must open.
    ///
    /// # Errors
    /// [`StoreError::Lost`] naming one that does not open; a missing key; the disk.
    pub fn adopt_objects(&self, objects: &[(ChunkId, crate::FetchedObject)]) -> Result<(), StoreError> {
        self.store().store_objects(objects, &self.keys, Some(&self.upload)).map(drop)
    }

    /// Makes the checkpoint durable here and pins it for `pin` until [`Store::decided`]. Only after this returned may
    /// anybody be told that this node holds it. Doing it again does no harm.
    ///
    /// # Errors
    /// [`StoreError::Missing`] if its closure is not whole; the disk. Then it is absent.
    pub fn commit(&self, manifest_bytes: &[u8], pin: &PinKey) -> Result<CheckpointId, StoreError> {
        self.upload.commit_pinned(manifest_bytes, Some(pin))
    }

    /// Removes the packs that this reception brought and nobody else relies on.
    pub fn abort(&self) {
        self.upload.abort();
    }
}

impl Drop for Reception {
    fn drop(&mut self) {
        self.upload.keep();
    }
}
