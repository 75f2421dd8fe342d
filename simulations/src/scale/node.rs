//! Nodes of the scale measurement: a holder and gossip on each, granter and placer on the leader.

use super::hub::Hub;
use crate::gossip::{address, number};
use chitchat::transport::{Socket, Transport};
use chitchat::{
    ChitchatConfig, ChitchatHandle, ChitchatId, ChitchatMessage, Deserializable, FailureDetectorConfig, Serializable,
};
use ks_fleet::lease::{Answer, Granter, GranterEffect, GranterInput, Holder, HolderEffect, HolderInput};
use ks_fleet::placement::{Cause, Effect, Input, Placer};
use ks_fleet::{FactsView, View};
use ks_proto::SessionId;
use ks_raft::host::Consensus;
use ks_raft::{Assignment, Command};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};
use tokio::task::AbortHandle;

/// Letters that wait for the leader.
const MAILBOX_MAX: usize = 4096;
/// Gossip of the product: once a second.
const GOSSIP_EVERY: Duration = Duration::from_secs(1);

fn locked<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A renewal on its way to the leader.
pub struct Letter {
    node: u64,
    incarnation: u64,
    reply: oneshot::Sender<Answer>,
}

#[derive(Default)]
struct Seen {
    held: u64,
    granted: u64,
    rounds: u64,
    lapses: u64,
    lapsed_at: BTreeMap<u64, (Instant, f64)>,
    decide_ms: f64,
}

/// The leader's part.
pub struct Lead {
    seen: Arc<Mutex<Seen>>,
}

enum Done {
    Round(u64, Option<(u64, u64)>),
    Regranted(u64, u64, Option<u64>),
}

struct Leader {
    peer: Consensus,
    seen: Arc<Mutex<Seen>>,
    granter: Granter,
    placer: Placer,
    requests: BTreeMap<u64, oneshot::Sender<Answer>>,
    tell: mpsc::UnboundedSender<Done>,
    begun: Instant,
}

