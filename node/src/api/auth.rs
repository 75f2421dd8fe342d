//! Who may call. Three doors lead to one router:
//!
//! ```text
//!   local   HTTP on loopback      the token of api.json, Host and Origin must name this node (DNS rebinding, other sites)
//!   tls     HTTPS, fleet's CA     a user's token, or none for `fleet/admit`, which takes a one-use join token
//!   peer    a stream of a member  proved by its key; the role of the far caller comes with it
//! ```

use super::App;
use super::reply::Refused;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use ks_proto::api::ApiError;
use ks_raft::{FleetState, Role};
use std::sync::Arc;

/// The role of the caller, on a request that one member passes on to another.
pub const ROLE_HEADER: &str = "ks-caller-role";
/// The one call that needs no token.
pub const ADMIT: &str = "/v1/fleet/admit";

/// Where a request came in.
#[derive(Debug, Clone)]
pub enum Door {
    /// Loopback: the port listened on, and the token of api.json.
    Local {
        /// Port.
        port: u16,
        /// Token.
        token: Arc<str>,
    },
    /// HTTPS.
    Tls,
    /// The control plane: the member's number.
    Peer {
        /// Member.
        number: u64,
    },
}

/// Who calls, after the check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caller {
    /// What it may do.
    pub role: Role,
    /// A member passes the request on for somebody: it is not passed on again.
    pub passed_on: bool,
}

/// Refuses a request that may not be served.
pub async fn check(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let door = request.extensions().get::<Door>().cloned();
    let path = request.uri().path().to_owned();
    let checked = match door {
        Some(door) => allowed(&door, request.method(), &path, request.headers(), &app.node.state.read()),
        None => Err(refuse("it came in by no known way")),
    };
    match checked {
        Ok(caller) => {
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        Err(e) => Refused(e).into_response(),
    }
}

fn refuse(why: &str) -> ApiError {
    ApiError::new(
        "not-allowed",
        "the node refuses the request",
        why,
        "on this machine use the url and token of api.json; elsewhere: ks login",
    )
}

fn allowed(door: &Door, method: &Method, path: &str, headers: &HeaderMap, state: &FleetState) -> Result<Caller, ApiError> {
    let caller = match door {
        Door::Local { port, token } => {
            local(headers, *port, token)?;
            Caller { role: Role::Admin, passed_on: false }
        }
        Door::Tls if path == ADMIT => return Ok(Caller { role: Role::Viewer, passed_on: false }),
        Door::Tls => Caller { role: user(headers, state)?, passed_on: false },
        Door::Peer { .. } => {
            let role = match text(headers, ROLE_HEADER) {
                Some("admin") => Role::Admin,
                Some("user") => Role::User,
                _ => Role::Viewer,
            };
            Caller { role, passed_on: true }
        }
    };
    if path.starts_with("/v1/internal/") && !matches!(door, Door::Peer { .. }) {
        return Err(refuse("it is a call that only members make of each other"));
    }
    let needed = needed(method, path);
    if rank(caller.role) >= rank(needed) {
        return Ok(caller);
    }
    let why = format!("{method} {path} needs the role {}, this token has {}", role_name(needed), role_name(caller.role));
    Err(ApiError::new("not-allowed", "the node refuses the request", why, "ask an admin of the fleet for another role"))
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).and_then(|v| v.to_str().ok())
}

fn bearer(headers: &HeaderMap) -> &str {
    text(headers, "authorization").and_then(|v| v.strip_prefix("Bearer ")).unwrap_or_default().trim()
}

fn local(headers: &HeaderMap, port: u16, token: &str) -> Result<(), ApiError> {
    if !text(headers, "host").is_some_and(|h| is_own(h, port)) {
        return Err(refuse("its Host header does not name this node"));
    }
    if let Some(origin) = headers.get(header::ORIGIN) {
        let own = origin.to_str().ok().and_then(|o| o.strip_prefix("http://")).is_some_and(|h| is_own(h, port));
        if !own {
            return Err(refuse("its Origin header is another site"));
        }
    }
    if !equal(bearer(headers), token) {
        return Err(refuse("its bearer token is missing or wrong"));
    }
    Ok(())
}

/// A user by token. Only hashes are kept, so the lookup leaks nothing that a token could be guessed from.
fn user(headers: &HeaderMap, state: &FleetState) -> Result<Role, ApiError> {
    if headers.contains_key(header::ORIGIN) {
        return Err(refuse("it has an Origin header, and no web page may call this door"));
    }
    let token = bearer(headers);
    if token.is_empty() {
        return Err(refuse("its bearer token is missing"));
    }
    let hash = blake3::hash(token.as_bytes()).to_hex().to_string();
    let found = state.users.values().find(|u| u.token_hashes.contains(&hash));
    found.map(|u| u.role).ok_or_else(|| refuse("its bearer token is of no user of this fleet"))
}

