//! Where sessions and their checkpoints are: reassignment, replica sets, holders.
//!
//! A reassignment chooses the checkpoint here, inside apply, so that one that was committed between the decision and
//! this entry is not skipped:
//!
//! ```text
//!  line of the session (no side branches), newest first:   c9     c8     c7
//!  durable, or held by a member that can be reached?        no     yes
//!                                                           │      └─ becomes the head
//!                                                           └─ becomes a side branch, listed and kept
//! ```
//!
//! A session that never had a checkpoint on its line begins again where it began. One that has, but none that can be
//! read without the lost node, is not moved: it waits for that node, for nothing older would be what its user had.

use crate::command::{Assignment, Response};
use crate::error::Refusal;
use crate::fleet::{Durability, Member, MemberState};
use crate::limits::{ALLOW_BYTES_MAX, ALLOW_MAX, COPIES_MAX, MOVES_MAX, TEXT_MAX};
use crate::record::{CheckpointRecord, Lapse, Lost, SessionRecord};
use crate::state::FleetState;
use ks_proto::{CheckpointId, RunToken, SessionId};

type Outcome = Result<Response, Refusal>;

impl FleetState {
    /// Refuses a node that sessions may not be given to. Before the fleet is founded numbers mean nothing.
    pub(crate) fn check_target(&self, node: u64) -> Result<(), Refusal> {
        if !self.is_founded() {
            return Ok(());
        }
        let m = self.members.get(&node).ok_or(Refusal::NoMember { number: node })?;
        if m.state == MemberState::Active {
            return Ok(());
        }
        Err(Refusal::MemberNotFit { number: node, state: m.state, what: "it gets no sessions".into() })
    }

    /// Refuses holders that are not members, twice the same, or too many.
    pub(crate) fn check_holders(&self, nodes: &[u64]) -> Result<(), Refusal> {
        if nodes.len() > usize::from(COPIES_MAX) {
            return Err(Refusal::TooMany { what: "copies".into(), limit: COPIES_MAX.into() });
        }
        for (at, node) in nodes.iter().enumerate() {
            if nodes[..at].contains(node) {
                return Err(Refusal::BadValue { what: format!("{nodes:?}"), why: format!("node {node} is named twice") });
            }
            if self.is_founded() && !self.members.get(node).is_some_and(Member::is_member) {
                return Err(Refusal::NoMember { number: *node });
            }
        }
        Ok(())
    }

    /// The checkpoint that `a` would restore now; None is "as it began". What [`crate::Command::Assign`] will choose may
    /// be a newer one.
    ///
    /// # Errors
    /// If the session has checkpoints on its line and none of them can be read.
    pub fn restorable(&self, s: &SessionRecord, to: u64, from_lapsed: bool) -> Result<Option<u64>, Refusal> {
        let reachable = |n: &u64| *n == to || !(from_lapsed && *n == s.owner);
        // Mostly the first half settles it; the second looks at all members.
        let usable =
            |c: &&CheckpointRecord| self.holders(s, c).iter().any(reachable) || self.durability(s, c) == Durability::Durable;
        let mut line = s.checkpoints.values().filter(|c| !c.branch).rev().peekable();
        if line.peek().is_none() {
            return Ok(None);
        }
        let found = line.find(usable).map(|c| c.info.number);
        found.map(Some).ok_or_else(|| Refusal::NothingToRestore { name: s.name.to_string() })
    }

    pub(crate) fn assign(&mut self, a: Assignment, lapse: Option<Lapse>) -> Outcome {
        let s = self.sessions.get(&a.id).filter(|s| !s.tombstone).ok_or(Refusal::NoSession { id: a.id })?;
        s.expect_epoch(a.expected_epoch)?;
        self.check_target(a.to)?;
        let chosen = self.restorable(s, a.to, a.from_lapsed)?;
        let (generation, founded) = (self.generation, self.is_founded());
        let s = self.live(a.id)?;
        if let Some(id) = chosen.and_then(|n| s.checkpoints.get(&n)).map(|c| c.info.id) {
            s.go_on_from(id);
        }
        let old = std::mem::replace(&mut s.owner, a.to);
        s.token = RunToken { generation, epoch: s.token.epoch + 1, run: s.token.run };
        if founded {
            // The old owner stays in the set as a holder, last in line if it is thought dead: repair decides about it.
            s.replicas.retain(|n| *n != a.to && !(a.from_lapsed && *n == old));
            s.replicas.insert(0, a.to);
            if a.from_lapsed && old != a.to {
                s.replicas.push(old);
            }
            s.replicas.truncate(usize::from(COPIES_MAX));
        }
        if a.from_lapsed {
            let at_unix_ms = lapse.map_or(a.now_unix_ms, |l| l.seen_unix_ms);
            s.lost.get_or_insert(Lost { at_unix_ms, cause: a.cause, lapse });
        }
        Ok(Response::Token { token: s.token })
    }

