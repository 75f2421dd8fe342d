//! Preloaded into QEMU: makes the userfaultfd for the guest's memory inside the process that maps it, and hands it out.
//!
//! It replaces `mmap`/`mmap64` with plain system calls. The first writable shared mapping of the file that the
//! environment names is registered (write-protect always, missing only when asked) and one message of 32 bytes goes
//! out over an inherited socket: magic, base, length, negative errno or 0, with the descriptor when it is 0. Nothing
//! here may fail QEMU: on any error the mapping is still returned and the other side falls back. The socket, the
//! device descriptor and our copy of the userfaultfd are closed afterwards and LD_PRELOAD is removed.
//!
//! Environment: `KS_MEM_FD` the memory file, `KS_SHIM_FD` the socket, `KS_UFFD_DEV` an open /dev/userfaultfd (works
//! without privileges) or absent, `KS_UFFD_FEATURES` decimal feature bits, `KS_UFFD_MODE` decimal register modes.
#![expect(unsafe_code, reason = "a preload hook is made of raw system calls")]

use libc::{c_char, c_int, c_void, off_t, size_t};
use std::sync::atomic::{AtomicBool, Ordering};

/// First word of the message.
const MAGIC: u64 = 0x4b53_5348_494d_3031;
const UFFD_API: u64 = 0xaa;
const USERFAULTFD_IOC_NEW: u64 = 0xaa00;
const UFFDIO_API: u64 = 0xc018_aa3f;
const UFFDIO_REGISTER: u64 = 0xc020_aa00;

static DONE: AtomicBool = AtomicBool::new(false);

#[repr(C)]
struct UffdApi {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct UffdRegister {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

/// The C library's `mmap`, then the hook.
///
/// # Safety
/// As mmap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(addr: *mut c_void, len: size_t, prot: c_int, flags: c_int, fd: c_int, off: off_t) -> *mut c_void {
    // SAFETY: the caller keeps mmap(2)'s contract; libc's syscall wrapper sets errno as mmap does.
    let at = unsafe { libc::syscall(libc::SYS_mmap, addr, len, prot, flags, fd, off) } as *mut c_void;
    if at != libc::MAP_FAILED && fd >= 0 && prot & libc::PROT_WRITE != 0 && flags & libc::MAP_SHARED != 0 {
        // SAFETY: at..at+len was mapped just now.
        unsafe { after_map(at as u64, len as u64, fd) };
    }
    at
}

/// See [`mmap64`]; the same on 64-bit systems.
///
/// # Safety
/// As mmap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(addr: *mut c_void, len: size_t, prot: c_int, flags: c_int, fd: c_int, off: off_t) -> *mut c_void {
    // SAFETY: passed on as it came.
    unsafe { mmap64(addr, len, prot, flags, fd, off) }
}

fn env_number(name: &'static [u8]) -> Option<u64> {
    debug_assert!(name.ends_with(&[0]));
    // SAFETY: `name` ends with a zero byte; the returned string is only read, before any thread could change it.
    let at = unsafe { libc::getenv(name.as_ptr().cast::<c_char>()) };
    if at.is_null() {
        return None;
    }
    let mut value: u64 = 0;
    let mut n = 0;
    loop {
        // SAFETY: getenv returns a string that ends with a zero byte, and reading stops there.
        let c = unsafe { *at.add(n) } as u8;
        match c {
            0 => return (n > 0).then_some(value),
            b'0'..=b'9' => value = value.checked_mul(10)?.checked_add(u64::from(c - b'0'))?,
            _ => return None,
        }
        n += 1;
    }
}

fn env_fd(name: &'static [u8]) -> Option<c_int> {
    env_number(name).and_then(|n| c_int::try_from(n).ok())
}

/// Device and inode of an open file.
fn identity(fd: c_int) -> Option<(u64, u64)> {
    // SAFETY: an all-zero stat is a valid value to be filled in.
    let mut st: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: `st` is writable and of the right type.
    (unsafe { libc::fstat(fd, &raw mut st) } == 0).then_some((st.st_dev, st.st_ino))
}

