//! The answers: the same request always gets the same one, in the wire form of its dialect.
//!
//! Token texts come from the hash of the request and hold multi-byte characters and U+2028, as real answers do. Usage: input is the
//! request's bytes / 4, output the number of tokens.

use crate::fault::Faults;
use serde_json::{Value, json};

/// Whose wire form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// OpenAI chat completions.
    Chat,
    /// OpenAI Responses.
    Responses,
    /// Anthropic Messages.
    Anthropic,
    /// Gemini.
    Gemini,
}

/// What is known of one request.
#[derive(Debug, Clone)]
pub struct Asked {
    /// Its dialect.
    pub dialect: Dialect,
    /// The model's name without its list of faults.
    pub model: String,
    /// A stream is wanted.
    pub stream: bool,
    /// Chat only: usage in a last chunk is wanted.
    pub include_usage: bool,
    /// Input tokens.
    pub input: usize,
    /// BLAKE3 of the decoded body as JSON with sorted keys, without `stream_options`.
    pub hash: blake3::Hash,
    /// Faults.
    pub faults: Faults,
}

/// One piece of a stream; a stall or a delay lies between two of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// Bytes that are no token.
    Frame(String),
    /// Bytes of one token.
    Token(String),
}

const WORDS: [&str; 16] = [
    "the",
    "session",
    "goes",
    "on",
    "größer",
    "\u{2028}",
    "日本語",
    "fork",
    "byte",
    "🙂",
    "point",
    "of",
    "a",
    "ledger",
    "naïve",
    "end",
];

/// The text of token `n`.
fn token(asked: &Asked, n: usize) -> String {
    let seed = asked.hash.as_bytes();
    let mut out = String::new();
    for w in 0..asked.faults.words {
        let i = usize::from(seed[(n + w) % 32]) + n * 7 + w;
        out.push_str(WORDS[i % WORDS.len()]);
        out.push(' ');
    }
    out
}

fn text(asked: &Asked) -> String {
    (0..asked.faults.tokens).map(|n| token(asked, n)).collect()
}

fn id(asked: &Asked, prefix: &str) -> String {
    format!("{prefix}{}", &asked.hash.to_hex()[..24])
}

fn sse(name: Option<&str>, data: &Value) -> String {
    match name {
        Some(name) => format!("event: {name}\ndata: {data}\n\n"),
        None => format!("data: {data}\n\n"),
    }
}

/// The streamed answer, whole.
pub fn pieces(asked: &Asked) -> Vec<Piece> {
    let mut out = match asked.dialect {
        Dialect::Chat => chat(asked),
        Dialect::Responses => responses(asked),
        Dialect::Anthropic => anthropic(asked),
        Dialect::Gemini => gemini(asked),
    };
    if let Some(at) = asked.faults.error_at {
        let cut = out.iter().scan(0, |n, p| {
            let seen = *n;
            *n += usize::from(matches!(p, Piece::Token(_)));
            Some(seen)
        });
        let keep = cut.take_while(|n| *n < at).count();
        out.truncate(keep);
        out.push(Piece::Frame(error_event(asked.dialect)));
    }
    out
}

fn error_event(dialect: Dialect) -> String {
    match dialect {
        Dialect::Chat => sse(None, &json!({"error": {"message": "overloaded", "type": "server_error", "code": "overloaded"}})),
        Dialect::Responses => sse(
            Some("error"),
            &json!({"type": "error", "sequence_number": 99, "code": "server_error", "message": "overloaded", "param": null}),
        ),
        Dialect::Anthropic => {
            sse(Some("error"), &json!({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}))
        }
        Dialect::Gemini => sse(None, &json!({"error": {"code": 503, "message": "overloaded", "status": "UNAVAILABLE"}})),
    }
}

fn chat_usage(asked: &Asked) -> Value {
    let (input, output) = (asked.input, asked.faults.tokens);
    json!({"prompt_tokens": input, "completion_tokens": output, "total_tokens": input + output,
        "prompt_tokens_details": {"cached_tokens": input / 4}, "completion_tokens_details": {"reasoning_tokens": 0}})
}

