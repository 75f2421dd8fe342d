//! The fleet as people see and change it: nodes, tokens, users, policy.

use crate::fleet::Fleet;
use crate::host::{clock, files};
use crate::node::Node;
use ks_proto::api::ApiError;
use ks_proto::fleet::{
    FleetInfo, FleetPolicy, JoinToken, LeaseView, MakeToken, NewUser, NodeRole, NodeState, NodeView, PolicyChange, PutUser, Role,
    UserView,
};
use ks_raft::{Command, FleetState, Member, MemberState};
use std::sync::Arc;

/// Life of a join token that says none, seconds.
const TOKEN_TTL_S: u64 = 3600;
/// The longest, seconds.
const TOKEN_TTL_MAX_S: u64 = 30 * 24 * 3600;

fn usage(what: &str, why: String, next: &str) -> ApiError {
    ApiError::new("usage", what, why, next)
}

/// A member by number (`#3` or `3`) or name.
///
/// # Errors
/// `not-found`.
pub fn find(state: &FleetState, text: &str) -> Result<Member, ApiError> {
    let by_number = text.strip_prefix('#').unwrap_or(text).parse::<u64>().ok().and_then(|n| state.members.get(&n));
    let found = by_number.or_else(|| state.members.values().find(|m| m.is_member() && m.name == text));
    found.cloned().ok_or_else(|| {
        ApiError::new(
            "not-found",
            "there is no such node",
            format!("no node is called {text:?}"),
            "ks node ls shows what there is",
        )
    })
}

/// The fleet as this node sees it.
pub fn info(node: &Node) -> FleetInfo {
    let f = &node.fleet;
    let state = node.state.read();
    let leadership = *f.consensus().leadership().borrow();
    let voters: Vec<u64> = f.voters().into_iter().collect();
    let nodes = state.members.values().filter(|m| m.is_member()).map(|m| view(node, &state, m, &voters, leadership.leader));
    FleetInfo {
        schema: "ks.fleet.v1".into(),
        fleet_id: state.fleet_id.map(|i| i.to_hex()).unwrap_or_default(),
        generation: state.generation,
        leader: leadership.leader,
        term: leadership.term,
        me: f.number(),
        quorum: leadership.leader.is_some() && (f.alone() || f.deadline() > clock::boottime_ms()),
        lease: lease(f),
        policy: policy_view(&state),
        fingerprint: f.fingerprint(),
        nodes: nodes.collect(),
        warning: warning(&state, voters.len()),
        voters,
    }
}

fn policy_view(state: &FleetState) -> FleetPolicy {
    let p = &state.policy;
    FleetPolicy { copies: p.copies, voters: p.voters, lease_ms: u64::from(p.lease_ms) }
}

fn lease(f: &Fleet) -> LeaseView {
    let (deadline, now) = (f.deadline(), clock::boottime_ms());
    match deadline {
        u64::MAX => LeaseView { state: "unlimited".into(), remaining_ms: None },
        d if d > now => LeaseView { state: "held".into(), remaining_ms: Some(d - now) },
        _ => LeaseView { state: "lapsed".into(), remaining_ms: Some(0) },
    }
}

/// What the fleet cannot survive, in words.
pub fn warning(state: &FleetState, voters: usize) -> String {
    let members = state.members.values().filter(|m| m.is_member()).count();
    match (members, voters) {
        (0 | 1, _) => {
            "one node: every checkpoint has one copy, on this disk. If the disk or the host is lost, so are the sessions.".into()
        }
        (2, _) => {
            "two nodes have one voter: losing that one pauses every session until `ks fleet recover`. A third node mends this."
                .into()
        }
        (_, 0..=2) => format!("{voters} of {members} nodes vote as yet: the loss of a voter may pause every session for now."),
        _ if state.policy.copies < 2 => "one copy of each checkpoint: a dead disk takes its sessions along.".into(),
        _ => String::new(),
    }
}

fn view(node: &Node, state: &FleetState, m: &Member, voters: &[u64], leader: Option<u64>) -> NodeView {
    let facts = node.fleet.facts_of(m.number);
    let link = node.fleet.link_of(m.number);
    let me = m.number == node.fleet.number();
    let own = me.then(|| super::facts::own(node));
    let f = own.or(facts.as_ref().map(|(f, _)| f.clone())).unwrap_or_default();
    NodeView {
        number: m.number,
        name: m.name.clone(),
        peer_id: m.peer_id.clone(),
        state: match m.state {
            MemberState::Active => NodeState::Active,
            MemberState::Draining => NodeState::Draining,
            MemberState::Gone => NodeState::Gone,
        },
        role: if voters.contains(&m.number) { NodeRole::Voter } else { NodeRole::Learner },
        leader: leader == Some(m.number),
        live: me || facts.as_ref().is_some_and(|(_, ago)| *ago < node.fleet.liveness_ms()),
        seen_ms_ago: if me { Some(0) } else { node.fleet.seen_ms_ago(m.number) },
        rtt_us: link.and_then(|l| l.rtt_us),
        api: m.api.clone(),
        addrs: m.control.iter().cloned().chain(m.bulk.iter().map(|b| format!("bulk {b}"))).collect(),
        domain: m.domain().to_owned(),
        sessions: state.sessions.values().filter(|s| !s.tombstone && s.owner == m.number).count() as u64,
        mem_free_mib: f.mem_free_mib,
        mem_total_mib: f.mem_total_mib,
        cpus: f.cpus,
        load: f64::from(u32::try_from(f.load_milli).unwrap_or(u32::MAX)) / 1000.0,
        disk_free_mib: f.disk_free_mib,
        profiles: m.profiles.clone(),
        version: f.versions.get("ksd").cloned().unwrap_or_default(),
        incarnation: format!("{:016x}", m.incarnation),
        joined_unix_ms: m.joined_unix_ms,
    }
}

