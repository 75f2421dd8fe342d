//! The replicated state, and what gossip says, in the machines' words.
//!
//! A view is built anew after every change of the state, so it holds no more sessions than its machine looks at: a fleet may have
//! ten thousand, of which a node owns a hundred.

use crate::node::Node;
use ks_fleet::{FactsView, Scope, View};
use ks_raft::{FleetState, SessionRecord};
use std::collections::BTreeMap;

/// The part of the state that a machine decides on: all members, and the sessions that it asks for.
pub fn of(state: &FleetState, wants: impl Fn(&SessionRecord) -> bool) -> View {
    capped(state, View::of(state, wants))
}

/// As [`of`], for a machine that says what it looks at.
pub fn within(state: &FleetState, scope: &Scope) -> View {
    capped(state, View::within(state, scope))
}

/// No more copies are wanted than there are members to keep them.
fn capped(state: &FleetState, mut view: View) -> View {
    let active = u16::try_from(state.active().count()).unwrap_or(u16::MAX).max(1);
    view.sessions.values_mut().for_each(|s| s.copies = s.copies.min(active));
    view
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
