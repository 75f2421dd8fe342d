//! The guest of the VMM's own tests: `/init` of an initramfs. It speaks lines over the guest port, in generations, and
//! can say what it holds in memory and on disk. It needs only the image's kernel modules, not ks-guest.
//!
//! Each line is one command and has one answer line; see [`Guest::command`].

use ks_proto::channel::{Deframer, Escaper, Piece, marker};
use rustix::event::{PollFd, PollFlags, poll};
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

const DISK: &str = "/dev/vda";

fn mount(source: &str, at: &str, kind: &str) {
    std::fs::create_dir_all(at).expect("make a mount point");
    // The kernel may have mounted it already.
    let _ = rustix::mount::mount(source, at, kind, rustix::mount::MountFlags::empty(), None);
}

fn load_modules() {
    let list = std::fs::read_to_string("/ks/modules.list").unwrap_or_default();
    for name in list.lines().filter(|l| !l.is_empty()) {
        let loaded = File::open(Path::new("/ks/modules").join(name))
            .map_err(|e| e.to_string())
            .and_then(|f| rustix::system::finit_module(&f, c"", 0).map_err(|e| e.to_string()));
        if let Err(e) = loaded {
            println!("GUEST module {name}: {e}");
        }
    }
}

fn find_port() -> PathBuf {
    loop {
        for entry in std::fs::read_dir("/sys/class/virtio-ports").into_iter().flatten().flatten() {
            let name = std::fs::read_to_string(entry.path().join("name")).unwrap_or_default();
            let device = Path::new("/dev").join(entry.file_name());
            if name.trim() == ks_proto::guest::PORT_NAME && device.exists() {
                return device;
            }
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Fills memory that compresses badly and depends on `seed`.
fn fill(out: &mut [u8], seed: u64) {
    let mut s = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for word in out.chunks_exact_mut(8) {
        s ^= s << 13;
        s ^= s >> 7;
        s ^= s << 17;
        word.copy_from_slice(&s.to_le_bytes());
    }
}

#[derive(Default)]
struct Guest {
    memory: Vec<u8>,
    hang_ups: u32,
    connects: u32,
}

impl Guest {
    /// `ping`; `fill BYTES SEED`; `poke EVERY`; `hash`; `drop`; `write OFFSET BYTES SEED`; `read OFFSET BYTES`;
    /// `clock`; `random`; `echo BYTES`; `poweroff`; `panic`.
    fn command(&mut self, line: &str) -> String {
        let words: Vec<&str> = line.split(' ').collect();
        let n = |i: usize| words.get(i).and_then(|w| w.parse::<u64>().ok()).unwrap_or(0);
        let done = |r: std::io::Result<()>| r.map_or_else(|e| format!("error {e}"), |()| "ok".to_owned());
        match words[0] {
            "ping" => format!("pong connects={} hang_ups={}", self.connects, self.hang_ups),
            "fill" => {
                self.memory = vec![0; n(1) as usize];
                fill(&mut self.memory, n(2));
                "ok".to_owned()
            }
            "poke" => {
                for b in self.memory.iter_mut().step_by((n(1) as usize).max(1)) {
                    *b = b.wrapping_add(1);
                }
                "ok".to_owned()
            }
            "hash" => blake3::hash(&self.memory).to_hex().to_string(),
            "drop" => {
                self.memory = Vec::new();
                "ok".to_owned()
            }
            "write" => done(write_disk(n(1), n(2), n(3))),
            "read" => read_disk(n(1), n(2)).unwrap_or_else(|e| format!("error {e}")),
            "clock" => clock(),
            "random" => {
                let mut b = [0u8; 16];
                getrandom::fill(&mut b).map_or_else(|e| format!("error {e}"), |()| hex::encode(b))
            }
            "echo" => "x".repeat(n(1) as usize),
            "poweroff" => done(rustix::system::reboot(rustix::system::RebootCommand::PowerOff).map_err(Into::into)),
            "panic" => done(std::fs::write("/proc/sysrq-trigger", "c")),
            other => format!("error no command {other:?}"),
        }
    }
}

fn write_disk(offset: u64, bytes: u64, seed: u64) -> std::io::Result<()> {
    let mut data = vec![0; bytes as usize];
    fill(&mut data, seed);
    let mut disk = OpenOptions::new().write(true).open(DISK)?;
    disk.seek(SeekFrom::Start(offset))?;
    disk.write_all(&data)?;
    disk.sync_all()
}

/// The hash of what is on the disk, past the page cache.
fn read_disk(offset: u64, bytes: u64) -> std::io::Result<String> {
    std::fs::write("/proc/sys/vm/drop_caches", "3")?;
    let mut disk = File::open(DISK)?;
    disk.seek(SeekFrom::Start(offset))?;
    let mut data = vec![0; bytes as usize];
    disk.read_exact(&mut data)?;
    Ok(blake3::hash(&data).to_hex().to_string())
}

fn clock() -> String {
    let ms = |c| {
        let t = rustix::time::clock_gettime(c);
        t.tv_sec * 1000 + t.tv_nsec / 1_000_000
    };
    let source = std::fs::read_to_string("/sys/devices/system/clocksource/clocksource0/current_clocksource").unwrap_or_default();
    let (mono, real) = (ms(rustix::time::ClockId::Monotonic), ms(rustix::time::ClockId::Realtime));
    format!("source={} mono={mono} real={real}", source.trim())
}

fn serve(port: &Path) -> std::io::Result<()> {
    let mut file = OpenOptions::new().read(true).write(true).open(port)?;
    let mut guest = Guest::default();
    let (mut deframer, mut escaper, mut line) = (Deframer::new(), Escaper::default(), Vec::new());
    let mut open = false;
    println!("GUEST up");
    loop {
        let mut fds = [PollFd::new(&file, PollFlags::IN)];
        poll(&mut fds, None)?;
        let events = fds[0].revents();
        if events.contains(PollFlags::HUP) && !events.contains(PollFlags::IN) {
            guest.hang_ups += u32::from(open);
            open = false;
            std::thread::sleep(Duration::from_millis(5));
            continue;
        }
        let mut buffer = [0u8; 4096];
        let n = file.read(&mut buffer)?;
        for piece in deframer.push(&buffer[..n]) {
            match piece {
                Piece::Marker(g) => {
                    open = true;
                    guest.connects += 1;
                    line.clear();
                    escaper = Escaper::default();
                    file.write_all(&marker(&g))?;
                }
                Piece::Data(bytes) => line.extend(bytes),
            }
        }
        while let Some(end) = line.iter().position(|b| *b == b'\n') {
            let words: Vec<u8> = line.drain(..=end).collect();
            let mut answer = guest.command(String::from_utf8_lossy(&words).trim());
            answer.push('\n');
            let mut out = Vec::new();
            escaper.push(answer.as_bytes(), &mut out);
            // A port that was closed meanwhile is no reason to end.
            if let Err(e) = file.write_all(&out) {
                println!("GUEST write: {e}");
            }
        }
    }
}

fn main() {
    if std::process::id() != 1 {
        return println!("this program is the init of a test VM");
    }
    mount("dev", "/dev", "devtmpfs");
    mount("proc", "/proc", "proc");
    mount("sys", "/sys", "sysfs");
    load_modules();
    let port = find_port();
    let ended = serve(&port);
    println!("GUEST ended: {ended:?}");
}
