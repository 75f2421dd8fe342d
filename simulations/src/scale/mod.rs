//! How the control plane grows: many nodes in one process, real openraft, chitchat, redb (under the voters) and machines,
//! an in-memory wire, real time.
//!
//! One process has one memory bandwidth and few cores for all nodes, so what it shows is an upper bound of the work, not a
//! network's latency.

mod hub;
mod node;
mod plot;

pub use plot::svg;

use crate::client;
use hub::{Hub, MemDisk, Plug};
use ks_proto::{CheckpointId, FleetId, RunToken, SessionId};
use ks_raft::host::{Consensus, ConsensusConfig, RedbDisk, Timing};
use ks_raft::{Command, Member, MemberState, Response};
use node::{Lead, Placed, Runner};
use serde::Serialize;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;
use tokio::time::sleep;

/// Voters of every size.
const VOTERS: u64 = 3;
/// Sessions of a node that dies.
const VICTIM_SESSIONS: u64 = 500;
/// Nodes that die, one after another.
const VICTIMS: u64 = 3;
/// Proposals under way while the fleet is filled.
const FILLERS: usize = 200;
/// Longest wait for anything.
const PATIENCE: Duration = Duration::from_secs(120);

/// What is measured.
#[derive(Debug, Clone, Copy)]
pub struct Size {
    /// Nodes.
    pub nodes: u64,
    /// Sessions.
    pub sessions: u64,
    /// How long the quiet fleet is watched.
    pub watch: Duration,
}

/// What came out.
#[derive(Debug, Clone, Serialize)]
pub struct Figures {
    /// Nodes.
    pub nodes: u64,
    /// Sessions.
    pub sessions: u64,
    /// Renewals granted in a second.
    pub renewals_s: f64,
    /// From a renewal's sending to its grant, milliseconds.
    pub renewal_p50_ms: f64,
    /// The same, 99th percentile.
    pub renewal_p99_ms: f64,
    /// Quorum rounds in a second: renewals share them.
    pub rounds_s: f64,
    /// Bytes of consensus on the wire in a second, all nodes together.
    pub raft_bytes_s: f64,
    /// Bytes of gossip that one node sends in a second.
    pub gossip_bytes_node_s: f64,
    /// Leases that lapsed while nothing was wrong.
    pub false_lapses: u64,
    /// From the declared lapse until the last of 500 sessions' new owners knew of it, seconds; the worst of three.
    pub place_500_s: f64,
    /// The same, each.
    pub place_s: Vec<f64>,
    /// Until the leader had decided all 500, seconds; the worst.
    pub place_decided_s: f64,
    /// Until every node knew, whether concerned or not, seconds; the worst.
    pub place_everywhere_s: f64,
    /// Processor time of all nodes together meanwhile, seconds; the worst. All of them share the processors of one machine here.
    pub place_cpu_s: f64,
    /// Processors of this machine.
    pub cpus: usize,
    /// Mean number of runnable tasks in the last minute, of the whole machine, when the first node died.
    pub load_1m: f64,
    /// What of it the placer itself took, milliseconds; the worst.
    pub decide_ms: f64,
    /// Filling the fleet with sessions and checkpoints while only its three voters run, entries in a second.
    pub entries_s: f64,
}

/// As the product's: drawn, so that all buckets of the state's map have some.
fn session_id(n: u64) -> SessionId {
    let mut id = [0; 16];
    id.copy_from_slice(&blake3::hash(&n.to_le_bytes()).as_bytes()[..16]);
    SessionId(id)
}

fn member(n: u64) -> Member {
    Member {
        number: 0,
        peer_id: format!("peer-{n}"),
        name: format!("n{n}"),
        control: vec![format!("/ip4/10.0.0.{n}/udp/4601/quic-v1")],
        bulk: Vec::new(),
        api: vec![format!("https://10.0.0.{n}:4601")],
        profiles: vec!["v2".into()],
        domain: String::new(),
        joined_unix_ms: 0,
        state: MemberState::Active,
        incarnation: n << 32,
    }
}

