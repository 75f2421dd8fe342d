//! Guest memory: one memfd addressed by offset, paged in lazily or eagerly, with the set of dirty chunks.
//!
//! How an engine uses it: map [`Memory::fd`] shared, register the mapping with a userfaultfd (kvm:
//! [`Tracked::in_this_process`]; qemu: the preload shim sends the descriptor), call [`Memory::attach`] before anything
//! touches the mapping, or [`Memory::detached`] when there is no userfaultfd. Nothing here reads guest memory through
//! a mapping (a read of a hole would allocate zeros): SEEK_DATA and pread only.

mod aside;
mod capture;
mod extents;
pub mod map;
mod pager;
mod state;
mod stop;
pub mod tracker;
pub mod uffd;

pub use capture::{Collected, DirtyChunk};
pub use tracker::Tracked;

use crate::source::{ChunkSource, in_bulk, lock};
use ks_proto::chunk::is_zeros;
use ks_proto::control::Fault;
use ks_proto::{CHUNK_BYTES, ChunkId};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;
use state::PageStates;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::Instant;
use stop::Stop;
use uffd::PAGE_BYTES;

/// Called once when guest memory can no longer be served: the VM must die. Runs on a thread of the pager.
pub type OnFatal = Arc<dyn Fn(Fault) + Send + Sync>;

/// Counters of paging, in chunks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PagingStats {
    /// Loaded because the guest waited.
    pub faulted: u64,
    /// Loaded by the prefetcher (or eagerly).
    pub prefetched: u64,
    /// Not yet loaded.
    pub missing: u64,
}

/// Guest memory of one VM. Every method works from any thread.
pub struct Memory {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Memory({} bytes, {:?})", self.bytes(), self.paging())
    }
}

struct Shared {
    file: OwnedFd,
    bytes: u64,
    inner: Mutex<Inner>,
    tracked: OnceLock<Tracked>,
    // Held while messages are read and their removes applied: who takes it afterwards sees every remove that was read.
    events: Mutex<()>,
    stop: Stop,
    started: Instant,
    last_fault_us: AtomicU64,
    prefetch_done: AtomicBool,
}

struct Inner {
    states: PageStates,
    // Settled pages that are known to hold data: all that a scan for holes, a placement or write tracking found, less
    // what was given back since.
    had: Vec<u16>,
    // Chunks of the last stored checkpoint; zeros before the first one.
    refs: Vec<ChunkId>,
    lazy: Option<Arc<Lazy>>,
    // Nobody knows what changed: the next checkpoint looks at everything.
    all_dirty: bool,
    touched: Vec<u32>,
    faulted: u64,
    prefetched: u64,
}

impl Inner {
    fn discard(&mut self, first_page: u64, pages: u64) {
        self.states.discard(first_page, pages);
        extents::clear(&mut self.had, first_page, first_page + pages);
    }
}

struct Lazy {
    source: Arc<ChunkSource>,
    refs: Vec<ChunkId>,
    order: Vec<u32>,
    on_fatal: OnFatal,
}

