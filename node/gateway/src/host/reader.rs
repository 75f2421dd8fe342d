//! One client's way along an answer: head, bytes as they may be had, end. Asks the lease before every batch of bytes.

use super::live::{End, Live};
use super::wire::{WireError, read_frame, write_end, write_message};
use crate::crash;
use crate::limits::READER_PATIENCE;
use ks_proto::relay::{BodyFrame, FRAME_HEADER_BYTES, PAYLOAD_BYTES_MAX, RelayAnswer};
use std::future::Future;
use std::os::unix::fs::FileExt;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};

/// How a client's stream ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Left {
    /// It has all there is.
    Delivered,
    /// The client closed its socket.
    Closed,
    /// The stream broke, took nothing for long, or may be given nothing more: the client may come back.
    Cut,
}

/// Where a client is.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    /// The number that `Head` says.
    pub seq: u64,
    /// First byte of the body that it wants.
    pub offset: u64,
}

/// Waits for the client's word that it is gone.
async fn guest(read: &mut (impl AsyncRead + Unpin)) -> Left {
    match read_frame(read).await {
        Ok(Some(BodyFrame::Gone)) => Left::Closed,
        Ok(_) | Err(_) => Left::Cut,
    }
}

async fn patient<T>(work: impl Future<Output = Result<T, WireError>>) -> Option<T> {
    tokio::time::timeout(READER_PATIENCE, work).await.ok()?.ok()
}

/// Serves `live` from `place` on until its end, or the client's.
pub async fn serve(
    read: &mut (impl AsyncRead + Unpin),
    write: &mut (impl AsyncWrite + Unpin),
    live: &Live,
    place: Place,
    may_pass: impl Fn() -> bool,
) -> Left {
    let mut progress = live.progress.subscribe();
    let mut offset = place.offset;
    let mut head_sent = false;
    let gone = guest(read);
    tokio::pin!(gone);
    loop {
        let p = progress.borrow_and_update().clone();
        if !may_pass() {
            return Left::Cut;
        }
        if let Some(head) = p.head.as_ref().filter(|_| !head_sent) {
            let whole = matches!(p.end, Some(End::Whole)).then_some(p.free);
            let (status, headers) = (head.status, head.headers.clone());
            let message = RelayAnswer::Head { status, headers, seq: place.seq, body_bytes: whole };
            if patient(write_message(write, &message)).await.is_none() {
                return Left::Cut;
            }
            head_sent = true;
        }
        while head_sent && offset < p.free {
            if !may_pass() {
                return Left::Cut;
            }
            match patient(batch(write, live, offset, p.free)).await {
                Some(n) => offset += n,
                None => return Left::Cut,
            }
        }
        if let Some(end) = p.end {
            return finish(write, end, offset > p.free).await;
        }
        tokio::select! {
            biased;
            left = &mut gone => return left,
            changed = progress.changed() => if changed.is_err() { return Left::Cut },
        }
    }
}

/// Writes one frame of bytes from `offset`.
async fn batch(write: &mut (impl AsyncWrite + Unpin), live: &Live, offset: u64, free: u64) -> Result<u64, WireError> {
    let n = usize::try_from(free - offset).unwrap_or(usize::MAX).min(PAYLOAD_BYTES_MAX);
    let mut buf = vec![0; FRAME_HEADER_BYTES + n];
    buf[..FRAME_HEADER_BYTES].copy_from_slice(&BodyFrame::data_header(n));
    live.file.read_exact_at(&mut buf[FRAME_HEADER_BYTES..], offset)?;
    write.write_all(&buf).await?;
    write.flush().await?;
    crash::point("first-byte");
    Ok(n as u64)
}

