//! Borrowing the descriptor of an [`EventFd`], which does not implement `AsFd`; taking an inherited /dev/kvm.
#![expect(unsafe_code, reason = "BorrowedFd::borrow_raw, Kvm::from_raw_fd")]

use std::os::fd::{AsRawFd, BorrowedFd};
use vmm_sys_util::eventfd::EventFd;

/// The descriptor of `event`.
pub fn borrow(event: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: `event` owns the descriptor and outlives the result.
    unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }
}

/// A [`kvm_ioctls::Kvm`] from an inherited descriptor, which it then owns.
pub fn kvm_from(fd: std::os::fd::RawFd) -> kvm_ioctls::Kvm {
    // SAFETY: the only caller has just given up the ownership of `fd` (`into_raw_fd`), an open descriptor; if it is not
    // /dev/kvm, its ioctls fail.
    unsafe { std::os::fd::FromRawFd::from_raw_fd(fd) }
}
