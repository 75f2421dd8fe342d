//! Bytes between members: a version, a JSON header behind its length, and a raw body (for pieces of a snapshot).
//!
//! ```text
//!  0        1            5                  5+n
//!  ┌────────┬────────────┬──────────────────┬──────────────┐
//!  │ 1      │ n, u32 LE  │ header, JSON     │ body         │
//!  └────────┴────────────┴──────────────────┴──────────────┘
//! ```
//!
//! Decoding refuses other versions, lengths beyond the message, and headers that are not what they should be; it
//! allocates no more than the message is long.

use super::types::{SnapshotMeta, Types, Vote};
use super::wire::MESSAGE_BYTES_MAX;
use crate::{Proposal, Response};
use openraft::AsyncRuntime;
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, TransferLeaderRequest, TransferLeaderResponse, VoteRequest,
    VoteResponse,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

const VERSION: u8 = 1;
const HEAD: usize = 5;

/// Bytes that are no frame.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum FrameError {
    #[error("the message has {0} bytes, fewer than its head")]
    Short(usize),
    #[error("the message has {0} bytes, more than are allowed")]
    Long(usize),
    #[error("the message has version {0}, this program speaks {VERSION}")]
    Version(u8),
    #[error("the message's header is {header} bytes long, but the message has {all}")]
    Length { header: usize, all: usize },
    #[error("the message's header cannot be read: {0}")]
    Header(String),
}

/// A request.
#[derive(Serialize, Deserialize)]
#[serde(bound = "")]
pub(super) struct Question<R: AsyncRuntime> {
    /// The sender's lineage: rises with each recovery; members of an older one are not listened to.
    pub lineage: u64,
    /// Whom it is for: a wiped node has another number.
    pub to: u64,
    /// The sender's process.
    pub process: Process,
    pub ask: Ask<R>,
}

/// Names one process of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Process {
    /// Random.
    pub incarnation: u64,
    /// Starts of the node so far, by its database.
    pub boot: u64,
}

/// What is asked.
#[derive(Serialize, Deserialize)]
#[serde(bound = "")]
pub(super) enum Ask<R: AsyncRuntime> {
    Append(AppendEntriesRequest<Types<R>>),
    Vote(VoteRequest<Types<R>>),
    PreVote(VoteRequest<Types<R>>),
    /// One piece, as the body. The last one installs the snapshot.
    Snapshot(Piece),
    Transfer(TransferLeaderRequest<Types<R>>),
    /// Apply this, if you lead.
    Propose(Proposal),
    /// Confirm with a quorum that you lead, and say how far one must have applied.
    Read,
}

/// Which part of which snapshot.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Piece {
    pub vote: Vote,
    pub meta: SnapshotMeta,
    /// BLAKE3 of the whole body.
    pub blake3: String,
    /// Where this piece begins.
    pub offset: u64,
    /// Length of the whole body.
    pub total: u64,
}

/// An answer, with the process that gives it.
#[derive(Serialize, Deserialize)]
#[serde(bound = "")]
pub(super) struct Answer<R: AsyncRuntime> {
    pub process: Process,
    pub tell: Tell<R>,
}

/// What is answered.
#[derive(Serialize, Deserialize)]
#[serde(bound = "")]
pub(super) enum Tell<R: AsyncRuntime> {
    Append(AppendEntriesResponse<Types<R>>),
    Vote(VoteResponse<Types<R>>),
    /// The piece was taken; the next one begins here.
    Next(u64),
    Snapshot(SnapshotResponse<Types<R>>),
    Transfer(TransferLeaderResponse<Types<R>>),
    /// The proposal was applied by the entry with this index.
    Applied {
        index: u64,
        response: Response,
    },
    /// What was committed when the question came is applied once this index is.
    Read {
        index: u64,
    },
    /// The one asked does not lead.
    NotLeader {
        leader: Option<u64>,
    },
    /// It was not carried out.
    Refused(No),
}

