//! The guest channel: bytes between the node's connection and the guest's port, one generation at a time.
//!
//! ```text
//!   no client ──accept──▶ waiting for the port ──port──▶ passing ──either end closes, or a newer client──▶ …
//! ```
//! The newest connection wins. Each one gets a fresh generation: its marker is the first thing written into the port,
//! and what comes from the guest is dropped until the same marker comes back. The lease gate is asked before every
//! pass. Buffers are bounded both ways; a full one stops reading at the other side.

use crate::mailbox::Mailbox;
use crate::shared::Shared;
use ks_proto::channel::{Deframer, Escaper, Generation, Piece, marker};
use ks_proto::control::Fault;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

/// Bytes kept per direction before the reading side is held back.
const BUFFER_BYTES: usize = 256 * 1024;
/// Bytes taken at once.
const STEP_BYTES: usize = 64 * 1024;
/// While the lease is over, the gate is looked at this often.
const HELD_LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// The run loop's answer to a wish for the guest's port.
pub struct PortAnswer {
    /// The wish that it answers.
    pub wish: u64,
    /// The host's end of the port.
    pub port: Result<UnixStream, Fault>,
}

/// What the pump needs from outside.
pub struct Pump {
    /// Where the node connects.
    pub listener: UnixListener,
    /// Lease, counters.
    pub shared: Arc<Shared>,
    /// Answers to wishes.
    pub answers: Arc<Mailbox<PortAnswer>>,
    /// Asks the run loop for the port, anew.
    pub wish: Box<dyn Fn(u64) + Send>,
}

/// Bytes on their way in one direction.
#[derive(Default)]
struct Queue {
    bytes: Vec<u8>,
    at: usize,
}
impl Queue {
    fn len(&self) -> usize {
        self.bytes.len() - self.at
    }
    fn has_room(&self) -> bool {
        self.len() + STEP_BYTES <= BUFFER_BYTES
    }
    /// Writes what the other side takes now; Ok(false) when it is gone.
    fn drain(&mut self, to: &mut UnixStream) -> bool {
        while self.at < self.bytes.len() {
            match to.write(&self.bytes[self.at..]) {
                Ok(0) => return false,
                Ok(n) => self.at += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
        if self.at == self.bytes.len() {
            self.bytes.clear();
            self.at = 0;
        } else if self.at >= STEP_BYTES {
            self.bytes.drain(..self.at);
            self.at = 0;
        }
        true
    }
}

/// One connection from the node, with the guest's port once that is there.
struct Passage {
    client: UnixStream,
    port: Option<UnixStream>,
    wish: u64,
    generation: Generation,
    live: bool,
    escaper: Escaper,
    deframer: Deframer,
    to_guest: Queue,
    to_host: Queue,
}

impl Passage {
    fn new(client: UnixStream, wish: u64) -> std::io::Result<Self> {
        client.set_nonblocking(true)?;
        let mut generation: Generation = [0; 16];
        getrandom::fill(&mut generation).map_err(|e| std::io::Error::other(e.to_string()))?;
        let to_guest = Queue { bytes: marker(&generation).to_vec(), at: 0 };
        Ok(Self {
            client,
            port: None,
            wish,
            generation,
            live: false,
            escaper: Escaper::default(),
            deframer: Deframer::new(),
            to_guest,
            to_host: Queue::default(),
        })
    }

    /// Bytes of this generation from the guest.
    fn take_from_guest(&mut self, bytes: &[u8]) {
        for piece in self.deframer.push(bytes) {
            match piece {
                Piece::Marker(g) => self.live = g == self.generation,
                Piece::Data(d) if self.live => self.to_host.bytes.extend(d),
                Piece::Data(_) => {}
            }
        }
    }

    /// Moves what can be moved; false when the passage is over. `ready` are the events of (client, port).
    fn pass(&mut self, ready: (PollFlags, PollFlags), count: &dyn Fn(u64)) -> bool {
        let Some(port) = &mut self.port else { return !gone(ready.0) };
        let stuck = (gone(ready.0) && !self.to_guest.has_room()) || (gone(ready.1) && !self.to_host.has_room());
        if stuck {
            return false;
        }
        let mut buffer = vec![0u8; STEP_BYTES];
        let mut from_port = Vec::new();
        if ready.1.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) && self.to_host.has_room() {
            match take(port, &mut buffer) {
                Taken::Some(n) => from_port.extend_from_slice(&buffer[..n]),
                Taken::Nothing => {}
                Taken::End => return false,
            }
        }
        if ready.0.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) && self.to_guest.has_room() {
            match take(&mut self.client, &mut buffer) {
                Taken::Some(n) => {
                    count(n as u64);
                    self.escaper.push(&buffer[..n], &mut self.to_guest.bytes);
                }
                Taken::Nothing => {}
                Taken::End => return false,
            }
        }
        if !self.to_guest.drain(port) {
            return false;
        }
        if !from_port.is_empty() {
            let before = self.to_host.bytes.len();
            self.take_from_guest(&from_port);
            count((self.to_host.bytes.len() - before) as u64);
        }
        self.to_host.drain(&mut self.client)
    }

