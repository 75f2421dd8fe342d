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
    /// Settled pages that may hold data; the other settled ones are zeros.
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
    /// How many chunks a collect would find now, about; the guest may run. Also looks for holes that replaced data
    /// without a remove event, which takes too long for the pause.
    pub fn prescan(&self) -> usize {
        let s = &self.shared;
        let all = lock(&s.inner).all_dirty;
        match s.tracked.get() {
            Some(t) if !all => match (self.find_punched(), t.prescan()) {
                (Ok(()), Ok(ranges)) => chunks_of(&ranges).len() + lock(&s.inner).states.dirty_count(),
                (Err(_), _) | (_, Err(_)) => self.chunks_in_use(),
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
            Some(Ok(ranges)) => Some(masks_of(&ranges, inner.had.len())),
            Some(Err(e)) => {
                tracing::warn!(error = %e, "the dirty tracker failed; this checkpoint looks at all memory");
                None
            }
            None => None,
        };
        let all = inner.all_dirty || written.is_none();
        inner.all_dirty = true;
        if all {
            inner.had = extents::data_pages(self.fd(), self.bytes()).map_err(|e| io_fault("find holes", e))?;
        }
        let unseen = inner.states.take_dirty();
        let mut dirty: Vec<DirtyChunk> = Vec::new();
        for c in 0..inner.had.len() {
            let index = c as u32;
            let settled = inner.states.settled_pages(index);
            let written = written.as_ref().map_or(0, |w| w[c]) & settled;
            inner.had[c] |= written;
            let data = inner.had[c] & settled;
            let in_use = data != 0 || !inner.refs[c].is_zero();
            let changed = all || written != 0 || unseen.contains(&index);
            // A chunk that was and is all holes is zeros; one with no settled page is still what was restored.
            if changed && settled != 0 && in_use {
                dirty.push(DirtyChunk { index, settled, data });
            }
        }
        inner.all_dirty = false;
        let tracker = if tracked.is_some() { "wp-async" } else { "hash-scan" };
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

    fn find_punched(&self) -> Result<(), Errno> {
        let (had, settled) = {
            let inner = lock(&self.shared.inner);
            let settled: Vec<u16> = (0..inner.had.len()).map(|c| inner.states.settled_pages(c as u32)).collect();
            (inner.had.clone(), settled)
        };
        let now = extents::data_pages(self.fd(), self.bytes())?;
        let mut inner = lock(&self.shared.inner);
        let punched = (0..now.len()).filter(|&c| had[c] & !now[c] & settled[c] != 0).map(|c| c as u32);
        inner.states.put_back(punched);
        for c in 0..now.len() {
            // What was placed or given back since the scan began stays as it is known.
            inner.had[c] &= now[c] | !had[c];
        }
        Ok(())
    }

    fn chunks_in_use(&self) -> usize {
        extents::data_pages(self.fd(), self.bytes()).map_or(0, |m| m.iter().filter(|d| **d != 0).count())
    }
}

/// The pages that offset ranges cover, one mask per chunk.
fn masks_of(ranges: &[(u64, u64)], chunks: usize) -> Vec<u16> {
    let mut masks = vec![0; chunks];
    for (start, end) in ranges {
        extents::mark(&mut masks, start / PAGE_BYTES, end / PAGE_BYTES);
    }
    masks
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
