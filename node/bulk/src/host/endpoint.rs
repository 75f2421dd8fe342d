//! The endpoint: one UDP socket that accepts members and dials them.

use super::pace::Pace;
use super::provider;
use super::tls::{Allow, Identity, peer_of};
use crate::error::{CallError, StartError, Wrong};
use ks_blobs::{KeyRing, ObjectFault, Store};
use ks_proto::ids::{ImageId, PackId};
use libp2p_identity::{Keypair, PeerId};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::Semaphore;

/// A dial to one address takes no longer.
pub(crate) const DIAL_MAX: Duration = Duration::from_secs(5);
/// Nothing comes, or nothing is taken, for so long: the peer is given up.
pub(crate) const STALL_MAX: Duration = Duration::from_secs(15);
/// Connections that are accepted at the same time.
const CONNECTIONS_MAX: usize = 256;
/// Streams that one peer may have open at the same time.
const STREAMS_MAX: u32 = 64;
/// Streams served at the same time in all.
const SERVED_MAX: usize = 512;
/// Receive window of a stream and of a connection, and bytes sent but not acknowledged.
const STREAM_WINDOW: u32 = 8 << 20;
const WINDOW: u32 = 32 << 20;

/// A node to fetch from: who it is and where its bulk endpoint may be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// Who.
    pub peer: PeerId,
    /// Where; tried in order.
    pub addrs: Vec<SocketAddr>,
}

/// Finds files of images for peers that ask.
pub trait ImageFiles: Send + Sync {
    /// The file called `which` (a plain name, checked) of an image, if this node has it whole.
    fn path(&self, image: &ImageId, which: &str) -> Option<PathBuf>;
}

/// A node that gives out no image files.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoImages;
impl ImageFiles for NoImages {
    fn path(&self, _: &ImageId, _: &str) -> Option<PathBuf> {
        None
    }
}

/// Bandwidth caps in bytes per second; None: no cap.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BulkLimits {
    /// What this node sends to all peers together.
    pub send_bytes_per_s: Option<u64>,
    /// What it receives from all peers together.
    pub receive_bytes_per_s: Option<u64>,
}

/// Something that people should hear of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BulkEvent {
    /// A peer sent what does not verify. It is marked and asked last from now on.
    WrongBytes { peer: PeerId, wrong: Wrong },
    /// A pack was found damaged while a peer read it; it was not served. `faults` are out of service here.
    Damaged { pack: PackId, faults: Vec<ObjectFault> },
}

/// What an endpoint needs.
pub struct BulkConfig {
    /// The node's key.
    pub keypair: Keypair,
    /// Where to listen (UDP); port 0 picks one.
    pub listen: SocketAddr,
    /// Is this peer a member? Asked in each handshake and at each request.
    pub allow: Allow,
    /// The node's chunk store.
    pub store: Arc<Store>,
    /// The keys at hand, to look whether a closure is whole.
    pub keys: Arc<dyn Fn() -> KeyRing + Send + Sync>,
    /// Kernels and initramfs.
    pub images: Arc<dyn ImageFiles>,
    /// Caps.
    pub limits: BulkLimits,
    /// Told of what people should hear of; must not block.
    pub events: Arc<dyn Fn(BulkEvent) + Send + Sync>,
}

/// A connection to a peer, once there is one; the lock merges dials.
type Dialled = Arc<tokio::sync::Mutex<Option<quinn::Connection>>>;

pub(crate) struct Inner {
    pub identity: Identity,
    pub endpoint: quinn::Endpoint,
    pub allow: Allow,
    pub store: Arc<Store>,
    pub keys: Arc<dyn Fn() -> KeyRing + Send + Sync>,
    pub images: Arc<dyn ImageFiles>,
    pub send_pace: Pace,
    pub receive_pace: Pace,
    pub events: Arc<dyn Fn(BulkEvent) + Send + Sync>,
    pub outboards: provider::Outboards,
    pub packs_served: Arc<Semaphore>,
    pub packs_in_memory: Arc<Semaphore>,
    pub streams_served: Arc<Semaphore>,
    transport: Arc<quinn::TransportConfig>,
    dialled: Mutex<BTreeMap<PeerId, Dialled>>,
    accepted: Mutex<BTreeMap<usize, (PeerId, quinn::Connection)>>,
    marks: Mutex<BTreeMap<PeerId, u64>>,
    sent: AtomicU64,
    received: AtomicU64,
}