async fn open(hub: &Arc<Hub>, dir: &Path, number: u64, durable: bool) -> anyhow::Result<Consensus> {
    let config = ConsensusConfig { number, incarnation: number << 32, dir: PathBuf::new(), timing: Timing::default() };
    let wire = Arc::new(Plug { from: number, hub: hub.clone() });
    let node = if durable {
        let dir = dir.join(number.to_string());
        std::fs::create_dir_all(&dir)?;
        Consensus::open_on(config, Arc::new(RedbDisk::open(&dir)?), wire).await?
    } else {
        Consensus::open_on(config, Arc::new(MemDisk::default()), wire).await?
    };
    hub.plug(number, node.clone());
    Ok(node)
}

async fn done(node: &Consensus, command: Command) -> anyhow::Result<Response> {
    Ok(node.propose(command).await?.ok()?)
}

/// A fleet of that many members; the first three run and vote. Gives back all numbers.
async fn form(hub: &Arc<Hub>, dir: &Path, nodes: u64) -> anyhow::Result<(Vec<Consensus>, Vec<u64>)> {
    let first = open(hub, dir, 1, true).await?;
    first.found().await?;
    let found = Command::Found { fleet_id: FleetId([3; 16]), member: member(1), ca_cert_hex: "ca".into(), now_unix_ms: 1 };
    done(&first, found).await?;
    done(&first, client::image()).await?;
    let (mut voters, mut numbers) = (vec![first.clone()], vec![first.number()]);
    for n in 2..=nodes {
        let token_hash = format!("{n:064x}");
        let made_by = "root".to_owned();
        let token = Command::AddToken { token_hash: token_hash.clone(), made_by, expires_unix_ms: u64::MAX, now_unix_ms: 1 };
        done(&first, token).await?;
        let joined = done(&first, Command::AddMember { token_hash, member: member(n), now_unix_ms: 1 }).await?;
        let Response::Member { number } = joined else { anyhow::bail!("node {n} was not let in: {joined:?}") };
        numbers.push(number);
        if n <= VOTERS {
            voters.push(open(hub, dir, number, true).await?);
            first.ensure_learner(number).await?;
        }
    }
    let set: BTreeSet<u64> = voters.iter().map(Consensus::number).collect();
    first.set_voters(&set, first.membership().guard).await?;
    Ok((voters, numbers))
}

/// Starts the members that do not vote, one after another: each takes a snapshot of the filled state.
async fn grow(hub: &Arc<Hub>, dir: &Path, all: &mut Vec<Consensus>, numbers: &[u64]) -> anyhow::Result<()> {
    for number in &numbers[all.len()..] {
        let node = open(hub, dir, *number, false).await?;
        all[0].ensure_learner(*number).await?;
        let mut changes = node.changes();
        let sessions = all[0].state().sessions.len();
        tokio::time::timeout(PATIENCE, changes.wait_for(|s| s.sessions.len() == sessions)).await??;
        all.push(node);
    }
    Ok(())
}

/// Gives the fleet its sessions, each with a checkpoint at two holders: 500 for each node that will die, the others spread.
async fn fill(first: &Consensus, numbers: &[u64], sessions: u64) -> anyhow::Result<f64> {
    let begun = Instant::now();
    let mut work = JoinSet::new();
    for n in 0..sessions {
        let victims = VICTIMS * VICTIM_SESSIONS;
        let count = numbers.len();
        let owner =
            if n < victims { count - 1 - (n / VICTIM_SESSIONS) as usize } else { n as usize % (count - VICTIMS as usize) };
        let (owner, other) =
            (numbers[owner], numbers[(owner + 1 + n as usize % (count - VICTIMS as usize - 1)) % (count - VICTIMS as usize)]);
        while work.len() >= FILLERS {
            work.join_next().await.transpose()?.transpose()?;
        }
        let node = first.clone();
        work.spawn(async move {
            let Some(mut session) = client::session(0, owner, 1) else { anyhow::bail!("a name that is none") };
            let id = session_id(n);
            if let Command::CreateSession { id: i, name, .. } = &mut session {
                (*i, *name) = (id, format!("s{n}").parse()?);
            }
            done(&node, session).await?;
            let mut c = [1; 32];
            c[..8].copy_from_slice(&n.to_be_bytes());
            let info = client::checkpoint(CheckpointId(c), 1);
            let token = RunToken { generation: 0, epoch: 1, run: 0 };
            let holders = if owner == other { vec![owner] } else { vec![owner, other] };
            done(&node, Command::CommitCheckpoint { id, token, info, holders: holders.clone() }).await?;
            done(&node, Command::SetReplicas { session: id, expected_epoch: 1, replicas: holders }).await?;
            Ok(())
        });
    }
    while let Some(one) = work.join_next().await {
        one??;
    }
    Ok(3.0 * sessions as f64 / begun.elapsed().as_secs_f64())
}

