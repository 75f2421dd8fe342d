//! The one writer of a ledger: lines of concurrent calls go to the disk together, with one sync.
//!
//! A line gets its number when it is written, not when it is handed in, so that a failed write leaves no gap: the file is cut
//! back to its last durable line and the chain goes on from there.

use super::super::locked;
use super::bodies::Bodies;
use crate::crash;
use crate::host::files;
use crate::limits::{COMMITS_MAX, LEDGER_SPACE_BYTES};
use bytes::Bytes;
use ks_gateway::ledger::{Chain, Entry, LINE_BYTES_MAX, Line};
use rustix::fs::FallocateFlags;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use tokio::sync::{oneshot, watch};

/// Why a line is not in the journal.
#[derive(Debug, Clone, thiserror::Error)]
pub enum JournalError {
    /// No space, or not enough left for the answer. Nothing of the call is in the journal.
    #[error("the journal's disk is full: {0}")]
    Full(String),
    /// The disk failed once; what is durable is not known until a restart reads it.
    #[error("the journal cannot be written any more until the gateway is started again: {0}")]
    Broken(String),
    /// Too many lines wait.
    #[error("{COMMITS_MAX} lines wait for the journal's disk")]
    Busy,
}

/// A durable line.
#[derive(Debug)]
pub struct Committed {
    /// The line.
    pub line: Line,
    /// Number of lines that are durable with it, for the replica set.
    pub lines: u64,
    /// Where the answer goes, for an intent.
    pub answer: Option<File>,
}

struct Item {
    entry: Entry,
    /// The request's body, for an intent.
    body: Option<Bytes>,
    done: oneshot::Sender<Result<Committed, JournalError>>,
}

#[derive(Default)]
struct Queue {
    items: Vec<Item>,
    running: bool,
    broken: Option<String>,
}

struct Writer {
    chain: Chain,
    file: Arc<File>,
    /// Durable bytes and lines.
    len: u64,
    lines: u64,
    /// Space taken in the file.
    space: u64,
}

struct Inner {
    path: PathBuf,
    bodies: Bodies,
    /// Space that is left free on the disk.
    free_bytes: u64,
    queue: Mutex<Queue>,
    writer: Mutex<Writer>,
    durable: watch::Sender<(u64, u64)>,
    file: Arc<File>,
}

/// One session's journal. Cheap to clone.
#[derive(Clone)]
pub struct Journal {
    inner: Arc<Inner>,
}

impl Journal {
    /// Goes on with what recovery found.
    pub fn new(path: PathBuf, file: File, chain: Chain, lines: u64, bodies: Bodies, free_bytes: u64) -> io::Result<Self> {
        let len = file.metadata()?.len();
        let file = Arc::new(file);
        let writer = Mutex::new(Writer { chain, file: file.clone(), len, lines, space: len });
        let (queue, durable) = (Mutex::default(), watch::Sender::new((lines, len)));
        Ok(Self { inner: Arc::new(Inner { path, bodies, free_bytes, queue, writer, durable, file }) })
    }

    /// The folder of bodies.
    pub fn bodies(&self) -> &Bodies {
        &self.inner.bodies
    }

    /// Number and bytes of durable lines, as they rise.
    pub fn durable(&self) -> watch::Receiver<(u64, u64)> {
        self.inner.durable.subscribe()
    }

    /// Bytes `from..to` of the ledger, all durable.
    ///
    /// # Errors
    /// As the disk says.
    pub fn read(&self, from: u64, to: u64) -> io::Result<Vec<u8>> {
        let mut out = vec![0; usize::try_from(to.saturating_sub(from)).unwrap_or(usize::MAX)];
        self.inner.file.read_exact_at(&mut out, from)?;
        Ok(out)
    }

    /// Makes an intent durable, with space for its answer taken and its request stored.
    ///
    /// # Errors
    /// [`JournalError`]; nothing of the call is then in the journal.
    pub async fn intent(&self, entry: Entry, body: Bytes) -> Result<Committed, JournalError> {
        wait(self.put(entry, Some(body))?).await
    }

    /// Makes any other entry durable.
    ///
    /// # Errors
    /// [`JournalError`].
    pub async fn append(&self, entry: Entry) -> Result<Committed, JournalError> {
        wait(self.put(entry, None)?).await
    }

    /// Hands an entry in without waiting: it comes before all that is handed in later.
    ///
    /// # Errors
    /// If it cannot be handed in.
    pub fn append_later(&self, entry: Entry) -> Result<(), JournalError> {
        self.put(entry, None).map(|_| ())
    }

    /// Ends all writing, for good. Blocks until what was being written is on the disk.
    pub fn freeze(&self, why: &str) {
        {
            let mut q = locked(&self.inner.queue);
            q.broken.get_or_insert_with(|| why.to_owned());
            for item in q.items.drain(..) {
                let _ = item.done.send(Err(JournalError::Broken(why.to_owned())));
            }
        }
        drop(locked(&self.inner.writer));
    }

