//! Identifiers as newtypes. Text forms are lower-case hex; parsing refuses anything else.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Why a text form was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IdError {
    /// Not the right number of hex digits, or other characters.
    #[error("{kind} is written as {digits} lower-case hex digits, got {got:?}")]
    NotHex { kind: &'static str, digits: usize, got: String },
    /// A session name outside the allowed alphabet or length.
    #[error("a session name has 1-63 characters of a-z, 0-9, '-' and '.', starting with a letter or digit; got {0:?}")]
    Name(String),
}

macro_rules! hex_id {
    ($(#[$m:meta])* $name:ident, $len:literal, $kind:literal) => {
        $(#[$m])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub [u8; $len]);

        impl $name {
            /// The id as lower-case hex.
            pub fn to_hex(&self) -> String { hex::encode(self.0) }
            /// The first eight hex digits, for people.
            pub fn short(&self) -> String { hex::encode(&self.0[..4]) }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result { f.write_str(&self.to_hex()) }
        }
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result { write!(f, "{}({})", stringify!($name), self.short()) }
        }
        impl FromStr for $name {
            type Err = IdError;
            fn from_str(s: &str) -> Result<Self, IdError> {
                let bad = || IdError::NotHex { kind: $kind, digits: $len * 2, got: s.chars().take(80).collect() };
                if s.bytes().any(|b| b.is_ascii_uppercase()) { return Err(bad()); }
                let mut out = [0u8; $len];
                hex::decode_to_slice(s, &mut out).map_err(|_| bad())?;
                Ok(Self(out))
            }
        }
        impl Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> { s.serialize_str(&self.to_hex()) }
        }
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                let s = String::deserialize(d)?;
                s.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}

hex_id!(/// A user's durable machine; 16 random bytes, never reused.
    SessionId, 16, "a session id");
hex_id!(/// Keyed BLAKE3 of a chunk's (or segment's, or state object's) plain bytes. All zeros means "a chunk of zeros".
    ChunkId, 32, "a chunk id");
hex_id!(/// BLAKE3 of a manifest's bytes: the checkpoint's name.
    CheckpointId, 32, "a checkpoint id");
hex_id!(/// BLAKE3 of a whole pack file as stored.
    PackId, 32, "a pack id");
hex_id!(/// One fleet: 16 random bytes, made when it is founded.
    FleetId, 16, "a fleet id");
hex_id!(/// Content id of an image (kernel, initramfs and root disk).
    ImageId, 32, "an image id");

impl ChunkId {
    /// Stands for a chunk (or a whole segment) of zeros; nothing is stored for it.
    pub const ZERO: ChunkId = ChunkId([0; 32]);
    /// True for [`ChunkId::ZERO`].
    pub fn is_zero(&self) -> bool {
        self.0 == [0; 32]
    }
}

/// A name a person gives to a session: unique among live sessions of one fleet.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct SessionName(String);

impl SessionName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}
impl fmt::Display for SessionName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
impl FromStr for SessionName {
    type Err = IdError;
    fn from_str(s: &str) -> Result<Self, IdError> {
        let ok = (1..=63).contains(&s.len())
            && s.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'.')
            && s.as_bytes()[0].is_ascii_alphanumeric();
        if ok { Ok(Self(s.to_owned())) } else { Err(IdError::Name(s.chars().take(80).collect())) }
    }
}
impl<'de> Deserialize<'de> for SessionName {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let s = String::deserialize(d)?;
        s.parse().map_err(serde::de::Error::custom)
    }
}

/// The fencing number of one run: ordered by generation, then epoch, then run. Stamped on every external effect;
/// an older one is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Default)]
pub struct RunToken {
    /// Rises with `ks fleet recover`.
    pub generation: u64,
    /// Rises with every assignment of the session to a node.
    pub epoch: u64,
    /// Rises with every start of the VM on the same node; durable before the VM starts.
    pub run: u64,
}
impl fmt::Display for RunToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.generation, self.epoch, self.run)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hex_ids_round_trip_and_refuse_other_text() {
        let id = ChunkId([7; 32]);
        assert_eq!(id.to_hex().parse::<ChunkId>(), Ok(id));
        for bad in ["", "00", &"0".repeat(63), &"G".repeat(64), &"A".repeat(64)] {
            assert!(bad.parse::<ChunkId>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn session_names_keep_to_their_alphabet() {
        for good in ["a", "quiet-otter", "quiet-otter.1", "7x"] {
            assert!(good.parse::<SessionName>().is_ok(), "{good}");
        }
        for bad in ["", "-a", ".a", "A", "a/b", "a b", "ä", &"a".repeat(64)] {
            assert!(bad.parse::<SessionName>().is_err(), "{bad}");
        }
    }

    #[test]
    fn run_tokens_order_by_generation_then_epoch_then_run() {
        let t = |generation, epoch, run| RunToken { generation, epoch, run };
        assert!(t(1, 0, 0) > t(0, 9, 9) && t(0, 2, 0) > t(0, 1, 9) && t(0, 1, 2) > t(0, 1, 1));
    }
}
