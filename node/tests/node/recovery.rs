//! Crashes: of the VM, of ksd, of both, at bad moments.

use crate::harness::{DEADLINE, TestNode};
use ks_proto::api::{Checkpoint, Session, SessionState};
use serde_json::json;

#[tokio::test]
async fn a_killed_vm_comes_back_with_what_was_checkpointed() {
    let n = TestNode::with_image().await;
    n.create("a").await;
    n.set("a", "/f", "kept").await;
    let c = n.ok("sessions/a/checkpoint", json!({})).await;
    n.set("a", "/f", "lost").await;
    let back = n.ok("sessions/a/kill", json!({})).await;
    assert_eq!(back["state"], "running");
    assert_eq!(
        (&back["last_interruption"]["checkpoint"], &back["last_interruption"]["cause"]),
        (&c["number"], &json!("killed by request"))
    );
    assert_eq!(n.value("a", "/f").await.as_deref(), Some("kept"));
    assert!(n.dump("a").await.hooks.ends_with(&["Resume".to_owned()]));

    // From outside, without asking.
    let from = n.last_event().await;
    let pid = n.show("a").await.vmm_pid.unwrap();
    std::process::Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap();
    n.event_from(from + 1, "a", "recovered").await;
    assert_eq!(n.value("a", "/f").await.as_deref(), Some("kept"));
    assert_eq!(n.vmms().len(), 1, "never two runs");
}

#[tokio::test]
async fn a_restarted_ksd_adopts_the_running_vm_without_interruption() {
    let mut n = TestNode::with_image().await;
    n.create("a").await;
    n.set("a", "/f", "in memory only").await;
    let before = n.show("a").await;
    for graceful in [false, true] {
        if graceful {
            assert!(n.end_ksd().success());
        } else {
            n.kill_ksd();
        }
        n.up().await;
        assert_eq!(n.value("a", "/f").await.as_deref(), Some("in memory only"));
        let after = n.show("a").await;
        assert_eq!((after.token, after.vmm_pid), (before.token, before.vmm_pid));
        assert!(after.last_interruption.is_none());
    }
    n.ok("sessions/a/checkpoint", json!({})).await;
}

#[tokio::test]
async fn vm_and_ksd_killed_together_come_back_under_the_supervisor() {
    let mut n = TestNode::start(true);
    n.up().await;
    n.ok("images/build", json!({})).await;
    n.create("a").await;
    n.set("a", "/f", "kept").await;
    n.ok("sessions/a/checkpoint", json!({})).await;
    let before = n.api().unwrap();
    let shown = n.ok("sessions/a/kill", json!({ "with_daemon": true })).await;
    assert_eq!(shown["name"], "a");
    n.wait_other_pid(Some(before.pid)).await;
    assert_eq!(n.api().unwrap().url, before.url, "clients find it where it was");
    n.event("a", "recovered").await;
    assert_eq!(n.value("a", "/f").await.as_deref(), Some("kept"));
    let i = n.show("a").await.last_interruption.unwrap();
    assert_eq!(i.cause, "VM and node killed by request");
    assert!(n.end_ksd().success(), "the supervisor hands SIGTERM on and ends");
}

#[tokio::test]
async fn a_crash_before_the_commit_leaves_the_previous_checkpoint() {
    let n = TestNode::with_image().await;
    n.create("a").await;
    n.set("a", "/f", "kept").await;
    n.ok("sessions/a/checkpoint", json!({})).await;
    let before: Vec<Checkpoint> = n.get("sessions/a/checkpoints").await.unwrap();
    n.set("a", "/f", "half").await;
    n.fault("crash-before-commit", true);
    let e = n.refused("sessions/a/checkpoint", json!({})).await;
    assert!(["busy", "internal"].contains(&e.code.as_str()), "{e}");
    n.event("a", "recovered").await;
    assert_eq!(n.value("a", "/f").await.as_deref(), Some("kept"));
    let after: Vec<Checkpoint> = n.get("sessions/a/checkpoints").await.unwrap();
    assert_eq!(after.len(), before.len(), "the torn one was never listed");
}

