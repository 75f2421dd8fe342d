//! Fetching a checkpoint: manifest, missing objects, packs, commit. Whole, durable and pinned, or an error.
//!
//! ```text
//!   manifest ──> missing? ──none──> commit (closure, fsync, pin, manifest's name) ──> Fetched
//!                  │  ^
//!                  │  └── peek at segments; adopt each pack as it is whole ──┐
//!                  └──> locate at a holder ──> plan ──> fetch, some at a time
//! ```
//! A holder that fails is asked no more in this fetch; one that sends wrong bytes is marked. What arrived stays: the next
//! attempt, of this process or a later one, fetches the rest.

use super::endpoint::{Bulk, Holder, Inner};
use super::receive::{self, Watch};
use crate::error::{CallError, FetchError};
use crate::plan::{self, Job};
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use ks_blobs::{KeyRing, PinKey, Reception, StoreError};
use ks_proto::ids::{CheckpointId, ChunkId, PackId};
use ks_proto::manifest::Manifest;
use ks_proto::pack::PackEntry;
use libp2p_identity::PeerId;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;

/// Packs that one fetch receives at the same time.
pub const PACKS_AT_ONCE: usize = 3;
/// Packs of one fetch that have arrived and are opened and synced, while the next ones come.
pub const PACKS_FINISHING: usize = 3;
/// Rounds of one fetch: state and segments, then data, and as many again for what holders lose meanwhile.
const ROUNDS_MAX: u32 = 64;
/// Failures after which a holder is asked no more in one fetch.
const FAILURES_MAX: u32 = 2;
/// Rounds on end that may find everything here already.
const IDLE_MAX: u32 = 2;

/// How far a fetch is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Progress {
    /// Bytes received by this fetch.
    pub received: u64,
    /// Bytes to receive, as far as is known yet: it grows when segments have told what they refer to.
    pub wanted: u64,
}

/// What a fetch did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Fetched {
    /// Bytes of packs and objects that were received.
    pub bytes: u64,
    /// Packs that were received whole.
    pub packs: u64,
    /// Objects that were received alone, out of packs that are mostly of no use here.
    pub objects: u64,
    /// Bytes that were here from an earlier attempt at the packs that were received.
    pub resumed: u64,
    /// Packs that another fetch was receiving at that time, and that came once.
    pub merged: u64,
}

/// Told of progress; must not block.
pub type OnProgress = Arc<dyn Fn(Progress) + Send + Sync>;

/// Fetches checkpoints from other nodes. Cheap to clone; clones share what is under way.
#[derive(Clone)]
pub struct Fetcher {
    bulk: Bulk,
    open_objects: bool,
    under_way: Arc<Mutex<BTreeMap<PackId, watch::Receiver<()>>>>,
}

impl std::fmt::Debug for Fetcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fetcher").field("bulk", &self.bulk).finish_non_exhaustive()
    }
}

/// Says that a pack is being received, until dropped.
struct UnderWay {
    id: PackId,
    all: Arc<Mutex<BTreeMap<PackId, watch::Receiver<()>>>>,
    _told: watch::Sender<()>,
}
impl Drop for UnderWay {
    fn drop(&mut self) {
        self.all.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
    }
}

/// How one job ended well.
#[derive(Debug, Clone, Copy)]
enum Done {
    Pack { resumed: u64 },
    Objects(u64),
    Elsewhere,
    Here,
}

/// One fetch.
struct Run<'a> {
    fetcher: &'a Fetcher,
    inner: &'a Arc<Inner>,
    reception: Arc<Reception>,
    failures: BTreeMap<PeerId, u32>,
    /// Packs that a holder named and then did not have, or not intact: not asked for there again.
    absent: BTreeSet<(PeerId, PackId)>,
    /// Rounds on end in which all that was to be fetched was here already.
    idle: u32,
    causes: Vec<String>,
    out: Fetched,
    received: Arc<AtomicU64>,
    wanted: Arc<AtomicU64>,
    on_progress: OnProgress,
    stop: CancellationToken,
    full: Arc<AtomicBool>,
}

impl Fetcher {
    /// On this endpoint.
    pub fn new(bulk: Bulk) -> Self {
        Self { bulk, open_objects: true, under_way: Arc::default() }
    }

