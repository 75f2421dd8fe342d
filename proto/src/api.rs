//! The node's HTTP API as JSON types. Base path `/v1`, bearer token, loopback.
//!
//! ```text
//! GET    /v1/node                                   NodeInfo
//! GET    /v1/doctor                                 DoctorReport (host)
//! GET    /v1/events?follow=1                        Event, NDJSON
//! GET    /v1/images            DELETE /v1/images/NAME
//! POST   /v1/images/build|import                    ImageBuild | ImageImport -> Progress NDJSON
//! GET    /v1/sessions                               [Session]
//! POST   /v1/sessions                               CreateSession -> Progress NDJSON, result Session
//! GET    /v1/sessions/S        DELETE ?force=1      Session
//! GET    /v1/sessions/S/checkpoints | tree | doctor | stats
//! POST   /v1/sessions/S/start                       StartMain
//! POST   /v1/sessions/S/checkpoint                  TakeCheckpoint -> Progress NDJSON, result Checkpoint
//! POST   /v1/sessions/S/restore | fork | park | wake | kill | stop   -> Progress NDJSON
//! POST   /v1/sessions/S/diff                        Diff -> Progress NDJSON, result DiffReport
//! GET    /v1/sessions/S/logs?lines=N                text
//! PUT    /v1/sessions/S/files?path=P                tar body, unpacked in the guest
//! GET    /v1/sessions/S/files?path=P                tar body
//! GET    /v1/sessions/S/exec | attach?wake=0        WebSocket: first a text message ExecStart, then binary
//!                                                   messages of guest::ExecFrame (type, payload) both ways; a
//!                                                   refusal is a text message ApiError before the close
//! ```
//! The fleet's calls are in [`crate::fleet`]. S is a session's name or id. A long call answers 200 with NDJSON [`Progress`] lines; the last is `result` or `error`.

use crate::guest::{Check, Tty};
use crate::ids::{CheckpointId, RunToken, SessionId, SessionName};
use crate::manifest::EngineKind;
use serde::{Deserialize, Serialize};

/// A refusal: what, why, what next. HTTP status follows `code`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{what}: {why}\n  next: {next}")]
pub struct ApiError {
    /// Always `ks.error.v1`.
    pub schema: String,
    /// Stable, kebab-case: `not-found`, `exists`, `usage`, `not-executable`, `not-allowed`, `busy`, `corrupt`, `incompatible`, `disk-full`,
    /// `never-checkpointed`, `running`, `resting` (parked, stopped or failed, and not to be woken), `guest-silent`, `engine-missing`, `timeout`, `internal`; of a fleet: `no-quorum` (nobody
    /// leads: nothing can be decided), `lapsed` (this node's lease has run out), `moving` (the session changes its node; ask
    /// again), `unreachable` (the owner cannot be reached), `fenced` (a newer run exists), `token-refused` (join token unknown,
    /// used or expired).
    pub code: String,
    /// What failed.
    pub what: String,
    /// Why.
    pub why: String,
    /// What to do next.
    pub next: String,
}
impl ApiError {
    /// An error from its parts.
    pub fn new(code: &str, what: impl Into<String>, why: impl Into<String>, next: impl Into<String>) -> Self {
        Self { schema: "ks.error.v1".into(), code: code.into(), what: what.into(), why: why.into(), next: next.into() }
    }
    /// The HTTP status that goes with the code.
    pub fn status(&self) -> u16 {
        match self.code.as_str() {
            "not-found" => 404,
            "usage" | "not-executable" => 400,
            "not-allowed" | "token-refused" => 403,
            "exists" | "busy" | "running" | "resting" | "never-checkpointed" | "fenced" => 409,
            "incompatible" | "corrupt" => 422,
            "disk-full" => 507,
            "timeout" | "guest-silent" => 504,
            "engine-missing" | "no-quorum" | "lapsed" | "moving" => 503,
            "unreachable" => 502,
            _ => 500,
        }
    }
}

/// One line of a long call.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "kebab-case")]
pub enum Progress<T> {
    /// A step: `done` of `total` (0 when unknown).
    Step { what: String, done: u64, total: u64 },
    /// The end: it worked.
    Result { result: T },
    /// The end: it did not.
    Error { error: ApiError },
}

