//! The keeper: the process that ksd started. It forks the jailed ks-vmm, waits for its end, and cleans up.
//!
//! ```text
//! ksd -- keeper (ksd's uid, no capabilities, a filter of a few calls)
//!          `- ks-vmm (own uid, namespaces, a filter per thread; pid 1 of its namespace)
//!               |- starter (ksd's rights, until the one start request)
//!               `- QEMU (only with that engine; same uid, namespaces within those of ks-vmm)
//! ```
//! Who dies takes those below along: parent-death signals, and the pid namespace that ends with its first process.

use crate::jail::{filter, own, trap};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, WaitId, WaitIdOptions, pidfd_open, waitid};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How often and how long after another an empty cgroup is removed.
const GROUP_TRIES: u32 = 100;
const GROUP_WAIT: Duration = Duration::from_millis(2);

/// What the keeper keeps.
pub struct Keeper {
    /// The jailed process.
    pub child: Pid,
    /// Stop signals.
    pub signals: OwnedFd,
    /// Written to when one comes; the child ends when this closes.
    pub stop: OwnedFd,
    /// The log's descriptor.
    pub log: RawFd,
    /// Removed at the end.
    pub files: Vec<PathBuf>,
    /// Empty folders, removed at the end.
    pub folders: Vec<PathBuf>,
}

impl Keeper {
    /// Gives up all rights, waits for the child, cleans up; returns the child's exit code.
    pub fn keep(self) -> i32 {
        let pidfd = match pidfd_open(self.child, PidfdFlags::empty()) {
            Ok(fd) => fd,
            Err(e) => {
                tracing::error!("the keeper: {e}");
                return self.end();
            }
        };
        crate::sys::keep_only(&[self.signals.as_raw_fd(), self.stop.as_raw_fd(), self.log, pidfd.as_raw_fd()]);
        let less = own::drop_rights(None).map_err(|e| e.to_string());
        let less = less.and_then(|()| trap::install(self.log).map_err(|e| e.to_string()));
        if let Err(e) = less.and_then(|()| filter::confine_keeper()) {
            tracing::warn!("the keeper keeps rights that it does not need: {e}");
        }
        let mut told = false;
        loop {
            let mut fds = vec![PollFd::new(&pidfd, PollFlags::IN)];
            if !told {
                fds.push(PollFd::new(&self.signals, PollFlags::IN));
            }
            match poll(&mut fds, None) {
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(e) => tracing::error!("the keeper: poll: {e}"),
            }
            if fds[0].revents().intersects(PollFlags::IN) {
                return self.end();
            }
            if fds.get(1).is_some_and(|f| f.revents().intersects(PollFlags::IN)) {
                told = true;
                let _ = rustix::io::write(&self.stop, b"s");
            }
        }
    }

    /// The child is dead or cannot be watched: reaps it, cleans up.
    fn end(&self) -> i32 {
        let status = loop {
            match waitid(WaitId::Pid(self.child), WaitIdOptions::EXITED) {
                Err(rustix::io::Errno::INTR) => {}
                other => break other.ok().flatten(),
            }
        };
        for path in &self.files {
            let _ = std::fs::remove_file(path);
        }
        for dir in &self.folders {
            remove_group(dir);
        }
        let Some(status) = status else { return 1 };
        match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => code,
            (None, Some(signal)) => {
                tracing::error!("the jailed process was ended by signal {signal}");
                128 + signal
            }
            (None, None) => 1,
        }
    }
}

/// A cgroup counts a process for a moment longer than its parent does.
fn remove_group(dir: &Path) {
    for left in (0..GROUP_TRIES).rev() {
        match std::fs::remove_dir(dir) {
            Err(e) if e.kind() == std::io::ErrorKind::ResourceBusy && left > 0 => std::thread::sleep(GROUP_WAIT),
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return tracing::info!("{}: {e}", dir.display()),
            Err(_) | Ok(()) => return,
        }
    }
}
