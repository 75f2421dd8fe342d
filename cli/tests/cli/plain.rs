//! Verbs without terminals: help, mistakes, nodes that do not answer, results for people and for programs.

use crate::fake::{Answer, Fake, checkpoint, expect, ks, session};
use serde_json::{Value, json};
use std::process::Stdio;
use std::sync::atomic::{AtomicU64, Ordering};

fn parse(out: &str) -> Value {
    serde_json::from_str(out).unwrap_or_else(|e| panic!("{e}: {out}"))
}

#[test]
fn help_is_twelve_lines_and_needs_no_node() {
    let t = tempfile::tempdir().unwrap();
    let (out, err) = expect(&ks(t.path()).output().unwrap(), 0);
    assert_eq!((out.lines().count(), err.as_str()), (12, ""));
    expect(&ks(t.path()).arg("--help").output().unwrap(), 0);
    for topic in ["config", "exit-codes", "terminal", "sync", "checkpoints", "completion", "run"] {
        let (out, _) = expect(&ks(t.path()).args(["help", topic]).output().unwrap(), 0);
        assert!(out.len() > 200, "{topic}");
    }
    let (_, err) = expect(&ks(t.path()).args(["help", "snyc"]).output().unwrap(), 2);
    assert!(err.contains("ks help sync"), "{err}");
    let (out, _) = expect(&ks(t.path()).args(["completion", "bash"]).output().unwrap(), 0);
    assert!(out.contains("COMPLETE="));
    let (out, _) = expect(&ks(t.path()).arg("man").output().unwrap(), 0);
    assert!(out.contains(".TH ks"));
}

#[test]
fn mistakes_are_usage_with_a_suggestion() {
    let t = tempfile::tempdir().unwrap();
    let (_, err) = expect(&ks(t.path()).args(["chekpoint", "a"]).output().unwrap(), 2);
    assert!(err.contains("'checkpoint'"), "{err}");
    let (_, err) = expect(&ks(t.path()).args(["rnu", "--", "true"]).output().unwrap(), 2);
    assert!(err.contains("'run'"), "{err}");
    let (_, err) = expect(&ks(t.path()).args(["run", "true"]).output().unwrap(), 2);
    assert!(err.contains("ks run -- true"), "{err}");
    let (out, _) = expect(&ks(t.path()).args(["--json", "chekpoint", "a"]).output().unwrap(), 2);
    let v = parse(&out);
    assert!(v["schema"] == "ks.error.v1" && v["why"].as_str().unwrap().contains("checkpoint"), "{v}");
    for args in [
        &["show", "../x"][..],
        &["restore", "a"],
        &["diff", "a", "b"],
        &["cp", "a", "b"],
        &["run", "--engine", "xen"],
        &["exec", "a"],
    ] {
        expect(&ks(t.path()).args(args).output().unwrap(), 2);
    }
    std::fs::write(t.path().join(".ks.toml"), "adress = 'x'").unwrap();
    let (_, err) = expect(&ks(t.path()).arg("ls").output().unwrap(), 2);
    assert!(err.contains(".ks.toml") && err.contains("adress"), "{err}");
}

