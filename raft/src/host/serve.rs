//! What peers ask of this node. Their bytes are checked before anything believes them.

use super::consensus::{Consensus, Inner};
use super::frame::{self, Answer, Ask, No, Piece, Question, Tell};
use super::machine::hash;
use super::peers::Suspect;
use super::types::Snapshot;
use openraft::AsyncRuntime;
use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};

/// Largest snapshot that is taken from a leader.
const SNAPSHOT_BYTES_MAX: u64 = 1 << 30;

/// A snapshot that is arriving; one at a time, for there is one leader.
pub(super) struct Arriving {
    from: u64,
    blake3: String,
    total: u64,
    body: Vec<u8>,
}

impl<R: AsyncRuntime> Consensus<R> {
    /// Answers a request of the member `from`, whose identity the caller has proven.
    pub async fn serve(&self, from: u64, request: &[u8]) -> Vec<u8> {
        let tell = match frame::decode::<Question<R>>(request) {
            Ok((question, body)) => self.answer(from, question, body).await.unwrap_or_else(Tell::Refused),
            Err(e) => Tell::Refused(No::Malformed(e.to_string())),
        };
        let process = self.inner.courier.process;
        let shorter = |e: frame::FrameError| {
            let no: Answer<R> = Answer { process, tell: Tell::Refused(No::Failed(e.to_string())) };
            frame::encode(&no, &[]).unwrap_or_default()
        };
        frame::encode(&Answer { process, tell }, &[]).unwrap_or_else(shorter)
    }

    /// Nodes whose data folder seems to have been copied, lost or put back. They are not listened to.
    pub fn suspects(&self) -> BTreeMap<u64, Suspect> {
        self.inner.courier.suspects()
    }

    async fn answer(&self, from: u64, question: Question<R>, body: &[u8]) -> Result<Tell<R>, No> {
        let me = &self.inner;
        let Question { lineage, to, process, ask } = question;
        if to != me.number {
            return Err(No::NotMe { to, me: me.number });
        }
        me.courier.admit(from, process)?;
        me.check_lineage(lineage, &ask).await?;
        let failed = |e: &dyn std::fmt::Display| No::Failed(e.to_string());
        Ok(match ask {
            Ask::Append(request) => Tell::Append(me.raft.append_entries(request).await.map_err(|e| failed(&e))?),
            Ask::Vote(request) => Tell::Vote(me.raft.vote(request).await.map_err(|e| failed(&e))?),
            Ask::PreVote(request) => Tell::Vote(me.raft.pre_vote(request).await.map_err(|e| failed(&e))?),
            Ask::Transfer(request) => Tell::Transfer(me.raft.handle_transfer_leader(request).await.map_err(|e| failed(&e))?),
            Ask::Snapshot(piece) => me.take_piece(from, piece, body).await?,
            Ask::Propose(proposal) => {
                if proposal.id.node != from {
                    return Err(No::Malformed(format!("node {from} proposes in the name of node {}", proposal.id.node)));
                }
                self.lead(proposal).await
            }
            Ask::Read => match self.read_index().await {
                Ok(index) => Tell::Read { index },
                Err(e) => Tell::NotLeader { leader: e.leader },
            },
        })
    }
}

impl<R: AsyncRuntime> Inner<R> {
    /// Members of an older lineage are not listened to. A node without one takes its leader's; one with an older one must
    /// be reset, which its owner does ([`Consensus::superseded`]).
    async fn check_lineage(&self, theirs: u64, ask: &Ask<R>) -> Result<(), No> {
        let mine = self.lineage();
        if theirs == mine {
            return Ok(());
        }
        if theirs < mine {
            return Err(No::OldLineage { theirs, mine });
        }
        if mine == 0 && matches!(ask, Ask::Append(_) | Ask::Snapshot(_)) {
            return self.adopt_lineage(theirs).await.map_err(|e| No::Failed(e.to_string()));
        }
        if mine != 0 {
            self.superseded.send_if_modified(|s| s.replace(theirs) != Some(theirs));
        }
        Err(No::NewLineage { theirs, mine })
    }

    async fn take_piece(&self, from: u64, piece: Piece, body: &[u8]) -> Result<Tell<R>, No> {
        let Piece { vote, meta, blake3, offset, total } = piece;
        if total > SNAPSHOT_BYTES_MAX || body.len() as u64 > total {
            return Err(No::Malformed(format!("a snapshot of {total} bytes, of at most {SNAPSHOT_BYTES_MAX}")));
        }
        let whole = {
            let mut slot = self.arriving.lock().unwrap_or_else(PoisonError::into_inner);
            if offset == 0 {
                *slot = Some(Arriving { from, blake3: blake3.clone(), total, body: Vec::new() });
            }
            let Some(a) = slot.as_mut().filter(|a| a.from == from && a.blake3 == blake3 && a.total == total) else {
                return Ok(Tell::Next(0));
            };
            let so_far = a.body.len() as u64;
            if offset != so_far || so_far + body.len() as u64 > total {
                return Ok(Tell::Next(so_far));
            }
            a.body.extend_from_slice(body);
            if (a.body.len() as u64) < total {
                return Ok(Tell::Next(a.body.len() as u64));
            }
            slot.take().map(|a| a.body).unwrap_or_default()
        };
        if hash(&whole) != blake3 {
            return Err(No::Malformed("the snapshot does not have its hash".into()));
        }
        let snapshot = Snapshot { meta, snapshot: Arc::new(whole) };
        let done = self.raft.install_full_snapshot(vote, snapshot).await;
        done.map(Tell::Snapshot).map_err(|e| No::Failed(e.to_string()))
    }
}
