//! Serving members: packs in iroh-blobs' protocol straight out of the store's files, and small requests.
//!
//! A byte of a pack leaves only after it was hashed against the pack's name: the first time a pack is asked for it is read
//! whole and its hash tree is built (and kept, 0.4 % of its size); later reads are checked against the tree as they go.
//! A pack that does not hash is not served, and what is damaged in it is taken out of service.

use super::endpoint::{BulkEvent, Inner, STALL_MAX};
use crate::wire::{
    self, ANSWER_BYTES_MAX, ASK, ASK_BYTES_MAX, Answer, Ask, BLOBS, CODE_ABSENT, CODE_REFUSED, LOCATE_MAX, Located, PLACES_MAX,
};
use bao_tree::io::EncodeError;
use bao_tree::io::outboard::PreOrderMemOutboard;
use bao_tree::io::sync::{ReadAt, Size, encode_ranges, encode_ranges_validated, outboard};
use bao_tree::{BaoTree, BlockSize, ChunkRanges};
use bytes::Bytes;
use iroh_blobs::protocol::{MAX_MESSAGE_SIZE, Request};
use ks_blobs::{Store, StoreError};
use ks_proto::ids::{CheckpointId, ChunkId, PackId};
use libp2p_identity::PeerId;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::mpsc;

/// Packs that are read for peers at the same time.
pub const SERVE_MAX: usize = 32;
/// Those of them that are sent out of memory, right after they were hashed; others are read, and hashed, a second time.
pub(crate) const IN_MEMORY_MAX: usize = 4;
/// iroh-blobs' groups: 16 chunks of 1 KiB.
pub(crate) const GROUP: BlockSize = BlockSize::from_chunk_log(4);
/// Codes with which connections are closed.
pub(crate) const CLOSE_DONE: u32 = 0;
pub(crate) const CLOSE_STRANGER: u32 = 1;
/// A request must be there within this.
const REQUEST_MAX: Duration = Duration::from_secs(10);
/// Bytes that go from the reader to the socket at once, and how many such blocks wait.
const BLOCK: usize = 256 * 1024;
const BLOCKS: usize = 4;
/// Hash trees that are kept: at most 128 KiB each.
const OUTBOARDS_MAX: usize = 256;

/// Serves one peer until it leaves, or is no member any more.
pub(crate) async fn serve(inner: &Arc<Inner>, peer: PeerId, c: &quinn::Connection) {
    while let Ok((send, recv)) = c.accept_bi().await {
        if !(inner.allow)(&peer) {
            return c.close(CLOSE_STRANGER.into(), b"not a member");
        }
        let Ok(permit) = inner.streams_served.clone().acquire_owned().await else { return };
        let inner = inner.clone();
        tokio::spawn(async move {
            let _permit = permit;
            if let Err(e) = stream(&inner, send, recv).await {
                tracing::debug!(%peer, "a request ended: {e}");
            }
        });
    }
}

async fn stream(inner: &Arc<Inner>, mut send: quinn::SendStream, mut recv: quinn::RecvStream) -> io::Result<()> {
    let late = |_| io::Error::from(io::ErrorKind::TimedOut);
    let mut tag = [0];
    tokio::time::timeout(REQUEST_MAX, recv.read_exact(&mut tag)).await.map_err(late)?.map_err(io::Error::other)?;
    let most = match tag[0] {
        BLOBS => MAX_MESSAGE_SIZE,
        ASK => ASK_BYTES_MAX,
        _ => {
            let _ = send.reset(CODE_REFUSED.into());
            return Err(io::Error::from(io::ErrorKind::InvalidData));
        }
    };
    let request = tokio::time::timeout(REQUEST_MAX, recv.read_to_end(most)).await.map_err(late)?.map_err(io::Error::other)?;
    let done = if tag[0] == BLOBS { blobs(inner, &mut send, request).await } else { ask(inner, &mut send, &request).await };
    match &done {
        Ok(()) => {
            let _ = send.finish();
        }
        Err(code) => {
            let _ = send.reset((*code).into());
        }
    }
    done.map_err(|code| io::Error::other(format!("ended with code {code}")))
}

/// iroh-blobs' protocol: a get request for ranges of one blob. Nothing else of it is served.
async fn blobs(inner: &Arc<Inner>, send: &mut quinn::SendStream, request: Vec<u8>) -> Result<(), u32> {
    let (request, _) = Request::read_async(&mut Bytes::from(request)).await.map_err(|_| CODE_REFUSED)?;
    let Request::Get(get) = request else { return Err(CODE_REFUSED) };
    let Some((0, ranges)) = get.ranges.as_single() else { return Err(CODE_REFUSED) };
    let (id, ranges) = (PackId(*get.hash.as_bytes()), ranges.clone());
    let permit = inner.packs_served.clone().acquire_owned().await.map_err(|_| CODE_REFUSED)?;
    let (tx, mut rx) = mpsc::channel(BLOCKS);
    let reader = {
        let inner = inner.clone();
        tokio::task::spawn_blocking(move || {
            let _permit = permit;
            read_pack(&inner, &id, &ranges, tx)
        })
    };
    while let Some(block) = rx.recv().await {
        inner.send_pace.pass(block.len()).await;
        inner.count_sent(block.len());
        let sent = tokio::time::timeout(STALL_MAX, send.write_chunk(block)).await;
        if !matches!(sent, Ok(Ok(()))) {
            return Err(CODE_REFUSED); // nobody reads any more
        }
    }
    reader.await.unwrap_or(Err(CODE_REFUSED))
}

