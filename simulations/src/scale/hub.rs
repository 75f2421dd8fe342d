//! The wire and the disks of the scale measurement: everything in memory, every byte counted.

use super::node::Letter;
use crate::disk::Platter;
use futures::FutureExt;
use futures::future::BoxFuture;
use ks_raft::host::{Consensus, Disk, LogBatch, StoredSnapshot, Wire, WireError};
use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::timeout;

/// Messages of gossip that wait for one node.
const QUEUE_MAX: usize = 256;

/// A sender's number and its message of gossip.
type Gossiped = (u64, Vec<u8>);

/// All nodes.
#[derive(Default)]
pub struct Hub {
    nodes: RwLock<BTreeMap<u64, Consensus>>,
    ears: RwLock<BTreeMap<u64, mpsc::Sender<Gossiped>>>,
    /// The leader's mailbox.
    pub leader: Mutex<Option<mpsc::Sender<Letter>>>,
    /// Bytes of requests and answers.
    pub raft_bytes: AtomicU64,
    /// Bytes of gossip sent.
    pub gossip_bytes: AtomicU64,
}

impl Hub {
    /// Connects a node.
    pub fn plug(&self, number: u64, node: Consensus) {
        self.nodes.write().unwrap_or_else(PoisonError::into_inner).insert(number, node);
    }
    /// Cuts a node off.
    pub fn unplug(&self, number: u64) {
        self.nodes.write().unwrap_or_else(PoisonError::into_inner).remove(&number);
        self.ears.write().unwrap_or_else(PoisonError::into_inner).remove(&number);
    }
    fn node(&self, number: u64) -> Option<Consensus> {
        self.nodes.read().unwrap_or_else(PoisonError::into_inner).get(&number).cloned()
    }
    /// An ear for gossip.
    pub fn listen(&self, number: u64) -> mpsc::Receiver<Gossiped> {
        let (tell, heard) = mpsc::channel(QUEUE_MAX);
        self.ears.write().unwrap_or_else(PoisonError::into_inner).insert(number, tell);
        heard
    }
    /// Sends gossip; lost if nobody listens or too much waits.
    pub fn gossip(&self, from: u64, to: u64, bytes: Vec<u8>) {
        self.gossip_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        let ear = self.ears.read().unwrap_or_else(PoisonError::into_inner).get(&to).cloned();
        if let Some(ear) = ear {
            drop(ear.try_send((from, bytes)));
        }
    }
    /// Counts from zero.
    pub fn reset(&self) {
        self.raft_bytes.store(0, Ordering::Relaxed);
        self.gossip_bytes.store(0, Ordering::Relaxed);
    }
}

/// One node's end of the wire.
pub struct Plug {
    /// Who sends.
    pub from: u64,
    /// All nodes.
    pub hub: Arc<Hub>,
}

impl Wire for Plug {
    fn call(&self, to: u64, request: Vec<u8>, deadline: Duration) -> BoxFuture<'static, Result<Vec<u8>, WireError>> {
        let (from, hub) = (self.from, self.hub.clone());
        let ms = u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX);
        async move {
            hub.raft_bytes.fetch_add(request.len() as u64, Ordering::Relaxed);
            let gone = || WireError::Unreachable { to, why: "it is down".into() };
            let peer = hub.node(to).ok_or_else(gone)?;
            let served = tokio::spawn(async move { peer.serve(from, &request).await });
            match timeout(deadline, served).await {
                Ok(Ok(answer)) => {
                    hub.raft_bytes.fetch_add(answer.len() as u64, Ordering::Relaxed);
                    Ok(answer)
                }
                Ok(Err(_)) => Err(gone()),
                Err(_) => Err(WireError::Timeout { to, ms }),
            }
        }
        .boxed()
    }
}

/// A learner's disk in memory; the voters have redb.
#[derive(Default)]
pub struct MemDisk(Mutex<Platter>);

impl MemDisk {
    fn platter(&self) -> MutexGuard<'_, Platter> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Disk for MemDisk {
    fn write(&self, batch: LogBatch) -> BoxFuture<'static, io::Result<()>> {
        self.platter().write(batch);
        futures::future::ready(Ok(())).boxed()
    }
    fn entries(&self, start: u64, end: u64, bytes_max: usize) -> io::Result<Vec<(u64, Vec<u8>)>> {
        Ok(self.platter().entries(start, end, bytes_max))
    }
    fn last(&self) -> io::Result<Option<(u64, Vec<u8>)>> {
        Ok(self.platter().last())
    }
    fn note(&self, key: &'static str) -> io::Result<Option<Vec<u8>>> {
        Ok(self.platter().notes.get(key).cloned())
    }
    fn write_snapshot(&self, snapshot: StoredSnapshot) -> BoxFuture<'static, io::Result<()>> {
        self.platter().snapshot = Some(snapshot);
        futures::future::ready(Ok(())).boxed()
    }
    fn snapshot(&self) -> io::Result<Option<StoredSnapshot>> {
        Ok(self.platter().snapshot.clone())
    }
}
