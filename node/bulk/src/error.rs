//! What can go wrong in the bulk plane, in terms of what the caller can do about it.

use ks_blobs::StoreError;
use ks_proto::ids::CheckpointId;
use libp2p_identity::PeerId;
use std::io;
use std::net::SocketAddr;

/// The endpoint did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The address cannot be had.
    #[error("cannot listen for bulk transfers on {addr} (UDP): {source}; is another ksd there? choose another --fleet-address")]
    Bind { addr: SocketAddr, source: io::Error },
    /// No certificate could be made from the node's key.
    #[error("cannot make a certificate from the node's key: {why}")]
    Identity { why: String },
}

/// Bytes from a peer that are not what they should be: it is marked, and others are asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {why}")]
pub struct Wrong {
    /// What was asked for.
    pub what: String,
    /// What is wrong with the answer.
    pub why: String,
}

/// One request to one peer failed.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// It cannot be reached at any of its addresses.
    #[error("{peer} is not reached: {why}")]
    Unreachable { peer: PeerId, why: String },
    /// The connection broke, or nothing came for too long.
    #[error("{peer} was lost: {why}")]
    Lost { peer: PeerId, why: String },
    /// It does not have what was asked for.
    #[error("{peer} does not have {what}")]
    Absent { peer: PeerId, what: String },
    /// It refused.
    #[error("{peer} refused: {why}")]
    Refused { peer: PeerId, why: String },
    /// It sent what does not verify or does not decode.
    #[error("{peer} sent wrong bytes: {wrong}")]
    Wrong { peer: PeerId, wrong: Box<Wrong> },
    /// This node's store refused.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A file of this node.
    #[error("{path}: {source}")]
    File { path: String, source: io::Error },
}

impl CallError {
    /// True if the fault is on this side: asking another peer does not help.
    pub fn is_ours(&self) -> bool {
        matches!(self, Self::Store(_) | Self::File { .. })
    }
}

/// A checkpoint was not fetched. Nothing of it is listed here; what arrived stays for the next attempt unless said otherwise.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// No holder was named.
    #[error("checkpoint {id} cannot be fetched: no holder of it is known; wait until a node that has it is back")]
    NoHolders { id: CheckpointId },
    /// The holders that were named could not give it all.
    #[error(
        "checkpoint {id} cannot be fetched: {missing} of its objects are not to be had ({causes}); try again when a holder is back"
    )]
    Incomplete { id: CheckpointId, missing: usize, causes: String },
    /// This node's disk is full. What had arrived of this checkpoint was removed.
    #[error("checkpoint {id} cannot be kept here: {source}")]
    DiskFull { id: CheckpointId, source: Box<StoreError> },
    /// This node's store refused.
    #[error("checkpoint {id} cannot be kept here: {source}")]
    Store { id: CheckpointId, source: Box<StoreError> },
    /// The endpoint was closed.
    #[error("checkpoint {id} cannot be fetched: this node is shutting down")]
    Closed { id: CheckpointId },
}

impl FetchError {
    /// A stable word for programs.
    pub fn code(&self) -> &'static str {
        match self {
            Self::NoHolders { .. } | Self::Incomplete { .. } => "no-holder",
            Self::DiskFull { .. } => "disk-full",
            Self::Store { source, .. } => source.code(),
            Self::Closed { .. } => "shutting-down",
        }
    }
}
