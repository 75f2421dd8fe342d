//! One node's chunk store, modelled: objects named by their BLAKE3, synced or not, perhaps rotten; pins; collection.
//!
//! A checkpoint is a manifest (names of three chunks and of its session) and its chunks. The chunks hold the counter at
//! three coarsenesses, so that neighbours share chunks and a mixture of two checkpoints shows.

use ks_proto::{CheckpointId, RunToken, SessionId};
use std::collections::{BTreeMap, BTreeSet};

/// Name of an object.
pub type Name = [u8; 32];

/// What each chunk divides the counter by.
const COARSE: [u64; 3] = [1, 16, 256];

#[derive(Debug, Clone)]
struct Object {
    bytes: Vec<u8>,
    synced: bool,
    // The damaged bytes that this object takes the place of once it is synced.
    under: Option<Vec<u8>>,
}

/// Why a checkpoint is kept although no record may name this node yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pin {
    /// Its session.
    pub session: SessionId,
    /// The run that took it.
    pub token: RunToken,
    /// It is being fetched or was fetched (and not taken here).
    pub fetched: bool,
    /// Fetches and captures of it that go on.
    pub under_way: u32,
    /// The applied state covers the end of the last of them. An older state says nothing about this pin.
    pub settled: bool,
}

/// The store.
#[derive(Debug, Clone, Default)]
pub struct Store {
    objects: BTreeMap<Name, Object>,
    /// Pins by checkpoint.
    pub pins: BTreeMap<CheckpointId, Pin>,
}

/// A checkpoint as bytes.
#[derive(Debug, Clone)]
pub struct Captured {
    /// Its name.
    pub id: CheckpointId,
    /// Bytes of the manifest.
    pub manifest: Vec<u8>,
    /// Bytes of the chunks.
    pub chunks: Vec<Vec<u8>>,
}

impl Object {
    fn unsynced(bytes: &[u8]) -> Self {
        Self { bytes: bytes.to_vec(), synced: false, under: None }
    }
}

fn name(bytes: &[u8]) -> Name {
    *blake3::hash(bytes).as_bytes()
}

/// The checkpoint of a session whose memory says `memory` and whose disk says `disk` (equal at every instant).
pub fn capture(session: SessionId, token: RunToken, memory: u64, disk: u64) -> Captured {
    let chunk = |(at, coarse): (usize, &u64)| {
        let value = if at == 0 { memory } else { disk };
        let mut b = session.0.to_vec();
        b.extend(coarse.to_be_bytes());
        b.extend((value / coarse).to_be_bytes());
        b
    };
    let chunks: Vec<Vec<u8>> = COARSE.iter().enumerate().map(chunk).collect();
    let mut manifest = session.0.to_vec();
    for n in [token.generation, token.epoch, token.run] {
        manifest.extend(n.to_be_bytes());
    }
    chunks.iter().for_each(|c| manifest.extend(name(c)));
    Captured { id: CheckpointId(name(&manifest)), manifest, chunks }
}

/// Names of the chunks in a manifest; None for bytes that are none.
pub fn chunk_names(manifest: &[u8]) -> Option<Vec<Name>> {
    let rest = manifest.get(16 + 24..)?;
    let names: Vec<Name> = rest.chunks_exact(32).filter_map(|c| c.try_into().ok()).collect();
    (names.len() == COARSE.len() && rest.len() == 32 * COARSE.len()).then_some(names)
}

