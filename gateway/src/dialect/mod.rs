//! The providers' languages: facts of a request, and a scan of its answer.

mod facts;
mod request;
mod response;
#[cfg(test)]
mod wire_facts;

pub use request::{SECRET_PARAMETERS, inject_usage, request_facts, scrub_path};
pub use response::{HOLD_MAX, Head, ResponseScan, provider_request_id};

use crate::usage::Usage;
use serde::{Deserialize, Serialize};

/// Whose API a provider speaks; part of a provider's settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Family {
    /// OpenAI and everything compatible with it.
    Openai,
    /// Anthropic.
    Anthropic,
    /// Google Gemini.
    Gemini,
}

/// How one endpoint's answers are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Dialect {
    /// `/chat/completions` (and the older `/completions`).
    OpenaiChat,
    /// `/responses`.
    OpenaiResponses,
    /// `/v1/messages`.
    Anthropic,
    /// `:generateContent` and `:streamGenerateContent`.
    Gemini,
    /// Any other endpoint: passed on and journaled; only what its JSON says of usage in the family's way is counted.
    Other(Family),
}

/// A provider as far as decisions need it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Profile {
    /// First segment of the path in the guest.
    pub name: String,
    /// Whose API it speaks.
    pub family: Family,
    /// It knows `stream_options.include_usage` (OpenAI's chat API).
    pub include_usage: bool,
}

/// What a request asks, as far as metering and replay care.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestFacts {
    /// How its answer will be read.
    pub dialect: Dialect,
    /// Model that it names, in body or path.
    pub model: Option<String>,
    /// It asks for a stream of events.
    pub stream: bool,
    /// The largest output that it declares, in tokens per choice.
    pub max_output: Option<u64>,
    /// Choices (samples) that it asks for.
    pub choices: u64,
    /// Its answer depends on, or makes, state at the provider: never served after a divergence.
    pub stateful: bool,
    /// Upper guess of its input in tokens: bytes divided by [`BYTES_PER_TOKEN`], rounded up.
    pub input_estimate: u64,
    /// Streamed usage must be asked for with [`inject_usage`], and its chunk hidden from the client.
    pub inject_usage: bool,
}

/// Bytes of a request's body that count as one token of input when budget is reserved before anything was counted.
pub const BYTES_PER_TOKEN: u64 = 4;

/// How a call ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// Whole, as its dialect defines it: the only one that is ever replayed.
    Complete,
    /// A status of 400 or more, or an error inside a 200.
    Failed,
    /// Cut off before its end.
    Partial,
    /// Given up by us after nobody wanted it any more.
    Aborted,
    /// The process that carried it died: it may have been bought.
    Unknown,
}

/// What an answer said, at its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// How it ended. Never [`Outcome::Aborted`] or [`Outcome::Unknown`]: those are the process's to say.
    pub outcome: Outcome,
    /// Billed tokens, if it said any.
    pub usage: Option<Usage>,
    /// Why figures that it did say were refused.
    pub usage_error: Option<String>,
    /// Model that answered.
    pub model: Option<String>,
    /// The provider's id of the answer, from its body.
    pub response_id: Option<String>,
    /// Service tier, where it changes the price.
    pub tier: Option<String>,
    /// Type of the error that it reported.
    pub error: Option<String>,
}
