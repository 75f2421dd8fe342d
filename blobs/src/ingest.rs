//! Taking in a raw disk image: sparse, deduplicated, sealed by two threads while a third reads.
//!
//! ```text
//!   reader (SEEK_DATA) ──batches──> 2 sealers (name, known?, compress, seal) ──> writer (this thread): packs, map
//! ```

use crate::error::{At, StoreError};
use crate::host::{self, Disk};
use crate::keys::KeyRing;
use crate::store::Store;
use crate::upload::{PackWriter, Upload, UploadScope};
use ks_proto::chunk::{CHUNK_BYTES, Codec, DomainKey, ObjectKind, is_zeros};
use ks_proto::ids::{CheckpointId, ChunkId, SessionId};
use ks_proto::manifest::{DISK_BYTES_MAX, Manifest, Map, SEGMENT_CHUNKS, encode_segment};
use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

/// Chunks in one batch: 2 MiB.
const BATCH: usize = 32;
/// Batches waiting on each side of the sealers.
const QUEUE: usize = 4;
const SEALERS: usize = 2;

/// What an image became.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ingested {
    /// Name of the image's manifest (session zeros, no machine, no memory, created 0: the same disk under the same key
    /// gives the same name).
    pub id: CheckpointId,
    /// The manifest itself; its `disk` map is the image.
    pub manifest: Manifest,
    /// Chunks stored now, chunks that were here already or twice in the image, chunks of zeros.
    pub chunks_new: u64,
    /// See `chunks_new`.
    pub chunks_known: u64,
    /// See `chunks_new`.
    pub chunks_zero: u64,
    /// Sealed bytes written.
    pub stored_bytes: u64,
}

/// One chunk as read: its place in the image, and its bytes.
type Plain = (usize, Vec<u8>);
/// Chunks on their way to the sealers, numbered in the image's order.
type Batch = (usize, Vec<Plain>);
/// The same batch on its way to the packs.
type SealedBatch = (usize, Result<Vec<Sealed>, StoreError>);

/// One chunk after the sealers: its place in the image, its name, and the sealed bytes unless it is here already.
struct Sealed {
    at: usize,
    id: ChunkId,
    body: Option<(Codec, Vec<u8>)>,
}

