//! One run: a fleet of five grows from one, faults come, faults stop, everything is well again.

use crate::client;
use crate::disk::SimDisk;
use crate::entropy;
use crate::host::{Host, MAILBOX_MAX};
use crate::invariants::{durable_means_peers, recovers};
use crate::mutants::Mutant;
use crate::net::Plug;
use crate::plan::Plan;
use crate::store::Store;
use crate::world::{Node, Sim, World};
use ks_fleet::lease::CLOCK_DRIFT_MAX_PERMILLE;
use ks_proto::FleetId;
use ks_raft::host::{Consensus, ConsensusConfig, Timing};
use ks_raft::{Command, Member, Response};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};

/// Nodes of the fleet.
const NODES: u64 = 5;
/// Sessions of the fleet.
const SESSIONS: u8 = 8;
/// Time without faults at the end, in which everything must become well.
const CALM_MS: u64 = 90_000;
/// Longest wait for the fleet to form.
const FORM_MS: u64 = 30_000;

/// What came of one run.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Outcome {
    /// Its seed.
    pub seed: u64,
    /// Hash over everything that happened.
    pub trace: String,
    /// Broken promises.
    pub violations: Vec<String>,
    /// Faults by kind.
    pub faults: BTreeMap<String, u64>,
    /// Other counts.
    pub counts: BTreeMap<String, u64>,
    /// Simulated time.
    pub simulated_ms: u64,
    /// Real time.
    pub wall_ms: u64,
}

/// Runs a seed for so many simulated milliseconds; with a planted bug, until the promise that it breaks is seen to be broken.
///
/// Only the first run of a process is the same every time (see [`crate::child`]), and there is no second one.
///
/// # Panics
/// On a second call, and where the simulation itself is wrong.
pub fn run(seed: u64, simulated_ms: u64, mutant: Option<Mutant>) -> Outcome {
    static USED: AtomicBool = AtomicBool::new(false);
    assert!(!USED.swap(true, Ordering::SeqCst), "a process runs one seed");
    let wall = std::time::Instant::now();
    entropy::seed_this_thread(seed ^ 0x6b73_0001);
    let mut b = tokio::runtime::Builder::new_current_thread();
    let runtime = b.enable_time().start_paused(true).build().expect("a runtime without I/O needs nothing from the system");
    let story = Sim::scope(seed, async move { story(seed, simulated_ms, mutant).await });
    let outcome = runtime.block_on(story);
    Outcome { wall_ms: u64::try_from(wall.elapsed().as_millis()).unwrap_or(u64::MAX), ..outcome }
}

async fn story(seed: u64, simulated_ms: u64, mutant: Option<Mutant>) -> Outcome {
    let world = World::new(seed, mutant);
    form(&world).await;
    let (mut plan, mut next_check, mut calm_since) = (Plan::new(world.now_ms()), 0, None);
    world.with(|w| w.calm = false);
    loop {
        sleep(Duration::from_millis(100)).await;
        let now = world.now_ms();
        if now >= next_check {
            next_check = now + 500;
            client::read(&world);
            check(&world, now);
        }
        let caught = mutant.is_some_and(|m| world.with(|w| w.invariants.violations().iter().any(|v| v.starts_with(m.breaks()))));
        if now >= simulated_ms || caught {
            break;
        }
        match calm_since {
            None if now + CALM_MS >= simulated_ms && simulated_ms > CALM_MS => {
                plan.stop(&world);
                calm_since = Some(now);
            }
            None => plan.step(&world),
            Some(since) => {
                if now > since + 20_000 && now % 1000 < 100 && ills(&world, now).is_empty() {
                    break;
                }
            }
        }
    }
    let now = world.now_ms();
    if calm_since.is_some() {
        let ills = ills(&world, now);
        world.with(|w| w.invariants.recovers.violations.extend(ills));
    }
    let trace = world.trace_hash();
    // The world and its nodes hold each other.
    drop(world.with(|w| std::mem::take(&mut w.nodes)));
    world.with(|w| {
        w.counts.insert("effects refused as stale", w.invariants.fenced.refused);
        w.counts.insert("durable checkpoints read by the client", w.invariants.durable.durable_seen);
        w.counts.insert("checkpoints restored", w.invariants.no_torn.restored);
        Outcome {
            seed,
            trace,
            violations: w.invariants.violations(),
            faults: owned(&w.faults),
            counts: owned(&w.counts),
            simulated_ms: now,
            wall_ms: 0,
        }
    })
}

