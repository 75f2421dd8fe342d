//! One program on one stream: frames in, frames out, and its end.
//!
//! ```text
//!   Running --program ended--> Draining --output empty or grace over--> Exit sent, stream closed
//!   Running --stream lost----> SIGHUP to its process group, as from a lost terminal
//! ```
//!
//! Memory is bounded: output is read only when the stream took the last piece, input waits in a queue of
//! [`STDIN_BYTES_MAX`] so that resizes and signals behind a paste still arrive.

use std::{collections::VecDeque, convert::Infallible, io, time::Duration};

use ks_proto::guest::ExecFrame;
use rustix::process::Pid;
use tokio::{
    io::AsyncWriteExt as _,
    sync::{Notify, oneshot},
    time::{Instant, sleep_until},
};

use super::{
    fds::Fd,
    reaper::{Ended, Reaper},
    spawn::{Streams, winsize},
};
use crate::wire::{self, Reader, Writer};

/// Input that waits for the program.
const STDIN_BYTES_MAX: usize = 256 * 1024;
/// One read of a pipe.
const PIPE_READ_BYTES: usize = 16 * 1024;
/// One read of a terminal: small, so that little output is on its way when somebody presses Ctrl-C.
const TERMINAL_READ_BYTES: usize = 4 * 1024;
/// How long children that hold the output may go on writing after the program ended.
const GRACE: Duration = Duration::from_millis(50);
/// How often a half-closed stream is looked at.
const GONE_CHECK: Duration = Duration::from_secs(1);
const HANGUP: u8 = 1;
const CONTINUE: u8 = 18;

/// Runs the streams of a started program until it ended or the stream is lost.
pub async fn run(
    reaper: &Reaper,
    pid: Pid,
    ended: oneshot::Receiver<Ended>,
    streams: Streams,
    mut reader: Reader,
    mut writer: Writer,
) {
    let input = Input::default();
    let target = Target { reaper, pid };
    let result = match streams {
        Streams::Pipes { stdin, stdout, stderr } => {
            tokio::select! {
                r = pump_out(&mut writer, &stdout, Some(&stderr), ended, PIPE_READ_BYTES) => r,
                () = read_input(&mut reader, &input, &target, None) => Err(lost()),
                never = write_pipe(&input, stdin) => match never {},
            }
        }
        Streams::Terminal(master) => {
            tokio::select! {
                r = pump_out(&mut writer, &master, None, ended, TERMINAL_READ_BYTES) => r,
                () = read_input(&mut reader, &input, &target, Some(&master)) => Err(lost()),
                never = write_terminal(&input, &master) => match never {},
            }
        }
    };
    match result {
        Ok(end) => {
            let frame = ExecFrame::Exit { code: end.code, signal: end.signal };
            if writer.write_all(&frame.encode()).await.is_ok() {
                let _ = writer.shutdown().await;
            }
        }
        Err(_) => {
            target.signal(HANGUP);
            target.signal(CONTINUE);
        }
    }
}

fn lost() -> io::Error {
    io::ErrorKind::ConnectionReset.into()
}

struct Target<'a> {
    reaper: &'a Reaper,
    pid: Pid,
}

impl Target<'_> {
    fn signal(&self, number: u8) {
        self.reaper.signal_group(self.pid, number);
    }
}

/// Input on its way to the program.
#[derive(Default)]
struct Input {
    queue: std::sync::Mutex<Queue>,
    /// Something was queued.
    filled: Notify,
    /// Something was taken.
    taken: Notify,
}

#[derive(Default)]
struct Queue {
    pieces: VecDeque<Vec<u8>>,
    bytes: usize,
    eof: bool,
    /// The program does not read any more: input is dropped.
    closed: bool,
}

