//! Calls that are bought: byte for byte, journaled, of every dialect; and the ones that come back for the rest.

use crate::harness::*;

/// One call of each dialect: the client's bytes are the provider's, and the ledger says what was bought.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_is_bought_once_and_passes_byte_for_byte() {
    for dialect in ["chat", "responses", "anthropic", "gemini"] {
        for chunk in ["", ",chunk=1", ",chunk=7"] {
            let world = World::new(family(dialect)).await;
            let guest = Guest::new(&world.socket(), 1);
            let (path, body) = streamed(dialect, &format!("tokens=20{chunk}"));
            let got = guest.call(1, &path, &body).await.to_end().await;
            assert_eq!((got.status(), &got.end), (200, &Some(Ok(()))), "{dialect}{chunk}: {:?}", got.refused);
            assert!(got.body == reference(&path, &body).await, "{dialect}{chunk}: other bytes");
            assert_eq!(world.provider.purchases(), 1);
            let intents = world.kind(guest.session(), "intent");
            assert_eq!((intents.len(), intents[0]["seq"].as_u64()), (1, got.seq));
            let ends = world.kind(guest.session(), "completed");
            assert_eq!(ends.len(), 1);
            assert_eq!((&ends[0]["of"], &ends[0]["outcome"]), (&intents[0]["seq"], &"complete".into()), "{dialect}{chunk}");
            assert_eq!(ends[0]["usage"]["output"].as_u64(), Some(if dialect == "gemini" { 30 } else { 20 }), "{dialect}");
            assert_eq!(ends[0]["body_bytes"].as_u64(), Some(got.body.len() as u64));
            assert_eq!(ends[0]["body_hash"], blake3::hash(&got.body).to_hex().as_str());
            world.in_order(&[guest.session()]).await;
        }
    }
}

/// The stream dies in mid-answer (VM and ksd killed): the pump goes on, and the client continues at its byte. Paid once.
#[tokio::test(flavor = "multi_thread")]
async fn a_cut_stream_is_rejoined_at_its_byte_and_paid_once() {
    let world = World::new("anthropic").await;
    let guest = Guest::new(&world.socket(), 1);
    let (path, body) = streamed("anthropic", "tokens=40,stall=7");
    let mut first = guest.call(1, &path, &body).await;
    first.at_least(700).await;
    let before = first.body.len();
    drop(std::mem::replace(&mut first.stream, guest.open().await));
    // Another host process, another timeline, the same client.
    let resumed = guest.resumed(2, first.seq.unwrap());
    let rest = resumed.rejoin(1, 1, &first, &body).await;
    world.provider.go();
    let rest = rest.to_end().await;
    assert_eq!(rest.end, Some(Ok(())), "{:?} unknown {}", rest.refused, rest.unknown);
    assert_eq!(rest.seq, first.seq);
    assert!(before > 0 && [first.body, rest.body].concat() == reference(&path, &body).await, "spliced bytes differ");
    assert_eq!(world.provider.purchases(), 1);
    assert_eq!(world.kind(guest.session(), "completed")[0]["outcome"], "complete");
}

/// Nobody is connected while the answer comes and ends; it is whole in the journal, and the client that comes back gets it.
#[tokio::test(flavor = "multi_thread")]
async fn in_flight_when_the_vm_dies_is_read_to_the_end() {
    let world = World::new("openai").await;
    let guest = Guest::new(&world.socket(), 1);
    let (path, body) = streamed("chat", "tokens=40,stall=7");
    let mut first = guest.call(1, &path, &body).await;
    first.at_least(300).await;
    drop(std::mem::replace(&mut first.stream, guest.open().await));
    world.provider.go();
    soon("the end of the answer", world.provider.until(|_, finished| finished == 1)).await;
    until("the completed line", || !world.kind(guest.session(), "completed").is_empty()).await;
    let rest = guest.resumed(2, first.seq.unwrap()).rejoin(1, 1, &first, &body).await.to_end().await;
    assert_eq!(rest.end, Some(Ok(())), "{:?}", rest.refused);
    assert!([first.body, rest.body].concat() == reference(&path, &body).await);
    assert_eq!(world.provider.purchases(), 1);
}

