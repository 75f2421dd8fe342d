//! What all nodes share: time, dice, the network's state, disks and stores, the outside, and what was seen to go wrong.

use crate::disk::SimDisk;
use crate::host::Mail;
use crate::invariants::Invariants;
use crate::mutants::Mutant;
use crate::net::Peer;
use crate::store::Store;
use crate::vm::Vm;
use ks_proto::{RunToken, SessionId};
use ks_raft::FleetState;
use ks_raft::host::{DeterministicRng, TokioRuntime};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until};

/// The runtime whose dice are seeded.
pub type Sim = DeterministicRng<TokioRuntime>;
/// Unix time at the start of every run, milliseconds.
pub const EPOCH_UNIX_MS: u64 = 1_700_000_000_000;

/// One node, in all its lives.
pub struct Node {
    /// Counts its daemon's lives.
    pub life: u64,
    /// Random number of its first daemon; later ones count on from it.
    pub first_incarnation: u64,
    /// Its daemon runs.
    pub up: bool,
    /// How its clock runs, in thousandths fast.
    pub drift_permille: i64,
    /// Its daemon stands still until then.
    pub frozen_until: Instant,
    /// Its VMs stand still until then.
    pub vm_frozen_until: Instant,
    /// Its disk is full until then.
    pub full_until: Instant,
    /// Starts of VMs fail until then.
    pub starts_fail_until: Instant,
    /// Its disk is slow until then.
    pub slow_until: Instant,
    /// Its consensus, while it is up.
    pub peer: Option<Peer>,
    /// Its daemon's mailbox.
    pub mailbox: Option<mpsc::Sender<Mail>>,
    /// Its gossip's ear.
    pub gossip: Option<mpsc::Sender<(u64, Vec<u8>)>>,
    /// Disk of its consensus.
    pub disk: SimDisk,
    /// Its chunks.
    pub store: Store,
    /// Its VMs.
    pub vms: BTreeMap<SessionId, Arc<Vm>>,
    /// Ends its daemon.
    pub abort: Option<AbortHandle>,
}

/// The state behind the lock.
pub struct Inner {
    rng: SmallRng,
    trace: blake3::Hasher,
    /// Nodes by number.
    pub nodes: BTreeMap<u64, Node>,
    /// From, to: what is sent so is lost.
    pub cut: BTreeSet<(u64, u64)>,
    /// Faults so far, by kind.
    pub faults: BTreeMap<&'static str, u64>,
    /// Other things worth counting.
    pub counts: BTreeMap<&'static str, u64>,
    /// What must hold.
    pub invariants: Invariants,
    /// The newest state that any node applied, with its index.
    pub newest: (u64, Arc<FleetState>),
    /// Faults are over.
    pub calm: bool,
}

impl Inner {
    /// The node with that number; it must be there.
    pub fn node(&self, n: u64) -> &Node {
        &self.nodes[&n]
    }
    /// As [`Inner::node`].
    pub fn node_mut(&mut self, n: u64) -> &mut Node {
        self.nodes.get_mut(&n).expect("nodes are added once and never removed")
    }
    /// Counts a fault.
    pub fn fault(&mut self, kind: &'static str) {
        *self.faults.entry(kind).or_default() += 1;
    }
    /// Counts something else.
    pub fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }
}

/// The world of one run.
pub struct World {
    inner: Mutex<Inner>,
    start: Instant,
    /// The planted bug.
    pub mutant: Option<Mutant>,
    talks: bool,
}

impl World {
    /// An empty world. Needs a paused runtime.
    pub fn new(seed: u64, mutant: Option<Mutant>) -> Arc<Self> {
        let inner = Inner {
            rng: SmallRng::seed_from_u64(seed),
            trace: blake3::Hasher::new(),
            nodes: BTreeMap::new(),
            cut: BTreeSet::new(),
            faults: BTreeMap::new(),
            counts: BTreeMap::new(),
            invariants: Invariants::default(),
            newest: (0, Arc::default()),
            calm: true,
        };
        let talks = std::env::var_os("KS_SIM_LOG").is_some();
        Arc::new(Self { inner: Mutex::new(inner), start: Instant::now(), mutant, talks })
    }

