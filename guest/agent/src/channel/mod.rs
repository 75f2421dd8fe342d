//! The guest channel: one byte pipe to the host that carries generations of yamux connections.
//!
//! ```text
//!   port --bytes--> Pump --marker--> drop the old yamux connection, echo the marker, begin a new one
//!                        --data----> current connection --streams--> server::handle, one task each
//! ```
//!
//! Refuses to keep anything of an older generation: streams end, programs on them get SIGHUP.

mod connection;
mod port;
mod pump;

use std::{io, os::fd::OwnedFd, path::Path, sync::Arc};

pub use connection::serve_connection;
pub use port::{Port, find};
pub use pump::Pump;
use tokio_util::compat::TokioAsyncReadCompatExt as _;

use crate::agent::Agent;

/// Serves generations on a framed pipe until the pipe fails.
pub async fn serve_framed(agent: Arc<Agent>, port: Port) -> io::Error {
    let begin = move |io: tokio::io::DuplexStream| {
        let agent = agent.clone();
        tokio::spawn(async move { serve_connection(agent, io.compat()).await })
    };
    Pump::new(port, begin).run().await
}

/// Listens on a Unix socket and serves each connection, until the process is stopped.
pub fn serve_socket(socket: &Path, framed: bool, state: &Path) -> io::Result<()> {
    // tmux is started elsewhere and is told where its socket is.
    let state = &std::path::absolute(state)?;
    std::fs::create_dir_all(state)?;
    match std::fs::remove_file(socket) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        Ok(()) | Err(_) => {}
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let agent = Agent::outside(state);
        let reaping = agent.clone();
        tokio::spawn(async move { reaping.reaper.run().await });
        agent.note_outside();
        let listener = tokio::net::UnixListener::bind(socket)?;
        loop {
            let (stream, _) = listener.accept().await?;
            let agent = agent.clone();
            if framed {
                let port = Port::stream(OwnedFd::from(stream.into_std()?))?;
                tokio::spawn(async move {
                    let why = serve_framed(agent, port).await;
                    crate::log::line(&format!("framed connection ended: {why}"));
                });
            } else {
                tokio::spawn(async move { serve_connection(agent, stream.compat()).await });
            }
        }
    })
}
