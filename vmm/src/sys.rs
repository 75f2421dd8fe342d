//! What has no safe wrapper among our dependencies: signals as a descriptor, the TSC, the engine's exit descriptor, how
//! much of a socket is unread, forking, leaving namespaces, closing what was inherited.
#![expect(
    unsafe_code,
    reason = "signalfd, rdtsc, one ioctl, fork, unshare, close_range, and a raw descriptor of the engine seam"
)]

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

/// Leaves namespaces. This process has one thread, and has no open files through which it could come back.
pub fn unshare(flags: rustix::thread::UnshareFlags) -> rustix::io::Result<()> {
    // SAFETY: descriptors stay shared (CLONE_FILES is not among the flags that callers use), so no other thread's or
    // library's view of them changes.
    unsafe { rustix::thread::unshare_unsafe(flags) }
}

/// Forks this process, which must have one thread: the child may then do everything. None in the child.
///
/// # Errors
/// What the kernel refused, or that there are several threads.
pub fn fork() -> std::io::Result<Option<rustix::process::Pid>> {
    if std::fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(std::io::Error::other("a process with several threads cannot be forked"));
    }
    // SAFETY: there is one thread, so no lock is held by a thread that the child lacks.
    match unsafe { libc::fork() } {
        -1 => Err(std::io::Error::last_os_error()),
        pid => Ok(rustix::process::Pid::from_raw(pid)),
    }
}

/// Closes every descriptor of this process but standard ones and `kept`. Whoever calls it never uses or drops an owner
/// of the others: the process leaves by [`leave`].
pub fn keep_only(kept: &[std::os::fd::RawFd]) {
    let mut kept: Vec<u32> = kept.iter().filter_map(|fd| u32::try_from(*fd).ok()).filter(|fd| *fd > 2).collect();
    kept.sort_unstable();
    kept.dedup();
    let mut from = 3u32;
    for fd in kept.into_iter().chain([u32::MAX]) {
        if from < fd {
            // SAFETY: closes descriptors whose owners are never used again (the caller's duty).
            unsafe { libc::syscall(libc::SYS_close_range, from, fd - u32::from(fd != u32::MAX), 0u32) };
        }
        from = fd.saturating_add(1);
    }
}

/// Ends this process without running destructors.
pub fn leave(code: i32) -> ! {
    // SAFETY: no preconditions.
    unsafe { libc::_exit(code) }
}

/// Bounds the allocator's arenas: more threads than this share them.
pub fn limit_arenas() {
    // SAFETY: sets a number in the C library.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 16) };
}