    /// Works on the shared state. Never held over an await.
    pub fn with<T>(&self, f: impl FnOnce(&mut Inner) -> T) -> T {
        f(&mut self.inner.lock().unwrap_or_else(PoisonError::into_inner))
    }
    /// True if this bug is planted.
    pub fn is(&self, mutant: Mutant) -> bool {
        self.mutant == Some(mutant)
    }
    /// A number below `sides`.
    pub fn roll(&self, sides: u64) -> u64 {
        self.with(|w| w.rng.random_range(0..sides.max(1)))
    }
    /// True time since the start, milliseconds.
    pub fn now_ms(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
    /// Unix time.
    pub fn unix_ms(&self) -> u64 {
        EPOCH_UNIX_MS + self.now_ms()
    }
    /// CLOCK_BOOTTIME of a node: it starts elsewhere and runs at another speed.
    pub fn clock_ms(&self, node: u64) -> u64 {
        let speed = self.with(|w| w.nodes.get(&node).map_or(0, |n| n.drift_permille)) + 1000;
        node * 1_000_000 + self.now_ms() * u64::try_from(speed).unwrap_or(1000) / 1000
    }
    /// Runs a task with dice of its own.
    pub fn spawn(self: &Arc<Self>, task: impl Future<Output = ()> + Send + 'static) -> AbortHandle {
        let seed = self.with(|w| w.rng.random());
        tokio::spawn(Sim::scope(seed, task)).abort_handle()
    }
    /// Writes into the trace.
    pub fn trace(&self, what: &str) {
        let at = self.start.elapsed().as_micros();
        self.with(|w| {
            w.trace.update(&at.to_le_bytes());
            w.trace.update(what.as_bytes());
        });
    }
    /// For a person: on stderr, if `KS_SIM_LOG` is set. Not part of the trace.
    pub fn say(&self, what: impl FnOnce() -> String) {
        if self.talks {
            eprintln!("{:>7} {}", self.now_ms(), what());
        }
    }
    /// Hash of the trace so far.
    pub fn trace_hash(&self) -> String {
        self.with(|w| w.trace.finalize().to_hex()[..16].to_owned())
    }

    /// The way of one message: how long it takes, or None if it is lost.
    pub fn hop(&self, from: u64, to: u64, kind: u8) -> Option<Duration> {
        let at = self.start.elapsed().as_micros();
        self.with(|w| {
            let slow = !w.calm && w.rng.random_range(0..200) == 0;
            let us = if slow { w.rng.random_range(20_000..1_500_000) } else { w.rng.random_range(100..4_000) };
            let lost = !w.calm && w.rng.random_range(0..300) == 0;
            let up = |n: &u64| w.nodes.get(n).is_some_and(|n| n.up);
            let gone = lost || w.cut.contains(&(from, to)) || !up(&from) || !up(&to);
            let mut record = [0u8; 42];
            record[..16].copy_from_slice(&at.to_le_bytes());
            record[16..24].copy_from_slice(&from.to_le_bytes());
            record[24..32].copy_from_slice(&to.to_le_bytes());
            record[32..40].copy_from_slice(&u64::to_le_bytes(us));
            (record[40], record[41]) = (kind, u8::from(gone));
            w.trace.update(&record);
            *w.counts.entry("messages").or_default() += 1;
            if gone { None } else { Some(Duration::from_micros(us)) }
        })
    }
    /// True for the few requests that arrive twice.
    pub fn is_doubled(&self) -> bool {
        self.roll(200) == 0
    }
    /// Counts bytes of consensus.
    pub fn count_bytes(&self, bytes: usize) {
        self.with(|w| *w.counts.entry("raft_bytes").or_default() += bytes as u64);
    }
    /// Counts bytes of gossip.
    pub fn count_gossip(&self, bytes: usize) {
        self.with(|w| *w.counts.entry("gossip_bytes").or_default() += bytes as u64);
    }

    /// Waits while the node's daemon stands still.
    pub async fn thaw(&self, node: u64) {
        while let Some(until) = self.with(|w| w.nodes.get(&node).map(|n| n.frozen_until)).filter(|t| *t > Instant::now()) {
            sleep_until(until).await;
        }
    }
    /// Waits while the node's VMs stand still.
    pub async fn thaw_vm(&self, node: u64) {
        while let Some(until) = self.with(|w| w.nodes.get(&node).map(|n| n.vm_frozen_until)).filter(|t| *t > Instant::now()) {
            sleep_until(until).await;
        }
    }
    /// How long a sync takes on that node now.
    pub fn sync_us(&self, node: u64) -> u64 {
        let slow = self.with(|w| w.nodes.get(&node).is_some_and(|n| n.slow_until > Instant::now()));
        if slow { 50_000 + self.roll(450_000) } else { 200 + self.roll(8_000) }
    }
    /// True while its disk has no space.
    pub fn disk_full(&self, node: u64) -> bool {
        self.with(|w| w.nodes.get(&node).is_some_and(|n| n.full_until > Instant::now()))
    }
    /// True while this is the running life of the node.
    pub fn is_life(&self, node: u64, life: u64) -> bool {
        self.with(|w| w.nodes.get(&node).is_some_and(|n| n.up && n.life == life))
    }
    /// Consensus and mailbox of a node that is up.
    pub fn peer(&self, node: u64) -> Option<(Peer, mpsc::Sender<Mail>)> {
        self.with(|w| {
            let n = w.nodes.get(&node).filter(|n| n.up)?;
            Some((n.peer.clone()?, n.mailbox.clone()?))
        })
    }

    /// A VM writes to the outside: it leaves now, and arrives later.
    pub fn effect(self: &Arc<Self>, session: SessionId, token: RunToken, node: u64, value: u64) {
        let at = self.now_ms();
        self.trace(&format!("effect {session} {token} {node} {value}"));
        let delay = self.with(|w| {
            w.invariants.one_owner.emitted(at, session, token, node);
            *w.counts.entry("effects").or_default() += 1;
            let slow = !w.calm && w.rng.random_range(0..50) == 0;
            w.rng.random_range(if slow { 1_000..8_000 } else { 1..30 })
        });
        let world = self.clone();
        self.spawn(async move {
            tokio::time::sleep(Duration::from_millis(delay)).await;
            let accepts_all = world.is(Mutant::StaleTokenAccepted);
            let at = world.now_ms();
            world.with(|w| w.invariants.fenced.arrived(at, session, token, value, accepts_all));
        });
    }
}
