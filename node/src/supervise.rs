//! The small supervisor of an embedded node: starts ksd, starts it again when it dies, hands SIGTERM on.

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};
use std::ffi::OsString;
use std::time::{Duration, Instant};
use tokio::signal::unix::{SignalKind, signal};

/// Exit code of a ksd that cannot work until somebody changes something: it is not started again.
pub const CANNOT_START: u8 = 2;

/// How long to wait before the next start. Pure.
#[derive(Debug, Default)]
pub struct Backoff {
    failures: u32,
}
impl Backoff {
    /// After a run of this length.
    pub fn after(&mut self, ran: Duration) -> Duration {
        self.failures = if ran > Duration::from_secs(10) { 0 } else { self.failures + 1 };
        // The first restart is at once: somebody may be waiting for a session to come back.
        Duration::from_millis(if self.failures <= 1 { 0 } else { 100u64 << (self.failures - 2).min(6) })
            .min(Duration::from_secs(5))
    }
}

/// Runs `ksd` with `args` until it ends by itself or by our signal. Returns its exit code.
///
/// # Errors
/// If it cannot be started at all.
pub async fn run(args: Vec<OsString>) -> Result<u8> {
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let mut backoff = Backoff::default();
    loop {
        let started = Instant::now();
        let mut child = tokio::process::Command::new(&program)
            .args(&args)
            .arg("--supervised")
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        let pid = child.id().and_then(|p| i32::try_from(p).ok()).and_then(Pid::from_raw);
        let mut ending = false;
        let status = loop {
            tokio::select! {
                status = child.wait() => break status?,
                _ = term.recv() => ending = true,
                _ = int.recv() => ending = true,
            }
            if let Some(pid) = pid {
                let _ = kill_process(pid, Signal::TERM);
            }
        };
        match status.code() {
            Some(0) => return Ok(0),
            Some(code) if ending || code == i32::from(CANNOT_START) => return Ok(u8::try_from(code).unwrap_or(1)),
            _ if ending => return Ok(1),
            _ => {}
        }
        let wait = backoff.after(started.elapsed());
        tracing::warn!("ksd ended ({status}); starting it again in {} ms", wait.as_millis());
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            _ = term.recv() => return Ok(0),
            _ = int.recv() => return Ok(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_to_five_seconds_and_a_long_run_forgives() {
        let mut b = Backoff::default();
        let short = Duration::from_secs(1);
        let waits: Vec<u128> = (0..9).map(|_| b.after(short).as_millis()).collect();
        assert_eq!(waits, [0, 100, 200, 400, 800, 1600, 3200, 5000, 5000]);
        assert_eq!(b.after(Duration::from_secs(60)).as_millis(), 0);
    }
}
