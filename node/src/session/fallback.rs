//! Falling back: which checkpoints were skipped because they could not be started, and how that is told. Pure.
//!
//! A skipped checkpoint stays listed and can be restored by hand. A fault of the host (a missing engine, a full disk)
//! is no fault of a checkpoint: then nothing is skipped. Nor is anything when a person asked for just this checkpoint.

use super::input::Head;
use ks_proto::CheckpointId;
use ks_proto::api::ApiError;

/// Starts of one older checkpoint that may fail in a row: what made the newest fail was tried often enough.
const OLDER_ATTEMPTS_MAX: u32 = 2;
/// Faults that no other checkpoint could mend.
const HOST_CODES: [&str; 4] = ["engine-missing", "not-allowed", "usage", "disk-full"];
/// Characters of one cause in the note.
const CAUSE_MAX: usize = 300;

/// See the module.
#[derive(Debug, Clone, Default)]
pub(super) struct Falls {
    /// What people read while the session lives on from an older checkpoint; "" otherwise.
    pub note: String,
    /// Skipped in this node's life, newest first; never chosen again by itself.
    skipped: Vec<CheckpointId>,
    /// Where the fall began that has not led to a new checkpoint yet.
    first: Option<Head>,
    /// The name that `first` can be restored by.
    first_name: String,
    /// `c5: why`, one for each that failed in this fall.
    causes: Vec<String>,
    /// An older checkpoint is being started.
    under_way: bool,
    /// A person asked for just this checkpoint, and it has not run yet.
    asked_for: bool,
}

impl Falls {
    /// A person chose the checkpoint: nothing of before counts.
    pub fn asked_for() -> Self {
        Self { asked_for: true, ..Self::default() }
    }
    /// The session runs.
    pub fn started(&mut self) {
        (self.under_way, self.asked_for) = (false, false);
    }
    /// The session has a new checkpoint, which everything goes on from.
    pub fn stored(&mut self) {
        self.first = None;
        self.causes.clear();
    }
    /// Starts of the present head that may fail in a row.
    pub fn attempts_max(&self, usual: u32) -> u32 {
        if self.under_way { usual.min(OLDER_ATTEMPTS_MAX) } else { usual }
    }
    /// Whether another checkpoint may start where this error was met.
    pub fn may_help(&self, e: &ApiError) -> bool {
        !self.asked_for && !HOST_CODES.contains(&e.code.as_str())
    }
    /// Where the fall began.
    pub fn first(&self) -> Option<Head> {
        self.first
    }
    /// All that were skipped.
    pub fn skipped(&self) -> Vec<CheckpointId> {
        self.skipped.clone()
    }
    /// `reason`, or the note when there is none.
    pub fn or_note(&self, reason: &str) -> String {
        if reason.is_empty() { self.note.clone() } else { reason.to_owned() }
    }
    /// Notes that `head` could not be started.
    pub fn skip(&mut self, head: Head, session: &str, name: &str, e: &ApiError) {
        if self.first.is_none() {
            (self.first, self.first_name) = (Some(head), format!("{session}@{name}"));
        }
        self.skipped.push(head.id);
        let why: String = e.why.chars().take(CAUSE_MAX).collect();
        self.causes.push(format!("{name}: {} ({why})", e.what));
    }
    /// The next one is tried; returns what to tell.
    pub fn go_on_from(&mut self, name: &str) -> String {
        self.under_way = true;
        self.note = format!(
            "went on from the older checkpoint {name}, because what is newer could not be started: {}; it is still listed: \
             ks restore {}",
            self.causes.join("; "),
            self.first_name
        );
        self.note.clone()
    }
    /// The error of a session that has no checkpoint left to try.
    pub fn none_starts(&self, last: ApiError) -> ApiError {
        let session = self.first_name.split('@').next().unwrap_or_default();
        let (what, why) = if self.causes.len() > 1 {
            ("none of its checkpoints could be started".to_owned(), self.causes.join("; "))
        } else {
            (last.what, last.why)
        };
        let next = format!(
            "`ks events {session}` tells more; ks restore {} tries that one again, ks checkpoints {session} lists all",
            self.first_name
        );
        ApiError { what, why, next, ..last }
    }
}

/// One own checkpoint of a session, as its record has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link {
    /// Number within the session.
    pub number: u64,
    /// Id.
    pub id: CheckpointId,
    /// What the VM had begun from, or its checkpoint before.
    pub parent: Option<CheckpointId>,
}

/// The own checkpoint before `than` that is not among `skipped`: along the parents, so that work which a restore left
/// behind does not come back; by number where retention took the parent away.
pub fn next_older(links: &[Link], than: &CheckpointId, skipped: &[CheckpointId]) -> Option<Link> {
    let find = |id: &CheckpointId| links.iter().find(|l| l.id == *id).copied();
    let mut at = find(than)?;
    loop {
        let below = || links.iter().filter(|l| l.number < at.number).max_by_key(|l| l.number).copied();
        // A parent has a lower number always; anything else would not end.
        at = at.parent.and_then(|p| find(&p)).filter(|p| p.number < at.number).or_else(below)?;
        if !skipped.contains(&at.id) && at.id != *than {
            return Some(at);
        }
    }
}
