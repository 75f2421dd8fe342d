//! Streams that a guest opens, carried to the gateway: bounded, stamped, byte for byte.

use crate::host::channel::GuestStream;
use crate::host::clock;
use crate::host::vm::LiveVm;
use crate::node::Node;
use ks_proto::SessionId;
use ks_proto::api::ApiError;
use ks_proto::gateway::{AdminAsk, Stamp};
use ks_proto::relay::{CALLS_MAX, RelayAnswer, encode_message};
use std::sync::{Arc, Weak};
use tokio::io::AsyncWriteExt;
use tokio::sync::{Mutex, Semaphore, mpsc};

/// Streams of one guest at once: its calls, and as many connections to the outside as its relay may have.
const STREAMS_MAX: usize = CALLS_MAX + 256;
/// Streams that wait for a task: a guest may open all of them at once.
const WAITING_MAX: usize = STREAMS_MAX;

/// Carries what the guest of `vm` opens, until the VM ends. To be called before its hook: a guest opens nothing earlier.
pub fn attach(node: &Arc<Node>, vm: &LiveVm, stamp: Stamp) {
    let (tx, mut rx) = mpsc::channel(WAITING_MAX);
    vm.guest.carry_to(tx);
    let (weak, mut ended) = (Arc::downgrade(node), vm.ended.clone());
    let run = Arc::new(Run { stamp, told: Mutex::new(0) });
    tokio::spawn(async move {
        let room = Arc::new(Semaphore::new(STREAMS_MAX));
        let mut leased = false;
        loop {
            let stream: GuestStream = tokio::select! {
                stream = rx.recv() => match stream {
                    Some(stream) => stream,
                    None => return,
                },
                _ = ended.wait_for(Option::is_some) => return,
            };
            let Some(node) = weak.upgrade() else { return };
            // Above the limit a stream is dropped, which resets it: the relay has a lower limit of its own.
            let Ok(permit) = room.clone().try_acquire_owned() else { continue };
            if !leased {
                leased = true;
                tokio::spawn(lend(weak.clone(), run.clone(), ended.clone()));
            }
            let run = run.clone();
            tokio::spawn(async move {
                carry(&node, stream, &run).await;
                drop(permit);
            });
        }
    });
}

/// One run, as its streams know it.
struct Run {
    stamp: Stamp,
    /// The gateway's process that was told this run's lease, by its generation; 0 is none.
    told: Mutex<u64>,
}

async fn carry(node: &Arc<Node>, mut stream: GuestStream, run: &Run) {
    let connected = async {
        // A gateway lets nothing pass for a session of a fleet whose lease it was not told.
        let (mut socket, process) = node.gateway.connect().await?;
        let mut told = run.told.lock().await;
        if *told != process {
            tell_outside(node, run.stamp.session).await?;
            tell_lease(node, &run.stamp).await?;
            *told = process;
        }
        drop(told);
        super::stamp(&mut socket, &run.stamp).await?;
        Ok::<_, ApiError>(socket)
    };
    match connected.await {
        Ok(mut socket) => drop(tokio::io::copy_bidirectional(&mut stream, &mut socket).await),
        Err(e) => {
            tracing::warn!(session = %run.stamp.session, "a call does not reach the gateway: {e}");
            let message = format!("{}: {}; {}", e.what, e.why, e.next);
            let refused = RelayAnswer::Refused { status: 503, code: "no-gateway".into(), message };
            if let Ok(bytes) = encode_message(&refused) {
                let _ = stream.write_all(&bytes).await;
                let _ = stream.shutdown().await;
            }
        }
    }
}

/// Tells the gateway what the replicated state says of a session: what it may reach, and what it may spend.
async fn tell_outside(node: &Node, session: SessionId) -> Result<(), ApiError> {
    let (allow, budget) = match node.state.read().sessions.get(&session) {
        Some(r) => (r.allow.clone(), r.budget.clone()),
        None => return Ok(()),
    };
    if let Some(allow) = allow {
        node.gateway.admin(AdminAsk::EgressSet { session, allow }).await?;
    }
    if let Some(limit) = budget {
        let limit = Some(limit).filter(|l| !l.is_empty());
        node.gateway.admin(AdminAsk::BudgetSet { user: String::new(), session: Some(session), limit }).await?;
    }
    Ok(())
}

/// Tells the gateway the node's present lease, if it is one.
async fn tell_lease(node: &Node, stamp: &Stamp) -> Result<(), ApiError> {
    let deadline = *node.supply.lease.borrow();
    if deadline <= clock::boottime_ms() {
        return Ok(());
    }
    let deadline_boottime_ms = (deadline != u64::MAX).then_some(deadline);
    let lease = AdminAsk::Lease { session: stamp.session, token: stamp.token, deadline_boottime_ms };
    node.gateway.admin(lease).await.map(drop)
}

/// Tells the gateway this run's lease whenever it is renewed.
async fn lend(node: Weak<Node>, run: Arc<Run>, mut ended: tokio::sync::watch::Receiver<Option<String>>) {
    let Some(mut lease) = node.upgrade().map(|n| n.supply.lease.clone()) else { return };
    lease.mark_unchanged();
    loop {
        tokio::select! {
            changed = lease.changed() => if changed.is_err() { return },
            _ = ended.wait_for(Option::is_some) => return,
        }
        let Some(node) = node.upgrade() else { return };
        if let Err(e) = tell_lease(&node, &run.stamp).await {
            tracing::warn!(session = %run.stamp.session, "the gateway was not told a lease: {e}");
        }
    }
}
