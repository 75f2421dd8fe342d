//! `peers.sock`: the way of this node's gateway to the gateways of the other members, which keep copies of its journals.
//!
//! The asking side names who is to have a copy and passes asks on; the asked side lets an ask through only if the replicated state,
//! as it is applied there, has the asking member as the session's owner at that epoch. Refuses to look into copies: it only carries
//! them.

use crate::fleet::Fleet;
use crate::fleet::wire::{Ask, Reply};
use crate::node::Node;
use crate::session::Input;
use ks_net::Proto;
use ks_proto::SessionId;
use ks_proto::copies::{CopyAnswer, CopyAsk, PEERS_SOCKET, PeersAnswer, PeersAsk};
use ks_proto::gateway::{AdminAnswer, AdminAsk};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;

/// Connections of the gateway at once.
const CONNECTIONS_MAX: usize = 256;
/// Another member has so long to answer.
const PEER: Duration = Duration::from_secs(2);
/// How often copies of sessions that are gone are looked for.
const SWEEP: Duration = Duration::from_secs(600);

/// Serves the gateway for as long as the node lives.
pub async fn run(node: Weak<Node>) {
    let Some(path) = node.upgrade().map(|n| n.gateway.dir().join(PEERS_SOCKET)) else { return };
    let listener = match bind(&path) {
        Ok(l) => l,
        Err(e) => return tracing::error!("{}: {e}; sessions of this node have no copies of their calls", path.display()),
    };
    let slots = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok(slot) = slots.clone().acquire_owned().await else { return };
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let own = rustix::process::getuid().as_raw();
        if !stream.peer_cred().is_ok_and(|c| c.uid() == own || c.uid() == 0) {
            continue;
        }
        let node = node.clone();
        tokio::spawn(async move {
            if let Err(e) = connection(&node, stream).await {
                tracing::debug!("the gateway's connection ended: {e}");
            }
            drop(slot);
        });
    }
}

