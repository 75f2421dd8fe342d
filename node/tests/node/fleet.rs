//! Three real ksd processes on loopback with stand-in VMs: joining, copies, a dead host, any node serves, drain, users.

use crate::harness::TestNode;
use ks_proto::api::{Checkpoint, Session};
use ks_proto::blobs::BlobReport;
use ks_proto::fleet::{FleetInfo, NodeRole};
use serde_json::json;
use std::time::{Duration, Instant};

const DEADLINE: Duration = Duration::from_secs(120);

/// Polls until `f` gives something; events tell the rest when it does not.
pub async fn until<T>(what: &str, nodes: &[&TestNode], mut f: impl AsyncFnMut() -> Option<T>) -> T {
    let end = Instant::now() + DEADLINE;
    loop {
        if let Some(t) = f().await {
            return t;
        }
        if Instant::now() > end {
            let logs: Vec<String> = nodes.iter().map(|n| n.log()).collect();
            panic!("{what} did not come\n{}", logs.join("\n----- next node\n"));
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

pub async fn info(n: &TestNode) -> Option<FleetInfo> {
    n.maybe("fleet").await
}

/// A fleet: the first has the image, the others joined it.
pub async fn fleet(size: usize) -> Vec<TestNode> {
    let mut nodes = vec![TestNode::start(true)];
    nodes[0].up().await;
    nodes[0].ok("images/build", json!({})).await;
    for k in 1..size {
        let mut n = TestNode::start(true);
        n.up().await;
        let token = nodes[0].ok("fleet/token", json!({})).await;
        let before = n.api().unwrap().pid;
        let joined = n.ok("fleet/join", json!({ "token": token["token"], "name": format!("n{}", k + 1) })).await;
        assert!(joined["number"].as_u64().unwrap() > 1, "{joined}");
        n.wait_other_pid(Some(before)).await;
        nodes.push(n);
    }
    let all: Vec<&TestNode> = nodes.iter().collect();
    let voters = if size >= 3 { 3 } else { 1 };
    for n in &all {
        until("the fleet's nodes and voters", &all, async || {
            let i = info(n).await?;
            let ready = i.nodes.len() == size && i.voters.len() == voters && i.quorum && i.lease.state == "held";
            (ready && i.nodes.iter().all(|n| n.live)).then_some(())
        })
        .await;
    }
    nodes
}

/// Waits until the newest checkpoint is durable, and gives it.
pub async fn durable(all: &[&TestNode], at: &TestNode, name: &str) -> Checkpoint {
    until("a durable checkpoint", all, async || {
        let list: Vec<Checkpoint> = at.maybe(&format!("sessions/{name}/checkpoints")).await?;
        list.last().filter(|c| c.durability == "durable" && c.holders.len() >= 2).cloned()
    })
    .await
}

async fn owner(at: &TestNode, name: &str) -> Option<String> {
    at.maybe::<Session>(&format!("sessions/{name}")).await.map(|s| s.node)
}

#[tokio::test]
async fn a_dead_hosts_session_runs_on_a_peer_from_its_durable_checkpoint() {
    let mut nodes = fleet(3).await;
    {
        let all: Vec<&TestNode> = nodes.iter().collect();
        all[0].create("a").await;
        all[0].set("a", "/f", "kept").await;
        all[0].ok("sessions/a/checkpoint", json!({})).await;
        let c = durable(&all, all[0], "a").await;
        all[0].set("a", "/f", "after the checkpoint").await;
        // Any node serves: a command, a list, a file, all through a node that does not own it.
        assert_eq!(all[2].value("a", "/f").await.as_deref(), Some("after the checkpoint"));
        let list: Vec<Session> = all[1].get("sessions").await.unwrap();
        assert_eq!((list.len(), list[0].state.to_string().as_str()), (1, "running"));
        assert!(c.holders.len() >= 2, "{c:?}");
    }
    let led = info(&nodes[0]).await.is_some_and(|i| i.leader == Some(i.me));
    let killed_unix_ms = ks_node::host::clock::unix_ms();
    let killed = Instant::now();
    let first = nodes.remove(0);
    let dead = first.kill_everything();
    let all: Vec<&TestNode> = nodes.iter().collect();
    // The call waits at a survivor until the session is back there or on the other one.
    let value = until("the session on a peer", &all, async || {
        let (code, out) = all[0].exec("a", &["get", "/f"], b"").await.ok()?;
        (code == 0).then(|| String::from_utf8(out).unwrap())
    })
    .await;
    assert_eq!(value, "kept", "from the durable checkpoint");
    eprintln!("interruption {:?}", killed.elapsed());
    let s = all[0].show("a").await;
    assert!(s.last_interruption.is_some() && s.token.epoch > 1, "{s:?}");
    assert_ne!(s.node, "", "{s:?}");
    // It is told from the dead node's last renewal on, and in parts. How long each may take is not this test's business: a
    // busy machine elects late, or once more than needed. What cannot be is told: shorter than a lease, or parts beyond the whole.
    let i = s.last_interruption.as_ref().unwrap();
    let p = i.parts.unwrap();
    eprintln!("{i:?}");
    let now = ks_node::host::clock::unix_ms();
    assert!(i.at_unix_ms + i.ready_ms <= now && i.at_unix_ms + 30_000 > killed_unix_ms, "{i:?}, killed {killed_unix_ms}");
    assert!(p.lease_ms.is_some_and(|ms| ms >= 3_000), "{p:?}");
    assert!(p.election_ms.is_some() || !led, "the dead node led, so another one was elected: {p:?}");
    let (lease, restore, hook) = (p.lease_ms.unwrap(), p.restore_ms.unwrap(), p.hook_ms.unwrap());
    assert!(p.election_ms.is_none_or(|e| e <= lease) && lease + restore + hook <= i.ready_ms + 5, "{i:?}");
    // Its new owner copies on.
    all[0].ok("sessions/a/checkpoint", json!({})).await;
    durable(&all, all[1], "a").await;
    drop(dead);
}

#[tokio::test]
async fn a_node_that_comes_back_owns_nothing_it_lost_and_serves_again() {
    let mut nodes = fleet(3).await;
    nodes[0].create("a").await;
    nodes[0].set("a", "/f", "kept").await;
    nodes[0].ok("sessions/a/checkpoint", json!({})).await;
    {
        let all: Vec<&TestNode> = nodes.iter().collect();
        durable(&all, all[0], "a").await;
    }
    // ksd and its supervisor die; its VM lives on, and must stop by itself.
    nodes[0].kill_supervised();
    let survivors: Vec<&TestNode> = nodes[1..].iter().collect();
    let moved = until("a new owner", &survivors, async || {
        let s = survivors[0].maybe::<Session>("sessions/a").await?;
        (s.token.epoch > 1 && s.state.to_string() == "running").then_some(s)
    })
    .await;
    survivors[0].set("a", "/f", "newer").await;
    nodes[0].up().await;
    let all: Vec<&TestNode> = nodes.iter().collect();
    until("the old run's end", &all, async || nodes[0].vmms().is_empty().then_some(())).await;
    assert_eq!(nodes[0].value("a", "/f").await.as_deref(), Some("newer"), "served by the new owner");
    assert_eq!(owner(&nodes[0], "a").await, Some(moved.node));
}

#[tokio::test]
async fn a_session_begins_on_the_node_that_is_named() {
    let mut nodes = fleet(3).await;
    let ask = |name: &str, on: &str, copies: u16| json!({ "name": name, "memory_mib": 128, "copies": copies, "node": on, "main": { "command": ["agent"] } });
    let all: Vec<&TestNode> = nodes.iter().collect();
    let made: Session = serde_json::from_value(all[0].ok("sessions", ask("b", "n2", 3)).await).unwrap();
    assert_eq!((made.node.as_str(), made.copies), ("n2", 3), "{made:?}");
    assert!(!all[1].vmms().is_empty() && all[0].vmms().is_empty(), "its VM runs there, not here");
    // At once, through the node that was asked: it has heard of it.
    all[0].set("b", "/f", "there").await;
    assert_eq!(all[2].value("b", "/f").await.as_deref(), Some("there"));
    let me = info(all[2]).await.unwrap().me;
    let made: Session = serde_json::from_value(all[1].ok("sessions", ask("c", &me.to_string(), 1)).await).unwrap();
    assert_eq!((made.node.as_str(), made.copies), ("n3", 1), "by number");
    let e = all[0].refused("sessions", ask("d", "n9", 1)).await;
    assert_eq!(e.code, "not-found", "{e}");
    let e = all[0].refused("sessions", ask("d", "n2", 9)).await;
    assert_eq!(e.code, "usage", "{e}");
    let e = all[0].refused("sessions", ask("b", "n3", 1)).await;
    assert_eq!(e.code, "exists", "the other node's refusal comes back: {e}");
    all[0].ok(&format!("fleet/nodes/{me}/drain"), json!({})).await;
    let e = all[0].refused("sessions", ask("d", "n3", 1)).await;
    assert!(e.code == "busy" && e.why.contains("draining"), "{e}");
    let made: Session = serde_json::from_value(all[2].ok("sessions", json!({ "name": "e", "memory_mib": 128 })).await).unwrap();
    assert_ne!(made.node, "n3", "a draining node has another one make it");
    nodes[1].kill_supervised();
    let left = [&nodes[0], &nodes[2]];
    until("the dead node's silence", &left, async || {
        let nodes = info(left[0]).await?.nodes;
        nodes.iter().any(|n| n.name == "n2" && !n.live).then_some(())
    })
    .await;
    let e = left[0].refused("sessions", ask("d", "n2", 1)).await;
    assert!(e.code == "unreachable" && e.why.contains("n2"), "{e}");
    let names: Vec<String> = left[0].get::<Vec<Session>>("sessions").await.unwrap().iter().map(|s| s.name.to_string()).collect();
    assert_eq!(names, ["b", "c", "e"], "nothing of a refused one stays");
    // A node that has just come back has heard of nobody yet: what is named through it is waited for, not refused.
    let first = info(&nodes[0]).await.unwrap();
    nodes[1].up().await;
    let made: Session = serde_json::from_value(nodes[1].ok("sessions", ask("f", &first.me.to_string(), 1)).await).unwrap();
    assert_eq!(Some(&made.node), first.nodes.iter().find(|n| n.number == first.me).map(|n| &n.name));
}

#[tokio::test]
async fn draining_moves_sessions_without_loss() {
    let nodes = fleet(3).await;
    let all: Vec<&TestNode> = nodes.iter().collect();
    all[0].create("a").await;
    all[0].set("a", "/f", "in memory, newest").await;
    let me = info(all[0]).await.unwrap().me;
    let (_, drained) = all[1].call(&format!("fleet/nodes/{me}/drain"), json!({})).await;
    let drained = drained.unwrap();
    assert_eq!(drained["moved"], json!(["a"]), "{drained}");
    assert_eq!(all[0].value("a", "/f").await.as_deref(), Some("in memory, newest"), "no loss in a planned move");
    let s = all[0].show("a").await;
    assert_ne!(s.node, info(all[0]).await.unwrap().nodes.iter().find(|n| n.number == me).unwrap().name);
    assert!(nodes[0].vmms().is_empty());
}

#[tokio::test]
async fn a_drain_is_undone_and_a_removed_node_leaves_by_itself() {
    let mut nodes = fleet(3).await;
    let me = info(&nodes[2]).await.unwrap().me;
    let on_n3 = json!({ "name": "a", "memory_mib": 128, "node": "n3", "main": { "command": ["agent"] } });
    {
        let e = nodes[0].refused("fleet/nodes/n3/undrain", json!({})).await;
        assert!(e.code == "usage" && e.why.contains("already"), "{e}");
        nodes[0].ok("fleet/nodes/n3/drain", json!({})).await;
        // Each through another node than the last, with nothing between them.
        for _ in 0..8 {
            nodes[1].ok("fleet/nodes/n3/undrain", json!({})).await;
            nodes[0].ok("fleet/nodes/n3/drain", json!({})).await;
        }
        let view = nodes[1].ok("fleet/nodes/n3/undrain", json!({})).await;
        assert_eq!((view["state"].as_str(), view["number"].as_u64()), (Some("active"), Some(me)), "{view}");
        let made: Session = serde_json::from_value(nodes[0].ok("sessions", on_n3).await).unwrap();
        assert_eq!(made.node, "n3");
        let e = nodes[2].refused("fleet/leave", json!({ "force": true })).await;
        assert!(e.code == "usage" && e.why.contains("can be reached"), "{e}");
        nodes[0].ok("sessions/a/checkpoint", json!({})).await;
        let all: Vec<&TestNode> = nodes.iter().collect();
        durable(&all, all[0], "a").await;
    }
    nodes[2].kill_supervised();
    let left = [&nodes[0], &nodes[1]];
    // Silent for longer than gossip keeps its record: when it was heard last is still told.
    until("the dead node's age", &left, async || {
        let nodes = info(left[0]).await?.nodes;
        let n3 = nodes.iter().find(|n| n.name == "n3")?;
        (!n3.live && n3.seen_ms_ago? > 6_000).then_some(())
    })
    .await;
    let gone = nodes[0].request("DELETE", "fleet/nodes/n3?force=1").send().await.unwrap();
    assert!(gone.status().is_success(), "{}", gone.text().await.unwrap());
    let e = nodes[0].refused("fleet/nodes/n3/undrain", json!({})).await;
    assert_eq!(e.code, "not-found", "{e}");
    // It comes back and knows nothing of its removal; nobody speaks to it. (One that has just left is spoken to for a second more.)
    tokio::time::sleep(Duration::from_secs(2)).await;
    nodes[2].up().await;
    let e = nodes[2].refused("fleet/leave", json!({})).await;
    assert!(e.next.contains("--force"), "{e}");
    let before = nodes[2].api().unwrap().pid;
    let done = nodes[2].ok("fleet/leave", json!({ "force": true })).await;
    assert_eq!(done["number"].as_u64(), Some(me), "{done}");
    nodes[2].wait_other_pid(Some(before)).await;
    let all: Vec<&TestNode> = nodes.iter().collect();
    let fleet_id = info(&nodes[0]).await.unwrap().fleet_id;
    until("a lone node", &all, async || {
        info(&nodes[2]).await.filter(|i| i.me == 1 && i.nodes.len() == 1 && i.fleet_id != fleet_id)
    })
    .await;
    assert!(nodes[2].vmms().is_empty(), "what ran there has ended");
    assert_eq!(nodes[1].get::<Vec<Session>>("sessions").await.unwrap().len(), 1);
}

fn packs(n: &TestNode) -> Vec<std::path::PathBuf> {
    let list = |p: std::path::PathBuf| std::fs::read_dir(p).into_iter().flatten().flatten().map(|e| e.path());
    let mut all: Vec<_> = list(n.data().join("store/packs")).flat_map(list).collect();
    all.sort();
    all
}

#[tokio::test]
async fn a_nodes_store_is_verified_and_mended_on_request() {
    let nodes = fleet(2).await;
    let all: Vec<&TestNode> = nodes.iter().collect();
    all[0].create("a").await;
    all[0].ok("sessions/a/checkpoint", json!({})).await;
    durable(&all, all[0], "a").await;
    let verify = async |at: &TestNode, which: serde_json::Value| -> BlobReport {
        serde_json::from_value(at.ok("blobs/verify", which).await).unwrap()
    };
    let before = verify(all[1], json!({})).await;
    assert_eq!((before.node.as_str(), before.damaged_objects), ("n2", 0), "{before:?}");
    assert_eq!(before.packs, packs(all[1]).len() as u64);
    // Rot in every pack of the second node; asked through the first.
    for p in packs(all[1]) {
        let mut bytes = std::fs::read(&p).unwrap();
        let middle = bytes.len() / 3;
        bytes[middle] ^= 0x10;
        std::fs::write(&p, bytes).unwrap();
    }
    let found = verify(all[0], json!({ "node": "n2" })).await;
    assert_eq!(found.node, "n2");
    assert!(found.damaged_objects >= 1 && found.mended_objects == found.damaged_objects, "{found:?}");
    let named = found.damaged.iter().all(|d| d.mended && d.file.is_some() && !d.why.is_empty());
    assert!(named && found.damaged.len() as u64 == found.damaged_objects, "{found:?}");
    let after = verify(all[0], json!({ "node": "#1" })).await;
    assert_eq!(after.damaged_objects, 0, "the first one had no fault");
    let mended = verify(all[1], json!({})).await;
    assert_eq!(mended.damaged_objects, 0, "{mended:?}");
    let e = all[0].refused("blobs/verify", json!({ "node": "n9" })).await;
    assert_eq!(e.code, "not-found", "{e}");
}

#[tokio::test]
async fn a_join_token_works_once_and_only_for_whom_it_names() {
    let nodes = fleet(2).await;
    let mut third = TestNode::start(true);
    third.up().await;
    let token = nodes[1].ok("fleet/token", json!({})).await["token"].as_str().unwrap().to_owned();
    let before = third.api().unwrap().pid;
    third.ok("fleet/join", json!({ "token": token, "name": "n3" })).await;
    third.wait_other_pid(Some(before)).await;
    let mut fourth = TestNode::start(true);
    fourth.up().await;
    let e = fourth.refused("fleet/join", json!({ "token": token })).await;
    assert_eq!(e.code, "token-refused", "{e}");
    let e = fourth.refused("fleet/join", json!({ "token": "nonsense" })).await;
    assert_eq!(e.code, "usage", "{e}");
    let mut parts: Vec<&str> = token.splitn(4, '.').collect();
    let other = "0".repeat(64);
    parts[2] = &other;
    let e = fourth.refused("fleet/join", json!({ "token": parts.join(".") })).await;
    assert_eq!(e.code, "unreachable", "another fleet's certificate: {e}");
    fourth.create_image_and_session("mine").await;
    let fresh = nodes[0].ok("fleet/token", json!({})).await["token"].as_str().unwrap().to_owned();
    let e = fourth.refused("fleet/join", json!({ "token": fresh })).await;
    assert_eq!(e.code, "exists", "its own session would be lost: {e}");
    let all: Vec<&TestNode> = nodes.iter().chain([&third]).collect();
    until("three voters", &all, async || {
        let i = info(&third).await?;
        let voters = i.nodes.iter().filter(|n| n.role == NodeRole::Voter).count();
        (i.nodes.len() == 3 && voters == 3).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_fleet_is_recovered_from_one_survivor_and_the_founder_comes_back_as_a_learner() {
    let mut nodes = fleet(2).await;
    nodes[1].create("a").await;
    nodes[1].set("a", "/f", "kept").await;
    nodes[1].ok("sessions/a/checkpoint", json!({})).await;
    {
        let all: Vec<&TestNode> = nodes.iter().collect();
        durable(&all, all[1], "a").await;
    }
    let fleet_id = info(&nodes[1]).await.unwrap().fleet_id;
    // The only voter dies: nothing can be decided, and that is said.
    nodes[0].kill_supervised();
    let survivor = &nodes[1];
    until("the loss of the quorum", &[survivor], async || info(survivor).await.filter(|i| !i.quorum).map(drop)).await;
    let e = survivor.refused("fleet/recover", json!({})).await;
    assert_eq!(e.code, "usage", "it asks for a person's word: {e}");
    let before = survivor.api().unwrap().pid;
    survivor.ok("fleet/recover", json!({ "confirmed": true })).await;
    survivor.wait_other_pid(Some(before)).await;
    until("the new generation", &[survivor], async || info(survivor).await.filter(|i| i.quorum && i.generation == 1).map(drop))
        .await;
    let s = until("the session under the new generation", &[survivor], async || {
        survivor.maybe::<Session>("sessions/a").await.filter(|s| s.state.to_string() == "running" && s.token.generation == 1)
    })
    .await;
    assert_eq!(survivor.value("a", "/f").await.as_deref(), Some("kept"), "{s:?}");
    // The founder comes back with its old log: it gives it up, and is a member of the same fleet.
    nodes[0].up().await;
    let all: Vec<&TestNode> = nodes.iter().collect();
    until("the founder as a learner", &all, async || {
        let i = info(&nodes[0]).await?;
        (i.fleet_id == fleet_id && i.generation == 1 && i.nodes.len() == 2 && i.quorum).then_some(())
    })
    .await;
    assert_eq!(nodes[0].value("a", "/f").await.as_deref(), Some("kept"), "served through it");
}

/// Kinds of events that a node has told, of any session.
async fn told(n: &TestNode) -> Vec<String> {
    let text = n.request("GET", "events").send().await.unwrap().text().await.unwrap();
    let kind = |l: &str| serde_json::from_str::<ks_proto::api::Event>(l).unwrap().kind;
    text.lines().map(kind).collect()
}

#[tokio::test]
async fn f2_an_election_alone_takes_no_lease_and_no_session_away() {
    let mut nodes = fleet(3).await;
    for on in ["n2", "n3"] {
        let ask = json!({ "name": format!("on-{on}"), "memory_mib": 128, "node": on, "main": { "command": ["agent"] } });
        nodes[0].ok("sessions", ask).await;
    }
    let leads = info(&nodes[0]).await.unwrap();
    let leader = leads.leader.unwrap();
    assert_eq!(leader, leads.me, "the founder leads a fleet that was just made");
    let before = [told(&nodes[1]).await.len(), told(&nodes[2]).await.len()];
    nodes[0].kill_supervised();
    let left = [&nodes[1], &nodes[2]];
    until("another leader", &left, async || {
        info(left[0]).await.filter(|i| i.leader.is_some_and(|l| l != leader) && i.quorum).map(drop)
    })
    .await;
    // For longer than a lease and its margin: whatever was to run out has.
    let end = Instant::now() + Duration::from_secs(5);
    while Instant::now() < end {
        for (n, name) in left.iter().zip(["on-n2", "on-n3"]) {
            let s = n.show(name).await;
            assert!(s.token.epoch == 1 && !s.paused && s.state.to_string() == "running", "{s:?}");
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    for (n, from) in left.iter().zip(before) {
        let kinds = told(n).await;
        assert!(!kinds[from..].iter().any(|k| k == "lease-lapsed"), "{:?}", &kinds[from..]);
    }
}

#[tokio::test]
async fn f11_a_start_that_fails_on_the_chosen_peer_is_tried_on_another() {
    let mut nodes = fleet(3).await;
    let make = |name: &str, on: &str, copies: u16| json!({ "name": name, "memory_mib": 128, "copies": copies, "node": on, "main": { "command": ["agent"] } });
    nodes[0].ok("sessions", make("a", "#1", 3)).await;
    // The second node is the less busy one, so it is chosen first.
    for name in ["b", "c", "d"] {
        nodes[0].ok("sessions", make(name, "n3", 1)).await;
    }
    nodes[0].set("a", "/f", "kept").await;
    nodes[0].ok("sessions/a/checkpoint", json!({})).await;
    {
        let all: Vec<&TestNode> = nodes.iter().collect();
        until("three holders", &all, async || {
            let list: Vec<Checkpoint> = all[0].maybe("sessions/a/checkpoints").await?;
            list.last().filter(|c| c.holders.len() == 3).map(drop)
        })
        .await;
    }
    nodes[1].fault("fail-every-restore", true);
    let dead = nodes.remove(0).kill_everything();
    let left: Vec<&TestNode> = nodes.iter().collect();
    until("the start that fails", &left, async || told(left[0]).await.iter().any(|k| k == "start-failed").then_some(())).await;
    let s = until("the session on the other peer", &left, async || {
        left[1].maybe::<Session>("sessions/a").await.filter(|s| s.node == "n3" && s.state.to_string() == "running")
    })
    .await;
    assert_eq!(left[0].value("a", "/f").await.as_deref(), Some("kept"), "{s:?}");
    until("no VM of the failed start", &left, async || left[0].vmms().is_empty().then_some(())).await;
    drop(dead);
}
