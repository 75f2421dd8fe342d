//! The host's TSC frequency in kHz: what the guest is told at boot, and what a restore must find again.
//!
//! CPUID leaf 0x15 when the processor fills it in; else counted against CLOCK_MONOTONIC_RAW for [`WINDOW`], best of
//! three. Counting is right to about 20 parts per million here, far inside [`TOLERANCE_PPM`].

use std::sync::OnceLock;
use std::time::Duration;

/// Two frequencies that differ by less are the same machine clock.
pub const TOLERANCE_PPM: u64 = 1000;
const WINDOW: Duration = Duration::from_millis(4);

/// In kHz; found once per process.
pub fn khz() -> u32 {
    static KHZ: OnceLock<u32> = OnceLock::new();
    *KHZ.get_or_init(|| from_cpuid().unwrap_or_else(counted))
}

/// True if a guest that counts with `a` may go on where `b` is right.
pub fn same(a: u32, b: u32) -> bool {
    u64::from(a.abs_diff(b)) * 1_000_000 <= u64::from(a.max(b)) * TOLERANCE_PPM
}

fn from_cpuid() -> Option<u32> {
    if core::arch::x86_64::__cpuid(0).eax < 0x15 {
        return None;
    }
    let l = core::arch::x86_64::__cpuid(0x15);
    if l.eax == 0 || l.ebx == 0 || l.ecx == 0 {
        return None;
    }
    u32::try_from(u64::from(l.ecx) * u64::from(l.ebx) / u64::from(l.eax) / 1000).ok()
}

fn now_ns() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::MonotonicRaw);
    t.tv_sec.unsigned_abs() * 1_000_000_000 + t.tv_nsec.unsigned_abs()
}

/// A pair of readings taken close together: the narrowest of several, so that a preempted one does not count.
fn pair() -> (u64, u64) {
    let mut best = (u64::MAX, 0, 0);
    for _ in 0..16 {
        let before = crate::sys::rdtsc();
        let ns = now_ns();
        let after = crate::sys::rdtsc();
        let width = after.wrapping_sub(before);
        if width < best.0 {
            best = (width, before.wrapping_add(width / 2), ns);
        }
    }
    (best.1, best.2)
}

fn counted() -> u32 {
    let once = || {
        let (t0, n0) = pair();
        std::thread::sleep(WINDOW);
        let (t1, n1) = pair();
        u128::from(t1.wrapping_sub(t0)) * 1_000_000 / u128::from((n1 - n0).max(1))
    };
    let mut all = [once(), once(), once()];
    all.sort_unstable();
    u32::try_from(all[1]).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counting_twice_gives_the_same_clock() {
        let (a, b) = (counted(), counted());
        assert!(a > 100_000, "{a} kHz");
        assert!(same(a, b), "{a} and {b} kHz");
        assert!(!same(2_000_000, 2_003_000));
    }
}
