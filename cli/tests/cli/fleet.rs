//! A fleet from outside: logging in, the pinned certificate, fail-over between addresses, and what is said of nodes,
//! users, copies and quorum.

use crate::fake::{Answer, Fake, Request, TOKEN, checkpoint, expect, ks, session};
use crate::secure::{Authority, Secure};
use serde_json::{Value, json};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

fn parse(out: &str) -> Value {
    serde_json::from_str(out).unwrap_or_else(|e| panic!("{e}: {out}"))
}

pub fn fleet(addresses: &[String], quorum: bool) -> Value {
    let nodes: Vec<Value> = addresses
        .iter()
        .zip(1u64..)
        .map(|(a, n)| {
            json!({
                "number": n, "name": format!("n{n}"), "peer_id": "12D3", "state": "active", "role": "voter", "leader": n == 1,
                "live": quorum || n == 2, "seen_ms_ago": 7000, "api": [format!("https://{a}")], "sessions": 2,
                "mem_free_mib": 4096, "disk_free_mib": 10_000, "load": 0.5
            })
        })
        .collect();
    json!({
        "schema": "ks.fleet.v1", "fleet_id": "0f".repeat(16), "generation": 0, "leader": quorum.then_some(1), "term": 4, "me": 2,
        "voters": [1, 2, 3], "quorum": quorum, "lease": {"state": if quorum { "held" } else { "lapsed" }, "remaining_ms": 2400},
        "policy": {"copies": 2, "voters": 3, "lease_ms": 3000}, "fingerprint": "ab".repeat(32), "nodes": nodes, "warning": ""
    })
}

/// A fleet's ordinary node; `all` is what it says of addresses.
fn node(all: Vec<String>) -> impl Fn(&Request) -> Answer + Send + Sync + 'static {
    move |r| match r.line.split(' ').nth(1).unwrap() {
        "/v1/fleet" => Answer::json(&fleet(&all, true)),
        "/v1/sessions" => Answer::json(&json!([session("quiet-otter", "running", 1)])),
        _ => Answer::not_found(),
    }
}

fn with_stdin(home: &Path, args: &[&str], text: &str) -> Output {
    let mut child = ks(home)
        .env_remove("KS_HOME")
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

/// `ks` that uses contexts (no KS_HOME).
fn plain(home: &Path, args: &[&str]) -> Output {
    ks(home).env_remove("KS_HOME").args(args).stdin(Stdio::null()).output().unwrap()
}

#[test]
fn login_notes_the_fleet_and_a_dead_node_is_passed_over() {
    let ca = Authority::new();
    let second = Secure::new(&ca, "ks-node", node(vec![]));
    let second_at = second.address.to_string();
    let told = vec![second_at.clone()];
    let first = Secure::new(&ca, "ks-node", node(told));
    let first_at = first.address.to_string();
    let home = tempfile::tempdir().unwrap();
    let args = ["login", &first_at, "--fingerprint", &ca.fingerprint(), "--name", "prod"];
    let (out, _) = expect(&with_stdin(home.path(), &args, &format!("{TOKEN}\n")), 0);
    assert!(out.contains("2 addresses") && !out.contains(TOKEN), "{out}");
    let file = home.path().join(".config/keepstate/contexts.toml");
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let (out, _) = expect(&plain(home.path(), &["ls"]), 0);
    assert!(out.contains("quiet-otter"), "{out}");
    assert_eq!((first.asked("GET /v1/sessions"), second.asked("GET")), (1, 0), "the address that answered last is asked first");
    drop(first);
    let begun = Instant::now();
    expect(&plain(home.path(), &["ls"]), 0);
    assert!(begun.elapsed() < Duration::from_secs(8), "{:?}", begun.elapsed());
    assert_eq!(second.asked("GET /v1/sessions"), 1);
    let (out, _) = expect(&plain(home.path(), &["--json", "context", "ls"]), 0);
    let v = parse(&out);
    assert_eq!((v["current"].as_str(), v["contexts"][0]["addresses"].as_array().map(Vec::len)), (Some("prod"), Some(2)));
    assert!(!out.contains(TOKEN), "{out}");
    // Named by folder or by context, this machine's node is meant, and there is none.
    expect(&plain(home.path(), &["--context", "local", "ls"]), 125);
    expect(&ks(home.path()).arg("ls").output().unwrap(), 125);
    expect(&plain(home.path(), &["context", "use", "local"]), 0);
    expect(&plain(home.path(), &["ls"]), 125);
    expect(&plain(home.path(), &["--context", "prod", "ls"]), 0);
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();
    let (_, err) = expect(&plain(home.path(), &["--context", "prod", "ls"]), 2);
    assert!(err.contains("chmod 600"), "{err}");
}

#[test]
fn another_fleets_certificate_gets_no_token() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let home = tempfile::tempdir().unwrap();
    let stranger = Secure::new(&theirs, "ks-node", node(vec![]));
    let at = stranger.address.to_string();
    let (out, _) = expect(&with_stdin(home.path(), &["--json", "login", &at, "--fingerprint", &ours.fingerprint()], TOKEN), 125);
    assert_eq!(parse(&out)["code"], "untrusted", "{out}");
    // A leaf of the right authority under another name is no node either.
    let other = Secure::new(&ours, "something-else", node(vec![]));
    let at = other.address.to_string();
    let (out, _) = expect(&with_stdin(home.path(), &["--json", "login", &at, "--fingerprint", &ours.fingerprint()], TOKEN), 125);
    assert_eq!(parse(&out)["code"], "untrusted", "{out}");
    assert_eq!(
        (stranger.requests.lock().unwrap().len(), other.requests.lock().unwrap().len()),
        (0, 0),
        "no byte of a request was sent"
    );
    // Without a fingerprint nothing is believed, but what is shown is told.
    let at = stranger.address.to_string();
    let (_, err) = expect(&with_stdin(home.path(), &["login", &at], TOKEN), 2);
    assert!(err.contains(&theirs.fingerprint()), "{err}");
    assert!(!home.path().join(".config/keepstate/contexts.toml").exists());
    for bad in ["http://127.0.0.1:1", "nowhere"] {
        expect(&with_stdin(home.path(), &["login", bad, "--fingerprint", &ours.fingerprint()], TOKEN), 2);
    }
}

