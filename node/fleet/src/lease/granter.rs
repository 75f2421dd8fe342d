//! The leader's side of node leases.
//!
//! ```text
//!                     round ok: grant                  ended, another instance asks
//!   (new member,  ──► Held{until} ◄───────────────┐  ┌──────────────┐
//!    new leader)        │   ▲                     │  │              ▼
//!                 ended,│   └─ round ok: grant ── Held ◄── entry ── Returning
//!                 round ▼                                            ▲
//!                     Lapsed ── it asks again ───────────────────────┘
//! ```
//!
//! A renewal is answered only after a quorum round that began after it arrived; all that arrive during one round share the
//! next. A node is declared lapsed only after a round that began after the end of its lease. A node that comes back (after
//! a lapse, or as another instance when the former's lease has run out) is re-granted through an entry of the log first.
//! Everything is of one term: in another one the machine starts anew and waits a whole lease.

use super::{Answer, RENEWALS_PER_LEASE, Reason, margin_ms};
use std::collections::BTreeMap;

/// Renewals that wait for a round at one time; more are refused as busy.
pub const WAITING_MAX: usize = 4096;

/// Rounds that begin in the length of one lease, at most: every 50 ms for a lease of 3 s. A round costs a message to every
/// node, and what waits a little longer shares it with more renewals.
pub const ROUNDS_PER_LEASE: u64 = 60;

/// What the granter hears.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// This node leads in `term`.
    BecameLeader { term: u64 },
    /// This node leads no longer.
    Deposed,
    /// All nodes whose lease matters. The host says it after each change, and before an [`Input::RoundDone`] whose round
    /// covers the change.
    Members(BTreeMap<u64, Tracked>),
    /// The policy's lease length.
    LeaseMs(u64),
    /// A node asks. `request` is the host's name for it; every request gets exactly one answer.
    Renewal { node: u64, incarnation: u64, request: u64 },
    /// The quorum round `round` ended: with (term, log index that it covers), or not.
    RoundDone { round: u64, result: Option<(u64, u64)> },
    /// The entry of [`Effect::Regrant`] was applied, at this index; or not (or nobody knows).
    RegrantDone { node: u64, regrant: u64, index: Option<u64> },
    /// Time passed.
    Tick,
}

/// What the granter wants done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Begin a quorum round (a linearizable read that begins now), then report [`Input::RoundDone`], in any case.
    StartRound { round: u64 },
    /// Answer the renewal.
    Answer { request: u64, answer: Answer },
    /// Record in the log that the lease goes to this instance, behind every assignment proposed so far and in this term
    /// only; then report [`Input::RegrantDone`], in any case.
    Regrant { node: u64, incarnation: u64, regrant: u64, term: u64 },
    /// The node asks for its lease again: propose no further assignment because of its lapse.
    Returning { node: u64 },
    /// The node's lease is over; its sessions may be assigned to others, in this term only.
    Lapse { node: u64, term: u64 },
}

