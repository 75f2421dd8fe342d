//! Replication and repair: which nodes keep copies of a session, and what to send to whom next.
//!
//! ```text
//!   session owned here ──► replica set right? ──no──► SetReplicas
//!   for each live peer of the set: missing ──Fetch──► under way ──done──► AddHolder ──(applied)──► held
//!                                     ▲                   │ failed, silent
//!                                     └──── back-off ◄────┘        (never given up)
//!   set complete ──► copies outside the set: DropHolder (only then may they be collected there)
//! ```
//!
//! A machine of every node, for the sessions that it owns. The newest checkpoint of every session goes before any older
//! one; one transfer per peer at a time. A holder that is silent for [`REPAIR_AFTER_MS`] is replaced, and stays in the
//! set while nobody can replace it.

#[cfg(test)]
mod tests;

use crate::view::{CheckpointView, FactsView, SessionView, Standing, View};
use ks_proto::{CheckpointId, RunToken, SessionId};
use std::collections::{BTreeMap, BTreeSet};

/// A peer that was heard within this time is sent to.
pub const LIVE_MS: u64 = 5_000;
/// A holder that was silent for this long is replaced in the replica sets.
pub const REPAIR_AFTER_MS: u64 = 30_000;
/// First wait after a failed transfer; doubles up to [`BACKOFF_MAX_MS`].
pub const BACKOFF_MS: u64 = 1_000;
/// Longest wait between two attempts.
pub const BACKOFF_MAX_MS: u64 = 60_000;
/// A transfer without progress for this long has failed.
pub const TRANSFER_SILENCE_MS: u64 = 60_000;
/// A proposal whose effect is not seen in the state for this long is made again. Longer than any proposal is under way: a
/// copy is not dropped sooner after it was proposed as one, by this node or by the session's former owner.
pub const PROPOSAL_PATIENCE_MS: u64 = 15_000;
/// A node with less space than this gets no new replica sets, MiB.
pub const DISK_MIN_MIB: u64 = 1024;
/// How often to step it when nothing else happens, milliseconds.
pub const TICK_MS: u64 = 500;

/// What the replicator hears.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// What gossip says about the members.
    Nodes(BTreeMap<u64, FactsView>),
    /// The peer has the whole closure on stable storage, pinned until Raft has decided.
    FetchDone { peer: u64, checkpoint: CheckpointId },
    /// It has not.
    FetchFailed { peer: u64, checkpoint: CheckpointId },
    /// It is getting on.
    FetchProgress { peer: u64, checkpoint: CheckpointId },
    /// Time passed, or the state changed.
    Tick,
}

