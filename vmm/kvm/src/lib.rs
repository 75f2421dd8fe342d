//! The kvm engine: our own VMM on /dev/kvm, behind the seam of `ks-vmm-core`.
//!
//! [`engine`] builds the machine, runs, pauses, saves; [`vcpu`] are the vCPU threads; [`virtio`], [`serial`] and [`bus`]
//! the devices; [`boot`], [`acpi`], [`layout`] what the guest finds; [`cpu_state`] and [`state`] what is saved and its
//! format; [`profile`] and [`assist`] what a host without hardware virtualization needs; [`sys`] all `unsafe`.
//!
//! Guest memory is one shared mapping of the core's memory file, watched by the core's pager and dirty tracker; device
//! threads write through the same mapping, so what they write is in the dirty set like what the guest writes.

pub mod acpi;
pub mod assist;
pub mod boot;
pub mod bus;
pub mod cpu_state;
pub mod engine;
pub mod host;
pub mod layout;
pub mod profile;
pub mod serial;
pub mod state;
pub mod sys;
pub mod vcpu;
pub mod virtio;

pub use engine::{Devices, KvmEngine};

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks, going on after a panic elsewhere: the data are registers, which have no broken middle state.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What has to happen once per process before a filter forbids it: the signal handler that gets vCPUs out of the guest.
pub fn prepare_process() {
    sys::kick::install();
}
