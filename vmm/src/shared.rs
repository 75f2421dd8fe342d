//! What several threads know about the VM: its phase, its lease, its counters. Locks here are held for moments only.

use crate::mailbox::Mailbox;
use ks_proto::RunToken;
use ks_proto::control::{Fault, VmConfig, VmPhase, VmStats};
use ks_vmm_core::disk::Disk;
use ks_vmm_core::engine::Stopper;
use ks_vmm_core::lease::{LeaseError, LeaseGate};
use ks_vmm_core::memory::Memory;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

struct State {
    phase: VmPhase,
    config: Option<VmConfig>,
    jail: Vec<String>,
    /// The last heartbeat that came before there was a gate.
    early: Option<(RunToken, u64)>,
    gate: Option<Arc<LeaseGate>>,
    stopper: Option<Arc<dyn Stopper>>,
    /// The watchdog holds the VM stopped.
    frozen: bool,
    memory: Option<Arc<Memory>>,
    disk: Option<Arc<Disk>>,
    counters: (u64, Option<u64>),
    to_run_us: u64,
}

/// What a heartbeat did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Heartbeat {
    /// Taken.
    Renewed,
    /// From a newer run: this one must end.
    Superseded(Fault),
}

/// Shared by all threads of the process.
pub struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// Bytes through the guest channel, both ways.
    pub channel_bytes: AtomicU64,
    /// Wakes the lease watchdog.
    pub lease_bell: Mailbox<()>,
    /// Held by the channel while it moves bytes; false while the guest is paused, see [`Shared::hold_port`].
    pub port_open: Mutex<bool>,
    /// Wakes the channel.
    pub channel_bell: Mailbox<()>,
}