#[test]
fn what_may_have_been_done_is_not_sent_again() {
    let ca = Authority::new();
    let dead = Secure::new(&ca, "ks-node", |_| Answer { status: 0, body: vec![], cut: false });
    let alive = Secure::new(&ca, "ks-node", |r| match r.line.split(' ').nth(1).unwrap() {
        "/v1/sessions/a/checkpoint" => Answer::json(&checkpoint(1)),
        "/v1/sessions" => Answer::json(&json!([])),
        _ => Answer::not_found(),
    });
    let home = tempfile::tempdir().unwrap();
    let both = format!("{},{}", dead.address, alive.address);
    let ks = |args: &[&str]| {
        let mut c = ks(home.path());
        c.env("KS_ADDR", &both).env("KS_TOKEN", TOKEN).env("KS_FINGERPRINT", ca.fingerprint());
        c.args(args).stdin(Stdio::null()).output().unwrap()
    };
    let (_, err) = expect(&ks(&["checkpoint", "a"]), 255);
    assert!(err.contains("outcome is unknown"), "{err}");
    assert_eq!((dead.asked("POST"), alive.asked("POST")), (1, 0));
    // A question is asked again elsewhere.
    expect(&ks(&["ls"]), 0);
    assert_eq!((dead.asked("GET"), alive.asked("GET")), (1, 1));
    // Nothing was sent to a node that does not answer at all: then also a change goes to the next.
    drop(dead);
    expect(&ks(&["checkpoint", "a"]), 0);
    assert_eq!(alive.asked("POST"), 1);
}

#[test]
fn a_node_that_is_stopped_costs_less_than_a_second() {
    let ca = Authority::new();
    // The kernel completes connections to it, and nobody ever speaks.
    let stopped = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let alive = Secure::new(&ca, "ks-node", node(vec![]));
    let home = tempfile::tempdir().unwrap();
    let begun = Instant::now();
    let mut c = ks(home.path());
    c.env("KS_ADDR", format!("{},{}", stopped.local_addr().unwrap(), alive.address));
    c.env("KS_TOKEN", TOKEN).env("KS_FINGERPRINT", ca.fingerprint());
    expect(&c.arg("ls").output().unwrap(), 0);
    assert!(begun.elapsed() < Duration::from_secs(8), "{:?}", begun.elapsed());
}

