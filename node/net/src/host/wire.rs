//! The swarm's behaviour for substreams: opens them on the newest connection of a peer, hands inbound ones to bounded queues.
//!
//! Own code instead of libp2p-stream and request-response, because of what those do at the limits that matter here: libp2p-stream
//! picks any of several connections (also a dead one after a peer's restart), keeps an entry per connection for ever, and drops
//! inbound streams when more than one arrives between two polls; request-response spreads requests over live and dead connections
//! alike and cannot give one request its own deadline.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    convert::Infallible,
    fmt,
    future::{Ready, ready},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use libp2p::{
    Multiaddr, PeerId, Stream, StreamProtocol,
    core::{Endpoint, InboundUpgrade, OutboundUpgrade, UpgradeInfo, transport::PortUse},
    swarm::{
        ConnectionDenied, ConnectionHandler, ConnectionHandlerEvent, ConnectionId, FromSwarm, NetworkBehaviour, NotifyHandler,
        StreamUpgradeError, SubstreamProtocol, THandler, THandlerInEvent, THandlerOutEvent, ToSwarm,
        handler::{ConnectionEvent, DialUpgradeError, FullyNegotiatedInbound, FullyNegotiatedOutbound},
    },
};
use tokio::sync::{mpsc, oneshot};

use super::stream::OpenError;

/// Connections that may be in their handshake at once: a flood of strangers must not eat the node's memory.
const HANDSHAKES_MAX: usize = 64;
/// Streams that may wait to be opened on one connection.
const OPENS_MAX: usize = 512;
/// How long opening may take before it fails.
const OPEN_TIMEOUT: Duration = Duration::from_secs(5);

/// An inbound stream, negotiated.
pub(crate) type Inbound = (PeerId, Stream);

/// Where inbound streams go, by protocol.
pub(crate) struct Router {
    routes: Vec<(StreamProtocol, mpsc::Sender<Inbound>)>,
    dropped: AtomicU64,
}

impl Router {
    pub(crate) fn new(routes: Vec<(StreamProtocol, mpsc::Sender<Inbound>)>) -> Self {
        Self { routes, dropped: AtomicU64::new(0) }
    }

    /// Inbound streams that were reset because nobody took them in time.
    pub(crate) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    fn route(&self, peer: PeerId, protocol: &StreamProtocol, stream: Stream) {
        let queue = self.routes.iter().find(|(name, _)| name == protocol).map(|(_, queue)| queue);
        if queue.is_none_or(|queue| queue.try_send((peer, stream)).is_err()) {
            self.dropped.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(%peer, %protocol, "inbound stream dropped: its queue is full or closed");
        }
    }
}

/// A stream that somebody waits for.
pub(crate) struct Open {
    pub(crate) protocol: StreamProtocol,
    pub(crate) reply: oneshot::Sender<Result<Stream, OpenError>>,
}

impl fmt::Debug for Open {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Open({})", self.protocol)
    }
}

pub(crate) struct Wire {
    router: Arc<Router>,
    /// In the order in which they were established.
    connections: BTreeMap<PeerId, Vec<ConnectionId>>,
    handshakes: BTreeSet<ConnectionId>,
    events: VecDeque<ToSwarm<Infallible, Open>>,
    waker: Option<Waker>,
}

impl Wire {
    pub(crate) fn new(router: Arc<Router>) -> Self {
        Self { router, connections: BTreeMap::new(), handshakes: BTreeSet::new(), events: VecDeque::new(), waker: None }
    }

    /// Opens a stream on the newest connection to `peer`.
    pub(crate) fn open(&mut self, peer: PeerId, open: Open) {
        let Some(newest) = self.connections.get(&peer).and_then(|all| all.last()) else {
            let _ = open.reply.send(Err(OpenError::NotConnected { peer, reason: None }));
            return;
        };
        if self.events.len() >= OPENS_MAX {
            let _ = open.reply.send(Err(OpenError::Busy { peer }));
            return;
        }
        self.events.push_back(ToSwarm::NotifyHandler { peer_id: peer, handler: NotifyHandler::One(*newest), event: open });
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    fn handler(&self, peer: PeerId) -> Handler {
        Handler { peer, router: self.router.clone(), waiting: VecDeque::new() }
    }
}

#[derive(Debug, thiserror::Error)]
#[error("too many connections are in their handshake")]
struct Flooded;

impl NetworkBehaviour for Wire {
    type ConnectionHandler = Handler;
    type ToSwarm = Infallible;

    fn handle_pending_inbound_connection(
        &mut self,
        id: ConnectionId,
        _: &Multiaddr,
        _: &Multiaddr,
    ) -> Result<(), ConnectionDenied> {
        if self.handshakes.len() >= HANDSHAKES_MAX {
            return Err(ConnectionDenied::new(Flooded));
        }
        self.handshakes.insert(id);
        Ok(())
    }

    fn handle_established_inbound_connection(
        &mut self,
        _: ConnectionId,
        peer: PeerId,
        _: &Multiaddr,
        _: &Multiaddr,
    ) -> Result<THandler<Self>, ConnectionDenied> {
        Ok(self.handler(peer))
    }

