//! Serves what a VMM asks while it stores a checkpoint or pages, and takes its checkpoints.

use super::state::StateStore;
use super::vm::Supply;
use crate::session::{Checkpointed, Job};
use ks_blobs::{KeyRing, Store, StoreError, Upload, UploadScope};
use ks_proto::api::Checkpoint;
use ks_proto::chunk::CHUNK_BYTES;
use ks_proto::control::{CheckpointStats, Fault, HostReply, HostRequest, KNOWN_BATCH_MAX};
use ks_proto::manifest::{MANIFEST_BYTES_MAX, Manifest, decode_segment};
use ks_proto::{CheckpointId, ChunkId, RunToken, SessionId};
use ks_raft::{Command, Response};
use std::collections::BTreeMap;

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

/// Segments whose count of used chunks is remembered.
const USED_CACHE_MAX: usize = 100_000;

/// Where a VM's checkpoints go.
#[derive(Clone)]
pub enum Sink {
    /// Into the session's records, under its run token.
    Session { state: StateStore, id: SessionId, token: RunToken },
    /// To whoever waits for it (a golden checkpoint).
    Golden,
    /// Nowhere: this VM may not store.
    Refuse,
}

/// One VM's way into the store.
pub struct Uploader {
    store: Arc<Store>,
    keys: KeyRing,
    upload: Upload,
    sink: Sink,
    /// The checkpoint that was ordered and is not committed yet.
    job: Mutex<Option<Job>>,
    /// The last one that was committed.
    committed: Mutex<Option<Checkpointed>>,
    /// Held while one is being committed; true once the VM is dead and no more may be.
    closed: Mutex<bool>,
    /// The last one of all, whatever was ordered since.
    latest: Mutex<Option<Checkpointed>>,
    used: Mutex<BTreeMap<ChunkId, u64>>,
}

type Served = (Result<HostReply, Fault>, Vec<OwnedFd>);

impl Uploader {
    /// For a VM that writes objects of `write_domain` and builds upon `bases`.
    pub fn new(supply: &Supply, write_domain: u32, bases: Vec<CheckpointId>, sink: Sink) -> Self {
        let scope = UploadScope { keys: supply.keys.clone(), write_domain, bases };
        let upload = supply.store.begin_upload(scope);
        let (store, keys) = (supply.store.clone(), supply.keys.clone());
        Self {
            store,
            keys,
            upload,
            sink,
            job: Mutex::default(),
            committed: Mutex::default(),
            closed: Mutex::default(),
            latest: Mutex::default(),
            used: Mutex::default(),
        }
    }

