//! Voters and learners, for the leader. Who should vote is decided elsewhere; here it is carried out, guarded by the
//! membership that the decision was made under.

use super::consensus::Consensus;
use super::error::{ChangeError, NotLeader};
use super::types::{LogId, Types};
use openraft::async_runtime::watch::WatchReceiver;
use openraft::errors::{ClientWriteError, RaftError};
use openraft::raft::ClientWriteResponse;
use openraft::{AsyncRuntime, ChangeMembers, EmptyNode, Precondition};
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::time::Duration;
use tokio::time::timeout;

/// Longest wait for a change.
const CHANGE_WAIT: Duration = Duration::from_secs(10);

/// Names one membership: a change that was decided under another one is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Guard(Option<LogId>);

/// Voters and learners as this node knows them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Membership {
    /// Names it.
    pub guard: Guard,
    /// Numbers of the voters; of both groups while one takes over from the other.
    pub voters: BTreeSet<u64>,
    /// Numbers of the other nodes.
    pub learners: BTreeSet<u64>,
    /// A change is half done. Setting the voters again completes it.
    pub joint: bool,
}

/// How far the leader and the others are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress {
    /// Index of the leader's last entry.
    pub last: u64,
    /// Index up to which each node has the leader's entries; None if that is not known (yet).
    pub matched: BTreeMap<u64, Option<u64>>,
}

impl<R: AsyncRuntime> Consensus<R> {
    /// Voters and learners.
    pub fn membership(&self) -> Membership {
        let metrics = self.inner.raft.metrics();
        let metrics = metrics.borrow_watched();
        let stored = &metrics.membership_config;
        let membership = stored.membership();
        Membership {
            guard: Guard(*stored.log_id()),
            voters: membership.voter_ids().collect(),
            learners: membership.learner_ids().collect(),
            joint: membership.get_joint_config().len() > 1,
        }
    }

    /// Matched indexes; None unless this node leads.
    pub fn progress(&self) -> Option<Progress> {
        let metrics = self.inner.raft.metrics();
        let metrics = metrics.borrow_watched();
        let replication = metrics.replication.as_ref()?;
        let matched = replication.iter().map(|(n, id)| (*n, id.map(|id| id.index()))).collect();
        Some(Progress { last: metrics.last_log_index.unwrap_or(0), matched })
    }

    /// Sends the log to node `number` from now on, if it does not get it yet.
    ///
    /// # Errors
    /// If this node does not lead, or another change is under way.
    pub async fn ensure_learner(&self, number: u64) -> Result<(), ChangeError> {
        let now = self.membership();
        if now.voters.contains(&number) || now.learners.contains(&number) {
            return Ok(());
        }
        self.changed(self.inner.raft.add_learner(number, EmptyNode::default(), false)).await
    }

    /// Sends node `number` nothing any more. A voter is not dropped: take its vote first.
    ///
    /// # Errors
    /// If this node does not lead, the node votes, or another change is under way.
    pub async fn drop_learner(&self, number: u64) -> Result<(), ChangeError> {
        let now = self.membership();
        if now.voters.contains(&number) {
            return Err(ChangeError::Refused(format!("node {number} votes")));
        }
        if !now.learners.contains(&number) {
            return Ok(());
        }
        let change = ChangeMembers::RemoveNodes(BTreeSet::from([number]));
        self.changed(self.inner.raft.change_membership(change, true)).await
    }

    /// Makes exactly `voters` vote; those that did and do not any more stay as learners. Done once both the joint and the
    /// new membership are committed.
    ///
    /// # Errors
    /// [`ChangeError::Changed`] if the membership is not the one that `guard` names.
    pub async fn set_voters(&self, voters: &BTreeSet<u64>, guard: Guard) -> Result<(), ChangeError> {
        let now = self.membership();
        if now.guard != guard {
            return Err(ChangeError::Changed);
        }
        if now.voters == *voters && !now.joint {
            return Ok(());
        }
        let only_if = [Precondition::LastMembershipLogId { last_membership_log_id: guard.0 }];
        self.changed(self.inner.raft.change_membership_if(voters.iter().copied(), true, only_if)).await
    }

    /// Lets voter `to` lead, if it has all entries. Does not wait for it.
    ///
    /// # Errors
    /// If consensus stopped.
    pub async fn hand_over(&self, to: u64) -> Result<(), ChangeError> {
        self.inner.raft.trigger().transfer_leader(to).await.map_err(|e| ChangeError::Stopped(e.to_string()))
    }

    async fn changed<E>(&self, change: E) -> Result<(), ChangeError>
    where
        E: Future<Output = Result<ClientWriteResponse<Types<R>>, RaftError<Types<R>, ClientWriteError<Types<R>>>>>,
    {
        match timeout(CHANGE_WAIT, change).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(RaftError::Fatal(e))) => Err(ChangeError::Stopped(e.to_string())),
            Ok(Err(RaftError::APIError(e))) => Err(match e {
                ClientWriteError::ForwardToLeader(f) | ClientWriteError::LogEntryDiscarded(f) => {
                    ChangeError::NotLeader(NotLeader { leader: f.leader_id })
                }
                ClientWriteError::PreconditionFailed(_) => ChangeError::Changed,
                ClientWriteError::ChangeMembershipError(e) => ChangeError::Refused(e.to_string()),
            }),
            Err(_) => Err(ChangeError::Timeout { waited_ms: CHANGE_WAIT.as_millis() as u64 }),
        }
    }
}
