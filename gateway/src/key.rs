//! The two keys under which a request is found again.

use crate::dialect::{Family, scrub_path};
use crate::json::{self, Canonical, Rule};
use crate::names::{Digest, Hex};
use serde::{Deserialize, Serialize};

/// Headers that tell an API's version or its beta features: they are part of the canonical key. All others are volatile, among
/// them credentials, `x-stainless-*`, `x-request-id`, `traceparent`, `session-id` and `user-agent`.
const VERSION_HEADERS: &[&str] =
    &["anthropic-version", "anthropic-beta", "openai-beta", "openai-version", "api-version", "x-goog-api-version"];
/// First words of the block that Claude Code puts before its system prompt; the hash in it changes with every call.
const BILLING_HEADER: &[u8] = b"x-anthropic-billing-header:";

/// Keys of one request. Two requests are the same when `target` and `raw` agree, or `canonical` agrees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Keys {
    /// Provider, method, path and query, without credentials.
    pub target: Digest,
    /// The decoded request body.
    pub raw: Digest,
    /// Target, API version and beta headers, and the body as JSON with sorted keys and without volatile fields; none if
    /// the body is not JSON that could be read within the limits.
    pub canonical: Option<Digest>,
}

/// Which key matched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Matched {
    /// Byte for byte the same decoded body.
    Raw,
    /// The same but for volatile fields and the order of keys.
    Canonical,
    /// The very same call: its id was named again.
    Call,
}

/// A request, as far as its keys go.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// Provider by name.
    pub provider: &'a str,
    /// Whose API it speaks.
    pub family: Family,
    /// HTTP method.
    pub method: &'a str,
    /// Path and query behind the provider's segment.
    pub path: &'a str,
    /// Headers as they came.
    pub headers: &'a [(String, String)],
    /// Body, decoded.
    pub body: &'a [u8],
}

impl Keys {
    /// The keys of a request.
    pub fn of(r: &Request<'_>) -> Self {
        let method = r.method.to_ascii_uppercase();
        let path = scrub_path(r.path);
        let target = parts("target", &[r.provider.as_bytes(), method.as_bytes(), path.as_bytes()]);
        let canonical = json::digest(r.body, &Volatile(r.family)).ok().map(|body| {
            let versions = versions(r.headers);
            let mut all: Vec<&[u8]> = vec![&target.0];
            all.extend(versions.iter().map(String::as_bytes));
            all.push(&body);
            parts("canonical", &all)
        });
        Self { target, raw: Digest::of(r.body), canonical }
    }
    /// Whether a later request is the same as this one, and by which key.
    pub fn matches(&self, later: &Keys) -> Option<Matched> {
        if self.target == later.target && self.raw == later.raw {
            Some(Matched::Raw)
        } else if self.canonical.is_some() && self.canonical == later.canonical {
            Some(Matched::Canonical)
        } else {
            None
        }
    }
}

/// A hash of parts that cannot be mistaken for other parts.
fn parts(what: &str, parts: &[&[u8]]) -> Digest {
    let mut h = blake3::Hasher::new();
    for part in std::iter::once(&what.as_bytes()).chain(parts) {
        h.update(&(part.len() as u64).to_le_bytes());
        h.update(part);
    }
    Hex(*h.finalize().as_bytes())
}

/// `name:value` for each value of each version header, sorted.
fn versions(headers: &[(String, String)]) -> Vec<String> {
    let mut all: Vec<String> = headers
        .iter()
        .map(|(name, value)| (name.to_ascii_lowercase(), value))
        .filter(|(name, _)| VERSION_HEADERS.contains(&name.as_str()))
        .flat_map(|(name, value)| value.split(',').map(move |v| format!("{name}:{}", v.trim())).collect::<Vec<_>>())
        .collect();
    all.sort();
    all
}

/// What of a body is volatile, by family.
struct Volatile(Family);

