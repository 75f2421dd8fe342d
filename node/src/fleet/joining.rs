//! Joining, admitting, draining, leaving, removing, recovering, and the planned move of one session.

use super::fetch::{FetchDone, FetchOrder};
use super::{call, start};
use crate::api::{ADMIT, tunnel};
use crate::host::{clock, membership};
use crate::node::Node;
use crate::ops;
use crate::progress::Steps;
use crate::session::{Answer, Request};
use axum::body::Body;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ks_net::{JoinToken, tls};
use ks_proto::SessionId;
use ks_proto::api::{ApiError, SessionState};
use ks_proto::fleet::{Admit, Admitted, Drained, FleetInfo, Join, Joined, Leave, Left, MemberAddrs, NodeView, Stuck};
use ks_raft::{Assignment, Command, Member, MemberState, Response};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;

/// How long a joining node waits for a connection to the fleet.
const DIAL: Duration = Duration::from_secs(10);
/// The largest answer to an admission.
const ADMITTED_BYTES_MAX: usize = 4 << 20;
/// Between two looks at a drain.
const LOOK: Duration = Duration::from_millis(500);
/// A drain whose remaining sessions did not move for so long names them as stuck and goes on without its caller.
const STUCK: Duration = Duration::from_secs(300);

fn internal(what: &str, why: impl std::fmt::Display) -> ApiError {
    ApiError::new("internal", what, why.to_string(), "see ksd's log")
}

/// The bytes that the joining node signs.
fn signed(a: &Admit) -> Vec<u8> {
    let unsigned = Admit { signature: String::new(), ..a.clone() };
    let mut out = b"keepstate admission 1\0".to_vec();
    out.extend(serde_json::to_vec(&unsigned).expect("an admission has no map with keys that are no text"));
    out
}

/// Joins the fleet that gave the token. Done when the fleet has this node as a member and the order to become it is durable; the
/// node then starts again as one.
///
/// # Errors
/// What stands against it, here or there; this node is as before.
pub async fn join(node: &Arc<Node>, j: Join, steps: &Steps) -> Result<Joined, ApiError> {
    may_join(node)?;
    let token: JoinToken = j.token.parse().map_err(|e: ks_net::TokenError| {
        ApiError::new("usage", "the join token", e.to_string(), "make one on a member: ks node token")
    })?;
    let addr = j.addr.clone().unwrap_or_else(|| token.api.clone());
    let f = &node.fleet;
    let name = j.name.clone().unwrap_or_else(start::host_name);
    let domain = j.domain.clone().unwrap_or_default();
    let profiles = ops::facts::profiles(node);
    let me = start::member(&f.key, &f.addresses, profiles.clone(), f.incarnation, &name, &domain);
    let mut ask = Admit {
        secret: hex::encode(token.secret),
        peer_id: me.peer_id,
        public_key: hex::encode(f.key.public().encode_protobuf()),
        signature: String::new(),
        name,
        domain,
        control: me.control,
        bulk: me.bulk.iter().map(ToString::to_string).collect(),
        api: me.api,
        profiles,
        incarnation: format!("{:016x}", f.incarnation),
        version: env!("CARGO_PKG_VERSION").into(),
        api_public: hex::encode(f.api_key.public()),
    };
    ask.signature = hex::encode(f.key.sign(&signed(&ask)).map_err(|e| internal("signing the admission", e))?);
    steps.step(format!("asking {addr} to be admitted"), 0, 3);
    let admitted = ask_admission(&addr, &token, &ask).await?;
    steps.step(format!("admitted as node {} ({})", admitted.number, admitted.name), 1, 3);
    if STANDARD.decode(&admitted.ca).ok().map(|ca| tls::fingerprint(&ca)) != Some(token.ca) {
        return Err(ApiError::new(
            "not-allowed",
            "the admission",
            "it carries another authority than the token",
            "make a new token",
        ));
    }
    let layout = node.layout.clone();
    let order = admitted.clone();
    let ordered = tokio::task::spawn_blocking(move || membership::order_join(&layout, &order)).await;
    ordered.map_err(|e| internal("keeping the admission", e))?.map_err(|e| internal("keeping the admission", e))?;
    node.state.event("", "joined", &format!("this node becomes member {} of fleet {}", admitted.number, admitted.fleet_id));
    steps.step("starting again as a member", 2, 3);
    node.restart_soon();
    Ok(Joined {
        schema: "ks.joined.v1".into(),
        fleet_id: admitted.fleet_id,
        number: admitted.number,
        name: admitted.name,
        warning: admitted.warning,
    })
}

