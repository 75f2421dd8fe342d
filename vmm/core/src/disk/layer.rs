//! One layer: an unlinked sparse file and the 4 KiB blocks that it holds. A held block that is a hole is zeros.

use super::{BLOCK_BYTES, DiskError};
use ks_proto::CHUNK_BYTES;
use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

/// Blocks in a chunk; one bit each in a `u16`.
pub const CHUNK_BLOCKS: u64 = CHUNK_BYTES as u64 / BLOCK_BYTES;

/// A layer. Clones share the file.
#[derive(Debug, Clone)]
pub struct Layer {
    file: Arc<File>,
    // Invariant: no mask is zero.
    have: BTreeMap<u32, u16>,
}

impl Layer {
    /// An empty layer for a disk of `bytes`, its file made in `dir` and unlinked.
    pub fn create(dir: &Path, bytes: u64) -> Result<Self, DiskError> {
        let scratch = |what| move |errno| DiskError::Scratch { what, errno };
        let mode = Mode::RUSR | Mode::WUSR;
        let file = match rustix::fs::open(dir, OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, mode) {
            Ok(fd) => fd,
            Err(Errno::OPNOTSUPP | Errno::ISDIR) => named_then_unlinked(dir, mode).map_err(scratch("create"))?,
            Err(errno) => return Err(DiskError::Scratch { what: "create", errno }),
        };
        rustix::fs::ftruncate(&file, bytes).map_err(scratch("set size"))?;
        Ok(Self { file: Arc::new(File::from(file)), have: BTreeMap::new() })
    }
    /// Which blocks of `chunk` it holds.
    pub fn mask(&self, chunk: u32) -> u16 {
        self.have.get(&chunk).copied().unwrap_or(0)
    }
    /// True if it holds block number `block` of the disk.
    pub fn has(&self, block: u64) -> bool {
        self.mask(chunk_of(block)) >> (block % CHUNK_BLOCKS) & 1 == 1
    }
    /// Chunks of which it holds a block, ascending.
    pub fn chunks(&self) -> impl Iterator<Item = u32> + '_ {
        self.have.keys().copied()
    }
    /// True if it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.have.is_empty()
    }
    /// Fills `buf` from the file. Meaningful only for held blocks.
    pub fn read(&self, offset: u64, buf: &mut [u8]) -> Result<(), DiskError> {
        self.file.read_exact_at(buf, offset).map_err(|e| io("read", &e))
    }
    /// Writes bytes without marking them held.
    pub fn put(&self, offset: u64, data: &[u8]) -> Result<(), DiskError> {
        self.file.write_all_at(data, offset).map_err(|e| io("write", &e))
    }
    /// Makes a range a hole without marking it held.
    pub fn punch(&self, offset: u64, len: u64) -> Result<(), DiskError> {
        match rustix::fs::fallocate(&self.file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, len) {
            Ok(()) => Ok(()),
            Err(Errno::OPNOTSUPP) => self.put_zeros(offset, len),
            Err(errno) => Err(DiskError::Scratch { what: "punch", errno }),
        }
    }
    /// Marks whole blocks held.
    pub fn mark(&mut self, first_block: u64, blocks: u64) {
        let end = first_block + blocks;
        let mut at = first_block;
        while at < end {
            let chunk_end = (at / CHUNK_BLOCKS + 1) * CHUNK_BLOCKS;
            let stop = end.min(chunk_end);
            let bits = ((1u32 << (stop - at)) - 1) << (at % CHUNK_BLOCKS);
            *self.have.entry(chunk_of(at)).or_default() |= bits as u16;
            at = stop;
        }
    }
    /// This layer with the blocks of `above` marked as well (their bytes were `put` here before).
    pub fn with_marks_of(&self, above: &Layer) -> Layer {
        let mut have = self.have.clone();
        for (&chunk, &mask) in &above.have {
            *have.entry(chunk).or_default() |= mask;
        }
        Layer { file: Arc::clone(&self.file), have }
    }
    /// Copies every block that this layer holds into the file of `below`, zeros as holes.
    pub fn copy_into(&self, below: &Layer) -> Result<(), DiskError> {
        let mut block = vec![0u8; BLOCK_BYTES as usize];
        for (&chunk, &mask) in &self.have {
            for b in (0..CHUNK_BLOCKS).filter(|b| mask >> b & 1 == 1) {
                let at = u64::from(chunk) * CHUNK_BYTES as u64 + b * BLOCK_BYTES;
                self.read(at, &mut block)?;
                if ks_proto::chunk::is_zeros(&block) { below.punch(at, BLOCK_BYTES)? } else { below.put(at, &block)? }
            }
        }
        Ok(())
    }

    fn put_zeros(&self, mut offset: u64, mut len: u64) -> Result<(), DiskError> {
        let zeros = vec![0u8; CHUNK_BYTES];
        while len > 0 {
            let n = len.min(CHUNK_BYTES as u64);
            self.put(offset, &zeros[..n as usize])?;
            (offset, len) = (offset + n, len - n);
        }
        Ok(())
    }
}

/// The chunk of a block.
pub fn chunk_of(block: u64) -> u32 {
    u32::try_from(block / CHUNK_BLOCKS).expect("a disk has at most 2^28 chunks")
}

fn named_then_unlinked(dir: &Path, mode: Mode) -> Result<std::os::fd::OwnedFd, Errno> {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let path = dir.join(format!(".layer-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
    let fd = rustix::fs::open(&path, OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC, mode)?;
    rustix::fs::unlink(&path)?;
    Ok(fd)
}

fn io(what: &'static str, e: &std::io::Error) -> DiskError {
    DiskError::Scratch { what, errno: e.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error) }
}
