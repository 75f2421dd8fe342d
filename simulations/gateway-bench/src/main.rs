//! Benchmarks of the gateway: what it adds to a call, against going direct and against LiteLLM in the same run, and how fast it
//! serves a stored answer. Prints one JSON object on the last line of stdout; conditions are in it.
//!
//! Provider, relay, gateway and LiteLLM are processes of their own. The relay is the guest's, run on this host, so what is measured
//! is relay and gateway without the guest channel.

mod gateway;
mod litellm;
mod load;
mod replay;
mod rig;

use anyhow::Result;
use clap::{Parser, Subcommand};
use std::path::PathBuf;

/// Benchmarks of the gateway.
#[derive(Parser)]
#[command(name = "ks-gateway-bench", version)]
struct Args {
    #[command(subcommand)]
    which: Which,
}

#[derive(Subcommand)]
enum Which {
    /// Added time to first byte at several loads, memory per idle stream, a large body
    Gateway(gateway::Options),
    /// A stored answer of 30,000 tokens, served again and again
    Replay(replay::Options),
    /// The guest's relay on this host (started by the others)
    #[command(hide = true)]
    Relay {
        /// Socket of the gateway.
        #[arg(long)]
        socket: PathBuf,
        /// Number of the run.
        #[arg(long)]
        run: u64,
    },
}

fn main() -> Result<()> {
    let args = Args::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    match args.which {
        Which::Gateway(o) => runtime.block_on(gateway::run(&o)),
        Which::Replay(o) => runtime.block_on(replay::run(&o)),
        Which::Relay { socket, run } => runtime.block_on(rig::relay(socket, run)),
    }
}
