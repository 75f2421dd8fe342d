//! Starts and stops the node's program, `ksd`, on this machine.
//!
//! `ksd supervise -- --data-dir DIR` keeps a `ksd` alive; SIGTERM ends both. api.json names the daemon's process;
//! `supervisor.pid`, which is ours, that of the supervisor.

use crate::failure::{Failure, Res};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The program `ksd`: in KS_LIBEXEC, else beside our own.
pub fn program() -> Res<PathBuf> {
    let own =
        std::env::current_exe().map_err(|e| Failure::local("cannot find my own program", e, "start ks by its full path"))?;
    let dir = match std::env::var_os("KS_LIBEXEC").filter(|v| !v.is_empty()) {
        Some(d) => PathBuf::from(d),
        None => own.parent().map(Path::to_path_buf).unwrap_or_default(),
    };
    let ksd = dir.join("ksd");
    if ksd.is_file() {
        return Ok(ksd);
    }
    Err(Failure::new(
        "local",
        "cannot start a node",
        format!("there is no {}", ksd.display()),
        "install all programs in one folder, or set KS_LIBEXEC to it",
    ))
}

/// What `ks up` passes on to the node.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options<'a> {
    /// `--fleet-address`.
    pub fleet_address: Option<&'a str>,
    /// `--bulk-mib-s`.
    pub bulk_mib_s: Option<u32>,
}

fn arguments(data_dir: &Path, o: Options<'_>) -> Vec<OsString> {
    let mut all = vec!["supervise".into(), "--".into(), "--data-dir".into(), data_dir.as_os_str().to_owned()];
    if let Some(a) = o.fleet_address {
        all.extend(["--fleet-address".into(), a.into()]);
    }
    if let Some(n) = o.bulk_mib_s {
        all.extend(["--bulk-mib-s".into(), n.to_string().into()]);
    }
    all
}

fn pid_file(data_dir: &Path) -> PathBuf {
    data_dir.join("supervisor.pid")
}

/// The log of a node that runs away from the terminal.
pub fn log_file(data_dir: &Path) -> PathBuf {
    data_dir.join("ksd.log")
}

/// Makes the data folder, for its owner only.
pub fn make_data_dir(data_dir: &Path) -> Res<()> {
    use std::os::unix::fs::DirBuilderExt;
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(data_dir);
    made.map_err(|e| Failure::local(format!("cannot make {}", data_dir.display()), e, "set KS_HOME to a folder of yours"))
}

/// Becomes the node; returns only if that fails.
pub fn become_node(data_dir: &Path, o: Options<'_>) -> Res<std::convert::Infallible> {
    let ksd = program()?;
    let e = Command::new(&ksd).args(arguments(data_dir, o)).exec();
    Err(Failure::local(format!("cannot run {}", ksd.display()), e, "is it a program for this machine?"))
}

/// Starts the node in a session of its own, away from the terminal. The child is the supervisor itself.
pub fn start(data_dir: &Path, o: Options<'_>) -> Res<std::process::Child> {
    let ksd = program()?;
    let bad =
        |e: std::io::Error| Failure::local(format!("cannot start {}", ksd.display()), e, "is it a program for this machine?");
    let path = log_file(data_dir);
    let log: File = OpenOptions::new().append(true).create(true).mode(0o600).open(&path).map_err(bad)?;
    let me = std::env::current_exe().map_err(bad)?;
    let child = Command::new(me)
        .arg(crate::DETACH)
        .arg(&ksd)
        .args(arguments(data_dir, o))
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(log.try_clone().map_err(bad)?)
        .stderr(log)
        .spawn()
        .map_err(bad)?;
    std::fs::write(pid_file(data_dir), child.id().to_string()).map_err(bad)?;
    Ok(child)
}

/// Leaves the caller's session, then becomes the command.
pub fn detach(command: &[OsString]) -> Failure {
    // Failing means that it leads a session already.
    let _ = rustix::process::setsid();
    let Some((program, args)) = command.split_first() else {
        return Failure::usage("nothing to run", "no command was given", "this verb is for ks itself");
    };
    let e = Command::new(program).args(args).exec();
    Failure::local(format!("cannot run {}", Path::new(program).display()), e, "is it a program for this machine?")
}

/// The supervisor's process: the one that `ks up` noted, or the daemon's parent if that is a `ksd`.
pub fn supervisor(data_dir: &Path, daemon: Option<u32>) -> Option<u32> {
    let noted = std::fs::read_to_string(pid_file(data_dir)).ok().and_then(|t| t.trim().parse().ok());
    let parent = daemon.filter(|p| alive(*p)).and_then(|p| {
        let stat = std::fs::read_to_string(format!("/proc/{p}/stat")).ok()?;
        stat.rsplit(") ").next()?.split(' ').nth(1)?.parse().ok()
    });
    noted.into_iter().chain(parent).find(|p| alive(*p))
}

/// True if `ks up` gave the node a supervisor and that one is dead.
pub fn unattended(data_dir: &Path) -> bool {
    let noted = std::fs::read_to_string(pid_file(data_dir)).ok().and_then(|t| t.trim().parse::<u32>().ok());
    noted.is_some_and(|p| !alive(p))
}

fn pid(raw: u32) -> Option<Pid> {
    i32::try_from(raw).ok().filter(|p| *p > 1).and_then(Pid::from_raw)
}

/// Does this process exist and is it a `ksd`? (A number alone may be somebody else's by now.)
pub fn alive(raw: u32) -> bool {
    let exists = pid(raw).is_some_and(|p| test_kill_process(p).is_ok());
    let name = std::fs::read_to_string(format!("/proc/{raw}/comm")).unwrap_or_default();
    let zombie = std::fs::read_to_string(format!("/proc/{raw}/stat"))
        .is_ok_and(|s| s.rsplit(") ").next().is_some_and(|r| r.starts_with('Z')));
    exists && !zombie && name.trim_end().starts_with("ksd")
}

/// Sends a signal to a live `ksd`.
pub fn signal(raw: u32, hard: bool) -> bool {
    let which = if hard { Signal::KILL } else { Signal::TERM };
    alive(raw) && pid(raw).is_some_and(|p| kill_process(p, which).is_ok())
}

/// Where the node's log ends now: what a later start writes comes after it.
pub fn log_end(data_dir: &Path) -> u64 {
    std::fs::metadata(log_file(data_dir)).map_or(0, |m| m.len())
}

/// The last lines that the node's log has after byte `from`.
pub fn log_tail(data_dir: &Path, from: u64, lines: usize) -> String {
    let text = std::fs::read(log_file(data_dir)).unwrap_or_default();
    let text = String::from_utf8_lossy(text.get(usize::try_from(from).unwrap_or(usize::MAX)..).unwrap_or_default());
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::{pid_file, unattended};

    #[test]
    fn a_node_is_unattended_only_when_the_supervisor_that_it_got_is_dead() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!unattended(dir.path()), "it never got one");
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        std::fs::write(pid_file(dir.path()), child.id().to_string()).unwrap();
        assert!(unattended(dir.path()));
    }
}
