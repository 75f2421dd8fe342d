//! The attached terminal: sizes, keys, floods, lost links, and every way out.

use crate::fake::{Answer, Fake, Shared, Socket, frame, out, send, session, started};
use crate::pty::{Terminal, contains, ended};
use ks_proto::guest::ExecFrame;
use std::process::Child;
use std::time::Duration;

/// What a full-screen program sets.
const SETS: &str = "\x1b[?1049h\x1b[?1000h\x1b[?1002h\x1b[?1006h\x1b[?2004h\x1b[?1004h\x1b[?25l\x1b[?1h\x1b=\x1b[>1u";
/// What must undo it.
const UNDOES: [&str; 10] = [
    "\x1b[?1000l",
    "\x1b[?1002l",
    "\x1b[?1006l",
    "\x1b[?2004l",
    "\x1b[?1004l",
    "\x1b[?25h",
    "\x1b[?1l",
    "\x1b>",
    "\x1b[<1u",
    "\x1b[?1049l",
];

fn fake(ws: impl Fn(String, Socket, Shared) -> futures::future::BoxFuture<'static, ()> + Send + Sync + 'static) -> Fake {
    Fake::with_links(
        |r| if r.line.contains("/v1/sessions/a") { Answer::json(&session("a", "running", 1)) } else { Answer::not_found() },
        ws,
    )
}

/// A program that sets all modes and then only listens.
fn listening() -> Fake {
    fake(|_, mut s, shared| {
        Box::pin(async move {
            started(&mut s, &shared).await;
            out(&mut s, &format!("{SETS}READY")).await;
            while frame(&mut s, &shared).await.is_some() {}
        })
    })
}

fn attach(f: &Fake, t: &Terminal) -> Child {
    let mut c = f.command();
    c.args(["attach", "a"]);
    t.start(&c)
}

fn is_as_before(t: &Terminal, before: &rustix::termios::Termios) -> bool {
    let now = t.modes();
    (now.local_modes, now.input_modes, now.output_modes) == (before.local_modes, before.input_modes, before.output_modes)
}

#[test]
fn every_way_out_puts_the_terminal_back() {
    type Leave = fn(&Terminal, &Child);
    let ways: [(&str, Leave, i32); 6] = [
        ("detach", |t, _| t.type_in(b"\r~d"), 0),
        ("cut", |t, _| t.type_in(b"\r~."), 255),
        ("SIGTERM", |_, c| signal(c, rustix::process::Signal::TERM), 143),
        ("SIGHUP", |_, c| signal(c, rustix::process::Signal::HUP), 129),
        ("SIGKILL", |_, c| signal(c, rustix::process::Signal::KILL), 137),
        ("SIGABRT", |_, c| signal(c, rustix::process::Signal::ABORT), 134),
    ];
    for (name, leave, code) in ways {
        let f = listening();
        let t = Terminal::new(100, 30);
        let before = t.modes();
        let mut c = attach(&f, &t);
        t.wait("READY");
        assert!(!is_as_before(&t, &before), "{name}: raw while attached");
        t.forget();
        leave(&t, &c);
        assert_eq!(ended(&mut c), code, "{name}: {:?}", String::from_utf8_lossy(&t.seen()));
        for undo in UNDOES {
            t.wait(undo);
        }
        // After SIGKILL another process restores the line discipline, right after the modes.
        let until = std::time::Instant::now() + Duration::from_secs(5);
        while !is_as_before(&t, &before) {
            assert!(std::time::Instant::now() < until, "{name}: the line discipline stays raw");
            std::thread::park_timeout(Duration::from_millis(5));
        }
    }
}

fn signal(c: &Child, s: rustix::process::Signal) {
    rustix::process::kill_process(rustix::process::Pid::from_child(c), s).unwrap();
}

