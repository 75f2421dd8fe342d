//! Byte streams between members: a member opens one, the other one gets it from a bounded queue.

use std::{
    collections::BTreeMap,
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use libp2p::{PeerId, Stream, StreamProtocol};
use thiserror::Error;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
};
use tokio_util::{
    compat::{Compat, FuturesAsyncReadCompatExt as _},
    sync::CancellationToken,
};

use super::wire::Inbound;

/// Inbound streams that may wait for `Incoming::next`.
pub(crate) const INCOMING_MAX: usize = 256;
/// Streams of one protocol that one peer may have open here; more are reset. Well below the connection's limit of streams, so that
/// tunnels never keep Raft from opening its own.
pub(crate) const STREAMS_PER_PEER_MAX: usize = 256;

/// What a stream carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StreamProto {
    /// HTTP of the node API, tunnelled to the node that owns a session.
    Api,
}

impl StreamProto {
    pub(crate) const ALL: [Self; 1] = [Self::Api];

    pub(crate) fn name(self) -> StreamProtocol {
        match self {
            Self::Api => StreamProtocol::new("/ks/api/1"),
        }
    }
}

/// Why a stream could not be opened. The peer has seen nothing of it.
#[derive(Debug, Error)]
pub enum OpenError {
    /// There is no connection; dialling goes on by itself.
    #[error("not connected to {peer}{}", .reason.as_deref().map(|r| format!(": {r}")).unwrap_or_default())]
    NotConnected {
        /// The peer.
        peer: PeerId,
        /// Why the last dial failed.
        reason: Option<String>,
    },
    /// Too many streams wait to be opened.
    #[error("too many streams wait to be opened to {peer}")]
    Busy {
        /// The peer.
        peer: PeerId,
    },
    /// The connection hangs, or the peer has as many streams of ours as it takes.
    #[error("no stream to {peer} could be opened in time")]
    Timeout {
        /// The peer.
        peer: PeerId,
    },
    /// The connection broke.
    #[error("the connection to {peer} broke while a stream was opened")]
    Lost {
        /// The peer.
        peer: PeerId,
        /// What broke.
        source: io::Error,
    },
    /// The peer runs a program without this protocol.
    #[error("{peer} does not speak {protocol}")]
    Unsupported {
        /// The peer.
        peer: PeerId,
        /// The protocol.
        protocol: String,
    },
    /// This control plane has been shut down.
    #[error("this node's control plane is shut down")]
    Shutdown,
}

/// A stream of bytes to a member, both ways; dropping it without `shutdown` resets it. Each direction has a window of
/// [`super::swarm::STREAM_WINDOW`] bytes: a side that does not read stops the other one's writes and nothing else.
pub struct PeerStream {
    stream: Compat<Stream>,
    /// The stream failed: it is not touched any more, because its protocol negotiation panics when polled after an error.
    broken: bool,
    _permit: Option<OwnedSemaphorePermit>,
}

impl PeerStream {
    pub(crate) fn new(stream: Stream, permit: Option<OwnedSemaphorePermit>) -> Self {
        Self { stream: stream.compat(), broken: false, _permit: permit }
    }

    /// Polls the stream unless it failed before, and remembers a failure.
    fn guarded<T>(&mut self, poll: impl FnOnce(Pin<&mut Compat<Stream>>) -> Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if self.broken {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        let polled = poll(Pin::new(&mut self.stream));
        self.broken = matches!(polled, Poll::Ready(Err(_)));
        polled
    }
}

impl std::fmt::Debug for PeerStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PeerStream")
    }
}

impl AsyncRead for PeerStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.guarded(|s| s.poll_read(cx, buf))
    }
}

impl AsyncWrite for PeerStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.guarded(|s| s.poll_write(cx, buf))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.guarded(|s| s.poll_flush(cx))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.guarded(|s| s.poll_shutdown(cx))
    }
}

/// The streams that members open to this node, of one protocol.
pub struct Incoming {
    inbound: mpsc::Receiver<Inbound>,
    open: BTreeMap<PeerId, Arc<Semaphore>>,
    stop: CancellationToken,
}

impl Incoming {
    pub(crate) fn new(inbound: mpsc::Receiver<Inbound>, stop: CancellationToken) -> Self {
        Self { inbound, open: BTreeMap::new(), stop }
    }

    /// The next stream and the member who opened it; `None` after shutdown. A member with too many open streams gets this one
    /// reset.
    pub async fn next(&mut self) -> Option<(PeerId, PeerStream)> {
        loop {
            let (peer, stream) = tokio::select! {
                biased;
                () = self.stop.cancelled() => return None,
                next = self.inbound.recv() => next?,
            };
            self.open.retain(|other, open| *other == peer || open.available_permits() != STREAMS_PER_PEER_MAX);
            let open = self.open.entry(peer).or_insert_with(|| Arc::new(Semaphore::new(STREAMS_PER_PEER_MAX)));
            match open.clone().try_acquire_owned() {
                Ok(permit) => return Some((peer, PeerStream::new(stream, Some(permit)))),
                Err(_) => tracing::warn!(%peer, "stream reset: the peer has {STREAMS_PER_PEER_MAX} open"),
            }
        }
    }
}
