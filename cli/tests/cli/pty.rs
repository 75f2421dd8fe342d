//! `ks` on a pseudo-terminal of its own, and everything that it writes there.

use crate::fake::DEADLINE;
use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Termios, Winsize, tcgetattr, tcsetwinsize};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

pub struct Terminal {
    master: Arc<OwnedFd>,
    slave: OwnedFd,
    seen: Arc<(Mutex<Vec<u8>>, Condvar)>,
}

impl Terminal {
    pub fn new(cols: u16, rows: u16) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, vec![]).unwrap();
        let slave = rustix::fs::open(name.as_c_str(), OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty()).unwrap();
        let me = Self { master: Arc::new(master), slave, seen: Arc::default() };
        me.resize(cols, rows);
        let (master, seen) = (me.master.clone(), me.seen.clone());
        std::thread::spawn(move || {
            let mut buffer = vec![0; 64 * 1024];
            while let Ok(n) = rustix::io::read(master.as_fd(), &mut buffer) {
                seen.0.lock().unwrap().extend_from_slice(&buffer[..n]);
                seen.1.notify_all();
            }
        });
        me
    }
    /// Starts the command with this terminal as its own.
    pub fn start(&self, command: &Command) -> Child {
        // setsid(1) makes it the controlling terminal, then becomes the command: the process id stays.
        let mut c = Command::new("setsid");
        c.arg("-c").arg(command.get_program()).args(command.get_args()).env_clear();
        c.envs(command.get_envs().filter_map(|(k, v)| v.map(|v| (k, v)))).current_dir(command.get_current_dir().unwrap());
        let end = || Stdio::from(self.slave.try_clone().unwrap());
        c.stdin(end()).stdout(end()).stderr(end()).spawn().unwrap()
    }
    pub fn resize(&self, cols: u16, rows: u16) {
        tcsetwinsize(self.master.as_fd(), Winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
    }
    pub fn type_in(&self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let n = rustix::io::write(self.master.as_fd(), bytes).unwrap();
            bytes = &bytes[n..];
        }
    }
    pub fn modes(&self) -> Termios {
        tcgetattr(&self.slave).unwrap()
    }
    pub fn seen(&self) -> Vec<u8> {
        self.seen.0.lock().unwrap().clone()
    }
    pub fn forget(&self) {
        self.seen.0.lock().unwrap().clear();
    }
    /// Waits until what was written holds `text`; returns how long it took.
    pub fn wait(&self, text: &str) -> Duration {
        let begun = Instant::now();
        let mut seen = self.seen.0.lock().unwrap();
        let mut from = 0;
        loop {
            if contains(&seen[from.min(seen.len())..], text.as_bytes()) {
                return begun.elapsed();
            }
            // What was searched is not searched again: a flood would be slowed down by its own test.
            from = (seen.len() + 1).saturating_sub(text.len());
            let left = DEADLINE.saturating_sub(begun.elapsed());
            assert!(!left.is_zero(), "never seen: {text:?}; the end of what was: {:?}", tail(&seen));
            seen = self.seen.1.wait_timeout(seen, left).unwrap().0;
        }
    }
}

pub fn contains(all: &[u8], part: &[u8]) -> bool {
    all.windows(part.len()).any(|w| w == part)
}

fn tail(seen: &[u8]) -> String {
    String::from_utf8_lossy(&seen[seen.len().saturating_sub(600)..]).into_owned()
}

/// Waits for the end of a process, with a deadline; its exit code, 128+n for signal n.
pub fn ended(child: &mut Child) -> i32 {
    use std::os::unix::process::ExitStatusExt;
    let until = Instant::now() + DEADLINE;
    loop {
        if let Some(s) = child.try_wait().unwrap() {
            return s.code().unwrap_or_else(|| 128 + s.signal().unwrap());
        }
        assert!(Instant::now() < until, "it does not end");
        std::thread::park_timeout(Duration::from_millis(10));
    }
}