fn owned(counts: &BTreeMap<&'static str, u64>) -> BTreeMap<String, u64> {
    counts.iter().map(|(k, v)| ((*k).to_owned(), *v)).collect()
}

fn ills(world: &World, now: u64) -> Vec<String> {
    world.with(|w| recovers::ills(w, &w.newest.1.clone(), now))
}

fn check(world: &World, now: u64) {
    world.with(|w| {
        let state = w.newest.1.clone();
        let missing = durable_means_peers::missing(w, &state);
        w.invariants.durable.check(now, &missing);
        w.invariants.fenced.check(now, &state);
    });
}

/// The founder, alone, runs a session; then the others join, and the fleet gets its voters and its other sessions.
async fn form(world: &Arc<World>) {
    let deadline = world.now_ms() + FORM_MS;
    add(world, 1, incarnation(1));
    while world.peer(1).is_none() {
        sleep(Duration::from_millis(10)).await;
    }
    let member = |n: u64| Member {
        number: 0,
        peer_id: format!("peer-{n}"),
        name: format!("n{n}"),
        control: Vec::new(),
        bulk: Vec::new(),
        api: Vec::new(),
        profiles: vec!["v2".into()],
        domain: String::new(),
        joined_unix_ms: 0,
        state: ks_raft::MemberState::Active,
        incarnation: incarnation(n),
    };
    let now_unix_ms = world.unix_ms();
    let found = Command::Found { fleet_id: FleetId([3; 16]), member: member(1), ca_cert_hex: "ca".into(), now_unix_ms };
    expect(world, found).await;
    expect(world, client::image()).await;
    if let Some(first) = client::session(1, 1, now_unix_ms) {
        expect(world, first).await;
    }
    sleep(Duration::from_secs(2)).await;
    for n in 2..=NODES {
        let (token_hash, expires_unix_ms) = (format!("{n:064x}"), world.unix_ms() + 60_000);
        let now_unix_ms = world.unix_ms();
        let made_by = "root".to_owned();
        expect(world, Command::AddToken { token_hash: token_hash.clone(), made_by, expires_unix_ms, now_unix_ms }).await;
        let joined = client::propose(world, Command::AddMember { token_hash, member: member(n), now_unix_ms }).await;
        match joined {
            Response::Member { number } => add(world, number, incarnation(n)),
            other => panic!("node {n} could not join: {other:?}"),
        }
    }
    let formed = |w: &mut crate::world::Inner| {
        let voters = w.nodes.get(&1).and_then(|n| n.peer.as_ref()).map(|p| p.membership());
        voters.is_some_and(|m| m.voters.len() == 3 && !m.joint && m.voters.len() + m.learners.len() == NODES as usize)
    };
    while !world.with(formed) {
        assert!(world.now_ms() < deadline, "the fleet did not form");
        sleep(Duration::from_millis(100)).await;
    }
    let numbers: Vec<u64> = world.with(|w| w.nodes.keys().copied().collect());
    for n in 2..=SESSIONS {
        let owner = numbers[usize::from(n) % numbers.len()];
        if let Some(session) = client::session(n, owner, world.unix_ms()) {
            expect(world, session).await;
        }
    }
}

async fn expect(world: &Arc<World>, command: Command) {
    let what = format!("{command:?}");
    let answer = client::propose(world, command).await;
    assert!(!matches!(answer, Response::Refused { .. }), "{what}: {answer:?}");
}

/// Of the first daemon of the `n`th node.
fn incarnation(n: u64) -> u64 {
    n << 32
}

