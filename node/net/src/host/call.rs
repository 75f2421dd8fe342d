//! Calls: one request and one answer on a substream of their own.
//!
//! Frames in `docs/formats.md`. A request is read only as far as it has arrived and only within the peer's budget; its length is
//! never trusted. A call that gives up resets its stream, so nothing piles up behind a peer that hangs.

use std::{
    collections::BTreeMap,
    io,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures::{AsyncReadExt, AsyncWriteExt, future::BoxFuture};
use libp2p::{PeerId, Stream, StreamProtocol};
use thiserror::Error;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_util::sync::CancellationToken;

use super::{stream::OpenError, wire::Inbound};

/// Largest request and largest answer.
pub const MESSAGE_BYTES_MAX: usize = 16 << 20;
/// Longest time that a call can take, whatever its deadline; the answering side gives up then, too.
pub const CALL_DEADLINE_MAX: Duration = Duration::from_secs(60);
/// Calls of one protocol that one peer may have running here.
const CALLS_PER_PEER_MAX: usize = 64;
/// Request bytes of one protocol that one peer may have in memory here, in KiB.
const REQUEST_KIB_PER_PEER_MAX: usize = 64 << 10;
/// Request bytes that are read, and counted, at a time.
const READ_STEP: usize = 256 << 10;
/// Answers to calls.
const ANSWER: u8 = 0;
const BUSY: u8 = 1;
const REQUEST_TOO_LARGE: u8 = 2;
const ANSWER_TOO_LARGE: u8 = 3;

/// What a call is about. Each has limits of its own, so that one cannot crowd out the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Proto {
    /// Raft's messages.
    Raft,
    /// Session commands, lease renewals, replication requests.
    Command,
}

impl Proto {
    pub(crate) const ALL: [Self; 2] = [Self::Raft, Self::Command];

    pub(crate) fn name(self) -> StreamProtocol {
        match self {
            Self::Raft => StreamProtocol::new("/ks/raft/1"),
            Self::Command => StreamProtocol::new("/ks/cmd/1"),
        }
    }
}

/// Answers the calls of peers.
pub trait Handler: Send + Sync + 'static {
    /// Answers `request` of `peer`, whose identity is proven and who is a member. An answer above [`MESSAGE_BYTES_MAX`] reaches the
    /// peer as [`CallError::AnswerTooLarge`], a panic as [`CallError::Lost`]. Dropped after [`CALL_DEADLINE_MAX`]; not dropped
    /// when the peer gives up earlier.
    fn handle(&self, peer: PeerId, proto: Proto, request: Vec<u8>) -> BoxFuture<'static, Vec<u8>>;
}

