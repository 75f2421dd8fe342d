//! The task that carries out `ks_fleet::placement` while this node leads: who runs what when a node is gone, drains, or could
//! not start a session.

use super::joining::HandOver;
use super::{call, view, wire};
use crate::host::clock::{boottime_ms, unix_ms};
use crate::node::Node;
use crate::progress::Steps;
use ks_fleet::placement::{Cause, Effect, Input, Placer};
use ks_proto::SessionId;
use ks_raft::{Assignment, Command, Lapse, MemberState, Response, Wanted};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::mpsc;

/// Notices that may wait for the task.
pub const MAILBOX_MAX: usize = 4096;
/// The task looks at the clock at least this often.
const TICK: Duration = Duration::from_millis(250);

/// What the task hears from others.
#[derive(Debug)]
pub enum Notice {
    /// The node's lease is over, in this term.
    Lapsed {
        /// Node.
        node: u64,
        /// Term.
        term: u64,
        /// How it ended.
        lapse: Lapse,
    },
    /// It asks for it again.
    Returning {
        /// Node.
        node: u64,
    },
    /// Nodes whose lease is in force, by the granter.
    Held(BTreeSet<u64>),
    /// An owner could not start a session.
    StartFailed {
        /// Session.
        session: SessionId,
        /// Epoch.
        epoch: u64,
        /// Owner.
        node: u64,
        /// Why.
        reason: String,
    },
    /// It runs.
    Started {
        /// Session.
        session: SessionId,
        /// Epoch.
        epoch: u64,
    },
    /// A proposal or hand-over of the task itself came to nothing.
    NotAssigned {
        /// Session.
        session: SessionId,
        /// Epoch it was decided under.
        expected_epoch: u64,
    },
}

/// Runs for as long as the node lives.
pub async fn run(node: Weak<Node>, mut rx: mpsc::Receiver<Notice>) {
    let Some((mut changes, mut leadership)) = node.upgrade().map(|n| (n.fleet.changes(), n.fleet.consensus().leadership()))
    else {
        return;
    };
    let mut task =
        Task { placer: Placer::new(), term: None, held: BTreeSet::new(), told: BTreeMap::new(), lapses: BTreeMap::new() };
    let mut tick = tokio::time::interval(TICK);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let mut notice = None;
        tokio::select! {
            n = rx.recv() => match n {
                Some(n) => notice = Some(n),
                None => return,
            },
            changed = changes.changed() => {
                if changed.is_err() { return }
                changes.mark_unchanged();
            }
            changed = leadership.changed() => {
                if changed.is_err() { return }
                leadership.mark_unchanged();
            }
            _ = tick.tick() => {}
        }
        let Some(node) = node.upgrade() else { return };
        task.turn(&node, notice);
    }
}

struct Task {
    placer: Placer,
    term: Option<u64>,
    held: BTreeSet<u64>,
    /// What people were told last of each session that waits.
    told: BTreeMap<SessionId, String>,
    /// How the leases ended that are over in this term.
    lapses: BTreeMap<u64, Lapse>,
}

impl Task {
    fn turn(&mut self, node: &Arc<Node>, notice: Option<Notice>) {
        let l = *node.fleet.consensus().leadership().borrow();
        let term = l.me.then_some(l.term);
        if term.is_none() && self.term.is_none() {
            return;
        }
        let state = node.state.read();
        let draining = state.members.values().filter(|m| m.state == MemberState::Draining).map(|m| m.number).collect();
        let scope = self.placer.scope(draining, &notice.as_ref().map_or(Input::Tick, input));
        let view = view::within(&state, &scope);
        drop(state);
        let now = boottime_ms();
        let mut out = Vec::new();
        if term != self.term {
            self.term = term;
            self.lapses.clear();
            out.extend(match term {
                Some(term) => self.placer.step(now, &view, Input::BecameLeader { term }),
                None => self.placer.step(now, &view, Input::Deposed),
            });
        }
        match notice {
            Some(Notice::Held(held)) => self.held = held,
            Some(n) => {
                if let Notice::Lapsed { node: lapsed, lapse, .. } = n {
                    self.held.remove(&lapsed);
                    self.lapses.insert(lapsed, lapse);
                    // Candidates as they are now, before anything is placed.
                    out.extend(self.nodes(node, now, &view));
                    let name = node.fleet.name_of(lapsed);
                    node.state.event("", "node-lapsed", &format!("{name} did not renew its lease: its sessions go to others"));
                }
                out.extend(self.placer.step(now, &view, input(&n)));
            }
            None => {}
        }
        out.extend(self.nodes(node, now, &view));
        for e in out {
            self.perform(node, e);
        }
    }

    fn nodes(&mut self, node: &Arc<Node>, now: u64, view: &ks_fleet::View) -> Vec<Effect> {
        let draining = view.members.values().any(|m| m.standing == ks_fleet::Standing::Draining);
        let facts = if draining || self.placer.is_busy() { view::facts(node) } else { BTreeMap::new() };
        self.placer.step(now, view, Input::Nodes { held: self.held.clone(), facts })
    }

