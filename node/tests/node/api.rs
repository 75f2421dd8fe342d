//! The API's edges: who may call, bad input, streams.

use crate::fake_guest::untar;
use crate::harness::{DEADLINE, TestNode};
use futures::{SinkExt, StreamExt};
use ks_proto::api::{ApiError, DoctorReport, NodeInfo};
use ks_proto::guest::ExecFrame;
use serde_json::json;
use tokio_tungstenite::tungstenite::Message;

#[tokio::test]
async fn without_the_token_or_with_a_strange_host_nothing_is_served() {
    let mut n = TestNode::start(false);
    n.up().await;
    let a = n.api().unwrap();
    let http = crate::harness::http();
    let url = format!("{}/v1/node", a.url);
    assert_eq!(http.get(&url).send().await.unwrap().status(), 403);
    assert_eq!(http.get(&url).bearer_auth("wrong").send().await.unwrap().status(), 403);
    assert_eq!(http.get(&url).bearer_auth(&a.token).header("host", "evil.example").send().await.unwrap().status(), 403);
    assert_eq!(http.get(&url).bearer_auth(&a.token).header("origin", "http://evil.example").send().await.unwrap().status(), 403);
    let info: NodeInfo = n.get("node").await.unwrap();
    assert_eq!((info.schema.as_str(), info.pid), ("ks.node.v1", n.ksd_pid()));
    for file in ["api.json", "token", "keys", "state.redb"] {
        use std::os::unix::fs::PermissionsExt;
        let mode = std::fs::metadata(n.data().join(file)).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o600, "{file}");
    }
    let second = std::process::Command::new(env!("CARGO_BIN_EXE_ksd")).arg("--data-dir").arg(n.data()).output().unwrap();
    assert_eq!(second.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&second.stderr).contains("another ksd"));
}

#[tokio::test]
async fn bad_input_is_refused_with_what_why_and_next() {
    let n = TestNode::with_image().await;
    let cases = [
        ("sessions", json!({ "name": "No Good" }), "usage"),
        ("sessions", json!({ "memory_mib": 1 }), "usage"),
        // More than this machine has.
        ("sessions", json!({ "memory_mib": 1 << 20 }), "usage"),
        ("sessions", json!({ "vcpus": 1000 }), "usage"),
        ("sessions", json!({ "engine": "xen" }), "usage"),
        ("sessions", json!({ "image": "nope" }), "not-found"),
        ("sessions/nope/checkpoint", json!({}), "not-found"),
        ("sessions/nope/nope", json!({}), "not-found"),
        ("images/import", json!({ "name": "x" }), "usage"),
        ("images/build", json!({ "kernel": "/bad" }), "internal"),
        ("images/build", json!({ "name": "../x" }), "usage"),
    ];
    for (path, body, code) in cases {
        let e = n.refused(path, body.clone()).await;
        assert_eq!(e.code, code, "{path} {body}: {e}");
        assert!(!e.what.is_empty() && !e.why.is_empty() && !e.next.is_empty(), "{e:?}");
    }
    n.create("a").await;
    for (path, body, code) in [
        ("sessions/a/restore", json!({ "checkpoint": "c99" }), "not-found"),
        ("sessions/a/restore", json!({}), "usage"),
        ("sessions/a/fork", json!({ "steer": [["/f", "?"]] }), "usage"),
        ("sessions/a/diff", json!({ "from": "c98", "to": "c99" }), "not-found"),
    ] {
        assert_eq!(n.refused(path, body).await.code, code, "{path}");
    }
}

#[tokio::test]
async fn exec_is_byte_exact_and_passes_codes_and_refusals() {
    let n = TestNode::with_image().await;
    n.create("a").await;
    let data: Vec<u8> = (0..300_000u32).map(|i| (i * 31 % 251) as u8).collect();
    let (code, out) = n.exec("a", &["cat"], &data).await.unwrap();
    assert_eq!(code, 0);
    assert!(out == data, "{} of {} bytes came back", out.len(), data.len());
    assert_eq!(n.exec("a", &["exit", "7"], b"").await.unwrap().0, 7);
    assert_eq!(n.exec("a", &["no-such-program"], b"").await.unwrap_err().code, "not-found");
    assert_eq!(n.exec("nope", &["cat"], b"").await.unwrap_err().code, "not-found");
    assert_eq!(n.exec("a", &[], b"").await.unwrap_err().code, "usage");
}

#[tokio::test]
async fn a_slow_reader_holds_up_only_its_own_program() {
    let n = TestNode::with_image().await;
    n.create("a").await;
    let mut ws = n.socket("sessions/a/exec").await;
    ws.send(Message::Text(json!({ "argv": ["yes"] }).to_string().into())).await.unwrap();
    ws.next().await.unwrap().unwrap();
    // Nobody reads on: another command still works.
    assert_eq!(n.exec("a", &["exit", "3"], b"").await.unwrap().0, 3);
    drop(ws);
}

