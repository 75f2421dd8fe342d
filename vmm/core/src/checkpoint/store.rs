//! The background part: names, deduplicates, seals and commits what a pause captured.

use super::packer::{Packer, Sealed};
use super::{Captured, Copied, POOL_RESERVE, Pipeline, Step};
use crate::disk::FrozenSet;
use crate::memory::map::Pool;
use crate::memory::uffd::PAGE_BYTES;
use crate::source::{BULK_THREADS, in_bulk, lock};
use ks_proto::chunk::{OBJECT_BYTES_MAX, is_zeros};
use ks_proto::control::{CheckpointStats, Fault, KNOWN_BATCH_MAX};
use ks_proto::manifest::{Manifest, Map, SEGMENT_CHUNKS, encode_segment};
use ks_proto::{CHUNK_BYTES, ChunkId, ObjectKind};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;

/// The n-th dirty chunk: its number and its bytes.
type ChunkAt<'p> = dyn Fn(usize) -> Result<(u32, Cow<'p, [u8]>), Fault> + Sync + 'p;

/// Chunks that are named, asked for and sealed together: 16 MiB.
const BATCH: usize = 256;
const _: () = assert!(BATCH <= KNOWN_BATCH_MAX);
const _: () = assert!(BULK_THREADS <= 2, "the guest's vCPUs need the rest");

/// What becomes of a dirty chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Zero,
    Unchanged(ChunkId),
    Named(ChunkId),
}

/// New references by chunk, of one address space.
type Changes = BTreeMap<u32, ChunkId>;

/// An object that may have to be written.
struct Object<'a> {
    kind: ObjectKind,
    id: ChunkId,
    plain: Cow<'a, [u8]>,
}

struct Storing<'a> {
    pipeline: &'a Pipeline,
    packer: Packer<'a>,
    // Written in this checkpoint, or known to the node.
    have: BTreeSet<ChunkId>,
    stats: CheckpointStats,
}

impl Pipeline {
    pub(super) fn store_captured(&self, captured: &mut Captured) -> Result<CheckpointStats, Fault> {
        let Some(frozen) = captured.frozen.take() else {
            return Err(Fault::new("internal", "checkpoint", "it was stored already", "see vmm.log"));
        };
        let step = |s| self.step(s);
        let mut storing = Storing {
            pipeline: self,
            packer: Packer::new(&*self.parts.link, self.key.domain(), &step),
            have: BTreeSet::new(),
            stats: CheckpointStats {
                pause_us: captured.pause_us,
                dirty_memory_bytes: (captured.memory.len() * CHUNK_BYTES) as u64,
                memory_used_bytes: captured.used_bytes,
                tracker: captured.tracker.to_owned(),
                ..CheckpointStats::default()
            },
        };
        let memory_refs = self.parts.memory.stored_refs();
        let disk_refs = self.parts.disk.stored_refs();
        let memory = storing.memory_chunks(captured, &memory_refs)?;
        let disk = storing.disk_chunks(&frozen, &disk_refs)?;
        self.step(Step::Segments)?;
        let (memory_segments, disk_segments) = {
            let state = lock(&self.state);
            (state.memory_segments.clone(), state.disk_segments.clone())
        };
        let memory_segments = storing.segments(&memory_refs, &memory, memory_segments)?;
        let disk_segments = storing.segments(&disk_refs, &disk, disk_segments)?;
        self.step(Step::State)?;
        let state = storing.state(&captured.state)?;
        storing.packer.finish()?;
        let manifest = Manifest {
            session: self.parts.session,
            parent: captured.request.parent,
            created_unix_ms: captured.created_unix_ms,
            journal_position: captured.request.journal_position,
            machine: Some(captured.machine.clone()),
            state,
            state_bytes: captured.state.len() as u64,
            memory: Map { bytes: self.parts.memory.bytes(), segments: memory_segments },
            disk: Map { bytes: self.parts.disk.bytes(), segments: disk_segments },
        };
        let mut stats = storing.stats;
        stats.stored_bytes = storing.packer.stored_bytes;
        self.commit(captured, &manifest, &mut stats)?;
        // Stored. Nothing below fails.
        captured.stored = true;
        self.parts.memory.stored(&memory);
        self.parts.disk.stored(frozen, &disk);
        let mut state = lock(&self.state);
        state.memory_segments = manifest.memory.segments;
        state.disk_segments = manifest.disk.segments;
        Ok(stats)
    }

