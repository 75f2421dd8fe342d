//! chitchat over the modelled wire: bounded lossy queues, as the product's.

use crate::world::World;
use async_trait::async_trait;
use chitchat::transport::{Socket, Transport};
use chitchat::{
    ChitchatConfig, ChitchatHandle, ChitchatId, ChitchatMessage, Deserializable, FailureDetectorConfig, Serializable,
};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::sleep;

/// Messages that wait for one node.
const QUEUE_MAX: usize = 64;

struct Plug {
    me: u64,
    world: Arc<World>,
}
struct Ear {
    me: u64,
    world: Arc<World>,
    heard: mpsc::Receiver<(u64, Vec<u8>)>,
}

/// The address by which chitchat knows a node; nothing listens there.
pub fn address(node: u64) -> SocketAddr {
    SocketAddr::from(([10, 0, u8::try_from(node / 256).unwrap_or(0), u8::try_from(node % 256).unwrap_or(0)], 1))
}
/// The node at an address of [`address`].
pub fn number(at: SocketAddr) -> u64 {
    match at {
        SocketAddr::V4(v4) => u64::from(v4.ip().octets()[2]) * 256 + u64::from(v4.ip().octets()[3]),
        SocketAddr::V6(_) => 0,
    }
}

#[async_trait]
impl Transport for Plug {
    async fn open(&self, _: SocketAddr) -> anyhow::Result<Box<dyn Socket>> {
        let (tell, heard) = mpsc::channel(QUEUE_MAX);
        self.world.with(|w| w.node_mut(self.me).gossip = Some(tell));
        Ok(Box::new(Ear { me: self.me, world: self.world.clone(), heard }))
    }
}

#[async_trait]
impl Socket for Ear {
    async fn send(&mut self, to: SocketAddr, message: ChitchatMessage) -> anyhow::Result<()> {
        let (world, me, to) = (self.world.clone(), self.me, number(to));
        let bytes = message.serialize_to_vec();
        world.count_gossip(bytes.len());
        if let Some(there) = world.hop(me, to, 9) {
            self.world.spawn(async move {
                world.thaw(me).await;
                sleep(there).await;
                world.thaw(to).await;
                let queue = world.with(|w| w.nodes.get(&to).and_then(|n| n.gossip.clone()));
                if let Some(queue) = queue {
                    drop(queue.try_send((me, bytes)));
                }
            });
        }
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

/// Starts chitchat on one node.
pub async fn start(world: &Arc<World>, me: u64, start: u64) -> Option<ChitchatHandle> {
    let config = ChitchatConfig {
        chitchat_id: ChitchatId::new(me.to_string(), start, address(me)),
        cluster_id: "fleet".into(),
        gossip_interval: Duration::from_millis(500),
        listen_addr: address(me),
        seed_nodes: world.with(|w| w.nodes.keys().map(|n| address(*n).to_string()).collect()),
        failure_detector_config: FailureDetectorConfig { initial_interval: Duration::from_millis(500), ..Default::default() },
        marked_for_deletion_grace_period: Duration::from_secs(60),
        catchup_callback: None,
        extra_liveness_predicate: None,
    };
    chitchat::spawn_chitchat(config, Vec::new(), &Plug { me, world: world.clone() }).await.ok()
}

/// What gossip says: the facts of each node that is thought to live.
pub async fn live(handle: &ChitchatHandle) -> Vec<(u64, String)> {
    handle
        .with_chitchat(|c| {
            let live: Vec<ChitchatId> = c.live_nodes().cloned().collect();
            let fact = |id: &ChitchatId| {
                let value = c.node_state(id)?.get("facts")?.to_owned();
                Some((id.node_id.parse().ok()?, value))
            };
            let mut all: Vec<(u64, String)> = live.iter().filter_map(fact).collect();
            all.sort();
            all
        })
        .await
}