fn load_1m() -> f64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().and_then(|t| t.parse().ok()).unwrap_or(f64::NAN)
}

fn percentile(sorted: &[f64], p: f64) -> f64 {
    let at = ((sorted.len() as f64 - 1.0) * p).round() as usize;
    sorted.get(at).copied().unwrap_or(0.0)
}

/// Forms, fills, watches, and kills three nodes.
///
/// # Errors
/// If a part of it fails or takes too long.
pub async fn measure(size: Size, dir: &Path) -> anyhow::Result<Figures> {
    anyhow::ensure!(size.nodes >= 2 * VICTIMS + 2 && size.sessions >= VICTIMS * VICTIM_SESSIONS, "too small: {size:?}");
    let hub = Arc::new(Hub::default());
    let (mut all, numbers) = form(&hub, dir, size.nodes).await?;
    let entries_s = fill(&all[0], &numbers, size.sessions).await?;
    eprintln!("{} sessions are there, {entries_s:.0} entries/s", size.sessions);
    grow(&hub, dir, &mut all, &numbers).await?;
    eprintln!("{} nodes are there", size.nodes);
    let lead = Lead::start(&hub, all[0].clone());
    let mut runners = Vec::new();
    for node in &all {
        runners.push(Runner::start(&hub, node.clone()).await?);
    }
    // Everybody is granted, and gossip has spread.
    let begun = Instant::now();
    while lead.held() < size.nodes {
        anyhow::ensure!(begun.elapsed() < PATIENCE, "only {} of {} leases were granted", lead.held(), size.nodes);
        sleep(Duration::from_millis(100)).await;
    }
    sleep(Duration::from_secs(5)).await;
    hub.reset();
    lead.reset();
    let watched = Instant::now();
    sleep(size.watch).await;
    let s = watched.elapsed().as_secs_f64();
    let mut latencies: Vec<f64> = runners.iter().flat_map(Runner::latencies_ms).collect();
    latencies.sort_by(f64::total_cmp);
    let per_s = |n: u64| n as f64 / s;
    let (granted, rounds, false_lapses) = (lead.granted(), lead.rounds(), lead.lapses());
    let (raft_bytes_s, gossip) = (per_s(hub.raft_bytes.load(Ordering::Relaxed)), per_s(hub.gossip_bytes.load(Ordering::Relaxed)));
    let load_1m = load_1m();
    let mut placed: Vec<Placed> = Vec::new();
    for victim in 0..VICTIMS as usize {
        let at = all.len() - 1 - victim;
        let number = all[at].number();
        hub.unplug(number);
        runners[at].stop();
        all[at].shutdown().await;
        let one = lead.wait_placed(number, &all[..at], PATIENCE).await?;
        anyhow::ensure!(one.sessions as u64 >= VICTIM_SESSIONS, "node {number} had {} sessions", one.sessions);
        eprintln!("node {number} died: {one:?}");
        placed.push(one);
    }
    let worst = |of: fn(&Placed) -> f64| placed.iter().map(of).fold(0.0, f64::max);
    runners.iter_mut().for_each(Runner::stop);
    let decide_ms = lead.decide_ms();
    for node in &all {
        node.shutdown().await;
    }
    Ok(Figures {
        nodes: size.nodes,
        sessions: size.sessions,
        renewals_s: per_s(granted),
        renewal_p50_ms: percentile(&latencies, 0.5),
        renewal_p99_ms: percentile(&latencies, 0.99),
        rounds_s: per_s(rounds),
        raft_bytes_s,
        gossip_bytes_node_s: gossip / size.nodes as f64,
        false_lapses,
        place_500_s: worst(|p| p.told_s),
        place_s: placed.iter().map(|p| p.told_s).collect(),
        place_decided_s: worst(|p| p.decided_s),
        place_everywhere_s: worst(|p| p.everywhere_s),
        place_cpu_s: worst(|p| p.cpu_s),
        cpus: std::thread::available_parallelism().map_or(1, usize::from),
        load_1m,
        decide_ms,
        entries_s,
    })
}