#[test]
fn a_node_that_is_down_is_said_in_words_and_in_json() {
    let t = tempfile::tempdir().unwrap();
    let (_, err) = expect(&ks(t.path()).arg("ls").output().unwrap(), 125);
    assert!(err.contains("ks up") && !err.contains('\x1b'), "{err}");
    // Nobody listens on port 1; a port that was just given up may be another test's by now.
    let home = t.path().to_path_buf();
    std::fs::write(home.join("api.json"), r#"{"url": "http://127.0.0.1:1", "token": "a-token", "pid": 1}"#).unwrap();
    let (out, err) = expect(&ks(&home).args(["ls", "--json"]).output().unwrap(), 125);
    let v = parse(&out);
    assert!(v["code"] == "node-down" && v["exit"] == 125 && v["next"].as_str().unwrap().contains("ks up"), "{v}");
    assert_eq!(err, "");
    let (out, _) = expect(&ks(&home).args(["doctor", "--json"]).output().unwrap(), 1);
    let v = parse(&out);
    let node = v["checks"].as_array().unwrap().iter().find(|c| c["name"] == "node").unwrap().clone();
    assert!(v["ok"] == false && node["ok"] == false && node["fix"].as_str().unwrap().contains("ks up"), "{v}");
}

#[test]
fn lists_align_and_json_has_a_schema() {
    let f = Fake::new(|r| match r.line.split(' ').nth(1).unwrap() {
        "/v1/sessions" => Answer::json(&json!([session("quiet-otter", "running", 1), session("x", "recovering", 2)])),
        "/v1/sessions/a/checkpoints" => Answer::json(&json!([checkpoint(1), checkpoint(12)])),
        "/v1/events" => {
            Answer::lines(&[json!({"seq": 1, "unix_ms": 0, "session": "a", "kind": "created", "text": "made\u{1b}[2J"})])
        }
        _ => Answer::not_found(),
    });
    let (out, _) = expect(&f.ks(&["ls"]), 0);
    let lines: Vec<&str> = out.lines().collect();
    let column = lines[0].find("STATE").unwrap();
    assert!(lines.iter().skip(1).all(|l| l[column..].starts_with("r")), "{out}");
    let v = parse(&expect(&f.ks(&["ls", "--json"]), 0).0);
    assert!(v["schema"] == "ks.sessions.v1" && v["sessions"][1]["state"] == "recovering");
    let (out, _) = expect(&f.ks(&["checkpoints", "a"]), 0);
    assert!(out.contains("420 MiB") && out.contains("31 MiB") && out.contains("12 ms"), "{out}");
    let (out, _) = expect(&f.ks(&["events"]), 0);
    assert!(out.contains("1970-01-01 00:00:00") && !out.contains('\x1b'), "{out}");
    let v = parse(&expect(&f.ks(&["events", "--json"]), 0).0);
    assert_eq!(v["schema"], "ks.event.v1");
    // A reader that goes away early is no error.
    let o = f.command().args(["ls"]).stdout(Stdio::null()).output().unwrap();
    expect(&o, 0);
}

#[test]
fn refusals_map_to_the_documented_exit_codes() {
    let f = Fake::new(|r| match r.line.split(' ').nth(1).unwrap() {
        "/v1/sessions/denied" => Answer::error(403, "not-allowed"),
        "/v1/sessions/slow" => Answer::error(504, "timeout"),
        "/v1/sessions/odd" => Answer { status: 502, body: b"<html>".to_vec(), cut: false },
        "/v1/sessions/strange" => Answer::json(&json!({"no": "session"})),
        _ => Answer::not_found(),
    });
    for (name, code) in [("denied", 4), ("slow", 124), ("odd", 125), ("strange", 125), ("nobody", 125)] {
        let (_, err) = expect(&f.ks(&["show", name]), code);
        assert!(err.contains("why") && err.contains("next"), "{err}");
        let v = parse(&expect(&f.ks(&["show", name, "--json"]), code).0);
        assert_eq!(v["exit"], code);
    }
}

#[test]
fn long_calls_end_in_their_result_their_error_or_the_unknown() {
    let step = json!({"type": "step", "what": "writing", "done": 1, "total": 2});
    let done = json!({"type": "result", "result": checkpoint(7)});
    let full = json!({"type": "error", "error": {"schema": "ks.error.v1", "code": "disk-full", "what": "w", "why": "no room", "next": "n"}});
    let f = Fake::new(move |r| match r.line.split(' ').nth(1).unwrap() {
        "/v1/sessions/good/checkpoint" => Answer::lines(&[step.clone(), done.clone()]),
        "/v1/sessions/full/checkpoint" => Answer::lines(&[step.clone(), full.clone()]),
        "/v1/sessions/cut/checkpoint" => Answer::lines(std::slice::from_ref(&step)).cut(),
        "/v1/sessions/short/checkpoint" => Answer::lines(std::slice::from_ref(&step)),
        _ => Answer::not_found(),
    });
    let (out, err) = expect(&f.ks(&["checkpoint", "good", "-m", "tests green"]), 0);
    assert_eq!((out.as_str(), err.as_str()), ("c7  420 MiB logical, 31 MiB stored, pause 12 ms  tests green\n", ""));
    let v = parse(&expect(&f.ks(&["--json", "checkpoint", "good"]), 0).0);
    assert!(v["schema"] == "ks.checkpoint.v1" && v["number"] == 7);
    assert!(expect(&f.ks(&["checkpoint", "full"]), 125).1.contains("no room"));
    for name in ["cut", "short"] {
        assert!(expect(&f.ks(&["checkpoint", name]), 255).1.contains("unknown"), "{name}");
    }
}

#[test]
fn one_that_is_refused_does_not_keep_the_others() {
    let f = Fake::new(|r| match r.line.split(' ').nth(1).unwrap() {
        p if p.contains("/denied") => Answer::error(403, "not-allowed"),
        p if p.contains("/foo") => Answer::not_found(),
        _ => Answer::json(&session("a", "stopped", 1)),
    });
    for (verb, line) in [
        ("stop", "POST /v1/sessions/NAME/stop "),
        ("park", "POST /v1/sessions/NAME/park "),
        ("wake", "POST /v1/sessions/NAME/wake "),
        ("rm", "DELETE /v1/sessions/NAME "),
    ] {
        let (out, err) = expect(&f.ks(&[verb, "a", "denied", "foo", "b"]), 125);
        assert_eq!((out.lines().count(), err.matches("the why").count()), (2, 2), "{verb}: {out} {err}");
        assert!(["a", "denied", "foo", "b"].iter().all(|n| f.shared.asked(&line.replace("NAME", n)) == 1), "{verb}");
        expect(&f.ks(&[verb, "a", "denied"]), 4);
    }
}

#[test]
fn who_wakes_a_session_hears_that_it_went_back_further() {
    let f = Fake::new(|_| {
        let mut s = session("a", "running", 1);
        s["reason"] = "c5 could not be started; it goes on from c4".into();
        Answer::json(&s)
    });
    let (out, err) = expect(&f.ks(&["wake", "a"]), 0);
    assert!(out.starts_with("a running in ") && err.contains("a: c5 could not be started; it goes on from c4"), "{out} {err}");
}

#[test]
fn one_copy_is_called_durable_only_as_what_one_node_can_do() {
    let f = Fake::new(|r| {
        let mut s = session("a", "running", 1);
        (s["copies"], s["replicas"], s["node"]) = (2.into(), json!(["n1"]), "n1".into());
        let mut c = checkpoint(3);
        c["holders"] = json!(["n1"]);
        s["last_checkpoint"] = c;
        if r.line.contains("/v1/sessions/a ") { Answer::json(&s) } else { Answer::json(&json!([s])) }
    });
    let (out, _) = expect(&f.ks(&["ls"]), 0);
    assert!(out.contains("durable 1/1") && !out.contains("1/2"), "{out}");
    let (out, _) = expect(&f.ks(&["show", "a"]), 0);
    assert!(out.contains("2 make a checkpoint durable; 1 until there are more nodes"), "{out}");
}

#[test]
fn going_back_says_where_the_present_is_kept() {
    let f = Fake::new(|r| match r.line.split(' ').nth(1).unwrap() {
        "/v1/sessions/a/restore" => Answer::json(&session("a", "running", 2)),
        _ => Answer::json(&json!([checkpoint(7), checkpoint(8)])),
    });
    let (_, err) = expect(&f.ks(&["restore", "a@c7"]), 0);
    assert!(!err.contains("kept as"), "nothing new was taken: {err}");
    let back = AtomicU64::new(0);
    let f = Fake::new(move |r| match r.line.split(' ').nth(1).unwrap() {
        "/v1/sessions/a/restore" => {
            back.store(1, Ordering::SeqCst);
            Answer::json(&session("a", "running", 2))
        }
        "/v1/sessions/a/checkpoints" if back.load(Ordering::SeqCst) == 1 => {
            let mut kept = checkpoint(9);
            kept["message"] = "before restore to abcd".into();
            Answer::json(&json!([checkpoint(7), checkpoint(8), kept, checkpoint(10)]))
        }
        "/v1/sessions/a/checkpoints" => Answer::json(&json!([checkpoint(7), checkpoint(8)])),
        _ => Answer::not_found(),
    });
    let (out, err) = expect(&f.ks(&["restore", "a@c7"]), 0);
    assert!(out.contains("back at c7") && err.contains("ks restore a@c9"), "{out} {err}");
}

#[test]
fn all_of_a_node_is_stopped_before_the_node_and_a_refusal_keeps_it_up() {
    let f = Fake::new(|r| {
        let with = |name: &str, state: &str, node: &str| {
            let mut s = session(name, state, 1);
            s["node"] = node.into();
            s
        };
        match r.line.split(' ').nth(1).unwrap() {
            "/v1/fleet" => Answer::json(&crate::fleet::fleet(&["10.0.0.1:1".to_owned(), "10.0.0.2:1".to_owned()], true)),
            "/v1/sessions" => Answer::json(&json!([
                with("stuck", "running", "n2"),
                with("good", "recovering", "n2"),
                with("rests", "parked", "n2"),
                with("elsewhere", "running", "n1"),
            ])),
            "/v1/sessions/stuck/stop" => Answer::error(409, "busy"),
            "/v1/sessions/good/stop" => Answer::json(&session("good", "stopped", 1)),
            _ => Answer::not_found(),
        }
    });
    let (out, err) = expect(&f.ks(&["down", "--all"]), 125);
    assert!(out.contains("good stopped") && err.contains("the why") && err.contains("stays up"), "{out} {err}");
    let asked = f.shared.with(|s| s.requests.iter().filter(|r| r.line.starts_with("POST")).count());
    assert_eq!((asked, f.shared.asked("POST /v1/sessions/good/stop")), (2, 1));
}

#[test]
fn kill_waits_for_another_run_and_measures() {
    let asked = AtomicU64::new(0);
    let f = Fake::new(move |r| {
        if r.line.starts_with("POST /v1/sessions/a/kill") {
            return Answer::lines(&[json!({"type": "result", "result": session("a", "recovering", 1)})]);
        }
        Answer::json(&match asked.fetch_add(1, Ordering::SeqCst) {
            0 | 1 => session("a", "running", 1),
            2 | 3 => session("a", "recovering", 1),
            _ => {
                let mut s = session("a", "running", 2);
                s["last_interruption"] =
                    json!({"at_unix_ms": 1, "cause": "killed", "ready_ms": 840, "checkpoint": 7, "lost_ms": 12_300});
                s
            }
        })
    });
    let v = parse(&expect(&f.ks(&["--json", "kill", "a"]), 0).0);
    assert!(v["token_after"]["run"] == 2 && v["interruption"]["ready_ms"] == 840 && v["away_us"].as_u64().unwrap() > 0, "{v}");
    assert!(f.shared.asked("GET /v1/sessions/a ") >= 5, "it asked until the run was another one");
}

#[test]
fn a_token_goes_only_where_it_belongs() {
    let f = Fake::new(|_| Answer::json(&json!([])));
    let address = f.address.to_string();
    let nowhere = tempfile::tempdir().unwrap();
    let with = |vars: &[(&str, &str)], args: &[&str]| ks(nowhere.path()).envs(vars.iter().copied()).args(args).output().unwrap();
    expect(&with(&[("KS_ADDR", &address), ("KS_TOKEN", crate::fake::TOKEN)], &["ls"]), 0);
    let (_, err) = expect(&with(&[("KS_ADDR", &address)], &["ls"]), 2);
    assert!(err.contains("KS_TOKEN"), "{err}");
    expect(&with(&[("KS_TOKEN", "x")], &["--address", &address, "ls"]), 2);
    std::fs::write(nowhere.path().join(".ks.toml"), format!("address = '{address}'")).unwrap();
    expect(&with(&[("KS_TOKEN", "x")], &["ls"]), 2);
}

#[test]
fn the_node_is_started_away_from_the_terminal_with_its_arguments_untouched() {
    use std::os::unix::fs::PermissionsExt;
    let t = tempfile::tempdir().unwrap();
    let ksd = t.path().join("ksd");
    std::fs::write(&ksd, "#!/bin/sh\necho \"args: $*; session: $(ps -o sid= -p $$ | tr -d ' ') of $$\"\nexit 3\n").unwrap();
    std::fs::set_permissions(&ksd, std::fs::Permissions::from_mode(0o755)).unwrap();
    let home = t.path().join("home");
    let o = ks(t.path()).env("KS_HOME", &home).env("KS_LIBEXEC", t.path()).args(["up"]).output().unwrap();
    let (_, err) = expect(&o, 125);
    let args = format!("args: supervise -- --data-dir {}; session: ", home.display());
    let rest = err.split(&args).nth(1).unwrap_or_else(|| panic!("{args:?} is not in {err}"));
    let ids: Vec<&str> = rest.lines().next().unwrap().split(" of ").collect();
    assert_eq!(ids[0], ids[1], "it leads its own session");
    assert_eq!(home.metadata().unwrap().permissions().mode() & 0o777, 0o700);
}