/// A node with empty disks, started.
fn add(world: &Arc<World>, number: u64, first_incarnation: u64) {
    let now = Instant::now();
    let drift = CLOCK_DRIFT_MAX_PERMILLE.cast_signed();
    let drift_permille = world.roll(2 * CLOCK_DRIFT_MAX_PERMILLE + 1).cast_signed() - drift;
    let node = Node {
        life: 0,
        first_incarnation,
        up: false,
        drift_permille,
        frozen_until: now,
        vm_frozen_until: now,
        full_until: now,
        starts_fail_until: now,
        slow_until: now,
        peer: None,
        mailbox: None,
        gossip: None,
        disk: SimDisk::new(number, world),
        store: Store::default(),
        vms: BTreeMap::new(),
        abort: None,
    };
    world.with(|w| {
        w.nodes.insert(number, node);
        w.fault("clock drift");
    });
    launch(world, number);
}

/// Starts the node's daemon on what its disks hold.
pub fn launch(world: &Arc<World>, number: u64) {
    world.say(|| format!("node {number} starts"));
    let Some((life, incarnation, disk)) = world.with(|w| {
        let n = w.node_mut(number);
        if n.up {
            return None;
        }
        (n.life, n.up) = (n.life + 1, true);
        Some((n.life, n.first_incarnation + n.life - 1, n.disk.clone()))
    }) else {
        return;
    };
    let w = world.clone();
    let task = async move {
        let timing = Timing { snapshot_entries: 500, kept_entries: 200, ..Timing::default() };
        let config = ConsensusConfig { number, incarnation, dir: PathBuf::new(), timing };
        let wire = Arc::new(Plug { from: number, life, world: w.clone() });
        let peer = match Consensus::<Sim>::open_on(config, Arc::new(disk), wire).await {
            Ok(peer) => peer,
            Err(_) if w.disk_full(number) => return restart_later(&w, number, life),
            Err(e) => {
                w.with(|w| w.invariants.recovers.violations.push(format!("node {number} cannot open its log: {e}")));
                return;
            }
        };
        if number == 1 && life == 1 {
            peer.found().await.expect("a new log can be founded");
        }
        let (tell, mail) = mpsc::channel(MAILBOX_MAX);
        w.with(|w| {
            let n = w.node_mut(number);
            (n.peer, n.mailbox) = (Some(peer.clone()), Some(tell));
        });
        Host::run(w, number, life, peer, incarnation, mail).await;
    };
    let abort = world.spawn(task);
    world.with(|w| w.node_mut(number).abort = Some(abort));
}

/// A daemon that could not start is started again, as a supervisor does.
fn restart_later(world: &Arc<World>, number: u64, life: u64) {
    world.with(|w| w.count("daemons that did not start on a full disk"));
    let again = world.clone();
    world.spawn(async move {
        sleep(Duration::from_secs(1)).await;
        if again.is_life(number, life) {
            kill(&again, number, Kill::Daemon);
            launch(&again, number);
        }
    });
}

/// How a node goes down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kill {
    /// SIGKILL of the daemon alone: its VMs go on until their lease ends.
    Daemon,
    /// SIGKILL of everything on the host: what the kernel holds is written later.
    Host,
    /// The power fails: what was not synced is lost.
    Power,
}

impl Kill {
    /// For counting.
    pub fn name(self) -> &'static str {
        match self {
            Self::Daemon => "daemon killed",
            Self::Host => "host killed",
            Self::Power => "power cut",
        }
    }
}

/// Takes a node down; false if it was down already.
pub fn kill(world: &Arc<World>, number: u64, how: Kill) -> bool {
    let was = world.with(|w| {
        let n = w.node_mut(number);
        let was = std::mem::replace(&mut n.up, false);
        let now = Instant::now();
        (n.frozen_until, n.vm_frozen_until) = (now, now);
        (n.mailbox, n.gossip) = (None, None);
        if how != Kill::Daemon {
            std::mem::take(&mut n.vms).into_values().for_each(|vm| vm.end());
        }
        n.store.unsettle();
        if how == Kill::Power {
            n.store.lose_unsynced();
        }
        was.then(|| (n.abort.take(), n.peer.take(), n.disk.clone()))
    });
    let Some((abort, peer, disk)) = was else { return false };
    world.say(|| format!("node {number}: {}", how.name()));
    let disk = disk.crash();
    world.with(|w| w.node_mut(number).disk = disk);
    if let Some(abort) = abort {
        abort.abort();
    }
    if let Some(peer) = peer {
        world.spawn(async move { peer.shutdown().await });
    }
    true
}