    /// Whether each object of a pack that arrives is opened under its name before the pack counts (it does by default). A
    /// pack's own hash is checked in any case.
    #[must_use]
    pub fn open_objects(mut self, yes: bool) -> Self {
        self.open_objects = yes;
        self
    }

    /// Brings checkpoint `id` here from `holders`. When this returns `Ok`, its manifest and whole closure are verified and
    /// fsynced here, and pinned for `pin` until [`ks_blobs::Store::decided`] is told: only then may this node say that it
    /// holds it. If it is here already this only checks and pins. `keys` must open it. Dropping the future gives up; what
    /// arrived stays.
    ///
    /// # Errors
    /// See [`FetchError`]; on all of them nothing is listed that was not before.
    pub async fn fetch_checkpoint(
        &self,
        id: &CheckpointId,
        holders: &[Holder],
        keys: &KeyRing,
        pin: &PinKey,
        on_progress: OnProgress,
    ) -> Result<Fetched, FetchError> {
        let inner = &self.bulk.inner;
        let store = inner.store.clone();
        let keys = keys.clone();
        let reception = blocking(id, move || Ok(store.receive(keys))).await?;
        let mut run = Run {
            fetcher: self,
            inner,
            reception: Arc::new(reception),
            failures: BTreeMap::new(),
            absent: BTreeSet::new(),
            idle: 0,
            causes: Vec::new(),
            out: Fetched::default(),
            received: Arc::default(),
            wanted: Arc::default(),
            on_progress,
            stop: CancellationToken::new(),
            full: Arc::default(),
        };
        // Ends transfers and their threads whenever and however this future ends.
        let _ended = run.stop.clone().drop_guard();
        let holders = inner.in_order(holders);
        let done = run.all(id, &holders, pin).await;
        if matches!(done, Err(FetchError::DiskFull { .. })) {
            let reception = run.reception.clone();
            let _ = tokio::task::spawn_blocking(move || reception.abort()).await;
        }
        done.map(|()| run.out)
    }
}

/// Runs store work on a blocking thread.
async fn blocking<T: Send + 'static>(
    id: &CheckpointId,
    work: impl FnOnce() -> Result<T, StoreError> + Send + 'static,
) -> Result<T, FetchError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done.map_err(|source| ours(id, source)),
        Err(_) => Err(FetchError::Closed { id: *id }),
    }
}

fn ours(id: &CheckpointId, source: StoreError) -> FetchError {
    match source {
        StoreError::DiskFull { .. } => FetchError::DiskFull { id: *id, source: Box::new(source) },
        source => FetchError::Store { id: *id, source: Box::new(source) },
    }
}

