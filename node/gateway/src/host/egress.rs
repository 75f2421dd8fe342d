//! The host side of the egress proxy: asks the session's allow-list, resolves the name, connects, and counts bytes.

use super::files;
use super::live::Refusal;
use super::session::Session;
use super::wire::write_message;
use crate::allow::{permits, permits_address};
use crate::limits::{CONNECT_PATIENCE, EGRESS_MAX};
use ks_gateway::ledger::Entry;
use ks_proto::RunToken;
use ks_proto::relay::RelayAnswer;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;

/// How often the lease is asked while bytes pass.
const LEASE_LOOK: Duration = Duration::from_millis(250);

/// One connection of a guest to elsewhere, from the ask to its end.
pub async fn serve(
    session: &Arc<Session>,
    token: RunToken,
    (host, port): (String, u16),
    read: &mut (impl AsyncRead + Unpin),
    write: &mut (impl AsyncWrite + Unpin),
) {
    let started_ms = files::unix_ms();
    let (allowed, reason, bytes_out, bytes_in) = match connect(session, token, &host, port).await {
        Err(refusal) => {
            let reason = refusal.message.clone();
            let allowed = refusal.code != "not-allowed";
            let (status, code, message) = (refusal.status, refusal.code.to_owned(), refusal.message);
            let _ = write_message(write, &RelayAnswer::Refused { status, code, message }).await;
            (allowed, reason, 0, 0)
        }
        Ok((mut tcp, _slot)) => {
            if write_message(write, &RelayAnswer::Ok {}).await.is_err() {
                return;
            }
            let (out, inward, reason) = pipe(session, token, &mut tcp, read, write).await;
            (true, reason, out, inward)
        }
    };
    if !allowed && !session.notes_refusal() {
        return tracing::warn!(session = %session.id(), host, "more refused connections in a minute than are written down");
    }
    let entry = Entry::Egress { host, port, allowed, reason, bytes_out, bytes_in, started_ms };
    if let Err(e) = session.journal().append(entry).await {
        tracing::warn!(session = %session.id(), error = %e, "an egress line was not journaled");
    }
}

async fn connect(
    session: &Session,
    token: RunToken,
    host: &str,
    port: u16,
) -> Result<(TcpStream, tokio::sync::OwnedSemaphorePermit), Refusal> {
    let denied = |why: String| Refusal::new(403, "not-allowed", why);
    let list = session.allow_list();
    if !permits(&list, host, port) {
        return Err(denied(format!("{host}:{port} is not on this session's allow-list; its user can add it: ks egress allow")));
    }
    session.may_pass(token).map_err(|e| Refusal::new(503, "lapsed", e.to_string()))?;
    let slots = session.egress_slots().clone();
    let slot = slots
        .try_acquire_owned()
        .map_err(|_| Refusal::new(503, "busy", format!("{EGRESS_MAX} connections of this session are open already")))?;
    let failed = |why: String| Refusal::new(502, "unreached", why);
    let work = async {
        let found = match host.trim_matches(['[', ']']).parse::<IpAddr>() {
            Ok(address) => vec![SocketAddr::new(address, port)],
            Err(_) => tokio::net::lookup_host((host, port)).await.map_err(|e| failed(format!("{host}: {e}")))?.collect(),
        };
        let (may, not): (Vec<SocketAddr>, Vec<SocketAddr>) =
            found.into_iter().partition(|a| permits_address(&list, a.ip(), port));
        if may.is_empty() {
            let which = not.first().map_or_else(|| "no address".to_owned(), |a| a.ip().to_string());
            return Err(denied(format!("{host} is {which}, which is not of the public internet; name that address to allow it")));
        }
        TcpStream::connect(&may[..]).await.map_err(|e| failed(format!("{host}:{port}: {e}")))
    };
    let tcp = tokio::time::timeout(CONNECT_PATIENCE, work)
        .await
        .map_err(|_| failed(format!("{host}:{port} did not answer within {CONNECT_PATIENCE:?}")))??;
    let _ = tcp.set_nodelay(true);
    Ok((tcp, slot))
}

/// Copies one way, half-close passed on; adds to `count`.
async fn one_way(
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
    count: &mut u64,
) -> std::io::Result<()> {
    let mut buf = vec![0; 32 * 1024];
    loop {
        let n = from.read(&mut buf).await?;
        if n == 0 {
            return to.shutdown().await;
        }
        to.write_all(&buf[..n]).await?;
        to.flush().await?;
        *count += n as u64;
    }
}

async fn pipe(
    session: &Session,
    token: RunToken,
    tcp: &mut TcpStream,
    read: &mut (impl AsyncRead + Unpin),
    write: &mut (impl AsyncWrite + Unpin),
) -> (u64, u64, String) {
    let (mut out, mut inward) = (0, 0);
    let reason = {
        let (mut from, mut to) = tcp.split();
        let both = async { tokio::try_join!(one_way(read, &mut to, &mut out), one_way(&mut from, write, &mut inward)) };
        let lapsed = async {
            let mut look = tokio::time::interval(LEASE_LOOK);
            loop {
                look.tick().await;
                if let Err(why) = session.may_pass(token) {
                    return why;
                }
            }
        };
        tokio::select! {
            done = both => done.err().map(|e| e.to_string()).unwrap_or_default(),
            why = lapsed => why.to_string(),
        }
    };
    (out, inward, reason)
}
