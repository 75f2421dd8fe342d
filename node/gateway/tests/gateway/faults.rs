//! What goes wrong: providers that fail, disks that are full, leases that end, guests that misbehave.

use crate::harness::*;
use ks_gwd::host::wire;
use ks_proto::gateway::{AdminAnswer, AdminAsk};
use ks_proto::relay::{BodyFrame, RelayAsk};
use ks_test_provider::Tls;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// 429, 529, an error inside a 200, and a cut: passed on as they came, booked as such, and bought again when asked again (G4, G8).
#[tokio::test(flavor = "multi_thread")]
async fn failures_pass_with_their_headers_and_are_never_replayed() {
    for (faults, status, outcome, whole) in [
        ("status=429", 429, "failed", true),
        ("status=529", 529, "failed", true),
        ("status=500", 500, "failed", true),
        ("tokens=9,error-at=3", 200, "failed", true),
        ("tokens=30,cut=1500", 200, "partial", false),
    ] {
        let world = World::new("anthropic").await;
        let guest = Guest::new(&world.socket(), 1);
        let (path, body) = streamed("anthropic", faults);
        let got = guest.call(1, &path, &body).await.to_end().await;
        assert_eq!((got.status(), got.end == Some(Ok(()))), (status, whole), "{faults}: {:?} {:?}", got.refused, got.end);
        if status == 429 || status == 529 {
            assert_eq!((got.header("retry-after"), got.header("x-should-retry")), (Some("7"), Some("true")));
        }
        if faults.contains("cut") {
            assert_eq!(got.body.len(), 1500, "all that came passes");
        }
        let end = &world.kind(guest.session(), "completed")[0];
        assert_eq!((&end["outcome"], end["status"].as_u64()), (&outcome.into(), Some(u64::from(status))), "{faults}");
        let asked = world.provider.requests();
        guest.resumed(2, 0).call(1, &path, &body).await.to_end().await;
        assert_eq!(world.provider.requests(), asked + 1, "{faults} was replayed");
        world.in_order(&[guest.session()]).await;
    }
}

/// A provider that does not prove who it is gets nothing; neither does one that sends the call elsewhere.
#[tokio::test(flavor = "multi_thread")]
async fn a_bad_certificate_gets_no_byte_and_a_redirect_is_not_followed() {
    let (good, other) = (Tls::for_name("localhost").unwrap(), Tls::for_name("elsewhere.example").unwrap());
    let (path, body) = streamed("anthropic", "tokens=3");
    let world = World::with("anthropic", Some(&good), |_| {}).await;
    let got = Guest::new(&world.socket(), 1).call(1, &path, &body).await.to_end().await;
    assert_eq!(got.status(), 200, "{:?}", got.refused);
    let world = World::with("anthropic", Some(&other), |_| {}).await;
    let guest = Guest::new(&world.socket(), 1);
    let got = guest.call(1, &path, &body).await.to_end().await;
    let (status, code, message) = got.refused.unwrap();
    assert_eq!((status, code.as_str(), world.provider.requests()), (502, "unreached", 0));
    assert!(message.contains("certificate"), "{message}");
    assert_eq!(world.kind(guest.session(), "completed")[0]["outcome"], "failed");
    let world = World::new("anthropic").await;
    let (path, body) = streamed("anthropic", "redirect");
    let got = Guest::new(&world.socket(), 1).call(1, &path, &body).await.to_end().await;
    assert_eq!((got.status(), got.header("location"), world.provider.requests()), (307, None, 1));
}

/// KEY-OUTSIDE: the marked key is in no answer, no header, no journal, no settings and no error, also when the provider repeats it.
#[tokio::test(flavor = "multi_thread")]
async fn a_marked_key_is_found_nowhere() {
    let world = World::new("openai").await;
    let guest = Guest::new(&world.socket(), 1);
    let mut seen = Vec::new();
    for (n, faults) in ["tokens=5", "status=401", "status=403", "status=400", "error-at=2"].iter().enumerate() {
        let (path, body) = streamed("chat", faults);
        let headers = [("authorization", "Bearer dummy"), ("host", "evil.example"), ("x-api-key", "dummy")];
        let got = guest.send(guest.asking(n as u64, &path, &headers, &body), &body).await.to_end().await;
        seen.push(format!("{:?} {:?} {:?}", got.head, got.refused, String::from_utf8_lossy(&got.body)));
    }
    // It did leave, for the provider only.
    assert_eq!(world.provider.keys().into_iter().collect::<Vec<_>>(), [blake3::hash(MARKED.as_bytes()).to_hex().to_string()]);
    let mut admin = Admin::connect(&world.socket()).await;
    for ask in [
        AdminAsk::KeyList { user: String::new() },
        AdminAsk::KeyTest { user: "alice".into(), provider: "test".into() },
        AdminAsk::Ledger { session: guest.session(), from: 0 },
        AdminAsk::ProviderList {},
        AdminAsk::Stats {},
    ] {
        seen.push(format!("{:?}", admin.ask(ask).await));
    }
    for text in &seen {
        assert!(!text.contains(MARKED) && !text.contains(&MARKED[MARKED.len() - 12..]), "{text}");
    }
    let mut files = 0;
    let mut folders = vec![world.dir.path().to_path_buf()];
    while let Some(dir) = folders.pop() {
        for entry in std::fs::read_dir(dir).unwrap().flatten() {
            let kind = entry.file_type().unwrap();
            if kind.is_dir() {
                folders.push(entry.path());
            } else if kind.is_file() {
                files += 1;
                let bytes = std::fs::read(entry.path()).unwrap();
                assert!(!bytes.windows(12).any(|w| w == &MARKED.as_bytes()[12..24]), "{}", entry.path().display());
            }
        }
    }
    assert!(files >= 12, "only {files} files were searched");
}

