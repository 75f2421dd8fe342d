//! The wire facts of REPLAY.md and the cases G1 to G5 and G8, each a test under its name; and for every dialect: any split of
//! the bytes says the same, and what goes out is what came in but for a hidden usage chunk.

use super::*;
use proptest::prelude::*;

struct Ended {
    out: Vec<u8>,
    finishing_at: Option<u64>,
    releasable: u64,
    report: Report,
}

fn head(dialect: Dialect, sse: bool) -> Head<'static> {
    let content_type = Some(if sse { "text/event-stream; charset=utf-8" } else { "application/json" });
    Head { dialect, status: 200, content_type, stream: sse, choices: 1, hide_usage: false }
}

fn run(head: &Head<'_>, pieces: &[&[u8]], clean: bool) -> Ended {
    let (mut scan, mut out, mut last) = (ResponseScan::new(head), Vec::new(), 0);
    for p in pieces {
        scan.push(p, &mut out);
        assert!(scan.releasable() >= last && scan.releasable() <= out.len() as u64, "a reader is never ahead");
        last = scan.releasable();
    }
    let (finishing_at, releasable) = (scan.finishing_at(), scan.releasable());
    let report = scan.finish(clean, &mut out);
    Ended { out, finishing_at, releasable, report }
}

fn whole(head: &Head<'_>, text: &str) -> Ended {
    run(head, &[text.as_bytes()], true)
}

/// A chat stream: role, text, finish, usage chunk, end.
fn chat() -> String {
    concat!(
        ": ping\n\n",
        "data: {\"id\":\"chatcmpl-1\",\"model\":\"gpt-5.5-2026-04-23\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"\"},\"finish_reason\":null}],\"usage\":null}\n\n",
        "data: {\"id\":\"chatcmpl-1\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"né\u{2028}e 😀\"},\"finish_reason\":null}],\"usage\":null}\r\n\r\n",
        "data: {\"id\":\"chatcmpl-1\",\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}],\"usage\":null}\n\n",
        "data: {\"id\":\"chatcmpl-1\",\"choices\":[],\"usage\":{\"prompt_tokens\":100,\"completion_tokens\":30,\"total_tokens\":130,",
        "\"prompt_tokens_details\":{\"cached_tokens\":40},\"completion_tokens_details\":{\"reasoning_tokens\":10}}}\r\n\r\n",
        "data: [DONE]\n\n"
    )
    .to_owned()
}

fn responses(end: &str) -> String {
    format!(
        concat!(
            "event: response.created\ndata: {{\"type\":\"response.created\",\"response\":{{\"id\":\"resp_1\",\"model\":\"gpt-5.5\",\"usage\":null,\"error\":null}}}}\n\n",
            "event: response.output_text.delta\ndata: {{\"type\":\"response.output_text.delta\",\"delta\":\"hi\"}}\n\n",
            "event: {0}\ndata: {{\"type\":\"{0}\",\"response\":{{\"id\":\"resp_1\",\"status\":\"x\",\"error\":null,\"usage\":",
            "{{\"input_tokens\":75,\"input_tokens_details\":{{\"cached_tokens\":5}},\"output_tokens\":12,\"output_tokens_details\":{{\"reasoning_tokens\":2}}}}}}}}\n\n"
        ),
        end
    )
}

fn anthropic(usage: &str) -> String {
    format!(
        concat!(
            "event: message_start\ndata: {{\"type\":\"message_start\",\"message\":{{\"id\":\"msg_1\",\"model\":\"claude-opus-5-5\",",
            "\"usage\":{{\"input_tokens\":3,\"cache_creation_input_tokens\":12304,\"cache_read_input_tokens\":0,\"output_tokens\":1,\"service_tier\":\"standard\"}}}}}}\n\n",
            "event: ping\ndata: {{\"type\":\"ping\"}}\n\n",
            "event: content_block_delta\ndata: {{\"type\":\"content_block_delta\",\"delta\":{{\"type\":\"text_delta\",\"text\":\"hi\"}}}}\n\n",
            "event: message_delta\ndata: {{\"type\":\"message_delta\",\"delta\":{{\"stop_reason\":null}},\"usage\":{{\"output_tokens\":300}}}}\n\n",
            "event: message_delta\ndata: {{\"type\":\"message_delta\",\"delta\":{{\"stop_reason\":\"end_turn\"}},\"usage\":{{\"output_tokens\":550{0}}}}}\n\n",
            "event: message_stop\ndata: {{\"type\":\"message_stop\"}}\n\n"
        ),
        usage
    )
}

