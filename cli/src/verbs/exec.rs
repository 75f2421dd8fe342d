//! `ks exec`: a program in the session, byte for byte, with its own exit code.

use super::signal_exit;
use crate::args;
use crate::failure::{Failure, LINK_LOST, NOT_EXECUTABLE, NOT_FOUND, Res};
use crate::host::http::Node;
use crate::host::link::{self, Incoming, Receiver, STDIN_CHUNK, Sender};
use crate::host::pump::{Ended, Person};
use crate::host::terminal;
use crate::output::Ctx;
use crate::target;
use base64::Engine;
use ks_proto::api::{ApiError, ExecStart};
use ks_proto::guest::{ExecFrame, Tty};
use serde_json::json;
use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

/// Signals that are passed on to the program.
const PASSED: [i32; 6] = [1, 2, 3, 10, 12, 15];

/// A program that was told to end has this long before we end without it.
const PROGRAM_ENDS: Duration = Duration::from_secs(5);

/// Runs `ks exec`.
pub async fn run(ctx: &Ctx, a: args::Exec) -> Res<u8> {
    let session = target::session(&a.session)?;
    let node = Node::find(ctx)?;
    let env: Vec<(String, String)> = a.env.iter().map(|e| target::env(e, |k| std::env::var(k).ok())).collect::<Res<_>>()?;
    let wants_tty = a.tty || (!a.no_tty && !ctx.json && terminal::both());
    if wants_tty && !terminal::both() {
        return Err(Failure::usage("--tty needs a terminal here", "stdin or stdout is none", "leave --tty away"));
    }
    let (cols, rows) = terminal::size();
    let tty = wants_tty.then(|| Tty { term: terminal::term(), cols, rows });
    let start = ExecStart { argv: a.command, env, cwd: a.cwd, user: a.user, tty };
    let (tx, rx) = link::open(&node, &session, "exec", &start).await?;
    let ended = if wants_tty { in_terminal(tx, rx).await? } else { in_pipe(ctx, tx, rx).await? };
    match ended {
        Ended::Exit { code, .. } => Ok(code),
        Ended::Refused(e) => Err(not_run(&node, &session, e).await),
        Ended::Lost { why, .. } => Err(Failure::link_lost(format!("exec in {session}"), why)),
        Ended::Cut | Ended::Detached => {
            ctx.note("link cut; whether the program goes on is unknown");
            Ok(LINK_LOST)
        }
        Ended::Signal(n) => Ok(signal_exit(n)),
    }
}

/// Tells "no such session" (125) from "no such program" (127) and "not a program" (126).
async fn not_run(node: &Node, session: &str, e: ApiError) -> Failure {
    let exists = || async { node.session(session).await.is_ok() };
    let exit = match e.code.as_str() {
        "not-executable" => Some(NOT_EXECUTABLE),
        "not-found" if exists().await => Some(NOT_FOUND),
        _ => None,
    };
    let mut f = Failure::from(e);
    f.exit = exit.unwrap_or(f.exit);
    f
}

async fn in_terminal(tx: Sender, rx: Receiver) -> Res<Ended> {
    let raw = terminal::Raw::enter()?;
    let mut person = Person::new(false)?;
    let ended = person.pump(tx, rx, std::future::pending()).await;
    person.finish().await;
    drop(raw);
    Ok(ended)
}

/// One of our output streams, written by a thread of its own so that it can block without stopping the rest.
struct Output {
    tx: mpsc::Sender<Vec<u8>>,
    done: tokio::task::JoinHandle<std::io::Result<()>>,
}

impl Output {
    fn new(mut to: impl Write + Send + 'static) -> Self {
        let (tx, mut rx) = mpsc::channel::<Vec<u8>>(4);
        let done = tokio::task::spawn_blocking(move || {
            while let Some(b) = rx.blocking_recv() {
                to.write_all(&b)?;
                to.flush()?;
            }
            Ok(())
        });
        Self { tx, done }
    }
    async fn finish(self) -> std::io::Result<()> {
        drop(self.tx);
        self.done.await.unwrap_or_else(|e| Err(std::io::Error::other(e)))
    }
}

