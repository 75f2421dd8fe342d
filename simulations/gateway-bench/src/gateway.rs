//! `gateway`: what relay and gateway add to a call's first byte, beside LiteLLM, at several loads; memory per idle stream; a large body.

use crate::litellm;
use crate::load::{Found, Target};
use crate::rig::{Ours, Process, beside, sync_ms};
use anyhow::{Context, Result, ensure};
use clap::Args;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// What to run.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Streams at once
    #[arg(long, value_delimiter = ',', default_value = "10,50,200,1000")]
    loads: Vec<usize>,
    /// Folder for the journal; its disk is what is synced
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Bytes of each prompt
    #[arg(long, default_value_t = 48 * 1024)]
    prompt_bytes: usize,
    /// Leave LiteLLM out
    #[arg(long)]
    without_litellm: bool,
}

/// Tokens of a stream, and milliseconds between them: three seconds.
const TOKENS: usize = 12;
const TOKEN_MS: u64 = 250;

fn model() -> String {
    format!("bench!tokens={TOKENS}+slow={TOKEN_MS}+words=4")
}

fn target(address: SocketAddr, path: &'static str, o: &Options) -> Target {
    Target { address, path, model: model(), prompt_bytes: o.prompt_bytes }
}

/// Runs the benchmark.
///
/// # Errors
/// If a process does not start or a measurement fails.
pub async fn run(o: &Options) -> Result<()> {
    let scratch = tempfile::tempdir()?;
    let disk = match &o.dir {
        Some(dir) => tempfile::tempdir_in(dir)?,
        None => tempfile::tempdir()?,
    };
    let memory = tempfile::tempdir_in("/dev/shm")?;
    let (_provider, provider) = Process::with_address("the test provider", &mut Command::new(beside("ks-test-provider")?))?;
    let ours = Ours::start(disk.path(), provider)?;
    let direct = target(provider, "/v1/chat/completions", o);
    let through = target(ours.address, "/bench/v1/chat/completions", o);
    let mut report = json!({
        "bench": "gateway",
        "conditions": {
            "cores": std::thread::available_parallelism().map(usize::from).unwrap_or(0),
            "stream": format!("{TOKENS} tokens, {TOKEN_MS} ms apart"), "prompt_bytes": o.prompt_bytes,
            "journal": "on, intent synced before sending", "journal_disk_sync_p50_ms": round(sync_ms(disk.path())?),
            "ours": "relay (the guest's, on this host) and ksgw, two processes", "provider": "ks-test-provider over loopback",
            "peer": "none: no replica holds the journal in this run",
        },
    });
    direct.load(10, 1, Duration::from_millis(100), 1).await;
    through.load(10, 1, Duration::from_millis(100), 2).await;
    let in_memory = Ours::start(memory.path(), provider)?;
    let through_memory = target(in_memory.address, "/bench/v1/chat/completions", o);
    through_memory.load(10, 1, Duration::from_millis(100), 3).await;
    let theirs = if o.without_litellm { None } else { Some(start_litellm(scratch.path(), provider).await?) };
    for &n in &o.loads {
        let rounds = (400 / n).clamp(1, 10);
        let mut base = run_one("direct", &direct, n, rounds, 1_000_000).await;
        let mut mine = run_one("ours", &through, n, rounds, 2_000_000).await;
        let mut quick = run_one("ours, journal in memory", &through_memory, n, rounds, 3_000_000).await;
        let at = n.to_string();
        report["direct"][&at] = absolute(&mut base);
        report["ours"][&at] = added(&mut mine, &mut base);
        report["ours_journal_in_memory"][&at] = added(&mut quick, &mut base);
        if let Some((_, address)) = &theirs {
            let mut other = run_one("LiteLLM", &target(*address, "/v1/chat/completions", o), n, rounds, 4_000_000).await;
            report["litellm"][&at] = added(&mut other, &mut base);
        }
    }
    head_lines(&mut report);
    report["litellm_version"] = json!(theirs.as_ref().map(|_| litellm::VERSION));
    drop(theirs);
    drop(in_memory);
    report["memory"] = idle(&ours, provider, o).await?;
    report["large_body"] = large(&ours, o).await?;
    println!("{report}");
    Ok(())
}

async fn start_litellm(scratch: &Path, provider: SocketAddr) -> Result<(Process, SocketAddr)> {
    let program = litellm::install()?;
    let (process, address) = litellm::start(&program, scratch, provider, &model()).await?;
    let t = Target { address, path: "/v1/chat/completions", model: model(), prompt_bytes: 100 };
    t.load(10, 1, Duration::from_millis(100), 4).await;
    Ok((process, address))
}

