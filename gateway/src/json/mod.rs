//! Two readers of hostile JSON: [`Scan`] takes it in any pieces and tells scalars by path with bounded memory;
//! [`digest`] hashes a whole document so that the order of keys and the way strings are escaped do not matter.

mod canonical;
mod scan;

pub use canonical::{Canonical, JsonError, Rule, digest};
pub use scan::{Path, Scalar, Scan, Sink};

/// Deepest nesting that either reader follows.
pub const DEPTH_MAX: usize = 128;
