//! The thread of one device: waits for kicks, the control descriptor and the device's own, and steps until idle.

use super::{Progress, Slot};
use crate::sys::fd;
use ks_vmm_core::confine::{Kind, enter};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;
use std::thread::JoinHandle;

/// Starts the worker of `slot`; it ends after [`super::mmio::MmioSlot::end`].
pub fn spawn(slot: Slot) -> std::io::Result<JoinHandle<()>> {
    let name = slot.with_core(|c| c.device.name());
    std::thread::Builder::new().name(format!("ks-{name}")).spawn(move || {
        enter(Kind::Device);
        work(&slot);
    })
}

fn work(slot: &Slot) {
    while !slot.ended() {
        let mut wait = None;
        loop {
            match slot.step() {
                Some(Progress::More) => {}
                Some(Progress::Idle) | None => break,
                Some(Progress::Later(ms)) => {
                    wait = Some(ms);
                    break;
                }
            }
        }
        if let Err(e) = sleep(slot, wait) {
            tracing::error!("device worker: {e}");
            return;
        }
    }
}

/// Waits for a reason to step again.
fn sleep(slot: &Slot, timeout_ms: Option<u16>) -> rustix::io::Result<()> {
    let watched = if timeout_ms.is_some() { None } else { slot.watch() };
    let mut fds: Vec<PollFd<'_>> = std::iter::once(&slot.control)
        .chain(&slot.kicks)
        .map(|e| PollFd::from_borrowed_fd(fd::borrow(e), PollFlags::IN))
        .collect();
    if let Some((stream, events)) = &watched {
        fds.push(PollFd::new(&**stream, *events));
    }
    let timeout = timeout_ms.map(|ms| Timespec { tv_sec: 0, tv_nsec: i64::from(ms.min(999)) * 1_000_000 });
    match poll(&mut fds, timeout.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(e) => return Err(e),
    }
    for event in std::iter::once(&slot.control).chain(&slot.kicks) {
        // Non-blocking; empty is fine.
        let _ = event.read();
    }
    Ok(())
}