impl Run<'_> {
    async fn all(&mut self, id: &CheckpointId, holders: &[Holder], pin: &PinKey) -> Result<(), FetchError> {
        let (bytes, manifest) = self.manifest(id, holders).await?;
        let manifest = Arc::new(manifest);
        for _ in 0..ROUNDS_MAX {
            let (reception, m) = (self.reception.clone(), manifest.clone());
            let missing = blocking(id, move || reception.missing(&m)).await?;
            if missing.objects.is_empty() {
                let (reception, pin) = (self.reception.clone(), *pin);
                return blocking(id, move || reception.commit(&bytes, &pin)).await.map(drop);
            }
            let peek = !missing.unread.is_empty();
            let wanted = if peek { &missing.unread } else { &missing.objects };
            if !self.round(id, wanted, holders, peek).await? {
                return Err(self.incomplete(id, holders, missing.objects.len()));
            }
        }
        Err(self.incomplete(id, holders, 0))
    }

    fn incomplete(&self, id: &CheckpointId, holders: &[Holder], missing: usize) -> FetchError {
        if holders.is_empty() {
            return FetchError::NoHolders { id: *id };
        }
        let causes = if self.causes.is_empty() { "no holder has them".to_owned() } else { self.causes.join("; ") };
        FetchError::Incomplete { id: *id, missing, causes }
    }

    /// Notes what a holder did wrong, while it was asked for a pack or in general.
    fn note(&mut self, e: &CallError, pack: Option<PackId>) {
        if let CallError::Wrong { peer, wrong } = e {
            self.inner.mark(*peer, wrong);
        }
        let peer = match e {
            CallError::Absent { peer, .. } => {
                self.absent.extend(pack.map(|p| (*peer, p)));
                None
            }
            CallError::Unreachable { peer, .. }
            | CallError::Lost { peer, .. }
            | CallError::Refused { peer, .. }
            | CallError::Wrong { peer, .. } => Some(*peer),
            CallError::Store(_) | CallError::File { .. } => None,
        };
        if let Some(peer) = peer {
            let n = self.failures.entry(peer).or_default();
            // Bytes that do not verify, and addresses that do not answer, do not get better.
            let worst = matches!(e, CallError::Wrong { .. } | CallError::Unreachable { .. });
            *n += if worst { FAILURES_MAX } else { 1 };
        }
        let text = e.to_string();
        if self.causes.len() < 8 && !self.causes.contains(&text) {
            self.causes.push(text);
        }
    }

    fn may_ask(&self, holder: &Holder) -> bool {
        self.failures.get(&holder.peer).copied().unwrap_or(0) < FAILURES_MAX
    }

    async fn manifest(&mut self, id: &CheckpointId, holders: &[Holder]) -> Result<(Vec<u8>, Manifest), FetchError> {
        let (store, wanted) = (self.inner.store.clone(), *id);
        let here = blocking(id, move || match store.manifest_here(&wanted) {
            Ok(found) => Ok(Some(found)),
            Err(StoreError::NoManifest { .. } | StoreError::Decode { .. }) => Ok(None),
            Err(e) => Err(e),
        });
        if let Some(found) = here.await? {
            return Ok(found);
        }
        for h in holders {
            match self.inner.fetch_manifest(h, id).await {
                Ok(bytes) => match Manifest::decode_verified(id, &bytes) {
                    Ok(m) => return Ok((bytes, m)),
                    Err(e) => self.causes.push(e.to_string()),
                },
                Err(e) => self.note(&e, None),
            }
        }
        Err(self.incomplete(id, holders, 1))
    }

    /// Locates what is missing and fetches it, or only has a look at it. False if nothing came, and nobody else is left to
    /// ask.
    async fn round(
        &mut self,
        id: &CheckpointId,
        missing: &[ChunkId],
        holders: &[Holder],
        peek: bool,
    ) -> Result<bool, FetchError> {
        let mut left: Vec<ChunkId> = missing.to_vec();
        let mut jobs: Vec<(Holder, Job)> = Vec::new();
        let mut packs = BTreeSet::new();
        for h in holders {
            if left.is_empty() {
                break;
            }
            if !self.may_ask(h) {
                continue;
            }
            match self.inner.locate(h, &left).await {
                Ok(mut found) => {
                    found.iter_mut().for_each(|places| places.retain(|p| !self.absent.contains(&(h.peer, p.pack))));
                    let (some, absent) = plan::plan(&left, &found, peek);
                    jobs.extend(
                        some.into_iter()
                            .filter(|j| matches!(j, Job::Objects { .. }) || packs.insert(j.pack()))
                            .map(|j| (h.clone(), j)),
                    );
                    left = absent;
                }
                Err(e) => self.note(&e, None),
            }
        }
        if !left.is_empty() && self.causes.is_empty() {
            self.causes.push(format!("object {} is at none of {} holders", left[0].short(), holders.len()));
        }
        // A round of failures alone ends too: each excludes a holder, or one pack at one holder.
        Ok(!jobs.is_empty() && self.jobs(id, jobs, peek).await?)
    }

    /// Runs jobs, some at a time. Errors of this node end all. False if another round would find the same again.
    async fn jobs(&mut self, id: &CheckpointId, jobs: Vec<(Holder, Job)>, peek: bool) -> Result<bool, FetchError> {
        self.wanted.fetch_add(jobs.iter().map(|(_, j)| j.bytes()).sum(), Ordering::Relaxed);
        let stop = self.stop.child_token();
        let mut waiting = jobs.into_iter();
        let mut running = FuturesUnordered::new();
        let lines = Arc::new(Semaphore::new(PACKS_AT_ONCE));
        let (mut came, mut failed, mut fatal) = (0, 0, None);
        loop {
            while running.len() < PACKS_AT_ONCE + PACKS_FINISHING && fatal.is_none() {
                let Some((holder, job)) = waiting.next() else { break };
                if !self.may_ask(&holder) {
                    failed += 1;
                    continue;
                }
                running.push(self.job(holder, job, peek, (stop.clone(), lines.clone())));
            }
            match running.next().await {
                None => break,
                Some((_, Ok(done))) => {
                    came += usize::from(!matches!(done, Done::Here));
                    self.count(done);
                }
                Some((_, Err(CallError::Store(e)))) => {
                    // The others end soon, so that nothing of theirs is written after this returned.
                    self.full.store(matches!(e, StoreError::DiskFull { .. }), Ordering::Relaxed);
                    stop.cancel();
                    fatal.get_or_insert(e);
                }
                Some((pack, Err(e))) if fatal.is_none() => {
                    failed += 1;
                    self.note(&e, Some(pack));
                }
                Some((_, Err(_))) => {}
            }
        }
        self.out.bytes = self.received.load(Ordering::Relaxed);
        if let Some(e) = fatal {
            return Err(ours(id, e));
        }
        // Packs may have come by another fetch just before; but not for ever.
        self.idle = if came + failed > 0 { 0 } else { self.idle + 1 };
        if self.idle > IDLE_MAX {
            self.causes.push("packs that are here do not give them: is a key missing?".into());
        }
        Ok(self.idle <= IDLE_MAX)
    }

    fn count(&mut self, done: Done) {
        match done {
            Done::Pack { resumed } => {
                self.out.packs += 1;
                self.out.resumed += resumed;
            }
            Done::Objects(n) => self.out.objects += n,
            Done::Elsewhere => self.out.merged += 1,
            Done::Here => {}
        }
    }

    /// One job, apart from `self` so that several run at once.
    fn job(
        &self,
        holder: Holder,
        job: Job,
        peek: bool,
        (stop, lines): (CancellationToken, Arc<Semaphore>),
    ) -> impl Future<Output = (PackId, Result<Done, CallError>)> + Send + 'static {
        let transfer = Transfer {
            inner: self.inner.clone(),
            reception: self.reception.clone(),
            under_way: self.fetcher.under_way.clone(),
            open_objects: self.fetcher.open_objects,
            received: self.received.clone(),
            wanted: self.wanted.clone(),
            on_progress: self.on_progress.clone(),
            stop,
            lines,
            full: self.full.clone(),
        };
        async move {
            let id = job.pack();
            let done = match job {
                Job::Whole { pack, bytes } => transfer.whole(&holder, pack, bytes).await,
                Job::Objects { pack, bytes, domain, rows } => transfer.objects(&holder, (pack, bytes, domain), &rows, peek).await,
            };
            (id, done)
        }
    }
}

