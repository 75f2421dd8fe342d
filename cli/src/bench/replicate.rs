//! `ks bench replicate`: packs to one peer over the bulk plane, against plain QUIC with a hash of the whole file and a
//! sync; then, on a real fleet, how long a question through the control plane takes while a checkpoint travels.

use super::figures::Samples;
use crate::demo::drive::{fresh_name, json, ok, say, sh, wait};
use crate::demo::fleet::{assemble, durable};
use crate::demo::report;
use crate::host::daemon;
use anyhow::{Context, Result, anyhow, ensure};
use clap::Args;
use serde_json::{Map, Value, json};
use std::process::{Command, Stdio};
use std::time::Instant;

/// What to run.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// MiB of packs in each round
    #[arg(long, default_value_t = 512)]
    mib: u32,
    /// Rounds
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// Guest memory to fill and send while the control plane is watched, MiB; 0 leaves this part out
    #[arg(long, default_value_t = 512)]
    filled: u64,
}

/// Runs the benchmark.
pub fn run(o: &Options) -> Result<()> {
    let (mut ours, mut plain, mut percent) = (Samples::default(), Samples::default(), Samples::default());
    say(&format!("{} rounds of {} MiB to one peer, in turn with plain QUIC", o.rounds, o.mib));
    let mut beside = Value::Null;
    for line in core(o)? {
        if line.get("control_p99_ms").is_some() {
            beside = line;
            continue;
        }
        let figure = |k: &str| line[k].as_f64().with_context(|| format!("no {k} in {line}"));
        ours.push(figure("ours_mib_s")?);
        plain.push(figure("plain_mib_s")?);
        percent.push(figure("percent")?);
    }
    let control = if o.filled > 0 { control_plane(o)? } else { Value::Null };
    let middle = |s: &Samples| s.percentile(50.0).map(|v| (v * 10.0).round() / 10.0);
    println!(
        "{}",
        json!({
            "bench": "replicate", "mib": o.mib, "rounds": o.rounds, "mib_s": middle(&ours), "baseline": { "quinn_mib_s": middle(&plain) },
            "percent_of_baseline": middle(&percent),
            "control_calls": beside["control_calls"], "control_p50_ms": beside["control_p50_ms"], "control_p99_ms": beside["control_p99_ms"],
            "control": control,
            "measured": "mib_s: medians; every pack verified and synced with its folder before it counts; baseline: the same bytes as one stream of plain quinn, BLAKE3 of the whole file, fsync; control_*: a call over a control plane of two nodes every 20 ms while our rounds run, in the same process; control: GET of a session through a node that does not own it, TLS handshake and tunnel included, while a checkpoint is being sent",
            "conditions": report::conditions()?,
        })
    );
    Ok(())
}

/// The core runs inside ksd's own program, which links the bulk plane.
fn core(o: &Options) -> Result<Vec<Value>> {
    let ksd = daemon::program().map_err(|f| anyhow!("{f}"))?;
    let dir = tempfile::tempdir().context("a scratch folder")?;
    let out = Command::new(&ksd)
        .arg("bench-replicate")
        .args(["--mib", &o.mib.to_string(), "--rounds", &o.rounds.to_string(), "--dir"])
        .arg(dir.path())
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("starting {}", ksd.display()))?;
    ensure!(out.status.success(), "{} bench-replicate: {}", ksd.display(), out.status);
    let text = String::from_utf8(out.stdout).context("its output")?;
    text.lines().filter(|l| l.starts_with('{')).map(|l| serde_json::from_str(l).context("a line of its output")).collect()
}

fn control_plane(o: &Options) -> Result<Value> {
    let (_dir, lab) = assemble(false)?;
    let name = fresh_name("replicate");
    let memory = (o.filled * 2 + 512).to_string();
    let fill = super::resume::fill(o.filled);
    ok(&["run", "--name", &name, "--memory", &memory, "--cadence", "0", "--detach", "--", "python3", "-c", &fill])?;
    wait("the guest fills its memory", 600, || {
        Ok((!sh(&name, "cat /workspace/filled 2>/dev/null || true")?.is_empty()).then_some(()))
    })?;
    let owner = lab.owner(&name)?;
    let peer = *lab.others(&[owner]).first().context("a peer")?;
    let mut quiet = Samples::default();
    for _ in 0..50 {
        quiet.push(question(&lab, peer, &name)?);
    }
    let number = json(&["checkpoint", &name])?["number"].as_u64().context("a number")?;
    let begun = Instant::now();
    let waiting = {
        let name = name.clone();
        std::thread::spawn(move || durable(&name, number, 300))
    };
    let mut busy = Samples::default();
    while !waiting.is_finished() {
        busy.push(question(&lab, peer, &name)?);
    }
    waiting.join().map_err(|_| anyhow!("the waiter panicked"))??;
    let took = begun.elapsed().as_secs_f64();
    let stored = json(&["checkpoints", &name])?["checkpoints"]
        .as_array()
        .and_then(|all| all.iter().find(|c| c["number"].as_u64() == Some(number)).map(|c| c["stored_bytes"].clone()));
    let mut m = Map::new();
    for (what, s) in [("quiet", &quiet), ("busy", &busy)] {
        m.insert(format!("{what}_p50_ms"), json!(s.percentile(50.0)));
        m.insert(format!("{what}_p99_ms"), json!(s.percentile(99.0)));
    }
    m.insert("durable_after_s".into(), json!(took));
    m.insert("stored_bytes".into(), json!(stored));
    Ok(Value::Object(m))
}

/// Milliseconds of one question through a node that does not own the session; the start of `ks` itself not counted.
fn question(lab: &crate::lab::Lab, peer: usize, name: &str) -> Result<f64> {
    let nothing = {
        let t = Instant::now();
        lab.through(&[peer]).arg("version").output().context("starting ks")?;
        t.elapsed()
    };
    let t = Instant::now();
    let o = lab.through(&[peer]).args(["--json", "show", name]).output().context("starting ks")?;
    ensure!(o.status.success(), "{}", crate::lab::shown(&o));
    Ok(t.elapsed().saturating_sub(nothing).as_secs_f64() * 1000.0)
}
