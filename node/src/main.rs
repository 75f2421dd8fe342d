//! `ksd`: one node. `ksd --data-dir DIR` serves; `ksd supervise -- ARGS` keeps such a one running.

use anyhow::Result;
use clap::{Parser, Subcommand};
use ks_node::{daemon, supervise};
use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

/// The KeepState node.
#[derive(Parser)]
#[command(name = "ksd", version, args_conflicts_with_subcommands = true)]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    /// Data folder: state, chunk store, keys, images, run folders.
    #[arg(long, env = "KS_DATA_DIR")]
    data_dir: Option<PathBuf>,
    /// Loopback address of the API; port 0 takes the last one again.
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// Another place for api.json than the data folder.
    #[arg(long)]
    api_file: Option<PathBuf>,
    /// Address of the fleet's planes: UDP PORT and PORT+1 for members, TCP PORT for the HTTPS API. Port 0 takes the last one
    /// again, or any free one. Without it the last address is taken again, or loopback.
    #[arg(long, value_parser = fleet_address)]
    fleet_address: Option<SocketAddr>,
    /// MiB per second that checkpoints may take between this node and its peers, each way; without it there is no limit.
    #[arg(long, env = "KS_BULK_MIB_S", value_parser = clap::value_parser!(u32).range(1..))]
    bulk_mib_s: Option<u32>,
    /// A supervisor starts this one again when it dies.
    #[arg(long)]
    supervised: bool,
}

/// What is logged when `KS_LOG` does not say: of the libraries only what went wrong.
const QUIET: &str =
    "info,openraft=error,libp2p_swarm=warn,libp2p_core=warn,chitchat=warn,iroh_blobs=warn,quinn=warn,quinn_proto=warn";

#[derive(Subcommand)]
enum Command {
    /// Start ksd with ARGS, again whenever it dies; SIGTERM is handed on.
    Supervise {
        /// Arguments of ksd.
        #[arg(last = true)]
        args: Vec<OsString>,
    },
    /// Measures the bulk plane against plain QUIC, both ends in this process: one line of JSON per round, then the medians.
    #[command(hide = true)]
    BenchReplicate {
        /// MiB of packs in each round.
        #[arg(long, default_value_t = 512)]
        mib: u32,
        /// Rounds.
        #[arg(long, default_value_t = 5)]
        rounds: u32,
        /// An empty folder, on the disk to measure.
        #[arg(long)]
        dir: PathBuf,
    },
}

/// `IP` or `IP:PORT`.
fn fleet_address(text: &str) -> Result<SocketAddr, String> {
    let ip = || text.parse::<std::net::IpAddr>().map(|ip| SocketAddr::new(ip, 0));
    text.parse().or_else(|_| ip()).map_err(|_| format!("{text:?} is not IP or IP:PORT"))
}

fn main() -> ExitCode {
    let filter = tracing_subscriber::EnvFilter::try_from_env("KS_LOG").unwrap_or_else(|_| QUIET.into());
    let colours = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
    tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colours).with_writer(|| Log(std::io::stderr())).init();
    match run(Args::parse()) {
        Ok(code) => ExitCode::from(code),
        Err(e) => {
            let _ = writeln!(Log(std::io::stderr()), "ksd: {e:#}");
            // A full disk is a matter of time: the supervisor tries again until there is space.
            ExitCode::from(if disk_is_full(&e) { 1 } else { supervise::CANNOT_START })
        }
    }
}

/// The log. What a full disk does not take is lost and hurts nobody: a log that fails must not end the node.
struct Log(std::io::Stderr);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let _ = self.0.write_all(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Some causes come as words only, with the system's own text at their end.
fn disk_is_full(e: &anyhow::Error) -> bool {
    let full = |io: &std::io::Error| matches!(io.kind(), std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded);
    e.chain().any(|c| c.downcast_ref::<std::io::Error>().is_some_and(full)) || format!("{e:#}").contains("(os error 28)")
}

fn run(args: Args) -> Result<u8> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    match args.command {
        Some(Command::Supervise { args }) => runtime.block_on(supervise::run(args)),
        Some(Command::BenchReplicate { mib, rounds, dir }) => {
            for line in runtime.block_on(ks_node::host::measure::replicate(&dir, mib, rounds))? {
                println!("{line}");
            }
            Ok(0)
        }
        None => {
            let data_dir = args.data_dir.ok_or_else(|| anyhow::anyhow!("--data-dir DIR is missing"))?;
            let (listen, api_file, fleet_address) = (args.listen, args.api_file, args.fleet_address);
            let bulk_bytes_per_s = args.bulk_mib_s.map(|n| u64::from(n) << 20);
            let config = daemon::Config { data_dir, listen, api_file, fleet_address, bulk_bytes_per_s };
            let code = runtime.block_on(daemon::run(config))?;
            // Tasks that block on a disk must not hold the end up.
            runtime.shutdown_timeout(std::time::Duration::from_secs(1));
            Ok(code)
        }
    }
}