/// A resumed guest that asks again is served what was bought after its checkpoint, and what differs is bought.
#[tokio::test(flavor = "multi_thread")]
async fn after_a_crash_the_same_calls_are_served_and_others_bought() {
    let world = World::new("openai").await;
    let guest = Guest::new(&world.socket(), 1);
    let asks: Vec<_> = (0..3).map(|n| streamed("chat", &format!("tokens={}", 5 + n))).collect();
    let mut first = Vec::new();
    for (n, (path, body)) in asks.iter().enumerate() {
        first.push(guest.call(n as u64, path, body).await.to_end().await);
    }
    assert_eq!(world.provider.purchases(), 3);
    // The checkpoint was taken after the first call.
    let resumed = guest.resumed(2, first[0].seq.unwrap());
    for n in [2, 1] {
        let (path, body) = &asks[n];
        let again = resumed.call(n as u64, path, body).await.to_end().await;
        assert!(again.body == first[n].body && again.end == Some(Ok(())), "call {n}: {:?}", again.refused);
    }
    assert_eq!(world.provider.purchases(), 3);
    assert_eq!(world.kind(guest.session(), "served").len(), 2);
    let (path, body) = &asks[0];
    resumed.call(9, path, body).await.to_end().await;
    assert_eq!(world.provider.purchases(), 4);
}

/// Several sessions, many calls at once: each is bought once, and each ledger is whole.
#[tokio::test(flavor = "multi_thread")]
async fn concurrent_calls_share_syncs_and_every_line_is_there() {
    let world = World::new("anthropic").await;
    let mut all = tokio::task::JoinSet::new();
    for n in 0..60u64 {
        let guest = Guest::new(&world.socket(), (n % 3) as u8 + 1);
        all.spawn(async move {
            let (path, body) = streamed("anthropic", &format!("tokens={},slow=1", 10 + n));
            let got = guest.call(n, &path, &body).await.to_end().await;
            (got.end, got.refused)
        });
    }
    while let Some(done) = all.join_next().await {
        assert_eq!(done.unwrap(), (Some(Ok(())), None));
    }
    assert_eq!(world.provider.purchases(), 60);
    for s in 1..=3 {
        let session = ks_proto::SessionId([s; 16]);
        assert_eq!((world.kind(session, "intent").len(), world.kind(session, "completed").len()), (20, 20));
        let seqs: Vec<u64> = world.ledger(session).iter().map(|l| l["seq"].as_u64().unwrap()).collect();
        assert_eq!(seqs, (1..=seqs.len() as u64).collect::<Vec<_>>());
        world.in_order(&[session]).await;
    }
}

/// Not streamed, gzip and zstd both ways, and a 16.9 MB body (G6, G7).
#[tokio::test(flavor = "multi_thread")]
async fn coded_bodies_and_large_ones_pass() {
    use std::io::Write;
    let world = World::new("anthropic").await;
    let guest = Guest::new(&world.socket(), 1);
    for (n, coding) in ["gzip", "zstd"].into_iter().enumerate() {
        let (path, plain) = streamed("anthropic", &format!("tokens=9,{coding}"));
        let body = match coding {
            "gzip" => {
                let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
                gz.write_all(&plain).unwrap();
                gz.finish().unwrap()
            }
            _ => zstd::encode_all(&plain[..], 1).unwrap(),
        };
        let headers = [("content-encoding", coding), ("accept-encoding", "gzip, zstd, br")];
        let got = guest.send(guest.asking(n as u64, &path, &headers, &body), &body).await.to_end().await;
        assert_eq!((got.header("content-encoding"), &got.end), (Some(coding), &Some(Ok(()))), "{:?}", got.refused);
        assert!(got.body == reference_with(&path, &headers[..1], &body).await, "{coding}: other raw bytes");
        let end = &world.kind(guest.session(), "completed")[n];
        assert_eq!((&end["outcome"], end["usage"]["output"].as_u64()), (&"complete".into(), Some(9)), "{coding}");
    }
    let text = "x".repeat(16_900_000);
    let body = serde_json::json!({"model": "m!tokens=4", "max_tokens": 9, "messages": [{"role": "user", "content": text}]});
    let body = body.to_string().into_bytes();
    let got = guest.call(7, "/v1/messages", &body).await.to_end().await;
    assert_eq!((got.status(), &got.end), (200, &Some(Ok(()))), "{:?}", got.refused);
    assert!(got.body == reference("/v1/messages", &body).await);
}
