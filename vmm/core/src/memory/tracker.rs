//! Finds the pages that the guest wrote: PAGEMAP_SCAN over an asynchronously write-protected mapping.

use super::uffd::{self, Scan, Uffd};
use rustix::io::Errno;
use std::fs::File;
use std::os::fd::BorrowedFd;

/// A registered mapping of the whole guest memory: `len` bytes at `base` in the process of `pagemap`, offset 0 first.
#[derive(Debug)]
pub struct Tracked {
    /// The userfaultfd that the mapping is registered with (WP, and MISSING if [`super::Memory::wants_missing`]).
    pub uffd: Uffd,
    /// Address of memory offset 0 in that process.
    pub base: u64,
    /// Bytes mapped: all of guest memory.
    pub len: u64,
    /// `/proc/PID/pagemap` of that process, read-only.
    pub pagemap: File,
}

impl Tracked {
    /// For a mapping in this process (kvm): opens the userfaultfd (through `dev`, an open /dev/userfaultfd, if given) and
    /// registers. `pagemap` is this process's own, opened before a jail took the right to open it; None opens it here.
    pub fn in_this_process(
        dev: Option<BorrowedFd<'_>>,
        pagemap: Option<File>,
        base: u64,
        len: u64,
        missing: bool,
    ) -> std::io::Result<Self> {
        let uffd = Uffd::open(dev)?;
        uffd.register(base, len, missing)?;
        let pagemap = pagemap.map_or_else(|| File::open("/proc/self/pagemap"), Ok)?;
        Ok(Self { uffd, base, len, pagemap })
    }
    /// Begins tracking: every page, there or not, is clean from now on. Returns what had been written before, as
    /// offset ranges. EAGAIN: events must be read first.
    pub fn arm(&self) -> Result<Vec<(u64, u64)>, Errno> {
        let before = self.scan(Scan::Present)?;
        self.uffd.write_protect(self.base, self.len)?;
        Ok(before)
    }
    /// Offset ranges written since the last `collect` (or `arm`), which stay dirty.
    pub fn prescan(&self) -> Result<Vec<(u64, u64)>, Errno> {
        self.scan(Scan::Written)
    }
    /// Offset ranges written since the last `collect`; they are clean again in the same step. After an error nobody
    /// knows what was written: treat everything as dirty.
    pub fn collect(&self) -> Result<Vec<(u64, u64)>, Errno> {
        self.scan(Scan::WrittenAndRearm)
    }

    fn scan(&self, scan: Scan) -> Result<Vec<(u64, u64)>, Errno> {
        let found = uffd::scan_written(&self.pagemap, self.base, self.base + self.len, scan)?;
        Ok(found.into_iter().map(|(a, b)| (a - self.base, b - self.base)).collect())
    }
}
