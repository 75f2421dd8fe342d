//! Seeded fleets on fake hosts, and chaos on real processes (tests/). Links nothing of the product but its machines.
//!
//! ```text
//!  plan (faults) ─┐                      ┌─► invariants (one file each)
//!                 ▼                      │
//!   world: time, network, disks, stores, VMs, the outside ◄── client (oracle)
//!                 ▲
//!   host (one per node): real openraft through ks-raft, real chitchat, the machines of ks-fleet
//! ```
//!
//! One thread and one process per seed, paused time: a run of ten simulated minutes takes seconds, and the same seed gives
//! the same trace (a hash over every message). What is modelled and not real: the wire, disks that lose unsynced bytes, the chunk store,
//! and VMs (counters that write to the outside with their run token). A frozen node (SIGSTOP) neither gets nor sends nor
//! writes, while timers inside openraft run on. The structure test (tests/tidy.rs) lives here because this crate sees the
//! whole tree and nobody depends on it.

pub mod child;
mod client;
mod disk;
pub mod entropy;
mod gossip;
mod host;
mod invariants;
mod net;
mod plan;
mod run;
pub mod scale;
mod store;
mod vm;
mod world;

#[path = "../mutants/mod.rs"]
mod mutants;

pub use mutants::Mutant;
pub use run::{Outcome, run};
