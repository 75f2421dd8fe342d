//! One node's daemon on fake hardware: turns messages, time and state into inputs of the machines, and carries out effects.
//!
//! It holds no policy. What it must keep to, and the product's host too:
//! - the granter hears of members before it hears that a round is done;
//! - a re-grant is proposed only when every assignment proposed because of that node's lapse has ended;
//! - a deadline is given only to VMs of sessions that the applied state says are this node's, at their epoch;
//! - a daemon starts nothing before the first proposal of its life was answered: what its former life proposed late, such as
//!   a checkpoint newer than the one it is about to start from, is void from then on;
//! - a surplus copy is given up only when every node of the replica set has read its own copy whole just before;
//! - nothing is collected, and no pin released, by a state that is behind what this node applied in an earlier life;
//! - an owner that said it cannot start a session at an epoch never starts it at that epoch.

mod copy;
mod lease;
mod place;
mod start;

use crate::gossip;
use crate::mutants::Mutant;
use crate::net::Peer;
use crate::world::World;
use chitchat::ChitchatHandle;
use ks_fleet::lease::{Answer, Granter, GranterInput, Holder, HolderInput};
use ks_fleet::lease::{DRIFT_MARGIN_PERMILLE, RENEWALS_PER_LEASE};
use ks_fleet::placement::Placer;
use ks_fleet::replication::{self, Replicator};
use ks_fleet::{FactsView, View};
use ks_proto::{CheckpointId, RunToken, SessionId};
use ks_raft::{Command, FleetState, MemberChange, Response};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

/// Letters that wait for a daemon.
pub const MAILBOX_MAX: usize = 1024;
/// How often the machines are stepped when nothing happens.
const TICK: Duration = Duration::from_millis(100);
/// The head of a session that never had a checkpoint: it begins at 0.
pub const GOLDEN: CheckpointId = CheckpointId([0xee; 32]);

/// What peers ask a daemon.
pub enum Mail {
    /// Renew the lease.
    Renew { node: u64, incarnation: u64, reply: oneshot::Sender<Answer> },
    /// Get a checkpoint from one of `from`, sync it, and say so.
    Fetch { session: SessionId, checkpoint: CheckpointId, token: RunToken, from: Vec<u64>, reply: oneshot::Sender<bool> },
    /// Read the checkpoint whole: is every byte of it there and sound?
    Verify { checkpoint: CheckpointId, reply: oneshot::Sender<bool> },
    /// The session's owner cannot start it.
    StartFailed { session: SessionId, epoch: u64, node: u64, reply: oneshot::Sender<()> },
    /// The session runs.
    Started { session: SessionId, epoch: u64, reply: oneshot::Sender<()> },
}

/// What this daemon's own tasks report.
enum Done {
    Round { round: u64, result: Option<(u64, u64)> },
    Regranted { node: u64, regrant: u64, index: Option<u64> },
    Assigned { from: u64, failed: Vec<(SessionId, u64)> },
    Renewed { seq: u64, answer: Answer },
    Fetched { peer: u64, checkpoint: CheckpointId, ok: bool },
    Begun { session: SessionId, epoch: u64, begun: Option<(RunToken, u64)> },
    StartFailed { session: SessionId, epoch: u64 },
    Captured { session: SessionId },
    Introduced,
    Current { is: bool },
    Alone,
    VotersSet,
}