    fn put(&self, entry: Entry, body: Option<Bytes>) -> Result<Waiting, JournalError> {
        let (done, result) = oneshot::channel();
        let mut q = locked(&self.inner.queue);
        if let Some(why) = &q.broken {
            return Err(JournalError::Broken(why.clone()));
        }
        if q.items.len() >= COMMITS_MAX {
            return Err(JournalError::Busy);
        }
        q.items.push(Item { entry, body, done });
        if !q.running {
            q.running = true;
            let inner = self.inner.clone();
            tokio::task::spawn_blocking(move || run(&inner));
        }
        Ok(result)
    }
}

type Waiting = oneshot::Receiver<Result<Committed, JournalError>>;

async fn wait(result: Waiting) -> Result<Committed, JournalError> {
    crash::point("intent-queued");
    result.await.unwrap_or_else(|_| Err(JournalError::Broken("the writer stopped".to_owned())))
}

/// Takes what waits, again and again, until nothing does.
fn run(inner: &Inner) {
    loop {
        let batch = {
            let mut q = locked(&inner.queue);
            if q.items.is_empty() {
                q.running = false;
                return;
            }
            std::mem::take(&mut q.items)
        };
        let mut writer = locked(&inner.writer);
        if let Err(why) = commit(inner, &mut writer, batch) {
            let mut q = locked(&inner.queue);
            tracing::error!(journal = %inner.path.display(), why, "the journal failed; it is read again at the next start");
            for item in q.items.drain(..) {
                let _ = item.done.send(Err(JournalError::Broken(why.clone())));
            }
            q.broken = Some(why);
            q.running = false;
            return;
        }
    }
}

struct Prepared {
    item: Item,
    line: Line,
    files: Option<(File, File)>,
}

/// Writes and syncs a batch. Err only when it is unknown what is on the disk.
fn commit(inner: &Inner, w: &mut Writer, batch: Vec<Item>) -> Result<(), String> {
    let before = w.chain.clone();
    let (mut bytes, mut ready) = (Vec::new(), Vec::new());
    for item in batch {
        match prepare(inner, w, &item, bytes.len()) {
            Ok((line, text, files)) => {
                bytes.extend_from_slice(&text);
                ready.push(Prepared { item, line, files });
            }
            Err(e) => {
                let _ = item.done.send(Err(e));
            }
        }
    }
    if ready.is_empty() {
        return Ok(());
    }
    if let Err(e) = w.file.write_all_at(&bytes, w.len) {
        let undone = w.file.set_len(w.len);
        w.chain = before;
        let full = JournalError::Full(e.to_string());
        for p in ready {
            if p.files.is_some() {
                inner.bodies.remove(p.line.seq);
            }
            let _ = p.item.done.send(Err(full.clone()));
        }
        return undone.map_err(|e| e.to_string());
    }
    if let Err(e) = w.file.sync_data() {
        for p in ready {
            let _ = p.item.done.send(Err(JournalError::Broken(e.to_string())));
        }
        return Err(e.to_string());
    }
    w.len += bytes.len() as u64;
    w.space = w.space.max(w.len);
    w.lines += ready.len() as u64;
    inner.durable.send_replace((w.lines, w.len));
    finish(ready, w.lines);
    Ok(())
}

fn finish(ready: Vec<Prepared>, lines: u64) {
    for p in ready {
        let (request, answer) = p.files.map_or((None, None), |(r, a)| (Some(r), Some(a)));
        let _ = p.item.done.send(Ok(Committed { line: p.line, lines, answer }));
        // Its space is taken; the call need not wait for it.
        if let (Some(file), Some(body)) = (request, p.item.body)
            && let Err(e) = file.write_all_at(&body, 0)
        {
            tracing::warn!(error = %e, "a request's body could not be stored beside its intent");
        }
    }
}

type Made = (Line, Vec<u8>, Option<(File, File)>);

/// Numbers one entry, takes the space it needs, and makes its files.
fn prepare(inner: &Inner, w: &mut Writer, item: &Item, ahead: usize) -> Result<Made, JournalError> {
    let full = |e: io::Error| JournalError::Full(e.to_string());
    let before = w.chain.clone();
    let (line, mut text) = w.chain.append(files::unix_ms(), item.entry.clone());
    text.push('\n');
    let text = text.into_bytes();
    if text.len() > LINE_BYTES_MAX {
        w.chain = before;
        return Err(JournalError::Full(format!("a line of {} bytes, at most {LINE_BYTES_MAX} are written", text.len())));
    }
    let made = (|| {
        let Some(body) = &item.body else { return Ok(None) };
        // Every intent leaves space for the lines of all that is under way.
        let need = w.len + (ahead + text.len()) as u64 + LEDGER_SPACE_BYTES;
        if w.space < need {
            let more = need + LEDGER_SPACE_BYTES - w.len;
            rustix::fs::fallocate(&w.file, FallocateFlags::KEEP_SIZE, w.len, more)?;
            w.space = w.len + more;
        }
        let free = rustix::fs::fstatvfs(&w.file)?;
        let (free, least) = (free.f_bavail * free.f_frsize, inner.free_bytes + body.len() as u64);
        if free < least {
            return Err(io::Error::new(
                io::ErrorKind::StorageFull,
                format!("{free} bytes are free, {least} are needed: free some space, or set the journal on another disk"),
            ));
        }
        inner.bodies.make(line.seq, body.len() as u64).map(Some)
    })();
    match made {
        Ok(files) => Ok((line, text, files)),
        Err(e) => {
            w.chain = before;
            Err(full(e))
        }
    }
}
