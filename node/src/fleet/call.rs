//! Calls to another member's API over the control plane.

use super::Fleet;
use crate::api::tunnel;
use crate::progress::Steps;
use axum::body::Body;
use axum::http::{Method, Request, Response, StatusCode};
use futures::{StreamExt, TryStreamExt};
use ks_proto::api::{ApiError, Progress};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncBufReadExt, AsyncRead};
use tokio_util::io::StreamReader;

/// The largest JSON answer of a member.
const ANSWER_BYTES_MAX: usize = 64 << 20;

fn odd(e: impl std::fmt::Display) -> ApiError {
    ApiError::new("unreachable", "another node's answer", e.to_string(), "ks node ls; nodes may be of different versions")
}

async fn send(fleet: &Fleet, to: u64, method: Method, path: &str, body: Vec<u8>) -> Result<Response<Body>, ApiError> {
    let stream = fleet.api_stream(to).await?;
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header("host", "member")
        .header(crate::api::ROLE_HEADER, "admin")
        .header("content-type", "application/json")
        .body(Body::from(body))
        .map_err(odd)?;
    let response = tunnel::forward(stream, request).await?;
    if response.status() == StatusCode::OK {
        return Ok(response);
    }
    let bytes = axum::body::to_bytes(response.into_body(), ANSWER_BYTES_MAX).await.map_err(odd)?;
    Err(serde_json::from_slice(&bytes).unwrap_or_else(odd))
}

/// GET, as JSON.
///
/// # Errors
/// The member's refusal, or `unreachable`.
pub async fn get<T: DeserializeOwned>(fleet: &Fleet, to: u64, path: &str) -> Result<T, ApiError> {
    let response = send(fleet, to, Method::GET, path, vec![]).await?;
    let bytes = axum::body::to_bytes(response.into_body(), ANSWER_BYTES_MAX).await.map_err(odd)?;
    serde_json::from_slice(&bytes).map_err(odd)
}

/// Any short call with a JSON body; its answer is not looked at.
///
/// # Errors
/// As [`get`].
pub async fn tell(fleet: &Fleet, to: u64, method: Method, path: &str, body: &impl Serialize) -> Result<(), ApiError> {
    send(fleet, to, method, path, serde_json::to_vec(body).map_err(odd)?).await.map(drop)
}

/// GET, as bytes that come while they are read.
///
/// # Errors
/// As [`get`].
pub async fn get_stream(fleet: &Fleet, to: u64, path: &str) -> Result<impl AsyncRead + Send + use<>, ApiError> {
    let response = send(fleet, to, Method::GET, path, vec![]).await?;
    let bytes = response.into_body().into_data_stream().map_err(std::io::Error::other);
    Ok(StreamReader::new(Box::pin(bytes)))
}

/// POST of a long call: its steps are told on, its result comes back.
///
/// # Errors
/// As [`get`]; a stream that ends before its result is `unreachable`.
pub async fn post_long<T: DeserializeOwned>(
    fleet: &Fleet,
    to: u64,
    path: &str,
    body: &impl Serialize,
    steps: &Steps,
) -> Result<T, ApiError> {
    let body = serde_json::to_vec(body).map_err(odd)?;
    let response = send(fleet, to, Method::POST, path, body).await?;
    let bytes = response.into_body().into_data_stream().map_err(std::io::Error::other).boxed();
    let mut lines = StreamReader::new(bytes).lines();
    while let Some(line) = lines.next_line().await.map_err(odd)? {
        match serde_json::from_str::<Progress<T>>(&line).map_err(odd)? {
            Progress::Step { what, done, total } => steps.step(what, done, total),
            Progress::Result { result } => return Ok(result),
            Progress::Error { error } => return Err(error),
        }
    }
    Err(odd("the call ended without a result"))
}