/// Only a lone node with no sessions joins: what it holds would be sealed under keys that the fleet does not have.
fn may_join(node: &Node) -> Result<(), ApiError> {
    if !node.fleet.alone() || node.fleet.number() != membership::FOUNDER || !node.state.read().is_founded() {
        let why = "it is a member of a fleet already";
        return Err(ApiError::new("exists", "this node cannot join", why, "ks node leave first, or use another data folder"));
    }
    let state = node.state.read();
    let names: Vec<&str> = state.sessions.values().filter(|s| !s.tombstone).map(|s| s.name.as_str()).collect();
    if !names.is_empty() {
        let why = format!("it has sessions of its own ({}), which would be lost", names.join(", "));
        let next = "remove them (ks rm), or let the other node join this one: ks node token";
        return Err(ApiError::new("exists", "this node cannot join", why, next));
    }
    Ok(())
}

async fn ask_admission(addr: &str, token: &JoinToken, ask: &Admit) -> Result<Admitted, ApiError> {
    let unreachable = |why: String| {
        ApiError::new(
            "unreachable",
            format!("{addr} cannot be asked"),
            why,
            "check the address and the firewall, or give another: ks node join TOKEN ADDR",
        )
    };
    let config = tls::client_config(tls::Trust::Fingerprint(token.ca)).map_err(|e| internal("TLS", e))?;
    let dial = async {
        let tcp = tokio::net::TcpStream::connect(addr).await?;
        let name = tokio_rustls::rustls::pki_types::ServerName::try_from("ks-node").map_err(std::io::Error::other)?;
        tokio_rustls::TlsConnector::from(config).connect(name, tcp).await
    };
    let stream = match tokio::time::timeout(DIAL, dial).await {
        Ok(Ok(s)) => s,
        Ok(Err(e)) => return Err(unreachable(e.to_string())),
        Err(_) => return Err(unreachable(format!("no connection in {} s", DIAL.as_secs()))),
    };
    let body = serde_json::to_vec(ask).map_err(|e| internal("the admission", e))?;
    let request = axum::http::Request::post(ADMIT)
        .header("host", "ks-node")
        .header("content-type", "application/json")
        .body(Body::from(body))
        .map_err(|e| internal("the admission", e))?;
    let response = tunnel::forward(stream, request).await?;
    let status = response.status();
    let bytes = axum::body::to_bytes(response.into_body(), ADMITTED_BYTES_MAX).await.map_err(|e| unreachable(e.to_string()))?;
    if status.is_success() {
        return serde_json::from_slice(&bytes).map_err(|e| unreachable(format!("its answer is not understood: {e}")));
    }
    Err(serde_json::from_slice::<ApiError>(&bytes).unwrap_or_else(|e| unreachable(format!("it answered {status}: {e}"))))
}

