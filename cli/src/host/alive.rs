//! Is the far end of a TCP connection still there? Asked of the kernel, for what no program at the ends can tell.
//!
//! A peer that reads slowly, or not at all for an hour, acknowledges what it gets and answers probes of its full window:
//! it is alive, and is never given up. (TCP_USER_TIMEOUT would: it counts such a window as silence.) A peer that is gone
//! answers nothing: what was sent is sent again, or probed for, and no segment comes back. A link where nothing is to be
//! sent is watched by the kernel's keepalive (conn.rs).
#![expect(unsafe_code, reason = "getsockopt(TCP_INFO) has no safe wrapper here")]

use std::os::fd::{AsFd, AsRawFd};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Interval, MissedTickBehavior};

/// Sent again, or probed for, so often without an answer: a single loss is no silence.
const UNANSWERED: u8 = 2;

/// What the kernel knows of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seen {
    /// Segments sent and not acknowledged.
    pub unacked: u32,
    /// Timeouts of the oldest of them.
    pub retransmits: u8,
    /// Probes (of a full window, or keepalive) without an answer.
    pub probes: u8,
    /// Since anything came from the peer.
    pub silent: Duration,
}

impl Seen {
    /// Was everything that was tried for longer than `limit` in vain?
    pub fn dead(&self, limit: Duration) -> bool {
        let tried = (self.unacked > 0 && self.retransmits >= UNANSWERED) || self.probes >= UNANSWERED;
        tried && self.silent > limit
    }
}

/// Asks the kernel.
///
/// # Errors
/// The socket is no TCP socket.
pub fn look(socket: impl AsFd) -> std::io::Result<Seen> {
    // SAFETY: all bytes zero are a valid tcp_info, which is integers only.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut len = libc::socklen_t::try_from(size_of::<libc::tcp_info>()).map_err(std::io::Error::other)?;
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: the descriptor is open while it is borrowed; the kernel writes at most `len` bytes to `info`, which has them.
    let rc = unsafe { libc::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, (&raw mut info).cast(), &raw mut len) };
    if rc != 0 {
        return Err(std::io::Error::last_os_error());
    }
    let ms = info.tcpi_last_ack_recv.min(info.tcpi_last_data_recv);
    Ok(Seen {
        unacked: info.tcpi_unacked,
        retransmits: info.tcpi_retransmits,
        probes: info.tcpi_probes,
        silent: Duration::from_millis(ms.into()),
    })
}

/// Looks now and then while a reader or a writer waits.
#[derive(Debug)]
pub struct Watch {
    limit: Duration,
    beat: Option<Interval>,
}

impl Watch {
    /// One that gives up after `limit` of silence; it is looked at eight times as often.
    pub fn new(limit: Duration) -> Self {
        Self { limit, beat: None }
    }
    /// Ready with the error when the peer is gone; else the task is woken for the next look.
    pub fn poll(&mut self, cx: &mut Context<'_>, socket: impl AsFd) -> Poll<std::io::Error> {
        let every = (self.limit / 8).max(Duration::from_millis(10));
        let beat = self.beat.get_or_insert_with(|| {
            let mut beat = tokio::time::interval(every);
            beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
            beat
        });
        while beat.poll_tick(cx).is_ready() {
            if look(socket.as_fd()).is_ok_and(|s| s.dead(self.limit)) {
                let why = format!("the peer has answered nothing for {} s", self.limit.as_secs());
                return Poll::Ready(std::io::Error::new(std::io::ErrorKind::TimedOut, why));
            }
        }
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::conn::Wire;
    use std::process::Command;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    const LIMIT: Duration = Duration::from_millis(300);
    const MANY: usize = 64 << 20;
    /// A whole test's, not a measure of anything.
    const DEADLINE: Duration = Duration::from_secs(60);

    #[test]
    fn only_silence_after_trying_is_death() {
        let limit = Duration::from_secs(8);
        let s = |unacked, retransmits, probes, s| Seen { unacked, retransmits, probes, silent: Duration::from_secs(s) };
        // Idle for an hour; a slow reader between two probes; its probe just sent; one loss; many losses, but answers come.
        for alive in [s(0, 0, 0, 3600), s(0, 0, 0, 100), s(0, 0, 1, 100), s(1, 1, 0, 9), s(9, 7, 0, 1), s(0, 0, 5, 8)] {
            assert!(!alive.dead(limit), "{alive:?}");
        }
        for dead in [s(1, 2, 0, 9), s(0, 0, 2, 9)] {
            assert!(dead.dead(limit), "{dead:?}");
        }
    }

    async fn pair() -> (Wire, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (Wire::plain(near, LIMIT).unwrap(), listener.accept().await.unwrap().0)
    }

    #[tokio::test]
    async fn a_peer_that_does_not_read_for_long_is_not_cut() {
        let (near, mut far) = pair().await;
        let (mut reading, mut writing) = tokio::io::split(near);
        let mut write = tokio::spawn(async move {
            writing.write_all(&vec![7; MANY]).await?;
            writing.shutdown().await
        });
        let mut read = tokio::spawn(async move { reading.read_u8().await });
        // More than ten times the limit nothing is read: neither side gives up.
        tokio::select! {
            done = &mut write => panic!("given up, or the kernel's buffers are larger than {MANY}: {done:?}"),
            done = &mut read => panic!("given up: {done:?}"),
            () = tokio::time::sleep(LIMIT * 12) => {}
        }
        let mut got = vec![];
        tokio::time::timeout(DEADLINE, far.read_to_end(&mut got)).await.unwrap().unwrap();
        assert_eq!(got.len(), MANY);
        write.await.unwrap().unwrap();
        far.write_all(b"x").await.unwrap();
        assert_eq!(read.await.unwrap().unwrap(), b'x');
    }

    #[test]
    fn a_peer_that_is_gone_is_noticed() {
        let script = "ip link set lo up && exec \"$0\" --exact host::alive::tests::gone --ignored --nocapture";
        let me = std::env::current_exe().unwrap();
        let o = Command::new("unshare").args(["-n", "sh", "-c", script]).arg(me).output().unwrap();
        let said = String::from_utf8_lossy(&o.stdout).into_owned() + &String::from_utf8_lossy(&o.stderr);
        assert!(o.status.success() && said.contains("1 passed"), "{said}");
    }

    /// Only in a network namespace of its own: it takes loopback away.
    #[tokio::test]
    #[ignore = "started by a_peer_that_is_gone_is_noticed"]
    async fn gone() {
        let ((mut sending, _far), (mut full, _away), (mut idle, _quiet)) = (pair().await, pair().await, pair().await);
        let data = vec![7; MANY];
        let stuck = tokio::time::timeout(LIMIT, full.write_all(&data)).await;
        assert!(stuck.is_err(), "its window is full: {stuck:?}");
        assert!(Command::new("ip").args(["link", "set", "lo", "down"]).status().unwrap().success());
        sending.write_all(b"hello").await.unwrap();
        let all = async { tokio::join!(sending.read_u8(), full.write_all(&data), idle.read_u8()) };
        let (a, b, c) = tokio::time::timeout(DEADLINE, all).await.expect("noticed in bounded time");
        for (what, kind) in [("unacknowledged", a.map(drop)), ("full window", b), ("idle", c.map(drop))] {
            use std::io::ErrorKind::{HostUnreachable, NetworkUnreachable, TimedOut};
            let kind = kind.unwrap_err().kind();
            assert!(matches!(kind, TimedOut | HostUnreachable | NetworkUnreachable), "{what}: {kind:?}");
        }
    }
}
