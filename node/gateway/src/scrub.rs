//! Keeps a provider's error from telling a guest the key: bodies of 401 and 403 are replaced, other errors are searched.

use ks_gateway::dialect::{Dialect, Family};
use serde_json::json;

/// What becomes of an error's body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Clean {
    /// It passes as it came.
    Same,
    /// This passes in its place, uncoded.
    Replaced(Vec<u8>),
}

/// Letters of a key from which a piece of it counts as the key.
const PIECE: usize = 8;

/// Decoded bytes of an error that are searched; a longer one does not pass.
const TEXT_BYTES_MAX: usize = 8 << 20;

fn tells(text: &[u8], key: &str) -> bool {
    let key = key.as_bytes();
    if key.is_empty() {
        return false;
    }
    let n = key.len().min(PIECE);
    // The ends of a key are what errors show; its first letters alone (`sk-proj-`) are the same in every key.
    let pieces = key.windows(n).skip(if key.len() > 2 * PIECE { PIECE } else { 0 });
    pieces.into_iter().any(|p| text.windows(n).any(|w| w == p))
}

fn message(dialect: Dialect, status: u16) -> Vec<u8> {
    let text = "the provider refused the key that this session's user stored; its words are not passed on, because they may repeat \
                the key. Test it with: ks key test";
    let kind = if status == 401 { "authentication_error" } else { "permission_error" };
    let family = match dialect {
        Dialect::OpenaiChat | Dialect::OpenaiResponses => Family::Openai,
        Dialect::Anthropic => Family::Anthropic,
        Dialect::Gemini => Family::Gemini,
        Dialect::Other(family) => family,
    };
    match family {
        Family::Openai => json!({"error": {"message": text, "type": kind, "param": null, "code": "provider_refused_key"}}),
        Family::Anthropic => json!({"type": "error", "error": {"type": kind, "message": text}}),
        Family::Gemini => json!({"error": {"code": status, "message": text, "status": "PERMISSION_DENIED"}}),
    }
    .to_string()
    .into_bytes()
}

/// What passes of an error's body.
pub fn error_body(status: u16, dialect: Dialect, coding: Option<&str>, raw: &[u8], key: &str) -> Clean {
    if status == 401 || status == 403 {
        return Clean::Replaced(message(dialect, status));
    }
    let mut text = Vec::new();
    let read = crate::coding::Decoder::new(coding).push(raw, &mut |plain| {
        if text.len() < TEXT_BYTES_MAX {
            text.extend_from_slice(plain);
        }
    });
    let readable = read.is_ok() && text.len() < TEXT_BYTES_MAX && text.is_empty() == raw.is_empty();
    match readable && !tells(&text, key) {
        true => Clean::Same,
        false => Clean::Replaced(
            json!({"error": {"message": "the provider's error repeated a part of the key, or could not be read, and is not passed on",
                "type": "provider_error", "code": status.to_string()}})
            .to_string()
            .into_bytes(),
        ),
    }
}

/// Blanks a header's value that tells the key.
pub fn header(value: &mut String, key: &str) {
    if tells(value.as_bytes(), key) {
        "removed".clone_into(value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "sk-proj-marked-0123456789abcdefXYZ";

    #[test]
    fn no_error_tells_the_key_or_a_piece_of_it() {
        let echo = format!("Incorrect API key provided: {KEY}");
        for status in [401, 403, 400, 500] {
            let Clean::Replaced(out) = error_body(status, Dialect::OpenaiChat, None, echo.as_bytes(), KEY) else {
                panic!("{status} passed")
            };
            assert!(!tells(&out, KEY), "{status}");
        }
        let tail = b"no such key: sk-...89abcdefXYZ";
        assert!(matches!(error_body(400, Dialect::Anthropic, None, tail, KEY), Clean::Replaced(_)));
        assert_eq!(error_body(429, Dialect::Anthropic, None, b"Rate limit for sk-proj- keys", KEY), Clean::Same);
        assert!(matches!(error_body(400, Dialect::Gemini, Some("br"), b"\x01\x02", KEY), Clean::Replaced(_)));
        let mut h = format!("Bearer {KEY}");
        header(&mut h, KEY);
        assert_eq!(h, "removed");
    }
}
