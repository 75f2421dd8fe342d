//! The control plane as others see it: who may talk, calls, streams, and how the peers are doing.

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use libp2p::{Multiaddr, PeerId, Stream, StreamProtocol, identity::Keypair};
use thiserror::Error;
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::{
    call::{self, CALL_DEADLINE_MAX, CallError, Handler, MESSAGE_BYTES_MAX, Proto},
    stream::{INCOMING_MAX, Incoming, OpenError, PeerStream, StreamProto},
    swarm::{self, Command},
    wire::{Inbound, Open, Router},
};
use crate::links::{LinkTiming, PeerState};

/// Commands that may wait for the swarm task.
const COMMANDS_MAX: usize = 1024;
/// Longest time that opening a byte stream may take.
const STREAM_DEADLINE: Duration = Duration::from_secs(5);

/// Name of the gossip's streams.
pub(crate) const GOSSIP: StreamProtocol = StreamProtocol::new("/ks/gossip/1");

/// How a control plane is started.
pub struct ControlConfig {
    /// The node's key; its PeerId is the node's name.
    pub key: Keypair,
    /// Where to listen; see [`crate::control_addr`]. Port 0 takes a free one: see [`ControlPlane::listening`].
    pub listen: Vec<Multiaddr>,
    /// Pauses between dials.
    pub links: LinkTiming,
    /// A connection on which nothing arrived for this long is dead. Keep-alives are sent at a quarter of it.
    pub idle_timeout: Duration,
    /// How long a handshake may take.
    pub handshake_timeout: Duration,
    /// How long to wait for a port that another process still holds (a former run that is going down).
    pub bind_patience: Duration,
    /// How often the round-trip time of each connected peer is taken.
    pub echo_every: Duration,
}

impl ControlConfig {
    /// The product's timing.
    #[must_use]
    pub fn new(key: Keypair, listen: Vec<Multiaddr>) -> Self {
        Self {
            key,
            listen,
            links: LinkTiming::default(),
            idle_timeout: Duration::from_secs(3),
            handshake_timeout: Duration::from_secs(2),
            bind_patience: Duration::from_secs(5),
            echo_every: Duration::from_secs(2),
        }
    }
}

