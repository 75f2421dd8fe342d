//! Copies of a session's journal on other nodes: what the gateway of its owner asks of theirs, by way of the two nodes' daemons.
//!
//! ```text
//! owner's ksgw ──PeersAsk, peers.sock──► owner's ksd ──control plane──► holder's ksd ──AdminAsk::Copy, gw.sock──► holder's ksgw
//! ```
//!
//! The holder's daemon checks in the replicated state that the asking node owns the session at that epoch; the gateway takes its
//! word. Messages are framed as the relay's are, so that each has at most 1 MiB.

use crate::ids::SessionId;
use serde::{Deserialize, Serialize};

/// Name of the daemon's socket in its data folder's `gateway`, 0600.
pub const PEERS_SOCKET: &str = "peers.sock";
/// Bytes of a body in one message.
pub const PIECE_BYTES_MAX: usize = 256 << 10;
/// Bytes of lines in one message; one line may be longer.
pub const LINES_BYTES_MAX: usize = 320 << 10;

/// Part of a call's bodies that is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BodyPart {
    /// The request as it came.
    Request,
    /// Status and headers of the answer.
    Head,
    /// The answer.
    Answer,
}

/// One thing asked of a holder, by the session's owner at some epoch. Every one ends the epochs below that one there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case")]
pub enum CopyAsk {
    /// Ends the epochs below, durably, and says how much is there.
    Seal {},
    /// Makes lines (without line feeds) durable, the first of which is line `from`, counted from 0.
    Append {
        /// Where they go.
        from: u64,
        /// The hash at the end of the line before; "" before the first.
        before: String,
        /// They.
        lines: Vec<String>,
        /// No line stands after these: what the holder has beyond them was written under an ended epoch and goes.
        all: bool,
    },
    /// Writes bytes of a body; durable when `last` was answered.
    Body {
        /// The purchase.
        seq: u64,
        /// Which part.
        part: BodyPart,
        /// Where they go; 0 begins the part anew.
        offset: u64,
        /// They, in hex.
        hex: String,
        /// The last of several.
        last: bool,
    },
    /// Gives lines from `from` on.
    Lines {
        /// The first.
        from: u64,
    },
    /// Gives bytes of a body.
    Read {
        /// The purchase.
        seq: u64,
        /// Which part.
        part: BodyPart,
        /// From where.
        offset: u64,
    },
}

/// What a holder says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "copy", rename_all = "kebab-case")]
pub enum CopyAnswer {
    /// Done; so much is durable there.
    Stands {
        /// Lines.
        lines: u64,
        /// The epoch of the owner whose whole ledger it had last.
        written: u64,
    },
    /// Lines before the first one are missing, or are not the same: go on from here.
    Behind {
        /// Lines that may be the same.
        lines: u64,
    },
    /// A newer owner was heard of.
    Sealed {
        /// Its epoch.
        epoch: u64,
    },
    /// To `Lines`.
    Lines {
        /// Without line feeds.
        lines: Vec<String>,
        /// There are more.
        more: bool,
    },
    /// To `Read`.
    Bytes {
        /// In hex.
        hex: String,
        /// Length of the whole; None: there is no such body.
        total: Option<u64>,
    },
    /// Not done now.
    Away {
        /// Why.
        why: String,
    },
}

/// What a gateway asks of its own daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "kebab-case")]
pub enum PeersAsk {
    /// Who keeps copies of this session's journal.
    Set {
        /// The session.
        session: SessionId,
    },
    /// A call of this session was bought and its answer is whole: a good moment for a checkpoint.
    Bought {
        /// The session.
        session: SessionId,
    },
    /// Passed on to the gateway of another node.
    Copy {
        /// The node's number.
        to: u64,
        /// The session.
        session: SessionId,
        /// The asker's epoch.
        epoch: u64,
        /// What.
        copy: CopyAsk,
    },
}

/// What the daemon answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "kebab-case")]
pub enum PeersAnswer {
    /// To `Set`.
    Set {
        /// The session's epoch, as the state has it here.
        epoch: u64,
        /// Nodes that must have a line before it counts; not this one. Empty: there is to be no other copy.
        holders: Vec<u64>,
        /// All other nodes that are heard of, any of which may have kept a copy.
        members: Vec<u64>,
    },
    /// To `Copy`.
    Copy {
        /// What the holder says.
        copy: CopyAnswer,
    },
    /// To `Bought`.
    Done {},
    /// Not known, or not reached.
    Away {
        /// Why.
        why: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::relay::{decode_message, encode_message};

    #[test]
    fn the_largest_messages_fit_and_round_trip() {
        let line = "\"".repeat(LINES_BYTES_MAX);
        let lines = CopyAsk::Append { from: u64::MAX, before: "f".repeat(64), lines: vec![line], all: true };
        let hex = "ab".repeat(PIECE_BYTES_MAX);
        let body = CopyAsk::Body { seq: u64::MAX, part: BodyPart::Answer, offset: u64::MAX, hex, last: true };
        for copy in [lines, body] {
            let ask = PeersAsk::Copy { to: u64::MAX, session: SessionId([9; 16]), epoch: u64::MAX, copy };
            let bytes = encode_message(&ask).unwrap();
            assert_eq!(decode_message::<PeersAsk>(&bytes[4..]).unwrap(), ask);
        }
    }
}
