//! `ks run` without a terminal: the plan, the upload, what is left behind when it goes wrong; and `ks cp`.

use crate::fake::{Answer, Fake, expect, frame, send, session, started};
use ks_proto::guest::ExecFrame;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::Read;
use std::process::{Command, Stdio};

fn made() -> Answer {
    Answer::lines(&[
        json!({"type": "step", "what": "golden", "done": 0, "total": 0}),
        json!({"type": "result", "result": session("otter", "running", 1)}),
    ])
}

fn repository() -> tempfile::TempDir {
    let t = tempfile::tempdir().unwrap();
    let dir = t.path().join("repo");
    std::fs::create_dir(&dir).unwrap();
    let script = "git init -q . && mkdir -p src node_modules && echo node_modules > .gitignore && echo code > src/a && chmod 755 src/a \
        && echo big > node_modules/x && ln -s /etc/passwd link";
    assert!(Command::new("sh").args(["-ec", script]).current_dir(&dir).status().unwrap().success());
    t
}

/// Files of a tar: mode and contents, or the link's text.
fn unpacked(bytes: &[u8]) -> BTreeMap<String, (u32, String)> {
    let mut a = tar::Archive::new(bytes);
    a.entries()
        .unwrap()
        .map(|e| {
            let mut e = e.unwrap();
            let name = e.path().unwrap().display().to_string();
            let mode = e.header().mode().unwrap() & 0o777;
            let mut text = String::new();
            match e.link_name().unwrap() {
                Some(l) => text = format!("-> {}", l.display()),
                None => _ = e.read_to_string(&mut text),
            }
            (name, (mode, text))
        })
        .collect()
}

#[test]
fn the_plan_is_shown_the_folder_travels_and_the_name_is_all_of_stdout() {
    let f = Fake::new(|r| match r.line.as_str() {
        l if l.starts_with("POST /v1/sessions ") => made(),
        l if l.starts_with("PUT ") => Answer::json(&json!({"bytes": 1})),
        _ => Answer::json(&session("otter", "running", 1)),
    });
    let t = repository();
    let dir = t.path().join("repo");
    let o = f
        .command()
        .args(["run", "--env", "K=V", "--sync"])
        .arg(&dir)
        .args(["--", "make", "test"])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let (out, err) = expect(&o, 0);
    assert_eq!(out, "otter\n");
    assert!(err.contains("-> /workspace/repo") && err.contains("skipped node_modules"), "{err}");
    f.shared.with(|s| {
        let lines: Vec<&str> = s.requests.iter().map(|r| r.line.trim_end_matches(" HTTP/1.1")).collect();
        assert_eq!(
            lines[..3],
            ["POST /v1/sessions", "PUT /v1/sessions/otter/files?path=/workspace/repo", "POST /v1/sessions/otter/start"]
        );
        let create: Value = serde_json::from_slice(&s.requests[0].body).unwrap();
        assert!(create["main"].is_null(), "the command waits for its files: {create}");
        let files = unpacked(&s.requests[1].body);
        assert_eq!(files["src/a"], (0o755, "code\n".into()));
        assert_eq!(files["link"].1, "-> /etc/passwd");
        assert!(files.contains_key(".git/HEAD") && !files.keys().any(|k| k.starts_with("node_modules")), "{:?}", files.keys());
        let start: Value = serde_json::from_slice(&s.requests[2].body).unwrap();
        assert_eq!(
            (&start["command"], &start["cwd"], &start["env"]),
            (&json!(["make", "test"]), &json!("/workspace/repo"), &json!([["K", "V"]]))
        );
    });
}

#[test]
fn without_files_the_command_starts_with_the_session() {
    let f =
        Fake::new(
            |r| if r.line.starts_with("POST /v1/sessions ") { made() } else { Answer::json(&session("otter", "running", 1)) },
        );
    std::fs::write(f.home.path().join(".ks.toml"), "memory_mib = 512\ncadence_s = 5").unwrap();
    let o = f
        .command()
        .args(["--json", "run", "--cadence", "7", "--", "true"])
        .env("KS_MEMORY", "1024")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let v: Value = serde_json::from_str(&expect(&o, 0).0).unwrap();
    assert_eq!((&v["schema"], &v["name"]), (&json!("ks.session.v1"), &json!("otter")));
    let create: Value = f.shared.with(|s| serde_json::from_slice(&s.requests[0].body).unwrap());
    assert_eq!(
        (&create["memory_mib"], &create["cadence_s"], &create["main"]["command"]),
        (&json!(1024), &json!(7), &json!(["true"]))
    );
}

#[test]
fn an_upload_that_fails_leaves_no_session_behind() {
    let f = Fake::new(|r| match r.line.as_str() {
        l if l.starts_with("POST /v1/sessions ") => made(),
        l if l.starts_with("PUT ") => Answer::error(507, "disk-full"),
        _ => Answer::json(&session("otter", "running", 1)),
    });
    let t = repository();
    let o = f
        .command()
        .args(["run", "--sync"])
        .arg(t.path().join("repo"))
        .args(["--", "true"])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let (out, err) = expect(&o, 125);
    assert!(out.is_empty() && err.contains("the why") && err.contains("otter was taken back"), "{err}");
    assert_eq!((f.shared.asked("DELETE /v1/sessions/otter?force=1"), f.shared.asked("POST /v1/sessions/otter/start")), (1, 0));
}

