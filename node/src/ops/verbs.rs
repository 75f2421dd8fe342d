//! Checkpoint, restore, park, wake, stop, kill, remove.

use super::describe;
use crate::host::session::SessionHandle;
use crate::node::{Node, head_of};
use crate::progress::Steps;
use crate::session::{Answer, Request};
use ks_proto::api::{ApiError, Checkpoint, Restore, Session, SessionState, TakeCheckpoint};
use ks_raft::{Lost, SessionRecord};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Finds a checkpoint of `r`: `c7`, `7`, a full id, or a unique beginning of one (8 digits or more). A fork's own fork
/// point counts.
///
/// # Errors
/// `not-found`, or `usage` when the beginning is not unique.
pub fn find_checkpoint(node: &Node, r: &SessionRecord, text: &str) -> Result<Checkpoint, ApiError> {
    let missing = || {
        let why = format!("session {} has no checkpoint {text:?}", r.name);
        ApiError::new("not-found", "there is no such checkpoint", why, format!("ks checkpoints {} shows what there is", r.name))
    };
    let number = text.strip_prefix('c').unwrap_or(text).parse::<u64>().ok().filter(|_| text.len() < 8);
    if let Some(c) = number.and_then(|n| r.checkpoints.get(&n)) {
        return Ok(c.info.clone());
    }
    if text.len() < 8 {
        return Err(missing());
    }
    let mut all: Vec<Checkpoint> = r.checkpoints.values().map(|c| c.info.clone()).collect();
    if let Some(f) = &r.forked_from {
        let state = node.state.read();
        all.extend(state.sessions.get(&f.session).and_then(|p| p.by_id(&f.checkpoint)).map(|c| c.info.clone()));
    }
    let mut hits = all.into_iter().filter(|c| c.id.to_hex().starts_with(text));
    let hit = hits.next().ok_or_else(missing)?;
    match hits.next() {
        None => Ok(hit),
        Some(_) => Err(ApiError::new("usage", "the checkpoint", format!("{text:?} begins more than one id"), "give more digits")),
    }
}

/// Waits for `work` while telling the session's changes of state.
async fn watching<T>(handle: &SessionHandle, steps: &Steps, work: impl Future<Output = T>) -> T {
    let mut view = handle.view.clone();
    tokio::pin!(work);
    let mut shown = String::new();
    loop {
        let now = {
            let v = view.borrow_and_update();
            if v.reason.is_empty() { v.state.to_string() } else { format!("{}: {}", v.state, v.reason) }
        };
        if now != shown {
            steps.step(now.clone(), 0, 0);
            shown = now;
        }
        tokio::select! {
            done = &mut work => return done,
            changed = view.changed() => if changed.is_err() {
                return work.await;
            }
        }
    }
}

/// Takes a checkpoint.
///
/// # Errors
/// Why it is absent.
pub async fn checkpoint(node: &Arc<Node>, name: &str, t: TakeCheckpoint, steps: &Steps) -> Result<Checkpoint, ApiError> {
    if t.message.len() > 4096 {
        return Err(ApiError::new("usage", "the note", "it has more than 4096 bytes", "make it shorter"));
    }
    let (record, handle) = node.session(name)?;
    let request = Request::Checkpoint { reason: "demand".into(), message: t.message, pin: t.pin, freeze: false };
    steps.step("taking a checkpoint", 0, 0);
    match handle.ask(request).await? {
        Answer::Checkpoint(c) => {
            let state = node.state.read();
            let found = state
                .sessions
                .get(&record.id)
                .and_then(|s| Some(describe::checkpoint(node, &state, s, s.checkpoints.get(&c.number)?)));
            found.ok_or_else(|| ApiError::new("not-found", "the checkpoint is gone", "it was dropped meanwhile", "take another"))
        }
        Answer::Done => Err(ApiError::new("internal", "the checkpoint", "no number came back", "report this")),
    }
}

