//! This node's part in the fleet: consensus, control plane, bulk plane, gossip and lease, held together. A lone node has all of
//! it too, as a fleet of one, so that it grows without a restart.
//!
//! ```text
//!   wire      calls of members, both ways          renewal   the node's lease, and those of all while leading
//!   call      a member's API over a stream         placing   who runs what, while leading; voters
//!   fetch     a checkpoint made whole here         owning    machines for the sessions that are this node's
//!   joining   tokens, admission, leaving, drain    copying   copies of this node's checkpoints on its peers
//! ```

pub mod board;
pub mod call;
pub mod copying;
pub mod fetch;
pub mod joining;
pub mod owning;
pub mod placing;
pub mod renewal;
pub mod start;
pub mod view;
pub mod voting;
pub mod wire;

use crate::host::files::Layout;
use crate::host::membership::{self, MemberRow, Membership};
use board::Board;
use ks_net::tls::ApiKey;
use ks_net::{ControlPlane, Gossip, JoinToken, Keypair, NodeFacts, PeerId, PeerState, PeerStream, StreamProto};
use ks_proto::api::ApiError;
use ks_raft::FleetState;
use ks_raft::host::Consensus;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::Instant;

/// A member that was not heard of for this long is not called live.
const LIVENESS_MS: u64 = 5_000;
/// How long a stream to a member may wait for its connection.
const CONNECT: Duration = Duration::from_secs(2);
/// A node that has left is talked to for so long still, or it would not hear the answer to its own farewell.
const FAREWELL: Duration = Duration::from_secs(1);

/// Where this node is reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Addresses {
    /// Control plane, UDP.
    pub control: SocketAddr,
    /// Bulk plane, UDP.
    pub bulk: SocketAddr,
    /// HTTPS API, TCP.
    pub api: SocketAddr,
}

/// See the module.
pub struct Fleet {
    number: u64,
    incarnation: u64,
    addresses: Addresses,
    layout: Layout,
    key: Keypair,
    pub(crate) control: ControlPlane,
    gossip: Gossip,
    bulk: ks_bulk::Bulk,
    fetcher: ks_bulk::Fetcher,
    consensus: Consensus,
    pub(crate) book: Book,
    deadline: watch::Sender<u64>,
    board: Board,
    ca: Mutex<start::Authority>,
    api_key: ApiKey,
    lease_tx: mpsc::Sender<renewal::Message>,
    placing_tx: mpsc::Sender<placing::Notice>,
    /// Rings when owned sessions should be looked at again.
    pub(crate) owning: Notify,
    /// The node that this is part of, once it is there.
    pub(crate) node: std::sync::OnceLock<std::sync::Weak<crate::node::Node>>,
}

/// Numbers and keys of members: what the wire needs before and while the state is there.
#[derive(Debug, Clone, Default)]
pub struct Book {
    rows: Arc<RwLock<BTreeMap<u64, PeerId>>>,
}

impl Book {
    /// Replaces it.
    pub fn set(&self, rows: BTreeMap<u64, PeerId>) {
        *self.rows.write().unwrap_or_else(PoisonError::into_inner) = rows;
    }
    /// The key of a member.
    pub fn peer(&self, number: u64) -> Option<PeerId> {
        self.rows.read().unwrap_or_else(PoisonError::into_inner).get(&number).copied()
    }
    /// The member with this key.
    pub fn number(&self, peer: &PeerId) -> Option<u64> {
        self.rows.read().unwrap_or_else(PoisonError::into_inner).iter().find(|(_, p)| *p == peer).map(|(n, _)| *n)
    }
}

impl Fleet {
    /// This node's number.
    pub fn number(&self) -> u64 {
        self.number
    }
    /// This instance of the node: the same for every start on one machine since its boot, another for a copy of its disk.
    pub fn incarnation(&self) -> u64 {
        self.incarnation
    }
    /// Consensus.
    pub fn consensus(&self) -> &Consensus {
        &self.consensus
    }
    /// The replicated state as applied here.
    pub fn state(&self) -> Arc<FleetState> {
        self.consensus.state()
    }
    /// Told after every change of it.
    pub fn changes(&self) -> watch::Receiver<Arc<FleetState>> {
        self.consensus.changes()
    }
    /// True while no other member is known: nothing has to be asked of anybody.
    pub fn alone(&self) -> bool {
        self.is_only_member()
    }
    /// As [`Self::alone`], and nobody else votes.
    pub fn is_only_member(&self) -> bool {
        let state = self.state();
        let others = state.members.values().any(|m| m.is_member() && m.number != self.number);
        !others && self.voters().iter().all(|v| *v == self.number)
    }
    /// Numbers of the voters.
    pub fn voters(&self) -> std::collections::BTreeSet<u64> {
        self.consensus.membership().voters
    }
    /// The lease: CLOCK_BOOTTIME milliseconds, `u64::MAX` without end, 0 lapsed.
    pub fn deadline(&self) -> u64 {
        *self.deadline.borrow()
    }
    /// Which deadlines the VMs have taken.
    pub fn board(&self) -> &Board {
        &self.board
    }
    /// A member's name, for people.
    pub fn name_of(&self, number: u64) -> String {
        self.state().members.get(&number).map_or_else(|| format!("node {number}"), |m| m.name.clone())
    }
    /// See [`LIVENESS_MS`].
    pub fn liveness_ms(&self) -> u64 {
        LIVENESS_MS
    }
    /// Fingerprint of the fleet's certificate authority.
    pub fn fingerprint(&self) -> String {
        self.ca.lock().unwrap_or_else(PoisonError::into_inner).fingerprint()
    }
    /// `HOST:PORT` of the HTTPS API.
    pub fn api_address(&self) -> String {
        self.addresses.api.to_string()
    }
    /// Where this node is reached.
    pub fn addresses(&self) -> &Addresses {
        &self.addresses
    }

