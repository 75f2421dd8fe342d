//! A request's body until its answer begins: in memory, or in a file without a name when it is large.

use std::{
    fs::File,
    io::{self, Write as _},
    os::unix::fs::FileExt as _,
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
};

use hyper::body::Body;
use ks_proto::relay::{BODY_BYTES_MAX, PAYLOAD_BYTES_MAX};
use tokio::io::AsyncWrite;

use crate::{SPOOL_MEMORY_BYTES, wire};

static NAMES: AtomicU64 = AtomicU64::new(0);

/// A whole body.
#[derive(Debug)]
pub(crate) struct Spool {
    memory: Vec<u8>,
    file: Option<File>,
    /// Bytes.
    pub len: u64,
    /// BLAKE3, hex.
    pub hash: String,
}

/// Why a body was not taken.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SpoolError {
    #[error("the request's body is longer than {} MiB", BODY_BYTES_MAX >> 20)]
    TooLong,
    #[error("the request's body did not arrive whole: {0}")]
    Cut(String),
    #[error("the request's body cannot be kept: {0}")]
    Disk(#[from] io::Error),
}

impl Spool {
    /// Takes a body to its end.
    pub async fn take<B>(body: B, dir: &Path) -> Result<Self, SpoolError>
    where
        B: Body<Data = bytes::Bytes>,
        B::Error: std::fmt::Display,
    {
        use http_body_util::BodyExt as _;
        let mut body = std::pin::pin!(body);
        if body.size_hint().lower() > BODY_BYTES_MAX {
            return Err(SpoolError::TooLong);
        }
        let mut hasher = blake3::Hasher::new();
        let mut spool = Self { memory: Vec::new(), file: None, len: 0, hash: String::new() };
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame.map_err(|e| SpoolError::Cut(e.to_string()))?.into_data() else { continue };
            spool.len += data.len() as u64;
            if spool.len > BODY_BYTES_MAX {
                return Err(SpoolError::TooLong);
            }
            hasher.update(&data);
            spool.keep(&data, dir)?;
        }
        spool.hash = hasher.finalize().to_hex().to_string();
        Ok(spool)
    }

    fn keep(&mut self, data: &[u8], dir: &Path) -> io::Result<()> {
        if self.file.is_none() && self.memory.len() + data.len() <= SPOOL_MEMORY_BYTES {
            self.memory.extend_from_slice(data);
            return Ok(());
        }
        if self.file.is_none() {
            let mut file = nameless(dir)?;
            file.write_all(&self.memory)?;
            self.memory = Vec::new();
            self.file = Some(file);
        }
        match &mut self.file {
            Some(file) => file.write_all(data),
            None => Ok(()),
        }
    }

    /// Writes it as body frames, without the end.
    pub async fn send<W: AsyncWrite + Unpin>(&self, w: &mut W) -> io::Result<()> {
        let Some(file) = &self.file else { return wire::write_data(w, &self.memory).await };
        let mut buffer = vec![0; PAYLOAD_BYTES_MAX];
        let mut at = 0;
        while at < self.len {
            let n = usize::try_from(self.len - at).unwrap_or(usize::MAX).min(buffer.len());
            file.read_exact_at(&mut buffer[..n], at)?;
            wire::write_data(w, &buffer[..n]).await?;
            at += n as u64;
        }
        Ok(())
    }
}

/// A file that goes with its descriptor.
fn nameless(dir: &Path) -> io::Result<File> {
    std::fs::create_dir_all(dir)?;
    let path = dir.join(format!("body.{}.{}", std::process::id(), NAMES.fetch_add(1, Ordering::Relaxed)));
    let mut options = std::fs::OpenOptions::new();
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let file = options.read(true).write(true).create_new(true).open(&path)?;
    std::fs::remove_file(&path)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::Full;

    #[tokio::test]
    async fn small_and_large_bodies_come_out_as_they_went_in() {
        let dir = tempfile::tempdir().unwrap();
        for len in [0, 10, SPOOL_MEMORY_BYTES, SPOOL_MEMORY_BYTES + 1, 3 * SPOOL_MEMORY_BYTES + 7] {
            let bytes: Vec<u8> = (0..len).map(|n| (n % 251) as u8).collect();
            let spool = Spool::take(Full::new(bytes::Bytes::from(bytes.clone())), dir.path()).await.unwrap();
            assert_eq!(spool.file.is_some(), len > SPOOL_MEMORY_BYTES);
            assert_eq!(spool.hash, blake3::hash(&bytes).to_hex().to_string());
            let mut wire = Vec::new();
            spool.send(&mut wire).await.unwrap();
            let mut back = Vec::new();
            let mut rest = wire.as_slice();
            while !rest.is_empty() {
                match wire::read_frame(&mut rest).await.unwrap() {
                    ks_proto::relay::BodyFrame::Data(d) => back.extend(d),
                    other => panic!("{other:?}"),
                }
            }
            assert!(back == bytes, "{len}");
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "no file has a name");
    }

    #[tokio::test]
    async fn a_body_above_the_limit_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let body = Full::new(bytes::Bytes::from(vec![0; BODY_BYTES_MAX as usize + 1]));
        assert!(matches!(Spool::take(body, dir.path()).await, Err(SpoolError::TooLong)));
    }
}
