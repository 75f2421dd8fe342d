//! An upload: packs come in, then one manifest makes them a checkpoint. Whole or absent.
//!
//! ```text
//!   new_pack ──> incoming/ ──pack_done: verify, fsync──> packs/ (unclaimed) ──commit: closure, fsync──> checkpoint
//!                   └── abort, drop or a failed commit: removed, unless somebody else relies on it by now
//! ```

use crate::error::{At, StoreError};
use crate::keys::KeyRing;
use crate::load::read_all;
use crate::pins::PinKey;
use crate::store::{Pins, Store};
use ks_proto::chunk::{Codec, ObjectKind};
use ks_proto::ids::{CheckpointId, ChunkId, PackId};
use ks_proto::manifest::Manifest;
use ks_proto::pack::{self, PACK_BYTES_MAX, PackBuilder};
use std::fs::File;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

/// Packs of one upload that are being written at the same time.
pub const OPEN_PACKS_MAX: usize = 8;

/// What an upload may do, and what it builds upon.
#[derive(Debug, Clone, Default)]
pub struct UploadScope {
    /// Keys of all domains that the checkpoint may refer to.
    pub keys: KeyRing,
    /// The domain of its own packs.
    pub write_domain: u32,
    /// Checkpoints (or images) whose objects the writer may refer to without asking: its parent, its image's disk.
    pub bases: Vec<CheckpointId>,
}

struct Slot {
    path: PathBuf,
    file: File,
}

/// One upload. After a commit or an abort it is empty again and may carry the next checkpoint. Dropping it aborts.
pub struct Upload {
    store: Arc<Store>,
    no: u64,
    keys: KeyRing,
    write_domain: u32,
    slots: Mutex<Vec<Slot>>,
}

impl std::fmt::Debug for Upload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Upload").field("no", &self.no).field("write_domain", &self.write_domain).finish_non_exhaustive()
    }
}

impl Store {
    /// Begins an upload. Until it ends, no collection removes what it was told is known, what it brought, or what its
    /// bases hold. A base that cannot be read is not pinned; the commit checks everything anyway.
    pub fn begin_upload(self: &Arc<Self>, scope: UploadScope) -> Upload {
        let upload = Upload::register(self, scope.keys, scope.write_domain);
        for base in &scope.bases {
            let needs = self.manifest(base).and_then(|m| self.closure(&m, &upload.keys));
            if let Ok(needs) = needs {
                self.state_mut().pin_base(upload.no, needs.iter().map(|n| n.0));
            }
        }
        upload
    }
}

impl Upload {
    pub(crate) fn store(&self) -> &Arc<Store> {
        &self.store
    }
    pub(crate) fn no(&self) -> u64 {
        self.no
    }
    pub(crate) fn register(store: &Arc<Store>, keys: KeyRing, write_domain: u32) -> Self {
        let no = {
            let mut s = store.state_mut();
            s.next_upload += 1;
            let no = s.next_upload;
            s.uploads.insert(no, Pins::default());
            no
        };
        Self { store: store.clone(), no, keys, write_domain, slots: Mutex::default() }
    }
    /// An upload of the store itself: repair and compaction.
    pub(crate) fn internal(store: &Arc<Store>, domain: u32) -> Self {
        Self::register(store, KeyRing::default(), domain)
    }
    fn slots(&self) -> std::sync::MutexGuard<'_, Vec<Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new, empty pack file, open for reading and writing.
    ///
    /// # Errors
    /// If too many are open, or the disk refuses.
    pub fn new_pack(&self) -> Result<File, StoreError> {
        let mut slots = self.slots();
        if slots.len() >= OPEN_PACKS_MAX {
            let why = format!("{OPEN_PACKS_MAX} packs of this upload are open; finish one first");
            return Err(StoreError::Refused { what: "new pack", why });
        }
        let n = {
            let mut s = self.store.state_mut();
            s.next_upload += 1;
            s.next_upload
        };
        let path = self.store.root.join("incoming").join(format!("{n}.pack"));
        let file = self.store.disk.create(&path).at("create", &path)?;
        let theirs = file.try_clone().at("duplicate", &path)?;
        slots.push(Slot { path, file });
        Ok(theirs)
    }