/// Lets a node in that has a token. The same node asking again with the same token gets the same answer.
///
/// # Errors
/// `token-refused`, or what stands against it.
pub async fn admit(node: &Arc<Node>, a: Admit) -> Result<Admitted, ApiError> {
    let bad = |why: String| ApiError::new("token-refused", "the admission is refused", why, "make a new token: ks node token");
    let secret: [u8; 16] =
        hex::decode(&a.secret).ok().and_then(|b| b.try_into().ok()).ok_or_else(|| bad("the secret is no hex".into()))?;
    prove(&a).map_err(bad)?;
    node.fleet.get_authority().await;
    let ca = node.fleet.authority_file()?.ca;
    let member = asked_member(&a).map_err(bad)?;
    let names: Vec<String> = member.bulk.iter().map(|b| b.ip().to_string()).collect();
    let public = hex::decode(&a.api_public).map_err(|e| bad(e.to_string()))?;
    let leaf = ca.issue(&public, &names).map_err(|e| bad(e.to_string()))?;
    let token_hash = blake3::hash(&secret).to_hex().to_string();
    let command = Command::AddMember { token_hash, member, now_unix_ms: clock::unix_ms() };
    let number = match node.state.propose(command).await {
        Ok(Response::Member { number }) => number,
        Ok(other) => return Err(internal("the admission", format!("{other:?}"))),
        Err(e) => return Err(e),
    };
    let keys = tokio::fs::read(node.layout.keys()).await.map_err(|e| internal("the fleet's keys", e))?;
    let state = node.state.read();
    let name = node.fleet.name_of(number);
    node.state.event("", "node-joined", &format!("{name} (node {number}) joined"));
    Ok(Admitted {
        fleet_id: state.fleet_id.map(|i| i.to_hex()).unwrap_or_default(),
        generation: state.generation,
        number,
        name,
        members: state.members.values().filter(|m| m.is_member()).map(addrs).collect(),
        ca: STANDARD.encode(ca.cert_der()),
        certificate: STANDARD.encode(leaf),
        keys: STANDARD.encode(keys),
        warning: ops::fleet::warning(&state, node.fleet.voters().len()),
    })
}

/// The asker has the key that it names.
fn prove(a: &Admit) -> Result<(), String> {
    let key = hex::decode(&a.public_key).map_err(|e| e.to_string())?;
    let key = libp2p_identity::PublicKey::try_decode_protobuf(&key).map_err(|e| format!("the public key: {e}"))?;
    if key.to_peer_id().to_string() != a.peer_id {
        return Err("the peer id is not that of the public key".into());
    }
    let signature = hex::decode(&a.signature).map_err(|e| e.to_string())?;
    if key.verify(&signed(a), &signature) { Ok(()) } else { Err("the signature is not by the key that it names".into()) }
}

fn asked_member(a: &Admit) -> Result<Member, String> {
    let bulk: Result<Vec<std::net::SocketAddr>, _> = a.bulk.iter().map(|b| b.parse()).collect();
    Ok(Member {
        number: 0,
        peer_id: a.peer_id.clone(),
        name: a.name.clone(),
        control: a.control.clone(),
        bulk: bulk.map_err(|e| format!("a bulk address: {e}"))?,
        api: a.api.clone(),
        profiles: a.profiles.clone(),
        domain: a.domain.clone(),
        joined_unix_ms: 0,
        state: MemberState::Active,
        incarnation: u64::from_str_radix(&a.incarnation, 16).map_err(|e| format!("the incarnation: {e}"))?,
    })
}

fn addrs(m: &Member) -> MemberAddrs {
    MemberAddrs {
        number: m.number,
        peer_id: m.peer_id.clone(),
        name: m.name.clone(),
        control: m.control.clone(),
        bulk: m.bulk.iter().map(ToString::to_string).collect(),
        api: m.api.clone(),
    }
}

/// A planned move of one session.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct HandOver {
    /// Session.
    pub session: SessionId,
    /// To this member.
    pub to: u64,
    /// Under this epoch; another one by now makes it void.
    pub expected_epoch: u64,
}

