//! The gateway's own copy of a session's lease, and of its newest run: pure; the moment is an argument.
//!
//! Nothing is sent upstream and no byte is released for a run that is not the newest one seen, or past its deadline. A session of a
//! fleet (one with replicas) whose lease was never told has none.

use ks_proto::RunToken;

/// Why nothing passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Lapse {
    /// Another run of the session was seen that is newer.
    #[error("another run of this session is newer")]
    Superseded,
    /// The deadline passed.
    #[error("this node's lease of the session ended")]
    Ended,
    /// No lease was told.
    #[error("this node has not told the gateway a lease of the session yet")]
    Untold,
}

/// What is known of one session.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Lease {
    newest: RunToken,
    /// Whose lease, and its end (None: without end).
    told: Option<(RunToken, Option<u64>)>,
    in_fleet: bool,
}

impl Lease {
    /// A stream of this run came.
    pub fn seen(&mut self, token: RunToken, in_fleet: bool) {
        self.newest = self.newest.max(token);
        self.in_fleet |= in_fleet;
    }
    /// The node told a lease. That of an older run changes nothing.
    pub fn told(&mut self, token: RunToken, deadline_boottime_ms: Option<u64>) {
        if self.told.is_none_or(|(t, _)| same_epoch(t, token) || token > t) {
            self.told = Some((token, deadline_boottime_ms));
        }
    }
    /// Whether something of run `token` may pass at `now_ms`; the deadline until which that holds.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self, token: RunToken, now_ms: u64) -> Result<Option<u64>, Lapse> {
        if token < self.newest {
            return Err(Lapse::Superseded);
        }
        match self.told {
            Some((_, Some(end))) if now_ms >= end => Err(Lapse::Ended),
            Some((of, end)) if same_epoch(of, token) => Ok(end),
            Some(_) | None if self.in_fleet => Err(Lapse::Untold),
            Some((_, end)) => Ok(end),
            None => Ok(None),
        }
    }
}

/// A lease is of an assignment, whatever runs it sees.
fn same_epoch(a: RunToken, b: RunToken) -> bool {
    (a.generation, a.epoch) == (b.generation, b.epoch)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn t(epoch: u64, run: u64) -> RunToken {
        RunToken { generation: 0, epoch, run }
    }

    #[test]
    fn nothing_passes_past_the_deadline_or_for_an_older_run() {
        let mut l = Lease::default();
        assert_eq!(l.check(t(1, 1), 5), Ok(None));
        l.seen(t(1, 1), true);
        assert_eq!(l.check(t(1, 1), 5), Err(Lapse::Untold));
        l.told(t(1, 1), Some(10));
        assert_eq!(l.check(t(1, 1), 9), Ok(Some(10)));
        assert_eq!(l.check(t(1, 1), 10), Err(Lapse::Ended));
        l.told(t(1, 1), Some(20));
        l.seen(t(1, 2), true);
        assert_eq!((l.check(t(1, 1), 11), l.check(t(1, 2), 11)), (Err(Lapse::Superseded), Ok(Some(20))));
        l.seen(t(2, 1), true);
        assert_eq!(l.check(t(2, 1), 11), Err(Lapse::Untold));
        l.told(t(1, 2), Some(99));
        l.told(t(2, 1), Some(30));
        l.told(t(1, 2), Some(99));
        assert_eq!(l.check(t(2, 1), 11), Ok(Some(30)));
    }
}