impl Leader {
    fn now(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
    fn grant(&mut self, input: GranterInput) {
        for effect in self.granter.step(self.now(), input) {
            match effect {
                GranterEffect::StartRound { round } => {
                    locked(&self.seen).rounds += 1;
                    let (peer, tell) = (self.peer.clone(), self.tell.clone());
                    tokio::spawn(async move {
                        let result = peer.covering_round().await.ok();
                        drop(tell.send(Done::Round(round, result)));
                    });
                }
                GranterEffect::Answer { request, answer } => {
                    locked(&self.seen).granted += u64::from(matches!(answer, Answer::Granted { .. }));
                    if let Some(reply) = self.requests.remove(&request) {
                        drop(reply.send(answer));
                    }
                }
                GranterEffect::Regrant { node, regrant, .. } => {
                    drop(self.tell.send(Done::Regranted(node, regrant, Some(self.peer.applied()))));
                }
                GranterEffect::Returning { node } => self.place(Input::Returning { node }),
                GranterEffect::Lapse { node, term } => {
                    {
                        let mut seen = locked(&self.seen);
                        seen.lapses += 1;
                        seen.lapsed_at.insert(node, (Instant::now(), cpu_s()));
                    }
                    let now = self.now();
                    let held: BTreeSet<u64> = self.granter.held(now).collect();
                    let fact = FactsView { mem_free_mib: 1 << 20, disk_free_mib: 1 << 20, ..FactsView::default() };
                    let facts = held.iter().map(|n| (*n, fact.clone())).collect();
                    self.place(Input::Nodes { held, facts });
                    self.place(Input::Lapsed { node, term });
                }
            }
        }
    }
    fn place(&mut self, input: Input) {
        let begun = Instant::now();
        // As the product does.
        let view = View::within(&self.peer.state(), &self.placer.scope(BTreeSet::new(), &input));
        let effects = self.placer.step(self.now(), &view, input);
        {
            let mut seen = locked(&self.seen);
            seen.decide_ms = seen.decide_ms.max(begun.elapsed().as_secs_f64() * 1000.0);
        }
        for effect in effects {
            let Effect::Assign { moves, cause, term, .. } = effect else { continue };
            let one = |m: ks_fleet::placement::Move| Assignment {
                id: m.session,
                to: m.to,
                expected_epoch: Some(m.expected_epoch),
                from_lapsed: cause == Cause::Lapsed,
                now_unix_ms: 1,
                cause: "its node died".into(),
            };
            let command = Command::AssignMany { moves: moves.into_iter().map(one).collect() };
            let peer = self.peer.clone();
            tokio::spawn(async move { drop(peer.propose_in_term(term, command).await) });
        }
    }
}

impl Lead {
    /// Starts granter and placer beside the leader.
    pub fn start(hub: &Arc<Hub>, peer: Consensus) -> Self {
        let seen = Arc::new(Mutex::new(Seen::default()));
        let (mailbox, mut letters) = mpsc::channel::<Letter>(MAILBOX_MAX);
        let (tell, mut done) = mpsc::unbounded_channel();
        *locked(&hub.leader) = Some(mailbox);
        let mut l = Leader {
            seen: seen.clone(),
            granter: Granter::new(3000),
            placer: Placer::new(),
            requests: BTreeMap::new(),
            tell,
            begun: Instant::now(),
            peer,
        };
        tokio::spawn(async move {
            let term = l.peer.leadership().borrow().term;
            let members = GranterInput::Members(View::of(&l.peer.state(), |_| false).tracked());
            l.grant(members);
            l.grant(GranterInput::BecameLeader { term });
            l.place(Input::BecameLeader { term });
            let (mut state, mut next) = (l.peer.state(), 0u64);
            loop {
                tokio::select! {
                    Some(d) = done.recv() => match d {
                        Done::Round(round, result) => l.grant(GranterInput::RoundDone { round, result }),
                        Done::Regranted(node, regrant, index) => l.grant(GranterInput::RegrantDone { node, regrant, index }),
                    },
                    Some(Letter { node, incarnation, reply }) = letters.recv() => {
                        next += 1;
                        l.requests.insert(next, reply);
                        l.grant(GranterInput::Renewal { node, incarnation, request: next });
                    }
                    () = tokio::time::sleep(Duration::from_millis(20)) => l.grant(GranterInput::Tick),
                }
                let newest = l.peer.state();
                if !Arc::ptr_eq(&newest, &state) {
                    state = newest;
                    l.place(Input::Tick);
                }
                let held = l.granter.held(l.now()).count() as u64;
                locked(&l.seen).held = held;
            }
        });
        Self { seen }
    }
    /// Leases in force.
    pub fn held(&self) -> u64 {
        locked(&self.seen).held
    }
    /// Counts from zero.
    pub fn reset(&self) {
        let mut s = locked(&self.seen);
        (s.granted, s.rounds, s.lapses) = (0, 0, 0);
    }
    /// Renewals granted.
    pub fn granted(&self) -> u64 {
        locked(&self.seen).granted
    }
    /// Quorum rounds.
    pub fn rounds(&self) -> u64 {
        locked(&self.seen).rounds
    }
    /// Lapses declared.
    pub fn lapses(&self) -> u64 {
        locked(&self.seen).lapses
    }
    /// The longest step of the placer.
    pub fn decide_ms(&self) -> f64 {
        locked(&self.seen).decide_ms
    }
    /// What it took to place the sessions of `node`, from its declared lapse; `left` are the other nodes, the leader first.
    pub async fn wait_placed(&self, node: u64, left: &[Consensus], patience: Duration) -> anyhow::Result<Placed> {
        let begun = Instant::now();
        let (lapsed, cpu) = loop {
            if let Some(at) = locked(&self.seen).lapsed_at.get(&node).copied() {
                break at;
            }
            anyhow::ensure!(begun.elapsed() < patience, "the lease of node {node} did not lapse");
            tokio::time::sleep(Duration::from_millis(2)).await;
        };
        let Some(leader) = left.first() else { anyhow::bail!("no node is left") };
        let theirs: Vec<SessionId> = leader.state().sessions.values().filter(|s| s.owner == node).map(|s| s.id).collect();
        let mut changes = leader.changes();
        let placed = changes.wait_for(|s| theirs.iter().all(|id| s.sessions.get(id).is_none_or(|s| s.owner != node)));
        let state = tokio::time::timeout(patience, placed).await??.clone();
        let decided_s = lapsed.elapsed().as_secs_f64();
        let owners: BTreeSet<u64> = theirs.iter().filter_map(|id| state.sessions.get(id)).map(|s| s.owner).collect();
        let (mut told_s, mut everywhere_s) = (decided_s, decided_s);
        // The new owners first; each of them may have been told while another was waited for, so this is the time of the last.
        for first in [true, false] {
            for peer in left.iter().filter(|p| owners.contains(&p.number()) == first) {
                let mut changes = peer.changes();
                tokio::time::timeout(patience, changes.wait_for(|s| s.applied >= state.applied)).await??;
            }
            everywhere_s = lapsed.elapsed().as_secs_f64();
            if first {
                told_s = everywhere_s;
            }
        }
        Ok(Placed { sessions: theirs.len(), decided_s, told_s, everywhere_s, cpu_s: cpu_s() - cpu })
    }
}

/// What one dead node cost.
#[derive(Debug, Clone, Copy)]
pub struct Placed {
    /// Its sessions.
    pub sessions: usize,
    /// Until the leader had decided all, by a majority of the voters.
    pub decided_s: f64,
    /// Until every new owner knew of its own.
    pub told_s: f64,
    /// Until every node knew of all.
    pub everywhere_s: f64,
    /// Processor time of all nodes together until then.
    pub cpu_s: f64,
}

/// Processor time of this process so far, seconds.
fn cpu_s() -> f64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    t.tv_sec as f64 + t.tv_nsec as f64 / 1e9
}

/// One node's part.
pub struct Runner {
    tasks: Vec<AbortHandle>,
    gossip: ChitchatHandle,
    latencies: Arc<Mutex<Vec<f64>>>,
}

