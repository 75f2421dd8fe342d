//! Serves the pages of a restored guest as it touches them, and fills in the rest behind it.
//!
//! The fault thread owns the userfaultfd's messages and never waits for the node: what is not on this host goes to the
//! fetch thread. No thread touches guest memory through a mapping: pages are
//! placed by UFFDIO_COPY, write-protected, so that loading makes nothing dirty. A chunk that cannot be read kills the
//! VM through `on_fatal`; its waiters are left waiting, they never see zeros.

use super::aside::{Pace, RunQueue};
use super::state::{CHUNK_PAGES, Serve};
use super::uffd::{Message, PAGE_BYTES, Partial};
use super::{Lazy, Shared, Tracked};
use crate::source::{is_transient, lock};
use ks_proto::control::Fault;
use ks_proto::{CHUNK_BYTES, ChunkId};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

/// How long a chunk is asked for again while the node is away, before the VM is given up.
pub const NODE_GONE_MAX: Duration = Duration::from_secs(20);
/// Bytes per second that the prefetcher loads at most.
pub const PREFETCH_BYTES_PER_S: u64 = 400 * 1024 * 1024;
/// The prefetcher begins after this: first the guest gets going, on a host that may start many at once.
const PREFETCH_AFTER: Duration = Duration::from_millis(300);
/// The prefetcher stands aside while the guest waited for a page within this time.
const QUIET: Duration = Duration::from_millis(2);
const RETRY: Duration = Duration::from_millis(200);

/// Why a thread of the pager ends.
enum End {
    /// Told to stop, or the process with the mapping is gone.
    Stopped,
    /// Guest memory cannot be served any more.
    Fatal(Fault),
}

impl Shared {
    /// Body of the fault thread.
    pub(super) fn serve_faults(self: &Arc<Self>, tracked: &Tracked, lazy: Option<&Lazy>, slow: &Sender<u32>) {
        self.finish(self.fault_loop(tracked, lazy, slow), lazy);
    }
    /// Body of the thread that loads what only the node can give.
    pub(super) fn fetch(self: &Arc<Self>, tracked: &Tracked, lazy: &Lazy, chunks: &Receiver<u32>) {
        self.finish(self.fetch_loop(tracked, lazy, chunks), Some(lazy));
    }
    /// Body of the prefetch thread.
    pub(super) fn prefetch(self: &Arc<Self>, tracked: &Tracked, lazy: &Lazy, queue: RunQueue) {
        self.finish(self.prefetch_loop(tracked, lazy, queue), Some(lazy));
        self.prefetch_done.store(true, Ordering::SeqCst);
    }

    fn finish(self: &Arc<Self>, end: Result<(), End>, lazy: Option<&Lazy>) {
        let Err(End::Fatal(fault)) = end else { return };
        let first = self.stop.set();
        tracing::error!(%fault, "guest memory cannot be served");
        // Closing the userfaultfd would let waiters go on with zeros: it stays open until the process ends.
        std::mem::forget(Arc::clone(self));
        if let Some(lazy) = lazy.filter(|_| first) {
            (lazy.on_fatal)(fault);
        }
    }

    fn fault_loop(&self, tracked: &Tracked, lazy: Option<&Lazy>, slow: &Sender<u32>) -> Result<(), End> {
        let mut faults = Vec::new();
        loop {
            let mut fds = [PollFd::new(&tracked.uffd, PollFlags::IN), PollFd::new(&self.stop, PollFlags::IN)];
            match poll(&mut fds, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(e) => return Err(fatal("poll", e)),
            }
            if self.stop.is_set() {
                return Ok(());
            }
            self.take_messages(tracked, &mut faults)?;
            // Serving may take further messages (EAGAIN), which queue up here.
            while let Some(address) = faults.pop() {
                self.last_fault_us.store(self.started.elapsed().as_micros() as u64, Ordering::Relaxed);
                self.serve_one(tracked, lazy, slow, address, &mut faults)?;
            }
        }
    }

    /// Reads what is there; remove events take effect before anybody else can look at the page states.
    fn take_messages(&self, tracked: &Tracked, faults: &mut Vec<u64>) -> Result<(), End> {
        let _in_order = lock(&self.events);
        for m in tracked.uffd.read().map_err(|e| fatal("read userfaultfd", e))? {
            match m {
                Message::Fault { address } => faults.push(address),
                Message::Remove { start, end } => {
                    let (start, end) = (start.max(tracked.base), end.min(tracked.base + tracked.len));
                    if start < end {
                        let first = (start - tracked.base) / PAGE_BYTES;
                        lock(&self.inner).discard(first, (end - start) / PAGE_BYTES);
                    }
                }
            }
        }
        Ok(())
    }

