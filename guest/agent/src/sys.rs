//! The system calls that have no safe wrapper: ioctls on the random device and for loopback,
//! and kill() with any signal number.
#![expect(unsafe_code, reason = "system calls that no safe crate wraps")]

use std::{
    fs::File,
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
};

use tokio::io::{Interest, unix::AsyncFd};

/// _IOW('R', 0x03, int[2])
const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
/// _IO('R', 0x07)
const RNDRESEEDCRNG: libc::c_ulong = 0x5207;
/// The most entropy that one call adds.
pub const ENTROPY_BYTES_MAX: usize = 256;

/// `struct rand_pool_info` with room for the largest input.
#[repr(C)]
struct RandPoolInfo {
    entropy_bits: libc::c_int,
    bytes: libc::c_int,
    buf: [u8; ENTROPY_BYTES_MAX],
}

/// Credits `seed` to the kernel's pool and makes the generator take it up at once.
pub fn add_entropy(seed: &[u8]) -> io::Result<()> {
    if seed.len() > ENTROPY_BYTES_MAX {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    let bytes = libc::c_int::try_from(seed.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut info = RandPoolInfo { entropy_bits: bytes * 8, bytes, buf: [0; ENTROPY_BYTES_MAX] };
    info.buf[..seed.len()].copy_from_slice(seed);
    let dev = File::options().write(true).open("/dev/urandom")?;
    // SAFETY: the kernel reads `bytes` bytes of `buf`, which is at least that long; `info` lives across the call.
    check(unsafe { libc::ioctl(dev.as_raw_fd(), RNDADDENTROPY as _, &raw const info) })?;
    // SAFETY: takes no argument.
    check(unsafe { libc::ioctl(dev.as_raw_fd(), RNDRESEEDCRNG as _) })
}

/// Brings the interface `lo` up.
pub fn loopback_up() -> io::Result<()> {
    // SAFETY: no pointers; the result is checked before it is owned.
    let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    check(fd)?;
    // SAFETY: `fd` was just opened and nobody else owns it.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: all-zero bytes are a valid ifreq.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
        *to = *from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    // SAFETY: the kernel reads one ifreq, which lives across the call.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS as _, &raw const request) })
}

/// Sends a signal to one process (to a group if `pid` is negative).
pub fn signal(pid: i32, number: i32) -> io::Result<()> {
    // SAFETY: kill has no memory effects.
    check(unsafe { libc::kill(pid, number) })
}

/// Registers a descriptor with tokio.
pub fn watch(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd keeps one open descriptor for as long as it lives, and nobody here calls `get_mut` to
    // put another in its place.
    Ok(unsafe { AsyncFd::register_with_interest(fd, interest)? })
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
