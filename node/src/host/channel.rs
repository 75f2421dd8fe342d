//! The guest channel's node end: one yamux connection over the VMM's channel socket. We open streams, and the guest's relay does.

use futures::future::poll_fn;
use std::io;
use std::path::Path;
use std::task::Poll;
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::compat::{Compat, FuturesAsyncReadCompatExt, TokioAsyncReadCompatExt};

/// Streams that may wait to be opened.
const OPENING_MAX: usize = 64;

/// Streams of one connection at once, ours and the guest's; yamux wants 256 KiB of window for each.
const STREAMS_MAX: usize = 2048;

/// Where streams that the guest opens go; what finds no room is reset.
pub type Inbound = mpsc::Sender<GuestStream>;

/// One stream to the guest.
pub type GuestStream = Compat<yamux::Stream>;

/// The node's end. Cheap to clone; the connection ends with the last clone.
#[derive(Clone)]
pub struct Channel {
    open: mpsc::Sender<oneshot::Sender<io::Result<GuestStream>>>,
    closed: watch::Receiver<bool>,
}

impl Channel {
    /// Connects to the VMM's channel socket. Without `inbound`, streams of the guest are reset.
    ///
    /// # Errors
    /// If nothing listens there.
    pub async fn connect(path: &Path, inbound: Option<Inbound>) -> io::Result<Self> {
        Ok(Self::over(UnixStream::connect(path).await?, inbound))
    }

    /// Over a connected socket.
    pub fn over(socket: UnixStream, inbound: Option<Inbound>) -> Self {
        let (open, rx) = mpsc::channel(OPENING_MAX);
        let (tx, closed) = watch::channel(false);
        let mut config = yamux::Config::default();
        config.set_max_num_streams(STREAMS_MAX);
        let connection = yamux::Connection::new(socket.compat(), config, yamux::Mode::Client);
        tokio::spawn(async move {
            drive(connection, rx, inbound).await;
            let _ = tx.send(true);
        });
        Self { open, closed }
    }

    /// True once the connection ended.
    pub fn is_closed(&self) -> bool {
        *self.closed.borrow()
    }

    /// Opens a stream.
    ///
    /// # Errors
    /// If the connection is lost.
    pub async fn stream(&self) -> io::Result<GuestStream> {
        let lost = || io::Error::new(io::ErrorKind::BrokenPipe, "the guest channel is closed");
        let (tx, rx) = oneshot::channel();
        self.open.send(tx).await.map_err(|_| lost())?;
        rx.await.map_err(|_| lost())?
    }
}

async fn drive(
    mut connection: yamux::Connection<Compat<UnixStream>>,
    mut rx: mpsc::Receiver<oneshot::Sender<io::Result<GuestStream>>>,
    inbound: Option<Inbound>,
) {
    let mut waiting: Option<oneshot::Sender<io::Result<GuestStream>>> = None;
    let lost = poll_fn(|cx| {
        loop {
            if waiting.is_none() {
                match rx.poll_recv(cx) {
                    Poll::Ready(Some(tx)) => waiting = Some(tx),
                    Poll::Ready(None) => return Poll::Ready(false),
                    Poll::Pending => {}
                }
            }
            if waiting.is_some()
                && let Poll::Ready(r) = connection.poll_new_outbound(cx)
            {
                if let Some(tx) = waiting.take() {
                    let _ = tx.send(r.map(FuturesAsyncReadCompatExt::compat).map_err(io::Error::other));
                }
                continue;
            }
            return match connection.poll_next_inbound(cx) {
                Poll::Ready(Some(Ok(stream))) => {
                    if let Some(to) = &inbound {
                        let _ = to.try_send(stream.compat());
                    }
                    continue;
                }
                Poll::Ready(Some(Err(_)) | None) => Poll::Ready(true),
                Poll::Pending => Poll::Pending,
            };
        }
    })
    .await;
    if !lost {
        let _ = poll_fn(|cx| connection.poll_close(cx)).await;
    }
}
