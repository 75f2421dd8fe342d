//! Commands and their answers.

use crate::error::Refusal;
use crate::record::{GoldenRecord, ImageRecord, Lost, SessionParams, Wanted};
use ks_proto::api::{Checkpoint, ForkPoint, Interruption};
use ks_proto::{CheckpointId, RunToken, SessionId, SessionName};
use serde::{Deserialize, Serialize};

/// A change of the fleet's state. Stored in the log, so variants are only ever added.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case")]
pub enum Command {
    /// A new session that begins from `head` (a golden checkpoint, or the fork point).
    CreateSession {
        id: SessionId,
        name: SessionName,
        owner: u64,
        params: SessionParams,
        cadence_s: u64,
        idle_park_s: u64,
        command: Option<Vec<String>>,
        forked_from: Option<ForkPoint>,
        head: CheckpointId,
        now_unix_ms: u64,
    },
    /// A VM is about to be started from `from`: raises the run counter. Answered with [`Response::Token`].
    BeginRun { id: SessionId, from: CheckpointId },
    /// The session moves to another node: raises the epoch. Answered with [`Response::Token`].
    Assign { id: SessionId, owner: u64 },
    /// All tokens so far become stale (a fleet that lost its quorum was recovered).
    RaiseGeneration {},
    /// What the owner wants, and why.
    SetWanted { id: SessionId, wanted: Wanted, reason: String },
    /// The main window's command was started.
    SetCommand { id: SessionId, command: Vec<String> },
    /// Other cadence or idle policy.
    SetPolicy { id: SessionId, cadence_s: u64, idle_park_s: u64 },
    /// A checkpoint that is durable at its holders; `info.number` is given by apply. Answered with
    /// [`Response::Checkpoint`]; committing the same id again gives the same number.
    CommitCheckpoint { id: SessionId, token: RunToken, info: Checkpoint },
    /// Keep for ever, or not; with a note.
    Pin { id: SessionId, number: u64, pinned: bool },
    /// Retention lets go of these; kept ones among them refuse the whole command.
    DropCheckpoints { id: SessionId, numbers: Vec<u64> },
    /// The VM is gone.
    NoteLost { id: SessionId, lost: Lost },
    /// The session answers again.
    NoteBack { id: SessionId, interruption: Interruption },
    /// Remove the session; checkpoints that forks began from stay, under a tombstone.
    RemoveSession { id: SessionId },
    /// Add or replace an image.
    PutImage { image: ImageRecord },
    /// Forget an image and its golden checkpoints, unless a session uses it.
    RemoveImage { name: String },
    /// A golden checkpoint was made; replaces one of the same key.
    PutGolden { golden: GoldenRecord },
    /// Forget the golden checkpoint (it was found corrupt).
    DropGolden { checkpoint: CheckpointId },
}

/// The answer to a command.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "kebab-case")]
pub enum Response {
    /// Done.
    Done,
    /// The run token in force from now on.
    Token { token: RunToken },
    /// The checkpoint's number.
    Checkpoint { number: u64 },
    /// Nothing was changed.
    Refused { refusal: Refusal },
}

impl Response {
    /// The refusal as an error.
    pub fn ok(self) -> Result<Self, Refusal> {
        match self {
            Self::Refused { refusal } => Err(refusal),
            other => Ok(other),
        }
    }
}
