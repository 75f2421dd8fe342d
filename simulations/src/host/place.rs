//! Placement and voters: effects of the placer, and the changes of the group.

use super::{Done, Host, refused};
use ks_fleet::placement::{Cause, Effect, Input};
use ks_fleet::voters::{Change, Group, wanted_voters};
use ks_raft::{Assignment, Command, Response, Wanted};
use std::collections::BTreeSet;

impl Host {
    pub(super) fn place(&mut self, input: Input) {
        let now = self.now();
        for effect in self.placer.step(now, &self.view, input) {
            match effect {
                Effect::Assign { moves, from, cause, term } => {
                    *self.assigning.entry(from).or_default() += 1;
                    let now_unix_ms = self.world.unix_ms();
                    let one = |m: &ks_fleet::placement::Move| Assignment {
                        id: m.session,
                        to: m.to,
                        expected_epoch: Some(m.expected_epoch),
                        from_lapsed: cause == Cause::Lapsed,
                        now_unix_ms,
                        cause: format!("node {from}: {cause:?}"),
                    };
                    let command = Command::AssignMany { moves: moves.iter().map(one).collect() };
                    let (peer, world) = (self.peer.clone(), self.world.clone());
                    self.spawn_done(async move {
                        let answers = match peer.propose_in_term(term, command).await {
                            Ok((_, Response::Many { answers })) => answers,
                            _ => Vec::new(),
                        };
                        let ok = |at: usize| answers.get(at).is_some_and(|a| !refused(a));
                        let failed: Vec<_> = (0..moves.len()).filter(|at| !ok(*at)).collect();
                        world.with(|w| *w.counts.entry("reassignments").or_default() += (moves.len() - failed.len()) as u64);
                        let failed = failed.into_iter().map(|at| (moves[at].session, moves[at].expected_epoch)).collect();
                        Done::Assigned { from, failed }
                    });
                }
                Effect::HandOver { session, expected_epoch, .. } => {
                    // Nothing drains in this simulation.
                    self.place(Input::NotAssigned { session, expected_epoch });
                }
                Effect::GiveUp { session, reason, .. } => {
                    self.propose(Command::SetWanted { id: session, wanted: Wanted::Failed, reason });
                }
                Effect::Waiting { .. } => self.world.with(|w| w.count("placements waited")),
            }
        }
    }

    pub(super) fn place_nodes(&mut self) {
        let held: BTreeSet<u64> = self.granter.held(self.now()).collect();
        self.place(Input::Nodes { held, facts: self.facts.clone() });
    }

    pub(super) fn voters(&mut self) {
        if !self.peer.leadership().borrow().me || self.changing_voters {
            return;
        }
        let (membership, Some(progress)) = (self.peer.membership(), self.peer.progress()) else { return };
        let group = Group {
            leader: self.me,
            voters: membership.voters.clone(),
            learners: membership.learners.clone(),
            matched: progress.matched.iter().filter_map(|(n, at)| at.map(|at| (*n, at))).collect(),
            last_log: progress.last,
            silent_ms: self.facts.iter().map(|(n, f)| (*n, f.seen_ms_ago)).collect(),
            leader_is_finite: self.holder.is_finite(),
        };
        let (peer, world) = (self.peer.clone(), self.world.clone());
        let change = match wanted_voters(&self.view, &group) {
            // Half done: setting the same again completes it.
            Change::None if membership.joint => Change::SetVoters { voters: membership.voters.clone(), guard: BTreeSet::new() },
            change => change,
        };
        if change == Change::None {
            return;
        }
        self.changing_voters = true;
        self.spawn_done(async move {
            match change {
                Change::None => {}
                Change::AddLearner(n) => drop(peer.ensure_learner(n).await),
                Change::DropLearner(n) => drop(peer.drop_learner(n).await),
                Change::SetVoters { voters, .. } => {
                    if peer.set_voters(&voters, membership.guard).await.is_ok() {
                        world.with(|w| w.count("voter changes"));
                    }
                }
            }
            Done::VotersSet
        });
    }
}
