//! A bounded cache of decoded segments, so that a plan of an unchanged memory map costs no reading.

use ks_proto::ids::ChunkId;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Segments in one generation: 16 KiB each, two generations, so at most 32 MiB.
const GENERATION: usize = 1024;

/// Two generations: what was used since the last turn, and what was used in the one before.
#[derive(Default)]
pub struct SegmentCache {
    young: BTreeMap<ChunkId, Arc<Vec<ChunkId>>>,
    old: BTreeMap<ChunkId, Arc<Vec<ChunkId>>>,
}

impl SegmentCache {
    /// The references of a segment, if cached.
    pub fn get(&mut self, id: &ChunkId) -> Option<Arc<Vec<ChunkId>>> {
        if let Some(refs) = self.young.get(id) {
            return Some(refs.clone());
        }
        let refs = self.old.remove(id)?;
        self.put(*id, refs.clone());
        Some(refs)
    }
    /// Keeps a segment that was verified.
    pub fn put(&mut self, id: ChunkId, refs: Arc<Vec<ChunkId>>) {
        if self.young.len() >= GENERATION {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(id, refs);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn used_segments_survive_and_the_cache_stays_bounded() {
        let id = |n: usize| {
            let mut b = [1u8; 32];
            b[..8].copy_from_slice(&n.to_le_bytes());
            ChunkId(b)
        };
        let mut c = SegmentCache::default();
        for n in 0..10 * GENERATION {
            c.put(id(n), Arc::new(vec![]));
            assert!(c.get(&id(0)).is_some(), "touched every time, so kept ({n})");
        }
        assert!(c.young.len() + c.old.len() <= 2 * GENERATION);
        assert!(c.get(&id(1)).is_none());
    }
}
