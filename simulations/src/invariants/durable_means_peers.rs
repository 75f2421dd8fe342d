//! DURABLE-MEANS-PEERS: every node that the state names as a holder has the whole closure on stable storage, and what was
//! reported as durable is never lost to a session that goes on.

use crate::world::Inner;
use ks_proto::{CheckpointId, SessionId};
use ks_raft::{Durability, FleetState};
use std::collections::BTreeMap;

/// What it saw.
#[derive(Debug, Default)]
pub struct DurableMeansPeers {
    // Counter of the newest checkpoint that a client was told is durable.
    told: BTreeMap<SessionId, (u64, u64)>,
    reported: BTreeMap<(CheckpointId, u64), ()>,
    /// Checkpoints that were seen to be durable.
    pub durable_seen: u64,
    /// What it found.
    pub violations: Vec<String>,
}

/// Holders that lack some of a checkpoint that the state says they have.
pub fn missing(world: &Inner, state: &FleetState) -> Vec<(SessionId, CheckpointId, u64, String)> {
    let mut out = Vec::new();
    for s in state.sessions.values().filter(|s| !s.tombstone) {
        for c in s.checkpoints.values() {
            for node in state.holders(s, c) {
                let Some(store) = world.nodes.get(&node).map(|n| &n.store) else { continue };
                if !store.holds(&c.info.id, true) {
                    out.push((s.id, c.info.id, node, store.describe(&c.info.id)));
                }
            }
        }
    }
    out
}

impl DurableMeansPeers {
    /// Looks at the newest state and at all stores.
    pub fn check(&mut self, at_ms: u64, missing: &[(SessionId, CheckpointId, u64, String)]) {
        for (session, id, node, there) in missing {
            if self.reported.insert((*id, *node), ()).is_none() {
                let (s, c) = (session.short(), id.short());
                self.violations.push(format!(
                    "at {at_ms} ms node {node} is named as a holder of {c} of {s} and has not all of it synced: {there}"
                ));
            }
        }
    }

    /// A client reads the state: what it is told is durable must not be lost.
    pub fn client_reads(&mut self, state: &FleetState, counters: &BTreeMap<CheckpointId, u64>) {
        for s in state.sessions.values().filter(|s| !s.tombstone) {
            let line = s.checkpoints.values().rev().filter(|c| !c.branch);
            let newest = line.clone().find(|c| state.durability(s, c) == Durability::Durable);
            if let Some((number, counter)) = newest.and_then(|c| counters.get(&c.info.id).map(|v| (c.info.number, *v))) {
                let told = self.told.entry(s.id).or_default();
                if number > told.0 {
                    *told = (number, counter);
                    self.durable_seen += 1;
                }
            }
        }
    }

    /// A run begins at `counter`.
    pub fn begun(&mut self, at_ms: u64, session: SessionId, counter: u64) {
        let told = self.told.get(&session).copied().unwrap_or_default();
        if counter < told.1 {
            let s = session.short();
            self.violations.push(format!("at {at_ms} ms {s} goes on from {counter}; c{} at {} was durable", told.0, told.1));
        }
    }
}
