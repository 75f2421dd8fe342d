//! Records and machines as the API shows them.

use crate::fleet::{call, owning};
use crate::host::clock;
use crate::node::Node;
use ks_proto::SessionId;
use ks_proto::api::{ApiError, Checkpoint, Session, SessionState, Tree, TreeSession};
use ks_raft::{CheckpointRecord, FleetState, SessionRecord, Wanted};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// How long another node may take to tell of its sessions.
const TELL: Duration = Duration::from_millis(1500);

/// A session as it is now.
pub fn session(node: &Node, r: &SessionRecord) -> Session {
    let view = node.handle(&r.id).map(|h| h.view.borrow().clone());
    let fleet = node.state.read();
    let (state, reason, vmm_pid) = match view {
        _ if r.tombstone => (SessionState::Stopped, "removed; kept because forks of it remain".to_owned(), None),
        Some(v) => {
            let silent = v.vm.as_ref().and_then(|vm| vm.pulse.words());
            let reason = [silent, Some(v.reason).filter(|r| !r.is_empty())].into_iter().flatten().collect::<Vec<_>>().join("; ");
            (v.state, reason, v.vm.map(|vm| vm.pid))
        }
        None if r.owner == node.fleet.number() => near(node, r),
        None => far(node, r),
    };
    Session {
        schema: "ks.session.v1".into(),
        id: r.id,
        name: r.name.clone(),
        state,
        reason,
        engine: r.params.engine,
        profile: r.params.profile.clone(),
        engine_why: r.params.engine_why.clone(),
        image: r.params.image.clone(),
        memory_mib: r.params.memory_mib,
        vcpus: r.params.vcpus,
        token: r.token,
        created_unix_ms: r.created_unix_ms,
        forked_from: r.forked_from.clone(),
        // After a restore the restored one, until the next is taken.
        last_checkpoint: r.by_id(&r.head).or_else(|| r.latest()).map(|c| checkpoint(node, &fleet, r, c)),
        checkpoints: r.checkpoints.len() as u64,
        cadence_s: r.cadence_s,
        idle_park_s: r.idle_park_s,
        command: r.command.clone().unwrap_or_default(),
        last_interruption: r.last_interruption.clone(),
        vmm_pid,
        node: node.fleet.name_of(r.owner),
        copies: if r.copies == 0 { fleet.policy.copies } else { r.copies },
        replicas: r.replicas.iter().map(|n| node.fleet.name_of(*n)).collect(),
        paused: r.owner == node.fleet.number() && node.fleet.deadline() < clock::boottime_ms(),
    }
}

/// A checkpoint as it is listed: who has it, and how safe that makes it.
pub fn checkpoint(node: &Node, state: &FleetState, r: &SessionRecord, c: &CheckpointRecord) -> Checkpoint {
    Checkpoint {
        durability: state.durability(r, c).as_str().to_owned(),
        holders: state.holders(r, c).into_iter().map(|n| node.fleet.name_of(n)).collect(),
        branch: c.branch,
        ..c.info.clone()
    }
}

/// All kept checkpoints of a session, oldest first.
pub fn checkpoints(node: &Node, r: &SessionRecord) -> Vec<Checkpoint> {
    let state = node.state.read();
    r.checkpoints.values().map(|c| checkpoint(node, &state, r, c)).collect()
}

/// What there is to tell of a session of this node that has no machine here: it is being made, or ksd was started a moment ago, or
/// without a quorum, and its VM stands still or runs out its lease until there is one.
fn near(node: &Node, r: &SessionRecord) -> (SessionState, String, Option<u32>) {
    if node.is_making(&r.id) {
        return (SessionState::Creating, String::new(), None);
    }
    let led = node.fleet.consensus().leadership().borrow().leader.is_some();
    let reason = if led { String::new() } else { "not taken up yet: this node waits for a majority of the voters".to_owned() };
    (owning::state_of(r), reason, None)
}

