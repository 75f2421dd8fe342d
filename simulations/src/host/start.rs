//! Starts: brings back the sessions that this node owns.

use super::copy::gather;
use super::{Done, GOLDEN, Host, Mail};
use crate::net::ask;
use crate::vm::Vm;
use ks_proto::{CheckpointId, RunToken, SessionId};
use ks_raft::{Command, Response, SessionRecord, Wanted};
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// Longest wait for the leader to hear of a start.
const TELL_WAIT: Duration = Duration::from_secs(2);

impl Host {
    /// Ends what is not this node's any more and starts what is.
    pub(super) fn reconcile(&mut self) {
        self.end_strangers();
        if !self.introduced || !self.holder.holds(self.now()) {
            return;
        }
        let (state, me) = (self.state.clone(), self.me);
        let mine = state.sessions.values().filter(|s| !s.tombstone && s.owner == me && s.wanted == Wanted::Running);
        for s in mine {
            let epoch = s.token.epoch;
            let runs = self.world.with(|w| w.node(me).vms.contains_key(&s.id));
            let cannot = self.cannot_start.get(&s.id) == Some(&epoch);
            if !runs && !cannot && self.starting.insert(s.id) {
                self.start(s);
            }
        }
    }

    fn start(&mut self, s: &SessionRecord) {
        let (session, epoch, head) = (s.id, s.token.epoch, s.head);
        let holders = s.by_id(&head).map(|c| c.holders.clone()).unwrap_or_default();
        let (world, me, peer) = (self.world.clone(), self.me, self.peer.clone());
        self.spawn_done(async move {
            if world.with(|w| w.node(me).starts_fail_until > Instant::now()) {
                world.with(|w| w.count("starts failed"));
                sleep(Duration::from_millis(300)).await;
                return Done::StartFailed { session, epoch };
            }
            let nothing = Done::Begun { session, epoch, begun: None };
            let Some(counter) = restore(&world, me, head, &holders).await else {
                sleep(Duration::from_millis(500)).await;
                return nothing;
            };
            let command = Command::BeginRun { id: session, from: head, expected_epoch: Some(epoch), node: Some(me) };
            match peer.propose(command).await {
                Ok(Response::Token { token }) => Done::Begun { session, epoch, begun: Some((token, counter)) },
                _ => nothing,
            }
        });
    }

    pub(super) fn begun(&mut self, session: SessionId, epoch: u64, begun: Option<(RunToken, u64)>) {
        self.starting.remove(&session);
        let Some((token, counter)) = begun else { return };
        let current = self.state.sessions.get(&session).is_some_and(|s| s.owner == self.me && s.token == token);
        // A start that took too long may find that another life of this daemon, or another node, began a newer run.
        if !current || token.epoch != epoch {
            return;
        }
        let at = self.world.now_ms();
        self.world.with(|w| {
            w.count("runs begun");
            w.invariants.durable.begun(at, session, counter);
        });
        let vm = Vm::start(&self.world, self.me, session, token, counter, self.deadline());
        self.world.with(|w| drop(w.node_mut(self.me).vms.insert(session, vm)));
        self.next_capture_ms.remove(&session);
        self.tell_leader(move |reply| Mail::Started { session, epoch, reply });
    }

    /// Starts that failed are told until the session has another epoch.
    pub(super) fn say_again(&mut self) {
        let (state, me) = (self.state.clone(), self.me);
        let still = |id: &SessionId, epoch: u64| {
            state.sessions.get(id).is_some_and(|s| !s.tombstone && s.owner == me && s.token.epoch == epoch)
        };
        self.cannot_start.retain(|id, epoch| still(id, *epoch));
        for (session, epoch) in self.cannot_start.clone() {
            self.tell_leader(move |reply| Mail::StartFailed { session, epoch, node: me, reply });
        }
    }

    fn tell_leader(&mut self, letter: impl FnOnce(tokio::sync::oneshot::Sender<()>) -> Mail + Send + 'static) {
        let Some(leader) = self.peer.leadership().borrow().leader else { return };
        let (world, me) = (self.world.clone(), self.me);
        self.spawn(async move {
            let _ = ask(&world, me, leader, TELL_WAIT, letter).await;
        });
    }
}

/// Gets the checkpoint here and reads it back.
async fn restore(world: &std::sync::Arc<crate::world::World>, me: u64, head: CheckpointId, holders: &[u64]) -> Option<u64> {
    if head == GOLDEN {
        return Some(0);
    }
    if !gather(world, me, head, holders).await {
        return None;
    }
    sleep(Duration::from_millis(50 + world.roll(300))).await;
    let at = world.now_ms();
    world.with(|w| {
        let (counter, one_instant) = w.node(me).store.read(&head)?;
        w.invariants.no_torn.read_back(at, head, counter, one_instant);
        Some(counter)
    })
}
