//! The store of one node: its folder, what is in it, and the shared state behind uploads, reads and collection.
//!
//! ```text
//!   lock       held while open                packs/<hh>/<pack id>.pack
//!   format     "keepstate store 1\n"          manifests/<hh>/<checkpoint id>.manifest
//!   incoming/  unfinished, emptied at open    quarantine/  files that could not be read, kept for a person
//!   staging/   packs half received from peers pins/      names of checkpoints that wait for the fleet's decision
//! ```
//! Order of durability: a pack's bytes, its name, then the manifest's bytes, then its name. A collection removes in the
//! other order. So after a crash every manifest that is named has all that it refers to.

use crate::error::{At, StoreError};
use crate::host::{Disk, RealDisk};
use crate::index::{Index, PackNo};
use crate::load::{self, read_all};
use crate::peers::{NoPeers, PeerSource};
use crate::pins::PinKey;
use crate::segments::SegmentCache;
use ks_proto::ids::{CheckpointId, ChunkId, PackId};
use ks_proto::manifest::{MANIFEST_BYTES_MAX, Manifest};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// What errors call this node as a holder.
pub(crate) const THIS_NODE: &str = "this node";

/// A manifest's file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ManifestInfo {
    pub bytes: u64,
    pub since_ms: u64,
}

/// What an upload relies on while it is active.
#[derive(Debug, Default)]
pub(crate) struct Pins {
    /// Told known, brought, or checked since the last commit or abort.
    pub objects: HashSet<ChunkId>,
    /// What its bases, then its last commit, hold: relied on without asking, after an abort too.
    pub base: HashSet<ChunkId>,
}

/// Everything that changes, behind one lock; nobody does slow I/O while writing it.
#[derive(Default)]
pub(crate) struct State {
    pub index: Index,
    pub manifests: BTreeMap<CheckpointId, ManifestInfo>,
    pub uploads: BTreeMap<u64, Pins>,
    pub next_upload: u64,
    /// Objects that became needed while a collection is marking; None when none runs.
    pub touched: Option<HashSet<ChunkId>>,
    /// Manifests that were committed while a collection is marking.
    pub committed: BTreeSet<CheckpointId>,
    /// Checkpoints that wait for the fleet's decision: roots of a collection.
    pub pins: BTreeSet<(CheckpointId, PinKey)>,
    /// Decided since the last collection began: roots of the next one, whose caller may have listed its own before.
    pub decided: BTreeSet<CheckpointId>,
    /// Packs that are being received.
    pub staging: BTreeSet<PackId>,
    /// Those of them that are in memory too.
    pub kept_parts: usize,
    /// How durable the names in each folder are.
    pub dirs: BTreeMap<PathBuf, DirNames>,
}

/// Changes of a folder's names in this process: how many, and how many the last sync covered (None: never synced).
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct DirNames {
    changed: u64,
    synced: Option<u64>,
}

/// What is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StoreStats {
    /// Packs and manifests, indexes included.
    pub bytes: u64,
    /// Distinct objects.
    pub objects: u64,
    /// Packs.
    pub packs: u64,
    /// Manifests.
    pub manifests: u64,
    /// Uploads under way.
    pub uploads: u64,
}

/// The chunk store of one node. Shared by `Arc`; all methods block.
pub struct Store {
    pub(crate) root: PathBuf,
    pub(crate) disk: Arc<dyn Disk>,
    state: RwLock<State>,
    peers: RwLock<Arc<dyn PeerSource>>,
    pub(crate) segments: Mutex<SegmentCache>,
    pub(crate) collecting: Mutex<()>,
    /// Packs that are being mended, and when that was tried last: who finds another damaged object in one waits, and has it then.
    pub(crate) mending: Mutex<BTreeMap<PackNo, Arc<Mutex<Option<u64>>>>>,
    /// Held while a name of `packs/` or `manifests/` and its entry in `state` change together; taken before `state`.
    naming: Mutex<()>,
    warnings: Vec<String>,
    _lock: File,
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store").field("root", &self.root).finish_non_exhaustive()
    }
}

impl Store {
    /// Opens the store in `dir`, making it if needed. Unfinished uploads of an earlier run are removed; packs whose
    /// index cannot be read are moved to `quarantine/` and named by [`Self::warnings`].
    ///
    /// # Errors
    /// If another process has it open, the folder is of another version, or the disk refuses.
    pub fn open(dir: &Path) -> Result<Arc<Self>, StoreError> {
        Self::open_on(dir, Arc::new(RealDisk))
    }

