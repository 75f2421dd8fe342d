//! The checkpoint pipeline: a short part in the pause, and a long part beside the running guest.
//!
//! pause → device state → dirty set → copy aside → freeze disk → run; then hash, ask what is known, compress, seal, pack, segments,
//! manifest, commit. The dirty set is consumed only when the commit is answered; any failure puts it back.

mod packer;
mod step;
mod store;

pub use step::{Probe, Step};

use crate::disk::{Disk, FrozenSet};
use crate::engine::Engine;
use crate::host_link::HostLink;
use crate::memory::map::{GuestView, Pool};
use crate::memory::{DirtyChunk, Memory};
use crate::source::{ChunkSource, lock};
use ks_proto::chunk::{DomainKey, is_zeros};
use ks_proto::control::{CheckpointStats, Fault};
use ks_proto::manifest::{Machine, Map};
use ks_proto::{CHUNK_BYTES, CheckpointId, ChunkId, ObjectKind, SessionId};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

/// Copy slots that stay backed between checkpoints: 16 MiB.
pub const POOL_RESERVE: usize = 256;
/// Copy slots prefaulted beyond the estimate: a sixteenth, at least 4 MiB and at most 32 MiB.
const MARGIN: (usize, usize) = (64, 512);

/// What a pipeline works on.
pub struct Parts {
    /// The session, for the manifest.
    pub session: SessionId,
    /// Key domain for new objects; its key is in `source`.
    pub write_domain: u32,
    /// Guest memory.
    pub memory: Arc<Memory>,
    /// Root disk.
    pub disk: Arc<Disk>,
    /// Keys, and the base chunks of pages that are not loaded.
    pub source: Arc<ChunkSource>,
    /// The node.
    pub link: Arc<dyn HostLink>,
    /// Memory map of the manifest that was restored; None after a boot.
    pub memory_map: Option<Map>,
    /// Disk map of the manifest that was restored or booted from.
    pub disk_map: Map,
}

/// One checkpoint wanted.
#[derive(Debug, Clone)]
pub struct Request {
    /// The checkpoint that it follows.
    pub parent: Option<CheckpointId>,
    /// Position in the gateway's journal.
    pub journal_position: u64,
    /// The longest wait for the engine's pause.
    pub pause_bound: Duration,
}

/// Takes checkpoints of one VM, one at a time.
pub struct Pipeline {
    parts: Parts,
    key: DomainKey,
    view: GuestView,
    state: Mutex<PipelineState>,
    probe: Mutex<Option<Probe>>,
}

struct PipelineState {
    busy: bool,
    // None while a capture owns it.
    pool: Option<Pool>,
    // Dirty chunks of the last capture: the estimate where only hashing finds them.
    last_dirty: usize,
    memory_segments: Vec<ChunkId>,
    disk_segments: Vec<ChunkId>,
}

/// A captured instant that is not stored yet. Dropping it unstored is the same as a failed store.
pub struct Captured {
    pipeline: Arc<Pipeline>,
    request: Request,
    begun: Instant,
    created_unix_ms: u64,
    pause_us: u64,
    machine: Machine,
    state: Vec<u8>,
    memory: Vec<Copied>,
    tracker: &'static str,
    used_bytes: u64,
    // Some until stored.
    frozen: Option<FrozenSet>,
    // Some until the end.
    pool: Option<Pool>,
    stored: bool,
}

/// A dirty chunk of memory and where its copy is.
#[derive(Debug, Clone, Copy)]
struct Copied {
    chunk: DirtyChunk,
    // None: every page is a hole.
    slot: Option<usize>,
}

impl Captured {
    /// vCPUs stopped, microseconds.
    pub fn pause_us(&self) -> u64 {
        self.pause_us
    }
    /// Dirty chunks of memory that it holds.
    pub fn memory_chunks(&self) -> usize {
        self.memory.len()
    }
}