/// A node that is at work on the session until the test has sent its signal.
fn slow_to_make() -> Fake {
    let slot = std::sync::Arc::new(std::sync::OnceLock::<crate::fake::Shared>::new());
    let inner = slot.clone();
    let f = Fake::new(move |r| {
        if r.line.starts_with("POST /v1/sessions ") {
            inner.wait().wait("the signal", |s| s.go);
            return made();
        }
        Answer::json(&session("otter", "running", 1))
    });
    assert!(slot.set(f.shared.clone()).is_ok());
    f
}

/// A `ks` whose create call has reached the node.
fn begun(f: &Fake, args: &[&str]) -> std::process::Child {
    let mut c = f.command();
    c.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let c = c.spawn().unwrap();
    f.shared.wait("the create call", |s| !s.requests.is_empty());
    c
}

#[test]
fn what_ends_it_while_it_starts_leaves_nothing_behind() {
    use rustix::process::Signal;
    for (sent, code) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)] {
        let f = slow_to_make();
        let mut c = begun(&f, &["run", "-d", "--", "true"]);
        rustix::process::kill_process(rustix::process::Pid::from_child(&c), sent).unwrap();
        let mut first = [0; 8];
        c.stderr.as_mut().unwrap().read_exact(&mut first).unwrap();
        assert_eq!(&first, b"stopping");
        f.shared.with(|s| s.go = true);
        let (out, _) = expect(&c.wait_with_output().unwrap(), code);
        assert_eq!((out.as_str(), f.shared.asked("DELETE /v1/sessions/otter?force=1")), ("", 1), "{sent:?}");
    }
}

#[test]
fn a_window_that_closes_while_it_starts_takes_the_session_back() {
    let f = slow_to_make();
    // Nobody reads what it says, and more than one signal comes.
    let mut c = begun(&f, &["run", "--", "true"]);
    drop((c.stdout.take(), c.stderr.take()));
    let pid = rustix::process::Pid::from_child(&c);
    rustix::process::kill_process(pid, rustix::process::Signal::HUP).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    // Both are delivered: none is pending or ignored any more.
    let until = std::time::Instant::now() + crate::fake::DEADLINE;
    let status = format!("/proc/{}/status", c.id());
    let pending = || {
        let text = std::fs::read_to_string(&status).unwrap();
        let of = |k: &str| text.lines().find_map(|l| l.strip_prefix(k)).map(|v| u64::from_str_radix(v.trim(), 16).unwrap());
        of("SigPnd:").unwrap() | of("ShdPnd:").unwrap()
    };
    while pending() != 0 {
        assert!(std::time::Instant::now() < until, "the signals stay pending");
        std::thread::yield_now();
    }
    f.shared.with(|s| s.go = true);
    let code = c.wait().unwrap().code();
    assert!(matches!(code, Some(129 | 143)), "{code:?}");
    assert_eq!(f.shared.asked("DELETE /v1/sessions/otter?force=1"), 1);
}

#[test]
fn a_taken_name_offers_attach() {
    let f = Fake::new(|r| {
        if r.line.starts_with("POST ") { Answer::error(409, "exists") } else { Answer::json(&session("otter", "parked", 1)) }
    });
    let (_, err) = expect(&f.ks(&["run", "--name", "otter", "--", "true"]), 125);
    assert!(err.contains("ks attach otter"), "{err}");
    assert_eq!(f.shared.asked("DELETE"), 0, "somebody else's session is not touched");
}

#[test]
fn files_are_copied_in_and_out_by_their_names() {
    let tar_of_one = {
        let mut b = tar::Builder::new(vec![]);
        let mut h = tar::Header::new_gnu();
        h.set_size(5);
        h.set_mode(0o640);
        b.append_data(&mut h, "remote", &b"hello"[..]).unwrap();
        b.into_inner().unwrap()
    };
    let f = Fake::with_links(
        move |r| {
            if r.line.starts_with("GET ") {
                Answer { status: 200, body: tar_of_one.clone(), cut: false }
            } else {
                Answer::json(&json!({}))
            }
        },
        |_, mut s, shared| {
            Box::pin(async move {
                let start = started(&mut s, &shared).await;
                let folder = start["argv"][2] == "/workspace/dir";
                send(&mut s, ExecFrame::Exit { code: u8::from(!folder), signal: 0 }).await;
                frame(&mut s, &shared).await;
            })
        },
    );
    let here = f.home.path();
    std::fs::write(here.join("notes.txt"), "mine").unwrap();
    expect(&f.ks(&["cp", "notes.txt", "a:dir"]), 0);
    expect(&f.ks(&["cp", "notes.txt", "a:/etc/other"]), 0);
    f.shared.with(|s| {
        assert!(s.requests[0].line.contains("path=/workspace/dir "), "{}", s.requests[0].line);
        assert_eq!(unpacked(&s.requests[0].body).into_keys().collect::<Vec<_>>(), ["notes.txt"]);
        assert!(s.requests[1].line.contains("path=/etc "), "{}", s.requests[1].line);
        assert_eq!(unpacked(&s.requests[1].body)["other"].1, "mine");
    });
    expect(&f.ks(&["cp", "a:/x/remote", "local"]), 0);
    expect(&f.ks(&["cp", "a:/x/remote", "."]), 0);
    assert_eq!(std::fs::read_to_string(here.join("local")).unwrap(), "hello");
    assert_eq!(std::fs::read_to_string(here.join("remote")).unwrap(), "hello");
}