impl Runner {
    /// Starts holder and gossip.
    pub async fn start(hub: &Arc<Hub>, peer: Consensus) -> anyhow::Result<Self> {
        let number = peer.number();
        let gossip = gossip(hub, number).await?;
        let latencies = Arc::new(Mutex::new(Vec::new()));
        let renew = tokio::spawn(renew(hub.clone(), peer, latencies.clone()));
        let chat = gossip.chitchat();
        let facts = tokio::spawn(async move {
            for seq in 0u64.. {
                let fact = format!(
                    "{{\"number\":{number},\"seq\":{seq},\"load\":{},\"mem_free_mib\":{}}}",
                    seq % 700,
                    60_000 + seq % 999
                );
                // As the product's: the record is signed.
                let signed = format!("{fact} {}", "5a".repeat(64));
                chat.lock().await.self_node_state().set("facts", signed);
                tokio::time::sleep(GOSSIP_EVERY).await;
            }
        });
        Ok(Self { tasks: vec![renew.abort_handle(), facts.abort_handle()], gossip, latencies })
    }
    /// It dies.
    pub fn stop(&mut self) {
        self.tasks.drain(..).for_each(|t| t.abort());
        self.gossip.abort();
    }
    /// From sending to grant.
    pub fn latencies_ms(&self) -> Vec<f64> {
        locked(&self.latencies).clone()
    }
}

async fn renew(hub: Arc<Hub>, peer: Consensus, latencies: Arc<Mutex<Vec<f64>>>) {
    let (number, begun) = (peer.number(), Instant::now());
    let now = || u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
    let state = peer.state();
    let mut holder = Holder::new(state.members.get(&number).map_or(0, |m| m.incarnation), 3000);
    drop(state);
    let (tell, mut told) = mpsc::unbounded_channel::<(u64, Answer)>();
    // Nodes do not start in step.
    tokio::time::sleep(Duration::from_millis(number * 37 % 500)).await;
    loop {
        let input = tokio::select! {
            Some((seq, answer)) = told.recv() => HolderInput::Answer { seq, answer },
            () = tokio::time::sleep(Duration::from_millis(holder.wake_ms().saturating_sub(now()).clamp(1, 500))) => HolderInput::Tick,
        };
        let mut effects = holder.step(now(), HolderInput::Applied { index: peer.applied() });
        effects.extend(holder.step(now(), input));
        for effect in effects {
            if let HolderEffect::SendRenewal { seq, incarnation } = effect {
                let (leader, tell, latencies) = (locked(&hub.leader).clone(), tell.clone(), latencies.clone());
                tokio::spawn(async move {
                    let sent = Instant::now();
                    let (reply, answered) = oneshot::channel();
                    let Some(leader) = leader else { return };
                    if leader.try_send(Letter { node: number, incarnation, reply }).is_err() {
                        return;
                    }
                    if let Ok(answer) = answered.await {
                        locked(&latencies).push(sent.elapsed().as_secs_f64() * 1000.0);
                        drop(tell.send((seq, answer)));
                    }
                });
            }
        }
    }
}

struct Way {
    me: u64,
    hub: Arc<Hub>,
}
struct Ear {
    me: u64,
    hub: Arc<Hub>,
    heard: mpsc::Receiver<(u64, Vec<u8>)>,
}

#[async_trait::async_trait]
impl Transport for Way {
    async fn open(&self, _: SocketAddr) -> anyhow::Result<Box<dyn Socket>> {
        Ok(Box::new(Ear { me: self.me, hub: self.hub.clone(), heard: self.hub.listen(self.me) }))
    }
}

#[async_trait::async_trait]
impl Socket for Ear {
    async fn send(&mut self, to: SocketAddr, message: ChitchatMessage) -> anyhow::Result<()> {
        self.hub.gossip(self.me, number(to), message.serialize_to_vec());
        Ok(())
    }
    async fn recv(&mut self) -> anyhow::Result<(SocketAddr, ChitchatMessage)> {
        loop {
            let Some((from, bytes)) = self.heard.recv().await else { std::future::pending().await };
            if let Ok(message) = ChitchatMessage::deserialize(&mut &bytes[..]) {
                return Ok((address(from), message));
            }
        }
    }
}

async fn gossip(hub: &Arc<Hub>, me: u64) -> anyhow::Result<ChitchatHandle> {
    let config = ChitchatConfig {
        chitchat_id: ChitchatId::new(me.to_string(), 1, address(me)),
        cluster_id: "fleet".into(),
        gossip_interval: GOSSIP_EVERY,
        listen_addr: address(me),
        seed_nodes: vec![address(1).to_string()],
        failure_detector_config: FailureDetectorConfig::default(),
        marked_for_deletion_grace_period: Duration::from_secs(600),
        catchup_callback: None,
        extra_liveness_predicate: None,
    };
    chitchat::spawn_chitchat(config, Vec::new(), &Way { me, hub: hub.clone() }).await
}