/// Moves one session of this node to `to`: copies most of it while it runs, then checkpoints and stops it, copies the rest, and
/// assigns it. If anything fails before the assignment, it goes on here.
///
/// # Errors
/// Why it stays.
pub async fn hand_over(node: &Arc<Node>, h: HandOver, steps: &Steps) -> Result<(), ApiError> {
    let (record, handle) = node.session(&h.session.to_hex())?;
    if record.owner != node.fleet.number() || record.token.epoch != h.expected_epoch {
        let why = format!("{} has epoch {} by now", record.name, record.token.epoch);
        return Err(ApiError::new("moving", "the session is not moved", why, "nothing: it has moved already"));
    }
    let running = handle.view.borrow().state == SessionState::Running;
    if running {
        steps.step(format!("{}: copying while it runs", record.name), 0, 4);
        if let Answer::Checkpoint(c) = handle.ask(demand("before a move")).await? {
            copy(node, &h, c.id, steps).await?;
        }
        steps.step(format!("{}: its last checkpoint here", record.name), 1, 4);
    }
    let last = match handle.ask(Request::Leave).await {
        Ok(Answer::Checkpoint(c)) => Some(c.id),
        Ok(Answer::Done) => None,
        Err(e) => return Err(e),
    };
    let head = node.record(&h.session.to_hex())?.head;
    let moved = async {
        steps.step(format!("{}: copying the rest", record.name), 2, 4);
        copy(node, &h, last.unwrap_or(head), steps).await?;
        steps.step(format!("{}: handing it over", record.name), 3, 4);
        let assignment = Assignment {
            id: h.session,
            to: h.to,
            expected_epoch: Some(h.expected_epoch),
            from_lapsed: false,
            now_unix_ms: clock::unix_ms(),
            cause: format!("moved from {}", node.fleet.name_of(node.fleet.number())),
        };
        node.state.propose(Command::Assign(assignment)).await
    };
    match moved.await {
        Ok(_) => {
            let to = node.fleet.name_of(h.to);
            node.state.event(record.name.as_str(), "moved", &format!("to {to}, from its last checkpoint, without loss"));
            Ok(())
        }
        Err(e) => {
            // It goes on here, unless the state says that it went after all.
            if running && node.state.read().sessions.get(&h.session).is_some_and(|r| r.owner == node.fleet.number()) {
                handle.ask_quietly(Request::Stay);
            }
            Err(e)
        }
    }
}

fn demand(message: &str) -> Request {
    Request::Checkpoint { reason: "demand".into(), message: message.into(), pin: false, freeze: false }
}

/// Has the target fetch a checkpoint, and records it as a holder.
async fn copy(node: &Arc<Node>, h: &HandOver, checkpoint: ks_proto::CheckpointId, steps: &Steps) -> Result<(), ApiError> {
    let token = node.record(&h.session.to_hex())?.token;
    let order = FetchOrder { session: h.session, token, checkpoint, from: vec![node.fleet.number()] };
    let _: FetchDone = call::post_long(&node.fleet, h.to, "/v1/internal/fetch", &order, steps).await?;
    let own = node.record(&h.session.to_hex())?.by_id(&checkpoint).is_some();
    if own {
        node.state.propose(Command::AddHolder { session: h.session, checkpoint, token, node: h.to }).await?;
    }
    Ok(())
}

/// Drains a node: no new sessions, and those that it has move away. Blocks until they did; goes on when the caller leaves.
///
/// # Errors
/// `not-found`, or if nobody else could take them.
pub async fn drain(node: &Arc<Node>, which: &str, steps: &Steps) -> Result<Drained, ApiError> {
    let m = ops::fleet::find(&node.state.read(), which)?;
    if node.state.read().active().all(|a| a.number == m.number) {
        let why = format!("{} is the only active node: nobody could take its sessions", m.name);
        return Err(ApiError::new("usage", "the node is not drained", why, "let another node join first: ks node token"));
    }
    node.state.propose(Command::SetMemberState { number: m.number, state: MemberState::Draining }).await?;
    node.state.event("", "draining", &format!("{} hands its sessions over", m.name));
    watch_drain(node, &m, steps).await
}

/// Lets a node that drains, or has drained, take sessions again. What has moved away stays where it is.
///
/// # Errors
/// `not-found`; `usage` for a node that does not drain.
pub async fn undrain(node: &Arc<Node>, which: &str) -> Result<NodeView, ApiError> {
    let m = ops::fleet::find(&node.state.read(), which)?;
    if m.state != MemberState::Draining {
        let why = if m.is_member() { "it takes sessions already" } else { "it has left the fleet" };
        let next = "ks node ls shows how nodes stand";
        return Err(ApiError::new("usage", format!("{} is not draining", m.name), why, next));
    }
    node.state.propose(Command::SetMemberState { number: m.number, state: MemberState::Active }).await?;
    node.state.event("", "undrained", &format!("{} takes sessions again", m.name));
    let view = ops::fleet::info(node).nodes.into_iter().find(|n| n.number == m.number);
    view.ok_or_else(|| internal("the node's state", "it left meanwhile"))
}

