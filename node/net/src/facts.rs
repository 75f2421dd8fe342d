//! What a node tells the others about itself, signed, so that no member can speak for another one.
//!
//! Text `ksf1.<signature>.<json>`; see `docs/formats.md`. The signer is the peer whose record it claims to be: the key is inside
//! an ed25519 PeerId. The signature covers the fleet's id, so that a record means nothing in another fleet.

use std::collections::BTreeMap;

use libp2p::{
    PeerId,
    identity::{Keypair, PublicKey},
};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Longest record text.
pub const FACTS_BYTES_MAX: usize = 8 << 10;
const PREFIX: &str = "ksf1.";
const CONTEXT: &[u8] = b"keepstate node facts 1\0";
const SIGNATURE_HEX: usize = 128;

/// One node's word about itself. Hints for placement and listings; never a proof of anything.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeFacts {
    /// Raft's number of the node.
    pub number: u64,
    /// Random at each start of the node: two at once mean a copied key.
    pub incarnation: u64,
    /// Rises with each record of a node. [`crate::Gossip`] fills it in.
    pub seq: u64,
    /// Runnable tasks of the last minute, in thousandths.
    pub load_milli: u64,
    /// Memory that sessions can still get, in MiB.
    pub mem_free_mib: u64,
    /// The node's memory, in MiB.
    pub mem_total_mib: u64,
    /// Processors.
    pub cpus: u32,
    /// Sessions whose VM runs here.
    pub sessions: u32,
    /// Free space of the node's state directory, in MiB.
    pub disk_free_mib: u64,
    /// CPU profiles whose sessions can run here.
    pub profiles: Vec<String>,
    /// Version by program (`ksd`, `kernel`, …).
    pub versions: BTreeMap<String, String>,
    /// Sessions by state (`running`, `paused`, …).
    pub states: BTreeMap<String, u32>,
    /// Raft's last applied index.
    pub applied: u64,
    /// Takes no new sessions.
    pub draining: bool,
}

/// Why a record is ignored.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum FactsError {
    /// Above [`FACTS_BYTES_MAX`].
    #[error("the record is too long ({0} bytes)")]
    TooLong(usize),
    /// Another version, or no record.
    #[error("the record is not of a version that this node knows")]
    Version,
    /// Not signed by the peer for whom it speaks, or for another fleet.
    #[error("the signature is not of the peer that the record speaks for")]
    Signature,
    /// Signed, but not readable.
    #[error("the record is not readable")]
    Json,
    /// The peer's id holds no ed25519 key.
    #[error("the peer's id holds no key")]
    Key,
    /// Older than, or as old as, what is known.
    #[error("the record is not newer than what is known")]
    Stale,
}

impl NodeFacts {
    /// The signed text; `None` if it would be above [`FACTS_BYTES_MAX`].
    pub(crate) fn sign(&self, key: &Keypair, fleet: &str) -> Option<String> {
        let json = serde_json::to_string(self).ok()?;
        let signature = key.sign(&message(fleet, &json)).ok()?;
        let text = format!("{PREFIX}{}.{json}", hex::encode(signature));
        (text.len() <= FACTS_BYTES_MAX).then_some(text)
    }

    /// Reads what claims to be `peer`'s record.
    pub(crate) fn verify(text: &str, peer: PeerId, fleet: &str) -> Result<Self, FactsError> {
        if text.len() > FACTS_BYTES_MAX {
            return Err(FactsError::TooLong(text.len()));
        }
        let rest = text.strip_prefix(PREFIX).ok_or(FactsError::Version)?;
        let (signature, json) = rest.split_once('.').ok_or(FactsError::Version)?;
        if signature.len() != SIGNATURE_HEX {
            return Err(FactsError::Signature);
        }
        let signature = hex::decode(signature).map_err(|_| FactsError::Signature)?;
        if !key_of(peer)?.verify(&message(fleet, json), &signature) {
            return Err(FactsError::Signature);
        }
        serde_json::from_str(json).map_err(|_| FactsError::Json)
    }
}

fn message(fleet: &str, json: &str) -> Vec<u8> {
    let mut out = CONTEXT.to_vec();
    out.extend(u32::try_from(fleet.len()).unwrap_or(u32::MAX).to_le_bytes());
    out.extend(fleet.as_bytes());
    out.extend(json.as_bytes());
    out
}

