//! `ks bench gateway` and `ks bench replay`: run beside the node by a program of their own, since what they measure needs none.

use crate::host::daemon;
use anyhow::{Context, Result, anyhow, ensure};
use clap::Args;
use std::process::Command;

/// What to run.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Options of the benchmark itself; `-- --help` lists them
    #[arg(last = true)]
    args: Vec<String>,
}

/// Runs the program's benchmark `which`; its last line of output is the result.
pub fn run(which: &str, o: &Options) -> Result<()> {
    let program = daemon::program().map_err(|f| anyhow!("{f}"))?.with_file_name("ks-gateway-bench");
    let status = Command::new(&program)
        .arg(which)
        .args(&o.args)
        .status()
        .with_context(|| format!("starting {}; ./dev build makes it", program.display()))?;
    ensure!(status.success(), "the benchmark ended with {status}");
    Ok(())
}
