//! Verified reading of objects from the packs that the node handed over, with the node as the second source.
//!
//! Bytes leave this module only after they hashed to the name that was asked for. A failed read is an error that
//! names the object and its pack; it is never zeros.

mod cache;

use crate::host_link::{Fetched, HostLink};
use cache::Lru;
use ks_proto::chunk::{CHUNK_BYTES, DomainKey, ObjectKind};
use ks_proto::control::Fault;
use ks_proto::manifest::{Map, decode_segment};
use ks_proto::pack::PackEntry;
use ks_proto::plan::Plan;
use ks_proto::{ChunkId, DecodeError};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Decoded bytes kept by default.
pub const CACHE_BYTES: usize = 64 * 1024 * 1024;
/// Threads that verify or load in bulk.
pub const BULK_THREADS: usize = 2;

/// Reads objects by name. Shared by the pager, the disk and the checkpoint; every method works from any thread.
pub struct ChunkSource {
    keys: BTreeMap<u32, DomainKey>,
    plan: Plan,
    packs: Vec<File>,
    link: Arc<dyn HostLink>,
    cache: Mutex<Lru>,
    // Good copies that the node gave later; they go before the plan.
    fetched: Mutex<HashMap<ChunkId, Arc<Fetched>>>,
}

impl std::fmt::Debug for ChunkSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ChunkSource({} objects in {} packs)", self.plan.rows().len(), self.packs.len())
    }
}

impl ChunkSource {
    /// A source over `packs` (in plan order). `keys` are those of every domain that the plan names.
    pub fn new(keys: Vec<DomainKey>, plan: Plan, packs: Vec<File>, link: Arc<dyn HostLink>) -> Self {
        Self {
            keys: keys.into_iter().map(|k| (k.domain(), k)).collect(),
            plan,
            packs,
            link,
            cache: Mutex::new(Lru::new(CACHE_BYTES)),
            fetched: Mutex::new(HashMap::new()),
        }
    }
    /// The same with another bound on the decoded bytes kept (0 keeps none).
    pub fn with_cache(self, bytes: usize) -> Self {
        Self { cache: Mutex::new(Lru::new(bytes)), ..self }
    }
    /// A chunk of memory or disk: exactly 64 KiB. [`ChunkId::ZERO`] gives zeros. Blocks on the node when the local
    /// copy is missing or corrupt.
    pub fn read(&self, id: &ChunkId) -> Result<Vec<u8>, Fault> {
        if id.is_zero() {
            return Ok(vec![0; CHUNK_BYTES]);
        }
        let plain = self.read_object(id, ObjectKind::Data)?;
        if plain.len() == CHUNK_BYTES {
            Ok(plain)
        } else {
            Err(corrupt(id, format!("it verifies but holds {} bytes, a chunk has {CHUNK_BYTES}", plain.len())))
        }
    }
    /// A chunk from what is on this node, without asking anybody; None if that cannot give it.
    pub fn read_here(&self, id: &ChunkId) -> Option<Vec<u8>> {
        if id.is_zero() {
            return Some(vec![0; CHUNK_BYTES]);
        }
        self.open_here(id, ObjectKind::Data).ok().filter(|plain| plain.len() == CHUNK_BYTES)
    }
    /// An object of any kind, past the cache.
    pub fn read_object(&self, id: &ChunkId, kind: ObjectKind) -> Result<Vec<u8>, Fault> {
        let broken = match self.open_here(id, kind) {
            Ok(plain) => return Ok(plain),
            Err(why) => why,
        };
        tracing::warn!(chunk = %id, why = broken, "object cannot be read here; asking the node");
        let fetched = self.link.fetch(id, Some(&broken)).map_err(|f| not_served(id, &broken, f))?;
        match self.open(&fetched.pack, &fetched.entry, fetched.domain, id, kind) {
            Ok(plain) => {
                lock(&self.fetched).insert(*id, Arc::new(fetched));
                Ok(plain)
            }
            Err(why) => Err(corrupt(id, format!("{broken}; and the copy that the node fetched: {why}"))),
        }
    }
    /// A chunk through the cache.
    pub fn read_cached(&self, id: &ChunkId) -> Result<Arc<Vec<u8>>, Fault> {
        if let Some(hit) = lock(&self.cache).get(id) {
            return Ok(hit);
        }
        let plain = Arc::new(self.read(id)?);
        lock(&self.cache).put(*id, Arc::clone(&plain));
        Ok(plain)
    }
    /// All chunk references of `map`, one per 64 KiB, by reading its segments.
    pub fn load_map(&self, map: &Map) -> Result<Vec<ChunkId>, Fault> {
        let chunks = map.chunks();
        let mut refs = Vec::with_capacity(chunks);
        for segment in &map.segments {
            let left = chunks - refs.len();
            let part = if segment.is_zero() {
                vec![ChunkId::ZERO; ks_proto::manifest::SEGMENT_CHUNKS]
            } else {
                let plain = self.read_object(segment, ObjectKind::Segment)?;
                decode_segment(&plain).map_err(|e| corrupt(segment, e.to_string()))?
            };
            refs.extend(part.into_iter().take(left));
        }
        if refs.len() == chunks {
            return Ok(refs);
        }
        let why = format!("{} segments name {} chunks, {chunks} are needed", map.segments.len(), refs.len());
        Err(Fault::new("corrupt", "address map", why, "restore another checkpoint"))
    }
    /// The device state: `ids` concatenated; they must hold exactly `bytes`.
    pub fn load_state(&self, ids: &[ChunkId], bytes: u64) -> Result<Vec<u8>, Fault> {
        let mut out = Vec::new();
        for id in ids {
            out.extend(self.read_object(id, ObjectKind::State)?);
        }
        if out.len() as u64 == bytes {
            return Ok(out);
        }
        let why = format!("its objects hold {} bytes, the manifest says {bytes}", out.len());
        Err(Fault::new("corrupt", "device state", why, "restore another checkpoint"))
    }
    /// Reads and verifies every one of `ids` (repeats once), on two threads. For `verify_eager`.
    pub fn verify(&self, ids: &[ChunkId]) -> Result<(), Fault> {
        let unique: Vec<ChunkId> = ids.iter().filter(|i| !i.is_zero()).collect::<BTreeSet<_>>().into_iter().copied().collect();
        in_bulk(unique.len(), |i| self.read(&unique[i]).map(drop))
    }
    /// The key domain that `id` was stored under, if the plan (or a fetch) has it.
    pub fn domain_of(&self, id: &ChunkId) -> Option<u32> {
        self.plan.find(id).map(|r| r.domain).or_else(|| lock(&self.fetched).get(id).map(|f| f.domain))
    }
    /// The key of a domain.
    pub fn key(&self, domain: u32) -> Option<&DomainKey> {
        self.keys.get(&domain)
    }

