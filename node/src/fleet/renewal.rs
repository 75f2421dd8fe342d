//! The task that carries out both sides of the node's lease (see `ks_fleet::lease`): it renews this node's, and grants those of
//! all nodes while this one leads.

use super::placing::Notice;
use super::{Fleet, wire};
use crate::host::clock::{boottime_ms, unix_ms};
use crate::node::Node;
use ks_fleet::lease::{Answer, Granter, GranterEffect, GranterInput, Holder, HolderEffect, HolderInput, Reason, Tracked};
use ks_raft::{Command, FleetState, Lapse, MemberChange};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};

/// Messages that may wait for the task.
pub const MAILBOX_MAX: usize = 8192;
/// The task looks at the clock at least this often.
const TICK: Duration = Duration::from_millis(200);
/// How long a renewal may be on its way; an answer that comes later is worth nothing.
const RENEWAL: Duration = Duration::from_secs(2);
/// How long a VM may take to accept a finite deadline before it is ended.
const LIMIT: Duration = Duration::from_secs(5);

/// What the task hears.
pub enum Message {
    /// A node asks this one, as leader, for its lease.
    Renewal {
        /// Node.
        node: u64,
        /// Instance.
        incarnation: u64,
        /// Where the answer goes.
        reply: oneshot::Sender<Answer>,
    },
    /// The leader answered.
    Answered {
        /// Of which renewal.
        seq: u64,
        /// What.
        answer: Answer,
    },
    /// A quorum round ended.
    Round {
        /// Which.
        round: u64,
        /// Term and index that it covers.
        result: Option<(u64, u64)>,
    },
    /// A re-grant was applied, or not.
    Regranted {
        /// Node.
        node: u64,
        /// Which re-grant.
        regrant: u64,
        /// Where it was applied; None if it was not, or nobody knows.
        index: Option<u64>,
    },
    /// Nobody else is in the fleet, and a quorum round said so.
    Alone,
    /// Every VM has a finite deadline.
    Limited,
}

/// Runs until the node ends.
pub async fn run(node: Weak<Node>, fleet: Arc<Fleet>, mut rx: mpsc::Receiver<Message>) {
    let lease_ms = u64::from(fleet.state().policy.lease_ms);
    let holder = Holder::new(fleet.incarnation(), lease_ms);
    let granter = Granter::new(lease_ms);
    let mut task = Task {
        node,
        fleet: fleet.clone(),
        holder,
        granter,
        requests: BTreeMap::new(),
        granted: BTreeMap::new(),
        led_since: 0,
        next_request: 0,
        term: None,
        held: BTreeSet::new(),
    };
    let (mut changes, mut leadership) = (fleet.changes(), fleet.consensus().leadership());
    task.state_changed();
    task.leadership_changed();
    loop {
        let wake = task.wake();
        tokio::select! {
            message = rx.recv() => match message {
                Some(m) => task.hear(m),
                None => return,
            },
            changed = changes.changed() => {
                if changed.is_err() { return }
                changes.mark_unchanged();
                task.state_changed();
            }
            changed = leadership.changed() => {
                if changed.is_err() { return }
                leadership.mark_unchanged();
                task.leadership_changed();
            }
            () = tokio::time::sleep(wake) => {
                task.hold(HolderInput::Tick);
                task.grant(GranterInput::Tick);
            }
        }
        if task.node.strong_count() == 0 {
            return;
        }
    }
}

struct Task {
    node: Weak<Node>,
    fleet: Arc<Fleet>,
    holder: Holder,
    granter: Granter,
    requests: BTreeMap<u64, (u64, oneshot::Sender<Answer>)>,
    /// When this node as leader granted each node's lease last, and since when it leads; boot time, ms.
    granted: BTreeMap<u64, u64>,
    led_since: u64,
    next_request: u64,
    /// The term in which this node leads, as told to the granter.
    term: Option<u64>,
    /// Nodes whose lease is in force, as told to the placement.
    held: BTreeSet<u64>,
}

impl Task {
    fn wake(&self) -> Duration {
        let now = boottime_ms();
        let next = [Some(self.holder.wake_ms()), self.granter.wake_ms()].into_iter().flatten().min().unwrap_or(u64::MAX);
        // A step at a passed deadline must not spin.
        Duration::from_millis(next.saturating_sub(now).max(5)).min(TICK)
    }

    fn event(&self, kind: &str, text: &str) {
        if let Some(node) = self.node.upgrade() {
            node.state.event("", kind, text);
        }
    }

