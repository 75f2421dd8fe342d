//! Whether a call is bought or served: inputs and decisions of the machine of one session.
//!
//! ```text
//! Ask ──nobody asked like it──► Live ──Bought──► entry ──Changed──► complete | failed | partial | aborted | unknown
//!  ├──an unused entry after the checkpoint is like it──► Serve (complete) | Join (open)
//!  └──this timeline's own call is like it, and its client left before the last byte──► Serve | Join
//! Rejoin ──its call has an entry──► Serve | Join from the byte      else ──► Unknown
//! entry, open: read ──last client closed──► grace ──GRACE_MS──► drain ──DRAIN_MS──► abort        anyone back ──► read
//! ```
//!
//! *Numbers.* Every line of the ledger has one, and a guest is told only numbers of durable lines. What a guest was told of is
//! its past, so a checkpoint's *position* divides the lines exactly: `served` lines count as much as purchases, whatever their
//! order. A fork's lines go on from its fork point, so positions in its memory stay true.
//!
//! *Pool.* A timeline that resumes may use, each once: purchases of this session after its position, and what the timeline before
//! it could still use at that position. A timeline with replay off uses none, and they are abandoned for ever.

mod begin;
mod machine;
mod rebuild;
#[cfg(test)]
mod table;

pub use ks_proto::gateway::{Began, ReplayMode};
pub use machine::{DRAIN_MS, GRACE_MS, Replay};

use crate::dialect::Outcome;
use crate::key::{Keys, Matched};
use crate::names::{CallId, Digest, EntryRef, Nonce};
use serde::{Deserialize, Serialize};

/// What happened to a session. Times are the caller's monotonic milliseconds.
#[derive(Debug, Clone, PartialEq)]
pub enum Input {
    /// The first word of a timeline. A nonce that is known already changes nothing. Comes before its first ask.
    OpenTimeline {
        /// Its name.
        nonce: Nonce,
        /// The timeline in which the guest lived before, from its memory.
        prior: Option<Nonce>,
        /// Highest line that the guest had been told of, from its memory. More than exists is taken as all that exists.
        position: u64,
        /// By the stamp, never by the guest.
        mode: ReplayMode,
        /// By the stamp.
        began: Began,
    },
    /// A whole request.
    Ask {
        /// Its name.
        call: CallId,
        /// The timeline that asks (the call's own nonce, or a later one if the call is from before a restore).
        timeline: Nonce,
        /// Keys.
        keys: Keys,
        /// BLAKE3 of the body as sent.
        body_hash: Digest,
        /// Depends on state at the provider.
        stateful: bool,
    },
    /// A client that is still connected wants its answer from a byte on. What is stored of its entry must have been told by a
    /// [`Input::Changed`] just before: a client that is ahead of the journal is unknown.
    Rejoin {
        /// The call, with the nonce that it was made under.
        call: CallId,
        /// The timeline that asks now.
        timeline: Nonce,
        /// Bytes of the body that the client has had.
        offset: u64,
        /// It has had the head.
        head_sent: bool,
        /// BLAKE3 of the body as sent.
        body_hash: Digest,
    },
    /// The intent line of a call that was told to go live is durable.
    Bought {
        /// The call.
        call: CallId,
        /// The line.
        seq: u64,
    },
    /// The `served` line of a call is durable.
    Noted {
        /// The call.
        call: CallId,
        /// The line.
        seq: u64,
    },
    /// A call that was decided will not be carried out (no budget, no space, no replica): as if never asked.
    Withdrawn {
        /// The call.
        call: CallId,
    },
    /// A purchase moved on: bytes stored, or its completed line is durable.
    Changed {
        /// Which.
        entry: EntryRef,
        /// Bytes of its body in the journal.
        stored: u64,
        /// How it ended, once its line is durable.
        outcome: Option<Outcome>,
    },
    /// The client has had the last byte.
    Delivered {
        /// The call.
        call: CallId,
    },
    /// The client's stream ended before that.
    ClientGone {
        /// The call.
        call: CallId,
        /// How.
        how: Gone,
    },
    /// Somebody outside this session reads an entry along (a fork that joined it): it is read to its end.
    Held {
        /// Which.
        entry: EntryRef,
    },
    /// That reader left.
    LetGo {
        /// Which.
        entry: EntryRef,
    },
    /// Time passed.
    Tick,
}

/// How a client's stream ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gone {
    /// The client closed its socket while its VM ran: grace, drain, abort.
    Closed,
    /// VM, node daemon or stream died: the call is read to its end, however long it takes. In doubt, this one.
    Cut,
}

/// What to do.
#[derive(Debug, Clone, PartialEq)]
pub enum Effect {
    /// Answer from the journal. The entry is complete.
    Serve {
        /// The call.
        call: CallId,
        /// The purchase.
        entry: EntryRef,
        /// What matched.
        matched: Matched,
        /// First byte of the body to send.
        offset: u64,
        /// The number that the relay was told for this call before: told again. None: the number of the `served` line.
        told: Option<u64>,
        /// A `served` line is appended, and durable before anything is told; then [`Input::Noted`].
        note: bool,
    },
    /// Read along with a purchase whose end is not there yet: its stored prefix, then its tail.
    /// Also the rest of a failed or cut answer to a client that has had a part of it.
    Join {
        /// The call.
        call: CallId,
        /// The purchase.
        entry: EntryRef,
        /// What matched.
        matched: Matched,
        /// First byte of the body to send.
        offset: u64,
        /// The number that the relay was told for this call before: told again. None: the number of the `served` line.
        told: Option<u64>,
        /// A `served` line is appended, and durable before anything is told; then [`Input::Noted`].
        note: bool,
    },
    /// Buy it.
    Live {
        /// The call.
        call: CallId,
        /// Why it was not served.
        why: Why,
    },
    /// Nothing is known of the call: the relay sends it whole if nothing reached the client, else cuts the client off.
    Unknown {
        /// The call.
        call: CallId,
    },
    /// Append a `diverged` line.
    Diverged {
        /// The timeline.
        timeline: Nonce,
        /// Its first call that differs.
        call: CallId,
    },
    /// Nobody came back within the grace: go on reading for the usage, until the deadline.
    Drain {
        /// The purchase.
        entry: EntryRef,
        /// When it will be aborted.
        until_ms: u64,
    },
    /// Cut it upstream; `completed` with outcome aborted.
    Abort {
        /// The purchase.
        entry: EntryRef,
    },
}

/// Why a call was bought.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "why", rename_all = "kebab-case")]
pub enum Why {
    /// Nothing in the journal after the checkpoint is like it.
    New,
    /// The first call that differs from what was asked before, or one after it.
    Diverged,
    /// What is like it depends on state at the provider, and the timeline has diverged.
    Stateful {
        /// The entry that was not served.
        of: EntryRef,
    },
    /// What is like it failed, was cut off, was given up, or nobody knows how it ended.
    NotReplayable {
        /// The entry.
        of: EntryRef,
    },
    /// Replay is off in this timeline.
    ReplayOff,
}
