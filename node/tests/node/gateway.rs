//! Streams that a guest opens: whose they are said to be, where they go, and the gateway's process over ksd's deaths.

use crate::harness::TestNode;
use ks_proto::gateway::{Began, ReplayMode, Stamp};
use ks_proto::relay::RelayAnswer;
use serde_json::{Value, json};

impl TestNode {
    /// The session's guest opens a stream to `host`; what it is answered.
    async fn relay(&self, session: &str, host: &str) -> RelayAnswer {
        let (_, out) = self.exec(session, &["relay", host], b"").await.unwrap();
        serde_json::from_slice(&out).unwrap_or_else(|e| panic!("{e}: {}\n{}", String::from_utf8_lossy(&out), self.log()))
    }

    /// As [`Self::relay`], and the stamp under which the gateway saw it.
    async fn stamp(&self, session: &str) -> Stamp {
        match self.relay(session, "example.org").await {
            RelayAnswer::Refused { code, message, .. } if code == "seen" => assert!(message.contains("example.org"), "{message}"),
            other => panic!("{other:?}\n{}", self.log()),
        }
        serde_json::from_str(self.fault_text("gateway-stamps").lines().last().unwrap()).unwrap()
    }

    async fn checkpoint(&self, session: &str) -> String {
        format!("c{}", self.ok(&format!("sessions/{session}/checkpoint"), json!({})).await["number"])
    }
}

#[tokio::test]
async fn a_stream_is_stamped_with_why_its_run_began() {
    let n = TestNode::with_image().await;
    let made = n.create("a").await;
    let first = n.stamp("a").await;
    assert_eq!((first.session, first.token, first.began), (made.id, made.token, Began::Boot));
    assert!(first.origin.is_none() && first.replicas.is_empty());
    let point = n.checkpoint("a").await;

    n.ok("sessions/a/kill", json!({})).await;
    let s = n.stamp("a").await;
    assert_eq!((s.began, s.replay, s.token), (Began::Resume, ReplayMode::On, n.show("a").await.token));
    assert!(s.token > first.token);

    n.ok("sessions/a/restore", json!({ "checkpoint": point })).await;
    let s = n.stamp("a").await;
    assert_eq!((s.began, s.replay), (Began::Rewind, ReplayMode::Off));
    // A crash of what was chosen is a crash.
    n.ok("sessions/a/kill", json!({})).await;
    let s = n.stamp("a").await;
    assert_eq!((s.began, s.replay), (Began::Resume, ReplayMode::On));

    n.ok("sessions/a/park", json!({})).await;
    n.ok("sessions/a/wake", json!({})).await;
    assert_eq!(n.stamp("a").await.replay, ReplayMode::On);

    for (replay_parent, names, replay) in [(false, ["b"], ReplayMode::Off), (true, ["c"], ReplayMode::On)] {
        let fork = json!({ "checkpoint": point, "n": 1, "names": names, "replay_parent": replay_parent });
        n.ok("sessions/a/fork", fork).await;
        let s = n.stamp(names[0]).await;
        assert_eq!((s.began, s.replay, s.origin.unwrap().session), (Began::Fork, replay, made.id));
    }
    let asks = n.fault_text("gateway-asks");
    let lease = format!("Lease {{ session: {:?}", made.id);
    assert!(asks.contains("Unseal") && asks.contains(&lease), "{asks}");
}

#[tokio::test]
async fn the_gateway_outlives_ksd_and_a_run_keeps_its_stamp() {
    let mut n = TestNode::with_image().await;
    n.create("a").await;
    let point = n.checkpoint("a").await;
    n.ok("sessions/a/restore", json!({ "checkpoint": point })).await;
    let before = n.stamp("a").await;
    assert_eq!(before.began, Began::Rewind);
    n.kill_ksd();
    n.up().await;
    assert_eq!(n.stamp("a").await, before, "the adopted run is what it was");
    assert_eq!(n.fault_text("gateway-pids").lines().count(), 1, "one process served both");
    // Its own death is noticed when it is needed again.
    let pid = n.fault_text("gateway-pids").trim().to_owned();
    std::process::Command::new("kill").args(["-9", &pid]).status().unwrap();
    assert_eq!(n.stamp("a").await, before);
    assert_eq!(n.fault_text("gateway-pids").lines().count(), 2);
}

