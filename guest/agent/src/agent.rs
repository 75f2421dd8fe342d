//! What every request handler shares: where things are, who the programs run as, the reaper and the user's cgroup.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use ks_relay::Relay;

use crate::{
    cgroup::UserCgroup,
    exec::Reaper,
    outlet::{Out, Outlet},
    refusal::Refusal,
};

/// The server's surroundings.
pub struct Agent {
    /// Collects programs that ended.
    pub reaper: Reaper,
    /// The cgroup of the user's processes; None outside a VM.
    pub cgroup: Option<UserCgroup>,
    /// PID 1 of a VM: may change users, the clock and the machine's identity.
    pub in_vm: bool,
    /// Sockets and notes (`/run/keepstate` in a VM).
    pub state: PathBuf,
    /// Configuration written by us (`/etc/keepstate` in a VM).
    pub conf: PathBuf,
    /// The tmux session was started by a request.
    pub main_started: AtomicBool,
    /// One start of the main session at a time.
    pub starting: tokio::sync::Mutex<()>,
    /// Streams that this guest opens.
    pub outlet: Arc<Outlet>,
    /// Model calls and other egress of the session's programs.
    pub relay: Relay<Out>,
    /// Said once: users are not switched outside a VM.
    told: Mutex<bool>,
}

impl Agent {
    /// For PID 1 of a VM.
    pub fn in_vm(cgroup: Option<UserCgroup>) -> Arc<Self> {
        Arc::new(Self::new(true, cgroup, Path::new("/run/keepstate"), Path::new("/etc/keepstate")))
    }

    /// For a server outside a VM: everything runs as the caller and lives below `state`.
    pub fn outside(state: &Path) -> Arc<Self> {
        Arc::new(Self::new(false, None, state, state))
    }

    fn new(in_vm: bool, cgroup: Option<UserCgroup>, state: &Path, conf: &Path) -> Self {
        let outlet = Arc::new(Outlet::default());
        let relay = Relay::new(Out(outlet.clone()), nonce(), state.join("relay"));
        Self {
            reaper: Reaper::new(rustix::process::getpid().is_init()),
            cgroup,
            in_vm,
            state: state.to_owned(),
            conf: conf.to_owned(),
            main_started: AtomicBool::new(false),
            starting: tokio::sync::Mutex::new(()),
            outlet,
            relay,
            told: Mutex::new(false),
        }
    }

    /// Refuses while the user's processes are frozen: a program that joined them would hang before it began.
    pub fn not_frozen(&self, what: &str) -> Result<(), Refusal> {
        match &self.cgroup {
            Some(group) if group.is_frozen() => Err(Refusal::new(
                "busy",
                what,
                "the session's processes are frozen for a checkpoint",
                "try again when the restore hook or a thaw has run",
            )),
            Some(_) | None => Ok(()),
        }
    }

    /// Says once that users and cgroups are left alone.
    pub fn note_outside(&self) {
        if self.in_vm {
            return;
        }
        let mut told = self.told.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if !*told {
            *told = true;
            crate::log::line("outside a VM: programs run as the caller, without cgroups, clock or identity changes");
        }
    }

    /// Whether a request has started the main session.
    pub fn has_started_main(&self) -> bool {
        self.main_started.load(Ordering::Relaxed)
    }
}

/// Fresh random bytes from the kernel, whose pool each hook that restores has renewed before. A kernel that has none to give
/// leaves the name of a timeline to the clock, which a hook has set too.
pub fn nonce() -> ks_relay::Nonce {
    let mut nonce = [0; 16];
    if getrandom::fill(&mut nonce).is_err() {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        nonce.copy_from_slice(&now.as_nanos().to_le_bytes());
    }
    nonce
}
