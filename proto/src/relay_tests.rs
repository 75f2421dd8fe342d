//! Tests of the relay's frames: round trips, and hostile bytes.

use super::*;
use proptest::prelude::*;

fn call() -> Call {
    Call {
        call: CallId { nonce_hex: "ab".repeat(16), counter: 7 },
        position: 3,
        prior: Some("cd".repeat(16)),
        provider: "openai".into(),
        method: "POST".into(),
        path: "/v1/chat/completions?x=1".into(),
        headers: vec![("content-type".into(), "application/json".into())],
        body_bytes: 12,
        body_hash: "0f".repeat(32),
    }
}

fn decode(ask: &RelayAsk) -> Result<RelayAsk, DecodeError> {
    let bytes = encode_message(ask)?;
    let len = message_length([bytes[0], bytes[1], bytes[2], bytes[3]])?;
    assert_eq!(len, bytes.len() - 4);
    RelayAsk::decode(&bytes[4..])
}

#[test]
fn asks_and_answers_round_trip() {
    let rejoin = Rejoin {
        call: call().call,
        timeline: "00".repeat(16),
        prior: None,
        position: 1,
        seq: Some(9),
        offset: 1 << 40,
        head_sent: true,
        body_hash: "11".repeat(32),
    };
    let egress = RelayAsk::Egress { host: "pypi.org".into(), port: 443 };
    for ask in [RelayAsk::Call(call()), RelayAsk::Rejoin(rejoin), egress] {
        assert_eq!(decode(&ask), Ok(ask));
    }
    let head = RelayAnswer::Head { status: 200, headers: vec![("a".into(), "b".into())], seq: 4, body_bytes: None };
    let refused = RelayAnswer::Refused { status: 503, code: "replica".into(), message: "m".into() };
    for answer in [RelayAnswer::Accepted { seq: 1 }, head, RelayAnswer::Unknown {}, refused, RelayAnswer::Ok {}] {
        let bytes = encode_message(&answer).unwrap();
        assert_eq!(decode_message::<RelayAnswer>(&bytes[4..]), Ok(answer));
    }
}

type Change = fn(&mut Call);

#[test]
fn asks_above_a_limit_are_refused() {
    let changed: [(&str, Change); 12] = [
        ("nonce", |c| c.call.nonce_hex = "AB".repeat(16)),
        ("prior", |c| c.prior = Some("x".into())),
        ("hash", |c| c.body_hash.clear()),
        ("provider", |c| c.provider.clear()),
        ("method", |c| c.method = "get /".into()),
        ("path", |c| c.path = "http://elsewhere/".into()),
        ("path", |c| c.path = "/a b".into()),
        ("body", |c| c.body_bytes = BODY_BYTES_MAX + 1),
        ("headers", |c| c.headers = vec![("x".into(), "1".into()); 10_000]),
        ("headers", |c| c.headers = vec![("x".into(), "1".repeat(HEADER_BYTES_MAX))]),
        ("headers", |c| c.headers = vec![("x".into(), "1\r\nhost: evil".into())]),
        ("headers", |c| c.headers = vec![("a b".into(), "1".into())]),
    ];
    for (what, change) in changed {
        let mut bad = call();
        change(&mut bad);
        let why = decode(&RelayAsk::Call(bad)).unwrap_err().to_string();
        assert!(why.contains(what), "{what}: {why}");
    }
    for host in ["", "a b", "a/b", "a\nb", &"h".repeat(256)] {
        assert!(decode(&RelayAsk::Egress { host: host.into(), port: 1 }).is_err(), "{host:?}");
    }
}

#[test]
fn lengths_are_refused_before_anything_is_read() {
    assert!(message_length(u32::MAX.to_le_bytes()).is_err());
    assert!(message_length(((MESSAGE_BYTES_MAX + 1) as u32).to_le_bytes()).is_err());
    assert_eq!(message_length((MESSAGE_BYTES_MAX as u32).to_le_bytes()), Ok(MESSAGE_BYTES_MAX));
    assert!(BodyFrame::header([0, 1, 0, 1, 0]).is_err(), "64 KiB and one byte");
    assert_eq!(BodyFrame::header([0, 0, 0, 1, 0]), Ok((0, PAYLOAD_BYTES_MAX)));
    assert!(BodyFrame::header([1, 1, 0, 0, 0]).is_err(), "an end with a payload");
    assert!(BodyFrame::header([9, 0, 0, 0, 0]).is_err());
    assert!(encode_message(&"x".repeat(MESSAGE_BYTES_MAX)).is_err());
}

proptest! {
    #[test]
    fn frames_round_trip(data in proptest::collection::vec(any::<u8>(), 0..2000), why in ".{0,80}") {
        for frame in [BodyFrame::Data(data), BodyFrame::End, BodyFrame::Abort(why), BodyFrame::Gone] {
            let bytes = frame.encode();
            let mut head = [0; FRAME_HEADER_BYTES];
            head.copy_from_slice(&bytes[..FRAME_HEADER_BYTES]);
            let (kind, len) = BodyFrame::header(head).unwrap();
            prop_assert_eq!(len, bytes.len() - FRAME_HEADER_BYTES);
            prop_assert_eq!(BodyFrame::from_parts(kind, bytes[FRAME_HEADER_BYTES..].to_vec()), Ok(frame));
        }
    }

    #[test]
    fn hostile_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = RelayAsk::decode(&bytes);
        let _ = decode_message::<RelayAnswer>(&bytes);
        if bytes.len() >= 5 {
            let _ = BodyFrame::header([bytes[0], bytes[1], bytes[2], bytes[3], bytes[4]]);
            let _ = BodyFrame::from_parts(bytes[0], bytes[1..].to_vec());
        }
    }
}
