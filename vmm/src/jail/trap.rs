//! A forbidden system call ends the process, with its number and the kind of thread in the log: never a silent hang.
//!
//! The filters answer with SIGSYS. They also forbid changing its handler, and the kernel kills a process outright that
//! has the signal blocked.
#![expect(unsafe_code, reason = "a signal handler reads siginfo_t and writes with raw calls")]

use super::filter;
use ks_vmm_core::confine::Kind;
use std::cell::Cell;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicI32, Ordering};

/// Exit code of a process that made a forbidden system call.
pub const EXIT_CODE: i32 = 13;

static LOG: AtomicI32 = AtomicI32::new(2);

thread_local! {
    static KIND: Cell<&'static str> = const { Cell::new("control") };
}

/// Remembers what this thread is, for the handler.
pub fn this_thread_is(kind: Kind) {
    KIND.set(kind.name());
}

/// Installs the handler; `log` is written to.
pub fn install(log: RawFd) -> std::io::Result<()> {
    LOG.store(log, Ordering::SeqCst);
    // SAFETY: zeroed is a valid sigaction; the handler makes only async-signal-safe calls and does not return.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_forbidden as extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) as usize;
        action.sa_flags = libc::SA_SIGINFO;
        match libc::sigaction(libc::SIGSYS, &raw const action, std::ptr::null_mut()) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    }
}

/// Where `si_syscall` lies: after three ints, padding and the address of the call.
const SYSCALL_OFFSET: usize = 24;

extern "C" fn on_forbidden(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel hands a siginfo_t of 128 bytes; the field is an aligned int for SIGSYS. The calls below are
    // async-signal-safe, and allowed by every filter.
    unsafe {
        let number = info.cast::<u8>().add(SYSCALL_OFFSET).cast::<i32>().read();
        let mut text = Text::default();
        text.put(b"FORBIDDEN: a thread of kind ");
        text.put(KIND.get().as_bytes());
        text.put(b" made system call ");
        text.number(number);
        text.put(b" (");
        text.put(filter::name_of(i64::from(number)).as_bytes());
        text.put(b"), which its filter does not allow; ks-vmm ends\n");
        libc::write(LOG.load(Ordering::SeqCst), text.bytes.as_ptr().cast(), text.len);
        libc::syscall(libc::SYS_exit_group, EXIT_CODE);
    }
}

/// A line put together without memory.
struct Text {
    bytes: [u8; 192],
    len: usize,
}

impl Default for Text {
    fn default() -> Self {
        Self { bytes: [0; 192], len: 0 }
    }
}

impl Text {
    fn put(&mut self, part: &[u8]) {
        for b in part {
            if let Some(slot) = self.bytes.get_mut(self.len) {
                *slot = *b;
                self.len += 1;
            }
        }
    }
    fn number(&mut self, n: i32) {
        let mut digits = [0u8; 10];
        let mut left = n.unsigned_abs();
        let mut at = digits.len();
        loop {
            at -= 1;
            digits[at] = b'0' + (left % 10) as u8;
            left /= 10;
            if left == 0 {
                break;
            }
        }
        if n < 0 {
            self.put(b"-");
        }
        self.put(&digits[at..]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_cut_and_numbers_are_whole() {
        let mut t = Text::default();
        for n in [0, 7, 435, -1, i32::MIN] {
            t.number(n);
            t.put(b" ");
        }
        assert_eq!(&t.bytes[..t.len], b"0 7 435 -1 -2147483648 ");
        t.put(&[b'x'; 500]);
        assert_eq!(t.len, t.bytes.len());
    }
}