impl Store {
    /// Pins a checkpoint before a fetch or capture of it begins.
    pub fn pin(&mut self, id: CheckpointId, session: SessionId, token: RunToken, fetched: bool) {
        let pin = self.pins.entry(id).or_insert(Pin { session, token, fetched, under_way: 0, settled: false });
        (pin.under_way, pin.settled) = (pin.under_way + 1, false);
    }
    /// That fetch or capture is over, and the applied state covers its end.
    pub fn settle(&mut self, id: &CheckpointId) {
        if let Some(pin) = self.pins.get_mut(id) {
            pin.under_way = pin.under_way.saturating_sub(1);
            pin.settled = pin.under_way == 0;
        }
    }
    /// A daemon died: what it had under way ends here, and what it had applied is not known to the next one.
    pub fn unsettle(&mut self) {
        self.pins.values_mut().for_each(|pin| (pin.under_way, pin.settled) = (0, false));
    }
    /// The applied state covers everything that an earlier daemon did.
    pub fn settle_idle(&mut self) {
        self.pins.values_mut().filter(|pin| pin.under_way == 0).for_each(|pin| pin.settled = true);
    }
    /// Adds an object, not synced.
    pub fn put(&mut self, bytes: &[u8]) {
        self.objects.entry(name(bytes)).or_insert_with(|| Object::unsynced(bytes));
    }
    /// Adds an object, or replaces a rotten one, not synced.
    pub fn mend(&mut self, bytes: &[u8]) {
        let new = Object::unsynced(bytes);
        match self.objects.get_mut(&name(bytes)) {
            Some(old) if old.bytes != bytes => {
                let under = if old.synced { Some(std::mem::take(&mut old.bytes)) } else { old.under.take() };
                *old = Object { under, ..new };
            }
            Some(_) => {}
            None => drop(self.objects.insert(name(bytes), new)),
        }
    }
    /// Names that are not synced: what a sync that begins now covers.
    pub fn unsynced(&self) -> Vec<Name> {
        self.objects.iter().filter(|(_, o)| !o.synced).map(|(n, _)| *n).collect()
    }
    /// That sync is done.
    pub fn synced(&mut self, names: &[Name]) {
        for n in names {
            if let Some(o) = self.objects.get_mut(n) {
                (o.synced, o.under) = (true, None);
            }
        }
    }
    /// The power failed.
    pub fn lose_unsynced(&mut self) {
        self.objects.retain(|_, o| {
            if let Some(under) = o.under.take().filter(|_| !o.synced) {
                (o.bytes, o.synced) = (under, true);
            }
            o.synced
        });
    }
    /// An object whose bytes match its name.
    pub fn get(&self, n: &Name) -> Option<Vec<u8>> {
        self.objects.get(n).filter(|o| name(&o.bytes) == *n).map(|o| o.bytes.clone())
    }
    /// True if it is there, rotten or not.
    pub fn has(&self, n: &Name, synced: bool) -> bool {
        self.objects.get(n).is_some_and(|o| o.synced || o.under.is_some() || !synced)
    }
    /// True if the bytes are there and damaged.
    pub fn is_rotten(&self, n: &Name) -> bool {
        self.objects.get(n).is_some_and(|o| name(&o.bytes) != *n)
    }
    /// True if manifest and chunks are there (rot is not looked at), and synced if so wanted.
    pub fn holds(&self, id: &CheckpointId, synced: bool) -> bool {
        let there = |n: &Name| self.has(n, synced);
        let Some(o) = self.objects.get(&id.0) else { return false };
        // A rotten manifest was whole once; which chunks it needs cannot be read, and a scrub will mend it.
        there(&id.0) && chunk_names(&o.bytes).is_none_or(|c| self.is_rotten(&id.0) || c.iter().all(there))
    }
    /// The whole closure, verified: the counter, and whether all of it is from the same instant.
    pub fn read(&self, id: &CheckpointId) -> Option<(u64, bool)> {
        let chunks = chunk_names(&self.get(&id.0)?)?;
        let value = |n: &Name| self.get(n).and_then(|b| b.get(24..32).and_then(|v| v.try_into().ok()).map(u64::from_be_bytes));
        let values: Vec<u64> = chunks.iter().map(value).collect::<Option<_>>()?;
        Some((values[0], values.windows(2).all(|w| w[0] / 16 == w[1])))
    }
    /// Flips a bit of the object.
    pub fn rot(&mut self, n: &Name) {
        if let Some(o) = self.objects.get_mut(n) {
            o.bytes[0] ^= 1;
        }
    }
    /// Rotten objects.
    pub fn rotten(&self) -> Vec<Name> {
        self.objects.keys().filter(|n| self.is_rotten(n)).copied().collect()
    }
    /// Drops what no kept checkpoint reaches; gives back how much.
    pub fn collect(&mut self, keep: &BTreeSet<CheckpointId>) -> usize {
        let mut live: BTreeSet<Name> = keep.iter().map(|c| c.0).collect();
        for id in keep {
            let chunks = self.objects.get(&id.0).and_then(|o| chunk_names(&o.bytes));
            live.extend(chunks.unwrap_or_default());
        }
        // A rotten manifest hides its chunks: nothing is dropped while there is one.
        if live.iter().any(|n| self.is_rotten(n)) {
            return 0;
        }
        let before = self.objects.len();
        self.objects.retain(|n, _| live.contains(n));
        before - self.objects.len()
    }
    /// What there is of a checkpoint, for a report.
    pub fn describe(&self, id: &CheckpointId) -> String {
        let word = |n: &Name| match self.objects.get(n) {
            None => "missing",
            Some(_) if self.is_rotten(n) => "rotten",
            Some(o) if o.synced => "synced",
            Some(_) => "unsynced",
        };
        let chunks = self.get(&id.0).and_then(|m| chunk_names(&m)).unwrap_or_default();
        let chunks: Vec<&str> = chunks.iter().map(word).collect();
        format!("manifest {}, chunks {}, pin {:?}", word(&id.0), chunks.join(" "), self.pins.get(id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_is_whole_absent_or_known_to_be_damaged() {
        let (s, t) = (SessionId([1; 16]), RunToken::default());
        let c = capture(s, t, 1000, 1000);
        let mut store = Store::default();
        c.chunks.iter().for_each(|b| store.put(b));
        assert!(!store.holds(&c.id, false));
        store.put(&c.manifest);
        assert!(store.holds(&c.id, false) && !store.holds(&c.id, true));
        assert_eq!(store.read(&c.id), Some((1000, true)));
        let names = store.unsynced();
        store.synced(&names);
        assert!(store.holds(&c.id, true));
        let torn = capture(s, t, 1000, 900);
        torn.chunks.iter().for_each(|b| store.put(b));
        store.put(&torn.manifest);
        assert_eq!(store.read(&torn.id), Some((1000, false)));
        store.lose_unsynced();
        assert_eq!(store.read(&torn.id), None);
        let chunk = name(&c.chunks[0]);
        store.rot(&chunk);
        assert_eq!((store.read(&c.id), store.rotten()), (None, vec![chunk]));
        store.mend(&c.chunks[0]);
        assert_eq!(store.read(&c.id), Some((1000, true)));
        assert_eq!(store.collect(&BTreeSet::from([c.id])), 0);
        assert_eq!(store.collect(&BTreeSet::new()), 4);
    }
}
