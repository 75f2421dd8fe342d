//! Moves bytes between the pipe and the current connection, and changes the connection at each marker.
//!
//! ```text
//!   Waiting --marker(g)--> Live(g) --marker(h)--> Live(h)      the old connection is dropped, its output too
//!                          Live(g) --connection ended--> Waiting   data is dropped until the next marker
//! ```
//!
//! Reading goes on while writing is blocked, so that a marker is always seen.

use std::{
    future::poll_fn,
    io,
    pin::Pin,
    task::{Context, Poll},
};

use ks_proto::channel::{Deframer, Escaper, Piece, marker};
use tokio::{
    io::{AsyncRead as _, AsyncWrite as _, DuplexStream, ReadBuf},
    task::JoinHandle,
};

use super::Port;

/// Bytes between the pump and the connection, each way. Small, so that output on its way stays small.
const PIPE_BYTES: usize = 32 * 1024;
/// One read or write of the port.
const STEP_BYTES: usize = 16 * 1024;
/// The most unsent output that the pump holds before it takes more from the connection.
const OUT_BYTES_MAX: usize = 32 * 1024;
/// The most received data that waits for the connection.
const INBOX_BYTES_MAX: usize = 1024 * 1024;
/// Rounds before other tasks get a turn.
const ROUNDS_MAX: usize = 32;

/// The connection of the current generation.
struct Live {
    io: DuplexStream,
    driver: JoinHandle<()>,
}

impl Drop for Live {
    fn drop(&mut self) {
        // Dropping the connection ends all its streams.
        self.driver.abort();
    }
}

/// Bytes with a read position.
#[derive(Default)]
struct Backlog {
    bytes: Vec<u8>,
    at: usize,
}

impl Backlog {
    fn rest(&self) -> &[u8] {
        &self.bytes[self.at..]
    }
    fn take(&mut self, n: usize) {
        self.at += n;
        if self.at == self.bytes.len() {
            self.clear();
        } else if self.at >= STEP_BYTES {
            self.bytes.drain(..self.at);
            self.at = 0;
        }
    }
    fn clear(&mut self) {
        self.bytes.clear();
        self.at = 0;
    }
}

/// The state of one pipe.
pub struct Pump<F> {
    port: Port,
    begin: F,
    deframer: Deframer,
    escaper: Escaper,
    inbox: Backlog,
    out: Backlog,
    live: Option<Live>,
}

impl<F: FnMut(DuplexStream) -> JoinHandle<()> + Unpin> Pump<F> {
    /// `begin` starts a connection for each generation.
    pub fn new(port: Port, begin: F) -> Self {
        Self {
            port,
            begin,
            deframer: Deframer::new(),
            escaper: Escaper::default(),
            inbox: Backlog::default(),
            out: Backlog::default(),
            live: None,
        }
    }

    /// Runs until the pipe fails.
    pub async fn run(mut self) -> io::Error {
        match poll_fn(|cx| self.poll(cx)).await {
            Ok(never) => match never {},
            Err(why) => why,
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<std::convert::Infallible>> {
        for _ in 0..ROUNDS_MAX {
            let sent = self.send()?;
            let received = self.receive()?;
            let moved = self.exchange(cx);
            if sent || received || moved {
                continue;
            }
            match self.port.poll_event(cx)? {
                Poll::Ready(()) => {}
                Poll::Pending => return Poll::Pending,
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    fn send(&mut self) -> io::Result<bool> {
        if self.out.rest().is_empty() {
            return Ok(false);
        }
        let step = &self.out.rest()[..self.out.rest().len().min(STEP_BYTES)];
        let Some(n) = self.port.try_write(step)? else { return Ok(false) };
        self.out.take(n);
        Ok(true)
    }

    fn receive(&mut self) -> io::Result<bool> {
        if self.inbox.rest().len() >= INBOX_BYTES_MAX {
            return Ok(false);
        }
        let mut buf = [0; STEP_BYTES];
        let Some(n) = self.port.try_read(&mut buf)? else { return Ok(false) };
        for piece in self.deframer.push(&buf[..n]) {
            match piece {
                Piece::Data(data) if self.live.is_some() => self.inbox.bytes.extend_from_slice(&data),
                Piece::Data(_) => {}
                Piece::Marker(generation) => {
                    self.live = None;
                    self.inbox.clear();
                    // What the old generation had not sent is cut off; the reader on the host skips it.
                    self.out.clear();
                    self.out.bytes.extend_from_slice(&marker(&generation));
                    self.escaper = Escaper::default();
                    let (ours, theirs) = tokio::io::duplex(PIPE_BYTES);
                    self.live = Some(Live { io: ours, driver: (self.begin)(theirs) });
                }
            }
        }
        Ok(true)
    }

    /// Moves data to and from the connection; drops one that has ended.
    fn exchange(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(live) = &mut self.live else { return false };
        let mut moved = false;
        let mut ended = false;
        if !self.inbox.rest().is_empty() {
            match Pin::new(&mut live.io).poll_write(cx, self.inbox.rest()) {
                Poll::Ready(Ok(n)) if n > 0 => {
                    self.inbox.take(n);
                    moved = true;
                }
                Poll::Ready(_) => ended = true,
                Poll::Pending => {}
            }
        }
        if self.out.rest().len() < OUT_BYTES_MAX {
            let mut space = [0; STEP_BYTES];
            let mut buf = ReadBuf::new(&mut space);
            match Pin::new(&mut live.io).poll_read(cx, &mut buf) {
                Poll::Ready(Ok(())) if !buf.filled().is_empty() => {
                    self.escaper.push(buf.filled(), &mut self.out.bytes);
                    moved = true;
                }
                Poll::Ready(_) => ended = true,
                Poll::Pending => {}
            }
        }
        if ended {
            self.live = None;
            self.inbox.clear();
        }
        moved
    }
}

#[cfg(test)]
mod tests;