/// Where the node listens and what it is.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct NodeInfo {
    /// `ks.node.v1`.
    pub schema: String,
    /// Program version.
    pub version: String,
    /// Process id of ksd.
    pub pid: u32,
    /// Data folder.
    pub data_dir: String,
    /// The engine that `auto` means here, its profile, and why.
    pub engine: EngineKind,
    /// `hardware`, `soft` or `tcg`.
    pub profile: String,
    /// Why this engine.
    pub engine_why: String,
    /// What one node cannot survive, in words.
    pub warning: String,
}

/// Contents of `api.json` (0600) in the node's data folder, by which clients find it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ApiFile {
    /// `http://127.0.0.1:PORT`.
    pub url: String,
    /// Bearer token.
    pub token: String,
    /// Process id of ksd.
    pub pid: u32,
    /// HTTPS URLs of its fleet's API, its own first; empty without a fleet. `token` is for `url` only.
    #[serde(default)]
    pub fleet: Vec<String>,
    /// Fingerprint of the fleet's certificate authority; "" without a fleet.
    #[serde(default)]
    pub fingerprint: String,
}

/// A session's life as people see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SessionState {
    /// Being made.
    Creating,
    /// Restoring from a checkpoint.
    Starting,
    /// The guest works.
    Running,
    /// The VM died; the session is coming back.
    Recovering,
    /// Checkpointed; memory and CPU given back.
    Parked,
    /// Ended by `ks stop`; its checkpoints remain.
    Stopped,
    /// It could not be brought back; `reason` says why and what next. Its checkpoints remain.
    Failed,
}
impl std::fmt::Display for SessionState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Creating => "creating",
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Recovering => "recovering",
            Self::Parked => "parked",
            Self::Stopped => "stopped",
            Self::Failed => "failed",
        })
    }
}

/// A session.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Session {
    /// `ks.session.v1`.
    pub schema: String,
    /// Id.
    pub id: SessionId,
    /// Name.
    pub name: SessionName,
    /// State.
    pub state: SessionState,
    /// Why it is in this state ("" when there is nothing to say).
    pub reason: String,
    /// Engine and profile of its VM, and why that engine.
    pub engine: EngineKind,
    /// See `engine`.
    pub profile: String,
    /// See `engine`.
    pub engine_why: String,
    /// Image name.
    pub image: String,
    /// Memory, MiB.
    pub memory_mib: u64,
    /// Virtual CPUs.
    pub vcpus: u16,
    /// Current run.
    pub token: RunToken,
    /// Created, Unix milliseconds.
    pub created_unix_ms: u64,
    /// Parent session and checkpoint, for forks.
    pub forked_from: Option<ForkPoint>,
    /// Latest durable checkpoint.
    pub last_checkpoint: Option<Checkpoint>,
    /// Number of checkpoints kept.
    pub checkpoints: u64,
    /// Seconds between cadence checkpoints; 0 is never.
    pub cadence_s: u64,
    /// Seconds without a viewer, exec or guest activity after which it is parked; 0 is never.
    pub idle_park_s: u64,
    /// Command in the main window.
    pub command: Vec<String>,
    /// Last interruption, if there was one.
    pub last_interruption: Option<Interruption>,
    /// VMM process id on its node, when there is one.
    pub vmm_pid: Option<u32>,
    /// Name of the node that owns it; "" on a node without a fleet.
    #[serde(default)]
    pub node: String,
    /// Copies of its checkpoints that make them durable (the fleet's policy, or its own); 0 when not told.
    #[serde(default)]
    pub copies: u16,
    /// Names of the nodes of its replica set, owner first.
    #[serde(default)]
    pub replicas: Vec<String>,
    /// Its node's lease has run out: the guest stands still until the lease is granted again or a peer takes over.
    #[serde(default)]
    pub paused: bool,
}

/// Where a session parted from its parent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForkPoint {
    /// Parent session.
    pub session: SessionId,
    /// Its name at that time.
    pub name: String,
    /// Checkpoint number in the parent.
    pub number: u64,
    /// Checkpoint id.
    pub checkpoint: CheckpointId,
}

