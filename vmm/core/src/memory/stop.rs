//! A stop signal that both poll and timed waits notice.

use crate::source::lock;
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Set once, never unset.
#[derive(Debug)]
pub struct Stop {
    fd: OwnedFd,
    set: Mutex<bool>,
    wake: Condvar,
}

impl Stop {
    /// Not set.
    pub fn new() -> rustix::io::Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { fd, set: Mutex::new(false), wake: Condvar::new() })
    }
    /// Sets it and wakes everyone. True if it was not set before.
    pub fn set(&self) -> bool {
        let before = std::mem::replace(&mut *lock(&self.set), true);
        self.wake.notify_all();
        // A full counter is readable as well.
        let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
        !before
    }
    /// True once set.
    pub fn is_set(&self) -> bool {
        *lock(&self.set)
    }
    /// Waits at most `time`; true if set.
    pub fn wait(&self, time: Duration) -> bool {
        let (set, _) = self.wake.wait_timeout_while(lock(&self.set), time, |set| !*set).unwrap_or_else(PoisonError::into_inner);
        *set
    }
}

impl AsFd for Stop {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
