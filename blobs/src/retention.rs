//! Which checkpoints of a session to drop as they age. Pure.
//!
//! Everything of the last hour stays; then one an hour for a day; then one a day. Pinned ones, fork points and the
//! latest stay whatever their age. The one that stays for an hour or a day is its *first*: then thinning twice is
//! thinning once, and what was kept before is not dropped for a newcomer.

use std::collections::BTreeSet;

const HOUR_MS: u64 = 3_600_000;
const DAY_MS: u64 = 24 * HOUR_MS;

/// What retention knows of one checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kept {
    /// Its number in its session.
    pub number: u64,
    /// Wall clock at its pause, Unix milliseconds.
    pub created_ms: u64,
    /// A user wants to keep it.
    pub pinned: bool,
    /// A session was forked from it.
    pub fork_point: bool,
    /// The session's latest.
    pub latest: bool,
}

/// Ages at which thinning changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention {
    /// Younger than this: all stay.
    pub keep_all_ms: u64,
    /// Younger than this: one per hour stays; older: one per day.
    pub keep_hourly_ms: u64,
}
impl Default for Retention {
    fn default() -> Self {
        Self { keep_all_ms: HOUR_MS, keep_hourly_ms: DAY_MS }
    }
}

impl Retention {
    /// Numbers of the checkpoints of one session to drop now, rising. A checkpoint from the future counts as new.
    pub fn to_drop(&self, checkpoints: &[Kept], now_ms: u64) -> Vec<u64> {
        let mut by_age: Vec<&Kept> = checkpoints.iter().collect();
        by_age.sort_by_key(|c| (c.created_ms, c.number));
        let (mut hours, mut days) = (BTreeSet::new(), BTreeSet::new());
        let mut drop = Vec::new();
        for c in by_age {
            let age = now_ms.saturating_sub(c.created_ms);
            let first_of_hour = hours.insert(c.created_ms / HOUR_MS);
            let first_of_day = days.insert(c.created_ms / DAY_MS);
            let by_age = if age < self.keep_all_ms {
                true
            } else if age < self.keep_hourly_ms {
                first_of_hour
            } else {
                first_of_day
            };
            if !(by_age || c.pinned || c.fork_point || c.latest) {
                drop.push(c.number);
            }
        }
        drop.sort_unstable();
        drop
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MINUTE: u64 = 60_000;
    // Noon of some day.
    const NOON: u64 = 20_000 * DAY_MS + 12 * HOUR_MS;

    fn at(number: u64, created_ms: u64) -> Kept {
        Kept { number, created_ms, pinned: false, fork_point: false, latest: false }
    }
    fn left(all: &[Kept], now: u64) -> Vec<Kept> {
        let gone = Retention::default().to_drop(all, now);
        all.iter().filter(|c| !gone.contains(&c.number)).copied().collect()
    }

    #[test]
    fn a_week_of_minutes_thins_to_an_hour_of_minutes_a_day_of_hours_and_days() {
        let minutes = 7 * 24 * 60;
        let mut all: Vec<Kept> = (0..=minutes).map(|i| at(i, NOON - (minutes - i) * MINUTE)).collect();
        all.last_mut().unwrap().latest = true;
        let kept = left(&all, NOON);
        let age = |c: &Kept| NOON - c.created_ms;
        assert_eq!(kept.iter().filter(|c| age(c) < HOUR_MS).count(), 60);
        assert_eq!(kept.iter().filter(|c| age(c) >= HOUR_MS && age(c) < DAY_MS).count(), 23);
        // Six older days whose first is their midnight, the first day from noon, and no second one of yesterday noon.
        assert_eq!(kept.iter().filter(|c| age(c) >= DAY_MS).count(), 7);
        assert!(kept.iter().all(|c| age(c) < HOUR_MS || c.created_ms % HOUR_MS == 0));
    }

    #[test]
    fn pinned_fork_points_and_the_latest_stay() {
        let old = NOON - 30 * DAY_MS;
        let mut all = vec![at(1, old), at(2, old + 1), at(3, old + 2), at(4, old + 3), at(5, old + 4)];
        (all[1].pinned, all[2].fork_point, all[4].latest) = (true, true, true);
        assert_eq!(Retention::default().to_drop(&all, NOON), [4]);
        assert_eq!(Retention::default().to_drop(&[at(9, NOON + DAY_MS)], NOON), [] as [u64; 0]);
    }

    proptest! {
        #[test]
        fn thinning_on_the_way_changes_nothing(mut times in proptest::collection::vec(0u64..10 * DAY_MS, 0..80), waits in proptest::collection::vec(0u64..3 * DAY_MS, 1..6)) {
            times.sort_unstable();
            let all: Vec<Kept> = (0..).zip(&times).map(|(n, t)| at(n, NOON + t)).collect();
            let mut now = NOON + 10 * DAY_MS;
            let mut thinned = all.clone();
            for w in waits {
                now += w;
                thinned = left(&thinned, now);
                prop_assert_eq!(&thinned, &left(&all, now));
                // Every day that had one still has one.
                for c in &all {
                    prop_assert!(thinned.iter().any(|k| k.created_ms / DAY_MS == c.created_ms / DAY_MS));
                }
            }
        }
    }
}