/// From losing the VM to answering again.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Interruption {
    /// When the VM was lost, Unix milliseconds.
    pub at_unix_ms: u64,
    /// Why.
    pub cause: String,
    /// Milliseconds until the guest was running and its restore hook had answered.
    pub ready_ms: u64,
    /// The checkpoint it came back from.
    pub checkpoint: u64,
    /// Milliseconds of guest work since that checkpoint, lost.
    pub lost_ms: u64,
    /// What the time went into.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parts: Option<InterruptionParts>,
}

/// An interruption in parts, milliseconds; lease, restore and hook come one after the other. None is not known, or was not: a VM
/// that died alone had no lease to wait for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct InterruptionParts {
    /// From the last grant of the old owner's lease until the leader called it lapsed. A leader that took office meanwhile counts
    /// from when it last heard of that node.
    pub lease_ms: Option<u64>,
    /// What of the lease was the wait of a new leader, from its taking office; None when the leader did not change.
    pub election_ms: Option<u64>,
    /// From the new owner's learning of it until its VM was restored, fetched data included.
    pub restore_ms: Option<u64>,
    /// From the guest's first word to the end of its restore hook.
    pub hook_ms: Option<u64>,
}

/// A checkpoint as listed.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Checkpoint {
    /// `c1`, `c2`… within its session.
    pub number: u64,
    /// Id.
    pub id: CheckpointId,
    /// Parent checkpoint's id.
    pub parent: Option<CheckpointId>,
    /// Taken, Unix milliseconds.
    pub created_unix_ms: u64,
    /// The person's note.
    pub message: String,
    /// Why it was taken: `start`, `cadence`, `demand`, `park`, `fork-point`, `stop`, `guest`.
    pub reason: String,
    /// Kept by retention for ever.
    pub pinned: bool,
    /// `local` (one node has it, fsynced), `replicating` (some more do) or `durable` (the policy's number of nodes do; on a
    /// lone node one is enough).
    pub durability: String,
    /// Memory in use plus disk in use, bytes.
    pub logical_bytes: u64,
    /// New bytes that it stored.
    pub stored_bytes: u64,
    /// vCPUs stopped, microseconds.
    pub pause_us: u64,
    /// Request to durable, microseconds.
    pub total_us: u64,
    /// Names of the nodes that have all of it, fsynced.
    #[serde(default)]
    pub holders: Vec<String>,
    /// Newer than the point that a peer went on from: kept beside, never chosen by itself.
    #[serde(default)]
    pub branch: bool,
}

/// Make a session.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct CreateSession {
    /// Wanted name; None lets the node choose.
    pub name: Option<SessionName>,
    /// Image name; None is `default`.
    pub image: Option<String>,
    /// MiB; None is 2048.
    pub memory_mib: Option<u64>,
    /// None is 1.
    pub vcpus: Option<u16>,
    /// `auto`, `kvm` or `qemu`.
    pub engine: Option<String>,
    /// Seconds; None is 60.
    pub cadence_s: Option<u64>,
    /// Seconds; None is 0 (never).
    pub idle_park_s: Option<u64>,
    /// Copies that make its checkpoints durable, 1-7; None is the fleet's policy.
    pub copies: Option<u16>,
    /// Node (name, number or `#number`) to begin on; None is the node that is asked, or the best other one when that one drains,
    /// has no engine for it or has no room.
    pub node: Option<String>,
    /// Start the main window at once with `main`; leave None to upload files first and call `start`.
    pub main: Option<StartMain>,
}

/// Start the main tmux window.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct StartMain {
    /// Program and arguments; empty is a login shell.
    pub command: Vec<String>,
    /// Environment.
    pub env: Vec<(String, String)>,
    /// Folder in the guest; "" is /workspace.
    pub cwd: String,
    /// Terminal size; 0 is 80x24.
    pub cols: u16,
    /// See `cols`.
    pub rows: u16,
}

/// Take a checkpoint.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct TakeCheckpoint {
    /// Note.
    pub message: String,
    /// Keep for ever.
    pub pin: bool,
}

