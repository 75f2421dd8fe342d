//! The root disk: 64 KiB chunks from packs below sparse scratch layers that hold what this run wrote.
//!
//! base (verified chunks) <- local (stored in a checkpoint) <- frozen (being stored) <- active (takes writes). Layers are
//! unlinked files: they die with the process, as guest memory does, so a guest FLUSH needs no fsync.

use crate::lease::LeaseGate;
use crate::source::ChunkSource;
use ks_proto::ChunkId;
use ks_proto::control::Fault;
use std::path::Path;
use std::sync::Arc;

/// The unit in which layers know what they hold.
pub const BLOCK_BYTES: u64 = 4096;

/// A failed disk request.
#[derive(Debug, Clone, thiserror::Error)]
pub enum DiskError {
    /// Outside the disk. Tell the guest EINVAL.
    #[error("disk request of {len} bytes at {offset} is outside the disk of {bytes} bytes")]
    Range { offset: u64, len: u64, bytes: u64 },
    /// The run's lease has ended: nothing is written. Tell the guest EIO; the run loop stops the VM.
    #[error("the lease of this run has ended: disk writes are refused")]
    LeaseEnded,
    /// The scratch file could not take it (EIO or ENOSPC).
    #[error("scratch layer: {what}: {errno}")]
    Scratch { what: &'static str, errno: rustix::io::Errno },
    /// A base chunk could not be read verified.
    #[error(transparent)]
    Base(#[from] Fault),
}

/// The disk of one run. Every method works from any thread.
pub struct Disk {}

/// The layers that one checkpoint stores: everything written since the last stored checkpoint.
pub struct FrozenSet {}

impl FrozenSet {
    /// Indices of the 64 KiB chunks that it changes, ascending.
    pub fn chunks(&self) -> &[u32] {
        unimplemented!()
    }
}

impl Disk {
    /// A disk of `bytes` (a multiple of 64 KiB) that begins as `refs`. Scratch layers are made in `scratch_dir`.
    pub fn new(
        refs: Vec<ChunkId>,
        bytes: u64,
        source: Arc<ChunkSource>,
        scratch_dir: &Path,
        lease: Arc<LeaseGate>,
    ) -> Result<Self, Fault> {
        let _ = (refs, bytes, source, scratch_dir, lease);
        unimplemented!()
    }
    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        unimplemented!()
    }
    /// Fills `buf` from `offset`. Any alignment. Allowed without a lease (nothing leaves).
    pub fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), DiskError> {
        let _ = (offset, buf);
        unimplemented!()
    }
    /// Writes `data` at `offset`. Any alignment; partial 4 KiB blocks are completed from below. On an error the
    /// range holds old or new bytes per block.
    pub fn write_at(&self, offset: u64, data: &[u8]) -> Result<(), DiskError> {
        let _ = (offset, data);
        unimplemented!()
    }
    /// Zeros `len` bytes at `offset` without storing them. Any alignment.
    pub fn write_zeroes(&self, offset: u64, len: u64) -> Result<(), DiskError> {
        let _ = (offset, len);
        unimplemented!()
    }
    /// Discards: as [`Disk::write_zeroes`], so that a discarded block reads as zeros for ever.
    pub fn discard(&self, offset: u64, len: u64) -> Result<(), DiskError> {
        self.write_zeroes(offset, len)
    }
    /// A guest FLUSH: writes are in the layer when `write_at` returns, and the layer dies with the memory.
    pub fn flush(&self) -> Result<(), DiskError> {
        unimplemented!()
    }
    /// Bytes of chunks that the next checkpoint must store.
    pub fn dirty_bytes(&self) -> u64 {
        unimplemented!()
    }
}