#[tokio::test]
async fn attach_needs_a_terminal_and_carries_its_size() {
    let n = TestNode::with_image().await;
    n.create("a").await;
    let mut ws = n.socket("sessions/a/attach").await;
    ws.send(Message::Text("{}".into())).await.unwrap();
    let Message::Text(t) = ws.next().await.unwrap().unwrap() else { panic!("a refusal was expected") };
    assert_eq!(serde_json::from_str::<ApiError>(&t).unwrap().code, "usage");
    let mut ws = n.socket("sessions/a/attach").await;
    ws.send(Message::Text(json!({ "tty": { "term": "xterm", "cols": 100, "rows": 30 } }).to_string().into())).await.unwrap();
    let Message::Binary(b) = ws.next().await.unwrap().unwrap() else { panic!("bytes were expected") };
    assert_eq!(ExecFrame::decode_message(&b), Some(ExecFrame::Stdout(b"xterm 100x30".to_vec())));
    ws.send(Message::Binary(ExecFrame::Stdin(b"q".to_vec()).encode_message().into())).await.unwrap();
    let Message::Binary(b) = ws.next().await.unwrap().unwrap() else { panic!("an exit was expected") };
    assert_eq!(ExecFrame::decode_message(&b), Some(ExecFrame::Exit { code: 0, signal: 0 }));
}

#[tokio::test]
async fn files_go_in_and_out_as_archives() {
    let n = TestNode::with_image().await;
    n.create("a").await;
    let tar = ks_node::host::tar::one_file("f", b"text").unwrap();
    let put = n.request("PUT", "sessions/a/files?path=/d").body(tar).send().await.unwrap();
    assert_eq!(put.status(), 200, "{}", put.text().await.unwrap());
    let got = n.request("GET", "sessions/a/files?path=/d/f").send().await.unwrap().bytes().await.unwrap();
    assert_eq!(untar(&got), Some(("f".into(), "text".into())));
    let bad = n.request("PUT", "sessions/a/files?path=/d").body("short").send().await.unwrap();
    assert_eq!(bad.status(), 400);
    assert_eq!(n.request("GET", "sessions/a/files?path=/none").send().await.unwrap().status(), 404);
    assert_eq!(n.request("GET", "sessions/a/logs?lines=5").send().await.unwrap().text().await.unwrap(), "log of 5 lines");
}

#[tokio::test]
async fn doctors_look_at_host_and_session() {
    let n = TestNode::with_image().await;
    let host: DoctorReport = n.get("doctor").await.unwrap();
    let names: Vec<&str> = host.checks.iter().map(|c| c.name.as_str()).collect();
    assert!(["engine", "disk", "userfaultfd", "jail", "images"].iter().all(|w| names.contains(w)), "{names:?}");
    assert!(host.checks.iter().all(|c| c.ok || !c.fix.is_empty()));
    n.create("a").await;
    let s: DoctorReport = n.get("sessions/a/doctor").await.unwrap();
    let names: Vec<&str> = s.checks.iter().map(|c| c.name.as_str()).collect();
    assert_eq!(names, ["state", "checkpoint", "vm", "clock"]);
}

#[tokio::test]
async fn an_image_without_a_tsc_clock_is_refused_and_nothing_stays() {
    let n = TestNode::with_image().await;
    n.fault("wrong-clock", true);
    let e = n.refused("sessions", json!({ "name": "a", "memory_mib": 128 })).await;
    assert!(e.code == "incompatible" && e.why.contains("hpet"), "{e}");
    assert_eq!(n.vmms(), Vec::<u32>::new());
    n.fault("wrong-clock", false);
    n.create("a").await;
}

#[tokio::test]
async fn a_caller_that_leaves_while_its_session_starts_leaves_nothing_behind() {
    let n = TestNode::with_image().await;
    n.create("warm").await;
    n.fault("silent-guest", true);
    let request = n.request("POST", "sessions").json(&json!({ "name": "b", "memory_mib": 128 }));
    let mut answer = request.send().await.unwrap().bytes_stream();
    answer.next().await.unwrap().unwrap();
    let shown = async { while n.get::<serde_json::Value>("sessions/b").await.is_err() {} };
    tokio::time::timeout(DEADLINE, shown).await.unwrap();
    drop(answer);
    n.event("", "create-failed").await;
    assert!(n.get::<serde_json::Value>("sessions/b").await.is_err());
    assert_eq!(n.vmms().len(), 1);
    n.fault("silent-guest", false);
}

#[test]
fn the_bulk_plane_is_measured_against_plain_quic() {
    let dir = tempfile::tempdir().unwrap();
    let run = || {
        let mut c = std::process::Command::new(env!("CARGO_BIN_EXE_ksd"));
        c.args(["bench-replicate", "--mib", "6", "--rounds", "2", "--dir"]).arg(dir.path()).output().unwrap()
    };
    let out = run();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let text = String::from_utf8(out.stdout).unwrap();
    let lines: Vec<serde_json::Value> =
        text.lines().filter(|l| l.starts_with('{')).map(|l| serde_json::from_str(l).unwrap()).collect();
    let (control, rounds) = lines.split_last().unwrap();
    assert_eq!(rounds.len(), 2, "{text}");
    for figure in ["control_calls", "control_p50_ms", "control_p99_ms"] {
        assert!(control[figure].as_f64().unwrap() > 0.0, "{figure} in {control}");
    }
    for l in rounds {
        assert!(l["bytes"].as_u64().unwrap() > 6 << 20, "{l}");
        for figure in ["ours_mib_s", "plain_mib_s", "percent"] {
            assert!(l[figure].as_f64().unwrap() > 0.0, "{figure} in {l}");
        }
    }
    assert!(text.lines().any(|l| l.starts_with("median")), "{text}");
    let again = run();
    assert!(!again.status.success() && String::from_utf8_lossy(&again.stderr).contains("not empty"), "{again:?}");
}
