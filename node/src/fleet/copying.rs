//! The task that carries out `ks_fleet::replication` for this node's sessions, and the fetching that it orders of peers.

use super::fetch::{FetchDone, FetchOrder};
use super::{call, view};
use crate::host::clock::boottime_ms;
use crate::node::Node;
use crate::progress::Steps;
use ks_blobs::PinKey;
use ks_bulk::{Fetcher, Holder};
use ks_fleet::replication::{Effect, Input, Replicator, TICK_MS};
use ks_net::PeerId;
use ks_proto::api::ApiError;
use ks_proto::{CheckpointId, RunToken, SessionId};
use ks_raft::{Command, FleetState};
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::mpsc;

/// Outcomes that may wait for the task.
const MAILBOX_MAX: usize = 1024;
/// Changes of the state that come closer than this are taken together.
const GATHER: Duration = Duration::from_millis(20);

/// Runs for as long as the node lives.
pub async fn run(node: Weak<Node>) {
    let (tx, mut rx) = mpsc::channel(MAILBOX_MAX);
    let Some((me, mut changes)) = node.upgrade().map(|n| (n.fleet.number(), n.fleet.changes())) else { return };
    let mut machine = Replicator::new(me);
    let mut tick = tokio::time::interval(Duration::from_millis(TICK_MS));
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let input = tokio::select! {
            _ = tick.tick() => None,
            changed = changes.changed() => {
                if changed.is_err() { return }
                tokio::time::sleep(GATHER).await;
                changes.mark_unchanged();
                Some(Input::Tick)
            }
            input = rx.recv() => input,
        };
        let Some(node) = node.upgrade() else { return };
        if node.fleet.alone() {
            continue;
        }
        let now = boottime_ms();
        let view = view::of(&node.state.read(), |s| s.owner == me);
        let mut effects = Vec::new();
        match input {
            // Time: what gossip says is taken along.
            None => effects.extend(machine.step(now, &view, Input::Nodes(view::facts(&node)))),
            Some(i) => effects.extend(machine.step(now, &view, i)),
        }
        for e in effects {
            perform(&node, &tx, e);
        }
    }
}

fn perform(node: &Arc<Node>, tx: &mpsc::Sender<Input>, effect: Effect) {
    match effect {
        Effect::Fetch { peer, session, checkpoint, token, from } => {
            let (node, tx) = (node.clone(), tx.clone());
            tokio::spawn(async move {
                let order = FetchOrder { session, checkpoint, token, from };
                let input = match ask(&node, &tx, peer, order).await {
                    Ok(_) => Input::FetchDone { peer, checkpoint },
                    Err(e) => {
                        tracing::info!("node {peer} has no copy of {} yet: {e}", checkpoint.short());
                        Input::FetchFailed { peer, checkpoint }
                    }
                };
                let _ = tx.send(input).await;
            });
        }
        Effect::AddHolder { session, checkpoint, token, node: holder } => {
            propose(node, Command::AddHolder { session, checkpoint, token, node: holder });
        }
        Effect::DropHolder { session, checkpoint, node: holder } => {
            propose(node, Command::DropHolder { session, checkpoint, node: holder });
        }
        Effect::SetReplicas { session, expected_epoch, replicas } => {
            propose(node, Command::SetReplicas { session, expected_epoch, replicas });
        }
    }
}

fn propose(node: &Arc<Node>, command: Command) {
    let node = node.clone();
    tokio::spawn(async move {
        // The machine sees in the state whether it worked, and proposes again.
        if let Err(e) = node.state.propose(command).await {
            tracing::debug!("a change of copies is not recorded: {e}");
        }
    });
}

