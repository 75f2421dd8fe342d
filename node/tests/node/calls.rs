//! Model calls in a real fleet with the real gateway: three ksd and three ksgw on loopback, stand-in VMs, the test provider.
//! What a host had bought when it died is served by the peer to which the session moved, and is bought once.

use crate::fake_guest::Called;
use crate::fleet::{durable, fleet, until};
use crate::harness::TestNode;
use ks_proto::api::Session;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::PathBuf;

const PATH: &str = "/v1/messages";

/// A streamed request of its own for each `n`, with faults.
fn request(n: u32, faults: &str) -> String {
    let messages = json!([{ "role": "user", "content": format!("question {n}: größer?") }]);
    json!({ "model": format!("test-model!{faults}"), "stream": true, "max_tokens": 100, "messages": messages }).to_string()
}

impl TestNode {
    async fn call_model(&self, session: &str, body: &str) -> Called {
        let (_, out) = self.exec(session, &["call", PATH, body], b"").await.unwrap_or_else(|e| panic!("{e}\n{}", self.log()));
        serde_json::from_slice(&out)
            .unwrap_or_else(|e| panic!("{e}: {}\n{}\n{}", String::from_utf8_lossy(&out), self.log(), self.gateway_log()))
    }

    /// A call that must be answered whole; its text.
    async fn answered(&self, session: &str, body: &str) -> String {
        let called = self.call_model(session, body).await;
        assert!(called.status == 200 && called.cut.is_none(), "{called:?}\n{}\n{}", self.log(), self.gateway_log());
        assert!(called.body.contains("message_stop"), "{called:?}");
        called.body
    }

    fn copies(&self) -> PathBuf {
        self.data().join("gateway/copies")
    }
}

/// A fleet with real gateways that know the provider and its key.
async fn gateways(size: usize, provider: &ks_test_provider::Provider) -> Vec<TestNode> {
    let nodes = fleet(size).await;
    nodes.iter().for_each(TestNode::real_gateway);
    let settings = json!({ "name": "test", "dialect": "anthropic", "base_url": format!("http://{}", provider.address) });
    nodes[0].ok("gateway/providers", settings).await;
    nodes[0].ok("gateway/keys", json!({ "provider": "test", "secret": "sk-of-the-whole-fleet" })).await;
    nodes
}

async fn provider() -> ks_test_provider::Provider {
    ks_test_provider::start("127.0.0.1:0".parse().unwrap(), None).await.unwrap()
}

async fn moved(all: &[&TestNode]) -> Session {
    until("a new owner", all, async || {
        let s = all[0].maybe::<Session>("sessions/a").await?;
        (s.token.epoch > 1 && s.state.to_string() == "running").then_some(s)
    })
    .await
}

#[tokio::test]
async fn what_a_dead_host_bought_is_served_by_its_peer_and_bought_once() {
    let provider = provider().await;
    let mut nodes = gateways(3, &provider).await;
    nodes[0].create("a").await;
    nodes[0].answered("a", &request(1, "tokens=5")).await;
    nodes[0].ok("sessions/a/checkpoint", json!({})).await;
    {
        let all: Vec<&TestNode> = nodes.iter().collect();
        durable(&all, all[0], "a").await;
    }
    // What is bought after the checkpoint is unknown to it.
    let asked: Vec<String> = (2..6).map(|n| request(n, "tokens=20,chunk=7")).collect();
    let mut first = Vec::new();
    for body in &asked {
        first.push(nodes[0].answered("a", body).await);
    }
    assert_eq!(first.iter().collect::<BTreeSet<_>>().len(), asked.len(), "answers differ");
    assert_eq!(provider.purchases(), 5);
    let dead = nodes.remove(0).kill_everything();
    let all: Vec<&TestNode> = nodes.iter().collect();
    moved(&all).await;
    let mut again = Vec::new();
    for body in &asked {
        again.push(all[0].answered("a", body).await);
    }
    assert!(again == first, "byte for byte");
    let by_request = provider.purchases_by_request();
    assert!(by_request.len() == 5 && by_request.values().all(|n| *n == 1), "{by_request:?}");
    let verified: Value = all[1].ok("sessions/a/ledger/verify", json!({})).await;
    assert_eq!((&verified["ok"], &verified["problems"]), (&json!(true), &json!([])), "{verified}");
    // The new owner buys, with a copy at the one that is left.
    all[0].answered("a", &request(6, "tokens=5")).await;
    assert_eq!(provider.purchases(), 6);
    let ledgers: Vec<Vec<u8>> = all.iter().map(|n| ledger_anywhere(n)).collect();
    assert!(!ledgers[0].is_empty() && ledgers[0] == ledgers[1], "both have every line");
    drop(dead);
}

/// The only ledger that a node has, as a journal or as a copy.
fn ledger_anywhere(n: &TestNode) -> Vec<u8> {
    let list = |p: PathBuf| std::fs::read_dir(p).into_iter().flatten().flatten().map(|e| e.path().join("ledger.jsonl"));
    let gateway = n.data().join("gateway");
    let mut found = list(gateway.join("journal")).chain(list(gateway.join("copies"))).filter(|p| p.exists());
    let one = found.next().map(|p| std::fs::read(p).unwrap()).unwrap_or_default();
    assert!(found.next().is_none(), "a journal and a copy at once");
    one
}

#[tokio::test]
async fn without_a_copy_within_reach_the_peer_buys_nothing() {
    let provider = provider().await;
    let mut nodes = gateways(3, &provider).await;
    nodes[0].create("a").await;
    let known = request(1, "tokens=5");
    nodes[0].answered("a", &known).await;
    nodes[0].ok("sessions/a/checkpoint", json!({})).await;
    {
        let all: Vec<&TestNode> = nodes.iter().collect();
        durable(&all, all[0], "a").await;
    }
    let after = request(2, "tokens=20");
    let first = nodes[0].answered("a", &after).await;
    // The peers lose their copies for a while, as when a disk is gone.
    let lost = |n: &TestNode| n.data().join("lost-copies");
    let mut kept = 0;
    for n in &nodes[1..] {
        n.kill_gateway();
        if n.copies().exists() {
            std::fs::rename(n.copies(), lost(n)).unwrap();
            kept += 1;
        }
    }
    assert!(kept >= 1, "nobody had a copy");
    let dead = nodes.remove(0).kill_everything();
    let all: Vec<&TestNode> = nodes.iter().collect();
    moved(&all).await;
    for body in [&after, &request(3, "tokens=5")] {
        let called = all[0].call_model("a", body).await;
        let (code, why) = called.refused.clone().unwrap_or_else(|| panic!("{called:?}\n{}", all[0].gateway_log()));
        assert!(called.status == 503 && code == "journal", "{called:?}");
        assert!(why.contains("guest knows of") || why.contains("may have one"), "{why}");
    }
    assert_eq!(provider.purchases(), 2, "nothing is bought in silence");
    for n in &all {
        n.kill_gateway();
        if lost(n).exists() {
            std::fs::remove_dir_all(n.copies()).or_else(|e| if n.copies().exists() { Err(e) } else { Ok(()) }).unwrap();
            std::fs::rename(lost(n), n.copies()).unwrap();
        }
    }
    assert!(all[0].answered("a", &after).await == first, "the copy is back, and serves");
    assert_eq!(provider.purchases(), 2);
    drop(dead);
}
