//! A small typed QMP client over an inherited socket: one command at a time, a deadline on each, events kept aside.
//!
//! While the lease watchdog holds QEMU stopped, QMP is silent by our own doing: that time does not count.

use serde_json::{Value, json};
use std::collections::VecDeque;
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The longest line that QMP may send.
const LINE_BYTES_MAX: usize = 4 * 1024 * 1024;
/// Events kept while nobody asks for them; older ones are dropped.
const EVENTS_MAX: usize = 256;
/// How often a waiting command looks whether QEMU was stopped by the watchdog.
const LOOK: Duration = Duration::from_millis(200);

/// Why a command has no result.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// No answer in time.
    #[error("QMP was silent for {} ms after {command:?}", bound.as_millis())]
    Silent { command: String, bound: Duration },
    /// QEMU refused.
    #[error("QEMU refused {command:?}: {why}")]
    Refused { command: String, why: String },
    /// QEMU closed the socket: it is dead or dying.
    #[error("QEMU closed the QMP socket during {command:?}")]
    Closed { command: String },
    /// Bytes that are no QMP.
    #[error("QMP sent something that is not a message: {0}")]
    Garbage(String),
}

/// An unasked message.
#[derive(Debug, Clone, PartialEq)]
pub struct QmpEvent {
    /// `STOP`, `SHUTDOWN`, …
    pub name: String,
    /// Its data, or null.
    pub data: Value,
}

/// QEMU's version as it tells it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QemuVersion {
    /// `7.2.22`.
    pub number: String,
    /// `Debian 1:7.2+dfsg-7+deb12u18+b3`, or "".
    pub package: String,
}

/// The client's end.
pub struct Qmp {
    stream: UnixStream,
    buffer: Vec<u8>,
    next_id: u64,
    events: VecDeque<QmpEvent>,
    frozen: Arc<AtomicBool>,
}

impl Qmp {
    /// Over our end of the socket pair; `frozen` is true while the watchdog holds QEMU stopped.
    pub fn new(stream: UnixStream, frozen: Arc<AtomicBool>) -> Self {
        Self { stream, buffer: Vec::new(), next_id: 0, events: VecDeque::new(), frozen }
    }

    /// Reads the greeting and leaves negotiation mode.
    pub fn handshake(&mut self, bound: Duration) -> Result<QemuVersion, QmpError> {
        let mut clock = Clock::new("greeting", bound);
        let greeting = self.message(&mut clock)?;
        let v = &greeting["QMP"]["version"];
        let n = |k: &str| v["qemu"][k].as_u64().unwrap_or(0);
        if v.is_null() {
            return Err(QmpError::Garbage(shorten(&greeting.to_string())));
        }
        let version = QemuVersion {
            number: format!("{}.{}.{}", n("major"), n("minor"), n("micro")),
            package: v["package"].as_str().unwrap_or("").to_owned(),
        };
        self.execute("qmp_capabilities", json!({}), bound)?;
        Ok(version)
    }

    /// Runs one command.
    pub fn execute(&mut self, command: &str, arguments: Value, bound: Duration) -> Result<Value, QmpError> {
        self.execute_with_fd(command, arguments, None, bound)
    }

    /// Runs one command that takes a descriptor (`getfd`).
    pub fn execute_with_fd(
        &mut self,
        command: &str,
        arguments: Value,
        fd: Option<BorrowedFd<'_>>,
        bound: Duration,
    ) -> Result<Value, QmpError> {
        let id = self.send(command, arguments, fd)?;
        let mut clock = Clock::new(command, bound);
        loop {
            let m = self.message(&mut clock)?;
            if m["id"].as_u64() != Some(id) {
                self.keep_event(m);
                continue;
            }
            if let Some(value) = m.get("return") {
                return Ok(value.clone());
            }
            let why = m["error"]["desc"].as_str().unwrap_or("no reason given").to_owned();
            return Err(QmpError::Refused { command: command.to_owned(), why });
        }
    }