fn gemini() -> String {
    concat!(
        "data: {\"candidates\":[{\"content\":{\"parts\":[{\"text\":\"a\"}]}}],\"usageMetadata\":{\"promptTokenCount\":41,\"cachedContentTokenCount\":9,\"totalTokenCount\":50},\"modelVersion\":\"gemini-3.8-flash\",\"responseId\":\"r1\"}\r\n\r\n",
        "data: {\"candidates\":[{\"content\":{\"parts\":[{\"text\":\"b\"}]},\"finishReason\":\"STOP\"}],",
        "\"usageMetadata\":{\"promptTokenCount\":41,\"candidatesTokenCount\":5,\"thoughtsTokenCount\":343,\"totalTokenCount\":389}}\r\n\r\n"
    )
    .to_owned()
}

#[test]
fn g1_multi_byte_characters_and_u2028_split_across_reads() {
    let text = chat();
    let one = whole(&head(Dialect::OpenaiChat, true), &text);
    for cut in 1..text.len() {
        let (a, b) = text.as_bytes().split_at(cut);
        let two = run(&head(Dialect::OpenaiChat, true), &[a, b], true);
        assert_eq!(two.out, text.as_bytes());
        assert_eq!((two.report, two.finishing_at), (one.report.clone(), one.finishing_at));
    }
    assert_eq!(one.report.outcome, Outcome::Complete);
    assert!(one.report.usage.is_some());
}

#[test]
fn g2_a_usage_chunk_that_the_client_did_not_ask_for_is_counted_and_hidden() {
    let text = chat();
    let hidden_from = text.find("data: {\"id\":\"chatcmpl-1\",\"choices\":[]").unwrap();
    let hidden_to = text.find("data: [DONE]").unwrap();
    let want = format!("{}{}", &text[..hidden_from], &text[hidden_to..]);
    for cut in 1..text.len() {
        let (a, b) = text.as_bytes().split_at(cut);
        let e = run(&Head { hide_usage: true, ..head(Dialect::OpenaiChat, true) }, &[a, b], true);
        assert_eq!(String::from_utf8(e.out).unwrap(), want, "cut at {cut}");
        let u = e.report.usage.unwrap();
        assert_eq!((u.input, u.cache_read, u.output, u.reasoning), (60, 40, 30, 10));
        assert_eq!((e.report.outcome, e.report.model.as_deref()), (Outcome::Complete, Some("gpt-5.5-2026-04-23")));
    }
}

#[test]
fn openai_chat_is_complete_when_each_choice_has_a_finish_reason() {
    let chunk = |i: u64, f: &str| format!("data: {{\"choices\":[{{\"index\":{i},\"delta\":{{}},\"finish_reason\":{f}}}]}}\n\n");
    let done = "data: [DONE]\n\n";
    let h = head(Dialect::OpenaiChat, true);
    // [DONE] alone proves nothing; a finish without it is enough, even if the connection broke.
    assert_eq!(whole(&h, &format!("{}{done}", chunk(0, "null"))).report.outcome, Outcome::Partial);
    assert_eq!(run(&h, &[chunk(0, "\"stop\"").as_bytes()], false).report.outcome, Outcome::Complete);
    let two = Head { choices: 2, ..h };
    let text = chunk(0, "\"stop\"") + &chunk(1, "null") + done;
    assert_eq!(whole(&two, &text).report.outcome, Outcome::Partial);
    let text = chunk(0, "\"stop\"") + &chunk(1, "\"length\"");
    assert_eq!(whole(&two, &text).report.outcome, Outcome::Complete);
    // The second choice never came.
    assert_eq!(whole(&two, &chunk(0, "\"stop\"")).report.outcome, Outcome::Partial);
    // A finish in an event whose end never came does not count.
    assert_eq!(run(&h, &[chunk(0, "\"stop\"").trim_end().as_bytes()], false).report.outcome, Outcome::Partial);
    assert_eq!(whole(&h, "").report.outcome, Outcome::Partial);
}