    /// A pack that [`Self::new_pack`] gave is written: its bytes are read back and checked against its name, synced, named,
    /// and indexed. Which of the open packs it is follows from its bytes.
    ///
    /// # Errors
    /// If no open pack has these bytes, its index is damaged, it is of another domain, or the disk refuses.
    pub fn pack_done(&self, id: PackId, bytes: u64) -> Result<(), StoreError> {
        let refused = |why: String| StoreError::Pack { id, why };
        if bytes > PACK_BYTES_MAX as u64 {
            return Err(refused(format!("{bytes} bytes, the most is {PACK_BYTES_MAX}")));
        }
        let (slot, content) = self.take_slot(&id, bytes)?;
        let done = (|| {
            let index = pack::decode_index(&content).map_err(|e| refused(e.to_string()))?;
            drop(content);
            if index.domain != self.write_domain {
                return Err(refused(format!(
                    "it is of domain {}, this upload writes domain {}",
                    index.domain, self.write_domain
                )));
            }
            self.store.disk.sync(&slot.file).at("sync", &slot.path)?;
            let _names = self.store.naming();
            self.store.publish(&slot.path, &self.store.pack_path(&id))?;
            let mut s = self.store.state_mut();
            let ids: Vec<ChunkId> = index.entries.iter().map(|e| e.id).collect();
            // A pack of this name may be here already: the copy that was just verified has replaced its file.
            let old = s.index.number(&id).and_then(|no| s.index.remove(no));
            let unclaimed_by = old.map_or(Some(self.no), |o| o.unclaimed_by);
            s.index.add(id, bytes, self.store.disk.now_ms(), unclaimed_by, index);
            s.pin(self.no, ids.iter().copied());
            Ok(())
        })();
        if done.is_err() {
            let _ = self.store.disk.unlink(&slot.path); // emptied at open too
        }
        done
    }

    fn take_slot(&self, id: &PackId, bytes: u64) -> Result<(Slot, Vec<u8>), StoreError> {
        let mut slots = self.slots();
        let mut seen = Vec::new();
        for i in 0..slots.len() {
            let len = self.store.disk.len(&slots[i].file).at("stat", &slots[i].path)?;
            seen.push(len);
            if len != bytes {
                continue;
            }
            let content = read_all(&*self.store.disk, &slots[i].file, &slots[i].path, PACK_BYTES_MAX as u64)?;
            if blake3::hash(&content).as_bytes() == &id.0 {
                return Ok((slots.remove(i), content));
            }
        }
        let why = format!("no open pack of this upload has these {bytes} bytes under that hash (open packs have {seen:?} bytes)");
        Err(StoreError::Pack { id: *id, why })
    }

    /// For each object: is it here, so that it need not be stored again? Those are pinned.
    pub fn known(&self, ids: &[ChunkId]) -> Vec<bool> {
        let mut s = self.store.state_mut();
        let mut out = Vec::with_capacity(ids.len());
        let mut packs = std::collections::BTreeSet::new();
        for id in ids {
            // A pack with one damaged object is no base for new checkpoints: the sender still has good bytes.
            let sound = |no| s.index.bad_of(no).next().is_none();
            let ours = |no| s.index.pack(no).is_some_and(|i| self.keys.get(i.domain).is_some());
            let place = s.index.places(id).find(|p| ours(p.pack) && sound(p.pack));
            packs.extend(place.map(|p| p.pack));
            out.push(id.is_zero() || place.is_some());
        }
        packs.iter().for_each(|no| s.index.claim(*no, Some(self.no)));
        let known = ids.iter().zip(&out).filter(|(id, k)| **k && !id.is_zero()).map(|(id, _)| *id);
        s.pin(self.no, known);
        out
    }

    /// Makes the checkpoint: the manifest's whole closure must be here. On return it is durable. Committing the same
    /// manifest again does no harm.
    ///
    /// # Errors
    /// If the manifest or its closure is not whole, or the disk refuses; then the checkpoint is absent and what was
    /// uploaded stays until [`Self::abort`], so that a retry need not send it again.
    pub fn commit(&self, manifest_bytes: &[u8]) -> Result<CheckpointId, StoreError> {
        self.commit_pinned(manifest_bytes, None)
    }