    fn commit(&self, captured: &Captured, manifest: &Manifest, stats: &mut CheckpointStats) -> Result<(), Fault> {
        self.step(Step::Commit)?;
        let bytes = manifest.encode();
        let id = Manifest::id_of(&bytes);
        stats.id = id.to_hex();
        stats.total_us = captured.begun.elapsed().as_micros() as u64;
        let named = self.parts.link.commit(&bytes, stats)?;
        if named != id {
            let why = format!("the node names it {named}, its bytes are {id}");
            return Err(Fault::new("internal", "checkpoint", why, "see the node's log"));
        }
        stats.total_us = captured.begun.elapsed().as_micros() as u64;
        Ok(())
    }

    fn fate(&self, base: &ChunkId, plain: &[u8]) -> Fate {
        if is_zeros(plain) {
            return Fate::Zero;
        }
        if !base.is_zero()
            && self.parts.source.domain_of(base).is_some_and(|d| d != self.key.domain())
            && self.is_named(base, plain)
        {
            return Fate::Unchanged(*base);
        }
        let id = self.key.name(ObjectKind::Data, plain);
        if id == *base { Fate::Unchanged(id) } else { Fate::Named(id) }
    }

    /// The whole bytes of a captured chunk: pages that had not been loaded come from where they were restored from.
    fn memory_plain<'p>(&self, pool: &'p Pool, copied: &Copied) -> Result<Cow<'p, [u8]>, Fault> {
        static ZEROS: [u8; CHUNK_BYTES] = [0; CHUNK_BYTES];
        let copy = copied.slot.map_or(&ZEROS[..], |slot| pool.slot(slot));
        let settled = copied.chunk.settled;
        if settled == u16::MAX {
            return Ok(Cow::Borrowed(copy));
        }
        let Some((source, id)) = self.parts.memory.restored_from(copied.chunk.index) else {
            let why = format!("chunk {} has unloaded pages, but memory was not restored", copied.chunk.index);
            return Err(Fault::new("internal", "checkpoint", why, "see vmm.log"));
        };
        let mut plain = source.read(&id)?;
        let page = PAGE_BYTES as usize;
        for n in (0..CHUNK_BYTES / page).filter(|n| settled >> n & 1 == 1) {
            plain[n * page..(n + 1) * page].copy_from_slice(&copy[n * page..(n + 1) * page]);
        }
        Ok(Cow::Owned(plain))
    }
}