    fn serve_one(
        &self,
        tracked: &Tracked,
        lazy: Option<&Lazy>,
        slow: &Sender<u32>,
        address: u64,
        faults: &mut Vec<u64>,
    ) -> Result<(), End> {
        if address < tracked.base || address >= tracked.base + tracked.len {
            return Err(End::Fatal(Fault::new(
                "internal",
                "pager",
                format!("fault at {address:#x}, outside guest memory"),
                "see vmm.log",
            )));
        }
        let page = (address - tracked.base) / PAGE_BYTES;
        let serve = lock(&self.inner).states.fault(page);
        match serve {
            Serve::Wait => Ok(()),
            Serve::Zero(page) => self.place_zeros(tracked, page, faults),
            Serve::Load(chunk) => {
                let Some(lazy) = lazy else {
                    let why = format!("chunk {chunk} is missing, but nothing was to be loaded");
                    return Err(End::Fatal(Fault::new("internal", "pager", why, "see vmm.log")));
                };
                {
                    let mut inner = lock(&self.inner);
                    inner.touched.push(chunk);
                    inner.faulted += 1;
                }
                match lazy.source.read_here(&lazy.refs[chunk as usize]) {
                    Some(plain) => self.place(tracked, chunk, &plain, Some(faults)),
                    // The node may take long: meanwhile removes must be read, or the thread that discards hangs.
                    None => slow.send(chunk).map_err(|_| End::Stopped),
                }
            }
        }
    }

    fn fetch_loop(&self, tracked: &Tracked, lazy: &Lazy, chunks: &Receiver<u32>) -> Result<(), End> {
        while let Ok(chunk) = chunks.recv() {
            let plain = self.load(lazy, chunk)?;
            self.place(tracked, chunk, &plain, None)?;
        }
        Ok(())
    }

    fn prefetch_loop(&self, tracked: &Tracked, lazy: &Lazy, mut queue: RunQueue) -> Result<(), End> {
        let chunks = lazy.refs.len() as u32;
        if self.stop.wait(PREFETCH_AFTER) {
            return Err(End::Stopped);
        }
        let began = Instant::now();
        let mut loaded = 0u64;
        let mut pace = Pace::default();
        queue.waited();
        for chunk in lazy.order.iter().copied().filter(|c| *c < chunks).chain(0..chunks) {
            if !lock(&self.inner).states.claim(chunk) {
                continue;
            }
            let plain = self.load(lazy, chunk)?;
            lock(&self.inner).prefetched += 1;
            self.place(tracked, chunk, &plain, None)?;
            loaded += CHUNK_BYTES as u64;
            let due = Duration::from_micros(loaded * 1_000_000 / PREFETCH_BYTES_PER_S);
            let mut pause = due.saturating_sub(began.elapsed());
            let quiet_for =
                (self.started.elapsed().as_micros() as u64).saturating_sub(self.last_fault_us.load(Ordering::Relaxed));
            pause = pause.max(QUIET.saturating_sub(Duration::from_micros(quiet_for))).max(pace.after(queue.waited()));
            if !pause.is_zero() && self.stop.wait(pause) || self.stop.is_set() {
                return Err(End::Stopped);
            }
        }
        Ok(())
    }

    /// The verified bytes of a chunk; waits a bounded time for a node that is away.
    fn load(&self, lazy: &Lazy, chunk: u32) -> Result<Vec<u8>, End> {
        let id: &ChunkId = &lazy.refs[chunk as usize];
        let deadline = Instant::now() + NODE_GONE_MAX;
        loop {
            match lazy.source.read(id) {
                Ok(plain) => return Ok(plain),
                Err(f) if is_transient(&f) && Instant::now() < deadline => {
                    if self.stop.wait(RETRY) {
                        return Err(End::Stopped);
                    }
                }
                Err(f) => {
                    let what = format!("memory chunk {chunk}: {}", f.what);
                    return Err(End::Fatal(Fault { what, ..f }));
                }
            }
        }
    }

