//! Consensus on real hosts: openraft over a [`Wire`] and a [`Disk`].
//!
//! ```text
//!   propose ──► Consensus ──► openraft ──► LogStore ──► Disk (redb, or the simulation's)
//!                  ▲  │           │
//!     serve ◄──────┘  └─► Wire    └──► Machine ──► FleetState, published once a batch
//!    (from peers)        (to peers)
//! ```
//!
//! Policy is elsewhere: who votes, who leads sessions and where copies go is decided by the fleet's pure machines.

mod consensus;
mod disk;
mod error;
mod frame;
mod local;
mod log;
mod machine;
mod membership;
mod network;
mod offline;
mod peers;
mod propose;
mod redb;
mod serve;
#[cfg(test)]
mod tests;
mod types;
mod wire;

pub use consensus::{Consensus, ConsensusConfig, Leadership, Timing};
pub use disk::{Disk, LogBatch, StoredSnapshot};
pub use error::{ChangeError, NotLeader, OfflineError, OpenError, ProposeError};
pub use log::Health;
pub use membership::{Guard, Membership, Progress};
pub use offline::{Recovered, forget, import_alone, recover_alone};
pub use openraft::AsyncRuntime;
pub use openraft_rt::deterministic_rng::DeterministicRng;
pub use openraft_rt_tokio::TokioRuntime;
pub use peers::Suspect;
pub use redb::RedbDisk;
pub use wire::{MESSAGE_BYTES_MAX, Wire, WireError};