/// Goes back to a checkpoint in place.
///
/// # Errors
/// Why not; the session is as before unless it says that it failed.
pub async fn restore(node: &Arc<Node>, name: &str, r: Restore, steps: &Steps) -> Result<Session, ApiError> {
    let (record, handle) = node.session(name)?;
    let to = find_checkpoint(node, &record, &r.checkpoint)?;
    // Readable at all? Better to refuse now than after the present was ended.
    let (store, id, keys) = (node.supply.store.clone(), to.id, node.supply.keys.clone());
    let whole = tokio::task::spawn_blocking(move || store.closure_plan(&id, &keys).map(drop)).await;
    whole
        .map_err(|e| ApiError::new("internal", "reading the checkpoint", e.to_string(), "try again"))?
        .map_err(|e| crate::host::vm::store_error(&e))?;
    let request = Request::Restore { to: head_of(&record, to.id), verify_eager: r.verify_eager };
    watching(&handle, steps, handle.ask(request)).await?;
    describe::by_id(node, &record.id)
}

/// Park, wake and stop.
///
/// # Errors
/// Why not.
pub async fn simple(node: &Arc<Node>, name: &str, request: Request, steps: &Steps) -> Result<Session, ApiError> {
    let (record, handle) = node.session(name)?;
    watching(&handle, steps, handle.ask(request)).await?;
    describe::by_id(node, &record.id)
}

/// Crashes the VM; answers when the session is back.
///
/// # Errors
/// If there is no VM, or nothing it could come back from.
pub async fn kill(node: &Arc<Node>, name: &str, steps: &Steps) -> Result<Session, ApiError> {
    simple(node, name, Request::Kill, steps).await
}

/// Crashes the VM and prepares to crash ksd: the caller ends the process once its answer is out.
///
/// # Errors
/// If there is no VM, or nothing it could come back from.
pub async fn kill_both(node: &Arc<Node>, name: &str) -> Result<Session, ApiError> {
    let (record, handle) = node.session(name)?;
    let Some(vm) = handle.view.borrow().vm.clone() else {
        let why = format!("the session is {}, so there is no VM to kill", handle.view.borrow().state);
        return Err(ApiError::new("busy", "this cannot be done now", why, "wait until it runs"));
    };
    if record.checkpoints.is_empty() && record.forked_from.is_none() {
        let next = format!("take a checkpoint first: ks checkpoint {name}");
        return Err(ApiError::new("never-checkpointed", "the VM is not killed", "the session would lose everything", next));
    }
    node.ending.store(true, Ordering::Release);
    let lost = Lost { at_unix_ms: crate::host::clock::unix_ms(), cause: "VM and node killed by request".into(), lapse: None };
    super::create::apply(node, ks_raft::Command::NoteLost { id: record.id, lost }).await?;
    vm.kill();
    describe::by_id(node, &record.id)
}

/// Removes a session with its checkpoints. Without `force` a running or never-checkpointed one is refused.
///
/// # Errors
/// What would be lost, or why a process stays.
pub async fn remove(node: &Arc<Node>, name: &str, force: bool) -> Result<Session, ApiError> {
    let record = node.record(name)?;
    let shown = describe::session(node, &record);
    if !force {
        let count = record.checkpoints.len();
        let next = format!("ks stop {n} first, or `ks rm --force {n}`", n = record.name);
        if record.checkpoints.is_empty() && record.forked_from.is_none() && shown.state != SessionState::Failed {
            let why = "it was never checkpointed: everything in it would be lost";
            return Err(ApiError::new("never-checkpointed", format!("{} is not removed", record.name), why, next));
        }
        if !matches!(shown.state, SessionState::Parked | SessionState::Stopped | SessionState::Failed) {
            let since = record.latest().map_or(record.created_unix_ms, |c| c.info.created_unix_ms);
            let age = crate::host::clock::unix_ms().saturating_sub(since) / 1000;
            let why =
                format!("it is {}: {age} s of work since its last checkpoint and {count} checkpoints would be lost", shown.state);
            return Err(ApiError::new("running", format!("{} is not removed", record.name), why, next));
        }
    }
    match node.handle(&record.id) {
        Some(handle) => drop(handle.ask(Request::Remove).await?),
        None => drop(super::create::apply(node, ks_raft::Command::RemoveSession { id: record.id }).await?),
    }
    node.state.event(record.name.as_str(), "removed", &format!("with {} checkpoints", record.checkpoints.len()));
    Ok(shown)
}
