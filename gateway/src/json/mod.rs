//! Two readers of hostile JSON: [`Scan`] takes it in any pieces and tells scalars by path with bounded memory;
//! [`digest`] hashes a whole document so that the order of keys and the way strings are escaped do not matter.

mod canonical;
mod scan;

pub use canonical::{Canonical, JsonError, Rule, digest};
pub use scan::{Path, Scalar, Scan, Sink};

/// The byte that `\\` and this one stand for; none for `u`, which needs its digits, and for what is no escape.
fn escaped(b: u8) -> Option<u8> {
    match b {
        b'"' | b'\\' | b'/' => Some(b),
        b'b' => Some(8),
        b'f' => Some(12),
        b'n' => Some(b'\n'),
        b'r' => Some(b'\r'),
        b't' => Some(b'\t'),
        _ => None,
    }
}

/// Deepest nesting that either reader follows.
pub const DEPTH_MAX: usize = 128;