    /// As [`Self::open`], on another disk.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_on(dir: &Path, disk: Arc<dyn Disk>) -> Result<Arc<Self>, StoreError> {
        if disk.make_dir(dir).at("create", dir)? {
            let parent = dir.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
            disk.sync_dir(parent).at("sync", parent)?;
        }
        let lock_path = dir.join("lock");
        let lock = disk.lock(&lock_path).map_err(|e| match e.kind() {
            std::io::ErrorKind::WouldBlock => StoreError::Locked { path: dir.to_owned() },
            _ => StoreError::io("lock", &lock_path, e),
        })?;
        for sub in ["packs", "manifests", "incoming", "quarantine", "staging", "pins"] {
            let path = dir.join(sub);
            disk.make_dir(&path).at("create", &path)?;
        }
        let incoming = dir.join("incoming");
        for f in disk.list(&incoming).at("list", &incoming)? {
            let path = incoming.join(&f.name);
            disk.unlink(&path).at("remove", &path)?;
        }
        let (state, warnings) = load::load(&*disk, dir)?;
        Ok(Arc::new(Self {
            root: dir.to_owned(),
            disk,
            state: RwLock::new(state),
            peers: RwLock::new(Arc::new(NoPeers)),
            segments: Mutex::new(SegmentCache::default()),
            collecting: Mutex::new(()),
            mending: Mutex::default(),
            naming: Mutex::new(()),
            warnings,
            _lock: lock,
        }))
    }

    /// What was found wrong while opening, one line each.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }
    /// The store's folder.
    pub fn root(&self) -> &Path {
        &self.root
    }
    /// Where objects and manifests come from when the copy here is damaged or gone.
    pub fn set_peers(&self, peers: Arc<dyn PeerSource>) {
        *self.peers.write().unwrap_or_else(PoisonError::into_inner) = peers;
        self.mending.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
    pub(crate) fn peers(&self) -> Arc<dyn PeerSource> {
        self.peers.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
    pub(crate) fn state(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }
    pub(crate) fn state_mut(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }
    pub(crate) fn naming(&self) -> MutexGuard<'_, ()> {
        self.naming.lock().unwrap_or_else(PoisonError::into_inner)
    }
    pub(crate) fn segment_cache(&self) -> MutexGuard<'_, SegmentCache> {
        self.segments.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is stored.
    pub fn stats(&self) -> StoreStats {
        let s = self.state();
        let packs: u64 = s.index.packs().map(|(_, p)| p.bytes).sum();
        let manifests: u64 = s.manifests.values().map(|m| m.bytes).sum();
        StoreStats {
            bytes: packs + manifests,
            objects: s.index.objects() as u64,
            packs: s.index.packs().count() as u64,
            manifests: s.manifests.len() as u64,
            uploads: s.uploads.len() as u64,
        }
    }
    /// All manifests here, by id.
    pub fn manifests(&self) -> Vec<CheckpointId> {
        self.state().manifests.keys().copied().collect()
    }
    /// True if the manifest is here.
    pub fn has_manifest(&self, id: &CheckpointId) -> bool {
        self.state().manifests.contains_key(id)
    }

    /// The manifest of `id`, its bytes checked against the id.
    ///
    /// # Errors
    /// If it is not here, or damaged and no peer has it.
    pub fn manifest(&self, id: &CheckpointId) -> Result<Manifest, StoreError> {
        Ok(self.manifest_bytes(id)?.1)
    }

    /// The manifest of `id`, with its bytes as stored.
    ///
    /// # Errors
    /// As [`Self::manifest`].
    pub fn manifest_bytes(&self, id: &CheckpointId) -> Result<(Vec<u8>, Manifest), StoreError> {
        match self.manifest_here(id) {
            Ok(ok) => Ok(ok),
            Err(local) => match self.peers().fetch_manifest(id) {
                Some(bytes) if bytes.len() <= MANIFEST_BYTES_MAX => {
                    let m = Manifest::decode_verified(id, &bytes).map_err(|source| StoreError::Manifest { source })?;
                    self.write_manifest(id, &bytes)?;
                    Ok((bytes, m))
                }
                _ => Err(local),
            },
        }
    }

    /// As [`Self::manifest_bytes`], without asking peers: what this node itself can give to others.
    ///
    /// # Errors
    /// If it is not here, or damaged.
    pub fn manifest_here(&self, id: &CheckpointId) -> Result<(Vec<u8>, Manifest), StoreError> {
        let path = self.manifest_path(id);
        let bytes = match self.disk.open(&path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Err(StoreError::NoManifest { id: *id, path }),
            other => other.at("open", &path).and_then(|f| read_all(&*self.disk, &f, &path, MANIFEST_BYTES_MAX as u64))?,
        };
        let m = Manifest::decode_verified(id, &bytes).map_err(|source| StoreError::Decode { path, source })?;
        Ok((bytes, m))
    }

    /// Stores a manifest's bytes durably under its name. The caller has made its closure durable.
    pub(crate) fn write_manifest(&self, id: &CheckpointId, bytes: &[u8]) -> Result<(), StoreError> {
        let to = self.manifest_path(id);
        let no = {
            let mut s = self.state_mut();
            s.next_upload += 1;
            s.next_upload
        };
        let tmp = self.root.join("incoming").join(format!("{no}.manifest"));
        let done = (|| {
            let file = self.disk.create(&tmp).at("create", &tmp)?;
            self.disk.append(&file, 0, bytes).at("write", &tmp)?;
            self.disk.sync(&file).at("sync", &tmp)?;
            let _names = self.naming();
            self.publish(&tmp, &to)?;
            let info = ManifestInfo { bytes: bytes.len() as u64, since_ms: self.disk.now_ms() };
            let mut s = self.state_mut();
            s.manifests.insert(*id, info);
            s.committed.insert(*id);
            Ok(())
        })();
        if done.is_err() {
            let _ = self.disk.unlink(&tmp); // it is emptied at open too
        }
        done
    }

    /// Renames a synced file to its final place and makes the name durable.
    pub(crate) fn publish(&self, from: &Path, to: &Path) -> Result<(), StoreError> {
        let dir = to.parent().expect("files of the store lie in its folders");
        self.ensure_dir(dir)?;
        self.disk.rename(from, to).at("rename", to)?;
        self.names_changed(dir);
        self.sync_dir(dir)
    }

    /// Renames a synced file to its final place. The name is not durable before [`Self::sync_packs`] or [`Self::sync_dir`].
    pub(crate) fn rename_into(&self, from: &Path, to: &Path) -> Result<(), StoreError> {
        let dir = to.parent().expect("files of the store lie in its folders");
        if self.disk.make_dir(dir).at("create", dir)? {
            self.names_changed(dir.parent().expect("folders of the store lie in its root"));
        }
        self.disk.rename(from, to).at("rename", to)?;
        self.names_changed(dir);
        Ok(())
    }

    fn ensure_dir(&self, dir: &Path) -> Result<(), StoreError> {
        let parent = dir.parent().expect("folders of the store lie in its root");
        if self.disk.make_dir(dir).at("create", dir)? {
            self.names_changed(parent);
        }
        self.sync_dir(&self.root)?;
        self.sync_dir(parent)
    }

    pub(crate) fn names_changed(&self, dir: &Path) {
        self.state_mut().dirs.entry(dir.to_owned()).or_default().changed += 1;
    }

    /// Makes the names in `dir` durable, unless this process did so since they last changed.
    pub(crate) fn sync_dir(&self, dir: &Path) -> Result<(), StoreError> {
        let names = self.state().dirs.get(dir).copied().unwrap_or_default();
        if names.synced == Some(names.changed) {
            return Ok(());
        }
        self.disk.sync_dir(dir).at("sync", dir)?;
        // Only what had changed before the sync is covered by it.
        let mut s = self.state_mut();
        let now = s.dirs.entry(dir.to_owned()).or_default();
        now.synced = now.synced.max(Some(names.changed));
        Ok(())
    }

    /// Makes durable the names of packs that a commit relies on; an earlier process may have died before its sync.
    pub(crate) fn sync_packs(&self, packs: &BTreeSet<PackNo>) -> Result<(), StoreError> {
        let dirs: BTreeSet<PathBuf> = {
            let s = self.state();
            packs
                .iter()
                .filter_map(|no| s.index.pack(*no))
                .filter_map(|p| self.pack_path(&p.id).parent().map(Path::to_owned))
                .collect()
        };
        for dir in &dirs {
            self.ensure_dir(dir)?;
            self.sync_dir(dir)?;
        }
        Ok(())
    }

    /// The file of a pack.
    pub fn pack_path(&self, id: &PackId) -> PathBuf {
        pack_path(&self.root, id)
    }
    /// The file of a manifest.
    pub fn manifest_path(&self, id: &CheckpointId) -> PathBuf {
        let hex = id.to_hex();
        self.root.join("manifests").join(&hex[..2]).join(format!("{hex}.manifest"))
    }
}

pub(crate) fn pack_path(root: &Path, id: &PackId) -> PathBuf {
    let hex = id.to_hex();
    root.join("packs").join(&hex[..2]).join(format!("{hex}.pack"))
}
