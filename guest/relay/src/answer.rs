//! Answers to clients: a body fed by a call's task, and refusals in the words of each provider's dialect.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use hyper::{
    HeaderMap, Response, StatusCode,
    body::{Body, Frame, SizeHint},
    header::{HeaderName, HeaderValue},
};
use tokio::sync::{mpsc, watch};

/// Pieces between a call's task and its client's connection.
pub(crate) const PIECES_MAX: usize = 2;

/// The answer's body will never be whole: hyper cuts the connection, which is what a client takes for a broken stream.
#[derive(Debug, thiserror::Error)]
#[error("the answer was cut: {0}")]
pub(crate) struct Cut(pub String);

/// A body that comes piece by piece. Dropped, it tells the call's task that the client is gone.
pub(crate) struct AnswerBody {
    pieces: mpsc::Receiver<Result<Bytes, Cut>>,
    left: Option<u64>,
    alive: Option<Alive>,
    /// Held back for one turn.
    cut: Option<Cut>,
}

/// Held by the client's side; the call's task sees when it goes.
pub(crate) type Alive = watch::Sender<()>;

impl AnswerBody {
    /// A body of `length` bytes, if that is known.
    pub fn new(length: Option<u64>) -> (mpsc::Sender<Result<Bytes, Cut>>, Self) {
        let (tx, pieces) = mpsc::channel(PIECES_MAX);
        (tx, Self { pieces, left: length, alive: None, cut: None })
    }

    /// From now on this body is the client's sign of life.
    pub fn hold(&mut self, alive: Alive) {
        self.alive = Some(alive);
    }

    /// A body that is here already.
    pub fn whole(bytes: Vec<u8>) -> Self {
        let (tx, body) = Self::new(Some(bytes.len() as u64));
        // There is room for one piece in a new channel.
        let _ = tx.try_send(Ok(Bytes::from(bytes)));
        body
    }
}

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = Cut;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        if let Some(cut) = self.cut.take() {
            return Poll::Ready(Some(Err(cut)));
        }
        let piece = std::task::ready!(self.pieces.poll_recv(cx));
        if let Some(Err(cut)) = piece {
            // hyper throws away what it has not flushed when a body fails, and it flushes when a body has nothing.
            self.cut = Some(cut);
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        if let (Some(left), Some(Ok(bytes))) = (&mut self.left, &piece) {
            *left = left.saturating_sub(bytes.len() as u64);
        }
        Poll::Ready(piece.map(|p| p.map(Frame::data)))
    }

    fn size_hint(&self) -> SizeHint {
        self.left.map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}

/// Headers that belong to one connection, or that this side sets itself.
fn is_ours(name: &HeaderName) -> bool {
    ["connection", "keep-alive", "proxy-connection", "transfer-encoding", "te", "trailer", "upgrade", "content-length"]
        .contains(&name.as_str())
}

/// The gateway's head as an HTTP answer.
pub(crate) fn head(status: u16, headers: Vec<(String, String)>, body: AnswerBody) -> Response<AnswerBody> {
    let mut response = Response::new(body);
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::BAD_GATEWAY);
    let mut map = HeaderMap::with_capacity(headers.len());
    for (name, value) in headers {
        let (Ok(name), Ok(value)) = (HeaderName::try_from(name), HeaderValue::try_from(value)) else { continue };
        if !is_ours(&name) {
            map.append(name, value);
        }
    }
    *response.headers_mut() = map;
    response
}

/// A refusal by the relay or the gateway.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub status: u16,
    pub code: String,
    pub message: String,
}

impl Refusal {
    pub fn new(status: u16, code: &str, message: impl Into<String>) -> Self {
        Self { status, code: code.to_owned(), message: message.into() }
    }

    /// In the shape that the SDK of the provider's dialect reads. Nobody should try again what cannot succeed.
    pub fn response(&self, provider: &str, path: &str) -> Response<AnswerBody> {
        let json = match dialect(provider, path) {
            Dialect::OpenAi => serde_json::json!({
                "error": { "message": self.message, "type": format!("keystate_{}", self.code), "param": null, "code": self.code }
            }),
            Dialect::Anthropic => serde_json::json!({
                "type": "error",
                "error": { "type": anthropic_type(self.status), "message": self.message, "code": self.code }
            }),
            Dialect::Gemini => serde_json::json!({
                "error": { "code": self.status, "message": self.message, "status": gemini_status(self.status) }
            }),
        };
        let mut response = Response::new(AnswerBody::whole(json.to_string().into_bytes()));
        *response.status_mut() = StatusCode::from_u16(self.status).unwrap_or(StatusCode::BAD_GATEWAY);
        let headers = response.headers_mut();
        headers.insert("content-type", HeaderValue::from_static("application/json"));
        if let Ok(code) = HeaderValue::try_from(self.code.as_str()) {
            headers.insert("x-keystate-refused", code);
        }
        if !matches!(self.status, 408 | 409 | 503 | 504) {
            headers.insert("x-should-retry", HeaderValue::from_static("false"));
        }
        if self.status == 426 {
            headers.insert("upgrade", HeaderValue::from_static("HTTP/1.1"));
        }
        response
    }
}

enum Dialect {
    OpenAi,
    Anthropic,
    Gemini,
}

/// By the provider's name, else by the path: added providers have any name.
fn dialect(provider: &str, path: &str) -> Dialect {
    match provider {
        "openai" => Dialect::OpenAi,
        "anthropic" => Dialect::Anthropic,
        "gemini" => Dialect::Gemini,
        _ if path.starts_with("/v1/messages") => Dialect::Anthropic,
        _ if path.contains(":generateContent") || path.contains(":streamGenerateContent") => Dialect::Gemini,
        _ => Dialect::OpenAi,
    }
}

fn anthropic_type(status: u16) -> &'static str {
    match status {
        400 | 431 => "invalid_request_error",
        401 => "authentication_error",
        402 => "billing_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        _ => "api_error",
    }
}

fn gemini_status(status: u16) -> &'static str {
    match status {
        400 => "INVALID_ARGUMENT",
        401 => "UNAUTHENTICATED",
        403 => "PERMISSION_DENIED",
        404 => "NOT_FOUND",
        402 | 429 => "RESOURCE_EXHAUSTED",
        503 => "UNAVAILABLE",
        504 => "DEADLINE_EXCEEDED",
        _ => "INTERNAL",
    }
}
