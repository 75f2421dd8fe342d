//! `ksgw --dir DIR`: the gateway of one node, started by ksd and outliving it.

use anyhow::{Context, Result};
use clap::Parser;
use ks_gwd::host::node::{Config, Node, StartError};
use ks_gwd::host::socket;
use ks_gwd::limits::FREE_SPACE_BYTES;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};

/// The gateway of one KeepState node.
#[derive(Parser)]
#[command(name = "ksgw", version)]
struct Args {
    /// Its folder: vault, journals, settings, gw.sock.
    #[arg(long)]
    dir: PathBuf,
    /// Another place for the socket.
    #[arg(long)]
    socket: Option<PathBuf>,
    /// A price table (JSON) over the built-in one.
    #[arg(long)]
    prices: Option<PathBuf>,
    /// Bytes that calls leave free on the journal's disk.
    #[arg(long, default_value_t = FREE_SPACE_BYTES)]
    free_space: u64,
    /// Ends when nobody was connected and nothing under way for so many seconds; its node starts it again when it is needed.
    #[arg(long, default_value_t = 120)]
    idle_seconds: u64,
}

/// An earlier process of the same folder has so long to end.
const LOCK_PATIENCE: Duration = Duration::from_secs(5);

/// After SIGTERM, calls under way have so long to end.
const LAST_CALLS: Duration = Duration::from_secs(20);

fn main() -> ExitCode {
    let filter = tracing_subscriber::EnvFilter::try_from_env("KS_LOG").unwrap_or_else(|_| "info".into());
    let colours = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
    tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colours).with_writer(std::io::stderr).init();
    match run(Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("ksgw: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: Args) -> Result<()> {
    // A dump of this process would hold keys.
    rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable).context("forbidding core dumps")?;
    raise_file_limit();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(serve(args))?;
    runtime.shutdown_timeout(Duration::from_secs(1));
    Ok(())
}

/// As many open files as it may have: each guest's stream is one, each call under way three.
fn raise_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let now = getrlimit(Resource::Nofile);
    if let Err(e) = setrlimit(Resource::Nofile, Rlimit { current: now.maximum, maximum: now.maximum }) {
        tracing::warn!("the limit of open files stays at {:?}: {e}", now.current);
    }
}

async fn serve(args: Args) -> Result<()> {
    let config = Config { prices: args.prices, free_bytes: args.free_space, ..Config::in_fleet(&args.dir) };
    let node = start(config).await?;
    let path = args.socket.unwrap_or_else(|| args.dir.join(ks_proto::gateway::SOCKET));
    let listener = socket::bind(&path).with_context(|| format!("listening at {}", path.display()))?;
    tracing::info!(socket = %path.display(), "gateway serves");
    tokio::spawn(node.clone().tick());
    let mut term = signal(SignalKind::terminate())?;
    let mut int = signal(SignalKind::interrupt())?;
    // A daemon that dies takes its process group's terminal along, not this process.
    let mut hup = signal(SignalKind::hangup())?;
    tokio::spawn(async move { while hup.recv().await.is_some() {} });
    tokio::select! {
        r = socket::serve(node.clone(), listener) => r.context("gw.sock")?,
        _ = term.recv() => {}
        _ = int.recv() => {}
        () = idle(&node, Duration::from_secs(args.idle_seconds)) => tracing::info!("nobody was here for a while: it ends"),
    }
    let _ = std::fs::remove_file(&path);
    let patience = tokio::time::Instant::now() + LAST_CALLS;
    while node.under_way() > 0 && tokio::time::Instant::now() < patience {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    if node.under_way() > 0 {
        tracing::warn!(calls = node.under_way(), "calls under way are given up: their ends will be unknown");
    }
    Ok(())
}

/// Waits a while for an earlier process that is ending.
async fn start(config: Config) -> Result<std::sync::Arc<Node>> {
    let give_up = tokio::time::Instant::now() + LOCK_PATIENCE;
    let mut config = Some(config);
    loop {
        let Some(next) = config.take() else { anyhow::bail!("the settings are gone") };
        let again = Config { prices: next.prices.clone(), free_bytes: next.free_bytes, ..Config::in_fleet(&next.dir) };
        match Node::start(next) {
            Err(StartError::Taken(_)) if tokio::time::Instant::now() < give_up => {
                config = Some(again);
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            other => return Ok(other?),
        }
    }
}

/// Returns when the gateway was idle for so long.
async fn idle(node: &Node, patience: Duration) {
    loop {
        let left = patience.saturating_sub(node.idle());
        if left.is_zero() {
            return;
        }
        tokio::time::sleep(left.max(Duration::from_millis(50))).await;
    }
}