/// Hash trees of packs that were read lately.
#[derive(Default)]
pub(crate) struct Outboards {
    kept: Mutex<(u64, BTreeMap<PackId, Kept>)>,
}
type Outboard = Arc<PreOrderMemOutboard<Vec<u8>>>;
struct Kept {
    outboard: Outboard,
    used: u64,
}

impl Outboards {
    fn get(&self, id: &PackId) -> Option<Outboard> {
        let mut k = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        k.0 += 1;
        let now = k.0;
        let found = k.1.get_mut(id)?;
        found.used = now;
        Some(found.outboard.clone())
    }
    fn put(&self, id: PackId, outboard: Outboard) {
        let mut k = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        k.0 += 1;
        let used = k.0;
        k.1.insert(id, Kept { outboard, used });
        if k.1.len() > OUTBOARDS_MAX
            && let Some(oldest) = k.1.iter().min_by_key(|(_, v)| v.used).map(|(id, _)| *id)
        {
            k.1.remove(&oldest);
        }
    }
    fn drop_one(&self, id: &PackId) {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).1.remove(id);
    }
}

/// A pack's file, read through the store.
struct PackFile<'a> {
    store: &'a Store,
    id: PackId,
    file: File,
    bytes: u64,
}
impl ReadAt for PackFile<'_> {
    fn read_at(&self, pos: u64, buf: &mut [u8]) -> io::Result<usize> {
        let n = usize::try_from(self.bytes.saturating_sub(pos)).unwrap_or(usize::MAX).min(buf.len());
        self.store.read_pack(&self.id, &self.file, &mut buf[..n], pos).map_err(io::Error::other)?;
        Ok(n)
    }
}
impl Size for PackFile<'_> {
    fn size(&self) -> io::Result<Option<u64>> {
        Ok(Some(self.bytes))
    }
}

/// Collects small writes into blocks for the socket.
struct Blocks {
    tx: mpsc::Sender<Bytes>,
    block: Vec<u8>,
}
impl Write for Blocks {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.block.extend_from_slice(buf);
        if self.block.len() >= BLOCK {
            self.flush()?;
        }
        Ok(buf.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        let block = std::mem::replace(&mut self.block, Vec::with_capacity(BLOCK + 32 * 1024));
        if block.is_empty() {
            return Ok(());
        }
        self.tx.blocking_send(block.into()).map_err(|_| io::ErrorKind::ConnectionReset.into())
    }
}

fn read_pack(inner: &Inner, id: &PackId, ranges: &ChunkRanges, tx: mpsc::Sender<Bytes>) -> Result<(), u32> {
    let found = inner.store.open_pack(id).inspect_err(|e| tracing::warn!("a peer asks for a pack: {e}"));
    let (file, bytes) = found.ok().flatten().ok_or(CODE_ABSENT)?;
    let pack = PackFile { store: &inner.store, id: *id, file, bytes };
    let mut out = Blocks { tx, block: Vec::with_capacity(BLOCK + 32 * 1024) };
    let sent = match inner.outboards.get(id) {
        Some(tree) => out
            .write_all(&bytes.to_le_bytes())
            .and_then(|()| encode_ranges_validated(&pack, &*tree, ranges, &mut out).map_err(sort)),
        None => first_read(inner, &pack, ranges, &mut out),
    };
    let sent = sent.and_then(|()| out.flush());
    match sent {
        Ok(()) => Ok(()),
        Err(e) if e.kind() == io::ErrorKind::ConnectionReset => Err(CODE_REFUSED),
        Err(e) => {
            tracing::warn!("pack {id} is not served: {e}");
            inner.outboards.drop_one(id);
            let faults = inner.store.suspect(id, &(inner.keys)()).unwrap_or_default();
            (inner.events)(BulkEvent::Damaged { pack: *id, faults });
            Err(CODE_ABSENT)
        }
    }
}

/// Builds a pack's tree and sends: out of the same memory, so that what leaves is what was hashed; or, when enough packs are
/// in memory, reading again and checking against the tree.
fn first_read(inner: &Inner, pack: &PackFile<'_>, ranges: &ChunkRanges, out: &mut Blocks) -> io::Result<()> {
    let room = inner.packs_in_memory.try_acquire().ok();
    let (tree, whole) = if room.is_some() {
        let mut whole = vec![0; usize::try_from(pack.bytes).map_err(io::Error::other)?];
        pack.read_exact_at(0, &mut whole)?;
        (PreOrderMemOutboard::create(&whole, GROUP), Some(whole))
    } else {
        let tree = BaoTree::new(pack.bytes, GROUP);
        let data = vec![0; usize::try_from(tree.outboard_size()).map_err(io::Error::other)?];
        let mut made = PreOrderMemOutboard { root: blake3::Hash::from([0; 32]), tree, data };
        made.root = outboard(io::BufReader::with_capacity(BLOCK, InOrder { pack, at: 0 }), tree, &mut made)?;
        (made, None)
    };
    if tree.root.as_bytes() != &pack.id.0 {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "its bytes do not match its name"));
    }
    let tree = Arc::new(tree);
    inner.outboards.put(pack.id, tree.clone());
    out.write_all(&pack.bytes.to_le_bytes())?;
    match whole {
        Some(whole) => encode_ranges(&whole[..], &*tree, ranges, &mut *out).map_err(sort),
        None => encode_ranges_validated(pack, &*tree, ranges, &mut *out).map_err(sort),
    }
}