/// The public key inside an ed25519 PeerId: an "identity" multihash of the key's protobuf.
fn key_of(peer: PeerId) -> Result<PublicKey, FactsError> {
    let bytes = peer.to_bytes();
    let key = bytes.strip_prefix(&[0x00, 0x24]).ok_or(FactsError::Key)?;
    let key = PublicKey::try_decode_protobuf(key).map_err(|_| FactsError::Key)?;
    if key.to_peer_id() == peer { Ok(key) } else { Err(FactsError::Key) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts() -> NodeFacts {
        NodeFacts { number: 3, incarnation: u64::MAX, seq: 9, profiles: vec!["x".into()], ..NodeFacts::default() }
    }

    #[test]
    fn only_the_peer_itself_can_speak_for_it_in_its_fleet() {
        let (key, other) = (Keypair::generate_ed25519(), Keypair::generate_ed25519());
        let (peer, stranger) = (key.public().to_peer_id(), other.public().to_peer_id());
        let text = facts().sign(&key, "fleet").unwrap();
        assert_eq!(NodeFacts::verify(&text, peer, "fleet"), Ok(facts()));
        assert_eq!(NodeFacts::verify(&text, stranger, "fleet"), Err(FactsError::Signature));
        assert_eq!(NodeFacts::verify(&text, peer, "fleet2"), Err(FactsError::Signature));
        assert_eq!(NodeFacts::verify(&facts().sign(&other, "fleet").unwrap(), peer, "fleet"), Err(FactsError::Signature));
        assert_eq!(NodeFacts::verify(&text, PeerId::random(), "fleet"), Err(FactsError::Key));
    }

    #[test]
    fn any_changed_byte_is_noticed() {
        let key = Keypair::generate_ed25519();
        let text = facts().sign(&key, "fleet").unwrap();
        for at in 0..text.len() {
            let mut bytes = text.clone().into_bytes();
            bytes[at] ^= 1;
            let Ok(bad) = String::from_utf8(bytes) else { continue };
            assert!(NodeFacts::verify(&bad, key.public().to_peer_id(), "fleet").is_err(), "byte {at}");
        }
        for bad in ["", "ksf1.", "ksf1.00.{}", "ksf2.", &"x".repeat(FACTS_BYTES_MAX + 1)] {
            assert!(NodeFacts::verify(bad, key.public().to_peer_id(), "fleet").is_err());
        }
    }

    /// Golden text of version 1: the key of 32 ones.
    #[test]
    fn the_text_is_stable_and_later_fields_do_not_break_it() {
        let key = Keypair::ed25519_from_bytes([1; 32]).unwrap();
        let text = NodeFacts { number: 3, seq: 9, ..NodeFacts::default() }.sign(&key, "fleet").unwrap();
        let json = r#"{"number":3,"incarnation":0,"seq":9,"load_milli":0,"mem_free_mib":0,"mem_total_mib":0,"cpus":0,"sessions":0,"disk_free_mib":0,"profiles":[],"versions":{},"states":{},"applied":0,"draining":false}"#;
        assert!(text.ends_with(&format!(".{json}")), "{text}");
        let signed = b"keepstate node facts 1\0\x05\0\0\0fleet".iter().copied().chain(json.bytes()).collect::<Vec<_>>();
        assert_eq!(text, format!("ksf1.{}.{json}", hex::encode(key.sign(&signed).unwrap())));

        let json = r#"{"number":3,"new":{"x":[1]}}"#;
        let signature = key.sign(&message("fleet", json)).unwrap();
        let read = NodeFacts::verify(&format!("ksf1.{}.{json}", hex::encode(signature)), key.public().to_peer_id(), "fleet");
        assert_eq!(read, Ok(NodeFacts { number: 3, ..NodeFacts::default() }));
    }

    #[test]
    fn a_record_that_nobody_would_read_is_not_sent() {
        let key = Keypair::generate_ed25519();
        let long = NodeFacts { profiles: vec!["x".repeat(FACTS_BYTES_MAX)], ..NodeFacts::default() };
        assert_eq!(long.sign(&key, "fleet"), None);
    }
}
