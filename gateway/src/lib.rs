//! The gateway's decisions: what a request asks, whether it is bought or served from the journal, what an answer used
//! and cost, and what the ledger says about it. Everything here is pure: no clock, no socket, no disk.
//!
//! The process around it (sockets, TLS, the pump, files, keys) is `ksgw`. Sources: DESIGN section 8, REPLAY.md.
//!
//! A call's way through: [`dialect::request_facts`] and [`key::Keys`] of the request → [`replay::Replay`] says *serve*,
//! *join*, or *live* → [`budget::Budgets`] reserves → an `intent` line ([`ledger::Entry`]) is durable → the upstream's bytes
//! pass a [`dialect::ResponseScan`], which says how far a reader may be let ([`dialect::ResponseScan::releasable`]) →
//! the `completed` line with usage and cost is durable → the rest is released, the reservation settled.

pub mod budget;
pub mod codec;
pub mod dialect;
pub mod json;
pub mod key;
pub mod ledger;
pub mod money;
pub mod names;
pub mod price;
pub mod replay;
pub mod sse;
pub mod usage;
