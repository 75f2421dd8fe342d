//! The relay of a session: plain HTTP for programs inside, resumable streams to the gateway outside.
//!
//! ```text
//!   agent ──HTTP/1.1──► server ──► call: one task per call ──Dial──► stream ──► (node) ──► gateway
//!                          │          │  stream breaks: dial again, Rejoin at the offset
//!                          │          └─ the client closes: GONE
//!                          └── spool: the request's body until an answer begins
//!   git, pip … ──CONNECT, SOCKS5, http://──► egress ──Dial──► stream
//! ```
//!
//! The clients' connections and this relay live in guest memory, so a restore brings back both as they were: only the
//! streams to the outside are new. The same code runs in a guest and, for measuring, on a host.
//!
//! Refuses to know keys, providers' addresses or what a body means. Never decides what is bought: it asks.

mod answer;
mod call;
pub mod egress;
mod server;
mod spool;
mod timeline;
mod wire;

use std::{
    io,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::Semaphore,
};

pub use timeline::Nonce;
use timeline::Timeline;

/// Where programs find the relay inside a guest.
pub const PORT: u16 = 4180;
/// Where programs find the egress proxy inside a guest.
pub const EGRESS_PORT: u16 = 4181;
/// Connections of clients to either port at once.
pub const CONNECTIONS_MAX: usize = 1_500;
/// Request bodies up to this size stay in memory.
pub const SPOOL_MEMORY_BYTES: usize = 1024 * 1024;
/// First and longest pause between two attempts to reach the gateway.
pub(crate) const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(2));

/// Opens streams to the gateway.
pub trait Dial: Send + Sync + 'static {
    /// A stream.
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    /// Opens one. Waits, without a deadline, while there is no way out; an error is followed by another attempt.
    fn open(&self) -> impl Future<Output = io::Result<Self::Stream>> + Send;
}

/// The relay. Clones share it.
pub struct Relay<D> {
    inner: Arc<Inner<D>>,
}

impl<D> Clone for Relay<D> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone() }
    }
}

pub(crate) struct Inner<D> {
    pub(crate) dial: D,
    timeline: Mutex<Timeline>,
    pub(crate) calls: Arc<Semaphore>,
    pub(crate) connections: Arc<Semaphore>,
    pub(crate) spool: PathBuf,
}

impl<D> Inner<D> {
    pub(crate) fn timeline<T>(&self, f: impl FnOnce(&mut Timeline) -> T) -> T {
        f(&mut self.timeline.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl<D: Dial> Relay<D> {
    /// A relay in its first timeline. Bodies too large for memory go to files in `spool`, which is made when needed.
    pub fn new(dial: D, nonce: Nonce, spool: PathBuf) -> Self {
        let timeline = Mutex::new(Timeline::new(nonce));
        let calls = Arc::new(Semaphore::new(ks_proto::relay::CALLS_MAX));
        let connections = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        Self { inner: Arc::new(Inner { dial, timeline, calls, connections, spool }) }
    }

    /// The machine was restored, as the same session or as a fork: a new timeline begins. To be called before a stream can
    /// be opened again.
    pub fn restored(&self, nonce: Nonce) {
        self.inner.timeline(|t| t.restored(nonce));
    }

    /// Serves programs on `listener` for ever.
    pub async fn serve(&self, listener: tokio::net::TcpListener) -> io::Error {
        server::serve(self.inner.clone(), listener).await
    }

    /// Serves one client's connection until it ends.
    pub async fn serve_connection<S>(&self, io: S)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        server::connection(self.inner.clone(), io).await;
    }

    /// Serves the egress proxy on `listener` for ever.
    pub async fn serve_egress(&self, listener: tokio::net::TcpListener) -> io::Error {
        egress::serve(self.inner.clone(), listener).await
    }
}

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_egress;
