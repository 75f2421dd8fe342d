//! The end of the VM: quiesce and power off, or a loud stop when the guest cannot go on.

use std::{io, time::Duration};

use rustix::system::RebootCommand;

use crate::agent::Agent;

const TERM_WAIT: Duration = Duration::from_secs(3);
/// Time for the answer to leave through the port.
const ANSWER_WAIT: Duration = Duration::from_millis(100);
const SIGTERM: i32 = 15;

/// SIGTERM to the user's processes, SIGKILL to those that stay, then file systems are flushed.
pub async fn quiesce(agent: &Agent) {
    if let Some(group) = &agent.cgroup {
        let _ = group.thaw();
        group.signal_all(SIGTERM);
        let deadline = tokio::time::Instant::now() + TERM_WAIT;
        while group.is_populated() && tokio::time::Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        if group.is_populated() {
            let _ = group.kill();
        }
    }
    let _ = tokio::task::spawn_blocking(rustix::fs::sync).await;
}

/// Powers off a moment later. Returns only if the kernel refuses.
pub async fn off_after_answer() -> io::Result<()> {
    tokio::time::sleep(ANSWER_WAIT).await;
    match tokio::task::spawn_blocking(off).await {
        Ok(why) => Err(why),
        Err(why) => Err(io::Error::other(why)),
    }
}

/// Makes the root disk read-only and powers off; falls back to a reset, which the host takes as the end too.
fn off() -> io::Error {
    let _ = rustix::mount::mount_remount("/", rustix::mount::MountFlags::RDONLY, c"");
    rustix::fs::sync();
    if let Err(why) = rustix::system::reboot(RebootCommand::PowerOff) {
        crate::log::line(&format!("cannot power off: {why}"));
    }
    match rustix::system::reboot(RebootCommand::Restart) {
        Ok(()) => io::Error::other("the kernel did not power off"),
        Err(why) => why.into(),
    }
}

/// The guest cannot go on: says why on the console and resets, so that the host notices.
pub fn fatal(why: &str) -> ! {
    crate::log::line(&format!("FATAL: {why}"));
    rustix::fs::sync();
    // The console drains before the machine is gone.
    std::thread::sleep(ANSWER_WAIT);
    let _ = rustix::system::reboot(RebootCommand::Restart);
    // If even that fails, the end of PID 1 makes the kernel panic, and `panic=-1` resets.
    std::process::exit(1)
}
