//! Transmission: a few threads share one connection. Each takes a whole request off the socket while the others wait
//! for their turn, serves it beside them, and answers.

use super::handshake::handshake;
use super::{BlockError, Blocks, PAYLOAD_BYTES_MAX, WORKERS};
use ks_vmm_core::confine::{Kind, enter};
use ks_vmm_core::lease::LeaseGate;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;
/// A write that waits for space on the host looks this often whether there is some.
const SPACE_LOOK: Duration = Duration::from_millis(250);
/// A write that waits for the lease looks this often whether it is back.
const HELD_LOOK: Duration = Duration::from_millis(25);

/// Called with a sentence when a request failed for a reason that the operator should read.
pub type OnFault = Arc<dyn Fn(String) + Send + Sync>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Op {
    Read,
    Write,
    Disconnect,
    Flush,
    Trim,
    Zeroes,
    Other,
}

struct Request {
    op: Op,
    cookie: u64,
    offset: u64,
    len: u32,
    payload: Vec<u8>,
}

struct Shared<B: ?Sized> {
    disk: Arc<B>,
    lease: Arc<LeaseGate>,
    reading: Mutex<UnixStream>,
    writing: Mutex<UnixStream>,
    on_fault: OnFault,
}

/// Serves `disk` on `stream` from threads of its own, until the other end closes.
pub fn serve<B: Blocks + ?Sized + 'static>(
    stream: UnixStream,
    disk: Arc<B>,
    lease: Arc<LeaseGate>,
    on_fault: OnFault,
) -> std::io::Result<()> {
    let mut first = stream.try_clone()?;
    let shared =
        Arc::new(Shared { disk, lease, reading: Mutex::new(stream.try_clone()?), writing: Mutex::new(stream), on_fault });
    let leader = move || {
        match handshake(&mut first, shared.disk.bytes()) {
            Ok(true) => {}
            Ok(false) => return,
            Err(e) => return tracing::debug!("nbd handshake: {e}"),
        }
        let workers: Vec<_> = (1..WORKERS)
            .filter_map(|_| {
                let s = shared.clone();
                std::thread::Builder::new()
                    .name("ks-disk".into())
                    .spawn(move || {
                        enter(Kind::Device);
                        work(&s);
                    })
                    .ok()
            })
            .collect();
        enter(Kind::Device);
        work(&shared);
        for w in workers {
            let _ = w.join();
        }
    };
    std::thread::Builder::new().name("ks-disk".into()).spawn(leader)?;
    Ok(())
}

fn work<B: Blocks + ?Sized>(s: &Shared<B>) {
    let end = || {
        let _ = s.writing.lock().unwrap_or_else(PoisonError::into_inner).shutdown(std::net::Shutdown::Both);
    };
    loop {
        let request = {
            let mut from = s.reading.lock().unwrap_or_else(PoisonError::into_inner);
            read_request(&mut *from)
        };
        let request = match request {
            Ok(r) if r.op != Op::Disconnect => r,
            Ok(_) => return end(),
            Err(e) => {
                tracing::debug!("nbd: {e}");
                return end();
            }
        };
        let mut answer = Vec::new();
        let error = match serve_one(s, &request, &mut answer) {
            Ok(()) => 0,
            Err(e) => {
                answer.clear();
                error_number(e, &s.on_fault)
            }
        };
        let head = [&REPLY_MAGIC.to_be_bytes()[..], &error.to_be_bytes(), &request.cookie.to_be_bytes()].concat();
        let mut to = s.writing.lock().unwrap_or_else(PoisonError::into_inner);
        if to.write_all(&head).and_then(|()| to.write_all(&answer)).is_err() {
            return;
        }
    }
}

fn error_number(e: BlockError, on_fault: &OnFault) -> u32 {
    match e {
        BlockError::Invalid => 22,
        BlockError::NoSpace(why) => {
            on_fault(why);
            28
        }
        BlockError::Io(why) => {
            on_fault(why);
            5
        }
        BlockError::Held => 108,
    }
}

fn bad(why: String) -> std::io::Error {
    std::io::Error::new(std::io::ErrorKind::InvalidData, why)
}