/// What one job needs.
struct Transfer {
    inner: Arc<Inner>,
    reception: Arc<Reception>,
    under_way: Arc<Mutex<BTreeMap<PackId, watch::Receiver<()>>>>,
    open_objects: bool,
    received: Arc<AtomicU64>,
    wanted: Arc<AtomicU64>,
    on_progress: OnProgress,
    stop: CancellationToken,
    /// One for each pack that is on its way at once.
    lines: Arc<Semaphore>,
    /// The disk is full: nothing is left behind.
    full: Arc<AtomicBool>,
}

impl Transfer {
    fn progress(&self, bytes: u64) {
        let received = self.received.fetch_add(bytes, Ordering::Relaxed) + bytes;
        (self.on_progress)(Progress { received, wanted: self.wanted.load(Ordering::Relaxed).max(received) });
    }

    /// The right to receive a pack, or what to wait for.
    fn take(&self, id: PackId) -> Result<UnderWay, watch::Receiver<()>> {
        let mut all = self.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(rx) = all.get(&id) {
            return Err(rx.clone());
        }
        let (told, rx) = watch::channel(());
        all.insert(id, rx);
        Ok(UnderWay { id, all: self.under_way.clone(), _told: told })
    }

    async fn whole(&self, holder: &Holder, pack: PackId, bytes: u64) -> Result<Done, CallError> {
        loop {
            if let Some(done) = self.whole_once(holder, pack, bytes).await? {
                return Ok(done);
            }
            // What an earlier attempt had left was damaged, and is removed: the next round begins with nothing.
        }
    }