impl Shared {
    /// Before there is a VM.
    pub fn new() -> std::io::Result<Self> {
        let state = State {
            phase: VmPhase::Empty,
            config: None,
            jail: Vec::new(),
            early: None,
            gate: None,
            stopper: None,
            frozen: false,
            memory: None,
            disk: None,
            counters: (0, None),
            to_run_us: 0,
        };
        Ok(Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            channel_bytes: AtomicU64::new(0),
            lease_bell: Mailbox::new()?,
            port_open: Mutex::new(true),
            channel_bell: Mailbox::new()?,
        })
    }
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// The phase as seen from outside.
    pub fn phase(&self) -> VmPhase {
        let s = self.lock();
        match s.phase {
            VmPhase::Running | VmPhase::Paused if s.frozen => VmPhase::LeaseEnded,
            p => p,
        }
    }
    /// Moves on to `phase`; nothing follows `Dead`.
    pub fn set_phase(&self, phase: VmPhase) {
        let mut s = self.lock();
        if s.phase != VmPhase::Dead {
            s.phase = phase;
        }
    }
    /// Moves from `from` to `to`; false if the phase was another one.
    pub fn advance(&self, from: VmPhase, to: VmPhase) -> bool {
        let mut s = self.lock();
        let right = s.phase == from;
        if right {
            s.phase = to;
        }
        right
    }
    /// The phase without regard to the lease.
    pub fn own_phase(&self) -> VmPhase {
        self.lock().phase
    }
    /// The VM's shape, once known.
    pub fn config(&self) -> Option<VmConfig> {
        self.lock().config.clone()
    }
    /// See [`Shared::config`].
    pub fn set_config(&self, config: VmConfig) {
        self.lock().config = Some(config);
    }
    /// What the jail has in force and what it lacks.
    pub fn jail(&self) -> Vec<String> {
        self.lock().jail.clone()
    }
    /// See [`Shared::jail`].
    pub fn set_jail(&self, words: Vec<String>) {
        self.lock().jail = words;
    }
    /// Memory and disk, for counters.
    pub fn set_parts(&self, memory: Arc<Memory>, disk: Arc<Disk>) {
        let mut s = self.lock();
        (s.memory, s.disk) = (Some(memory), Some(disk));
    }
    /// The engine's own counters. Its first exit after `run` is kept once, as counted from the request to start.
    pub fn set_counters(&self, (assists, first_exit_us): (u64, Option<u64>)) {
        let mut s = self.lock();
        let to_run_us = s.to_run_us;
        s.counters.0 = assists;
        s.counters.1 = s.counters.1.or(first_exit_us.map(|us| us.saturating_add(to_run_us)));
    }
    /// The VM was let go this long after the request; `first_exit_us` if the engine cannot tell it later.
    pub fn set_started(&self, to_run_us: u64, first_exit_us: Option<u64>) {
        let mut s = self.lock();
        (s.to_run_us, s.counters.1) = (to_run_us, first_exit_us);
    }

    /// Takes a heartbeat, before or after the VM exists.
    pub fn renew_lease(&self, token: RunToken, deadline_ms: u64) -> Result<Heartbeat, Fault> {
        let mut s = self.lock();
        let Some(gate) = s.gate.clone() else {
            s.early = Some((token, deadline_ms));
            drop(s);
            self.changed.notify_all();
            return Ok(Heartbeat::Renewed);
        };
        drop(s);
        let answer = match gate.renew(token, deadline_ms) {
            Ok(()) => Ok(Heartbeat::Renewed),
            Err(LeaseError::OtherRun { own, got }) if got > own => {
                gate.end();
                let why = format!("run {got} of this session was started; this is run {own}");
                Ok(Heartbeat::Superseded(Fault::new("superseded", "run this VM", why, "talk to the newer run")))
            }
            Err(e @ LeaseError::OtherRun { .. }) => {
                Err(Fault::new("stale-run", "renew the lease", e.to_string(), "send the token of the run that is meant"))
            }
        };
        self.changed.notify_all();
        self.lease_bell.ring();
        answer
    }

    /// Makes the gate of this run, with the heartbeat that may have come before.
    pub fn open_gate(&self, token: RunToken) -> Arc<LeaseGate> {
        let gate = Arc::new(LeaseGate::new(token));
        let mut s = self.lock();
        if let Some((t, deadline)) = s.early.take().filter(|(t, _)| *t == token) {
            let taken = gate.renew(t, deadline);
            assert!(taken.is_ok(), "the tokens are equal");
        }
        s.gate = Some(gate.clone());
        gate
    }
    /// Waits until the gate is open; false when it is not by the bound.
    pub fn wait_for_lease(&self, bound: Duration) -> bool {
        let deadline = Instant::now() + bound;
        let mut s = self.lock();
        loop {
            if s.gate.as_ref().is_some_and(|g| g.may_run()) {
                return true;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || s.phase == VmPhase::Dead {
                return false;
            }
            s = self.changed.wait_timeout(s, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
    /// The gate, once there is one.
    pub fn gate(&self) -> Option<Arc<LeaseGate>> {
        self.lock().gate.clone()
    }
    /// True while bytes may pass the guest channel.
    pub fn may_pass(&self) -> bool {
        self.gate().is_some_and(|g| g.may_run())
    }
    /// When this returns, the channel moves no byte until [`Shared::release_port`]. Devices may take and give bytes of
    /// the port while the vCPUs stand still, and what they do then would be in one half of a checkpoint only.
    pub fn hold_port(&self) {
        *self.port_open.lock().unwrap_or_else(PoisonError::into_inner) = false;
    }
    /// Undoes [`Shared::hold_port`].
    pub fn release_port(&self) {
        *self.port_open.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.channel_bell.ring();
    }
    /// From now on the watchdog can stop the vCPUs.
    pub fn set_stopper(&self, stopper: Arc<dyn Stopper>) {
        self.lock().stopper = Some(stopper);
        self.lease_bell.ring();
    }
    /// What the watchdog stops, if there is something.
    pub fn stopper(&self) -> Option<Arc<dyn Stopper>> {
        self.lock().stopper.clone()
    }
    /// Set by the watchdog.
    pub fn set_frozen(&self, frozen: bool) {
        self.lock().frozen = frozen;
    }

    /// Counters, from what threads told last.
    pub fn stats(&self) -> VmStats {
        let phase = self.phase();
        let (memory, disk, counters) = {
            let s = self.lock();
            (s.memory.clone(), s.disk.clone(), s.counters)
        };
        let paging = memory.as_ref().map(|m| m.paging()).unwrap_or_default();
        VmStats {
            phase: Some(phase),
            memory_present_bytes: memory.as_ref().map_or(0, |m| m.used_bytes()),
            chunks_faulted: paging.faulted,
            chunks_prefetched: paging.prefetched,
            chunks_missing: paging.missing,
            disk_dirty_bytes: disk.as_ref().map_or(0, |d| d.dirty_bytes()),
            vmm_rss_bytes: own_rss_bytes(),
            channel_bytes: self.channel_bytes.load(Ordering::Relaxed),
            assists: counters.0,
            first_exit_us: counters.1,
            dirty_set: memory.map_or("", |m| if m.is_tracked() { "tracked" } else { "hash-scan" }).to_owned(),
        }
    }

    #[cfg(test)]
    pub(crate) fn close_gate_for_test(&self) {
        self.gate().unwrap().end();
    }
}

/// Resident bytes of this process that are not mapped memory files.
fn own_rss_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let mut words = statm.split(' ').skip(1).filter_map(|w| w.parse::<u64>().ok());
    let (resident, shared) = (words.next().unwrap_or(0), words.next().unwrap_or(0));
    resident.saturating_sub(shared) * rustix::param::page_size() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: RunToken = RunToken { generation: 1, epoch: 5, run: 2 };

    #[test]
    fn the_first_exit_counts_from_the_request_and_is_that_of_the_first_run() {
        let s = Shared::new().unwrap();
        s.set_started(20_000, None);
        s.set_counters((1, None));
        assert_eq!(s.stats().first_exit_us, None);
        s.set_counters((2, Some(300)));
        s.set_counters((3, None));
        s.set_counters((4, Some(7)));
        assert_eq!((s.stats().assists, s.stats().first_exit_us), (4, Some(20_300)));
        // An engine that cannot tell: running is what is known.
        let s = Shared::new().unwrap();
        s.set_started(0, Some(90_000));
        s.set_counters((0, None));
        assert_eq!(s.stats().first_exit_us, Some(90_000));
    }

    #[test]
    fn a_heartbeat_before_the_vm_counts_only_for_its_own_run() {
        let s = Shared::new().unwrap();
        s.renew_lease(RunToken { run: 1, ..OWN }, u64::MAX).unwrap();
        s.open_gate(OWN);
        assert!(!s.wait_for_lease(Duration::ZERO));
        let s = Shared::new().unwrap();
        s.renew_lease(OWN, u64::MAX).unwrap();
        s.open_gate(OWN);
        assert!(s.wait_for_lease(Duration::ZERO));
    }

    #[test]
    fn an_older_run_is_refused_and_a_newer_one_ends_this() {
        let s = Shared::new().unwrap();
        s.open_gate(OWN);
        assert_eq!(s.renew_lease(RunToken { epoch: 4, ..OWN }, u64::MAX).unwrap_err().code, "stale-run");
        assert_eq!(s.renew_lease(OWN, u64::MAX), Ok(Heartbeat::Renewed));
        assert!(s.may_pass());
        let newer = s.renew_lease(RunToken { epoch: 6, ..OWN }, u64::MAX);
        assert!(matches!(newer, Ok(Heartbeat::Superseded(f)) if f.code == "superseded"));
        assert!(!s.may_pass());
    }

    #[test]
    fn nothing_follows_death_and_a_frozen_vm_shows_as_lease_ended() {
        let s = Shared::new().unwrap();
        assert!(s.advance(VmPhase::Empty, VmPhase::Starting));
        s.set_frozen(true);
        assert_eq!(s.phase(), VmPhase::Starting);
        s.set_phase(VmPhase::Running);
        assert_eq!((s.phase(), s.own_phase()), (VmPhase::LeaseEnded, VmPhase::Running));
        s.set_phase(VmPhase::Dead);
        s.set_phase(VmPhase::Running);
        assert_eq!(s.phase(), VmPhase::Dead);
    }
}
