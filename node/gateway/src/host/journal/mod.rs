//! A session's journal on disk: `ledger.jsonl`, and the bodies that its lines name.
//!
//! ```text
//! DIR/journal/SESSION/ledger.jsonl       one line per entry, chained by hash; only ever appended to
//!                     bodies/SEQ.req     the request's body as it came
//!                     bodies/SEQ.head    status and headers of the answer
//!                     bodies/SEQ.resp    the answer's body as clients get it
//! ```
//!
//! Durability order of a call: intent line; then anything may be sent; bodies; completed line; then the finishing event may be
//! released. Lines of concurrent calls share one sync (group commit). A line that could not be made durable is taken back whole:
//! its number is given to the next. After a failed sync nothing more is written until a restart has read back what is there.

mod bodies;
mod commit;
mod recover;

pub use bodies::{Bodies, StoredHead};
pub use commit::{Committed, Journal, JournalError};
pub use recover::{Recovered, recover};