impl Store {
    /// Stores a raw disk image and commits a manifest for it. Holes are skipped unread; a length that is not whole chunks
    /// is padded with zeros. `progress` is told (bytes done, bytes in all) about every 2 MiB.
    ///
    /// # Errors
    /// If the image is empty or too large, cannot be read, or the store's disk refuses; then nothing of it is kept.
    pub fn ingest_disk(
        self: &Arc<Self>,
        image: &File,
        key: &DomainKey,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Ingested, StoreError> {
        let shown = Path::new("the disk image");
        let len = self.disk.len(image).at("stat", shown)?;
        if len == 0 || len > DISK_BYTES_MAX {
            let why = format!("{len} bytes; it must have between 1 and {DISK_BYTES_MAX}");
            return Err(StoreError::Refused { what: "disk image", why });
        }
        let keys = KeyRing::new([key.clone()]);
        let upload = self.begin_upload(UploadScope { keys, write_domain: key.domain(), bases: Vec::new() });
        let chunks = usize::try_from(len.div_ceil(CHUNK_BYTES as u64)).expect("bounded by the largest disk");
        let mut out = Ingested {
            id: CheckpointId([0; 32]),
            manifest: image_manifest(chunks),
            chunks_new: 0,
            chunks_known: 0,
            chunks_zero: chunks as u64,
            stored_bytes: 0,
        };
        let mut refs: BTreeMap<usize, Vec<ChunkId>> = BTreeMap::new();
        let mut writer = upload.writer();
        self.pipeline(image, len, key, &upload, &mut |sealed| {
            let done = sealed.last().map_or(0, |s| s.at as u64 + 1) * CHUNK_BYTES as u64;
            store_batch(sealed, &mut writer, &mut refs, &mut out)?;
            progress(done.min(len), len);
            Ok(())
        })?;
        for (segment, ids) in &refs {
            let plain = encode_segment(ids);
            let id = key.name(ObjectKind::Segment, &plain);
            out.manifest.disk.segments[*segment] = id;
            if !upload.known(&[id])[0] {
                let nonce = host::random().at("draw a nonce for", shown)?;
                let (codec, stored) = key.seal(ObjectKind::Segment, &id, &plain, nonce);
                out.stored_bytes += stored.len() as u64;
                writer.put(ObjectKind::Segment, codec, id, u32::try_from(plain.len()).expect("16 KiB"), &stored)?;
            }
        }
        writer.finish()?;
        out.id = upload.commit(&out.manifest.encode())?;
        progress(len, len);
        Ok(out)
    }

    fn pipeline(
        &self,
        image: &File,
        len: u64,
        key: &DomainKey,
        upload: &Upload,
        sink: &mut dyn FnMut(Vec<Sealed>) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let (to_seal, batches) = sync_channel::<Batch>(QUEUE);
        let (to_write, sealed) = sync_channel::<SealedBatch>(QUEUE);
        // Owned by the sealers alone: when they end early the reader's next send fails, and it ends too.
        let batches = Arc::new(Mutex::new(batches));
        let seen = Mutex::new(HashSet::new());
        std::thread::scope(|scope| {
            let failed = to_write.clone();
            let disk = &*self.disk;
            scope.spawn(move || {
                if let Err(e) = read_batches(disk, image, len, &to_seal) {
                    let _ = failed.send((usize::MAX, Err(e)));
                }
            });
            for _ in 0..SEALERS {
                let (batches, seen, to_write) = (batches.clone(), &seen, to_write.clone());
                scope.spawn(move || seal_batches(&batches, seen, &to_write, key, upload));
            }
            drop((to_write, batches));
            // Batches come in any order and are written in the image's: neighbours stay neighbours in the packs. Ending
            // early drops the receiver, which ends the sealers, which ends the reader.
            write_in_order(sealed, sink)
        })
    }
}

fn write_in_order(
    sealed: Receiver<SealedBatch>,
    sink: &mut dyn FnMut(Vec<Sealed>) -> Result<(), StoreError>,
) -> Result<(), StoreError> {
    let (mut waiting, mut next) = (BTreeMap::new(), 0);
    for (no, batch) in sealed {
        waiting.insert(no, batch?);
        while let Some(batch) = waiting.remove(&next) {
            sink(batch)?;
            next += 1;
        }
    }
    Ok(())
}

fn image_manifest(chunks: usize) -> Manifest {
    let bytes = (chunks * CHUNK_BYTES) as u64;
    Manifest {
        session: SessionId([0; 16]),
        parent: None,
        created_unix_ms: 0,
        journal_position: 0,
        machine: None,
        state: vec![],
        state_bytes: 0,
        memory: Map::default(),
        disk: Map { bytes, segments: vec![ChunkId::ZERO; chunks.div_ceil(SEGMENT_CHUNKS)] },
    }
}

fn read_batches(disk: &dyn Disk, image: &File, len: u64, out: &SyncSender<Batch>) -> Result<(), StoreError> {
    let shown = Path::new("the disk image");
    let size = CHUNK_BYTES as u64;
    let (mut at, mut no, mut batch) = (0u64, 0usize, Vec::with_capacity(BATCH));
    while let Some((start, end)) = host::next_data(image, at, len).at("find data in", shown)? {
        at = at.max(start / size * size);
        while at < end {
            let mut chunk = vec![0u8; CHUNK_BYTES];
            let n = usize::try_from((len - at).min(size)).expect("at most a chunk");
            disk.read_at(image, &mut chunk[..n], at).at("read", shown)?;
            batch.push((usize::try_from(at / size).expect("bounded by the largest disk"), chunk));
            at += size;
            if batch.len() == BATCH {
                if out.send((no, std::mem::take(&mut batch))).is_err() {
                    return Ok(()); // the writer gave up and says why
                }
                no += 1;
            }
        }
    }
    if !batch.is_empty() {
        let _ = out.send((no, batch));
    }
    Ok(())
}

fn seal_batches(
    batches: &Mutex<Receiver<Batch>>,
    seen: &Mutex<HashSet<ChunkId>>,
    out: &SyncSender<SealedBatch>,
    key: &DomainKey,
    upload: &Upload,
) {
    loop {
        let next = batches.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok((no, batch)) = next else { return };
        let ids: Vec<ChunkId> = batch
            .iter()
            .map(|(_, plain)| if is_zeros(plain) { ChunkId::ZERO } else { key.name(ObjectKind::Data, plain) })
            .collect();
        let known = upload.known(&ids);
        let sealed = batch
            .into_iter()
            .zip(ids)
            .zip(known)
            .map(|(((at, plain), id), known)| {
                if known || !seen.lock().unwrap_or_else(PoisonError::into_inner).insert(id) {
                    return Ok(Sealed { at, id, body: None });
                }
                let nonce = host::random().at("draw a nonce for", Path::new("the disk image"))?;
                Ok(Sealed { at, id, body: Some(key.seal(ObjectKind::Data, &id, &plain, nonce)) })
            })
            .collect();
        if out.send((no, sealed)).is_err() {
            return;
        }
    }
}

fn store_batch(
    batch: Vec<Sealed>,
    writer: &mut PackWriter<'_>,
    refs: &mut BTreeMap<usize, Vec<ChunkId>>,
    out: &mut Ingested,
) -> Result<(), StoreError> {
    for s in batch {
        if s.id.is_zero() {
            continue;
        }
        out.chunks_zero -= 1;
        let segment = refs.entry(s.at / SEGMENT_CHUNKS).or_insert_with(|| vec![ChunkId::ZERO; SEGMENT_CHUNKS]);
        segment[s.at % SEGMENT_CHUNKS] = s.id;
        match s.body {
            None => out.chunks_known += 1,
            Some((codec, stored)) => {
                out.chunks_new += 1;
                out.stored_bytes += stored.len() as u64;
                writer.put(ObjectKind::Data, codec, s.id, u32::try_from(CHUNK_BYTES).expect("64 KiB"), &stored)?;
            }
        }
    }
    Ok(())
}
