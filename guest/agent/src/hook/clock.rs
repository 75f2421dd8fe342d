//! The wall clock, stepped to the host's.

use std::{io, time::Duration};

use ks_proto::guest::HookKind;
use rustix::time::{ClockId, Timespec, clock_gettime, clock_settime};

/// After a checkpoint's pause the guest's clock is behind by the pause. A smaller difference is left alone, so that
/// programs see no needless steps.
const STEP_MIN: Duration = Duration::from_millis(2);
/// A running clock goes back only for more than this: build tools dislike time that goes back.
const BACK_MIN: Duration = Duration::from_millis(200);

/// Sets CLOCK_REALTIME to the host's time, where that is worth a step.
pub fn set(wall_unix_ns: u64, kind: HookKind) -> io::Result<()> {
    let now = clock_gettime(ClockId::Realtime);
    if !worth_a_step(unix_ns(now), i128::from(wall_unix_ns), kind) {
        return Ok(());
    }
    let seconds = i64::try_from(wall_unix_ns / 1_000_000_000).map_err(io::Error::other)?;
    let nanos = i64::try_from(wall_unix_ns % 1_000_000_000).map_err(io::Error::other)?;
    Ok(clock_settime(ClockId::Realtime, Timespec { tv_sec: seconds, tv_nsec: nanos })?)
}

/// A time as nanoseconds since 1970.
pub fn unix_ns(t: Timespec) -> i128 {
    i128::from(t.tv_sec) * 1_000_000_000 + i128::from(t.tv_nsec)
}

fn worth_a_step(guest_ns: i128, host_ns: i128, kind: HookKind) -> bool {
    match kind {
        HookKind::Boot | HookKind::Resume | HookKind::Fork => true,
        HookKind::AfterPause => {
            let ahead = host_ns - guest_ns;
            ahead >= STEP_MIN.as_nanos().cast_signed() || -ahead >= BACK_MIN.as_nanos().cast_signed()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_a_pause_small_differences_are_left_alone() {
        let ms = 1_000_000;
        for (guest, host, step) in [(0, ms, false), (0, 3 * ms, true), (100 * ms, 0, false), (300 * ms, 0, true)] {
            assert_eq!(worth_a_step(guest, host, HookKind::AfterPause), step, "{guest} {host}");
            assert!(worth_a_step(guest, host, HookKind::Resume));
        }
    }
}
