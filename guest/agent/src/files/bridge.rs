//! Bounded queues between a stream's task and a blocking thread, as `Read` and `Write` on the thread's side.

use std::io::{self, Read, Write};

use tokio::sync::mpsc;

/// The task's end of an incoming stream.
pub(super) struct Pieces(mpsc::Sender<io::Result<Vec<u8>>>);

impl Pieces {
    /// Hands over one piece; an error when the thread gave up.
    pub(super) async fn send(&self, piece: Vec<u8>) -> Result<(), ()> {
        self.0.send(Ok(piece)).await.map_err(|_| ())
    }
    /// Makes the thread's next read fail.
    pub(super) async fn fail(self) {
        let _ = self.0.send(Err(io::ErrorKind::ConnectionReset.into())).await;
    }
}

/// The thread's end of an incoming stream.
pub(super) struct Incoming {
    pieces: mpsc::Receiver<io::Result<Vec<u8>>>,
    now: Vec<u8>,
    at: usize,
}

/// A queue from a stream to a thread.
pub(super) fn incoming(pieces_max: usize) -> (Pieces, Incoming) {
    let (sender, receiver) = mpsc::channel(pieces_max);
    (Pieces(sender), Incoming { pieces: receiver, now: Vec::new(), at: 0 })
}

impl Read for Incoming {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        while self.at == self.now.len() {
            match self.pieces.blocking_recv() {
                Some(piece) => (self.now, self.at) = (piece?, 0),
                None => return Ok(0),
            }
        }
        let n = buf.len().min(self.now.len() - self.at);
        buf[..n].copy_from_slice(&self.now[self.at..self.at + n]);
        self.at += n;
        Ok(n)
    }
}

/// The thread's end of an outgoing stream. What is buffered is sent by `flush`.
pub(super) struct Sink {
    pieces: mpsc::Sender<Vec<u8>>,
    buf: Vec<u8>,
    piece_bytes: usize,
}

/// A queue from a thread to a stream.
pub(super) fn outgoing(pieces_max: usize, piece_bytes: usize) -> (Sink, mpsc::Receiver<Vec<u8>>) {
    let (sender, receiver) = mpsc::channel(pieces_max);
    (Sink { pieces: sender, buf: Vec::with_capacity(piece_bytes), piece_bytes }, receiver)
}

impl Write for Sink {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        if self.buf.len() >= self.piece_bytes {
            self.flush()?;
        }
        let n = data.len().min(self.piece_bytes - self.buf.len());
        self.buf.extend_from_slice(&data[..n]);
        Ok(n)
    }
    fn flush(&mut self) -> io::Result<()> {
        if self.buf.is_empty() {
            return Ok(());
        }
        let piece = std::mem::replace(&mut self.buf, Vec::with_capacity(self.piece_bytes));
        self.pieces.blocking_send(piece).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}
