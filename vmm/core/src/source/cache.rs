//! A bounded least-recently-used map of decoded chunks.

use ks_proto::ChunkId;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Decoded chunks, the least recently used dropped first. Pure; the owner locks it.
#[derive(Debug)]
pub struct Lru {
    bytes_max: usize,
    bytes: usize,
    tick: u64,
    // Invariant: `by_use` holds exactly the ticks of `by_id`.
    by_id: HashMap<ChunkId, (u64, Arc<Vec<u8>>)>,
    by_use: BTreeMap<u64, ChunkId>,
}

impl Lru {
    /// An empty cache of at most `bytes_max` bytes.
    pub fn new(bytes_max: usize) -> Self {
        Self { bytes_max, bytes: 0, tick: 0, by_id: HashMap::new(), by_use: BTreeMap::new() }
    }
    /// The chunk, now the most recently used.
    pub fn get(&mut self, id: &ChunkId) -> Option<Arc<Vec<u8>>> {
        self.tick += 1;
        let entry = self.by_id.get_mut(id)?;
        self.by_use.remove(&entry.0);
        entry.0 = self.tick;
        self.by_use.insert(self.tick, *id);
        Some(Arc::clone(&entry.1))
    }
    /// Keeps `plain`, dropping the least recently used to stay within bounds.
    pub fn put(&mut self, id: ChunkId, plain: Arc<Vec<u8>>) {
        if plain.len() > self.bytes_max {
            return;
        }
        self.tick += 1;
        self.bytes += plain.len();
        if let Some((tick, old)) = self.by_id.insert(id, (self.tick, plain)) {
            self.by_use.remove(&tick);
            self.bytes -= old.len();
        }
        self.by_use.insert(self.tick, id);
        while self.bytes > self.bytes_max {
            let Some((_, oldest)) = self.by_use.pop_first() else { break };
            if let Some((_, gone)) = self.by_id.remove(&oldest) {
                self.bytes -= gone.len();
            }
        }
    }
    /// Bytes held.
    #[cfg(test)]
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_goes_first_and_the_bound_holds() {
        let id = |b| ChunkId([b; 32]);
        let mut lru = Lru::new(30);
        for b in 1..=3 {
            lru.put(id(b), Arc::new(vec![b; 10]));
        }
        assert!(lru.get(&id(1)).is_some());
        lru.put(id(4), Arc::new(vec![4; 10]));
        assert!(lru.get(&id(2)).is_none(), "2 was used least recently");
        assert_eq!(lru.get(&id(1)).as_deref(), Some(&vec![1; 10]));
        lru.put(id(1), Arc::new(vec![9; 20]));
        assert_eq!(lru.bytes(), 30);
        lru.put(id(5), Arc::new(vec![5; 31]));
        assert!(lru.get(&id(5)).is_none(), "larger than the whole cache");
        assert_eq!(lru.by_id.len(), lru.by_use.len());
    }
}
