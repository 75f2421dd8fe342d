//! Words of the session machine: its times, its stages, and what may follow a checkpoint.

use super::input::{Answer, AskId, Effect, Head};
use ks_proto::api::{ApiError, SessionState};
use ks_raft::Wanted;

/// Times and limits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// Milliseconds between cadence checkpoints; 0 is never.
    pub cadence_ms: u64,
    /// Idle milliseconds before parking; 0 is never.
    pub idle_park_ms: u64,
    /// Starts that may fail in a row.
    pub attempts_max: u32,
    /// Wait after the first failed start; doubles with each.
    pub backoff_ms: u64,
    /// A run this long forgives earlier failures.
    pub stable_ms: u64,
}
impl Policy {
    /// The usual limits with this cadence and idle time, in seconds.
    pub fn new(cadence_s: u64, idle_park_s: u64) -> Self {
        Self {
            cadence_ms: cadence_s.saturating_mul(1000),
            idle_park_ms: idle_park_s.saturating_mul(1000),
            attempts_max: 5,
            backoff_ms: 500,
            stable_ms: 30_000,
        }
    }
}

/// Where a session goes when its process is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rest {
    Parked,
    Stopped,
    /// Another node takes over.
    Leaving,
}
impl Rest {
    pub fn state(self) -> SessionState {
        match self {
            Self::Parked => SessionState::Parked,
            Self::Stopped => SessionState::Stopped,
            Self::Leaving => SessionState::Recovering,
        }
    }
    /// What the record says from then on; None leaves it, so that the next owner does as it says.
    pub fn wanted(self) -> Option<Wanted> {
        match self {
            Self::Parked => Some(Wanted::Parked),
            Self::Stopped => Some(Wanted::Stopped),
            Self::Leaving => None,
        }
    }
    pub fn word(self) -> &'static str {
        match self {
            Self::Parked => "parked",
            Self::Stopped => "stopped",
            Self::Leaving => "leaving",
        }
    }
    /// Reason of the checkpoint before it.
    pub fn reason(self) -> &'static str {
        match self {
            Self::Parked => "park",
            Self::Stopped => "stop",
            Self::Leaving => "move",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Stage {
    /// Nothing under way.
    Still,
    /// The node came back and looks whether the VM of the current run lives.
    Looking,
    /// EndProcess asked for, then start.
    EndingToStart,
    /// EndProcess asked for, then rest.
    EndingToRest(Rest),
    /// EndProcess asked for after a failed start, then wait and try again.
    EndingToRetry,
    /// EndProcess asked for, then Failed with this error.
    EndingToFail(ApiError),
    /// EndProcess asked for after the head could not be started, then FindOlder.
    EndingToFallBack(ApiError),
    /// FindOlder asked for.
    Choosing(ApiError),
    /// BeginRun asked for only so that the record names the newest checkpoint again, then Failed with this error.
    Returning(ApiError),
    /// EndProcess asked for, then forget.
    EndingToForget,
    /// EndProcess asked for, then let go: the session is another's.
    EndingToLetGo,
    /// Ended, and another node is about to take over.
    Leaving,
    /// BeginRun asked for.
    Beginning,
    /// Launch asked for.
    Launching,
    /// Waiting until the next attempt.
    BackingOff { until_ms: u64 },
}

/// What follows a checkpoint that is being stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Then {
    Rest(Rest, Vec<AskId>),
    Restore { to: Head, verify_eager: bool, ask: AskId },
}

/// The caller has what it asked for.
pub(super) fn done(ask: AskId) -> Effect {
    Effect::Reply { ask, result: Ok(Answer::Done) }
}

/// The caller gets nothing, and why.
pub(super) fn refuse(ask: AskId, code: &str, why: impl Into<String>, next: &str) -> Effect {
    Effect::Reply { ask, result: Err(ApiError::new(code, "this cannot be done now", why, next)) }
}

/// Something else came first.
pub(super) fn gone_error(why: &str) -> ApiError {
    ApiError::new("busy", "the request was given up", why, "try again")
}
