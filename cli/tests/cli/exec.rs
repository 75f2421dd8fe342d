//! `ks exec` in pipes: exact bytes, codes, ends of input, signals, lost links.

use crate::fake::{Answer, Fake, Shared, Socket, expect, frame, out, send, session, started};
use futures::{SinkExt, StreamExt};
use ks_proto::guest::ExecFrame;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::process::Stdio;
use tokio_tungstenite::tungstenite::Message;

/// A guest whose programs are named by the first word.
async fn guest(mut s: Socket, shared: Shared) {
    let start = started(&mut s, &shared).await;
    let argv: Vec<&str> = start["argv"].as_array().unwrap().iter().map(|v| v.as_str().unwrap()).collect();
    match argv.as_slice() {
        ["cat"] => {
            while let Some(f) = frame(&mut s, &shared).await {
                let go_on = match f {
                    ExecFrame::Stdin(b) => send(&mut s, ExecFrame::Stdout(b)).await,
                    ExecFrame::StdinEof => {
                        send(&mut s, ExecFrame::Exit { code: 0, signal: 0 }).await;
                        false
                    }
                    _ => true,
                };
                if !go_on {
                    break;
                }
            }
        }
        ["exit", n] => _ = send(&mut s, ExecFrame::Exit { code: n.parse().unwrap(), signal: 0 }).await,
        ["both"] => {
            out(&mut s, "out\n").await;
            send(&mut s, ExecFrame::Stderr(b"err\n".to_vec())).await;
            send(&mut s, ExecFrame::Exit { code: 3, signal: 0 }).await;
        }
        ["sleep"] => {
            while let Some(f) = frame(&mut s, &shared).await {
                if let ExecFrame::Signal(n) = f {
                    send(&mut s, ExecFrame::Exit { code: 128 + n, signal: n }).await;
                }
            }
        }
        ["stuck"] => while frame(&mut s, &shared).await.is_some() {},
        ["after-eof"] => {
            while !matches!(frame(&mut s, &shared).await, Some(ExecFrame::StdinEof) | None) {}
            shared.gate().await;
            out(&mut s, "still here\n").await;
            send(&mut s, ExecFrame::Exit { code: 0, signal: 0 }).await;
        }
        ["flood"] => while out(&mut s, &"y\n".repeat(10_000)).await {},
        ["cut"] => {
            out(&mut s, "half").await;
            return;
        }
        ["silent"] => refuse(&mut s, "guest-silent").await,
        ["missing"] => refuse(&mut s, "not-found").await,
        ["data"] => refuse(&mut s, "not-executable").await,
        other => panic!("{other:?}"),
    }
    // Closing with input unread would reset the link, and the reset may overtake the exit frame.
    while let Some(Ok(_)) = s.next().await {}
}

pub async fn refuse(s: &mut Socket, code: &str) {
    let e = json!({"schema": "ks.error.v1", "code": code, "what": "the what", "why": "the why", "next": "the next"});
    s.send(Message::text(e.to_string())).await.unwrap();
    let _ = s.close(None).await;
}

fn fake() -> Fake {
    Fake::with_links(
        |r| if r.line.contains("/v1/sessions/a ") { Answer::json(&session("a", "running", 1)) } else { Answer::not_found() },
        |line, mut s, shared| {
            Box::pin(async move {
                if line.contains("/sessions/nobody/") {
                    started(&mut s, &shared).await;
                    return refuse(&mut s, "not-found").await;
                }
                guest(s, shared).await;
            })
        },
    )
}