    fn hear(&mut self, message: Message) {
        match message {
            Message::Renewal { node, incarnation, reply } => {
                self.next_request += 1;
                self.requests.insert(self.next_request, (node, reply));
                self.grant(GranterInput::Renewal { node, incarnation, request: self.next_request });
            }
            Message::Answered { seq, answer } => self.hold(HolderInput::Answer { seq, answer }),
            Message::Round { round, result } => {
                // What the round covers comes first.
                self.grant(GranterInput::Members(tracked(&self.fleet.state())));
                self.grant(GranterInput::RoundDone { round, result });
            }
            Message::Regranted { node, regrant, index } => {
                self.grant(GranterInput::RegrantDone { node, regrant, index });
            }
            Message::Alone if self.fleet.is_only_member() => self.hold(HolderInput::Alone(true)),
            Message::Alone => {}
            Message::Limited => self.hold(HolderInput::Limited),
        }
    }

    fn state_changed(&mut self) {
        let state = self.fleet.state();
        let lease_ms = u64::from(state.policy.lease_ms);
        self.hold(HolderInput::LeaseMs(lease_ms));
        self.grant(GranterInput::LeaseMs(lease_ms));
        self.hold(HolderInput::Applied { index: self.fleet.consensus().applied() });
        self.grant(GranterInput::Members(tracked(&state)));
        self.look_if_alone();
    }

    fn leadership_changed(&mut self) {
        let l = *self.fleet.consensus().leadership().borrow();
        match (l.me.then_some(l.term), self.term) {
            (Some(term), now) if now != Some(term) => {
                self.term = Some(term);
                self.granted.clear();
                self.led_since = boottime_ms();
                self.grant(GranterInput::Members(tracked(&self.fleet.state())));
                self.grant(GranterInput::BecameLeader { term });
            }
            (None, Some(_)) => {
                self.term = None;
                self.grant(GranterInput::Deposed);
            }
            _ => {}
        }
        self.look_if_alone();
        self.hold(HolderInput::Tick);
    }

    /// A node that is the fleet needs no lease, once a round of its own said that nobody else was let in.
    fn look_if_alone(&mut self) {
        if !self.fleet.is_only_member() {
            self.hold(HolderInput::Alone(false));
        } else if self.term.is_some() && self.holder.is_finite() {
            let fleet = self.fleet.clone();
            tokio::spawn(async move {
                if fleet.consensus().quorum_round().await.is_ok() && fleet.is_only_member() {
                    fleet.lease_mail(Message::Alone);
                }
            });
        }
    }

    fn hold(&mut self, input: HolderInput) {
        for effect in self.holder.step(boottime_ms(), input) {
            match effect {
                HolderEffect::SendRenewal { seq, incarnation } => self.send_renewal(seq, incarnation),
                HolderEffect::SetDeadline { boottime_ms } => self.fleet.set_deadline(boottime_ms),
                HolderEffect::Limit { boottime_ms } => {
                    self.fleet.set_deadline(boottime_ms);
                    self.limit();
                }
                HolderEffect::Lapsed => {
                    self.fleet.set_deadline(0);
                    self.event("lease-lapsed", "no majority of the voters granted this node's lease in time: its sessions stand still until it is granted again or a peer takes over");
                }
                HolderEffect::Regained { .. } => self.event("lease", "this node holds its lease"),
                HolderEffect::Refused { .. } if self.fleet.is_only_member() => {}
                HolderEffect::Refused { reason } => self.event("lease-refused", &reason.to_string()),
            }
        }
    }

    /// Reports once every VM of this node has taken a finite deadline; one that does not is ended, because it could run on
    /// beside its successor.
    fn limit(&self) {
        let (fleet, node) = (self.fleet.clone(), self.node.clone());
        tokio::spawn(async move {
            for pid in fleet.board().finite(LIMIT).await {
                if let Some(node) = node.upgrade() {
                    node.state.event("", "vm-ended", &format!("VM process {pid} did not take a finite lease"));
                }
                crate::host::process::kill_group_of(pid);
            }
            fleet.lease_mail(Message::Limited);
        });
    }

    fn send_renewal(&self, seq: u64, incarnation: u64) {
        let fleet = self.fleet.clone();
        let Some(leader) = fleet.consensus().leadership().borrow().leader else { return };
        tokio::spawn(async move {
            let me = fleet.number();
            let answer = if leader == me {
                let (reply, rx) = oneshot::channel();
                fleet.lease_mail(Message::Renewal { node: me, incarnation, reply });
                rx.await.ok()
            } else {
                wire::renew(&fleet, leader, incarnation, RENEWAL).await
            };
            if let Some(answer) = answer {
                fleet.lease_mail(Message::Answered { seq, answer });
            }
        });
    }

