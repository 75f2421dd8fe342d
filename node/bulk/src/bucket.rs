//! A token bucket: how long to wait before so many bytes may pass. Pure.

/// Bytes that may pass at once after a silence, in milliseconds of the rate.
const BURST_MS: u64 = 100;

/// Lets `rate` bytes per second pass.
#[derive(Debug, Clone)]
pub struct Bucket {
    rate: u64,
    // Invariant: the time, in microseconds, up to which the bytes that passed have used the rate.
    spent_until_us: u64,
}

impl Bucket {
    /// Of `rate` bytes per second, at least 1.
    pub fn new(rate: u64) -> Self {
        Self { rate: rate.max(1), spent_until_us: 0 }
    }

    /// Takes `bytes` at time `now_us`; returns how many microseconds to wait before they pass. Takers queue up in the
    /// order of their calls.
    pub fn take(&mut self, now_us: u64, bytes: u64) -> u64 {
        let begin = self.spent_until_us.max(now_us.saturating_sub(BURST_MS * 1000));
        let cost = u64::try_from(u128::from(bytes) * 1_000_000 / u128::from(self.rate)).unwrap_or(u64::MAX);
        self.spent_until_us = begin.saturating_add(cost);
        self.spent_until_us.saturating_sub(now_us)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_minute_of_takers_passes_the_rate_and_one_burst() {
        let mut b = Bucket::new(1_000_000);
        let (mut now, mut passed) = (5_000_000, 0u64);
        let end = now + 60_000_000;
        loop {
            now += b.take(now, 70_000);
            if now > end {
                break;
            }
            passed += 70_000;
        }
        assert!((59_900_000..=60_200_000).contains(&passed), "{passed}");
    }

    #[test]
    fn silence_saves_up_one_burst_only() {
        let mut b = Bucket::new(1000);
        assert_eq!(b.take(0, 1000), 1_000_000);
        assert_eq!(b.take(100_000_000, 100), 0, "a tenth of a second's worth");
        assert_eq!(b.take(100_000_000, 1000), 1_000_000);
    }
}
