//! Node leases: the right of a node to run the sessions assigned to it until a deadline.
//!
//! ```text
//!  Holder (every node)                                  Granter (the Raft leader)
//!   SendRenewal{seq} at t0  ─────────────────────────►  Renewal at t1 ≥ t0
//!                                                        quorum round that begins after t1
//!   deadline = t0 + lease   ◄─────────────────────────  Granted at t2: may lapse from t2 + lease + margin on
//! ```
//!
//! Why no two nodes run a session at once, with clocks that drift by at most [`CLOCK_DRIFT_MAX_PERMILLE`] each:
//! - the holder counts from before it sent the renewal, the granter from after its round, and waits the margin on top;
//! - a leader that was cut off completes no round, so it grants nothing; a new one waits a whole lease plus margin, and
//!   every grant before it was asked for before its election;
//! - a lapse is declared only after a round that began after the end of the lease, in the same term;
//! - a node that comes back after a lapse gets a *re-grant*: an entry of the log behind every assignment that the lapse
//!   caused. The holder takes it up only when it has applied that entry, so it sees first what it lost;
//! - a lapse belongs to a term. An assignment for it must not be proposed, or forwarded, in another term.

mod granter;
mod holder;
#[cfg(test)]
mod model;

pub use granter::{Effect as GranterEffect, Granter, Input as GranterInput, ROUNDS_PER_LEASE, Tracked, WAITING_MAX};
pub use holder::{Effect as HolderEffect, Holder, Input as HolderInput, OUTSTANDING_MAX, UNLIMITED};
use serde::{Deserialize, Serialize};

/// Renewals sent in the length of one lease.
pub const RENEWALS_PER_LEASE: u64 = 6;
/// What the granter waits on top of a lease, in thousandths of it: 300 ms for a lease of 3 s.
pub const DRIFT_MARGIN_PERMILLE: u64 = 100;
/// The most that a clock may run fast or slow, in thousandths, for the margin to hold: `l(1+d) <= (l+margin)(1-d)`.
pub const CLOCK_DRIFT_MAX_PERMILLE: u64 = 45;
/// Longest lease that a holder believes in, milliseconds.
pub const LEASE_MAX_MS: u64 = 60_000;

/// What the granter waits on top of a lease of this length.
pub fn margin_ms(lease_ms: u64) -> u64 {
    (lease_ms * DRIFT_MARGIN_PERMILLE).div_ceil(1000)
}

/// Why a renewal was not granted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "why", rename_all = "kebab-case")]
pub enum Reason {
    /// Ask the leader.
    #[error("this node is not the leader")]
    NotLeader,
    /// The node is not in the fleet (any more).
    #[error("the node is not a member of this fleet")]
    NotMember,
    /// Another start of the same node may still hold the lease: an older one that ended, or a copy of its disk.
    #[error(
        "another instance of this node may hold its lease for {wait_ms} ms; if it is not this node's former start, its key was copied"
    )]
    OtherInstance { wait_ms: u64 },
    /// The leader could not reach a majority of the voters.
    #[error("the leader reaches no majority of the voters")]
    NoQuorum,
    /// Too many renewals wait.
    #[error("too many renewals wait at the leader")]
    Busy,
}

/// The leader's answer to a renewal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "kebab-case")]
pub enum Answer {
    /// The lease runs for `lease_ms` from the moment before the renewal was sent. A holder whose lease had lapsed waits
    /// until it has applied the log up to `index`.
    Granted { term: u64, lease_ms: u64, index: u64 },
    /// Not granted.
    Refused { term: u64, reason: Reason },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_margin_covers_the_drift_that_it_is_for() {
        for lease in [1, 10, 500, 3000, 10_000, LEASE_MAX_MS] {
            let holder = lease * (1000 + CLOCK_DRIFT_MAX_PERMILLE);
            let granter = (lease + margin_ms(lease)) * (1000 - CLOCK_DRIFT_MAX_PERMILLE);
            assert!(holder <= granter, "lease {lease}: the holder's ends at {holder}, the granter's at {granter}");
        }
    }
}