    pub(crate) fn set_deadline(&self, boottime_ms: u64) {
        self.deadline.send_replace(boottime_ms);
    }
    pub(crate) fn lease_mail(&self, m: renewal::Message) {
        if self.lease_tx.try_send(m).is_err() {
            tracing::warn!("the lease's mailbox is full or closed");
        }
    }
    pub(crate) fn placing_mail(&self, n: placing::Notice) {
        if self.placing_tx.try_send(n).is_err() {
            tracing::warn!("the placement's mailbox is full or closed");
        }
    }

    /// A fresh join token for the API at `addr`.
    ///
    /// # Errors
    /// If the kernel has no randomness, or there is no authority on this node yet.
    pub fn new_token(&self, addr: &str) -> Result<JoinToken, ApiError> {
        let ca = self.ca.lock().unwrap_or_else(PoisonError::into_inner).fingerprint_bytes();
        Ok(JoinToken { secret: crate::host::files::random(), ca, api: addr.to_owned() })
    }

    /// What gossip says of a member, and how many milliseconds ago it was last heard.
    pub fn facts_of(&self, number: u64) -> Option<(NodeFacts, u64)> {
        let peer = self.book.peer(number)?;
        let live = self.gossip.live();
        let live = live.borrow();
        live.get(&peer).map(|n| (n.facts.clone(), self.gossip.now_ms().saturating_sub(n.seen_ms)))
    }
    /// How many milliseconds ago a member was heard last, a dead one too; None is never since this node started.
    pub fn seen_ms_ago(&self, number: u64) -> Option<u64> {
        let seen_ms = self.gossip.seen_ms(&self.book.peer(number)?)?;
        Some(self.gossip.now_ms().saturating_sub(seen_ms))
    }
    /// How a member is reached.
    pub fn link_of(&self, number: u64) -> Option<PeerState> {
        let peer = self.book.peer(number)?;
        self.control.peers().borrow().get(&peer).cloned()
    }

    /// A stream to a member's API.
    ///
    /// # Errors
    /// `unreachable`, with why.
    pub async fn api_stream(&self, to: u64) -> Result<PeerStream, ApiError> {
        let unreachable = |why: String| {
            ApiError::new("unreachable", format!("{} cannot be reached", self.name_of(to)), why, "ks node ls; ks fleet status")
        };
        let peer = self.book.peer(to).ok_or_else(|| unreachable("it is not a member".into()))?;
        if tokio::time::timeout(CONNECT, self.control.connected(peer)).await.is_err() {
            let why = self.link_of(to).and_then(|l| l.error).unwrap_or_else(|| "there is no connection".into());
            return Err(unreachable(why));
        }
        self.control.open_stream(peer, StreamProto::Api).await.map_err(|e| unreachable(e.to_string()))
    }

    /// Says this about the node, to all.
    pub fn say(&self, facts: NodeFacts) {
        self.gossip.set_facts(facts);
    }

    /// Where the store gets what is damaged or missing here.
    pub fn repair_source(&self, node: std::sync::Weak<crate::node::Node>) -> Arc<dyn ks_blobs::PeerSource> {
        let (a, b) = (node.clone(), node);
        let holders = move || {
            let Some(n) = a.upgrade() else { return vec![] };
            copying::all_places(&n.state.read(), n.fleet.number())
        };
        let keys = move || b.upgrade().map(|n| n.supply.keys.clone()).unwrap_or_default();
        Arc::new(ks_bulk::BulkPeers::new(self.bulk.clone(), Arc::new(holders), Arc::new(keys)))
    }

    /// Tells the members that this node goes, and frees its ports.
    pub async fn shutdown(&self) {
        self.control.shutdown().await;
        self.bulk.close().await;
    }

    /// What fetches checkpoints from peers.
    pub fn fetcher(&self) -> &ks_bulk::Fetcher {
        &self.fetcher
    }

