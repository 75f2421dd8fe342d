//! Verbs on a session that does not crash.

use crate::harness::TestNode;
use ks_proto::api::{Checkpoint, SessionState, Tree};
use serde_json::json;

#[tokio::test]
async fn create_exec_checkpoint_restore_and_remove() {
    let n = TestNode::with_image().await;
    let (steps, made) = n.call("sessions", json!({ "name": "a", "memory_mib": 128, "main": { "command": ["agent"] } })).await;
    let made = made.unwrap();
    assert!(steps.iter().any(|s| s.contains("booting image default")), "{steps:?}");
    assert_eq!((made["state"].as_str(), made["command"][0].as_str()), (Some("running"), Some("agent")));
    let memory = n.dump("a").await;
    assert_eq!((memory.hostname.as_str(), memory.main.as_slice()), ("a", ["agent".to_owned()].as_slice()));
    assert!(memory.hooks.contains(&"Fork".to_owned()) && !memory.frozen);

    n.set("a", "/f", "one").await;
    let c = n.ok("sessions/a/checkpoint", json!({ "message": "tests green", "pin": true })).await;
    let number = c["number"].as_u64().unwrap();
    assert_eq!(
        (c["reason"].as_str(), c["message"].as_str(), c["pinned"].as_bool()),
        (Some("demand"), Some("tests green"), Some(true))
    );
    assert!(c["logical_bytes"].as_u64().unwrap() >= 65536 * 2, "memory and disk in use are counted: {c}");
    n.set("a", "/f", "two").await;
    n.set("a", "/g", "new").await;
    let before = n.show("a").await;
    n.ok("sessions/a/restore", json!({ "checkpoint": format!("c{number}") })).await;
    assert_eq!(n.value("a", "/f").await.as_deref(), Some("one"));
    assert_eq!(n.value("a", "/g").await, None);
    let after = n.show("a").await;
    assert!(after.token > before.token);
    assert_eq!(after.checkpoints, before.checkpoints + 1, "the present was kept before going back");

    assert_eq!(Some(after.last_checkpoint.unwrap().number), c["number"].as_u64(), "what it went back to is what it has");
    let all: Vec<Checkpoint> = n.get("sessions/a/checkpoints").await.unwrap();
    let later = format!("c{}", all.iter().map(|c| c.number).max().unwrap());
    let d = n.ok("sessions/a/diff", json!({ "from": format!("c{number}"), "to": later })).await;
    let changes: Vec<String> = d["files"]
        .as_array()
        .unwrap()
        .iter()
        .map(|f| format!("{} {}", f["path"].as_str().unwrap(), f["change"].as_str().unwrap()))
        .collect();
    assert_eq!(changes, ["/f changed", "/g added"]);

    let e = n.request("DELETE", "sessions/a").send().await.unwrap();
    assert_eq!(e.status(), 409);
    let e = n.refused("sessions", json!({ "name": "a", "memory_mib": 128 })).await;
    assert_eq!(e.code, "exists");
    assert_eq!(n.request("DELETE", "sessions/a?force=1").send().await.unwrap().status(), 200);
    assert_eq!(n.get::<serde_json::Value>("sessions/a").await.unwrap_err().code, "not-found");
    assert_eq!(n.vmms(), Vec::<u32>::new(), "nothing of it is left running");
}

#[tokio::test]
async fn a_diff_reads_only_files_whose_times_leave_it_open() {
    let n = TestNode::with_image().await;
    n.create("a").await;
    let set = async |verb: &str, path: &str, text: &str| assert_eq!(n.exec("a", &[verb, path, text], b"").await.unwrap().0, 0);
    for path in ["/left-alone", "/touched", "/edited", "/grown"] {
        set("set-long-ago", path, "text").await;
    }
    set("set", "/just-written", "text").await;
    let checkpoint = async || format!("c{}", n.ok("sessions/a/checkpoint", json!({})).await["number"]);
    let from = checkpoint().await;
    set("set", "/touched", "text").await;
    set("set", "/edited", "TEXT").await;
    set("set", "/grown", "text and more").await;
    let to = checkpoint().await;

    let diff = async |from: &str, to: &str| {
        n.fault("listed", false);
        let (steps, d) = n.call("sessions/a/diff", json!({ "from": from, "to": to })).await;
        let d = d.unwrap();
        let files = d["files"].as_array().unwrap().iter();
        let changes = files.map(|f| format!("{} {}", f["path"].as_str().unwrap(), f["change"].as_str().unwrap()));
        (changes.collect::<Vec<_>>(), n.fault_text("listed"), steps)
    };
    let (changes, listed, _) = diff(&from, &to).await;
    assert_eq!(changes, ["/edited changed", "/grown changed"]);
    let open = "hash true /edited /just-written /touched\n";
    assert_eq!(listed, format!("hash false \nhash false \n{open}{open}"));

    let (changes, listed, steps) = diff(&to, &to).await;
    assert_eq!((changes.len(), listed.as_str(), steps.len()), (0, "", 0), "no guest is needed for that");

    n.fault("old-agent", true);
    let (changes, listed, _) = diff(&from, &to).await;
    assert_eq!(changes, ["/edited changed", "/grown changed"]);
    assert_eq!(listed, "hash false \nhash false \n", "an older agent told all it can at once");
}

