//! FENCED: the outside takes no effect of a run once it took one of a newer run; and checkpoints of older runs are not
//! committed after those of newer ones.

use ks_proto::{RunToken, SessionId};
use ks_raft::FleetState;
use std::collections::BTreeMap;

/// The outside, and what it saw.
#[derive(Debug, Default)]
pub struct Fenced {
    // The gate that checks tokens.
    gate: BTreeMap<SessionId, RunToken>,
    // What got through.
    taken: BTreeMap<SessionId, (RunToken, u64)>,
    /// Effects that the gate refused.
    pub refused: u64,
    /// Effects that got through, by session.
    pub accepted: BTreeMap<SessionId, (u64, u64)>,
    /// What it found.
    pub violations: Vec<String>,
}

impl Fenced {
    /// An effect arrives. `accepts_all`: the gate is broken.
    pub fn arrived(&mut self, at_ms: u64, session: SessionId, token: RunToken, value: u64, accepts_all: bool) {
        let gate = self.gate.entry(session).or_insert(token);
        if token < *gate && !accepts_all {
            self.refused += 1;
            return;
        }
        *gate = (*gate).max(token);
        let taken = self.taken.entry(session).or_insert((token, value));
        if token < taken.0 {
            self.violations.push(format!(
                "at {at_ms} ms an effect of run {token} of {} follows one of run {}",
                session.short(),
                taken.0
            ));
        }
        *taken = (token, value);
        self.accepted.insert(session, (at_ms, value));
    }

    /// The records of checkpoints rise in number and run together.
    pub fn check(&mut self, at_ms: u64, state: &FleetState) {
        for s in state.sessions.values() {
            let tokens: Vec<RunToken> = s.checkpoints.values().map(|c| c.token).collect();
            if tokens.windows(2).any(|w| w[0] > w[1]) {
                self.violations.push(format!("at {at_ms} ms checkpoints of {} were committed by runs {tokens:?}", s.name));
            }
        }
    }
}
