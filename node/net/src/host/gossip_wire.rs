//! chitchat's packets over the control plane: one stream per peer and direction, frames of a length and that many bytes.
//!
//! chitchat awaits each send inside its loop, so sends only fill a short lossy queue per peer. It knows nodes by socket address:
//! each member gets a made-up one, from its PeerId, and the address of an inbound packet is that of the *proven* sender. Addresses
//! that belong to no member lead nowhere. One more made-up address means "some member, another one each time": it is chitchat's
//! only seed, so the allow-list alone says who can be met, now and after any outage.

use std::{
    collections::BTreeMap,
    net::{Ipv6Addr, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use chitchat::{
    ChitchatMessage, Deserializable as _, Serializable as _,
    transport::{Socket, Transport},
};
use futures::{AsyncReadExt as _, AsyncWriteExt as _};
use libp2p::{PeerId, Stream};
use tokio::sync::{Mutex as AsyncMutex, mpsc};

use super::{
    control::{ControlPlane, GOSSIP},
    wire::Inbound,
};

/// Longest packet: chitchat's own limit.
const PACKET_MAX: usize = 65_507;
/// Packets that may wait for one peer; newer ones are dropped, the next round sends fresher ones.
const OUTBOX_MAX: usize = 8;
/// Packets that may wait for chitchat.
const INBOX_MAX: usize = 256;
/// Streams that one peer may have open for gossip; a further one ends the oldest.
const STREAMS_PER_PEER: usize = 2;
/// How long a packet may take onto the wire.
const SEND_DEADLINE: Duration = Duration::from_secs(2);

type Packet = (PeerId, Vec<u8>);

/// The made-up address of a member.
pub(crate) fn address_of(peer: &PeerId) -> SocketAddr {
    let hash = blake3::hash(&peer.to_bytes());
    let mut ip = [0; 16];
    ip[0] = 0xfd;
    ip[1..].copy_from_slice(&hash.as_bytes()[..15]);
    SocketAddr::new(Ipv6Addr::from(ip).into(), 1)
}

/// The made-up address of "some member".
pub(crate) fn some_member() -> SocketAddr {
    SocketAddr::new(Ipv6Addr::new(0xfc00, 0, 0, 0, 0, 0, 0, 1).into(), 1)
}

/// The gossip's side of the control plane; outlives each run of chitchat.
#[derive(Clone)]
pub(crate) struct Post {
    control: ControlPlane,
    inbox: Arc<AsyncMutex<mpsc::Receiver<Packet>>>,
    outboxes: Arc<Mutex<BTreeMap<PeerId, mpsc::Sender<Vec<u8>>>>>,
}

impl Post {
    /// `None` when the gossip's streams have been taken before.
    pub(crate) fn new(control: ControlPlane) -> Option<Self> {
        let streams = control.take_incoming(&GOSSIP)?;
        let (sender, receiver) = mpsc::channel(INBOX_MAX);
        tokio::spawn(receive_all(streams, sender, control.stopping()));
        Some(Self { control, inbox: Arc::new(AsyncMutex::new(receiver)), outboxes: Arc::default() })
    }

    /// Ends the queues of peers that are no longer members.
    pub(crate) fn prune(&self) {
        let peers = self.control.peers();
        let members = peers.borrow();
        self.outboxes.lock().unwrap_or_else(PoisonError::into_inner).retain(|peer, _| members.contains_key(peer));
    }

    fn peer_at(&self, address: SocketAddr, turn: usize) -> Option<PeerId> {
        let peers = self.control.peers();
        let members = peers.borrow();
        if address == some_member() {
            let connected: Vec<_> = members.iter().filter(|(_, state)| state.connected).map(|(peer, _)| *peer).collect();
            return (!connected.is_empty()).then(|| connected[turn % connected.len()]);
        }
        members.keys().find(|peer| address_of(peer) == address).copied()
    }

    fn outbox(&self, peer: PeerId) -> mpsc::Sender<Vec<u8>> {
        let mut outboxes = self.outboxes.lock().unwrap_or_else(PoisonError::into_inner);
        let start = || {
            let (sender, receiver) = mpsc::channel(OUTBOX_MAX);
            tokio::spawn(send_all(self.control.clone(), peer, receiver));
            sender
        };
        outboxes.entry(peer).or_insert_with(start).clone()
    }
}

/// Writes one peer's packets until its queue is dropped.
async fn send_all(control: ControlPlane, peer: PeerId, mut packets: mpsc::Receiver<Vec<u8>>) {
    let mut stream: Option<Stream> = None;
    let stop = control.stopping();
    loop {
        let packet = tokio::select! {
            () = stop.cancelled() => return,
            packet = packets.recv() => match packet { Some(packet) => packet, None => return },
        };
        let send = async {
            let mut open = match stream.take() {
                Some(open) => open,
                None => control.open(peer, GOSSIP).await.ok()?,
            };
            let len = u32::try_from(packet.len()).ok()?;
            open.write_all(&len.to_le_bytes()).await.ok()?;
            open.write_all(&packet).await.ok()?;
            open.flush().await.ok()?;
            Some(open)
        };
        stream = tokio::time::timeout(SEND_DEADLINE, send).await.ok().flatten();
    }
}

/// Takes the peers' gossip streams and reads each in a task of its own.
async fn receive_all(
    mut streams: mpsc::Receiver<Inbound>,
    inbox: mpsc::Sender<Packet>,
    stop: tokio_util::sync::CancellationToken,
) {
    let mut readers: BTreeMap<PeerId, Vec<tokio::task::AbortHandle>> = BTreeMap::new();
    loop {
        let (peer, stream) = tokio::select! {
            () = stop.cancelled() => return,
            next = streams.recv() => match next { Some(next) => next, None => return },
        };
        for all in readers.values_mut() {
            all.retain(|reader| !reader.is_finished());
        }
        readers.retain(|_, all| !all.is_empty());
        let all = readers.entry(peer).or_default();
        if all.len() >= STREAMS_PER_PEER {
            all.remove(0).abort();
        }
        all.push(tokio::spawn(receive(peer, stream, inbox.clone())).abort_handle());
    }
}

async fn receive(peer: PeerId, mut stream: Stream, inbox: mpsc::Sender<Packet>) {
    let mut len = [0; 4];
    while stream.read_exact(&mut len).await.is_ok() {
        let len = u32::from_le_bytes(len) as usize;
        if len > PACKET_MAX {
            tracing::warn!(%peer, len, "gossip stream closed: a packet is above the limit");
            return;
        }
        let mut packet = vec![0; len];
        if stream.read_exact(&mut packet).await.is_err() {
            return;
        }
        // Lossy on purpose: when chitchat cannot keep up, newer packets come anyway.
        let _ = inbox.try_send((peer, packet));
    }
}

#[async_trait::async_trait]
impl Transport for Post {
    async fn open(&self, _: SocketAddr) -> anyhow::Result<Box<dyn Socket>> {
        Ok(Box::new(PostSocket { post: self.clone(), turn: 0 }))
    }
}

struct PostSocket {
    post: Post,
    turn: usize,
}

#[async_trait::async_trait]
impl Socket for PostSocket {
    async fn send(&mut self, to: SocketAddr, message: ChitchatMessage) -> anyhow::Result<()> {
        self.turn = self.turn.wrapping_add(1);
        if let Some(peer) = self.post.peer_at(to, self.turn) {
            let mut packet = Vec::new();
            message.serialize(&mut packet);
            let _ = self.post.outbox(peer).try_send(packet);
        }
        Ok(())
    }

    async fn recv(&mut self) -> anyhow::Result<(SocketAddr, ChitchatMessage)> {
        let mut inbox = self.post.inbox.lock().await;
        loop {
            let Some((peer, packet)) = inbox.recv().await else { std::future::pending().await };
            match ChitchatMessage::deserialize(&mut &packet[..]) {
                Ok(message) => return Ok((address_of(&peer), message)),
                Err(error) => tracing::warn!(%peer, %error, "gossip packet ignored: not readable"),
            }
        }
    }
}
