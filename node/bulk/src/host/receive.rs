//! Receiving pack bytes in iroh-blobs' protocol: the network on this side, hashing and writing on a blocking thread.
//!
//! Every byte is checked against the pack's name before it is written.

use super::call::{lost, read_error, stalled, wrong};
use super::endpoint::{Holder, Inner, STALL_MAX};
use super::provider::GROUP;
use crate::error::CallError;
use crate::plan::groups;
use crate::wire::BLOBS;
use bao_tree::io::sync::DecodeResponseIter;
use bao_tree::io::{BaoContentItem, DecodeError};
use bao_tree::{BaoTree, ChunkNum, ChunkRanges};
use bytes::Bytes;
use iroh_blobs::Hash;
use iroh_blobs::protocol::{GetRequest, Request};
use ks_blobs::{FetchedObject, Part, StoreError};
use ks_proto::ids::{ChunkId, PackId};
use ks_proto::pack::{PACK_BYTES_MAX, PackEntry};
use std::collections::VecDeque;
use std::io::{self, Read};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// Slices that are taken from the socket at once, and how many such lots wait for the hasher: about 2 MiB.
const SLICES: usize = 64;
const LOTS: usize = 24;
/// BLAKE3's chunk.
const CHUNK: u64 = 1024;

/// Slices as they come from the socket, as a reader for a blocking thread.
pub(crate) struct Slices {
    rx: mpsc::Receiver<Vec<Bytes>>,
    have: VecDeque<Bytes>,
}
impl Read for Slices {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        loop {
            if let Some(first) = self.have.front_mut() {
                let n = first.len().min(buf.len());
                buf[..n].copy_from_slice(&first.split_to(n));
                if first.is_empty() {
                    self.have.pop_front();
                }
                if n > 0 || buf.is_empty() {
                    return Ok(n);
                }
                continue;
            }
            match self.rx.blocking_recv() {
                Some(lot) => self.have.extend(lot),
                None => return Ok(0),
            }
        }
    }
}

/// How decoding ended early.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The bytes ended: the network side knows why.
    Short,
    /// They do not hash.
    Wrong(String),
    /// This node's disk.
    Store(StoreError),
}

fn sort(e: DecodeError) -> Stop {
    match e {
        DecodeError::ParentNotFound(_) | DecodeError::LeafNotFound(_) => Stop::Short,
        DecodeError::Io(e) if e.kind() == io::ErrorKind::UnexpectedEof => Stop::Short,
        other @ (DecodeError::ParentHashMismatch(_) | DecodeError::LeafHashMismatch(_) | DecodeError::Io(_)) => {
            Stop::Wrong(other.to_string())
        }
    }
}

/// Takes verified bytes and their offset.
type Sink<'a> = &'a mut dyn FnMut(u64, &[u8]) -> Result<(), Stop>;

fn decode(pack: &PackId, bytes: u64, ranges: &ChunkRanges, slices: Slices, sink: Sink<'_>) -> Result<(), Stop> {
    let tree = BaoTree::new(bytes, GROUP);
    for item in DecodeResponseIter::new(blake3::Hash::from(pack.0), tree, slices, ranges) {
        if let BaoContentItem::Leaf(leaf) = item.map_err(sort)? {
            sink(leaf.offset, &leaf.data)?;
        }
    }
    Ok(())
}

/// Verifies and writes what is left of a part.
pub(crate) fn write_part(part: &mut Part, slices: Slices) -> Result<(), Stop> {
    let (id, bytes) = (part.id(), part.bytes());
    let ranges = from(part.at());
    let done = decode(&id, bytes, &ranges, slices, &mut |offset, data| {
        if offset != part.next() {
            return Err(Stop::Wrong(format!("bytes of {offset} where {} was next", part.next())));
        }
        part.push(data).map_err(Stop::Store)
    });
    // What was verified before the end is of use to the next attempt.
    if !matches!(done, Err(Stop::Store(_))) {
        part.flush().map_err(Stop::Store)?;
    }
    done
}

/// All chunks from a byte on.
pub(crate) fn from(at: u64) -> ChunkRanges {
    if at == 0 { ChunkRanges::all() } else { ChunkRanges::from(ChunkNum(at / CHUNK)..) }
}