/// Makes a join token: one use.
///
/// # Errors
/// What the state refused, or that this node has no address that others could reach.
pub async fn token(node: &Arc<Node>, t: MakeToken) -> Result<JoinToken, ApiError> {
    let ttl_s = if t.ttl_s == 0 { TOKEN_TTL_S } else { t.ttl_s };
    if ttl_s > TOKEN_TTL_MAX_S {
        return Err(usage("the token's life", format!("{ttl_s} s; at most {TOKEN_TTL_MAX_S}"), "ask for a shorter one"));
    }
    let addr = node.fleet.api_address();
    let token = node.fleet.new_token(&addr)?;
    let expires_unix_ms = clock::unix_ms() + ttl_s * 1000;
    let hash = hex::encode(token.hash());
    let command = Command::AddToken { token_hash: hash, expires_unix_ms, made_by: "admin".into(), now_unix_ms: clock::unix_ms() };
    node.state.propose(command).await?;
    let text = token.to_string();
    Ok(JoinToken { schema: "ks.token.v1".into(), token: text, expires_unix_ms, fingerprint: node.fleet.fingerprint(), addr })
}

/// Changes the policy.
///
/// # Errors
/// `usage` for values that are not allowed.
pub async fn policy(node: &Arc<Node>, c: PolicyChange) -> Result<FleetPolicy, ApiError> {
    let mut p = node.state.read().policy;
    p.copies = c.copies.unwrap_or(p.copies);
    p.voters = c.voters.unwrap_or(p.voters);
    if let Some(ms) = c.lease_ms {
        p.lease_ms = u32::try_from(ms).map_err(|_| usage("the lease", format!("{ms} ms is too long"), "use 1000 to 60000"))?;
    }
    node.state.propose(Command::SetFleetPolicy { policy: p }).await?;
    Ok(policy_view(&node.state.read()))
}

/// Makes a user, or gives one a further token.
///
/// # Errors
/// `usage` for a bad name.
pub async fn put_user(node: &Arc<Node>, u: PutUser) -> Result<NewUser, ApiError> {
    let valid = u.name.parse::<ks_proto::SessionName>().is_ok();
    if !valid {
        return Err(usage("the user's name", format!("{:?} is not 1-63 of a-z, 0-9, '-' and '.'", u.name), "choose another"));
    }
    let token = format!("ksu_{}", hex::encode(files::random::<24>()));
    let token_hash = blake3::hash(token.as_bytes()).to_hex().to_string();
    let role = match u.role {
        Role::Viewer => ks_raft::Role::Viewer,
        Role::User => ks_raft::Role::User,
        Role::Admin => ks_raft::Role::Admin,
    };
    let mut token_hashes = node.state.read().users.get(&u.name).map(|u| u.token_hashes.clone()).unwrap_or_default();
    token_hashes.push(token_hash);
    let command = Command::PutUser { name: u.name.clone(), role, token_hashes, now_unix_ms: clock::unix_ms() };
    node.state.propose(command).await?;
    Ok(NewUser { schema: "ks.user.v1".into(), name: u.name, role: u.role, token })
}

/// All users.
pub fn users(node: &Node) -> Vec<UserView> {
    let role = |r: ks_raft::Role| match r {
        ks_raft::Role::Viewer => Role::Viewer,
        ks_raft::Role::User => Role::User,
        ks_raft::Role::Admin => Role::Admin,
    };
    let state = node.state.read();
    let view = |(name, u): (&String, &ks_raft::UserRecord)| UserView {
        name: name.clone(),
        role: role(u.role),
        created_unix_ms: u.created_unix_ms,
        tokens: u.token_hashes.len() as u64,
    };
    state.users.iter().map(view).collect()
}

/// Forgets a user with all tokens.
///
/// # Errors
/// `not-found`.
pub async fn drop_user(node: &Arc<Node>, name: &str) -> Result<(), ApiError> {
    node.state.propose(Command::DropUser { name: name.to_owned() }).await.map(drop)
}
