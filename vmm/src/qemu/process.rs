//! QEMU as a process: where its program is, stopping and killing it, and how it ended. The starter starts it.

use crate::spawn::Child;
use ks_proto::control::Fault;
use ks_vmm_core::engine::Stopper;
use rustix::process::{Signal, WaitId, WaitIdOptions, pidfd_send_signal, waitid};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The program's name, sought in PATH.
pub const PROGRAM: &str = "qemu-system-x86_64";
/// How long a stop signal may take to reach every thread.
const STOP_BOUND: Duration = Duration::from_secs(2);

/// Where QEMU is: the given path, or the first in PATH.
pub fn find(given: Option<&Path>) -> Result<PathBuf, Fault> {
    let missing = |why: String| {
        Fault::new(
            "engine-missing",
            "start the qemu engine",
            why,
            "install the package qemu-system-x86 (apt-get install qemu-system-x86)",
        )
    };
    if let Some(p) = given {
        return if p.is_file() { Ok(p.to_path_buf()) } else { Err(missing(format!("there is no {}", p.display()))) };
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|d| d.join(PROGRAM)).find(|p| p.is_file());
    found.ok_or_else(|| missing(format!("{PROGRAM} is not in PATH")))
}

/// How it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// exit(2) with this code.
    Code(i32),
    /// By this signal.
    Signal(i32),
}

/// A running QEMU.
pub struct Process {
    child: Child,
    ended: Option<Ended>,
    frozen: Arc<AtomicBool>,
}

impl Process {
    /// Takes charge of a process that was started; a child of this one.
    pub fn new(child: Child, frozen: Arc<AtomicBool>) -> Self {
        Self { child, ended: None, frozen }
    }
    /// Its process id.
    pub fn pid(&self) -> i32 {
        self.child.pid
    }
    /// Readable once it has ended.
    pub fn pidfd(&self) -> &OwnedFd {
        &self.child.pidfd
    }
    /// How it ended, if it did.
    pub fn ended(&mut self) -> Option<Ended> {
        if self.ended.is_none() {
            let id = WaitId::PidFd(self.child.pidfd.as_fd());
            if let Ok(Some(status)) = waitid(id, WaitIdOptions::EXITED | WaitIdOptions::NOHANG) {
                self.ended = Some(match status.exit_status() {
                    Some(code) => Ended::Code(code),
                    None => Ended::Signal(status.terminating_signal().unwrap_or(0)),
                });
            }
        }
        self.ended
    }
    /// Ends it at once and reaps it.
    pub fn kill(&mut self) {
        if self.ended().is_none()
            && let Some(status) = crate::spawn::reap(&self.child)
        {
            self.ended = Some(Ended::Signal(status.terminating_signal().unwrap_or(0)));
        }
    }
    /// Works from any thread.
    pub fn stopper(&self) -> std::io::Result<Arc<dyn Stopper>> {
        let pidfd = self.child.pidfd.try_clone()?;
        Ok(Arc::new(SignalStopper { pidfd, pid: self.child.pid, frozen: self.frozen.clone() }))
    }
    /// What the kernel says that it is doing, for people.
    pub fn state_word(&self) -> &'static str {
        match thread_states(self.child.pid).first() {
            Some('T') => "stopped by a signal",
            Some('D') => "waiting for the disk",
            Some('Z' | 'X') | None => "gone",
            Some('R') => "busy",
            Some(_) => "idle",
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

struct SignalStopper {
    pidfd: OwnedFd,
    pid: i32,
    frozen: Arc<AtomicBool>,
}

impl Stopper for SignalStopper {
    fn freeze(&self) {
        self.frozen.store(true, Ordering::SeqCst);
        if pidfd_send_signal(&self.pidfd, Signal::STOP).is_err() {
            return;
        }
        let deadline = Instant::now() + STOP_BOUND;
        while !all_stopped(&thread_states(self.pid)) {
            if Instant::now() > deadline {
                // It does not stop: better no VM than a second one.
                tracing::error!("QEMU does not stop: it is killed");
                let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
                return;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    }
    fn thaw(&self) {
        let _ = pidfd_send_signal(&self.pidfd, Signal::CONT);
        self.frozen.store(false, Ordering::SeqCst);
    }
}

/// No thread executes: stopped, traced, dead, or in the kernel for something that a signal does not interrupt.
fn all_stopped(states: &[char]) -> bool {
    states.iter().all(|s| matches!(s, 'T' | 't' | 'Z' | 'X' | 'D'))
}

/// The state letter of every thread, the main one first; empty when the process is gone.
fn thread_states(pid: i32) -> Vec<char> {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let mut ids: Vec<i32> = tasks.flatten().filter_map(|e| e.file_name().to_str()?.parse().ok()).collect();
    ids.sort_by_key(|id| (*id != pid, *id));
    ids.iter().filter_map(|id| state_of(&std::fs::read_to_string(format!("/proc/{pid}/task/{id}/stat")).ok()?)).collect()
}

/// `pid (comm) S …`; the name may hold brackets and spaces.
fn state_of(stat: &str) -> Option<char> {
    stat.rsplit_once(')')?.1.trim_start().chars().next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_read_past_hostile_names() {
        assert_eq!(state_of("7 (a) b) T 1 2"), Some('T'));
        assert_eq!(state_of("junk"), None);
        assert!(all_stopped(&['T', 'T', 'D']) && all_stopped(&[]));
        assert!(!all_stopped(&['T', 'S']) && !all_stopped(&['R']));
    }

    #[test]
    fn a_missing_program_says_what_to_install() {
        let f = find(Some(Path::new("/nonexistent/qemu"))).unwrap_err();
        assert_eq!(f.code, "engine-missing");
        assert!(f.next.contains("qemu-system-x86"));
    }
}
