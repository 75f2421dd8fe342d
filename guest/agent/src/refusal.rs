//! Why a request is refused, in the shape that [`GuestAnswer::Refused`] carries.

use ks_proto::guest::GuestAnswer;

/// A request that was refused: what, why, and what to do next.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {why}")]
pub struct Refusal {
    /// `not-found`, `not-executable`, `bad-request`, `io` or `busy`.
    pub code: &'static str,
    /// What could not be done.
    pub what: String,
    /// Why not.
    pub why: String,
    /// What to do about it.
    pub next: String,
}

impl Refusal {
    /// A refusal with its four parts.
    pub fn new(code: &'static str, what: impl Into<String>, why: impl Into<String>, next: impl Into<String>) -> Self {
        Self { code, what: what.into(), why: why.into(), next: next.into() }
    }
    /// A failed operation of the system.
    pub fn io(what: impl Into<String>, why: impl std::fmt::Display) -> Self {
        Self::new("io", what, why.to_string(), "run `ks doctor` on this session")
    }
    /// A request that makes no sense.
    pub fn bad(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self::new("bad-request", what, why, "check the request")
    }
}

impl From<Refusal> for GuestAnswer {
    fn from(r: Refusal) -> Self {
        Self::Refused { code: r.code.to_owned(), what: r.what, why: r.why, next: r.next }
    }
}
