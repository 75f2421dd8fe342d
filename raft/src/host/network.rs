//! openraft's way out: its requests as frames over the [`Wire`].

use super::frame::{self, Answer, Ask, No, Piece, Process, Question, Tell};
use super::machine::{Machine, hash};
use super::peers::{Peers, Suspect};
use super::types::{Snapshot, SnapshotBytes, Types, Vote};
use super::wire::{Wire, WireError};
use openraft::errors::{NetworkError, RPCError, ReplicationClosed, StreamingError, Unreachable};
use openraft::network::RPCOption;
use openraft::network::v2::RaftNetworkV2;
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, TransferLeaderRequest, TransferLeaderResponse, VoteRequest,
    VoteResponse,
};
use openraft::{AnyError, AsyncRuntime, EmptyNode, OptionalSend, RaftNetworkFactory};
use std::collections::BTreeMap;
use std::future::Future;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Bytes of a snapshot in one message.
const PIECE_BYTES: usize = 2 << 20;
/// Longest wait for the answer to entries: a follower may be syncing a large batch, while openraft's own limit is meant
/// for heartbeats.
const APPEND_WAIT: Duration = Duration::from_millis(1000);
/// Longest wait for the answer to one piece of a snapshot but the last.
const PIECE_WAIT: Duration = Duration::from_secs(10);

/// Why there is no answer.
#[derive(Debug, Clone, thiserror::Error)]
pub(super) enum CallError {
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error("node {to} refused: {no}")]
    Refused { to: u64, no: No },
    #[error("node {to} and this one do not understand each other: {why}")]
    Garbled { to: u64, why: String },
}

/// Sends questions in this node's name.
pub(super) struct Courier {
    pub wire: Arc<dyn Wire>,
    pub process: Process,
    pub peers: Mutex<Peers>,
    /// Knows of the starts of other nodes.
    pub machine: Machine,
    /// 0 until this node belongs to a fleet.
    pub lineage: AtomicU64,
}

impl Courier {
    pub async fn ask<R: AsyncRuntime>(&self, to: u64, ask: Ask<R>, body: &[u8], wait: Duration) -> Result<Tell<R>, CallError> {
        let garbled = |e: frame::FrameError| CallError::Garbled { to, why: e.to_string() };
        let lineage = self.lineage.load(Ordering::Acquire);
        let question = Question { lineage, to, process: self.process, ask };
        let request = frame::encode(&question, body).map_err(garbled)?;
        drop(question);
        let answer = self.wire.call(to, request, wait).await?;
        let Answer { process, tell } = frame::decode::<Answer<R>>(&answer).map_err(garbled)?.0;
        // What such a node says of its log must not reach openraft, which would stop over it.
        self.admit(to, process).map_err(|no| CallError::Refused { to, no })?;
        match tell {
            Tell::Refused(no) => Err(CallError::Refused { to, no }),
            tell => Ok(tell),
        }
    }

    /// Refuses a process that must not speak for node `number` any more.
    pub fn admit(&self, number: u64, process: Process) -> Result<(), No> {
        let floor = self.machine.state().boot_of(number);
        let admitted = self.peers.lock().unwrap_or_else(PoisonError::into_inner).admit(number, process, floor);
        if let Err(no) = &admitted {
            tracing::debug!("a message of node {number} is not believed: {no}");
        }
        admitted
    }

    pub fn suspects(&self) -> BTreeMap<u64, Suspect> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner).suspects()
    }
}

/// Makes links for openraft.
pub(super) struct Links(pub Arc<Courier>);

/// The way to one peer.
pub(super) struct Link<R> {
    courier: Arc<Courier>,
    to: u64,
    runtime: PhantomData<fn() -> R>,
}

impl<R: AsyncRuntime> RaftNetworkFactory<Types<R>> for Links {
    type Network = Link<R>;

    async fn new_client(&mut self, to: u64, _: &EmptyNode) -> Link<R> {
        Link { courier: self.0.clone(), to, runtime: PhantomData }
    }
}

fn failed<R: AsyncRuntime>(e: CallError) -> RPCError<Types<R>> {
    match &e {
        // Waits before the next try; the others are tried again at once.
        CallError::Wire(_) | CallError::Refused { .. } => RPCError::Unreachable(Unreachable::new(&AnyError::new(&e))),
        CallError::Garbled { .. } => RPCError::Network(NetworkError::new(&AnyError::new(&e))),
    }
}

