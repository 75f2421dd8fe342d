//! The `replicate` measurement: packs from one store to one peer, verified, fsynced and committed, against plain QUIC with
//! whole-file BLAKE3 and fsync in the same process, interleaved.
//!
//! Both sides carry the same pack files over the same kind of connection (same certificates, cipher and windows), as many at a
//! time, to the same file system. The plain side sends a file raw, hashes it as it arrives, compares, fsyncs, and syncs the
//! folder at the end. Ours also proves each 16 KiB before it is written, opens each object, indexes it, checks the closure
//! and pins it.

use crate::host::endpoint::transport;
use crate::host::tls::Identity;
use crate::{Bulk, BulkConfig, BulkLimits, FetchError, Fetcher, Holder, Keypair, NoImages, PACKS_AT_ONCE, PinKey, StartError};
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use ks_blobs::{KeyRing, Store, StoreError, UploadScope};
use ks_proto::chunk::{CHUNK_BYTES, DomainKey, ObjectKind};
use ks_proto::ids::{CheckpointId, ChunkId, RunToken, SessionId};
use ks_proto::manifest::{EngineKind, Machine, Manifest, Map, SEGMENT_CHUNKS, encode_segment};
use ks_proto::pack::{PACK_BYTES_MAX, PackBuilder};
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Domain of the benchmark's objects.
const DOMAIN: u32 = 1;

/// What one round took.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Round {
    /// Bytes of packs that went over.
    pub bytes: u64,
    /// Seconds until the checkpoint was durable, verified and pinned at the peer.
    pub ours_s: f64,
    /// Seconds until the same files were hashed and durable at the end of a plain stream.
    pub plain_s: f64,
}

impl Round {
    /// Our rate in MiB/s.
    pub fn ours_mib_s(&self) -> f64 {
        mib(self.bytes) / self.ours_s
    }
    /// The plain rate in MiB/s.
    pub fn plain_mib_s(&self) -> f64 {
        mib(self.bytes) / self.plain_s
    }
    /// Our rate in percent of the plain one.
    pub fn percent(&self) -> f64 {
        100.0 * self.plain_s / self.ours_s
    }
    /// As a line of JSON: `bytes`, `ours_mib_s`, `plain_mib_s`, `percent`.
    pub fn line(&self) -> String {
        format!(
            "{{\"bytes\":{},\"ours_mib_s\":{:.1},\"plain_mib_s\":{:.1},\"percent\":{:.1}}}",
            self.bytes,
            self.ours_mib_s(),
            self.plain_mib_s(),
            self.percent()
        )
    }
}

/// The medians of the rounds, in words.
pub fn medians(rounds: &[Round]) -> String {
    let median = |of: fn(&Round) -> f64| {
        let mut v: Vec<f64> = rounds.iter().map(of).collect();
        v.sort_by(f64::total_cmp);
        v.get(v.len() / 2).copied().unwrap_or(f64::NAN)
    };
    let (ours, plain, percent) = (median(Round::ours_mib_s), median(Round::plain_mib_s), median(Round::percent));
    format!("median: ours {ours:.1} MiB/s, plain {plain:.1} MiB/s, {percent:.1} percent")
}

