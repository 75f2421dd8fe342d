//! The doors: loopback HTTP, HTTPS under the fleet's certificate, and streams of members.

use super::auth::Door;
use super::tunnel;
use axum::{Extension, Router};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;

/// How long a TLS handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Connections of the HTTPS door at once; more wait in the kernel's queue.
const CONNECTIONS_MAX: usize = 1024;
/// After an accept that failed (no descriptors, mostly).
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// The router as seen through `door`.
pub fn through(router: &Router, door: Door) -> Router {
    router.clone().layer(Extension(door))
}

/// Serves HTTPS for as long as it is polled.
pub async fn https(listener: TcpListener, config: Arc<ServerConfig>, router: Router) {
    let acceptor = TlsAcceptor::from(config);
    let router = through(&router, Door::Tls);
    let places = Arc::new(tokio::sync::Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(e) => {
                tracing::warn!("the HTTPS door cannot accept: {e}");
                tokio::time::sleep(ACCEPT_AGAIN).await;
                continue;
            }
        };
        let _ = stream.set_nodelay(true);
        let (acceptor, router) = (acceptor.clone(), router.clone());
        tokio::spawn(async move {
            match tokio::time::timeout(HANDSHAKE, acceptor.accept(stream)).await {
                Ok(Ok(tls)) => tunnel::serve(tls, router).await,
                Ok(Err(e)) => tracing::debug!("a TLS handshake failed: {e}"),
                Err(_) => tracing::debug!("a TLS handshake took too long"),
            }
            drop(place);
        });
    }
}
