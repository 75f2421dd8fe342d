//! One session at the gateway: its journal, its replay machine, the answers under way, its lease and its allow-list.

use super::copies::epochs;
use super::files;
use super::journal::{Journal, Recovered, recover};
use super::live::{End, Live, Order};
use super::locked;
use super::replica::{Part, Replica, ReplicaError};
use crate::allow::Pattern;
use crate::lease::{Lapse, Lease};
use crate::limits::{ALLOW_MAX, EGRESS_MAX, REFUSALS_MAX, SESSION_REQUEST_BYTES_MAX, STREAMS_MAX, TIMELINES_MAX};
use bytes::Bytes;
use ks_gateway::dialect::Outcome;
use ks_gateway::key::Matched;
use ks_gateway::ledger::{Completed, Entry};
use ks_gateway::names::{CallId, Digest, EntryRef, Nonce};
use ks_gateway::replay::{Effect, Input, Replay, Why};
use ks_proto::gateway::Stamp;
use ks_proto::{RunToken, SessionId};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, oneshot, watch};

/// Why a session's journal cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The disk.
    #[error("cannot open the journal of session {session}")]
    Io {
        /// The session.
        session: SessionId,
        /// Why.
        source: io::Error,
    },
    /// What is in it.
    #[error(
        "the journal of session {session} is damaged ({why}); its file is kept as it is: restore it from another node or a copy"
    )]
    Damaged {
        /// The session.
        session: SessionId,
        /// Where.
        why: String,
    },
    /// Another node wrote it, and no copy is at hand yet.
    #[error("the journal of session {session} is not taken over yet ({why}): nothing is bought until it is; try again")]
    Elsewhere {
        /// The session.
        session: SessionId,
        /// Why.
        why: String,
    },
}

/// How a purchase ended, as far as readers need it.
#[derive(Debug, Clone)]
struct Past {
    outcome: Outcome,
    status: u16,
    len: u64,
    error: Option<String>,
}

/// An entry that answers a call.
#[derive(Debug, Clone)]
pub struct FoundEntry {
    /// Which.
    pub entry: EntryRef,
    /// What matched.
    pub matched: Matched,
    /// First byte that the client wants.
    pub offset: u64,
    /// The number that the relay was told before.
    pub told: Option<u64>,
    /// A `served` line is due.
    pub note: bool,
}

/// What is decided of a call.
#[derive(Debug, Clone)]
pub enum Verdict {
    /// It has an answer.
    Entry(FoundEntry),
    /// It is bought.
    Live(Why),
    /// Nothing is known of it.
    Unknown,
}

struct State {
    waiting: BTreeMap<CallId, oneshot::Sender<Verdict>>,
    replay: Replay,
    timelines: BTreeSet<Nonce>,
    lives: BTreeMap<u64, Arc<Live>>,
    past: BTreeMap<u64, Past>,
}

/// How far the replica set is.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Copies {
    Lines(u64),
    Sealed(u64),
}

/// A session.
pub struct Session {
    id: SessionId,
    name: String,
    dir: PathBuf,
    journal: Journal,
    replica: RwLock<Option<Arc<dyn Replica>>>,
    /// The epoch under which this node owns the journal, as its folder says.
    owned: u64,
    copies: watch::Sender<Copies>,
    copying: Mutex<Option<tokio::task::JoinHandle<()>>>,
    epoch: Mutex<u64>,
    lease: Mutex<Lease>,
    state: Mutex<State>,
    allow: RwLock<Vec<(String, Pattern)>>,
    egress: Arc<Semaphore>,
    streams: Arc<Semaphore>,
    room: Arc<Semaphore>,
    /// The newest run, and how many timelines it began.
    began: Mutex<(RunToken, u32)>,
    /// When the minute of refused connections began, and how many it has.
    refusals: Mutex<(Instant, u32)>,
    telling: AtomicBool,
    started: Instant,
    ancestors: Vec<SessionId>,
    forked_at: u64,
}

/// How long a replica that does not answer is left alone.
const COPY_PAUSE: Duration = Duration::from_millis(100);

