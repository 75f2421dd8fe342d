//! openraft's log on a [`Disk`]: appends are queued, and one writer syncs all that are queued together.
//!
//! ```text
//!  append ──► pending (readable at once) ──► queue ──► writer: one batch, one sync ──► openraft is told, in order
//! ```
//!
//! While a sync is under way further entries collect, so the number of syncs does not grow with the load. The newest entries
//! stay in memory behind their sync, for a leader reads each of them once for every other node. The index of
//! the last committed entry rides along with the next batch: it only saves work after a restart. Votes, cuts and purges
//! go through the same queue and are waited for.
//!
//! A full disk is waited out: the batch is tried again until there is space, and meanwhile [`Health`] says so. Any other
//! error of the disk ends consensus on this node, for what was written is not known any more.

use super::disk::{Disk, LogBatch};
use super::types::{Entry, LogId, Types, Vote};
use openraft::entry::RaftEntry;
use openraft::storage::{IOFlushed, LogState, RaftLogStorage};
use openraft::{AsyncRuntime, OptionalSend, RaftLogReader};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::io;
use std::ops::{Bound, RangeBounds};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot, watch};

/// Writes waiting for the writer.
const QUEUE_MAX: usize = 1024;
/// Bytes of entries in one sync.
const BATCH_BYTES_MAX: usize = 8 << 20;
/// Bytes of entries in one message to a follower.
pub(super) const APPEND_BYTES_MAX: usize = 4 << 20;
/// Bytes, as stored, of entries on disk that stay in memory as well.
const RECENT_BYTES_MAX: usize = 4 << 20;
/// Pause before a batch that found the disk full is tried again.
const FULL_RETRY: Duration = Duration::from_millis(500);

pub(super) const VOTE: &str = "vote";
pub(super) const COMMITTED: &str = "committed";
pub(super) const PURGED: &str = "purged";

/// How the disk is.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Health {
    /// Writes succeed.
    #[default]
    Good,
    /// The disk is full; writes wait for space.
    Full,
    /// A write failed for good; consensus has stopped on this node.
    Broken(String),
}

pub(super) fn encode<T: Serialize>(value: &T) -> io::Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(io::Error::other)
}

pub(super) fn decode<T: DeserializeOwned>(what: &str, bytes: &[u8]) -> io::Result<T> {
    serde_json::from_slice(bytes)
        .map_err(|e| io::Error::new(io::ErrorKind::InvalidData, format!("{what} cannot be read by this program: {e}")))
}

pub(super) fn read_note<T: DeserializeOwned>(disk: &dyn Disk, key: &'static str) -> io::Result<Option<T>> {
    let read = |bytes: Vec<u8>| decode::<Option<T>>(&format!("the note {key:?}"), &bytes);
    Ok(disk.note(key)?.map(read).transpose()?.flatten())
}

enum Job<R: AsyncRuntime> {
    Append { put: Vec<(u64, Vec<u8>)>, done: IOFlushed<Types<R>> },
    Sync { batch: LogBatch, done: oneshot::Sender<io::Result<()>> },
}

#[derive(Default)]
struct Memory {
    /// Entries that are not known to be on disk yet, with their stored sizes.
    pending: BTreeMap<u64, (Entry, usize)>,
    /// The newest of those that are, without a gap to the first pending one.
    recent: BTreeMap<u64, (Entry, usize)>,
    recent_bytes: usize,
    last: Option<LogId>,
    purged: Option<LogId>,
    vote: Option<Vote>,
    committed: Option<LogId>,
}

impl Memory {
    /// These are on disk now.
    fn written(&mut self, indexes: &[u64]) {
        for index in indexes {
            if let Some((entry, bytes)) = self.pending.remove(index) {
                self.recent_bytes += bytes;
                self.recent.insert(*index, (entry, bytes));
            }
        }
        while self.recent_bytes > RECENT_BYTES_MAX
            && let Some((_, (_, bytes))) = self.recent.pop_first()
        {
            self.recent_bytes -= bytes;
        }
    }

    /// Forgets entries from `start` up to, not with, `end`.
    fn forget(&mut self, start: u64, end: u64) {
        self.pending.retain(|index, _| !(start..end).contains(index));
        self.recent.retain(|index, _| !(start..end).contains(index));
        self.recent_bytes = self.recent.values().map(|(_, bytes)| bytes).sum();
    }