async fn watch_drain(node: &Arc<Node>, m: &Member, steps: &Steps) -> Result<Drained, ApiError> {
    let names = |n: u64| -> Vec<String> {
        let state = node.state.read();
        state.sessions.values().filter(|s| !s.tombstone && s.owner == n).map(|s| s.name.to_string()).collect()
    };
    let first = names(m.number);
    let (mut left, mut moved_at) = (first.clone(), tokio::time::Instant::now());
    while !left.is_empty() && moved_at.elapsed() < STUCK {
        let total = first.len() as u64;
        steps.step(
            format!("{} of {} sessions moved; waiting for {}", total - left.len() as u64, total, left.join(", ")),
            total - left.len() as u64,
            total,
        );
        if steps.is_abandoned() {
            break; // the leader goes on by itself
        }
        if node.state.read().members.get(&m.number).is_none_or(|m| m.state == MemberState::Active) {
            let why = format!("{} was told to take sessions again meanwhile", m.name);
            return Err(ApiError::new("busy", "the drain was undone", why, "ks node drain again, if you still want it"));
        }
        tokio::time::sleep(LOOK).await;
        let now = names(m.number);
        if now != left {
            moved_at = tokio::time::Instant::now();
        }
        left = now;
    }
    let stuck = left.iter().map(|s| Stuck { session: s.clone(), why: "it did not move in time: see ks events".into() });
    Ok(Drained {
        schema: "ks.drained.v1".into(),
        number: m.number,
        name: m.name.clone(),
        moved: first.into_iter().filter(|s| !left.contains(s)).collect(),
        stuck: stuck.collect(),
    })
}

/// This node leaves its fleet: drained, then removed, then it starts again alone. One that the fleet has removed already only
/// starts again; so does, with `force`, one that cannot reach the fleet and was perhaps removed without hearing of it.
///
/// # Errors
/// If it cannot be drained, or is alone; with `force`, if the fleet can be reached after all.
pub async fn leave(node: &Arc<Node>, l: Leave, steps: &Steps) -> Result<Left, ApiError> {
    let me = node.fleet.number();
    let standing = node.state.read().members.get(&me).map(|m| m.state);
    let founded = node.state.read().is_founded();
    if founded && standing.is_none_or(|s| s == MemberState::Gone) {
        steps.step("the fleet has removed this node already", 0, 0);
        return start_alone(node, vec![]).await;
    }
    if node.fleet.alone() && (founded || me == membership::FOUNDER) {
        return Err(ApiError::new("usage", "this node cannot leave", "it is alone: there is nothing to leave", "nothing to do"));
    }
    if l.force {
        return give_up(node, steps).await;
    }
    let drained = drain(node, &me.to_string(), steps).await.map_err(|e| match e.code.as_str() {
        "no-quorum" | "unreachable" | "timeout" | "not-found" => ApiError::new(
            &e.code,
            "this node cannot ask its fleet",
            e.why,
            "if `ks node ls` on another member says that this one is gone, or it never comes back: ks node leave --force",
        ),
        _ => e,
    })?;
    if let Some(s) = drained.stuck.first() {
        return Err(ApiError::new(
            "busy",
            "this node does not leave yet",
            format!("{} stays: {}", s.session, s.why),
            "ks node drain, then leave again",
        ));
    }
    steps.step("waiting until it votes no more", 0, 0);
    let end = tokio::time::Instant::now() + Duration::from_secs(30);
    while node.fleet.voters().contains(&me) && tokio::time::Instant::now() < end {
        tokio::time::sleep(LOOK).await;
    }
    node.state.propose(Command::RemoveMember { number: me, forced: false }).await?;
    start_alone(node, drained.moved).await
}

