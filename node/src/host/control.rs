//! The control socket to one `ks-vmm`: frames with descriptors, requests with answers, and what the VMM asks back.

use ks_proto::control::{FRAME_BYTES_MAX, FRAME_FDS_MAX, Fault, Frame, HostReply, HostRequest, VmmEvent, VmmReply, VmmRequest};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use std::collections::{BTreeMap, VecDeque};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};

/// Frames of the VMM that wait for the node at most.
const INCOMING_MAX: usize = 64;

/// What a VMM sends by itself.
#[derive(Debug)]
pub enum Incoming {
    /// An event.
    Event(VmmEvent),
    /// A request, to be answered by [`Control::answer`].
    Request { id: u64, request: HostRequest, fds: Vec<OwnedFd> },
    /// The socket ended, and why. Always the last.
    Closed(String),
}

type Pending = BTreeMap<u64, oneshot::Sender<Result<(VmmReply, Vec<OwnedFd>), Fault>>>;

/// The node's end. Cheap to clone.
#[derive(Clone)]
pub struct Control {
    inner: Arc<Inner>,
}

struct Inner {
    socket: UnixStream,
    writing: tokio::sync::Mutex<()>,
    next: AtomicU64,
    pending: Mutex<Option<Pending>>,
}

fn gone(why: impl std::fmt::Display) -> Fault {
    Fault::new("engine-died", "the VM's control socket", why.to_string(), "the session is brought back by itself")
}

impl Control {
    /// Connects to the socket at `path` and starts reading.
    ///
    /// # Errors
    /// If nothing listens there.
    pub async fn connect(path: &Path) -> io::Result<(Self, mpsc::Receiver<Incoming>)> {
        Ok(Self::over(UnixStream::connect(path).await?))
    }

    /// Over a connected socket.
    pub fn over(socket: UnixStream) -> (Self, mpsc::Receiver<Incoming>) {
        let (tx, rx) = mpsc::channel(INCOMING_MAX);
        let pending = Mutex::new(Some(Pending::new()));
        let inner = Arc::new(Inner { socket, writing: tokio::sync::Mutex::new(()), next: AtomicU64::new(1), pending });
        tokio::spawn(read_all(inner.clone(), tx));
        (Self { inner }, rx)
    }

    /// Sends a request and waits for its answer.
    ///
    /// # Errors
    /// The VMM's refusal, a lost socket (`engine-died`), or `timeout`.
    pub async fn ask(&self, request: VmmRequest, fds: &[BorrowedFd<'_>], deadline: Duration) -> Result<VmmReply, Fault> {
        let id = self.inner.next.fetch_add(1, Ordering::Relaxed);
        let (tx, rx) = oneshot::channel();
        match self.inner.pending.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            Some(p) => drop(p.insert(id, tx)),
            None => return Err(gone("it is closed")),
        }
        let what = format!("{request:?}").split([' ', '(']).next().unwrap_or_default().to_owned();
        let frame = Frame::Request { id, fds: u32::try_from(fds.len()).unwrap_or(u32::MAX), request };
        let work = async {
            self.send(&frame, fds).await.map_err(gone)?;
            rx.await.unwrap_or_else(|_| Err(gone("it closed before the answer")))
        };
        match tokio::time::timeout(deadline, work).await {
            Ok(answer) => answer.map(|(reply, _)| reply),
            Err(_) => {
                if let Some(p) = self.inner.pending.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
                    p.remove(&id);
                }
                let why = format!("no answer in {} ms", deadline.as_millis());
                Err(Fault::new("timeout", format!("the VM's answer to {what}"), why, "see vmm.log in its run folder"))
            }
        }
    }

    /// As [`Self::ask`] for requests that are answered with Done.
    ///
    /// # Errors
    /// As [`Self::ask`].
    pub async fn order(&self, request: VmmRequest, fds: &[BorrowedFd<'_>], deadline: Duration) -> Result<(), Fault> {
        match self.ask(request, fds, deadline).await? {
            VmmReply::Done {} => Ok(()),
            other => Err(Fault::new("internal", "the VM's answer", format!("unexpected {other:?}"), "report this")),
        }
    }

    /// Answers a request of the VMM.
    ///
    /// # Errors
    /// If the socket is lost.
    pub async fn answer(&self, id: u64, result: Result<HostReply, Fault>, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let frame = Frame::HostReply { id, fds: u32::try_from(fds.len()).unwrap_or(u32::MAX), result };
        self.send(&frame, fds).await
    }

    async fn send(&self, frame: &Frame, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let bytes = encode(frame, fds.len())?;
        // One frame at a time, and each whole.
        let _turn = self.inner.writing.lock().await;
        send_frame(&self.inner.socket, &bytes, fds).await
    }
}

