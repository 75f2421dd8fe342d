//! exec and attach: a WebSocket's binary messages and the guest's exec frames, byte for byte, both ways at once.
//!
//! Neither direction buffers more than one message: a slow reader slows the program in the guest down, and nothing else.

use super::App;
use crate::host::guest::{SHORT, read_exec_frame};
use crate::host::session::SessionHandle;
use crate::node::Node;
use crate::session::Input;
use axum::extract::ws::{Message, WebSocket, WebSocketUpgrade};
use axum::extract::{Path, State};
use axum::response::Response;
use futures::stream::{SplitSink, SplitStream};
use futures::{SinkExt, StreamExt};
use ks_proto::api::{ApiError, ExecStart};
use ks_proto::guest::{EXEC_PAYLOAD_MAX, ExecFrame, GuestRequest};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};

const FIRST_MESSAGE: Duration = Duration::from_secs(10);
/// How long a client that was told the end may take to close.
const LINGER: Duration = Duration::from_secs(5);
/// A viewer counts as activity this often.
const PRESENCE: Duration = Duration::from_secs(5);

pub async fn exec(State(app): State<App>, Path(name): Path<String>, ws: WebSocketUpgrade) -> Response {
    upgrade(app, name, ws, false)
}

pub async fn attach(State(app): State<App>, Path(name): Path<String>, ws: WebSocketUpgrade) -> Response {
    upgrade(app, name, ws, true)
}

fn upgrade(app: App, name: String, ws: WebSocketUpgrade, attach: bool) -> Response {
    ws.max_message_size(EXEC_PAYLOAD_MAX + 1).max_frame_size(EXEC_PAYLOAD_MAX + 1).on_upgrade(move |mut socket| async move {
        match begin(&app.node, &name, &mut socket, attach).await {
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
    let vm = handle.running().await?;
    let (_, stream) = vm.guest.open(&request, SHORT).await?;
    Ok((handle, stream))
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