fn bind(path: &Path) -> io::Result<UnixListener> {
    if let Some(dir) = path.parent() {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    }
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        Ok(()) | Err(_) => {}
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

async fn connection(node: &Weak<Node>, mut stream: UnixStream) -> io::Result<()> {
    loop {
        let ask = super::read(&mut stream).await?;
        let Some(node) = node.upgrade() else { return Ok(()) };
        let answer = match ask {
            PeersAsk::Set { session } => set(&node, session),
            PeersAsk::Bought { session } => {
                if let Some(machine) = node.handle(&session) {
                    machine.input(Input::Bought).await;
                }
                PeersAnswer::Done {}
            }
            PeersAsk::Copy { to, session, epoch, copy } => pass_on(&node.fleet, to, Ask::Journal { session, epoch, copy }).await,
        };
        super::write(&mut stream, &answer).await?;
    }
}

fn set(node: &Node, session: SessionId) -> PeersAnswer {
    let (state, me) = (node.state.read(), node.fleet.number());
    let Some(r) = state.sessions.get(&session).filter(|r| !r.tombstone) else {
        return PeersAnswer::Away { why: "this node knows of no such session".into() };
    };
    let others: Vec<u64> = state.members.values().filter(|m| m.is_member() && m.number != me).map(|m| m.number).collect();
    let liveness = node.fleet.liveness_ms();
    let live = |n: &u64| node.fleet.seen_ms_ago(*n).is_some_and(|ago| ago < liveness);
    let in_set = |n: &u64| r.replicas.contains(n);
    let holders = holders(&others, live, in_set, state.copies_wanted(r));
    PeersAnswer::Set { epoch: r.token.epoch, holders, members: others.into_iter().filter(|n| live(n)).collect() }
}

/// As many others as there are to be copies besides this one: live ones of the set, other live ones, then the rest.
fn holders(others: &[u64], live: impl Fn(&u64) -> bool, in_set: impl Fn(&u64) -> bool, copies: usize) -> Vec<u64> {
    let mut sorted = others.to_vec();
    sorted.sort_by_key(|n| (!live(n), !in_set(n), *n));
    sorted.truncate(copies.saturating_sub(1));
    sorted
}

async fn pass_on(fleet: &Fleet, to: u64, ask: Ask) -> PeersAnswer {
    let away = |why: String| PeersAnswer::Away { why };
    let Some(peer) = fleet.book.peer(to) else { return away("it is no member".into()) };
    let request = match serde_json::to_vec(&ask) {
        Ok(r) => r,
        Err(e) => return away(e.to_string()),
    };
    match fleet.control.call(peer, Proto::Command, request, PEER).await {
        Err(e) => away(e.to_string()),
        Ok(answer) => match serde_json::from_slice(&answer) {
            Ok(Reply::Journal { answer }) => PeersAnswer::Copy { copy: answer },
            Ok(Reply::Refused { why }) => away(why),
            Ok(Reply::Lease { .. } | Reply::Heard {}) => away("it answered something else".into()),
            Err(e) => away(e.to_string()),
        },
    }
}

/// What member `from` asks of the copy here.
pub async fn asked(node: &Arc<Node>, from: u64, session: SessionId, epoch: u64, copy: CopyAsk) -> CopyAnswer {
    let may = {
        let state = node.state.read();
        let known = state.sessions.get(&session).filter(|r| !r.tombstone).map(|r| (r.owner, r.token.epoch));
        admit(known, from, epoch)
    };
    if let Err(answer) = may {
        return answer;
    }
    match node.gateway.admin(AdminAsk::Copy { session, epoch, copy }).await {
        Ok(AdminAnswer::Copy { copy }) => copy,
        Ok(other) => CopyAnswer::Away { why: format!("its gateway answered {other:?}") },
        Err(e) => CopyAnswer::Away { why: format!("{}: {}", e.what, e.why) },
    }
}

/// Whether `from` may ask as the owner at `epoch` of a session of which (owner, epoch) is known here.
fn admit(known: Option<(u64, u64)>, from: u64, epoch: u64) -> Result<(), CopyAnswer> {
    match known {
        None => Err(CopyAnswer::Away { why: "this node knows of no such session".into() }),
        Some((_, newer)) if newer > epoch => Err(CopyAnswer::Sealed { epoch: newer }),
        Some((owner, same)) if same == epoch && owner == from => Ok(()),
        Some((owner, known)) => {
            Err(CopyAnswer::Away { why: format!("as this node knows it, node {owner} owns the session at epoch {known}") })
        }
    }
}

/// Drops copies of sessions that are gone, again and again.
pub async fn sweep(node: Weak<Node>) {
    loop {
        tokio::time::sleep(SWEEP).await;
        let Some(node) = node.upgrade() else { return };
        // Without copies no process is started to ask.
        if !node.gateway.dir().join("copies").exists() || node.state.read().sessions.values().next().is_none() {
            continue;
        }
        let Ok(AdminAnswer::Copies { sessions }) = node.gateway.admin(AdminAsk::CopyList {}).await else { continue };
        for session in sessions {
            let gone = node.state.read().sessions.get(&session).is_none();
            if gone && let Err(e) = node.gateway.admin(AdminAsk::Forget { session }).await {
                tracing::warn!(session = %session, "a copy of its journal of model calls stays: {e}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_owner_at_that_epoch_is_let_through() {
        assert_eq!(admit(Some((2, 5)), 2, 5), Ok(()));
        assert_eq!(admit(Some((2, 5)), 2, 4), Err(CopyAnswer::Sealed { epoch: 5 }));
        assert_eq!(admit(Some((2, 5)), 1, 4), Err(CopyAnswer::Sealed { epoch: 5 }));
        for (known, from, epoch) in [(Some((2, 5)), 1, 5), (Some((2, 5)), 2, 6), (Some((2, 5)), 1, 6), (None, 1, 1)] {
            assert!(matches!(admit(known, from, epoch), Err(CopyAnswer::Away { .. })), "{known:?} {from} {epoch}");
        }
    }

    #[test]
    fn holders_are_live_ones_of_the_set_then_live_ones_then_dead_ones() {
        let (live, set) = ([3, 4], [2, 4]);
        let of = |copies| holders(&[2, 3, 4], |n| live.contains(n), |n| set.contains(n), copies);
        assert_eq!((of(1), of(2), of(3), of(4), of(9)), (vec![], vec![4], vec![4, 3], vec![4, 3, 2], vec![4, 3, 2]));
        assert_eq!(holders(&[], |_| true, |_| true, 3), Vec::<u64>::new());
    }
}
