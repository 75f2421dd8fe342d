//! One HTTP request over any byte stream to another node's API, and its answer back. A WebSocket goes on as raw bytes.
//!
//! ```text
//!   client ──request──► this node ──stream──► owner's router ──answer──► this node ──► client
//!   after a 101 both connections are joined byte for byte, both ways, until either ends
//! ```
//! Nothing is buffered beyond hyper's own windows: a slow reader slows the far writer down.

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::response::Response;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use ks_proto::api::ApiError;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};

/// How long the far node may take to begin its answer. Long calls answer at once and stream.
const ANSWER: Duration = Duration::from_secs(120);

/// Sends `request` over `io` and gives the answer; a WebSocket that the far node accepts is joined to the caller's. The
/// connection ends with it.
///
/// # Errors
/// `unreachable` when the stream breaks before an answer came: whether the far node acted is then unknown.
pub async fn forward<I>(io: I, mut request: Request) -> Result<Response, ApiError>
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let near = request.extensions_mut().remove::<OnUpgrade>();
    let response = exchange(io, request).await?;
    Ok(switched(response, near))
}

/// Sends `request` over `io` and gives the answer as it comes.
///
/// # Errors
/// As [`forward`].
pub async fn exchange<I>(io: I, request: Request) -> Result<Response, ApiError>
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let broken = |why: String| {
        ApiError::new("unreachable", "the session's node did not answer", why, "try again; `ks ls` shows where the session is")
    };
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake::<_, Body>(TokioIo::new(io)).await.map_err(|e| broken(e.to_string()))?;
    tokio::spawn(async move {
        if let Err(e) = connection.with_upgrades().await {
            tracing::debug!("a forwarded call's connection ended: {e}");
        }
    });
    let answer = tokio::time::timeout(ANSWER, sender.send_request(request)).await;
    let response =
        answer.map_err(|_| broken(format!("no answer in {} s", ANSWER.as_secs())))?.map_err(|e| broken(e.to_string()))?;
    Ok(response.map(Body::new))
}

/// Joins the caller's connection to the far one when the far node changed protocols.
pub fn switched(mut response: Response, near: Option<OnUpgrade>) -> Response {
    if response.status() == hyper::StatusCode::SWITCHING_PROTOCOLS
        && let Some(near) = near
    {
        let far = hyper::upgrade::on(&mut response);
        tokio::spawn(join(near, far));
    }
    response
}

async fn join(near: OnUpgrade, far: OnUpgrade) {
    match tokio::join!(near, far) {
        (Ok(near), Ok(far)) => {
            let (mut near, mut far) = (TokioIo::new(near), TokioIo::new(far));
            // Whichever end breaks, both are dropped: the client then reconnects.
            let _ = tokio::io::copy_bidirectional(&mut near, &mut far).await;
        }
        (near, far) => {
            let why = near.err().or(far.err()).map(|e| e.to_string()).unwrap_or_default();
            tracing::debug!("a forwarded WebSocket did not open: {why}");
        }
    }
}

/// Serves one connection with `router`, WebSockets included, until it ends.
pub async fn serve<I>(io: I, router: Router)
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = TowerToHyperService::new(router);
    let served = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(io), service).with_upgrades().await;
    if let Err(e) = served {
        tracing::debug!("a connection of the API ended: {e}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::extract::ws::{Message, WebSocketUpgrade};
    use axum::routing::{get, post};
    use futures::{SinkExt, StreamExt};

    fn far() -> Router {
        Router::new().route("/echo", post(|body: String| async move { format!("far got {body}") })).route(
            "/ws",
            get(|ws: WebSocketUpgrade| async move {
                ws.on_upgrade(|mut s| async move {
                    while let Some(Ok(Message::Binary(b))) = s.recv().await {
                        let _ = s.send(Message::Binary(b)).await;
                    }
                })
            }),
        )
    }

    /// A router that forwards everything over an in-memory stream to `far`.
    fn near() -> Router {
        Router::new().fallback(|request: Request| async move {
            let (a, b) = tokio::io::duplex(4096);
            tokio::spawn(serve(b, far()));
            forward(a, request).await.unwrap_or_else(|e| panic!("{e}"))
        })
    }

    /// What else is in the build gives reqwest a TLS backend, which wants a provider even for plain loopback.
    fn client() -> reqwest::Client {
        drop(tokio_rustls::rustls::crypto::ring::default_provider().install_default());
        reqwest::Client::new()
    }

    async fn listening() -> std::net::SocketAddr {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, near()).await });
        at
    }

    #[tokio::test]
    async fn a_request_and_its_body_pass_both_ways() {
        let at = listening().await;
        let big = "x".repeat(300_000);
        let got = client().post(format!("http://{at}/echo")).body(big.clone()).send().await.unwrap();
        assert_eq!(got.text().await.unwrap(), format!("far got {big}"));
        let missing = client().get(format!("http://{at}/nowhere")).send().await.unwrap();
        assert_eq!(missing.status(), 404);
    }

    #[tokio::test]
    async fn a_websocket_passes_bytes_both_ways() {
        let at = listening().await;
        let (mut ws, _) = tokio_tungstenite::connect_async(format!("ws://{at}/ws")).await.unwrap();
        for n in 0..20u8 {
            let bytes = vec![n; 5000 * usize::from(n)];
            ws.send(tokio_tungstenite::tungstenite::Message::Binary(bytes.clone().into())).await.unwrap();
            let back = ws.next().await.unwrap().unwrap();
            assert_eq!(back.into_data().to_vec(), bytes);
        }
    }

    #[tokio::test]
    async fn a_stream_that_breaks_is_unreachable() {
        let (a, b) = tokio::io::duplex(4096);
        drop(b);
        let request = Request::builder().uri("/echo").body(Body::empty()).unwrap();
        let e = forward(a, request).await.unwrap_err();
        assert_eq!(e.code, "unreachable");
    }
}
