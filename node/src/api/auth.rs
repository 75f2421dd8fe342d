//! Who may call: the bearer token (compared in constant time), and Host and Origin headers that name this node, so that
//! no web page can reach it through a browser (DNS rebinding, cross-site requests).

use super::App;
use super::reply::Refused;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use ks_proto::api::ApiError;

/// Refuses a request that may not be served.
pub async fn check(State(app): State<App>, request: Request, next: Next) -> Response {
    match allowed(request.headers(), app.port, &app.token) {
        Ok(()) => next.run(request).await,
        Err(e) => Refused(e).into_response(),
    }
}

fn allowed(headers: &HeaderMap, port: u16, token: &str) -> Result<(), ApiError> {
    let refuse =
        |why: &str| ApiError::new("not-allowed", "the node refuses the request", why, "use the url and token of api.json");
    let text = |name| headers.get(name).and_then(|v| v.to_str().ok());
    if !text(header::HOST).is_some_and(|h| is_own(h, port)) {
        return Err(refuse("its Host header does not name this node"));
    }
    if let Some(origin) = headers.get(header::ORIGIN) {
        let own = origin.to_str().ok().and_then(|o| o.strip_prefix("http://")).is_some_and(|h| is_own(h, port));
        if !own {
            return Err(refuse("its Origin header is another site"));
        }
    }
    let given = text(header::AUTHORIZATION).and_then(|v| v.strip_prefix("Bearer ")).unwrap_or_default();
    if !equal(given.trim(), token) {
        return Err(refuse("its bearer token is missing or wrong"));
    }
    Ok(())
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
            allowed(&h, 7000, "secret").is_ok()
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
}
