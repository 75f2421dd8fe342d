//! The seam between consensus and the network.

use futures::future::BoxFuture;
use std::time::Duration;

/// The largest request or answer that is ever handed to a [`Wire`].
pub const MESSAGE_BYTES_MAX: usize = 16 << 20;

/// Why a peer did not answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// No connection, or no such member: the request was not delivered.
    #[error("node {to} cannot be reached: {why}")]
    Unreachable { to: u64, why: String },
    /// No answer in time: the request may have been carried out.
    #[error("node {to} did not answer within {ms} ms")]
    Timeout { to: u64, ms: u64 },
}

/// Carries requests to other members.
pub trait Wire: Send + Sync + 'static {
    /// Sends `request` to the member with that number and gives back its answer. Finds the peer by its number itself. Done
    /// or failed by the deadline.
    fn call(&self, to: u64, request: Vec<u8>, deadline: Duration) -> BoxFuture<'static, Result<Vec<u8>, WireError>>;
}
