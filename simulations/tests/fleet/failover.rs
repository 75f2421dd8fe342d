//! Hosts die: every process of them at once, as when the power goes.

use crate::harness::{answers, begin, checkpoint, counted, durable, fleet, kill, long_fleet, no_vm, remove, session, sh, whole};
use crate::lab::{Lab, json, ok};
use anyhow::{Result, ensure};
use std::process::Stdio;
use std::time::Duration;

fn killed(lab: &Lab, name: &str, leads: bool) -> Result<()> {
    let leader = lab.leader()?;
    let on = if leads { leader } else { lab.others(&[leader])[0] };
    begin(lab, name, on)?;
    let nonce = sh(lab, name, "cat /proc/sys/kernel/random/uuid | tee /workspace/nonce; sync")?;
    let before = counted(lab, name)?;
    durable(lab, name)?;
    let owner = lab.owner(name)?;
    ensure!(owner == on, "it began on {}, not on {}", lab.machines[owner].name, lab.machines[on].name);
    let epoch = session(lab, name)?["token"]["epoch"].as_u64();
    kill(lab, owner)?;
    let away = answers(lab, &lab.others(&[]), name)?;
    println!("{name}: away for {:.2} s", away.as_secs_f64());
    let s = session(lab, name)?;
    ensure!(lab.machine(s["node"].as_str().unwrap_or_default())? != owner, "it is still said to be on the dead host: {s}");
    ensure!(s["token"]["epoch"].as_u64() > epoch, "the epoch did not rise: {s}");
    ensure!(sh(lab, name, "cat /workspace/nonce")? == nonce, "another disk");
    let after = counted(lab, name)?;
    ensure!(after >= before, "the counter fell behind its durable checkpoint: {before}, then {after}");
    // The host comes back and owns nothing of it.
    lab.up(owner)?;
    whole(lab)?;
    no_vm(lab, owner, "the returned host runs no VM")?;
    ensure!(session(lab, name)?["token"]["epoch"].as_u64() == s["token"]["epoch"].as_u64(), "it moved again for no reason");
    remove(lab, name)
}

#[test]
fn recovers_on_a_peer_when_its_host_dies() {
    let Some(lab) = long_fleet() else { return };
    killed(&lab, "peer", false).unwrap_or_else(|e| panic!("{e:#}"));
}

#[test]
fn recovers_when_the_host_that_dies_leads_the_fleet() {
    let Some(lab) = long_fleet() else { return };
    killed(&lab, "leads", true).unwrap_or_else(|e| panic!("{e:#}"));
}

#[test]
fn durable_means_peers_have_it() {
    let Some(lab) = long_fleet() else { return };
    let rounds = || -> Result<()> {
        begin(&lab, "dur", lab.others(&[])[0])?;
        for round in 0..3 {
            sh(&lab, "dur", &format!("echo {round} > /workspace/round; sync"))?;
            let number = durable(&lab, "dur")?;
            // At once: what was reported is held to.
            let owner = lab.owner("dur")?;
            kill(&lab, owner)?;
            answers(&lab, &lab.others(&[]), "dur")?;
            ensure!(sh(&lab, "dur", "cat /workspace/round")? == round.to_string(), "round {round} was durable and is lost");
            checkpoint(&lab, "dur", number)?;
            whole(&lab)?;
        }
        remove(&lab, "dur")
    };
    rounds().unwrap_or_else(|e| panic!("{e:#}"));
}

#[test]
fn a_host_that_dies_while_replicating_leaves_a_whole_checkpoint() {
    let Some(lab) = fleet() else { return };
    let rounds = || -> Result<()> {
        begin(&lab, "part", lab.others(&[])[0])?;
        for round in 0..3u64 {
            let write = "head -c 60000000 /dev/urandom > /workspace/big; sha256sum /workspace/big > /workspace/sum; sync";
            sh(&lab, "part", write)?;
            durable(&lab, "part")?;
            sh(&lab, "part", write)?;
            let mut c = lab.anywhere();
            let mut child = c.args(["checkpoint", "part"]).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
            std::thread::park_timeout(Duration::from_millis(150 + 400 * round));
            let owner = lab.owner("part")?;
            kill(&lab, owner)?;
            child.wait()?;
            answers(&lab, &lab.others(&[]), "part")?;
            sh(&lab, "part", "sha256sum -c --quiet /workspace/sum")?;
            whole(&lab)?;
        }
        remove(&lab, "part")
    };
    rounds().unwrap_or_else(|e| panic!("{e:#}"));
}

#[test]
fn recovers_after_the_whole_site_lost_its_power() {
    let Some(lab) = long_fleet() else { return };
    let site = || -> Result<()> {
        let names = ["site-a", "site-b", "site-c"];
        for (i, name) in names.iter().enumerate() {
            begin(&lab, name, i)?;
            durable(&lab, name)?;
        }
        let before = names.iter().map(|n| counted(&lab, n)).collect::<Result<Vec<_>>>()?;
        lab.others(&[]).into_iter().try_for_each(|i| kill(&lab, i))?;
        whole(&lab)?;
        for (name, before) in names.iter().zip(before) {
            answers(&lab, &lab.others(&[]), name)?;
            // Work since the checkpoint may be lost, not the checkpoint's.
            let now = counted(&lab, name)?;
            ensure!(now + 600 > before, "{name}: {before}, then {now}");
            remove(&lab, name)?;
        }
        Ok(())
    };
    site().unwrap_or_else(|e| panic!("{e:#}"));
}

#[test]
fn any_node_serves_any_request() {
    let Some(lab) = long_fleet() else { return };
    let all = || -> Result<()> {
        begin(&lab, "any", 1)?;
        for i in lab.others(&[]) {
            let through = || lab.through(&[i]);
            ensure!(ok(through(), &["exec", "any", "--", "echo", "hello"])? == "hello");
            ensure!(json(through(), &["show", "any"])?["state"] == "running");
            ok(through(), &["checkpoint", "any", "-m", &format!("through {i}")])?;
            ok(through(), &["cp", "/etc/hostname", "any:/workspace/host"])?;
            ensure!(!ok(through(), &["exec", "any", "--", "cat", "/workspace/host"])?.is_empty());
            ok(through(), &["logs", "any"])?;
        }
        let listed = json(lab.anywhere(), &["checkpoints", "any"])?;
        ensure!(listed["checkpoints"].as_array().map_or(0, Vec::len) >= 3, "{listed}");
        remove(&lab, "any")
    };
    all().unwrap_or_else(|e| panic!("{e:#}"));
}
