//! Measures a fleet's log in one process: real redb files, an in-memory wire, 10,000 sessions in the state.
//!
//! `cargo run --release -p ks-raft --example commit_rate -- [voters] [sessions]`; prints one JSON object.

use futures::FutureExt;
use futures::future::BoxFuture;
use ks_raft::host::{Consensus, ConsensusConfig, Timing, Wire, WireError};
use ks_raft::{Command, FleetState, ImageRecord, SessionParams};
use std::collections::BTreeMap;
use std::error::Error;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

type Nodes = Arc<Mutex<BTreeMap<u64, Consensus>>>;

struct Plug(u64, Nodes);

impl Wire for Plug {
    fn call(&self, to: u64, request: Vec<u8>, deadline: Duration) -> BoxFuture<'static, Result<Vec<u8>, WireError>> {
        let (from, peer) = (self.0, self.1.lock().unwrap_or_else(PoisonError::into_inner).get(&to).cloned());
        async move {
            let peer = peer.ok_or_else(|| WireError::Unreachable { to, why: "it is not started".into() })?;
            let served = tokio::time::timeout(deadline, peer.serve(from, &request)).await;
            served.map_err(|_| WireError::Timeout { to, ms: deadline.as_millis() as u64 })
        }
        .boxed()
    }
}

fn id(n: u64) -> ks_proto::SessionId {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes());
    bytes[8..].copy_from_slice(&n.to_be_bytes());
    ks_proto::SessionId(bytes)
}

fn begin(n: u64) -> Command {
    Command::BeginRun { id: id(n), from: ks_proto::CheckpointId([1; 32]), expected_epoch: None, node: None }
}

fn populated(sessions: u64) -> Result<FleetState, Box<dyn Error>> {
    let mut state = FleetState::default();
    let (name, kernel, cmdline, profile) = ("default".to_owned(), String::new(), String::new(), String::new());
    let (image_id, disk) = (ks_proto::ImageId([9; 32]), ks_proto::CheckpointId([9; 32]));
    let (disk_bytes, disk_used_bytes, created_unix_ms, holders) = (1, 1, 1, vec![]);
    let image =
        ImageRecord { name, id: image_id, kernel, cmdline, profile, disk_bytes, disk_used_bytes, disk, created_unix_ms, holders };
    state.apply(Command::PutImage { image });
    for n in 0..sessions {
        let params = SessionParams {
            image: "default".into(),
            image_id,
            memory_mib: 2048,
            vcpus: 1,
            engine: ks_proto::manifest::EngineKind::Qemu,
            profile: "tcg".into(),
            engine_why: "there is no other".into(),
        };
        let create = Command::CreateSession {
            id: id(n),
            name: format!("session-{n}").parse()?,
            owner: 1,
            params,
            cadence_s: 60,
            idle_park_s: 0,
            command: Some(vec!["agent".into()]),
            forked_from: None,
            head: ks_proto::CheckpointId([1; 32]),
            now_unix_ms: 1,
        };
        state.apply(create).ok()?;
    }
    Ok(state)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let voters: u64 = args.next().map_or(Ok(3), |a| a.parse())?;
    let sessions: u64 = args.next().map_or(Ok(10_000), |a| a.parse())?;
    let dir = tempfile::tempdir()?;
    let nodes: Nodes = Arc::default();
    ks_raft::host::import_alone(&dir.path().join("1"), &populated(sessions)?).await?;
    let mut all = Vec::new();
    let started = Instant::now();
    for number in 1..=voters {
        let config =
            ConsensusConfig { number, incarnation: number, dir: dir.path().join(number.to_string()), timing: Timing::default() };
        let node = Consensus::open(config, Arc::new(Plug(number, nodes.clone()))).await?;
        nodes.lock().unwrap_or_else(PoisonError::into_inner).insert(number, node.clone());
        all.push(node);
        if number == 1 {
            all[0].found().await?;
        } else {
            all[0].ensure_learner(number).await?;
        }
    }
    all[0].set_voters(&(1..=voters).collect(), all[0].membership().guard).await?;
    for node in &all {
        node.catch_up().await?;
    }
    let open_ms = started.elapsed().as_millis() as u64;

    let mut one_by_one: Vec<u64> = Vec::new();
    for n in 0..200 {
        let start = Instant::now();
        all[0].propose(begin(n % sessions)).await?.ok()?;
        one_by_one.push(start.elapsed().as_micros() as u64);
    }
    one_by_one.sort_unstable();
    let start = Instant::now();
    let mut work = JoinSet::new();
    let (tasks, each) = (100, 50);
    for t in 0..tasks {
        let node = all[(t % all.len() as u64) as usize].clone();
        work.spawn(async move {
            for n in 0..each {
                node.propose(begin((t * each + n) % sessions)).await.map_err(|e| e.to_string())?;
            }
            Ok::<_, String>(())
        });
    }
    while let Some(done) = work.join_next().await {
        done??;
    }
    let together_s = start.elapsed().as_secs_f64();

    let mut state = (*all[0].state()).clone();
    let start = Instant::now();
    let applies = 20_000;
    for n in 0..applies {
        let published = Arc::new(state.clone());
        state.apply(begin(n % sessions));
        drop(published);
    }
    let apply_us = start.elapsed().as_secs_f64() * 1e6 / applies as f64;
    let start = Instant::now();
    let snapshot_bytes = serde_json::to_vec(&state)?.len();
    let out = serde_json::json!({
        "voters": voters,
        "sessions": sessions,
        "open_and_join_ms": open_ms,
        "one_by_one_p50_us": one_by_one[100],
        "one_by_one_p99_us": one_by_one[197],
        "together_per_s": (tasks * each) as f64 / together_s,
        "apply_and_publish_us": apply_us,
        "snapshot_bytes": snapshot_bytes,
        "snapshot_encode_ms": start.elapsed().as_millis() as u64,
    });
    println!("{out}");
    for node in all {
        node.shutdown().await;
    }
    Ok(())
}
