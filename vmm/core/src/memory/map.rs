//! Mappings: the guest's memory for an engine in this process, and the pool that dirty chunks are copied into.
#![expect(unsafe_code, reason = "mappings and raw access to memory that a guest writes")]

use super::Memory;
use ks_proto::CHUNK_BYTES;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::os::fd::AsFd;

/// Guest memory mapped shared and writable into this process. Guest memory changes at any time, so there are no
/// references into it: bytes are copied in and out.
#[derive(Debug)]
pub struct GuestMap {
    base: *mut u8,
    len: usize,
}

// SAFETY: it is a plain address range that stays mapped until drop; all access copies through raw pointers.
unsafe impl Send for GuestMap {}
// SAFETY: as above; racing copies are the guest's business and tear at most within themselves.
unsafe impl Sync for GuestMap {}

impl GuestMap {
    /// Maps all of `memory`.
    pub fn new(memory: &Memory) -> rustix::io::Result<Self> {
        let len = memory.bytes() as usize;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address that the kernel picks; nothing else refers to it.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, memory.fd().as_fd(), 0)? };
        Ok(Self { base: base.cast(), len })
    }
    /// Address of memory offset 0.
    pub fn base(&self) -> u64 {
        self.base as u64
    }
    /// Bytes mapped.
    pub fn len(&self) -> u64 {
        self.len as u64
    }
    /// Never true: memory has at least one chunk.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
    /// Copies guest memory out. Faults pages in.
    ///
    /// # Panics
    /// If the range is outside.
    pub fn read(&self, offset: u64, buf: &mut [u8]) {
        let at = self.check(offset, buf.len());
        // SAFETY: `check` holds the range inside the mapping; `buf` is ours and cannot overlap it.
        unsafe { std::ptr::copy_nonoverlapping(at, buf.as_mut_ptr(), buf.len()) }
    }
    /// Copies into guest memory. Faults pages in and makes them dirty.
    ///
    /// # Panics
    /// If the range is outside.
    pub fn write(&self, offset: u64, data: &[u8]) {
        let at = self.check(offset, data.len());
        // SAFETY: as in `read`.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), at, data.len()) }
    }
    /// madvise(MADV_REMOVE) on whole pages, as a device in another process would discard.
    pub fn remove(&self, offset: u64, len: u64) -> rustix::io::Result<()> {
        let at = self.check(offset, len as usize);
        // SAFETY: the range is inside our own shared mapping, into which no references exist.
        unsafe { rustix::mm::madvise(at.cast(), len as usize, Advice::LinuxRemove) }
    }

    fn check(&self, offset: u64, len: usize) -> *mut u8 {
        assert!(offset.checked_add(len as u64).is_some_and(|end| end <= self.len as u64), "outside guest memory");
        // SAFETY: `offset` is at most `len`, so the result stays inside (or one past) the mapping.
        unsafe { self.base.add(offset as usize) }
    }
}

impl Drop for GuestMap {
    fn drop(&mut self) {
        // SAFETY: our own mapping, and no reference into it exists.
        let _ = unsafe { rustix::mm::munmap(self.base.cast(), self.len) };
    }
}

/// Guest memory mapped read-only and not registered with any userfaultfd, to copy from faster than pread does.
///
/// Reading a hole through it would fill the hole with zeros, also where a restored chunk is still due: callers name
/// the pages, and name only settled ones.
#[derive(Debug)]
pub struct GuestView {
    base: *mut u8,
    len: usize,
}

// SAFETY: as for `GuestMap`.
unsafe impl Send for GuestView {}
// SAFETY: as for `GuestMap`.
unsafe impl Sync for GuestView {}

impl GuestView {
    /// Maps all of `memory`.
    pub fn new(memory: &Memory) -> rustix::io::Result<Self> {
        let len = memory.bytes() as usize;
        // SAFETY: a fresh mapping at an address that the kernel picks; nothing else refers to it. The file is sealed
        // against shrinking, so no access can be beyond its end.
        let base =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED, memory.fd().as_fd(), 0)? };
        Ok(Self { base: base.cast(), len })
    }
    /// Copies the named pages of a chunk out; the others are zeros in `buf`.
    ///
    /// # Panics
    /// If the chunk is outside, or `buf` is not one chunk.
    pub fn copy_pages(&self, chunk: u32, pages: u16, buf: &mut [u8]) {
        let start = chunk as usize * CHUNK_BYTES;
        assert!(start + CHUNK_BYTES <= self.len && buf.len() == CHUNK_BYTES, "a whole chunk of guest memory");
        for (n, page) in buf.chunks_exact_mut(super::uffd::PAGE_BYTES as usize).enumerate() {
            if pages >> n & 1 == 0 {
                page.fill(0);
                continue;
            }
            // SAFETY: inside the mapping by the assertion above; `page` is ours and cannot overlap it. The guest may write
            // at the same time only if the caller does not mind torn bytes (it is paused).
            unsafe { std::ptr::copy_nonoverlapping(self.base.add(start + n * page.len()), page.as_mut_ptr(), page.len()) }
        }
    }
}