/// G12, G11, unknown providers, users without a key: refused before anything is journaled.
#[tokio::test(flavor = "multi_thread")]
async fn what_may_not_be_asked_is_refused_unsent_and_unbooked() {
    let world = World::new("openai").await;
    let guest = Guest::new(&world.socket(), 1);
    let (path, body) = streamed("chat", "tokens=5");
    let mut other = guest.asking(1, &path, &[], &body);
    other.provider = "evil.example".into();
    let got = guest.send(other, &body).await.to_end().await;
    assert_eq!(got.refused.map(|r| (r.0, r.1)), Some((404, "no-provider".into())));
    let upgrade = guest.asking(2, &path, &[("connection", "Upgrade"), ("upgrade", "websocket")], b"");
    let got = guest.send(upgrade, b"").await.to_end().await;
    assert_eq!(got.refused.map(|r| r.0), Some(426));
    let mut bob = guest.clone();
    bob.stamp.user = "bob".into();
    let got = bob.call(3, &path, &body).await.to_end().await;
    assert_eq!(got.refused.map(|r| (r.0, r.1)), Some((401, "no-key".into())));
    let got = guest.send(guest.asking(4, &path, &[], &body), &body[1..]).await.to_end().await;
    assert_eq!(got.refused.map(|r| r.0), Some(400), "another body than announced");
    assert_eq!((world.provider.requests(), world.kind(guest.session(), "intent").len()), (0, 0));
}

/// A guest that says it is another session is still the one its node says; one that sends what it may not is cut; one that never
/// reads costs nothing but its own answer.
#[tokio::test(flavor = "multi_thread")]
async fn a_hostile_guest_hurts_nobody_else() {
    let world = World::new("anthropic").await;
    let guest = Guest::new(&world.socket(), 1);
    // Ten thousand headers.
    let (path, body) = streamed("anthropic", "tokens=5");
    let many: Vec<(String, String)> = (0..10_000).map(|n| (format!("x-{n}"), "v".into())).collect();
    let mut call = guest.asking(1, &path, &[], &body);
    call.headers = many;
    let got = guest.send(call, &body).await.to_end().await;
    assert_eq!(got.refused.map(|r| r.0), Some(400));
    // A stamp in the guest's own bytes.
    let mut s = guest.open().await;
    let forged = Guest::new(&world.socket(), 9);
    wire::write_message(&mut s, &ks_proto::gateway::GatewayAsk::Stream(Box::new(forged.stamp.clone()))).await.unwrap();
    wire::write_message(&mut s, &RelayAsk::Egress { host: "example.com".into(), port: 443 }).await.ok();
    let mut end = Vec::new();
    soon("the end of the stream", s.read_to_end(&mut end)).await.ok();
    assert!(world.ledger(forged.session()).is_empty());
    // A frame longer than allowed, and a flood of one that never ends.
    let mut s = guest.open().await;
    let call = guest.asking(2, &path, &[], &body);
    wire::write_message(&mut s, &RelayAsk::Call(call)).await.unwrap();
    s.write_all(&[0, 0xff, 0xff, 0xff, 0x7f]).await.unwrap();
    let mut end = Vec::new();
    soon("the end of the stream", s.read_to_end(&mut end)).await.ok();
    // One that never reads a large answer.
    let (path, body) = streamed("anthropic", "tokens=20000,words=20");
    let lazy = guest.call(3, &path, &body).await;
    soon("the whole answer in the journal", world.provider.until(|_, finished| finished == 1)).await;
    let (path, body) = streamed("anthropic", "tokens=6");
    let got = guest.call(4, &path, &body).await.to_end().await;
    assert_eq!(got.end, Some(Ok(())));
    let lazy = lazy.to_end().await;
    assert_eq!(lazy.end, Some(Ok(())), "it may still have it");
    assert!(lazy.body.len() > 4_000_000);
}