/// One daemon.
pub struct Host {
    world: Arc<World>,
    me: u64,
    life: u64,
    peer: Peer,
    gossip: Option<ChitchatHandle>,
    mail: mpsc::Receiver<Mail>,
    tell: mpsc::UnboundedSender<Done>,
    done: mpsc::UnboundedReceiver<Done>,
    tasks: JoinSet<()>,
    state: Arc<FleetState>,
    view: View,
    holder: Holder,
    granter: Granter,
    placer: Placer,
    replicator: Replicator,
    requests: BTreeMap<u64, oneshot::Sender<Answer>>,
    next_request: u64,
    sent_ms: BTreeMap<u64, u64>,
    regrants: VecDeque<(u64, u64, u64, u64)>,
    assigning: BTreeMap<u64, u32>,
    facts: BTreeMap<u64, FactsView>,
    heard: BTreeMap<u64, (String, u64)>,
    starting: BTreeSet<SessionId>,
    cannot_start: BTreeMap<SessionId, u64>,
    capturing: BTreeSet<SessionId>,
    next_capture_ms: BTreeMap<SessionId, u64>,
    changing_voters: bool,
    alone_asked: bool,
    introduced: bool,
    due: BTreeMap<&'static str, u64>,
}

impl Host {
    /// Starts the daemon's loop. Its consensus is open.
    pub async fn run(world: Arc<World>, me: u64, life: u64, peer: Peer, incarnation: u64, mail: mpsc::Receiver<Mail>) {
        let gossip = gossip::start(&world, me, life).await;
        let (tell, done) = mpsc::unbounded_channel();
        let state = peer.state();
        let lease_ms = u64::from(state.policy.lease_ms);
        let mut host = Self {
            world,
            me,
            life,
            gossip,
            mail,
            tell,
            done,
            tasks: JoinSet::new(),
            view: View::from(&*state),
            state,
            holder: Holder::new(incarnation, lease_ms),
            granter: Granter::new(lease_ms),
            placer: Placer::new(),
            replicator: Replicator::new(me),
            peer,
            requests: BTreeMap::new(),
            next_request: 0,
            sent_ms: BTreeMap::new(),
            regrants: VecDeque::new(),
            assigning: BTreeMap::new(),
            facts: BTreeMap::new(),
            heard: BTreeMap::new(),
            starting: BTreeSet::new(),
            cannot_start: BTreeMap::new(),
            capturing: BTreeSet::new(),
            next_capture_ms: BTreeMap::new(),
            changing_voters: false,
            alone_asked: false,
            introduced: false,
            due: BTreeMap::new(),
        };
        host.looped().await;
    }

    async fn looped(&mut self) {
        let mut changes = self.peer.changes();
        let mut leadership = self.peer.leadership();
        self.lead();
        self.introduce();
        loop {
            let due_ms = self.granter.wake_ms().map_or(u64::MAX, |t| t.saturating_sub(self.now()).max(5));
            let tick = sleep_until(Instant::now() + TICK.min(Duration::from_millis(due_ms)));
            tokio::select! {
                biased;
                Some(done) = self.done.recv() => { self.world.thaw(self.me).await; self.look(); self.finished(done) }
                Some(mail) = self.mail.recv() => { self.world.thaw(self.me).await; self.look(); self.letter(mail) }
                Ok(()) = leadership.changed() => { self.world.thaw(self.me).await; self.look(); self.lead() }
                Ok(()) = changes.changed() => { self.world.thaw(self.me).await; self.look() }
                () = tick => {}
            }
            self.world.thaw(self.me).await;
            self.look();
            self.tick().await;
            while self.tasks.try_join_next().is_some() {}
        }
    }

    fn now(&self) -> u64 {
        self.world.clock_ms(self.me)
    }
    /// True each time the period has passed.
    fn every(&mut self, what: &'static str, period_ms: u64) -> bool {
        let now = self.now();
        let due = self.due.entry(what).or_insert(now + period_ms / 2);
        let is_due = now >= *due;
        if is_due {
            *due = now + period_ms;
        }
        is_due
    }
    fn spawn(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        let seed = self.world.roll(u64::MAX);
        self.tasks.spawn(crate::world::Sim::scope(seed, task));
    }
    /// Does something and reports it.
    fn spawn_done(&mut self, task: impl Future<Output = Done> + Send + 'static) {
        let tell = self.tell.clone();
        self.spawn(async move { drop(tell.send(task.await)) });
    }
    fn propose(&mut self, command: Command) {
        let peer = self.peer.clone();
        self.spawn(async move { drop(peer.propose(command).await) });
    }

