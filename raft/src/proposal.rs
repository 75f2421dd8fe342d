//! A command on its way through the log, and the answers that make a retry harmless.
//!
//! A proposer that does not learn the outcome (the leader died, the answer was lost) sends the same proposal again. Its
//! id is (node, boot, sequence number): `boot` is a durable counter of the node's starts, so that a proposal of an earlier
//! process that arrives late is known as such, and sequence numbers are given without gaps. Every proposal also says
//! below which number its proposer knows all answers (`done_below`); those answers are forgotten by every replica at the
//! same entry, so what is kept is bounded by the proposals that are under way, and nothing that can still be asked for is
//! evicted. `nonce` is random for each process: two processes that run on copies of one disk do not get each other's
//! answers.

use crate::command::{Command, Response};
use crate::error::Refusal;
use crate::limits::WINDOW;
use crate::state::FleetState;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Names one proposal for ever.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ProposalId {
    /// The proposer's number.
    pub node: u64,
    /// Starts of that node so far.
    pub boot: u64,
    /// Random number of that process.
    pub nonce: u64,
    /// Counts that process's proposals from 0.
    pub seq: u64,
}

/// An entry of the log.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Proposal {
    /// Its name.
    pub id: ProposalId,
    /// The proposer knows the answers of all its proposals with a smaller sequence number.
    pub done_below: u64,
    /// What to do.
    pub command: Command,
}

impl std::fmt::Display for Proposal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "proposal {} of node {} (start {})", self.id.seq, self.id.node, self.id.boot)
    }
}

/// Where in the log a command stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Applied {
    /// Index of its entry.
    pub index: u64,
}

/// What is remembered of one node's proposals.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Proposer {
    boot: u64,
    nonce: u64,
    done_below: u64,
    answers: BTreeMap<u64, Response>,
}

/// What is remembered of all nodes' proposals. Clones share it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Proposers(BTreeMap<u64, Arc<Proposer>>);

impl Proposers {
    /// The answer that was given before, or a refusal of what must not be applied (any more); None lets it through.
    fn known(&mut self, id: ProposalId, done_below: u64) -> Option<Response> {
        let over = |why: &str| Some(Response::Refused { refusal: Refusal::ProposalOver { why: why.to_owned() } });
        let p = Arc::make_mut(self.0.entry(id.node).or_default());
        if id.boot > p.boot {
            *p = Proposer { boot: id.boot, nonce: id.nonce, done_below: 0, answers: BTreeMap::new() };
        } else if id.boot < p.boot {
            return over("the node was started again since");
        } else if id.nonce != p.nonce {
            return over("two processes propose as the same node: its data folder was copied");
        }
        if id.seq < p.done_below || done_below > id.seq {
            return over("its answer was received");
        }
        if let Some(answer) = p.answers.get(&id.seq) {
            return Some(answer.clone());
        }
        if id.seq - done_below.max(p.done_below) >= WINDOW {
            return over("too many proposals before it have no answer yet");
        }
        if done_below > p.done_below {
            p.done_below = done_below;
            p.answers = p.answers.split_off(&done_below);
        }
        None
    }

    fn remember(&mut self, id: ProposalId, answer: Response) {
        if let Some(p) = self.0.get_mut(&id.node) {
            Arc::make_mut(p).answers.insert(id.seq, answer);
        }
    }

    fn boot_of(&self, node: u64) -> u64 {
        self.0.get(&node).map_or(0, |p| p.boot)
    }

    /// Answers kept, of all nodes.
    pub(crate) fn len(&self) -> usize {
        self.0.values().map(|p| p.answers.len()).sum()
    }
}

impl FleetState {
    /// Applies one entry of the log; a proposal that was applied before gets its first answer again.
    pub fn apply_proposal(&mut self, at: Applied, proposal: Proposal) -> Response {
        let Proposal { id, done_below, command } = proposal;
        if let Some(answer) = self.proposers.known(id, done_below) {
            return answer;
        }
        let answer = self.apply_at(at, command);
        self.proposers.remember(id, answer.clone());
        answer
    }

    /// Starts of `node` that the fleet knows of: one with fewer has lost its database, or an old copy of it was put back.
    pub(crate) fn boot_of(&self, node: u64) -> u64 {
        self.proposers.boot_of(node)
    }

    /// Answers that are kept for retries (for tests and diagnosis).
    pub fn answers_kept(&self) -> usize {
        self.proposers.len()
    }
}
