//! Files of images (kernel, initramfs) between nodes: announced with their hash, checked against it at the end.

use super::call::{lost, read_error, stalled, unexpected, wrong};
use super::endpoint::{Bulk, Holder, Inner, STALL_MAX};
use super::provider::{answer, blocks};
use crate::error::CallError;
use crate::wire::{Answer, Ask, IMAGE_FILE_BYTES_MAX, is_file_name};
use bytes::Bytes;
use ks_proto::ids::ImageId;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::sync::mpsc;

/// Bytes read, sent and written at once.
const BLOCK: usize = 1 << 20;

/// A file that was fetched, durable under its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageFileGot {
    /// Its size.
    pub bytes: u64,
    /// Its BLAKE3, verified.
    pub hash: [u8; 32],
}

pub(crate) async fn serve(
    inner: &Arc<Inner>,
    send: &mut quinn::SendStream,
    image: [u8; 32],
    which: String,
    from: u64,
) -> Result<(), u32> {
    if !is_file_name(&which) {
        return answer(send, &Answer::Refused { why: "that is not the name of a file of an image".into() }).await;
    }
    let images = inner.images.clone();
    let opened = tokio::task::spawn_blocking(move || {
        let path = images.path(&ImageId(image), &which)?;
        let opened = open_hashed(&path).inspect_err(|e| tracing::warn!("a peer asks for {}: {e}", path.display()));
        opened.ok()
    });
    let Ok(Some((mut file, bytes, hash))) = opened.await else { return answer(send, &Answer::Absent).await };
    if from > bytes {
        return answer(send, &Answer::Refused { why: format!("the file has {bytes} bytes") }).await;
    }
    answer(send, &Answer::File { bytes, hash }).await?;
    let (tx, mut rx) = mpsc::channel::<Bytes>(2);
    let reader = tokio::task::spawn_blocking(move || -> io::Result<()> {
        file.seek(SeekFrom::Start(from))?;
        let mut left = bytes - from;
        while left > 0 {
            let mut block = vec![0; usize::try_from(left).unwrap_or(usize::MAX).min(BLOCK)];
            file.read_exact(&mut block)?;
            left -= block.len() as u64;
            if tx.blocking_send(block.into()).is_err() {
                break;
            }
        }
        Ok(())
    });
    while let Some(block) = rx.recv().await {
        blocks(inner, send, block).await?;
    }
    match reader.await {
        Ok(Ok(())) => Ok(()),
        _ => Err(crate::wire::CODE_ABSENT),
    }
}

fn open_hashed(path: &Path) -> io::Result<(File, u64, [u8; 32])> {
    let mut file = File::open(path)?;
    let bytes = file.metadata()?.len();
    let hash = hash_of(&mut file)?;
    Ok((file, bytes, *hash.finalize().as_bytes()))
}

fn hash_of(file: &mut File) -> io::Result<blake3::Hasher> {
    let mut hasher = blake3::Hasher::new();
    let mut block = vec![0; BLOCK];
    loop {
        let n = file.read(&mut block)?;
        if n == 0 {
            return Ok(hasher);
        }
        hasher.update(&block[..n]);
    }
}

impl Bulk {
    /// Fetches the file `which` of an image to `to`. It is written beside it (`<to>.part`, which a later attempt goes on with),
    /// checked, synced and renamed; `expect` is the hash that the fleet's records name, if they do. On return it is durable.
    ///
    /// # Errors
    /// If the holder does not have it or sends something else; then nothing is at `to` that was not there before.
    pub async fn fetch_image_file(
        &self,
        holder: &Holder,
        image: &ImageId,
        which: &str,
        to: &Path,
        expect: Option<[u8; 32]>,
    ) -> Result<ImageFileGot, CallError> {
        let part = to.with_file_name(format!("{}.part", to.file_name().map_or_else(Default::default, |n| n.to_string_lossy())));
        let mut done = self.image_file(holder, image, which, to, &part, expect).await;
        if matches!(&done, Err(CallError::Wrong { .. })) && part.exists() {
            // Perhaps only what an earlier attempt left was wrong.
            let _ = std::fs::remove_file(&part);
            done = self.image_file(holder, image, which, to, &part, expect).await;
        }
        if let Err(CallError::Wrong { peer, wrong }) = &done {
            let _ = std::fs::remove_file(&part);
            self.inner.mark(*peer, wrong);
        }
        done
    }

