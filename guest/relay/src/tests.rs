//! The relay against a scripted gateway: every cut, a restore, refusals, clients that go, and floods.

use std::sync::Arc;

use http_body_util::BodyExt as _;
use ks_proto::relay::{BodyFrame, CALLS_MAX, RelayAnswer, RelayAsk};

use crate::testing::{Gateway, Stream, all, client, post, relay, within};

const ANSWER: &[u8] = b"data: one\n\ndata: tw\xc3\xb6\n\ndata: [DONE]\n\n";

/// Sends the answer from `offset` on, to its end.
async fn rest(stream: &mut Stream, offset: u64) {
    stream.say(RelayAnswer::Accepted { seq: 5 }).await;
    stream.head(5, None).await;
    stream.data(&ANSWER[offset as usize..]).await;
    stream.send(BodyFrame::End).await;
}

#[tokio::test]
async fn a_call_passes_as_it_is() {
    let (relay, gateway, _dir) = relay();
    let mut client = client(&relay).await;
    let far = async {
        let (mut stream, ask, body) = gateway.ask().await;
        let RelayAsk::Call(call) = ask else { panic!("{ask:?}") };
        assert_eq!((call.provider.as_str(), call.method.as_str(), call.path.as_str()), ("openai", "POST", "/v1/x?y=z"));
        assert_eq!((call.call.counter, call.position, call.prior), (1, 0, None));
        assert_eq!((call.body_bytes, body.as_slice()), (5, b"hello".as_slice()));
        assert_eq!(call.body_hash, blake3::hash(b"hello").to_hex().to_string());
        assert!(call.headers.contains(&("x-one".into(), "1".into())), "{:?}", call.headers);
        stream.say(RelayAnswer::Accepted { seq: 5 }).await;
        stream.head(5, Some(ANSWER.len() as u64)).await;
        stream.data(ANSWER).await;
        // The client has all of it: it may go without a GONE.
        assert!(stream.unasked().await.is_none(), "nothing more comes from the relay");
        stream.send(BodyFrame::End).await;
    };
    let near = async {
        let answer = client.send(post("/openai/v1/x?y=z", "hello")).await;
        assert_eq!(answer.headers()["content-length"], ANSWER.len().to_string());
        assert_eq!(answer.headers()["content-type"], "text/event-stream");
        assert_eq!(all(answer).await.unwrap(), ANSWER);
    };
    tokio::join!(far, near);
}

/// Where a stream breaks.
#[derive(Debug, Clone, Copy)]
enum CutAt {
    Open,
    Ask,
    Request,
    Accepted,
    Head,
    Bytes(usize),
    End,
}

/// Breaks the first stream there; returns what a Rejoin must say: entry, head sent, offset.
async fn break_at(gateway: &Gateway, cut: CutAt) -> (Option<u64>, bool, u64) {
    let mut stream = gateway.accept().await;
    if matches!(cut, CutAt::Open) {
        return (None, false, 0);
    }
    stream.ask().await;
    if matches!(cut, CutAt::Ask) {
        return (None, false, 0);
    }
    stream.body().await;
    if matches!(cut, CutAt::Request) {
        return (None, false, 0);
    }
    stream.say(RelayAnswer::Accepted { seq: 5 }).await;
    if matches!(cut, CutAt::Accepted) {
        return (Some(5), false, 0);
    }
    stream.head(5, None).await;
    match cut {
        CutAt::Bytes(n) => {
            stream.data(&ANSWER[..n]).await;
            (Some(5), true, n as u64)
        }
        CutAt::End => {
            stream.data(ANSWER).await;
            (Some(5), true, ANSWER.len() as u64)
        }
        _ => (Some(5), true, 0),
    }
}