fn chat(asked: &Asked) -> Vec<Piece> {
    let chunk = |choices: Value, usage: Option<Value>| {
        let mut v = json!({"id": id(asked, "chatcmpl-"), "object": "chat.completion.chunk", "created": 1_700_000_000,
            "model": asked.model, "choices": choices});
        if let Some(u) = usage {
            v["usage"] = u;
        }
        sse(None, &v)
    };
    let delta = |delta: Value, finish: Value| json!([{"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish}]);
    let mut out = vec![Piece::Frame(chunk(delta(json!({"role": "assistant", "content": ""}), Value::Null), None))];
    out.extend(
        (0..asked.faults.tokens).map(|n| Piece::Token(chunk(delta(json!({"content": token(asked, n)}), Value::Null), None))),
    );
    out.push(Piece::Frame(chunk(delta(json!({}), json!("stop")), None)));
    if asked.include_usage {
        out.push(Piece::Frame(chunk(json!([]), Some(chat_usage(asked)))));
    }
    out.push(Piece::Frame("data: [DONE]\n\n".to_owned()));
    out
}

fn response_object(asked: &Asked, done: bool) -> Value {
    let (input, output) = (asked.input, asked.faults.tokens);
    let mut v = json!({"id": id(asked, "resp_"), "object": "response", "created_at": 1_700_000_000,
        "status": if done { "completed" } else { "in_progress" }, "error": null, "incomplete_details": null,
        "instructions": null, "metadata": {}, "model": asked.model, "output": [], "parallel_tool_calls": true,
        "temperature": 1.0, "tool_choice": "auto", "tools": [], "top_p": 1.0, "usage": null});
    if done {
        v["output"] = json!([item(asked, true)]);
        v["usage"] = json!({"input_tokens": input, "input_tokens_details": {"cached_tokens": input / 4}, "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": input + output});
    }
    v
}

fn item(asked: &Asked, done: bool) -> Value {
    let content = if done { json!([part(&text(asked))]) } else { json!([]) };
    json!({"id": id(asked, "msg_"), "type": "message", "role": "assistant", "content": content,
        "status": if done { "completed" } else { "in_progress" }})
}

fn part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}

fn responses(asked: &Asked) -> Vec<Piece> {
    let mut number = 0;
    let mut event = |name: &str, mut v: Value| {
        v["type"] = json!(name);
        v["sequence_number"] = json!(number);
        number += 1;
        sse(Some(name), &v)
    };
    let place = || json!({"item_id": id(asked, "msg_"), "output_index": 0, "content_index": 0});
    let with = |name: &str, value: Value| {
        let mut v = place();
        v[name] = value;
        v
    };
    let mut out = vec![
        Piece::Frame(event("response.created", json!({"response": response_object(asked, false)}))),
        Piece::Frame(event("response.output_item.added", json!({"output_index": 0, "item": item(asked, false)}))),
        Piece::Frame(event("response.content_part.added", with("part", part("")))),
    ];
    for n in 0..asked.faults.tokens {
        let mut v = with("delta", json!(token(asked, n)));
        v["logprobs"] = json!([]);
        out.push(Piece::Token(event("response.output_text.delta", v)));
    }
    let mut done = with("text", json!(text(asked)));
    done["logprobs"] = json!([]);
    out.push(Piece::Frame(event("response.output_text.done", done)));
    out.push(Piece::Frame(event("response.content_part.done", with("part", part(&text(asked))))));
    out.push(Piece::Frame(event("response.output_item.done", json!({"output_index": 0, "item": item(asked, true)}))));
    out.push(Piece::Frame(event("response.completed", json!({"response": response_object(asked, true)}))));
    out
}

fn anthropic_usage(asked: &Asked, output: usize) -> Value {
    json!({"input_tokens": asked.input, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": output})
}

fn anthropic(asked: &Asked) -> Vec<Piece> {
    let event = |name: &str, mut v: Value| {
        v["type"] = json!(name);
        sse(Some(name), &v)
    };
    let message = json!({"id": id(asked, "msg_"), "type": "message", "role": "assistant", "model": asked.model, "content": [],
        "stop_reason": null, "stop_sequence": null, "usage": anthropic_usage(asked, 1)});
    let mut out = vec![
        Piece::Frame(event("message_start", json!({"message": message}))),
        Piece::Frame(event("content_block_start", json!({"index": 0, "content_block": {"type": "text", "text": ""}}))),
        Piece::Frame(event("ping", json!({}))),
    ];
    out.extend((0..asked.faults.tokens).map(|n| {
        let delta = json!({"index": 0, "delta": {"type": "text_delta", "text": token(asked, n)}});
        Piece::Token(event("content_block_delta", delta))
    }));
    out.push(Piece::Frame(event("content_block_stop", json!({"index": 0}))));
    let usage = json!({"output_tokens": asked.faults.tokens, "cache_read_input_tokens": asked.input / 4});
    let delta = json!({"delta": {"stop_reason": "end_turn", "stop_sequence": null}, "usage": usage});
    out.push(Piece::Frame(event("message_delta", delta)));
    out.push(Piece::Frame(event("message_stop", json!({}))));
    out
}

fn gemini_object(asked: &Asked, text: &str, so_far: usize, finish: bool) -> Value {
    let thoughts = asked.faults.tokens / 2;
    let mut candidate = json!({"content": {"parts": [{"text": text}], "role": "model"}, "index": 0});
    if finish {
        candidate["finishReason"] = json!("STOP");
    }
    json!({"candidates": [candidate], "modelVersion": asked.model, "responseId": id(asked, ""),
        "usageMetadata": {"promptTokenCount": asked.input, "candidatesTokenCount": so_far, "thoughtsTokenCount": thoughts,
            "totalTokenCount": asked.input + so_far + thoughts}})
}

fn gemini(asked: &Asked) -> Vec<Piece> {
    let n = asked.faults.tokens;
    let mut out: Vec<Piece> =
        (0..n).map(|i| Piece::Token(sse(None, &gemini_object(asked, &token(asked, i), i + 1, false)))).collect();
    out.push(Piece::Frame(sse(None, &gemini_object(asked, "", n, true))));
    out
}

/// The answer in one piece.
pub fn whole(asked: &Asked) -> Value {
    match asked.dialect {
        Dialect::Chat => json!({"id": id(asked, "chatcmpl-"), "object": "chat.completion", "created": 1_700_000_000,
            "model": asked.model, "usage": chat_usage(asked), "choices": [{"index": 0, "finish_reason": "stop", "logprobs": null,
                "message": {"role": "assistant", "content": text(asked), "refusal": null}}]}),
        Dialect::Responses => response_object(asked, true),
        Dialect::Anthropic => {
            let mut usage = anthropic_usage(asked, asked.faults.tokens);
            usage["cache_read_input_tokens"] = json!(asked.input / 4);
            json!({"id": id(asked, "msg_"), "type": "message", "role": "assistant", "model": asked.model,
                "content": [{"type": "text", "text": text(asked)}], "stop_reason": "end_turn", "stop_sequence": null, "usage": usage})
        }
        Dialect::Gemini => gemini_object(asked, &text(asked), asked.faults.tokens, true),
    }
}

/// The body of an error of this status. It repeats the key it was given, as real ones do in part.
pub fn error_body(dialect: Dialect, status: u16, key: &str) -> Value {
    let message = match status {
        401 | 403 => format!("Incorrect API key provided: {key}. You can find your API key at the provider's site."),
        429 => "Rate limit reached".to_owned(),
        _ => "The server had an error".to_owned(),
    };
    match dialect {
        Dialect::Chat | Dialect::Responses => {
            json!({"error": {"message": message, "type": "provider_error", "param": null, "code": status.to_string()}})
        }
        Dialect::Anthropic => json!({"type": "error", "error": {"type": "provider_error", "message": message}}),
        Dialect::Gemini => json!({"error": {"code": status, "message": message, "status": "PROVIDER_ERROR"}}),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(dialect: Dialect, faults: &str) -> Asked {
        Asked {
            dialect,
            model: "m".into(),
            stream: true,
            include_usage: true,
            input: 40,
            hash: blake3::hash(b"a request"),
            faults: Faults::parse(faults).unwrap(),
        }
    }

    #[test]
    fn the_same_request_gets_the_same_answer_and_an_error_ends_it_early() {
        for dialect in [Dialect::Chat, Dialect::Responses, Dialect::Anthropic, Dialect::Gemini] {
            let all = pieces(&asked(dialect, "tokens=9"));
            assert_eq!(all, pieces(&asked(dialect, "tokens=9")));
            assert_eq!(all.iter().filter(|p| matches!(p, Piece::Token(_))).count(), 9);
            let cut = pieces(&asked(dialect, "tokens=9,error-at=4"));
            assert_eq!(cut.iter().filter(|p| matches!(p, Piece::Token(_))).count(), 4);
            assert!(matches!(cut.last(), Some(Piece::Frame(f)) if f.contains("error")));
        }
    }
}