async fn in_pipe(ctx: &Ctx, tx: Sender, mut rx: Receiver) -> Res<Ended> {
    let (frames, frames_rx) = mpsc::channel(4);
    tokio::spawn(send_all(tx, frames_rx));
    let heard = Arc::new(AtomicU64::new(0));
    pass_signals(&frames, &heard)?;
    feed_stdin(frames.clone())?;
    let out = Output::new(std::io::stdout());
    let err = Output::new(std::io::stderr());
    let ended = loop {
        let incoming = rx.next().await;
        heard.fetch_add(1, Ordering::Relaxed);
        let sent = match incoming {
            Incoming::Frame(ExecFrame::Stdout(b)) if ctx.json => out.tx.send(as_json("stdout", &b)).await,
            Incoming::Frame(ExecFrame::Stderr(b)) if ctx.json => out.tx.send(as_json("stderr", &b)).await,
            Incoming::Frame(ExecFrame::Stdout(b)) => out.tx.send(b).await,
            Incoming::Frame(ExecFrame::Stderr(b)) => err.tx.send(b).await,
            Incoming::Frame(ExecFrame::Exit { code, signal }) => break Ended::Exit { code, signal },
            Incoming::Frame(ExecFrame::Stdin(_) | ExecFrame::StdinEof | ExecFrame::Resize(..) | ExecFrame::Signal(_)) => Ok(()),
            // The node says so when the guest's side of the link breaks: the program may have run.
            Incoming::Refused(e) if e.code == "guest-silent" => {
                break Ended::Lost { why: format!("{}: {}", e.what, e.why), alive: true };
            }
            Incoming::Refused(e) => break Ended::Refused(e),
            Incoming::Lost(why) => break Ended::Lost { why, alive: true },
        };
        if sent.is_err() {
            // Our reader has gone: the program gets what it would get from a broken pipe.
            let _ = frames.try_send(ExecFrame::Signal(13));
            break Ended::Signal(13);
        }
    };
    if let (true, Ended::Exit { code, signal }) = (ctx.json, &ended) {
        let line = format!("{}\n", json!({"schema": "ks.exec.v1", "type": "exit", "code": code, "signal": signal}));
        // A reader that has gone shows when the stream is finished.
        let _ = out.tx.send(line.into_bytes()).await;
    }
    let written = out.finish().await.and(err.finish().await);
    match written {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(Ended::Signal(13)),
        Err(e) => Err(Failure::local("cannot write the program's output", e, "check where stdout and stderr go")),
        Ok(()) => Ok(ended),
    }
}

fn as_json(stream: &str, bytes: &[u8]) -> Vec<u8> {
    let data = base64::engine::general_purpose::STANDARD.encode(bytes);
    format!("{}\n", json!({"schema": "ks.exec.v1", "type": stream, "base64": data})).into_bytes()
}

/// Ends with the link; the end of stdin does not end it.
async fn send_all(mut tx: Sender, mut frames: mpsc::Receiver<ExecFrame>) {
    while let Some(f) = frames.recv().await {
        if tx.send(&f).await.is_err() {
            return;
        }
    }
}

/// Stdin has a thread: it may block for ever, and the process ends without it.
fn feed_stdin(frames: mpsc::Sender<ExecFrame>) -> Res<()> {
    let work = move || {
        let mut buffer = vec![0; STDIN_CHUNK];
        let mut stdin = std::io::stdin().lock();
        loop {
            let frame = match stdin.read(&mut buffer) {
                Ok(0) => ExecFrame::StdinEof,
                Ok(n) => ExecFrame::Stdin(buffer[..n].to_vec()),
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
                // A stdin that cannot be read has nothing more to give.
                Err(_) => ExecFrame::StdinEof,
            };
            let last = frame == ExecFrame::StdinEof;
            if frames.blocking_send(frame).is_err() || last {
                return;
            }
        }
    };
    let made = std::thread::Builder::new().name("stdin".into()).spawn(work);
    made.map(|_| ()).map_err(|e| Failure::local("cannot start a thread", e, "free some memory"))
}

/// Signals go to the program. What a person sends to be rid of it must not wait for a guest that is stuck: SIGTERM,
/// SIGHUP and SIGQUIT end us as well when the program has not ended a short while later, and so does a second Ctrl-C
/// when nothing was heard since the first, or a third one.
fn pass_signals(frames: &mpsc::Sender<ExecFrame>, heard: &Arc<AtomicU64>) -> Res<()> {
    for n in PASSED {
        let mut on =
            signal(SignalKind::from_raw(n)).map_err(|e| Failure::local("cannot listen for signals", e, "report this"))?;
        let (frames, heard) = (frames.clone(), heard.clone());
        tokio::spawn(async move {
            let (mut times, mut before) = (0u32, 0);
            while on.recv().await.is_some() {
                times += 1;
                let number = u8::try_from(n).unwrap_or(15);
                // A full way is that of a stuck guest: the signal is lost, ours is not.
                let _ = frames.try_send(ExecFrame::Signal(number));
                let silent = heard.load(Ordering::Relaxed) == std::mem::replace(&mut before, heard.load(Ordering::Relaxed));
                if n == 2 && (times >= 3 || (silent && times >= 2)) {
                    std::process::exit(i32::from(crate::failure::INTERRUPTED));
                }
                if matches!(n, 1 | 3 | 15) {
                    // A second one does not wait.
                    let _ = tokio::time::timeout(PROGRAM_ENDS, on.recv()).await;
                    std::process::exit(i32::from(signal_exit(number)));
                }
            }
        });
    }
    Ok(())
}