async fn run_one(name: &str, target: &Target, n: usize, rounds: usize, salt: u64) -> Found {
    // Clients that all begin in the same instant measure the instant.
    let spread = Duration::from_millis(TOKENS as u64 * TOKEN_MS);
    let mut found = target.load(n, rounds, spread, salt + (n as u64) * 10_000).await;
    let (p50, p99) = found.percentiles();
    eprintln!("{name}, {n} streams: first byte p50 {p50:.2} ms, p99 {p99:.2} ms, {} failed", found.failed);
    found
}

fn round(ms: f64) -> f64 {
    (ms * 100.0).round() / 100.0
}

fn absolute(found: &mut Found) -> Value {
    let (p50, p99) = found.percentiles();
    json!({"ttfb_p50_ms": round(p50), "ttfb_p99_ms": round(p99), "requests": found.first_ms.len(), "failed": found.failed})
}

fn added(found: &mut Found, base: &mut Found) -> Value {
    let ((p50, p99), (b50, b99)) = (found.percentiles(), base.percentiles());
    let mut v = absolute(found);
    v["added_ttfb_p50_ms"] = json!(round(p50 - b50));
    v["added_ttfb_p99_ms"] = json!(round(p99 - b99));
    v
}

/// The figures that the bars are about, at the top.
fn head_lines(report: &mut Value) {
    for who in ["ours", "ours_journal_in_memory", "litellm"] {
        let at = report[who]["200"]["added_ttfb_p50_ms"].clone();
        report[who]["added_ttfb_p50_ms"] = at;
    }
    let (mine, other) = (report["ours"]["added_ttfb_p50_ms"].as_f64(), report["litellm"]["added_ttfb_p50_ms"].as_f64());
    report["litellm_over_ours_at_200"] = json!(mine.zip(other).map(|(m, o)| round(o / m)));
}

async fn go(provider: SocketAddr) -> Result<()> {
    let tcp = tokio::net::TcpStream::connect(provider).await?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(tcp)).await?;
    tokio::spawn(connection);
    let request = hyper::Request::post("/go").header("host", "bench").body(Full::new(bytes::Bytes::new()))?;
    sender.send_request(request).await?.into_body().collect().await?;
    Ok(())
}

/// Streams that all wait: what each costs gateway and relay.
async fn idle(ours: &Ours, provider: SocketAddr, o: &Options) -> Result<Value> {
    let n = o.loads.iter().copied().max().unwrap_or(1000).min(1000);
    let t = Target {
        model: "bench!tokens=6,stall=3".to_owned(),
        prompt_bytes: 1024,
        ..target(ours.address, "/bench/v1/chat/completions", o)
    };
    let (gateway, relay) = (ours.gateway.memory()?, ours.relay.memory()?);
    let mut before = purchases(provider).await?;
    let want = before + n as u64;
    let load = tokio::spawn(async move { t.load(n, 1, Duration::from_secs(3), 9_000_000).await });
    while before < want {
        tokio::time::sleep(Duration::from_millis(100)).await;
        before = purchases(provider).await?;
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    let per = |now: u64, then: u64| (now.saturating_sub(then)) / n as u64;
    let out = json!({"idle_streams": n, "gateway_bytes_per_stream": per(ours.gateway.memory()?, gateway),
        "relay_bytes_per_stream": per(ours.relay.memory()?, relay), "bar_bytes": 65536});
    go(provider).await?;
    let found = load.await?;
    ensure!(found.failed == 0, "{} of {n} idle streams failed", found.failed);
    Ok(out)
}

/// How often the provider accepted a request.
///
/// # Errors
/// If it does not say.
pub async fn purchases(provider: SocketAddr) -> Result<u64> {
    let tcp = tokio::net::TcpStream::connect(provider).await?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(tcp)).await?;
    tokio::spawn(connection);
    let request = hyper::Request::get("/purchases").header("host", "bench").body(Full::new(bytes::Bytes::new()))?;
    let body = sender.send_request(request).await?.into_body().collect().await?.to_bytes();
    let v: Value = serde_json::from_slice(&body)?;
    v["total"].as_u64().context("a count")
}

/// A body of 16 MiB: how much more memory the gateway's peak has than it had before.
async fn large(ours: &Ours, o: &Options) -> Result<Value> {
    let bytes = 16 << 20;
    let t = Target {
        model: "bench!tokens=2".to_owned(),
        prompt_bytes: bytes,
        ..target(ours.address, "/bench/v1/chat/completions", o)
    };
    let before = ours.gateway.resident()?;
    ours.gateway.forget_peak()?;
    let (first, _) = t.ask(77).await?;
    let over = ours.gateway.peak()?.saturating_sub(before);
    Ok(
        json!({"body_bytes": bytes, "gateway_peak_over_bytes": over, "times_its_size": round(over as f64 / bytes as f64), "bar_times": 3,
        "ttfb_ms": round(first)}),
    )
}
