//! The plan of faults: what goes wrong, when, for how long. Everything follows from the seed.

use crate::run::{Kill, kill, launch};
use crate::world::World;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Faults under way.
#[derive(Debug, Default)]
pub struct Plan {
    next_ms: u64,
    revive: Vec<(u64, u64)>,
    heal: Vec<(u64, BTreeSet<(u64, u64)>)>,
}

impl Plan {
    /// A plan whose first fault comes soon after `now_ms`.
    pub fn new(now_ms: u64) -> Self {
        Self { next_ms: now_ms + 3_000, ..Self::default() }
    }

    /// Ends what is due and begins what is next.
    pub fn step(&mut self, world: &Arc<World>) {
        let now = world.now_ms();
        self.end(world, now);
        if now < self.next_ms {
            return;
        }
        self.next_ms = now + 1_500 + world.roll(9_000);
        let nodes: Vec<u64> = world.with(|w| w.nodes.keys().copied().collect());
        let node = pick(world, &nodes);
        match world.roll(17) {
            0 | 1 => self.down(world, now, node, Kill::Host, 1_000 + world.roll(40_000)),
            2 | 3 => self.down(world, now, node, Kill::Daemon, 200 + world.roll(3_000)),
            4 | 5 => self.down(world, now, node, Kill::Power, 2_000 + world.roll(30_000)),
            6 if world.roll(3) == 0 => {
                for n in &nodes {
                    self.down(world, now, *n, Kill::Power, 1_000 + world.roll(4_000));
                }
                world.with(|w| w.fault("power cut of the whole site"));
            }
            6 | 7 => self.cut(world, now, "node cut off", &nodes, |a, b| (a == node) != (b == node)),
            8 => self.cut(world, now, "node is not heard", &nodes, |a, _| a == node),
            9 => self.cut(world, now, "node hears nothing", &nodes, |_, b| b == node),
            10 => {
                let half = world.roll(1 << nodes.len());
                let side = |n: u64| nodes.iter().position(|x| *x == n).is_some_and(|i| half >> i & 1 == 1);
                self.cut(world, now, "fleet split", &nodes, |a, b| side(a) != side(b));
            }
            11 => freeze(world, node, "daemon frozen", true, false),
            12 => freeze(world, node, "VMs frozen", false, true),
            13 => freeze(world, node, "node frozen", true, true),
            14 => rot(world),
            15 => {
                let until = Instant::now() + Duration::from_millis(2_000 + world.roll(15_000));
                let full = world.roll(3) == 0;
                world.with(|w| {
                    let n = w.node_mut(node);
                    *(if full { &mut n.full_until } else { &mut n.slow_until }) = until;
                    w.fault(if full { "disk full" } else { "disk slow" });
                });
            }
            _ => {
                let until = Instant::now() + Duration::from_millis(2_000 + world.roll(6_000));
                world.with(|w| {
                    w.node_mut(node).starts_fail_until = until;
                    w.fault("starts fail");
                });
            }
        }
    }

    /// Faults are over: everything is repaired, and everybody comes back.
    pub fn stop(&mut self, world: &Arc<World>) {
        world.with(|w| {
            w.calm = true;
            w.cut.clear();
            for n in w.nodes.values_mut() {
                let now = Instant::now();
                (n.frozen_until, n.vm_frozen_until, n.full_until, n.slow_until) = (now, now, now, now);
                n.starts_fail_until = now;
            }
        });
        let down: Vec<u64> = world.with(|w| w.nodes.iter().filter(|(_, n)| !n.up).map(|(n, _)| *n).collect());
        down.into_iter().for_each(|n| launch(world, n));
        *self = Self::default();
    }

    fn end(&mut self, world: &Arc<World>, now: u64) {
        let due = |at: u64| at <= now;
        for (_, node) in self.revive.extract_if(.., |(at, _)| due(*at)) {
            launch(world, node);
        }
        for (_, cuts) in self.heal.extract_if(.., |(at, _)| due(*at)) {
            world.with(|w| w.cut.retain(|c| !cuts.contains(c)));
        }
    }

    fn down(&mut self, world: &Arc<World>, now: u64, node: u64, how: Kill, ms: u64) {
        if kill(world, node, how) {
            world.trace(&format!("{how:?} of {node} for {ms}"));
            world.with(|w| w.fault(how.name()));
            self.revive.push((now + ms, node));
        }
    }

    fn cut(&mut self, world: &Arc<World>, now: u64, name: &'static str, nodes: &[u64], wants: impl Fn(u64, u64) -> bool) {
        let pairs = nodes.iter().flat_map(|a| nodes.iter().map(move |b| (*a, *b))).filter(|(a, b)| a != b && wants(*a, *b));
        let cuts: BTreeSet<(u64, u64)> = pairs.collect();
        self.heal.push((now + 1_000 + world.roll(35_000), cuts.clone()));
        world.with(|w| {
            w.cut.extend(cuts);
            w.fault(name);
        });
    }
}

/// A node; half of the time the leader.
fn pick(world: &World, nodes: &[u64]) -> u64 {
    let leaders: Vec<u64> = world.with(|w| {
        let leads = |n: &&u64| w.node(**n).peer.as_ref().is_some_and(|p| p.leadership().borrow().me);
        nodes.iter().filter(leads).copied().collect()
    });
    let from = if leaders.is_empty() || world.roll(2) == 0 { nodes } else { &leaders };
    let at = usize::try_from(world.roll(from.len() as u64)).unwrap_or(0);
    from[at]
}

fn freeze(world: &World, node: u64, name: &'static str, daemon: bool, vms: bool) {
    let until = Instant::now() + Duration::from_millis(500 + world.roll(12_000));
    world.with(|w| {
        let n = w.node_mut(node);
        if daemon {
            n.frozen_until = until;
        }
        if vms {
            n.vm_frozen_until = until;
        }
        w.fault(name);
    });
}

/// Flips a bit of an object of which another holder has a sound copy.
fn rot(world: &World) {
    let dice = world.roll(u64::MAX);
    world.with(|w| {
        let mut candidates = Vec::new();
        for s in w.newest.1.sessions.values() {
            for c in s.checkpoints.values() {
                let sound = |n: &u64| w.nodes.get(n).is_some_and(|x| x.store.read(&c.info.id).is_some());
                let holders: Vec<u64> = c.holders.iter().copied().filter(sound).collect();
                if holders.len() > 1 {
                    candidates.extend(holders.iter().map(|h| (*h, c.info.id)));
                }
            }
        }
        if candidates.is_empty() {
            return;
        }
        let (node, id) = candidates[usize::try_from(dice % candidates.len() as u64).unwrap_or(0)];
        let store = &mut w.node_mut(node).store;
        let mut names = vec![id.0];
        names.extend(store.get(&id.0).and_then(|m| crate::store::chunk_names(&m)).unwrap_or_default());
        let name = names[usize::try_from((dice >> 32) % names.len() as u64).unwrap_or(0)];
        store.rot(&name);
        w.fault("rot");
    });
}