#[test]
fn g3_a_responses_stream_is_complete_without_done() {
    let h = head(Dialect::OpenaiResponses, true);
    for end in ["response.completed", "response.incomplete"] {
        let text = responses(end);
        let e = run(&h, &[text.as_bytes()], false);
        assert_eq!(e.report.outcome, Outcome::Complete, "{end}");
        let u = e.report.usage.unwrap();
        assert_eq!((u.input, u.cache_read, u.output, u.reasoning), (70, 5, 12, 2));
        assert_eq!(e.finishing_at, text.find(&format!("event: {end}")).map(|n| n as u64));
        assert_eq!((e.report.model.as_deref(), e.report.response_id.as_deref()), (Some("gpt-5.5"), Some("resp_1")));
    }
    let failed = whole(&h, &responses("response.failed")).report;
    assert_eq!((failed.outcome, failed.usage.map(|u| u.output)), (Outcome::Failed, Some(12)));
    let cut = whole(&h, responses("response.completed").split("event: response.completed").next().unwrap());
    assert_eq!(cut.report.outcome, Outcome::Partial);
}

#[test]
fn g4_an_error_event_inside_a_200_is_a_failure_passed_on_to_the_byte() {
    let text = anthropic("").split("event: message_delta").next().unwrap().to_owned()
        + "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"Overloaded\"}}\n\n";
    let e = whole(&head(Dialect::Anthropic, true), &text);
    assert_eq!(e.out, text.as_bytes());
    assert_eq!((e.report.outcome, e.report.error.as_deref()), (Outcome::Failed, Some("overloaded_error")));
    assert_eq!(e.report.usage.unwrap().cache_write_5m, 12_304, "what was billed is booked");
    let chat = "data: {\"error\":{\"message\":\"no\",\"code\":\"server_error\"}}\n\n";
    let e = whole(&head(Dialect::OpenaiChat, true), chat);
    assert_eq!((e.report.outcome, e.report.error.as_deref()), (Outcome::Failed, Some("server_error")));
    let e = whole(&head(Dialect::OpenaiResponses, true), "data: {\"type\":\"error\",\"code\":\"x\"}\n\n");
    assert_eq!(e.report.outcome, Outcome::Failed);
}

#[test]
fn g5_anthropic_usage_is_cumulative_and_replaced_never_added() {
    let h = head(Dialect::Anthropic, true);
    let e = whole(&h, &anthropic(""));
    let u = e.report.usage.unwrap();
    assert_eq!((u.input, u.cache_write_5m, u.output), (3, 12_304, 550));
    assert_eq!((e.report.outcome, e.report.tier), (Outcome::Complete, None));
    // Cache figures only in the last message_delta, and a lifetime for each write.
    let u = whole(
        &h,
        &anthropic(
            ",\"input_tokens\":3,\"cache_read_input_tokens\":77,\"cache_creation_input_tokens\":1000,\"cache_creation\":{\"ephemeral_5m_input_tokens\":600,\"ephemeral_1h_input_tokens\":400}",
        ),
    );
    let u = u.report.usage.unwrap();
    assert_eq!((u.input, u.cache_read, u.cache_write_5m, u.cache_write_1h), (3, 77, 600, 400));
}

#[test]
fn anthropic_is_complete_at_message_stop_and_held_from_the_stop_reason_on() {
    let text = anthropic("");
    let e = whole(&head(Dialect::Anthropic, true), &text);
    let last_delta = text.match_indices("event: message_delta").nth(1).unwrap().0 as u64;
    assert_eq!((e.finishing_at, e.releasable), (Some(last_delta), last_delta));
    let cut = whole(&head(Dialect::Anthropic, true), text.split("event: message_stop").next().unwrap());
    assert_eq!(cut.report.outcome, Outcome::Partial);
}

#[test]
fn gemini_usage_of_the_last_event_counts() {
    let text = gemini();
    let e = whole(&head(Dialect::Gemini, true), &text);
    let u = e.report.usage.unwrap();
    assert_eq!((u.input, u.cache_read, u.output, u.reasoning, u.input_total() + u.output), (41, 0, 348, 343, 389));
    assert_eq!(e.report.outcome, Outcome::Complete);
    assert_eq!((e.report.model.as_deref(), e.report.response_id.as_deref()), (Some("gemini-3.8-flash"), Some("r1")));
    assert_eq!(e.finishing_at, text.match_indices("data:").nth(1).map(|m| m.0 as u64));
    // The same as one array, and a prompt that was refused.
    let array = format!("[{}]", text.replace("data: ", "").trim().replace("\r\n\r\n", ",\r\n"));
    let a = whole(&head(Dialect::Gemini, false), &array).report;
    assert_eq!((a.outcome, a.usage.map(|u| u.output)), (Outcome::Complete, Some(348)));
    let blocked = "data: {\"promptFeedback\":{\"blockReason\":\"SAFETY\"},\"usageMetadata\":{\"promptTokenCount\":4}}\n\n";
    let b = whole(&head(Dialect::Gemini, true), blocked).report;
    assert_eq!((b.outcome, b.usage.map(|u| u.input)), (Outcome::Complete, Some(4)));
    assert_eq!(
        whole(&head(Dialect::Gemini, true), text.split_inclusive("\r\n\r\n").next().unwrap()).report.outcome,
        Outcome::Partial
    );
}

