//! The clocks, as the machines want them.

use crate::session::Now;
use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

fn start() -> Instant {
    static START: OnceLock<Instant> = OnceLock::new();
    *START.get_or_init(Instant::now)
}

/// Both clocks, now.
pub fn now() -> Now {
    let ms = |d: Duration| u64::try_from(d.as_millis()).unwrap_or(u64::MAX);
    Now { mono_ms: ms(start().elapsed()), unix_ms: unix_ms() }
}

/// Unix milliseconds.
pub fn unix_ms() -> u64 {
    let d = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(d.as_millis()).unwrap_or(u64::MAX)
}

/// Unix nanoseconds.
pub fn unix_ns() -> u64 {
    let d = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)
}

/// The instant at which the monotonic clock of [`now`] shows `mono_ms`.
pub fn instant(mono_ms: u64) -> tokio::time::Instant {
    tokio::time::Instant::from_std(start() + Duration::from_millis(mono_ms))
}

/// CLOCK_BOOTTIME in milliseconds: it goes on while the machine sleeps, and leases are counted on it.
pub fn boottime_ms() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    t.tv_sec.unsigned_abs() * 1000 + t.tv_nsec.unsigned_abs() / 1_000_000
}
