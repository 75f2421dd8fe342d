//! Getting back what is damaged or missing, many objects at a time: rot seldom comes alone, and a pack per object would leave a store
//! of crumbs.
//!
//! ```text
//!   a reader finds a damaged object ──► its pack, whole, from a peer ──not there──► all that is damaged in it, in packs of our own
//!   a manifest needs what has no place here ──► all of that, in packs of our own
//! ```
//! What peers give is verified before it is stored. What they do not have is left as it is.

use crate::closure::Need;
use crate::error::{At, ObjectFault, StoreError};
use crate::index::PackNo;
use crate::keys::KeyRing;
use crate::peers::FetchedObject;
use crate::store::Store;
use crate::upload::Upload;
use ks_proto::ids::ChunkId;
use std::sync::{Arc, PoisonError};

/// Objects that are fetched before they are stored: 16 MiB of chunks.
pub(crate) const MEND_AT_ONCE: usize = 256;

/// A pack that could not be mended is tried again after this long, milliseconds.
const AGAIN_MS: u64 = 30_000;

fn opens(id: &ChunkId, o: &FetchedObject, keys: &KeyRing) -> bool {
    keys.get(o.domain).is_some_and(|key| key.open(o.kind, o.codec, id, o.plain_len as usize, &o.stored).is_ok())
}

impl Store {
    /// Asks peers for a damaged pack, then for what is damaged in it and lies nowhere else. Returns what is here again.
    pub(crate) fn mend(self: &Arc<Self>, no: PackNo, faults: &[ObjectFault], keys: &KeyRing) -> Vec<ChunkId> {
        if self.refetch_pack(no) {
            return faults.iter().map(|f| f.chunk).collect();
        }
        let placed = |id: &ChunkId| self.state().index.places(id).next().is_some();
        let (mut here, missing): (Vec<ChunkId>, Vec<ChunkId>) = faults.iter().map(|f| f.chunk).partition(placed);
        here.extend(self.fetch_and_store(&missing, keys));
        here
    }

    /// One object of a pack was found damaged: mends the pack. One caller works, others that come meanwhile wait for it; what could
    /// not be had is not asked for again within [`AGAIN_MS`].
    ///
    /// # Errors
    /// If this machine cannot read at all.
    pub(crate) fn mend_around(self: &Arc<Self>, id: &ChunkId, keys: &KeyRing) -> Result<(), StoreError> {
        let Some(no) = self.state().index.bad_place(id).map(|p| p.pack) else { return Ok(()) };
        let lock = self.mending.lock().unwrap_or_else(PoisonError::into_inner).entry(no).or_default().clone();
        let mut tried_ms = lock.lock().unwrap_or_else(PoisonError::into_inner);
        let now_ms = self.disk.now_ms();
        let recently = tried_ms.is_some_and(|t| now_ms < t.saturating_add(AGAIN_MS));
        // Whoever had the lock before may have mended it.
        if recently || self.state().index.places(id).next().is_some() {
            return Ok(());
        }
        *tried_ms = Some(now_ms);
        let faults = self.faults_in(no, keys)?;
        self.mend(no, &faults, keys);
        let mut all = self.mending.lock().unwrap_or_else(PoisonError::into_inner);
        let s = self.state();
        all.retain(|no, _| s.index.pack(*no).is_some());
        Ok(())
    }

    /// Fetches what of `needs` has no place here. Ends at the first lot of which no peer has anything.
    pub(crate) fn fill(self: &Arc<Self>, needs: &[Need], keys: &KeyRing) {
        let missing: Vec<ChunkId> = {
            let s = self.state();
            let absent = |n: &&Need| s.index.find(&n.0, n.1, |d| keys.get(d).is_some()).is_none();
            needs.iter().filter(absent).map(|n| n.0).collect()
        };
        self.fetch_and_store(&missing, keys);
    }

    fn fetch_and_store(self: &Arc<Self>, ids: &[ChunkId], keys: &KeyRing) -> Vec<ChunkId> {
        let peers = self.peers();
        let mut here = Vec::new();
        for some in ids.chunks(MEND_AT_ONCE) {
            let got = peers.fetch_objects(some);
            if got.is_empty() {
                break;
            }
            // One bad object of a lot must not keep the good ones away.
            let good: Vec<_> = got.into_iter().filter(|(id, o)| opens(id, o, keys)).collect();
            if !good.is_empty() && self.store_objects(&good, keys, None).is_ok() {
                here.extend(good.iter().map(|o| o.0));
            }
        }
        here
    }

    /// Puts a peer's copy of a pack in the place of ours, verified. False if no peer has it or the disk refuses.
    pub(crate) fn refetch_pack(self: &Arc<Self>, no: PackNo) -> bool {
        let Some((id, domain)) = self.state().index.pack(no).map(|p| (p.id, p.domain)) else { return false };
        let Some(bytes) = self.peers().fetch_pack(&id) else { return false };
        let upload = Upload::internal(self, domain);
        let put = (|| {
            let file = upload.new_pack()?;
            let incoming = self.root.join("incoming");
            self.disk.append(&file, 0, &bytes).at("write a pack in", &incoming)?;
            upload.pack_done(id, bytes.len() as u64)
        })();
        if put.is_ok() {
            upload.keep();
        }
        put.is_ok()
    }
}
