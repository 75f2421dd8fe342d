//! What happens when the disk is full, or fails.

use super::harness::*;
use crate::host::{Consensus, Disk, Health, LogBatch, OpenError, ProposeError, RedbDisk, StoredSnapshot};
use crate::*;
use futures::FutureExt;
use futures::future::BoxFuture;
use std::io;
use std::sync::{Arc, Mutex};

/// redb, with an error in the way of every write while one is set.
#[derive(Clone)]
struct Faulty {
    disk: Arc<RedbDisk>,
    fault: Arc<Mutex<Option<io::ErrorKind>>>,
}

impl Disk for Faulty {
    fn write(&self, batch: LogBatch) -> BoxFuture<'static, io::Result<()>> {
        match *self.fault.lock().unwrap() {
            Some(kind) => async move { Err(io::Error::from(kind)) }.boxed(),
            None => self.disk.write(batch),
        }
    }
    fn entries(&self, start: u64, end: u64, bytes_max: usize) -> io::Result<Vec<(u64, Vec<u8>)>> {
        self.disk.entries(start, end, bytes_max)
    }
    fn last(&self) -> io::Result<Option<(u64, Vec<u8>)>> {
        self.disk.last()
    }
    fn note(&self, key: &'static str) -> io::Result<Option<Vec<u8>>> {
        self.disk.note(key)
    }
    fn write_snapshot(&self, snapshot: StoredSnapshot) -> BoxFuture<'static, io::Result<()>> {
        self.disk.write_snapshot(snapshot)
    }
    fn snapshot(&self) -> io::Result<Option<StoredSnapshot>> {
        self.disk.snapshot()
    }
    fn close(&self) {
        self.disk.close();
    }
}

async fn lone(g: &mut Group) -> (Consensus, Faulty) {
    let config = g.config(1);
    let disk = Faulty { disk: Arc::new(RedbDisk::open(&config.dir).unwrap()), fault: Arc::default() };
    let node = Consensus::open_on(config, Arc::new(disk.clone()), g.wire(1)).await.unwrap();
    node.found().await.unwrap();
    with_session(&node).await;
    (node, disk)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_is_said_at_once_and_waited_out() {
    let mut g = Group::new(timing());
    let (node, disk) = lone(&mut g).await;
    *disk.fault.lock().unwrap() = Some(io::ErrorKind::StorageFull);
    assert_eq!(node.propose(begin(1)).await, Err(ProposeError::DiskFull));
    assert_eq!(*node.health().borrow(), Health::Full);
    assert_eq!(node.propose(begin(1)).await, Err(ProposeError::DiskFull), "this one is not even written");
    assert_eq!(node.state().sessions[&sid(1)].token.run, 0);
    *disk.fault.lock().unwrap() = None;
    // The first one stands in the log, and is decided once there is space.
    until("the first run", &node, |s| s.sessions[&sid(1)].token.run == 1).await;
    assert_eq!(run(node.propose(begin(1)).await.unwrap()), 2);
    assert_eq!(*node.health().borrow(), Health::Good);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_write_ends_consensus_with_its_reason() {
    let mut g = Group::new(timing());
    let (node, disk) = lone(&mut g).await;
    *disk.fault.lock().unwrap() = Some(io::ErrorKind::PermissionDenied);
    let e = node.propose(begin(1)).await.unwrap_err();
    assert!(matches!(&e, ProposeError::Broken(why) if why.contains("permission denied")), "{e:?}");
    assert!(matches!(&*node.health().borrow(), Health::Broken(_)));
    node.shutdown().await;
    // Nothing that was answered is lost.
    let again = g.start(1).await;
    again.found().await.unwrap();
    again.catch_up().await.unwrap();
    assert_eq!(again.state().sessions[&sid(1)].token.run, 0);
    assert_eq!(run(again.propose(begin(1)).await.unwrap()), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_in_use_or_of_another_node_or_damaged_is_refused() {
    let mut g = Group::new(timing());
    let node = g.start(1).await;
    node.found().await.unwrap();
    let config = g.config(1);
    let busy = Consensus::open(config, g.wire(1)).await;
    assert!(matches!(busy.err(), Some(OpenError::Disk(_))), "another process has it");
    g.stop(node).await;
    let mut config = g.config(1);
    config.number = 7;
    let other = Consensus::open(config, g.wire(7)).await;
    assert!(matches!(other.err(), Some(OpenError::OtherNode { stored: 1, asked: 7 })));
    std::fs::write(g.dir(1).join("state.redb"), b"this is no database").unwrap();
    let config = g.config(1);
    let damaged = Consensus::open(config, g.wire(1)).await;
    assert!(matches!(damaged.err(), Some(OpenError::Disk(_))));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn proposals_end_when_consensus_is_shut_down_and_too_large_ones_are_refused() {
    let mut g = Group::new(timing());
    let node = g.start(1).await;
    node.found().await.unwrap();
    let command = vec!["x".repeat(17 << 20)];
    let e = node.propose(Command::SetCommand { id: sid(1), command }).await.unwrap_err();
    assert!(matches!(e, ProposeError::TooLarge { .. }), "{e:?}");
    node.shutdown().await;
    assert_eq!(node.propose(begin(1)).await, Err(ProposeError::Shutdown));
    assert!(node.quorum_round().await.is_err());
}
