//! Placement: where the sessions of a lapsed or draining node go.
//!
//! ```text
//!   owner lapsed ──► assigning ──(entry applied)──► starting at the new owner ──► done
//!                      ▲   │ refused, no answer                │ start failed
//!                      └───┴──────────── waits (back-off) ◄────┘──► given up after START_ATTEMPTS_MAX
//!   owner draining ──► handing over (the owner checkpoints, stops and assigns) ──► done
//! ```
//!
//! A machine of the leader, of one term. Gossip only ranks: a node is a candidate because its lease is in force. Replica set
//! first, then load, free memory, and spread. Every assignment carries the epoch that it replaces, so that one which comes
//! late changes nothing; and the term of the lapse, because in another term the lapse may not be one (see [`crate::lease`]).

mod score;
#[cfg(test)]
mod tests;

use crate::view::{FactsView, Scope, SessionView, Standing, View};
use ks_proto::SessionId;
use score::Desk;
use std::collections::{BTreeMap, BTreeSet};

/// Sessions in one assignment entry.
pub const ASSIGN_MAX: usize = 512;
/// Starts of one session that may fail, on whatever nodes, before it is given up.
pub const START_ATTEMPTS_MAX: u32 = 6;
/// First wait after a failed start; doubles up to [`BACKOFF_MAX_MS`].
pub const BACKOFF_MS: u64 = 1_000;
/// Longest wait between starts.
pub const BACKOFF_MAX_MS: u64 = 30_000;
/// An assignment without an outcome for so long is proposed again.
pub const ASSIGN_PATIENCE_MS: u64 = 12_000;
/// Sessions that one draining node hands over at the same time.
pub const HANDOVERS_MAX: usize = 4;
/// A hand-over without an outcome for so long is asked for again.
pub const HANDOVER_PATIENCE_MS: u64 = 180_000;
/// Starts that failed longer ago than this are forgotten, so that an old trouble does not end a session.
pub const ATTEMPTS_FORGOTTEN_MS: u64 = 600_000;

/// What the placer hears.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// This node leads in `term`.
    BecameLeader { term: u64 },
    /// This node leads no longer.
    Deposed,
    /// The granter declared the node's lease over.
    Lapsed { node: u64, term: u64 },
    /// The node asks for its lease again, or has it.
    Returning { node: u64 },
    /// Nodes with a lease in force, with what gossip says about them.
    Nodes { held: BTreeSet<u64>, facts: BTreeMap<u64, FactsView> },
    /// An assignment or hand-over was refused or failed (its success is seen in the state).
    NotAssigned { session: SessionId, expected_epoch: u64 },
    /// The owner `node` could not start the session at this epoch. May be said more than once.
    StartFailed { session: SessionId, epoch: u64, node: u64, reason: String },
    /// The session runs at this epoch.
    Started { session: SessionId, epoch: u64 },
    /// Time passed, or the state changed.
    Tick,
}

/// One move of one session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Move {
    /// Session.
    pub session: SessionId,
    /// New owner.
    pub to: u64,
    /// Replaced epoch: the assignment is void if it is another one by then.
    pub expected_epoch: u64,
}

/// Why a session moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cause {
    /// The lease of its node ran out.
    Lapsed,
    /// Its node could not start it.
    StartFailed,
}

