//! Model calls in a real fleet with the real gateway: three ksd and three ksgw on loopback, stand-in VMs, the test provider.
//! What a host had bought when it died is served by the peer to which the session moved, and is bought once.

use crate::fake_guest::{BROKE, Called};
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

    /// As [`Self::call_model`], again when the stream broke or the node's lease had just lapsed, as on a busy machine: a client
    /// tries again then, and its call goes on.
    async fn called(&self, session: &str, body: &str) -> Called {
        let begun = std::time::Instant::now();
        loop {
            let called = self.call_model(session, body).await;
            let broke = called.cut.as_ref().is_some_and(|c| c.starts_with(BROKE));
            let lapsed = called.refused.as_ref().is_some_and(|r| r.0 == "lapsed");
            if !(broke || lapsed) || begun.elapsed() > crate::harness::DEADLINE {
                return called;
            }
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
    }

    /// A call that must be answered whole; its text.
    async fn answered(&self, session: &str, body: &str) -> String {
        let called = self.called(session, body).await;
        assert!(called.status == 200 && called.cut.is_none(), "{called:?}\n{}\n{}", self.log(), self.gateway_log());
        assert!(called.body.contains("message_stop"), "{called:?}");
        called.body
    }

    /// A session with checkpoints every `cadence_s` seconds; 0 is only on request.
    async fn create_with(&self, name: &str, cadence_s: u64) {
        let body = json!({ "name": name, "memory_mib": 128, "cadence_s": cadence_s, "main": { "command": ["agent"] } });
        self.ok("sessions", body).await;
    }

    async fn put(&self, path: &str, body: Value) {
        let r = self.request("PUT", path).json(&body).send().await.unwrap();
        assert!(r.status().is_success(), "{path}: {}\n{}", r.text().await.unwrap(), self.log());
    }

    /// Lines of JSON.
    async fn rows(&self, path: &str) -> Vec<Value> {
        let text = self.request("GET", path).send().await.unwrap().text().await.unwrap();
        text.lines().map(|l| serde_json::from_str(l).unwrap_or_else(|e| panic!("{e}: {text}"))).collect()
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
    nodes[0].create_with("a", 0).await;
    // Through a node that does not own it, too.
    nodes[1].put("sessions/a/egress", json!({ "allow": ["pypi.org", "*.debian.org"] })).await;
    nodes[2].put("gateway/budgets", json!({ "session": "a", "limit": "7.50" })).await;
    nodes[0].put("gateway/budgets", json!({ "session": "a", "limit": null })).await;
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
    // What it may reach and spend came along.
    let egress: Value = all[0].get("sessions/a/egress").await.unwrap();
    assert_eq!(egress["allow"], json!(["pypi.org", "*.debian.org"]));
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
    nodes[0].create_with("a", 0).await;
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
        let called = all[0].called("a", body).await;
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

#[tokio::test]
async fn what_a_session_may_reach_and_spend_moves_with_it() {
    let provider = provider().await;
    let mut nodes = gateways(3, &provider).await;
    nodes[0].create_with("a", 0).await;
    nodes[0].answered("a", &request(1, "tokens=5")).await;
    nodes[1].put("sessions/a/egress", json!({ "allow": ["example.org:444"] })).await;
    // A budget refuses calls of a model that has no price, such as the stand-in's.
    nodes[2].put("gateway/budgets", json!({ "session": "a", "limit": "7.50" })).await;
    let refused = async |n: &TestNode, which: u32| {
        let called = n.called("a", &request(which, "tokens=5")).await;
        assert_eq!((called.status, called.refused.clone().map(|r| r.0).as_deref()), (402, Some("budget")), "{called:?}");
    };
    refused(&nodes[0], 2).await;
    let e = nodes[2].request("PUT", "gateway/budgets").json(&json!({ "session": "a", "limit": "much" })).send().await.unwrap();
    assert!(e.status().is_client_error(), "{}", e.text().await.unwrap());
    nodes[0].ok("sessions/a/checkpoint", json!({})).await;
    {
        let all: Vec<&TestNode> = nodes.iter().collect();
        durable(&all, all[0], "a").await;
    }
    let dead = nodes.remove(0).kill_everything();
    let all: Vec<&TestNode> = nodes.iter().collect();
    moved(&all).await;
    refused(all[0], 3).await;
    assert_eq!(provider.purchases(), 1);
    let egress: Value = all[0].get("sessions/a/egress").await.unwrap();
    assert_eq!(egress["allow"], json!(["example.org:444"]));
    for n in &all {
        let rows = n.rows("gateway/budgets").await;
        assert!(rows.iter().any(|r| r["name"] == "a" && r["limit"] == "7.50"), "{rows:?}");
    }
    drop(dead);
}

#[tokio::test]
async fn a_bought_call_is_followed_by_a_checkpoint_of_its_own() {
    let provider = provider().await;
    let mut n = TestNode::with_image().await;
    n.real_gateway();
    let settings = json!({ "name": "test", "dialect": "anthropic", "base_url": format!("http://{}", provider.address) });
    n.ok("gateway/providers", settings).await;
    n.ok("gateway/keys", json!({ "provider": "test", "secret": "sk-of-this-node" })).await;
    n.create_with("off", 0).await;
    n.create_with("a", 3600).await;
    n.answered("off", &request(1, "tokens=5")).await;
    let calls = async |n: &TestNode, name: &str| -> Vec<u64> {
        let list: Vec<ks_proto::api::Checkpoint> = n.get(&format!("sessions/{name}/checkpoints")).await.unwrap();
        list.iter().filter(|c| c.reason == "call").map(|c| c.created_unix_ms).collect()
    };
    for round in 1..=2 {
        for k in 0..3 {
            n.answered("a", &request(10 * round + k, "tokens=5")).await;
        }
        until("the checkpoint after a call", &[&n], async || (calls(&n, "a").await.len() == round as usize).then_some(())).await;
    }
    let at = calls(&n, "a").await;
    assert!(at[1] - at[0] >= 4_900, "{at:?}: at most one in five seconds");
    // What the session was told of is in it: it comes back, and asks nothing again.
    n.ok("sessions/a/kill", json!({})).await;
    n.answered("a", &request(99, "tokens=5")).await;
    assert_eq!((calls(&n, "off").await.len(), provider.purchases()), (0, 8));
    assert!(n.end_ksd().success());
}