    /// Takes the members of the state as those to talk to, and for a while those that have just left.
    pub(crate) fn follow_members(&self, state: &FleetState, leaving: &BTreeMap<u64, Instant>) {
        if state.members.is_empty() {
            return; // nothing applied yet: what it knew when it joined stays
        }
        let members = state.members.values().filter(|m| m.is_member() || leaving.contains_key(&m.number));
        let rows = members.clone().filter_map(|m| Some((m.number, m.peer_id.parse().ok()?))).collect();
        self.book.set(rows);
        let addrs = members
            .clone()
            .filter_map(|m| Some((m.peer_id.parse().ok()?, m.control.iter().filter_map(|a| a.parse().ok()).collect())));
        self.control.allow(addrs.collect());
        self.bulk.recheck_allowed();
    }
}

/// Follows the members for as long as the node lives.
pub async fn follow(fleet: Arc<Fleet>) {
    let mut changes = fleet.changes();
    let (mut before, mut leaving) = (BTreeSet::new(), BTreeMap::new());
    loop {
        let state = fleet.state();
        let members: BTreeSet<u64> = state.members.values().filter(|m| m.is_member()).map(|m| m.number).collect();
        farewell(&mut leaving, &before, &members, Instant::now());
        fleet.follow_members(&state, &leaving);
        before = members;
        let next = leaving.values().min().copied();
        let over = async {
            match next {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            changed = changes.changed() => if changed.is_err() { return },
            () = over => {}
        }
    }
}

/// Until when nodes that have left are talked to.
fn farewell(leaving: &mut BTreeMap<u64, Instant>, before: &BTreeSet<u64>, members: &BTreeSet<u64>, now: Instant) {
    leaving.extend(before.difference(members).map(|n| (*n, now + FAREWELL)));
    leaving.retain(|n, until| now < *until && !members.contains(n));
}

/// This node's place as it knows it.
fn known(node: &crate::node::Node) -> Membership {
    let state = node.state.read();
    let row = |m: &ks_raft::Member| MemberRow {
        number: m.number,
        peer_id: m.peer_id.clone(),
        control: m.control.clone(),
        bulk: m.bulk.iter().map(ToString::to_string).collect(),
    };
    Membership {
        number: node.fleet.number(),
        fleet_id: state.fleet_id.map(|i| i.to_hex()).unwrap_or_default(),
        members: state.members.values().filter(|m| m.is_member()).map(row).collect(),
    }
}

/// When the fleet was recovered without this node, its log is worth nothing: it gives it up and starts again as a learner.
pub async fn follow_lineage(node: std::sync::Weak<crate::node::Node>, fleet: Arc<Fleet>) {
    let mut superseded = fleet.consensus().superseded();
    let Ok(lineage) = superseded.wait_for(Option::is_some).await.map(|l| l.unwrap_or_default()) else { return };
    let Some(node) = node.upgrade() else { return };
    // First of all: a founder whose log is gone must not take itself for a new fleet.
    let kept = membership::save(&node.layout, &known(&node));
    let order = membership::Order::Forget { lineage };
    match kept.and_then(|()| membership::order(&node.layout, order)) {
        Ok(()) => {
            node.state.event(
                "",
                "superseded",
                "the fleet was recovered without this node: it starts again from the others' state",
            );
            node.restart_soon();
        }
        Err(e) => node.state.event("", "superseded", &format!("the fleet was recovered without this node, and {e}")),
    }
}

/// Serves the API to members, over the control plane, for as long as that lives.
pub async fn serve_members(fleet: Arc<Fleet>, router: axum::Router) {
    let Some(mut incoming) = fleet.control.incoming(StreamProto::Api) else { return };
    while let Some((peer, stream)) = incoming.next().await {
        let Some(number) = fleet.book.number(&peer) else { continue };
        let router = crate::api::serve::through(&router, crate::api::Door::Peer { number });
        tokio::spawn(crate::api::tunnel::serve(stream, router));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_left_is_talked_to_for_a_moment() {
        let (begun, mut leaving) = (Instant::now(), BTreeMap::new());
        let of = |numbers: &[u64]| numbers.iter().copied().collect::<BTreeSet<u64>>();
        farewell(&mut leaving, &of(&[]), &of(&[1, 2, 3]), begun);
        assert!(leaving.is_empty());
        farewell(&mut leaving, &of(&[1, 2, 3]), &of(&[1, 3]), begun);
        assert!(leaving.contains_key(&2));
        farewell(&mut leaving, &of(&[1, 3]), &of(&[1, 3]), begun + FAREWELL / 2);
        assert!(leaving.contains_key(&2), "the state changed meanwhile");
        farewell(&mut leaving, &of(&[1, 3]), &of(&[1, 3]), begun + FAREWELL);
        assert!(leaving.is_empty());
    }
}
