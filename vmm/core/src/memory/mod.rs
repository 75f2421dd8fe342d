//! Guest memory: one memfd addressed by offset, paged in lazily or eagerly, with the set of dirty chunks.
//!
//! How an engine uses it: map [`Memory::fd`] shared, register the mapping with a userfaultfd (kvm:
//! [`Tracked::in_this_process`]; qemu: the preload shim sends the descriptor), call [`Memory::attach`] before anything
//! touches the mapping, or [`Memory::detached`] when there is no userfaultfd. Nothing here reads guest memory through
//! a mapping (a read of a hole would allocate zeros): SEEK_DATA and pread only.

pub mod tracker;
pub mod uffd;

pub use tracker::Tracked;

use crate::source::ChunkSource;
use ks_proto::ChunkId;
use ks_proto::control::Fault;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// Called once when guest memory can no longer be served: the VM must die. Runs on the pager's thread.
pub type OnFatal = Arc<dyn Fn(Fault) + Send + Sync>;

/// Counters of paging, in chunks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PagingStats {
    /// Loaded because the guest waited.
    pub faulted: u64,
    /// Loaded by the prefetcher (or eagerly).
    pub prefetched: u64,
    /// Not yet loaded.
    pub missing: u64,
}

/// Guest memory of one VM. Every method works from any thread.
pub struct Memory {}

impl Memory {
    /// A memfd of `bytes` (a multiple of 64 KiB), all holes, that can neither grow nor shrink. A booting VM uses it so.
    pub fn create(bytes: u64) -> Result<Arc<Self>, Fault> {
        let _ = bytes;
        unimplemented!()
    }
    /// The memory file, to map shared or to hand to a child (it is close-on-exec: dup or clear the flag there).
    pub fn fd(&self) -> BorrowedFd<'_> {
        unimplemented!()
    }
    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        unimplemented!()
    }
    /// Bytes that are not holes.
    pub fn used_bytes(&self) -> u64 {
        unimplemented!()
    }
    /// Before the engine is built, for a restore: memory is `refs` (from [`ChunkSource::load_map`]), loaded as the guest
    /// touches it; `order` are chunk indices to prefetch first. Needs `attach` (or `detached`, which loads all).
    pub fn restore_lazy(
        &self,
        source: Arc<ChunkSource>,
        refs: Vec<ChunkId>,
        order: Vec<u32>,
        on_fatal: OnFatal,
    ) -> Result<(), Fault> {
        let _ = (source, refs, order, on_fatal);
        unimplemented!()
    }
    /// Before the engine is built, for a restore: loads and verifies all of `refs` now.
    pub fn restore_eager(&self, source: Arc<ChunkSource>, refs: Vec<ChunkId>) -> Result<(), Fault> {
        let _ = (source, refs);
        unimplemented!()
    }
    /// True if the engine must register its mapping for missing pages as well (`UFFDIO_REGISTER_MODE_MISSING`).
    pub fn wants_missing(&self) -> bool {
        unimplemented!()
    }
    /// Takes the registered mapping: arms the dirty tracker, serves faults and remove events from now on. Once per VM.
    pub fn attach(self: &Arc<Self>, tracked: Tracked) -> Result<(), Fault> {
        let _ = tracked;
        unimplemented!()
    }
    /// There is no userfaultfd: loads everything that is not loaded yet; checkpoints find dirty chunks by hashing.
    pub fn detached(&self) -> Result<(), Fault> {
        unimplemented!()
    }
    /// The guest gave back whole 4 KiB pages (balloon, free-page report): they read as zeros from now on. kvm calls this
    /// instead of madvise; in qemu the remove event does.
    pub fn discard(&self, offset: u64, len: u64) -> Result<(), Fault> {
        let _ = (offset, len);
        unimplemented!()
    }
    /// Counters.
    pub fn paging(&self) -> PagingStats {
        unimplemented!()
    }
    /// Chunks in the order in which the guest first waited for them: the next restore's `order`.
    pub fn touch_order(&self) -> Vec<u32> {
        unimplemented!()
    }
    /// Ends the pager threads and waits for them. Idempotent; also on drop.
    pub fn shutdown(&self) {
        unimplemented!()
    }
}