#[test]
fn a_plain_response_holds_its_last_byte_back() {
    let text = "{\"id\":\"msg_1\",\"type\":\"message\",\"model\":\"claude-haiku-4-5\",\"stop_reason\":\"end_turn\",\"usage\":{\"input_tokens\":10,\"output_tokens\":5,\"speed\":\"fast\"}}\n";
    let e = whole(&head(Dialect::Anthropic, false), text);
    assert_eq!(e.releasable, text.trim_end().len() as u64 - 1);
    assert_eq!((e.report.outcome, e.report.tier.as_deref()), (Outcome::Complete, Some("fast")));
    assert_eq!(e.report.usage.map(|u| (u.input, u.output)), Some((10, 5)));
    for cut in 1..text.len() - 2 {
        let e = run(&head(Dialect::Anthropic, false), &[&text.as_bytes()[..cut]], true);
        assert_eq!((e.report.outcome, e.releasable), (Outcome::Partial, cut as u64 - 1));
    }
    assert_eq!(run(&head(Dialect::Anthropic, false), &[text.as_bytes()], false).report.outcome, Outcome::Partial);
    let chat = "{\"id\":\"c\",\"choices\":[{\"index\":0,\"message\":{},\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":2,\"completion_tokens\":1},\"service_tier\":\"flex\"}";
    let r = whole(&head(Dialect::OpenaiChat, false), chat).report;
    assert_eq!((r.outcome, r.tier.as_deref(), r.usage.map(|u| u.input)), (Outcome::Complete, Some("flex"), Some(2)));
    let failed = "{\"id\":\"r\",\"status\":\"failed\",\"error\":{\"code\":\"server_error\",\"message\":\"m\"},\"usage\":{\"input_tokens\":2,\"output_tokens\":0}}";
    let r = whole(&head(Dialect::OpenaiResponses, false), failed).report;
    assert_eq!((r.outcome, r.usage.map(|u| u.input)), (Outcome::Failed, Some(2)));
}

#[test]
fn g8_a_429_or_529_is_failed_and_what_it_says_passes_through() {
    for status in [429, 500, 503, 529] {
        let text = "{\"type\":\"error\",\"error\":{\"type\":\"rate_limit_error\",\"message\":\"slow down\"}}";
        let e = whole(&Head { status, ..head(Dialect::Anthropic, false) }, text);
        assert_eq!((e.report.outcome, e.report.error.as_deref()), (Outcome::Failed, Some("rate_limit_error")));
        assert_eq!(e.out, text.as_bytes());
    }
    let html = whole(&Head { status: 502, content_type: Some("text/html"), ..head(Dialect::Anthropic, true) }, "<h1>Bad</h1>");
    assert_eq!((html.report.outcome, html.out.len()), (Outcome::Failed, 12));
}

#[test]
fn figures_that_contradict_themselves_are_refused_not_guessed() {
    let text = "{\"choices\":[{\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":2,\"prompt_tokens_details\":{\"cached_tokens\":3},\"completion_tokens\":1}}";
    let r = whole(&head(Dialect::OpenaiChat, false), text).report;
    assert_eq!(r.usage, None);
    assert!(r.usage_error.unwrap().contains("prompt_tokens"));
}

#[test]
fn an_endless_event_is_not_held_and_not_buffered() {
    let mut scan = ResponseScan::new(&Head { hide_usage: true, ..head(Dialect::OpenaiChat, true) });
    let (mut total, mut most) = (0, 0);
    scan.push(b"data: {\"choices\":[],\"usage\":{\"x\":\"", &mut Vec::new());
    for _ in 0..100 {
        let mut out = Vec::new();
        scan.push(&[b'a'; 10_000], &mut out);
        total += out.len();
        most = most.max(out.len());
    }
    assert!(total > 1_000_000 - HOLD_MAX && most <= HOLD_MAX + 20_000, "{total} {most}");
    assert_eq!(scan.releasable(), 0);
}