    /// Sends a command without waiting; its answer is dropped when it comes.
    pub fn send(&mut self, command: &str, arguments: Value, fd: Option<BorrowedFd<'_>>) -> Result<u64, QmpError> {
        self.next_id += 1;
        let mut line = json!({ "execute": command, "arguments": arguments, "id": self.next_id }).to_string().into_bytes();
        line.push(b'\n');
        let fds: Vec<BorrowedFd<'_>> = fd.into_iter().collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(rustix::net::SendAncillaryMessage::ScmRights(&fds)), "sized for one");
        }
        let closed = |_| QmpError::Closed { command: command.to_owned() };
        let mut at = 0;
        while at < line.len() {
            let flags = rustix::net::SendFlags::NOSIGNAL;
            at += rustix::net::sendmsg(&self.stream, &[IoSlice::new(&line[at..])], &mut control, flags).map_err(closed)?;
            control.clear();
        }
        Ok(self.next_id)
    }

    /// Waits for an event that `wanted` accepts; others stay kept.
    pub fn wait_event(
        &mut self,
        what: &str,
        bound: Duration,
        mut wanted: impl FnMut(&QmpEvent) -> bool,
    ) -> Result<QmpEvent, QmpError> {
        let mut clock = Clock::new(what, bound);
        loop {
            if let Some(i) = self.events.iter().position(&mut wanted) {
                return Ok(self.events.remove(i).expect("found just now"));
            }
            let m = self.message(&mut clock)?;
            self.keep_event(m);
        }
    }

    /// Drops kept events of this name.
    pub fn forget(&mut self, name: &str) {
        self.events.retain(|e| e.name != name);
    }

    /// Everything that QEMU still said; used once it is dead.
    pub fn last_words(&mut self) -> Vec<QmpEvent> {
        let mut clock = Clock::new("last words", Duration::from_millis(50));
        while let Ok(m) = self.message(&mut clock) {
            self.keep_event(m);
        }
        self.events.drain(..).collect()
    }

    fn keep_event(&mut self, m: Value) {
        if let Some(name) = m["event"].as_str() {
            if self.events.len() == EVENTS_MAX {
                self.events.pop_front();
            }
            self.events.push_back(QmpEvent { name: name.to_owned(), data: m["data"].clone() });
        }
    }

    /// The next whole line as JSON.
    fn message(&mut self, clock: &mut Clock) -> Result<Value, QmpError> {
        loop {
            if let Some(end) = self.buffer.iter().position(|b| *b == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                let text = String::from_utf8_lossy(&line);
                return serde_json::from_str(text.trim()).map_err(|_| QmpError::Garbage(shorten(&text)));
            }
            if self.buffer.len() > LINE_BYTES_MAX {
                return Err(QmpError::Garbage(format!("a line of more than {LINE_BYTES_MAX} bytes")));
            }
            clock.wait_readable(&self.stream, &self.frozen)?;
            let mut chunk = [0u8; 16 * 1024];
            match self.stream.read(&mut chunk) {
                Ok(0) | Err(_) => return Err(QmpError::Closed { command: clock.command.clone() }),
                Ok(n) => self.buffer.extend_from_slice(&chunk[..n]),
            }
        }
    }
}

/// A deadline that stands still while QEMU is held stopped.
struct Clock {
    command: String,
    bound: Duration,
    left: Duration,
}

impl Clock {
    fn new(command: &str, bound: Duration) -> Self {
        Self { command: command.to_owned(), bound, left: bound }
    }
    fn wait_readable(&mut self, stream: &UnixStream, frozen: &AtomicBool) -> Result<(), QmpError> {
        loop {
            let step = self.left.min(LOOK);
            let was_frozen = frozen.load(Ordering::SeqCst);
            let began = Instant::now();
            let mut fds = [rustix::event::PollFd::from_borrowed_fd(stream.as_fd(), rustix::event::PollFlags::IN)];
            let timeout = rustix::event::Timespec { tv_sec: 0, tv_nsec: i64::from(step.subsec_nanos()) };
            match rustix::event::poll(&mut fds, Some(&timeout)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                Ok(_) => return Ok(()),
                Err(e) => return Err(QmpError::Garbage(e.to_string())),
            }
            if !was_frozen && !frozen.load(Ordering::SeqCst) {
                self.left = self.left.saturating_sub(began.elapsed());
                if self.left.is_zero() {
                    return Err(QmpError::Silent { command: self.command.clone(), bound: self.bound });
                }
            }
        }
    }
}

