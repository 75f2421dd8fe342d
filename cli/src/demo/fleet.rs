//! `ks demo fleet`: three nodes on this machine; an agent works; every process of the host that runs it is killed between
//! two of its steps; a peer goes on from the latest durable checkpoint and the agent finishes there.

use super::drive::{self, fresh_name, json, ks, ok, say, wait};
use super::{kill, report};
use crate::host::daemon;
use crate::lab::{Lab, Net, Part, Place};
use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::time::{Duration, Instant};

struct Outcome {
    at_step: u64,
    owner: String,
    peer: String,
    led: bool,
    processes: usize,
    interruption_s: f64,
    lost_steps: u64,
    checkpoint: u64,
    recorded: Value,
}

/// Three machines, assembled, and all later calls of this process coming from a client of theirs.
pub fn assemble(netns: bool) -> Result<(tempfile::TempDir, Lab)> {
    if let (true, Some(why)) = (netns, Net::missing()) {
        bail!("no network namespaces here: {why}; leave --netns away");
    }
    let libexec = daemon::program().map_err(|f| anyhow!("{f}"))?;
    let libexec = libexec.parent().context("a folder of programs")?.to_owned();
    let dir = tempfile::Builder::new().prefix("ks-fleet-").tempdir().context("a scratch folder")?;
    let place = if netns { Place::Namespaces } else { Place::Loopback };
    let mut lab = Lab::new(dir.path(), &libexec, place, 3)?;
    lab.assemble()?;
    drive::come_from(drive::Client { env: lab.client_env(&[0, 1, 2]), before: lab.client_before() });
    Ok((dir, lab))
}

/// Runs the demonstration; fails when the session does not come back on a peer, or not whole.
pub fn run(pace: f64, netns: bool, keep: bool) -> Result<()> {
    say("three nodes, each with a folder of its own; the second and third join the first with one-use tokens");
    let begun = Instant::now();
    let (dir, lab) = assemble(netns)?;
    let names: Vec<&str> = lab.machines.iter().map(|m| m.name.as_str()).collect();
    say(&format!("a fleet of {} after {:.1} s", names.join(", "), begun.elapsed().as_secs_f64()));
    let name = fresh_name("fleet");
    kill::begin(&name, pace)?;
    let outcome = crash(&lab, &name)?;
    say("it goes on there; waiting for the agent to finish");
    let verdict = kill::finished(&name)?;
    let figures = json!({
        "session": name, "nodes": lab.machines.len(), "place": if netns { "namespaces" } else { "loopback" },
        "killed_after_step": outcome.at_step, "owner": outcome.owner, "owner_led": outcome.led, "peer": outcome.peer,
        "processes_killed": outcome.processes, "interruption_s": outcome.interruption_s, "lost_steps": outcome.lost_steps,
        "from_checkpoint": outcome.checkpoint, "recorded": outcome.recorded, "doctor_ok": verdict.doctor,
        "tests_pass": verdict.tests, "git_fsck_clean": verdict.fsck, "commits": verdict.commits, "same_process": verdict.same_process,
    });
    let text = text(&name, &outcome, &verdict)?;
    let path = report::write("demo-fleet", &figures, &text)?;
    eprint!("\n{text}");
    eprintln!("report: {}", path.display());
    if keep {
        keep_running(dir, lab);
    } else {
        ok(&["rm", &name, "--force"])?;
    }
    ensure!(outcome.peer != outcome.owner, "the session did not move: see the report");
    ensure!(verdict.good(), "the session came back, but not whole: see the report");
    println!("{}", serde_json::to_string(&figures)?);
    Ok(())
}

