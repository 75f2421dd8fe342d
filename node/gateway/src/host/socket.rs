//! `gw.sock`: accepts ksd's connections, reads whose stream it is, and hands it on.
//!
//! The socket is 0600 and only processes of this user (or root) are served.

use super::admin;
use super::call::Calling;
use super::egress;
use super::node::Node;
use super::wire::{drain, read_json, read_message, write_message};
use crate::limits::{CONNECTIONS_MAX, GUEST_PATIENCE, STREAMS_MAX};
use ks_proto::gateway::{GatewayAsk, Stamp};
use ks_proto::relay::{RelayAnswer, RelayAsk};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;

/// Listens at `path`, taking the place of a socket that a dead process left.
///
/// # Errors
/// As the system says.
pub fn bind(path: &Path) -> io::Result<UnixListener> {
    super::files::gone(std::fs::remove_file(path))?;
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Serves connections until the listener fails.
pub async fn serve(node: Arc<Node>, listener: UnixListener) -> io::Result<()> {
    let slots = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let own = rustix::process::getuid().as_raw();
    loop {
        let slot = slots.clone().acquire_owned().await.map_err(io::Error::other)?;
        let (stream, _) = match listener.accept().await {
            Ok(s) => s,
            // Too many open files: those that end make room.
            Err(e) if e.raw_os_error() == Some(24) || e.kind() == io::ErrorKind::ConnectionAborted => {
                tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                continue;
            }
            Err(e) => return Err(e),
        };
        if !stream.peer_cred().is_ok_and(|c| c.uid() == own || c.uid() == 0) {
            continue;
        }
        let (node, used) = (node.clone(), node.used());
        tokio::spawn(async move {
            connection(node, stream).await;
            drop((slot, used));
        });
    }
}

async fn connection(node: Arc<Node>, mut stream: UnixStream) {
    match tokio::time::timeout(GUEST_PATIENCE, read_message::<GatewayAsk>(&mut stream)).await {
        Ok(Ok(Some(GatewayAsk::Stream(stamp)))) => {
            let (mut read, mut write) = stream.into_split();
            guest(node, *stamp, &mut read, &mut write).await;
        }
        Ok(Ok(Some(GatewayAsk::Admin(ask)))) => admin::serve(node, *ask, stream).await,
        Ok(Ok(None)) => {}
        Ok(Err(e)) => tracing::warn!(error = %e, "a connection began with what is no ask"),
        Err(_) => tracing::debug!("a connection said nothing"),
    }
}

/// One stream of a guest.
async fn guest(node: Arc<Node>, stamp: Stamp, read: &mut (impl AsyncRead + Unpin), write: &mut (impl AsyncWrite + Unpin)) {
    let json = match tokio::time::timeout(GUEST_PATIENCE, read_json(read)).await {
        Ok(Ok(Some(json))) => json,
        Ok(Ok(None) | Err(_)) | Err(_) => return,
    };
    let ask = match RelayAsk::decode(&json) {
        Ok(ask) => ask,
        Err(e) => return refuse(read, write, 400, "bad-request", e.to_string()).await,
    };
    let position = match &ask {
        RelayAsk::Call(c) => c.position,
        RelayAsk::Rejoin(r) => r.position,
        RelayAsk::Egress { .. } => 0,
    };
    let session = match node.session(&stamp, position).await {
        Ok(session) => session,
        Err(e) => {
            tracing::error!(session = %stamp.session, error = %super::upstream::chain(&e), "a session's journal cannot be used");
            return refuse(read, write, 503, "journal", e.to_string()).await;
        }
    };
    session.seen(&stamp);
    let Ok(_stream) = session.streams().clone().try_acquire_owned() else {
        return refuse(read, write, 503, "busy", format!("{STREAMS_MAX} streams of this session are open already")).await;
    };
    match ask {
        RelayAsk::Egress { host, port } => egress::serve(&session, stamp.token, (host, port), read, write).await,
        RelayAsk::Call(call) => Calling { node, session, stamp }.call(call, read, write).await,
        RelayAsk::Rejoin(rejoin) => Calling { node, session, stamp }.rejoin(rejoin, read, write).await,
    }
}

async fn refuse(
    read: &mut (impl AsyncRead + Unpin),
    write: &mut (impl AsyncWrite + Unpin),
    status: u16,
    code: &str,
    message: String,
) {
    let answer = RelayAnswer::Refused { status, code: code.to_owned(), message };
    if let Ok(Ok(())) = tokio::time::timeout(GUEST_PATIENCE, write_message(write, &answer)).await {
        drain(read).await;
    }
}