/// Go back to a checkpoint in place.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Restore {
    /// `c7`, a full id, or a unique beginning of one (8 digits or more).
    pub checkpoint: String,
    /// Verify everything before the first instruction.
    #[serde(default)]
    pub verify_eager: bool,
}

/// Fork a checkpoint.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Fork {
    /// Checkpoint; None takes one now.
    pub checkpoint: Option<String>,
    /// Children, 1-64.
    pub n: u32,
    /// Files put into each child before it goes on: (path in the guest, contents as base64).
    pub steer: Vec<(String, String)>,
    /// Names wanted; else NAME.1, NAME.2…
    pub names: Vec<SessionName>,
    /// Serve the children what their parent bought after the checkpoint, call for call; else their later calls are live.
    pub replay_parent: bool,
}

/// Crash a session's VM on purpose.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Kill {
    /// Kill ksd as well (its supervisor starts it again).
    pub with_daemon: bool,
}

/// Compare two checkpoints of one tree.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Diff {
    /// Older.
    pub from: String,
    /// Newer.
    pub to: String,
    /// Only below this folder; "" is /.
    #[serde(default)]
    pub path: String,
}

/// A changed file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiffEntry {
    /// Path.
    pub path: String,
    /// `added`, `removed` or `changed`.
    pub change: String,
    /// Size before and after, bytes.
    pub bytes_from: u64,
    /// See `bytes_from`.
    pub bytes_to: u64,
}

/// Result of a diff.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DiffReport {
    /// `ks.diff.v1`.
    pub schema: String,
    /// Changed files by path.
    pub files: Vec<DiffEntry>,
}

/// A node of the tree of sessions and checkpoints.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TreeSession {
    /// The session (removed ones that still have descendants have state `stopped`).
    pub session: Session,
    /// Its checkpoints, oldest first.
    pub checkpoints: Vec<Checkpoint>,
}

/// Result of `tree`: the whole family, parents first.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Tree {
    /// `ks.tree.v1`.
    pub schema: String,
    /// Sessions of the family.
    pub sessions: Vec<TreeSession>,
}

/// Checks of the host or of a session.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DoctorReport {
    /// `ks.doctor.v1`.
    pub schema: String,
    /// All ok?
    pub ok: bool,
    /// The checks.
    pub checks: Vec<Check>,
}

/// First message on an exec or attach WebSocket. Attach needs `tty` and ignores the rest.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ExecStart {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Environment.
    pub env: Vec<(String, String)>,
    /// Folder; None is /workspace.
    pub cwd: Option<String>,
    /// User; None is `agent`.
    pub user: Option<String>,
    /// Terminal, if wanted.
    pub tty: Option<Tty>,
}

/// Build the default image.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ImageBuild {
    /// Image name; "" is that of the profile's default image: `default` or `soft`.
    pub name: String,
    /// A kernel file instead of the distribution's.
    pub kernel: Option<String>,
    /// `general` or `soft` (software KVM); "" is `general`.
    pub profile: String,
}

/// Import an image.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ImageImport {
    /// Image name.
    pub name: String,
    /// OCI archive on the node's disk.
    pub oci: Option<String>,
    /// Root directory on the node's disk.
    pub root_dir: Option<String>,
    /// Kernel file (vmlinux or bzImage).
    pub kernel: Option<String>,
    /// `general` or `soft` (software KVM); "" is `general`.
    pub profile: String,
}

/// An image as listed.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Image {
    /// `ks.image.v1`.
    pub schema: String,
    /// Name.
    pub name: String,
    /// Content id, hex.
    pub id: String,
    /// Kernel release or file name.
    pub kernel: String,
    /// `general` or `soft`: which engines it is for.
    #[serde(default)]
    pub profile: String,
    /// Root disk size and bytes in use.
    pub disk_bytes: u64,
    /// See `disk_bytes`.
    pub disk_used_bytes: u64,
    /// Golden checkpoints made of it.
    pub golden: u64,
}

/// Something that happened.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Event {
    /// Position, rising.
    pub seq: u64,
    /// Unix milliseconds.
    pub unix_ms: u64,
    /// Session name ("" for the node).
    pub session: String,
    /// Kebab-case kind.
    pub kind: String,
    /// In words.
    pub text: String,
}
