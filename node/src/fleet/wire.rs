//! Calls between members: Raft's messages as they are, and a few commands of our own as JSON.
//!
//! Whatever a member sends is answered or refused; nothing that it says is taken for its identity, which the control plane has
//! proved.

use super::placing::Notice;
use super::renewal::{Message, not_leader};
use super::{Book, Fleet};
use crate::host::gateway::peers;
use futures::FutureExt;
use futures::future::BoxFuture;
use ks_fleet::lease::Answer;
use ks_net::{ControlPlane, Handler, PeerId, Proto};
use ks_proto::SessionId;
use ks_proto::copies::{CopyAnswer, CopyAsk};
use ks_raft::host::{Wire, WireError};
use serde::{Deserialize, Serialize};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;
use tokio::sync::oneshot;

/// How long a notice to the leader may take.
const TELL: Duration = Duration::from_secs(3);

/// A command of one member to another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "kebab-case")]
pub enum Ask {
    /// The node lease, asked of the leader.
    Renew {
        /// Instance that asks.
        incarnation: u64,
    },
    /// The asker could not start a session that is its own.
    StartFailed {
        /// Session.
        session: SessionId,
        /// Epoch.
        epoch: u64,
        /// Why.
        reason: String,
    },
    /// It runs there.
    Started {
        /// Session.
        session: SessionId,
        /// Epoch.
        epoch: u64,
    },
    /// The asker owns the session at this epoch: about the copy of its gateway's journal.
    Journal {
        /// Session.
        session: SessionId,
        /// Epoch.
        epoch: u64,
        /// What.
        copy: CopyAsk,
    },
}

/// Its answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "kebab-case")]
pub enum Reply {
    /// To `Renew`.
    Lease {
        /// What the leader says.
        answer: Answer,
    },
    /// Heard.
    Heard {},
    /// To `Journal`.
    Journal {
        /// What the copy's holder says.
        answer: CopyAnswer,
    },
    /// The request was not understood, or came from a stranger.
    Refused {
        /// Why.
        why: String,
    },
}

/// Consensus's way to the members, over the control plane.
pub struct ControlWire {
    control: Arc<OnceLock<ControlPlane>>,
    book: Book,
}

impl ControlWire {
    /// Over `control`, which is set once it listens.
    pub fn new(control: Arc<OnceLock<ControlPlane>>, book: Book) -> Self {
        Self { control, book }
    }
}

impl Wire for ControlWire {
    fn call(&self, to: u64, request: Vec<u8>, deadline: Duration) -> BoxFuture<'static, Result<Vec<u8>, WireError>> {
        let (control, peer) = (self.control.get().cloned(), self.book.peer(to));
        async move {
            let (Some(control), Some(peer)) = (control, peer) else {
                return Err(WireError::Unreachable { to, why: "it is no member that this node knows".into() });
            };
            control.call(peer, Proto::Raft, request, deadline).await.map_err(|e| {
                if e.not_handled() {
                    WireError::Unreachable { to, why: e.to_string() }
                } else {
                    WireError::Timeout { to, ms: u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX) }
                }
            })
        }
        .boxed()
    }
}

/// Answers members.
#[derive(Default)]
pub struct Answerer {
    fleet: OnceLock<Weak<Fleet>>,
}

impl Answerer {
    /// From now on there is a fleet to answer for.
    pub fn serve(&self, fleet: &Arc<Fleet>) {
        let _ = self.fleet.set(Arc::downgrade(fleet));
    }
}

impl Handler for Answerer {
    fn handle(&self, peer: PeerId, proto: Proto, request: Vec<u8>) -> BoxFuture<'static, Vec<u8>> {
        let fleet = self.fleet.get().and_then(Weak::upgrade);
        async move {
            let Some(fleet) = fleet else { return refused("this node is starting") };
            let Some(number) = fleet.book.number(&peer) else { return refused("this node does not know the caller as a member") };
            match proto {
                Proto::Raft => fleet.consensus.serve(number, &request).await,
                Proto::Command => command(&fleet, number, &request).await,
            }
        }
        .boxed()
    }
}

fn refused(why: &str) -> Vec<u8> {
    encode(&Reply::Refused { why: why.into() })
}

fn encode(reply: &Reply) -> Vec<u8> {
    serde_json::to_vec(reply).expect("a reply has no map with keys that are no text")
}

async fn command(fleet: &Arc<Fleet>, from: u64, request: &[u8]) -> Vec<u8> {
    match serde_json::from_slice::<Ask>(request) {
        Ok(Ask::Renew { incarnation }) => {
            let (reply, rx) = oneshot::channel();
            fleet.lease_mail(Message::Renewal { node: from, incarnation, reply });
            encode(&Reply::Lease { answer: rx.await.unwrap_or_else(|_| not_leader()) })
        }
        Ok(Ask::StartFailed { session, epoch, reason }) => {
            fleet.placing_mail(Notice::StartFailed { session, epoch, node: from, reason });
            encode(&Reply::Heard {})
        }
        Ok(Ask::Started { session, epoch }) => {
            fleet.placing_mail(Notice::Started { session, epoch });
            encode(&Reply::Heard {})
        }
        Ok(Ask::Journal { session, epoch, copy }) => {
            let Some(node) = fleet.node.get().and_then(Weak::upgrade) else { return refused("this node is starting") };
            encode(&Reply::Journal { answer: peers::asked(&node, from, session, epoch, copy).await })
        }
        Err(e) => refused(&format!("the command is not understood: {e}")),
    }
}

/// Asks `leader` for this node's lease; None when no answer came in time.
pub async fn renew(fleet: &Fleet, leader: u64, incarnation: u64, deadline: Duration) -> Option<Answer> {
    let peer = fleet.book.peer(leader)?;
    let request = serde_json::to_vec(&Ask::Renew { incarnation }).ok()?;
    let answer = fleet.control.call(peer, Proto::Command, request, deadline).await.ok()?;
    match serde_json::from_slice::<Reply>(&answer).ok()? {
        Reply::Lease { answer } => Some(answer),
        Reply::Heard {} | Reply::Journal { .. } => None,
        Reply::Refused { why } => {
            tracing::debug!("the leader does not renew: {why}");
            None
        }
    }
}

/// Passes a notice on to the leader; lost ones are told again by whoever still has reason to.
pub async fn tell(fleet: &Fleet, leader: u64, notice: Notice) {
    let ask = match notice {
        Notice::StartFailed { session, epoch, reason, node: _ } => Ask::StartFailed { session, epoch, reason },
        Notice::Started { session, epoch } => Ask::Started { session, epoch },
        Notice::Lapsed { .. } | Notice::Returning { .. } | Notice::Held(_) | Notice::NotAssigned { .. } => return,
    };
    let (Some(peer), Ok(request)) = (fleet.book.peer(leader), serde_json::to_vec(&ask)) else { return };
    if let Err(e) = fleet.control.call(peer, Proto::Command, request, TELL).await {
        tracing::info!("the leader was not told: {e}");
    }
}
