//! The parts that the simulation brings: its own runtime on one thread, and a disk that loses what was not synced.

use super::harness::*;
use crate::host::{Consensus, ConsensusConfig, DeterministicRng, Disk, LogBatch, StoredSnapshot, Timing, TokioRuntime};
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

type Node = Consensus<DeterministicRng<TokioRuntime>>;

/// What is on the platter.
#[derive(Default)]
struct Platter {
    log: BTreeMap<u64, Vec<u8>>,
    notes: BTreeMap<&'static str, Vec<u8>>,
    snapshot: Option<StoredSnapshot>,
}

/// A write is on the platter 2 ms after it was asked for; a crash before that loses it.
#[derive(Clone, Default)]
struct Slow(Arc<Mutex<Platter>>);

impl Slow {
    fn later(&self, write: impl FnOnce(&mut Platter) + Send + 'static) -> BoxFuture<'static, io::Result<()>> {
        let platter = self.0.clone();
        async move {
            tokio::time::sleep(Duration::from_millis(2)).await;
            write(&mut platter.lock().unwrap());
            Ok(())
        }
        .boxed()
    }
}

impl Disk for Slow {
    fn write(&self, batch: LogBatch) -> BoxFuture<'static, io::Result<()>> {
        self.later(move |p| {
            if let Some(from) = batch.cut_from {
                p.log.retain(|index, _| *index < from);
            }
            if let Some(to) = batch.purge_to {
                p.log.retain(|index, _| *index > to);
            }
            p.log.extend(batch.put);
            p.notes.extend(batch.notes);
        })
    }
    fn entries(&self, start: u64, end: u64, _: usize) -> io::Result<Vec<(u64, Vec<u8>)>> {
        Ok(self.0.lock().unwrap().log.range(start..end).map(|(i, b)| (*i, b.clone())).collect())
    }
    fn last(&self) -> io::Result<Option<(u64, Vec<u8>)>> {
        Ok(self.0.lock().unwrap().log.last_key_value().map(|(i, b)| (*i, b.clone())))
    }
    fn note(&self, key: &'static str) -> io::Result<Option<Vec<u8>>> {
        Ok(self.0.lock().unwrap().notes.get(key).cloned())
    }
    fn write_snapshot(&self, snapshot: StoredSnapshot) -> BoxFuture<'static, io::Result<()>> {
        self.later(move |p| p.snapshot = Some(snapshot))
    }
    fn snapshot(&self) -> io::Result<Option<StoredSnapshot>> {
        Ok(self.0.lock().unwrap().snapshot.clone())
    }
}

/// One life of the node: a runtime that is dropped at the end, with everything that it had not finished.
fn life<T>(seed: u64, disk: &Slow, live: impl AsyncFnOnce(Node) -> T) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let timing = Timing { snapshot_entries: 10, kept_entries: 3, ..timing() };
    let config = ConsensusConfig { number: 1, incarnation: seed, dir: "unused".into(), timing };
    let wire = Group::new(timing).wire(1);
    runtime.block_on(DeterministicRng::<TokioRuntime>::scope(seed, async {
        let node = Node::open_on(config, Arc::new(disk.clone()), wire).await.unwrap();
        node.found().await.unwrap();
        live(node).await
    }))
}

#[test]
fn what_was_answered_survives_a_crash_at_any_moment() {
    for seed in 0..12 {
        let disk = Slow::default();
        life(seed, &disk, async |node: Node| {
            for command in [image(), create(1)] {
                node.propose(command).await.unwrap().ok().unwrap();
            }
        });
        let (mut answered, mut syncs) = (BTreeSet::new(), 0);
        for crash in 1..4 {
            life(seed * 10 + crash, &disk, async |node: Node| {
                // What was committed in an earlier life is applied before the first proposal of this one.
                let first = run(node.propose(begin(1)).await.unwrap());
                assert!(answered.last().is_none_or(|a| *a < first), "seed {seed}: an answered run is gone");
                assert!(answered.insert(first), "seed {seed}: run {first} was given twice");
                let mut under_way: FuturesUnordered<_> = (0..20).map(|_| node.propose(begin(1))).collect();
                // Some are answered; the others are somewhere between here and the platter when the life ends.
                for _ in 0..(seed + crash) % 20 {
                    let run = run(under_way.next().await.unwrap().unwrap());
                    assert!(answered.insert(run), "seed {seed}: run {run} was given twice");
                    syncs += 1;
                }
            });
        }
        assert!(syncs > 0 || seed == 0);
    }
}
