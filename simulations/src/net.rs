//! The wire between nodes, modelled: delays, losses, doubles, cuts (one way or both), frozen ends.

use crate::host::Mail;
use crate::world::{Sim, World};
use futures::FutureExt;
use futures::future::BoxFuture;
use ks_raft::host::{Wire, WireError};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

/// One life of one node, as a sender.
pub struct Plug {
    /// Who sends.
    pub from: u64,
    /// In which of its lives.
    pub life: u64,
    /// Everything.
    pub world: Arc<World>,
}

impl Wire for Plug {
    fn call(&self, to: u64, request: Vec<u8>, deadline: Duration) -> BoxFuture<'static, Result<Vec<u8>, WireError>> {
        let (from, life, world) = (self.from, self.life, self.world.clone());
        let ms = u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX);
        let delivered = async move {
            let unreachable = |why: &str| WireError::Unreachable { to, why: why.into() };
            if !world.is_life(from, life) {
                return Err(unreachable("this node has crashed"));
            }
            world.count_bytes(request.len());
            let Some(there) = world.hop(from, to, 1) else { return std::future::pending().await };
            sleep(there).await;
            world.thaw(to).await;
            let Some((peer, _)) = world.peer(to) else { return Err(unreachable("it is down")) };
            let (tell, told) = oneshot::channel();
            let request = Arc::new(request);
            if world.is_doubled() {
                let (peer, request) = (peer.clone(), request.clone());
                world.spawn(async move { drop(peer.serve(from, &request).await) });
            }
            // A caller that stops waiting does not stop what it asked for.
            world.spawn(async move { drop(tell.send(peer.serve(from, &request).await)) });
            let Ok(answer) = told.await else { return std::future::pending().await };
            world.count_bytes(answer.len());
            world.thaw(to).await;
            let Some(back) = world.hop(to, from, 2) else { return std::future::pending().await };
            sleep(back).await;
            world.thaw(from).await;
            Ok(answer)
        };
        async move { timeout(deadline, delivered).await.unwrap_or(Err(WireError::Timeout { to, ms })) }.boxed()
    }
}

/// Asks another node's daemon (or this one's, without the wire). None: no answer.
pub async fn ask<T>(
    world: &Arc<World>,
    from: u64,
    to: u64,
    wait: Duration,
    mail: impl FnOnce(oneshot::Sender<T>) -> Mail,
) -> Option<T> {
    let delivered = async {
        if from != to {
            sleep(world.hop(from, to, 3)?).await;
            world.thaw(to).await;
        }
        let (_, mailbox) = world.peer(to)?;
        let (tell, told) = oneshot::channel();
        mailbox.try_send(mail(tell)).ok()?;
        let answer = told.await.ok()?;
        if from != to {
            world.thaw(to).await;
            sleep(world.hop(to, from, 4)?).await;
            world.thaw(from).await;
        }
        Some(answer)
    };
    timeout(wait, delivered).await.ok().flatten()
}

/// Reads one verified object from another node's store.
pub async fn fetch_object(world: &Arc<World>, from: u64, to: u64, name: &crate::store::Name) -> Option<Vec<u8>> {
    sleep(world.hop(to, from, 5)?).await;
    world.thaw(from).await;
    world.peer(from)?;
    let bytes = world.with(|w| w.node(from).store.get(name))?;
    sleep(world.hop(from, to, 6)?).await;
    world.thaw(to).await;
    Some(bytes)
}

/// The consensus of a simulated node.
pub type Peer = ks_raft::host::Consensus<Sim>;