impl Drop for Captured {
    fn drop(&mut self) {
        if !self.stored {
            self.pipeline.parts.memory.put_back(self.memory.iter().map(|c| c.chunk.index));
        }
        let mut state = lock(&self.pipeline.state);
        if let Some(mut pool) = self.pool.take() {
            pool.release(0, pool.slots(), POOL_RESERVE);
            state.pool = Some(pool);
        }
        state.busy = false;
    }
}

/// What the pause found.
struct Instantaneous {
    created_unix_ms: u64,
    state: Vec<u8>,
    machine: Machine,
    used_bytes: u64,
    frozen: FrozenSet,
}

impl Pipeline {
    /// A pipeline over `parts`.
    pub fn new(parts: Parts) -> Result<Self, Fault> {
        let key = parts.source.key(parts.write_domain).cloned().ok_or_else(|| {
            let why = format!("no key for domain {} was handed over", parts.write_domain);
            Fault::new("bad-request", "checkpoints", why, "send the write domain's key with Keys")
        })?;
        let chunks = (parts.memory.bytes() / CHUNK_BYTES as u64) as usize;
        let memory_segments = match &parts.memory_map {
            Some(map) => map.segments.clone(),
            None => vec![ChunkId::ZERO; Map::segments_for(parts.memory.bytes()) as usize],
        };
        let fits = memory_segments.len() as u64 == Map::segments_for(parts.memory.bytes())
            && parts.disk_map.segments.len() as u64 == Map::segments_for(parts.disk.bytes());
        if !fits {
            return Err(Fault::new("incompatible", "checkpoints", "the maps do not fit memory and disk", "see vmm.log"));
        }
        let pool = Pool::new(chunks)
            .map_err(|e| Fault::new("out-of-memory", "reserve the copy pool", e.to_string(), "raise the limit of addresses"))?;
        let view = GuestView::new(&parts.memory)
            .map_err(|e| Fault::new("out-of-memory", "map guest memory", e.to_string(), "raise the limit of addresses"))?;
        let disk_segments = parts.disk_map.segments.clone();
        let state = PipelineState { busy: false, pool: Some(pool), last_dirty: 0, memory_segments, disk_segments };
        Ok(Self { parts, key, view, state: Mutex::new(state), probe: Mutex::new(None) })
    }
    /// Calls `probe` as each step begins.
    pub fn set_probe(&self, probe: Option<Probe>) {
        *lock(&self.probe) = probe;
    }
    /// The part with the pause; on the engine's thread. On an error the VM runs on (or `engine.exited()` says that it
    /// died, or the lease has ended and it stays stopped) and nothing is lost. Refuses with `busy` while another
    /// capture is not stored.
    pub fn capture(self: &Arc<Self>, engine: &mut dyn Engine, request: &Request) -> Result<Captured, Fault> {
        let begun = Instant::now();
        let pool = {
            let mut state = lock(&self.state);
            match (state.busy, state.pool.take()) {
                (false, Some(pool)) => {
                    state.busy = true;
                    pool
                }
                (_, pool) => {
                    state.pool = pool;
                    return Err(Fault::new("busy", "checkpoint", "another one is being stored", "try again when it is done"));
                }
            }
        };
        // From here on dropping `captured` undoes everything.
        let mut captured = Captured {
            pipeline: Arc::clone(self),
            request: request.clone(),
            begun,
            created_unix_ms: 0,
            pause_us: 0,
            machine: engine.machine(),
            state: Vec::new(),
            memory: Vec::new(),
            tracker: "",
            used_bytes: 0,
            frozen: None,
            pool: Some(pool),
            stored: false,
        };
        self.step(Step::Prescan)?;
        self.prefault(&mut captured)?;
        self.step(Step::Pause)?;
        let stopped = Instant::now();
        engine.pause(request.pause_bound)?;
        let instant = self.in_pause(engine, &mut captured);
        let ran = engine.run();
        captured.pause_us = stopped.elapsed().as_micros() as u64;
        ran?;
        let instant = instant?;
        self.step(Step::Run)?;
        captured.created_unix_ms = instant.created_unix_ms;
        captured.state = instant.state;
        captured.machine = instant.machine;
        captured.used_bytes = instant.used_bytes;
        captured.frozen = Some(instant.frozen);
        lock(&self.state).last_dirty = captured.memory.len();
        Ok(captured)
    }
    /// The part beside the running guest; on any thread, for seconds. On an error the dirty set is put back.
    pub fn store(self: &Arc<Self>, captured: Captured) -> Result<CheckpointStats, Fault> {
        assert!(Arc::ptr_eq(self, &captured.pipeline), "a capture is stored by the pipeline that took it");
        let mut captured = captured;
        let result = self.store_captured(&mut captured);
        if let Err(fault) = &result {
            self.parts.link.abort(&fault.to_string());
        }
        result
    }

