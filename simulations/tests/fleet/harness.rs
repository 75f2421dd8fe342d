//! One fleet for all tests: three members and a spare machine, real `ks`, `ksd`, `ks-vmm` and guests, taken down when the
//! test process is gone. Before each test the network is healed, everything thawed and started, and the fleet settled.

use crate::lab::{Lab, Net, Part, Place, json, ok};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Longest time for the fleet to be whole again.
pub const WHOLE_AGAIN: Duration = Duration::from_secs(120);
/// Longest time that a session may be away.
pub const AWAY: Duration = Duration::from_secs(60);
/// The machine that is no member.
pub const SPARE: usize = 3;

/// The shared fleet, or None with a loud line when it cannot be had here. Tests take it in turn.
pub fn fleet() -> Option<MutexGuard<'static, Lab>> {
    static FLEET: OnceLock<Result<Mutex<Lab>, String>> = OnceLock::new();
    match FLEET.get_or_init(start) {
        Ok(m) => {
            let lab = m.lock().unwrap_or_else(PoisonError::into_inner);
            whole(&lab).unwrap_or_else(|e| panic!("the fleet is not whole before the test: {e:#}"));
            Some(lab)
        }
        Err(why) => {
            println!("skipped: {why}");
            None
        }
    }
}

/// As [`fleet`], for the tests that together take a quarter of an hour: they run with `KS_FLEET_TESTS=all`.
pub fn long_fleet() -> Option<MutexGuard<'static, Lab>> {
    if std::env::var("KS_FLEET_TESTS").as_deref() == Ok("all") {
        return fleet();
    }
    println!("skipped: a long test of a real fleet; KS_FLEET_TESTS=all runs it");
    None
}

fn start() -> Result<Mutex<Lab>, String> {
    let libexec =
        PathBuf::from(std::env::var("KS_LIBEXEC").map_err(|_| "the programs are not built (run ./dev test)".to_owned())?);
    if !libexec.join("ks").exists() || !libexec.join("ksd").exists() {
        return Err(format!("{} holds no ks and ksd (run ./dev test)", libexec.display()));
    }
    if let Some(why) = Net::missing() {
        return Err(format!("no root/netns: {why}"));
    }
    let dir = tempfile::Builder::new().prefix("ks-fleet-test-").tempdir().map_err(|e| e.to_string())?.keep();
    reaper(&dir)?;
    // From here on a failure is one of the product: loud, not skipped.
    let mut lab = Lab::new(&dir, &libexec, Place::Namespaces, SPARE + 1).unwrap_or_else(|e| panic!("the lab: {e:#}"));
    lab.members = SPARE;
    lab.assemble().unwrap_or_else(|e| panic!("the fleet does not assemble: {e:#}"));
    Ok(Mutex::new(lab))
}

/// A watcher that takes everything down once this test process is gone, however it ends.
fn reaper(dir: &Path) -> Result<(), String> {
    let script = r#"
        while kill -0 "$1" 2>/dev/null; do sleep 0.5; done
        for i in 1 2 3; do pkill -KILL -f -- "$2/" 2>/dev/null; sleep 0.2; done
        for ns in $(ip netns list | cut -d' ' -f1 | grep "^kslab$1-"); do ip netns del "$ns"; done
        umount -q -l "$2"/n* 2>/dev/null
        rm -rf -- "$2"
    "#;
    Command::new("setsid")
        .args(["bash", "-c", script, "reaper"])
        .arg(std::process::id().to_string())
        .arg(dir)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map(|_| ())
        .map_err(|e| format!("setsid: {e}"))
}

/// No fault is left, every member runs, the fleet has its quorum.
pub fn whole(lab: &Lab) -> Result<()> {
    if let Some(net) = lab.net() {
        net.heal()?;
    }
    for i in 0..lab.machines.len() {
        lab.thaw(i);
    }
    for i in lab.others(&[]) {
        lab.up(i)?;
    }
    lab.settled(WHOLE_AGAIN).map(|_| ())
}

/// A session whose main window counts into /workspace/n, on this machine.
pub fn begin(lab: &Lab, name: &str, on: usize) -> Result<()> {
    let count = "i=0; while :; do i=$((i+1)); echo $i > /workspace/n.new; mv /workspace/n.new /workspace/n; sleep 0.1; done";
    let node = lab.machines[on].name.as_str();
    let options = ["run", "--name", name, "--memory", "512", "--cadence", "0", "--node", node, "--detach"];
    ok(lab.anywhere(), &[options.as_slice(), &["--", "sh", "-c", count]].concat())?;
    counted(lab, name)?;
    Ok(())
}

/// A shell line in the guest, through any node.
pub fn sh(lab: &Lab, name: &str, line: &str) -> Result<String> {
    ok(lab.anywhere(), &["exec", name, "--", "sh", "-c", line])
}

/// How far the counter is.
pub fn counted(lab: &Lab, name: &str) -> Result<u64> {
    lab.wait("the counter", AWAY, || Ok(sh(lab, name, "cat /workspace/n")?.parse::<u64>().ok()))
}

/// A checkpoint, once it is durable; its number.
pub fn durable(lab: &Lab, name: &str) -> Result<u64> {
    let number = json(lab.anywhere(), &["checkpoint", name])?["number"].as_u64().context("a number")?;
    lab.wait(&format!("{name}@c{number} is durable"), AWAY, || {
        let c = checkpoint(lab, name, number)?;
        let holders = c["holders"].as_array().map_or(0, Vec::len);
        if c["durability"] == "durable" && holders >= 2 {
            return Ok(Some(number));
        }
        bail!("{} with {holders} holders", c["durability"])
    })
}

/// One checkpoint as it is listed.
pub fn checkpoint(lab: &Lab, name: &str, number: u64) -> Result<Value> {
    let all = json(lab.anywhere(), &["checkpoints", name])?;
    let one = all["checkpoints"].as_array().into_iter().flatten().find(|c| c["number"].as_u64() == Some(number)).cloned();
    one.with_context(|| format!("{name}@c{number} is not listed"))
}

/// Waits until the session answers through one of these machines; how long it took.
pub fn answers(lab: &Lab, machines: &[usize], name: &str) -> Result<Duration> {
    let begun = Instant::now();
    let mut last = String::new();
    while begun.elapsed() < AWAY {
        let o = lab.through_within(machines, 3).args(["exec", name, "--", "true"]).output().context("starting ks")?;
        if o.status.success() {
            return Ok(begun.elapsed());
        }
        last = crate::lab::shown(&o);
    }
    bail!("{name} does not answer after {} s: {last}", AWAY.as_secs())
}

/// The session as it is shown.
pub fn session(lab: &Lab, name: &str) -> Result<Value> {
    json(lab.anywhere(), &["show", name])
}

/// Removes a session.
pub fn remove(lab: &Lab, name: &str) -> Result<()> {
    ok(lab.anywhere(), &["rm", name, "--force"]).map(|_| ())
}

/// Kills everything of a machine and says how many processes that were.
pub fn kill(lab: &Lab, i: usize) -> Result<()> {
    let n = lab.kill(i, Part::All);
    anyhow::ensure!(n >= 2, "only {n} processes of {} were found", lab.machines[i].name);
    Ok(())
}

/// Waits until machine `i` runs no VM of this session any more.
pub fn no_vm(lab: &Lab, i: usize, what: &str) -> Result<()> {
    lab.wait(what, WHOLE_AGAIN, || Ok(lab.process_ids(i, Part::Machines).is_empty().then_some(())))
}