#[test]
fn the_size_travels_first_and_changes_follow() {
    let f = listening();
    let t = Terminal::new(132, 43);
    let mut c = attach(&f, &t);
    t.wait("READY");
    f.shared
        .with(|s| assert!(s.said[0].contains(r#""cols":132,"rows":43"#) && s.said[0].contains("xterm-256color"), "{:?}", s.said));
    t.resize(90, 20);
    f.shared.wait("the new size", |s| s.said.iter().any(|w| w == "Resize(90, 20)"));
    t.type_in(b"\r~d");
    assert_eq!(ended(&mut c), 0);
}

#[test]
fn raw_bytes_pass_both_ways_and_a_lone_prefix_key_is_not_held_back() {
    let f = fake(|_, mut s, shared| {
        Box::pin(async move {
            started(&mut s, &shared).await;
            send(&mut s, ExecFrame::Stdout(b"READY\xe2".to_vec())).await;
            shared.gate().await;
            send(&mut s, ExecFrame::Stdout(b"\x94\x80\xff\xfe|end".to_vec())).await;
            while frame(&mut s, &shared).await.is_some() {}
        })
    });
    let t = Terminal::new(80, 24);
    let mut c = attach(&f, &t);
    t.wait("READY");
    f.shared.with(|s| s.go = true);
    t.wait("|end");
    assert!(contains(&t.seen(), b"\xe2\x94\x80\xff\xfe|end"), "one character in two parts, and bytes that are none");
    t.type_in(b"\x03\x1b[A\xc3\x28\x00\r");
    f.shared.wait("the keys", |s| s.stdin == b"\x03\x1b[A\xc3\x28\x00\r");
    t.type_in(b"~");
    f.shared.wait("the lone prefix", |s| s.stdin.ends_with(b"\r~"));
    t.type_in(b"/bin\r~d");
    assert_eq!(ended(&mut c), 0);
    f.shared.wait("what was typed before leaving", |s| s.stdin.ends_with(b"\r~/bin\r"));
}

#[test]
fn a_large_paste_arrives_whole_through_a_slow_link() {
    let f = fake(|_, mut s, shared| {
        Box::pin(async move {
            started(&mut s, &shared).await;
            out(&mut s, "READY").await;
            // Nothing is taken until the test has pasted for a while.
            shared.gate().await;
            while frame(&mut s, &shared).await.is_some() {}
        })
    });
    let t = Terminal::new(80, 24);
    let mut c = attach(&f, &t);
    t.wait("READY");
    let line = "pasted text with a ~. and a \r~d in it, ä\n";
    let paste: Vec<u8> = format!("\x1b[200~{}\x1b[201~", line.repeat(240_000 / line.len())).into_bytes();
    std::thread::scope(|s| {
        s.spawn(|| t.type_in(&paste));
        std::thread::park_timeout(Duration::from_millis(300));
        f.shared.with(|s| s.go = true);
    });
    f.shared.wait("the paste", |s| s.stdin.len() >= paste.len());
    f.shared.with(|s| assert!(s.stdin == paste, "{} bytes pasted, {} arrived", paste.len(), s.stdin.len()));
    t.type_in(b"\r~d");
    assert_eq!(ended(&mut c), 0);
}

#[test]
fn a_flood_stops_within_a_second_of_ctrl_c() {
    let f = fake(|_, s, shared| {
        Box::pin(async move {
            use futures::{SinkExt, StreamExt};
            let mut s = s;
            started(&mut s, &shared).await;
            let (mut tx, mut rx) = s.split();
            let flood = ExecFrame::Stdout("y\r\n".repeat(5000).into_bytes()).encode_message();
            loop {
                tokio::select! {
                    m = rx.next() => if m.is_some_and(|m| m.is_ok_and(|m| m.into_data().ends_with(b"\x03"))) { break },
                    sent = tx.send(tokio_tungstenite::tungstenite::Message::binary(flood.clone())) => if sent.is_err() { return },
                }
            }
            let end = |f: ExecFrame| tokio_tungstenite::tungstenite::Message::binary(f.encode_message());
            let _ = tx.send(end(ExecFrame::Stdout(b"^C STOPPED".to_vec()))).await;
            let _ = tx.send(end(ExecFrame::Exit { code: 130, signal: 2 })).await;
            while rx.next().await.is_some() {}
        })
    });
    let t = Terminal::new(80, 24);
    let mut c = attach(&f, &t);
    t.wait("y\r\ny\r\ny\r\n");
    t.forget();
    t.wait("y\r\n");
    t.type_in(b"\x03");
    let took = t.wait("^C STOPPED");
    assert!(took < Duration::from_secs(5), "{took:?}");
    assert_eq!(ended(&mut c), 130, "the program's code passes through");
}

#[test]
fn a_lost_link_comes_back_by_itself_and_nothing_untyped_reaches_the_program() {
    let f = fake(|_, mut s, shared| {
        Box::pin(async move {
            started(&mut s, &shared).await;
            if shared.with(|s| s.links) == 1 {
                // It asks the terminal who it is, and dies before the answer.
                out(&mut s, &format!("{SETS}\x1b[c\x1b[>cFIRST")).await;
                shared.gate().await;
                return;
            }
            out(&mut s, "\x1b[?1049h\x1b[cSECOND").await;
            while frame(&mut s, &shared).await.is_some() {}
        })
    });
    let t = Terminal::new(80, 24);
    let mut c = attach(&f, &t);
    t.wait("FIRST");
    t.resize(101, 31);
    t.forget();
    f.shared.with(|s| s.go = true);
    t.wait("link to a lost");
    t.wait("SECOND");
    let seen = t.seen();
    let at = |p: &str| seen.windows(p.len()).position(|w| w == p.as_bytes()).unwrap_or_else(|| panic!("{p:?} not seen"));
    for undo in UNDOES {
        assert!(at(undo) < at("SECOND"), "{undo:?} comes before the new picture");
    }
    f.shared
        .wait("the size of now", |s| s.said.iter().filter(|w| w.starts_with("start")).nth(1).is_some_and(|w| w.contains("101")));
    // The answers to the first program's questions arrive late, then that to the second's, between real keys.
    t.type_in(b"a\x1b[?62;1c\x1b[>41;354;0cb\x1b[?62;9cc");
    f.shared.wait("the keys", |s| s.stdin.ends_with(b"c"));
    f.shared.with(|s| assert_eq!(String::from_utf8_lossy(&s.stdin), "ab\x1b[?62;9cc"));
    t.type_in(b"\r~d");
    assert_eq!(ended(&mut c), 0);
}

#[test]
fn while_the_node_is_away_the_cut_key_works_and_keys_are_not_kept() {
    let f = fake(|_, mut s, shared| {
        Box::pin(async move {
            started(&mut s, &shared).await;
            out(&mut s, "READY").await;
            shared.gate().await;
        })
    });
    let t = Terminal::new(80, 24);
    let mut c = attach(&f, &t);
    t.wait("READY");
    // A node whose file is gone cannot be found again.
    std::fs::write(f.home.path().join("api.json"), r#"{"url": "http://127.0.0.1:1", "token": "a-token", "pid": 1}"#).unwrap();
    f.shared.with(|s| s.go = true);
    t.wait("reconnecting");
    t.type_in(b"rm -rf /\r");
    t.type_in(b"~.");
    assert_eq!(ended(&mut c), 255);
    assert!(f.shared.with(|s| s.stdin.is_empty()), "what is typed at a dead screen is not kept for a live one");
}

#[test]
fn a_session_that_was_parked_or_removed_is_not_waited_for() {
    for (state, code, words) in
        [("parked", 0, "was parked"), ("stopped", 0, "was stopped"), ("failed", 125, "could not be brought back")]
    {
        let f = Fake::with_links(
            move |_| Answer::json(&session("a", state, 1)),
            |_, mut s, shared| {
                Box::pin(async move {
                    started(&mut s, &shared).await;
                    out(&mut s, "READY").await;
                })
            },
        );
        let t = Terminal::new(80, 24);
        let mut c = attach(&f, &t);
        assert_eq!(ended(&mut c), code, "{state}: {}", String::from_utf8_lossy(&t.seen()));
        t.wait(words);
        assert_eq!(f.shared.with(|s| s.links), 1, "{state}: attaching again would wake it");
    }
}

#[test]
fn a_session_that_is_still_being_parked_is_not_woken_by_its_terminal() {
    for (state, words) in [("parked", "was parked"), ("stopped", "was stopped")] {
        let slot = std::sync::Arc::new(std::sync::OnceLock::<Shared>::new());
        let inner = slot.clone();
        let f = Fake::with_links(
            // The guest's end of the link goes first; the session rests only when its checkpoint is stored.
            move |_| Answer::json(&session("a", if inner.wait().with(|s| s.links) < 2 { "running" } else { state }, 1)),
            |line, mut s, shared| {
                Box::pin(async move {
                    started(&mut s, &shared).await;
                    shared.with(|s| s.said.push(line));
                    if shared.with(|s| s.links) == 1 {
                        out(&mut s, "READY").await;
                        return;
                    }
                    crate::exec::refuse(&mut s, "resting").await;
                    while frame(&mut s, &shared).await.is_some() {}
                })
            },
        );
        assert!(slot.set(f.shared.clone()).is_ok());
        let t = Terminal::new(80, 24);
        let mut c = attach(&f, &t);
        assert_eq!(ended(&mut c), 0, "{state}: {}", String::from_utf8_lossy(&t.seen()));
        t.wait(words);
        let lines: Vec<String> = f.shared.with(|s| s.said.iter().filter(|w| w.starts_with("GET")).cloned().collect());
        assert_eq!(lines.len(), 2, "{state}: {lines:?}");
        assert!(
            lines[0].contains("/attach ") && lines[1].contains("/attach?wake=0 "),
            "a person wakes, a link does not: {lines:?}"
        );
    }
}

#[test]
fn exec_in_a_terminal_gets_one_and_passes_the_code() {
    let f = fake(|_, mut s, shared| {
        Box::pin(async move {
            started(&mut s, &shared).await;
            out(&mut s, "hello from a terminal\r\n").await;
            send(&mut s, ExecFrame::Exit { code: 5, signal: 0 }).await;
            frame(&mut s, &shared).await;
        })
    });
    let t = Terminal::new(77, 22);
    let before = t.modes();
    let mut command = f.command();
    command.args(["exec", "a", "--", "tool"]);
    let mut c = t.start(&command);
    assert_eq!(ended(&mut c), 5);
    t.wait("hello from a terminal");
    assert!(is_as_before(&t, &before));
    assert!(!contains(&t.seen(), b"?1049l"), "no jump out of a screen that was never entered");
    f.shared.with(|s| assert!(s.said[0].contains(r#""cols":77,"rows":22"#), "{:?}", s.said));
}

/// `ks attach a` with the addresses of both.
fn attach_to_both(first: &Fake, second: &Fake, t: &Terminal) -> Child {
    let mut c = first.command();
    c.env("KS_ADDR", format!("http://{},http://{}", first.address, second.address)).env("KS_TOKEN", crate::fake::TOKEN);
    c.args(["attach", "a"]);
    t.start(&c)
}

#[test]
fn when_its_node_dies_the_terminal_goes_on_through_another_and_redraws() {
    let first = listening();
    let second = fake(|_, mut s, shared| {
        Box::pin(async move {
            started(&mut s, &shared).await;
            out(&mut s, "AGAIN").await;
            while frame(&mut s, &shared).await.is_some() {}
        })
    });
    let t = Terminal::new(100, 30);
    let mut c = attach_to_both(&first, &second, &t);
    t.wait("READY");
    t.forget();
    drop(first);
    t.wait("link to a lost");
    t.wait("AGAIN");
    // What the first one's program had set is undone before the second one draws.
    let seen = t.seen();
    let at = |part: &str| seen.windows(part.len()).position(|w| w == part.as_bytes());
    assert!(at("\x1b[?1049l") < at("AGAIN") && at("\x1b[?1049l").is_some(), "{:?}", String::from_utf8_lossy(&seen));
    t.type_in(b"\r~d");
    assert_eq!(ended(&mut c), 0);
}

#[test]
fn a_session_that_moved_is_followed_although_its_old_link_stays_open() {
    // The old owner is stopped: its links stay open and silent, and questions are answered by the other node.
    let moved = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let says = moved.clone();
    let answer = move |r: &crate::fake::Request| {
        let mut s = session("a", "running", 1);
        let on = says.load(std::sync::atomic::Ordering::SeqCst);
        (s["token"]["epoch"], s["node"]) = if on { (2.into(), "n2".into()) } else { (1.into(), "n1".into()) };
        if r.line.contains("/v1/sessions/a") { Answer::json(&s) } else { Answer::not_found() }
    };
    let ws = |_, mut s: Socket, shared: Shared| -> futures::future::BoxFuture<'static, ()> {
        Box::pin(async move {
            started(&mut s, &shared).await;
            out(&mut s, &format!("LINK{}", shared.with(|s| s.links))).await;
            while frame(&mut s, &shared).await.is_some() {}
        })
    };
    let first = Fake::with_links(answer.clone(), ws);
    let second = Fake::with_links(answer, ws);
    let t = Terminal::new(100, 30);
    let mut c = attach_to_both(&first, &second, &t);
    t.wait("LINK1");
    // Before the third question is asked the answer to an earlier one has told where it is.
    first.shared.wait("it looks where the session is", |s| {
        s.requests.iter().filter(|r| r.line.starts_with("GET /v1/sessions/a ")).count() >= 3
    });
    moved.store(true, std::sync::atomic::Ordering::SeqCst);
    t.wait("it runs on n2 now");
    t.wait("LINK2");
    t.type_in(b"\r~d");
    assert_eq!(ended(&mut c), 0);
}