    fn interest(&self) -> (PollFlags, PollFlags) {
        let wants = |read: bool, write: bool| {
            let mut f = PollFlags::empty();
            f.set(PollFlags::IN, read);
            f.set(PollFlags::OUT, write);
            f
        };
        let connected = self.port.is_some();
        (
            wants(connected && self.to_guest.has_room(), self.to_host.len() > 0),
            wants(self.to_host.has_room(), self.to_guest.len() > 0),
        )
    }
}

fn gone(f: PollFlags) -> bool {
    f.intersects(PollFlags::HUP | PollFlags::ERR)
}

enum Taken {
    Some(usize),
    Nothing,
    End,
}

fn take(from: &mut UnixStream, buffer: &mut [u8]) -> Taken {
    match from.read(buffer) {
        Ok(0) => Taken::End,
        Ok(n) => Taken::Some(n),
        Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Taken::Nothing,
        Err(_) => Taken::End,
    }
}

impl Pump {
    /// Runs until the process ends.
    pub fn run(self) {
        ks_vmm_core::confine::enter(ks_vmm_core::confine::Kind::Channel);
        let mut passage: Option<Passage> = None;
        let mut wishes = 0;
        loop {
            self.shared.channel_bell.take();
            let held = !*self.shared.port_open.lock().unwrap_or_else(PoisonError::into_inner);
            let gate = if held {
                Gate::Held
            } else if self.shared.may_pass() {
                Gate::Open
            } else {
                Gate::LeaseEnded
            };
            let ready = match wait(&self, passage.as_ref(), gate) {
                Ok(r) => r,
                Err(e) => {
                    tracing::error!("the channel stops: {e}");
                    return;
                }
            };
            if ready.accept
                && let Ok((client, _)) = self.listener.accept()
            {
                wishes += 1;
                // The old client and its port close here, before the new port is asked for.
                drop(passage.take());
                match Passage::new(client, wishes) {
                    Ok(p) => {
                        passage = Some(p);
                        (self.wish)(wishes);
                    }
                    Err(e) => tracing::warn!("a channel connection was dropped: {e}"),
                }
                continue;
            }
            for answer in self.answers.take() {
                take_port(&mut passage, answer);
            }
            let count = |n: u64| {
                self.shared.channel_bytes.fetch_add(n, Ordering::Relaxed);
            };
            // Kept until the bytes are moved: a pause that holds the port waits for this pass.
            let port_open = self.shared.port_open.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(p) = &mut passage
                && *port_open
                && self.shared.may_pass()
                && !p.pass((ready.client, ready.port), &count)
            {
                passage = None;
            }
        }
    }
}

