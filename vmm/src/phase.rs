//! Which request is legal in which phase. Pure.
//!
//! ```text
//!   Empty ──Boot/Restore──▶ Starting ──first instruction──▶ Running ◀──Resume/Pause──▶ Paused
//!                                                              ▲  │ deadline passed
//!                                        same token renewed    │  ▼
//!                                                           LeaseEnded          any ──Stop, death──▶ Dead
//! ```

use ks_proto::control::{Fault, VmPhase, VmmRequest};

/// The request's name, for people.
pub fn name(r: &VmmRequest) -> &'static str {
    match r {
        VmmRequest::Hello { .. } => "hello",
        VmmRequest::Keys { .. } => "keys",
        VmmRequest::Packs {} => "packs",
        VmmRequest::Boot { .. } => "boot",
        VmmRequest::Restore { .. } => "restore",
        VmmRequest::Pause {} => "pause",
        VmmRequest::Resume {} => "resume",
        VmmRequest::Checkpoint { .. } => "checkpoint",
        VmmRequest::Lease { .. } => "lease",
        VmmRequest::Stats {} => "stats",
        VmmRequest::Stop {} => "stop",
    }
}

/// Ok if `r` may be carried out in `phase`.
pub fn legal(phase: VmPhase, r: &VmmRequest) -> Result<(), Fault> {
    use VmPhase::{Dead, Empty, LeaseEnded, Paused, Running, Starting};
    let refuse = |code: &str, why: &str, next: &str| Err(Fault::new(code, format!("{} this VM", name(r)), why, next));
    match (r, phase) {
        (VmmRequest::Hello { .. } | VmmRequest::Stats {} | VmmRequest::Stop {}, _) => Ok(()),
        (_, Dead) => refuse("engine-died", "the VM is gone", "start a new one from its last checkpoint"),
        (VmmRequest::Lease { .. }, _) => Ok(()),
        (VmmRequest::Keys { .. } | VmmRequest::Packs {} | VmmRequest::Boot { .. } | VmmRequest::Restore { .. }, Empty) => Ok(()),
        (VmmRequest::Keys { .. } | VmmRequest::Packs {} | VmmRequest::Boot { .. } | VmmRequest::Restore { .. }, _) => {
            refuse("not-legal", "this process has its VM already", "start another ks-vmm for another VM")
        }
        (_, Empty) => refuse("not-ready", "there is no VM yet", "send boot or restore first"),
        (_, Starting) => refuse("not-ready", "the VM is still starting", "wait for the answer to boot or restore"),
        (_, LeaseEnded) => refuse("lease-ended", "the lease of this run has ended", "renew the lease with the run's own token"),
        (VmmRequest::Pause {} | VmmRequest::Resume {} | VmmRequest::Checkpoint { .. }, Running | Paused) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PHASES: [VmPhase; 6] =
        [VmPhase::Empty, VmPhase::Starting, VmPhase::Running, VmPhase::Paused, VmPhase::LeaseEnded, VmPhase::Dead];

    fn row(r: &VmmRequest) -> String {
        PHASES.map(|p| legal(p, r).map_or_else(|f| f.code, |()| "ok".into())).join(" ")
    }

    #[test]
    fn the_table() {
        let token = ks_proto::RunToken::default();
        assert_eq!(row(&VmmRequest::Hello { protocol: 1 }), "ok ok ok ok ok ok");
        assert_eq!(row(&VmmRequest::Stop {}), "ok ok ok ok ok ok");
        assert_eq!(row(&VmmRequest::Lease { token, deadline_boottime_ms: 1 }), "ok ok ok ok ok engine-died");
        assert_eq!(row(&VmmRequest::Packs {}), "ok not-legal not-legal not-legal not-legal engine-died");
        for r in [VmmRequest::Pause {}, VmmRequest::Resume {}, VmmRequest::Checkpoint { parent: None, journal_position: 0 }] {
            assert_eq!(row(&r), "not-ready not-ready ok ok lease-ended engine-died");
        }
    }
}
