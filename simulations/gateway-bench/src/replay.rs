//! `replay`: a stored answer of many tokens, served from the journal again and again through relay and gateway on this host.

use crate::load::{Target, percentile};
use crate::rig::{Ours, Process, beside};
use anyhow::{Result, ensure};
use clap::Args;
use serde_json::json;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

/// What to run.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Tokens of the answer
    #[arg(long, default_value_t = 30_000)]
    tokens: usize,
    /// Times that it is served
    #[arg(long, default_value_t = 20)]
    samples: usize,
    /// Folder for the journal
    #[arg(long)]
    dir: Option<PathBuf>,
}

/// Runs the benchmark.
///
/// # Errors
/// If a process does not start, or an answer was bought where it should have been served.
pub async fn run(o: &Options) -> Result<()> {
    let disk = match &o.dir {
        Some(dir) => tempfile::tempdir_in(dir)?,
        None => tempfile::tempdir()?,
    };
    let (_provider, provider) = Process::with_address("the test provider", &mut Command::new(beside("ks-test-provider")?))?;
    let mut ours = Ours::start(disk.path(), provider)?;
    let target = |address| Target {
        address,
        path: "/bench/v1/chat/completions",
        model: format!("bench!tokens={},words=2", o.tokens),
        prompt_bytes: 4096,
    };
    let (_, len) = target(ours.address).ask(1).await?;
    let (mut rates, mut firsts, mut cpu) = (Vec::new(), Vec::new(), 0.0);
    for _ in 0..o.samples {
        // A restored guest: another timeline, from before the call.
        ours.restore()?;
        let used = ours.gateway.cpu_s()?;
        let t = Instant::now();
        let (first, got) = target(ours.address).ask(1).await?;
        let took = t.elapsed();
        cpu += ours.gateway.cpu_s()? - used;
        ensure!(got == len, "{got} bytes were served, {len} were bought");
        rates.push(mib_s(len, took));
        firsts.push(first);
    }
    let bought = crate::gateway::purchases(provider).await?;
    ensure!(bought == 1, "the provider was asked {bought} times: the answer was not served from the journal");
    let report = json!({
        "bench": "replay", "tokens": o.tokens, "answer_bytes": len, "samples": o.samples, "purchases": bought,
        "mib_s": round(percentile(&mut rates, 50.0)), "mib_s_p5": round(percentile(&mut rates, 5.0)), "bar_mib_s": 50,
        "ttfb_p50_ms": round(percentile(&mut firsts, 50.0)), "gateway_cpu_s_per_answer": round(cpu / o.samples as f64),
        "conditions": "relay and ksgw on this host, one client at a time, journal warm in the page cache; the way through a guest \
                       is not in this figure",
    });
    println!("{report}");
    Ok(())
}

fn mib_s(len: u64, took: Duration) -> f64 {
    len as f64 / took.as_secs_f64() / f64::from(1 << 20)
}

fn round(x: f64) -> f64 {
    (x * 100.0).round() / 100.0
}
