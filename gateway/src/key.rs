//! The two keys under which a request is found again.

use crate::names::Digest;
use serde::{Deserialize, Serialize};

/// Keys of one request. Two requests are the same when `target` and `raw` agree, or `canonical` agrees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Keys {
    /// Provider, method, path and query, without credentials.
    pub target: Digest,
    /// The decoded request body.
    pub raw: Digest,
    /// Target, API version and beta headers, and the body as JSON with sorted keys and without volatile fields; none if
    /// the body is not JSON that could be read within the limits.
    pub canonical: Option<Digest>,
}

/// Which key matched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Matched {
    /// Byte for byte the same decoded body.
    Raw,
    /// The same but for volatile fields and the order of keys.
    Canonical,
    /// The very same call: its id was named again.
    Call,
}