/// What the record alone tells of a session whose node has not told more.
fn far(node: &Node, r: &SessionRecord) -> (SessionState, String, Option<u32>) {
    let owner = node.fleet.name_of(r.owner);
    let state = match r.wanted {
        Wanted::Running if r.lost.is_some() => SessionState::Recovering,
        Wanted::Running => SessionState::Running,
        Wanted::Parked => SessionState::Parked,
        Wanted::Stopped => SessionState::Stopped,
        Wanted::Failed => SessionState::Failed,
    };
    let reason = match (&r.lost, r.wanted) {
        (Some(lost), _) => format!("{} ({owner} brings it back)", lost.cause),
        (None, Wanted::Running) => format!("as last recorded: {owner} does not answer now"),
        (None, _) => r.reason.clone(),
    };
    (state, reason, None)
}

/// The session with this id as it is now.
///
/// # Errors
/// `not-found`.
pub fn by_id(node: &Node, id: &SessionId) -> Result<Session, ApiError> {
    let record = node.state.read().sessions.get(id).cloned();
    let record = record.ok_or_else(|| ApiError::new("not-found", "the session is gone", "it was removed", "ks ls"))?;
    Ok(session(node, &record))
}

/// The sessions that this node owns, by name.
pub fn own(node: &Node) -> Vec<Session> {
    let me = node.fleet.number();
    let state = node.state.read();
    let mut records: Vec<&SessionRecord> = state.sessions.values().filter(|s| !s.tombstone && s.owner == me).collect();
    records.sort_by(|a, b| a.name.cmp(&b.name));
    records.into_iter().map(|r| session(node, r)).collect()
}

/// All live sessions of the fleet by name. What another node runs, it tells itself; one that does not answer in time is shown
/// from the record, and the reason says so.
pub async fn all(node: &Arc<Node>) -> Vec<Session> {
    let me = node.fleet.number();
    let mut out = own(node);
    let state = node.state.read();
    let others: BTreeSet<u64> = state.sessions.values().filter(|s| !s.tombstone && s.owner != me).map(|s| s.owner).collect();
    let asked = others.into_iter().map(|n| {
        let node = node.clone();
        async move {
            let got = tokio::time::timeout(TELL, call::get::<Vec<Session>>(&node.fleet, n, "/v1/internal/sessions")).await;
            got.ok().and_then(Result::ok).unwrap_or_default()
        }
    });
    let told: BTreeMap<SessionId, Session> =
        futures::future::join_all(asked).await.into_iter().flatten().map(|s| (s.id, s)).collect();
    let far = state.sessions.values().filter(|s| !s.tombstone && s.owner != me);
    out.extend(far.map(|r| told.get(&r.id).cloned().unwrap_or_else(|| session(node, r))));
    out.sort_by(|a, b| a.name.cmp(&b.name));
    out
}

/// The whole family of a session, parents first.
pub fn tree(node: &Node, of: &SessionRecord) -> Tree {
    let records: Vec<SessionRecord> = node.state.read().sessions.values().cloned().collect();
    let find = |id: &SessionId| records.iter().find(|r| r.id == *id);
    let parent = |r: &SessionRecord| r.forked_from.as_ref().map(|f| f.session);
    let mut root = of.id;
    let mut seen = BTreeSet::from([root]);
    while let Some(up) = find(&root).and_then(parent).filter(|p| find(p).is_some()) {
        if !seen.insert(up) {
            break;
        }
        root = up;
    }
    let mut order = vec![root];
    let mut at = 0;
    while at < order.len() {
        let mut children: Vec<&SessionRecord> = records.iter().filter(|r| parent(r) == Some(order[at])).collect();
        children.sort_by_key(|r| (r.created_unix_ms, r.name.clone()));
        order.extend(children.iter().map(|r| r.id));
        at += 1;
    }
    let sessions =
        order.iter().filter_map(find).map(|r| TreeSession { session: session(node, r), checkpoints: checkpoints(node, r) });
    Tree { schema: "ks.tree.v1".into(), sessions: sessions.collect() }
}