    /// Says which checkpoint the next commit is.
    pub fn expect(&self, job: Job) {
        *self.job.lock().unwrap_or_else(PoisonError::into_inner) = Some(job);
        *self.committed.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// The ordered checkpoint failed: drops what it uploaded.
    pub fn give_up(&self) {
        self.job.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.upload.abort();
    }

    /// The checkpoint that was committed since [`Self::expect`].
    pub fn committed(&self) -> Option<Checkpointed> {
        *self.committed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The VM is dead: nothing is committed from now on, and the last one that was is told. Blocks while one is being committed.
    pub fn close(&self) -> Option<Checkpointed> {
        *self.closed.lock().unwrap_or_else(PoisonError::into_inner) = true;
        *self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves one request; descriptors go back with the answer.
    pub async fn serve(self: Arc<Self>, request: HostRequest, fds: Vec<OwnedFd>) -> Served {
        let work = tokio::task::spawn_blocking(move || self.serve_now(request, fds));
        work.await.unwrap_or_else(|e| (Err(Fault::new("internal", "the node's store", e.to_string(), "report this")), vec![]))
    }

    fn serve_now(&self, request: HostRequest, fds: Vec<OwnedFd>) -> Served {
        let done = || (Ok(HostReply::Done {}), vec![]);
        match request {
            HostRequest::NewPack {} => match self.upload.new_pack() {
                Ok(f) => (Ok(HostReply::Pack {}), vec![f.into()]),
                Err(e) => (Err(store_fault(&e)), vec![]),
            },
            HostRequest::PackDone { id, bytes } => match self.upload.pack_done(id, bytes) {
                Ok(()) => done(),
                Err(e) => (Err(store_fault(&e)), vec![]),
            },
            HostRequest::Known { ids } if ids.len() > KNOWN_BATCH_MAX => {
                let why = format!("{} ids, at most {KNOWN_BATCH_MAX} in one", ids.len());
                (Err(Fault::new("bad-request", "known objects", why, "report this")), vec![])
            }
            HostRequest::Known { ids } => (Ok(HostReply::Known { known: self.upload.known(&ids) }), vec![]),
            HostRequest::Commit { stats } => (self.commit(stats, fds).map(|()| HostReply::Done {}), vec![]),
            HostRequest::Abort { why } => {
                tracing::info!("a checkpoint is given up by its VM: {why}");
                self.give_up();
                done()
            }
            HostRequest::Fetch { id, broken } => self.fetch(&id, broken.as_deref()),
        }
    }

    fn fetch(&self, id: &ChunkId, broken: Option<&str>) -> Served {
        tracing::warn!("the VM misses object {} ({})", id.short(), broken.unwrap_or("not in its plan"));
        match self.store.locate(id, &self.keys, None) {
            Ok(l) => {
                let e = l.entry;
                let reply = HostReply::Object {
                    offset: e.offset,
                    stored_len: e.stored_len,
                    plain_len: e.plain_len,
                    kind: e.kind as u8,
                    codec: e.codec as u8,
                    domain: l.domain,
                };
                (Ok(reply), vec![l.file.into()])
            }
            Err(e) => (Err(store_fault(&e)), vec![]),
        }
    }

    fn commit(&self, stats: CheckpointStats, fds: Vec<OwnedFd>) -> Result<(), Fault> {
        let bad = |why: String| Fault::new("bad-request", "the checkpoint to commit", why, "report this");
        let closed = self.closed.lock().unwrap_or_else(PoisonError::into_inner);
        if *closed {
            return Err(bad("its VM was found dead".into()));
        }
        let Some(job) = self.job.lock().unwrap_or_else(PoisonError::into_inner).clone() else {
            return Err(bad("nobody ordered it from this connection".into()));
        };
        let fd = fds.into_iter().next().ok_or_else(|| bad("no manifest came along".into()))?;
        let bytes = super::files::read_fd(fd, MANIFEST_BYTES_MAX).map_err(|e| bad(e.to_string()))?;
        let manifest =
            Manifest::decode(&bytes).map_err(|e| Fault::new("corrupt", "the manifest", e.to_string(), "report this"))?;
        if manifest.machine.is_none() {
            return Err(bad("its manifest has no machine".into()));
        }
        if let Sink::Session { id, .. } = &self.sink
            && manifest.session != *id
        {
            return Err(bad(format!("its manifest is of session {}", manifest.session.short())));
        }
        if matches!(self.sink, Sink::Refuse) {
            return Err(bad("this VM may not store checkpoints".into()));
        }
        let id = self.upload.commit(&bytes).map_err(|e| store_fault(&e))?;
        let number = self.record(&job, id, &manifest, &stats)?;
        self.job.lock().unwrap_or_else(PoisonError::into_inner).take();
        *self.committed.lock().unwrap_or_else(PoisonError::into_inner) = Some(Checkpointed { number, id });
        *self.latest.lock().unwrap_or_else(PoisonError::into_inner) = Some(Checkpointed { number, id });
        drop(closed);
        Ok(())
    }

    /// Only with this record is the checkpoint listed; a run that is over is refused here (FENCED).
    fn record(&self, job: &Job, id: CheckpointId, manifest: &Manifest, stats: &CheckpointStats) -> Result<u64, Fault> {
        let Sink::Session { state, id: session, token } = &self.sink else { return Ok(0) };
        let info = Checkpoint {
            number: 0,
            id,
            parent: manifest.parent,
            created_unix_ms: manifest.created_unix_ms,
            message: job.message.clone(),
            reason: job.reason.clone(),
            pinned: job.pin,
            durability: "durable".into(),
            logical_bytes: stats.memory_used_bytes + self.disk_used(manifest),
            stored_bytes: stats.stored_bytes,
            pause_us: stats.pause_us,
            total_us: stats.total_us,
            holders: vec![],
            branch: false,
        };
        match state.apply(Command::CommitCheckpoint { id: *session, token: *token, info, holders: Vec::new() }) {
            Ok(Response::Checkpoint { number }) => Ok(number),
            Ok(other) => Err(Fault::new("internal", "recording the checkpoint", format!("unexpected {other:?}"), "report this")),
            Err(e) => Err(Fault::new(&e.code, e.what, e.why, e.next)),
        }
    }

    /// Disk bytes in chunks that are not zero.
    fn disk_used(&self, m: &Manifest) -> u64 {
        let mut cache = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        if cache.len() > USED_CACHE_MAX {
            cache.clear();
        }
        let mut total = 0;
        for id in m.disk.segments.iter().filter(|s| !s.is_zero()) {
            if let Some(n) = cache.get(id) {
                total += n;
                continue;
            }
            let refs = self.store.read_object(id, &self.keys).ok().and_then(|plain| decode_segment(&plain).ok());
            let n = refs.map_or(0, |r| r.iter().filter(|c| !c.is_zero()).count() as u64 * CHUNK_BYTES as u64);
            cache.insert(*id, n);
            total += n;
        }
        total
    }
}

fn store_fault(e: &StoreError) -> Fault {
    Fault::new(e.code(), "the chunk store", e.to_string(), "the session runs on; see ksd's log")
}
