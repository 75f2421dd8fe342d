//! The node's way to its peers: who it is, whom it talks to, what they tell each other.
//!
//! | what | type |
//! |---|---|
//! | the node's key; its libp2p PeerId is the node's name | [`identity`] |
//! | one QUIC swarm with an allow-list: calls and byte streams to members, and to nobody else | [`ControlPlane`] |
//! | soft state, gossiped and signed: load, free memory, incarnation | [`Gossip`], [`NodeFacts`] |
//! | the fleet's certificate authority and the HTTPS API's certificates | [`tls`] |
//! | the text that lets a node join once | [`JoinToken`] |
//!
//! It owns no decision about sessions, leases or ownership: those are in `raft/` and `node/fleet`. It takes the list of members
//! from whoever reads them in Raft ([`ControlPlane::allow`]) and speaks to no address that was not given to it.
//!
//! Pure parts: `links` (whom to dial and when, which of two connections stays), `facts` and `board` (signed records), `token`,
//! `address`. Everything that touches a socket, a file or a clock is in `host/`. Layouts: `docs/formats.md`.
//!
//! # Use
//!
//! ```no_run
//! # use std::{collections::BTreeMap, sync::Arc, time::Duration};
//! # use ks_net::*;
//! # async fn f(handler: Arc<dyn Handler>, peer: PeerId) -> Result<(), Box<dyn std::error::Error>> {
//! let key = identity::load_or_create(std::path::Path::new("/var/lib/keepstate"))?;
//! let control = ControlPlane::start(ControlConfig::new(key, vec![control_addr("127.0.0.1:7450".parse()?)]), handler).await?;
//! control.allow(BTreeMap::from([(peer, vec![control_addr("127.0.0.1:7460".parse()?)])]));
//! let answer = control.call(peer, Proto::Raft, b"request".to_vec(), Duration::from_millis(500)).await?;
//! let stream = control.open_stream(peer, StreamProto::Api).await?;
//! let gossip = Gossip::start(control.clone(), "fleet id", GossipTiming::default());
//! gossip.set_facts(NodeFacts::default());
//! for (peer, node) in gossip.live().borrow().iter() { println!("{peer} {}", node.facts.sessions); }
//! # drop((answer, stream)); Ok(()) }
//! ```

mod address;
mod board;
mod facts;
mod host;
mod links;
mod token;

pub use address::{control_addr, socket_addr};
pub use board::LiveNode;
pub use facts::{FACTS_BYTES_MAX, FactsError, NodeFacts};
pub use host::call::{CALL_DEADLINE_MAX, CallError, Handler, MESSAGE_BYTES_MAX, Proto};
pub use host::control::{ControlConfig, ControlPlane, StartError};
pub use host::gossip::{Gossip, GossipStats, GossipTiming};
pub use host::identity;
pub use host::stream::{Incoming, OpenError, PeerStream, StreamProto};
pub use host::tls;
pub use libp2p::{Multiaddr, PeerId, identity::Keypair};
pub use links::{LinkTiming, PeerState};
pub use token::{JoinToken, TokenError};