    async fn whole_once(&self, holder: &Holder, pack: PackId, bytes: u64) -> Result<Option<Done>, CallError> {
        let mine = match self.take(pack) {
            Ok(mine) => mine,
            Err(mut other) => {
                // Another fetch brings it; its end, however it ends, is told by its going away.
                while other.changed().await.is_ok() {}
                return Ok(Some(Done::Elsewhere));
            }
        };
        let gone = |e: tokio::task::JoinError| super::call::lost(holder.peer, &e);
        let line = self.lines.acquire().await.map_err(|e| super::call::lost(holder.peer, &e))?;
        let reception = self.reception.clone();
        let staged = tokio::task::spawn_blocking(move || {
            if reception.has_pack(&pack) {
                return Ok(None);
            }
            reception.stage(pack, bytes).map(|part| Some((part, mine)))
        });
        let Some((part, mine)) = staged.await.map_err(gone)?.map_err(|e| sort(holder, e))? else {
            return Ok(Some(Done::Here));
        };
        let (resumed, at) = (part.resumed(), part.at());
        let (tx, slices) = receive::channel();
        let writer = {
            let (reception, full, open) = (self.reception.clone(), self.full.clone(), self.open_objects);
            tokio::task::spawn_blocking(move || {
                let _mine = mine;
                receive_and_adopt(&reception, part, slices, &full, open)
            })
        };
        let watch = Watch { stop: &self.stop, progress: &|n| self.progress(n) };
        let sent = if at == bytes {
            drop(tx);
            Ok(())
        } else {
            receive::request(&self.inner, holder, (&pack, bytes), receive::from(at), tx, &watch).await
        };
        // The next pack comes while this one is opened and synced.
        drop(line);
        let (got, whole) = match writer.await.map_err(gone)? {
            Ok(whole) => (Ok(()), whole),
            Err(stop) => (Err(stop), false),
        };
        match receive::outcome(holder.peer, &format!("pack {}", pack.short()), sent, got) {
            Ok(()) if whole => Ok(Some(Done::Pack { resumed })),
            Ok(()) => Ok(None),
            Err(CallError::Store(e)) => Err(sort(holder, e)),
            Err(e) => Err(e),
        }
    }

    async fn objects(
        &self,
        holder: &Holder,
        (pack, bytes, domain): (PackId, u64, u32),
        rows: &[PackEntry],
        peek: bool,
    ) -> Result<Done, CallError> {
        let line = self.lines.acquire().await.map_err(|e| super::call::lost(holder.peer, &e))?;
        let watch = Watch { stop: &self.stop, progress: &|n| self.progress(n) };
        let got = receive::fetch_objects(&self.inner, holder, (&pack, bytes, domain), rows, &watch).await?;
        drop(line);
        let (n, reception) = (if peek { 0 } else { got.len() as u64 }, self.reception.clone());
        let work = move || if peek { reception.peek(&got) } else { reception.adopt_objects(&got) };
        let stored = tokio::task::spawn_blocking(work).await.map_err(|e| super::call::lost(holder.peer, &e))?;
        stored.map_err(|e| sort(holder, e))?;
        Ok(Done::Objects(n))
    }
}

/// Bytes that the store refuses are the holder's fault; anything else is ours.
fn sort(holder: &Holder, e: StoreError) -> CallError {
    match e {
        StoreError::Pack { id, why } => super::call::wrong(holder.peer, format!("pack {}", id.short()), why),
        StoreError::Lost { chunk, why, .. } => super::call::wrong(holder.peer, format!("object {}", chunk.short()), why),
        e => CallError::Store(e),
    }
}

/// On a blocking thread: verify, write, sync, index. False: what was here from an earlier attempt is damaged.
fn receive_and_adopt(
    reception: &Reception,
    mut part: ks_blobs::Part,
    slices: receive::Slices,
    full: &AtomicBool,
    open: bool,
) -> Result<bool, receive::Stop> {
    let done = if part.at() == part.bytes() { Ok(()) } else { receive::write_part(&mut part, slices) };
    match done {
        Ok(()) => reception.adopt(part, open).map_err(receive::Stop::Store),
        Err(e) => {
            let full_here = matches!(&e, receive::Stop::Store(StoreError::DiskFull { .. }));
            if full_here || full.load(Ordering::Relaxed) {
                part.discard();
            }
            Err(e)
        }
    }
}