fn take_port(passage: &mut Option<Passage>, answer: PortAnswer) {
    match (answer.port, passage.as_mut().filter(|p| p.wish == answer.wish)) {
        (Ok(port), Some(p)) => match port.set_nonblocking(true) {
            Ok(()) => p.port = Some(port),
            Err(_) => *passage = None,
        },
        (Err(f), Some(_)) => {
            tracing::warn!("{f}");
            *passage = None;
        }
        (_, None) => {}
    }
}

struct Ready {
    accept: bool,
    client: PollFlags,
    port: PollFlags,
}

/// Whether bytes may move.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Gate {
    Open,
    /// The guest is paused; the bell rings when it goes on.
    Held,
    /// Looked at again and again.
    LeaseEnded,
}

fn wait(pump: &Pump, passage: Option<&Passage>, gate: Gate) -> std::io::Result<Ready> {
    let mut fds = vec![
        PollFd::new(&pump.listener, PollFlags::IN),
        PollFd::from_borrowed_fd(pump.answers.as_fd(), PollFlags::IN),
        PollFd::from_borrowed_fd(pump.shared.channel_bell.as_fd(), PollFlags::IN),
    ];
    if let Some(p) = passage.filter(|_| gate == Gate::Open) {
        let (client, port) = p.interest();
        fds.push(PollFd::new(&p.client, client));
        if let Some(s) = &p.port {
            fds.push(PollFd::new(s, port));
        }
    }
    match poll(&mut fds, if gate == Gate::LeaseEnded && passage.is_some() { Some(&HELD_LOOK) } else { None }) {
        Err(rustix::io::Errno::INTR) => return Ok(Ready { accept: false, client: PollFlags::empty(), port: PollFlags::empty() }),
        other => other?,
    };
    let at = |i: usize| fds.get(i).map_or(PollFlags::empty(), PollFd::revents);
    Ok(Ready { accept: at(0).contains(PollFlags::IN), client: at(3), port: at(4) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ks_proto::RunToken;
    use std::sync::mpsc;
    use std::time::Duration;

    const OWN: RunToken = RunToken { generation: 0, epoch: 1, run: 1 };

    struct Bench {
        _dir: tempfile::TempDir,
        path: std::path::PathBuf,
        shared: Arc<Shared>,
        wishes: mpsc::Receiver<u64>,
        answers: Arc<Mailbox<PortAnswer>>,
    }
    impl Bench {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("channel");
            let listener = UnixListener::bind(&path).unwrap();
            let shared = Arc::new(Shared::new().unwrap());
            shared.renew_lease(OWN, u64::MAX).unwrap();
            shared.open_gate(OWN);
            let answers = Arc::new(Mailbox::new().unwrap());
            let (tx, wishes) = mpsc::channel();
            let pump =
                Pump { listener, shared: shared.clone(), answers: answers.clone(), wish: Box::new(move |n| tx.send(n).unwrap()) };
            std::thread::spawn(move || pump.run());
            Self { _dir: dir, path, shared, wishes, answers }
        }
        /// A client, and the guest's end of its port.
        fn connect(&self) -> (UnixStream, UnixStream) {
            let client = UnixStream::connect(&self.path).unwrap();
            let wish = self.wishes.recv_timeout(Duration::from_secs(5)).unwrap();
            let (port, guest) = UnixStream::pair().unwrap();
            assert!(self.answers.push(PortAnswer { wish, port: Ok(port) }).is_ok());
            for s in [&client, &guest] {
                s.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            }
            (client, guest)
        }
    }
    fn exactly(s: &mut UnixStream, n: usize) -> Vec<u8> {
        let mut b = vec![0; n];
        s.read_exact(&mut b).unwrap();
        b
    }
    const MARK: usize = ks_proto::channel::MARKER_BYTES;

    #[test]
    fn the_guest_gets_a_marker_first_and_its_bytes_pass_only_after_the_same_one() {
        let b = Bench::new();
        let (mut client, mut guest) = b.connect();
        client.write_all(b"hello").unwrap();
        let mark = exactly(&mut guest, MARK);
        assert_eq!(exactly(&mut guest, 5), b"hello");
        guest.write_all(b"old bytes").unwrap();
        guest.write_all(&marker(&[3; 16])).unwrap();
        guest.write_all(b"another generation").unwrap();
        guest.write_all(&mark).unwrap();
        guest.write_all(b"fresh").unwrap();
        assert_eq!(exactly(&mut client, 5), b"fresh");
        assert_eq!(b.shared.channel_bytes.load(Ordering::Relaxed), 10);
    }

    #[test]
    fn a_newer_client_replaces_the_older_with_another_generation() {
        let b = Bench::new();
        let (mut first, mut guest1) = b.connect();
        let mark1 = exactly(&mut guest1, MARK);
        let (mut second, mut guest2) = b.connect();
        assert_eq!(first.read(&mut [0; 1]).unwrap(), 0, "the old client is closed");
        assert_eq!(guest1.read(&mut [0; 1]).unwrap(), 0, "and so is its port");
        let mark2 = exactly(&mut guest2, MARK);
        assert_ne!(mark1, mark2);
        guest2.write_all(&mark1).unwrap();
        guest2.write_all(b"stale").unwrap();
        guest2.write_all(&mark2).unwrap();
        guest2.write_all(b"new").unwrap();
        assert_eq!(exactly(&mut second, 3), b"new");
    }

    #[test]
    fn a_megabyte_each_way_with_a_slow_reader_arrives_whole() {
        let b = Bench::new();
        let (client, mut guest) = b.connect();
        let mark = exactly(&mut guest, MARK);
        guest.write_all(&mark).unwrap();
        let data: Vec<u8> = (0..1_000_000u32).map(|i| (i * 7 + i / 251) as u8).collect();
        // Every escape byte occurs; none of ESC as a whole does, so the guest's side reads it plainly.
        let (mut writer, sent) = (client.try_clone().unwrap(), data.clone());
        let a = std::thread::spawn(move || writer.write_all(&sent).unwrap());
        let (mut back, sent) = (guest.try_clone().unwrap(), data.clone());
        // The deframer may hold back what could begin an escape; more bytes push it out.
        let c = std::thread::spawn(move || back.write_all(&[&sent[..], &[1; 16]].concat()).unwrap());
        let mut reader = client;
        assert!(exactly(&mut guest, data.len()) == data, "to the guest");
        assert!(exactly(&mut reader, data.len()) == data, "to the host");
        c.join().unwrap();
        a.join().unwrap();
    }

    #[test]
    fn nothing_passes_while_the_port_is_held() {
        let b = Bench::new();
        let (mut client, mut guest) = b.connect();
        let mark = exactly(&mut guest, MARK);
        guest.write_all(&mark).unwrap();
        b.shared.hold_port();
        client.write_all(b"ping").unwrap();
        guest.write_all(b"pong").unwrap();
        for s in [&mut client, &mut guest] {
            s.set_read_timeout(Some(Duration::from_millis(150))).unwrap();
            assert!(s.read(&mut [0; 1]).is_err(), "no byte passes");
            s.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        }
        b.shared.release_port();
        assert_eq!(exactly(&mut guest, 4), b"ping");
        assert_eq!(exactly(&mut client, 4), b"pong");
    }

    #[test]
    fn nothing_passes_after_the_lease_and_everything_after_its_return() {
        let b = Bench::new();
        let (mut client, mut guest) = b.connect();
        exactly(&mut guest, MARK);
        b.shared.close_gate_for_test();
        client.write_all(b"late").unwrap();
        guest.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        assert!(guest.read(&mut [0; 1]).is_err(), "no byte passes");
        guest.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        b.shared.renew_lease(OWN, u64::MAX).unwrap();
        assert_eq!(exactly(&mut guest, 4), b"late");
    }
}
