//! The seam to the nodes that hold copies of a session's journal. A session of a lone node has none, and waits for none.
//!
//! A replica appends lines in order and refuses those of an epoch below one that it sealed; what it has taken is durable there.

use ks_proto::SessionId;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

/// Why a replica did not take it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReplicaError {
    /// It does not answer, or its disk is full: try again, or another.
    #[error("the replica set does not answer: {0}")]
    Away(String),
    /// The session has a newer owner: nothing more of this one counts.
    #[error("the session's journal was taken over by epoch {0}")]
    Sealed(u64),
}

/// What a call to a replica gives.
pub type Reply<'a, T> = Pin<Box<dyn Future<Output = Result<T, ReplicaError>> + Send + 'a>>;

/// Part of a call's bodies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The request as it came.
    Request,
    /// Status and headers of the answer.
    Head,
    /// The answer.
    Answer,
}

/// The replica set of one session, as the owner sees it: the fleet's majority rule is behind it.
pub trait Replica: Send + Sync {
    /// Makes lines durable there, the first of which is line `from` of the ledger, counted from 0. Told twice, it is taken once.
    fn append(&self, session: SessionId, epoch: u64, from: u64, lines: Arc<Vec<Vec<u8>>>) -> Reply<'_, ()>;
    /// Makes bytes of a body durable there.
    fn body(&self, session: SessionId, epoch: u64, seq: u64, part: Part, offset: u64, bytes: bytes::Bytes) -> Reply<'_, ()>;
    /// Ends all epochs below `epoch` and gives the number of lines that stand.
    fn seal(&self, session: SessionId, epoch: u64) -> Reply<'_, u64>;
}
