//! Any node serves any request: a call about a session goes on to the node that owns it. While that node is dead or the
//! session is on its way to another one, the call waits a bounded while and then goes where the session came up.

use super::App;
use super::auth::{Caller, ROLE_HEADER, role_name};
use super::reply::Refused;
use super::tunnel;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use hyper::upgrade::OnUpgrade;
use ks_proto::api::ApiError;
use std::time::Duration;

/// How long a call waits for its session's node: longer than a lease, an election and a restore.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long one attempt to reach the owner may take.
const REACH: Duration = Duration::from_secs(2);
/// Between two looks while nothing changed.
const LOOK_AGAIN: Duration = Duration::from_millis(250);

/// How long a call waits for what the fleet knows already. Without a quorum it goes on with what is known here.
const FRESH: Duration = Duration::from_secs(1);

/// Whoever did one thing through one node may do the next through another: a call that changes something, or that names a session
/// of which this node has not heard, waits until this node knows all that was decided before the call.
pub async fn fresh(State(app): State<App>, request: Request, next: Next) -> Response {
    let unheard = session_in(request.uri().path()).is_some_and(|name| app.node.state.read().find(&name).is_none());
    let changes = request.method() != Method::GET;
    if (changes || unheard) && !app.node.fleet.alone() {
        drop(tokio::time::timeout(FRESH, app.node.fleet.consensus().catch_up()).await);
    }
    next.run(request).await
}

/// Passes the request on if its session belongs to another node; else it goes to this node's own handlers. A call that only
/// looks, or opens a terminal or a command, is asked again of the next owner when its node dies before the answer; any other
/// one may have been carried out, and says so.
pub async fn to_owner(State(app): State<App>, request: Request, next: Next) -> Response {
    let Some(name) = session_in(request.uri().path()) else { return next.run(request).await };
    let caller = request.extensions().get::<Caller>().copied();
    let passed_on = caller.is_none_or(|c| c.passed_on);
    let deadline = tokio::time::Instant::now() + PATIENCE;
    let mut changes = app.node.fleet.changes();
    let mut call = Some(request);
    loop {
        changes.mark_unchanged();
        let owner = app.node.state.read().find(&name).map(|r| (r.owner, r.name.to_string()));
        let Some(mut request) = call.take() else { return refused("internal", "the call was given away".into(), "report this") };
        // An unknown name is refused by the handler, in its own words.
        let Some((owner, session)) = owner else { return next.run(request).await };
        if owner == app.node.fleet.number() {
            return next.run(request).await;
        }
        if passed_on {
            let why = format!("{session} moved to node {owner} while the call was on its way");
            return refused("moving", why, "try again");
        }
        let Some(role) = caller.map(|c| c.role) else { return refused("internal", "no caller".into(), "report this") };
        let why = match tokio::time::timeout(REACH, app.node.fleet.api_stream(owner)).await {
            Ok(Ok(stream)) if request.method() == Method::GET => {
                dress(&mut request, role_name(role));
                let (again, near) = copy(&mut request);
                match tunnel::exchange(stream, request).await {
                    // The far node has heard that it is the owner no more before this one did.
                    Ok(response)
                        if response.status() == StatusCode::SERVICE_UNAVAILABLE && tokio::time::Instant::now() < deadline =>
                    {
                        call = Some(give_back(again, near));
                        "the session is moving".to_owned()
                    }
                    Ok(response) => return tunnel::switched(response, near),
                    Err(e) => {
                        call = Some(give_back(again, near));
                        e.why
                    }
                }
            }
            Ok(Ok(stream)) => {
                dress(&mut request, role_name(role));
                return tunnel::forward(stream, request).await.unwrap_or_else(|e| Refused(e).into_response());
            }
            Ok(Err(e)) => {
                call = Some(request);
                e.why
            }
            Err(_) => {
                call = Some(request);
                format!("no connection in {} s", REACH.as_secs())
            }
        };
        if tokio::time::Instant::now() >= deadline {
            return refused("unreachable", format!("{session} is on node {owner}: {why}"), "ks fleet status; ks node ls");
        }
        let _ = tokio::time::timeout(LOOK_AGAIN, changes.changed()).await;
    }
}

/// The far node trusts this one for who calls; the caller's own secret goes no further.
fn dress(request: &mut Request, role: &'static str) {
    let headers = request.headers_mut();
    headers.remove("authorization");
    headers.remove("origin");
    headers.insert(ROLE_HEADER, HeaderValue::from_static(role));
}

/// A second copy of a call without a body, and the caller's side of a change of protocols.
fn copy(request: &mut Request) -> (Request, Option<OnUpgrade>) {
    let near = request.extensions_mut().remove::<OnUpgrade>();
    let mut again = Request::new(Body::empty());
    *again.method_mut() = request.method().clone();
    *again.uri_mut() = request.uri().clone();
    *again.headers_mut() = request.headers().clone();
    *again.extensions_mut() = request.extensions().clone();
    (again, near)
}

fn give_back(mut request: Request, near: Option<OnUpgrade>) -> Request {
    if let Some(near) = near {
        request.extensions_mut().insert(near);
    }
    request
}

fn refused(code: &str, why: String, next: &str) -> Response {
    Refused(ApiError::new(code, "the session's node cannot be reached", why, next)).into_response()
}

/// The session that a path is about.
fn session_in(path: &str) -> Option<String> {
    let rest = path.strip_prefix("/v1/sessions/")?;
    let name = rest.split('/').next().filter(|n| !n.is_empty())?;
    // Names and ids have no characters that a URL would escape; anything else is no session's name.
    Some(name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::session_in;

    #[test]
    fn a_session_is_found_in_its_paths_only() {
        assert_eq!(session_in("/v1/sessions/a.1/exec").as_deref(), Some("a.1"));
        assert_eq!(session_in("/v1/sessions/a").as_deref(), Some("a"));
        for none in ["/v1/sessions", "/v1/sessions/", "/v1/fleet", "/sessions/a"] {
            assert_eq!(session_in(none), None, "{none}");
        }
    }
}
