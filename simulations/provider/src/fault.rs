//! What goes wrong in one answer, as the request asks for it: the header `x-test-fault`, or the model's name after `!`.
//!
//! A list like `tokens=20,stall=5,chunk=7`, with `,` or `+` between (a comma in a model's name means several models to some proxies). Unknown words are refused, so that a test cannot ask for a fault that never comes.

use serde::Serialize;

/// The most tokens of one answer.
pub const TOKENS_MAX: usize = 200_000;

/// Why a list of faults was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a fault this provider knows (tokens, words, status, error-at, cut, stall, slow, chunk, gzip, zstd, headers, redirect, echo-key)"
)]
pub struct FaultError(pub String);

/// One answer's faults and shape.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Faults {
    /// Output tokens.
    pub tokens: usize,
    /// Words per token, to make answers long.
    pub words: usize,
    /// Answer with this status and an error body in place of an answer.
    pub status: Option<u16>,
    /// After so many tokens, an error event, and the end.
    pub error_at: Option<usize>,
    /// Close the connection after so many bytes of the body.
    pub cut: Option<usize>,
    /// After so many tokens, wait for `POST /go`.
    pub stall: Option<usize>,
    /// Milliseconds between tokens.
    pub slow_ms: u64,
    /// Write so many bytes at a time, whatever they split.
    pub chunk: Option<usize>,
    /// Compress the body: `gzip` or `zstd`.
    pub coding: Option<&'static str>,
    /// So many additional headers.
    pub headers: usize,
    /// Answer 307 to this place in place of an answer.
    pub redirect: bool,
}

impl Default for Faults {
    fn default() -> Self {
        Self {
            tokens: 12,
            words: 1,
            status: None,
            error_at: None,
            cut: None,
            stall: None,
            slow_ms: 0,
            chunk: None,
            coding: None,
            headers: 0,
            redirect: false,
        }
    }
}

impl Faults {
    /// From a list; the empty one is the answer without faults.
    ///
    /// # Errors
    /// If a word is unknown or its number is none.
    pub fn parse(list: &str) -> Result<Self, FaultError> {
        let mut f = Self::default();
        for word in list.split([',', '+']).map(str::trim).filter(|w| !w.is_empty()) {
            let bad = || FaultError(word.to_owned());
            let (name, value) = word.split_once('=').unwrap_or((word, ""));
            let number = || value.parse::<usize>().map_err(|_| bad());
            match name {
                "tokens" => f.tokens = number()?.min(TOKENS_MAX),
                "words" => f.words = number()?.clamp(1, 1000),
                "status" => f.status = Some(value.parse().map_err(|_| bad())?),
                "error-at" => f.error_at = Some(number()?),
                "cut" => f.cut = Some(number()?),
                "stall" => f.stall = Some(number()?),
                "slow" => f.slow_ms = number()? as u64,
                "chunk" => f.chunk = Some(number()?.max(1)),
                "gzip" => f.coding = Some("gzip"),
                "zstd" => f.coding = Some("zstd"),
                "headers" => f.headers = number()?.min(50_000),
                "redirect" => f.redirect = true,
                _ => return Err(bad()),
            }
        }
        Ok(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_and_unknown_words_refused() {
        let f = Faults::parse("tokens=3, stall=1,chunk=7,gzip").unwrap();
        assert_eq!((f.tokens, f.stall, f.chunk, f.coding), (3, Some(1), Some(7), Some("gzip")));
        assert_eq!(f, Faults::parse("tokens=3+stall=1+chunk=7+gzip").unwrap());
        assert_eq!(Faults::parse("").unwrap(), Faults::default());
        for bad in ["stal=1", "cut=x", "status=-1"] {
            assert!(Faults::parse(bad).is_err(), "{bad}");
        }
    }
}