#[tokio::test]
async fn a_cut_at_any_point_is_not_noticed_by_the_client() {
    let points = [CutAt::Open, CutAt::Ask, CutAt::Request, CutAt::Accepted, CutAt::Head, CutAt::End];
    for cut in points.into_iter().chain((1..ANSWER.len()).map(CutAt::Bytes)) {
        let (relay, gateway, _dir) = relay();
        let mut client = client(&relay).await;
        let far = async {
            let wanted = break_at(&gateway, cut).await;
            let (mut stream, ask, _) = gateway.ask().await;
            let RelayAsk::Rejoin(r) = ask else { panic!("{cut:?}: {ask:?}") };
            assert_eq!((r.seq, r.head_sent, r.offset), wanted, "{cut:?}");
            assert_eq!((r.call.counter, &r.timeline), (1, &r.call.nonce_hex), "{cut:?}: the same timeline");
            assert_eq!(r.body_hash, blake3::hash(b"hello").to_hex().to_string());
            rest(&mut stream, r.offset).await;
        };
        let near = async {
            let answer = client.send(post("/openai/v1/x", "hello")).await;
            assert_eq!(all(answer).await.unwrap(), ANSWER, "{cut:?}");
        };
        tokio::join!(far, near);
    }
}

#[tokio::test]
async fn a_restored_relay_rejoins_under_the_old_name_in_the_new_timeline() {
    let (relay, gateway, _dir) = relay();
    let mut client = client(&relay).await;
    let seen = tokio::sync::Notify::new();
    let far = async {
        let (mut first, _, _) = gateway.ask().await;
        first.say(RelayAnswer::Accepted { seq: 5 }).await;
        first.head(5, None).await;
        first.data(&ANSWER[..7]).await;
        within("the first bytes", seen.notified()).await;
        relay.restored([2; 16]);
        drop(first);
        let (mut stream, ask, _) = gateway.ask().await;
        let RelayAsk::Rejoin(r) = ask else { panic!("{ask:?}") };
        assert_eq!((r.call.nonce_hex, r.call.counter), ("01".repeat(16), 1));
        assert_eq!((r.timeline, r.prior, r.position), ("02".repeat(16), Some("01".repeat(16)), 5));
        rest(&mut stream, r.offset).await;
        let (mut stream, ask, _) = gateway.ask().await;
        let RelayAsk::Call(c) = ask else { panic!("{ask:?}") };
        assert_eq!((c.call.nonce_hex, c.call.counter, c.position), ("02".repeat(16), 1, 5));
        rest(&mut stream, 0).await;
    };
    let near = async {
        let mut answer = client.send(post("/openai/v1/x", "hello")).await;
        let first = within("bytes", answer.body_mut().frame()).await.unwrap().unwrap().into_data().unwrap();
        seen.notify_one();
        assert_eq!([first.to_vec(), all(answer).await.unwrap()].concat(), ANSWER);
        let answer = client.send(post("/openai/v1/x", "again")).await;
        assert_eq!(all(answer).await.unwrap(), ANSWER);
    };
    tokio::join!(far, near);
}

#[tokio::test]
async fn an_unknown_call_is_sent_anew_while_the_client_has_nothing() {
    let (relay, gateway, _dir) = relay();
    let mut client = client(&relay).await;
    // Larger than what stays in memory.
    let large = vec![b'x'; 3 * crate::SPOOL_MEMORY_BYTES];
    let far = async {
        break_at(&gateway, CutAt::Accepted).await;
        let (mut stream, ask, _) = gateway.ask().await;
        assert!(matches!(ask, RelayAsk::Rejoin(_)));
        stream.say(RelayAnswer::Unknown {}).await;
        let (mut stream, ask, body) = gateway.ask().await;
        let RelayAsk::Call(c) = ask else { panic!("{ask:?}") };
        assert_eq!((c.call.counter, body == large), (2, true), "a new call with the whole body");
        rest(&mut stream, 0).await;
    };
    let near = async {
        let answer = client.send(post("/openai/v1/x", large.clone())).await;
        assert_eq!(all(answer).await.unwrap(), ANSWER);
    };
    tokio::join!(far, near);
}