fn lock<T>(m: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The bulk plane of this node. Cheap to clone; [`Bulk::close`] ends it.
#[derive(Clone)]
pub struct Bulk {
    pub(crate) inner: Arc<Inner>,
}

impl std::fmt::Debug for Bulk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bulk").field("peer", &self.peer_id()).field("addr", &self.local_addr()).finish_non_exhaustive()
    }
}

/// What both directions of every connection go by.
pub(crate) fn transport() -> quinn::TransportConfig {
    let mut t = quinn::TransportConfig::default();
    t.stream_receive_window(STREAM_WINDOW.into()).receive_window(WINDOW.into()).send_window(u64::from(WINDOW));
    t.max_concurrent_bidi_streams(STREAMS_MAX.into()).max_concurrent_uni_streams(0u32.into());
    t.keep_alive_interval(Some(Duration::from_secs(5)));
    t.datagram_receive_buffer_size(None);
    t
}

impl Bulk {
    /// Listens, and serves members until [`Self::close`].
    ///
    /// # Errors
    /// If the address cannot be had or the key makes no certificate.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn start(config: BulkConfig) -> Result<Self, StartError> {
        let identity = Identity::new(config.keypair)?;
        let transport = Arc::new(transport());
        let mut server = identity.server(config.allow.clone())?;
        server.transport_config(transport.clone());
        let bind = |source| StartError::Bind { addr: config.listen, source };
        let socket = std::net::UdpSocket::bind(config.listen).map_err(bind)?;
        let runtime = Arc::new(quinn::TokioRuntime);
        let endpoint = quinn::Endpoint::new(quinn::EndpointConfig::default(), Some(server), socket, runtime).map_err(bind)?;
        let inner = Arc::new(Inner {
            identity,
            endpoint: endpoint.clone(),
            allow: config.allow,
            store: config.store,
            keys: config.keys,
            images: config.images,
            send_pace: Pace::new(config.limits.send_bytes_per_s),
            receive_pace: Pace::new(config.limits.receive_bytes_per_s),
            events: config.events,
            outboards: provider::Outboards::default(),
            packs_served: Arc::new(Semaphore::new(provider::SERVE_MAX)),
            packs_in_memory: Arc::new(Semaphore::new(provider::IN_MEMORY_MAX)),
            streams_served: Arc::new(Semaphore::new(SERVED_MAX)),
            transport,
            dialled: Mutex::default(),
            accepted: Mutex::default(),
            marks: Mutex::default(),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
        });
        tokio::spawn(accept(endpoint, Arc::downgrade(&inner)));
        Ok(Self { inner })
    }

    /// Who this node is.
    pub fn peer_id(&self) -> PeerId {
        self.inner.identity.peer_id()
    }
    /// Where it listens; None once closed.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.inner.endpoint.local_addr().ok()
    }
    /// Asks the allow-list again about every open connection and closes those of peers that are members no more. New
    /// requests of theirs are refused even without this.
    pub fn recheck_allowed(&self) {
        let i = &self.inner;
        for (peer, c) in lock(&i.accepted).values() {
            if !(i.allow)(peer) {
                c.close(provider::CLOSE_STRANGER.into(), b"not a member");
            }
        }
        let gone: Vec<Dialled> = {
            let mut dialled = lock(&i.dialled);
            let gone: Vec<PeerId> = dialled.keys().filter(|p| !(i.allow)(p)).copied().collect();
            gone.iter().filter_map(|p| dialled.remove(p)).collect()
        };
        for d in gone {
            if let Ok(c) = d.try_lock()
                && let Some(c) = &*c
            {
                c.close(provider::CLOSE_STRANGER.into(), b"not a member");
            }
        }
    }
    /// Peers that sent wrong bytes, and how often.
    pub fn marked(&self) -> BTreeMap<PeerId, u64> {
        lock(&self.inner.marks).clone()
    }
    /// Forgets a peer's marks.
    pub fn forgive(&self, peer: &PeerId) {
        lock(&self.inner.marks).remove(peer);
    }
    /// Pack and file bytes (sent, received) since the start.
    pub fn traffic(&self) -> (u64, u64) {
        (self.inner.sent.load(Ordering::Relaxed), self.inner.received.load(Ordering::Relaxed))
    }
    /// Closes all connections and stops listening. Fetches under way fail.
    pub async fn close(&self) {
        self.inner.endpoint.close(provider::CLOSE_DONE.into(), b"shutting down");
        // Peers hear of it, or not; nobody waits longer than this.
        let _ = tokio::time::timeout(Duration::from_secs(1), self.inner.endpoint.wait_idle()).await;
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.endpoint.close(provider::CLOSE_DONE.into(), b"shutting down");
    }
}

