//! Errors of consensus: one type for each thing that can be asked.

use std::path::PathBuf;

/// Why consensus could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The disk, or what is on it.
    #[error("the fleet's database cannot be opened: {0}")]
    Disk(#[from] std::io::Error),
    /// The database is another node's.
    #[error("the fleet's database belongs to node {stored}, not to node {asked}")]
    OtherNode { stored: u64, asked: u64 },
    /// A timing that cannot work.
    #[error("the timing of elections is not usable: {0}")]
    Timing(String),
    /// openraft refused what it found.
    #[error("the fleet's log cannot be taken up: {0}")]
    Raft(String),
    /// Only the founder's number may found a fleet.
    #[error("node {0} cannot found a fleet: the founder is number 1")]
    NotFounder(u64),
    /// It was initialized, but leads nothing after a while.
    #[error("the fleet was founded, but has no leader after {waited_ms} ms")]
    NoLeader { waited_ms: u64 },
}

/// Why a proposal has no answer. A refusal by the state is an answer ([`crate::Response::Refused`]).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProposeError {
    /// No leader that has a quorum was found in time. If `maybe`, the command may be applied yet.
    #[error("the fleet has no quorum: nothing was decided within {waited_ms} ms")]
    NoQuorum { waited_ms: u64, maybe: bool },
    /// The command is larger than a message may be.
    #[error("the command has {bytes} bytes, more than the {max} that are allowed")]
    TooLarge { bytes: usize, max: usize },
    /// The disk of this node is full, and it leads: the command waits in its log and may be applied yet.
    #[error("the disk is full: the fleet's log waits for space")]
    DiskFull,
    /// The disk failed for good.
    #[error("the fleet's log failed: {0}")]
    Broken(String),
    /// Consensus was shut down.
    #[error("the node is shutting down")]
    Shutdown,
}

/// This node does not lead, or cannot show that it does.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("this node does not lead the fleet{}", .leader.map(|l| format!(", node {l} does")).unwrap_or_default())]
pub struct NotLeader {
    /// Who is thought to lead.
    pub leader: Option<u64>,
}

/// Why voters or learners were not changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// Only the leader does that.
    #[error(transparent)]
    NotLeader(#[from] NotLeader),
    /// They were changed meanwhile: look again and decide anew.
    #[error("the fleet's voters were changed meanwhile")]
    Changed,
    /// openraft refuses the change.
    #[error("the fleet's voters cannot be changed so: {0}")]
    Refused(String),
    /// No quorum in time; it may happen yet.
    #[error("the fleet's voters were not changed within {waited_ms} ms")]
    Timeout { waited_ms: u64 },
    /// Consensus stopped.
    #[error("consensus has stopped: {0}")]
    Stopped(String),
}

/// Why an explicit repair of a stopped node's database failed.
#[derive(Debug, thiserror::Error)]
pub enum OfflineError {
    /// The disk, or what is on it.
    #[error("the fleet's database in {dir} cannot be used: {source}")]
    Disk { dir: PathBuf, source: std::io::Error },
    /// The database is another node's.
    #[error("the fleet's database belongs to node {stored}, not to node {asked}")]
    OtherNode { stored: u64, asked: u64 },
    /// Nothing to recover from.
    #[error("the fleet's database in {dir} holds no state")]
    Empty { dir: PathBuf },
    /// A state is there already.
    #[error("the fleet's database in {dir} holds a state already; importing would lose it")]
    NotEmpty { dir: PathBuf },
}