/// Sends a get request for ranges of a pack. Returns the stream and the size that the peer says it has.
async fn begin(
    inner: &Inner,
    holder: &Holder,
    pack: &PackId,
    ranges: ChunkRanges,
) -> Result<(quinn::RecvStream, u64), CallError> {
    let (peer, what) = (holder.peer, format!("pack {}", pack.short()));
    let c = inner.connection(holder).await?;
    let (mut send, mut recv) = c.open_bi().await.map_err(|e| lost(peer, &e))?;
    let get = GetRequest::blob_ranges(Hash::from_bytes(pack.0), ranges);
    let mut ask = vec![BLOBS];
    ask.extend(crate::wire::encode(&Request::Get(get)));
    send.write_all(&ask).await.map_err(|e| lost(peer, &e))?;
    let _ = send.finish(); // only fails if it was stopped, which reading tells
    let mut size = [0; 8];
    let head = tokio::time::timeout(STALL_MAX, recv.read_exact(&mut size)).await.map_err(|_| stalled(peer))?;
    head.map_err(|e| match e {
        quinn::ReadExactError::FinishedEarly(_) => lost(peer, &"its answer ended at once"),
        quinn::ReadExactError::ReadError(e) => read_error(peer, &what, &e),
    })?;
    Ok((recv, u64::from_le_bytes(size)))
}

/// How a transfer is watched and given up.
pub(crate) struct Watch<'a> {
    pub stop: &'a CancellationToken,
    pub progress: &'a (dyn Fn(u64) + Send + Sync),
}

/// Passes what comes to `tx`. Returns when the answer has ended, or nobody takes it any more.
async fn pump(
    inner: &Inner,
    holder: &Holder,
    pack: &PackId,
    mut recv: quinn::RecvStream,
    tx: mpsc::Sender<Vec<Bytes>>,
    watch: &Watch<'_>,
) -> Result<(), CallError> {
    let (peer, what) = (holder.peer, format!("pack {}", pack.short()));
    loop {
        let mut slices: Vec<Bytes> = vec![Bytes::new(); SLICES];
        let read = tokio::select! {
            () = watch.stop.cancelled() => return Err(lost(peer, &"the fetch was given up")),
            read = tokio::time::timeout(STALL_MAX, recv.read_chunks(&mut slices)) => read.map_err(|_| stalled(peer))?,
        };
        let Some(n) = read.map_err(|e| read_error(peer, &what, &e))? else { return Ok(()) };
        slices.truncate(n);
        let len: usize = slices.iter().map(Bytes::len).sum();
        inner.receive_pace.pass(len).await;
        inner.count_received(len);
        (watch.progress)(len as u64);
        if tx.send(slices).await.is_err() {
            return Ok(()); // the hasher has what it needs, or gave up and says why
        }
    }
}

/// Sends a get request for ranges of a pack of `bytes` bytes and passes what comes to `tx`.
pub(crate) async fn request(
    inner: &Inner,
    holder: &Holder,
    (pack, bytes): (&PackId, u64),
    ranges: ChunkRanges,
    tx: mpsc::Sender<Vec<Bytes>>,
    watch: &Watch<'_>,
) -> Result<(), CallError> {
    let (recv, size) = begin(inner, holder, pack, ranges).await?;
    if size != bytes {
        return Err(wrong(holder.peer, format!("pack {}", pack.short()), format!("{size} bytes, where {bytes} were promised")));
    }
    pump(inner, holder, pack, recv, tx, watch).await
}

/// A whole pack in memory, of whatever size it has, verified.
pub(crate) async fn fetch_whole(inner: &Inner, holder: &Holder, pack: &PackId) -> Result<Vec<u8>, CallError> {
    let what = format!("pack {}", pack.short());
    let (recv, size) = begin(inner, holder, pack, ChunkRanges::all()).await?;
    if size > PACK_BYTES_MAX as u64 {
        return Err(wrong(holder.peer, what, format!("{size} bytes, the most is {PACK_BYTES_MAX}")));
    }
    let (tx, slices) = channel();
    let id = *pack;
    let decoder = tokio::task::spawn_blocking(move || {
        let mut whole = Vec::new();
        let done = decode(&id, size, &ChunkRanges::all(), slices, &mut |_, data| {
            whole.extend_from_slice(data);
            Ok(())
        });
        done.map(|()| whole)
    });
    let watch = Watch { stop: &CancellationToken::new(), progress: &|_| () };
    let sent = pump(inner, holder, pack, recv, tx, &watch).await;
    match decoder.await {
        Ok(Ok(whole)) => Ok(whole),
        Ok(Err(stop)) => Err(outcome(holder.peer, &what, sent, Err(stop)).err().unwrap_or_else(|| lost(holder.peer, &what))),
        Err(e) => Err(lost(holder.peer, &e)),
    }
}

