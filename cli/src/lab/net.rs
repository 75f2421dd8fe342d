//! A network of namespaces: one for each node, and one with a bridge between them, where the client lives too. Made and
//! removed with iproute2; nothing of the host's own network is touched.
//!
//! Loss in one direction is made without packet filters: the sender is told a hardware address that nobody has, so its
//! frames cross the bridge and are dropped by every receiver, silently, while the other direction works.

use anyhow::{Context, Result, ensure};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// Labs of this process so far.
static LABS: AtomicU32 = AtomicU32::new(0);
/// The hardware address that nobody has.
const NOBODY: &str = "02:00:00:00:00:99";

/// The namespaces.
#[derive(Debug)]
pub struct Net {
    prefix: String,
    n: usize,
    hub: String,
}

/// Why there can be no namespaces here; None when there can.
pub fn missing() -> Option<String> {
    for program in ["ip", "nsenter"] {
        let found = Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        if found.is_err() && !std::path::Path::new("/sbin").join(program).exists() {
            return Some(format!("{program} is not installed"));
        }
    }
    let name = format!("kslab-try-{}", std::process::id());
    match ip(&["netns", "add", &name]) {
        Ok(()) => {
            ip(&["netns", "del", &name]).ok();
            None
        }
        Err(e) => Some(format!("{e:#}")),
    }
}

fn ip(args: &[&str]) -> Result<()> {
    let o = Command::new("ip").args(args).stdin(Stdio::null()).output().context("starting ip")?;
    ensure!(o.status.success(), "ip {}: {}", args.join(" "), String::from_utf8_lossy(&o.stderr).trim());
    Ok(())
}

impl Net {
    /// Is it possible here? Otherwise why not.
    pub fn missing() -> Option<String> {
        missing()
    }
    /// Makes the namespaces, a bridge and a cable to each.
    pub fn new(n: usize) -> Result<Self> {
        let prefix = format!("kslab{}-{}", std::process::id(), LABS.fetch_add(1, Ordering::Relaxed));
        let net = Self { hub: format!("{prefix}-hub"), prefix, n };
        let hub = net.hub.as_str();
        ip(&["netns", "add", hub])?;
        ip(&["-n", hub, "link", "set", "lo", "up"])?;
        ip(&["-n", hub, "link", "add", "br0", "type", "bridge"])?;
        ip(&["-n", hub, "addr", "add", "10.77.0.254/24", "dev", "br0"])?;
        ip(&["-n", hub, "link", "set", "br0", "up"])?;
        for i in 0..n {
            let (ns, port) = (net.namespace(i), format!("v{}", i + 1));
            ip(&["netns", "add", &ns])?;
            ip(&["-n", &ns, "link", "set", "lo", "up"])?;
            ip(&["-n", hub, "link", "add", &port, "type", "veth", "peer", "name", "eth0", "netns", &ns])?;
            ip(&["-n", hub, "link", "set", &port, "master", "br0", "up"])?;
            ip(&["-n", &ns, "addr", "add", &format!("{}/24", Self::address(i)), "dev", "eth0"])?;
            ip(&["-n", &ns, "link", "set", "eth0", "up"])?;
        }
        Ok(net)
    }
    /// Address of node `i`.
    pub fn address(i: usize) -> String {
        format!("10.77.0.{}", i + 1)
    }
    /// Namespace of node `i`.
    pub fn namespace(&self, i: usize) -> String {
        format!("{}-n{}", self.prefix, i + 1)
    }
    /// Namespace of the bridge and the client.
    pub fn hub(&self) -> &str {
        &self.hub
    }
    /// Pulls the cable of node `i`.
    pub fn cut(&self, i: usize) -> Result<()> {
        ip(&["-n", &self.hub, "link", "set", &format!("v{}", i + 1), "down"])
    }
    /// What `from` sends to `to` is lost; None is the client.
    pub fn lose(&self, from: usize, to: Option<usize>) -> Result<()> {
        ip(&[
            "-n",
            &self.namespace(from),
            "neigh",
            "replace",
            &Self::end(to),
            "lladdr",
            NOBODY,
            "dev",
            "eth0",
            "nud",
            "permanent",
        ])
    }
    fn end(to: Option<usize>) -> String {
        to.map_or("10.77.0.254".to_owned(), Self::address)
    }
    /// No fault is left.
    pub fn heal(&self) -> Result<()> {
        for i in 0..self.n {
            ip(&["-n", &self.hub, "link", "set", &format!("v{}", i + 1), "up"])?;
            for to in (0..self.n).filter(|t| *t != i).map(Some).chain([None]) {
                // There is nothing to delete where nothing was lost.
                ip(&["-n", &self.namespace(i), "neigh", "del", &Self::end(to), "dev", "eth0"]).ok();
            }
        }
        Ok(())
    }
    /// Processes in the namespace of node `i`.
    pub fn processes(&self, i: usize) -> Vec<i32> {
        let o = Command::new("ip").args(["netns", "pids", &self.namespace(i)]).stdin(Stdio::null()).output();
        let text = o.map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default();
        text.split_whitespace().filter_map(|p| p.parse().ok()).collect()
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        for name in (0..self.n).map(|i| self.namespace(i)).chain([self.hub.clone()]) {
            ip(&["netns", "del", &name]).ok();
        }
    }
}
