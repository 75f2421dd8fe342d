//! `ks-test-provider --listen 127.0.0.1:0`: prints its address, then serves until it is killed.

use anyhow::{Context, Result};
use clap::Parser;
use std::net::SocketAddr;

/// A provider of models for tests and demos.
#[derive(Parser)]
#[command(name = "ks-test-provider", version)]
struct Args {
    /// Where to listen.
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: SocketAddr,
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    let provider = ks_test_provider::start(args.listen, None).await.context("cannot listen")?;
    println!("{}", provider.address);
    std::future::pending::<()>().await;
    Ok(())
}