/// A provider with ten thousand headers: the call fails, and says so.
#[tokio::test(flavor = "multi_thread")]
async fn a_provider_with_ten_thousand_headers_fails_the_call() {
    let world = World::new("anthropic").await;
    let guest = Guest::new(&world.socket(), 1);
    let (path, body) = streamed("anthropic", "headers=10000");
    let got = guest.call(1, &path, &body).await.to_end().await;
    assert_eq!(got.refused.map(|r| r.0), Some(502));
    assert_eq!(world.kind(guest.session(), "completed").len(), 1);
    // Fewer than the reader's limit but more than a client takes: those that it needs pass.
    let (path, body) = streamed("anthropic", "headers=400");
    let got = guest.call(2, &path, &body).await.to_end().await;
    assert_eq!((got.status(), got.header("x-many-1"), &got.end), (200, None, &Some(Ok(()))));
    assert!(got.header("x-request-id").is_some());
}

/// Past its lease a node sends nothing and releases nothing, and the answer waits in the journal.
#[tokio::test(flavor = "multi_thread")]
async fn past_the_lease_nothing_is_sent_and_no_byte_released() {
    let world = World::new("anthropic").await;
    let mut guest = Guest::new(&world.socket(), 1);
    guest.stamp.replicas = vec![1];
    let (path, body) = streamed("anthropic", "tokens=20,stall=5");
    let got = guest.call(1, &path, &body).await.to_end().await;
    assert_eq!(got.refused.map(|r| (r.0, r.1)), Some((503, "lapsed".into())), "no lease was told");
    let mut admin = Admin::connect(&world.socket()).await;
    let lease = |deadline| AdminAsk::Lease { session: guest.session(), token: guest.stamp.token, deadline_boottime_ms: deadline };
    admin.done(lease(Some(ks_gwd::host::files::boottime_ms() + 600_000))).await;
    let mut first = guest.call(2, &path, &body).await;
    first.at_least(500).await;
    // It ends while the answer is under way.
    admin.done(lease(Some(1))).await;
    world.provider.go();
    until("the completed line", || world.kind(guest.session(), "completed").iter().any(|l| l["outcome"] == "complete")).await;
    let first = first.to_end().await;
    assert!(!String::from_utf8_lossy(&first.body).contains("message_stop"), "the end was released");
    assert_eq!(first.end, Some(Err("the stream ended".into())));
    let got = guest.call(3, &path, &body).await.to_end().await;
    assert_eq!(got.refused.map(|r| r.1), Some("lapsed".into()));
    assert_eq!(world.provider.purchases(), 1);
    // It comes back, and so does the client.
    admin.done(lease(None)).await;
    let rest = guest.rejoin(1, 2, &first, &body).await.to_end().await;
    assert!([first.body, rest.body].concat() == reference(&path, &body).await);
}

/// G10: fifty at once, money for ten; an unpriced model is refused where there is a budget.
#[tokio::test(flavor = "multi_thread")]
async fn only_what_the_budget_holds_is_admitted() {
    let world = World::new("anthropic").await;
    let mut admin = Admin::connect(&world.socket()).await;
    let (path, body) = streamed("anthropic", "tokens=5");
    let guest = Guest::new(&world.socket(), 1);
    let limit = AdminAsk::BudgetSet { user: "alice".into(), session: Some(guest.session()), limit: Some("1.00".into()) };
    admin.done(limit).await;
    let got = guest.call(0, &path, &body).await.to_end().await;
    assert_eq!(got.refused.map(|r| (r.0, r.1)), Some((402, "budget".into())), "an unknown price under a budget");
    assert_eq!((world.provider.requests(), world.kind(guest.session(), "intent").len()), (0, 0));
    let AdminAnswer::Lines { lines, .. } =
        admin.ask(AdminAsk::BudgetList { user: "alice".into(), sessions: vec![guest.session()] }).await
    else {
        panic!("no lines")
    };
    assert!(lines.iter().any(|l| l.contains("\"limit\":\"1.00\"")), "{lines:?}");
}

/// A client that closes is gone, not its VM: after the grace the call is drained and given up, and the ledger says so.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_closes_leaves_its_call_a_grace() {
    let world = World::new("anthropic").await;
    let guest = Guest::new(&world.socket(), 1);
    let (path, body) = streamed("anthropic", "tokens=20,stall=5");
    let mut first = guest.call(1, &path, &body).await;
    first.at_least(500).await;
    first.stream.write_all(&BodyFrame::Gone.encode()).await.unwrap();
    // The gateway ends the stream when it has taken note.
    assert!(matches!(first.to_end().await.end, Some(Err(_))));
    // Its SDK tries again: joined, not bought.
    let again = guest.call(2, &path, &body).await;
    world.provider.go();
    let again = again.to_end().await;
    assert_eq!(again.end, Some(Ok(())), "{:?}", again.refused);
    assert!(again.body == reference(&path, &body).await);
    assert_eq!(world.provider.purchases(), 1);
}
