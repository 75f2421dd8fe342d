//! The task that keeps the group of voters as `ks_fleet::voters` wants it, while this node leads.

use super::view;
use crate::node::Node;
use ks_fleet::voters::{Change, Group, wanted_voters};
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Between two looks.
const EVERY: Duration = Duration::from_millis(500);

/// Runs for as long as the node lives.
pub async fn run(node: Weak<Node>) {
    let mut tick = tokio::time::interval(EVERY);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        let Some(node) = node.upgrade() else { return };
        look(&node).await;
    }
}

async fn look(node: &Arc<Node>) {
    let consensus = node.fleet.consensus();
    if !consensus.leadership().borrow().me {
        return;
    }
    let Some(progress) = consensus.progress() else { return };
    let membership = consensus.membership();
    let me = node.fleet.number();
    let state = node.state.read();
    let view = view::of(&state, |_| false);
    let silent_ms: BTreeMap<u64, u64> =
        state.members.keys().filter(|n| **n != me).filter_map(|n| node.fleet.facts_of(*n).map(|(_, ago)| (*n, ago))).collect();
    let group = Group {
        leader: me,
        voters: membership.voters.clone(),
        learners: membership.learners.clone(),
        matched: progress.matched.iter().filter_map(|(n, i)| Some((*n, (*i)?))).collect(),
        last_log: progress.last,
        silent_ms,
        leader_is_finite: node.fleet.deadline() != u64::MAX,
    };
    // A change that was cut short is completed first.
    if membership.joint {
        if let Err(e) = consensus.set_voters(&membership.voters, membership.guard).await {
            tracing::debug!("the group of voters stays half changed: {e}");
        }
        return;
    }
    let done = match wanted_voters(&view, &group) {
        Change::None => return,
        Change::AddLearner(n) => consensus.ensure_learner(n).await.map_err(|e| e.to_string()),
        Change::DropLearner(n) => consensus.drop_learner(n).await.map_err(|e| e.to_string()),
        Change::SetVoters { voters, guard: _ } => {
            let names: Vec<String> = voters.iter().map(|n| node.fleet.name_of(*n)).collect();
            let done = consensus.set_voters(&voters, membership.guard).await.map_err(|e| e.to_string());
            if done.is_ok() {
                node.state.event("", "voters", &format!("these nodes vote now: {}", names.join(", ")));
            }
            done
        }
    };
    if let Err(why) = done {
        tracing::debug!("the group of voters is not changed yet: {why}");
    }
}
