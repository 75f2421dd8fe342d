//! `/fleet`, `/users` and `/blobs`.

use super::App;
use super::reply::{Answered, Input, Needed, Refused, long};
use crate::fleet::joining;
use crate::ops::fleet as ops;
use axum::Json;
use axum::extract::{Path, Query, State};
use axum::response::Response;
use ks_proto::api::ApiError;
use ks_proto::blobs::VerifyBlobs;
use ks_proto::fleet::{
    Admit, Admitted, FleetInfo, FleetPolicy, Join, JoinToken, Leave, MakeToken, NewUser, NodeView, PolicyChange, PutUser,
    Recover, UserView,
};

pub async fn info(State(app): State<App>) -> Json<FleetInfo> {
    Json(ops::info(&app.node))
}

pub async fn token(State(app): State<App>, Input(t): Input<MakeToken>) -> Answered<JoinToken> {
    Ok(Json(ops::token(&app.node, t).await?))
}

pub async fn join(State(app): State<App>, Needed(j): Needed<Join>) -> Response {
    long(move |steps| async move { joining::join(&app.node, j, &steps).await })
}

pub async fn admit(State(app): State<App>, Needed(a): Needed<Admit>) -> Answered<Admitted> {
    Ok(Json(joining::admit(&app.node, a).await?))
}

pub async fn leave(State(app): State<App>, Input(l): Input<Leave>) -> Response {
    long(move |steps| async move { joining::leave(&app.node, l, &steps).await })
}

pub async fn recover(State(app): State<App>, Input(r): Input<Recover>) -> Response {
    long(move |steps| async move {
        if !r.confirmed {
            let why = "a recovery begins a new generation from this node's own state: what only other nodes know may be lost";
            return Err(ApiError::new(
                "usage",
                "the fleet is not recovered",
                why,
                "read `ks help fleet`, then: ks fleet recover --yes",
            ));
        }
        joining::recover(&app.node, &steps).await
    })
}

pub async fn policy(State(app): State<App>, Input(c): Input<PolicyChange>) -> Answered<FleetPolicy> {
    Ok(Json(ops::policy(&app.node, c).await?))
}

pub async fn drain(State(app): State<App>, Path(node): Path<String>) -> Response {
    long(move |steps| async move { joining::drain(&app.node, &node, &steps).await })
}

pub async fn undrain(State(app): State<App>, Path(node): Path<String>) -> Answered<NodeView> {
    Ok(Json(joining::undrain(&app.node, &node).await?))
}

pub async fn verify_blobs(State(app): State<App>, Input(v): Input<VerifyBlobs>) -> Response {
    long(move |steps| async move { crate::ops::scrub::verify(&app.node, v, &steps).await })
}

#[derive(Debug, Default, serde::Deserialize)]
#[serde(default)]
pub struct RemoveQuery {
    force: u8,
}

pub async fn remove(State(app): State<App>, Path(node): Path<String>, Query(q): Query<RemoveQuery>) -> Answered<NodeView> {
    Ok(Json(joining::remove(&app.node, &node, q.force != 0).await?))
}

pub async fn users(State(app): State<App>) -> Json<Vec<UserView>> {
    Json(ops::users(&app.node))
}

pub async fn put_user(State(app): State<App>, Needed(u): Needed<PutUser>) -> Answered<NewUser> {
    Ok(Json(ops::put_user(&app.node, u).await?))
}

pub async fn drop_user(State(app): State<App>, Path(name): Path<String>) -> Result<Json<serde_json::Value>, Refused> {
    ops::drop_user(&app.node, &name).await?;
    Ok(Json(serde_json::json!({})))
}