/// Has `peer`, or this node, fetch; progress is told to the machine.
async fn ask(node: &Arc<Node>, tx: &mpsc::Sender<Input>, peer: u64, order: FetchOrder) -> Result<FetchDone, ApiError> {
    let checkpoint = order.checkpoint;
    let (steps, mut told) = Steps::channel();
    let progress = async {
        while told.recv().await.is_some() {
            let _ = tx.try_send(Input::FetchProgress { peer, checkpoint });
        }
        std::future::pending::<()>().await;
    };
    let work = async {
        if peer == node.fleet.number() {
            super::fetch::run(node, order, &steps).await
        } else {
            call::post_long(&node.fleet, peer, "/v1/internal/fetch", &order, &steps).await
        }
    };
    tokio::select! {
        done = work => done,
        () = progress => unreachable!("progress never ends"),
    }
}

/// Members as places to fetch from, best first.
fn places(state: &FleetState, me: u64, numbers: &[u64]) -> Vec<Holder> {
    let place = |n: &u64| {
        let m = state.members.get(n).filter(|m| m.is_member() && m.number != me)?;
        let peer: PeerId = m.peer_id.parse().ok()?;
        Some(Holder { peer, addrs: m.bulk.clone() })
    };
    numbers.iter().filter_map(place).collect()
}

/// Every other member as a place to fetch from.
pub fn all_places(state: &FleetState, me: u64) -> Vec<Holder> {
    let numbers: Vec<u64> = state.members.keys().copied().collect();
    places(state, me, &numbers)
}

/// Fetches what is missing of a checkpoint from `holders`, and pins it for (session, run) until the fleet has decided.
///
/// # Errors
/// Who could not give what, or what this disk refused.
pub async fn fetch_closure(
    node: &Arc<Node>,
    id: CheckpointId,
    holders: &[u64],
    (session, token): (SessionId, RunToken),
    steps: &Steps,
) -> Result<u64, ApiError> {
    let from = places(&node.state.read(), node.fleet.number(), holders);
    let pin = PinKey { session, token, upload: 0 };
    let told = steps.clone();
    let progress = Arc::new(move |p: ks_bulk::Progress| told.step("fetching from peers", p.received, p.wanted));
    let fetcher: &Fetcher = node.fleet.fetcher();
    let got = fetcher.fetch_checkpoint(&id, &from, &node.supply.keys, &pin, progress).await.map_err(|e| refused(&e))?;
    let (node, me) = (node.clone(), node.fleet.number());
    tokio::spawn(async move { until_decided(&node, me, id, pin).await });
    Ok(got.bytes)
}

/// The pin goes when the state names this node as a holder, or nobody came back to it for a long time.
async fn until_decided(node: &Arc<Node>, me: u64, id: CheckpointId, pin: PinKey) {
    /// How long a fetched checkpoint waits for its record.
    const PATIENCE: Duration = Duration::from_secs(900);
    /// Between two tries to have the newest state.
    const AGAIN: Duration = Duration::from_secs(1);
    let named = async {
        // A state that is behind may name this node as the holder that it was before it was dropped as one.
        while node.fleet.consensus().catch_up().await.is_err() {
            tokio::time::sleep(AGAIN).await;
        }
        let decided = |s: &Arc<ks_raft::FleetState>| {
            let holds = |c: &ks_raft::CheckpointRecord| c.holders.contains(&me);
            s.sessions.get(&pin.session).is_none_or(|r| r.by_id(&id).is_some_and(holds))
        };
        drop(node.fleet.changes().wait_for(decided).await);
    };
    let _ = tokio::time::timeout(PATIENCE, named).await;
    let store = node.supply.store.clone();
    let _ = tokio::task::spawn_blocking(move || store.decided(&id, &pin)).await;
}

fn refused(e: &ks_bulk::FetchError) -> ApiError {
    let (code, next) = match e {
        ks_bulk::FetchError::NoHolders { .. } | ks_bulk::FetchError::Incomplete { .. } => {
            ("unreachable", "ks node ls; wait until a node that has it is back")
        }
        ks_bulk::FetchError::DiskFull { .. } => ("disk-full", "free space in the data folder"),
        _ => ("internal", "see ksd's log"),
    };
    ApiError::new(code, "the checkpoint is not whole on this node", e.to_string(), next)
}
