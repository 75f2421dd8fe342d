//! Real control planes on loopback: members, strangers, restarts, outages, gossip.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod control;
mod faults;
mod gossip;
mod relay;

use std::{
    collections::BTreeMap,
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures::{FutureExt as _, future::BoxFuture};
use ks_net::{ControlConfig, ControlPlane, Handler, Keypair, LinkTiming, Multiaddr, PeerId, PeerState, Proto, control_addr};

/// Answers with the request turned round, and counts.
#[derive(Default)]
pub struct Mirror {
    pub calls: AtomicU64,
    pub bytes: AtomicU64,
}

impl Mirror {
    pub fn seen(&self) -> (u64, u64) {
        (self.calls.load(Ordering::SeqCst), self.bytes.load(Ordering::SeqCst))
    }
}

impl Handler for Mirror {
    fn handle(&self, _: PeerId, _: Proto, mut request: Vec<u8>) -> BoxFuture<'static, Vec<u8>> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        self.bytes.fetch_add(request.len() as u64, Ordering::SeqCst);
        request.reverse();
        async move { request }.boxed()
    }
}

/// Dials fast, so that tests of long outages are short.
pub const FAST: LinkTiming = LinkTiming { pause_min_ms: 10, pause_max_ms: 100, yield_ms: 50, stable_ms: 300, crossing_ms: 400 };

pub fn any_port() -> Multiaddr {
    control_addr(([127, 0, 0, 1], 0).into())
}

pub fn config(key: &Keypair, listen: Multiaddr) -> ControlConfig {
    ControlConfig {
        links: FAST,
        idle_timeout: Duration::from_millis(1_500),
        handshake_timeout: Duration::from_millis(500),
        echo_every: Duration::from_millis(100),
        ..ControlConfig::new(key.clone(), vec![listen])
    }
}

pub struct Node {
    pub key: Keypair,
    pub control: ControlPlane,
    pub mirror: Arc<Mirror>,
}

impl Node {
    pub async fn start() -> Self {
        Self::start_with(Keypair::generate_ed25519(), any_port()).await
    }

    pub async fn start_with(key: Keypair, listen: Multiaddr) -> Self {
        let mirror = Arc::new(Mirror::default());
        let control = ControlPlane::start(config(&key, listen), mirror.clone()).await.unwrap();
        Self { key, control, mirror }
    }

    pub fn id(&self) -> PeerId {
        self.control.me()
    }

    pub fn entry(&self) -> (PeerId, Vec<Multiaddr>) {
        (self.id(), self.control.listening())
    }

    /// Lets in and dials exactly these.
    pub fn allow(&self, others: &[&Self]) {
        self.control.allow(others.iter().map(|other| other.entry()).collect());
    }

    pub async fn up(&self, other: &Self) {
        within(10, "a connection", self.control.connected(other.id())).await.unwrap();
    }

    pub async fn ask(&self, other: &Self, request: &[u8]) -> Result<Vec<u8>, ks_net::CallError> {
        self.control.call(other.id(), Proto::Raft, request.to_vec(), Duration::from_secs(5)).await
    }

    /// Waits until the state of the way to `peer` is as wanted.
    pub async fn state(&self, peer: PeerId, what: &str, wanted: impl Fn(&PeerState) -> bool) -> PeerState {
        let mut peers = self.control.peers();
        let found = within(20, what, peers.wait_for(|peers| peers.get(&peer).is_some_and(&wanted))).await.unwrap();
        found[&peer].clone()
    }
}

/// `n` nodes that all know each other and are all connected.
pub async fn fleet(n: usize) -> Vec<Node> {
    let mut nodes = Vec::new();
    for _ in 0..n {
        nodes.push(Node::start().await);
    }
    let all: BTreeMap<_, _> = nodes.iter().map(Node::entry).collect();
    for node in &nodes {
        node.control.allow(all.clone());
    }
    for a in &nodes {
        for b in &nodes {
            if a.id() != b.id() {
                a.up(b).await;
            }
        }
    }
    nodes
}

/// The future's value; fails the test after so many seconds.
pub async fn within<T>(seconds: u64, what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(seconds), future).await.unwrap_or_else(|_| panic!("not within {seconds} s: {what}"))
}
