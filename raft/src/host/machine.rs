//! The state machine that openraft drives: applies entries in memory, publishes the state once a batch, keeps snapshots.
//!
//! The log is durable, so the state need not be: after a restart it is the last snapshot plus the committed entries
//! behind it. A clone of the state is cheap (see [`crate::SessionMap`]), so a snapshot is encoded away from the
//! tasks that apply and answer, and readers hold a state for as long as they like.

use super::disk::{Disk, StoredSnapshot};
use super::log::{decode, encode};
use super::types::{LogId, Snapshot, SnapshotBytes, SnapshotMeta, StoredMembership, Types};
use crate::{Applied, FleetState, Response};
use futures::{Stream, TryStreamExt};
use openraft::entry::RaftEntry;
use openraft::storage::{EntryResponder, RaftStateMachine};
use openraft::{AsyncRuntime, EntryPayload, OptionalSend, RaftSnapshotBuilder};
use serde::{Deserialize, Serialize};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::{oneshot, watch};

/// What is stored beside a snapshot's bytes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct StoredMeta {
    /// What it covers.
    pub meta: SnapshotMeta,
    /// Length of the body.
    pub bytes: u64,
    /// BLAKE3 of the body, hex.
    pub blake3: String,
}

/// Hash of a snapshot's body, as it is stored and sent.
pub(super) fn hash(body: &[u8]) -> String {
    blake3::hash(body).to_hex().to_string()
}

#[derive(Default)]
struct Inner {
    state: FleetState,
    applied: Option<LogId>,
    membership: StoredMembership,
}

/// The state machine. Clones are the same one.
#[derive(Clone)]
pub struct Machine {
    disk: Arc<dyn Disk>,
    inner: Arc<Mutex<Inner>>,
    published: watch::Sender<Arc<FleetState>>,
    /// Index of the last applied entry, raised after the state was published.
    applied: watch::Sender<u64>,
}

fn damaged(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

/// Reads and checks the stored snapshot.
pub(super) fn stored(disk: &dyn Disk) -> io::Result<Option<(SnapshotMeta, SnapshotBytes)>> {
    let Some(StoredSnapshot { meta, body }) = disk.snapshot()? else {
        return Ok(None);
    };
    let meta: StoredMeta = decode("the snapshot's record", &meta)?;
    if meta.bytes != body.len() as u64 || meta.blake3 != hash(&body) {
        return Err(damaged("the snapshot of the fleet's state is damaged: its hash differs"));
    }
    Ok(Some((meta.meta, body)))
}

pub(super) fn to_store(meta: &SnapshotMeta, body: SnapshotBytes) -> io::Result<StoredSnapshot> {
    let (bytes, blake3) = (body.len() as u64, hash(&body));
    Ok(StoredSnapshot { meta: encode(&StoredMeta { meta: meta.clone(), bytes, blake3 })?, body })
}

impl Machine {
    /// Loads the last snapshot; the entries behind it are applied by openraft.
    pub fn open(disk: Arc<dyn Disk>) -> io::Result<Self> {
        let mut inner = Inner::default();
        if let Some((meta, body)) = stored(&*disk)? {
            inner.state = decode("the snapshot of the fleet's state", &body)?;
            (inner.applied, inner.membership) = (meta.last_log_id, meta.last_membership);
        }
        let (published, _) = watch::channel(Arc::new(inner.state.clone()));
        let (applied, _) = watch::channel(inner.applied.map_or(0, |l| l.index()));
        Ok(Self { disk, inner: Arc::new(Mutex::new(inner)), published, applied })
    }

    /// The state after the last batch.
    pub fn state(&self) -> Arc<FleetState> {
        self.published.borrow().clone()
    }

    /// Tells of every batch.
    pub fn changes(&self) -> watch::Receiver<Arc<FleetState>> {
        self.published.subscribe()
    }

    /// Index of the last applied entry.
    pub fn applied(&self) -> watch::Receiver<u64> {
        self.applied.subscribe()
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn publish(&self) {
        let (state, index) = {
            let inner = self.inner();
            (Arc::new(inner.state.clone()), inner.applied.map_or(0, |l| l.index()))
        };
        self.published.send_replace(state);
        self.applied.send_replace(index);
    }

    /// Runs `work` away from the tasks that answer peers.
    async fn offload<T: Send + 'static>(&self, work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
        let (done, told) = oneshot::channel();
        self.disk.offload(Box::new(move || drop(done.send(work())))).await;
        told.await.unwrap_or_else(|_| Err(io::Error::other("the work was given up")))
    }
}

impl<R: AsyncRuntime> RaftSnapshotBuilder<Types<R>> for Machine {
    type SnapshotData = SnapshotBytes;

    async fn build_snapshot(&mut self) -> Result<Snapshot, io::Error> {
        let (state, meta) = {
            let inner = self.inner();
            let meta = SnapshotMeta { last_log_id: inner.applied, last_membership: inner.membership.clone() };
            (inner.state.clone(), meta)
        };
        let body = self.offload(move || encode(&state).map(Arc::new)).await?;
        self.disk.write_snapshot(to_store(&meta, body.clone())?).await?;
        Ok(Snapshot { meta, snapshot: body })
    }
}

impl<R: AsyncRuntime> RaftStateMachine<Types<R>> for Machine {
    type SnapshotData = SnapshotBytes;
    type SnapshotBuilder = Self;

    async fn applied_state(&mut self) -> Result<(Option<LogId>, StoredMembership), io::Error> {
        let inner = self.inner();
        Ok((inner.applied, inner.membership.clone()))
    }

    async fn apply<S>(&mut self, mut entries: S) -> Result<(), io::Error>
    where
        S: Stream<Item = Result<EntryResponder<Types<R>>, io::Error>> + Unpin + OptionalSend,
    {
        let mut answers = Vec::new();
        while let Some((entry, responder)) = entries.try_next().await? {
            let id = entry.log_id();
            let mut inner = self.inner();
            inner.applied = Some(id);
            let response = match entry.payload {
                EntryPayload::Blank => Response::Done,
                EntryPayload::Normal(proposal) => inner.state.apply_proposal(Applied { index: id.index() }, proposal),
                EntryPayload::Membership(membership) => {
                    inner.membership = StoredMembership::new(Some(id), membership);
                    Response::Done
                }
            };
            answers.extend(responder.map(|r| (r, response)));
        }
        // Published before anybody is answered, so that a proposer finds its own change in the state.
        self.publish();
        answers.into_iter().for_each(|(responder, response)| responder.send(response));
        Ok(())
    }

    async fn get_snapshot_builder(&mut self) -> Self {
        self.clone()
    }

    async fn install_snapshot(&mut self, meta: &SnapshotMeta, body: SnapshotBytes) -> Result<(), io::Error> {
        let bytes = body.clone();
        let state: FleetState = self.offload(move || decode("the leader's snapshot", &bytes)).await?;
        self.disk.write_snapshot(to_store(meta, body)?).await?;
        {
            let mut inner = self.inner();
            (inner.state, inner.applied, inner.membership) = (state, meta.last_log_id, meta.last_membership.clone());
        }
        self.publish();
        Ok(())
    }

    async fn get_current_snapshot(&mut self) -> Result<Option<Snapshot>, io::Error> {
        Ok(stored(&*self.disk)?.map(|(meta, snapshot)| Snapshot { meta, snapshot }))
    }
}