/// What the replicated state says about a node's lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tracked {
    /// The instance to which the last re-grant in the log was given (at first, the one that joined).
    pub incarnation: u64,
    /// False for a node that was removed and still owns sessions: it gets nothing, and its lease is waited for.
    pub admitted: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Held,
    Lapsed,
    // Waits for the entry with this number.
    Returning(u64),
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Node {
    incarnation: u64,
    state: State,
    // Invariant: not before any deadline that the node may have been given, by any leader.
    until_ms: u64,
    // When to declare it lapsed; later than `until_ms` while another instance waits to take it up.
    due_ms: u64,
    // Granted in this term: from then on only a re-grant changes the instance.
    granted: bool,
    // When another instance asked last.
    claim_ms: Option<u64>,
    // Index of its re-grant. A round that was decided before it may end after it.
    floor: u64,
    // The request that waits for the re-grant.
    held_back: Option<Waiting>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Waiting {
    request: u64,
    node: u64,
    incarnation: u64,
}

#[derive(Debug)]
struct Round {
    number: u64,
    began_ms: u64,
    waiting: Vec<Waiting>,
}

/// The granter: one per node, at work while the node leads.
#[derive(Debug)]
pub struct Granter {
    lease_ms: u64,
    term: Option<u64>,
    members: BTreeMap<u64, Tracked>,
    nodes: BTreeMap<u64, Node>,
    rounds: u64,
    // Numbers of re-grants are never used again, in no term: an outcome that comes late belongs to none.
    regrants: u64,
    running: Option<Round>,
    next: Vec<Waiting>,
    // After a round that failed, no round for the sake of a lapse before this.
    rest_until_ms: u64,
    // No round before this, so that rounds do not follow each other at once.
    next_round_ms: u64,
    spaced: bool,
}

impl Granter {
    /// A granter that does not lead.
    pub fn new(lease_ms: u64) -> Self {
        Self {
            lease_ms,
            term: None,
            members: BTreeMap::new(),
            nodes: BTreeMap::new(),
            rounds: 0,
            regrants: 0,
            running: None,
            next: Vec::new(),
            rest_until_ms: 0,
            next_round_ms: 0,
            spaced: true,
        }
    }

    /// Nodes whose lease is in force, as far as this leader knows.
    pub fn held(&self, now_ms: u64) -> impl Iterator<Item = u64> + '_ {
        self.nodes.iter().filter(move |(_, n)| n.state == State::Held && n.granted && now_ms < n.until_ms).map(|(id, _)| *id)
    }
    /// Milliseconds until the node's lease may lapse; None if it has, or if this node does not lead.
    pub fn remaining_ms(&self, node: u64, now_ms: u64) -> Option<u64> {
        let n = self.nodes.get(&node).filter(|n| n.state == State::Held)?;
        Some(n.until_ms.saturating_sub(now_ms))
    }
    /// When the next [`Input::Tick`] is due at the latest; None while it does not lead.
    pub fn wake_ms(&self) -> Option<u64> {
        self.term?;
        let ends = self.nodes.values().filter(|n| n.state == State::Held).map(|n| n.due_ms.max(self.rest_until_ms));
        let waiting = (!self.next.is_empty()).then_some(self.next_round_ms);
        let idle = ends.map(|t| t.max(self.next_round_ms)).chain(waiting);
        match &self.running {
            Some(r) => Some(r.began_ms + self.round_max_ms()),
            None => idle.min(),
        }
    }

    fn whole_ms(&self) -> u64 {
        self.lease_ms + margin_ms(self.lease_ms)
    }
    /// A round that takes longer than a lease helps nobody.
    fn round_max_ms(&self) -> u64 {
        self.lease_ms.max(1)
    }

    /// The one entrance.
    pub fn step(&mut self, now_ms: u64, input: Input) -> Vec<Effect> {
        let mut out = Vec::new();
        match input {
            Input::BecameLeader { term } => self.lead(now_ms, term, &mut out),
            Input::Deposed => self.stop(&mut out),
            Input::Members(members) => self.set_members(now_ms, members),
            Input::LeaseMs(ms) => self.lease_ms = ms.max(1),
            Input::Renewal { node, incarnation, request } => {
                self.renewal(now_ms, Waiting { request, node, incarnation }, &mut out);
            }
            Input::RoundDone { round, result } => self.round_done(now_ms, round, result, &mut out),
            Input::RegrantDone { node, regrant, index } => self.regrant_done(now_ms, node, regrant, index, &mut out),
            Input::Tick => {
                if self.running.as_ref().is_some_and(|r| now_ms >= r.began_ms + self.round_max_ms()) {
                    self.end_round(None, now_ms, &mut out);
                }
            }
        }
        self.begin_round_if_due(now_ms, &mut out);
        out
    }

    fn lead(&mut self, now_ms: u64, term: u64, out: &mut Vec<Effect>) {
        if self.term == Some(term) {
            return;
        }
        self.stop(out);
        self.term = Some(term);
        let until_ms = now_ms + self.whole_ms();
        self.nodes = self.members.iter().map(|(n, t)| (*n, Node::fresh(t.incarnation, until_ms))).collect();
    }

    fn stop(&mut self, out: &mut Vec<Effect>) {
        let running = self.running.take().map(|r| r.waiting).unwrap_or_default();
        let held_back = std::mem::take(&mut self.nodes).into_values().filter_map(|n| n.held_back);
        for w in running.into_iter().chain(std::mem::take(&mut self.next)).chain(held_back) {
            out.push(self.refuse(w.request, Reason::NotLeader));
        }
        self.term = None;
    }

    fn refuse(&self, request: u64, reason: Reason) -> Effect {
        Effect::Answer { request, answer: Answer::Refused { term: self.term.unwrap_or(0), reason } }
    }

    fn set_members(&mut self, now_ms: u64, members: BTreeMap<u64, Tracked>) {
        self.members = members;
        if self.term.is_none() {
            return;
        }
        let until_ms = now_ms + self.whole_ms();
        for (number, t) in &self.members {
            let node = self.nodes.entry(*number).or_insert_with(|| Node::fresh(t.incarnation, until_ms));
            if !node.granted && node.state == State::Held {
                node.incarnation = t.incarnation;
            }
        }
        // Its own entry may go only when nothing of it can run any more.
        let members = &self.members;
        self.nodes.retain(|number, n| members.contains_key(number) || n.state != State::Lapsed);
    }

    fn renewal(&mut self, now_ms: u64, w: Waiting, out: &mut Vec<Effect>) {
        let waiting = self.next.len() + self.running.as_ref().map_or(0, |r| r.waiting.len());
        if self.term.is_none() {
            out.push(self.refuse(w.request, Reason::NotLeader));
        } else if waiting >= WAITING_MAX {
            out.push(self.refuse(w.request, Reason::Busy));
        } else {
            if let Some(n) = self.nodes.get_mut(&w.node).filter(|n| n.incarnation != w.incarnation) {
                n.claim_ms = Some(now_ms);
            }
            self.next.push(w);
        }
    }

    fn begin_round_if_due(&mut self, now_ms: u64, out: &mut Vec<Effect>) {
        if self.term.is_none() || self.running.is_some() || now_ms < self.next_round_ms {
            return;
        }
        let ended = now_ms >= self.rest_until_ms && self.nodes.values().any(|n| n.is_due(now_ms));
        if self.next.is_empty() && !ended {
            return;
        }
        self.rounds += 1;
        if self.spaced {
            self.next_round_ms = now_ms + self.lease_ms / ROUNDS_PER_LEASE;
        }
        self.running = Some(Round { number: self.rounds, began_ms: now_ms, waiting: std::mem::take(&mut self.next) });
        out.push(Effect::StartRound { round: self.rounds });
    }

    fn round_done(&mut self, now_ms: u64, round: u64, result: Option<(u64, u64)>, out: &mut Vec<Effect>) {
        if self.running.as_ref().is_none_or(|r| r.number != round) {
            return;
        }
        match result {
            Some((term, _)) if self.term != Some(term) => {
                // Deposed and elected again without hearing of it: another leader may have granted meanwhile.
                self.lead(now_ms, term, out);
            }
            result => self.end_round(result.map(|(_, index)| index), now_ms, out),
        }
    }

    fn end_round(&mut self, index: Option<u64>, now_ms: u64, out: &mut Vec<Effect>) {
        let Some(Round { began_ms, waiting, .. }) = self.running.take() else { return };
        for w in waiting {
            match index {
                None => out.push(self.refuse(w.request, Reason::NoQuorum)),
                Some(index) => self.decide(now_ms, index, w, out),
            }
        }
        if index.is_some() {
            self.lapse_ended(began_ms, now_ms, out);
        } else {
            self.rest_until_ms = now_ms + self.lease_ms / RENEWALS_PER_LEASE;
        }
    }

    /// After a round: grants one renewal, or says why not.
    fn decide(&mut self, now_ms: u64, index: u64, w: Waiting, out: &mut Vec<Effect>) {
        let (until_ms, lease_ms, term) = (now_ms + self.whole_ms(), self.lease_ms, self.term.unwrap_or(0));
        let admitted = self.members.get(&w.node).is_some_and(|t| t.admitted);
        let Some(n) = self.nodes.get_mut(&w.node).filter(|_| admitted) else {
            out.push(self.refuse(w.request, Reason::NotMember));
            return;
        };
        let same = n.incarnation == w.incarnation;
        match n.state {
            State::Held if same => {
                (n.until_ms, n.due_ms, n.granted) = (until_ms, until_ms, true);
                out.push(Effect::Answer {
                    request: w.request,
                    answer: Answer::Granted { term, lease_ms, index: index.max(n.floor) },
                });
            }
            State::Held if now_ms < n.until_ms => {
                let wait_ms = n.until_ms - now_ms;
                out.push(self.refuse(w.request, Reason::OtherInstance { wait_ms }));
            }
            State::Held | State::Lapsed => {
                self.regrants += 1;
                (n.state, n.incarnation, n.claim_ms) = (State::Returning(self.regrants), w.incarnation, None);
                out.push(Effect::Returning { node: w.node });
                out.push(Effect::Regrant { node: w.node, incarnation: w.incarnation, regrant: self.regrants, term });
                n.held_back = Some(w);
            }
            State::Returning(_) if same => {
                if let Some(older) = n.held_back.replace(w) {
                    out.push(self.refuse(older.request, Reason::Busy));
                }
            }
            State::Returning(_) => out.push(self.refuse(w.request, Reason::OtherInstance { wait_ms: lease_ms })),
        }
    }

    /// Declares over what had ended before the round began, unless another instance waits to take it up.
    fn lapse_ended(&mut self, began_ms: u64, now_ms: u64, out: &mut Vec<Effect>) {
        let (Some(term), patience_ms) = (self.term, self.lease_ms / 2) else { return };
        for (number, n) in &mut self.nodes {
            if !n.is_due(began_ms) {
                continue;
            }
            let claimed_until = n.claim_ms.map_or(0, |at| at + patience_ms);
            if now_ms < claimed_until && self.members.get(number).is_some_and(|t| t.admitted) {
                n.due_ms = claimed_until;
                continue;
            }
            n.state = State::Lapsed;
            out.push(Effect::Lapse { node: *number, term });
        }
        let members = &self.members;
        self.nodes.retain(|number, n| members.contains_key(number) || n.state != State::Lapsed);
    }

    fn regrant_done(&mut self, now_ms: u64, node: u64, regrant: u64, index: Option<u64>, out: &mut Vec<Effect>) {
        let (until_ms, term) = (now_ms + self.whole_ms(), self.term.unwrap_or(0));
        let Some(n) = self.nodes.get_mut(&node).filter(|n| n.state == State::Returning(regrant)) else {
            return;
        };
        let held_back = n.held_back.take();
        if let Some(index) = index {
            n.floor = index;
            (n.state, n.until_ms, n.due_ms, n.granted) = (State::Held, until_ms, until_ms, true);
            self.next.extend(held_back);
        } else {
            n.state = State::Lapsed;
            out.push(Effect::Lapse { node, term });
            if let Some(w) = held_back {
                out.push(self.refuse(w.request, Reason::NoQuorum));
            }
        }
    }
}

impl Node {
    fn fresh(incarnation: u64, until_ms: u64) -> Self {
        Self {
            incarnation,
            state: State::Held,
            until_ms,
            due_ms: until_ms,
            granted: false,
            claim_ms: None,
            floor: 0,
            held_back: None,
        }
    }
    fn is_due(&self, now_ms: u64) -> bool {
        self.state == State::Held && now_ms >= self.due_ms
    }
}

#[cfg(test)]
mod tests;
