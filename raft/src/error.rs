//! Why a command was refused. A refused command changes nothing.

use crate::fleet::MemberState;
use ks_proto::{CheckpointId, FleetId, RunToken, SessionId};
use serde::{Deserialize, Serialize};

/// A refusal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "refusal", rename_all = "kebab-case")]
pub enum Refusal {
    /// Another live session has the name.
    #[error("the name {name} is taken")]
    NameTaken { name: String },
    /// The id was used before.
    #[error("the session id {id} exists")]
    IdTaken { id: SessionId },
    /// No such session.
    #[error("there is no session {id}")]
    NoSession { id: SessionId },
    /// No such checkpoint of that session.
    #[error("session {name} has no checkpoint {wanted}")]
    NoCheckpoint { name: String, wanted: String },
    /// FENCED: the command comes from a run that is not the newest one.
    #[error("run {stale} of session {name} is over (the current run is {current})")]
    Fenced { name: String, stale: RunToken, current: RunToken },
    /// A checkpoint that must be kept.
    #[error("checkpoint c{number} of {name} is kept: {why}")]
    Kept { name: String, number: u64, why: String },
    /// No such image.
    #[error("there is no image {name}")]
    NoImage { name: String },
    /// Sessions still use the image.
    #[error("image {name} is used by {by}")]
    ImageUsed { name: String, by: String },
    /// The decision was made under another epoch: read the state again and decide anew.
    #[error("session {name} has epoch {current} by now, not {expected}")]
    StaleEpoch { name: String, expected: u64, current: u64 },
    /// Only the owner may do that.
    #[error("session {name} belongs to node {owner}, not to node {node}")]
    NotOwner { name: String, node: u64, owner: u64 },
    /// No checkpoint of the session can be read without the node that was lost.
    #[error("no node that can be reached has a checkpoint of session {name}")]
    NothingToRestore { name: String },
    /// No such member.
    #[error("there is no member {number}")]
    NoMember { number: u64 },
    /// The member is not in the state that this needs.
    #[error("node {number} is {state:?}, so {what}")]
    MemberNotFit { number: u64, state: MemberState, what: String },
    /// It still owns sessions.
    #[error("node {number} still owns {sessions} sessions")]
    OwnsSessions { number: u64, sessions: usize },
    /// A fleet keeps at least one active member.
    #[error("node {number} is the last active member")]
    LastMember { number: u64 },
    /// Another member has that key.
    #[error("peer {peer_id} is member {number} already")]
    PeerTaken { peer_id: String, number: u64 },
    /// Never made, taken back, or forgotten a day after its end.
    #[error("the join token is not known")]
    NoToken,
    /// Too late.
    #[error("the join token expired {ago_ms} ms ago")]
    TokenExpired { ago_ms: u64 },
    /// One token lets one node in.
    #[error("the join token was used by node {by}")]
    TokenUsed { by: u64 },
    /// No such user.
    #[error("there is no user {name}")]
    NoUser { name: String },
    /// The fleet exists.
    #[error("this is fleet {fleet_id} already")]
    AlreadyFounded { fleet_id: FleetId },
    /// Nobody founded the fleet.
    #[error("the fleet is not founded yet")]
    NotFounded,
    /// No golden checkpoint and no image has that manifest.
    #[error("no golden checkpoint or image has the manifest {manifest}")]
    NoRoot { manifest: CheckpointId },
    /// The only copy.
    #[error("node {node} is the only holder of checkpoint {checkpoint}")]
    LastHolder { node: u64, checkpoint: CheckpointId },
    /// A value that is not allowed.
    #[error("{what} is not allowed: {why}")]
    BadValue { what: String, why: String },
    /// A named limit.
    #[error("there are {limit} {what} already, which is the limit")]
    TooMany { what: String, limit: u64 },
    /// A proposal that its proposer gave up, or of a process that was replaced. It was not applied now.
    #[error("the proposal is over: {why}")]
    ProposalOver { why: String },
}
