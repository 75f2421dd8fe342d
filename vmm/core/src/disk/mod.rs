//! The root disk: 64 KiB chunks from packs below sparse scratch layers that hold what this run wrote.
//!
//! base (verified chunks) <- local (stored in a checkpoint) <- frozen (being stored) <- active (takes writes). Layers are
//! unlinked files: they die with the process, as guest memory does, so a guest FLUSH needs no fsync.

mod layer;

use crate::lease::LeaseGate;
use crate::source::ChunkSource;
use ks_proto::control::Fault;
use ks_proto::{CHUNK_BYTES, ChunkId};
use layer::{CHUNK_BLOCKS, Layer, chunk_of};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// A block that a request covers in part: its offset, and its bytes where they had to be read.
type Partial = (u64, Option<Vec<u8>>);

/// The unit in which layers know what they hold.
pub const BLOCK_BYTES: u64 = 4096;
const CHUNK: u64 = CHUNK_BYTES as u64;

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

impl From<DiskError> for Fault {
    fn from(e: DiskError) -> Self {
        match e {
            DiskError::Base(fault) => fault,
            DiskError::LeaseEnded => Fault::new("lease-ended", "disk", e.to_string(), "wait for a lease"),
            DiskError::Scratch { errno: rustix::io::Errno::NOSPC | rustix::io::Errno::DQUOT, .. } => {
                Fault::new("disk-full", "disk", e.to_string(), "free space in the folder of the run")
            }
            DiskError::Range { .. } | DiskError::Scratch { .. } => Fault::new("internal", "disk", e.to_string(), "see vmm.log"),
        }
    }
}

/// The disk of one run. Every method works from any thread.
pub struct Disk {
    bytes: u64,
    // What the run began as; what is read below the layers. Never changes.
    base: Vec<ChunkId>,
    source: Arc<ChunkSource>,
    scratch_dir: PathBuf,
    lease: Arc<LeaseGate>,
    layers: RwLock<Layers>,
}

struct Layers {
    active: Layer,
    // Oldest first, both.
    frozen: Vec<Arc<Layer>>,
    local: Vec<Arc<Layer>>,
    // The chunks of the last stored checkpoint.
    refs: Vec<ChunkId>,
}

impl Layers {
    fn newest_first(&self) -> impl Iterator<Item = &Layer> {
        std::iter::once(&self.active).chain(self.frozen.iter().rev().map(|l| &**l)).chain(self.local.iter().rev().map(|l| &**l))
    }
    fn holder(&self, block: u64) -> Option<&Layer> {
        self.newest_first().find(|l| l.has(block))
    }
}

/// The layers that one checkpoint stores: everything written since the last stored checkpoint.
pub struct FrozenSet {
    layers: Vec<Arc<Layer>>,
}

