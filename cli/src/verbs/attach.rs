//! `ks attach`: the session's terminal here, through lost links and moves.

use super::signal_exit;
use crate::failure::{FAILED, Failure, LINK_LOST, Res};
use crate::host::http::Node;
use crate::host::pump::{Ended, Person};
use crate::host::{link, terminal};
use crate::output::Ctx;
use ks_proto::api::{ApiError, ExecStart, SessionState};
use ks_proto::guest::Tty;
use serde_json::json;
use std::time::Duration;

const BACKOFF_FIRST: Duration = Duration::from_millis(100);
const BACKOFF_MAX: Duration = Duration::from_secs(3);
/// How often a fleet is asked whether the session has moved, while its terminal is open.
const WATCH: Duration = Duration::from_secs(2);

/// Refuses where there is no terminal to attach.
pub fn need_terminal(session: &str) -> Res<()> {
    if terminal::both() {
        return Ok(());
    }
    Err(Failure::usage(
        format!("cannot attach to {session} here"),
        "stdin and stdout must be a terminal, and one of them is not",
        format!("run a program instead: `ks exec {session} -- CMD`, or read the output: `ks logs {session}`"),
    ))
}

/// Attaches until the person leaves or the session ends.
pub async fn run(ctx: &Ctx, session: &str) -> Res<u8> {
    need_terminal(session)?;
    let mut node = Node::find(ctx)?;
    let (tx, rx) = link::open(&node, session, "attach", &start()).await?;
    let raw = terminal::Raw::enter()?;
    let mut person = Person::new(true)?;
    let mut links = Some((tx, rx));
    let mut backoff = BACKOFF_FIRST;
    let mut seen = false;
    let outcome = loop {
        let ended = match links.take() {
            Some((tx, rx)) => person.pump(tx, rx, moved(&node, session)).await,
            None => match reopen(ctx, &mut node, &mut person, session).await {
                Ok(pair) => {
                    links = Some(pair);
                    continue;
                }
                Err(e) => e,
            },
        };
        let why = match ended {
            // Nothing was ever seen of it: that is a failure to report, not a break to mend.
            Ended::Lost { why, alive: false } if !seen => break Out::Failed(never(session, &why)),
            Ended::Lost { why, alive } => {
                if alive {
                    backoff = BACKOFF_FIRST;
                }
                seen |= alive;
                why
            }
            Ended::Refused(e) if seen && passing(&e) => e.why,
            Ended::Refused(e) if e.code == "resting" => match person.during(gone(&node, session)).await {
                Ok(words) => break words.unwrap_or(Out::Ended(Ended::Refused(e))),
                Err(left) => break Out::Ended(left),
            },
            other @ (Ended::Exit { .. } | Ended::Detached | Ended::Cut | Ended::Refused(_) | Ended::Signal(_)) => {
                break Out::Ended(other);
            }
        };
        person.status(&format!("ks: link to {session} lost ({why}); reconnecting. Enter ~ . gives up")).await;
        match person.during(gone(&node, session)).await {
            Ok(Some(words)) => break words,
            Ok(None) => {}
            Err(e) => break Out::Ended(e),
        }
        if let Some(e) = person.wait(backoff).await {
            break Out::Ended(e);
        }
        backoff = (backoff * 8 / 5).min(BACKOFF_MAX);
    };
    person.finish().await;
    drop(raw);
    finish(ctx, session, outcome)
}

/// Ends when the session runs on another node than at the beginning: a host that was stopped, or cut off, keeps its links
/// open and silent. Only a fleet with several addresses can tell.
async fn moved(node: &Node, session: &str) -> String {
    if node.endpoints().urls().len() < 2 {
        return std::future::pending().await;
    }
    let mut before: Option<(u64, u64, String)> = None;
    loop {
        if let Ok(s) = node.session(session).await {
            let now = (s.token.generation, s.token.epoch, s.node);
            if before.as_ref().is_some_and(|b| *b != now) {
                return format!("it runs on {} now", if now.2.is_empty() { "another node" } else { &now.2 });
            }
            before = Some(now);
        }
        tokio::time::sleep(WATCH).await;
    }
}