    /// Places the pages of a chunk that are still due to it, and wakes everybody who waits in it.
    fn place(&self, tracked: &Tracked, chunk: u32, plain: &[u8], mut faults: Option<&mut Vec<u64>>) -> Result<(), End> {
        let start = tracked.base + u64::from(chunk) * CHUNK_BYTES as u64;
        loop {
            let step = {
                let mut inner = lock(&self.inner);
                let step = place_some(tracked, &mut inner, chunk, start, plain);
                if !matches!(step, Ok(false)) {
                    inner.states.release(chunk);
                }
                step
            };
            match step {
                Ok(true) => break,
                // An event has to be read first: by the fault thread.
                Ok(false) => match faults.as_deref_mut() {
                    Some(faults) => self.take_messages(tracked, faults)?,
                    None => {
                        if self.stop.wait(Duration::from_micros(100)) {
                            return Err(End::Stopped);
                        }
                    }
                },
                Err(e) => return Err(gone_or_fatal("UFFDIO_COPY", e)),
            }
        }
        tracked.uffd.wake(start, CHUNK_BYTES as u64).map_err(|e| gone_or_fatal("UFFDIO_WAKE", e))
    }

    /// Serves a page whose truth is in the file: zeros if it is a hole. Fills the holes right after it as well.
    fn place_zeros(&self, tracked: &Tracked, page: u64, faults: &mut Vec<u64>) -> Result<(), End> {
        static ZEROS: [u8; CHUNK_BYTES] = [0; CHUNK_BYTES];
        let at = tracked.base + page * PAGE_BYTES;
        loop {
            let placed = {
                let inner = lock(&self.inner);
                let within = page % CHUNK_PAGES;
                let settled = inner.states.settled_pages((page / CHUNK_PAGES) as u32) >> within;
                let run = u64::from(settled.trailing_ones()).min(CHUNK_PAGES - within).max(1);
                tracked.uffd.copy(at, &ZEROS[..(run * PAGE_BYTES) as usize])
            };
            match placed {
                Ok(()) => return Ok(()),
                Err(Partial { done, .. }) if done > 0 => return Ok(()),
                Err(Partial { errno: Errno::EXIST, .. }) => {
                    return tracked.uffd.wake(at, PAGE_BYTES).map_err(|e| gone_or_fatal("UFFDIO_WAKE", e));
                }
                Err(Partial { errno: Errno::AGAIN, .. }) => self.take_messages(tracked, faults)?,
                Err(Partial { errno, .. }) => return Err(gone_or_fatal("UFFDIO_COPY", errno)),
            }
            if self.stop.is_set() {
                return Err(End::Stopped);
            }
        }
    }
}

/// True when nothing of the chunk is due any more; false if events have to be read first. Holds the lock of the states
/// throughout, so that a discard comes wholly before (its pages are not due) or after.
fn place_some(tracked: &Tracked, inner: &mut super::Inner, chunk: u32, start: u64, plain: &[u8]) -> Result<bool, Errno> {
    loop {
        let due = inner.states.wanted(chunk);
        if due == 0 {
            return Ok(true);
        }
        let first = due.trailing_zeros();
        let run = (due >> first).trailing_ones();
        let (from, len) = (first as usize * PAGE_BYTES as usize, run as usize * PAGE_BYTES as usize);
        let (pages, again) = match tracked.uffd.copy(start + from as u64, &plain[from..from + len]) {
            Ok(()) => (run, false),
            Err(Partial { done, .. }) if done > 0 => ((done / PAGE_BYTES) as u32, false),
            // There already: whatever it is, it is newer than the chunk.
            Err(Partial { errno: Errno::EXIST, .. }) => (1, false),
            Err(Partial { errno: Errno::AGAIN, .. }) => (0, true),
            Err(Partial { errno, .. }) => return Err(errno),
        };
        if again {
            return Ok(false);
        }
        let mask = (((1u32 << pages) - 1) << first) as u16;
        inner.states.filled(chunk, mask);
        inner.had[chunk as usize] |= mask;
    }
}

fn fatal(what: &str, e: Errno) -> End {
    End::Fatal(Fault::new("internal", format!("pager: {what}"), e.to_string(), "see vmm.log"))
}

fn gone_or_fatal(what: &str, e: Errno) -> End {
    if e == Errno::SRCH { End::Stopped } else { fatal(what, e) }
}
