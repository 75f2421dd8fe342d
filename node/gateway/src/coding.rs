//! Content codings of answers: a decoded copy for the scan, while the raw bytes pass unchanged. A coding that nobody here reads is
//! not asked for, and passed on unread if it comes all the same.

use ks_gateway::codec::{self, CodecError, Encoding};

/// The decoder of one answer.
pub enum Decoder {
    /// No coding.
    Plain,
    /// One that is read.
    Coded(codec::Decoder),
    /// A coding that is not read.
    Opaque,
}

impl Decoder {
    /// For the value of `content-encoding`.
    pub fn new(coding: Option<&str>) -> Self {
        match Encoding::parse(coding) {
            Ok(Encoding::Identity) => Self::Plain,
            Ok(known) => codec::Decoder::new(known).map_or(Self::Opaque, Self::Coded),
            Err(_) => Self::Opaque,
        }
    }

    /// Hands on what comes out of these raw bytes.
    ///
    /// # Errors
    /// If they are not of this coding.
    pub fn push(&mut self, raw: &[u8], out: &mut dyn FnMut(&[u8])) -> Result<(), CodecError> {
        match self {
            Self::Plain => out(raw),
            Self::Opaque => {}
            Self::Coded(d) => d.push(raw, out)?,
        }
        Ok(())
    }
}

/// The `accept-encoding` that goes to a provider: what the client takes and this gateway reads.
pub fn accepted(asked: Option<&str>, plain_only: bool) -> String {
    let kept = asked.filter(|_| !plain_only).and_then(Encoding::restrict);
    kept.unwrap_or_else(|| "identity".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_codings_that_are_read_are_asked_for() {
        assert_eq!(accepted(Some("gzip, deflate, br, zstd"), false), "gzip, deflate, zstd");
        assert_eq!(accepted(Some("br;q=1.0"), false), "identity");
        assert_eq!(accepted(Some("gzip"), true), "identity");
        assert_eq!(accepted(None, false), "identity");
    }
}