impl Storing<'_> {
    fn memory_chunks(&mut self, captured: &mut Captured, refs: &[ChunkId]) -> Result<Changes, Fault> {
        let mut changes = Changes::new();
        let Captured { memory, pool, .. } = captured;
        let Some(pool) = pool.as_mut() else { return Ok(changes) };
        let mut freed = 0;
        for batch in memory.chunks(BATCH) {
            let pipeline = self.pipeline;
            let of = |i: usize| pipeline.memory_plain(pool, &batch[i]).map(|plain| (batch[i].chunk.index, plain));
            self.batch(batch.len(), refs, &of, &mut changes)?;
            let to = batch.iter().filter_map(|c| c.slot).max().map_or(freed, |s| s + 1);
            pool.release(freed, to, POOL_RESERVE);
            freed = to;
        }
        Ok(changes)
    }

    fn disk_chunks(&mut self, frozen: &FrozenSet, refs: &[ChunkId]) -> Result<Changes, Fault> {
        let mut changes = Changes::new();
        let chunks = frozen.chunks();
        self.stats.dirty_disk_bytes = (chunks.len() * CHUNK_BYTES) as u64;
        for batch in chunks.chunks(BATCH) {
            let disk = &self.pipeline.parts.disk;
            let of = |i: usize| {
                let mut plain = vec![0; CHUNK_BYTES];
                disk.read_frozen(frozen, batch[i], &mut plain)?;
                Ok((batch[i], Cow::Owned(plain)))
            };
            self.batch(batch.len(), refs, &of, &mut changes)?;
        }
        Ok(changes)
    }

    /// Names `count` chunks, and stores those that nobody has.
    fn batch<'p>(&mut self, count: usize, refs: &[ChunkId], of: &ChunkAt<'p>, changes: &mut Changes) -> Result<(), Fault> {
        self.pipeline.step(Step::Hash)?;
        let pipeline = self.pipeline;
        let named = map_bulk(count, |i| {
            let (index, plain) = of(i)?;
            let fate = pipeline.fate(&refs[index as usize], &plain);
            // The bytes are kept only if they may have to be written.
            let plain = if matches!(fate, Fate::Named(_)) { plain } else { Cow::Borrowed(&[][..]) };
            Ok((index, fate, plain))
        })?;
        let mut objects = Vec::new();
        for (index, fate, plain) in named {
            let id = match fate {
                Fate::Zero => {
                    self.stats.chunks_zero += 1;
                    ChunkId::ZERO
                }
                Fate::Unchanged(id) => {
                    self.stats.chunks_known += 1;
                    id
                }
                Fate::Named(id) => {
                    objects.push(Object { kind: ObjectKind::Data, id, plain });
                    id
                }
            };
            if id != refs[index as usize] {
                changes.insert(index, id);
            }
        }
        let (offered, written) = (objects.len() as u64, self.write_unknown(objects)?);
        self.stats.chunks_new += written;
        self.stats.chunks_known += offered - written;
        Ok(())
    }

    fn segments(&mut self, refs: &[ChunkId], changes: &Changes, mut segments: Vec<ChunkId>) -> Result<Vec<ChunkId>, Fault> {
        let touched: BTreeSet<usize> = changes.keys().map(|c| *c as usize / SEGMENT_CHUNKS).collect();
        let mut objects = Vec::new();
        for segment in touched {
            let first = segment * SEGMENT_CHUNKS;
            let end = refs.len().min(first + SEGMENT_CHUNKS);
            let mut part = refs[first..end].to_vec();
            for (&chunk, &id) in changes.range(first as u32..end as u32) {
                part[chunk as usize - first] = id;
            }
            if part.iter().all(ChunkId::is_zero) {
                segments[segment] = ChunkId::ZERO;
                continue;
            }
            let plain = encode_segment(&part);
            let id = self.pipeline.key.name(ObjectKind::Segment, &plain);
            if id != segments[segment] {
                segments[segment] = id;
                objects.push(Object { kind: ObjectKind::Segment, id, plain: Cow::Owned(plain) });
            }
        }
        self.write_unknown(objects)?;
        Ok(segments)
    }

    fn state(&mut self, state: &[u8]) -> Result<Vec<ChunkId>, Fault> {
        let key = &self.pipeline.key;
        let objects: Vec<Object<'_>> = state
            .chunks(OBJECT_BYTES_MAX)
            .map(|part| Object { kind: ObjectKind::State, id: key.name(ObjectKind::State, part), plain: Cow::Borrowed(part) })
            .collect();
        let ids = objects.iter().map(|o| o.id).collect();
        self.write_unknown(objects)?;
        Ok(ids)
    }

    /// Writes those of `objects` that the node does not have; returns how many.
    fn write_unknown(&mut self, objects: Vec<Object<'_>>) -> Result<u64, Fault> {
        let mut asked = BTreeSet::new();
        let objects: Vec<_> = objects.into_iter().filter(|o| !self.have.contains(&o.id) && asked.insert(o.id)).collect();
        let mut unknown = Vec::new();
        for part in objects.chunks(KNOWN_BATCH_MAX) {
            let ids: Vec<ChunkId> = part.iter().map(|o| o.id).collect();
            self.pipeline.step(Step::Known)?;
            let known = self.pipeline.parts.link.known(&ids)?;
            if known.len() != ids.len() {
                let why = format!("asked about {} objects, answered for {}", ids.len(), known.len());
                return Err(Fault::new("internal", "checkpoint: known objects", why, "see the node's log"));
            }
            unknown.extend(part.iter().zip(known).filter(|(_, k)| !k).map(|(o, _)| o));
        }
        for part in unknown.chunks(BATCH) {
            self.pipeline.step(Step::Seal)?;
            let key = &self.pipeline.key;
            let sealed = map_bulk(part.len(), |i| {
                let o = part[i];
                let mut nonce = [0; 24];
                getrandom::fill(&mut nonce)
                    .map_err(|e| Fault::new("internal", "random bytes", e.to_string(), "see the system's log"))?;
                let (codec, stored) = key.seal(o.kind, &o.id, &o.plain, nonce);
                Ok(Sealed { kind: o.kind, id: o.id, plain_len: o.plain.len() as u32, codec, stored })
            })?;
            for object in &sealed {
                self.packer.add(object)?;
            }
        }
        self.have.append(&mut asked);
        Ok(unknown.len() as u64)
    }
}

/// `work(0..count)` on the bulk threads, results in order.
fn map_bulk<T: Send + Sync>(count: usize, work: impl Fn(usize) -> Result<T, Fault> + Sync) -> Result<Vec<T>, Fault> {
    let out: Vec<OnceLock<T>> = (0..count).map(|_| OnceLock::new()).collect();
    in_bulk(count, |i| {
        let value = work(i)?;
        assert!(out[i].set(value).is_ok(), "each index is worked on once");
        Ok(())
    })?;
    Ok(out.into_iter().filter_map(OnceLock::into_inner).collect())
}