/// Why the control plane did not start.
#[derive(Debug, Error)]
pub enum StartError {
    /// `listen` has something that is no address, or nothing.
    #[error("cannot listen on {0}: a control address is IP, UDP port and QUIC, like /ip4/127.0.0.1/udp/7450/quic-v1")]
    Address(String),
    /// The port is taken, or the address is not of this machine.
    #[error(
        "cannot listen on {address}: is another node running with this address, and does the address belong to this machine? Choose another one with --fleet-address"
    )]
    Listen {
        /// The address.
        address: Multiaddr,
        /// The system's reason.
        source: io::Error,
    },
    /// The keys of all connections would be written to a file.
    #[error(
        "SSLKEYLOGFILE is set: the TLS library would write the keys of the fleet's connections into that file. Unset it and start again"
    )]
    KeyLog,
    /// The transport refused the key.
    #[error("cannot set up QUIC with this node's key")]
    Transport(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// One node's connections to the members of its fleet. Cheap to clone; the last clone's drop ends it.
#[derive(Clone)]
pub struct ControlPlane {
    inner: Arc<Inner>,
}

struct Inner {
    key: Keypair,
    me: PeerId,
    commands: mpsc::Sender<Command>,
    members: watch::Sender<BTreeMap<PeerId, Vec<Multiaddr>>>,
    states: watch::Receiver<BTreeMap<PeerId, PeerState>>,
    listening: watch::Receiver<Vec<Multiaddr>>,
    incoming: Mutex<VecDeque<(StreamProtocol, mpsc::Receiver<Inbound>)>>,
    router: Arc<Router>,
    done: watch::Receiver<bool>,
    stop: CancellationToken,
    _guard: DropGuard,
}

impl ControlPlane {
    /// Listens and answers. Nobody is let in before [`Self::allow`].
    ///
    /// # Errors
    /// [`StartError`]; nothing is left running then.
    pub async fn start(config: ControlConfig, handler: Arc<dyn Handler>) -> Result<Self, StartError> {
        let me = config.key.public().to_peer_id();
        let mut routes = Vec::new();
        let mut calls = Vec::new();
        for proto in Proto::ALL {
            let (sender, receiver) = mpsc::channel(INCOMING_MAX);
            routes.push((proto.name(), sender));
            calls.push((proto, receiver));
        }
        let (sender, echoes) = mpsc::channel(INCOMING_MAX);
        routes.push((swarm::ECHO, sender));
        let mut incoming = VecDeque::new();
        for name in StreamProto::ALL.map(StreamProto::name).into_iter().chain([GOSSIP]) {
            let (sender, receiver) = mpsc::channel(INCOMING_MAX);
            routes.push((name.clone(), sender));
            incoming.push_back((name, receiver));
        }
        let router = Arc::new(Router::new(routes));
        let stop = CancellationToken::new();
        let (commands, command_queue) = mpsc::channel(COMMANDS_MAX);
        let (members, members_seen) = watch::channel(BTreeMap::new());
        let key = config.key.clone();
        let task = swarm::start(config, router.clone(), command_queue, members_seen, stop.clone()).await?;
        for (proto, receiver) in calls {
            tokio::spawn(Arc::new(call::Server::new(proto, handler.clone())).run(receiver, stop.clone()));
        }
        tokio::spawn(swarm::answer_echoes(echoes, stop.clone()));
        tokio::spawn(swarm::measure(commands.downgrade(), task.states.clone(), task.echo_every, stop.clone()));
        let guard = stop.clone().drop_guard();
        let inner = Inner {
            key,
            me,
            commands,
            members,
            states: task.states,
            listening: task.listening,
            incoming: Mutex::new(incoming),
            router,
            done: task.done,
            stop,
            _guard: guard,
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// This node's name.
    #[must_use]
    pub fn me(&self) -> PeerId {
        self.inner.me
    }

    pub(crate) fn key(&self) -> &Keypair {
        &self.inner.key
    }

    /// Where this node listens now. Changes when a lost listener is back.
    #[must_use]
    pub fn listening(&self) -> Vec<Multiaddr> {
        self.inner.listening.borrow().clone()
    }

    /// Replaces the allow-list: exactly these peers may connect and are dialled, for ever, at these addresses. Connections of
    /// peers that are no longer on it are closed. Takes effect within the swarm task's next turn; never waits. This node's own
    /// entry is ignored, as is an address that is not IP, UDP and QUIC.
    pub fn allow(&self, members: BTreeMap<PeerId, Vec<Multiaddr>>) {
        self.inner.members.send_if_modified(|old| {
            let new = *old != members;
            if new {
                *old = members;
            }
            new
        });
    }

    /// Asks `peer` and waits for its answer, at most `deadline` (and [`CALL_DEADLINE_MAX`]). Fails at once when there is no
    /// connection: see [`Self::connected`] to wait for one.
    ///
    /// # Errors
    /// [`CallError`]; dropping the future gives the call up.
    pub async fn call(&self, peer: PeerId, proto: Proto, request: Vec<u8>, deadline: Duration) -> Result<Vec<u8>, CallError> {
        if request.len() > MESSAGE_BYTES_MAX {
            return Err(CallError::RequestTooLarge { bytes: request.len() });
        }
        let deadline = deadline.min(CALL_DEADLINE_MAX);
        let call = async {
            let stream = self.open(peer, proto.name()).await?;
            call::ask(peer, stream, &request).await
        };
        tokio::time::timeout(deadline, call).await.unwrap_or(Err(CallError::Timeout { peer, deadline }))
    }

    /// Opens a byte stream to `peer`. The other side sees it when the first byte is written (or the stream is shut down); that it
    /// takes no such stream shows at the first read.
    ///
    /// # Errors
    /// [`OpenError`], after at most five seconds.
    pub async fn open_stream(&self, peer: PeerId, proto: StreamProto) -> Result<PeerStream, OpenError> {
        let opened = tokio::time::timeout(STREAM_DEADLINE, self.open(peer, proto.name()));
        Ok(PeerStream::new(opened.await.unwrap_or(Err(OpenError::Timeout { peer }))?, None))
    }

    /// The streams that peers open to this node. `None` if they have been taken before: there is one receiver. Until it is taken,
    /// up to 256 streams wait and further ones are reset.
    #[must_use]
    pub fn incoming(&self, proto: StreamProto) -> Option<Incoming> {
        self.take_incoming(&proto.name()).map(|inbound| Incoming::new(inbound, self.stopping()))
    }

    /// How each member on the allow-list is reached; changes with every event on its connection.
    #[must_use]
    pub fn peers(&self) -> watch::Receiver<BTreeMap<PeerId, PeerState>> {
        self.inner.states.clone()
    }

    /// Waits until there is a connection to `peer`; for ever, if there never is one. Wrap it in a timeout.
    ///
    /// # Errors
    /// [`OpenError::Shutdown`].
    pub async fn connected(&self, peer: PeerId) -> Result<(), OpenError> {
        let mut states = self.inner.states.clone();
        let up = states.wait_for(|states| states.get(&peer).is_some_and(|state| state.connected)).await;
        up.map(|_| ()).map_err(|_| OpenError::Shutdown)
    }

    /// Inbound streams that were reset because nobody took them in time.
    #[must_use]
    pub fn dropped_streams(&self) -> u64 {
        self.inner.router.dropped()
    }

    /// Closes every connection, tells the peers so, and frees the port.
    pub async fn shutdown(&self) {
        self.inner.stop.cancel();
        let mut done = self.inner.done.clone();
        let _ = done.wait_for(|done| *done).await;
    }

    pub(crate) fn stopping(&self) -> CancellationToken {
        self.inner.stop.clone()
    }

    pub(crate) fn take_incoming(&self, name: &StreamProtocol) -> Option<mpsc::Receiver<Inbound>> {
        let mut incoming = self.inner.incoming.lock().unwrap_or_else(PoisonError::into_inner);
        let at = incoming.iter().position(|(other, _)| other == name)?;
        incoming.remove(at).map(|(_, receiver)| receiver)
    }

    pub(crate) async fn open(&self, peer: PeerId, protocol: StreamProtocol) -> Result<Stream, OpenError> {
        let mut stream = open(&self.inner.commands, peer, protocol).await;
        if let Err(OpenError::NotConnected { reason, .. }) = &mut stream {
            *reason = match self.inner.states.borrow().get(&peer) {
                Some(state) => state.error.clone(),
                None => Some("it is not a member of this fleet, as far as this node knows".into()),
            };
        }
        stream
    }

    #[cfg(test)]
    pub(crate) fn listening_changes(&self) -> watch::Receiver<Vec<Multiaddr>> {
        self.inner.listening.clone()
    }

    #[cfg(test)]
    pub(crate) async fn drop_listeners(&self) {
        let _ = self.inner.commands.send(Command::DropListeners).await;
    }
}

/// Asks the swarm task for a stream.
pub(crate) async fn open(commands: &mpsc::Sender<Command>, peer: PeerId, protocol: StreamProtocol) -> Result<Stream, OpenError> {
    let (reply, opened) = oneshot::channel();
    commands.send(Command::Open { peer, open: Open { protocol, reply } }).await.map_err(|_| OpenError::Shutdown)?;
    // The reply is dropped with the connection on which the stream was to be opened.
    opened.await.unwrap_or_else(|_| Err(OpenError::Lost { peer, source: io::ErrorKind::ConnectionReset.into() }))
}
