//! Programs over an in-memory connection, with real shells and terminals. Names of cases are those of CASES (T*).

use std::time::Instant;

use ks_proto::guest::{ExecFrame, GuestRequest};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::unix::pipe,
};

use crate::{
    exec::Ended,
    testing::{connected, exec_request, finish, tty, until, within},
    wire,
};

fn noise(bytes: usize) -> Vec<u8> {
    let mut data = vec![0; bytes];
    getrandom::fill(&mut data).unwrap();
    data
}

const OK: Ended = Ended { code: 0, signal: 0 };

#[tokio::test]
async fn input_and_output_are_byte_exact() {
    let (_dir, client) = connected();
    let data = noise(3_000_001);
    let done = client.run(&["cat"], &data, None).await;
    assert_eq!(done.ended, OK);
    assert!(done.stdout == data, "{} of {} bytes came back", done.stdout.len(), data.len());
    assert!(done.stderr.is_empty());
}

#[tokio::test]
async fn outputs_are_apart_and_the_code_is_the_programs() {
    let (_dir, client) = connected();
    let done = client.run(&["sh", "-c", "printf out; printf err >&2; pwd; exit 7"], b"", None).await;
    assert_eq!((done.stdout.as_slice(), done.stderr.as_slice()), (&b"out/\n"[..], &b"err"[..]));
    assert_eq!(done.ended, Ended { code: 7, signal: 0 });
}

#[tokio::test]
async fn the_environment_is_set_and_overridden() {
    let (_dir, client) = connected();
    let GuestRequest::Exec { argv, cwd, user, tty, .. } = exec_request(&["sh", "-c", "echo $LANG:$PATH:$X"], None) else {
        unreachable!("an exec request")
    };
    let env = vec![("X".to_owned(), "a b".to_owned()), ("PATH".into(), "/bin:/usr/bin".into())];
    let (mut reader, _writer) = client.program(&GuestRequest::Exec { argv, env, cwd, user, tty }).await.unwrap();
    assert_eq!(within("the end", finish(&mut reader)).await.stdout, b"C.UTF-8:/bin:/usr/bin:a b\n");
}

