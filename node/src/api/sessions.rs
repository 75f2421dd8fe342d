//! `/node`, `/doctor`, `/events` and `/sessions`.

use super::App;
use super::reply::{Answered, Input, Needed, Refused, long, ndjson};
use crate::ops::{create, describe, diff as diffing, doctor as checks, fork as forking, verbs};
use crate::session::Request;
use axum::Json;
use axum::extract::{Path, Query, State};
use axum::response::{IntoResponse, Response};
use ks_proto::api::{
    ApiError, Checkpoint, CreateSession, Diff, DoctorReport, Fork, Kill, NodeInfo, Restore, Session, StartMain, TakeCheckpoint,
    Tree,
};
use ks_proto::control::VmStats;

type Name = Path<String>;

pub async fn node(State(app): State<App>) -> Json<NodeInfo> {
    Json(app.node.info())
}

pub async fn host_doctor(State(app): State<App>) -> Json<DoctorReport> {
    Json(checks::host(&app.node))
}

#[derive(Debug, Default, serde::Deserialize)]
#[serde(default)]
pub struct EventsQuery {
    follow: u8,
    from: u64,
}

pub async fn events(State(app): State<App>, Query(q): Query<EventsQuery>) -> Result<Response, Refused> {
    let (past, mut live) = app.node.state.events(q.from)?;
    let (tx, rx) = tokio::sync::mpsc::channel(64);
    tokio::spawn(async move {
        let mut last = None;
        for e in past {
            last = Some(e.seq);
            if tx.send(e).await.is_err() {
                return;
            }
        }
        if q.follow == 0 {
            return;
        }
        loop {
            tokio::select! {
                () = tx.closed() => return,
                event = live.recv() => match event {
                    Ok(e) if last.is_some_and(|l| e.seq <= l) => {}
                    Ok(e) => if tx.send(e).await.is_err() {
                        return;
                    },
                    // A reader that is too slow has missed some: it sees the gap in `seq`.
                    Err(tokio::sync::broadcast::error::RecvError::Lagged(_)) => {}
                    Err(tokio::sync::broadcast::error::RecvError::Closed) => return,
                },
            }
        }
    });
    Ok(ndjson(rx))
}

pub async fn list(State(app): State<App>) -> Json<Vec<Session>> {
    Json(describe::all(&app.node).await)
}

pub async fn create(State(app): State<App>, Input(c): Input<CreateSession>) -> Response {
    long(move |steps| async move { create::create(&app.node, c, &steps).await })
}

pub async fn show(State(app): State<App>, Path(name): Name) -> Answered<Session> {
    Ok(Json(describe::session(&app.node, &app.node.record(&name)?)))
}

#[derive(Debug, Default, serde::Deserialize)]
#[serde(default)]
pub struct RemoveQuery {
    force: u8,
}

pub async fn remove(State(app): State<App>, Path(name): Name, Query(q): Query<RemoveQuery>) -> Answered<Session> {
    Ok(Json(verbs::remove(&app.node, &name, q.force != 0).await?))
}

pub async fn checkpoints(State(app): State<App>, Path(name): Name) -> Answered<Vec<Checkpoint>> {
    Ok(Json(describe::checkpoints(&app.node, &app.node.record(&name)?)))
}

pub async fn tree(State(app): State<App>, Path(name): Name) -> Answered<Tree> {
    Ok(Json(describe::tree(&app.node, &app.node.record(&name)?)))
}

pub async fn doctor(State(app): State<App>, Path(name): Name) -> Answered<DoctorReport> {
    Ok(Json(checks::session(&app.node, &name).await?))
}

pub async fn stats(State(app): State<App>, Path(name): Name) -> Answered<VmStats> {
    let (_, handle) = app.node.session(&name)?;
    let vm = handle.view.borrow().vm.clone();
    let state = handle.view.borrow().state;
    let vm =
        vm.ok_or_else(|| ApiError::new("busy", "there is no VM to measure", format!("the session is {state}"), "wake it first"))?;
    Ok(Json(vm.stats().await?))
}

#[derive(Debug, serde::Deserialize)]
#[serde(default)]
pub struct LogsQuery {
    lines: u32,
}
impl Default for LogsQuery {
    fn default() -> Self {
        Self { lines: 200 }
    }
}

pub async fn logs(State(app): State<App>, Path(name): Name, Query(q): Query<LogsQuery>) -> Result<Vec<u8>, Refused> {
    let (_, handle) = app.node.session(&name)?;
    Ok(handle.running().await?.guest.logs(q.lines).await?)
}

pub async fn start(State(app): State<App>, Path(name): Name, Input(m): Input<StartMain>) -> Answered<Session> {
    let (record, handle) = app.node.session(&name)?;
    create::start_main(&app.node, &handle, &m).await?;
    Ok(Json(describe::by_id(&app.node, &record.id)?))
}

pub async fn checkpoint(State(app): State<App>, Path(name): Name, Input(t): Input<TakeCheckpoint>) -> Response {
    long(move |steps| async move { verbs::checkpoint(&app.node, &name, t, &steps).await })
}

pub async fn restore(State(app): State<App>, Path(name): Name, Needed(r): Needed<Restore>) -> Response {
    long(move |steps| async move { verbs::restore(&app.node, &name, r, &steps).await })
}

pub async fn fork(State(app): State<App>, Path(name): Name, Input(f): Input<Fork>) -> Response {
    long(move |steps| async move { forking::fork(&app.node, &name, f, &steps).await })
}

pub async fn park(State(app): State<App>, Path(name): Name) -> Response {
    long(move |steps| async move { verbs::simple(&app.node, &name, Request::Park, &steps).await })
}

pub async fn wake(State(app): State<App>, Path(name): Name) -> Response {
    long(move |steps| async move { verbs::simple(&app.node, &name, Request::Wake, &steps).await })
}

pub async fn stop(State(app): State<App>, Path(name): Name) -> Response {
    long(move |steps| async move { verbs::simple(&app.node, &name, Request::Stop, &steps).await })
}

pub async fn kill(State(app): State<App>, Path(name): Name, Input(k): Input<Kill>) -> Response {
    if !k.with_daemon {
        return long(move |steps| async move { verbs::kill(&app.node, &name, &steps).await });
    }
    let session = match verbs::kill_both(&app.node, &name).await {
        Ok(s) => s,
        Err(e) => return Refused(e).into_response(),
    };
    let (tx, rx) = tokio::sync::mpsc::channel(1);
    tokio::spawn(async move {
        let _ = tx.send(ks_proto::api::Progress::Result { result: session }).await;
        // The reader has taken the line once the channel is closed; the socket then gets a moment to send it.
        drop(tx);
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        crate::host::process::kill_self();
    });
    ndjson(rx)
}

pub async fn diff(State(app): State<App>, Path(name): Name, Needed(d): Needed<Diff>) -> Response {
    long(move |steps| async move { diffing::diff(&app.node, &name, d, &steps).await })
}
