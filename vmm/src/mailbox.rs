//! A bounded queue whose reader can wait for it together with other descriptors.

use rustix::event::{EventfdFlags, eventfd};
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

/// Messages that may wait.
const WAITING_MAX: usize = 256;

/// Many senders, one reader.
pub struct Mailbox<T> {
    queue: Mutex<VecDeque<T>>,
    bell: OwnedFd,
}

impl<T> Mailbox<T> {
    /// An empty one.
    pub fn new() -> std::io::Result<Self> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { queue: Mutex::new(VecDeque::new()), bell })
    }
    /// Adds a message; gives it back when too many wait.
    pub fn push(&self, message: T) -> Result<(), T> {
        let mut q = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        if q.len() >= WAITING_MAX {
            return Err(message);
        }
        q.push_back(message);
        self.ring();
        Ok(())
    }
    /// Wakes the reader without a message.
    pub fn ring(&self) {
        // It can only fail when the bell is ringing already.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }
    /// Takes everything that waits and silences the bell.
    pub fn take(&self) -> VecDeque<T> {
        let mut q = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = rustix::io::read(&self.bell, &mut [0u8; 8]);
        std::mem::take(&mut *q)
    }
}

impl<T> AsFd for Mailbox<T> {
    /// Readable while something waits.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}
