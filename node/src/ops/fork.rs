//! Forking a checkpoint into several children at once.

use super::create::{apply, finish, parse_name};
use super::describe;
use super::verbs::find_checkpoint;
use crate::host::gateway::began::Notes;
use crate::host::session::{First, SessionHandle, Steer, start};
use crate::host::{clock, files};
use crate::node::Node;
use crate::progress::Steps;
use crate::session::{Answer, Request};
use base64::Engine;
use ks_proto::api::{ApiError, Checkpoint, Fork, ForkPoint, Session, SessionState};
use ks_proto::{SessionId, SessionName};
use ks_raft::{Command, SessionRecord};
use std::sync::Arc;

/// Children of one call at most.
pub const CHILDREN_MAX: u32 = 64;
/// Bytes of all steer files at most.
const STEER_BYTES_MAX: usize = 16 << 20;

/// Forks; answers when every child runs.
///
/// # Errors
/// What was refused; children that did not come up are removed, the others stay and are named.
pub async fn fork(node: &Arc<Node>, name: &str, f: Fork, steps: &Steps) -> Result<Vec<Session>, ApiError> {
    let n = f.n.max(1);
    if n > CHILDREN_MAX {
        let why = format!("{n} children; the most is {CHILDREN_MAX} at once");
        return Err(ApiError::new("usage", "the fork", why, "fork again for more"));
    }
    let steer = decode_steer(&f.steer)?;
    let parent = node.record(name)?;
    let names = child_names(node, &parent, n, &f.names)?;
    let point = fork_point(node, name, &parent, f.checkpoint.as_deref(), steps).await?;
    steps.step(format!("starting {n} from c{}", point.number), 0, u64::from(n));
    let children = names
        .into_iter()
        .map(|child| one(node.clone(), parent.clone(), point.clone(), child, steer.clone(), steps.clone(), f.replay_parent));
    let results = futures::future::join_all(children).await;
    let (good, bad): (Vec<_>, Vec<_>) = results.into_iter().partition(|r| r.1.is_ok());
    first_checkpoints(node, good.iter().filter_map(|g| g.1.as_ref().ok()).filter_map(|s| node.handle(&s.id)).collect());
    if let Some((child, Err(e))) = bad.into_iter().next() {
        let up: Vec<String> = good.iter().map(|g| g.0.to_string()).collect();
        let why = format!("{child}: {}: {}", e.what, e.why);
        let next = if up.is_empty() { e.next } else { format!("{}; these do run: {}", e.next, up.join(", ")) };
        return Err(ApiError::new(&e.code, "not every child came up", why, next));
    }
    good.into_iter().map(|(_, r)| r).collect()
}

/// Each child's own first checkpoint: from then on a crash does not take it back to its parent. One after the other once
/// all run, so that they hold up neither the brothers' start nor the first thing that is asked of them.
fn first_checkpoints(node: &Arc<Node>, children: Vec<SessionHandle>) {
    let node = Arc::downgrade(node);
    tokio::spawn(async move {
        for child in children {
            if node.upgrade().is_none() {
                return;
            }
            let (reason, message, pin, freeze) = ("start".to_owned(), String::new(), false, false);
            // A failure is told as an event by the machine.
            let _ = child.ask(Request::Checkpoint { reason, message, pin, freeze }).await;
        }
    });
}

fn decode_steer(files: &[(String, String)]) -> Result<Steer, ApiError> {
    let bad = |why: String| ApiError::new("usage", "the steer files", why, "give PATH=FILE with small files");
    let mut out = Vec::new();
    let mut total = 0;
    for (path, text) in files {
        let bytes =
            base64::engine::general_purpose::STANDARD.decode(text).map_err(|e| bad(format!("{path} is not base64: {e}")))?;
        total += bytes.len();
        if total > STEER_BYTES_MAX {
            return Err(bad(format!("more than {STEER_BYTES_MAX} bytes in all")));
        }
        out.push((path.clone(), bytes));
    }
    Ok(out)
}

