//! One yamux connection: streams that the node opens, each given to a task of its own, and streams that the relay wants.

use std::{future::poll_fn, sync::Arc, task::Poll};

use futures::io::{AsyncRead, AsyncWrite};
use ks_proto::relay::CALLS_MAX;

use crate::{agent::Agent, outlet::Wanted, server};

/// Streams that may be open at once: the node's, and one for each call of the relay and of the egress proxy.
const STREAMS_MAX: usize = 256 + CALLS_MAX + 256;
/// What one stream may hold unread: the smallest that yamux allows, so that Ctrl-C overtakes little output.
const WINDOW_BYTES: usize = 256 * 1024;

/// The yamux settings of the guest's end.
pub fn config() -> yamux::Config {
    let mut config = yamux::Config::default();
    config.set_max_num_streams(STREAMS_MAX).set_max_connection_receive_window(Some(STREAMS_MAX * WINDOW_BYTES));
    config
}

/// Serves one connection until it ends; its streams end with it.
pub async fn serve_connection<T: AsyncRead + AsyncWrite + Unpin>(agent: Arc<Agent>, io: T) {
    let mut connection = yamux::Connection::new(io, config(), yamux::Mode::Server);
    let (connected, mut wanted) = agent.outlet.connected();
    let mut waiting: Option<Wanted> = None;
    let why = poll_fn(|cx| {
        loop {
            if waiting.is_none()
                && let Poll::Ready(Some(next)) = wanted.poll_recv(cx)
            {
                waiting = Some(next);
            }
            // Nobody waits for a stream whose asker has given up.
            if waiting.as_ref().is_some_and(Wanted::is_closed) {
                waiting = None;
                continue;
            }
            if waiting.is_some()
                && let Poll::Ready(opened) = connection.poll_new_outbound(cx)
            {
                if let Some(to) = waiting.take() {
                    let _ = to.send(opened.map_err(std::io::Error::other));
                }
                continue;
            }
            match connection.poll_next_inbound(cx) {
                Poll::Ready(Some(Ok(stream))) => drop(tokio::spawn(server::handle(agent.clone(), stream, connected.id))),
                Poll::Ready(Some(Err(why))) => return Poll::Ready(Some(why)),
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Pending => return Poll::Pending,
            }
        }
    })
    .await;
    // An ended connection is ordinary: the node went away or a checkpoint was restored.
    if let Some(why) = why
        && !matches!(why, yamux::ConnectionError::Closed | yamux::ConnectionError::Io(_))
    {
        crate::log::line(&format!("channel connection failed: {why}"));
    }
}
