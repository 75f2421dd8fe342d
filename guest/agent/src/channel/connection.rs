//! One yamux connection: accepts streams that the node opens and gives each to a task of its own.

use std::{future::poll_fn, sync::Arc};

use futures::io::{AsyncRead, AsyncWrite};

use crate::{agent::Agent, server};

/// Streams that the node may have open at once.
const STREAMS_MAX: usize = 256;
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
    loop {
        match poll_fn(|cx| connection.poll_next_inbound(cx)).await {
            Some(Ok(stream)) => {
                tokio::spawn(server::handle(agent.clone(), stream));
            }
            Some(Err(why)) => {
                // An ended connection is ordinary: the node went away or a checkpoint was restored.
                if !matches!(why, yamux::ConnectionError::Closed | yamux::ConnectionError::Io(_)) {
                    crate::log::line(&format!("channel connection failed: {why}"));
                }
                return;
            }
            None => return,
        }
    }
}