    fn grant(&mut self, input: GranterInput) {
        for effect in self.granter.step(boottime_ms(), input) {
            match effect {
                GranterEffect::StartRound { round } => {
                    let fleet = self.fleet.clone();
                    tokio::spawn(async move {
                        let result = fleet.consensus().covering_round().await.ok();
                        fleet.lease_mail(Message::Round { round, result });
                    });
                }
                GranterEffect::Answer { request, answer } => {
                    if let Some((node, reply)) = self.requests.remove(&request) {
                        if matches!(answer, Answer::Granted { .. }) {
                            self.granted.insert(node, boottime_ms());
                        }
                        let _ = reply.send(answer);
                    }
                }
                GranterEffect::Regrant { node, incarnation, regrant, term } => {
                    let fleet = self.fleet.clone();
                    tokio::spawn(async move {
                        let change = MemberChange { incarnation: Some(incarnation), ..MemberChange::default() };
                        let command = Command::UpdateMember { number: node, change };
                        let index = match fleet.consensus().propose_in_term(term, command).await {
                            Ok((index, answer)) => answer.ok().is_ok().then_some(index),
                            Err(e) => {
                                tracing::info!("the lease of node {node} is not given again yet: {e}");
                                None
                            }
                        };
                        fleet.lease_mail(Message::Regranted { node, regrant, index });
                    });
                }
                GranterEffect::Returning { node } => self.fleet.placing_mail(Notice::Returning { node }),
                GranterEffect::Lapse { node, term } => {
                    let heard_ms = self.fleet.seen_ms_ago(node);
                    let lapse =
                        how_it_ended(boottime_ms(), unix_ms(), self.granted.get(&node).copied(), self.led_since, heard_ms);
                    self.fleet.placing_mail(Notice::Lapsed { node, term, lapse });
                }
            }
        }
        // A caller that went away needs no answer.
        self.requests.retain(|_, (_, r)| !r.is_closed());
        let held: BTreeSet<u64> = self.granter.held(boottime_ms()).collect();
        if held != self.held {
            self.held.clone_from(&held);
            self.fleet.placing_mail(Notice::Held(held));
        }
    }
}

/// How a node's lease ended, for people: `granted` and `led_since` are boot times, `heard_ms` is how long ago gossip brought the
/// node's last word.
fn how_it_ended(now: u64, now_unix: u64, granted: Option<u64>, led_since: u64, heard_ms: Option<u64>) -> Lapse {
    let led_ms = now.saturating_sub(led_since);
    let lease_ms = match granted {
        Some(at) => now.saturating_sub(at),
        None => heard_ms.unwrap_or(0).max(led_ms),
    };
    let election_ms = granted.is_none().then_some(led_ms);
    Lapse { seen_unix_ms: now_unix.saturating_sub(lease_ms), lease_ms, election_ms }
}

/// All nodes whose lease matters: members, and those that left while sessions were theirs. A lone node needs none.
fn tracked(state: &FleetState) -> BTreeMap<u64, Tracked> {
    let mut out: BTreeMap<u64, Tracked> = BTreeMap::new();
    if state.members.values().filter(|m| m.is_member()).count() < 2 {
        return out;
    }
    let gone = state.members.values().any(|m| !m.is_member());
    let owners: BTreeSet<u64> =
        if gone { state.sessions.values().filter(|s| !s.tombstone).map(|s| s.owner).collect() } else { BTreeSet::new() };
    for m in state.members.values().filter(|m| m.is_member() || owners.contains(&m.number)) {
        out.insert(m.number, Tracked { incarnation: m.incarnation, admitted: m.is_member() });
    }
    out
}

/// Not the leader, in the words of a renewal's answer.
pub fn not_leader() -> Answer {
    Answer::Refused { term: 0, reason: Reason::NotLeader }
}

#[cfg(test)]
mod tests {
    use super::how_it_ended;

    #[test]
    fn a_lapse_is_told_from_the_last_grant_or_the_last_word() {
        let told = |granted, led_since, heard| {
            let l = how_it_ended(100_000, 1_000_000, granted, led_since, heard);
            (l.seen_unix_ms, l.lease_ms, l.election_ms)
        };
        assert_eq!(told(Some(96_700), 5_000, Some(900)), (996_700, 3_300, None), "the same leader all the while");
        assert_eq!(told(None, 96_700, Some(4_100)), (995_900, 4_100, Some(3_300)), "a new leader, that heard of it before");
        assert_eq!(told(None, 96_700, None), (996_700, 3_300, Some(3_300)), "a new leader that never heard of it");
        assert_eq!(told(None, 96_700, Some(50)), (996_700, 3_300, Some(3_300)), "it spoke on and had no lease");
    }
}