fn read_request(from: &mut impl Read) -> std::io::Result<Request> {
    let mut head = [0u8; 28];
    from.read_exact(&mut head)?;
    let u32_at = |i: usize| u32::from_be_bytes([head[i], head[i + 1], head[i + 2], head[i + 3]]);
    let u64_at = |i: usize| u64::from(u32_at(i)) << 32 | u64::from(u32_at(i + 4));
    if u32_at(0) != REQUEST_MAGIC {
        return Err(bad(format!("request magic {:#x}", u32_at(0))));
    }
    let op = match u16::from_be_bytes([head[6], head[7]]) {
        0 => Op::Read,
        1 => Op::Write,
        2 => Op::Disconnect,
        3 => Op::Flush,
        4 => Op::Trim,
        6 => Op::Zeroes,
        _ => Op::Other,
    };
    let (cookie, offset, len) = (u64_at(8), u64_at(16), u32_at(24));
    let mut payload = Vec::new();
    if op == Op::Write {
        if len > PAYLOAD_BYTES_MAX {
            return Err(bad(format!("a write of {len} bytes (the most is {PAYLOAD_BYTES_MAX})")));
        }
        payload.resize(len as usize, 0);
        from.read_exact(&mut payload)?;
    }
    Ok(Request { op, cookie, offset, len, payload })
}

fn serve_one<B: Blocks + ?Sized>(s: &Shared<B>, r: &Request, answer: &mut Vec<u8>) -> Result<(), BlockError> {
    let inside = r.offset.checked_add(u64::from(r.len)).is_some_and(|end| end <= s.disk.bytes());
    if !inside && r.op != Op::Flush {
        return Err(BlockError::Invalid);
    }
    match r.op {
        Op::Read => {
            if r.len > PAYLOAD_BYTES_MAX {
                return Err(BlockError::Invalid);
            }
            answer.resize(r.len as usize, 0);
            s.disk.read_at(r.offset, answer)
        }
        Op::Write => held(s, || s.disk.write_at(r.offset, &r.payload)),
        Op::Zeroes => held(s, || s.disk.write_zeroes(r.offset, u64::from(r.len))),
        Op::Trim => held(s, || s.disk.discard(r.offset, u64::from(r.len))),
        Op::Flush => s.disk.flush(),
        Op::Disconnect | Op::Other => Err(BlockError::Invalid),
    }
}

/// Repeats a write that the lease gate refused until the gate opens again, and one that found the host's disk full until there is
/// space: the guest must not see an error for either, because its file system would not survive it.
fn held<B: Blocks + ?Sized>(s: &Shared<B>, write: impl Fn() -> Result<(), BlockError>) -> Result<(), BlockError> {
    let mut told = false;
    loop {
        match write() {
            Err(BlockError::NoSpace(why)) if !hung_up(s) => {
                if !told {
                    (s.on_fault)(format!("{why}; the guest's writes wait until there is space"));
                    told = true;
                }
                std::thread::park_timeout(SPACE_LOOK);
            }
            Err(BlockError::Held) if hung_up(s) => return Err(BlockError::Held),
            Err(BlockError::Held) => {
                while !s.lease.may_run() && !hung_up(s) {
                    std::thread::park_timeout(HELD_LOOK);
                }
            }
            other => return other,
        }
    }
}