/// Leaves without the fleet's word. Its sessions stand still (it has no lease), and the fleet has, or will have, called it dead.
async fn give_up(node: &Arc<Node>, steps: &Steps) -> Result<Left, ApiError> {
    steps.step("looking for the fleet", 0, 0);
    if node.fleet.consensus().catch_up().await.is_ok() {
        let why = "the fleet can be reached, and this node is a member of it";
        return Err(ApiError::new("usage", "this node does not leave by force", why, "ks node leave"));
    }
    node.state.event("", "left", "this node left its fleet without reaching it: remove it there, ks node rm --force");
    let mut left = start_alone(node, vec![]).await?;
    left.warning =
        format!("the fleet does not know that it left: ks node rm --force there, if it still lists it; {}", left.warning);
    Ok(left)
}

async fn start_alone(node: &Arc<Node>, moved: Vec<String>) -> Result<Left, ApiError> {
    let me = node.fleet.number();
    let layout = node.layout.clone();
    let ordered = tokio::task::spawn_blocking(move || membership::order_leave(&layout)).await;
    ordered.map_err(|e| internal("keeping the order to leave", e))?.map_err(|e| internal("keeping the order to leave", e))?;
    node.restart_soon();
    let warning = "this node knew the fleet's keys: rotate provider keys and users' tokens if it goes into other hands".into();
    Ok(Left { schema: "ks.left.v1".into(), number: me, moved, warning })
}

/// Removes a member: one that was drained, or with `force` a dead one, whose sessions go to others.
///
/// # Errors
/// What stands against it.
pub async fn remove(node: &Arc<Node>, which: &str, force: bool) -> Result<NodeView, ApiError> {
    let info = ops::fleet::info(node);
    let m = ops::fleet::find(&node.state.read(), which)?;
    let view = info
        .nodes
        .into_iter()
        .find(|n| n.number == m.number)
        .ok_or_else(|| ApiError::new("not-found", "there is no such node", format!("{} has left", m.name), "ks node ls"))?;
    if m.number == node.fleet.number() {
        let why = "it is the node that you ask";
        return Err(ApiError::new(
            "usage",
            format!("{} is not removed", m.name),
            why,
            "on that node: ks node leave; or ask another node",
        ));
    }
    if force && view.live {
        let why = "it is alive: a forced removal is for dead nodes";
        return Err(ApiError::new(
            "busy",
            format!("{} is not removed", m.name),
            why,
            format!("ks node drain {0}, then ks node rm {0}", m.name),
        ));
    }
    node.state.propose(Command::RemoveMember { number: m.number, forced: force }).await?;
    node.state.event(
        "",
        "node-removed",
        &format!("{} was removed; rotate provider keys if its disk may be read by others", m.name),
    );
    Ok(view)
}

/// Begins a new generation from this node's own state, as the only voter. For a fleet whose voters are lost for good: done at
/// the next start, which follows at once.
///
/// # Errors
/// If there is a quorum after all, or the disk refuses.
pub async fn recover(node: &Arc<Node>, steps: &Steps) -> Result<FleetInfo, ApiError> {
    steps.step("looking for a majority of the voters", 0, 2);
    if node.fleet.consensus().catch_up().await.is_ok() {
        let why = "the fleet has a leader and a majority of its voters: nothing has to be recovered";
        return Err(ApiError::new("usage", "the fleet is not recovered", why, "ks fleet status"));
    }
    let layout = node.layout.clone();
    let ordered = tokio::task::spawn_blocking(move || membership::order(&layout, membership::Order::Recover)).await;
    ordered.map_err(|e| internal("the recovery", e))?.map_err(|e| internal("the recovery", e))?;
    node.state.event("", "recovering-fleet", "this node becomes the only voter of a new generation");
    steps.step("starting again as the only voter of a new generation", 1, 2);
    let info = ops::fleet::info(node);
    node.restart_soon();
    Ok(info)
}
