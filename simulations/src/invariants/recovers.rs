//! RECOVERS: when the faults stop, every session runs again with nobody's help, every checkpoint has its copies, and no
//! rot is left.

use crate::world::Inner;
use ks_raft::{Durability, FleetState, Wanted};

/// A session whose effects were seen within this time runs, milliseconds.
const RUNS_WITHIN_MS: u64 = 5_000;

/// What it found.
#[derive(Debug, Default)]
pub struct Recovers {
    /// What it found.
    pub violations: Vec<String>,
}

/// Everything that is not well, at the end of a run.
pub fn ills(world: &Inner, state: &FleetState, now_ms: u64) -> Vec<String> {
    let mut out = Vec::new();
    for s in state.sessions.values().filter(|s| !s.tombstone) {
        let name = &s.name;
        if s.wanted != Wanted::Running {
            out.push(format!("{name} is {:?}: {}", s.wanted, s.reason));
        }
        match world.invariants.fenced.accepted.get(&s.id) {
            Some((at, _)) if at + RUNS_WITHIN_MS >= now_ms => {}
            last => out.push(format!("{name} (owner {}) does not run; its last effect was {last:?}", s.owner)),
        }
        let newest = s.checkpoints.values().rev().filter(|c| !c.branch).nth(1);
        if let Some(c) = newest.filter(|c| state.durability(s, c) != Durability::Durable) {
            out.push(format!("c{} of {name} is {}", c.info.number, state.durability(s, c).as_str()));
        }
    }
    for (n, node) in &world.nodes {
        let rotten = node.store.rotten().len();
        if rotten > 0 {
            out.push(format!("node {n} has {rotten} rotten objects"));
        }
    }
    out
}
