//! Copies: captures, transfers, pins, collection and scrubbing over the modelled store.

use super::{Done, Host, Mail};
use crate::client;
use crate::mutants::Mutant;
use crate::net::{Peer, ask, fetch_object};
use crate::store::{Pin, capture, chunk_names};
use crate::world::World;
use ks_fleet::replication::{Effect, Input};
use ks_proto::api::Checkpoint;
use ks_proto::{CheckpointId, RunToken, SessionId};
use ks_raft::{Command, Durability};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::sleep;

/// Longest wait for one transfer.
const FETCH_WAIT: Duration = Duration::from_secs(30);
/// Newest checkpoints of a session that retention keeps, and all from the newest durable one on.
const KEPT: usize = 3;

/// Everything that is unsynced now becomes synced, after a while.
async fn sync(world: &Arc<World>, node: u64) {
    let names = world.with(|w| w.node(node).store.unsynced());
    sleep(Duration::from_micros(world.sync_us(node))).await;
    world.thaw(node).await;
    world.with(|w| w.node_mut(node).store.synced(&names));
}

/// Ends a fetch or capture for its pin once the applied state covers everything up to now.
async fn settled(world: &Arc<World>, peer: &Peer, me: u64, id: CheckpointId) {
    while peer.catch_up().await.is_err() {
        sleep(Duration::from_millis(200)).await;
    }
    world.with(|w| w.node_mut(me).store.settle(&id));
}

/// Gets what is missing of a checkpoint, verified. Not synced.
pub(super) async fn gather(world: &Arc<World>, me: u64, checkpoint: CheckpointId, from: &[u64]) -> bool {
    let mut wanted = vec![checkpoint.0];
    while let Some(name) = wanted.pop() {
        let mut bytes = world.with(|w| w.node(me).store.get(&name));
        for holder in from.iter().filter(|h| **h != me) {
            if bytes.is_some() {
                break;
            }
            bytes = fetch_object(world, *holder, me, &name).await.filter(|b| *blake3::hash(b).as_bytes() == name);
            if let Some(b) = &bytes {
                world.with(|w| w.node_mut(me).store.mend(b));
                // Bulk takes its time.
                sleep(Duration::from_millis(5 + world.roll(40))).await;
            }
        }
        let Some(bytes) = bytes else { return false };
        if name == checkpoint.0 {
            let Some(chunks) = chunk_names(&bytes) else { return false };
            wanted.extend(chunks);
        }
    }
    true
}

impl Host {
    pub(super) fn replicate(&mut self, input: Input) {
        let now = self.now();
        for effect in self.replicator.step(now, &self.view, input) {
            self.world.say(|| format!("node {}: {effect:?}", self.me));
            match effect {
                Effect::Fetch { peer, session, checkpoint, token, from } => {
                    let (world, me) = (self.world.clone(), self.me);
                    self.spawn_done(async move {
                        let letter = |reply| Mail::Fetch { session, checkpoint, token, from, reply };
                        let ok = ask(&world, me, peer, FETCH_WAIT, letter).await.unwrap_or(false);
                        Done::Fetched { peer, checkpoint, ok }
                    });
                }
                Effect::AddHolder { session, checkpoint, token, node } => {
                    self.propose(Command::AddHolder { session, checkpoint, token, node });
                }
                Effect::DropHolder { session, checkpoint, node } => self.drop_holder(session, checkpoint, node),
                Effect::SetReplicas { session, expected_epoch, replicas } => {
                    self.propose(Command::SetReplicas { session, expected_epoch, replicas });
                }
            }
        }
    }

    /// A copy is given up only for copies that were just read.
    fn drop_holder(&mut self, session: SessionId, checkpoint: CheckpointId, node: u64) {
        let replicas = self.state.sessions.get(&session).map(|s| s.replicas.clone()).unwrap_or_default();
        let (world, me, peer) = (self.world.clone(), self.me, self.peer.clone());
        self.spawn(async move {
            for replica in replicas {
                let letter = |reply| Mail::Verify { checkpoint, reply };
                if ask(&world, me, replica, FETCH_WAIT, letter).await != Some(true) {
                    return;
                }
            }
            drop(peer.propose(Command::DropHolder { session, checkpoint, node }).await);
        });
    }

    /// A peer (or this node's replicator) asks for a copy here: acknowledged when it is whole, synced and pinned.
    pub(super) fn fetch(
        &mut self,
        session: SessionId,
        checkpoint: CheckpointId,
        token: RunToken,
        from: Vec<u64>,
        reply: oneshot::Sender<bool>,
    ) {
        let (world, me, peer) = (self.world.clone(), self.me, self.peer.clone());
        world.with(|w| w.node_mut(me).store.pin(checkpoint, session, token, true));
        self.spawn(async move {
            let whole = gather(&world, me, checkpoint, &from).await;
            if whole && world.is(Mutant::AckBeforeFsync) {
                let _ = reply.send(true);
                sleep(Duration::from_millis(500)).await;
                sync(&world, me).await;
                settled(&world, &peer, me, checkpoint).await;
                return;
            }
            sync(&world, me).await;
            let synced = whole && world.with(|w| w.node(me).store.holds(&checkpoint, true));
            if synced {
                world.with(|w| w.count("copies made"));
            }
            world.say(|| format!("node {me}: copy of {checkpoint} made: {synced}"));
            let _ = reply.send(synced);
            settled(&world, &peer, me, checkpoint).await;
        });
    }

