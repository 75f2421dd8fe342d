//! The store of one node: its folder, what is in it, and the shared state behind uploads, reads and collection.
//!
//! ```text
//!   lock       held while open                packs/<hh>/<pack id>.pack
//!   format     "keepstate store 1\n"          manifests/<hh>/<checkpoint id>.manifest
//!   incoming/  unfinished, emptied at open    quarantine/  files that could not be read, kept for a person
//! ```
//! Order of durability: a pack's bytes, its name, then the manifest's bytes, then its name. A collection removes in the
//! other order. So after a crash every manifest that is named has all that it refers to.

use crate::error::{At, StoreError};
use crate::host::{Disk, Found, RealDisk};
use crate::index::{Index, PackNo};
use crate::peers::{NoPeers, PeerSource};
use crate::segments::SegmentCache;
use ks_proto::bytes::DecodeError;
use ks_proto::ids::{CheckpointId, ChunkId, PackId};
use ks_proto::manifest::{MANIFEST_BYTES_MAX, Manifest};
use ks_proto::pack::{self, HEADER_BYTES, PACK_BYTES_MAX, PackIndex, TRAILER_BYTES};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

const FORMAT: &str = "keepstate store 1";
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
    pub objects: HashSet<ChunkId>,
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
        disk.make_dir(dir).at("create", dir)?;
        let lock_path = dir.join("lock");
        let lock = disk.lock(&lock_path).map_err(|e| match e.kind() {
            std::io::ErrorKind::WouldBlock => StoreError::Locked { path: dir.to_owned() },
            _ => StoreError::io("lock", &lock_path, e),
        })?;
        for sub in ["packs", "manifests", "incoming", "quarantine"] {
            let path = dir.join(sub);
            disk.make_dir(&path).at("create", &path)?;
        }
        let incoming = dir.join("incoming");
        for f in disk.list(&incoming).at("list", &incoming)? {
            let path = incoming.join(&f.name);
            disk.unlink(&path).at("remove", &path)?;
        }
        check_format(&*disk, dir)?;
        let mut loader = Loader { disk: &*disk, root: dir, state: State::default(), warnings: Vec::new() };
        loader.packs()?;
        loader.manifests()?;
        let Loader { state, warnings, .. } = loader;
        Ok(Arc::new(Self {
            root: dir.to_owned(),
            disk,
            state: RwLock::new(state),
            peers: RwLock::new(Arc::new(NoPeers)),
            segments: Mutex::new(SegmentCache::default()),
            collecting: Mutex::new(()),
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
        let path = self.manifest_path(id);
        let local = match self.disk.open(&path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Err(StoreError::NoManifest { id: *id, path: path.clone() }),
            other => other.at("open", &path).and_then(|f| read_all(&*self.disk, &f, &path, MANIFEST_BYTES_MAX as u64)),
        };
        let checked = local.and_then(|bytes| {
            let m = Manifest::decode_verified(id, &bytes).map_err(|source| StoreError::Decode { path, source })?;
            Ok((bytes, m))
        });
        match checked {
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

fn pack_path(root: &Path, id: &PackId) -> PathBuf {
    let hex = id.to_hex();
    root.join("packs").join(&hex[..2]).join(format!("{hex}.pack"))
}

fn check_format(disk: &dyn Disk, dir: &Path) -> Result<(), StoreError> {
    let path = dir.join("format");
    match disk.open(&path) {
        Ok(file) => {
            let bytes = read_all(disk, &file, &path, 4096)?;
            let found = String::from_utf8_lossy(&bytes).trim_end().to_owned();
            if found == FORMAT { Ok(()) } else { Err(StoreError::Format { path, found, known: FORMAT }) }
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            let tmp = dir.join("incoming").join("format");
            let file = disk.create(&tmp).at("create", &tmp)?;
            disk.append(&file, 0, format!("{FORMAT}\n").as_bytes()).at("write", &tmp)?;
            disk.sync(&file).at("sync", &tmp)?;
            disk.rename(&tmp, &path).at("rename", &path)?;
            disk.sync_dir(dir).at("sync", dir)
        }
        Err(e) => Err(StoreError::io("open", &path, e)),
    }
}

/// All bytes of a file of at most `max` bytes.
pub(crate) fn read_all(disk: &dyn Disk, file: &File, path: &Path, max: u64) -> Result<Vec<u8>, StoreError> {
    let len = disk.len(file).at("stat", path)?;
    if len > max {
        let why = format!("{len} bytes, the most is {max}");
        return Err(StoreError::Decode { path: path.to_owned(), source: DecodeError::Value { what: "file", why } });
    }
    let mut bytes = vec![0u8; usize::try_from(len).expect("bounded above")];
    disk.read_at(file, &mut bytes, 0).at("read", path)?;
    Ok(bytes)
}

/// Reads a pack's index: header, trailer and table only.
pub(crate) fn read_pack_index(disk: &dyn Disk, file: &File, path: &Path) -> Result<(u64, PackIndex), StoreError> {
    let refused = |source| StoreError::Decode { path: path.to_owned(), source };
    let len = disk.len(file).at("stat", path)?;
    if len < (HEADER_BYTES + TRAILER_BYTES) as u64 || len > PACK_BYTES_MAX as u64 {
        return Err(refused(DecodeError::Value { what: "pack", why: format!("a file of {len} bytes") }));
    }
    let mut header = [0u8; HEADER_BYTES];
    disk.read_at(file, &mut header, 0).at("read", path)?;
    let domain = pack::decode_header(&header).map_err(refused)?;
    let mut trailer = [0u8; TRAILER_BYTES];
    disk.read_at(file, &mut trailer, len - TRAILER_BYTES as u64).at("read", path)?;
    let (at, table_len) = pack::decode_trailer(&trailer, len).map_err(refused)?;
    let mut table = vec![0u8; table_len];
    disk.read_at(file, &mut table, at).at("read", path)?;
    Ok((len, pack::decode_table(domain, &table, &trailer).map_err(refused)?))
}

/// Builds the state from the folder.
struct Loader<'a> {
    disk: &'a dyn Disk,
    root: &'a Path,
    state: State,
    warnings: Vec<String>,
}

impl Loader<'_> {
    fn packs(&mut self) -> Result<(), StoreError> {
        for (path, found) in self.files("packs", ".pack")? {
            let Some(id) = name_of::<PackId>(&found.name, ".pack").filter(|id| pack_path(self.root, id) == path) else {
                self.quarantine(&path, &found.name, "its name is not a pack's")?;
                continue;
            };
            let file = self.disk.open(&path).at("open", &path)?;
            match read_pack_index(self.disk, &file, &path) {
                Ok((bytes, index)) => {
                    self.state.index.add(id, bytes, found.modified_ms, None, index);
                }
                Err(StoreError::Decode { source: e @ DecodeError::Version { .. }, .. }) => {
                    self.warnings.push(format!("pack {} is left alone and not used: {e}", path.display()));
                }
                Err(StoreError::Decode { source, .. }) => self.quarantine(&path, &found.name, &source.to_string())?,
                Err(other) => return Err(other),
            }
        }
        Ok(())
    }

    fn manifests(&mut self) -> Result<(), StoreError> {
        for (path, found) in self.files("manifests", ".manifest")? {
            match name_of::<CheckpointId>(&found.name, ".manifest") {
                Some(id) if path.parent().is_some_and(|p| p.ends_with(&id.to_hex()[..2])) => {
                    let info = ManifestInfo { bytes: found.bytes, since_ms: found.modified_ms };
                    self.state.manifests.insert(id, info);
                }
                _ => self.quarantine(&path, &found.name, "its name is not a manifest's")?,
            }
        }
        Ok(())
    }

    fn files(&mut self, sub: &str, suffix: &str) -> Result<Vec<(PathBuf, Found)>, StoreError> {
        let top = self.root.join(sub);
        let mut out = Vec::new();
        for d in self.disk.list(&top).at("list", &top)? {
            let dir = top.join(&d.name);
            if !d.is_dir {
                self.warnings.push(format!("{} is not part of the store and is ignored", dir.display()));
                continue;
            }
            for f in self.disk.list(&dir).at("list", &dir)? {
                if f.is_dir || !f.name.ends_with(suffix) {
                    self.warnings.push(format!("{} is not part of the store and is ignored", dir.join(&f.name).display()));
                } else {
                    out.push((dir.join(&f.name), f));
                }
            }
        }
        Ok(out)
    }

    fn quarantine(&mut self, path: &Path, name: &str, why: &str) -> Result<(), StoreError> {
        let to = self.root.join("quarantine").join(name);
        self.disk.rename(path, &to).at("quarantine", path)?;
        self.warnings.push(format!("{} could not be read ({why}); moved to {}", path.display(), to.display()));
        Ok(())
    }
}

fn name_of<T: std::str::FromStr>(name: &str, suffix: &str) -> Option<T> {
    name.strip_suffix(suffix)?.parse().ok()
}
