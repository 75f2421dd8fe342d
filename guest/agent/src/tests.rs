//! Requests as a whole, over an in-memory connection: greeting, bad requests, the main window, self-checks.

use std::time::{SystemTime, UNIX_EPOCH};

use ks_proto::guest::{ExecFrame, GuestAnswer, GuestRequest, PROTOCOL, Tty};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::{
    testing::{Client, answer, connected, finish, until, within},
    wire,
};

fn refusal(answer: &GuestAnswer) -> &str {
    match answer {
        GuestAnswer::Refused { code, .. } => code,
        GuestAnswer::Hello { .. } | GuestAnswer::Ok {} | GuestAnswer::Doctor { .. } => "none",
    }
}

#[tokio::test]
async fn the_greeting_names_both_sides() {
    let (_dir, client) = connected();
    let GuestAnswer::Hello { protocol, boot_id, kernel, .. } = client.ask(&GuestRequest::Hello { protocol: PROTOCOL }).await
    else {
        panic!("no greeting")
    };
    assert_eq!((protocol, boot_id.len()), (PROTOCOL, 36));
    assert!(!kernel.is_empty());
    assert_eq!(refusal(&client.ask(&GuestRequest::Hello { protocol: PROTOCOL + 1 }).await), "bad-request");
}

#[tokio::test]
async fn a_request_that_is_none_is_refused() {
    let (_dir, client) = connected();
    // Any stream will do; its first message is a good one, so a second stream is spoilt by hand.
    let (mut reader, _writer) = client.open(&GuestRequest::Freeze {}).await;
    assert_eq!(refusal(&within("an answer", answer(&mut reader)).await), "bad-request");
    for bad in [&b"{\"op\":\"format-disk\"}"[..], b"not json", &[0xff; 10]] {
        let (mut reader, _writer) = client.open_raw(bad).await;
        assert_eq!(refusal(&within("an answer", answer(&mut reader)).await), "bad-request", "{bad:?}");
    }
}

#[tokio::test]
async fn what_only_a_vm_can_do_is_refused_outside() {
    let (_dir, client) = connected();
    for request in [GuestRequest::PowerOff {}, GuestRequest::Freeze {}, GuestRequest::Thaw {}] {
        assert_eq!(refusal(&client.ask(&request).await), "bad-request", "{request:?}");
    }
}

#[tokio::test]
async fn a_healthy_place_passes_the_self_checks() {
    let (_dir, client) = connected();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos();
    let doctor = |wall: u128| GuestRequest::Doctor { wall_unix_ns: u64::try_from(wall).unwrap() };
    let GuestAnswer::Doctor { checks } = client.ask(&doctor(now)).await else { panic!("no checks") };
    let names: Vec<_> = checks.iter().map(|c| c.name.as_str()).collect();
    assert_eq!(names, ["clock", "disk", "memory", "kernel-log", "entropy", "network", "tmux", "processes"]);
    for name in ["clock", "entropy", "network", "tmux"] {
        assert!(checks.iter().any(|c| c.name == name && c.ok && c.fix.is_empty()), "{checks:?}");
    }
    let GuestAnswer::Doctor { checks } = client.ask(&doctor(now - 10_000_000_000)).await else { panic!("no checks") };
    let clock = checks.iter().find(|c| c.name == "clock").unwrap();
    assert!(!clock.ok && !clock.fix.is_empty(), "{clock:?}");
}

fn start(argv: &[&str], cwd: &std::path::Path) -> GuestRequest {
    GuestRequest::StartMain {
        argv: argv.iter().map(|a| (*a).to_owned()).collect(),
        env: vec![("GREETING".into(), "it's #{set}".into())],
        cwd: cwd.display().to_string(),
        cols: 90,
        rows: 20,
    }
}

fn attach(cols: u16, rows: u16) -> GuestRequest {
    GuestRequest::Attach { tty: Tty { term: "xterm-ghostty-x".into(), cols, rows } }
}