#[tokio::test]
async fn ksd_killed_during_a_commit_keeps_the_session_and_lists_no_torn_checkpoint() {
    let mut n = TestNode::with_image().await;
    n.create("a").await;
    n.ok("sessions/a/checkpoint", json!({})).await;
    let before: Vec<Checkpoint> = n.get("sessions/a/checkpoints").await.unwrap();
    n.set("a", "/f", "live").await;
    n.fault("hold-commit", true);
    let request = n.request("POST", "sessions/a/checkpoint").json(&json!({}));
    let waiting = tokio::spawn(async move { request.send().await.map(|r| r.status()) });
    n.faulted("held").await;
    n.kill_ksd();
    n.fault("hold-commit", false);
    n.up().await;
    assert_eq!(n.value("a", "/f").await.as_deref(), Some("live"), "the VM went on");
    let after: Vec<Checkpoint> = n.get("sessions/a/checkpoints").await.unwrap();
    let demanded = |all: &[Checkpoint]| all.iter().filter(|c| c.reason == "demand").count();
    assert_eq!(demanded(&after), demanded(&before), "an adopted session takes one of its own: {after:?}");
    n.ok("sessions/a/checkpoint", json!({})).await;
    drop(waiting);
}

#[tokio::test]
async fn a_failed_checkpoint_leaves_the_session_running() {
    let n = TestNode::with_image().await;
    n.create("a").await;
    n.ok("sessions/a/checkpoint", json!({})).await;
    for verb in ["checkpoint", "park", "stop"] {
        n.fault("fail-checkpoint", true);
        assert_eq!(n.refused(&format!("sessions/a/{verb}"), json!({})).await.code, "disk-full", "{verb}");
        assert_eq!(n.show("a").await.state, SessionState::Running);
    }
    n.fault("fail-checkpoint", true);
    let e = n.refused("sessions/a/restore", json!({ "checkpoint": "c1" })).await;
    assert_eq!(e.code, "disk-full", "a restore must not throw away what could not be kept");
    n.ok("sessions/a/checkpoint", json!({})).await;
}

#[tokio::test]
async fn a_failed_start_is_tried_again() {
    let n = TestNode::with_image().await;
    n.create("a").await;
    n.ok("sessions/a/checkpoint", json!({})).await;
    n.fault("fail-restore", true);
    n.ok("sessions/a/kill", json!({})).await;
    n.event("a", "start-failed").await;
    assert_eq!(n.show("a").await.state, SessionState::Running);
}

#[tokio::test]
async fn a_damaged_checkpoint_is_refused_by_name_and_the_session_goes_on() {
    let n = TestNode::with_image().await;
    n.create("a").await;
    n.ok("sessions/a/checkpoint", json!({})).await;
    let c = n.ok("sessions/a/checkpoint", json!({ "message": "damaged" })).await;
    let id = c["id"].as_str().unwrap();
    damage(&n, id);
    let e = n.refused("sessions/a/restore", json!({ "checkpoint": &id[..8] })).await;
    assert_eq!(e.code, "corrupt", "{e}");
    assert_eq!(n.show("a").await.state, SessionState::Running);
}

/// Flips a bit in a checkpoint's manifest.
fn damage(n: &TestNode, id: &str) {
    let file = n.data().join(format!("store/manifests/{}/{id}.manifest", &id[..2]));
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[40] ^= 1;
    std::fs::write(&file, bytes).unwrap();
}

