//! The guest channel's node end: one yamux connection over the VMM's channel socket, whose streams we open.

use futures::future::poll_fn;
use std::io;
use std::path::Path;
use std::task::Poll;
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::compat::{Compat, FuturesAsyncReadCompatExt, TokioAsyncReadCompatExt};

/// Streams that may wait to be opened.
const OPENING_MAX: usize = 64;

/// One stream to the guest.
pub type GuestStream = Compat<yamux::Stream>;

/// The node's end. Cheap to clone; the connection ends with the last clone.
#[derive(Clone)]
pub struct Channel {
    open: mpsc::Sender<oneshot::Sender<io::Result<GuestStream>>>,
    closed: watch::Receiver<bool>,
}

impl Channel {
    /// Connects to the VMM's channel socket.
    ///
    /// # Errors
    /// If nothing listens there.
    pub async fn connect(path: &Path) -> io::Result<Self> {
        Ok(Self::over(UnixStream::connect(path).await?))
    }

    /// Over a connected socket.
    pub fn over(socket: UnixStream) -> Self {
        let (open, rx) = mpsc::channel(OPENING_MAX);
        let (tx, closed) = watch::channel(false);
        let connection = yamux::Connection::new(socket.compat(), yamux::Config::default(), yamux::Mode::Client);
        tokio::spawn(async move {
            drive(connection, rx).await;
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
                // The guest opens no streams: one that does is dropped, which resets it.
                Poll::Ready(Some(Ok(_))) => continue,
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
