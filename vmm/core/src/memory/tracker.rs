//! Finds the pages that the guest wrote: PAGEMAP_SCAN over an asynchronously write-protected mapping.

use super::uffd::Uffd;
use std::fs::File;
use std::os::fd::BorrowedFd;

/// A registered mapping of the whole guest memory: `len` bytes at `base` in the process of `pagemap`, offset 0 first.
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
    /// For a mapping in this process (kvm): opens the userfaultfd (through `dev`, an open /dev/userfaultfd, if given),
    /// registers and opens /proc/self/pagemap.
    pub fn in_this_process(dev: Option<BorrowedFd<'_>>, base: u64, len: u64, missing: bool) -> std::io::Result<Self> {
        let _ = (dev, base, len, missing);
        unimplemented!()
    }
}