    fn perform(&mut self, node: &Arc<Node>, effect: Effect) {
        match effect {
            Effect::Assign { moves, from, cause, term } => {
                let lapse = self.lapses.get(&from).copied().filter(|_| cause == Cause::Lapsed);
                assign(node, moves, (from, cause, lapse), term);
            }
            Effect::HandOver { session, from, to, expected_epoch } => hand_over(node, session, from, to, expected_epoch),
            Effect::GiveUp { session, expected_epoch: _, reason } => {
                let node = node.clone();
                tokio::spawn(async move {
                    let command = Command::SetWanted { id: session, wanted: Wanted::Failed, reason };
                    if let Err(e) = node.state.propose(command).await {
                        tracing::warn!("session {} is not given up: {e}", session.short());
                    }
                });
            }
            Effect::Waiting { session, why } => {
                let before = self.told.insert(session, why.clone());
                if before.as_ref() != Some(&why) {
                    let name = node.state.read().sessions.get(&session).map(|s| s.name.to_string()).unwrap_or_default();
                    node.state.event(&name, "not-placed", &why);
                }
            }
        }
    }
}

fn input(n: &Notice) -> Input {
    match n {
        Notice::Lapsed { node, term, lapse: _ } => Input::Lapsed { node: *node, term: *term },
        Notice::Returning { node } => Input::Returning { node: *node },
        Notice::StartFailed { session, epoch, node, reason } => {
            Input::StartFailed { session: *session, epoch: *epoch, node: *node, reason: reason.clone() }
        }
        Notice::Started { session, epoch } => Input::Started { session: *session, epoch: *epoch },
        Notice::NotAssigned { session, expected_epoch } => {
            Input::NotAssigned { session: *session, expected_epoch: *expected_epoch }
        }
        Notice::Held(_) => Input::Tick,
    }
}

/// One entry with all moves, proposed here and in this term only.
fn assign(node: &Arc<Node>, moves: Vec<ks_fleet::placement::Move>, (from, cause, lapse): (u64, Cause, Option<Lapse>), term: u64) {
    let name = node.fleet.name_of(from);
    let words = match cause {
        Cause::Lapsed => format!("{name} was lost"),
        Cause::StartFailed => format!("{name} could not start it"),
    };
    let now_unix_ms = unix_ms();
    let list: Vec<Assignment> = moves
        .iter()
        .map(|m| Assignment {
            id: m.session,
            to: m.to,
            expected_epoch: Some(m.expected_epoch),
            from_lapsed: cause == Cause::Lapsed,
            now_unix_ms,
            cause: words.clone(),
        })
        .collect();
    let node = node.clone();
    tokio::spawn(async move {
        let command = match lapse {
            Some(lapse) => Command::AssignLapsed { moves: list, lapse },
            None => Command::AssignMany { moves: list },
        };
        let done = node.fleet.consensus().propose_in_term(term, command).await;
        let answers = match done {
            Ok((_, Response::Many { answers })) => answers,
            Ok(_) => vec![],
            Err(e) => {
                tracing::warn!("an assignment was not made: {e}");
                vec![]
            }
        };
        for (n, m) in moves.iter().enumerate() {
            let refused = match answers.get(n) {
                Some(Response::Refused { refusal }) => Some(refusal.to_string()),
                Some(_) => None,
                None => Some("no answer".into()),
            };
            if let Some(why) = refused {
                tracing::info!("session {} was not assigned: {why}", m.session.short());
                node.fleet.placing_mail(Notice::NotAssigned { session: m.session, expected_epoch: m.expected_epoch });
            }
        }
    });
}

/// Asks the owner for a planned move.
fn hand_over(node: &Arc<Node>, session: SessionId, from: u64, to: u64, expected_epoch: u64) {
    let node = node.clone();
    tokio::spawn(async move {
        let (steps, mut told) = Steps::channel();
        tokio::spawn(async move { while told.recv().await.is_some() {} });
        let order = HandOver { session, to, expected_epoch };
        let done = if from == node.fleet.number() {
            super::joining::hand_over(&node, order, &steps).await.map(drop)
        } else {
            call::post_long::<serde_json::Value>(&node.fleet, from, "/v1/internal/hand-over", &order, &steps).await.map(drop)
        };
        if let Err(e) = done {
            let name = node.state.read().sessions.get(&session).map(|s| s.name.to_string()).unwrap_or_default();
            node.state.event(&name, "not-moved", &e.to_string());
            node.fleet.placing_mail(Notice::NotAssigned { session, expected_epoch });
        }
    });
}

/// Tells the leader that this node could not start a session, or that it runs.
pub async fn tell(node: &Arc<Node>, notice: Notice) {
    let leadership = *node.fleet.consensus().leadership().borrow();
    match leadership.leader {
        Some(l) if l == node.fleet.number() => node.fleet.placing_mail(notice),
        Some(l) => wire::tell(&node.fleet, l, notice).await,
        None => {}
    }
}