    /// Takes over the newest applied state.
    fn look(&mut self) {
        let state = self.peer.state();
        if Arc::ptr_eq(&state, &self.state) {
            return;
        }
        let index = self.peer.applied();
        let at = self.world.now_ms();
        self.world.with(|w| {
            w.invariants.same_state.applied(at, self.me, index, &state);
            if index > w.newest.0 {
                w.newest = (index, state.clone());
            }
        });
        self.state = state;
        self.view = View::from(&*self.state);
        self.release_pins();
        let members = GranterInput::Members(self.view.tracked());
        self.grant(members);
        self.reconcile();
        if !self.view.is_alone() {
            self.hold(HolderInput::Alone(false));
        }
        self.hold(HolderInput::Applied { index });
        self.place(ks_fleet::placement::Input::Tick);
        self.replicate(replication::Input::Tick);
    }

    /// Takes over who leads.
    fn lead(&mut self) {
        let l = *self.peer.leadership().borrow();
        if l.me {
            let members = GranterInput::Members(self.view.tracked());
            self.grant(members);
            let now = self.now();
            if self.world.is(Mutant::NewLeaderDoesNotWait) {
                // It waits for one renewal of each node only, as if it had led for most of a lease already.
                let (lease, margin) = (self.view.lease_ms, self.view.lease_ms * DRIFT_MARGIN_PERMILLE / 1000);
                let early = (now + lease / RENEWALS_PER_LEASE + 50).saturating_sub(lease + margin);
                let effects = self.granter.step(early, GranterInput::BecameLeader { term: l.term });
                self.granted(effects);
            } else {
                self.grant(GranterInput::BecameLeader { term: l.term });
            }
            self.place(ks_fleet::placement::Input::BecameLeader { term: l.term });
        } else {
            self.regrants.clear();
            self.grant(GranterInput::Deposed);
            self.place(ks_fleet::placement::Input::Deposed);
        }
    }

    async fn tick(&mut self) {
        self.ask_alone();
        self.hold(HolderInput::Tick);
        self.grant(GranterInput::Tick);
        self.reconcile();
        if self.every("gossip", 1000) {
            self.gossip().await;
        }
        if self.every("voters", 1000) {
            self.voters();
        }
        if self.placer.wake_ms().is_some_and(|t| t <= self.now()) || self.every("place", 500) {
            self.place_nodes();
        }
        if self.every("replicate", replication::TICK_MS) {
            self.replicate(replication::Input::Tick);
        }
        self.capture_if_due();
        if self.every("collect", 7_000) {
            self.collect();
        }
        if self.every("scrub", 15_000) {
            self.scrub();
        }
        if self.every("retry", 2_000) {
            self.say_again();
        }
    }

    fn letter(&mut self, mail: Mail) {
        match mail {
            Mail::Renew { node, incarnation, reply } => {
                self.next_request += 1;
                let request = self.next_request;
                self.requests.insert(request, reply);
                self.grant(GranterInput::Renewal { node, incarnation, request });
            }
            Mail::Fetch { session, checkpoint, token, from, reply } => self.fetch(session, checkpoint, token, from, reply),
            Mail::Verify { checkpoint, reply } => {
                let _ = reply.send(self.world.with(|w| w.node(self.me).store.read(&checkpoint).is_some()));
            }
            Mail::StartFailed { session, epoch, node, reply } => {
                let reason = "the engine did not start".into();
                self.place(ks_fleet::placement::Input::StartFailed { session, epoch, node, reason });
                let _ = reply.send(());
            }
            Mail::Started { session, epoch, reply } => {
                self.place(ks_fleet::placement::Input::Started { session, epoch });
                let _ = reply.send(());
            }
        }
    }