impl Input {
    fn with<T>(&self, f: impl FnOnce(&mut Queue) -> T) -> T {
        f(&mut self.queue.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
    }

    /// Queues a piece once there is room; false if the stream is lost meanwhile.
    async fn push(&self, piece: Vec<u8>, reader: &Reader) -> bool {
        while self.with(|q| q.bytes >= STDIN_BYTES_MAX && !q.closed) {
            if reader.is_gone() {
                return false;
            }
            let _ = tokio::time::timeout(GONE_CHECK, self.taken.notified()).await;
        }
        self.with(|q| {
            if !q.closed && !q.eof {
                q.bytes += piece.len();
                q.pieces.push_back(piece);
            }
        });
        self.filled.notify_one();
        true
    }

    /// The next piece; None at the end of the input.
    async fn pop(&self) -> Option<Vec<u8>> {
        loop {
            let (piece, eof) = self.with(|q| (q.pieces.pop_front(), q.eof));
            if piece.is_some() || eof {
                return piece;
            }
            self.filled.notified().await;
        }
    }

    fn written(&self, bytes: usize) {
        self.with(|q| q.bytes -= bytes);
        self.taken.notify_one();
    }

    fn end(&self) {
        self.with(|q| q.eof = true);
        self.filled.notify_one();
    }

    fn close(&self) {
        self.with(|q| *q = Queue { closed: true, ..Queue::default() });
        self.taken.notify_one();
    }
}

/// Takes frames from the node; returns when the stream is lost.
async fn read_input(reader: &mut Reader, input: &Input, target: &Target<'_>, master: Option<&Fd>) {
    let mut eof = false;
    loop {
        match wire::read_frame(reader).await {
            Ok(Some(ExecFrame::Stdin(data))) => {
                if !input.push(data, reader).await {
                    return;
                }
            }
            Ok(Some(ExecFrame::StdinEof)) => {
                eof = true;
                input.end();
            }
            Ok(Some(ExecFrame::Resize(cols, rows))) => {
                if let Some(master) = master {
                    let _ = rustix::termios::tcsetwinsize(master, winsize(cols, rows));
                }
            }
            Ok(Some(ExecFrame::Signal(number))) => send_signal(number, target, master),
            Ok(Some(ExecFrame::Stdout(_) | ExecFrame::Stderr(_) | ExecFrame::Exit { .. })) => {
                crate::log::line("a stream sent frames that only the guest sends; its program is hung up");
                return;
            }
            // The node closed its half after it had ended the input: the program goes on until the rest goes too.
            Ok(None) if eof => {
                while !reader.is_gone() {
                    tokio::time::sleep(GONE_CHECK).await;
                }
                return;
            }
            Ok(None) | Err(_) => return,
        }
    }
}

/// To the terminal's foreground group if there is one, else to the program's own group.
fn send_signal(number: u8, target: &Target<'_>, master: Option<&Fd>) {
    match master.and_then(|m| rustix::termios::tcgetpgrp(m).ok()) {
        Some(foreground) if foreground != target.pid => {
            let _ = super::spawn::signal_group(foreground, number);
        }
        Some(_) | None => target.signal(number),
    }
}

async fn write_pipe(input: &Input, stdin: Fd) -> Infallible {
    while let Some(piece) = input.pop().await {
        if stdin.write_all(&piece).await.is_err() {
            // The program closed its input; what else comes is dropped, as a shell's pipe would.
            break;
        }
        input.written(piece.len());
    }
    drop(stdin);
    input.close();
    std::future::pending().await
}

async fn write_terminal(input: &Input, master: &Fd) -> Infallible {
    while let Some(piece) = input.pop().await {
        if master.write_all(&piece).await.is_err() {
            break;
        }
        input.written(piece.len());
    }
    if let Ok(modes) = rustix::termios::tcgetattr(master)
        && modes.local_modes.contains(rustix::termios::LocalModes::ICANON)
    {
        let eof = modes.special_codes[rustix::termios::SpecialCodeIndex::VEOF];
        let _ = master.write_all(&[eof]).await;
    }
    input.close();
    std::future::pending().await
}

/// One source of output.
struct Source<'a> {
    fd: Option<&'a Fd>,
    /// Bytes that the program had written before it ended: they are read whatever happens.
    owed: u64,
}

impl Source<'_> {
    async fn read(&mut self, buf: &mut [u8]) -> usize {
        let Some(fd) = self.fd else { return std::future::pending().await };
        let n = fd.read(buf).await.unwrap_or(0);
        self.owed = self.owed.saturating_sub(n as u64);
        if n == 0 {
            (self.fd, self.owed) = (None, 0);
        }
        n
    }
    fn note_owed(&mut self) {
        self.owed = self.fd.map_or(0, Fd::pending);
    }
}

/// Sends all output; returns how the program ended once its output is drained.
async fn pump_out(
    writer: &mut Writer,
    stdout: &Fd,
    stderr: Option<&Fd>,
    mut ended: oneshot::Receiver<Ended>,
    read_bytes: usize,
) -> io::Result<Ended> {
    let mut out = Source { fd: Some(stdout), owed: 0 };
    let mut err = Source { fd: stderr, owed: 0 };
    let (mut out_buf, mut err_buf) = (vec![0; read_bytes], vec![0; read_bytes]);
    let mut end = None;
    let mut deadline = Instant::now();
    loop {
        if let Some(end) = end
            && out.fd.is_none()
            && err.fd.is_none()
        {
            return Ok(end);
        }
        let frame = tokio::select! {
            n = out.read(&mut out_buf) => (n > 0).then(|| ExecFrame::Stdout(out_buf[..n].to_vec())),
            n = err.read(&mut err_buf) => (n > 0).then(|| ExecFrame::Stderr(err_buf[..n].to_vec())),
            status = &mut ended, if end.is_none() => {
                end = Some(status.unwrap_or(Ended { code: u8::MAX, signal: 0 }));
                out.note_owed();
                err.note_owed();
                deadline = Instant::now() + GRACE;
                None
            }
            () = sleep_until(deadline), if end.is_some() && out.owed == 0 && err.owed == 0 => {
                (out.fd, err.fd) = (None, None);
                None
            }
        };
        if let Some(frame) = frame {
            writer.write_all(&frame.encode()).await?;
            writer.flush().await?;
        }
    }
}