/// What the replicator wants done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Ask `peer` (it may be this node) to fetch the checkpoint's closure from one of `from`, best first; then report.
    Fetch { peer: u64, session: SessionId, checkpoint: CheckpointId, token: RunToken, from: Vec<u64> },
    /// Propose that `node` is a holder. `token` is the session's present run.
    AddHolder { session: SessionId, checkpoint: CheckpointId, token: RunToken, node: u64 },
    /// Propose that `node`, outside the full replica set or out of the fleet, is not one.
    DropHolder { session: SessionId, checkpoint: CheckpointId, node: u64 },
    /// Propose the replica set, owner first.
    SetReplicas { session: SessionId, expected_epoch: u64, replicas: Vec<u64> },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Transfer {
    session: SessionId,
    checkpoint: CheckpointId,
    heard_ms: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Proposal {
    Replicas(SessionId),
    Add(CheckpointId, u64),
    Drop(CheckpointId, u64),
}

/// The replicator: one per node.
#[derive(Debug)]
pub struct Replicator {
    me: u64,
    facts: BTreeMap<u64, FactsView>,
    // When each member was heard last, by this node's clock.
    heard_ms: BTreeMap<u64, u64>,
    busy: BTreeMap<u64, Transfer>,
    // Failed transfers: (attempts, not before).
    failed: BTreeMap<(u64, CheckpointId), (u32, u64)>,
    proposed: BTreeMap<Proposal, u64>,
    // No copy is dropped before: an earlier proposal that names it as one may still arrive.
    unsettled: BTreeMap<(CheckpointId, u64), u64>,
    // Since when a session is this node's, at which epoch: its former owner may have proposed, too.
    since_ms: BTreeMap<SessionId, (u64, u64)>,
}

impl Replicator {
    /// A replicator of the sessions of node `me`.
    pub fn new(me: u64) -> Self {
        Self {
            me,
            facts: BTreeMap::new(),
            heard_ms: BTreeMap::new(),
            busy: BTreeMap::new(),
            failed: BTreeMap::new(),
            proposed: BTreeMap::new(),
            unsettled: BTreeMap::new(),
            since_ms: BTreeMap::new(),
        }
    }

    /// Transfers under way: peer and checkpoint.
    pub fn under_way(&self) -> impl Iterator<Item = (u64, CheckpointId)> + '_ {
        self.busy.iter().map(|(peer, t)| (*peer, t.checkpoint))
    }

    /// The one entrance.
    pub fn step(&mut self, now_ms: u64, view: &View, input: Input) -> Vec<Effect> {
        let mut out = Vec::new();
        match input {
            Input::Nodes(facts) => {
                for (node, f) in &facts {
                    let heard = self.heard_ms.entry(*node).or_default();
                    *heard = (*heard).max(now_ms.saturating_sub(f.seen_ms_ago));
                }
                self.facts = facts;
            }
            Input::FetchDone { peer, checkpoint } => self.fetched(now_ms, view, peer, checkpoint, &mut out),
            Input::FetchFailed { peer, checkpoint } => self.fetch_failed(now_ms, peer, checkpoint),
            Input::FetchProgress { peer, checkpoint } => {
                if let Some(t) = self.busy.get_mut(&peer).filter(|t| t.checkpoint == checkpoint) {
                    t.heard_ms = now_ms;
                }
            }
            Input::Tick => {}
        }
        self.forget(now_ms, view);
        let mine: Vec<&SessionView> = view.sessions.values().filter(|s| s.owner == self.me).collect();
        for s in &mine {
            self.replica_set(now_ms, view, s, &mut out);
            self.drop_surplus(now_ms, view, s, &mut out);
        }
        self.send(now_ms, view, &mine, &mut out);
        out
    }

    fn silent_ms(&self, now_ms: u64, node: u64) -> u64 {
        if node == self.me { 0 } else { now_ms.saturating_sub(self.heard_ms.get(&node).copied().unwrap_or(0)) }
    }
    fn is_live(&self, now_ms: u64, node: u64) -> bool {
        node == self.me || self.facts.contains_key(&node) && self.silent_ms(now_ms, node) < LIVE_MS
    }

    /// True once per patience: the caller may propose it now.
    fn propose(&mut self, now_ms: u64, what: Proposal) -> bool {
        let until = self.proposed.entry(what).or_default();
        let free = now_ms >= *until;
        if free {
            *until = now_ms + PROPOSAL_PATIENCE_MS;
        }
        free
    }

    fn fetched(&mut self, now_ms: u64, view: &View, peer: u64, checkpoint: CheckpointId, out: &mut Vec<Effect>) {
        let Some(t) = self.busy.get(&peer).copied().filter(|t| t.checkpoint == checkpoint) else { return };
        self.busy.remove(&peer);
        self.failed.remove(&(peer, checkpoint));
        let Some(s) = view.sessions.get(&t.session).filter(|s| s.owner == self.me) else { return };
        let known = s.checkpoints.iter().find(|c| c.id == checkpoint);
        if known.is_some_and(|c| !c.holders.contains(&peer)) && self.propose(now_ms, Proposal::Add(checkpoint, peer)) {
            self.unsettled.insert((checkpoint, peer), now_ms + PROPOSAL_PATIENCE_MS);
            out.push(Effect::AddHolder { session: s.id, checkpoint, token: s.token, node: peer });
        }
    }

    fn fetch_failed(&mut self, now_ms: u64, peer: u64, checkpoint: CheckpointId) {
        if self.busy.get(&peer).is_some_and(|t| t.checkpoint == checkpoint) {
            self.busy.remove(&peer);
            let (attempts, not_before) = self.failed.entry((peer, checkpoint)).or_default();
            *not_before = now_ms + (BACKOFF_MS << (*attempts).min(16)).min(BACKOFF_MAX_MS);
            *attempts += 1;
        }
    }

    /// Lets go of what the state shows as done, what is no longer ours, and what fell silent.
    fn forget(&mut self, now_ms: u64, view: &View) {
        for m in view.members.keys() {
            self.heard_ms.entry(*m).or_insert(now_ms);
        }
        self.heard_ms.retain(|n, _| view.members.contains_key(n));
        let silent: Vec<(u64, CheckpointId)> = self
            .busy
            .iter()
            .filter(|(_, t)| now_ms >= t.heard_ms + TRANSFER_SILENCE_MS)
            .map(|(peer, t)| (*peer, t.checkpoint))
            .collect();
        for (peer, checkpoint) in silent {
            self.fetch_failed(now_ms, peer, checkpoint);
        }
        self.unsettled.retain(|_, until| now_ms < *until);
        self.since_ms.retain(|id, (epoch, _)| view.sessions.get(id).is_some_and(|s| s.owner == self.me && s.epoch == *epoch));
        if self.failed.is_empty() && self.proposed.is_empty() {
            return;
        }
        let mut kept: BTreeMap<CheckpointId, &CheckpointView> = BTreeMap::new();
        let mine = view.sessions.values().filter(|s| s.owner == self.me);
        for s in mine.clone() {
            kept.extend(s.checkpoints.iter().map(|c| (c.id, c)));
        }
        let mine: BTreeSet<SessionId> = mine.map(|s| s.id).collect();
        let holds = |c: &CheckpointId, n: &u64| kept.get(c).map(|c| c.holders.contains(n));
        self.failed.retain(|(peer, c), _| holds(c, peer) == Some(false));
        self.proposed.retain(|p, until| match p {
            Proposal::Replicas(s) => now_ms < *until && mine.contains(s),
            Proposal::Add(c, n) => holds(c, n) == Some(false) && now_ms < *until,
            Proposal::Drop(c, n) => holds(c, n) == Some(true) && now_ms < *until,
        });
    }

    fn replica_set(&mut self, now_ms: u64, view: &View, s: &SessionView, out: &mut Vec<Effect>) {
        let replicas = self.wanted_set(now_ms, view, s);
        if replicas == s.replicas {
            self.proposed.remove(&Proposal::Replicas(s.id));
        } else if self.propose(now_ms, Proposal::Replicas(s.id)) {
            out.push(Effect::SetReplicas { session: s.id, expected_epoch: s.epoch, replicas });
        }
    }

    /// The set that the session should have: this node, the members that are there, new ones in other failure domains, and
    /// while nobody can take their place those that are silent.
    fn wanted_set(&self, now_ms: u64, view: &View, s: &SessionView) -> Vec<u64> {
        let copies = usize::from(s.copies.max(1));
        let newest = s.checkpoints.iter().rev().find(|c| !c.branch);
        let holds = |n: u64| newest.is_some_and(|c| c.holders.contains(&n));
        let mut set = vec![self.me];
        let former = || s.replicas.iter().copied().filter(|n| *n != self.me);
        let well = |n: &u64| view.is_active(*n) && self.silent_ms(now_ms, *n) < REPAIR_AFTER_MS;
        for n in former().filter(well) {
            if !set.contains(&n) && set.len() < copies {
                set.push(n);
            }
        }
        while set.len() < copies {
            let domains: BTreeSet<&str> = set.iter().map(|n| view.domain(*n)).collect();
            let candidates = view.members.values().filter(|m| {
                let space = self.facts.get(&m.number).is_none_or(|f| f.disk_free_mib >= DISK_MIN_MIB);
                let live = self.is_live(now_ms, m.number);
                m.standing == Standing::Active && !set.contains(&m.number) && live && (space || holds(m.number))
            });
            let best = candidates.min_by_key(|m| {
                let f = self.facts.get(&m.number);
                let (sessions, free) = (f.map_or(0, |f| f.sessions), f.map_or(0, |f| f.disk_free_mib));
                (domains.contains(m.domain.as_str()), !holds(m.number), sessions, u64::MAX - free, m.number)
            });
            let Some(best) = best.map(|m| m.number) else { break };
            set.push(best);
        }
        let there = |n: &u64| view.members.get(n).is_some_and(|m| m.standing != Standing::Gone);
        for n in former().filter(there) {
            if !set.contains(&n) && set.len() < copies {
                set.push(n);
            }
        }
        set
    }

    fn drop_surplus(&mut self, now_ms: u64, view: &View, s: &SessionView, out: &mut Vec<Effect>) {
        let copies = usize::from(s.copies.max(1)).min(view.with_standing(Standing::Active).len());
        let (_, since_ms) = *self.since_ms.entry(s.id).or_insert((s.epoch, now_ms));
        if now_ms < since_ms + PROPOSAL_PATIENCE_MS {
            return;
        }
        for c in &s.checkpoints {
            let full = s.replicas.len() >= copies && s.replicas.iter().all(|n| c.holders.contains(n));
            for node in c.holders.iter().copied().filter(|n| !s.replicas.contains(n)) {
                let gone = view.members.get(&node).is_none_or(|m| m.standing == Standing::Gone);
                let settled = !self.unsettled.contains_key(&(c.id, node));
                if (full || gone) && settled && self.propose(now_ms, Proposal::Drop(c.id, node)) {
                    out.push(Effect::DropHolder { session: s.id, checkpoint: c.id, node });
                }
            }
        }
    }

    fn send(&mut self, now_ms: u64, view: &View, mine: &[&SessionView], out: &mut Vec<Effect>) {
        let peers: Vec<u64> = view.members.keys().copied().collect();
        for peer in peers {
            let standing = view.members.get(&peer).map(|m| m.standing);
            if self.busy.contains_key(&peer) || standing == Some(Standing::Gone) || !self.is_live(now_ms, peer) {
                continue;
            }
            let Some((s, c)) = self.next_for(now_ms, peer, mine) else { continue };
            let mut from: Vec<u64> = c.holders.iter().copied().filter(|h| *h != peer).collect();
            from.sort_by_key(|h| (*h != self.me, !self.is_live(now_ms, *h), *h));
            self.busy.insert(peer, Transfer { session: s.id, checkpoint: c.id, heard_ms: now_ms });
            out.push(Effect::Fetch { peer, session: s.id, checkpoint: c.id, token: s.token, from });
        }
    }

    /// What this peer should fetch next: of all that it lacks the newest, side branches last.
    fn next_for<'a>(&self, now_ms: u64, peer: u64, mine: &[&'a SessionView]) -> Option<(&'a SessionView, &'a CheckpointView)> {
        let mut best: Option<((bool, usize, SessionId), &SessionView, &CheckpointView)> = None;
        for s in mine.iter().filter(|s| s.replicas.contains(&peer)) {
            for (age, c) in s.checkpoints.iter().rev().enumerate() {
                let key = (c.branch, age, s.id);
                let better = best.as_ref().is_none_or(|(k, _, _)| key < *k);
                if better && !c.holders.contains(&peer) && self.may_send(now_ms, peer, c) {
                    best = Some((key, s, c));
                }
            }
        }
        best.map(|(_, s, c)| (s, c))
    }

    fn may_send(&self, now_ms: u64, peer: u64, c: &CheckpointView) -> bool {
        let waits = self.failed.get(&(peer, c.id)).is_some_and(|(_, not_before)| now_ms < *not_before);
        let acked = self.proposed.contains_key(&Proposal::Add(c.id, peer));
        let source = c.holders.iter().any(|h| *h != peer && self.is_live(now_ms, *h));
        !waits && !acked && source
    }
}
