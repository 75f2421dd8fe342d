//! The disk under one node's consensus, modelled: a batch is durable when its sync is done; a crash before that leaves
//! the batch whole or not at all, at the dice's choice.

use crate::world::World;
use futures::FutureExt;
use futures::future::BoxFuture;
use ks_raft::host::{Disk, LogBatch, StoredSnapshot};
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// What is on a disk.
#[derive(Clone, Default)]
pub struct Platter {
    log: BTreeMap<u64, Vec<u8>>,
    /// By name.
    pub notes: BTreeMap<&'static str, Vec<u8>>,
    /// The last that was written.
    pub snapshot: Option<StoredSnapshot>,
}

#[derive(Clone)]
enum Write {
    Batch(LogBatch),
    Snapshot(StoredSnapshot),
}

#[derive(Default)]
struct State {
    platter: Platter,
    // Under way, by the number of the write.
    queued: BTreeMap<u64, Write>,
    writes: u64,
    closed: bool,
}

/// The disk of one life of a node's daemon.
#[derive(Clone)]
pub struct SimDisk {
    node: u64,
    world: Arc<World>,
    state: Arc<Mutex<State>>,
}

fn closed() -> io::Error {
    io::Error::new(io::ErrorKind::BrokenPipe, "the node has crashed")
}

impl Platter {
    /// Carries a write out.
    pub fn write(&mut self, batch: LogBatch) {
        if let Some(from) = batch.cut_from {
            drop(self.log.split_off(&from));
        }
        if let Some(to) = batch.purge_to {
            self.log = self.log.split_off(&(to + 1));
        }
        self.log.extend(batch.put);
        self.notes.extend(batch.notes);
    }
    fn apply(&mut self, write: Write) {
        match write {
            Write::Snapshot(s) => self.snapshot = Some(s),
            Write::Batch(b) => self.write(b),
        }
    }
    /// Entries of a range, at least one and else no more than so many bytes.
    pub fn entries(&self, start: u64, end: u64, bytes_max: usize) -> Vec<(u64, Vec<u8>)> {
        let (mut bytes, mut out) = (0, Vec::new());
        for (i, b) in self.log.range(start..end.max(start)) {
            bytes += b.len();
            if bytes > bytes_max && !out.is_empty() {
                break;
            }
            out.push((*i, b.clone()));
        }
        out
    }
    /// The last entry.
    pub fn last(&self) -> Option<(u64, Vec<u8>)> {
        self.log.last_key_value().map(|(i, b)| (*i, b.clone()))
    }
}

impl SimDisk {
    /// An empty disk.
    pub fn new(node: u64, world: &Arc<World>) -> Self {
        Self { node, world: world.clone(), state: Arc::default() }
    }
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// Ends this life; the next one finds what is durable. Writes under way are there up to one of them, in order.
    pub fn crash(&self) -> Self {
        let mut s = self.state();
        s.closed = true;
        let mut platter = s.platter.clone();
        let survive = self.world.roll(s.queued.len() as u64 + 1) as usize;
        for write in std::mem::take(&mut s.queued).into_values().take(survive) {
            platter.apply(write);
        }
        let state = State { platter, ..State::default() };
        Self { node: self.node, world: self.world.clone(), state: Arc::new(Mutex::new(state)) }
    }
    fn write_one(&self, write: Write) -> BoxFuture<'static, io::Result<()>> {
        let me = self.clone();
        let number = {
            let mut s = self.state();
            if s.closed {
                return futures::future::ready(Err(closed())).boxed();
            }
            s.writes += 1;
            let number = s.writes;
            s.queued.insert(number, write);
            number
        };
        async move {
            if me.world.disk_full(me.node) {
                me.state().queued.remove(&number);
                return Err(io::ErrorKind::StorageFull.into());
            }
            tokio::time::sleep(Duration::from_micros(me.world.sync_us(me.node))).await;
            me.world.thaw(me.node).await;
            let mut s = me.state();
            if s.closed {
                return Err(closed());
            }
            // Writes take effect in order: those before this one are synced with it.
            let later = s.queued.split_off(&(number + 1));
            for write in std::mem::replace(&mut s.queued, later).into_values() {
                s.platter.apply(write);
            }
            Ok(())
        }
        .boxed()
    }
    fn read<T>(&self, f: impl FnOnce(&Platter) -> T) -> io::Result<T> {
        let s = self.state();
        if s.closed { Err(closed()) } else { Ok(f(&s.platter)) }
    }
}

impl Disk for SimDisk {
    fn write(&self, batch: LogBatch) -> BoxFuture<'static, io::Result<()>> {
        self.write_one(Write::Batch(batch))
    }
    fn entries(&self, start: u64, end: u64, bytes_max: usize) -> io::Result<Vec<(u64, Vec<u8>)>> {
        self.read(|p| p.entries(start, end, bytes_max))
    }
    fn last(&self) -> io::Result<Option<(u64, Vec<u8>)>> {
        self.read(Platter::last)
    }
    fn note(&self, key: &'static str) -> io::Result<Option<Vec<u8>>> {
        self.read(|p| p.notes.get(key).cloned())
    }
    fn write_snapshot(&self, snapshot: StoredSnapshot) -> BoxFuture<'static, io::Result<()>> {
        self.write_one(Write::Snapshot(snapshot))
    }
    fn snapshot(&self) -> io::Result<Option<StoredSnapshot>> {
        self.read(|p| p.snapshot.clone())
    }
    fn close(&self) {
        self.state().closed = true;
    }
}