/// What the placer wants done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Propose one entry with all of these, on this node and in this term only: never forwarded.
    Assign { moves: Vec<Move>, from: u64, cause: Cause, term: u64 },
    /// Ask the owner to checkpoint the session, wait for the copy at `to`, stop it, and assign it.
    HandOver { session: SessionId, from: u64, to: u64, expected_epoch: u64 },
    /// Nobody could start it: it becomes failed, with this reason.
    GiveUp { session: SessionId, expected_epoch: u64, reason: String },
    /// It cannot be placed now; for people. Said once per reason.
    Waiting { session: SessionId, why: String },
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Stage {
    Assigning { epoch: u64, to: u64, until_ms: u64 },
    HandingOver { epoch: u64, from: u64, until_ms: u64 },
    Idle,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Job {
    stage: Stage,
    attempts: u32,
    last_failure_ms: u64,
    failed_epoch: u64,
    // The owner that could not start it at `failed_epoch`: it must go from there.
    leave: Option<u64>,
    not_before_ms: u64,
    avoid: BTreeSet<u64>,
    reason: String,
    told: String,
}

impl Job {
    fn new() -> Self {
        Self {
            stage: Stage::Idle,
            attempts: 0,
            last_failure_ms: 0,
            failed_epoch: 0,
            leave: None,
            not_before_ms: 0,
            avoid: BTreeSet::new(),
            reason: String::new(),
            told: String::new(),
        }
    }
}

/// The placer: one per node, at work while the node leads.
#[derive(Debug, Default)]
pub struct Placer {
    term: Option<u64>,
    lapsed: BTreeSet<u64>,
    held: BTreeSet<u64>,
    facts: BTreeMap<u64, FactsView>,
    jobs: BTreeMap<SessionId, Job>,
}

impl Placer {
    /// A placer that does not lead.
    pub fn new() -> Self {
        Self::default()
    }

    /// True if a step could have an effect: the host may skip building a view otherwise.
    pub fn is_busy(&self) -> bool {
        !self.lapsed.is_empty() || !self.jobs.is_empty()
    }
    /// What the next step, with this input, looks at: a view may leave out every other session.
    pub fn scope(&self, draining: BTreeSet<u64>, input: &Input) -> Scope {
        let mut scope = Scope { owners: draining, sessions: self.jobs.keys().copied().collect() };
        scope.owners.extend(&self.lapsed);
        match input {
            Input::Lapsed { node, .. } => drop(scope.owners.insert(*node)),
            Input::NotAssigned { session, .. } | Input::StartFailed { session, .. } | Input::Started { session, .. } => {
                scope.sessions.insert(*session);
            }
            Input::BecameLeader { .. } | Input::Deposed | Input::Returning { .. } | Input::Nodes { .. } | Input::Tick => {}
        }
        scope
    }
    /// Nodes whose lapse is in force.
    pub fn lapsed(&self) -> &BTreeSet<u64> {
        &self.lapsed
    }
    /// When the next [`Input::Tick`] is due at the latest, for a back-off that ends.
    pub fn wake_ms(&self) -> Option<u64> {
        self.term?;
        self.jobs
            .values()
            .filter_map(|j| match j.stage {
                Stage::Assigning { until_ms, .. } | Stage::HandingOver { until_ms, .. } => Some(until_ms),
                Stage::Idle => j.leave.map(|_| j.not_before_ms),
            })
            .min()
    }

    /// The one entrance.
    pub fn step(&mut self, now_ms: u64, view: &View, input: Input) -> Vec<Effect> {
        let mut out = Vec::new();
        match input {
            Input::BecameLeader { term } => {
                if self.term != Some(term) {
                    *self = Self { term: Some(term), held: std::mem::take(&mut self.held), ..Self::default() };
                }
            }
            Input::Deposed => *self = Self::default(),
            Input::Lapsed { node, term } => {
                if self.term == Some(term) {
                    self.lapsed.insert(node);
                    self.held.remove(&node);
                }
            }
            Input::Returning { node } => {
                self.lapsed.remove(&node);
            }
            Input::Nodes { held, facts } => (self.held, self.facts) = (held, facts),
            Input::NotAssigned { session, expected_epoch } => self.not_assigned(now_ms, session, expected_epoch),
            Input::StartFailed { session, epoch, node, reason } => {
                self.start_failed(now_ms, view, session, (epoch, node), reason, &mut out);
            }
            Input::Started { session, epoch } => {
                if view.sessions.get(&session).is_some_and(|s| s.epoch == epoch) {
                    self.jobs.remove(&session);
                }
            }
            Input::Tick => {}
        }
        if let Some(term) = self.term {
            self.settle(now_ms, view);
            self.place(now_ms, view, term, &mut out);
            self.hand_over(now_ms, view, &mut out);
        }
        out
    }

    fn not_assigned(&mut self, now_ms: u64, session: SessionId, expected_epoch: u64) {
        let Some(job) = self.jobs.get_mut(&session) else { return };
        let ours = match job.stage {
            Stage::Assigning { epoch, .. } | Stage::HandingOver { epoch, .. } => epoch == expected_epoch,
            Stage::Idle => false,
        };
        if ours {
            job.stage = Stage::Idle;
            job.not_before_ms = now_ms + BACKOFF_MS;
        }
    }

    fn start_failed(
        &mut self,
        now_ms: u64,
        view: &View,
        session: SessionId,
        (epoch, node): (u64, u64),
        reason: String,
        out: &mut Vec<Effect>,
    ) {
        let Some(s) = view.sessions.get(&session).filter(|s| s.epoch == epoch && s.owner == node && !s.failed) else { return };
        if self.term.is_none() {
            return;
        }
        let job = self.jobs.entry(session).or_insert_with(Job::new);
        if job.failed_epoch == epoch {
            return;
        }
        if now_ms > job.last_failure_ms + ATTEMPTS_FORGOTTEN_MS {
            (job.attempts, job.avoid) = (0, BTreeSet::new());
        }
        job.attempts += 1;
        (job.failed_epoch, job.last_failure_ms, job.stage) = (epoch, now_ms, Stage::Idle);
        job.leave = Some(node);
        job.avoid.insert(node);
        job.not_before_ms = now_ms + (BACKOFF_MS << (job.attempts - 1).min(16)).min(BACKOFF_MAX_MS);
        job.reason = format!("node {node}: {reason}");
        if job.attempts >= START_ATTEMPTS_MAX {
            let reason = format!("it could not be started {} times; last, {}", job.attempts, job.reason);
            out.push(Effect::GiveUp { session, expected_epoch: s.epoch, reason });
            self.jobs.remove(&session);
        }
    }

    /// Forgets what the state shows as done, and what took too long.
    fn settle(&mut self, now_ms: u64, view: &View) {
        self.jobs.retain(|id, job| {
            let Some(s) = view.sessions.get(id).filter(|s| !s.failed) else { return false };
            match job.stage {
                Stage::Assigning { epoch, until_ms, .. } | Stage::HandingOver { epoch, until_ms, .. } => {
                    if s.epoch > epoch {
                        (job.stage, job.leave) = (Stage::Idle, None);
                    } else if now_ms >= until_ms {
                        job.stage = Stage::Idle;
                    }
                }
                Stage::Idle => {}
            }
            let recent = job.attempts > 0 && now_ms <= job.last_failure_ms + ATTEMPTS_FORGOTTEN_MS;
            let draining = view.members.get(&s.owner).is_some_and(|m| m.standing == Standing::Draining);
            let told = !job.told.is_empty() && (draining || self.lapsed.contains(&s.owner));
            job.stage != Stage::Idle || job.leave.is_some() || recent || told || now_ms < job.not_before_ms
        });
    }

    /// Sessions that must leave their node now: those of lapsed nodes, and those whose owner could not start them.
    fn homeless<'a>(&self, now_ms: u64, view: &'a View) -> Vec<(&'a SessionView, Cause)> {
        let ready = |s: &SessionView| {
            self.jobs.get(&s.id).is_none_or(|j| j.stage == Stage::Idle && now_ms >= j.not_before_ms) && !s.failed
        };
        let cause = |s: &SessionView| {
            if self.lapsed.contains(&s.owner) {
                Some(Cause::Lapsed)
            } else {
                let left = self.jobs.get(&s.id).and_then(|j| j.leave.filter(|_| j.failed_epoch == s.epoch));
                left.filter(|n| *n == s.owner).map(|_| Cause::StartFailed)
            }
        };
        if !self.is_busy() {
            return Vec::new();
        }
        let mut v: Vec<_> = view.sessions.values().filter(|s| ready(s)).filter_map(|s| cause(s).map(|c| (s, c))).collect();
        // What somebody waits for comes first.
        v.sort_by_key(|(s, _)| (!s.running, s.id));
        v
    }

    fn place(&mut self, now_ms: u64, view: &View, term: u64, out: &mut Vec<Effect>) {
        let homeless = self.homeless(now_ms, view);
        if homeless.is_empty() {
            return;
        }
        let mut desk = Desk::new(view, &self.held, &self.facts);
        for job in self.jobs.iter().filter_map(|(id, j)| view.sessions.get(id).map(|s| (s, j))) {
            if let Stage::Assigning { to, .. } = job.1.stage {
                desk.reserve(to, job.0);
            }
        }
        let mut groups: BTreeMap<(u64, Cause), Vec<Move>> = BTreeMap::new();
        for (s, cause) in homeless {
            let avoid = self.jobs.get(&s.id).map(|j| &j.avoid);
            match desk.choose(s, avoid, cause == Cause::Lapsed) {
                Ok(to) => {
                    desk.reserve(to, s);
                    let job = self.jobs.entry(s.id).or_insert_with(Job::new);
                    job.told.clear();
                    job.stage = Stage::Assigning { epoch: s.epoch, to, until_ms: now_ms + ASSIGN_PATIENCE_MS };
                    let group = groups.entry((s.owner, cause)).or_default();
                    group.push(Move { session: s.id, to, expected_epoch: s.epoch });
                }
                Err(why) => {
                    let job = self.jobs.entry(s.id).or_insert_with(Job::new);
                    job.not_before_ms = now_ms + BACKOFF_MS;
                    if job.told != why {
                        job.told.clone_from(&why);
                        out.push(Effect::Waiting { session: s.id, why });
                    }
                }
            }
        }
        for ((from, cause), moves) in groups {
            for part in moves.chunks(ASSIGN_MAX) {
                out.push(Effect::Assign { moves: part.to_vec(), from, cause, term });
            }
        }
    }

    fn hand_over(&mut self, now_ms: u64, view: &View, out: &mut Vec<Effect>) {
        let draining = view.with_standing(Standing::Draining);
        if draining.is_empty() {
            return;
        }
        let mut busy: BTreeMap<u64, usize> = BTreeMap::new();
        for job in self.jobs.values() {
            if let Stage::HandingOver { from, .. } = job.stage {
                *busy.entry(from).or_default() += 1;
            }
        }
        let mut desk = Desk::new(view, &self.held, &self.facts);
        for s in view.sessions.values().filter(|s| draining.contains(&s.owner) && !self.lapsed.contains(&s.owner)) {
            let ready = self.jobs.get(&s.id).is_none_or(|j| j.stage == Stage::Idle && now_ms >= j.not_before_ms);
            let underway = busy.entry(s.owner).or_default();
            if !ready || *underway >= HANDOVERS_MAX || !self.held.contains(&s.owner) {
                continue;
            }
            let avoid = self.jobs.get(&s.id).map(|j| &j.avoid);
            match desk.choose(s, avoid, false) {
                Ok(to) => {
                    desk.reserve(to, s);
                    *underway += 1;
                    let job = self.jobs.entry(s.id).or_insert_with(Job::new);
                    let until_ms = now_ms + HANDOVER_PATIENCE_MS;
                    job.stage = Stage::HandingOver { epoch: s.epoch, from: s.owner, until_ms };
                    out.push(Effect::HandOver { session: s.id, from: s.owner, to, expected_epoch: s.epoch });
                }
                Err(why) => {
                    let job = self.jobs.entry(s.id).or_insert_with(Job::new);
                    job.not_before_ms = now_ms + BACKOFF_MS;
                    if job.told != why {
                        job.told.clone_from(&why);
                        out.push(Effect::Waiting { session: s.id, why });
                    }
                }
            }
        }
    }
}
