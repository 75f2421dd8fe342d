//! The userfaultfd ioctls that are needed, declared here. Source: linux/userfaultfd.h, kernel 6.7 and newer.

use std::os::fd::{BorrowedFd, OwnedFd};

/// What the tracker and the pager ask of the kernel: WP_ASYNC | WP_UNPOPULATED | WP_HUGETLBFS_SHMEM | MISSING_SHMEM |
/// EVENT_REMOVE. The preload shim in QEMU asks for the same.
pub const FEATURES: u64 = 1 << 15 | 1 << 13 | 1 << 12 | 1 << 5 | 1 << 3;

/// A userfaultfd, of this process or of another one.
pub struct Uffd {}

impl Uffd {
    /// Opens one for this process: through `dev` (an open /dev/userfaultfd) if given, else by the system call; then
    /// negotiates [`FEATURES`].
    pub fn open(dev: Option<BorrowedFd<'_>>) -> rustix::io::Result<Self> {
        let _ = dev;
        unimplemented!()
    }
    /// Takes one whose features are negotiated already (from the shim).
    pub fn from_fd(fd: OwnedFd) -> Self {
        let _ = fd;
        unimplemented!()
    }
    /// UFFDIO_REGISTER for write-protect tracking and, if `missing`, for missing pages.
    pub fn register(&self, base: u64, len: u64, missing: bool) -> rustix::io::Result<()> {
        let _ = (base, len, missing);
        unimplemented!()
    }
}
