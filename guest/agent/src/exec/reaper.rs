//! Collects programs that ended. As PID 1 it also reaps orphans; elsewhere only what it started.

use std::{
    collections::BTreeMap,
    io,
    sync::{Mutex, MutexGuard, PoisonError},
};

use rustix::process::{Pid, WaitOptions, WaitStatus, wait, waitpid};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::oneshot,
};

use super::spawn::Command;

/// How a program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended {
    /// Exit code; 128 + n for signal n.
    pub code: u8,
    /// The signal that ended it, or 0.
    pub signal: u8,
}

impl Ended {
    fn from_status(status: WaitStatus) -> Self {
        let byte = |n: i32| u8::try_from(n & 0xff).unwrap_or(u8::MAX);
        match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => Self { code: byte(code), signal: 0 },
            (None, Some(signal)) => Self { code: byte(signal).saturating_add(128), signal: byte(signal) },
            (None, None) => Self { code: u8::MAX, signal: 0 },
        }
    }
}

/// The programs that are running, by process id.
#[derive(Debug)]
pub struct Reaper {
    table: Mutex<BTreeMap<i32, oneshot::Sender<Ended>>>,
    /// Wait for every child, not just for those in the table.
    all: bool,
}

impl Reaper {
    /// `all` for PID 1.
    pub fn new(all: bool) -> Self {
        Self { table: Mutex::new(BTreeMap::new()), all }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<i32, oneshot::Sender<Ended>>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a program. An error is that of the exec (not found, not executable) or of the system.
    pub fn spawn(&self, command: Command) -> io::Result<(Pid, oneshot::Receiver<Ended>)> {
        // Held across the fork: a program that ends at once must be in the table when it is reaped.
        let mut table = self.lock();
        let pid = command.start()?;
        let (ended, receiver) = oneshot::channel();
        table.insert(pid.as_raw_nonzero().get(), ended);
        Ok((pid, receiver))
    }

    /// Sends a signal to the process group that `pid` leads, unless it was reaped. False if it was.
    pub fn signal_group(&self, pid: Pid, number: u8) -> bool {
        // Held, so that the number cannot go to a later process with the same id.
        let table = self.lock();
        table.contains_key(&pid.as_raw_nonzero().get()) && crate::exec::spawn::signal_group(pid, number).is_ok()
    }

    /// Reaps until the runtime ends.
    pub async fn run(&self) {
        let mut children = match signal(SignalKind::child()) {
            Ok(children) => children,
            Err(why) => {
                crate::log::line(&format!("cannot watch for ended programs: {why}"));
                return;
            }
        };
        loop {
            // First, as programs may have ended before the handler was there.
            self.reap();
            if children.recv().await.is_none() {
                return;
            }
        }
    }

    fn reap(&self) {
        let mut table = self.lock();
        if self.all {
            while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
                if let Some(waiting) = table.remove(&pid.as_raw_nonzero().get()) {
                    let _ = waiting.send(Ended::from_status(status));
                }
            }
            return;
        }
        let pids: Vec<i32> = table.keys().copied().collect();
        for raw in pids {
            let Some(pid) = Pid::from_raw(raw) else { continue };
            let ended = match waitpid(Some(pid), WaitOptions::NOHANG) {
                Ok(None) => continue,
                Ok(Some((_, status))) => Ended::from_status(status),
                Err(_) => Ended { code: u8::MAX, signal: 0 },
            };
            if let Some(waiting) = table.remove(&raw) {
                let _ = waiting.send(ended);
            }
        }
    }
}