/// The bytes of one frame.
///
/// # Errors
/// If it is above the limits of the protocol.
pub fn encode(frame: &Frame, fds: usize) -> io::Result<Vec<u8>> {
    let body = serde_json::to_vec(frame)?;
    if body.len() > FRAME_BYTES_MAX || fds > FRAME_FDS_MAX {
        let why = format!("a frame of {} bytes and {fds} descriptors is above the limits", body.len());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    let mut bytes = Vec::with_capacity(body.len() + 4);
    bytes.extend_from_slice(&u32::try_from(body.len()).unwrap_or(u32::MAX).to_le_bytes());
    bytes.extend_from_slice(&body);
    Ok(bytes)
}

/// Writes one frame; the descriptors go with its first byte.
///
/// # Errors
/// If the socket is lost.
pub async fn send_frame(socket: &UnixStream, mut bytes: &[u8], mut fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    while !bytes.is_empty() {
        let sent = socket
            .async_io(Interest::WRITABLE, || {
                let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FRAME_FDS_MAX))];
                let mut control = SendAncillaryBuffer::new(&mut space);
                if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
                    return Err(io::Error::other("the descriptors do not fit one message"));
                }
                Ok(rustix::net::sendmsg(socket.as_fd(), &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?)
            })
            .await?;
        fds = &[];
        bytes = &bytes[sent..];
    }
    Ok(())
}

/// Reads frames and the descriptors that belong to them.
#[derive(Default)]
pub struct FrameReader {
    bytes: Vec<u8>,
    fds: VecDeque<OwnedFd>,
}

impl FrameReader {
    /// The next frame; None at the end of the stream.
    ///
    /// # Errors
    /// If the socket is lost or the bytes are not frames.
    pub async fn next(&mut self, socket: &UnixStream) -> io::Result<Option<(Frame, Vec<OwnedFd>)>> {
        loop {
            if let Some(frame) = self.parse()? {
                return Ok(Some(frame));
            }
            let mut chunk = vec![0u8; 64 * 1024];
            let n = socket.async_io(Interest::READABLE, || receive(socket, &mut chunk, &mut self.fds)).await?;
            if n == 0 {
                return Ok(None);
            }
            self.bytes.extend_from_slice(&chunk[..n]);
        }
    }

    fn parse(&mut self) -> io::Result<Option<(Frame, Vec<OwnedFd>)>> {
        let bad = |why: String| io::Error::new(io::ErrorKind::InvalidData, why);
        let Some(head) = self.bytes.first_chunk::<4>() else { return Ok(None) };
        let len = u32::from_le_bytes(*head) as usize;
        if len > FRAME_BYTES_MAX {
            return Err(bad(format!("a frame of {len} bytes")));
        }
        if self.bytes.len() < 4 + len {
            return Ok(None);
        }
        let frame: Frame = serde_json::from_slice(&self.bytes[4..4 + len])?;
        self.bytes.drain(..4 + len);
        let count = match &frame {
            Frame::Request { fds, .. }
            | Frame::Reply { fds, .. }
            | Frame::HostRequest { fds, .. }
            | Frame::HostReply { fds, .. } => *fds,
            Frame::Event { .. } => 0,
        } as usize;
        if count > self.fds.len() {
            return Err(bad(format!("a frame names {count} descriptors and {} came", self.fds.len())));
        }
        let fds = self.fds.drain(..count).collect();
        Ok(Some((frame, fds)))
    }
}

fn receive(socket: &UnixStream, chunk: &mut [u8], fds: &mut VecDeque<OwnedFd>) -> io::Result<usize> {
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FRAME_FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = rustix::net::recvmsg(socket.as_fd(), &mut [IoSliceMut::new(chunk)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(more) = message {
            fds.extend(more);
        }
    }
    if fds.len() > FRAME_FDS_MAX * 2 {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "descriptors that no frame names"));
    }
    Ok(got.bytes)
}

async fn read_all(inner: Arc<Inner>, tx: mpsc::Sender<Incoming>) {
    let mut reader = FrameReader::default();
    let why = loop {
        let (frame, fds) = match reader.next(&inner.socket).await {
            Ok(Some(f)) => f,
            Ok(None) => break "the VM's process closed it".to_owned(),
            Err(e) => break e.to_string(),
        };
        let out = match frame {
            Frame::Reply { id, result, .. } => {
                let waiter = inner.pending.lock().unwrap_or_else(PoisonError::into_inner).as_mut().and_then(|p| p.remove(&id));
                if let Some(w) = waiter {
                    let _ = w.send(result.map(|r| (r, fds)));
                }
                continue;
            }
            Frame::Event { event } => Incoming::Event(event),
            Frame::HostRequest { id, request, .. } => Incoming::Request { id, request, fds },
            Frame::Request { .. } | Frame::HostReply { .. } => break "it sent a frame of the node's side".to_owned(),
        };
        if tx.send(out).await.is_err() {
            break "nobody reads it any more".to_owned();
        }
    };
    inner.pending.lock().unwrap_or_else(PoisonError::into_inner).take();
    let _ = tx.send(Incoming::Closed(why)).await;
}
