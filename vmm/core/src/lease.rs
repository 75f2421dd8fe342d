//! The lease gate: one deadline on CLOCK_BOOTTIME that every path to the outside checks.
//!
//! Raised only by a heartbeat with the run's own token. When it has passed, `may_run` is false for good until a later
//! heartbeat of the same token. Reading it is one atomic load and one clock read, cheap enough for every KVM_RUN.

use ks_proto::RunToken;
use std::sync::atomic::{AtomicU64, Ordering};

/// Why a heartbeat was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LeaseError {
    /// Another run's token: an older one is refused; a newer one means that this run must end.
    #[error("heartbeat for run {got}, this run is {own}")]
    OtherRun { own: RunToken, got: RunToken },
}

/// Shared by the run loop, the engine, the disk and the channel.
#[derive(Debug)]
pub struct LeaseGate {
    token: RunToken,
    // Invariant: never lowered except by `end`, and from a lone node's endless lease to a finite one.
    deadline_boottime_ms: AtomicU64,
}

impl LeaseGate {
    /// A gate that is closed until the first heartbeat.
    pub fn new(token: RunToken) -> Self {
        Self { token, deadline_boottime_ms: AtomicU64::new(0) }
    }
    /// The run that it fences.
    pub fn token(&self) -> RunToken {
        self.token
    }
    /// Takes a heartbeat.
    pub fn renew(&self, token: RunToken, deadline_boottime_ms: u64) -> Result<(), LeaseError> {
        if token != self.token {
            return Err(LeaseError::OtherRun { own: self.token, got: token });
        }
        // A lone node's lease has no end; the first finite one replaces it, when the node is no longer alone.
        let next = |now: u64| Some(if now == u64::MAX { deadline_boottime_ms } else { now.max(deadline_boottime_ms) });
        let _ = self.deadline_boottime_ms.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next);
        Ok(())
    }
    /// Closes the gate for good (a newer run exists).
    pub fn end(&self) {
        self.deadline_boottime_ms.store(0, Ordering::SeqCst);
    }
    /// Milliseconds of CLOCK_BOOTTIME at which the gate closes.
    pub fn deadline_ms(&self) -> u64 {
        self.deadline_boottime_ms.load(Ordering::SeqCst)
    }
    /// True while this run may have effects.
    pub fn may_run(&self) -> bool {
        let deadline = self.deadline_ms();
        deadline == u64::MAX || boottime_ms() < deadline
    }
}

/// CLOCK_BOOTTIME in milliseconds.
pub fn boottime_ms() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    t.tv_sec.unsigned_abs() * 1000 + t.tv_nsec.unsigned_abs() / 1_000_000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gate_opens_only_for_its_own_run_and_closes_at_the_deadline() {
        let own = RunToken { generation: 0, epoch: 2, run: 3 };
        let gate = LeaseGate::new(own);
        assert!(!gate.may_run(), "closed before the first heartbeat");
        let older = RunToken { run: 2, ..own };
        assert_eq!(gate.renew(older, u64::MAX), Err(LeaseError::OtherRun { own, got: older }));
        assert!(!gate.may_run());
        gate.renew(own, boottime_ms() + 60_000).unwrap();
        assert!(gate.may_run());
        gate.renew(own, 1).unwrap();
        assert!(gate.may_run(), "an earlier deadline never shortens a lease");
        gate.end();
        assert!(!gate.may_run());
    }

    #[test]
    fn an_endless_lease_becomes_a_finite_one_when_the_node_is_no_longer_alone() {
        let own = RunToken { generation: 0, epoch: 1, run: 1 };
        let gate = LeaseGate::new(own);
        gate.renew(own, u64::MAX).unwrap();
        assert!(gate.may_run());
        gate.renew(own, 1).unwrap();
        assert!(!gate.may_run(), "it ends at the finite deadline");
        gate.renew(own, boottime_ms() + 60_000).unwrap();
        assert!(gate.may_run());
    }
}