/// What a tmux command prints. Programs find the session's tmux by their environment.
async fn tmux(client: &Client, args: &[&str]) -> String {
    let done = client.run(&[&["tmux"], args].concat(), b"", None).await;
    String::from_utf8(done.stdout).unwrap()
}

#[tokio::test]
async fn the_main_window_is_started_once_attached_resized_and_logged() {
    let (dir, client) = connected();
    assert_eq!(client.program(&attach(80, 24)).await.err().as_deref(), Some("not-found"));
    assert_eq!(client.program(&GuestRequest::Logs { lines: 5 }).await.err().as_deref(), Some("not-found"));

    let script = "echo \"[$GREETING|$1|$(pwd)]\"; while read line; do echo \"got $line $(stty size)\"; done; exit 9";
    let request = start(&["sh", "-c", script, "x", "a 'b' $c"], dir.path());
    assert_eq!(refusal(&client.ask(&request).await), "none");
    assert_eq!(refusal(&client.ask(&start(&["false"], dir.path())).await), "none", "it exists: nothing changes");

    let (mut reader, mut writer) = client.program(&attach(100, 30)).await.unwrap();
    let _ = until(&mut reader, format!("[it's #{{set}}|a 'b' $c|{}]", dir.path().display()).as_bytes()).await;
    writer.write_all(&ExecFrame::Stdin(b"one\r".to_vec()).encode()).await.unwrap();
    let _ = until(&mut reader, b"got one 30 100").await;

    // A second viewer of another size: who typed last decides, and it sees the whole screen.
    let (mut second, mut second_writer) = client.program(&attach(70, 15)).await.unwrap();
    let _ = until(&mut second, b"got one 30 100").await;
    within("the new size", async {
        // tmux tells the program a moment later.
        let mut seen = Vec::new();
        while !String::from_utf8_lossy(&seen).contains("got two 15 70") {
            second_writer.write_all(&ExecFrame::Stdin(b"two\r".to_vec()).encode()).await.unwrap();
            seen.extend(until(&mut second, b"got two ").await);
        }
    })
    .await;

    // The first goes away; the window stays.
    drop((reader, writer));
    second_writer.write_all(&ExecFrame::Stdin(vec![4]).encode()).await.unwrap();
    within("the end of the command", async {
        // tmux 3.3a now and then misses that its child ended (seen in 1 of 25 starts without this program); the end
        // of another child makes it look again.
        let ask = ["run-shell", "true", ";", "display-message", "-p", "-t", "=main:", "#{pane_dead_status}"];
        while tmux(&client, &ask).await != "9\n" {}
    })
    .await;
    let _ = until(&mut second, b"status 9").await;
    let (mut log, _log_writer) = client.program(&GuestRequest::Logs { lines: 50_000 }).await.unwrap();
    let mut text = String::new();
    within("the log", log.read_to_string(&mut text)).await.unwrap();
    assert!(text.contains("got one 30 100\n") && text.contains("got two 15 70\n"), "{text}");

    let (mut log, _log_writer) = client.program(&GuestRequest::Logs { lines: 2 }).await.unwrap();
    let mut text = String::new();
    within("the log", log.read_to_string(&mut text)).await.unwrap();
    assert!(text.starts_with("got two 15 70\n") && text.lines().count() == 2 && text.contains("status 9"), "{text}");

    // Detaching ends the client with code 0.
    second_writer.write_all(&ExecFrame::Stdin(vec![2, b'd']).encode()).await.unwrap();
    let done = within("the detach", finish(&mut second)).await;
    assert_eq!(done.ended.code, 0);
    assert_eq!(tmux(&client, &["kill-server"]).await, "");
    assert_eq!(client.program(&attach(80, 24)).await.err().as_deref(), Some("not-found"));
}

#[tokio::test]
async fn sync_is_answered() {
    let (_dir, client) = connected();
    let (mut reader, _writer) = client.open(&GuestRequest::Sync {}).await;
    assert_eq!(refusal(&within("an answer", answer(&mut reader)).await), "none");
    assert!(within("the end", wire::read_message(&mut reader)).await.is_err());
}