#[tokio::test]
async fn the_golden_checkpoint_is_made_once_for_many() {
    let n = TestNode::with_image().await;
    let make = |name: &str| {
        let body = json!({ "name": name, "memory_mib": 128 });
        let n = &n;
        async move { n.call("sessions", body).await }
    };
    let all = tokio::join!(make("a"), make("b"), make("c"));
    let boots = [&all.0, &all.1, &all.2].into_iter().filter(|r| r.0.iter().any(|s| s.contains("booting"))).count();
    for r in [all.0, all.1, all.2] {
        r.1.unwrap();
    }
    assert_eq!(boots, 1);
    let ids: std::collections::BTreeSet<String> =
        [n.dump("a").await, n.dump("b").await, n.dump("c").await].map(|m| m.machine_id).into();
    assert_eq!(ids.len(), 3, "every session has its own machine id");
    let images: serde_json::Value = n.get("images").await.unwrap();
    assert_eq!(images[0]["golden"], 1);
    assert_eq!(n.request("DELETE", "images/default").send().await.unwrap().status(), 409, "it is in use");
}

#[tokio::test]
async fn forks_differ_carry_their_steer_files_and_outlive_their_parent() {
    let n = TestNode::with_image().await;
    n.create("p").await;
    n.set("p", "/f", "past").await;
    let steer = json!([["/workspace/NOTE", "aGVsbG8="]]);
    let kids = n.ok("sessions/p/fork", json!({ "n": 3, "steer": steer })).await;
    let names: Vec<&str> = kids.as_array().unwrap().iter().map(|k| k["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["p.1", "p.2", "p.3"]);
    n.set("p.1", "/only-a", "x").await;
    let mut machine_ids = std::collections::BTreeSet::from([n.dump("p").await.machine_id]);
    for name in &names {
        let m = n.dump(name).await;
        assert_eq!(m.files.get("/f").map(String::as_str), Some("past"));
        assert_eq!(m.files.get("/workspace/NOTE").map(String::as_str), Some("hello"));
        assert_eq!(m.files.contains_key("/only-a"), *name == "p.1");
        assert_eq!((m.hostname.as_str(), m.frozen), (*name, false));
        machine_ids.insert(m.machine_id);
    }
    assert_eq!(machine_ids.len(), 4);
    assert!(!n.dump("p").await.frozen, "the parent was thawed after the fork point");

    for k in &names {
        n.ok(&format!("sessions/{k}/checkpoint"), json!({})).await;
    }
    assert_eq!(n.request("DELETE", "sessions/p?force=1").send().await.unwrap().status(), 200);
    let tree: Tree = n.get("sessions/p.2/tree").await.unwrap();
    let shown: Vec<(&str, usize)> = tree.sessions.iter().map(|t| (t.session.name.as_str(), t.checkpoints.len().min(1))).collect();
    assert_eq!(shown, [("p", 1), ("p.1", 1), ("p.2", 1), ("p.3", 1)]);
    assert_eq!(tree.sessions[0].session.state, SessionState::Stopped);
    n.ok("sessions/p.2/kill", json!({})).await;
    assert_eq!(n.value("p.2", "/f").await.as_deref(), Some("past"));
    let e = n.refused("sessions/p.1/fork", json!({ "n": 65 })).await;
    assert_eq!(e.code, "usage");
}

#[tokio::test]
async fn park_gives_the_vm_back_and_exec_wakes_it() {
    let n = TestNode::with_image().await;
    n.create("a").await;
    n.set("a", "/f", "kept").await;
    let parked = n.ok("sessions/a/park", json!({})).await;
    assert_eq!(parked["state"], "parked");
    assert_eq!(n.vmms(), Vec::<u32>::new());
    assert_eq!(n.refused("sessions/a/checkpoint", json!({})).await.code, "busy");
    assert_eq!(n.value("a", "/f").await.as_deref(), Some("kept"));
    assert_eq!(n.show("a").await.state, SessionState::Running);
    n.ok("sessions/a/stop", json!({})).await;
    let all: Vec<Checkpoint> = n.get("sessions/a/checkpoints").await.unwrap();
    let reasons: Vec<&str> = all.iter().map(|c| c.reason.as_str()).collect();
    assert!(reasons.contains(&"park") && reasons.contains(&"stop"), "{reasons:?}");
    assert_eq!(n.request("DELETE", "sessions/a").send().await.unwrap().status(), 200, "a stopped one needs no force");
}

#[tokio::test]
async fn cadence_takes_checkpoints_and_idle_parks() {
    let n = TestNode::with_image().await;
    n.ok("sessions", json!({ "name": "a", "memory_mib": 128, "cadence_s": 1, "idle_park_s": 3 })).await;
    n.event("a", "parked").await;
    let all: Vec<Checkpoint> = n.get("sessions/a/checkpoints").await.unwrap();
    assert!(all.iter().any(|c| c.reason == "cadence") && all.iter().any(|c| c.reason == "park"), "{all:?}");
}
