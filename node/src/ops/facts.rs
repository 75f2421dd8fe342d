//! What this node tells the others about itself.

use crate::node::Node;
use ks_net::NodeFacts;
use ks_proto::api::SessionState;
use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Between two words.
const EVERY: Duration = Duration::from_secs(1);
/// What was read so lately is not read again.
const FRESH: Duration = Duration::from_millis(900);

/// CPU profiles whose sessions can run here.
pub fn profiles(node: &Node) -> Vec<String> {
    let mut out: Vec<String> = ["kvm", "qemu"].into_iter().filter_map(|e| node.facts.choose(e).ok()).map(|c| c.profile).collect();
    out.sort();
    out.dedup();
    out
}

/// This node's own facts, at most [`FRESH`] old: several tasks ask several times a second.
pub fn own(node: &Node) -> NodeFacts {
    let mut told = node.told.lock().unwrap_or_else(PoisonError::into_inner);
    match &*told {
        Some((at, facts)) if at.elapsed() < FRESH => facts.clone(),
        _ => told.insert((Instant::now(), read(node))).1.clone(),
    }
}

/// A line of /proc/meminfo, MiB; None where there is none.
fn meminfo_mib(key: &str) -> Option<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = meminfo.lines().find(|l| l.starts_with(key))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? / 1024)
}

/// All memory of this machine, MiB.
pub fn memory_total_mib() -> Option<u64> {
    meminfo_mib("MemTotal:")
}

fn read(node: &Node) -> NodeFacts {
    let mib = |key: &str| meminfo_mib(key).unwrap_or(0);
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let disk = rustix::fs::statvfs(&node.layout.root).map_or(0, |s| s.f_bavail.saturating_mul(s.f_frsize) >> 20);
    let mut states: BTreeMap<String, u32> = BTreeMap::new();
    for h in node.handles() {
        *states.entry(h.view.borrow().state.to_string()).or_default() += 1;
    }
    let running = states.get(&SessionState::Running.to_string()).copied().unwrap_or(0);
    NodeFacts {
        number: node.fleet.number(),
        incarnation: node.fleet.incarnation(),
        seq: 0,
        load_milli: milli(&load),
        mem_free_mib: mib("MemAvailable:"),
        mem_total_mib: mib("MemTotal:"),
        cpus: u32::try_from(std::thread::available_parallelism().map_or(1, usize::from)).unwrap_or(1),
        sessions: running,
        disk_free_mib: disk,
        profiles: profiles(node),
        versions: BTreeMap::from([("ksd".to_owned(), env!("CARGO_PKG_VERSION").to_owned())]),
        states,
        applied: node.fleet.consensus().applied(),
        draining: false,
    }
}

/// The first figure of /proc/loadavg ("1.25") in thousandths.
fn milli(loadavg: &str) -> u64 {
    let word = loadavg.split_whitespace().next().unwrap_or_default();
    let (whole, part) = word.split_once('.').unwrap_or((word, "0"));
    let part: String = part.chars().chain("000".chars()).take(3).collect();
    whole.parse::<u64>().unwrap_or(0) * 1000 + part.parse::<u64>().unwrap_or(0)
}

/// Tells the others for as long as the node lives.
pub async fn run(node: Weak<Node>) {
    let mut tick = tokio::time::interval(EVERY);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        let Some(node) = node.upgrade() else { return };
        let facts = tokio::task::spawn_blocking({
            let node: Arc<Node> = node.clone();
            move || own(&node)
        });
        if let Ok(facts) = facts.await {
            node.fleet.say(facts);
        }
    }
}
