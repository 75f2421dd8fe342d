//! The ledger: what was bought, for whom, and what was served without buying.

mod line;

pub use line::{ByWhom, Completed, Entry, Intent, Line, Resolution};
