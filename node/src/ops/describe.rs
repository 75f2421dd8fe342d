//! Records and machines as the API shows them.

use crate::node::Node;
use ks_proto::SessionId;
use ks_proto::api::{ApiError, Session, SessionState, Tree, TreeSession};
use ks_raft::SessionRecord;
use std::collections::BTreeSet;

/// A session as it is now.
pub fn session(node: &Node, r: &SessionRecord) -> Session {
    let view = node.handle(&r.id).map(|h| h.view.borrow().clone());
    let (state, reason, vmm_pid) = match view {
        _ if r.tombstone => (SessionState::Stopped, "removed; kept because forks of it remain".to_owned(), None),
        Some(v) => {
            let silent = v.vm.as_ref().and_then(|vm| vm.pulse.words());
            let reason = [silent, Some(v.reason).filter(|r| !r.is_empty())].into_iter().flatten().collect::<Vec<_>>().join("; ");
            (v.state, reason, v.vm.map(|vm| vm.pid))
        }
        None => (SessionState::Creating, String::new(), None),
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
        last_checkpoint: r.by_id(&r.head).or_else(|| r.latest()).map(|c| c.info.clone()),
        checkpoints: r.checkpoints.len() as u64,
        cadence_s: r.cadence_s,
        idle_park_s: r.idle_park_s,
        command: r.command.clone().unwrap_or_default(),
        last_interruption: r.last_interruption.clone(),
        vmm_pid,
        node: String::new(),
        copies: 0,
        replicas: vec![],
        paused: false,
    }
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

/// All live sessions by name.
pub fn all(node: &Node) -> Vec<Session> {
    let mut records: Vec<SessionRecord> = node.state.read().sessions.values().filter(|s| !s.tombstone).cloned().collect();
    records.sort_by(|a, b| a.name.cmp(&b.name));
    records.iter().map(|r| session(node, r)).collect()
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
    let sessions = order.iter().filter_map(find).map(|r| TreeSession {
        session: session(node, r),
        checkpoints: r.checkpoints.values().map(|c| c.info.clone()).collect(),
    });
    Tree { schema: "ks.tree.v1".into(), sessions: sessions.collect() }
}
