//! One request to one peer, and what its failures mean.

use super::endpoint::{Bulk, Holder, Inner, STALL_MAX};
use crate::error::{CallError, Wrong};
use crate::wire::{self, ANSWER_BYTES_MAX, ASK, Answer, Ask, CODE_ABSENT, CODE_REFUSED, LOCATE_MAX};
use ks_blobs::PackPlace;
use ks_proto::ids::{CheckpointId, ChunkId};
use ks_proto::manifest::{MANIFEST_BYTES_MAX, Manifest};
use libp2p_identity::PeerId;
use std::time::Duration;

/// Looking through a large checkpoint's segments takes a peer no longer.
const CLOSURE_MAX: Duration = Duration::from_secs(120);

/// What a broken stream or connection means.
pub(crate) fn lost(peer: PeerId, e: &dyn std::fmt::Display) -> CallError {
    CallError::Lost { peer, why: e.to_string() }
}
pub(crate) fn stalled(peer: PeerId) -> CallError {
    CallError::Lost { peer, why: format!("nothing came for {} s", STALL_MAX.as_secs()) }
}
pub(crate) fn wrong(peer: PeerId, what: impl Into<String>, why: impl std::fmt::Display) -> CallError {
    CallError::Wrong { peer, wrong: Box::new(Wrong { what: what.into(), why: why.to_string() }) }
}
/// What a stream that ended with `e` means.
pub(crate) fn read_error(peer: PeerId, what: &str, e: &quinn::ReadError) -> CallError {
    match e {
        quinn::ReadError::Reset(code) if *code == CODE_ABSENT.into() => CallError::Absent { peer, what: what.to_owned() },
        quinn::ReadError::Reset(code) if *code == CODE_REFUSED.into() => CallError::Refused { peer, why: what.to_owned() },
        other => lost(peer, other),
    }
}

impl Inner {
    /// Sends a question; returns the answer and the stream, from which more may follow.
    pub async fn ask(&self, holder: &Holder, ask: &Ask, patience: Duration) -> Result<(Answer, quinn::RecvStream), CallError> {
        let peer = holder.peer;
        let c = self.connection(holder).await?;
        let work = async {
            let (mut send, mut recv) = c.open_bi().await.map_err(|e| lost(peer, &e))?;
            let mut bytes = vec![ASK];
            bytes.extend(wire::encode(ask));
            send.write_all(&bytes).await.map_err(|e| lost(peer, &e))?;
            let _ = send.finish(); // only fails if it was stopped, which reading tells
            let mut len = [0; 4];
            read_exact(peer, &mut recv, &mut len).await?;
            let len = u32::from_le_bytes(len) as usize;
            if len > ANSWER_BYTES_MAX {
                return Err(wrong(peer, "an answer", format!("{len} bytes, the most is {ANSWER_BYTES_MAX}")));
            }
            let mut body = vec![0; len];
            read_exact(peer, &mut recv, &mut body).await?;
            let answer: Answer = wire::decode(&body).map_err(|e| wrong(peer, "an answer", e))?;
            Ok((answer, recv))
        };
        let (answer, recv) = tokio::time::timeout(patience, work).await.map_err(|_| stalled(peer))??;
        match answer {
            Answer::Absent => Err(CallError::Absent { peer, what: name_of(ask) }),
            Answer::Refused { why } => Err(CallError::Refused { peer, why: why.chars().take(300).collect() }),
            Answer::Manifest { .. } | Answer::Located(_) | Answer::Closure { .. } | Answer::File { .. } => Ok((answer, recv)),
        }
    }

    /// A manifest from a peer, verified.
    pub async fn fetch_manifest(&self, holder: &Holder, id: &CheckpointId) -> Result<Vec<u8>, CallError> {
        let peer = holder.peer;
        let (answer, mut recv) = self.ask(holder, &Ask::Manifest { id: id.0 }, STALL_MAX).await?;
        let Answer::Manifest { bytes } = answer else { return Err(unexpected(peer, "a manifest")) };
        let len = usize::try_from(bytes).unwrap_or(usize::MAX);
        if len > MANIFEST_BYTES_MAX {
            return Err(wrong(peer, "a manifest", format!("{bytes} bytes, the most is {MANIFEST_BYTES_MAX}")));
        }
        let what = format!("manifest {}", id.short());
        let body = read_body(self, peer, &mut recv, len, &what).await?;
        Manifest::decode_verified(id, &body).map_err(|e| wrong(peer, what, e))?;
        Ok(body)
    }

    /// Where a peer has these objects.
    pub async fn locate(&self, holder: &Holder, ids: &[ChunkId]) -> Result<Vec<Vec<PackPlace>>, CallError> {
        let mut out = Vec::with_capacity(ids.len());
        for some in ids.chunks(LOCATE_MAX) {
            let ask = Ask::Locate { ids: some.iter().map(|i| i.0).collect() };
            let (answer, _) = self.ask(holder, &ask, STALL_MAX).await?;
            let Answer::Located(l) = answer else { return Err(unexpected(holder.peer, "places of objects")) };
            out.extend(l.check(some).map_err(|e| wrong(holder.peer, "places of objects", e))?);
        }
        Ok(out)
    }
}

impl Bulk {
    /// Does the holder have this checkpoint's whole closure?
    ///
    /// # Errors
    /// If it cannot be asked.
    pub async fn have_closure(&self, holder: &Holder, id: &CheckpointId) -> Result<bool, CallError> {
        match self.inner.ask(holder, &Ask::HaveClosure { id: id.0 }, CLOSURE_MAX).await? {
            (Answer::Closure { whole }, _) => Ok(whole),
            _ => Err(unexpected(holder.peer, "whether a closure is whole")),
        }
    }
}

pub(crate) fn unexpected(peer: PeerId, what: &str) -> CallError {
    wrong(peer, what, "an answer to another question")
}

fn name_of(ask: &Ask) -> String {
    match ask {
        Ask::Manifest { id } => format!("manifest {}", CheckpointId(*id).short()),
        Ask::Locate { .. } => "objects".into(),
        Ask::HaveClosure { id } => format!("checkpoint {}", CheckpointId(*id).short()),
        Ask::ImageFile { which, .. } => format!("the image's file {which}"),
    }
}

async fn read_exact(peer: PeerId, recv: &mut quinn::RecvStream, buf: &mut [u8]) -> Result<(), CallError> {
    recv.read_exact(buf).await.map_err(|e| match e {
        quinn::ReadExactError::FinishedEarly(n) => lost(peer, &format!("its answer ended after {n} bytes")),
        quinn::ReadExactError::ReadError(e) => read_error(peer, "this request", &e),
    })
}

/// Exactly `len` bytes, allocated as they come.
async fn read_body(
    inner: &Inner,
    peer: PeerId,
    recv: &mut quinn::RecvStream,
    len: usize,
    what: &str,
) -> Result<Vec<u8>, CallError> {
    let mut body = Vec::new();
    while body.len() < len {
        let want = (len - body.len()).min(256 * 1024);
        let chunk = tokio::time::timeout(STALL_MAX, recv.read_chunk(want, true)).await.map_err(|_| stalled(peer))?;
        match chunk.map_err(|e| read_error(peer, what, &e))? {
            Some(c) => {
                inner.receive_pace.pass(c.bytes.len()).await;
                inner.count_received(c.bytes.len());
                body.extend_from_slice(&c.bytes);
            }
            None => return Err(lost(peer, &format!("{what} ended after {} of {len} bytes", body.len()))),
        }
    }
    Ok(body)
}