#[tokio::test]
async fn two_answers_are_never_spliced() {
    for other_entry in [false, true] {
        let (relay, gateway, _dir) = relay();
        let mut client = client(&relay).await;
        let far = async {
            break_at(&gateway, CutAt::Bytes(4)).await;
            let (mut stream, _, _) = gateway.ask().await;
            if other_entry {
                stream.say(RelayAnswer::Accepted { seq: 6 }).await;
            } else {
                stream.say(RelayAnswer::Unknown {}).await;
            }
            assert_eq!(within("the end", stream.read_end()).await, 0, "the relay gives the call up");
        };
        let near = async {
            let answer = client.send(post("/openai/v1/x", "hello")).await;
            let mut body = answer.into_body();
            let first = within("bytes", body.frame()).await.unwrap().unwrap().into_data().unwrap();
            assert_eq!(first, ANSWER[..4]);
            assert!(within("the end", body.frame()).await.is_none_or(|f| f.is_err()), "the connection is cut");
        };
        tokio::join!(far, near);
    }
}

#[tokio::test]
async fn an_abort_cuts_the_clients_connection() {
    let (relay, gateway, _dir) = relay();
    let mut client = client(&relay).await;
    let far = async {
        let (mut stream, _, _) = gateway.ask().await;
        stream.say(RelayAnswer::Accepted { seq: 1 }).await;
        stream.head(1, None).await;
        stream.data(b"some").await;
        stream.send(BodyFrame::Abort("the provider's stream ended early".into())).await;
    };
    let near = async {
        let answer = client.send(post("/openai/v1/x", "hello")).await;
        assert!(all(answer).await.is_err());
    };
    tokio::join!(far, near);
}

#[tokio::test]
async fn refusals_speak_each_dialect() {
    let (relay, gateway, _dir) = relay();
    let cases = [
        ("/openai/v1/chat/completions", 402, "/error/code", "budget"),
        ("/anthropic/v1/messages", 402, "/error/type", "billing_error"),
        ("/gemini/v1beta/models/m:generateContent", 503, "/error/status", "UNAVAILABLE"),
        ("/mine/v1/messages", 503, "/type", "error"),
        ("/mine/v1/chat/completions", 503, "/error/type", "keystate_budget"),
    ];
    for (path, status, pointer, wanted) in cases {
        let mut client = client(&relay).await;
        let far = async {
            let (mut stream, _, _) = gateway.ask().await;
            let (code, message) = ("budget".into(), "the session's budget is used up".into());
            stream.say(RelayAnswer::Refused { status, code, message }).await;
        };
        let near = async {
            let answer = client.send(post(path, "{}")).await;
            assert_eq!(answer.status(), status);
            assert_eq!(answer.headers().contains_key("x-should-retry"), status == 402, "{path}");
            let json: serde_json::Value = serde_json::from_slice(&all(answer).await.unwrap()).unwrap();
            assert_eq!(json.pointer(pointer).and_then(|v| v.as_str()), Some(wanted), "{path}: {json}");
        };
        tokio::join!(far, near);
    }
}

#[tokio::test]
async fn a_client_that_goes_is_reported_once() {
    for with_head in [false, true] {
        let (relay, gateway, _dir) = relay();
        let mut client = client(&relay).await;
        let answering = tokio::spawn(async move {
            let answer = client.0.send_request(post("/openai/v1/x", "hello")).await;
            // Holds the connection until the task is aborted.
            std::future::pending::<()>().await;
            drop((client, answer));
        });
        let (mut stream, _, _) = gateway.ask().await;
        stream.say(RelayAnswer::Accepted { seq: 1 }).await;
        if with_head {
            stream.head(1, None).await;
            stream.data(b"some").await;
        }
        tokio::task::yield_now().await;
        answering.abort();
        let _ = answering.await;
        assert_eq!(stream.frame().await, BodyFrame::Gone, "with_head {with_head}");
        assert_eq!(within("the end", stream.read_end()).await, 0);
    }
}

