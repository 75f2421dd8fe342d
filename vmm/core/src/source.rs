//! Verified reading of objects from the packs that the node handed over, with the node as the second source.
//!
//! Bytes leave this module only after they hashed to the name that was asked for. A failed read is an error that
//! names the object and its pack; it is never zeros.

use crate::host_link::HostLink;
use ks_proto::ChunkId;
use ks_proto::chunk::{DomainKey, ObjectKind};
use ks_proto::control::Fault;
use ks_proto::manifest::Map;
use ks_proto::plan::Plan;
use std::fs::File;
use std::sync::Arc;

/// Decoded bytes kept by default.
pub const CACHE_BYTES: usize = 64 * 1024 * 1024;

/// Reads objects by name. Shared by the pager, the disk and the checkpoint; every method works from any thread.
pub struct ChunkSource {}

impl ChunkSource {
    /// A source over `packs` (in plan order). `keys` are those of every domain that the plan names.
    pub fn new(keys: Vec<DomainKey>, plan: Plan, packs: Vec<File>, link: Arc<dyn HostLink>) -> Self {
        let _ = (keys, plan, packs, link);
        unimplemented!()
    }
    /// The same with another bound on the decoded bytes kept (0 keeps none).
    pub fn with_cache(self, bytes: usize) -> Self {
        let _ = bytes;
        self
    }
    /// A chunk of memory or disk: exactly 64 KiB. [`ChunkId::ZERO`] gives zeros. Blocks on the node when the local
    /// copy is missing or corrupt.
    pub fn read(&self, id: &ChunkId) -> Result<Vec<u8>, Fault> {
        self.read_object(id, ObjectKind::Data)
    }
    /// An object of any kind, past the cache.
    pub fn read_object(&self, id: &ChunkId, kind: ObjectKind) -> Result<Vec<u8>, Fault> {
        let _ = (id, kind);
        unimplemented!()
    }
    /// A chunk through the cache.
    pub fn read_cached(&self, id: &ChunkId) -> Result<Arc<Vec<u8>>, Fault> {
        let _ = id;
        unimplemented!()
    }
    /// All chunk references of `map`, one per 64 KiB, by reading its segments.
    pub fn load_map(&self, map: &Map) -> Result<Vec<ChunkId>, Fault> {
        let _ = map;
        unimplemented!()
    }
    /// The device state: `ids` concatenated, cut to `bytes`.
    pub fn load_state(&self, ids: &[ChunkId], bytes: u64) -> Result<Vec<u8>, Fault> {
        let _ = (ids, bytes);
        unimplemented!()
    }
    /// Reads and verifies every one of `ids` (repeats once), on two threads. For `verify_eager`.
    pub fn verify(&self, ids: &[ChunkId]) -> Result<(), Fault> {
        let _ = ids;
        unimplemented!()
    }
    /// The key domain that `id` was stored under, if the plan (or a fetch) has it.
    pub fn domain_of(&self, id: &ChunkId) -> Option<u32> {
        let _ = id;
        unimplemented!()
    }
    /// The key of a domain.
    pub fn key(&self, domain: u32) -> Option<&DomainKey> {
        let _ = domain;
        unimplemented!()
    }
}
