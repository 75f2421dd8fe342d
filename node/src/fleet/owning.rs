//! Machines for the sessions that are this node's, and only for those: whatever the state says is followed.

use crate::host::session::{self, First};
use crate::node::Node;
use crate::session::Input;
use ks_proto::SessionId;
use ks_proto::api::SessionState;
use ks_raft::host::ProposeError;
use ks_raft::{FleetState, SessionRecord, Wanted};
use std::sync::{Arc, Weak};

/// Follows the state for as long as the node lives.
pub async fn run(node: Weak<Node>) {
    let Some(mut changes) = node.upgrade().map(|n| n.fleet.changes()) else { return };
    // After a restart the applied state is older than what was committed: a session taken up by it would begin at a checkpoint
    // that is not its newest.
    loop {
        let Some(strong) = node.upgrade() else { return };
        match strong.fleet.consensus().catch_up().await {
            Ok(()) => break,
            Err(ProposeError::Shutdown) => return,
            Err(e) => tracing::info!("sessions wait for the newest state: {e}"),
        }
    }
    loop {
        let Some(strong) = node.upgrade() else { return };
        let state = strong.state.read();
        look(&strong, &state).await;
        tokio::select! {
            changed = changes.changed() => if changed.is_err() { return },
            () = strong.fleet.owning.notified() => {}
        }
    }
}

/// One look: starts what is missing, lets go of what is not ours.
async fn look(node: &Arc<Node>, state: &FleetState) {
    let me = node.fleet.number();
    for r in state.sessions.values().filter(|r| !r.tombstone && r.owner == me) {
        match node.handle(&r.id) {
            None if node.is_making(&r.id) => {}
            None => {
                session::start(node, r, state_of(r), First::Resume);
            }
            // It went away and came back under a newer epoch: the earlier run ends first.
            Some(h) if h.epoch < r.token.epoch => h.input(Input::Disowned { to: node.fleet.name_of(me) }).await,
            Some(_) => {}
        }
    }
    for h in node.handles() {
        if node.is_making(&h.id) {
            continue;
        }
        match owner_of(state, &h.id) {
            Some(owner) if owner != me => h.input(Input::Disowned { to: node.fleet.name_of(owner) }).await,
            // Removed: its own machine was asked to, on this node or by an earlier owner.
            Some(_) | None => {}
        }
    }
}

fn owner_of(state: &FleetState, id: &SessionId) -> Option<u64> {
    state.sessions.get(id).filter(|r| !r.tombstone).map(|r| r.owner)
}

/// Where a session's machine begins.
pub fn state_of(r: &SessionRecord) -> SessionState {
    match r.wanted {
        Wanted::Running => SessionState::Starting,
        Wanted::Parked => SessionState::Parked,
        Wanted::Stopped => SessionState::Stopped,
        Wanted::Failed => SessionState::Failed,
    }
}
