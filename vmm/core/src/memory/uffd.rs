//! The kernel's interfaces that paging and tracking need, declared here: userfaultfd and PAGEMAP_SCAN.
//!
//! Source: linux/userfaultfd.h and linux/fs.h of kernel 6.7 (asynchronous write protection, PAGEMAP_SCAN) and newer.
//! Holds no policy.
#![expect(unsafe_code, reason = "ioctls have no safe wrapper in the crates that are linked")]

use rustix::fs::OFlags;
use rustix::io::{Errno, Result};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// What the tracker and the pager ask of the kernel: WP_ASYNC | WP_UNPOPULATED | WP_HUGETLBFS_SHMEM | MISSING_SHMEM |
/// EVENT_REMOVE. The preload shim in QEMU asks for the same.
pub const FEATURES: u64 = 1 << 15 | 1 << 13 | 1 << 12 | 1 << 5 | 1 << 3;
/// Guest page size.
pub const PAGE_BYTES: u64 = 4096;

const API: u64 = 0xAA;
const MODE_MISSING: u64 = 1;
const MODE_WP: u64 = 2;
const COPY_MODE_WP: u64 = 2;
const EVENT_PAGEFAULT: u8 = 0x12;
const EVENT_REMOVE: u8 = 0x15;
const MSG_BYTES: usize = 32;

const IOC_NEW: libc::c_ulong = 0xAA00;
const UFFDIO_API: libc::c_ulong = 0xC018_AA3F;
const UFFDIO_REGISTER: libc::c_ulong = 0xC020_AA00;
const UFFDIO_WAKE: libc::c_ulong = 0x8010_AA02;
const UFFDIO_COPY: libc::c_ulong = 0xC028_AA03;
const UFFDIO_WRITEPROTECT: libc::c_ulong = 0xC018_AA06;
const PAGEMAP_SCAN: libc::c_ulong = 0xC060_6610;

const PM_SCAN_WP_MATCHING: u64 = 1;
const PM_SCAN_CHECK_WPASYNC: u64 = 2;
const PAGE_IS_WRITTEN: u64 = 2;
const PAGE_IS_PRESENT: u64 = 8;
const PAGE_IS_SWAPPED: u64 = 16;

/// What the kernel tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Message {
    /// A thread waits for the page at this address.
    Fault { address: u64 },
    /// A range was, or is about to be, dropped by madvise; the caller of madvise goes on once this is read.
    Remove { start: u64, end: u64 },
}

/// A copy that did not place every page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Partial {
    /// Bytes placed before the stop.
    pub done: u64,
    /// EEXIST: the next page is there. EAGAIN: read events, try again (or only part was placed, if `done` > 0).
    /// ESRCH: the process is gone. ENOENT: not registered there.
    pub errno: Errno,
}

/// A userfaultfd, of this process or of another one.
#[derive(Debug)]
pub struct Uffd {
    fd: OwnedFd,
}

impl Uffd {
    /// Opens one for this process: through `dev` (an open /dev/userfaultfd) if given, else by the system call; then
    /// negotiates [`FEATURES`]. EINVAL: the kernel lacks one of them (Linux 6.7 has all).
    pub fn open(dev: Option<BorrowedFd<'_>>) -> Result<Self> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        let raw = match dev {
            // SAFETY: USERFAULTFD_IOC_NEW takes flags by value and touches no memory; the result is a new descriptor.
            Some(dev) => unsafe { libc::ioctl(dev.as_raw_fd(), IOC_NEW, flags) },
            // SAFETY: userfaultfd(2) takes flags by value and touches no memory.
            None => unsafe { libc::syscall(libc::SYS_userfaultfd, flags) as libc::c_int },
        };
        if raw < 0 {
            return Err(last());
        }
        // SAFETY: the kernel just returned this descriptor to us; nobody else owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(raw) };
        let mut arg = [API, FEATURES, 0];
        ioctl(fd.as_fd(), UFFDIO_API, &mut arg)?;
        Ok(Self { fd })
    }
    /// Takes one whose features are negotiated already (from the shim).
    pub fn from_fd(fd: OwnedFd) -> Self {
        Self { fd }
    }
    /// UFFDIO_REGISTER for write-protect tracking and, if `missing`, for missing pages.
    pub fn register(&self, base: u64, len: u64, missing: bool) -> Result<()> {
        let mode = MODE_WP | if missing { MODE_MISSING } else { 0 };
        ioctl(self.fd.as_fd(), UFFDIO_REGISTER, &mut [base, len, mode, 0])
    }
    /// Write-protects a range, pages that are not there yet included. EAGAIN: read events, try again.
    pub fn write_protect(&self, start: u64, len: u64) -> Result<()> {
        ioctl(self.fd.as_fd(), UFFDIO_WRITEPROTECT, &mut [start, len, 1])
    }
    /// Places `src` (whole pages) at `dst`, write-protected, and wakes who waits there. Zeros are placed so as well: pages
    /// of UFFDIO_ZEROPAGE would count as written.
    pub fn copy(&self, dst: u64, src: &[u8]) -> std::result::Result<(), Partial> {
        assert!((src.len() as u64).is_multiple_of(PAGE_BYTES) && dst.is_multiple_of(PAGE_BYTES), "pages are placed whole");
        let mut arg = [dst, src.as_ptr() as u64, src.len() as u64, COPY_MODE_WP, 0];
        ioctl(self.fd.as_fd(), UFFDIO_COPY, &mut arg).map_err(|errno| Partial { done: placed(arg[4]), errno })
    }
    /// Wakes who waits in the range: they look again.
    pub fn wake(&self, start: u64, len: u64) -> Result<()> {
        ioctl(self.fd.as_fd(), UFFDIO_WAKE, &mut [start, len])
    }
    /// Makes `read` return at once when nothing is there (poll needs that as well).
    pub fn set_nonblocking(&self) -> Result<()> {
        rustix::fs::fcntl_setfl(&self.fd, rustix::fs::fcntl_getfl(&self.fd)? | OFlags::NONBLOCK)
    }
    /// Takes the messages that are there, at most 64; none if there are none.
    pub fn read(&self) -> Result<Vec<Message>> {
        let mut buf = [0u8; MSG_BYTES * 64];
        let n = match rustix::io::read(&self.fd, &mut buf) {
            Ok(n) => n,
            Err(Errno::AGAIN | Errno::INTR) => 0,
            Err(e) => return Err(e),
        };
        Ok(buf[..n].chunks_exact(MSG_BYTES).filter_map(message).collect())
    }
}

