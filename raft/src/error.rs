//! Why a command was refused. A refused command changes nothing.

use ks_proto::{RunToken, SessionId};
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
}