#[tokio::test]
async fn what_cannot_run_is_refused_before_any_frame() {
    let (dir, client) = connected();
    let plain = dir.path().join("plain");
    std::fs::write(&plain, "no program").unwrap();
    let broken = dir.path().join("broken");
    std::fs::write(&broken, "#!/no/such/interpreter\n").unwrap();
    std::fs::set_permissions(&broken, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let cases = [
        ("no-such-program-here", "not-found"),
        (broken.to_str().unwrap(), "not-found"),
        (plain.to_str().unwrap(), "not-executable"),
        ("/", "not-executable"),
        ("", "bad-request"),
        ("a\0b", "bad-request"),
    ];
    for (program, code) in cases {
        assert_eq!(client.exec(&[program], None).await.err().as_deref(), Some(code), "{program:?}");
    }
    assert_eq!(client.exec(&[], None).await.err().as_deref(), Some("bad-request"));
    let nowhere =
        GuestRequest::Exec { argv: vec!["true".into()], env: vec![], cwd: Some("/no/where".into()), user: None, tty: None };
    assert_eq!(client.program(&nowhere).await.err().as_deref(), Some("bad-request"));
    let nobody =
        GuestRequest::Exec { argv: vec!["true".into()], env: vec![], cwd: None, user: Some("no-such-user".into()), tty: None };
    assert_eq!(client.program(&nobody).await.err().as_deref(), Some("bad-request"));
}

#[tokio::test]
async fn an_end_by_signal_is_told() {
    let (_dir, client) = connected();
    let done = client.run(&["sh", "-c", "kill -TERM $$"], b"", None).await;
    assert_eq!(done.ended, Ended { code: 143, signal: 15 });
}

#[tokio::test]
async fn a_signal_reaches_the_whole_group() {
    let (_dir, client) = connected();
    let child = r#"sh -c 'trap "echo child; exit" TERM; echo ready; while :; do sleep 0.01; done'"#;
    let script = format!("exec 2>/dev/null; trap : TERM; {child} & wait; wait; exit 4");
    let (mut reader, mut writer) = client.exec(&["sh", "-c", &script], None).await.unwrap();
    let _ = until(&mut reader, b"ready\n").await;
    writer.write_all(&ExecFrame::Signal(15).encode()).await.unwrap();
    let done = within("the end", finish(&mut reader)).await;
    assert_eq!((String::from_utf8_lossy(&done.stdout).as_ref(), done.ended.code), ("child\n", 4));
}

#[tokio::test]
async fn t1_the_size_is_there_before_the_first_byte() {
    let (_dir, client) = connected();
    for n in 0..100_u16 {
        let (cols, rows) = (40 + n, 10 + n % 37);
        let done = client.run(&["stty", "size"], b"", tty(cols, rows)).await;
        assert_eq!(String::from_utf8(done.stdout).unwrap(), format!("{rows} {cols}\r\n"), "start {n}");
        assert_eq!(done.ended, OK);
    }
}

#[tokio::test]
async fn a_resize_arrives() {
    let (_dir, client) = connected();
    let (mut reader, mut writer) =
        client.exec(&["sh", "-c", "stty -echo; echo ready; read x; stty size"], tty(80, 24)).await.unwrap();
    let _ = until(&mut reader, b"ready").await;
    writer.write_all(&ExecFrame::Resize(132, 50).encode()).await.unwrap();
    writer.write_all(&ExecFrame::Stdin(b"\n".to_vec()).encode()).await.unwrap();
    let out = within("the end", finish(&mut reader)).await.stdout;
    assert!(String::from_utf8(out).unwrap().ends_with("50 132\r\n"));
}

#[tokio::test]
async fn t4_ctrl_c_stops_yes_with_little_output_behind_it() {
    let (_dir, client) = connected();
    let (mut reader, mut writer) = client.exec(&["yes"], tty(80, 24)).await.unwrap();
    let _ = until(&mut reader, b"y\r\ny\r\n").await;
    writer.write_all(&ExecFrame::Stdin(vec![3]).encode()).await.unwrap();
    let pressed = Instant::now();
    let done = within("the end", finish(&mut reader)).await;
    assert_eq!(done.ended, Ended { code: 130, signal: 2 });
    assert!(done.stdout.len() < 4_000_000, "{} bytes after Ctrl-C, in {:?}", done.stdout.len(), pressed.elapsed());
}

#[tokio::test]
async fn t5_a_split_character_stays_whole() {
    let (_dir, client) = connected();
    let script = "stty raw -echo; echo ready; dd bs=1 count=3 2>/dev/null";
    let (mut reader, mut writer) = client.exec(&["sh", "-c", script], tty(80, 24)).await.unwrap();
    let _ = until(&mut reader, b"ready").await;
    writer.write_all(&ExecFrame::Stdin(vec![0xe2]).encode()).await.unwrap();
    let _ = until(&mut reader, &[0xe2]).await;
    writer.write_all(&ExecFrame::Stdin(vec![0x94, 0x80]).encode()).await.unwrap();
    let done = within("the end", finish(&mut reader)).await;
    assert_eq!(done.stdout, [0x94, 0x80]);
}

#[tokio::test]
async fn t6_an_unknown_term_becomes_a_known_one() {
    let (_dir, client) = connected();
    let strange = Some(ks_proto::guest::Tty { term: "xterm-of-another-world".into(), cols: 80, rows: 24 });
    let done = client.run(&["sh", "-c", "echo $TERM"], b"", strange).await;
    assert_eq!(done.stdout, b"xterm-256color\r\n");
}

#[tokio::test]
async fn t7_children_in_the_background_do_not_hold_the_end() {
    let (dir, client) = connected();
    let fifo = dir.path().join("alive");
    mkfifo(&fifo);
    let mut alive = pipe::OpenOptions::new().open_receiver(&fifo).unwrap();
    // The child keeps both outputs open and outlives the shell.
    let script = format!("sleep 30 3>{} & echo started $!", fifo.display());
    let done = client.run(&["sh", "-c", &script], b"", None).await;
    assert_eq!(done.ended, OK);
    let text = String::from_utf8(done.stdout).unwrap();
    let pid: i32 = text.trim().strip_prefix("started ").unwrap().parse().unwrap();
    // It runs on: its end of the fifo is still open.
    assert_eq!(alive.try_read(&mut [0; 1]).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    crate::sys::signal(pid, 9).unwrap();
    assert_eq!(within("its end", alive.read(&mut [0; 1])).await.unwrap(), 0);
}

#[tokio::test]
async fn all_output_of_a_program_that_ended_arrives() {
    let (_dir, client) = connected();
    for _ in 0..20 {
        let done = client.run(&["sh", "-c", "head -c 60000 /dev/zero; head -c 60000 /dev/zero >&2"], b"", None).await;
        assert_eq!((done.stdout.len(), done.stderr.len()), (60_000, 60_000));
    }
}

#[tokio::test]
async fn a_lost_stream_hangs_up_the_program() {
    for on_terminal in [false, true] {
        let (dir, client) = connected();
        let fifo = dir.path().join("alive");
        mkfifo(&fifo);
        let mut alive = pipe::OpenOptions::new().open_receiver(&fifo).unwrap();
        let script =
            format!("exec 3>{} 2>&3; trap 'echo hup >&3; exit' HUP; echo ready; while :; do sleep 0.01; done", fifo.display());
        let size = if on_terminal { tty(80, 24) } else { None };
        let (mut reader, writer) = client.exec(&["sh", "-c", &script], size).await.unwrap();
        let _ = until(&mut reader, b"ready").await;
        drop((reader, writer));
        let mut seen = Vec::new();
        within("the hang-up", alive.read_to_end(&mut seen)).await.unwrap();
        // The shell may also tell that its `sleep` was hung up.
        assert!(String::from_utf8_lossy(&seen).ends_with("hup\n"), "terminal: {on_terminal}, {seen:?}");
    }
}

#[tokio::test]
async fn a_half_closed_stream_still_carries_output() {
    let (_dir, client) = connected();
    let (mut reader, mut writer) = client.exec(&["sh", "-c", "cat; echo more"], None).await.unwrap();
    writer.write_all(&ExecFrame::Stdin(b"in ".to_vec()).encode()).await.unwrap();
    writer.write_all(&ExecFrame::StdinEof.encode()).await.unwrap();
    writer.shutdown().await.unwrap();
    let done = within("the end", finish(&mut reader)).await;
    assert_eq!(done.stdout, b"in more\n");
}

#[tokio::test]
async fn a_resize_overtakes_no_program_that_does_not_read() {
    let (_dir, client) = connected();
    let script = "stty raw -echo; trap 'stty size; exit 3' WINCH; echo ready; while :; do sleep 0.01; done";
    let (mut reader, mut writer) = client.exec(&["sh", "-c", script], tty(80, 24)).await.unwrap();
    let _ = until(&mut reader, b"ready").await;
    // A paste that nobody reads: more than the terminal takes, less than the queue.
    writer.write_all(&ExecFrame::Stdin(vec![b'x'; 60_000]).encode()).await.unwrap();
    writer.write_all(&ExecFrame::Stdin(vec![b'x'; 60_000]).encode()).await.unwrap();
    writer.write_all(&ExecFrame::Resize(99, 33).encode()).await.unwrap();
    let done = within("the end", finish(&mut reader)).await;
    assert_eq!((done.stdout.as_slice(), done.ended.code), (&b"33 99\n"[..], 3));
}

#[tokio::test]
async fn input_after_the_program_closed_it_is_dropped() {
    let (_dir, client) = connected();
    let data = noise(1_000_000);
    let done = client.run(&["sh", "-c", "exec <&-; echo closed; sleep 0.05; exit 5"], &data, None).await;
    assert_eq!((done.stdout.as_slice(), done.ended.code), (&b"closed\n"[..], 5));
}

#[tokio::test]
async fn frames_of_the_wrong_direction_hang_up() {
    let (_dir, client) = connected();
    let (mut reader, mut writer) = client.exec(&["cat"], None).await.unwrap();
    writer.write_all(&ExecFrame::Exit { code: 0, signal: 0 }.encode()).await.unwrap();
    assert!(!matches!(within("the cut", wire::read_frame(&mut reader)).await, Ok(Some(_))));
}

fn mkfifo(path: &std::path::Path) {
    rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, rustix::fs::Mode::from_raw_mode(0o600), 0).unwrap();
}