#[test]
fn a_node_that_is_cut_off_is_asked_and_then_another() {
    let ca = Authority::new();
    let cut = Secure::new(&ca, "ks-node", |_| Answer::error(503, "no-quorum"));
    let fine = Secure::new(&ca, "ks-node", node(vec![]));
    let home = tempfile::tempdir().unwrap();
    let run = |addr: String| {
        let mut c = ks(home.path());
        c.env("KS_ADDR", addr).env("KS_TOKEN", TOKEN).env("KS_FINGERPRINT", ca.fingerprint());
        c.args(["--json", "ls"]).output().unwrap()
    };
    expect(&run(format!("{},{}", cut.address, fine.address)), 0);
    let (out, _) = expect(&run(cut.address.to_string()), 125);
    assert_eq!(parse(&out)["code"], "no-quorum");
}

#[test]
fn no_quorum_is_said_plainly_and_is_exit_1() {
    let at: Vec<String> = (1..=3).map(|i| format!("10.0.0.{i}:7701")).collect();
    let f = Fake::new(move |r| match r.line.split(' ').nth(1).unwrap() {
        "/v1/fleet" => Answer::json(&fleet(&at, false)),
        "/v1/sessions" => {
            let mut s = session("quiet-otter", "running", 1);
            (s["node"], s["copies"], s["paused"]) = ("n2".into(), 2.into(), true.into());
            let mut c = checkpoint(7);
            (c["holders"], c["durability"]) = (json!(["n2"]), "local".into());
            s["last_checkpoint"] = c;
            Answer::json(&json!([s]))
        }
        _ => Answer::not_found(),
    });
    let (out, err) = expect(&f.ks(&["fleet", "status"]), 1);
    for words in ["quorum       NO", "lapsed", "n1 (#1), n2 (#2), n3 (#3)", "leader       none"] {
        assert!(out.contains(words), "{words:?} not in {out}");
    }
    for words in ["NO QUORUM: 2 of the 3 voters", "n1, n3", "ks fleet recover"] {
        assert!(err.contains(words), "{words:?} not in {err}");
    }
    let (out, err) = expect(&f.ks(&["--json", "fleet", "status"]), 1);
    assert!(parse(&out)["quorum"] == false && err.is_empty(), "{out} {err}");
    let (out, err) = expect(&f.ks(&["ls"]), 0);
    assert!(out.contains("running, paused") && out.contains("n2") && out.contains("local 1/2"), "{out}");
    assert!(err.contains("1 session is standing still"), "{err}");
    let (out, _) = expect(&f.ks(&["node", "ls"]), 0);
    assert!(out.contains("n2*") && out.contains("7.0 s ago") && out.contains("10.0.0.1:7701"), "{out}");
    // With a quorum there is nothing to recover, without --yes nothing is done.
    let (_, err) = expect(&f.ks(&["fleet", "recover"]), 2);
    assert!(err.contains("--yes"), "{err}");
    assert_eq!(f.shared.asked("POST"), 0);
}

#[test]
fn a_token_that_only_this_machine_can_use_says_so() {
    let f = Fake::new(|_| {
        Answer::json(&json!({
            "schema": "ks.token.v1", "token": "ks1.x", "expires_unix_ms": 4_000_000_000_000u64, "fingerprint": "ab".repeat(32),
            "addr": "127.0.0.1:7701"
        }))
    });
    let (out, err) = expect(&f.ks(&["node", "token"]), 0);
    assert!(out == "ks1.x\n" && err.contains("loopback") && err.contains("--fleet-address"), "{out} {err}");
}