impl Session {
    /// Opens its journal below `dir`, making one if there is none. Blocks on the disk.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open(
        dir: &Path,
        id: SessionId,
        parent: Option<&ForkedFrom>,
        replica: Option<Arc<dyn Replica>>,
        free_bytes: u64,
    ) -> Result<Arc<Self>, OpenError> {
        let dir = dir.join(id.to_hex());
        let Recovered { journal, lines, replay } = recover(&dir, id, parent, free_bytes)?;
        let owned = epochs(&dir).map_err(|source| OpenError::Io { session: id, source })?.written;
        let allow = read_allow(&dir).map_err(|source| OpenError::Io { session: id, source })?;
        let ancestors = parent.map_or_else(Vec::new, |p| {
            let older = p.known.as_ref().map(|(_, older)| older.clone()).unwrap_or_default();
            [vec![p.session], older].concat()
        });
        let (mut past, mut timelines) = (BTreeMap::new(), BTreeSet::new());
        for line in &lines {
            match &line.entry {
                Entry::Completed(c) => drop(past.insert(c.of, of(c))),
                Entry::Timeline { nonce, .. } => drop(timelines.insert(*nonce)),
                Entry::Origin { .. }
                | Entry::Intent(_)
                | Entry::Served { .. }
                | Entry::Diverged { .. }
                | Entry::Resolved { .. }
                | Entry::Egress { .. } => {}
            }
        }
        Ok(Arc::new(Self {
            id,
            name: id.to_hex(),
            dir,
            journal,
            replica: RwLock::new(replica),
            owned,
            copies: watch::Sender::new(Copies::Lines(0)),
            copying: Mutex::new(None),
            epoch: Mutex::new(0),
            lease: Mutex::default(),
            state: Mutex::new(State { waiting: BTreeMap::new(), replay, timelines, lives: BTreeMap::new(), past }),
            allow: RwLock::new(allow),
            egress: Arc::new(Semaphore::new(EGRESS_MAX)),
            streams: Arc::new(Semaphore::new(STREAMS_MAX)),
            room: Arc::new(Semaphore::new(SESSION_REQUEST_BYTES_MAX)),
            began: Mutex::default(),
            refusals: Mutex::new((Instant::now(), 0)),
            telling: AtomicBool::new(false),
            started: Instant::now(),
            ancestors,
            forked_at: parent.map_or(0, |p| p.at_seq),
        }))
    }

    /// Its id.
    pub fn id(&self) -> SessionId {
        self.id
    }
    /// Its id as the ledger writes it.
    pub fn name(&self) -> &str {
        &self.name
    }
    /// Its journal.
    pub fn journal(&self) -> &Journal {
        &self.journal
    }
    /// Its folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The epoch under which this node owns it; 0 if it never had to take it over.
    pub fn owned(&self) -> u64 {
        self.owned
    }
    fn replica(&self) -> Option<Arc<dyn Replica>> {
        self.replica.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
    /// Where copies go, for a session that was opened without being told.
    pub fn attach(&self, make: impl FnOnce() -> Option<Arc<dyn Replica>>) {
        let mut replica = self.replica.write().unwrap_or_else(PoisonError::into_inner);
        if replica.is_none() {
            *replica = make();
        }
    }
    /// Another owner's epoch ends this one: nothing more is written, and what is under way is given up. Blocks on the disk.
    pub fn freeze(&self, epoch: u64) {
        self.journal.freeze(&ReplicaError::Sealed(epoch).to_string());
        self.copies.send_replace(Copies::Sealed(epoch));
        self.abort_all();
    }

    /// A stream of this run came.
    pub fn seen(self: &Arc<Self>, stamp: &Stamp) {
        locked(&self.lease).seen(stamp.token, !stamp.replicas.is_empty());
        let mut epoch = locked(&self.epoch);
        *epoch = (*epoch).max(stamp.token.epoch);
        if self.replica().is_some() {
            let mut copying = locked(&self.copying);
            if copying.as_ref().is_none_or(tokio::task::JoinHandle::is_finished) {
                *copying = Some(tokio::spawn(copy_lines(Arc::downgrade(self))));
            }
        }
    }
    /// The node told a lease.
    pub fn told(&self, token: RunToken, deadline_boottime_ms: Option<u64>) {
        locked(&self.lease).told(token, deadline_boottime_ms);
    }
    /// Whether something of this run may be sent or released now.
    ///
    /// # Errors
    /// Why not.
    pub fn may_pass(&self, token: RunToken) -> Result<(), Lapse> {
        locked(&self.lease).check(token, files::boottime_ms()).map(|_| ())
    }

    /// Lets the machine take a step, and carries out what it says: orders to pumps, a divergence's line, words to those who wait.
    pub fn step(&self, input: Input) {
        let mut state = locked(&self.state);
        self.step_locked(&mut state, input);
    }

    /// As [`Session::step`] with an ask or a rejoin: what is decided of it, which may be only when another call's line is there.
    pub fn ask(&self, call: CallId, input: Input) -> oneshot::Receiver<Verdict> {
        let (tell, word) = oneshot::channel();
        let mut state = locked(&self.state);
        state.waiting.insert(call, tell);
        self.step_locked(&mut state, input);
        word
    }

    fn step_locked(&self, state: &mut State, input: Input) {
        let now = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        for effect in state.replay.step(now, input) {
            let (call, verdict) = match effect {
                Effect::Serve { call, entry, matched, offset, told, note }
                | Effect::Join { call, entry, matched, offset, told, note } => {
                    (call, Verdict::Entry(FoundEntry { entry, matched, offset, told, note }))
                }
                Effect::Live { call, why } => (call, Verdict::Live(why)),
                Effect::Unknown { call } => (call, Verdict::Unknown),
                Effect::Diverged { timeline, call } => {
                    self.append_later(Entry::Diverged { timeline, call });
                    continue;
                }
                Effect::Drain { entry, until_ms } => {
                    let until = tokio::time::Instant::now() + Duration::from_millis(until_ms.saturating_sub(now));
                    order(state, &entry, Order::Drain(until));
                    continue;
                }
                Effect::Abort { entry } => {
                    order(state, &entry, Order::Abort);
                    continue;
                }
            };
            // A buyer's own client is attached to what it bought without having waited.
            if let Some(tell) = state.waiting.remove(&call) {
                let _ = tell.send(verdict);
            }
        }
    }

    /// Tells a machine how far the answers under way are: its own, or (with `of`) another session's.
    pub fn tell_stored(&self, to: &Session) {
        let lives: Vec<(u64, u64)> = locked(&self.state).lives.values().map(|l| (l.seq, l.progress.borrow().stored)).collect();
        let own = self.id == to.id;
        for (seq, stored) in lives {
            let session = (!own).then(|| self.name.clone());
            to.step(Input::Changed { entry: EntryRef { session, seq }, stored, outcome: None });
        }
    }

    /// The machine as it stands, for a fork.
    pub fn replay(&self) -> Replay {
        locked(&self.state).replay.clone()
    }
    /// The last line of its parent's that is its past; 0 if it has no parent.
    pub fn forked_at(&self) -> u64 {
        self.forked_at
    }
    /// Sessions whose entries its machine knows: parents, nearest first.
    pub fn ancestors(&self) -> &[SessionId] {
        &self.ancestors
    }

    /// True for the first word of a timeline; None if this run began more than any relay does.
    pub fn is_new(&self, timeline: Nonce, token: RunToken) -> Option<bool> {
        let mut state = locked(&self.state);
        if state.timelines.contains(&timeline) {
            return Some(false);
        }
        let mut began = locked(&self.began);
        if began.0 != token {
            *began = (token, 0);
        }
        if began.1 >= TIMELINES_MAX {
            return None;
        }
        began.1 += 1;
        Some(state.timelines.insert(timeline))
    }
    /// Whether a refused connection is written down: a guest that asks again and again fills no disk with it.
    pub fn notes_refusal(&self) -> bool {
        let mut minute = locked(&self.refusals);
        if minute.0.elapsed() >= Duration::from_secs(60) {
            *minute = (Instant::now(), 0);
        }
        minute.1 = minute.1.saturating_add(1);
        minute.1 <= REFUSALS_MAX
    }
    /// True if nobody is about to tell the daemon of a bought call; whoever hears it does.
    pub fn may_tell(&self) -> bool {
        !self.telling.swap(true, Ordering::AcqRel)
    }
    /// The daemon is told now.
    pub fn tells(&self) {
        self.telling.store(false, Ordering::Release);
    }
    /// Slots of streams.
    pub fn streams(&self) -> &Arc<Semaphore> {
        &self.streams
    }
    /// Its share of the room for requests' bodies.
    pub fn room(&self) -> &Arc<Semaphore> {
        &self.room
    }
    /// Hands a line in without waiting for it.
    pub fn append_later(&self, entry: Entry) {
        if let Err(e) = self.journal.append_later(entry) {
            tracing::warn!(session = %self.id, error = %e, "a line was not journaled");
        }
    }
    /// Closes a purchase whose intent is durable and of which nothing was sent.
    pub async fn unsent(&self, seq: u64, why: &str, price_table: Digest) {
        let entry = Completed { outcome: Outcome::Failed, error: Some(why.to_owned()), price_table, ..never_sent(seq) };
        match self.journal.append(Entry::Completed(Box::new(entry.clone()))).await {
            Ok(_) => self.ended(&entry),
            Err(e) => tracing::warn!(session = %self.id, seq, error = %e, "the end of an unsent call was not journaled"),
        }
        let changed = Input::Changed { entry: EntryRef::own(seq), stored: 0, outcome: Some(Outcome::Failed) };
        self.step(changed);
        self.forget_live(seq);
    }
    /// Gives up everything that is under way.
    pub fn abort_all(&self) {
        for live in locked(&self.state).lives.values() {
            live.order.send_replace(Order::Abort);
        }
    }

    /// A purchase began.
    pub fn add_live(&self, live: Arc<Live>) {
        locked(&self.state).lives.insert(live.seq, live);
    }
    /// Its last reader follows what it holds already.
    pub fn forget_live(&self, seq: u64) {
        locked(&self.state).lives.remove(&seq);
    }
    /// A completed line is durable.
    pub fn ended(&self, entry: &Completed) {
        locked(&self.state).past.insert(entry.of, of(entry));
    }
    /// Purchases under way.
    pub fn under_way(&self) -> usize {
        locked(&self.state).lives.len()
    }

    /// The answer of a purchase: under way, or from the journal. None if there is none to be had.
    pub fn answer(&self, seq: u64) -> Option<Arc<Live>> {
        let past = {
            let state = locked(&self.state);
            if let Some(live) = state.lives.get(&seq) {
                return Some(live.clone());
            }
            state.past.get(&seq)?.clone()
        };
        let file = self.journal.bodies().answer(seq).ok()?;
        let (head, _) = self.journal.bodies().head(seq).ok()?;
        let short = file.metadata().ok()?.len() < past.len;
        if short || past.status == 0 {
            return None;
        }
        let end = match past.outcome {
            Outcome::Complete | Outcome::Failed => End::Whole,
            Outcome::Partial | Outcome::Aborted | Outcome::Unknown => {
                End::Abort(past.error.unwrap_or_else(|| "the answer was cut off".to_owned()).into())
            }
        };
        Some(Arc::new(Live::stored(seq, file, head, past.len, end)))
    }

    /// Waits until the replica set has `lines` lines, for at most `patience`.
    ///
    /// # Errors
    /// If it has not by then, or was told that another node owns the session.
    pub async fn replicated(&self, lines: u64, patience: Duration) -> Result<(), ReplicaError> {
        if self.replica().is_none() {
            return Ok(());
        }
        let mut copies = self.copies.subscribe();
        let there = copies.wait_for(|c| match c {
            Copies::Lines(n) => *n >= lines,
            Copies::Sealed(_) => true,
        });
        match tokio::time::timeout(patience, there).await {
            Ok(Ok(found)) => match *found {
                Copies::Lines(_) => Ok(()),
                Copies::Sealed(epoch) => Err(ReplicaError::Sealed(epoch)),
            },
            Ok(Err(_)) | Err(_) => Err(ReplicaError::Away(format!("no word from it for {patience:?}"))),
        }
    }

    /// Puts a call's bodies on the replica set, for at most `patience`; false if they are not there then.
    pub async fn copy_bodies(&self, seq: u64, patience: Duration) -> bool {
        let Some(replica) = self.replica() else { return true };
        let epoch = *locked(&self.epoch);
        let work = async {
            let answer = self.journal.bodies().answer(seq).map_err(|e| ReplicaError::Away(e.to_string()))?;
            let head = self.journal.bodies().head(seq).map(|(_, b)| b).unwrap_or_default();
            replica.body(self.id, epoch, seq, Part::Head, 0, Bytes::from(head)).await?;
            let len = answer.metadata().map_or(0, |m| m.len());
            let mut at = 0;
            while at < len {
                let n = usize::try_from(len - at).unwrap_or(usize::MAX).min(1 << 20);
                let mut buf = vec![0; n];
                answer.read_exact_at(&mut buf, at).map_err(|e| ReplicaError::Away(e.to_string()))?;
                replica.body(self.id, epoch, seq, Part::Answer, at, Bytes::from(buf)).await?;
                at += n as u64;
            }
            Ok::<(), ReplicaError>(())
        };
        matches!(tokio::time::timeout(patience, work).await, Ok(Ok(())))
    }

    /// The allow-list.
    pub fn allow_list(&self) -> Vec<Pattern> {
        self.allow.read().unwrap_or_else(PoisonError::into_inner).iter().map(|(_, p)| p.clone()).collect()
    }
    /// The allow-list as it was written.
    pub fn allow_text(&self) -> Vec<String> {
        self.allow.read().unwrap_or_else(PoisonError::into_inner).iter().map(|(t, _)| t.clone()).collect()
    }
    /// Replaces the allow-list; durable when this returns.
    ///
    /// # Errors
    /// If a pattern is none, there are too many, or the disk refuses.
    pub fn set_allow(&self, all: &[String]) -> Result<(), String> {
        let parsed = write_allow(&self.dir, all)?;
        *self.allow.write().unwrap_or_else(PoisonError::into_inner) = parsed;
        Ok(())
    }
    /// Slots of egress connections.
    pub fn egress_slots(&self) -> &Arc<Semaphore> {
        &self.egress
    }
}