fn errno() -> i64 {
    // SAFETY: always points to this thread's errno.
    i64::from(unsafe { *libc::__errno_location() })
}

/// # Safety
/// `base..base + len` must be mapped.
unsafe fn after_map(base: u64, len: u64, fd: c_int) {
    let (Some(mem), Some(sock)) = (env_fd(b"KS_MEM_FD\0"), env_fd(b"KS_SHIM_FD\0")) else { return };
    if identity(mem) != identity(fd) || identity(fd).is_none() || DONE.swap(true, Ordering::SeqCst) {
        return;
    }
    // SAFETY: errno is restored below because callers of mmap may look at it after a success.
    let saved = unsafe { *libc::__errno_location() };
    let result = open_and_register(base, len);
    let (rc, uffd) = match result {
        Ok(u) => (0, u),
        Err(e) => (-e, -1),
    };
    send(sock, [MAGIC, base, len, rc as u64], uffd);
    for fd in [Some(sock), (uffd >= 0).then_some(uffd), env_fd(b"KS_UFFD_DEV\0")].into_iter().flatten() {
        // SAFETY: these descriptors belong to this shim alone.
        unsafe { libc::close(fd) };
    }
    // SAFETY: QEMU maps guest memory while it is still single-threaded in its start-up.
    unsafe {
        libc::unsetenv(c"LD_PRELOAD".as_ptr());
        *libc::__errno_location() = saved;
    }
}

fn open_and_register(base: u64, len: u64) -> Result<c_int, i64> {
    let uffd = match env_fd(b"KS_UFFD_DEV\0") {
        // SAFETY: this ioctl takes flags by value and returns a new descriptor.
        Some(dev) => unsafe { libc::ioctl(dev, USERFAULTFD_IOC_NEW, libc::O_CLOEXEC | libc::O_NONBLOCK) },
        // SAFETY: takes flags only.
        None => unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) as c_int },
    };
    if uffd < 0 {
        return Err(errno());
    }
    let mut api = UffdApi { api: UFFD_API, features: env_number(b"KS_UFFD_FEATURES\0").unwrap_or(0), ioctls: 0 };
    let mut range = UffdRegister { start: base, len, mode: env_number(b"KS_UFFD_MODE\0").unwrap_or(2), ioctls: 0 };
    // SAFETY: both structures have the kernel's layout and live across the calls.
    let rc = unsafe {
        match libc::ioctl(uffd, UFFDIO_API, &raw mut api) {
            0 => libc::ioctl(uffd, UFFDIO_REGISTER, &raw mut range),
            bad => bad,
        }
    };
    if rc != 0 {
        let e = errno();
        // SAFETY: made above, known to nobody else.
        unsafe { libc::close(uffd) };
        return Err(e);
    }
    Ok(uffd)
}

fn send(sock: c_int, words: [u64; 4], fd: c_int) {
    let mut iov = libc::iovec { iov_base: words.as_ptr() as *mut c_void, iov_len: 32 };
    let mut control = [0u64; 4];
    // SAFETY: an all-zero msghdr is valid.
    let mut m: libc::msghdr = unsafe { std::mem::zeroed() };
    m.msg_iov = &raw mut iov;
    m.msg_iovlen = 1;
    if fd >= 0 {
        m.msg_control = control.as_mut_ptr().cast();
        // SAFETY: arithmetic only; 24 bytes, within `control`, which is aligned for a cmsghdr.
        m.msg_controllen = unsafe { libc::CMSG_SPACE(4) } as usize;
        // SAFETY: the header lies inside `control` by the length above.
        unsafe {
            let h = libc::CMSG_FIRSTHDR(&raw const m);
            (*h).cmsg_level = libc::SOL_SOCKET;
            (*h).cmsg_type = libc::SCM_RIGHTS;
            (*h).cmsg_len = libc::CMSG_LEN(4) as usize;
            libc::CMSG_DATA(h).cast::<c_int>().write_unaligned(fd);
        }
    }
    // SAFETY: all pointers in `m` are to locals that outlive the call.
    unsafe { libc::sendmsg(sock, &raw const m, libc::MSG_NOSIGNAL) };
}