    pub(crate) fn assign_many(&mut self, moves: Vec<Assignment>, lapse: Option<Lapse>) -> Outcome {
        if moves.len() > MOVES_MAX {
            return Err(Refusal::TooMany { what: "moves in one entry".into(), limit: MOVES_MAX as u64 });
        }
        let one = |a| self.assign(a, lapse).unwrap_or_else(|refusal| Response::Refused { refusal });
        Ok(Response::Many { answers: moves.into_iter().map(one).collect() })
    }

    pub(crate) fn set_replicas(&mut self, id: SessionId, expected_epoch: u64, replicas: Vec<u64>) -> Outcome {
        self.check_holders(&replicas)?;
        let s = self.live(id)?;
        s.expect_epoch(Some(expected_epoch))?;
        if replicas.first() != Some(&s.owner) {
            let why = format!("the owner, node {}, comes first", s.owner);
            return Err(Refusal::BadValue { what: format!("the replica set {replicas:?}"), why });
        }
        s.replicas = replicas;
        Ok(Response::Done)
    }

    pub(crate) fn set_copies(&mut self, id: SessionId, copies: u16) -> Outcome {
        if copies > COPIES_MAX {
            return Err(Refusal::BadValue { what: format!("{copies} copies"), why: format!("at most {COPIES_MAX}") });
        }
        self.live(id)?.copies = copies;
        Ok(Response::Done)
    }

    pub(crate) fn set_outside(&mut self, id: SessionId, allow: Option<Vec<String>>, budget: Option<String>) -> Outcome {
        let bad = |what: &str, why: String| Err(Refusal::BadValue { what: what.to_owned(), why });
        if let Some(all) = &allow {
            let bytes: usize = all.iter().map(String::len).sum();
            if all.len() > ALLOW_MAX || bytes > ALLOW_BYTES_MAX {
                let why = format!("{} places of {bytes} bytes; at most {ALLOW_MAX} of {ALLOW_BYTES_MAX}", all.len());
                return bad("the list of what a session may reach", why);
            }
        }
        if budget.as_ref().is_some_and(|b| b.len() > TEXT_MAX) {
            return bad("the budget", format!("longer than {TEXT_MAX} bytes"));
        }
        let s = self.live(id)?;
        s.allow = allow.or(s.allow.take());
        s.budget = budget.or(s.budget.take());
        Ok(Response::Done)
    }

    /// A tombstone's checkpoints have holders too: forks of it need them.
    fn held(&mut self, id: SessionId, checkpoint: &CheckpointId) -> Result<(RunToken, u64, &mut CheckpointRecord), Refusal> {
        let s = self.sessions.get_mut(&id).ok_or(Refusal::NoSession { id })?;
        let (token, owner) = (s.token, s.owner);
        let missing = Refusal::NoCheckpoint { name: s.name.to_string(), wanted: checkpoint.to_hex() };
        let found = s.checkpoints.values_mut().find(|c| c.info.id == *checkpoint);
        found.map(|c| (token, owner, c)).ok_or(missing)
    }

    pub(crate) fn add_holder(&mut self, id: SessionId, checkpoint: CheckpointId, token: RunToken, node: u64) -> Outcome {
        self.check_holders(&[node])?;
        let name = self.sessions.get(&id).map(|s| s.name.to_string()).unwrap_or_default();
        let (current, owner, c) = self.held(id, &checkpoint)?;
        if token != c.token && token != current {
            return Err(Refusal::Fenced { name, stale: token, current });
        }
        if c.holders.is_empty() {
            c.holders.push(owner);
        }
        if !c.holders.contains(&node) {
            if c.holders.len() >= usize::from(COPIES_MAX) {
                return Err(Refusal::TooMany { what: "copies".into(), limit: COPIES_MAX.into() });
            }
            c.holders.push(node);
        }
        Ok(Response::Done)
    }

    pub(crate) fn drop_holder(&mut self, id: SessionId, checkpoint: CheckpointId, node: u64) -> Outcome {
        let (_, owner, c) = self.held(id, &checkpoint)?;
        let holders = if c.holders.is_empty() { vec![owner] } else { c.holders.clone() };
        if holders == [node] {
            return Err(Refusal::LastHolder { node, checkpoint });
        }
        c.holders = holders.into_iter().filter(|n| *n != node).collect();
        Ok(Response::Done)
    }

    pub(crate) fn root_holder(&mut self, manifest: CheckpointId, node: u64, has: bool) -> Outcome {
        if has {
            self.check_holders(&[node])?;
        }
        let golden = self.golden.iter_mut().filter(|g| g.checkpoint == manifest).map(|g| &mut g.holders);
        let images = self.images.values_mut().chain(self.old_images.values_mut());
        let images = images.filter(|i| i.disk == manifest).map(|i| &mut i.holders);
        let mut found = false;
        for holders in golden.chain(images) {
            found = true;
            holders.retain(|n| *n != node);
            if has {
                holders.push(node);
            }
        }
        if found { Ok(Response::Done) } else { Err(Refusal::NoRoot { manifest }) }
    }
}
