//! `/sessions/S/files`: tar streams to and from the guest, never held whole in memory.

use super::App;
use super::reply::Refused;
use crate::host::guest::{SHORT, end_of_put, read_message};
use crate::session::Input;
use axum::body::Body;
use axum::extract::{Path, Query, Request, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures::StreamExt;
use ks_proto::api::ApiError;
use ks_proto::guest::{GuestAnswer, GuestRequest};
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio_util::io::ReaderStream;

/// A transfer that makes no progress for this long is given up.
const STALL: Duration = Duration::from_secs(60);

#[derive(serde::Deserialize)]
pub struct PathQuery {
    path: String,
}

fn stalled(what: &str, why: impl std::fmt::Display) -> ApiError {
    ApiError::new("guest-silent", format!("the transfer {what} the guest ended early"), why.to_string(), "try again")
}

pub async fn put_tar(
    State(app): State<App>,
    Path(name): Path<String>,
    Query(q): Query<PathQuery>,
    request: Request,
) -> Result<axum::Json<serde_json::Value>, Refused> {
    let (_, handle) = app.node.session(&name)?;
    let vm = handle.running().await?;
    let (_, stream) = vm.guest.open(&GuestRequest::PutTar { path: q.path }, SHORT).await?;
    let (mut read, mut write) = tokio::io::split(stream);
    let mut body = request.into_body().into_data_stream();
    let mut bytes = 0u64;
    let send = async {
        while let Some(chunk) = body.next().await {
            let chunk = chunk.map_err(|e| ApiError::new("usage", "the archive", e.to_string(), "send it again"))?;
            bytes += chunk.len() as u64;
            match tokio::time::timeout(STALL, write.write_all(&chunk)).await {
                Ok(Ok(())) => {}
                Ok(Err(e)) => return Err(stalled("to", e)),
                Err(_) => return Err(stalled("to", format!("nothing was taken in {} s", STALL.as_secs()))),
            }
            handle.input(Input::Activity).await;
        }
        write.shutdown().await.map_err(|e| stalled("to", e))
    };
    // A refusal may come at any time: then the rest of the body is not sent.
    let sent = tokio::select! {
        sent = send => sent,
        answer = read_message::<GuestAnswer>(&mut read) => {
            let early = answer.map_err(|e| stalled("to", e)).and_then(end_of_put);
            early?;
            return Ok(axum::Json(serde_json::json!({ "schema": "ks.put.v1", "bytes": bytes })));
        }
    };
    sent?;
    let answer = tokio::time::timeout(STALL, read_message::<GuestAnswer>(&mut read)).await;
    let answer = answer.map_err(|_| stalled("to", "no answer at its end"))?.map_err(|e| stalled("to", e))?;
    end_of_put(answer)?;
    Ok(axum::Json(serde_json::json!({ "schema": "ks.put.v1", "bytes": bytes })))
}

pub async fn get_tar(State(app): State<App>, Path(name): Path<String>, Query(q): Query<PathQuery>) -> Result<Response, Refused> {
    let (_, handle) = app.node.session(&name)?;
    let vm = handle.running().await?;
    let (_, stream) = vm.guest.open(&GuestRequest::GetTar { path: q.path }, SHORT).await?;
    // The VM is held for as long as its bytes flow. Two zero blocks end an archive, so a cut one is noticed.
    let bytes = ReaderStream::with_capacity(stream, 64 * 1024).map(move |chunk| {
        let _held = &vm;
        chunk
    });
    Ok(([(header::CONTENT_TYPE, "application/x-tar")], Body::from_stream(bytes)).into_response())
}