    fn finished(&mut self, done: Done) {
        match done {
            Done::Round { round, result } => self.grant(GranterInput::RoundDone { round, result }),
            Done::Regranted { node, regrant, index } => self.grant(GranterInput::RegrantDone { node, regrant, index }),
            Done::Assigned { from, failed } => {
                let n = self.assigning.entry(from).or_default();
                *n = n.saturating_sub(1);
                for (session, expected_epoch) in failed {
                    self.place(ks_fleet::placement::Input::NotAssigned { session, expected_epoch });
                }
                self.pump_regrants();
            }
            Done::Renewed { seq, answer } => self.renewed(seq, answer),
            Done::Fetched { peer, checkpoint, ok } => {
                let input = if ok {
                    replication::Input::FetchDone { peer, checkpoint }
                } else {
                    replication::Input::FetchFailed { peer, checkpoint }
                };
                self.replicate(input);
            }
            Done::Begun { session, epoch, begun } => self.begun(session, epoch, begun),
            Done::StartFailed { session, epoch } => {
                self.starting.remove(&session);
                self.cannot_start.insert(session, epoch);
                self.say_again();
            }
            Done::Captured { session } => {
                self.capturing.remove(&session);
            }
            Done::Alone => {
                let voters = self.peer.membership().voters;
                if self.view.is_alone() && voters == BTreeSet::from([self.me]) {
                    self.hold(HolderInput::Alone(true));
                }
            }
            Done::Introduced => {
                self.introduced = true;
                self.world.with(|w| w.node_mut(self.me).store.settle_idle());
            }
            Done::Current { is: true } => self.collect_now(),
            Done::Current { is: false } => self.world.with(|w| w.count("collections put off")),
            Done::VotersSet => self.changing_voters = false,
        }
    }

    /// The first proposal of this life: behind it nothing of an earlier life is applied any more.
    fn introduce(&mut self) {
        let (peer, number) = (self.peer.clone(), self.me);
        self.spawn_done(async move {
            let change = MemberChange::default();
            while peer.propose(Command::UpdateMember { number, change: change.clone() }).await.is_err() {}
            Done::Introduced
        });
    }

    /// A lone founder asks for its own round before it counts as alone.
    fn ask_alone(&mut self) {
        let voters = self.peer.membership().voters;
        if self.alone_asked || !self.view.is_alone() || voters != BTreeSet::from([self.me]) {
            return;
        }
        self.alone_asked = true;
        let peer = self.peer.clone();
        self.spawn_done(async move {
            while peer.quorum_round().await.is_err() {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            Done::Alone
        });
    }

    async fn gossip(&mut self) {
        let Some(handle) = &self.gossip else { return };
        let (life, sessions) = (self.life, self.world.with(|w| w.node(self.me).vms.len()));
        let fact = format!("{life} {} {sessions}", self.now());
        handle.with_chitchat(|c| c.self_node_state().set("facts", &fact)).await;
        let now = self.now();
        for (node, fact) in gossip::live(handle).await {
            let heard = self.heard.entry(node).or_insert_with(|| (String::new(), now));
            if heard.0 != fact {
                *heard = (fact, now);
            }
        }
        let facts = |(node, (fact, at)): (&u64, &(String, u64))| {
            let sessions = fact.split(' ').nth(2).and_then(|s| s.parse().ok()).unwrap_or(0);
            let seen_ms_ago = now.saturating_sub(*at);
            (*node, FactsView { seen_ms_ago, load_milli: 0, mem_free_mib: 64_000, disk_free_mib: 64_000, sessions })
        };
        self.facts = self.heard.iter().map(facts).collect();
        self.replicate(replication::Input::Nodes(self.facts.clone()));
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if let Some(gossip) = &self.gossip {
            gossip.abort();
        }
    }
}

/// The refusal in an answer, if it is one.
fn refused(answer: &Response) -> bool {
    matches!(answer, Response::Refused { .. })
}
