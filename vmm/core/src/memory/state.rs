//! Where the truth of each page of guest memory lies. Pure; its owner locks it.
//!
//! A page is *settled* once its truth is in the memory file (where a hole is zeros), and unsettled while its truth is
//! still the chunk that the restore named:
//!
//!   unsettled --filled--> settled        the chunk's bytes were placed
//!   unsettled --discard-> settled        the guest gave the page back: a hole, zeros; the chunk is never placed there
//!   settled   --discard-> settled        zeros from now on, and the chunk is dirty
//!
//! Settled never goes back, so an old chunk can never cover newer data; and only settled pages are served zeros, so
//! zeros can never stand where a chunk's data was due. Fault server, prefetcher and discards all go through here.

use ks_proto::{CHUNK_BYTES, ChunkId};
use std::collections::BTreeSet;

/// Pages in a chunk; one bit each in a `u16`.
pub const CHUNK_PAGES: u64 = CHUNK_BYTES as u64 / super::uffd::PAGE_BYTES;
/// All pages of a chunk.
pub const ALL: u16 = u16::MAX;

/// What a fault needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Serve {
    /// The caller loads this chunk: it is marked loading until `release`.
    Load(u32),
    /// The page's truth is in the file: zeros if it is a hole, else it is there already.
    Zero(u64),
    /// Another thread loads that chunk and wakes the waiter.
    Wait,
}

/// The state of every page.
#[derive(Debug, Clone)]
pub struct PageStates {
    settled: Vec<u16>,
    loading: Vec<bool>,
    // Invariant: the number of chunks with an unsettled page.
    missing: usize,
    // Chunks that changed in ways that write tracking does not see, and those of failed checkpoints.
    dirty: BTreeSet<u32>,
}

impl PageStates {
    /// Every page settled: a booting VM, or memory that was loaded eagerly.
    pub fn settled(chunks: usize) -> Self {
        Self { settled: vec![ALL; chunks], loading: vec![false; chunks], missing: 0, dirty: BTreeSet::new() }
    }
    /// Every page of a chunk that is not zeros is unsettled.
    pub fn missing(refs: &[ChunkId]) -> Self {
        let settled: Vec<u16> = refs.iter().map(|id| if id.is_zero() { ALL } else { 0 }).collect();
        let missing = settled.iter().filter(|s| **s != ALL).count();
        Self { loading: vec![false; refs.len()], settled, missing, dirty: BTreeSet::new() }
    }
    /// Chunks with an unsettled page.
    pub fn missing_chunks(&self) -> usize {
        self.missing
    }
    /// The settled pages of a chunk.
    pub fn settled_pages(&self, chunk: u32) -> u16 {
        self.settled[chunk as usize]
    }
    /// A thread waits for `page`.
    pub fn fault(&mut self, page: u64) -> Serve {
        let (chunk, bit) = split(page);
        if self.settled[chunk as usize] & bit != 0 {
            Serve::Zero(page)
        } else if self.claim(chunk) {
            Serve::Load(chunk)
        } else {
            Serve::Wait
        }
    }
    /// True if the caller now loads `chunk`; false if nothing is missing there or another thread loads it.
    pub fn claim(&mut self, chunk: u32) -> bool {
        let c = chunk as usize;
        let free = !self.loading[c] && self.settled[c] != ALL;
        self.loading[c] |= free;
        free
    }
    /// Pages of a chunk that its bytes may be placed on now.
    pub fn wanted(&self, chunk: u32) -> u16 {
        !self.settled[chunk as usize]
    }
    /// Those pages were placed.
    pub fn filled(&mut self, chunk: u32, pages: u16) {
        self.settle(chunk, pages);
    }
    /// The loader of `chunk` is done with it, well or not.
    pub fn release(&mut self, chunk: u32) {
        self.loading[chunk as usize] = false;
    }
    /// Whole pages were given back.
    pub fn discard(&mut self, first_page: u64, pages: u64) {
        for page in first_page..first_page + pages {
            let (chunk, bit) = split(page);
            self.settle(chunk, bit);
            self.dirty.insert(chunk);
        }
    }
    /// Chunks that changed unseen by write tracking; none are left.
    pub fn take_dirty(&mut self) -> BTreeSet<u32> {
        std::mem::take(&mut self.dirty)
    }
    /// How many chunks `take_dirty` would give.
    pub fn dirty_count(&self) -> usize {
        self.dirty.len()
    }
    /// Chunks that the next checkpoint must look at.
    pub fn put_back(&mut self, chunks: impl IntoIterator<Item = u32>) {
        self.dirty.extend(chunks);
    }