fn never(session: &str, why: &str) -> Failure {
    Failure::new(
        "link-lost",
        format!("cannot attach to {session}"),
        why,
        format!("look at `ks show {session}` and `ks doctor {session}`, then try again"),
    )
}

enum Out {
    Ended(Ended),
    /// The session has ended in order: nothing to reconnect to.
    Over(&'static str, String),
    /// It cannot be had any more.
    Failed(Failure),
}

fn start() -> ExecStart {
    let (cols, rows) = terminal::size();
    ExecStart { tty: Some(Tty { term: terminal::term(), cols, rows }), ..ExecStart::default() }
}

/// Refusals that pass by themselves while a session comes back.
fn passing(e: &ApiError) -> bool {
    matches!(
        e.code.as_str(),
        "busy"
            | "running"
            | "guest-silent"
            | "timeout"
            | "internal"
            | "engine-missing"
            | "node-down"
            | "link-lost"
            | "no-quorum"
            | "lapsed"
            | "moving"
            | "unreachable"
            | "fenced"
    )
}

/// Opens the link again, at the node's new address if it has one. The node may answer at once or not at all. It must
/// not wake the session for this: between the end of the link and the word `parked` a second or more may pass.
async fn reopen(ctx: &Ctx, node: &mut Node, person: &mut Person, session: &str) -> Result<(link::Sender, link::Receiver), Ended> {
    if let Ok(n) = Node::find(ctx) {
        *node = n;
    }
    match person.during(link::open(node, session, "attach?wake=0", &start())).await? {
        Ok(pair) => Ok(pair),
        Err(f) if passing(&f.error) => Err(Ended::Lost { why: f.error.why, alive: false }),
        Err(f) => Err(Ended::Refused(*f.error)),
    }
}

/// Is there nothing to come back to? Attaching again would wake a session that somebody has parked on purpose.
async fn gone(node: &Node, session: &str) -> Option<Out> {
    let asked = tokio::time::timeout(Duration::from_secs(3), node.session(session)).await;
    match asked {
        Ok(Ok(s)) => match s.state {
            SessionState::Parked => Some(Out::Over("parked", format!("{session} was parked; `ks attach {session}` wakes it"))),
            SessionState::Stopped => {
                Some(Out::Over("stopped", format!("{session} was stopped; `ks wake {session}` brings it back")))
            }
            SessionState::Failed => Some(Out::Failed(Failure::new(
                "failed",
                format!("{session} could not be brought back"),
                s.reason,
                format!("its checkpoints remain: `ks checkpoints {session}`"),
            ))),
            SessionState::Creating | SessionState::Starting | SessionState::Running | SessionState::Recovering => None,
        },
        Ok(Err(f)) if f.error.code == "not-found" => Some(Out::Failed(f)),
        Ok(Err(_)) | Err(_) => None,
    }
}

fn finish(ctx: &Ctx, session: &str, out: Out) -> Res<u8> {
    let (outcome, words, exit) = match out {
        Out::Failed(f) => return Err(f),
        Out::Over(outcome, words) => (outcome, words, 0),
        Out::Ended(Ended::Detached) => ("detached", format!("detached; {session} goes on. Back: `ks attach {session}`"), 0),
        Out::Ended(Ended::Cut) => ("cut", format!("link cut; {session} goes on if it can. Look: `ks show {session}`"), LINK_LOST),
        Out::Ended(Ended::Exit { code, signal: 0 }) => ("ended", format!("{session}: the terminal was closed"), code),
        Out::Ended(Ended::Exit { code, signal }) => {
            ("ended", format!("{session}: the terminal's program died by signal {signal}"), code)
        }
        Out::Ended(Ended::Signal(n)) => ("interrupted", format!("ended by signal {n}; {session} goes on"), signal_exit(n)),
        Out::Ended(Ended::Refused(e)) => return Err(e.into()),
        Out::Ended(Ended::Lost { why, .. }) => return Err(Failure::link_lost(format!("attach {session}"), why)),
    };
    if ctx.json {
        ctx.json_line(&json!({"schema": "ks.attach.v1", "session": session, "outcome": outcome, "exit": exit}))?;
    } else {
        ctx.note(&words);
    }
    debug_assert!(exit != FAILED || outcome == "ended", "a failure of ours is reported as one");
    Ok(exit)
}
