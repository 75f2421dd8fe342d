//! Guest memory as a checkpoint sees it: which chunks changed, their bytes, and what they are named once stored.

use super::uffd::PAGE_BYTES;
use super::{Memory, Shared, Tracked, extents, io_fault};
use crate::source::{ChunkSource, lock};
use ks_proto::control::Fault;
use ks_proto::{CHUNK_BYTES, ChunkId};
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// A chunk that may have changed since the last stored checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirtyChunk {
    /// Which one.
    pub index: u32,
    /// Pages whose truth is in the memory file; the others are still the restored chunk's.
    pub settled: u16,
    /// Pages that are not holes.
    pub data: u16,
}

/// What a pause found.
#[derive(Debug, Clone)]
pub struct Collected {
    /// Ascending.
    pub chunks: Vec<DirtyChunk>,
    /// `wp-async` or `hash-scan`: with the latter every chunk in use is listed.
    pub tracker: &'static str,
}

impl Memory {
    /// How many chunks a collect would find now, about. Changes nothing; the guest may run.
    pub fn prescan(&self) -> usize {
        let s = &self.shared;
        let all = lock(&s.inner).all_dirty;
        match s.tracked.get() {
            Some(t) if !all => match t.prescan() {
                Ok(ranges) => chunks_of(&ranges).len() + lock(&s.inner).states.dirty_count(),
                Err(_) => self.chunks_in_use(),
            },
            Some(_) | None => self.chunks_in_use(),
        }
    }
    /// The chunks that changed since the last collect; from now on they count as clean. Only while nothing writes guest
    /// memory. On an error the next collect lists everything.
    pub fn collect(&self) -> Result<Collected, Fault> {
        let s = &self.shared;
        let _removes_applied = lock(&s.events);
        let mut inner = lock(&s.inner);
        let tracked = s.tracked.get();
        let written = match tracked.map(Tracked::collect) {
            Some(Ok(ranges)) => Some(chunks_of(&ranges)),
            Some(Err(e)) => {
                tracing::warn!(error = %e, "the dirty tracker failed; this checkpoint looks at all memory");
                None
            }
            None => None,
        };
        let all = inner.all_dirty || written.is_none();
        inner.all_dirty = true;
        let now = extents::data_pages(self.fd(), self.bytes()).map_err(|e| io_fault("find holes", e))?;
        let unseen = inner.states.take_dirty();
        let mut dirty: Vec<DirtyChunk> = Vec::new();
        for (c, &data) in now.iter().enumerate() {
            let index = c as u32;
            let settled = inner.states.settled_pages(index);
            let in_use = data != 0 || !inner.refs[c].is_zero();
            let punched = inner.had[c] & !data & settled != 0;
            let changed =
                all && in_use || written.as_ref().is_some_and(|w| w.contains(&index)) || unseen.contains(&index) || punched;
            // A chunk that was and is all holes is zeros; one with no settled page is still what was restored.
            if changed && settled != 0 && in_use {
                dirty.push(DirtyChunk { index, settled, data });
            }
        }
        inner.had = now;
        inner.all_dirty = false;
        let done_loading = inner.missing_mode && inner.states.missing_chunks() == 0;
        let tracker = if tracked.is_some() { "wp-async" } else { "hash-scan" };
        if let (true, Some(t)) = (done_loading, tracked) {
            inner.missing_mode = false;
            if let Err(e) = leave_missing_mode(t) {
                tracing::warn!(error = %e, "guest memory could not be registered anew; the next checkpoint looks at all of it");
                inner.all_dirty = true;
            }
        }
        Ok(Collected { chunks: dirty, tracker })
    }
    /// True if writes are tracked; else every checkpoint hashes all memory in use.
    pub fn is_tracked(&self) -> bool {
        self.shared.tracked.get().is_some()
    }
    /// The bytes of a chunk in the memory file; holes read as zeros.
    pub fn read_chunk(&self, index: u32, buf: &mut [u8]) -> Result<(), Fault> {
        read_exact(&self.shared, u64::from(index) * CHUNK_BYTES as u64, buf)
    }
    /// These chunks were not stored: the next collect lists them again.
    pub fn put_back(&self, chunks: impl IntoIterator<Item = u32>) {
        lock(&self.shared.inner).states.put_back(chunks);
    }
    /// A checkpoint is stored: the chunks that changed are named so now.
    pub fn stored(&self, new_refs: &BTreeMap<u32, ChunkId>) {
        let mut inner = lock(&self.shared.inner);
        for (&chunk, &id) in new_refs {
            inner.refs[chunk as usize] = id;
        }
    }
    /// The chunks of the last stored checkpoint; zeros before the first one of a booted VM.
    pub fn stored_refs(&self) -> Vec<ChunkId> {
        lock(&self.shared.inner).refs.clone()
    }
    /// Where unsettled pages of `chunk` come from.
    pub fn restored_from(&self, chunk: u32) -> Option<(Arc<ChunkSource>, ChunkId)> {
        lock(&self.shared.inner).lazy.as_ref().map(|l| (Arc::clone(&l.source), l.refs[chunk as usize]))
    }

    fn chunks_in_use(&self) -> usize {
        extents::data_pages(self.fd(), self.bytes()).map_or(0, |m| m.iter().filter(|d| **d != 0).count())
    }
}

/// All is loaded: from now on the kernel itself gives zeros for holes. The VM is paused and its dirty set collected, so
/// that lifting the protection for a moment loses nothing.
fn leave_missing_mode(t: &Tracked) -> Result<(), Errno> {
    t.uffd.unregister(t.base, t.len)?;
    t.uffd.register(t.base, t.len, false)?;
    t.uffd.write_protect(t.base, t.len)
}

/// The chunks that offset ranges touch.
pub(super) fn chunks_of(ranges: &[(u64, u64)]) -> BTreeSet<u32> {
    debug_assert!(ranges.iter().all(|r| r.0 % PAGE_BYTES == 0 && r.1 % PAGE_BYTES == 0));
    let chunk = |at: u64| (at / CHUNK_BYTES as u64) as u32;
    ranges.iter().filter(|r| r.0 < r.1).flat_map(|r| chunk(r.0)..=chunk(r.1 - 1)).collect()
}

fn read_exact(s: &Shared, mut at: u64, mut buf: &mut [u8]) -> Result<(), Fault> {
    while !buf.is_empty() {
        let n = match rustix::io::pread(&s.file, &mut *buf, at) {
            Ok(0) => return Err(io_fault("read", Errno::IO)),
            Ok(n) => n,
            Err(Errno::INTR) => continue,
            Err(e) => return Err(io_fault("read", e)),
        };
        (at, buf) = (at + n as u64, &mut buf[n..]);
    }
    Ok(())
}