    async fn image_file(
        &self,
        holder: &Holder,
        image: &ImageId,
        which: &str,
        to: &Path,
        part: &Path,
        expect: Option<[u8; 32]>,
    ) -> Result<ImageFileGot, CallError> {
        let (peer, inner) = (holder.peer, &self.inner);
        let file_error = |path: &Path, source| CallError::File { path: path.display().to_string(), source };
        let (hasher, file, from) = {
            let path = part.to_owned();
            let opened = tokio::task::spawn_blocking(move || resume(&path)).await.map_err(|e| lost(peer, &e))?;
            opened.map_err(|e| file_error(part, e))?
        };
        let ask = Ask::ImageFile { image: image.0, which: which.to_owned(), from };
        let (told, mut recv) = inner.ask(holder, &ask, std::time::Duration::from_secs(60)).await?;
        let Answer::File { bytes, hash } = told else { return Err(unexpected(peer, "a file of an image")) };
        let what = format!("the image's file {which}");
        if bytes > IMAGE_FILE_BYTES_MAX || expect.is_some_and(|e| e != hash) {
            return Err(wrong(peer, what, format!("{bytes} bytes, BLAKE3 {}", hex::encode(hash))));
        }
        let (tx, rx) = mpsc::channel::<Bytes>(16);
        let (part, to) = (part.to_owned(), to.to_owned());
        let writer = {
            let (part, to) = (part.clone(), to.clone());
            tokio::task::spawn_blocking(move || write(file, hasher, rx, &part, &to, bytes, hash))
        };
        let mut at = from;
        let sent = loop {
            let next = tokio::time::timeout(STALL_MAX, recv.read_chunk(BLOCK, true)).await.map_err(|_| stalled(peer))?;
            match next {
                Ok(Some(c)) if at + c.bytes.len() as u64 <= bytes => {
                    at += c.bytes.len() as u64;
                    inner.receive_pace.pass(c.bytes.len()).await;
                    inner.count_received(c.bytes.len());
                    if tx.send(c.bytes).await.is_err() {
                        break Ok(());
                    }
                }
                Ok(Some(_)) => break Err(wrong(peer, &what, "more bytes than promised")),
                Ok(None) => break Ok(()),
                Err(e) => break Err(read_error(peer, &what, &e)),
            }
        };
        drop(tx);
        let written = writer.await.map_err(|e| lost(peer, &e))?.map_err(|e| file_error(&part, e))?;
        sent?;
        match written {
            Written::Done => Ok(ImageFileGot { bytes, hash }),
            Written::Short(n) => Err(lost(peer, &format!("{what} ended after {n} of {bytes} bytes"))),
            Written::Other(h) => Err(wrong(peer, what, format!("it hashes to {h}, where {} was promised", hex::encode(hash)))),
        }
    }
}

enum Written {
    Done,
    Short(u64),
    Other(blake3::Hash),
}

fn resume(part: &PathBuf) -> io::Result<(blake3::Hasher, File, u64)> {
    let mut file = File::options().read(true).write(true).create(true).truncate(false).open(part)?;
    let hasher = hash_of(&mut file)?;
    let at = file.stream_position()?;
    Ok((hasher, file, at))
}

fn write(
    mut file: File,
    mut hasher: blake3::Hasher,
    mut rx: mpsc::Receiver<Bytes>,
    part: &Path,
    to: &Path,
    bytes: u64,
    hash: [u8; 32],
) -> io::Result<Written> {
    let mut block = Vec::with_capacity(BLOCK * 2);
    loop {
        let next = rx.blocking_recv();
        if let Some(b) = &next {
            block.extend_from_slice(b);
        }
        if block.len() >= BLOCK || next.is_none() {
            hasher.update(&block);
            file.write_all(&block)?;
            block.clear();
        }
        if next.is_none() {
            break;
        }
    }
    let at = file.stream_position()?;
    if at != bytes {
        return Ok(Written::Short(at));
    }
    let got = hasher.finalize();
    if got.as_bytes() != &hash {
        return Ok(Written::Other(got));
    }
    file.sync_all()?;
    std::fs::rename(part, to)?;
    if let Some(dir) = to.parent() {
        File::open(dir)?.sync_all()?;
    }
    Ok(Written::Done)
}
