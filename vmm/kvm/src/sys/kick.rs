//! Gets a vCPU thread out of KVM_RUN: `immediate_exit` in its run page, and a signal that does nothing but interrupt.
#![expect(unsafe_code, reason = "an atomic in the shared run page, sigaction, pthread_kill")]

use kvm_ioctls::VcpuFd;
use std::sync::Once;
use std::sync::atomic::{AtomicU8, Ordering};

/// A real-time signal that nothing else here uses.
fn signal() -> i32 {
    libc::SIGRTMIN() + 7
}

extern "C" fn nothing(_: i32) {}

/// Installs the empty handler, once per process, so that the signal interrupts instead of killing.
pub fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: zeroed is a valid sigaction; the handler is async-signal-safe because it does nothing; no SA_RESTART,
        // so that KVM_RUN returns EINTR.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = nothing as extern "C" fn(i32) as usize;
            libc::sigaction(signal(), &action, std::ptr::null_mut());
        }
    });
}

/// The `immediate_exit` byte of one vCPU.
pub struct ImmediateExit(*const AtomicU8);

// SAFETY: the byte is in a page shared with the kernel and only ever accessed as an atomic.
unsafe impl Send for ImmediateExit {}
// SAFETY: as above.
unsafe impl Sync for ImmediateExit {}

impl ImmediateExit {
    /// Of `vcpu`, which must live as long as the result: the engine drops all users of it before the vCPUs.
    pub fn of(vcpu: &mut VcpuFd) -> Self {
        Self(std::ptr::from_mut(&mut vcpu.get_kvm_run().immediate_exit).cast::<AtomicU8>())
    }
    /// Makes the next or the present KVM_RUN return (the latter together with a signal).
    pub fn set(&self, on: bool) {
        // SAFETY: points into the vCPU's run mapping, which the owner keeps (see `of`); AtomicU8 has the layout of u8.
        unsafe { &*self.0 }.store(u8::from(on), Ordering::SeqCst);
    }
}

/// A thread that can be signalled while it is not joined.
#[derive(Clone, Copy)]
pub struct ThreadId(libc::pthread_t);

impl ThreadId {
    /// The calling thread.
    pub fn current() -> Self {
        // SAFETY: no preconditions.
        Self(unsafe { libc::pthread_self() })
    }
    /// Interrupts its system call. The caller knows that the thread is not joined yet.
    pub fn interrupt(self) {
        // SAFETY: the thread is not joined (the caller's duty), so the id is valid.
        unsafe { libc::pthread_kill(self.0, signal()) };
    }
}
