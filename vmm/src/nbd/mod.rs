//! The root disk offered to QEMU over NBD on an inherited socket. Source: the NBD protocol document (newstyle fixed
//! handshake, simple replies). Several requests are served at once and answered in the order in which they finish.

mod handshake;
mod server;

pub use server::serve;

use ks_vmm_core::disk::{Disk, DiskError};

/// The longest read or write.
pub const PAYLOAD_BYTES_MAX: u32 = 32 * 1024 * 1024;
/// Requests served at once.
pub const WORKERS: usize = 4;

/// What a request may end in, beside success.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BlockError {
    /// Outside the disk.
    Invalid,
    /// No space for what is written.
    NoSpace(String),
    /// It cannot be read or written.
    Io(String),
    /// Not now: the lease has ended and may come back.
    Held,
}

/// What a server serves.
pub trait Blocks: Send + Sync {
    /// Size in bytes.
    fn bytes(&self) -> u64;
    /// Fills `buf` from `offset`.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), BlockError>;
    /// Writes `data` at `offset`.
    fn write_at(&self, offset: u64, data: &[u8]) -> Result<(), BlockError>;
    /// Zeros a range.
    fn write_zeroes(&self, offset: u64, len: u64) -> Result<(), BlockError>;
    /// Discards a range.
    fn discard(&self, offset: u64, len: u64) -> Result<(), BlockError>;
    /// All that was answered is kept.
    fn flush(&self) -> Result<(), BlockError>;
}

impl From<DiskError> for BlockError {
    fn from(e: DiskError) -> Self {
        match e {
            DiskError::Range { .. } => Self::Invalid,
            DiskError::LeaseEnded => Self::Held,
            DiskError::Scratch { errno: rustix::io::Errno::NOSPC | rustix::io::Errno::DQUOT, .. } => Self::NoSpace(e.to_string()),
            DiskError::Scratch { .. } | DiskError::Base(_) => Self::Io(e.to_string()),
        }
    }
}

impl Blocks for Disk {
    fn bytes(&self) -> u64 {
        Disk::bytes(self)
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), BlockError> {
        Ok(Disk::read_at(self, offset, buf)?)
    }
    fn write_at(&self, offset: u64, data: &[u8]) -> Result<(), BlockError> {
        Ok(Disk::write_at(self, offset, data)?)
    }
    fn write_zeroes(&self, offset: u64, len: u64) -> Result<(), BlockError> {
        Ok(Disk::write_zeroes(self, offset, len)?)
    }
    fn discard(&self, offset: u64, len: u64) -> Result<(), BlockError> {
        Ok(Disk::discard(self, offset, len)?)
    }
    fn flush(&self) -> Result<(), BlockError> {
        Ok(Disk::flush(self)?)
    }
}
