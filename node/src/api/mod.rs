//! The HTTP API of proto's `api` module, on loopback, behind a bearer token.

mod auth;
mod bridge;
mod files;
mod images;
mod reply;
mod sessions;

use crate::node::Node;
use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::routing::{get, post};
use std::sync::Arc;

/// The largest JSON body.
const JSON_BYTES_MAX: usize = 24 << 20;

/// What handlers share.
#[derive(Clone)]
pub struct App {
    /// The node.
    pub node: Arc<Node>,
    /// Bearer token.
    pub token: Arc<str>,
    /// Port listened on; Host and Origin must name it.
    pub port: u16,
}

/// All routes.
pub fn router(app: App) -> Router {
    let files = get(files::get_tar).put(files::put_tar).layer(DefaultBodyLimit::disable());
    let v1 = Router::new()
        .route("/node", get(sessions::node))
        .route("/doctor", get(sessions::host_doctor))
        .route("/events", get(sessions::events))
        .route("/images", get(images::list))
        .route("/images/{name}", axum::routing::delete(images::remove))
        .route("/images/build", post(images::build))
        .route("/images/import", post(images::import))
        .route("/sessions", get(sessions::list).post(sessions::create))
        .route("/sessions/{name}", get(sessions::show).delete(sessions::remove))
        .route("/sessions/{name}/checkpoints", get(sessions::checkpoints))
        .route("/sessions/{name}/tree", get(sessions::tree))
        .route("/sessions/{name}/doctor", get(sessions::doctor))
        .route("/sessions/{name}/stats", get(sessions::stats))
        .route("/sessions/{name}/logs", get(sessions::logs))
        .route("/sessions/{name}/start", post(sessions::start))
        .route("/sessions/{name}/checkpoint", post(sessions::checkpoint))
        .route("/sessions/{name}/restore", post(sessions::restore))
        .route("/sessions/{name}/fork", post(sessions::fork))
        .route("/sessions/{name}/park", post(sessions::park))
        .route("/sessions/{name}/wake", post(sessions::wake))
        .route("/sessions/{name}/stop", post(sessions::stop))
        .route("/sessions/{name}/kill", post(sessions::kill))
        .route("/sessions/{name}/diff", post(sessions::diff))
        .route("/sessions/{name}/files", files)
        .route("/sessions/{name}/exec", get(bridge::exec))
        .route("/sessions/{name}/attach", get(bridge::attach))
        .fallback(reply::no_route)
        .layer(DefaultBodyLimit::max(JSON_BYTES_MAX))
        .layer(axum::middleware::from_fn_with_state(app.clone(), auth::check));
    Router::new().nest("/v1", v1).fallback(reply::no_route).with_state(app)
}
