//! From the kernel's first process to a serving agent.
//!
//! ```text
//!   initramfs: mounts, modules, root disk, switch root  (left out when `/` is already a disk)
//!   root disk: mounts, cgroup, loopback, host name, port of the guest channel, serve
//! ```
//!
//! Anything that makes the guest unusable is said on the console in one line and resets the machine.

mod initramfs;
mod mounts;

use std::{
    io,
    path::Path,
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use ks_proto::guest::PORT_NAME;

use crate::{agent::Agent, cgroup::UserCgroup, channel, log, power};

const PORT_WAIT: Duration = Duration::from_secs(120);
/// Open files of this process.
const FILES_MAX: u64 = 8_192;

/// Boots the guest and serves for ever.
pub fn run() -> ExitCode {
    let began = Instant::now();
    match boot(began) {
        Ok(never) => match never {},
        Err(why) => power::fatal(&why),
    }
}

fn boot(began: Instant) -> Result<std::convert::Infallible, String> {
    mounts::early().map_err(|e| e.to_string())?;
    if mounts::root_is_memory().map_err(|e| format!("look at /: {e}"))? {
        initramfs::leave().map_err(|e| e.to_string())?;
    }
    let rooted = began.elapsed();
    let cgroup = mounts::on_root().map_err(|e| e.to_string())?;
    if let Err(why) = crate::sys::loopback_up() {
        log::line(&format!("no loopback interface: {why}"));
    }
    if let Err(why) = host_name() {
        log::line(&format!("host name not set: {why}"));
    }
    exempt_from_oom();
    // Before the first program runs: what they inherit.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(8)
        .build()
        .map_err(|e| format!("start the runtime: {e}"))?;
    Err(runtime.block_on(serve(cgroup, began, rooted)))
}

/// Serves the guest channel; returns why that came to an end.
async fn serve(cgroup: UserCgroup, began: Instant, rooted: Duration) -> String {
    let agent = Agent::in_vm(Some(cgroup));
    let reaping = agent.clone();
    tokio::spawn(async move { reaping.reaper.run().await });
    listen(&agent).await;
    let port = match channel::find(PORT_NAME, PORT_WAIT).await {
        Ok(device) => channel::Port::open(&device).map_err(|e| format!("open {}: {e}", device.display())),
        Err(why) => Err(why.to_string()),
    };
    let port = match port {
        Ok(port) => port,
        Err(why) => return format!("no guest channel: {why}"),
    };
    let (root, all) = (rooted.as_millis(), began.elapsed().as_millis());
    log::line(&format!("version {} serves; root disk after {root} ms, channel after {all} ms", env!("CARGO_PKG_VERSION")));
    format!("the guest channel failed: {}", channel::serve_framed(agent, port).await)
}

/// The gateway's and the egress proxy's ports for the session's programs.
async fn listen(agent: &Arc<Agent>) {
    use std::net::Ipv4Addr;
    use tokio::net::TcpListener;
    // One descriptor for each client and spooled body; programs get limits of their own.
    let files = rustix::process::Rlimit { current: Some(FILES_MAX), maximum: Some(FILES_MAX) };
    let _ = rustix::process::setrlimit(rustix::process::Resource::Nofile, files);
    match TcpListener::bind((Ipv4Addr::LOCALHOST, ks_relay::PORT)).await {
        Ok(listener) => {
            let relay = agent.relay.clone();
            tokio::spawn(async move { log::line(&format!("the relay ended: {}", relay.serve(listener).await)) });
        }
        Err(why) => log::line(&format!("no relay on port {}: {why}", ks_relay::PORT)),
    }
    match TcpListener::bind((Ipv4Addr::LOCALHOST, ks_relay::EGRESS_PORT)).await {
        Ok(listener) => {
            let relay = agent.relay.clone();
            tokio::spawn(async move { log::line(&format!("the egress proxy ended: {}", relay.serve_egress(listener).await)) });
        }
        Err(why) => log::line(&format!("no egress proxy on port {}: {why}", ks_relay::EGRESS_PORT)),
    }
}

fn host_name() -> io::Result<()> {
    let name = match std::fs::read_to_string("/etc/hostname") {
        Ok(name) if !name.trim().is_empty() => name,
        Ok(_) | Err(_) => "keepstate".to_owned(),
    };
    Ok(rustix::system::sethostname(name.trim().as_bytes())?)
}

/// The out-of-memory killer takes other processes first. Children take it back when they start.
fn exempt_from_oom() {
    let _ = std::fs::write(Path::new("/proc/self/oom_score_adj"), "-1000");
}