    /// What is here of these entries: the last ones, without a gap, each with its size.
    fn range(&self, start: u64, end: u64) -> Vec<(Entry, usize)> {
        self.recent.range(start..end).chain(self.pending.range(start..end)).map(|(_, e)| e.clone()).collect()
    }
}

struct Inner<R: AsyncRuntime> {
    disk: Arc<dyn Disk>,
    memory: Mutex<Memory>,
    queue: mpsc::Sender<Job<R>>,
}

/// The log of one node. Clones are the same log.
pub struct LogStore<R: AsyncRuntime> {
    inner: Arc<Inner<R>>,
}

impl<R: AsyncRuntime> Clone for LogStore<R> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone() }
    }
}

impl<R: AsyncRuntime> LogStore<R> {
    /// Reads where the log stands and starts its writer.
    pub fn open(disk: Arc<dyn Disk>) -> io::Result<(Self, watch::Receiver<Health>)> {
        let purged = read_note(&*disk, PURGED)?;
        let last = match disk.last()? {
            Some((index, bytes)) => Some(decode_entry(index, &bytes)?.log_id()),
            None => purged,
        };
        let (vote, committed) = (read_note(&*disk, VOTE)?, read_note(&*disk, COMMITTED)?);
        let memory = Mutex::new(Memory { last, purged, vote, committed, ..Memory::default() });
        let (queue, jobs) = mpsc::channel(QUEUE_MAX);
        let (health, seen) = watch::channel(Health::Good);
        let inner = Arc::new(Inner { disk, memory, queue });
        let writer = Writer { disk: inner.disk.clone(), log: Arc::downgrade(&inner), jobs, health, noted: committed };
        drop(R::spawn(writer.run()));
        Ok((Self { inner }, seen))
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.inner.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn sync(&self, batch: LogBatch) -> io::Result<()> {
        let (done, told) = oneshot::channel();
        let gone = || io::Error::new(io::ErrorKind::BrokenPipe, "the log's writer has stopped");
        self.inner.queue.send(Job::Sync { batch, done }).await.map_err(|_| gone())?;
        told.await.map_err(|_| gone())?
    }

    fn read(&self, start: u64, end: u64, bytes_max: usize) -> io::Result<Vec<Entry>> {
        if start >= end {
            return Ok(Vec::new());
        }
        // Memory first: what the writer finishes in between is then in both.
        let in_memory = self.memory().range(start, end);
        let from_memory = in_memory.first().map_or(end, |(e, _)| e.index());
        let (mut out, mut bytes) = (Vec::new(), 0);
        if start < from_memory {
            for (index, stored) in self.inner.disk.entries(start, from_memory, bytes_max)? {
                bytes += stored.len();
                out.push(decode_entry(index, &stored)?);
            }
            if out.len() as u64 != from_memory - start {
                return Ok(out);
            }
        }
        for (entry, size) in in_memory {
            if !out.is_empty() && bytes + size > bytes_max {
                break;
            }
            bytes += size;
            out.push(entry);
        }
        Ok(out)
    }
}

fn decode_entry(index: u64, bytes: &[u8]) -> io::Result<Entry> {
    let entry: Entry = decode(&format!("entry {index} of the log"), bytes)?;
    if entry.index() != index {
        let what = format!("entry {} of the log is stored as number {index}", entry.index());
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    Ok(entry)
}

struct Writer<R: AsyncRuntime> {
    disk: Arc<dyn Disk>,
    /// Weak, or the writer would keep the queue open that it waits on.
    log: std::sync::Weak<Inner<R>>,
    jobs: mpsc::Receiver<Job<R>>,
    health: watch::Sender<Health>,
    noted: Option<LogId>,
}

impl<R: AsyncRuntime> Writer<R> {
    async fn run(mut self) {
        let mut next = None;
        loop {
            let job = match next.take() {
                Some(job) => job,
                None => match self.jobs.recv().await {
                    Some(job) => job,
                    None => return,
                },
            };
            match job {
                Job::Sync { batch, done } => drop(done.send(self.write(batch).await)),
                Job::Append { put, done } => next = self.append(put, done).await,
            }
        }
    }

    /// Writes this append and those queued behind it; gives back the first job of another kind.
    async fn append(&mut self, put: Vec<(u64, Vec<u8>)>, done: IOFlushed<Types<R>>) -> Option<Job<R>> {
        let size = |put: &[(u64, Vec<u8>)]| put.iter().map(|(_, b)| b.len()).sum::<usize>();
        let mut bytes = size(&put);
        let (mut batch, mut waiting, mut next) = (LogBatch { put, ..LogBatch::default() }, vec![done], None);
        while bytes < BATCH_BYTES_MAX {
            match self.jobs.try_recv() {
                Ok(Job::Append { put, done }) => {
                    bytes += size(&put);
                    batch.put.extend(put);
                    waiting.push(done);
                }
                Ok(other) => {
                    next = Some(other);
                    break;
                }
                Err(_) => break,
            }
        }
        let written: Vec<u64> = batch.put.iter().map(|(index, _)| *index).collect();
        let result = self.write(batch).await;
        if result.is_ok()
            && let Some(log) = self.log.upgrade()
        {
            // A cut waits in the queue behind these, so no other entry can have taken one of these indexes.
            log.memory.lock().unwrap_or_else(PoisonError::into_inner).written(&written);
        }
        for done in waiting {
            done.io_completed(match &result {
                Ok(()) => Ok(()),
                Err(e) => Err(io::Error::new(e.kind(), e.to_string())),
            });
        }
        next
    }

    async fn write(&mut self, mut batch: LogBatch) -> io::Result<()> {
        let committed = self.log.upgrade().and_then(|log| log.memory.lock().unwrap_or_else(PoisonError::into_inner).committed);
        if committed != self.noted {
            batch.notes.push((COMMITTED, encode(&committed)?));
        }
        loop {
            let result = self.disk.write(batch.clone()).await;
            match &result {
                Ok(()) => {
                    self.noted = committed;
                    self.health.send_if_modified(|h| std::mem::replace(h, Health::Good) != Health::Good);
                }
                Err(e) if e.kind() == io::ErrorKind::StorageFull => {
                    if self.health.send_if_modified(|h| std::mem::replace(h, Health::Full) != Health::Full) {
                        tracing::warn!("the disk is full: the fleet's log waits for space");
                    }
                    R::sleep(FULL_RETRY).await;
                    continue;
                }
                Err(e) => {
                    let broken = Health::Broken(e.to_string());
                    self.health.send_if_modified(|h| std::mem::replace(h, broken.clone()) != broken);
                }
            }
            return result;
        }
    }
}

impl<R: AsyncRuntime> RaftLogReader<Types<R>> for LogStore<R> {
    async fn try_get_log_entries<RB: RangeBounds<u64> + Clone + Debug + OptionalSend>(
        &mut self,
        range: RB,
    ) -> Result<Vec<Entry>, io::Error> {
        let start = match range.start_bound() {
            Bound::Included(i) => *i,
            Bound::Excluded(i) => i.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let end = match range.end_bound() {
            Bound::Included(i) => i.saturating_add(1),
            Bound::Excluded(i) => *i,
            Bound::Unbounded => u64::MAX,
        };
        // Openraft asks for more than there is only without an end, and then wants what there is.
        let end = end.min(self.memory().last.map_or(0, |l| l.index() + 1));
        self.read(start, end, usize::MAX)
    }

    async fn limited_get_log_entries(&mut self, start: u64, end: u64) -> Result<Vec<Entry>, io::Error> {
        self.read(start, end, APPEND_BYTES_MAX)
    }

    async fn read_vote(&mut self) -> Result<Option<Vote>, io::Error> {
        Ok(self.memory().vote)
    }
}

impl<R: AsyncRuntime> RaftLogStorage<Types<R>> for LogStore<R> {
    type LogReader = Self;

    async fn get_log_state(&mut self) -> Result<LogState<Types<R>>, io::Error> {
        let memory = self.memory();
        Ok(LogState { last_purged_log_id: memory.purged, last_log_id: memory.last })
    }

    async fn get_log_reader(&mut self) -> Self {
        self.clone()
    }

    async fn save_vote(&mut self, vote: &Vote) -> Result<(), io::Error> {
        let notes = vec![(VOTE, encode(vote)?)];
        self.sync(LogBatch { notes, ..LogBatch::default() }).await?;
        self.memory().vote = Some(*vote);
        Ok(())
    }

    async fn save_committed(&mut self, committed: Option<LogId>) -> Result<(), io::Error> {
        self.memory().committed = committed;
        Ok(())
    }

    async fn read_committed(&mut self) -> Result<Option<LogId>, io::Error> {
        Ok(self.memory().committed)
    }

    async fn append<I>(&mut self, entries: I, callback: IOFlushed<Types<R>>) -> Result<(), io::Error>
    where
        I: IntoIterator<Item = Entry> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let mut put = Vec::new();
        {
            let mut memory = self.memory();
            for entry in entries {
                let stored = encode(&entry)?;
                let (index, size) = (entry.index(), stored.len());
                put.push((index, stored));
                memory.last = Some(entry.log_id());
                memory.pending.insert(index, (entry, size));
            }
        }
        let gone = |_| io::Error::new(io::ErrorKind::BrokenPipe, "the log's writer has stopped");
        self.inner.queue.send(Job::Append { put, done: callback }).await.map_err(gone)
    }

    async fn truncate_after(&mut self, last: Option<LogId>) -> Result<(), io::Error> {
        let from = last.map_or(0, |l| l.index() + 1);
        self.sync(LogBatch { cut_from: Some(from), ..LogBatch::default() }).await?;
        let mut memory = self.memory();
        memory.forget(from, u64::MAX);
        memory.last = last.or(memory.purged);
        Ok(())
    }

    async fn purge(&mut self, to: LogId) -> Result<(), io::Error> {
        // The mark and the rows in one batch, or a crash leaves a hole.
        let notes = vec![(PURGED, encode(&to)?)];
        self.sync(LogBatch { purge_to: Some(to.index()), notes, ..LogBatch::default() }).await?;
        let mut memory = self.memory();
        memory.forget(0, to.index() + 1);
        memory.purged = Some(to);
        if memory.last.is_none_or(|l| l.index() < to.index()) {
            memory.last = Some(to);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(index: u64) -> Entry {
        let text = format!(r#"{{"log_id":{{"leader_id":{{"term":2,"node_id":7}},"index":{index}}},"payload":"Blank"}}"#);
        decode_entry(index, text.as_bytes()).unwrap()
    }

    #[test]
    fn what_memory_has_of_the_log_ends_it_without_a_gap() {
        let mut m = Memory::default();
        let at = |m: &Memory, start, end| m.range(start, end).iter().map(|(e, _)| e.index()).collect::<Vec<u64>>();
        let size = RECENT_BYTES_MAX / 4;
        m.pending.extend((1..=6).map(|i| (i, (entry(i), size))));
        assert_eq!(at(&m, 0, 9), [1, 2, 3, 4, 5, 6]);
        m.written(&[1, 2, 3, 4]);
        assert_eq!(at(&m, 0, 9), [1, 2, 3, 4, 5, 6], "written and kept");
        m.written(&[5]);
        assert_eq!(at(&m, 0, 9), [2, 3, 4, 5, 6], "the oldest made room");
        assert_eq!(at(&m, 3, 6), [3, 4, 5]);
        // Another leader's entries take the place of the last two.
        m.forget(5, u64::MAX);
        assert_eq!((at(&m, 0, 9), m.recent_bytes), (vec![2, 3, 4], 3 * size));
        m.pending.insert(5, (entry(5), size));
        m.written(&[5, 6]);
        m.forget(0, 4);
        assert_eq!((at(&m, 0, 9), m.recent_bytes), (vec![4, 5], 2 * size));
    }

    /// Entries as they are stored: docs/formats.md.
    #[test]
    fn entries_keep_their_format() {
        let stored = [
            r#"{"log_id":{"leader_id":{"term":2,"node_id":7},"index":9},"payload":"Blank"}"#,
            concat!(
                r#"{"log_id":{"leader_id":{"term":2,"node_id":7},"index":9},"payload":{"Normal":{"#,
                r#""id":{"node":7,"boot":3,"nonce":5,"seq":4},"done_below":2,"command":{"do":"raise-generation"}}}}"#
            ),
            concat!(
                r#"{"log_id":{"leader_id":{"term":2,"node_id":7},"index":9},"#,
                r#""payload":{"Membership":{"configs":[[1,7]],"nodes":{"1":{},"7":{}}}}}"#
            ),
        ];
        for text in stored {
            let entry = decode_entry(9, text.as_bytes()).unwrap();
            assert_eq!(String::from_utf8(encode(&entry).unwrap()).unwrap(), text);
            assert!(decode_entry(8, text.as_bytes()).is_err(), "it stands in another place");
        }
        let vote = r#"{"leader_id":{"term":2,"node_id":7},"committed":true}"#;
        assert_eq!(encode(&decode::<Vote>("a vote", vote.as_bytes()).unwrap()).unwrap(), vote.as_bytes());
    }
}