    /// Makes room for the dirty set while the guest still runs; again if it grew meanwhile.
    fn prefault(&self, captured: &mut Captured) -> Result<(), Fault> {
        let Some(pool) = captured.pool.as_mut() else { return Ok(()) };
        let hashing = !self.parts.memory.is_tracked();
        for _ in 0..3 {
            let found = if hashing { lock(&self.state).last_dirty } else { self.parts.memory.prescan() };
            let wanted = (found + (found / 16).clamp(MARGIN.0, MARGIN.1)).min(pool.slots());
            if wanted * CHUNK_BYTES <= pool.ready_bytes() {
                break;
            }
            pool.prefault(wanted).map_err(|e| {
                Fault::new("out-of-memory", "checkpoint: the copy pool", e.to_string(), "give the VM's process more memory")
            })?;
        }
        Ok(())
    }

    fn in_pause(&self, engine: &mut dyn Engine, captured: &mut Captured) -> Result<Instantaneous, Fault> {
        let created_unix_ms =
            SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(0));
        self.step(Step::SaveState)?;
        let state = engine.save_state()?;
        let machine = engine.machine();
        self.step(Step::Collect)?;
        let collected = self.parts.memory.collect()?;
        captured.tracker = collected.tracker;
        // Noted before anything can fail: from here on the chunks are put back on an error.
        captured.memory = collected.chunks.iter().map(|&chunk| Copied { chunk, slot: None }).collect();
        self.step(Step::Copy)?;
        self.copy_aside(captured);
        let used_bytes = self.parts.memory.used_bytes();
        self.step(Step::Freeze)?;
        let frozen = self.parts.disk.freeze()?;
        Ok(Instantaneous { created_unix_ms, state, machine, used_bytes, frozen })
    }

    fn copy_aside(&self, captured: &mut Captured) {
        let Captured { memory, pool: Some(pool), tracker, .. } = captured else { return };
        let with_data = memory.iter_mut().filter(|c| c.chunk.data != 0);
        if *tracker == "hash-scan" {
            let refs = self.parts.memory.stored_refs();
            let mut next = 0;
            for copied in with_data {
                let (index, slot) = (copied.chunk.index, pool.slot_mut(next));
                self.view.copy_pages(index, copied.chunk.data, slot);
                if !self.is_named(&refs[index as usize], slot) {
                    copied.slot = Some(next);
                    next += 1;
                }
            }
            // Without a copy: a chunk that is as it was, or one of holes.
            memory.retain(|c| c.slot.is_some() || c.chunk.data == 0);
            return;
        }
        let mut todo = Vec::new();
        for copied in with_data {
            copied.slot = Some(todo.len());
            todo.push(copied.chunk);
        }
        pool.fill(todo.len(), |slot, bytes| self.view.copy_pages(todo[slot].index, todo[slot].data, bytes));
    }

    /// True if `plain` is what `id` names, under the key that `id` was made with.
    fn is_named(&self, id: &ChunkId, plain: &[u8]) -> bool {
        if id.is_zero() {
            return is_zeros(plain);
        }
        let domain = self.parts.source.domain_of(id).unwrap_or(self.parts.write_domain);
        self.parts.source.key(domain).is_some_and(|key| key.name(ObjectKind::Data, plain) == *id)
    }

    fn step(&self, step: Step) -> Result<(), Fault> {
        lock(&self.probe).as_ref().map_or(Ok(()), |probe| probe(step))
    }
}

#[cfg(test)]
mod tests;