/// A channel between [`request`] and a decoder.
pub(crate) fn channel() -> (mpsc::Sender<Vec<Bytes>>, Slices) {
    let (tx, rx) = mpsc::channel(LOTS);
    (tx, Slices { rx, have: VecDeque::new() })
}

/// What both sides of a transfer say about it together.
pub(crate) fn outcome(
    peer: libp2p_identity::PeerId,
    what: &str,
    sent: Result<(), CallError>,
    got: Result<(), Stop>,
) -> Result<(), CallError> {
    match (got, sent) {
        (Err(Stop::Store(e)), _) => Err(e.into()),
        (Err(Stop::Wrong(why)), _) => Err(wrong(peer, what, why)),
        (Err(Stop::Short), Err(e)) | (Ok(()), Err(e @ CallError::Wrong { .. })) => Err(e),
        (Err(Stop::Short), Ok(())) => Err(lost(peer, &format!("{what} ended early"))),
        (Ok(()), _) => Ok(()),
    }
}

/// Objects out of one pack, verified against the pack's name (not opened).
pub(crate) async fn fetch_objects(
    inner: &Inner,
    holder: &Holder,
    (pack, bytes, domain): (&PackId, u64, u32),
    rows: &[PackEntry],
    watch: &Watch<'_>,
) -> Result<Vec<(ChunkId, FetchedObject)>, CallError> {
    let spans = groups(rows, bytes);
    let mut ranges = ChunkRanges::empty();
    for (start, end) in &spans {
        ranges |= ChunkRanges::from(ChunkNum(start / CHUNK)..ChunkNum(end.div_ceil(CHUNK)));
    }
    let (tx, slices) = channel();
    let decoder = {
        let (pack, ranges, spans) = (*pack, ranges.clone(), spans.clone());
        tokio::task::spawn_blocking(move || {
            let mut got: Vec<(u64, Vec<u8>)> = spans.iter().map(|(s, _)| (*s, Vec::new())).collect();
            let done = decode(&pack, bytes, &ranges, slices, &mut |offset, data| {
                let i = spans.partition_point(|(start, _)| *start <= offset);
                let (start, buf) =
                    i.checked_sub(1).map(|i| &mut got[i]).ok_or_else(|| Stop::Wrong("bytes that nobody asked for".into()))?;
                if *start + buf.len() as u64 != offset {
                    return Err(Stop::Wrong(format!("bytes of {offset} where {} was next", *start + buf.len() as u64)));
                }
                buf.extend_from_slice(data);
                Ok(())
            });
            done.map(|()| got)
        })
    };
    let sent = request(inner, holder, (pack, bytes), ranges, tx, watch).await;
    let (got, spans) = match decoder.await {
        Ok(Ok(spans)) => (Ok(()), spans),
        Ok(Err(stop)) => (Err(stop), Vec::new()),
        Err(e) => return Err(lost(holder.peer, &e)),
    };
    outcome(holder.peer, &format!("pack {}", pack.short()), sent, got)?;
    let mut out = Vec::with_capacity(rows.len());
    for e in rows {
        let i = spans.partition_point(|(start, _)| *start <= u64::from(e.offset));
        let span = i.checked_sub(1).map(|i| &spans[i]);
        let stored = span.and_then(|(start, buf)| {
            let at = usize::try_from(u64::from(e.offset) - start).ok()?;
            buf.get(at..at.checked_add(e.stored_len as usize)?)
        });
        let stored = stored.ok_or_else(|| wrong(holder.peer, format!("object {}", e.id.short()), "it ends outside its pack"))?;
        let (kind, codec, plain_len) = (e.kind, e.codec, e.plain_len);
        out.push((e.id, FetchedObject { domain, kind, codec, plain_len, stored: stored.to_vec() }));
    }
    Ok(out)
}