/// Why a request was not carried out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub(super) enum No {
    #[error("the message is malformed: {0}")]
    Malformed(String),
    #[error("the message is for node {to}, this is node {me}")]
    NotMe { to: u64, me: u64 },
    #[error("the sender's lineage {theirs} is over, the fleet was recovered as {mine}")]
    OldLineage { theirs: u64, mine: u64 },
    #[error("the sender's lineage {theirs} is newer than {mine}: this node must be reset")]
    NewLineage { theirs: u64, mine: u64 },
    #[error("another process speaks for node {number} now: two run on copies of one data folder")]
    Twin { number: u64 },
    #[error("the database of node {number} is an old copy or was lost: remove the node and let it join again")]
    RolledBack { number: u64 },
    #[error("it failed: {0}")]
    Failed(String),
}

/// Encodes a header and a body.
pub(super) fn encode<T: Serialize>(header: &T, body: &[u8]) -> Result<Vec<u8>, FrameError> {
    let mut out = vec![0; HEAD];
    serde_json::to_writer(&mut out, header).map_err(|e| FrameError::Header(e.to_string()))?;
    let length = out.len() - HEAD;
    out[0] = VERSION;
    out[1..HEAD].copy_from_slice(&u32::try_from(length).map_err(|_| FrameError::Long(length))?.to_le_bytes());
    out.extend_from_slice(body);
    if out.len() > MESSAGE_BYTES_MAX { Err(FrameError::Long(out.len())) } else { Ok(out) }
}

/// Decodes a header; the body is what follows.
pub(super) fn decode<T: DeserializeOwned>(message: &[u8]) -> Result<(T, &[u8]), FrameError> {
    let all = message.len();
    if all > MESSAGE_BYTES_MAX {
        return Err(FrameError::Long(all));
    }
    let Some(([version, length @ ..], rest)) = message.split_first_chunk::<HEAD>() else {
        return Err(FrameError::Short(all));
    };
    if *version != VERSION {
        return Err(FrameError::Version(*version));
    }
    let header = u32::from_le_bytes(*length) as usize;
    let (json, body) = rest.split_at_checked(header).ok_or(FrameError::Length { header, all })?;
    Ok((serde_json::from_slice(json).map_err(|e| FrameError::Header(e.to_string()))?, body))
}

#[cfg(test)]
mod tests {
    use super::*;
    use openraft_rt_tokio::TokioRuntime;
    use proptest::prelude::*;

    #[test]
    fn a_frame_reads_back_and_damaged_ones_are_refused() {
        let no: Tell<TokioRuntime> = Tell::Refused(No::NotMe { to: 1, me: 2 });
        let bytes = encode(&no, b"body").unwrap();
        let (back, body) = decode::<Tell<TokioRuntime>>(&bytes).unwrap();
        assert!(matches!(back, Tell::Refused(No::NotMe { to: 1, me: 2 })));
        assert_eq!(body, b"body");
        let refused = |b: &[u8]| decode::<Tell<TokioRuntime>>(b).err().unwrap();
        assert_eq!(refused(&bytes[..4]), FrameError::Short(4));
        assert_eq!(refused(&[9, 0, 0, 0, 0]), FrameError::Version(9));
        assert_eq!(refused(&[1, 255, 255, 255, 255]), FrameError::Length { header: u32::MAX as usize, all: 5 });
        assert!(matches!(refused(&[1, 1, 0, 0, 0, b'7']), FrameError::Header(_)));
    }

    proptest! {
        #[test]
        fn hostile_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), cut in 0usize..200, flip in any::<u8>()) {
            let _ = decode::<Question<TokioRuntime>>(&bytes);
            let question: Question<TokioRuntime> = Question { lineage: 1, to: 2, process: Process { incarnation: 3, boot: 1 }, ask: Ask::Read };
            let mut good = encode(&question, &[]).unwrap();
            let at = cut % good.len();
            good[at] ^= flip;
            let _ = decode::<Question<TokioRuntime>>(&good);
            let _ = decode::<Question<TokioRuntime>>(&good[..at]);
        }
    }
}
