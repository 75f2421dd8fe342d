//! The replicated state, and what gossip says, in the machines' words.

use crate::node::Node;
use ks_fleet::{CheckpointView, FactsView, MemberView, SessionView, Standing, View};
use ks_raft::{FleetState, MemberState, Wanted};
use std::collections::BTreeMap;

/// The part of the state that the machines decide on.
pub fn of(state: &FleetState) -> View {
    let members = state.members.values().map(|m| {
        let standing = match m.state {
            MemberState::Active => Standing::Active,
            MemberState::Draining => Standing::Draining,
            MemberState::Gone => Standing::Gone,
        };
        let view = MemberView {
            number: m.number,
            standing,
            profiles: m.profiles.clone(),
            domain: m.domain().to_owned(),
            incarnation: m.incarnation,
        };
        (m.number, view)
    });
    let sessions = state.sessions.values().filter(|s| !s.tombstone).map(|s| {
        let checkpoints = s.checkpoints.values().map(|c| CheckpointView {
            id: c.info.id,
            token: c.token,
            holders: state.holders(s, c),
            branch: c.branch,
        });
        let copies = u16::try_from(state.copies_wanted(s)).unwrap_or(u16::MAX);
        let view = SessionView {
            id: s.id,
            owner: s.owner,
            epoch: s.token.epoch,
            token: s.token,
            replicas: s.replicas.clone(),
            copies,
            profile: s.params.profile.clone(),
            memory_mib: s.params.memory_mib,
            running: s.wanted == Wanted::Running,
            failed: s.wanted == Wanted::Failed,
            checkpoints: checkpoints.collect(),
        };
        (s.id, view)
    });
    View {
        members: members.collect(),
        sessions: sessions.collect(),
        lease_ms: u64::from(state.policy.lease_ms),
        voters: state.policy.voters,
    }
}

/// What is known of every member by its last word, this node itself included.
pub fn facts(node: &Node) -> BTreeMap<u64, FactsView> {
    let me = node.fleet.number();
    let state = node.state.read();
    let mut out = BTreeMap::new();
    for number in state.members.keys().copied() {
        let told = if number == me { Some((crate::ops::facts::own(node), 0)) } else { node.fleet.facts_of(number) };
        if let Some((f, seen_ms_ago)) = told {
            let load_milli = f.load_milli / u64::from(f.cpus.max(1));
            let view = FactsView {
                seen_ms_ago,
                load_milli,
                mem_free_mib: f.mem_free_mib,
                disk_free_mib: f.disk_free_mib,
                sessions: u64::from(f.sessions),
            };
            out.insert(number, view);
        }
    }
    out
}
