//! exec and attach: a WebSocket's binary messages and the guest's exec frames, byte for byte, both ways at once.
//!
//! Neither direction buffers more than one message: a slow reader slows the program in the guest down, and nothing else.

use super::App;
use crate::host::guest::{SHORT, read_exec_frame};
use crate::host::session::SessionHandle;
use crate::host::vm::LiveVm;
use crate::node::Node;
use crate::session::Input;
use axum::extract::ws::{Message, WebSocket, WebSocketUpgrade};
use axum::extract::{Path, Query, State};
use axum::response::Response;
use futures::stream::{SplitSink, SplitStream};
use futures::{SinkExt, StreamExt};
use ks_proto::api::{ApiError, ExecStart, SessionState};
use ks_proto::guest::{EXEC_PAYLOAD_MAX, ExecFrame, GuestRequest};
use serde::Deserialize;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};

const FIRST_MESSAGE: Duration = Duration::from_secs(10);
/// How long a client that was told the end may take to close.
const LINGER: Duration = Duration::from_secs(5);
/// How long a caller that must not wake a session waits for it to run, or to rest.
const UNWOKEN: Duration = Duration::from_secs(20);
/// A viewer counts as activity this often.
const PRESENCE: Duration = Duration::from_secs(5);

pub async fn exec(State(app): State<App>, Path(name): Path<String>, ws: WebSocketUpgrade) -> Response {
    upgrade(app, name, ws, false, true)
}

/// What a caller says of an attach.
#[derive(Debug, Deserialize)]
pub struct Manner {
    /// `wake=0`: a terminal that only reconnects. A session that rests is then refused (`resting`), never woken.
    wake: Option<u8>,
}

pub async fn attach(
    State(app): State<App>,
    Path(name): Path<String>,
    Query(manner): Query<Manner>,
    ws: WebSocketUpgrade,
) -> Response {
    upgrade(app, name, ws, true, manner.wake != Some(0))
}

fn upgrade(app: App, name: String, ws: WebSocketUpgrade, attach: bool, wake: bool) -> Response {
    ws.max_message_size(EXEC_PAYLOAD_MAX + 1).max_frame_size(EXEC_PAYLOAD_MAX + 1).on_upgrade(move |mut socket| async move {
        match begin(&app.node, &name, &mut socket, attach, wake).await {
            Ok((handle, stream)) => run(handle, socket, stream).await,
            Err(e) => {
                let text = serde_json::to_string(&e).unwrap_or_default();
                let _ = socket.send(Message::Text(text.into())).await;
                let _ = socket.send(Message::Close(None)).await;
                linger(async { while let Some(Ok(_)) = socket.recv().await {} }).await;
            }
        }
    })
}

/// Reads on until the client has closed too: a socket that is closed with bytes unread is reset, and the client may
/// lose the last ones that were sent to it, the exit code among them.
async fn linger(reading: impl Future<Output = ()>) {
    let _ = tokio::time::timeout(LINGER, reading).await;
}

async fn begin(
    node: &Arc<Node>,
    name: &str,
    socket: &mut WebSocket,
    attach: bool,
    wake: bool,
) -> Result<(SessionHandle, crate::host::channel::GuestStream), ApiError> {
    let usage = |why: String| ApiError::new("usage", "the first message", why, "client and node may be of different versions");
    let start: ExecStart = match tokio::time::timeout(FIRST_MESSAGE, socket.recv()).await {
        Ok(Some(Ok(Message::Text(t)))) => serde_json::from_str(&t).map_err(|e| usage(e.to_string()))?,
        Ok(other) => return Err(usage(format!("a text message was expected, got {other:?}"))),
        Err(_) => return Err(usage("none came in 10 s".into())),
    };
    let request = if attach {
        GuestRequest::Attach { tty: start.tty.ok_or_else(|| usage("attach needs a terminal".into()))? }
    } else if start.argv.is_empty() {
        return Err(ApiError::new("usage", "exec", "there is no command", "ks exec NAME -- COMMAND"));
    } else {
        GuestRequest::Exec { argv: start.argv, env: start.env, cwd: start.cwd, user: start.user, tty: start.tty }
    };
    let (_, handle) = node.session(name)?;
    let vm = if wake { handle.running().await? } else { unwoken(&handle).await? };
    let (_, stream) = vm.guest.open(&request, SHORT).await?;
    Ok((handle, stream))
}

