//! Self-checks of a session: clock, disk, memory, kernel log, entropy, network, tmux, processes. Each failure has a fix.

mod kernel_log;
mod probes;

use std::{path::Path, sync::Arc, time::Duration};

use ks_proto::guest::Check;

use crate::{agent::Agent, tmux};

const PROBE_LIMIT: Duration = Duration::from_secs(60);

/// What one probe found: what was seen, or what is wrong and its fix.
pub(super) type Finding = Result<String, Wrong>;

/// A failed probe.
#[derive(Debug)]
pub(super) struct Wrong {
    pub(super) detail: String,
    pub(super) fix: &'static str,
}

impl Wrong {
    pub(super) fn new(detail: impl Into<String>, fix: &'static str) -> Self {
        Self { detail: detail.into(), fix }
    }
}

/// Runs all checks, in a fixed order.
pub async fn run(agent: &Arc<Agent>, wall_unix_ns: u64) -> Vec<Check> {
    // At once, as the host's clock goes on while the others run.
    let clock = probes::clock(wall_unix_ns, agent.in_vm);
    let scratch = if agent.in_vm { Path::new("/var/tmp").to_owned() } else { agent.state.clone() };
    vec![
        check("clock", clock),
        check("disk", blocking(move || probes::disk(&scratch)).await),
        check("memory", blocking(probes::memory).await),
        check("kernel-log", kernel_log(agent).await),
        check("entropy", probes::entropy()),
        check("network", probes::network().await),
        check("tmux", main_window(agent).await),
        check("processes", probes::processes()),
    ]
}

fn check(name: &str, finding: Finding) -> Check {
    match finding {
        Ok(detail) => Check { name: name.into(), ok: true, detail, fix: String::new() },
        Err(wrong) => Check { name: name.into(), ok: false, detail: wrong.detail, fix: wrong.fix.into() },
    }
}

async fn blocking(probe: impl FnOnce() -> Finding + Send + 'static) -> Finding {
    match tokio::time::timeout(PROBE_LIMIT, tokio::task::spawn_blocking(probe)).await {
        Ok(Ok(finding)) => finding,
        Ok(Err(why)) => Err(Wrong::new(why.to_string(), "report this: a probe failed inside ks-guest")),
        Err(_) => {
            let why = format!("no result within {} s", PROBE_LIMIT.as_secs());
            Err(Wrong::new(why, "restore the last checkpoint with `ks restore`"))
        }
    }
}

async fn kernel_log(agent: &Agent) -> Finding {
    if !agent.in_vm {
        return Ok("not read outside a VM: it is the host's".into());
    }
    blocking(|| kernel_log::probe(Path::new("/dev/kmsg"))).await
}

async fn main_window(agent: &Agent) -> Finding {
    const FIX: &str = "`ks exec SESSION -- tmux ls` shows what is left; restore a checkpoint if the window is gone";
    if !agent.has_started_main() {
        return Ok("the main window was not started".into());
    }
    if agent.not_frozen("ask tmux").is_err() {
        return Ok("not asked: the session's processes are frozen".into());
    }
    match tmux::exists(agent).await {
        Ok(true) => tmux::describe(agent).await.map_err(|r| Wrong::new(r.to_string(), FIX)),
        Ok(false) => Err(Wrong::new("the main window was started and is gone", FIX)),
        Err(refusal) => Err(Wrong::new(refusal.to_string(), FIX)),
    }
}
