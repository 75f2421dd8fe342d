//! VMM processes: started in their own process group, found again after a restart, and seen dead before a new run.

use ks_proto::SessionId;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal};

/// A process by pid and start time: a pid alone may be somebody else's later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Proc {
    /// Process id.
    pub pid: u32,
    /// Start time in clock ticks since boot.
    pub started: u64,
}

/// State letter, process group and start time of a process.
fn stat(pid: u32) -> Option<(char, u32, u64)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name may hold spaces and brackets: fields count from the last one.
    let rest: Vec<&str> = text.get(text.rfind(')')? + 1..)?.split_whitespace().collect();
    Some((rest.first()?.chars().next()?, rest.get(2)?.parse().ok()?, rest.get(19)?.parse().ok()?))
}

fn is_dead(state: char) -> bool {
    state == 'Z' || state == 'X'
}

impl Proc {
    /// The live process with this pid.
    pub fn of(pid: u32) -> Option<Self> {
        stat(pid).filter(|s| !is_dead(s.0)).map(|(_, _, started)| Self { pid, started })
    }
    /// True while this very process runs.
    pub fn alive(&self) -> bool {
        Self::of(self.pid) == Some(*self)
    }
}

/// Live processes whose command line has the argument `--run-dir DIR`.
pub fn of_run_dir(dir: &Path) -> Vec<Proc> {
    let wanted = dir.as_os_str().as_encoded_bytes();
    all_pids()
        .filter(|pid| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let args: Vec<&[u8]> = line.split(|b| *b == 0).collect();
            args.windows(2).any(|w| w[0] == b"--run-dir" && w[1] == wanted)
        })
        .filter_map(Proc::of)
        .collect()
}

fn all_pids() -> impl Iterator<Item = u32> {
    std::fs::read_dir("/proc").into_iter().flatten().flatten().filter_map(|e| e.file_name().to_str()?.parse().ok())
}

/// Live members of a process group.
fn of_group(pgid: u32) -> Vec<Proc> {
    all_pids()
        .filter(|p| stat(*p).is_some_and(|(state, group, _)| group == pgid && !is_dead(state)))
        .filter_map(Proc::of)
        .collect()
}

/// As [`kill_group`], for a process that is named by its id only.
pub fn kill_group_of(pid: u32) {
    if let Some(p) = Proc::of(pid) {
        kill_group(p);
    }
}

/// SIGKILL to the process and, when it leads one, to its whole group.
pub fn kill_group(p: Proc) {
    let Some(pid) = i32::try_from(p.pid).ok().and_then(Pid::from_raw) else { return };
    // The pidfd names the process that is there now; checking the start time after opening it rules out a reused pid.
    let Ok(fd) = rustix::process::pidfd_open(pid, PidfdFlags::empty()) else { return };
    if !p.alive() {
        return;
    }
    if stat(p.pid).is_some_and(|(_, group, _)| group == p.pid) {
        let _ = rustix::process::kill_process_group(pid, Signal::KILL);
    }
    let _ = rustix::process::pidfd_send_signal(&fd, Signal::KILL);
}

/// Kills every process of the run folder, with its group, and waits until all are dead.
///
/// # Errors
/// The processes that are still there after `deadline`.
pub async fn end_run_dir(dir: &Path, deadline: Duration) -> Result<(), String> {
    let found = of_run_dir(dir);
    let mut all: Vec<Proc> = found.iter().flat_map(|p| of_group(p.pid)).chain(found.iter().copied()).collect();
    all.sort_by_key(|p| p.pid);
    all.dedup();
    for p in &found {
        kill_group(*p);
    }
    let end = tokio::time::Instant::now() + deadline;
    for p in all {
        if tokio::time::timeout_at(end, wait_dead(p)).await.is_err() {
            return Err(format!("process {} ({}) did not end within {} s of SIGKILL", p.pid, dir.display(), deadline.as_secs()));
        }
    }
    Ok(())
}

/// Waits until the process is dead.
pub async fn wait_dead(p: Proc) {
    let Some(pid) = i32::try_from(p.pid).ok().and_then(Pid::from_raw) else { return };
    let Ok(fd) = rustix::process::pidfd_open(pid, PidfdFlags::empty()) else { return };
    if !p.alive() {
        return;
    }
    #[expect(
        deprecated,
        reason = "its replacement is unsafe; an OwnedFd stays open for as long as the AsyncFd, which is all it asks"
    )]
    let watched = tokio::io::unix::AsyncFd::<OwnedFd>::new(fd);
    if let Ok(fd) = watched {
        let _ = fd.readable().await;
    }
}

/// Seconds of CPU that the process group has used.
pub fn group_cpu_s(pgid: u32) -> f64 {
    let ticks = |pid: u32| -> Option<u64> {
        let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let rest: Vec<&str> = text.get(text.rfind(')')? + 1..)?.split_whitespace().collect();
        Some(rest.get(11)?.parse::<u64>().ok()? + rest.get(12)?.parse::<u64>().ok()?)
    };
    let total: u64 = of_group(pgid).iter().filter_map(|p| ticks(p.pid)).sum();
    total as f64 / rustix::param::clock_ticks_per_second() as f64
}

/// The folder that the programs of this installation are in.
pub fn libexec() -> PathBuf {
    if let Some(dir) = std::env::var_os("KS_LIBEXEC") {
        return PathBuf::from(dir);
    }
    let own = std::env::current_exe().ok();
    own.and_then(|p| p.parent().map(Path::to_path_buf)).unwrap_or_else(|| PathBuf::from("."))
}

/// First of the uids that jailed VMs get; far from those of people, services and subordinate ranges.
const JAIL_UID_BASE: u32 = 0x7000_0000;

/// Root gives every VM a uid of its own, which no account has; others cannot change uids.
fn jail_uid(session: &SessionId) -> Option<u32> {
    let low = u32::from_le_bytes([session.0[0], session.0[1], session.0[2], 0]);
    rustix::process::geteuid().is_root().then_some(JAIL_UID_BASE + low)
}

/// Starts `ks-vmm` for the run folder `dir`, in a process group of its own, so that ksd's end is not its end.
///
/// # Errors
/// If the program is missing or cannot be started.
pub fn start_vmm(dir: &Path, session: &SessionId) -> io::Result<tokio::process::Child> {
    use std::os::unix::process::CommandExt;
    let log = std::fs::OpenOptions::new().create(true).append(true).open(dir.join("vmm.log"))?;
    let mut c = std::process::Command::new(libexec().join("ks-vmm"));
    c.arg("--control-socket").arg(dir.join("control.sock")).arg("--channel-socket").arg(dir.join("channel.sock"));
    c.arg("--run-dir").arg(dir);
    if let Some(qemu) = std::env::var_os("KS_QEMU") {
        c.arg("--qemu").arg(qemu);
    }
    if let Some(uid) = jail_uid(session) {
        c.arg("--jail-uid").arg(uid.to_string());
    }
    c.stdin(std::process::Stdio::null()).stdout(log.try_clone()?).stderr(log).process_group(0);
    tokio::process::Command::from(c).kill_on_drop(false).spawn()
}

/// SIGKILL to this very process: a crash on purpose.
pub fn kill_self() {
    let _ = rustix::process::kill_process(rustix::process::getpid(), Signal::KILL);
}
