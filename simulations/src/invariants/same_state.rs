//! SAME-STATE: nodes that applied the same number of entries have the same state, in all their lives. What all other
//! promises rest on: an answered entry is in the log for good, and applying it depends on nothing else.

use ks_raft::FleetState;
use std::collections::BTreeMap;

/// Every so many entries a state is compared; states that have parted do not come together again.
const EVERY: u64 = 8;

/// What it saw.
#[derive(Debug, Default)]
pub struct SameState {
    // By index of the last entry: a hash of the state, and the node that had it first.
    seen: BTreeMap<u64, (blake3::Hash, u64)>,
    /// What it found.
    pub violations: Vec<String>,
}

impl SameState {
    /// A node applied everything up to `index`.
    pub fn applied(&mut self, at_ms: u64, node: u64, index: u64, state: &FleetState) {
        if !index.is_multiple_of(EVERY) {
            return;
        }
        let bytes = serde_json::to_vec(state).expect("a state is plain data");
        let hash = blake3::hash(&bytes);
        let (first, other) = *self.seen.entry(index).or_insert((hash, node));
        if first != hash && self.violations.is_empty() {
            self.violations.push(format!("at {at_ms} ms the states of nodes {node} and {other} differ after entry {index}"));
        }
    }
}
