//! The HTTP API of proto's `api` and `fleet` modules, behind three doors (see `auth`).

mod auth;
mod bridge;
mod files;
mod fleet;
mod gateway;
mod images;
pub mod internal;
mod pass_on;
mod reply;
pub mod serve;
mod sessions;
pub mod tunnel;

pub use auth::{ADMIT, Door, ROLE_HEADER};

use crate::node::Node;
use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::routing::{get, post, put};
use std::sync::Arc;

/// The largest JSON body.
const JSON_BYTES_MAX: usize = 24 << 20;

/// What handlers share.
#[derive(Clone)]
pub struct App {
    /// The node.
    pub node: Arc<Node>,
}

/// All routes. Each door adds itself as an extension (`serve::through`).
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
        .route("/sessions/{name}/ledger", get(gateway::ledger))
        .route("/sessions/{name}/ledger/verify", post(gateway::verify))
        .route("/sessions/{name}/ledger/reconcile", post(gateway::reconcile))
        .route("/sessions/{name}/ledger/resolve", post(gateway::resolve))
        .route("/sessions/{name}/egress", get(gateway::egress).put(gateway::set_egress))
        .route("/gateway", get(gateway::stats))
        .route("/gateway/keys", get(gateway::keys).post(gateway::add_key))
        .route("/gateway/keys/{provider}", axum::routing::delete(gateway::remove_key))
        .route("/gateway/keys/{provider}/test", post(gateway::test_key))
        .route("/gateway/providers", get(gateway::providers).post(gateway::add_provider))
        .route("/gateway/providers/{name}", axum::routing::delete(gateway::remove_provider))
        .route("/gateway/cost", get(gateway::cost))
        .route("/gateway/budgets", get(gateway::budgets).put(gateway::set_budget))
        .route("/fleet", get(fleet::info))
        .route("/fleet/token", post(fleet::token))
        .route("/fleet/join", post(fleet::join))
        .route("/fleet/admit", post(fleet::admit))
        .route("/fleet/leave", post(fleet::leave))
        .route("/fleet/recover", post(fleet::recover))
        .route("/fleet/policy", put(fleet::policy))
        .route("/fleet/nodes/{node}/drain", post(fleet::drain))
        .route("/fleet/nodes/{node}/undrain", post(fleet::undrain))
        .route("/fleet/nodes/{node}", axum::routing::delete(fleet::remove))
        .route("/blobs/verify", post(fleet::verify_blobs))
        .route("/users", get(fleet::users).post(fleet::put_user))
        .route("/users/{name}", axum::routing::delete(fleet::drop_user))
        .route("/internal/sessions", get(internal::sessions))
        .route("/internal/fetch", post(internal::fetch))
        .route("/internal/hand-over", post(internal::hand_over))
        .route("/internal/authority", get(internal::authority))
        .route("/internal/images/{id}/{file}", get(internal::image_file))
        .fallback(reply::no_route)
        .layer(DefaultBodyLimit::max(JSON_BYTES_MAX));
    Router::new()
        .nest("/v1", v1)
        .fallback(reply::no_route)
        .layer(axum::middleware::from_fn_with_state(app.clone(), pass_on::to_owner))
        .layer(axum::middleware::from_fn_with_state(app.clone(), pass_on::fresh))
        .layer(axum::middleware::from_fn_with_state(app.clone(), auth::check))
        .with_state(app)
}