/// A fork's parent.
pub struct ForkedFrom {
    /// The parent.
    pub session: SessionId,
    /// The last line of its that is the fork's past.
    pub at_seq: u64,
    /// That line's hash, for a fork that has no line yet.
    pub at_hash: Option<Digest>,
    /// The parent's machine and its own ancestors, if its journal is at hand.
    pub known: Option<(Replay, Vec<SessionId>)>,
}

/// The end of a purchase of which nothing was sent, or nothing is known.
pub fn never_sent(of: u64) -> Completed {
    Completed {
        of,
        status: 0,
        outcome: Outcome::Unknown,
        usage: None,
        model: None,
        tier: None,
        cost: None,
        price_table: Digest::of(b""),
        head_hash: Digest::of(b""),
        body_bytes: 0,
        body_hash: Digest::of(b""),
        single_copy: false,
        provider_request_id: None,
        response_id: None,
        error: None,
        first_byte_ms: None,
        took_ms: 0,
    }
}

fn of(c: &Completed) -> Past {
    Past { outcome: c.outcome, status: c.status, len: c.body_bytes, error: c.error.clone() }
}

/// A parent's purchase is the parent's to give up.
fn order(state: &State, entry: &EntryRef, order: Order) {
    if let Some(live) = state.lives.get(&entry.seq).filter(|_| entry.session.is_none()) {
        // Somebody who came back is told by an order too: reading on.
        live.order.send_replace(order);
    }
}