#[test]
fn the_providers_request_id_is_found() {
    let id = |f, h: &[(&'static str, &'static str)]| provider_request_id(f, h.iter().copied());
    assert_eq!(id(Family::Anthropic, &[("Request-Id", "req_1")]).as_deref(), Some("req_1"));
    assert_eq!(id(Family::Openai, &[("date", "x"), ("x-request-id", "req\n_2")]).as_deref(), Some("req_2"));
    assert_eq!(id(Family::Gemini, &[]), None);
}

#[test]
fn g6_usage_of_a_compressed_answer_is_found_and_its_raw_bytes_are_released_in_step() {
    use crate::codec::{Decoder, Encoding, OffsetMap};
    use std::io::Write;
    // Flushed after each event, as a provider does.
    let text = anthropic("");
    let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    for event in text.split_inclusive("\n\n") {
        gz.write_all(event.as_bytes()).unwrap();
        gz.flush().unwrap();
    }
    let mut z = zstd::stream::write::Encoder::new(Vec::new(), 3).unwrap();
    for event in text.split_inclusive("\n\n") {
        z.write_all(event.as_bytes()).unwrap();
        z.flush().unwrap();
    }
    for (encoding, raw) in [(Encoding::Gzip, gz.finish().unwrap()), (Encoding::Zstd, z.finish().unwrap())] {
        let (mut scan, mut map) = (ResponseScan::new(&head(Dialect::Anthropic, true)), OffsetMap::default());
        let (mut d, mut decoded, mut pushed, mut released) = (Decoder::new(encoding).unwrap(), 0, 0, 0);
        for piece in raw.chunks(7) {
            d.push(piece, &mut |plain| {
                scan.push(plain, &mut Vec::new());
                decoded += plain.len() as u64;
            })
            .unwrap();
            pushed += piece.len() as u64;
            map.note(pushed, decoded);
            released = map.raw_for(scan.releasable());
        }
        // What a client can decode of the released bytes stops before the finishing event, and is most of what comes before.
        let (mut seen, mut client) = (Vec::new(), Decoder::new(encoding).unwrap());
        client.push(&raw[..usize::try_from(released).unwrap()], &mut |p| seen.extend_from_slice(p)).unwrap();
        let finishing = scan.finishing_at().unwrap();
        assert!(
            seen.len() as u64 <= finishing && seen.len() as u64 > finishing / 2,
            "{encoding:?}: {} of {finishing}",
            seen.len()
        );
        assert!(d.finish(&mut |_| {}));
        let report = scan.finish(true, &mut Vec::new());
        assert_eq!((report.outcome, report.usage.map(|u| u.output)), (Outcome::Complete, Some(550)));
    }
}

fn streams() -> Vec<(Dialect, String)> {
    vec![
        (Dialect::OpenaiChat, chat()),
        (Dialect::OpenaiResponses, responses("response.completed")),
        (Dialect::Anthropic, anthropic("")),
        (Dialect::Gemini, gemini()),
    ]
}

proptest! {
    #[test]
    fn any_split_says_the_same_and_bytes_out_equal_bytes_in(
        which in 0usize..4, cuts in proptest::collection::vec(0usize..2000, 0..12), end in 0usize..2500, clean: bool, hide: bool,
    ) {
        let (dialect, text) = &streams()[which];
        let text = &text.as_bytes()[..end.min(text.len())];
        let mut cuts: Vec<usize> = cuts.into_iter().filter(|c| *c < text.len()).collect();
        cuts.sort_unstable();
        let (mut pieces, mut from) = (Vec::new(), 0);
        for c in cuts { pieces.push(&text[from..c]); from = c; }
        pieces.push(&text[from..]);
        let h = Head { hide_usage: hide, ..head(*dialect, true) };
        let (a, b) = (run(&h, &pieces, clean), run(&h, &[text], clean));
        prop_assert_eq!(&a.out, &b.out);
        prop_assert_eq!((a.report, a.finishing_at, a.releasable), (b.report, b.finishing_at, b.releasable));
        if !hide || *dialect != Dialect::OpenaiChat {
            prop_assert_eq!(&a.out[..], text);
        }
    }
    #[test]
    fn hostile_answers_never_panic_and_pass_through(
        bytes in proptest::collection::vec(proptest::sample::select(b"data: event\r\n{}[]\":,choices#usage0\\\xff".to_vec()), 0..600),
        which in 0usize..4, sse: bool,
    ) {
        let h = head(streams()[which].0, sse);
        let pieces: Vec<&[u8]> = bytes.chunks(5).collect();
        prop_assert_eq!(run(&h, &pieces, true).out, bytes);
    }
}
