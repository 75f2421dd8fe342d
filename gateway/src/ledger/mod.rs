//! The ledger: what was bought, for whom, and what was served without buying. One file of JSON lines per session, chained by
//! hashes (docs/formats.md), readable with ordinary tools.

mod chain;
mod export;
mod line;
mod query;
mod reconcile;
#[cfg(test)]
mod tests;

pub use chain::{Chain, LINE_BYTES_MAX, Ledger, LedgerError, verify_tree};
pub use export::{Export, ExportError, ExportRow};
pub use line::{ByWhom, Completed, Entry, Intent, Line, Resolution};
pub use query::{Purchase, Totals, day_of};
pub use reconcile::{Compared, Proposal, reconcile};