impl Drop for GuestView {
    fn drop(&mut self) {
        // SAFETY: our own mapping, and no reference into it exists.
        let _ = unsafe { rustix::mm::munmap(self.base.cast(), self.len) };
    }
}

/// Room for copies of dirty chunks: reserved for all of memory, backed only where prefaulted or written.
#[derive(Debug)]
pub struct Pool {
    base: *mut u8,
    slots: usize,
    // Slots from 0 that are backed now.
    ready: usize,
}

// SAFETY: an anonymous mapping that only this value refers to.
unsafe impl Send for Pool {}
// SAFETY: shared access only reads it.
unsafe impl Sync for Pool {}

impl Pool {
    /// Reserves addresses for `slots` chunks; takes no memory yet.
    pub fn new(slots: usize) -> rustix::io::Result<Self> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh anonymous mapping at an address that the kernel picks.
        let base = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), slots * CHUNK_BYTES, prot, flags)? };
        Ok(Self { base: base.cast(), slots, ready: 0 })
    }
    /// Slots that it has.
    pub fn slots(&self) -> usize {
        self.slots
    }
    /// Bytes backed now, at most.
    pub fn ready_bytes(&self) -> usize {
        self.ready * CHUNK_BYTES
    }
    /// Backs slots `0..slots` with memory, so that filling them takes no page fault.
    pub fn prefault(&mut self, slots: usize) -> rustix::io::Result<()> {
        let slots = slots.min(self.slots);
        if slots <= self.ready {
            return Ok(());
        }
        let (at, len) = (self.ready * CHUNK_BYTES, (slots - self.ready) * CHUNK_BYTES);
        // SAFETY: inside our own anonymous mapping; populating changes no contents.
        unsafe { rustix::mm::madvise(self.base.add(at).cast(), len, Advice::LinuxPopulateWrite)? };
        self.ready = slots;
        Ok(())
    }
    /// A slot to fill.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn slot_mut(&mut self, slot: usize) -> &mut [u8] {
        assert!(slot < self.slots, "slot {slot} of {}", self.slots);
        self.ready = self.ready.max(slot + 1);
        // SAFETY: inside our mapping, which is readable and writable; `&mut self` makes it the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(slot * CHUNK_BYTES), CHUNK_BYTES) }
    }
    /// Fills slots `0..count` by `fill(slot, bytes)`, on two threads if there are many.
    ///
    /// # Panics
    /// If there are not that many slots.
    pub fn fill(&mut self, count: usize, fill: impl Fn(usize, &mut [u8]) + Sync) {
        const FEW: usize = 128;
        assert!(count <= self.slots, "{count} slots of {}", self.slots);
        self.ready = self.ready.max(count);
        // SAFETY: inside our mapping, which is readable and writable; `&mut self` makes it the only reference.
        let all = unsafe { std::slice::from_raw_parts_mut(self.base, count * CHUNK_BYTES) };
        let run = |first: usize, part: &mut [u8]| {
            for (n, slot) in part.chunks_exact_mut(CHUNK_BYTES).enumerate() {
                fill(first + n, slot);
            }
        };
        if count < FEW {
            return run(0, all);
        }
        let (low, high) = all.split_at_mut(count / 2 * CHUNK_BYTES);
        std::thread::scope(|s| {
            s.spawn(|| run(count / 2, high));
            run(0, low);
        });
    }
    /// A slot's bytes.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn slot(&self, slot: usize) -> &[u8] {
        assert!(slot < self.slots, "slot {slot} of {}", self.slots);
        // SAFETY: inside our mapping; writers need `&mut self`.
        unsafe { std::slice::from_raw_parts(self.base.add(slot * CHUNK_BYTES), CHUNK_BYTES) }
    }
    /// Gives back the memory of `from..to`, but keeps the first `keep` slots backed.
    pub fn release(&mut self, from: usize, to: usize, keep: usize) {
        let (from, to) = (from.max(keep), to.min(self.slots));
        if from >= to {
            return;
        }
        // SAFETY: inside our own anonymous mapping; `&mut self` means that no slice into it is alive.
        let gone = unsafe {
            rustix::mm::madvise(self.base.add(from * CHUNK_BYTES).cast(), (to - from) * CHUNK_BYTES, Advice::LinuxDontNeed)
        };
        if let Err(e) = gone {
            tracing::warn!(error = %e, "the copy pool keeps memory that it should give back");
        } else if to >= self.ready {
            self.ready = self.ready.min(from);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: our own mapping; `&mut self` means that no slice into it is alive.
        let _ = unsafe { rustix::mm::munmap(self.base.cast(), self.slots * CHUNK_BYTES) };
    }
}
