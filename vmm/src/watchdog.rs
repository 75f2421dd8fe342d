//! The lease watchdog: a thread that stops the vCPUs the moment the deadline passes on CLOCK_BOOTTIME, whatever the
//! run loop and the node are doing, and lets them go when the same run is granted again.

use crate::shared::Shared;
use ks_proto::control::VmmEvent;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// Starts the thread. `tell` carries events to the node.
pub fn start(shared: Arc<Shared>, tell: impl Fn(VmmEvent) + Send + 'static) -> std::io::Result<()> {
    let timer = timerfd_create(TimerfdClockId::Boottime, TimerfdFlags::CLOEXEC)?;
    std::thread::Builder::new().name("ks-lease".into()).spawn(move || {
        ks_vmm_core::confine::enter(ks_vmm_core::confine::Kind::Lease);
        let mut frozen = false;
        loop {
            shared.lease_bell.take();
            let now = decide(&shared, &mut frozen);
            if let Some(running) = now {
                tell(VmmEvent::Lease { running });
            }
            // A deadline that has passed is not waited for: the bell rings when it is renewed or the VM can be stopped.
            let deadline = shared.gate().filter(|g| g.may_run()).map_or(u64::MAX, |g| g.deadline_ms());
            if arm(&timer, deadline).is_err() || wait(&timer, &shared).is_err() {
                // Without a timer nothing may run.
                if let Some(s) = shared.stopper() {
                    s.freeze();
                }
                tracing::error!("the lease timer failed: the VM is stopped");
                return;
            }
        }
    })?;
    Ok(())
}

/// Stops or lets go; Some(running) when that changed.
fn decide(shared: &Shared, frozen: &mut bool) -> Option<bool> {
    let (Some(gate), Some(stopper)) = (shared.gate(), shared.stopper()) else { return None };
    match (gate.may_run(), *frozen) {
        (false, false) => {
            stopper.freeze();
            *frozen = true;
            shared.set_frozen(true);
            Some(false)
        }
        (true, true) => {
            shared.set_frozen(false);
            *frozen = false;
            stopper.thaw();
            Some(true)
        }
        (false, true) | (true, false) => None,
    }
}

/// Fires at `deadline_ms`; never for u64::MAX.
fn arm(timer: &OwnedFd, deadline_ms: u64) -> rustix::io::Result<()> {
    let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
    let at = match i64::try_from(deadline_ms / 1000) {
        // A time of zero would disarm the timer.
        Ok(tv_sec) => Timespec { tv_sec, tv_nsec: i64::try_from(deadline_ms % 1000 * 1_000_000).unwrap_or(0).max(1) },
        Err(_) => zero,
    };
    let at = if deadline_ms == u64::MAX { zero } else { at };
    timerfd_settime(timer, TimerfdTimerFlags::ABSTIME, &Itimerspec { it_interval: zero, it_value: at })?;
    Ok(())
}

fn wait(timer: &OwnedFd, shared: &Shared) -> rustix::io::Result<()> {
    let mut fds = [PollFd::new(timer, PollFlags::IN), PollFd::from_borrowed_fd(shared.lease_bell.as_fd(), PollFlags::IN)];
    match poll(&mut fds, None) {
        Err(rustix::io::Errno::INTR) | Ok(_) => Ok(()),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ks_proto::RunToken;
    use ks_vmm_core::engine::Stopper;
    use ks_vmm_core::lease::boottime_ms;
    use std::sync::Mutex;
    use std::sync::mpsc;
    use std::time::Duration;

    struct Told(Mutex<mpsc::Sender<(&'static str, u64)>>);
    impl Stopper for Told {
        fn freeze(&self) {
            self.0.lock().unwrap().send(("freeze", boottime_ms())).unwrap();
        }
        fn thaw(&self) {
            self.0.lock().unwrap().send(("thaw", boottime_ms())).unwrap();
        }
    }

    #[test]
    fn it_stops_at_the_deadline_and_goes_on_when_granted_again() {
        let own = RunToken { generation: 0, epoch: 1, run: 1 };
        let shared = Arc::new(Shared::new().unwrap());
        let (tx, rx) = mpsc::channel();
        let events = Mutex::new(tx.clone());
        start(shared.clone(), move |e| {
            let VmmEvent::Lease { running } = e else { panic!("{e:?}") };
            events.lock().unwrap().send((if running { "running" } else { "stopped" }, 0)).unwrap();
        })
        .unwrap();
        shared.open_gate(own);
        let deadline = boottime_ms() + 150;
        shared.renew_lease(own, deadline).unwrap();
        shared.set_stopper(Arc::new(Told(Mutex::new(tx))));
        let next = || rx.recv_timeout(Duration::from_secs(10)).unwrap();
        let (what, at) = next();
        assert_eq!(what, "freeze");
        assert!(at >= deadline, "not before the deadline: {at} < {deadline}");
        assert_eq!(next().0, "stopped");
        shared.renew_lease(own, u64::MAX).unwrap();
        assert_eq!((next().0, next().0), ("thaw", "running"));
        // A longer lease that replaces a short one: no stop in between.
        assert!(rx.try_recv().is_err());
    }
}
