//! What the session machine hears and what it wants done: two closed sets.

use ks_proto::api::{ApiError, SessionState};
use ks_proto::{CheckpointId, RunToken};
use ks_raft::Wanted;

/// Names a waiting caller.
pub type AskId = u64;

/// The two clocks: timers run on the first, records carry the second.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Now {
    /// Monotonic milliseconds.
    pub mono_ms: u64,
    /// Unix milliseconds.
    pub unix_ms: u64,
}

/// Whose checkpoint a start begins from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadKind {
    /// The image's golden checkpoint: nothing of this session is in it.
    Golden,
    /// The parent's checkpoint where this session was forked.
    ForkPoint,
    /// One of its own: the same session goes on.
    Own,
}

/// Where the next start begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// Checkpoint.
    pub id: CheckpointId,
    /// Whose it is.
    pub kind: HeadKind,
}

/// One checkpoint to take, with everybody who waits for it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Job {
    /// `start`, `cadence`, `call` (a model call was bought), `demand`, `park`, `fork-point`, `stop`, `guest`.
    pub reason: String,
    /// Note.
    pub message: String,
    /// Keep for ever.
    pub pin: bool,
    /// Freeze the user's processes first, so that children of this point draw no equal randomness.
    pub freeze: bool,
    /// Its instant is the guest's last: it stays stopped while the checkpoint is stored, because what follows ends it. What it did
    /// and answered meanwhile would be lost. It goes on if the checkpoint fails.
    pub hold: bool,
    /// Who waits.
    pub asks: Vec<AskId>,
}

impl Job {
    /// A job nobody waits for.
    pub fn quiet(reason: &str) -> Self {
        Self { reason: reason.into(), ..Self::default() }
    }
    /// A job nobody waits for, that is the run's last.
    pub fn last(reason: &str) -> Self {
        Self { reason: reason.into(), hold: true, ..Self::default() }
    }
    /// One checkpoint serves both: notes are joined, the stricter wish wins.
    pub(super) fn merge(&mut self, o: Job) {
        if ["cadence", "call"].contains(&self.reason.as_str()) || o.reason == "fork-point" {
            self.reason = o.reason;
        }
        if !o.message.is_empty() {
            self.message = if self.message.is_empty() { o.message } else { format!("{}; {}", self.message, o.message) };
        }
        self.pin |= o.pin;
        self.freeze |= o.freeze;
        self.hold |= o.hold;
        self.asks.extend(o.asks);
    }
}

/// What a caller may ask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// Answer when the session runs (it may be starting already).
    AwaitRunning,
    /// Take a checkpoint.
    Checkpoint { reason: String, message: String, pin: bool, freeze: bool },
    /// Go back to a checkpoint, after taking one of the present.
    Restore { to: Head, verify_eager: bool },
    /// Checkpoint, then give memory and CPU back.
    Park,
    /// Bring back.
    Wake,
    /// Checkpoint, then end.
    Stop,
    /// Checkpoint, then end, because another node takes over: whoever comes meanwhile waits for that.
    Leave,
    /// The other node does not take over after all: go on here.
    Stay,
    /// Crash the VM; answered when the session is back.
    Kill,
    /// End without a checkpoint and forget.
    Remove,
}

/// A stored checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Checkpointed {
    /// Number.
    pub number: u64,
    /// Id.
    pub id: CheckpointId,
}

/// The answer to a caller whose request worked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// Done.
    Done,
    /// The checkpoint that was taken.
    Checkpoint(Checkpointed),
}

/// What the machine hears.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// The node begins to look after this session and wants it to run.
    Begin,
    /// The node came back and found the VM of the current run alive.
    Adopted,
    /// A caller asks.
    Ask(AskId, Request),
    /// Every process of earlier runs is dead.
    ProcessGone,
    /// The run's newest recorded checkpoint, told after its processes are dead and before ProcessGone: its VM may have died between
    /// the record and its own answer.
    Committed { token: RunToken, checkpoint: Checkpointed },
    /// A process of an earlier run could not be ended.
    ProcessStays { why: String },
    /// The run counter was raised durably.
    RunBegan { token: RunToken },
    /// It could not be.
    RunRefused { error: ApiError },
    /// The VM of this run answers and its restore hook is done.
    Ready { token: RunToken },
    /// It does not.
    StartFailed { token: RunToken, error: ApiError, retry: bool },
    /// The answer to FindOlder: the names of the session and of the checkpoint that failed, and the older one, with its
    /// name, if there is one.
    Older { session: String, failed: String, older: Option<(Head, String)> },
    /// The running VM is gone.
    Lost { token: RunToken, cause: String },
    /// The checkpoint is durable and recorded.
    Stored { token: RunToken, checkpoint: Checkpointed },
    /// It is not; the session runs on.
    NotStored { token: RunToken, error: ApiError },
    /// The session belongs to the node `to` now, or to another assignment of this one: this machine ends.
    Disowned { to: String },
    /// A model call of the session was bought, and its answer is whole.
    Bought,
    /// Somebody watches or works: not idle.
    Activity,
    /// Other policy.
    Policy { cadence_ms: u64, idle_park_ms: u64 },
    /// Time passed (see [`super::Machine::deadline`]).
    Tick,
}

/// What the machine wants done, in this order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// End every process of this session and see it dead; answered with ProcessGone or ProcessStays.
    EndProcess,
    /// SIGKILL to the VM's process group at once (a crash on purpose); nothing is answered.
    KillProcess,
    /// Raise the run counter durably; answered with RunBegan or RunRefused.
    BeginRun { from: CheckpointId },
    /// Let the guest go on, that a checkpoint with `hold` left stopped.
    GoOn,
    /// Start the VM of `token`; answered with Ready or StartFailed.
    Launch { token: RunToken, from: Head, verify_eager: bool },
    /// Name the checkpoint `than`, and find the own one before it that is not among `skipped`; answered with Older.
    FindOlder { than: CheckpointId, skipped: Vec<CheckpointId> },
    /// Take a checkpoint; answered with Stored or NotStored.
    TakeCheckpoint { token: RunToken, job: Job },
    /// Record durably what is wanted and why.
    SetWanted { wanted: Wanted, reason: String },
    /// Record durably that the VM was lost now.
    NoteLost { cause: String },
    /// Record the interruption that ends now, if a loss is recorded.
    NoteBack { from: CheckpointId },
    /// Tell.
    Event { kind: &'static str, text: String },
    /// Answer a caller.
    Reply { ask: AskId, result: Result<Answer, ApiError> },
    /// The state that people see.
    Show { state: SessionState, reason: String },
    /// Remove the session's record; this machine is at its end.
    Forget,
    /// This machine is at its end; the record is another's.
    LetGo,
}