/// Why a call has no answer. [`CallError::not_handled`] tells whether the peer can have acted on it.
#[derive(Debug, Error)]
pub enum CallError {
    /// There is no connection; dialling goes on by itself.
    #[error("not connected to {peer}{}", .reason.as_deref().map(|r| format!(": {r}")).unwrap_or_default())]
    NotConnected {
        /// The peer.
        peer: PeerId,
        /// Why the last dial failed.
        reason: Option<String>,
    },
    /// The peer has as many calls of this kind as it may; try again later.
    #[error("{peer} is busy with {CALLS_PER_PEER_MAX} calls of this node")]
    Busy {
        /// The peer.
        peer: PeerId,
    },
    /// Ours or theirs: the request is above the limit.
    #[error("a request of {bytes} bytes is above the limit of {MESSAGE_BYTES_MAX}")]
    RequestTooLarge {
        /// Its length.
        bytes: usize,
    },
    /// The peer handled the request and has an answer that cannot be sent.
    #[error("the answer of {peer} is above the limit of {MESSAGE_BYTES_MAX} bytes")]
    AnswerTooLarge {
        /// The peer.
        peer: PeerId,
    },
    /// No answer in time; the outcome is unknown.
    #[error("no answer from {peer} within {} ms", .deadline.as_millis())]
    Timeout {
        /// The peer.
        peer: PeerId,
        /// How long the call was allowed to take.
        deadline: Duration,
    },
    /// The connection or the peer's handler broke off; the outcome is unknown.
    #[error("the call to {peer} was cut off")]
    Lost {
        /// The peer.
        peer: PeerId,
        /// What broke.
        source: io::Error,
    },
    /// Not in the protocol: the peer is broken or hostile. The outcome is unknown.
    #[error("{peer} sent an answer that is none ({what})")]
    Malformed {
        /// The peer.
        peer: PeerId,
        /// What did not fit.
        what: &'static str,
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

impl CallError {
    /// The peer has certainly not acted on the request: asking again, or another peer, cannot do it twice.
    #[must_use]
    pub fn not_handled(&self) -> bool {
        match self {
            Self::NotConnected { .. }
            | Self::Busy { .. }
            | Self::RequestTooLarge { .. }
            | Self::Unsupported { .. }
            | Self::Shutdown => true,
            Self::AnswerTooLarge { .. } | Self::Timeout { .. } | Self::Lost { .. } | Self::Malformed { .. } => false,
        }
    }
}

impl From<OpenError> for CallError {
    fn from(error: OpenError) -> Self {
        match error {
            OpenError::NotConnected { peer, reason } => Self::NotConnected { peer, reason },
            OpenError::Busy { peer } => Self::Busy { peer },
            OpenError::Timeout { peer } => Self::NotConnected { peer, reason: Some("no stream could be opened in time".into()) },
            OpenError::Lost { peer, source } => Self::NotConnected { peer, reason: Some(source.to_string()) },
            OpenError::Unsupported { peer, protocol } => Self::Unsupported { peer, protocol },
            OpenError::Shutdown => Self::Shutdown,
        }
    }
}

/// Sends `request` on a fresh stream and reads the answer.
pub(crate) async fn ask(peer: PeerId, mut stream: Stream, request: &[u8]) -> Result<Vec<u8>, CallError> {
    let lost = |source| CallError::Lost { peer, source };
    let written = async {
        stream.write_all(&len_prefix(request)).await?;
        stream.write_all(request).await?;
        stream.close().await
    };
    // The peer may refuse before it has read everything: its answer says why, and is worth more than the broken pipe.
    let written = written.await;
    let mut status = [0];
    match (stream.read_exact(&mut status).await, written) {
        (Ok(()), _) => {}
        (Err(_), Err(source)) | (Err(source), Ok(())) => return Err(lost(source)),
    }
    match status[0] {
        ANSWER => {}
        BUSY => return Err(CallError::Busy { peer }),
        REQUEST_TOO_LARGE => return Err(CallError::RequestTooLarge { bytes: request.len() }),
        ANSWER_TOO_LARGE => return Err(CallError::AnswerTooLarge { peer }),
        _ => return Err(CallError::Malformed { peer, what: "unknown status" }),
    }
    let len = read_len(&mut stream).await.map_err(lost)?.ok_or(CallError::Malformed { peer, what: "length above the limit" })?;
    let mut answer = Vec::new();
    while answer.len() < len {
        read_step(&mut stream, &mut answer, len).await.map_err(lost)?;
    }
    Ok(answer)
}

fn len_prefix(message: &[u8]) -> [u8; 4] {
    u32::try_from(message.len()).expect("checked against MESSAGE_BYTES_MAX by every caller").to_le_bytes()
}

/// A length within the limit, or `None`.
async fn read_len(stream: &mut Stream) -> io::Result<Option<usize>> {
    let mut len = [0; 4];
    stream.read_exact(&mut len).await?;
    let len = u32::from_le_bytes(len) as usize;
    Ok((len <= MESSAGE_BYTES_MAX).then_some(len))
}

/// Appends the next at most [`READ_STEP`] bytes of a message of `len`.
async fn read_step(stream: &mut Stream, message: &mut Vec<u8>, len: usize) -> io::Result<()> {
    let have = message.len();
    message.resize(len.min(have + READ_STEP), 0);
    stream.read_exact(&mut message[have..]).await
}

/// What one peer may have running here.
#[derive(Clone)]
struct Budget {
    calls: Arc<Semaphore>,
    kib: Arc<Semaphore>,
}

/// Takes the inbound streams of one protocol and answers them, each in a task of its own.
pub(crate) struct Server {
    proto: Proto,
    handler: Arc<dyn Handler>,
    budgets: Mutex<BTreeMap<PeerId, Budget>>,
}

impl Server {
    pub(crate) fn new(proto: Proto, handler: Arc<dyn Handler>) -> Self {
        Self { proto, handler, budgets: Mutex::new(BTreeMap::new()) }
    }

    /// Until `stop`: then the handler is let go, although the queue's other end may live on.
    pub(crate) async fn run(self: Arc<Self>, mut inbound: mpsc::Receiver<Inbound>, stop: CancellationToken) {
        while let Some(Some((peer, stream))) = stop.run_until_cancelled(inbound.recv()).await {
            let server = self.clone();
            let budget = self.budget(peer);
            let permit = budget.calls.clone().try_acquire_owned().ok();
            tokio::spawn(async move {
                let served = tokio::time::timeout(CALL_DEADLINE_MAX, server.serve(peer, stream, permit, &budget.kib)).await;
                if let Ok(Err(error)) = served {
                    tracing::debug!(%peer, %error, "a peer's call broke off");
                }
            });
        }
    }

    /// The peer's budget; budgets that nobody uses are forgotten, so the map holds no more peers than have calls running.
    fn budget(&self, peer: PeerId) -> Budget {
        let mut budgets = self.budgets.lock().unwrap_or_else(PoisonError::into_inner);
        budgets.retain(|other, budget| *other == peer || budget.calls.available_permits() != CALLS_PER_PEER_MAX);
        let fresh = || Budget {
            calls: Arc::new(Semaphore::new(CALLS_PER_PEER_MAX)),
            kib: Arc::new(Semaphore::new(REQUEST_KIB_PER_PEER_MAX)),
        };
        budgets.entry(peer).or_insert_with(fresh).clone()
    }

    async fn serve(
        &self,
        peer: PeerId,
        mut stream: Stream,
        permit: Option<OwnedSemaphorePermit>,
        kib: &Arc<Semaphore>,
    ) -> io::Result<()> {
        let Some(_permit) = permit else { return refuse(stream, BUSY).await };
        let Some(len) = read_len(&mut stream).await? else { return refuse(stream, REQUEST_TOO_LARGE).await };
        let mut request = Vec::new();
        let mut held = Vec::new();
        while request.len() < len {
            let step_kib = (len - request.len()).min(READ_STEP).div_ceil(1024);
            let step_kib = u32::try_from(step_kib).expect("READ_STEP is small");
            let Ok(permit) = kib.clone().try_acquire_many_owned(step_kib) else { return refuse(stream, BUSY).await };
            held.push(permit);
            read_step(&mut stream, &mut request, len).await?;
        }
        let answer = self.handler.handle(peer, self.proto, request).await;
        if answer.len() > MESSAGE_BYTES_MAX {
            tracing::error!(%peer, bytes = answer.len(), "an answer is above the limit and was not sent");
            return refuse(stream, ANSWER_TOO_LARGE).await;
        }
        stream.write_all(&[ANSWER]).await?;
        stream.write_all(&len_prefix(&answer)).await?;
        stream.write_all(&answer).await?;
        stream.close().await
    }
}

async fn refuse(mut stream: Stream, status: u8) -> io::Result<()> {
    stream.write_all(&[status]).await?;
    stream.close().await
}