/// Stores an allow-list in a session's folder, which is made if it is missing.
///
/// # Errors
/// If a pattern is none, there are too many, or the disk refuses.
pub fn write_allow(dir: &Path, all: &[String]) -> Result<Vec<(String, Pattern)>, String> {
    if all.len() > ALLOW_MAX {
        return Err(format!("{} places, at most {ALLOW_MAX} are allowed", all.len()));
    }
    let parsed: Result<Vec<_>, _> = all.iter().map(|t| Pattern::parse(t).map(|p| (t.clone(), p))).collect();
    let parsed = parsed.map_err(|e| e.to_string())?;
    let json = serde_json::to_vec(all).map_err(|e| e.to_string())?;
    files::make_dir(dir).and_then(|()| files::write_atomic(&dir.join("egress.json"), &json)).map_err(|e| e.to_string())?;
    Ok(parsed)
}

/// The allow-list in a session's folder.
///
/// # Errors
/// If it cannot be read.
pub fn read_allow(dir: &Path) -> io::Result<Vec<(String, Pattern)>> {
    let text = match std::fs::read(dir.join("egress.json")) {
        Ok(t) => t,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(e),
    };
    let all: Vec<String> = serde_json::from_slice(&text)?;
    all.into_iter().map(|t| Pattern::parse(&t).map(|p| (t, p)).map_err(io::Error::other)).collect()
}