impl FrozenSet {
    /// Indices of the 64 KiB chunks that it changes, ascending.
    pub fn chunks(&self) -> Vec<u32> {
        self.layers.iter().flat_map(|l| l.chunks()).collect::<BTreeSet<_>>().into_iter().collect()
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
        if bytes == 0 || !bytes.is_multiple_of(CHUNK) || refs.len() as u64 != bytes / CHUNK {
            let why = format!("{} chunk references for {bytes} bytes; a disk is whole chunks of {CHUNK} bytes", refs.len());
            return Err(Fault::new("internal", "disk", why, "check the image's manifest"));
        }
        let active = Layer::create(scratch_dir, bytes)?;
        let layers = Layers { active, frozen: Vec::new(), local: Vec::new(), refs: refs.clone() };
        Ok(Self { bytes, base: refs, source, scratch_dir: scratch_dir.to_owned(), lease, layers: RwLock::new(layers) })
    }
    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
    /// Fills `buf` from `offset`. Any alignment. Allowed without a lease (nothing leaves).
    pub fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), DiskError> {
        self.check_range(offset, buf.len() as u64)?;
        // Base chunks are read after the lock is let go: they may wait for the node, and never change.
        let mut from_base = Vec::new();
        {
            let layers = self.read_lock();
            let mut at = offset;
            let end = offset + buf.len() as u64;
            while at < end {
                let holder = layers.holder(at / BLOCK_BYTES);
                let mut stop = end.min((at / BLOCK_BYTES + 1) * BLOCK_BYTES);
                while stop < end && same(holder, layers.holder(stop / BLOCK_BYTES)) {
                    stop = end.min(stop + BLOCK_BYTES);
                }
                match holder {
                    Some(layer) => layer.read(at, slice_mut(buf, at - offset, stop - at))?,
                    None => from_base.push((at, stop)),
                }
                at = stop;
            }
        }
        for (at, stop) in from_base {
            self.read_base(at, slice_mut(buf, at - offset, stop - at))?;
        }
        Ok(())
    }
    /// Writes `data` at `offset`. Any alignment; partial 4 KiB blocks are completed from below. On an error the
    /// range holds old or new bytes per block.
    pub fn write_at(&self, offset: u64, data: &[u8]) -> Result<(), DiskError> {
        self.check_range(offset, data.len() as u64)?;
        self.check_lease()?;
        if data.is_empty() {
            return Ok(());
        }
        let end = offset + data.len() as u64;
        let edges = self.partial_blocks(offset, end)?;
        let mut layers = self.write_lock();
        self.check_lease()?;
        for (block, below) in edges {
            self.complete(&mut layers, block, below)?;
        }
        layers.active.put(offset, data)?;
        let first = offset / BLOCK_BYTES;
        layers.active.mark(first, end.div_ceil(BLOCK_BYTES) - first);
        Ok(())
    }
    /// Zeros `len` bytes at `offset` without storing them. Any alignment.
    pub fn write_zeroes(&self, offset: u64, len: u64) -> Result<(), DiskError> {
        self.check_range(offset, len)?;
        self.check_lease()?;
        let end = offset + len;
        let (first, last) = (offset.next_multiple_of(BLOCK_BYTES), end / BLOCK_BYTES * BLOCK_BYTES);
        if first >= last {
            // Inside two blocks at most.
            return self.write_at(offset, &vec![0; len as usize]);
        }
        self.write_at(offset, &vec![0; (first - offset) as usize])?;
        self.write_at(last, &vec![0; (end - last) as usize])?;
        let mut layers = self.write_lock();
        self.check_lease()?;
        layers.active.punch(first, last - first)?;
        let mut at = first;
        while at < last {
            let stop = last.min((at / CHUNK + 1) * CHUNK);
            let chunk = chunk_of(at / BLOCK_BYTES);
            // What is zeros already is not made dirty: a guest may trim a whole empty disk.
            if !self.base[chunk as usize].is_zero() || layers.newest_first().any(|l| l.mask(chunk) != 0) {
                layers.active.mark(at / BLOCK_BYTES, (stop - at) / BLOCK_BYTES);
            }
            at = stop;
        }
        Ok(())
    }
    /// Discards: as [`Disk::write_zeroes`], so that a discarded block reads as zeros for ever.
    pub fn discard(&self, offset: u64, len: u64) -> Result<(), DiskError> {
        self.write_zeroes(offset, len)
    }
    /// A guest FLUSH: writes are in the layer when `write_at` returns, and the layer dies with the memory.
    pub fn flush(&self) -> Result<(), DiskError> {
        self.check_lease()
    }
    /// Bytes of chunks that the next checkpoint must store.
    pub fn dirty_bytes(&self) -> u64 {
        let layers = self.read_lock();
        let dirty: BTreeSet<u32> = layers.active.chunks().chain(layers.frozen.iter().flat_map(|l| l.chunks())).collect();
        dirty.len() as u64 * CHUNK
    }

    /// Freezes what was written since the last stored checkpoint, the layers of failed ones included; new writes go
    /// to a new layer. Constant time. On an error nothing changed.
    pub fn freeze(&self) -> Result<FrozenSet, DiskError> {
        let fresh = Layer::create(&self.scratch_dir, self.bytes)?;
        let mut layers = self.write_lock();
        if !layers.active.is_empty() {
            let full = std::mem::replace(&mut layers.active, fresh);
            layers.frozen.push(Arc::new(full));
        }
        Ok(FrozenSet { layers: layers.frozen.clone() })
    }
    /// The 64 KiB of `chunk` as they were at the freeze.
    pub fn read_frozen(&self, set: &FrozenSet, chunk: u32, buf: &mut [u8]) -> Result<(), DiskError> {
        assert_eq!(buf.len(), CHUNK_BYTES, "a chunk is read whole");
        let start = u64::from(chunk) * CHUNK;
        let local = self.read_lock().local.clone();
        let below: Vec<&Layer> = set.layers.iter().rev().chain(local.iter().rev()).map(|l| &**l).collect();
        let mut base = None;
        for b in 0..CHUNK_BLOCKS {
            let at = start + b * BLOCK_BYTES;
            let part = slice_mut(buf, b * BLOCK_BYTES, BLOCK_BYTES);
            if let Some(layer) = below.iter().find(|l| l.has(at / BLOCK_BYTES)) {
                layer.read(at, part)?;
                continue;
            }
            if base.is_none() {
                base = Some(self.source.read_cached(&self.base[chunk as usize])?);
            }
            if let Some(whole) = &base {
                part.copy_from_slice(slice(whole, b * BLOCK_BYTES, BLOCK_BYTES));
            }
        }
        Ok(())
    }
    /// The checkpoint of `set` is stored: its layers are clean now, and `new_refs` name the chunks that changed.
    pub fn stored(&self, set: FrozenSet, new_refs: &BTreeMap<u32, ChunkId>) {
        {
            let mut layers = self.write_lock();
            let prefix = layers.frozen.get(..set.layers.len());
            let same = prefix.is_some_and(|p| p.iter().zip(&set.layers).all(|(a, b)| Arc::ptr_eq(a, b)));
            assert!(same, "layers are stored in the order in which they were frozen");
            let clean: Vec<_> = layers.frozen.drain(..set.layers.len()).collect();
            layers.local.extend(clean);
            for (&chunk, &id) in new_refs {
                layers.refs[chunk as usize] = id;
            }
        }
        drop(set);
        if let Err(e) = self.merge_local() {
            tracing::warn!(error = %e, "clean disk layers are kept apart: they could not be merged");
        }
    }
    /// The chunks of the last stored checkpoint (at first: of what the run began as).
    pub fn stored_refs(&self) -> Vec<ChunkId> {
        self.read_lock().refs.clone()
    }

    // Copies the newer clean layers into the oldest. While it copies, each block copied is shadowed by the layer that
    // it comes from, so readers never see it half done.
    fn merge_local(&self) -> Result<(), DiskError> {
        loop {
            let (below, above) = match self.read_lock().local.as_slice() {
                [below, above, ..] => (Arc::clone(below), Arc::clone(above)),
                [] | [_] => return Ok(()),
            };
            above.copy_into(&below)?;
            let merged = Arc::new(below.with_marks_of(&above));
            let mut layers = self.write_lock();
            assert!(Arc::ptr_eq(&layers.local[0], &below), "only the storer of checkpoints merges layers");
            layers.local.splice(0..2, [merged]);
        }
    }

    // The bytes below of the first and last block where the write does not cover them: Some(bytes) if only the base
    // has them, None if a layer does (it will still do so under the write lock).
    fn partial_blocks(&self, offset: u64, end: u64) -> Result<Vec<Partial>, DiskError> {
        let mut blocks = BTreeSet::new();
        if !offset.is_multiple_of(BLOCK_BYTES) {
            blocks.insert(offset / BLOCK_BYTES);
        }
        if !end.is_multiple_of(BLOCK_BYTES) {
            blocks.insert(end / BLOCK_BYTES);
        }
        let mut out = Vec::new();
        for block in blocks {
            let held = self.read_lock().holder(block).is_some();
            let below = if held {
                None
            } else {
                let mut bytes = vec![0; BLOCK_BYTES as usize];
                self.read_base(block * BLOCK_BYTES, &mut bytes)?;
                Some(bytes)
            };
            out.push((block, below));
        }
        Ok(out)
    }

    // Copies a partly overwritten block up into the active layer.
    fn complete(&self, layers: &mut Layers, block: u64, below: Option<Vec<u8>>) -> Result<(), DiskError> {
        if layers.active.has(block) {
            return Ok(());
        }
        let at = block * BLOCK_BYTES;
        let bytes = match (layers.holder(block), below) {
            (Some(layer), _) => {
                let mut bytes = vec![0; BLOCK_BYTES as usize];
                layer.read(at, &mut bytes)?;
                bytes
            }
            (None, Some(bytes)) => bytes,
            (None, None) => unreachable!("a block that a layer held is held until the disk is dropped"),
        };
        layers.active.put(at, &bytes)?;
        layers.active.mark(block, 1);
        Ok(())
    }

    fn read_base(&self, mut at: u64, mut buf: &mut [u8]) -> Result<(), DiskError> {
        while !buf.is_empty() {
            let within = at % CHUNK;
            let n = (CHUNK - within).min(buf.len() as u64);
            let (part, rest) = buf.split_at_mut(n as usize);
            let id = &self.base[(at / CHUNK) as usize];
            if id.is_zero() {
                part.fill(0);
            } else {
                part.copy_from_slice(slice(&self.source.read_cached(id)?, within, n));
            }
            (at, buf) = (at + n, rest);
        }
        Ok(())
    }

    fn check_range(&self, offset: u64, len: u64) -> Result<(), DiskError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.bytes => Ok(()),
            Some(_) | None => Err(DiskError::Range { offset, len, bytes: self.bytes }),
        }
    }
    fn check_lease(&self) -> Result<(), DiskError> {
        if self.lease.may_run() { Ok(()) } else { Err(DiskError::LeaseEnded) }
    }
    fn read_lock(&self) -> RwLockReadGuard<'_, Layers> {
        self.layers.read().unwrap_or_else(PoisonError::into_inner)
    }
    fn write_lock(&self) -> RwLockWriteGuard<'_, Layers> {
        self.layers.write().unwrap_or_else(PoisonError::into_inner)
    }
}

fn same(a: Option<&Layer>, b: Option<&Layer>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => std::ptr::eq(a, b),
        (None, None) => true,
        (Some(_), None) | (None, Some(_)) => false,
    }
}

// Offsets inside one buffer fit usize: the buffer is in memory.
fn slice(buf: &[u8], at: u64, len: u64) -> &[u8] {
    &buf[at as usize..(at + len) as usize]
}
fn slice_mut(buf: &mut [u8], at: u64, len: u64) -> &mut [u8] {
    &mut buf[at as usize..(at + len) as usize]
}

#[cfg(test)]
mod tests;
