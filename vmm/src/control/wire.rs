//! Frames on the control socket: u32 little-endian length, JSON, descriptors with the first byte. Source: proto's
//! control.rs. Refuses long frames, too many descriptors, and a frame whose count of descriptors does not match.

use ks_proto::control::{FRAME_BYTES_MAX, FRAME_FDS_MAX, Frame};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// Why a connection cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The other end closed between two frames.
    #[error("the connection was closed")]
    Closed,
    /// The socket failed, or the other end went away inside a frame.
    #[error("the control socket failed")]
    Io(#[source] std::io::Error),
    /// Bytes that are no frame.
    #[error("not a frame: {0}")]
    Bad(String),
}
impl From<rustix::io::Errno> for WireError {
    fn from(e: rustix::io::Errno) -> Self {
        Self::Io(e.into())
    }
}

/// The number of descriptors that a frame says it carries.
pub fn fds_of(frame: &Frame) -> u32 {
    match frame {
        Frame::Request { fds, .. } | Frame::Reply { fds, .. } | Frame::HostRequest { fds, .. } | Frame::HostReply { fds, .. } => {
            *fds
        }
        Frame::Event { .. } => 0,
    }
}

/// Sends one frame; `fds` must be as many as the frame says. Blocks at most for the socket's write timeout per part.
pub fn send(stream: &UnixStream, frame: &Frame, fds: &[BorrowedFd<'_>]) -> Result<(), WireError> {
    assert_eq!(fds_of(frame) as usize, fds.len(), "a frame names the descriptors that it carries");
    assert!(fds.len() <= FRAME_FDS_MAX, "descriptors per frame are bounded");
    let json = serde_json::to_vec(frame).map_err(|e| WireError::Bad(e.to_string()))?;
    let Some(length) = u32::try_from(json.len()).ok().filter(|_| json.len() <= FRAME_BYTES_MAX) else {
        return Err(WireError::Bad(format!("{} bytes are more than a frame may have ({FRAME_BYTES_MAX})", json.len())));
    };
    let mut bytes = length.to_le_bytes().to_vec();
    bytes.extend(json);
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FRAME_FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)), "the buffer is sized for the largest frame");
    }
    let mut at = 0;
    while at < bytes.len() {
        match rustix::net::sendmsg(stream, &[IoSlice::new(&bytes[at..])], &mut control, SendFlags::NOSIGNAL) {
            Ok(n) => {
                at += n;
                control.clear();
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

/// Receives one frame with its descriptors (close-on-exec).
pub fn receive(stream: &UnixStream) -> Result<(Frame, Vec<OwnedFd>), WireError> {
    let mut fds = Vec::new();
    let mut head = [0u8; 4];
    fill(stream, &mut head, &mut fds, true)?;
    let length = u32::from_le_bytes(head) as usize;
    if length > FRAME_BYTES_MAX {
        return Err(WireError::Bad(format!("a frame of {length} bytes (the most is {FRAME_BYTES_MAX})")));
    }
    let mut body = vec![0u8; length];
    fill(stream, &mut body, &mut fds, false)?;
    let frame: Frame = serde_json::from_slice(&body).map_err(|e| WireError::Bad(e.to_string()))?;
    if fds.len() != fds_of(&frame) as usize {
        return Err(WireError::Bad(format!("{} descriptors came with a frame that names {}", fds.len(), fds_of(&frame))));
    }
    Ok((frame, fds))
}

fn fill(stream: &UnixStream, out: &mut [u8], fds: &mut Vec<OwnedFd>, may_end: bool) -> Result<(), WireError> {
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FRAME_FDS_MAX))];
    let mut at = 0;
    while at < out.len() {
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let got = rustix::net::recvmsg(stream, &mut [IoSliceMut::new(&mut out[at..])], &mut control, RecvFlags::CMSG_CLOEXEC);
        let got = match got {
            Err(rustix::io::Errno::INTR) => continue,
            other => other?,
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(more) = message {
                fds.extend(more);
            }
        }
        if got.flags.contains(ReturnFlags::CTRUNC) || fds.len() > FRAME_FDS_MAX {
            return Err(WireError::Bad(format!("more than {FRAME_FDS_MAX} descriptors in one frame")));
        }
        match got.bytes {
            0 if may_end && at == 0 => return Err(WireError::Closed),
            0 => return Err(WireError::Io(std::io::ErrorKind::UnexpectedEof.into())),
            n => at += n,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ks_proto::control::{HostReply, VmmRequest};
    use std::io::Write;
    use std::os::fd::AsFd;

    #[test]
    fn frames_and_descriptors_arrive_together_and_in_order() {
        let (a, b) = UnixStream::pair().unwrap();
        let file = tempfile::tempfile().unwrap();
        let t = std::thread::spawn(move || {
            for n in 0..200u32 {
                let fds: Vec<_> = (0..n).map(|_| file.as_fd()).collect();
                send(&a, &Frame::Request { id: u64::from(n), fds: n, request: VmmRequest::Packs {} }, &fds).unwrap();
                send(&a, &Frame::HostReply { id: 7, fds: 0, result: Ok(HostReply::Known { known: vec![true; 4096] }) }, &[])
                    .unwrap();
            }
        });
        for n in 0..200u32 {
            let (f, fds) = receive(&b).unwrap();
            assert!(matches!(f, Frame::Request { id, .. } if id == u64::from(n)));
            assert_eq!(fds.len(), n as usize);
            assert!(matches!(receive(&b).unwrap(), (Frame::HostReply { .. }, fds) if fds.is_empty()));
        }
        t.join().unwrap();
        assert!(matches!(receive(&b), Err(WireError::Closed)));
    }

    #[test]
    fn hostile_bytes_are_refused_before_memory_is_taken_for_them() {
        for (bytes, why) in [
            (u32::MAX.to_le_bytes().to_vec(), "a frame of"),
            ([&4u32.to_le_bytes()[..], b"junk"].concat(), "not a frame"),
            ([&44u32.to_le_bytes()[..], br#"{"frame":"request","id":1,"fds":1,"request":"#].concat(), ""),
        ] {
            let (mut a, b) = UnixStream::pair().unwrap();
            a.write_all(&bytes).unwrap();
            drop(a);
            let e = receive(&b).unwrap_err();
            assert!(e.to_string().contains(why), "{e}");
        }
    }

    #[test]
    fn a_frame_that_names_other_descriptors_than_it_brings_is_refused() {
        let (mut a, b) = UnixStream::pair().unwrap();
        let json = serde_json::to_vec(&Frame::Request { id: 1, fds: 2, request: VmmRequest::Packs {} }).unwrap();
        a.write_all(&[&u32::try_from(json.len()).unwrap().to_le_bytes()[..], &json].concat()).unwrap();
        assert!(receive(&b).unwrap_err().to_string().contains("0 descriptors came with a frame that names 2"));
    }
}
