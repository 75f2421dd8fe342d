//! Hosts that are cut off, half cut off, stopped and thawed: whatever happens, an outsider never sees two runs of a
//! session at work at once, and the fleet heals by itself.

use crate::harness::{WHOLE_AGAIN, answers, begin, counted, durable, kill, long_fleet, remove, session, whole};
use crate::lab::{Lab, Part, json};
use crate::observe::{Stream, overlap};
use anyhow::{Context, Result, ensure};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Watches the older run from its own host's address and the newer one from the others', around a fault.
fn watched(lab: &Lab, name: &str, fault: impl FnOnce(usize) -> Result<()>) -> Result<()> {
    begin(lab, name, lab.others(&[])[1])?;
    durable(lab, name)?;
    let owner = lab.owner(name)?;
    let others = lab.others(&[owner]);
    let older = Stream::open(lab.through(&[owner]), name)?;
    ensure!(older.reach(20, Duration::from_secs(30)), "the counter does not count");
    fault(owner)?;
    let away = answers(lab, &others, name)?;
    let newer = Stream::open(lab.through(&others), name)?;
    ensure!(newer.reach(50, Duration::from_secs(30)), "the newer run does not count");
    println!("{name}: taken over after {:.2} s", away.as_secs_f64());
    if let Some(net) = lab.net() {
        net.heal()?;
    }
    lab.thaw(owner);
    let lines = newer.lines().len();
    ensure!(newer.reach(lines + 150, Duration::from_secs(30)), "the newer run stopped when the older host came back");
    if let Some(s) = overlap(&older.lines(), &newer.lines()) {
        anyhow::bail!("two runs at once for {s:.3} s");
    }
    whole(lab)?;
    let now = lab.owner(name)?;
    ensure!(now != owner, "it is said to be on {} again", lab.machines[owner].name);
    counted(lab, name)?;
    remove(lab, name)
}

#[test]
fn one_owner_when_the_owner_is_cut_off() {
    let Some(lab) = long_fleet() else { return };
    watched(&lab, "cut", |owner| lab.net().context("a network")?.cut(owner)).unwrap_or_else(|e| panic!("{e:#}"));
}

#[test]
fn one_owner_when_the_owner_is_not_heard() {
    let Some(lab) = long_fleet() else { return };
    let mute = |owner| lab.others(&[owner]).into_iter().try_for_each(|p| lab.net().context("a network")?.lose(owner, Some(p)));
    watched(&lab, "mute", mute).unwrap_or_else(|e| panic!("{e:#}"));
}

#[test]
fn one_owner_when_the_owner_hears_nothing() {
    let Some(lab) = long_fleet() else { return };
    let deaf = |owner| lab.others(&[owner]).into_iter().try_for_each(|p| lab.net().context("a network")?.lose(p, Some(owner)));
    watched(&lab, "deaf", deaf).unwrap_or_else(|e| panic!("{e:#}"));
}

fn stopped(lab: &Lab, name: &str, part: Part) -> Result<()> {
    watched(lab, name, |owner| {
        ensure!(lab.stop(owner, part) > 0, "nothing to stop");
        Ok(())
    })
}

#[test]
fn one_owner_when_everything_is_stopped_and_thawed() {
    let Some(lab) = long_fleet() else { return };
    stopped(&lab, "frozen", Part::All).unwrap_or_else(|e| panic!("{e:#}"));
}

#[test]
fn one_owner_when_the_daemon_alone_is_stopped() {
    let Some(lab) = long_fleet() else { return };
    stopped(&lab, "hung", Part::Daemon).unwrap_or_else(|e| panic!("{e:#}"));
}

#[test]
fn a_host_that_was_away_for_long_rejoins_without_help() {
    let Some(lab) = long_fleet() else { return };
    let away = || -> Result<()> {
        let leader = lab.leader()?;
        let one = lab.others(&[leader])[0];
        lab.net().context("a network")?.cut(one)?;
        let begun = Instant::now();
        let seen = lab.wait("the others notice", Duration::from_secs(60), || {
            let f = lab.seen_by(leader)?;
            let dead = f["nodes"]
                .as_array()
                .into_iter()
                .flatten()
                .any(|n| n["name"] == lab.machines[one].name.as_str() && n["live"] == false);
            Ok((dead && begun.elapsed() > Duration::from_secs(45)).then_some(f))
        })?;
        ensure!(seen["quorum"] == true, "{seen}");
        lab.net().context("a network")?.heal()?;
        lab.settled(WHOLE_AGAIN)?;
        lab.wait("it sees a quorum itself", WHOLE_AGAIN, || Ok((lab.seen_by(one)?["quorum"] == true).then_some(())))
    };
    away().unwrap_or_else(|e| panic!("{e:#}"));
}

#[test]
fn without_a_quorum_it_stands_still_says_so_and_goes_on() {
    let Some(lab) = long_fleet() else { return };
    let quorum = || -> Result<()> {
        let on = lab.others(&[])[0];
        begin(&lab, "still", on)?;
        durable(&lab, "still")?;
        let (owner, epoch) = (lab.owner("still")?, session(&lab, "still")?["token"]["epoch"].as_u64());
        let peers = lab.others(&[owner]);
        peers.iter().try_for_each(|p| kill(&lab, *p))?;
        let seen = lab.wait("it is said", Duration::from_secs(30), || {
            let f = lab.seen_by(owner)?;
            Ok((f["quorum"] == false && f["lease"]["state"] == "lapsed").then_some(f))
        })?;
        println!("without a quorum: {}", seen["lease"]);
        let status = lab.on(owner).args(["fleet", "status"]).output()?;
        ensure!(
            status.status.code() == Some(1) && String::from_utf8_lossy(&status.stderr).contains("NO QUORUM"),
            "{}",
            crate::lab::shown(&status)
        );
        let s = json(lab.through(&[owner]), &["show", "still"])?;
        ensure!(s["paused"] == true, "it is not said to stand still: {s}");
        // One more makes two of three again.
        lab.up(peers[0])?;
        answers(&lab, &[owner, peers[0]], "still")?;
        let s = json(lab.through(&[owner]), &["show", "still"])?;
        ensure!(s["paused"] == false, "{s}");
        println!("epoch {epoch:?}, then {}", s["token"]["epoch"]);
        whole(&lab)?;
        remove(&lab, "still")
    };
    quorum().unwrap_or_else(|e| panic!("{e:#}"));
}

/// Programs that take all of the processor; ended when dropped.
struct Busy(Vec<Child>);

impl Drop for Busy {
    fn drop(&mut self) {
        for c in &mut self.0 {
            let _ = c.kill();
            let _ = c.wait();
        }
    }
}

#[test]
fn a_host_without_idle_time_is_not_called_dead() {
    let Some(lab) = long_fleet() else { return };
    let busy = || -> Result<()> {
        begin(&lab, "busy", lab.others(&[])[1])?;
        durable(&lab, "busy")?;
        let before = session(&lab, "busy")?["token"]["epoch"].as_u64();
        let n = 2 * std::thread::available_parallelism().map_or(2, usize::from);
        let loops = (0..n)
            .map(|_| Command::new("sh").args(["-c", "while :; do :; done"]).stdin(Stdio::null()).spawn())
            .collect::<Result<_, _>>()?;
        let load = Busy(loops);
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(15) {
            let s = session(&lab, "busy")?;
            ensure!(s["token"]["epoch"].as_u64() == before, "it was taken away: {s}");
        }
        drop(load);
        remove(&lab, "busy")
    };
    busy().unwrap_or_else(|e| panic!("{e:#}"));
}