impl Memory {
    /// A memfd of `bytes` (a multiple of 64 KiB), all holes, that can neither grow nor shrink. A booting VM uses it so.
    pub fn create(bytes: u64) -> Result<Arc<Self>, Fault> {
        if bytes == 0 || !bytes.is_multiple_of(CHUNK_BYTES as u64) {
            let why = format!("{bytes} bytes are not whole chunks of {CHUNK_BYTES} bytes");
            return Err(Fault::new("bad-request", "guest memory", why, "ask for a multiple of 2 MiB"));
        }
        let file = rustix::fs::memfd_create("guest-memory", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .and_then(|f| rustix::fs::ftruncate(&f, bytes).map(|()| f))
            .and_then(|f| rustix::fs::fcntl_add_seals(&f, SealFlags::SHRINK | SealFlags::GROW).map(|()| f))
            .map_err(|e| io_fault("create the memory file", e))?;
        let chunks = (bytes / CHUNK_BYTES as u64) as usize;
        let inner = Inner {
            states: PageStates::settled(chunks),
            had: vec![0; chunks],
            refs: vec![ChunkId::ZERO; chunks],
            lazy: None,
            all_dirty: true,
            touched: Vec::new(),
            faulted: 0,
            prefetched: 0,
        };
        let shared = Shared {
            file,
            bytes,
            inner: Mutex::new(inner),
            tracked: OnceLock::new(),
            events: Mutex::new(()),
            stop: Stop::new().map_err(|e| io_fault("create an eventfd", e))?,
            started: Instant::now(),
            last_fault_us: AtomicU64::new(0),
            prefetch_done: AtomicBool::new(false),
        };
        Ok(Arc::new(Self { shared: Arc::new(shared), threads: Mutex::new(Vec::new()) }))
    }
    /// The memory file, to map shared or to hand to a child (it is close-on-exec: dup or clear the flag there).
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.shared.file.as_fd()
    }
    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.shared.bytes
    }
    /// Bytes that are not holes.
    pub fn used_bytes(&self) -> u64 {
        rustix::fs::fstat(&self.shared.file).map_or(0, |s| u64::try_from(s.st_blocks).unwrap_or(0) * 512)
    }
    /// Before the engine is built, for a restore: memory is `refs` (from [`ChunkSource::load_map`]), loaded as the guest
    /// touches it; `order` are chunk indices to prefetch first. Needs `attach` (or `detached`, which loads all).
    pub fn restore_lazy(
        &self,
        source: Arc<ChunkSource>,
        refs: Vec<ChunkId>,
        order: Vec<u32>,
        on_fatal: OnFatal,
    ) -> Result<(), Fault> {
        self.check_restore(&refs)?;
        let mut inner = lock(&self.shared.inner);
        inner.states = PageStates::missing(&refs);
        inner.refs.clone_from(&refs);
        inner.all_dirty = false;
        inner.lazy = Some(Arc::new(Lazy { source, refs, order, on_fatal }));
        Ok(())
    }
    /// Before the engine is built, for a restore: loads and verifies all of `refs` now.
    pub fn restore_eager(&self, source: Arc<ChunkSource>, refs: Vec<ChunkId>) -> Result<(), Fault> {
        let fatal: OnFatal = Arc::new(|_| ());
        self.restore_lazy(source, refs, Vec::new(), fatal)?;
        self.load_all()
    }
    /// True if the engine must register its mapping for missing pages as well (`UFFDIO_REGISTER_MODE_MISSING`).
    pub fn wants_missing(&self) -> bool {
        lock(&self.shared.inner).states.missing_chunks() > 0
    }
    /// Takes the registered mapping: arms the dirty tracker, serves faults and remove events from now on. Once per VM.
    /// Nobody writes guest memory before it returns, except by a write that waits for a missing page. A process that
    /// maps it keeps the userfaultfd open as well: closing the last one lets waiters go on with zeros.
    pub fn attach(self: &Arc<Self>, tracked: Tracked) -> Result<(), Fault> {
        if tracked.len != self.bytes() {
            let why = format!("{} bytes are mapped, memory has {}", tracked.len, self.bytes());
            return Err(Fault::new("internal", "attach guest memory", why, "see vmm.log"));
        }
        let before = tracked.uffd.set_nonblocking().and_then(|()| tracked.arm());
        let before = before.map_err(|e| io_fault("arm the dirty tracker (it needs Linux 6.7)", e))?;
        let missing = self.wants_missing();
        let lazy = {
            let mut inner = lock(&self.shared.inner);
            inner.states.put_back(capture::chunks_of(&before));
            inner.lazy.clone()
        };
        if self.shared.tracked.set(tracked).is_err() {
            return Err(Fault::new("internal", "attach guest memory", "it is attached already", "see vmm.log"));
        }
        let faults = lazy.clone();
        let (slow, slow_chunks) = std::sync::mpsc::channel();
        self.spawn("ks-pager", || (), move |s, t, ()| s.serve_faults(t, faults.as_deref(), &slow))?;
        if let Some(lazy) = lazy.filter(|_| missing) {
            let fetch = Arc::clone(&lazy);
            self.spawn("ks-fetch", || (), move |s, t, ()| s.fetch(t, &fetch, &slow_chunks))?;
            self.spawn("ks-prefetch", aside::RunQueue::of_this_thread, move |s, t, queue| s.prefetch(t, &lazy, queue))?;
        }
        Ok(())
    }
    /// There is no userfaultfd: loads everything that is not loaded yet; checkpoints find dirty chunks by hashing.
    pub fn detached(&self) -> Result<(), Fault> {
        self.load_all()
    }
    /// The guest gave back whole 4 KiB pages (balloon, free-page report): they read as zeros from now on. kvm calls this
    /// instead of madvise; in qemu the remove event does. Parts of pages at the ends are left as they are.
    pub fn discard(&self, offset: u64, len: u64) -> Result<(), Fault> {
        let end = offset.saturating_add(len).min(self.bytes()) / PAGE_BYTES;
        let first = offset.div_ceil(PAGE_BYTES);
        if first >= end {
            return Ok(());
        }
        let mut inner = lock(&self.shared.inner);
        inner.discard(first, end - first);
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&self.shared.file, flags, first * PAGE_BYTES, (end - first) * PAGE_BYTES)
            .map_err(|e| io_fault("give back pages", e))
    }
    /// Counters.
    pub fn paging(&self) -> PagingStats {
        let inner = lock(&self.shared.inner);
        PagingStats { faulted: inner.faulted, prefetched: inner.prefetched, missing: inner.states.missing_chunks() as u64 }
    }
    /// Chunks in the order in which the guest first waited for them: the next restore's `order`.
    pub fn touch_order(&self) -> Vec<u32> {
        lock(&self.shared.inner).touched.clone()
    }
    /// Ends the pager threads and waits for them. Idempotent; also on drop. Waiters in the guest stay waiting: kill it.
    pub fn shutdown(&self) {
        self.shared.stop.set();
        let me = std::thread::current().id();
        for thread in lock(&self.threads).drain(..).filter(|t| t.thread().id() != me) {
            if thread.join().is_err() {
                tracing::error!("a pager thread panicked");
            }
        }
    }

    fn check_restore(&self, refs: &[ChunkId]) -> Result<(), Fault> {
        let chunks = (self.bytes() / CHUNK_BYTES as u64) as usize;
        if refs.len() != chunks || self.shared.tracked.get().is_some() {
            let why = format!("{} chunk references for {chunks} chunks of memory that must not be in use", refs.len());
            return Err(Fault::new("incompatible", "restore guest memory", why, "restore with the checkpoint's memory size"));
        }
        Ok(())
    }

    /// Writes every chunk that is not loaded into the file; before any engine maps it.
    fn load_all(&self) -> Result<(), Fault> {
        let (lazy, todo) = {
            let inner = lock(&self.shared.inner);
            let Some(lazy) = inner.lazy.clone() else { return Ok(()) };
            let todo: Vec<u32> = (0..lazy.refs.len() as u32).filter(|c| inner.states.wanted(*c) != 0).collect();
            (lazy, todo)
        };
        in_bulk(todo.len(), |i| {
            let chunk = todo[i];
            let plain = lazy.source.read(&lazy.refs[chunk as usize])?;
            let start = u64::from(chunk) * CHUNK_BYTES as u64;
            let mut had = 0u16;
            for (n, page) in plain.chunks_exact(PAGE_BYTES as usize).enumerate().filter(|(_, p)| !is_zeros(p)) {
                write_all(&self.shared.file, start + n as u64 * PAGE_BYTES, page)?;
                had |= 1 << n;
            }
            let mut inner = lock(&self.shared.inner);
            inner.states.filled(chunk, state::ALL);
            inner.had[chunk as usize] |= had;
            inner.prefetched += 1;
            Ok(())
        })
    }

    /// A thread of the pager: `prepare` may open files, `body` runs confined.
    fn spawn<P>(
        &self,
        name: &str,
        prepare: impl FnOnce() -> P + Send + 'static,
        body: impl FnOnce(&Arc<Shared>, &Tracked, P) + Send + 'static,
    ) -> Result<(), Fault> {
        let shared = Arc::clone(&self.shared);
        let run = move || {
            let prepared = prepare();
            crate::confine::enter(crate::confine::Kind::Pager);
            if let Some(tracked) = shared.tracked.get() {
                body(&shared, tracked, prepared);
            }
        };
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(run)
            .map_err(|e| Fault::new("internal", format!("start thread {name}"), e.to_string(), "raise the limit of processes"))?;
        lock(&self.threads).push(thread);
        Ok(())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.shutdown();
    }
}

fn write_all(file: &OwnedFd, mut at: u64, mut data: &[u8]) -> Result<(), Fault> {
    while !data.is_empty() {
        let n = match rustix::io::pwrite(file, data, at) {
            Ok(n) => n,
            Err(Errno::INTR) => continue,
            Err(e) => return Err(io_fault("write guest memory", e)),
        };
        (at, data) = (at + n as u64, &data[n..]);
    }
    Ok(())
}

fn io_fault(what: &str, e: Errno) -> Fault {
    let code = if matches!(e, Errno::NOMEM | Errno::NOSPC) { "out-of-memory" } else { "internal" };
    Fault::new(code, format!("guest memory: {what}"), e.to_string(), "see vmm.log")
}

#[cfg(test)]
pub(crate) mod tests;
