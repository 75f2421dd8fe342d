//! The way out for the relay: streams that this guest opens to the node, over whichever connection there is.
//!
//! ```text
//!   no connection ──marker──► connected, held ──hook or go──► connected, open ──connection ends──► no connection
//! ```
//!
//! A new connection is held until the node has run a hook on it, or said that none is due: after a restore nothing may
//! leave before the relay is in its new timeline. Waiting costs nothing: there is no timer here.

use std::{io, sync::Arc};

use ks_relay::Dial;
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::compat::{Compat, FuturesAsyncReadCompatExt as _};

/// Streams that may wait to be opened on one connection.
const OPENING_MAX: usize = 64;

/// Where a connection's task puts a stream that it has opened.
pub type Wanted = oneshot::Sender<io::Result<yamux::Stream>>;

#[derive(Debug, Clone)]
struct Way {
    id: u64,
    open: mpsc::Sender<Wanted>,
    held: bool,
}

/// See the module.
#[derive(Debug)]
pub struct Outlet {
    way: watch::Sender<Option<Way>>,
    ids: std::sync::atomic::AtomicU64,
}

impl Default for Outlet {
    fn default() -> Self {
        Self { way: watch::Sender::new(None), ids: std::sync::atomic::AtomicU64::new(1) }
    }
}

/// A connection, for as long as this lives.
#[derive(Debug)]
pub struct Connected {
    outlet: Arc<Outlet>,
    /// Names the connection in [`Outlet::go`].
    pub id: u64,
}

impl Drop for Connected {
    fn drop(&mut self) {
        self.outlet.way.send_if_modified(|way| {
            let mine = way.as_ref().is_some_and(|w| w.id == self.id);
            if mine {
                *way = None;
            }
            mine
        });
    }
}

impl Outlet {
    /// A new connection takes the place of any other; what it is asked to open comes out of the receiver.
    pub fn connected(self: &Arc<Self>) -> (Connected, mpsc::Receiver<Wanted>) {
        let (open, wanted) = mpsc::channel(OPENING_MAX);
        let id = self.ids.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        self.way.send_replace(Some(Way { id, open, held: true }));
        (Connected { outlet: self.clone(), id }, wanted)
    }

    /// The connection `id` may be used; another one that came meanwhile waits for its own word.
    pub fn go(&self, id: u64) {
        self.way.send_if_modified(|way| match way {
            Some(w) if w.id == id && w.held => {
                w.held = false;
                true
            }
            _ => false,
        });
    }
}

/// The outlet as the relay knows it.
#[derive(Debug, Clone)]
pub struct Out(pub Arc<Outlet>);

impl Dial for Out {
    type Stream = Compat<yamux::Stream>;

    async fn open(&self) -> io::Result<Self::Stream> {
        let mut ways = self.0.way.subscribe();
        let gone = || io::Error::new(io::ErrorKind::NotConnected, "the connection to the node ended");
        let way = ways.wait_for(|w| w.as_ref().is_some_and(|w| !w.held)).await.map_err(|_| gone())?.clone();
        let way = way.ok_or_else(gone)?;
        let (tx, rx) = oneshot::channel();
        way.open.send(tx).await.map_err(|_| gone())?;
        Ok(rx.await.map_err(|_| gone())??.compat())
    }
}
