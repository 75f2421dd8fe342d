//! Both halves of one stream of the guest channel, and the length-prefixed JSON messages on it (u32, little endian).
//!
//! Invariant: both halves are polled by one task only. A yamux stream keeps a single waker for its command queue,
//! so two tasks would steal each other's wake-ups.

use std::{
    io,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, ready},
};

use futures::io::{AsyncRead as _, AsyncWrite as _};
use ks_proto::guest::{EXEC_PAYLOAD_MAX, ExecFrame, GuestAnswer, GuestRequest, MESSAGE_BYTES_MAX};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};

type Shared = Arc<Mutex<yamux::Stream>>;

fn lock(s: &Shared) -> MutexGuard<'_, yamux::Stream> {
    s.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The half that reads.
pub struct Reader(Shared);
/// The half that writes.
pub struct Writer(Shared);

/// Splits a stream into its halves, for use within one task.
pub fn split(stream: yamux::Stream) -> (Reader, Writer) {
    let shared = Arc::new(Mutex::new(stream));
    (Reader(shared.clone()), Writer(shared))
}

impl Reader {
    /// Nothing can pass in either direction any more.
    pub fn is_gone(&self) -> bool {
        lock(&self.0).is_closed()
    }
}

impl AsyncRead for Reader {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let n = ready!(Pin::new(&mut *lock(&self.0)).poll_read(cx, buf.initialize_unfilled()))?;
        buf.advance(n);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Writer {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut *lock(&self.0)).poll_write(cx, data)
    }
    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *lock(&self.0)).poll_flush(cx)
    }
    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *lock(&self.0)).poll_close(cx)
    }
}

/// Reads the request that begins a stream.
pub async fn read_request(r: &mut (impl AsyncRead + Unpin)) -> io::Result<GuestRequest> {
    serde_json::from_slice(&read_message(r).await?).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
}

/// Writes an answer and flushes it.
pub async fn write_answer(w: &mut (impl AsyncWrite + Unpin), answer: &GuestAnswer) -> io::Result<()> {
    write_message(w, &serde_json::to_vec(answer)?).await
}

/// Reads one length-prefixed message of at most [`MESSAGE_BYTES_MAX`] bytes.
pub async fn read_message(r: &mut (impl AsyncRead + Unpin)) -> io::Result<Vec<u8>> {
    let len = r.read_u32_le().await? as usize;
    if len > MESSAGE_BYTES_MAX {
        let why = format!("a message of {len} bytes; at most {MESSAGE_BYTES_MAX} are allowed");
        return Err(io::Error::new(io::ErrorKind::InvalidData, why));
    }
    let mut message = vec![0; len];
    r.read_exact(&mut message).await?;
    Ok(message)
}

/// Writes one length-prefixed message and flushes it.
pub async fn write_message(w: &mut (impl AsyncWrite + Unpin), message: &[u8]) -> io::Result<()> {
    let len = u32::try_from(message.len()).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    w.write_all(&[&len.to_le_bytes()[..], message].concat()).await?;
    w.flush().await
}

/// Reads one exec frame; None at the end of the stream.
pub async fn read_frame(r: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<ExecFrame>> {
    let kind = match r.read_u8().await {
        Ok(kind) => kind,
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(e) => return Err(e),
    };
    let len = r.read_u32_le().await? as usize;
    if len > EXEC_PAYLOAD_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("an exec frame of {len} bytes")));
    }
    let mut payload = vec![0; len];
    r.read_exact(&mut payload).await?;
    let frame = ExecFrame::from_parts(kind, &payload);
    frame.map(Some).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("an exec frame of kind {kind}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_length_beyond_the_limit_is_refused_before_allocating() {
        let mut input: &[u8] = &[0xff; 8];
        let error = read_message(&mut input).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        let mut input: &[u8] = &[1, 0xff, 0xff, 0xff, 0xff];
        assert_eq!(read_frame(&mut input).await.unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[tokio::test]
    async fn frames_and_messages_are_read_as_written() {
        let mut wire = Vec::new();
        write_message(&mut wire, b"{}").await.unwrap();
        wire.extend(ExecFrame::Stdin(vec![1, 2]).encode());
        wire.extend(ExecFrame::StdinEof.encode());
        let mut input = wire.as_slice();
        assert_eq!(read_message(&mut input).await.unwrap(), b"{}");
        assert_eq!(read_frame(&mut input).await.unwrap(), Some(ExecFrame::Stdin(vec![1, 2])));
        assert_eq!(read_frame(&mut input).await.unwrap(), Some(ExecFrame::StdinEof));
        assert_eq!(read_frame(&mut input).await.unwrap(), None);
    }
}