    /// As [`Self::commit`], pinned before the manifest gets its name.
    pub(crate) fn commit_pinned(&self, manifest_bytes: &[u8], pin: Option<&PinKey>) -> Result<CheckpointId, StoreError> {
        let m = Manifest::decode(manifest_bytes).map_err(|source| StoreError::Manifest { source })?;
        let id = Manifest::id_of(manifest_bytes);
        let (packs, needs) = self.store.check_and_pin(self.no, &id, &m, &self.keys)?;
        self.store.sync_packs(&packs)?;
        let named = match pin {
            Some(pin) => self.store.pin_checkpoint(&id, pin).and_then(|()| self.store.write_manifest(&id, manifest_bytes)),
            None => self.store.write_manifest(&id, manifest_bytes),
        };
        if let (Err(_), Some(pin)) = (&named, pin) {
            self.store.unpin_absent(&id, pin);
        }
        named?;
        let mut s = self.store.state_mut();
        packs.iter().for_each(|no| s.index.claim(*no, None));
        // The next checkpoint of this upload builds upon this one.
        if let Some(p) = s.uploads.get_mut(&self.no) {
            p.base = needs.iter().map(|n| n.0).collect();
        }
        drop(s);
        self.reset();
        Ok(id)
    }

    /// Drops what was uploaded since the last commit, except what others rely on by now.
    pub fn abort(&self) {
        self.reset();
    }

    /// Keeps what was uploaded, without a manifest (compaction, repair).
    pub(crate) fn keep(&self) {
        let mut s = self.store.state_mut();
        for no in s.index.unclaimed(self.no) {
            s.index.claim(no, None);
        }
    }

    fn reset(&self) {
        let mut gone: Vec<PathBuf> = self.slots().drain(..).map(|slot| slot.path).collect();
        let _names = self.store.naming();
        {
            let mut s = self.store.state_mut();
            for no in s.index.unclaimed(self.no) {
                gone.extend(s.index.remove(no).map(|p| self.store.pack_path(&p.id)));
            }
            if let Some(p) = s.uploads.get_mut(&self.no) {
                p.objects.clear();
            }
        }
        for path in gone {
            // What stays behind after an error is an unreferenced file, which the next open or collection removes.
            if self.store.disk.unlink(&path).is_ok()
                && let Some(dir) = path.parent()
            {
                self.store.names_changed(dir);
            }
        }
    }

    /// Writes packs of this upload's domain.
    pub(crate) fn writer(&self) -> PackWriter<'_> {
        PackWriter { upload: self, open: None, last: None }
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        self.reset();
        self.store.state_mut().uploads.remove(&self.no);
    }
}

/// Appends sealed objects to packs of one upload, beginning a new pack when one is full.
pub(crate) struct PackWriter<'a> {
    upload: &'a Upload,
    open: Option<(PackBuilder, File)>,
    last: Option<PackId>,
}

impl PackWriter<'_> {
    /// Adds one object.
    pub fn put(&mut self, kind: ObjectKind, codec: Codec, id: ChunkId, plain_len: u32, stored: &[u8]) -> Result<(), StoreError> {
        if self.open.as_ref().is_some_and(|(b, _)| b.is_full_for(stored.len())) {
            self.finish()?;
        }
        let incoming = self.upload.store.root.join("incoming");
        let disk = &self.upload.store.disk;
        let (builder, file) = match &mut self.open {
            Some(o) => o,
            None => {
                let file = self.upload.new_pack()?;
                let (builder, header) = PackBuilder::start(self.upload.write_domain);
                disk.append(&file, 0, &header).at("write a pack in", &incoming)?;
                self.open.insert((builder, file))
            }
        };
        let at = builder.len() as u64;
        disk.append(file, at, stored).at("write a pack in", &incoming)?;
        builder.add_sealed(kind, codec, id, plain_len, stored);
        Ok(())
    }

    /// Finishes the open pack, if any. Returns the last pack's name.
    pub fn finish(&mut self) -> Result<Option<PackId>, StoreError> {
        if let Some((builder, file)) = self.open.take() {
            let at = builder.len() as u64;
            let (tail, id, _) = builder.finish();
            let incoming = self.upload.store.root.join("incoming");
            self.upload.store.disk.append(&file, at, &tail).at("write a pack in", &incoming)?;
            self.upload.pack_done(id, at + tail.len() as u64)?;
            self.last = Some(id);
        }
        Ok(self.last)
    }
}
