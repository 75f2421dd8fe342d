//! A WebSocket to a program in a session: exec and attach.

use super::conn::Wire;
use super::http::{Node, refusal, root_cause};
use crate::failure::{Failure, Res};
use futures::stream::{SplitSink, SplitStream};
use futures::{SinkExt, StreamExt};
use ks_proto::api::{ApiError, ExecStart};
use ks_proto::guest::ExecFrame;
use std::time::Duration;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;
use tokio_tungstenite::tungstenite::{Error as WsError, Message};
use tokio_tungstenite::{WebSocketStream, client_async_with_config};

/// Bytes of one stdin frame.
pub const STDIN_CHUNK: usize = 32 * 1024;
/// Longer than a node waits for a session that is on its way to another one.
const OPEN_TIMEOUT: Duration = Duration::from_secs(30);
/// Output in flight that nobody has read; small, so that Ctrl-C is felt.
const RECEIVE_BUFFER: usize = 256 * 1024;

/// Something from the far side.
#[derive(Debug, PartialEq, Eq)]
pub enum Incoming {
    /// A frame.
    Frame(ExecFrame),
    /// The node refuses.
    Refused(ApiError),
    /// The link is gone; why.
    Lost(String),
}

/// The receiving half.
#[derive(Debug)]
pub struct Receiver(SplitStream<WebSocketStream<Wire>>);
/// The sending half.
#[derive(Debug)]
pub struct Sender(SplitSink<WebSocketStream<Wire>, Message>);

/// `attach` of `attach?wake=0`.
fn verb(kind: &str) -> &str {
    kind.split('?').next().unwrap_or(kind)
}

/// Opens `exec` or `attach` (with its query, if any) of a session and sends the start message.
pub async fn open(node: &Node, session: &str, kind: &str, start: &ExecStart) -> Res<(Sender, Receiver)> {
    let what = format!("{} {session}", verb(kind));
    let slow = || {
        Failure::new(
            "timeout",
            &what,
            format!("no answer from {} in {} s", node.base(), OPEN_TIMEOUT.as_secs()),
            "look at `ks events`",
        )
    };
    let ws = tokio::time::timeout(OPEN_TIMEOUT, connect(node, session, kind)).await.map_err(|_| slow())??;
    let (mut tx, rx) = ws.split();
    let text = serde_json::to_string(start).map_err(|e| Failure::local("cannot write the request", e, "report this"))?;
    tx.send(Message::text(text)).await.map_err(|e| Failure::link_lost(&what, root_cause(&e)))?;
    Ok((Sender(tx), Receiver(rx)))
}

/// A node that is cut off refuses before anything ran: then the next one is asked.
async fn connect(node: &Node, session: &str, kind: &str) -> Res<WebSocketStream<Wire>> {
    let mut not = vec![];
    let mut first: Option<Failure> = None;
    loop {
        let (at, wire) = match node.endpoints().connect(&not).await {
            Ok(got) => got,
            Err(e) => return Err(first.unwrap_or_else(|| node.unreachable(&e))),
        };
        not.push(at);
        match upgrade(node, wire, &node.endpoints().urls()[at], session, kind).await {
            Ok(ws) => return Ok(ws),
            Err(f) if matches!(f.error.code.as_str(), "no-quorum" | "lapsed" | "unreachable" | "link-lost") => {
                first.get_or_insert(f);
            }
            Err(f) => return Err(f),
        }
    }
}

async fn upgrade(node: &Node, wire: Wire, url: &str, session: &str, kind: &str) -> Res<WebSocketStream<Wire>> {
    let what = format!("{} {session}", verb(kind));
    let host = url.split_once("://").map_or(url, |u| u.1);
    let bad = |e: &dyn std::error::Error| Failure::link_lost(&what, root_cause(e));
    rustix::net::sockopt::set_socket_recv_buffer_size(wire.tcp(), RECEIVE_BUFFER).map_err(|e| bad(&e))?;
    let mut request = format!("ws://{host}/v1/sessions/{session}/{kind}").into_client_request().map_err(|e| bad(&e))?;
    let bearer = format!("Bearer {}", node.token()).parse().map_err(|_| {
        Failure::usage("the token cannot be sent", "it has characters that HTTP does not carry", "set KS_TOKEN right")
    })?;
    request.headers_mut().insert("authorization", bearer);
    let config = WebSocketConfig::default()
        .read_buffer_size(64 * 1024)
        .write_buffer_size(0)
        .max_message_size(Some(1 << 20))
        .max_frame_size(Some(1 << 20));
    match client_async_with_config(request, wire, Some(config)).await {
        Ok((ws, _)) => Ok(ws),
        Err(WsError::Http(r)) => Err(refusal(&what, r.status().as_u16(), r.body().as_deref().unwrap_or_default())),
        Err(e) => Err(bad(&e)),
    }
}

impl Receiver {
    /// The next thing from the far side. Safe to cancel.
    pub async fn next(&mut self) -> Incoming {
        loop {
            match self.0.next().await {
                Some(Ok(Message::Binary(b))) => {
                    return match ExecFrame::decode_message(&b) {
                        Some(f) => Incoming::Frame(f),
                        None => Incoming::Lost("the node sent a frame that is not understood".into()),
                    };
                }
                Some(Ok(Message::Text(t))) => {
                    return match serde_json::from_str::<ApiError>(&t) {
                        Ok(e) => Incoming::Refused(e),
                        Err(_) => Incoming::Lost("the node sent a text that is not understood".into()),
                    };
                }
                Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => {}
                Some(Ok(Message::Close(_))) | None => return Incoming::Lost("the node closed the link".into()),
                Some(Err(e)) => return Incoming::Lost(root_cause(&e)),
            }
        }
    }
}

impl Sender {
    /// Sends a frame; waits while the far side takes nothing.
    pub async fn send(&mut self, frame: &ExecFrame) -> Result<(), String> {
        self.0.send(Message::binary(frame.encode_message())).await.map_err(|e| root_cause(&e))
    }
    /// Says goodbye, for at most half a second.
    pub async fn close(&mut self) {
        // The far side may be gone; then there is nobody to tell.
        let _ = tokio::time::timeout(Duration::from_millis(500), self.0.close()).await;
    }
}