    fn open_here(&self, id: &ChunkId, kind: ObjectKind) -> Result<Vec<u8>, String> {
        let later = lock(&self.fetched).get(id).cloned();
        match later {
            Some(f) => self.open(&f.pack, &f.entry, f.domain, id, kind).map_err(|why| format!("copy fetched earlier: {why}")),
            None => self.read_planned(id, kind),
        }
    }

    fn read_planned(&self, id: &ChunkId, kind: ObjectKind) -> Result<Vec<u8>, String> {
        let Some(row) = self.plan.find(id) else { return Err("the restore plan does not name it".to_owned()) };
        let Some(pack) = self.packs.get(row.pack as usize) else {
            return Err(format!("its pack is number {} and {} were handed over", row.pack, self.packs.len()));
        };
        self.open(pack, &row.entry, row.domain, id, kind)
            .map_err(|why| format!("pack number {} of this node, offset {}: {why}", row.pack, row.entry.offset))
    }

    fn open(&self, pack: &File, entry: &PackEntry, domain: u32, id: &ChunkId, kind: ObjectKind) -> Result<Vec<u8>, String> {
        if entry.id != *id || entry.kind != kind {
            return Err(format!("the place holds {:?} {}, wanted {kind:?}", entry.kind, entry.id.short()));
        }
        let Some(key) = self.keys.get(&domain) else { return Err(format!("no key for domain {domain} was handed over")) };
        let max = ks_proto::chunk::OBJECT_BYTES_MAX + ks_proto::chunk::SEAL_OVERHEAD;
        if entry.stored_len as usize > max {
            return Err(format!("{} stored bytes, the most is {max}", entry.stored_len));
        }
        let mut stored = vec![0; entry.stored_len as usize];
        pack.read_exact_at(&mut stored, u64::from(entry.offset)).map_err(|e| e.to_string())?;
        entry.open(key, &stored).map_err(|e: DecodeError| e.to_string())
    }
}

/// Runs `work(0..count)` on [`BULK_THREADS`] threads; stops at the first error and returns it.
pub(crate) fn in_bulk(count: usize, work: impl Fn(usize) -> Result<(), Fault> + Sync) -> Result<(), Fault> {
    use std::sync::atomic::{AtomicUsize, Ordering};
    let next = AtomicUsize::new(0);
    let failed: Mutex<Option<Fault>> = Mutex::new(None);
    let run = || loop {
        let i = next.fetch_add(1, Ordering::Relaxed);
        if i >= count {
            return;
        }
        if let Err(fault) = work(i) {
            next.store(count, Ordering::Relaxed);
            lock(&failed).get_or_insert(fault);
            return;
        }
    };
    std::thread::scope(|s| {
        for _ in 1..BULK_THREADS.min(count) {
            s.spawn(run);
        }
        run();
    });
    failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

/// Locks; a thread that panicked elsewhere does not make the data unusable (each critical section leaves it whole).
pub(crate) fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

/// True for a refusal that a later try may not meet: the node is away or slow.
pub fn is_transient(fault: &Fault) -> bool {
    matches!(fault.code.as_str(), "timeout" | "node-gone" | "busy")
}

fn corrupt(id: &ChunkId, why: String) -> Fault {
    Fault::new("corrupt", format!("object {id}"), why, "repair it from another holder, or restore another checkpoint")
}

fn not_served(id: &ChunkId, broken: &str, node: Fault) -> Fault {
    let code = if is_transient(&node) { node.code.as_str() } else { "corrupt" };
    let why = format!("{broken}; the node could not give another copy: {}: {}", node.what, node.why);
    Fault::new(code, format!("object {id}"), why, node.next)
}

#[cfg(test)]
mod tests;