/// True once QEMU is gone.
fn hung_up<B: Blocks + ?Sized>(s: &Shared<B>) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let to = s.writing.lock().unwrap_or_else(PoisonError::into_inner);
    let mut fds = [PollFd::new(&*to, PollFlags::HUP)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_err() || fds[0].revents().contains(PollFlags::HUP)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ks_proto::RunToken;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::sync::mpsc;

    const SIZE: u64 = 1 << 20;
    const OWN: RunToken = RunToken { generation: 1, epoch: 1, run: 1 };

    struct Model {
        bytes: Mutex<Vec<u8>>,
        held: AtomicBool,
        full: AtomicBool,
        broken: AtomicBool,
        /// Reads at offset 0 wait here.
        gate: Mutex<Option<mpsc::Receiver<()>>>,
        flushes: AtomicUsize,
    }
    impl Model {
        fn range(&self, offset: u64, len: usize, f: impl FnOnce(&mut [u8])) -> Result<(), BlockError> {
            if self.broken.load(Ordering::SeqCst) {
                return Err(BlockError::Io("broken on purpose".into()));
            }
            let at = offset as usize;
            f(&mut self.bytes.lock().unwrap()[at..at + len]);
            Ok(())
        }
    }
    impl Blocks for Model {
        fn bytes(&self) -> u64 {
            SIZE
        }
        fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), BlockError> {
            if offset == 0
                && let Some(gate) = self.gate.lock().unwrap().take()
            {
                gate.recv_timeout(Duration::from_secs(10)).unwrap();
            }
            self.range(offset, buf.len(), |b| buf.copy_from_slice(b))
        }
        fn write_at(&self, offset: u64, data: &[u8]) -> Result<(), BlockError> {
            if self.held.load(Ordering::SeqCst) {
                return Err(BlockError::Held);
            }
            if self.full.load(Ordering::SeqCst) {
                return Err(BlockError::NoSpace("full on purpose".into()));
            }
            self.range(offset, data.len(), |b| b.copy_from_slice(data))
        }
        fn write_zeroes(&self, offset: u64, len: u64) -> Result<(), BlockError> {
            self.range(offset, len as usize, |b| b.fill(0))
        }
        fn discard(&self, offset: u64, len: u64) -> Result<(), BlockError> {
            self.write_zeroes(offset, len)
        }
        fn flush(&self) -> Result<(), BlockError> {
            self.flushes.fetch_add(1, Ordering::SeqCst);
            Ok(())
        }
    }

    /// A small client: handshake with NBD_OPT_GO, then raw requests.
    struct Client(UnixStream);
    impl Client {
        fn send(&mut self, op: u16, flags: u16, cookie: u64, offset: u64, len: u32, data: &[u8]) {
            let mut m = REQUEST_MAGIC.to_be_bytes().to_vec();
            m.extend(flags.to_be_bytes());
            m.extend(op.to_be_bytes());
            m.extend(cookie.to_be_bytes());
            m.extend(offset.to_be_bytes());
            m.extend(len.to_be_bytes());
            m.extend(data);
            self.0.write_all(&m).unwrap();
        }
        fn reply(&mut self) -> (u32, u64) {
            let mut h = [0u8; 16];
            self.0.read_exact(&mut h).unwrap();
            assert_eq!(h[..4], REPLY_MAGIC.to_be_bytes());
            (u32::from_be_bytes(h[4..8].try_into().unwrap()), u64::from_be_bytes(h[8..].try_into().unwrap()))
        }
        fn data(&mut self, len: usize) -> Vec<u8> {
            let mut b = vec![0; len];
            self.0.read_exact(&mut b).unwrap();
            b
        }
        fn simple(&mut self, op: u16, offset: u64, len: u32, data: &[u8]) -> u32 {
            self.send(op, 0, 42, offset, len, data);
            let (e, cookie) = self.reply();
            assert_eq!(cookie, 42);
            e
        }
        fn read(&mut self, offset: u64, len: u32) -> Vec<u8> {
            assert_eq!(self.simple(0, offset, len, &[]), 0);
            self.data(len as usize)
        }
    }

    type Faults = Arc<Mutex<Vec<String>>>;

    fn start() -> (Client, Arc<Model>, Arc<LeaseGate>, Faults) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let model = Arc::new(Model {
            bytes: Mutex::new(vec![0; SIZE as usize]),
            held: AtomicBool::new(false),
            full: AtomicBool::new(false),
            broken: AtomicBool::new(false),
            gate: Mutex::new(None),
            flushes: AtomicUsize::new(0),
        });
        let lease = Arc::new(LeaseGate::new(OWN));
        let faults: Faults = Faults::default();
        let told = faults.clone();
        serve(theirs, model.clone(), lease.clone(), Arc::new(move |f| told.lock().unwrap().push(f))).unwrap();
        let mut c = Client(ours);
        assert_eq!(c.data(18), b"NBDMAGICIHAVEOPT\0\x03");
        c.0.write_all(&3u32.to_be_bytes()).unwrap();
        // An option that is not offered, then a malformed GO, then a good one for a named export.
        for (option, body) in [(8u32, &b""[..]), (7, &b"\0\0\0\x09ab\0\0"[..]), (7, &b"\0\0\0\x02ks\0\x01\0\x03"[..])] {
            c.0.write_all(b"IHAVEOPT").unwrap();
            c.0.write_all(&option.to_be_bytes()).unwrap();
            c.0.write_all(&(body.len() as u32).to_be_bytes()).unwrap();
            c.0.write_all(body).unwrap();
        }
        let mut kinds = Vec::new();
        while kinds.last() != Some(&1) {
            let h = c.data(20);
            kinds.push(u32::from_be_bytes(h[12..16].try_into().unwrap()));
            let body = c.data(u32::from_be_bytes(h[16..20].try_into().unwrap()) as usize);
            if body.starts_with(&[0, 0]) {
                assert_eq!(body[2..10], SIZE.to_be_bytes());
            }
        }
        assert_eq!(kinds, [0x8000_0001, 0x8000_0003, 3, 3, 1]);
        (c, model, lease, faults)
    }

    #[test]
    fn random_requests_agree_with_a_model() {
        let (mut c, ..) = start();
        let mut model = vec![0u8; SIZE as usize];
        let mut seed = 0x9e37_79b9_7f4a_7c15u64;
        let mut next = move |n: u64| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed % n
        };
        for i in 0..400u64 {
            let offset = next(SIZE - 1);
            let len = (next(70_000) + 1).min(SIZE - offset);
            let range = offset as usize..(offset + len) as usize;
            match next(4) {
                0 => {
                    let data: Vec<u8> = (0..len).map(|k| (k.wrapping_mul(31) + i) as u8).collect();
                    assert_eq!(c.simple(1, offset, len as u32, &data), 0);
                    model[range].copy_from_slice(&data);
                }
                1 => {
                    assert_eq!(c.simple(if i % 2 == 0 { 4 } else { 6 }, offset, len as u32, &[]), 0);
                    model[range].fill(0);
                }
                _ => assert_eq!(c.read(offset, len as u32), model[range]),
            }
        }
        assert_eq!(c.simple(3, 0, 0, &[]), 0);
    }

    #[test]
    fn a_slow_read_does_not_hold_up_the_others() {
        let (mut c, model, ..) = start();
        let (open, gate) = mpsc::channel();
        *model.gate.lock().unwrap() = Some(gate);
        c.send(0, 0, 1, 0, 512, &[]);
        c.send(1, 1, 2, 4096, 4, b"abcd");
        assert_eq!(c.reply(), (0, 2), "the write is answered while the read waits");
        c.send(3, 0, 3, 0, 0, &[]);
        assert_eq!(c.reply(), (0, 3));
        open.send(()).unwrap();
        assert_eq!(c.reply(), (0, 1));
        c.data(512);
        assert_eq!(c.read(4096, 4), b"abcd");
        assert_eq!(model.flushes.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn requests_outside_the_disk_and_unknown_ones_get_einval_and_the_connection_lives() {
        let (mut c, ..) = start();
        assert_eq!(c.simple(0, SIZE, 1, &[]), 22);
        assert_eq!(c.simple(1, u64::MAX, 1, b"x"), 22);
        assert_eq!(c.simple(6, SIZE - 1, 2, &[]), 22);
        assert_eq!(c.simple(9, 0, 1, &[]), 22);
        assert_eq!(c.read(0, 4), [0; 4]);
    }

    #[test]
    fn a_broken_disk_is_an_error_for_the_guest_and_a_sentence_for_the_operator() {
        let (mut c, model, _, faults) = start();
        model.broken.store(true, Ordering::SeqCst);
        assert_eq!(c.simple(0, 0, 8, &[]), 5);
        assert_eq!(*faults.lock().unwrap(), ["broken on purpose"]);
    }

    #[test]
    fn a_write_after_the_lease_waits_for_the_lease() {
        let (mut c, model, lease, _) = start();
        model.held.store(true, Ordering::SeqCst);
        c.send(1, 0, 9, 0, 2, b"zz");
        assert_eq!(c.read(4096, 1), [0], "reads go on");
        model.held.store(false, Ordering::SeqCst);
        lease.renew(OWN, u64::MAX).unwrap();
        assert_eq!(c.reply(), (0, 9));
        assert_eq!(c.read(0, 2), b"zz");
    }

    #[test]
    fn a_write_to_a_full_host_waits_for_space_and_tells_the_operator_once() {
        let (mut c, model, _, faults) = start();
        model.full.store(true, Ordering::SeqCst);
        c.send(1, 0, 9, 0, 2, b"zz");
        assert_eq!(c.read(4096, 1), [0], "reads go on");
        let deadline = std::time::Instant::now() + Duration::from_secs(10);
        while faults.lock().unwrap().is_empty() {
            assert!(std::time::Instant::now() < deadline, "nobody was told");
            std::thread::yield_now();
        }
        model.full.store(false, Ordering::SeqCst);
        assert_eq!(c.reply(), (0, 9));
        assert_eq!(c.read(0, 2), b"zz");
        assert_eq!(*faults.lock().unwrap(), ["full on purpose; the guest's writes wait until there is space"]);
    }

    #[test]
    fn garbage_ends_the_connection() {
        let (mut c, ..) = start();
        c.0.write_all(&[7; 28]).unwrap();
        assert_eq!(c.0.read(&mut [0; 1]).unwrap(), 0);
        let (mut c, ..) = start();
        c.send(1, 0, 1, 0, u32::MAX, &[]);
        assert_eq!(c.0.read(&mut [0; 1]).unwrap(), 0);
    }
}