    fn settle(&mut self, chunk: u32, pages: u16) {
        let s = &mut self.settled[chunk as usize];
        let was = *s;
        *s |= pages;
        if was != ALL && *s == ALL {
            self.missing -= 1;
        }
    }
}

fn split(page: u64) -> (u32, u16) {
    let chunk = u32::try_from(page / CHUNK_PAGES).expect("memory has at most 2^24 chunks");
    (chunk, 1 << (page % CHUNK_PAGES))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, Clone)]
    enum Op {
        Fault(u64),
        Claim(u32),
        Fill(u32, u16),
        Release(u32),
        Discard(u64, u64),
    }
    const CHUNKS: u32 = 4;

    fn op() -> impl Strategy<Value = Op> {
        let pages = u64::from(CHUNKS) * CHUNK_PAGES;
        prop_oneof![
            (0..pages).prop_map(Op::Fault),
            (0..CHUNKS).prop_map(Op::Claim),
            (0..CHUNKS, any::<u16>()).prop_map(|(c, m)| Op::Fill(c, m)),
            (0..CHUNKS).prop_map(Op::Release),
            (0..pages, 1..40u64).prop_map(move |(p, n)| Op::Discard(p, n.min(pages - p))),
        ]
    }

    proptest! {
        // The model: what a page of memory shows. None is a hole; a chunk's page shows its own number.
        #[test]
        fn no_zeros_where_data_is_due_and_no_old_data_after_a_discard(ops in proptest::collection::vec(op(), 0..120)) {
            let refs: Vec<ChunkId> = (0..CHUNKS).map(|c| if c == 3 { ChunkId::ZERO } else { ChunkId([c as u8 + 1; 32]) }).collect();
            let mut s = PageStates::missing(&refs);
            let pages = u64::from(CHUNKS) * CHUNK_PAGES;
            let truth_at_start = |p: u64| if p / CHUNK_PAGES == 3 { 0 } else { p + 1 };
            let mut truth: Vec<u64> = (0..pages).map(truth_at_start).collect();
            let mut file: Vec<Option<u64>> = vec![None; pages as usize];
            let mut loader: BTreeSet<u32> = BTreeSet::new();
            for op in ops {
                match op {
                    Op::Fault(p) => match s.fault(p) {
                        Serve::Zero(q) => {
                            prop_assert_eq!(p, q);
                            file[p as usize].get_or_insert(0);
                            prop_assert_eq!(file[p as usize], Some(truth[p as usize]), "served what the page is");
                        }
                        Serve::Load(c) => prop_assert!(loader.insert(c), "one loader"),
                        Serve::Wait => prop_assert!(loader.contains(&((p / CHUNK_PAGES) as u32)), "who waits is woken by a loader"),
                    },
                    Op::Claim(c) => if s.claim(c) { prop_assert!(loader.insert(c)); },
                    Op::Fill(c, subset) => if loader.contains(&c) {
                        let mask = s.wanted(c) & subset;
                        for b in 0..CHUNK_PAGES {
                            if mask >> b & 1 == 1 {
                                let p = u64::from(c) * CHUNK_PAGES + b;
                                prop_assert_eq!(file[p as usize], None, "never placed over newer content");
                                file[p as usize] = Some(p + 1);
                                prop_assert_eq!(file[p as usize], Some(truth[p as usize]), "old data never after a discard");
                            }
                        }
                        s.filled(c, mask);
                    },
                    Op::Release(c) => if loader.remove(&c) { s.release(c); },
                    Op::Discard(p, n) => {
                        s.discard(p, n);
                        for q in p..p + n {
                            truth[q as usize] = 0;
                            file[q as usize] = None;
                            prop_assert!(s.dirty.contains(&((q / CHUNK_PAGES) as u32)));
                        }
                    }
                }
                let missing = (0..CHUNKS).filter(|c| s.settled_pages(*c) != ALL).count();
                prop_assert_eq!(s.missing_chunks(), missing);
            }
        }
    }
}