/// Lets the agent work, takes a checkpoint, waits until it is durable, lets it work on, then kills the host.
fn crash(lab: &Lab, name: &str) -> Result<Outcome> {
    let reach = |n: u64| {
        wait(&format!("step {n}"), 180, || {
            let l = kill::log(name)?;
            Ok((kill::steps(&l) >= n).then_some(l))
        })
    };
    reach(3)?;
    let c = json(&["checkpoint", name, "-m", "in the middle of the work"])?;
    let number = c["number"].as_u64().context("a number")?;
    let holders = durable(name, number, 60)?;
    say(&format!("checkpoint c{number} is durable: {} have it, synced", holders.join(" and ")));
    let before = reach(kill::steps(&kill::log(name)?) + 2)?;
    let at_step = kill::steps(&before);
    let owner = lab.owner(name)?;
    let led = lab.leader().is_ok_and(|l| l == owner);
    let owner_name = lab.machines[owner].name.clone();
    say(&format!(
        "step {at_step} is done: SIGKILL to every process of {owner_name}{}",
        if led { ", which leads the fleet" } else { "" }
    ));
    let killed = Instant::now();
    let processes = lab.kill(owner, Part::All);
    wait("the session answers again", 120, || Ok(ks(&["exec", name, "--", "true"])?.status.success().then_some(())))?;
    let interruption_s = killed.elapsed().as_secs_f64();
    let after = kill::steps(&kill::log(name)?);
    let s = json(&["show", name])?;
    let peer = s["node"].as_str().unwrap_or_default().to_owned();
    say(&format!("{peer} answers for it after {interruption_s:.2} s"));
    Ok(Outcome {
        at_step,
        owner: owner_name,
        peer,
        led,
        processes,
        interruption_s,
        lost_steps: at_step.saturating_sub(after),
        checkpoint: s["last_interruption"]["checkpoint"].as_u64().unwrap_or(number),
        recorded: s["last_interruption"].clone(),
    })
}

/// Waits until a checkpoint is durable; its holders.
pub fn durable(name: &str, number: u64, seconds: u64) -> Result<Vec<String>> {
    wait(&format!("c{number} is durable"), seconds, || {
        let all = json(&["checkpoints", name])?;
        let one = all["checkpoints"].as_array().into_iter().flatten().find(|c| c["number"].as_u64() == Some(number));
        let one = one.with_context(|| format!("c{number} is not listed"))?;
        let holders: Vec<String> =
            one["holders"].as_array().into_iter().flatten().filter_map(|h| h.as_str().map(str::to_owned)).collect();
        if one["durability"] == "durable" && holders.len() >= 2 {
            return Ok(Some(holders));
        }
        bail!("it is {} with holders {holders:?}", one["durability"])
    })
}

/// Leaves everything running, and says how to speak to it and how to end it.
fn keep_running(dir: tempfile::TempDir, lab: Lab) {
    let dir = dir.keep();
    eprintln!("the nodes go on below {}. To speak to them:", dir.display());
    for (k, v) in lab.client_env(&[0, 1, 2]).iter().filter(|(k, _)| k.starts_with("KS_")) {
        eprintln!("  export {k}={v}");
    }
    for m in &lab.machines {
        eprintln!("  KS_HOME={} ks down --force      # ends {}", m.home.display(), m.name);
    }
    std::mem::forget(lab);
}

fn text(name: &str, o: &Outcome, v: &kill::Verdict) -> Result<String> {
    let yes = |b: bool| if b { "yes" } else { "NO" };
    let mut t = String::new();
    writeln!(t, "ks demo fleet: {name}")?;
    writeln!(
        t,
        "  killed after step             {} (SIGKILL to all {} processes of {}{})",
        o.at_step,
        o.processes,
        o.owner,
        if o.led { ", the leader" } else { "" }
    )?;
    writeln!(t, "  interruption                  {:.2} s, kill to first exec answered", o.interruption_s)?;
    writeln!(t, "  goes on at                    {} from c{}, with nobody's help", o.peer, o.checkpoint)?;
    writeln!(t, "  steps done again              {}, by the same process", o.lost_steps)?;
    writeln!(t, "  same process went on          {}", yes(v.same_process))?;
    writeln!(t, "  the repository's tests pass   {}", yes(v.tests))?;
    writeln!(t, "  git fsck is clean             {}, {} commits of 14", yes(v.fsck), v.commits)?;
    writeln!(t, "  ks doctor                     {}", if v.doctor { "all checks pass" } else { "NOT WELL" })?;
    Ok(t)
}

/// Longest wait for the fleet to be whole again after a host was killed.
pub const WHOLE_AGAIN: Duration = Duration::from_secs(90);