impl Inner {
    /// A peer sent what does not verify.
    pub fn mark(&self, peer: PeerId, wrong: &Wrong) {
        *lock(&self.marks).entry(peer).or_default() += 1;
        tracing::warn!(%peer, "wrong bytes: {wrong}");
        (self.events)(BulkEvent::WrongBytes { peer, wrong: wrong.clone() });
    }
    /// Holders in the order in which to ask them: those that never sent wrong bytes first.
    pub fn in_order(&self, holders: &[Holder]) -> Vec<Holder> {
        let marks = lock(&self.marks).clone();
        let mut out: Vec<Holder> = Vec::new();
        for h in holders.iter().filter(|h| h.peer != self.identity.peer_id()) {
            if !out.iter().any(|o| o.peer == h.peer) {
                out.push(h.clone());
            }
        }
        out.sort_by_key(|h| marks.get(&h.peer).copied().unwrap_or(0));
        out
    }
    pub fn count_sent(&self, bytes: usize) {
        self.sent.fetch_add(bytes as u64, Ordering::Relaxed);
    }
    pub fn count_received(&self, bytes: usize) {
        self.received.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// A connection to a holder: the one there is, or a new one.
    pub async fn connection(&self, holder: &Holder) -> Result<quinn::Connection, CallError> {
        let peer = holder.peer;
        if !(self.allow)(&peer) {
            return Err(CallError::Unreachable { peer, why: "it is not a member of this fleet".into() });
        }
        let slot = lock(&self.dialled).entry(peer).or_default().clone();
        let mut slot = slot.lock().await;
        if let Some(c) = slot.as_ref().filter(|c| c.close_reason().is_none()) {
            return Ok(c.clone());
        }
        let mut causes = Vec::new();
        for addr in &holder.addrs {
            match self.dial(peer, *addr).await {
                Ok(c) => {
                    *slot = Some(c.clone());
                    return Ok(c);
                }
                Err(why) => causes.push(format!("{addr}: {why}")),
            }
        }
        let why = if causes.is_empty() { "no address of it is known".to_owned() } else { causes.join("; ") };
        Err(CallError::Unreachable { peer, why })
    }

    async fn dial(&self, peer: PeerId, addr: SocketAddr) -> Result<quinn::Connection, String> {
        let mut client = self.identity.client(peer).map_err(|e| e.to_string())?;
        client.transport_config(self.transport.clone());
        let dialling = self.endpoint.connect_with(client, addr, "ks-bulk").map_err(|e| e.to_string())?;
        match tokio::time::timeout(DIAL_MAX, dialling).await {
            Ok(done) => done.map_err(|e| e.to_string()),
            Err(_) => Err(format!("no answer in {} s", DIAL_MAX.as_secs())),
        }
    }
}

async fn accept(endpoint: quinn::Endpoint, inner: std::sync::Weak<Inner>) {
    while let Some(incoming) = endpoint.accept().await {
        let Some(inner) = inner.upgrade() else { return };
        if endpoint.open_connections() > CONNECTIONS_MAX {
            incoming.refuse();
            continue;
        }
        tokio::spawn(async move {
            // A stranger ends here: the handshake asks the allow-list.
            let Ok(c) = incoming.await else { return };
            let Some(peer) = peer_of(&c) else { return c.close(provider::CLOSE_STRANGER.into(), b"who") };
            let no = c.stable_id();
            lock(&inner.accepted).insert(no, (peer, c.clone()));
            provider::serve(&inner, peer, &c).await;
            lock(&inner.accepted).remove(&no);
        });
    }
}