#[tokio::test]
async fn a_client_that_goes_while_there_is_no_way_out_is_reported_later() {
    let (relay, gateway, _dir) = relay();
    let mut client = client(&relay).await;
    let answering = tokio::spawn(async move {
        let _ = client.0.send_request(post("/openai/v1/x", "hello")).await;
    });
    let first = gateway.ask().await;
    answering.abort();
    let _ = answering.await;
    drop(first);
    // GONE may have been written to the first stream just before it broke; then no other one comes.
    let seen = tokio::time::timeout(std::time::Duration::from_secs(2), async {
        let (mut stream, ask, _) = gateway.ask().await;
        assert!(matches!(ask, RelayAsk::Rejoin(_)));
        stream.frame().await
    });
    if let Ok(frame) = seen.await {
        assert_eq!(frame, BodyFrame::Gone);
    }
}

#[tokio::test]
async fn ten_thousand_headers_are_refused_before_anything_leaves() {
    let (relay, gateway, _dir) = relay();
    let (mut ours, theirs) = tokio::io::duplex(1 << 20);
    let serving = relay.clone();
    tokio::spawn(async move { serving.serve_connection(theirs).await });
    let mut text = String::from("POST /openai/v1/x HTTP/1.1\r\nhost: h\r\n");
    for n in 0..10_000 {
        text.push_str(&format!("x-{n}: 1\r\n"));
    }
    text.push_str("content-length: 0\r\n\r\n");
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let _ = ours.write_all(text.as_bytes()).await;
    let mut answer = Vec::new();
    let _ = within("an answer", ours.read_to_end(&mut answer)).await;
    assert!(answer.starts_with(b"HTTP/1.1 431"), "{}", String::from_utf8_lossy(&answer));
    assert!(gateway.0.lock().await.try_recv().is_err(), "no stream was opened");
}

#[tokio::test]
async fn a_flood_of_calls_is_refused_above_the_limit_and_room_comes_back() {
    let (relay, gateway, _dir) = relay();
    let (gateway, mut streams) = (Arc::new(gateway), Vec::new());
    let mut clients = Vec::new();
    for _ in 0..CALLS_MAX {
        let mut client = client(&relay).await;
        clients.push(tokio::spawn(async move { all(client.send(post("/openai/v1/x", "hello")).await).await }));
        streams.push(gateway.ask().await.0);
    }
    let mut extra = client(&relay).await;
    let refused = extra.send(post("/openai/v1/x", "hello")).await;
    assert_eq!(
        (refused.status().as_u16(), refused.headers()["x-keystate-refused"].as_bytes()),
        (503, b"too-many-calls".as_slice())
    );
    all(refused).await.unwrap();
    for stream in &mut streams {
        rest(stream, 0).await;
    }
    for answer in clients {
        assert_eq!(answer.await.unwrap().unwrap(), ANSWER);
    }
    let far = async { rest(&mut gateway.ask().await.0, 0).await };
    let near = async { assert_eq!(extra.send(post("/openai/v1/x", "hello")).await.status(), 200) };
    tokio::join!(far, near);
}

#[tokio::test]
async fn requests_that_cannot_be_calls_are_refused_here() {
    let (relay, gateway, _dir) = relay();
    let mut upgrade = post("/openai/v1/responses", "");
    upgrade.headers_mut().insert("upgrade", "websocket".parse().unwrap());
    let mut binary = post("/openai/v1/x", "");
    binary.headers_mut().insert("x-bytes", hyper::header::HeaderValue::from_bytes(b"\xff").unwrap());
    for (request, status) in [(upgrade, 426), (post("/", ""), 404), (binary, 400)] {
        let mut client = client(&relay).await;
        let answer = client.send(request).await;
        assert_eq!(answer.status().as_u16(), status);
        assert!(serde_json::from_slice::<serde_json::Value>(&all(answer).await.unwrap()).is_ok());
    }
    assert!(gateway.0.lock().await.try_recv().is_err(), "no stream was opened");
}
