//! Lines of a session's ledger. Each is one JSON object on one line (docs/formats.md): numbers rise by one, and `hash` covers the
//! line and the one before it.

use crate::dialect::{Dialect, Outcome};
use crate::key::{Keys, Matched};
use crate::money::Money;
use crate::names::{CallId, Digest, EntryRef, Nonce};
use crate::replay::{Began, ReplayMode, Why};
use crate::usage::Usage;
use ks_proto::ids::RunToken;
use serde::{Deserialize, Serialize};

/// One line, without its hash.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Line {
    /// Number in this journal. The first of a session is 1, that of a fork follows the fork point's number; no gaps.
    /// A guest may be told of a number only when its line is durable.
    pub seq: u64,
    /// Unix milliseconds.
    pub at_ms: u64,
    /// The session whose journal this is.
    pub session: String,
    /// What happened.
    #[serde(flatten)]
    pub entry: Entry,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Entry {
    /// First line of a fork: whose journal it goes on from.
    Origin {
        /// The parent.
        from: String,
        /// The last line of the parent's that is this session's past.
        at_seq: u64,
        /// That line's hash, where the parent's journal was at hand.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        at_hash: Option<Digest>,
    },
    /// A guest began to live on from a checkpoint.
    Timeline {
        /// Its name.
        nonce: Nonce,
        /// The timeline in which the checkpoint was taken.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        prior: Option<Nonce>,
        /// Highest line that the checkpoint's guest had been told of.
        position: u64,
        /// Whether later entries are served to it.
        mode: ReplayMode,
        /// Why it began.
        began: Began,
        /// The run.
        token: RunToken,
    },
    /// A call is about to be sent upstream; durable before it is. Its `seq` names the purchase.
    Intent(Box<Intent>),
    /// How that call ended; durable before its finishing event is released.
    Completed(Box<Completed>),
    /// A call was answered from the journal, or joined a call in flight. Nothing was bought.
    Served {
        /// The call.
        call: CallId,
        /// The timeline that asked.
        timeline: Nonce,
        /// The purchase whose bytes it got.
        of: EntryRef,
        /// What matched.
        matched: Matched,
        /// BLAKE3 of this request's body as the client sent it.
        body_hash: Digest,
    },
    /// A resumed guest asked something else than it had asked before.
    Diverged {
        /// In which timeline.
        timeline: Nonce,
        /// The first call that differs.
        call: CallId,
    },
    /// What became of a purchase whose end was unknown.
    Resolved {
        /// The `intent` line.
        of: u64,
        /// Who says so.
        by: ByWhom,
        /// What.
        resolution: Resolution,
        /// In words.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        note: String,
    },
    /// Traffic of the egress proxy.
    Egress {
        /// Name or address that the guest asked for.
        host: String,
        /// Its port.
        port: u16,
        /// Whether the session may go there.
        allowed: bool,
        /// Why not, or how it ended.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        reason: String,
        /// Bytes from the guest.
        bytes_out: u64,
        /// Bytes to the guest.
        bytes_in: u64,
        /// Unix milliseconds of its start.
        started_ms: u64,
    },
}

/// A call that is about to be bought.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Intent {
    /// The relay's name of the call.
    pub call: CallId,
    /// The timeline that asked.
    pub timeline: Nonce,
    /// Who pays.
    pub user: String,
    /// The run that asked.
    pub token: RunToken,
    /// Provider by name.
    pub provider: String,
    /// How its answer is read.
    pub dialect: Dialect,
    /// Model that the request names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// HTTP method.
    pub method: String,
    /// Path and query, credentials removed.
    pub path: String,
    /// Keys.
    pub keys: Keys,
    /// BLAKE3 of the body as the client sent it.
    pub body_hash: Digest,
    /// Its length.
    pub body_bytes: u64,
    /// Depends on state at the provider.
    pub stateful: bool,
    /// A stream was asked for.
    pub stream: bool,
    /// Input reserved for, in tokens.
    pub input_estimate: u64,
    /// Output reserved for, in tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_output: Option<u64>,
    /// Reserved from the budgets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reserved: Option<Money>,
    /// Why it was not served from the journal.
    pub why: Why,
}

/// How a call ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Completed {
    /// The `intent` line.
    pub of: u64,
    /// HTTP status; 0 if no head ever came.
    pub status: u16,
    /// How.
    pub outcome: Outcome,
    /// Billed tokens, if any were said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
    /// Model that answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Service tier that answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tier: Option<String>,
    /// What it cost; absent is *unpriced*, never nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<Money>,
    /// The price table by which it was priced, or in which its model was looked for.
    pub price_table: Digest,
    /// BLAKE3 of the stored head.
    pub head_hash: Digest,
    /// Length of the stored body.
    pub body_bytes: u64,
    /// BLAKE3 of the stored body.
    pub body_hash: Digest,
    /// Released although no second copy could be made in time.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub single_copy: bool,
    /// The provider's id of the request, from the head.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub provider_request_id: Option<String>,
    /// The provider's id of the answer, from the body.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub response_id: Option<String>,
    /// Type of the error, or why its usage was refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Milliseconds from sending to the first byte of the body; absent without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_byte_ms: Option<u64>,
    /// Milliseconds from sending to the end.
    pub took_ms: u64,
}

/// Who resolved an unknown purchase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ByWhom {
    /// The provider's export.
    Reconcile,
    /// A person.
    Hand,
}

/// What an unknown purchase turned out to be.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "found", rename_all = "kebab-case")]
pub enum Resolution {
    /// The provider did not bill it.
    NotBilled,
    /// The provider billed this.
    Billed {
        /// Tokens.
        usage: Usage,
        /// Cost; absent is unpriced.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cost: Option<Money>,
        /// By which table.
        price_table: Digest,
    },
}
