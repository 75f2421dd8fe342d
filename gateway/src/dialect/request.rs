//! Facts of a request, read from a decoded copy of its body; the body itself is forwarded as it came, but for one option of
//! OpenAI's chat API.

use super::{BYTES_PER_TOKEN, Dialect, Family, Profile, RequestFacts};
use crate::json::{Path, Scalar, Scan, Sink};

/// Query parameters that are credentials: neither sent on as a guest wrote them, nor written down.
pub const SECRET_PARAMETERS: &[&str] = &["key", "api_key", "api-key", "apikey", "access_token", "token", "auth"];

#[derive(Debug, Default)]
struct Asked {
    model: Option<String>,
    stream: bool,
    max_output: Option<u64>,
    choices: Option<u64>,
    state: bool,
    /// `stream_options.include_usage`, if it is said.
    usage: Option<bool>,
}

impl Sink for Asked {
    fn open(&mut self, path: &Path<'_>, _array: bool) {
        let mut room = [""; 8];
        self.state |= matches!(path.names(&mut room), ["conversation" | "container" | "prompt"]);
    }
    fn close(&mut self, _: &Path<'_>) {}
    fn scalar(&mut self, path: &Path<'_>, value: &Scalar<'_>) {
        let mut room = [""; 8];
        match path.names(&mut room) {
            ["model"] => self.model = value.text().map(str::to_owned),
            ["stream"] => self.stream = *value == Scalar::Bool(true),
            ["max_tokens" | "max_completion_tokens" | "max_output_tokens"] | ["generationConfig", "maxOutputTokens"] => {
                self.max_output = value.count().max(self.max_output);
            }
            ["n"] | ["generationConfig", "candidateCount"] => self.choices = value.count(),
            ["stream_options", "include_usage"] => self.usage = Some(*value == Scalar::Bool(true)),
            ["previous_response_id" | "conversation" | "container" | "cachedContent"] => self.state |= value.text().is_some(),
            ["background"] => self.state |= *value == Scalar::Bool(true),
            // Files, and hosted tools that keep a machine between calls.
            [.., "file_id" | "container_id" | "fileUri"] => self.state |= value.text().is_some(),
            ["tools", "#", "container"] => self.state |= value.text().is_some_and(|t| t != "auto"),
            _ => {}
        }
    }
}

/// What a request asks. `path` is what follows the provider's segment; `body` is decoded.
pub fn request_facts(profile: &Profile, method: &str, path: &str, body: &[u8]) -> RequestFacts {
    let (dialect, endpoint) = endpoint(profile.family, path);
    let (mut scan, mut asked) = (Scan::default(), Asked::default());
    scan.push(body, &mut asked);
    let (path_model, path_stream) = match dialect {
        Dialect::Gemini => {
            let model = endpoint.rsplit('/').next().and_then(|m| m.split(':').next()).filter(|m| !m.is_empty());
            (model.map(str::to_owned), endpoint.ends_with(":streamGenerateContent"))
        }
        Dialect::OpenaiChat | Dialect::OpenaiResponses | Dialect::Anthropic | Dialect::Other(_) => (None, false),
    };
    let stream = asked.stream || path_stream;
    let known =
        !matches!(dialect, Dialect::Other(_)) || matches!(endpoint.rsplit('/').next(), Some("embeddings" | "count_tokens"));
    RequestFacts {
        dialect,
        model: path_model.or(asked.model),
        stream,
        max_output: asked.max_output,
        choices: asked.choices.unwrap_or(1).max(1),
        // An endpoint that we do not know may change anything at the provider.
        stateful: asked.state || !known || !method.eq_ignore_ascii_case("POST"),
        input_estimate: (body.len() as u64).div_ceil(BYTES_PER_TOKEN),
        inject_usage: profile.include_usage && dialect == Dialect::OpenaiChat && stream && asked.usage != Some(true),
    }
}

fn endpoint(family: Family, path: &str) -> (Dialect, &str) {
    let endpoint = path.split(['?', '#']).next().unwrap_or("").trim_end_matches('/');
    let last = endpoint.rsplit('/').next().unwrap_or("");
    let dialect = match family {
        Family::Openai if last == "completions" => Dialect::OpenaiChat,
        Family::Openai if last == "responses" => Dialect::OpenaiResponses,
        Family::Anthropic if last == "messages" => Dialect::Anthropic,
        Family::Gemini if last.ends_with(":generateContent") || last.ends_with(":streamGenerateContent") => Dialect::Gemini,
        Family::Openai | Family::Anthropic | Family::Gemini => Dialect::Other(family),
    };
    (dialect, endpoint)
}

/// The body with `stream_options.include_usage` switched on, all other bytes as they were; none if it is not an object whose
/// options could be found.
pub fn inject_usage(body: &[u8]) -> Option<Vec<u8>> {
    let mut f = Finder::default();
    let mut scan = Scan::default();
    scan.push(body, &mut f);
    scan.end()?;
    let (from, to, text): (usize, usize, &[u8]) = match (f.object, f.options, f.value) {
        (_, Some(_), Some((end, lexeme))) => (end - lexeme, end, b"true"),
        (_, Some(Options::Object { at, empty }), None) => {
            (at + 1, at + 1, if empty { b"\"include_usage\":true" } else { b"\"include_usage\":true," })
        }
        (_, Some(Options::Null { end }), None) => (end - 4, end, b"{\"include_usage\":true}"),
        (Some((at, empty)), None, _) => (
            at + 1,
            at + 1,
            if empty { b"\"stream_options\":{\"include_usage\":true}" } else { b"\"stream_options\":{\"include_usage\":true}," },
        ),
        (None, None, _) => return None,
    };
    Some([&body[..from], text, &body[to..]].concat())
}

#[derive(Debug, Clone, Copy)]
enum Options {
    Object { at: usize, empty: bool },
    Null { end: usize },
}

#[derive(Debug, Default)]
struct Finder {
    object: Option<(usize, bool)>,
    options: Option<Options>,
    /// End and length of the lexeme of `include_usage`.
    value: Option<(usize, usize)>,
}

/// Of what is in memory.
fn offset(path: &Path<'_>) -> usize {
    usize::try_from(path.at()).unwrap_or(usize::MAX)
}

impl Finder {
    fn member(&mut self, names: &[&str]) {
        match names {
            [_] => {
                if let Some((_, empty)) = &mut self.object {
                    *empty = false;
                }
            }
            ["stream_options", _] => {
                if let Some(Options::Object { empty, .. }) = &mut self.options {
                    *empty = false;
                }
            }
            _ => {}
        }
    }
}

impl Sink for Finder {
    fn open(&mut self, path: &Path<'_>, array: bool) {
        let mut room = [""; 8];
        let names = path.names(&mut room);
        self.member(names);
        let at = offset(path);
        match names {
            [] if !array => self.object = Some((at, true)),
            ["stream_options"] if !array => self.options = Some(Options::Object { at, empty: true }),
            _ => {}
        }
    }
    fn close(&mut self, _: &Path<'_>) {}
    fn scalar(&mut self, path: &Path<'_>, value: &Scalar<'_>) {
        let mut room = [""; 8];
        let names = path.names(&mut room);
        self.member(names);
        let end = offset(path);
        match (names, value) {
            (["stream_options"], Scalar::Null) => self.options = Some(Options::Null { end }),
            (["stream_options", "include_usage"], Scalar::Bool(b)) => self.value = Some((end, if *b { 4 } else { 5 })),
            (["stream_options", "include_usage"], Scalar::Null) => self.value = Some((end, 4)),
            _ => {}
        }
    }
}

/// A path and query without credentials: for the ledger, logs, keys and errors.
pub fn scrub_path(path: &str) -> String {
    let path = path.split('#').next().unwrap_or("");
    let Some((endpoint, query)) = path.split_once('?') else { return path.to_owned() };
    let kept: Vec<&str> = query
        .split('&')
        .filter(|p| {
            let name = unescaped(p.split('=').next().unwrap_or(""));
            !p.is_empty() && !SECRET_PARAMETERS.iter().any(|s| name.eq_ignore_ascii_case(s.as_bytes()))
        })
        .collect();
    if kept.is_empty() { endpoint.to_owned() } else { format!("{endpoint}?{}", kept.join("&")) }
}

/// A parameter's name as a server reads it.
fn unescaped(name: &str) -> Vec<u8> {
    let (bytes, mut out, mut at) = (name.as_bytes(), Vec::new(), 0);
    let digit = |b: Option<&u8>| b.and_then(|b| char::from(*b).to_digit(16)).and_then(|d| u8::try_from(d).ok());
    while let Some(b) = bytes.get(at) {
        match (b, digit(bytes.get(at + 1)), digit(bytes.get(at + 2))) {
            (b'%', Some(high), Some(low)) => {
                out.push(high * 16 + low);
                at += 3;
            }
            _ => {
                out.push(*b);
                at += 1;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn profile(family: Family) -> Profile {
        Profile { name: "p".into(), family, include_usage: family == Family::Openai }
    }

    #[test]
    fn facts_of_each_dialect() {
        let f = request_facts(
            &profile(Family::Openai),
            "POST",
            "/v1/chat/completions",
            br#"{"model":"gpt-5.5","stream":true,"max_completion_tokens":100,"n":3,"messages":[{"content":"hi"}]}"#,
        );
        assert_eq!((f.dialect, f.model.as_deref(), f.stream), (Dialect::OpenaiChat, Some("gpt-5.5"), true));
        assert_eq!((f.max_output, f.choices, f.stateful, f.inject_usage, f.input_estimate), (Some(100), 3, false, true, 25));
        let f = request_facts(
            &profile(Family::Openai),
            "POST",
            "/v1/chat/completions",
            br#"{"stream":true,"stream_options":{"include_usage":true}}"#,
        );
        assert!(!f.inject_usage);
        let f = request_facts(&profile(Family::Openai), "POST", "/v1/responses", br#"{"previous_response_id":"resp_1"}"#);
        assert_eq!((f.dialect, f.stateful), (Dialect::OpenaiResponses, true));
        let f = request_facts(&profile(Family::Anthropic), "POST", "/v1/messages?beta=true", br#"{"model":"c","max_tokens":9}"#);
        assert_eq!((f.dialect, f.max_output, f.stateful, f.inject_usage), (Dialect::Anthropic, Some(9), false, false));
        let f = request_facts(
            &profile(Family::Gemini),
            "POST",
            "/v1beta/models/gemini-3.8-flash:streamGenerateContent?alt=sse",
            br#"{"generationConfig":{"maxOutputTokens":7,"candidateCount":2}}"#,
        );
        assert_eq!((f.model.as_deref(), f.stream, f.max_output, f.choices), (Some("gemini-3.8-flash"), true, Some(7), 2));
    }

    #[test]
    fn server_side_state_is_seen() {
        let state = |body: &str| request_facts(&profile(Family::Openai), "POST", "/v1/responses", body.as_bytes()).stateful;
        for body in [
            r#"{"conversation":{"id":"c"}}"#,
            r#"{"conversation":"c"}"#,
            r#"{"background":true}"#,
            r#"{"input":[{"content":[{"file_id":"f"}]}]}"#,
            r#"{"container":"x"}"#,
        ] {
            assert!(state(body), "{body}");
        }
        assert!(!state(r#"{"previous_response_id":null,"input":"x"}"#));
        let get = request_facts(&profile(Family::Openai), "GET", "/v1/responses/resp_1", b"");
        let unknown = request_facts(&profile(Family::Anthropic), "POST", "/v1/files", b"{}");
        assert!(get.stateful && unknown.stateful);
    }

    #[test]
    fn usage_is_asked_for_and_nothing_else_changes() {
        for (body, want) in [
            (r#" { "a":1}"#, r#" {"stream_options":{"include_usage":true}, "a":1}"#),
            ("{}", r#"{"stream_options":{"include_usage":true}}"#),
            (r#"{"stream_options":null,"a":1}"#, r#"{"stream_options":{"include_usage":true},"a":1}"#),
            (r#"{"stream_options":{}}"#, r#"{"stream_options":{"include_usage":true}}"#),
            (r#"{"stream_options":{"x":0}}"#, r#"{"stream_options":{"include_usage":true,"x":0}}"#),
            (r#"{"stream_options":{"include_usage": false }}"#, r#"{"stream_options":{"include_usage": true }}"#),
            (r#"{"stream_options":{"include_usage":null,"x":0}}"#, r#"{"stream_options":{"include_usage":true,"x":0}}"#),
        ] {
            assert_eq!(inject_usage(body.as_bytes()).as_deref(), Some(want.as_bytes()), "{body}");
        }
        for bad in ["", "[1]", "{", "x"] {
            assert_eq!(inject_usage(bad.as_bytes()), None);
        }
    }

    #[test]
    fn credentials_in_urls_are_scrubbed() {
        assert_eq!(scrub_path("/v1/m:x?key=SECRET&alt=sse"), "/v1/m:x?alt=sse");
        assert_eq!(scrub_path("/v1/m?KEY=SECRET"), "/v1/m");
        assert_eq!(scrub_path("/v1/m?k%65y=SECRET&a=1#key=SECRET"), "/v1/m?a=1");
        assert_eq!(scrub_path("/v1/m?%4B%45%59=SECRET&&a=1"), "/v1/m?a=1");
        // Others may be escaped as they like.
        assert_eq!(scrub_path("/v1/m?include%5B%5D=a&monkey=1&%zz=2&%"), "/v1/m?include%5B%5D=a&monkey=1&%zz=2&%");
        assert_eq!(scrub_path("/v1/m"), "/v1/m");
    }

    proptest! {
        #[test]
        fn hostile_requests_never_panic(body in proptest::collection::vec(any::<u8>(), 0..300), path in ".{0,60}") {
            for family in [Family::Openai, Family::Anthropic, Family::Gemini] {
                let _ = request_facts(&profile(family), "POST", &path, &body);
            }
            let _ = (inject_usage(&body), scrub_path(&path));
        }
        #[test]
        fn an_injected_body_differs_only_by_the_option(n in any::<u32>(), extra in "[a-z]{1,5}") {
            let body = format!(r#"{{"{extra}":{n},"stream":true}}"#);
            let mut want: serde_json::Value = serde_json::from_str(&body).unwrap();
            want["stream_options"] = serde_json::json!({"include_usage": true});
            let got: serde_json::Value = serde_json::from_slice(&inject_usage(body.as_bytes()).unwrap()).unwrap();
            prop_assert_eq!(got, want);
        }
    }
}
