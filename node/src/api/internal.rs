//! Calls of one member to another, over the control plane only: fetch a checkpoint, hand out an image's files, tell what is
//! running here.

use super::App;
use super::reply::{Answered, Needed, Refused, long};
use crate::fleet::fetch::{self, FetchOrder};
use crate::host::image::image_dir;
use crate::ops::describe;
use axum::Json;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use ks_proto::ImageId;
use ks_proto::api::{ApiError, Session};
use tokio_util::io::ReaderStream;

/// Files of an image that a member may ask for.
pub const IMAGE_FILES: [&str; 3] = ["kernel", "initrd", "image.json"];

/// `POST /v1/internal/fetch`: get the whole closure of a checkpoint from its holders, with the files of its image. Answered
/// when every byte is verified, durable and pinned here.
pub async fn fetch(State(app): State<App>, Needed(order): Needed<FetchOrder>) -> Response {
    long(move |steps| async move { fetch::run(&app.node, order, &steps).await })
}

/// `GET /v1/internal/sessions`: the sessions that this node runs, as they are now.
pub async fn sessions(State(app): State<App>) -> Answered<Vec<Session>> {
    Ok(Json(describe::own(&app.node)))
}

/// `GET /v1/internal/images/{id}/{file}`: one file, whole.
pub async fn image_file(State(app): State<App>, Path((id, file)): Path<(String, String)>) -> Result<Response, Refused> {
    let id: ImageId = id.parse().map_err(|e: ks_proto::ids::IdError| bad(e.to_string()))?;
    if !IMAGE_FILES.contains(&file.as_str()) {
        return Err(bad(format!("an image has no file {file:?}")));
    }
    let path = image_dir(&app.node, &id).join(&file);
    let opened = tokio::fs::File::open(&path).await.map_err(|e| {
        ApiError::new("not-found", format!("image {} has no {file} on this node", id.short()), e.to_string(), "ask another node")
    })?;
    let length = opened.metadata().await.map_err(|e| bad(e.to_string()))?.len();
    Ok(([(header::CONTENT_LENGTH, length)], Body::from_stream(ReaderStream::new(opened))).into_response())
}

fn bad(why: String) -> Refused {
    Refused(ApiError::new("usage", "the image's file", why, "nodes may be of different versions"))
}

/// `POST /v1/internal/hand-over`: the owner checkpoints a session, copies it to a member, stops it and assigns it.
pub async fn hand_over(State(app): State<App>, Needed(h): Needed<crate::fleet::joining::HandOver>) -> Response {
    long(move |steps| async move { crate::fleet::joining::hand_over(&app.node, h, &steps).await })
}

/// `GET /v1/internal/authority`: the fleet's certificate authority with its key, for a member that admits others.
pub async fn authority(State(app): State<App>) -> Answered<crate::fleet::start::AuthorityFile> {
    Ok(Json(app.node.fleet.authority_file()?))
}
