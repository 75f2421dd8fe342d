//! Why `ks` ends without success, and the exit code that goes with each reason.
//!
//! Exit codes: 0 success and detach; the child's code passed through; 1 a verdict of "no" (`ks doctor`); 2 usage;
//! 4 not allowed; 124 timeout; 125 ks failed before the command ran; 126/127 as in shells; 130 interrupted; 255 link
//! lost, outcome unknown.

use ks_proto::api::ApiError;
use serde_json::{Value, json};

/// A negative verdict of a program that itself worked.
pub const VERDICT_NO: u8 = 1;
/// The command line or a configuration file is wrong.
pub const USAGE: u8 = 2;
/// The node refuses this to us.
pub const NOT_ALLOWED: u8 = 4;
/// A deadline passed.
pub const TIMEOUT: u8 = 124;
/// `ks` or the node failed before the command ran.
pub const FAILED: u8 = 125;
/// The command was found but is not a program.
pub const NOT_EXECUTABLE: u8 = 126;
/// The command was not found.
pub const NOT_FOUND: u8 = 127;
/// Ctrl-C.
pub const INTERRUPTED: u8 = 130;
/// The link broke; nobody knows how it ended.
pub const LINK_LOST: u8 = 255;

/// What, why, what next, and the exit code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Exit code of the process.
    pub exit: u8,
    /// The three sentences and the stable code.
    pub error: Box<ApiError>,
}

/// The result of everything in `ks` that can fail.
pub type Res<T> = Result<T, Failure>;

impl Failure {
    /// A failure whose exit code follows its stable code.
    pub fn new(code: &str, what: impl Into<String>, why: impl Into<String>, next: impl Into<String>) -> Self {
        ApiError::new(code, what, why, next).into()
    }
    /// The command line asks for something that cannot be.
    pub fn usage(what: impl Into<String>, why: impl Into<String>, next: impl Into<String>) -> Self {
        Self::new("usage", what, why, next)
    }
    /// Something on this machine failed (a file, a terminal).
    pub fn local(what: impl Into<String>, why: impl std::fmt::Display, next: impl Into<String>) -> Self {
        Self::new("local", what, why.to_string(), next)
    }
    /// The link broke with the outcome unknown.
    pub fn link_lost(what: impl Into<String>, why: impl std::fmt::Display) -> Self {
        Self::new("link-lost", what, why.to_string(), "the outcome is unknown: look with `ks ls` and `ks events`, then decide")
    }
    /// Ctrl-C.
    pub fn interrupted(what: impl Into<String>, next: impl Into<String>) -> Self {
        Self::new("interrupted", what, "you pressed Ctrl-C", next)
    }
    /// As one JSON object: the error with its exit code.
    pub fn to_json(&self) -> Value {
        json!({
            "schema": self.error.schema, "code": self.error.code, "what": self.error.what,
            "why": self.error.why, "next": self.error.next, "exit": self.exit,
        })
    }
}

/// The exit code that belongs to a stable error code.
pub fn exit_for(code: &str) -> u8 {
    match code {
        "usage" => USAGE,
        "not-allowed" => NOT_ALLOWED,
        "timeout" => TIMEOUT,
        "interrupted" => INTERRUPTED,
        "link-lost" => LINK_LOST,
        "command-not-found" => NOT_FOUND,
        "command-not-executable" | "not-executable" => NOT_EXECUTABLE,
        _ => FAILED,
    }
}

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        Self { exit: exit_for(&error.code), error: Box::new(error) }
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.error.what, self.error.why)
    }
}
impl std::error::Error for Failure {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_map_to_the_documented_exits() {
        for (code, exit) in [
            ("usage", 2),
            ("not-allowed", 4),
            ("timeout", 124),
            ("not-found", 125),
            ("exists", 125),
            ("node-down", 125),
            ("guest-silent", 125),
            ("command-not-found", 127),
            ("not-executable", 126),
            ("interrupted", 130),
            ("link-lost", 255),
        ] {
            assert_eq!(Failure::new(code, "w", "y", "n").exit, exit, "{code}");
        }
    }

    #[test]
    fn json_carries_the_cause_and_the_exit() {
        let v = Failure::usage("a", "b", "c").to_json();
        assert_eq!(v["schema"], "ks.error.v1");
        assert_eq!((v["code"].as_str(), v["why"].as_str(), v["exit"].as_u64()), (Some("usage"), Some("b"), Some(2)));
    }
}