#[test]
fn joining_draining_and_removing_say_what_they_did() {
    let at: Vec<String> = (1..=2).map(|i| format!("10.0.0.{i}:7701")).collect();
    let token = format!("ks1.secret.{}.10.0.0.1:7701", "ab".repeat(32));
    let says = token.clone();
    let f = Fake::new(move |r| match (r.line.split(' ').next().unwrap(), r.line.split(' ').nth(1).unwrap()) {
        ("GET", "/v1/fleet") => Answer::json(&fleet(&at, true)),
        ("POST", "/v1/fleet/token") => {
            let body: Value = serde_json::from_slice(&r.body).unwrap();
            assert_eq!(body["ttl_s"], 1800);
            Answer::json(
                &json!({"schema": "ks.token.v1", "token": says, "expires_unix_ms": 4_000_000_000_000u64, "fingerprint": "ab".repeat(32), "addr": "10.0.0.1:7701"}),
            )
        }
        ("POST", "/v1/fleet/join") => Answer::lines(&[
            json!({"type": "step", "what": "asking", "done": 0, "total": 0}),
            json!({"type": "result", "result": {"schema": "ks.joined.v1", "fleet_id": "0f", "number": 2, "name": "c", "warning": "two cannot lose one"}}),
        ]),
        ("POST", "/v1/fleet/nodes/1/drain") => Answer::lines(&[json!({"type": "result", "result": {
            "schema": "ks.drained.v1", "number": 1, "name": "n1", "moved": ["a", "b"], "stuck": [{"session": "c", "why": "no peer has its profile"}]}})]),
        ("POST", "/v1/fleet/nodes/1/undrain") => Answer::json(&json!({"number": 1, "name": "n1", "state": "active"})),
        ("DELETE", "/v1/fleet/nodes/1") => Answer::json(&json!({})),
        ("PUT", "/v1/fleet/policy") => {
            assert_eq!(serde_json::from_slice::<Value>(&r.body).unwrap(), json!({"copies": 3, "voters": null, "lease_ms": null}));
            Answer::json(&json!({"copies": 3, "voters": 3, "lease_ms": 3000}))
        }
        ("POST", "/v1/users") => Answer::json(&json!({"schema": "ks.user.v1", "name": "ann", "role": "viewer", "token": "t0"})),
        ("GET", "/v1/users") => Answer::json(&json!([{"name": "ann", "role": "viewer", "created_unix_ms": 0, "tokens": 1}])),
        ("DELETE", "/v1/users/ann") => Answer::json(&json!({})),
        _ => Answer::not_found(),
    });
    let (out, err) = expect(&f.ks(&["node", "token", "--ttl", "30m"]), 0);
    assert!(out.trim() == token && err.contains(&"ab".repeat(32)), "{out} {err}");
    assert!(!err.contains("loopback"), "{err}");
    let (out, err) = expect(&f.ks(&["node", "join", &token, "--name", "c"]), 0);
    assert!(out.contains("c is node 2") && err.contains("two cannot lose one"), "{out} {err}");
    expect(&f.ks(&["node", "join", "ks1.x.y"]), 2);
    let (out, _) = expect(&f.ks(&["node", "drain", "n1"]), 1);
    assert!(out.contains("2 sessions moved") && out.contains("c stays: no peer has its profile"), "{out}");
    for verb in ["undrain", "uncordon"] {
        let (out, _) = expect(&f.ks(&["node", verb, "n1"]), 0);
        assert!(out.contains("n1 takes sessions again"), "{out}");
    }
    // A live node with sessions is not removed by force; a drained one may go.
    let (out, _) = expect(&f.ks(&["--json", "node", "rm", "n1", "--force"]), 125);
    assert_eq!(parse(&out)["code"], "running");
    let (out, _) = expect(&f.ks(&["--json", "node", "rm", "n1"]), 0);
    assert_eq!(parse(&out)["number"], 1);
    let (out, _) = expect(&f.ks(&["--json", "node", "show", "n9"]), 125);
    assert_eq!(parse(&out)["code"], "not-found");
    expect(&f.ks(&["fleet", "policy", "--copies", "3"]), 0);
    expect(&f.ks(&["fleet", "policy", "--voters", "4"]), 2);
    let (out, _) = expect(&f.ks(&["user", "add", "ann", "--role", "viewer"]), 0);
    assert_eq!(out, "t0\n");
    let (out, _) = expect(&f.ks(&["user", "ls"]), 0);
    assert!(out.contains("ann") && out.contains("viewer"), "{out}");
    expect(&f.ks(&["user", "rm", "ann"]), 0);
    expect(&f.ks(&["user", "add", "ann", "--role", "root"]), 2);
    expect(&f.ks(&["user", "add", "../x"]), 2);
}
