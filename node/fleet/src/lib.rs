//! The fleet's decisions as pure machines: leases, placement, replication and repair, choice of voters.
//!
//! Nothing here reads a clock, draws randomness or does I/O. Each machine is a struct with one entrance,
//! `step(now_ms, ..) -> Vec<Effect>`; `now_ms` is CLOCK_BOOTTIME of the node that runs it, in milliseconds. The node's
//! host module turns messages into inputs and carries effects out in order. The seeded simulation drives the same code.

pub mod lease;
pub mod placement;
pub mod replication;
mod view;
pub mod voters;

pub use view::{CheckpointView, FactsView, MemberView, Scope, SessionView, Standing, View};
