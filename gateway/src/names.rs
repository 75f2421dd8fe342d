//! Names of the gateway's things: digests, nonces, calls and journal entries. Text forms are lower-case hex; anything
//! else is refused.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// `N` bytes whose text form is `2 N` lower-case hex digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Hex<const N: usize>(pub [u8; N]);

/// A BLAKE3 hash.
pub type Digest = Hex<32>;
/// What a relay drew at the hook that began a timeline; names the timeline.
pub type Nonce = Hex<16>;

/// Text that is not the hex form asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{digits} lower-case hex digits are needed here, not {got:?}")]
pub struct HexError {
    digits: usize,
    got: String,
}

impl Digest {
    /// The hash of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }
}
impl<const N: usize> fmt::Display for Hex<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}
impl<const N: usize> fmt::Debug for Hex<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", &hex::encode(self.0)[..8.min(N * 2)])
    }
}
impl<const N: usize> FromStr for Hex<N> {
    type Err = HexError;
    fn from_str(text: &str) -> Result<Self, HexError> {
        let bad = || HexError { digits: N * 2, got: text.chars().take(80).collect() };
        let mut out = [0; N];
        if text.bytes().any(|b| b.is_ascii_uppercase()) {
            return Err(bad());
        }
        hex::decode_to_slice(text, &mut out).map_err(|_| bad())?;
        Ok(Self(out))
    }
}
impl<const N: usize> Serialize for Hex<N> {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(&self.to_string())
    }
}
impl<'de, const N: usize> Deserialize<'de> for Hex<N> {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        String::deserialize(d)?.parse().map_err(serde::de::Error::custom)
    }
}

/// One request of one client, as the relay named it. The same id sent again is the same call, never a second one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct CallId {
    /// The timeline in which the client asked.
    pub nonce: Nonce,
    /// Counts the calls of that timeline.
    pub counter: u64,
}

/// One purchase: the number of its `intent` line, and whose journal that is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct EntryRef {
    /// The session whose journal has it; none is this session's own. A fork may use its parent's entries.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    /// The line's number.
    pub seq: u64,
}

impl EntryRef {
    /// An entry of the session's own journal.
    pub fn own(seq: u64) -> Self {
        Self { session: None, seq }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hex_reads_back_and_refuses_everything_else() {
        let d = Digest::of(b"x");
        assert_eq!(d.to_string().parse(), Ok(d));
        for bad in ["", "0", "zz", &d.to_string().to_uppercase(), &format!("{d}00")] {
            assert!(bad.parse::<Digest>().is_err(), "{bad}");
        }
        let call = CallId { nonce: Hex([7; 16]), counter: 3 };
        assert_eq!(serde_json::from_str::<CallId>(&serde_json::to_string(&call).unwrap()).unwrap(), call);
    }
}
