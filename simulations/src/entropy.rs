#![allow(unsafe_code)]
//! The simulator's one override: libc's `getrandom`, seeded for threads that simulate, the kernel's for all others.
//!
//! Libraries draw their random bytes from it (hash maps, gossip's choice of peers), so a seed fixes a whole run. Each run
//! has a process of its own, for what was drawn stays with it.

use rand::{RngCore, SeedableRng, rngs::SmallRng};
use std::cell::RefCell;

thread_local! {
    static SEEDED: RefCell<Option<SmallRng>> = const { RefCell::new(None) };
}

/// From now on this thread's random bytes follow from the seed.
pub fn seed_this_thread(seed: u64) {
    SEEDED.with(|s| *s.borrow_mut() = Some(SmallRng::seed_from_u64(seed)));
}

/// Takes the place of libc's function of that name in this program.
///
/// # Safety
/// As of getrandom(2): `buf` points to `n` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getrandom(buf: *mut u8, n: usize, flags: u32) -> isize {
    if buf.is_null() {
        return 0;
    }
    // SAFETY: the caller owns `n` writable bytes at `buf`, as getrandom(2) demands.
    let out = unsafe { std::slice::from_raw_parts_mut(buf, n) };
    let seeded = SEEDED.try_with(|s| match s.try_borrow_mut().ok().as_deref_mut() {
        Some(Some(rng)) => {
            rng.fill_bytes(out);
            true
        }
        _ => false,
    });
    if seeded.unwrap_or(false) {
        return isize::try_from(n).unwrap_or(-1);
    }
    // SAFETY: same obligation, handed on to the kernel.
    let got = unsafe { libc::syscall(libc::SYS_getrandom, buf, n, flags) };
    isize::try_from(got).unwrap_or(-1)
}
