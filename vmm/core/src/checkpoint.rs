//! The checkpoint pipeline: a short part in the pause, and a long part beside the running guest.
//!
//! pause → device state → dirty set → copy aside → freeze disk → run; then hash, ask what is known, compress, seal, pack, segments,
//! manifest, commit. The dirty set is consumed only when the commit is answered; any failure puts it back.

use crate::disk::Disk;
use crate::engine::Engine;
use crate::host_link::HostLink;
use crate::memory::Memory;
use crate::source::ChunkSource;
use ks_proto::control::{CheckpointStats, Fault};
use ks_proto::manifest::Map;
use ks_proto::{CheckpointId, SessionId};
use std::sync::Arc;
use std::time::Duration;

/// What a pipeline works on.
pub struct Parts {
    /// The session, for the manifest.
    pub session: SessionId,
    /// Key domain for new objects; its key is in `source`.
    pub write_domain: u32,
    /// Guest memory.
    pub memory: Arc<Memory>,
    /// Root disk.
    pub disk: Arc<Disk>,
    /// Keys, and the base chunks of pages that are not loaded.
    pub source: Arc<ChunkSource>,
    /// The node.
    pub link: Arc<dyn HostLink>,
    /// Memory map of the manifest that was restored; None after a boot.
    pub memory_map: Option<Map>,
    /// Disk map of the manifest that was restored or booted from.
    pub disk_map: Map,
}

/// One checkpoint wanted.
#[derive(Debug, Clone)]
pub struct Request {
    /// The checkpoint that it follows.
    pub parent: Option<CheckpointId>,
    /// Position in the gateway's journal.
    pub journal_position: u64,
    /// The longest wait for the engine's pause.
    pub pause_bound: Duration,
}

/// A captured instant that is not stored yet. Dropping it unstored is the same as a failed store.
pub struct Captured {}

impl Captured {
    /// vCPUs stopped, microseconds.
    pub fn pause_us(&self) -> u64 {
        unimplemented!()
    }
}

/// Takes checkpoints of one VM, one at a time.
pub struct Pipeline {}

impl Pipeline {
    /// A pipeline over `parts`.
    pub fn new(parts: Parts) -> Result<Self, Fault> {
        let _ = parts;
        unimplemented!()
    }
    /// The part with the pause; on the engine's thread. On an error the VM runs on (or `engine.exited()` says that it
    /// died) and nothing is lost. Refuses with `busy` while another capture is not stored.
    pub fn capture(self: &Arc<Self>, engine: &mut dyn Engine, request: &Request) -> Result<Captured, Fault> {
        let _ = (engine, request);
        unimplemented!()
    }
    /// The part beside the running guest; on any thread, for seconds. On an error the dirty set is put back.
    pub fn store(self: &Arc<Self>, captured: Captured) -> Result<CheckpointStats, Fault> {
        let _ = captured;
        unimplemented!()
    }
}
