//! What each thread of a VMM is for, so that the process can confine it to that.
//!
//! Every thread that this crate or an engine starts calls [`enter`] before its work. The process installs what that
//! does (a seccomp filter per kind); where none is installed, as in tests and tools, nothing happens.

use std::sync::OnceLock;

/// What a thread does. The order is the one in which tables list them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Runs guest code (kvm) and answers its exits.
    Vcpu,
    /// Serves and fetches pages of guest memory.
    Pager,
    /// Serves one device: the disk, the port, the console.
    Device,
    /// Stores a checkpoint, and starts helpers for it.
    Store,
    /// Moves bytes between the node and the guest's port.
    Channel,
    /// Watches the lease and stops the guest.
    Lease,
    /// Everything else: the run loop, the node's connections, signals.
    Control,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 7] = [Self::Vcpu, Self::Pager, Self::Device, Self::Store, Self::Channel, Self::Lease, Self::Control];

    /// As logs and reports spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Vcpu => "vcpu",
            Self::Pager => "pager",
            Self::Device => "device",
            Self::Store => "store",
            Self::Channel => "channel",
            Self::Lease => "lease",
            Self::Control => "control",
        }
    }
}

static HOOK: OnceLock<fn(Kind)> = OnceLock::new();

/// Sets what [`enter`] does, once per process and before threads start; false if it was set already.
pub fn install(hook: fn(Kind)) -> bool {
    HOOK.set(hook).is_ok()
}

/// Confines the calling thread to what `kind` needs. There is no way back.
pub fn enter(kind: Kind) {
    if let Some(hook) = HOOK.get() {
        hook(kind);
    }
}