fn child_names(node: &Node, parent: &SessionRecord, n: u32, wanted: &[SessionName]) -> Result<Vec<SessionName>, ApiError> {
    let state = node.state.read();
    let taken = |t: &str| state.sessions.values().any(|s| !s.tombstone && s.name.as_str() == t);
    if let Some(t) = wanted.iter().find(|w| taken(w.as_str())) {
        return Err(ApiError::new("exists", "the fork", format!("the name {t} is taken"), "choose another"));
    }
    let mut names: Vec<SessionName> = wanted.iter().take(n as usize).cloned().collect();
    let mut k = 0u64;
    while names.len() < n as usize {
        k += 1;
        let name = format!("{}.{k}", parent.name);
        if !taken(&name) && !names.iter().any(|x| x.as_str() == name) {
            names.push(parse_name(&name)?);
        }
    }
    Ok(names)
}

/// The named checkpoint; else, for a running session, one that is taken now with the user's programs frozen, so that no two
/// children draw the same random bytes; else the latest.
async fn fork_point(
    node: &Arc<Node>,
    name: &str,
    parent: &SessionRecord,
    wanted: Option<&str>,
    steps: &Steps,
) -> Result<Checkpoint, ApiError> {
    if let Some(text) = wanted {
        let c = find_checkpoint(node, parent, text)?;
        if parent.by_id(&c.id).is_none() {
            let why = format!("{text} is the fork point of {} in its parent", parent.name);
            return Err(ApiError::new("usage", "the fork", why, "fork the parent at that checkpoint"));
        }
        return Ok(c);
    }
    let (_, handle) = node.session(name)?;
    let state = handle.view.borrow().state;
    if matches!(state, SessionState::Parked | SessionState::Stopped | SessionState::Failed) {
        let latest = parent.by_id(&parent.head).or_else(|| parent.latest()).map(|c| c.info.clone());
        return latest.ok_or_else(|| {
            ApiError::new(
                "never-checkpointed",
                "the fork",
                format!("{} is {state} and has no checkpoint", parent.name),
                "wake it first",
            )
        });
    }
    steps.step("taking the fork point", 0, 0);
    let request = Request::Checkpoint { reason: "fork-point".into(), message: String::new(), pin: false, freeze: true };
    match handle.ask(request).await? {
        Answer::Checkpoint(c) => find_checkpoint(node, &node.record(&parent.id.to_hex())?, &format!("c{}", c.number)),
        Answer::Done => Err(ApiError::new("internal", "the fork point", "no number came back", "report this")),
    }
}

/// The child may reach what its parent may, and is served its parent's later calls only if that was asked for.
async fn calls_of_child(node: &Arc<Node>, parent: SessionId, child: SessionId, replay_parent: bool) -> Result<(), ApiError> {
    if replay_parent {
        let notes = Notes { replay_parent, ..Notes::default() };
        node.notes.write(&child, &notes).map_err(|e| {
            ApiError::new("disk-full", "the fork", format!("--replay is not noted: {e}"), "free space in the data folder")
        })?;
    }
    // What the state says of the parent's allow-list it says of the child's too.
    let recorded = node.state.read().sessions.get(&child).is_some_and(|r| r.allow.is_some());
    if recorded { Ok(()) } else { node.gateway.inherit_egress(parent, child).await }
}

async fn one(
    node: Arc<Node>,
    parent: SessionRecord,
    point: Checkpoint,
    name: SessionName,
    steer: Steer,
    steps: Steps,
    replay_parent: bool,
) -> (SessionName, Result<Session, ApiError>) {
    let id = SessionId(files::random());
    let from = ForkPoint { session: parent.id, name: parent.name.to_string(), number: point.number, checkpoint: point.id };
    let _making = node.make(id);
    let command = Command::CreateSession {
        id,
        name: name.clone(),
        owner: node.fleet.number(),
        params: parent.params.clone(),
        cadence_s: parent.cadence_s,
        idle_park_s: parent.idle_park_s,
        command: parent.command.clone(),
        forked_from: Some(from),
        head: point.id,
        now_unix_ms: clock::unix_ms(),
    };
    let work = async {
        apply(&node, command).await?;
        calls_of_child(&node, parent.id, id, replay_parent).await?;
        let record = node.record(&id.to_hex())?;
        let handle = start(&node, &record, SessionState::Creating, First::Begin(steer));
        let run = async {
            if parent.copies > 0 {
                apply(&node, Command::SetCopies { session: id, copies: parent.copies }).await?;
            }
            handle.ask(Request::AwaitRunning).await.map(drop)
        };
        finish(&node, &handle, run, &steps).await?;
        steps.step(format!("{name} runs"), 0, 0);
        describe::by_id(&node, &id)
    };
    let result = work.await;
    (name, result)
}