#[tokio::test]
async fn an_orderly_end_without_sessions_ends_the_gateway_too() {
    let mut n = TestNode::with_image().await;
    n.create("a").await;
    n.stamp("a").await;
    let pid: u32 = n.fault_text("gateway-pids").trim().parse().unwrap();
    let gateway = ks_node::host::process::Proc::of(pid).unwrap();
    assert!(n.end_ksd().success());
    assert!(gateway.alive(), "a session runs, and its calls go on");
    n.up().await;
    n.checkpoint("a").await;
    n.ok("sessions/a/stop", json!({})).await;
    assert!(n.end_ksd().success());
    tokio::time::timeout(crate::harness::DEADLINE, ks_node::host::process::wait_dead(gateway)).await.unwrap();
}

#[tokio::test]
async fn a_journal_goes_with_the_last_session_that_goes_on_from_it() {
    let n = TestNode::with_image().await;
    let a = n.create("a").await.id;
    let point = n.checkpoint("a").await;
    let fork = json!({ "checkpoint": point, "n": 1, "names": ["b"] });
    let b: ks_proto::SessionId = serde_json::from_value(n.ok("sessions/a/fork", fork).await[0]["id"].clone()).unwrap();
    for id in [a, b] {
        std::fs::create_dir_all(n.data().join("gateway/journal").join(id.to_hex())).unwrap();
    }
    let remove = async |name: &str| {
        let r = n.request("DELETE", &format!("sessions/{name}?force=1")).send().await.unwrap();
        assert!(r.status().is_success(), "{}", r.text().await.unwrap());
    };
    let forgotten = |id: ks_proto::SessionId| n.fault_text("gateway-asks").contains(&format!("Forget {{ session: {id:?}"));
    remove("a").await;
    assert!(!forgotten(a), "b goes on from it");
    remove("b").await;
    assert!(forgotten(a) && forgotten(b));
}

#[tokio::test]
async fn without_the_program_a_call_is_refused_in_words() {
    let n = TestNode::with_image().await;
    n.create("a").await;
    std::fs::remove_file(n.bin("ksgw")).unwrap();
    match n.relay("a", "example.org").await {
        RelayAnswer::Refused { status: 503, code, message } => {
            assert_eq!(code, "no-gateway");
            assert!(message.contains("ksgw") && message.contains("KS_LIBEXEC"), "{message}");
        }
        other => panic!("{other:?}"),
    }
    let e = n.get::<Value>("gateway/keys").await.unwrap_err();
    assert_eq!(e.code, "engine-missing");
}

#[tokio::test]
async fn the_api_asks_the_gateway_and_no_secret_is_logged() {
    let n = TestNode::with_image().await;
    n.create("a").await;
    n.ok("gateway/keys", json!({ "provider": "openai", "secret": "sk-marked-secret" })).await;
    let e = n.refused("gateway/keys", json!({ "provider": "nobody", "secret": "sk-marked-secret" })).await;
    assert_eq!((e.code.as_str(), e.next.as_str()), ("not-found", "ks provider ls"));
    let text = async || n.request("GET", "sessions/a/ledger?from=7").send().await.unwrap().text().await.unwrap();
    assert_eq!(text().await, "", "nothing was called, and nobody was asked");
    let id = n.show("a").await.id;
    std::fs::create_dir_all(n.data().join("gateway/journal").join(id.to_hex())).unwrap();
    let lines = text().await;
    assert_eq!(lines, "{\"seq\":7}\n{\"seq\":99}\n");
    let egress: Value = n.get("sessions/a/egress").await.unwrap();
    assert_eq!(egress["allow"], json!(["pypi.org"]));
    assert_eq!(n.get::<Value>("sessions/nobody/egress").await.unwrap_err().code, "not-found");
    assert!(!n.log().contains("sk-marked-secret") && !n.fault_text("gateway-asks").contains("sk-marked-secret"));
}