impl Rule for Volatile {
    fn member(&self, path: &[&str]) -> Canonical {
        match (self.0, path) {
            (Family::Anthropic, ["metadata", "user_id"]) | (Family::Openai, ["client_metadata"]) => Canonical::Drop,
            (Family::Anthropic | Family::Openai | Family::Gemini, _) => Canonical::Keep,
        }
    }
    fn text<'a>(&self, path: &[&str], text: &'a [u8]) -> &'a [u8] {
        match (self.0, path) {
            // The block, or the first line of a text that goes on.
            (Family::Anthropic, ["system"] | ["system", "#", "text"]) if text.starts_with(BILLING_HEADER) => {
                text.iter().position(|b| *b == b'\n').map_or(&[], |n| &text[n + 1..])
            }
            (Family::Anthropic | Family::Openai | Family::Gemini, _) => text,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::{Encoding, decode_all};

    fn keys(family: Family, path: &str, headers: &[(&str, &str)], body: &str) -> Keys {
        let headers: Vec<_> = headers.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect();
        Keys::of(&Request { provider: "p", family, method: "POST", path, headers: &headers, body: body.as_bytes() })
    }
    fn a(headers: &[(&str, &str)], body: &str) -> Keys {
        keys(Family::Anthropic, "/v1/messages?beta=true", headers, body)
    }

    #[test]
    fn volatile_headers_do_not_count_and_versions_do() {
        let base = a(&[("anthropic-version", "2023-06-01"), ("anthropic-beta", "b,a")], "{}");
        let same = [
            ("Anthropic-Beta", "a"),
            ("anthropic-beta", "b"),
            ("anthropic-version", "2023-06-01"),
            ("x-api-key", "SECRET"),
            ("authorization", "Bearer SECRET"),
            ("x-stainless-retry-count", "1"),
            ("x-request-id", "1"),
            ("traceparent", "1"),
            ("session-id", "1"),
            ("user-agent", "claude-cli"),
        ];
        assert_eq!(a(&same, "{}"), base);
        assert_ne!(a(&[("anthropic-version", "2024-01-01"), ("anthropic-beta", "b,a")], "{}").canonical, base.canonical);
        assert_ne!(a(&[("anthropic-version", "2023-06-01")], "{}").canonical, base.canonical);
    }

    #[test]
    fn volatile_fields_of_bodies_do_not_count() {
        let claude = |hash: &str, user: &str, text: &str| {
            a(
                &[],
                &format!(
                    r#"{{"system":[{{"type":"text","text":"x-anthropic-billing-header: cc_version=2.1; cch={hash};"}},{{"type":"text","text":"{text}"}}],"metadata":{{"user_id":"{user}"}},"max_tokens":5}}"#
                ),
            )
        };
        let (one, two) = (claude("0a1b2", "u1", "You are"), claude("ffff1", "u2", "You are"));
        assert_ne!(one.raw, two.raw);
        assert_eq!(one.matches(&two), Some(Matched::Canonical));
        assert_eq!(one.matches(&one), Some(Matched::Raw));
        assert_eq!(one.matches(&claude("0a1b2", "u1", "You were")), None);
        // The first line only, where the text goes on.
        let line = |h: &str, rest: &str| a(&[], &format!(r#"{{"system":"x-anthropic-billing-header: {h}\n{rest}"}}"#)).canonical;
        assert_eq!(line("1", "a"), line("2", "a"));
        assert_ne!(line("1", "a"), line("1", "b"));
        // Anywhere else such a text counts.
        let user = |h: &str| a(&[], &format!(r#"{{"messages":[{{"content":"x-anthropic-billing-header: {h}"}}]}}"#)).canonical;
        assert_ne!(user("1"), user("2"));
        let codex = |turn: &str| {
            keys(Family::Openai, "/v1/responses", &[], &format!(r#"{{"client_metadata":{{"turn":"{turn}"}},"input":"x"}}"#))
        };
        assert_eq!(codex("1").matches(&codex("2")), Some(Matched::Canonical));
        let gemini = |turn: &str| keys(Family::Gemini, "/v1", &[], &format!(r#"{{"client_metadata":"{turn}"}}"#)).canonical;
        assert_ne!(gemini("1"), gemini("2"));
    }

    #[test]
    fn stream_and_its_options_number_lexemes_and_array_order_count() {
        let base = a(&[], r#"{"stream":true,"t":1,"m":[1,2]}"#);
        assert_eq!(a(&[], r#" {"m":[1, 2],"t":1,"stream":true}"#).matches(&base), Some(Matched::Canonical));
        for other in [
            r#"{"stream":false,"t":1,"m":[1,2]}"#,
            r#"{"t":1,"m":[1,2]}"#,
            r#"{"stream":true,"t":1.0,"m":[1,2]}"#,
            r#"{"stream":true,"t":1,"m":[2,1]}"#,
            r#"{"stream":true,"stream_options":{},"t":1,"m":[1,2]}"#,
        ] {
            assert_eq!(a(&[], other).matches(&base), None, "{other}");
        }
    }

    #[test]
    fn the_target_counts_and_credentials_in_it_do_not() {
        let g = |path: &str, body: &str| keys(Family::Gemini, path, &[], body);
        assert_eq!(g("/v1/a:generateContent?key=1", "{}"), g("/v1/a:generateContent?key=2", "{}"));
        assert_eq!(g("/v1/a:generateContent", "{}").matches(&g("/v1/b:generateContent", "{}")), None);
        // Not JSON: only the same bytes match.
        let (one, two) = (g("/v1/a", "--form"), g("/v1/a", "--form2"));
        assert_eq!((one.canonical, one.matches(&two), one.matches(&one)), (None, None, Some(Matched::Raw)));
    }

    #[test]
    fn g6_a_compressed_request_has_the_keys_of_the_plain_one() {
        use std::io::Write;
        let body = r#"{"model":"m","messages":[{"role":"user","content":"hello hello hello"}]}"#;
        let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        gz.write_all(body.as_bytes()).unwrap();
        let zstd = zstd::encode_all(body.as_bytes(), 3).unwrap();
        for (encoding, bytes) in [(Encoding::Gzip, gz.finish().unwrap()), (Encoding::Zstd, zstd)] {
            let plain = decode_all(encoding, &bytes, 1 << 20).unwrap();
            assert_eq!(a(&[], std::str::from_utf8(&plain).unwrap()), a(&[("content-encoding", "gzip")], body));
        }
    }
}