/// `beyond`: the client says it has more bytes than there are; it has them from elsewhere.
async fn finish(write: &mut (impl AsyncWrite + Unpin), end: End, beyond: bool) -> Left {
    let written = match end {
        End::Whole if beyond => patient(write_end(write, Some("the client has more bytes than this answer"))).await,
        End::Whole => patient(write_end(write, None)).await,
        End::Abort(why) => patient(write_end(write, Some(&why))).await,
        End::Refused(r) => {
            let (status, code, message) = (r.status, r.code.to_owned(), r.message.clone());
            patient(write_message(write, &RelayAnswer::Refused { status, code, message })).await
        }
    };
    crash::point("released");
    if written.is_some() { Left::Delivered } else { Left::Cut }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::journal::StoredHead;
    use crate::host::live::Progress;
    use crate::host::wire::read_message;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    fn head() -> StoredHead {
        StoredHead { status: 200, headers: vec![("a".into(), "b".into())] }
    }

    #[tokio::test]
    async fn a_reader_gets_what_is_free_from_its_byte_on_and_the_end_only_when_it_is_durable() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(b"0123456789", 0).unwrap();
        let live = Live::new(4, file);
        live.progress.send_replace(Progress { head: Some(Arc::new(head())), stored: 10, free: 6, end: None });
        let (ours, mut theirs) = tokio::io::duplex(4096);
        let (mut r, mut w) = tokio::io::split(ours);
        let serving = serve(&mut r, &mut w, &live, Place { seq: 4, offset: 2 }, || true);
        let client = async {
            let head: RelayAnswer = read_message(&mut theirs).await.unwrap().unwrap();
            assert!(matches!(head, RelayAnswer::Head { status: 200, seq: 4, body_bytes: None, .. }));
            assert_eq!(read_frame(&mut theirs).await.unwrap(), Some(BodyFrame::Data(b"2345".to_vec())));
            live.progress.send_modify(|p| {
                p.free = 10;
                p.end = Some(End::Whole);
            });
            assert_eq!(read_frame(&mut theirs).await.unwrap(), Some(BodyFrame::Data(b"6789".to_vec())));
            assert_eq!(read_frame(&mut theirs).await.unwrap(), Some(BodyFrame::End));
        };
        assert_eq!(tokio::join!(serving, client).0, Left::Delivered);
    }

    #[tokio::test]
    async fn a_lease_past_its_deadline_releases_no_byte() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(b"0123456789", 0).unwrap();
        let live = Live::stored(1, file, head(), 10, End::Whole);
        let (ours, mut theirs) = tokio::io::duplex(4096);
        let (mut r, mut w) = tokio::io::split(ours);
        assert_eq!(serve(&mut r, &mut w, &live, Place { seq: 1, offset: 0 }, || false).await, Left::Cut);
        drop((r, w));
        let mut got = Vec::new();
        tokio::io::AsyncReadExt::read_to_end(&mut theirs, &mut got).await.unwrap();
        assert!(got.is_empty());
        // Between two batches too.
        let live = Live::new(1, tempfile::tempfile().unwrap());
        live.file.write_all_at(b"0123456789", 0).unwrap();
        live.progress.send_replace(Progress { head: Some(Arc::new(head())), stored: 10, free: 5, end: None });
        let (ours, mut theirs) = tokio::io::duplex(4096);
        let (mut r, mut w) = tokio::io::split(ours);
        let held = AtomicBool::new(true);
        let serving = serve(&mut r, &mut w, &live, Place { seq: 1, offset: 0 }, || held.load(Ordering::SeqCst));
        let client = async {
            let _: Option<RelayAnswer> = read_message(&mut theirs).await.unwrap();
            assert_eq!(read_frame(&mut theirs).await.unwrap(), Some(BodyFrame::Data(b"01234".to_vec())));
            held.store(false, Ordering::SeqCst);
            live.progress.send_modify(|p| p.free = 10);
        };
        assert_eq!(tokio::join!(serving, client).0, Left::Cut);
        drop((r, w));
        let mut got = Vec::new();
        tokio::io::AsyncReadExt::read_to_end(&mut theirs, &mut got).await.unwrap();
        assert!(got.is_empty());
    }

    #[tokio::test]
    async fn a_client_that_closes_is_told_from_a_stream_that_breaks() {
        for (word, left) in [(Some(BodyFrame::Gone), Left::Closed), (None, Left::Cut)] {
            let live = Live::new(1, tempfile::tempfile().unwrap());
            let (ours, mut theirs) = tokio::io::duplex(64);
            let (mut r, mut w) = tokio::io::split(ours);
            if let Some(word) = word {
                theirs.write_all(&word.encode()).await.unwrap();
            }
            drop(theirs);
            assert_eq!(serve(&mut r, &mut w, &live, Place { seq: 1, offset: 0 }, || true).await, left);
        }
    }
}
