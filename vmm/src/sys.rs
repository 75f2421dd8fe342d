//! What has no safe wrapper among our dependencies: signals as a descriptor, the TSC, the engine's
//! exit descriptor, and how much of a socket is unread.
#![expect(unsafe_code, reason = "signalfd, rdtsc, one ioctl, and a raw descriptor of the engine seam")]

use ks_vmm_core::engine::Engine;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Blocks SIGTERM, SIGINT and SIGHUP in this thread (and those it starts later) and returns a descriptor that becomes
/// readable when one arrives.
pub fn stop_signals() -> std::io::Result<OwnedFd> {
    // SAFETY: `set` is initialised by sigemptyset before use; signalfd returns a new descriptor or -1.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for s in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
            libc::sigaddset(&raw mut set, s);
        }
        if libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) != 0 {
            return Err(std::io::Error::last_os_error());
        }
        match libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC) {
            -1 => Err(std::io::Error::last_os_error()),
            fd => Ok(OwnedFd::from_raw_fd(fd)),
        }
    }
}

/// Bytes (with the kernel's overhead) that the other end of a local socket has not read yet; 0 when it read all.
pub fn unread(socket: &impl AsRawFd) -> std::io::Result<usize> {
    let mut n: libc::c_int = 0;
    // SAFETY: SIOCOUTQ (the same number as TIOCOUTQ) stores one int.
    match unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut n) } {
        0 => Ok(usize::try_from(n).unwrap_or(0)),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// The time stamp counter, now.
pub fn rdtsc() -> u64 {
    // SAFETY: every x86-64 processor has it, and it has no effect on memory.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// The engine's exit descriptor, for as long as the engine is borrowed.
pub fn borrow(engine: &dyn Engine) -> BorrowedFd<'_> {
    // SAFETY: an engine keeps its exit descriptor open until it is dropped, and the borrow keeps it from that.
    unsafe { BorrowedFd::borrow_raw(engine.exit_fd()) }
}
