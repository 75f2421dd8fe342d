//! Answers: JSON, errors with their status, and long calls as NDJSON.

use crate::progress::Steps;
use axum::Json;
use axum::body::Body;
use axum::extract::{FromRequest, Request};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use ks_proto::api::ApiError;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// An error as a response.
pub struct Refused(pub ApiError);

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.0.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        (status, Json(self.0)).into_response()
    }
}
impl From<ApiError> for Refused {
    fn from(e: ApiError) -> Self {
        Self(e)
    }
}

/// A JSON answer or a refusal.
pub type Answered<T> = Result<Json<T>, Refused>;

/// A JSON body; an empty one is the type's default. What cannot be read is refused in the API's words.
pub struct Input<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned + Default> FromRequest<S> for Input<T> {
    type Rejection = Refused;
    async fn from_request(request: Request, state: &S) -> Result<Self, Refused> {
        let bytes = body(request, state).await?;
        if bytes.is_empty() { Ok(Self(T::default())) } else { parse(&bytes).map(Self) }
    }
}

/// As [`Input`], for types without a default.
pub struct Needed<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Needed<T> {
    type Rejection = Refused;
    async fn from_request(request: Request, state: &S) -> Result<Self, Refused> {
        parse(&body(request, state).await?).map(Self)
    }
}

async fn body<S: Send + Sync>(request: Request, state: &S) -> Result<axum::body::Bytes, Refused> {
    axum::body::Bytes::from_request(request, state)
        .await
        .map_err(|e| Refused(ApiError::new("usage", "the request's body", e.body_text(), "send a smaller JSON object")))
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Refused> {
    serde_json::from_slice(bytes)
        .map_err(|e| Refused(ApiError::new("usage", "the request's body", e.to_string(), "see the API's description")))
}

/// Runs `work` apart from the connection and streams its steps; the last line is its result or error.
pub fn long<T, F>(work: impl FnOnce(Steps) -> F) -> Response
where
    T: Serialize + Send + 'static,
    F: Future<Output = Result<T, ApiError>> + Send + 'static,
{
    let (steps, rx) = Steps::channel();
    let future = work(steps.clone());
    tokio::spawn(async move {
        let result = future.await;
        steps.end(result).await;
    });
    ndjson(rx)
}

/// Values as lines, for as long as they come.
pub fn ndjson<T: Serialize + Send + 'static>(rx: tokio::sync::mpsc::Receiver<T>) -> Response {
    let lines = futures::stream::unfold(rx, |mut rx| async move {
        let value = rx.recv().await?;
        let mut line = serde_json::to_vec(&value).unwrap_or_else(|e| format!("{{\"bug\":\"{e}\"}}").into_bytes());
        line.push(b'\n');
        Some((Ok::<_, std::convert::Infallible>(line), rx))
    });
    ([(header::CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(lines)).into_response()
}

/// Any other path.
pub async fn no_route(request: Request) -> Refused {
    let why = format!("{} {} is not part of this API", request.method(), request.uri().path());
    Refused(ApiError::new("not-found", "there is no such call", why, "see docs; client and node may be of different versions"))
}