#[test]
fn bytes_in_are_bytes_out_and_the_end_of_input_ends_cat() {
    let f = fake();
    let all: Vec<u8> = (0..3_000_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let mut c = f.command().args(["exec", "a", "--", "cat"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdin = c.stdin.take().unwrap();
    let input = all.clone();
    let writer = std::thread::spawn(move || stdin.write_all(&input).unwrap());
    let o = c.wait_with_output().unwrap();
    writer.join().unwrap();
    expect(&o, 0);
    assert!(o.stdout == all, "{} bytes in, {} out", all.len(), o.stdout.len());
}

#[test]
fn codes_pass_through_and_failures_of_ours_have_their_own() {
    let f = fake();
    for (args, code) in [
        (&["exit", "0"][..], 0),
        (&["exit", "1"], 1),
        (&["exit", "77"], 77),
        (&["missing"], 127),
        (&["data"], 126),
        (&["cut"], 255),
        (&["silent"], 255),
    ] {
        let o = f.ks(&[&["exec", "a", "--"][..], args].concat());
        expect(&o, code);
    }
    let (_, err) = expect(&f.ks(&["exec", "nobody", "--", "grep", "x"]), 125);
    assert!(err.contains("the what"));
    let o = f.ks(&["exec", "a", "--", "both"]);
    let (out, err) = expect(&o, 3);
    assert_eq!((out.as_str(), err.as_str()), ("out\n", "err\n"));
}

#[test]
fn json_output_is_one_object_a_line_with_the_code_last() {
    let f = fake();
    let (out, err) = expect(&f.ks(&["--json", "exec", "a", "--", "both"]), 3);
    let lines: Vec<Value> = out.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert!(lines.iter().all(|l| l["schema"] == "ks.exec.v1") && err.is_empty());
    assert_eq!((&lines[0]["type"], &lines[0]["base64"]), (&json!("stdout"), &json!("b3V0Cg==")));
    assert_eq!((&lines[1]["type"], &lines[2]["type"], &lines[2]["code"]), (&json!("stderr"), &json!("exit"), &json!(3)));
}

#[test]
fn a_program_runs_on_after_the_end_of_its_input() {
    let f = fake();
    let c = f.command().args(["exec", "a", "--", "after-eof"]).stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    f.shared.wait("the end of input", |s| s.said.iter().any(|w| w == "StdinEof"));
    f.shared.with(|s| s.go = true);
    let (out, _) = expect(&c.wait_with_output().unwrap(), 0);
    assert_eq!(out, "still here\n");
}

#[test]
fn signals_reach_the_program_and_its_death_is_the_exit_code() {
    let f = fake();
    let mut c = f.command().args(["exec", "a", "--", "sleep"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    // Input is read once the signal handlers are in place.
    c.stdin.as_mut().unwrap().write_all(b"x").unwrap();
    f.shared.wait("the input", |s| s.stdin == b"x");
    rustix::process::kill_process(rustix::process::Pid::from_child(&c), rustix::process::Signal::TERM).unwrap();
    f.shared.wait("the signal", |s| s.said.iter().any(|w| w == "Signal(15)"));
    expect(&c.wait_with_output().unwrap(), 143);
}

#[test]
fn a_stuck_guest_does_not_hold_up_who_wants_to_leave() {
    use rustix::process::Signal;
    for (sent, code) in [(&[Signal::TERM, Signal::TERM][..], 143), (&[Signal::INT, Signal::INT], 130), (&[Signal::HUP], 129)] {
        let f = fake();
        let mut c = f.command().args(["exec", "a", "--", "stuck"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        c.stdin.as_mut().unwrap().write_all(b"x").unwrap();
        f.shared.wait("the input", |s| s.stdin == b"x");
        let begun = std::time::Instant::now();
        for (n, signal) in sent.iter().enumerate() {
            rustix::process::kill_process(rustix::process::Pid::from_child(&c), *signal).unwrap();
            if n == 0 {
                f.shared.wait("the signal", |s| s.said.iter().any(|w| w.starts_with("Signal(")));
            }
        }
        expect(&c.wait_with_output().unwrap(), code);
        assert!(begun.elapsed().as_secs() < 30, "{:?}", begun.elapsed());
    }
}

#[test]
fn a_reader_that_goes_away_ends_the_program() {
    let f = fake();
    let mut c = f.command().args(["exec", "a", "--", "flood"]).stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let mut some = [0; 1000];
    c.stdout.take().unwrap().read_exact(&mut some).unwrap();
    assert_eq!(c.wait().unwrap().code(), Some(141), "as a pipe into head ends other programs");
}

#[test]
fn attach_is_refused_where_there_is_no_terminal() {
    let f = fake();
    let (_, err) = expect(&f.ks(&["attach", "a"]), 2);
    assert!(err.contains("terminal") && err.contains("ks exec a"), "{err}");
    let (_, err) = expect(&f.ks(&["exec", "-t", "a", "--", "cat"]), 2);
    assert!(err.contains("terminal"), "{err}");
    assert_eq!(f.shared.with(|s| s.links), 0);
}