fn shorten(text: &str) -> String {
    text.chars().take(200).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Write};

    fn server(script: impl FnOnce(UnixStream) + Send + 'static) -> Qmp {
        let (ours, theirs) = UnixStream::pair().unwrap();
        std::thread::spawn(move || script(theirs));
        Qmp::new(ours, Arc::new(AtomicBool::new(false)))
    }
    fn line(r: &mut BufReader<UnixStream>) -> Value {
        let mut l = String::new();
        r.read_line(&mut l).unwrap();
        serde_json::from_str(&l).unwrap()
    }
    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn answers_are_matched_by_id_and_events_are_kept() {
        let mut q = server(|mut s| {
            let mut r = BufReader::new(s.try_clone().unwrap());
            writeln!(s, r#"{{"QMP":{{"version":{{"qemu":{{"major":7,"minor":2,"micro":22}},"package":"Debian x"}}}}}}"#).unwrap();
            let m = line(&mut r);
            writeln!(s, "{}", json!({"return": {}, "id": m["id"]})).unwrap();
            let m = line(&mut r);
            writeln!(s, "{}", json!({"return": "stale", "id": 77})).unwrap();
            writeln!(s, "{}", json!({"event": "STOP", "data": {"a": 1}})).unwrap();
            write!(s, "{}", json!({"error": {"class": "GenericError", "desc": "no"}, "id": m["id"]})).unwrap();
            writeln!(s).unwrap();
        });
        assert_eq!(q.handshake(SECOND).unwrap(), QemuVersion { number: "7.2.22".into(), package: "Debian x".into() });
        assert!(matches!(q.execute("stop", json!({}), SECOND), Err(QmpError::Refused { why, .. }) if why == "no"));
        assert_eq!(q.wait_event("STOP", SECOND, |e| e.name == "STOP").unwrap().data, json!({"a": 1}));
        assert!(matches!(q.execute("cont", json!({}), SECOND), Err(QmpError::Closed { .. })));
    }

    #[test]
    fn silence_ends_at_the_bound_but_time_held_stopped_does_not_count() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let frozen = Arc::new(AtomicBool::new(false));
        let mut q = Qmp::new(ours, frozen.clone());
        let began = Instant::now();
        let bound = Duration::from_millis(120);
        assert!(matches!(q.execute("stop", json!({}), bound), Err(QmpError::Silent { .. })));
        assert!(began.elapsed() >= bound);
        frozen.store(true, Ordering::SeqCst);
        let waiter = std::thread::spawn(move || q.execute("stop", json!({}), bound));
        let mut r = BufReader::new(theirs.try_clone().unwrap());
        let _first = line(&mut r);
        let second = line(&mut r);
        // Longer than the bound: the answer still counts.
        std::thread::park_timeout(Duration::from_millis(400));
        let mut w = theirs;
        writeln!(w, "{}", json!({"return": 5, "id": second["id"]})).unwrap();
        assert_eq!(waiter.join().unwrap().unwrap(), json!(5));
    }

    #[test]
    fn garbage_and_endless_lines_are_refused() {
        let mut q = server(|mut s| s.write_all(b"hello\n").unwrap());
        assert!(matches!(q.handshake(SECOND), Err(QmpError::Garbage(_))));
        let mut q = server(|mut s| {
            let _ = s.write_all(&vec![b'x'; LINE_BYTES_MAX + 20_000]);
        });
        assert!(matches!(q.handshake(Duration::from_secs(20)), Err(QmpError::Garbage(_))));
    }
}
