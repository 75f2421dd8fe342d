//! The board of live nodes: the newest record of each member, and when it came. Pure; time is an argument.
//!
//! ```text
//!   nothing --offer: signed, a member's--> live --offer: higher seq--> live
//!      ^                                    |
//!      '---- silent for dead_ms, or no longer a member ----'
//! ```
//!
//! A node is live while its *signed sequence number* rises. Whoever gossips on behalf of a dead node can therefore not keep it
//! alive, and replaying an old record does nothing. When a node has been silent for `dead_ms` its last number is forgotten, so
//! that one whose clock was set back is heard again.

use std::collections::BTreeMap;

use libp2p::PeerId;

use crate::facts::{FactsError, NodeFacts};

/// What is known of a live node.
#[derive(Clone, Debug, PartialEq)]
pub struct LiveNode {
    /// Its newest record.
    pub facts: NodeFacts,
    /// When a record of it came last, in milliseconds since this [`crate::Gossip`] started: compare with [`crate::Gossip::now_ms`].
    pub seen_ms: u64,
}

pub(crate) struct Board {
    fleet: String,
    dead_ms: u64,
    nodes: BTreeMap<PeerId, LiveNode>,
    // When each member was heard last, the silent ones too.
    seen_ms: BTreeMap<PeerId, u64>,
}

impl Board {
    pub(crate) fn new(fleet: String, dead_ms: u64) -> Self {
        Self { fleet, dead_ms, nodes: BTreeMap::new(), seen_ms: BTreeMap::new() }
    }

    /// A text that claims to be `peer`'s record. The caller has checked that `peer` is a member.
    pub(crate) fn offer(&mut self, now_ms: u64, peer: PeerId, text: &str) -> Result<(), FactsError> {
        let facts = NodeFacts::verify(text, peer, &self.fleet)?;
        match self.nodes.get(&peer) {
            Some(known) if facts.seq <= known.facts.seq => Err(FactsError::Stale),
            Some(_) | None => {
                self.nodes.insert(peer, LiveNode { facts, seen_ms: now_ms });
                self.seen_ms.insert(peer, now_ms);
                Ok(())
            }
        }
    }

    /// This node's own record, which needs no proof.
    pub(crate) fn own(&mut self, now_ms: u64, me: PeerId, facts: NodeFacts) {
        self.nodes.insert(me, LiveNode { facts, seen_ms: now_ms });
    }

    /// Forgets the records of the silent ones, and all about those for whom `member` is false.
    pub(crate) fn expire(&mut self, now_ms: u64, member: impl Fn(&PeerId) -> bool) {
        let dead_ms = self.dead_ms;
        self.nodes.retain(|peer, node| member(peer) && now_ms < node.seen_ms + dead_ms);
        self.seen_ms.retain(|peer, _| member(peer));
    }

    /// When a record of this member came last, however long ago.
    pub(crate) fn seen_ms(&self, peer: &PeerId) -> Option<u64> {
        self.seen_ms.get(peer).copied()
    }

    pub(crate) fn live(&self) -> &BTreeMap<PeerId, LiveNode> {
        &self.nodes
    }
}

#[cfg(test)]
mod tests {
    use libp2p::identity::Keypair;

    use super::*;

    fn text(key: &Keypair, seq: u64, sessions: u32) -> String {
        NodeFacts { seq, sessions, ..NodeFacts::default() }.sign(key, "f").unwrap()
    }

    #[test]
    fn only_a_rising_signed_number_keeps_a_node_alive() {
        let key = Keypair::generate_ed25519();
        let peer = key.public().to_peer_id();
        let mut board = Board::new("f".into(), 5_000);
        board.offer(0, peer, &text(&key, 10, 1)).unwrap();
        for now in [1_000, 4_999] {
            assert_eq!(board.offer(now, peer, &text(&key, 10, 1)), Err(FactsError::Stale));
            assert_eq!(board.offer(now, peer, &text(&key, 9, 7)), Err(FactsError::Stale));
            board.expire(now, |_| true);
            assert_eq!(board.live()[&peer].facts.sessions, 1);
        }
        board.offer(4_999, peer, &text(&key, 11, 2)).unwrap();
        board.expire(9_998, |_| true);
        assert_eq!((board.live()[&peer].facts.sessions, board.live()[&peer].seen_ms), (2, 4_999));
        board.expire(9_999, |_| true);
        assert!(board.live().is_empty());
        assert_eq!(board.seen_ms(&peer), Some(4_999), "when it was heard last is kept");
        // A clock that was set back: heard again, once the old number is forgotten.
        board.offer(10_000, peer, &text(&key, 3, 5)).unwrap();
        board.expire(10_001, |other| *other != peer);
        assert!(board.live().is_empty(), "no longer a member");
        assert_eq!(board.seen_ms(&peer), None);
    }

    #[test]
    fn a_forged_record_changes_nothing() {
        let (key, liar) = (Keypair::generate_ed25519(), Keypair::generate_ed25519());
        let peer = key.public().to_peer_id();
        let mut board = Board::new("f".into(), 5_000);
        board.offer(0, peer, &text(&key, 1, 1)).unwrap();
        assert_eq!(board.offer(1, peer, &text(&liar, 99, 7)), Err(FactsError::Signature));
        assert_eq!(board.live()[&peer].facts.seq, 1);
    }
}
