//! What only the leader of one term may do: an assignment because of a lapse belongs to the term of the lapse.

use super::consensus::Consensus;
use super::error::{NotLeader, ProposeError};
use super::types::{LeaderId, Types};
use crate::{Command, Proposal, ProposalId, Response};
use openraft::impls::OneshotResponder;
use openraft::type_config::TypeConfigExt;
use openraft::{AsyncRuntime, ReadPolicy};

impl<R: AsyncRuntime> Consensus<R> {
    /// A quorum round that began after this call: the term in which this node leads, and the index that it covers, which is
    /// applied here when this returns.
    ///
    /// # Errors
    /// If it does not lead, or no quorum answered in time.
    pub async fn covering_round(&self) -> Result<(u64, u64), NotLeader> {
        let round = self.inner.raft.get_read_linearizer(ReadPolicy::ReadIndex).await;
        let round = round.map_err(|e| NotLeader { leader: e.forward_to_leader().and_then(|f| f.leader_id) })?;
        // Never behind the first entry of the leader's own term, so its term is the leader's, whatever the watch says yet.
        let id = *round.read_log_id().log_id();
        let (term, index) = (id.leader_id.term, id.index());
        let mut applied = self.inner.machine.applied();
        let wait = applied.wait_for(|i| *i >= index);
        if tokio::time::timeout(super::propose::PROPOSE_WAIT, wait).await.is_err() {
            return Err(NotLeader { leader: self.leadership().borrow().leader });
        }
        Ok((term, index))
    }

    /// [`Consensus::propose`] on this node, as the leader of `term`, and in no other term: the entry is not forwarded, and not
    /// appended by a leader of another one. Gives the index of the entry as well.
    ///
    /// # Errors
    /// As there; [`ProposeError::NoQuorum`] if this node does not lead in that term.
    pub async fn propose_in_term(&self, term: u64, command: Command) -> Result<(u64, Response), ProposeError> {
        let waited_ms = super::propose::PROPOSE_WAIT.as_millis() as u64;
        let ticket = self.inner.flight.begin().await?;
        let (node, boot, nonce) = (self.inner.number, self.inner.courier.process.boot, self.inner.courier.process.incarnation);
        let id = ProposalId { node, boot, nonce, seq: ticket.seq() };
        let proposal = Proposal { id, done_below: self.inner.flight.done_below(), command };
        let (tell, applied) = Types::<R>::oneshot();
        let responder = OneshotResponder::new(tell);
        let leader = LeaderId { term, node_id: node };
        let sent = self.inner.raft.write(proposal).with_leader(leader).responder(responder).await;
        sent.map_err(|e| ProposeError::Broken(e.to_string()))?;
        let none = |maybe| ProposeError::NoQuorum { waited_ms, maybe };
        match tokio::time::timeout(super::propose::PROPOSE_WAIT, applied).await {
            Ok(Ok(Ok(done))) => Ok((done.log_id.index(), done.data)),
            Ok(Ok(Err(_))) => Err(none(false)),
            Ok(Err(_)) => Err(ProposeError::Shutdown),
            Err(_) => Err(none(true)),
        }
    }
}