/// Brings durable lines to the replica set, in order, for as long as the session is open.
async fn copy_lines(session: std::sync::Weak<Session>) {
    let (mut lines, mut bytes) = (0, 0);
    loop {
        let Some(s) = session.upgrade() else { return };
        let Some(replica) = s.replica() else { return };
        let mut durable = s.journal.durable();
        let (have, len) = *durable.borrow_and_update();
        if have == lines {
            drop(s);
            // A session that is closed drops its journal, which ends this wait.
            if durable.changed().await.is_err() {
                return;
            }
            continue;
        }
        let Ok(text) = s.journal.read(bytes, len) else { return };
        let batch: Vec<Vec<u8>> = text.split_inclusive(|b| *b == b'\n').map(<[u8]>::to_vec).collect();
        let epoch = *locked(&s.epoch);
        match replica.append(s.id, epoch, lines, Arc::new(batch)).await {
            Ok(()) => {
                (lines, bytes) = (have, len);
                // A word that it was sealed stays.
                s.copies.send_if_modified(|c| {
                    let open = matches!(c, Copies::Lines(_));
                    if open {
                        *c = Copies::Lines(have);
                    }
                    open
                });
            }
            Err(ReplicaError::Sealed(epoch)) => {
                s.copies.send_replace(Copies::Sealed(epoch));
                return;
            }
            Err(ReplicaError::Away(_)) => tokio::time::sleep(COPY_PAUSE).await,
        }
    }
}