/// The session's VM once it runs, without asking for that: whoever parked or stopped the session meant it.
async fn unwoken(handle: &SessionHandle) -> Result<Arc<LiveVm>, ApiError> {
    let mut view = handle.view.clone();
    let found = view.wait_for(|v| v.vm.is_some() || refusal(v.state, &v.reason).is_some());
    let late = || ApiError::new("busy", "the session does not run yet", "it is on its way", "try again");
    let gone = |_| ApiError::new("moving", "the session has left this node", "its machine here has ended", "try again");
    let v = tokio::time::timeout(UNWOKEN, found).await.map_err(|_| late())?.map_err(gone)?.clone();
    v.vm.ok_or_else(|| refusal(v.state, &v.reason).unwrap_or_else(late))
}

/// The refusal of one who must not wake the session; None when it runs or will by itself.
fn refusal(state: SessionState, reason: &str) -> Option<ApiError> {
    use SessionState::{Creating, Failed, Parked, Recovering, Running, Starting, Stopped};
    match state {
        Parked | Stopped | Failed => {
            let why = if reason.is_empty() { format!("it is {state}") } else { format!("it is {state}: {reason}") };
            Some(ApiError::new("resting", "the session is not woken by a terminal that reconnects", why, "`ks attach` wakes it"))
        }
        Creating | Starting | Running | Recovering => None,
    }
}

async fn run(handle: SessionHandle, socket: WebSocket, stream: crate::host::channel::GuestStream) {
    let (to_client, from_client) = socket.split();
    let (from_guest, to_guest) = tokio::io::split(stream);
    let presence = async {
        let mut tick = tokio::time::interval(PRESENCE);
        loop {
            tick.tick().await;
            handle.input(Input::Activity).await;
        }
    };
    let (out, input) = (guest_to_client(from_guest, to_client), client_to_guest(from_client, to_guest));
    tokio::pin!(out, input, presence);
    // A client that only closed its input goes on reading; one that left ends it all.
    tokio::select! {
        () = &mut out => linger(input).await,
        () = &mut input => {}
        () = &mut presence => {}
    }
}

async fn guest_to_client(mut from: impl AsyncRead + Unpin, mut to: SplitSink<WebSocket, Message>) {
    loop {
        let message = match read_exec_frame(&mut from).await {
            Ok(Some(frame)) => {
                let last = matches!(frame, ExecFrame::Exit { .. });
                if to.send(Message::Binary(frame.encode_message().into())).await.is_err() {
                    return;
                }
                if !last {
                    continue;
                }
                Message::Close(None)
            }
            // No exit frame: the client takes a close without one as a cut link.
            Ok(None) | Err(_) => {
                let next = "attach again; the session goes on or comes back";
                let e = ApiError::new("guest-silent", "the link to the guest was cut", "its stream ended", next);
                Message::Text(serde_json::to_string(&e).unwrap_or_default().into())
            }
        };
        let _ = to.send(message).await;
        let _ = to.close().await;
        return;
    }
}

async fn client_to_guest(mut from: SplitStream<WebSocket>, mut to: impl AsyncWrite + Unpin) {
    // Once the program is gone its input is read and dropped; the other direction says what happened.
    let mut open = true;
    loop {
        match from.next().await {
            Some(Ok(Message::Binary(m))) => {
                let Some(frame) = ExecFrame::decode_message(&m) else { return };
                if !matches!(frame, ExecFrame::Stdin(_) | ExecFrame::StdinEof | ExecFrame::Resize(..) | ExecFrame::Signal(_)) {
                    return;
                }
                open = open && to.write_all(&frame.encode()).await.is_ok();
            }
            Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Text(_))) => {}
            Some(Ok(Message::Close(_)) | Err(_)) | None => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_session_that_rests_is_refused_to_one_who_must_not_wake_it() {
        use SessionState::{Creating, Failed, Parked, Recovering, Running, Starting, Stopped};
        for state in [Parked, Stopped, Failed] {
            let e = refusal(state, "").expect("it rests");
            assert!(e.code == "resting" && e.status() == 409 && e.why.contains(&state.to_string()), "{e:?}");
        }
        assert!([Creating, Starting, Running, Recovering].iter().all(|s| refusal(*s, "x").is_none()));
    }
}
