//! What the core asks of the node while it pages and stores. Implemented by the control socket and by tests.

use ks_proto::control::{CheckpointStats, Fault};
use ks_proto::pack::PackEntry;
use ks_proto::{CheckpointId, ChunkId, PackId};
use std::fs::File;

/// A good copy of an object that the handed packs could not give.
pub struct Fetched {
    /// Pack that holds it.
    pub pack: File,
    /// Its place there.
    pub entry: PackEntry,
    /// Key domain of the pack.
    pub domain: u32,
}

/// Calls block until the node answers or the link's deadline passes (`timeout`) or the node is gone (`node-gone`).
pub trait HostLink: Send + Sync {
    /// A new, empty pack file, writable.
    fn new_pack(&self) -> Result<File, Fault>;
    /// The pack last handed out is written; returns when it is verified, synced and indexed.
    fn pack_done(&self, id: PackId, bytes: u64) -> Result<(), Fault>;
    /// One flag per id: need not be stored again.
    fn known(&self, ids: &[ChunkId]) -> Result<Vec<bool>, Fault>;
    /// Stores the manifest; returns when the checkpoint is durable here.
    fn commit(&self, manifest: &[u8], stats: &CheckpointStats) -> Result<CheckpointId, Fault>;
    /// Drops what was uploaded since the last commit.
    fn abort(&self, why: &str);
    /// A good copy of `id`; `broken` says what was wrong with the one that was handed over.
    fn fetch(&self, id: &ChunkId, broken: Option<&str>) -> Result<Fetched, Fault>;
}
