//! Commands and their answers.

use crate::error::Refusal;
use crate::fleet::{FleetPolicy, Member, MemberState, Role};
use crate::record::{GoldenRecord, ImageRecord, Lapse, Lost, SessionParams, Wanted};
use ks_proto::api::{Checkpoint, ForkPoint, Interruption};
use ks_proto::{CheckpointId, FleetId, RunToken, SessionId, SessionName};
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;

/// One session goes to another node. Apply chooses the checkpoint, so that one committed meanwhile is not skipped.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Assignment {
    /// Session.
    pub id: SessionId,
    /// The new owner.
    #[serde(alias = "owner")]
    pub to: u64,
    /// The epoch that the decision was made under; another one refuses it. None takes any (entries of earlier versions).
    #[serde(default)]
    pub expected_epoch: Option<u64>,
    /// The old owner's lease ran out: what only it has cannot be read, and the session counts as lost until it is back.
    #[serde(default)]
    pub from_lapsed: bool,
    /// Now, Unix milliseconds.
    #[serde(default)]
    pub now_unix_ms: u64,
    /// Why, in words.
    #[serde(default)]
    pub cause: String,
}

/// What changed about a member; None leaves it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MemberChange {
    /// Name for people.
    pub name: Option<String>,
    /// Addresses of its control plane.
    pub control: Option<Vec<String>>,
    /// Addresses of its bulk plane.
    pub bulk: Option<Vec<SocketAddr>>,
    /// URLs of its HTTPS API.
    pub api: Option<Vec<String>>,
    /// CPU profiles.
    pub profiles: Option<Vec<String>>,
    /// Failure domain.
    pub domain: Option<String>,
    /// Random number of its present process.
    pub incarnation: Option<u64>,
}

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
    /// A VM is about to be started from `from`: raises the run counter. Answered with [`Response::Token`]. Refused when
    /// the session has another epoch or another owner by now; None takes any (entries of a lone node).
    BeginRun {
        id: SessionId,
        from: CheckpointId,
        #[serde(default)]
        expected_epoch: Option<u64>,
        #[serde(default)]
        node: Option<u64>,
    },
    /// The session moves to another node: raises the epoch. Answered with [`Response::Token`].
    Assign(Assignment),
    /// Up to [`crate::limits::MOVES_MAX`] sessions move in one entry. Answered with [`Response::Many`], in order; one that
    /// is refused does not hinder the others.
    AssignMany { moves: Vec<Assignment> },
    /// As `AssignMany`, for the sessions of one node whose lease ended: how it ended is kept with them.
    AssignLapsed { moves: Vec<Assignment>, lapse: Lapse },
    /// All tokens so far become stale (a fleet that lost its quorum was recovered).
    RaiseGeneration {},
    /// What the owner wants, and why.
    SetWanted { id: SessionId, wanted: Wanted, reason: String },
    /// The main window's command was started.
    SetCommand { id: SessionId, command: Vec<String> },
    /// Other cadence or idle policy.
    SetPolicy { id: SessionId, cadence_s: u64, idle_park_s: u64 },
    /// What the session may reach outside, and what its model calls may cost; None leaves it. A budget is dollars as text, "" is no
    /// limit. They are here so that they go where the session goes.
    SetOutside {
        id: SessionId,
        #[serde(default)]
        allow: Option<Vec<String>>,
        #[serde(default)]
        budget: Option<String>,
    },
    /// A checkpoint that is durable at its holders (none named: its owner); `info.number` is given by apply. Answered with
    /// [`Response::Checkpoint`]; committing the same id again gives the same number.
    CommitCheckpoint {
        id: SessionId,
        token: RunToken,
        info: Checkpoint,
        #[serde(default)]
        holders: Vec<u64>,
    },
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

    /// The first command of a fleet: `member` becomes number 1, and what a lone node had is its own. The same again
    /// changes nothing.
    Found {
        fleet_id: FleetId,
        member: Member,
        /// Certificate of the fleet's CA, DER in hex.
        #[serde(default)]
        ca_cert_hex: String,
        now_unix_ms: u64,
    },
    /// Lets a node in, if the token is there, not expired and unused. Answered with [`Response::Member`]; the same peer
    /// with the same token again gets the same answer.
    AddMember { token_hash: String, member: Member, now_unix_ms: u64 },
    /// Other addresses, a new process and the like.
    UpdateMember {
        number: u64,
        #[serde(default)]
        change: MemberChange,
    },
    /// Begin or end draining.
    SetMemberState { number: u64, state: MemberState },
    /// The member leaves: only one that drains and owns no session, unless `forced` (it is dead; its sessions stay and
    /// are reassigned). Its copies count no more.
    RemoveMember { number: u64, forced: bool },
    /// A join token (its BLAKE3 in hex).
    AddToken { token_hash: String, made_by: String, expires_unix_ms: u64, now_unix_ms: u64 },
    /// Takes a join token back.
    DropToken { token_hash: String },
    /// Adds or replaces a user.
    PutUser { name: String, role: Role, token_hashes: Vec<String>, now_unix_ms: u64 },
    /// Removes a user.
    DropUser { name: String },
    /// Copies, voters, lease.
    SetFleetPolicy { policy: FleetPolicy },
    /// `node` has the whole closure of the checkpoint, fsynced and pinned. `token` is that of the run that took it, or the
    /// session's present one.
    AddHolder { session: SessionId, checkpoint: CheckpointId, token: RunToken, node: u64 },
    /// `node` has it no more (found corrupt, or given up); the last holder is not dropped.
    DropHolder { session: SessionId, checkpoint: CheckpointId, node: u64 },
    /// `node` has a golden checkpoint, or the disk and files of an image (`manifest` is its disk).
    AddRootHolder { manifest: CheckpointId, node: u64 },
    /// `node` has that no more.
    DropRootHolder { manifest: CheckpointId, node: u64 },
    /// The replica set, the owner first.
    SetReplicas { session: SessionId, expected_epoch: u64, replicas: Vec<u64> },
    /// Copies of a session's checkpoints; 0 is the fleet's policy.
    SetCopies { session: SessionId, copies: u16 },
}

/// The answer to a command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "kebab-case")]
pub enum Response {
    /// Done.
    Done,
    /// The run token in force from now on.
    Token { token: RunToken },
    /// The checkpoint's number.
    Checkpoint { number: u64 },
    /// The member's number.
    Member { number: u64 },
    /// One answer for each part of a command, in order.
    Many { answers: Vec<Response> },
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