/// Measures, and gives the lines to print: one of JSON per round, then the medians in words. `dir` is made if it is not there; it
/// must be empty, and is left with the packs that were sent. `busy` is set while our side of a round runs.
///
/// # Errors
/// If the folder is not empty, or as [`replicate`].
pub async fn report(dir: &Path, total_mib: u32, rounds: u32, busy: &AtomicBool) -> Result<Vec<String>, BenchError> {
    if total_mib == 0 || rounds == 0 {
        return Err(plain("the size")("at least 1 MiB and 1 round"));
    }
    std::fs::create_dir_all(dir).map_err(plain("making the folder"))?;
    if std::fs::read_dir(dir).map_err(plain("reading the folder"))?.next().is_some() {
        return Err(plain("the folder")(format!("{} is not empty", dir.display())));
    }
    let done = replicate(dir, total_mib, rounds, busy).await?;
    Ok(done.iter().map(Round::line).chain([medians(&done)]).collect())
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// Why a measurement failed.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// An endpoint.
    #[error(transparent)]
    Start(#[from] StartError),
    /// A store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The fetch that was measured.
    #[error(transparent)]
    Fetch(#[from] FetchError),
    /// The plain side, or a file.
    #[error("{what}: {why}")]
    Plain { what: &'static str, why: String },
}

fn plain<E: std::fmt::Display>(what: &'static str) -> impl Fn(E) -> BenchError {
    move |e| BenchError::Plain { what, why: e.to_string() }
}

/// Measures `rounds` rounds of about `total_mib` MiB in `dir`, which must be empty and is left so but for what a caller removes;
/// ours and plain take turns, each round into fresh folders. Runs both ends in this process. `busy` is set while ours runs.
///
/// # Errors
/// If anything on either side fails.
pub async fn replicate(dir: &Path, total_mib: u32, rounds: u32, busy: &AtomicBool) -> Result<Vec<Round>, BenchError> {
    let keys = KeyRing::new([DomainKey::new(DOMAIN, [9; 32])]);
    let from = Store::open(&dir.join("from"))?;
    let id = {
        let (from, keys) = (from.clone(), keys.clone());
        let made = tokio::task::spawn_blocking(move || make(&from, &keys, total_mib)).await;
        made.map_err(plain("filling the store"))??
    };
    let files = pack_files(&dir.join("from"))?;
    let source = serving(from, &keys)?;
    let mut out = Vec::new();
    for n in 0..rounds {
        // Whoever goes first finds the disk in another state, so they take turns.
        let (mut ours_s, mut plain_s, mut bytes) = (0.0, 0.0, 0);
        for first in [n % 2 == 0, n % 2 != 0] {
            let to = dir.join(format!("to-{n}-{first}"));
            if first {
                busy.store(true, Ordering::Release);
                let done = ours(&to, &source, &id, &keys).await;
                busy.store(false, Ordering::Release);
                (bytes, ours_s) = done?;
            } else {
                plain_s = plain_round(&to, &files).await?.as_secs_f64();
            }
            std::fs::remove_dir_all(&to).map_err(plain("removing what a round wrote"))?;
            settle(dir)?;
        }
        out.push(Round { bytes, ours_s, plain_s });
    }
    source.close().await;
    Ok(out)
}

/// Waits until the disk is idle again as far as this file system is concerned.
fn settle(dir: &Path) -> Result<(), BenchError> {
    File::open(dir).and_then(|f| f.sync_all()).map_err(plain("syncing the folder"))
}

fn serving(store: Arc<Store>, keys: &KeyRing) -> Result<Bulk, BenchError> {
    let keys = keys.clone();
    let listen = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
    Ok(Bulk::start(BulkConfig {
        keypair: Keypair::generate_ed25519(),
        listen,
        allow: Arc::new(|_| true),
        store,
        keys: Arc::new(move || keys.clone()),
        images: Arc::new(NoImages),
        limits: BulkLimits::default(),
        events: Arc::new(|_| ()),
    })?)
}

async fn ours(to: &Path, source: &Bulk, id: &CheckpointId, keys: &KeyRing) -> Result<(u64, f64), BenchError> {
    let store = Store::open(to)?;
    let here = serving(store, keys)?;
    let addrs = source.local_addr().into_iter().collect();
    let holder = Holder { peer: source.peer_id(), addrs };
    let token = RunToken { generation: 1, epoch: 1, run: 1 };
    let pin = PinKey { session: SessionId([1; 16]), token, upload: 1 };
    let fetcher = Fetcher::new(here.clone());
    let begin = Instant::now();
    let got = fetcher.fetch_checkpoint(id, &[holder], keys, &pin, Arc::new(|_| ())).await?;
    let took = begin.elapsed().as_secs_f64();
    here.close().await;
    Ok((got.bytes, took))
}

/// Plain QUIC: one stream per file, raw; the receiver hashes, compares, writes and fsyncs.
async fn plain_round(to: &Path, files: &[(PathBuf, blake3::Hash)]) -> Result<Duration, BenchError> {
    std::fs::create_dir_all(to).map_err(plain("making a folder"))?;
    let (server, client) = (Identity::new(Keypair::generate_ed25519())?, Identity::new(Keypair::generate_ed25519())?);
    let config = Arc::new(transport());
    let mut accepting = server.server(Arc::new(|_| true))?;
    accepting.transport_config(config.clone());
    let mut dialling = client.client(server.peer_id())?;
    dialling.transport_config(config);
    let any = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
    let sender = quinn::Endpoint::server(accepting, any).map_err(plain("listening"))?;
    let receiver = quinn::Endpoint::client(any).map_err(plain("binding"))?;
    let at = sender.local_addr().map_err(plain("listening"))?;
    let paths: Arc<Vec<PathBuf>> = Arc::new(files.iter().map(|f| f.0.clone()).collect());
    let serving = tokio::spawn(plain_serve(sender.clone(), paths));
    let begin = Instant::now();
    let c = receiver.connect_with(dialling, at, "plain").map_err(plain("dialling"))?.await.map_err(plain("dialling"))?;
    let mut waiting = files.iter().enumerate();
    let mut running = FuturesUnordered::new();
    loop {
        while running.len() < PACKS_AT_ONCE
            && let Some((n, (_, hash))) = waiting.next()
        {
            running.push(plain_fetch(c.clone(), n, *hash, to.join(n.to_string())));
        }
        match running.next().await {
            Some(done) => done?,
            None => break,
        }
    }
    File::open(to).and_then(|f| f.sync_all()).map_err(plain("syncing the folder"))?;
    let took = begin.elapsed();
    c.close(0u32.into(), b"");
    sender.close(0u32.into(), b"");
    serving.abort();
    Ok(took)
}

async fn plain_serve(sender: quinn::Endpoint, files: Arc<Vec<PathBuf>>) {
    let Some(incoming) = sender.accept().await else { return };
    let Ok(c) = incoming.await else { return };
    while let Ok((mut send, mut recv)) = c.accept_bi().await {
        let files = files.clone();
        tokio::spawn(async move {
            let mut n = [0; 4];
            if recv.read_exact(&mut n).await.is_err() {
                return;
            }
            let path = files[u32::from_le_bytes(n) as usize].clone();
            let (tx, mut rx) = tokio::sync::mpsc::channel::<bytes::Bytes>(4);
            tokio::task::spawn_blocking(move || -> io::Result<()> {
                let file = File::open(path)?;
                let (len, mut at) = (file.metadata()?.len(), 0);
                while at < len {
                    let mut block = vec![0; usize::try_from(len - at).unwrap_or(usize::MAX).min(256 * 1024)];
                    file.read_exact_at(&mut block, at)?;
                    at += block.len() as u64;
                    if tx.blocking_send(block.into()).is_err() {
                        break;
                    }
                }
                Ok(())
            });
            while let Some(block) = rx.recv().await {
                if send.write_chunk(block).await.is_err() {
                    return;
                }
            }
            let _ = send.finish();
        });
    }
}

async fn plain_fetch(c: quinn::Connection, n: usize, hash: blake3::Hash, to: PathBuf) -> Result<(), BenchError> {
    let (mut send, mut recv) = c.open_bi().await.map_err(plain("opening a stream"))?;
    let no = u32::try_from(n).map_err(plain("counting files"))?;
    send.write_all(&no.to_le_bytes()).await.map_err(plain("asking"))?;
    let (tx, mut rx) = tokio::sync::mpsc::channel::<Vec<bytes::Bytes>>(24);
    let writer = tokio::task::spawn_blocking(move || -> io::Result<blake3::Hash> {
        let mut file = File::create(to)?;
        let mut hasher = blake3::Hasher::new();
        let mut block = Vec::with_capacity(2 << 20);
        loop {
            let lot = rx.blocking_recv();
            for b in lot.iter().flatten() {
                block.extend_from_slice(b);
            }
            if block.len() >= 1 << 20 || lot.is_none() {
                hasher.update(&block);
                file.write_all(&block)?;
                block.clear();
            }
            if lot.is_none() {
                break;
            }
        }
        file.sync_all()?;
        Ok(hasher.finalize())
    });
    loop {
        let mut slices = vec![bytes::Bytes::new(); 64];
        match recv.read_chunks(&mut slices).await.map_err(plain("reading"))? {
            Some(n) => {
                slices.truncate(n);
                if tx.send(slices).await.is_err() {
                    break;
                }
            }
            None => break,
        }
    }
    drop(tx);
    let got = writer.await.map_err(plain("writing"))?.map_err(plain("writing"))?;
    if got == hash { Ok(()) } else { Err(plain("comparing hashes")("they differ")) }
}

fn pack_files(store: &Path) -> Result<Vec<(PathBuf, blake3::Hash)>, BenchError> {
    let mut out = Vec::new();
    let list = |p: &Path| std::fs::read_dir(p).map_err(plain("listing packs"));
    for folder in list(&store.join("packs"))? {
        for file in list(&folder.map_err(plain("listing packs"))?.path())? {
            let path = file.map_err(plain("listing packs"))?.path();
            let hash = blake3::hash(&std::fs::read(&path).map_err(plain("reading a pack"))?);
            out.push((path, hash));
        }
    }
    out.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(out)
}

/// Fills packs with chunks that do not compress, so that what is measured is the transfer; returns their checkpoint.
fn make(store: &Arc<Store>, keys: &KeyRing, total_mib: u32) -> Result<CheckpointId, BenchError> {
    let key = keys.get(DOMAIN).ok_or_else(|| plain("the key ring")("no key"))?;
    let upload = store.begin_upload(UploadScope { keys: keys.clone(), write_domain: DOMAIN, bases: vec![] });
    let chunks = (u64::from(total_mib) << 20).div_ceil(CHUNK_BYTES as u64);
    let (mut builder, mut bytes) = PackBuilder::start(DOMAIN);
    let mut put = |kind: ObjectKind, plain_bytes: &[u8], last: bool| -> Result<ChunkId, BenchError> {
        let id = key.name(kind, plain_bytes);
        let nonce = ks_blobs::host::random().map_err(plain("drawing a nonce"))?;
        bytes.extend(builder.add(key, kind, id, plain_bytes, nonce));
        if last || bytes.len() + CHUNK_BYTES * 2 + (1 << 17) > PACK_BYTES_MAX {
            let (next, header) = PackBuilder::start(DOMAIN);
            let (tail, pack, _) = std::mem::replace(&mut builder, next).finish();
            bytes.extend(tail);
            let file = upload.new_pack()?;
            file.write_all_at(&bytes, 0).map_err(plain("writing a pack"))?;
            upload.pack_done(pack, bytes.len() as u64)?;
            bytes = header;
        }
        Ok(id)
    };
    let mut refs = Vec::new();
    for n in 0..chunks {
        let mut chunk = vec![0; CHUNK_BYTES];
        blake3::Hasher::new_derive_key("keepstate bench filler").update(&n.to_le_bytes()).finalize_xof().fill(&mut chunk);
        refs.push(put(ObjectKind::Data, &chunk, false)?);
    }
    let mut segments = Vec::new();
    for part in refs.chunks(SEGMENT_CHUNKS) {
        segments.push(put(ObjectKind::Segment, &encode_segment(part), false)?);
    }
    let state = put(ObjectKind::State, b"state", true)?;
    let text = String::new;
    let machine = Machine {
        engine: EngineKind::Kvm,
        profile: text(),
        engine_version: text(),
        cpu_model: text(),
        features: vec![],
        tsc_khz: 1,
        vcpus: 1,
        cmdline: text(),
        kernel_hash: text(),
        initrd_hash: text(),
    };
    let m = Manifest {
        session: SessionId([1; 16]),
        parent: None,
        created_unix_ms: 0,
        journal_position: 0,
        machine: Some(machine),
        state: vec![state],
        state_bytes: 5,
        memory: Map { bytes: chunks * CHUNK_BYTES as u64, segments },
        disk: Map::default(),
    };
    Ok(upload.commit(&m.encode())?)
}