/// A pack's file from its beginning to its end.
struct InOrder<'a> {
    pack: &'a PackFile<'a>,
    at: u64,
}
impl io::Read for InOrder<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = self.pack.read_at(self.at, buf)?;
        self.at += n as u64;
        Ok(n)
    }
}

/// A reader that went away is told from a file that does not hash.
fn sort(e: EncodeError) -> io::Error {
    match e {
        EncodeError::ParentWrite(_) | EncodeError::LeafWrite(_) => io::ErrorKind::ConnectionReset.into(),
        EncodeError::Io(e) => e,
        other @ (EncodeError::ParentHashMismatch(_) | EncodeError::LeafHashMismatch(_) | EncodeError::SizeMismatch) => {
            io::Error::new(io::ErrorKind::InvalidData, other)
        }
    }
}

async fn ask(inner: &Arc<Inner>, send: &mut quinn::SendStream, request: &[u8]) -> Result<(), u32> {
    let ask: Ask = match wire::decode(request) {
        Ok(ask) => ask,
        Err(e) => return answer(send, &Answer::Refused { why: e.to_string() }).await,
    };
    match ask {
        Ask::Manifest { id } => manifest(inner, send, CheckpointId(id)).await,
        Ask::Locate { ids } if ids.len() > LOCATE_MAX => {
            let why = format!("{} objects, at most {LOCATE_MAX} in one request", ids.len());
            answer(send, &Answer::Refused { why }).await
        }
        Ask::Locate { ids } => {
            let ids: Vec<ChunkId> = ids.into_iter().map(ChunkId).collect();
            let inner = inner.clone();
            let found = tokio::task::spawn_blocking(move || Located::of(&inner.store.places(&ids, PLACES_MAX))).await;
            answer(send, &Answer::Located(found.map_err(|_| CODE_REFUSED)?)).await
        }
        Ask::HaveClosure { id } => {
            let inner = inner.clone();
            let work = move || inner.store.has_closure(&CheckpointId(id), &(inner.keys)());
            let whole = tokio::task::spawn_blocking(work).await.map_err(|_| CODE_REFUSED)?;
            let told = match whole {
                Ok(whole) => Answer::Closure { whole },
                Err(e) => Answer::Refused { why: e.to_string() },
            };
            answer(send, &told).await
        }
        Ask::ImageFile { image, which, from } => super::image::serve(inner, send, image, which, from).await,
    }
}

async fn manifest(inner: &Arc<Inner>, send: &mut quinn::SendStream, id: CheckpointId) -> Result<(), u32> {
    let found = {
        let inner = inner.clone();
        tokio::task::spawn_blocking(move || inner.store.manifest_here(&id)).await.map_err(|_| CODE_REFUSED)?
    };
    match found {
        Ok((bytes, _)) => {
            answer(send, &Answer::Manifest { bytes: bytes.len() as u64 }).await?;
            blocks(inner, send, Bytes::from(bytes)).await
        }
        Err(e) => {
            if !matches!(e, StoreError::NoManifest { .. }) {
                tracing::warn!("a peer asks for a manifest: {e}");
            }
            answer(send, &Answer::Absent).await
        }
    }
}

pub(crate) async fn answer(send: &mut quinn::SendStream, a: &Answer) -> Result<(), u32> {
    let body = wire::encode(a);
    assert!(body.len() <= ANSWER_BYTES_MAX, "answers are bounded by their questions");
    let mut bytes = u32::try_from(body.len()).expect("bounded above").to_le_bytes().to_vec();
    bytes.extend(body);
    match tokio::time::timeout(STALL_MAX, send.write_all(&bytes)).await {
        Ok(Ok(())) => Ok(()),
        _ => Err(CODE_REFUSED),
    }
}

/// Sends bytes under the cap.
pub(crate) async fn blocks(inner: &Inner, send: &mut quinn::SendStream, mut bytes: Bytes) -> Result<(), u32> {
    while !bytes.is_empty() {
        let block = bytes.split_to(bytes.len().min(BLOCK));
        inner.send_pace.pass(block.len()).await;
        inner.count_sent(block.len());
        match tokio::time::timeout(STALL_MAX, send.write_chunk(block)).await {
            Ok(Ok(())) => {}
            _ => return Err(CODE_REFUSED),
        }
    }
    Ok(())
}