#[tokio::test]
async fn a_newest_checkpoint_that_cannot_be_started_is_skipped_and_told() {
    let mut n = TestNode::with_image().await;
    n.create("a").await;
    n.set("a", "/f", "old").await;
    let good = n.ok("sessions/a/checkpoint", json!({})).await;
    n.set("a", "/f", "new").await;
    let bad = n.ok("sessions/a/checkpoint", json!({})).await;
    damage(&n, bad["id"].as_str().unwrap());
    n.ok("sessions/a/kill", json!({})).await;
    let note = format!("went on from the older checkpoint c{}", good["number"]);
    assert!(n.event("a", "fell-back").await.text.contains(&note));
    assert_eq!(n.value("a", "/f").await.as_deref(), Some("old"));
    let told = |s: Session| {
        assert_eq!(s.state, SessionState::Running);
        assert!(s.reason.contains(&note) && s.reason.contains(&format!("ks restore a@c{}", bad["number"])), "{}", s.reason);
    };
    told(n.show("a").await);
    let listed: Vec<Checkpoint> = n.get("sessions/a/checkpoints").await.unwrap();
    assert!(listed.iter().any(|c| Some(c.number) == bad["number"].as_u64()), "it stays listed: {listed:?}");
    // A node that comes back still says it.
    n.kill_ksd();
    n.up().await;
    n.event("a", "adopted").await;
    told(n.show("a").await);
}

#[tokio::test]
async fn a_lost_or_damaged_database_is_a_refusal_and_never_a_blank_node() {
    let mut n = TestNode::with_image().await;
    n.create("a").await;
    n.ok("sessions/a/checkpoint", json!({})).await;
    n.ok("sessions/a/stop", json!({})).await;
    assert!(n.end_ksd().success());
    let (raft, aside) = (n.data().join("raft"), n.data().join("raft.aside"));
    std::fs::rename(&raft, &aside).unwrap();
    assert_eq!(n.refuses_to_start(), Some(2), "2: the supervisor does not start it again");
    assert!(n.log().contains("raft is missing, but the chunk store beside it holds"), "{}", n.log());
    assert!(!raft.exists(), "nothing blank was put in its place");
    std::fs::rename(&aside, &raft).unwrap();

    for file in std::fs::read_dir(&raft).unwrap().map(|f| f.unwrap().path()) {
        let good = std::fs::read(&file).unwrap();
        let mut bad = good.clone();
        let last = bad.len() - 4096;
        for at in (4096..last).step_by(7) {
            bad[at] ^= 0x5a;
        }
        std::fs::write(&file, bad).unwrap();
        assert_eq!(n.refuses_to_start(), Some(2), "{}", file.display());
        assert!(n.log().contains("cannot be"), "{}", n.log());
        // One file of the two alone, gone or emptied.
        let named = format!("{} is missing or empty", file.display());
        for empty in [false, true] {
            std::fs::remove_file(&file).unwrap();
            if empty {
                std::fs::write(&file, b"").unwrap();
            }
            assert_eq!(n.refuses_to_start(), Some(2), "{}", file.display());
            assert!(n.log().contains(&named), "{}", n.log());
            assert_eq!(std::fs::metadata(&file).map_or(0, |m| m.len()), 0, "nothing blank was put in its place");
            if !empty {
                std::fs::write(&file, b"").unwrap();
            }
        }
        std::fs::write(&file, good).unwrap();
    }
    n.up().await;
    assert_eq!(n.show("a").await.state, SessionState::Stopped, "with the database back all is as it was");
}

/// Waits until the session is shown with a reason that `fits`.
async fn reason(n: &TestNode, fits: impl Fn(&str) -> bool) -> Session {
    let end = std::time::Instant::now() + DEADLINE;
    loop {
        let s = n.show("a").await;
        if fits(&s.reason) {
            return s;
        }
        assert!(std::time::Instant::now() < end, "{}", s.reason);
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn a_vm_process_that_stands_still_is_shown_and_forgiven_when_it_answers_again() {
    use rustix::process::{Pid, Signal, kill_process};
    let n = TestNode::with_image().await;
    let before = n.create("a").await;
    let pid = Pid::from_raw(before.vmm_pid.unwrap().cast_signed()).unwrap();
    kill_process(pid, Signal::STOP).unwrap();
    let silent = reason(&n, |r| r.starts_with("its VM process does not answer since ")).await;
    assert_eq!(silent.state, SessionState::Running);
    kill_process(pid, Signal::CONT).unwrap();
    let after = reason(&n, str::is_empty).await;
    assert_eq!((after.state, after.token), (SessionState::Running, before.token), "the same run goes on");
}