fn rank(role: Role) -> u8 {
    match role {
        Role::Viewer => 0,
        Role::User => 1,
        Role::Admin => 2,
    }
}

/// A role's word on the wire and for people.
pub fn role_name(role: Role) -> &'static str {
    match role {
        Role::Viewer => "viewer",
        Role::User => "user",
        Role::Admin => "admin",
    }
}

/// What a call needs: looking is free, sessions are for users, nodes, users and images for admins.
fn needed(method: &Method, path: &str) -> Role {
    let rest = path.strip_prefix("/v1/").unwrap_or(path);
    let entry = rest.rsplit('/').next().unwrap_or_default();
    let first = rest.split('/').next().unwrap_or_default();
    if rest.starts_with("internal/") {
        return Role::Admin;
    }
    let looks = method == Method::GET && !matches!(entry, "exec" | "attach" | "files") && first != "users";
    match first {
        _ if looks => Role::Viewer,
        "sessions" => Role::User,
        _ => Role::Admin,
    }
}

fn is_own(host: &str, port: u16) -> bool {
    let Some((name, p)) = host.rsplit_once(':') else { return false };
    matches!(name, "127.0.0.1" | "localhost" | "[::1]") && p.parse() == Ok(port)
}

/// Equal, in a time that tells nothing of where they differ: the hashes are compared, whose first difference is random.
fn equal(a: &str, b: &str) -> bool {
    blake3::hash(a.as_bytes()) == blake3::hash(b.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn local_door() -> Door {
        Door::Local { port: 7000, token: "secret".into() }
    }

    #[test]
    fn only_own_host_own_origin_and_the_token_pass() {
        let check = |host: &str, origin: Option<&str>, auth: Option<&str>| {
            let mut h = HeaderMap::new();
            h.insert(header::HOST, host.parse().unwrap());
            if let Some(o) = origin {
                h.insert(header::ORIGIN, o.parse().unwrap());
            }
            if let Some(a) = auth {
                h.insert(header::AUTHORIZATION, a.parse().unwrap());
            }
            allowed(&local_door(), &Method::GET, "/v1/node", &h, &FleetState::default()).is_ok()
        };
        let good = Some("Bearer secret");
        assert!(check("127.0.0.1:7000", None, good));
        assert!(check("localhost:7000", Some("http://localhost:7000"), good));
        assert!(check("[::1]:7000", None, good));
        assert!(!check("evil.example:7000", None, good), "DNS rebinding");
        assert!(!check("127.0.0.1:7001", None, good));
        assert!(!check("127.0.0.1", None, good));
        assert!(!check("127.0.0.1:7000", Some("http://evil.example"), good));
        assert!(!check("127.0.0.1:7000", Some("null"), good));
        for bad in [None, Some("Bearer secre"), Some("Bearer secret2"), Some("Basic secret"), Some("secret")] {
            assert!(!check("127.0.0.1:7000", None, bad), "{bad:?}");
        }
    }

    #[test]
    fn roles_reach_as_far_as_they_should_and_a_stranger_only_the_admission() {
        let role = |m: Method, p: &str| needed(&m, p);
        assert_eq!(role(Method::GET, "/v1/sessions"), Role::Viewer);
        assert_eq!(role(Method::GET, "/v1/sessions/a/exec"), Role::User);
        assert_eq!(role(Method::GET, "/v1/sessions/a/attach"), Role::User);
        assert_eq!(role(Method::GET, "/v1/sessions/a/files"), Role::User);
        assert_eq!(role(Method::POST, "/v1/sessions"), Role::User);
        assert_eq!(role(Method::POST, "/v1/fleet/token"), Role::Admin);
        assert_eq!(role(Method::GET, "/v1/users"), Role::Admin);
        assert_eq!(role(Method::GET, "/v1/internal/x"), Role::Admin);
        let none = HeaderMap::new();
        let state = FleetState::default();
        assert!(allowed(&Door::Tls, &Method::POST, ADMIT, &none, &state).is_ok());
        assert!(allowed(&Door::Tls, &Method::GET, "/v1/node", &none, &state).is_err());
        let mut passed = HeaderMap::new();
        passed.insert(ROLE_HEADER, "viewer".parse().unwrap());
        let peer = Door::Peer { number: 2 };
        assert!(allowed(&peer, &Method::GET, "/v1/sessions", &passed, &state).is_ok());
        assert!(allowed(&peer, &Method::POST, "/v1/sessions/a/kill", &passed, &state).is_err());
        passed.insert(ROLE_HEADER, "admin".parse().unwrap());
        assert!(allowed(&peer, &Method::POST, "/v1/sessions/a/kill", &passed, &state).is_ok());
    }
}