impl AsFd for Uffd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn message(m: &[u8]) -> Option<Message> {
    let word = |at: usize| m[at..at + 8].iter().rev().fold(0u64, |v, &b| v << 8 | u64::from(b));
    match m[0] {
        EVENT_PAGEFAULT => Some(Message::Fault { address: word(16) }),
        EVENT_REMOVE => Some(Message::Remove { start: word(8), end: word(16) }),
        other => {
            tracing::warn!(event = other, "userfaultfd event that was not asked for");
            None
        }
    }
}

/// What [`scan_written`] looks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scan {
    /// Pages that are there and not write-protected.
    Present,
    /// Pages not write-protected; places without a page may be among them.
    Written,
    /// The same, write-protecting each in the same step.
    WrittenAndRearm,
}

/// One PAGEMAP_SCAN over `start..end` of the process of `pagemap`: address ranges of written pages, in order.
pub fn scan_written(pagemap: &File, start: u64, end: u64, scan: Scan) -> Result<Vec<(u64, u64)>> {
    const REGIONS: usize = 4096;
    let (flags, any_of) = match scan {
        Scan::Present => (0, PAGE_IS_PRESENT | PAGE_IS_SWAPPED),
        Scan::Written => (0, 0),
        Scan::WrittenAndRearm => (PM_SCAN_WP_MATCHING, 0),
    };
    let flags = flags | PM_SCAN_CHECK_WPASYNC;
    let mut out: Vec<(u64, u64)> = Vec::new();
    let mut vec = vec![[0u64; 3]; REGIONS];
    let mut at = start;
    while at < end {
        let mut arg =
            [96, flags, at, end, 0, vec.as_mut_ptr() as u64, REGIONS as u64, 0, 0, PAGE_IS_WRITTEN, any_of, PAGE_IS_WRITTEN];
        // SAFETY: `arg` has the layout of struct pm_scan_arg (12 u64, size first); `vec` has room for REGIONS regions
        // of three u64 and outlives the call; the kernel writes only into these two.
        let n = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, arg.as_mut_ptr()) };
        if n < 0 {
            match last() {
                Errno::INTR => continue,
                e => return Err(e),
            }
        }
        for r in &vec[..n as usize] {
            match out.last_mut() {
                Some(l) if l.1 == r[0] => l.1 = r[1],
                Some(_) | None => out.push((r[0], r[1])),
            }
        }
        assert!(arg[4] > at, "a scan that succeeds makes progress");
        at = arg[4];
    }
    Ok(out)
}

fn ioctl<const N: usize>(fd: BorrowedFd<'_>, request: libc::c_ulong, arg: &mut [u64; N]) -> Result<()> {
    loop {
        // SAFETY: each caller passes the u64 array with the layout of the request's struct (all their fields are 64 bits
        // wide), alive for the call. Ranges named in it are pages of the registered guest mapping, which Rust code
        // never holds references into; a source range is a live slice.
        if unsafe { libc::ioctl(fd.as_raw_fd(), request, arg.as_mut_ptr()) } == 0 {
            return Ok(());
        }
        match last() {
            Errno::INTR => {}
            e => return Err(e),
        }
    }
}

fn placed(field: u64) -> u64 {
    u64::try_from(field as i64).unwrap_or(0)
}

fn last() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}