impl<R: AsyncRuntime> Link<R> {
    async fn ask(&self, ask: Ask<R>, wait: Duration) -> Result<Tell<R>, RPCError<Types<R>>> {
        self.courier.ask(self.to, ask, &[], wait).await.map_err(failed)
    }

    fn odd<T>(&self) -> Result<T, RPCError<Types<R>>> {
        Err(failed(CallError::Garbled { to: self.to, why: "the answer is to another question".into() }))
    }

    async fn send(&self, vote: Vote, snapshot: Snapshot, last_wait: Duration) -> Result<Tell<R>, CallError> {
        let body = snapshot.snapshot;
        let total = body.len() as u64;
        let blake3 = hash(&body);
        let mut offset = 0;
        loop {
            let end = body.len().min(offset + PIECE_BYTES);
            let wait = if end == body.len() { last_wait } else { PIECE_WAIT };
            let (meta, blake3) = (snapshot.meta.clone(), blake3.clone());
            let piece = Piece { vote, meta, blake3, offset: offset as u64, total };
            match self.courier.ask(self.to, Ask::Snapshot(piece), &body[offset..end], wait).await? {
                Tell::Next(next) if next == end as u64 && end < body.len() => offset = end,
                other => return Ok(other),
            }
        }
    }
}

impl<R: AsyncRuntime> RaftNetworkV2<Types<R>> for Link<R> {
    type SnapshotData = SnapshotBytes;

    async fn append_entries(
        &mut self,
        request: AppendEntriesRequest<Types<R>>,
        option: RPCOption,
    ) -> Result<AppendEntriesResponse<Types<R>>, RPCError<Types<R>>> {
        let wait = if request.entries.is_empty() { option.soft_ttl() } else { APPEND_WAIT.max(option.soft_ttl()) };
        match self.ask(Ask::Append(request), wait).await? {
            Tell::Append(answer) => Ok(answer),
            _ => self.odd(),
        }
    }

    async fn vote(
        &mut self,
        request: VoteRequest<Types<R>>,
        option: RPCOption,
    ) -> Result<VoteResponse<Types<R>>, RPCError<Types<R>>> {
        match self.ask(Ask::Vote(request), option.soft_ttl()).await? {
            Tell::Vote(answer) => Ok(answer),
            _ => self.odd(),
        }
    }

    async fn pre_vote(
        &mut self,
        request: VoteRequest<Types<R>>,
        option: RPCOption,
    ) -> Result<VoteResponse<Types<R>>, RPCError<Types<R>>> {
        match self.ask(Ask::PreVote(request), option.soft_ttl()).await? {
            Tell::Vote(answer) => Ok(answer),
            _ => self.odd(),
        }
    }

    async fn full_snapshot(
        &mut self,
        vote: Vote,
        snapshot: Snapshot,
        cancel: impl Future<Output = ReplicationClosed> + OptionalSend + 'static,
        option: RPCOption,
    ) -> Result<SnapshotResponse<Types<R>>, StreamingError<Types<R>>> {
        let sent = tokio::select! {
            closed = cancel => return Err(StreamingError::Closed(closed)),
            sent = self.send(vote, snapshot, option.soft_ttl()) => sent,
        };
        let network = |e: &CallError| StreamingError::Network(NetworkError::new(&AnyError::new(e)));
        match sent {
            Ok(Tell::Snapshot(answer)) => Ok(answer),
            Ok(_) => Err(network(&CallError::Garbled { to: self.to, why: "the pieces do not fit together".into() })),
            Err(e @ (CallError::Wire(_) | CallError::Refused { .. })) => {
                Err(StreamingError::Unreachable(Unreachable::new(&AnyError::new(&e))))
            }
            Err(e) => Err(network(&e)),
        }
    }

    async fn transfer_leader(
        &mut self,
        request: TransferLeaderRequest<Types<R>>,
        option: RPCOption,
    ) -> Result<TransferLeaderResponse<Types<R>>, RPCError<Types<R>>> {
        match self.ask(Ask::Transfer(request), option.soft_ttl()).await? {
            Tell::Transfer(answer) => Ok(answer),
            _ => self.odd(),
        }
    }
}
