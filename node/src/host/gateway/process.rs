//! The process `ksgw`: started in a process group of its own, so that ksd's end is not its end.

use crate::host::guest::tail;
use crate::host::process::libexec;
use ks_proto::api::ApiError;
use ks_proto::gateway::SOCKET;
use rustix::process::{Pid, Signal, kill_process};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::sync::oneshot;

/// How long it may take until it listens.
const START_DEADLINE: Duration = Duration::from_secs(20);
/// Between two looks whether it listens.
const LOOK_AGAIN: Duration = Duration::from_millis(5);
const LOG: &str = "ksgw.log";

/// Starts it and waits until it listens.
///
/// # Errors
/// `engine-missing` without the program; why it ended at once.
pub async fn start(dir: &Path) -> Result<(), ApiError> {
    let program = libexec().join("ksgw");
    let child = spawn(&program, dir).map_err(|e| {
        let next = "install KeepState's programs side by side, or set KS_LIBEXEC to their folder";
        ApiError::new("engine-missing", format!("cannot start {}", program.display()), e.to_string(), next)
    })?;
    let mut ended = reap(child);
    let give_up = tokio::time::Instant::now() + START_DEADLINE;
    loop {
        let last = match UnixStream::connect(dir.join(SOCKET)).await {
            Ok(_) => return Ok(()),
            Err(e) => e,
        };
        if let Ok(how) = tokio::time::timeout(LOOK_AGAIN, &mut ended).await {
            let how = how.unwrap_or_default();
            let why = format!("ksgw ended ({how}); the end of its log:\n{}", tail(&dir.join(LOG), 8));
            return Err(ApiError::new(
                "internal",
                "the node's gateway did not start",
                why,
                "see gateway/ksgw.log in the data folder",
            ));
        }
        if tokio::time::Instant::now() > give_up {
            let why = format!("it does not listen after {} s: {last}", START_DEADLINE.as_secs());
            return Err(ApiError::new(
                "internal",
                "the node's gateway did not start",
                why,
                "see gateway/ksgw.log in the data folder",
            ));
        }
    }
}

/// SIGTERM to the process, if it is the gateway of this folder.
pub fn end(pid: u32, dir: &Path) {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let ours = line.split(|b| *b == 0).any(|arg| arg == dir.as_os_str().as_encoded_bytes());
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw).filter(|_| ours) {
        let _ = kill_process(pid, Signal::TERM);
    }
}

fn spawn(program: &Path, dir: &Path) -> io::Result<tokio::process::Child> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    let log = std::fs::OpenOptions::new().create(true).append(true).open(dir.join(LOG))?;
    let mut c = std::process::Command::new(program);
    c.arg("--dir").arg(dir);
    c.stdin(std::process::Stdio::null()).stdout(log.try_clone()?).stderr(log).process_group(0);
    tokio::process::Command::from(c).kill_on_drop(false).spawn()
}

/// Collects its exit, so that it is no zombie, and tells how it ended.
fn reap(mut child: tokio::process::Child) -> oneshot::Receiver<String> {
    let (tx, rx) = oneshot::channel();
    tokio::spawn(async move {
        let how = match child.wait().await {
            Ok(status) => status.to_string(),
            Err(e) => e.to_string(),
        };
        tracing::warn!("the gateway's process ended ({how}); it is started again when it is needed");
        let _ = tx.send(how);
    });
    rx
}
