//! What one node gives to another: where objects lie, and packs to read from. Nothing here asks peers.

use crate::error::{At, StoreError};
use crate::store::Store;
use ks_proto::ids::{ChunkId, PackId};
use ks_proto::pack::PackEntry;
use std::fs::File;

/// One place of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackPlace {
    /// The pack.
    pub pack: PackId,
    /// Its size in bytes.
    pub pack_bytes: u64,
    /// Key domain of its objects.
    pub domain: u32,
    /// The object's row.
    pub entry: PackEntry,
}

impl Store {
    /// Where each object lies, at most `most` places each, those first that serve it here. Places that were found damaged are
    /// not among them.
    pub fn places(&self, ids: &[ChunkId], most: usize) -> Vec<Vec<PackPlace>> {
        let s = self.state();
        let place = |p: crate::index::Place| {
            let info = s.index.pack(p.pack)?;
            let entry = *info.rows.get(p.row as usize)?;
            Some(PackPlace { pack: info.id, pack_bytes: info.bytes, domain: info.domain, entry })
        };
        ids.iter().map(|id| s.index.places(id).filter_map(place).take(most).collect()).collect()
    }

    /// The file of a pack and its size, to read from; None if it is not here. It stays readable if a collection removes it.
    ///
    /// # Errors
    /// If the disk refuses.
    pub fn open_pack(&self, id: &PackId) -> Result<Option<(File, u64)>, StoreError> {
        let bytes = {
            let s = self.state();
            s.index.number(id).and_then(|no| s.index.pack(no)).map(|p| p.bytes)
        };
        let Some(bytes) = bytes else { return Ok(None) };
        let path = self.pack_path(id);
        match self.disk.open(&path) {
            Ok(file) => Ok(Some((file, bytes))),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(StoreError::io("open", &path, e)),
        }
    }

    /// A pack did not hash to its name when it was read for a peer: it is looked at, and what is damaged is taken out of
    /// service.
    ///
    /// # Errors
    /// If this machine cannot read at all.
    pub fn suspect(
        self: &std::sync::Arc<Self>,
        id: &PackId,
        keys: &crate::KeyRing,
    ) -> Result<Vec<crate::ObjectFault>, StoreError> {
        let no = self.state().index.number(id);
        no.map_or(Ok(Vec::new()), |no| self.faults_in(no, keys))
    }

    /// Bytes of an open pack.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn read_pack(&self, id: &PackId, file: &File, buf: &mut [u8], at: u64) -> Result<(), StoreError> {
        self.disk.read_at(file, buf, at).at("read", &self.pack_path(id))
    }
}
