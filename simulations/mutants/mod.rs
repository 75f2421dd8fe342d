//! Known bugs, planted one at a time: the simulation must catch each of them.
//!
//! A mutant changes what a fake host does with its machines, never a machine. Each is asked for at the one place where it
//! bites.

use std::fmt;

/// One planted bug.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mutant {
    /// A holder says that it has a checkpoint before it synced it.
    AckBeforeFsync,
    /// The lease counts from the answer to the renewal, not from before it was sent.
    RenewalFromReply,
    /// A new leader declares lapses without waiting a whole lease: a node that does not renew with it at once is over.
    NewLeaderDoesNotWait,
    /// The outside takes effects of runs that are over.
    StaleTokenAccepted,
    /// Collection looks at records only, and not at what is being fetched or named.
    GcIgnoresFetch,
    /// A leader answers renewals without a round of a quorum.
    NoQuorumRound,
}

impl Mutant {
    /// All of them.
    pub const ALL: [Mutant; 6] = [
        Mutant::AckBeforeFsync,
        Mutant::RenewalFromReply,
        Mutant::NewLeaderDoesNotWait,
        Mutant::StaleTokenAccepted,
        Mutant::GcIgnoresFetch,
        Mutant::NoQuorumRound,
    ];
}

impl Mutant {
    /// The promise that it breaks; it counts as caught when that is seen.
    pub fn breaks(self) -> &'static str {
        match self {
            Self::AckBeforeFsync | Self::GcIgnoresFetch => "DURABLE-MEANS-PEERS",
            Self::RenewalFromReply | Self::NewLeaderDoesNotWait | Self::NoQuorumRound => "ONE-OWNER",
            Self::StaleTokenAccepted => "FENCED",
        }
    }
}

impl fmt::Display for Mutant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AckBeforeFsync => "acknowledge before fsync",
            Self::RenewalFromReply => "renewal counted from the reply",
            Self::NewLeaderDoesNotWait => "new leader that does not wait",
            Self::StaleTokenAccepted => "stale run token accepted",
            Self::GcIgnoresFetch => "GC that ignores a fetch in progress",
            Self::NoQuorumRound => "isolated leader answers renewals without a quorum round",
        })
    }
}