    pub(super) fn capture_if_due(&mut self) {
        let now = self.now();
        if !self.holder.holds(now) {
            return;
        }
        let vms: Vec<_> = self.world.with(|w| w.node(self.me).vms.values().cloned().collect());
        for vm in vms {
            let first = now + 1_000 + self.world.roll(2_000);
            let due = *self.next_capture_ms.entry(vm.session).or_insert(first);
            if now < due || self.capturing.contains(&vm.session) || now >= vm.deadline_ms.load(Ordering::SeqCst) {
                continue;
            }
            self.next_capture_ms.insert(vm.session, now + 6_000 + self.world.roll(8_000));
            self.capturing.insert(vm.session);
            let counter = vm.counter.load(Ordering::SeqCst);
            self.capture(vm.session, vm.token, counter);
        }
    }

    /// Chunks synced, then the manifest, then the record: in this order.
    fn capture(&mut self, session: SessionId, token: RunToken, counter: u64) {
        let captured = capture(session, token, counter, counter);
        let (world, me, peer) = (self.world.clone(), self.me, self.peer.clone());
        let parent = self.state.sessions.get(&session).map(|s| s.head);
        let created_unix_ms = world.unix_ms();
        self.spawn_done(async move {
            let id = captured.id;
            world.with(|w| {
                w.invariants.no_torn.captured.insert(id, counter);
                let store = &mut w.node_mut(me).store;
                store.pin(id, session, token, false);
                captured.chunks.iter().for_each(|c| store.put(c));
            });
            sync(&world, me).await;
            world.with(|w| w.node_mut(me).store.put(&captured.manifest));
            sync(&world, me).await;
            // What another crash took is found out before the record is made.
            if world.with(|w| w.node(me).store.holds(&id, true)) {
                let info = Checkpoint { parent, ..client::checkpoint(id, created_unix_ms) };
                let command = Command::CommitCheckpoint { id: session, token, info, holders: vec![me] };
                if peer.propose(command).await.is_ok_and(|a| !super::refused(&a)) {
                    world.with(|w| w.count("checkpoints"));
                    retain(&world, &peer, session).await;
                }
            }
            settled(&world, &peer, me, id).await;
            Done::Captured { session }
        });
    }

    /// Pins go when the state has decided: it names this node as a holder, the record is gone, or a newer run rules out
    /// that it comes. A state that is behind decides nothing: it may name this node as the holder that it was long ago.
    pub(super) fn release_pins(&mut self) {
        let (state, me) = (self.state.clone(), self.me);
        let stays = |id: &CheckpointId, pin: &Pin| {
            let Some(s) = state.sessions.get(&pin.session) else { return false };
            let coming = !pin.fetched && s.token <= pin.token;
            s.by_id(id).map_or(coming, |c| !c.holders.contains(&me))
        };
        let mut gone = Vec::new();
        self.world.with(|w| {
            w.node_mut(me).store.pins.retain(|id, pin| {
                let kept = !pin.settled || stays(id, pin);
                gone.extend((!kept).then_some(*id));
                kept
            });
        });
        for id in gone {
            self.world.say(|| format!("node {me}: pin of {id} released at {}", self.peer.applied()));
        }
    }

    /// What nothing refers to goes, judged by a state that is not behind: after a restart it is older than what this node
    /// had applied before.
    pub(super) fn collect(&mut self) {
        let peer = self.peer.clone();
        self.spawn_done(async move { Done::Current { is: peer.catch_up().await.is_ok() } });
    }

    pub(super) fn collect_now(&mut self) {
        let me = self.me;
        let ignores = self.world.is(Mutant::GcIgnoresFetch);
        let mut keep: BTreeSet<CheckpointId> = BTreeSet::new();
        for s in self.state.sessions.values() {
            keep.extend(s.checkpoints.values().filter(|c| c.holders.contains(&me)).map(|c| c.info.id));
        }
        self.world.with(|w| {
            let store = &mut w.node_mut(me).store;
            keep.extend(store.pins.iter().filter(|(_, p)| !(ignores && p.fetched)).map(|(id, _)| *id));
            let dropped = store.collect(&keep) as u64;
            *w.counts.entry("objects collected").or_default() += dropped;
        });
        self.world.say(|| format!("node {me}: collected at {}", self.peer.applied()));
    }

    /// Reads everything that this node should have, and mends what is damaged from the other holders.
    pub(super) fn scrub(&mut self) {
        let me = self.me;
        let damaged = |id: &CheckpointId| self.world.with(|w| w.node(me).store.read(id).is_none());
        let mut work: Vec<(CheckpointId, Vec<u64>)> = Vec::new();
        for s in self.state.sessions.values() {
            for c in s.checkpoints.values().filter(|c| c.holders.contains(&me) && damaged(&c.info.id)) {
                work.push((c.info.id, c.holders.clone()));
            }
        }
        let world = self.world.clone();
        self.spawn(async move {
            for (id, holders) in work {
                if world.with(|w| w.node(me).store.holds(&id, false)) && gather(&world, me, id, &holders).await {
                    sync(&world, me).await;
                    world.with(|w| w.count("mended by a scrub"));
                }
            }
        });
    }
}

/// Lets go of old checkpoints, never of the newest durable one or anything newer.
async fn retain(world: &Arc<World>, peer: &Peer, session: SessionId) {
    let state = peer.state();
    let Some(s) = state.sessions.get(&session) else { return };
    let durable = |c: &&ks_raft::CheckpointRecord| !c.branch && state.durability(s, c) == Durability::Durable;
    let Some(newest_durable) = s.checkpoints.values().rev().find(durable).map(|c| c.info.number) else { return };
    let kept = state.kept(s);
    let old = s.checkpoints.keys().rev().skip(KEPT).filter(|n| **n < newest_durable && !kept.contains_key(n));
    let numbers: Vec<u64> = old.copied().collect();
    if !numbers.is_empty() && peer.propose(Command::DropCheckpoints { id: session, numbers }).await.is_ok() {
        world.with(|w| w.count("retentions"));
    }
}