    fn handle_established_outbound_connection(
        &mut self,
        _: ConnectionId,
        peer: PeerId,
        _: &Multiaddr,
        _: Endpoint,
        _: PortUse,
    ) -> Result<THandler<Self>, ConnectionDenied> {
        Ok(self.handler(peer))
    }

    fn on_swarm_event(&mut self, event: FromSwarm<'_>) {
        match event {
            FromSwarm::ConnectionEstablished(established) => {
                self.handshakes.remove(&established.connection_id);
                self.connections.entry(established.peer_id).or_default().push(established.connection_id);
            }
            FromSwarm::ListenFailure(failure) => {
                self.handshakes.remove(&failure.connection_id);
            }
            FromSwarm::ConnectionClosed(closed) => {
                if let Some(all) = self.connections.get_mut(&closed.peer_id) {
                    all.retain(|id| *id != closed.connection_id);
                    if all.is_empty() {
                        self.connections.remove(&closed.peer_id);
                    }
                }
            }
            _ => {}
        }
    }

    fn on_connection_handler_event(&mut self, _: PeerId, _: ConnectionId, event: THandlerOutEvent<Self>) {
        match event {}
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<ToSwarm<Self::ToSwarm, THandlerInEvent<Self>>> {
        if let Some(event) = self.events.pop_front() {
            return Poll::Ready(event);
        }
        self.waker = Some(cx.waker().clone());
        Poll::Pending
    }
}

/// One connection's part.
pub(crate) struct Handler {
    peer: PeerId,
    router: Arc<Router>,
    waiting: VecDeque<Open>,
}

impl ConnectionHandler for Handler {
    type FromBehaviour = Open;
    type ToBehaviour = Infallible;
    type InboundProtocol = Names;
    type OutboundProtocol = Names;
    type InboundOpenInfo = ();
    type OutboundOpenInfo = Open;

    fn listen_protocol(&self) -> SubstreamProtocol<Names> {
        SubstreamProtocol::new(Names(self.router.routes.iter().map(|(name, _)| name.clone()).collect()), ())
            .with_timeout(OPEN_TIMEOUT)
    }

    fn connection_keep_alive(&self) -> bool {
        true
    }

    fn on_behaviour_event(&mut self, open: Open) {
        if self.waiting.len() >= OPENS_MAX {
            let _ = open.reply.send(Err(OpenError::Busy { peer: self.peer }));
        } else {
            self.waiting.push_back(open);
        }
    }

    fn poll(&mut self, _: &mut Context<'_>) -> Poll<ConnectionHandlerEvent<Names, Open, Infallible>> {
        while let Some(open) = self.waiting.pop_front() {
            if open.reply.is_closed() {
                continue;
            }
            let protocol = SubstreamProtocol::new(Names(vec![open.protocol.clone()]), open).with_timeout(OPEN_TIMEOUT);
            return Poll::Ready(ConnectionHandlerEvent::OutboundSubstreamRequest { protocol });
        }
        // The swarm polls this handler again after each `on_behaviour_event`.
        Poll::Pending
    }

    fn on_connection_event(&mut self, event: ConnectionEvent<'_, Names, Names, (), Open>) {
        match event {
            ConnectionEvent::FullyNegotiatedInbound(FullyNegotiatedInbound { protocol: (stream, protocol), info: () }) => {
                self.router.route(self.peer, &protocol, stream);
            }
            ConnectionEvent::FullyNegotiatedOutbound(FullyNegotiatedOutbound { protocol: (stream, _), info }) => {
                let _ = info.reply.send(Ok(stream));
            }
            ConnectionEvent::DialUpgradeError(DialUpgradeError { info, error }) => {
                let peer = self.peer;
                let error = match error {
                    StreamUpgradeError::Timeout => OpenError::Timeout { peer },
                    StreamUpgradeError::NegotiationFailed => OpenError::Unsupported { peer, protocol: info.protocol.to_string() },
                    StreamUpgradeError::Io(source) => OpenError::Lost { peer, source },
                    StreamUpgradeError::Apply(never) => match never {},
                };
                let _ = info.reply.send(Err(error));
            }
            _ => {}
        }
    }
}

/// Protocol names, offered or asked for.
pub(crate) struct Names(Vec<StreamProtocol>);

impl UpgradeInfo for Names {
    type Info = StreamProtocol;
    type InfoIter = std::vec::IntoIter<StreamProtocol>;

    fn protocol_info(&self) -> Self::InfoIter {
        self.0.clone().into_iter()
    }
}

impl InboundUpgrade<Stream> for Names {
    type Output = (Stream, StreamProtocol);
    type Error = Infallible;
    type Future = Ready<Result<Self::Output, Infallible>>;

    fn upgrade_inbound(self, stream: Stream, name: StreamProtocol) -> Self::Future {
        ready(Ok((stream, name)))
    }
}

impl OutboundUpgrade<Stream> for Names {
    type Output = (Stream, StreamProtocol);
    type Error = Infallible;
    type Future = Ready<Result<Self::Output, Infallible>>;

    fn upgrade_outbound(self, stream: Stream, name: StreamProtocol) -> Self::Future {
        ready(Ok((stream, name)))
    }
}
