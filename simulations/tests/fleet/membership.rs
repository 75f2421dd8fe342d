//! Joining, draining, leaving, and coming back as somebody new.

use crate::harness::{SPARE, begin, counted, long_fleet, remove};
use crate::lab::{Lab, Part, json, ok, shown};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::time::Duration;

fn refused(lab: &Lab, token: &str) -> Result<Value> {
    let o = lab.on(SPARE).args(["--json", "node", "join", token]).output()?;
    ensure!(!o.status.success(), "it was let in: {}", shown(&o));
    serde_json::from_slice(&o.stdout).with_context(|| shown(&o))
}

/// The spare machine as new: no process, an empty folder.
fn wipe(lab: &Lab) -> Result<()> {
    lab.kill(SPARE, Part::All);
    let home = &lab.machines[SPARE].home;
    std::fs::remove_dir_all(home)?;
    std::fs::create_dir_all(home)?;
    Ok(())
}

fn joins(lab: &Lab) -> Result<Value> {
    let token = lab.token("5m")?;
    json(lab.on(SPARE), &["node", "join", &token, "--name", "spare"])
}

#[test]
fn a_token_lets_one_node_in_once() {
    let Some(lab) = long_fleet() else { return };
    let tokens = || -> Result<()> {
        wipe(&lab)?;
        lab.up(SPARE)?;
        let short = lab.token("1s")?;
        // Its end is by the fleet's clock: asked again until it has passed.
        std::thread::park_timeout(Duration::from_millis(2500));
        ensure!(refused(&lab, &short)?["code"] == "token-refused", "an expired token");
        let good = lab.token("5m")?;
        let mut forged = good.clone().into_bytes();
        forged[6] = if forged[6] == b'a' { b'b' } else { b'a' };
        let forged = String::from_utf8(forged)?;
        ensure!(refused(&lab, &forged)?["code"] == "token-refused", "a forged token");
        let first = json(lab.on(SPARE), &["node", "join", &good, "--name", "spare"])?;
        ensure!(first["number"].as_u64().is_some_and(|n| n > 1), "{first}");
        // A second machine with the same token is a stranger.
        wipe(&lab)?;
        lab.up(SPARE)?;
        ensure!(refused(&lab, &good)?["code"] == "token-refused", "a used token");
        // Wiped, it is somebody new: another number, and the dead one is removed.
        // Only a dead one: it may be called live for some seconds.
        lab.wait("it is removed", Duration::from_secs(60), || ok(lab.anywhere(), &["node", "rm", "--force", "spare"]).map(Some))?;
        let second = joins(&lab)?;
        ensure!(second["number"].as_u64() > first["number"].as_u64(), "{first} {second}");
        ok(lab.on(SPARE), &["node", "leave"])?;
        lab.kill(SPARE, Part::All);
        lab.settled(Duration::from_secs(60)).map(|_| ())
    };
    tokens().unwrap_or_else(|e| panic!("{e:#}"));
}

#[test]
fn a_drain_moves_the_work_and_loses_none() {
    let Some(lab) = long_fleet() else { return };
    let drained = || -> Result<()> {
        wipe(&lab)?;
        lab.up(SPARE)?;
        let joined = joins(&lab)?;
        let name = joined["name"].as_str().context("a name")?.to_owned();
        ok(lab.anywhere(), &["ls"])?;
        let on = json(lab.anywhere(), &["node", "show", &name])?;
        ensure!(on["state"] == "active", "{on}");
        // begin() names machines by their place in the lab; this one was named when it joined.
        let count = "i=0; while :; do i=$((i+1)); echo $i > /workspace/n; sleep 0.1; done";
        ok(
            lab.anywhere(),
            &[
                "run",
                "--name",
                "moves",
                "--memory",
                "512",
                "--cadence",
                "0",
                "--node",
                &name,
                "--detach",
                "--",
                "sh",
                "-c",
                count,
            ],
        )?;
        let before = counted(&lab, "moves")?;
        ensure!(json(lab.anywhere(), &["show", "moves"])?["node"] == name.as_str(), "it did not begin there");
        let d = json(lab.anywhere(), &["node", "drain", &name])?;
        ensure!(d["moved"].to_string().contains("moves"), "{d}");
        let s = json(lab.anywhere(), &["show", "moves"])?;
        ensure!(s["node"] != name.as_str(), "{s}");
        let after = counted(&lab, "moves")?;
        ensure!(after >= before, "a planned move lost work: {before}, then {after}");
        ok(lab.anywhere(), &["node", "rm", &name])?;
        lab.kill(SPARE, Part::All);
        remove(&lab, "moves")?;
        lab.settled(Duration::from_secs(60)).map(|_| ())
    };
    drained().unwrap_or_else(|e| panic!("{e:#}"));
}

#[test]
fn a_user_may_do_what_the_role_says() {
    let Some(lab) = long_fleet() else { return };
    let roles = || -> Result<()> {
        begin(&lab, "roles", 0)?;
        let viewer = json(lab.anywhere(), &["user", "add", "onlooker", "--role", "viewer"])?;
        let as_viewer = || {
            let mut c = lab.anywhere();
            c.env("KS_TOKEN", viewer["token"].as_str().unwrap_or_default());
            c
        };
        ok(as_viewer(), &["ls"])?;
        for args in [&["exec", "roles", "--", "true"][..], &["rm", "roles", "--force"], &["user", "ls"], &["node", "token"]] {
            let o = as_viewer().args(args).output()?;
            ensure!(o.status.code() == Some(4), "{args:?} as a viewer: {}", shown(&o));
        }
        ok(lab.anywhere(), &["user", "rm", "onlooker"])?;
        let o = as_viewer().args(["ls"]).output()?;
        ensure!(o.status.code() == Some(4), "a removed user: {}", shown(&o));
        remove(&lab, "roles")
    };
    roles().unwrap_or_else(|e| panic!("{e:#}"));
}
