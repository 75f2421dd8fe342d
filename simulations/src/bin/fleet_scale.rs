//! `./dev bench fleet-scale`: how the control plane grows to 100 nodes and 10,000 sessions; JSON on the last line.
//!
//! `--svg FILE` writes the plots. `--quick` measures the largest size only; `--size NODES SESSIONS` another one.

use ks_simulations::scale::{Figures, Size, measure, svg};
use serde_json::json;
use std::path::PathBuf;
use std::time::Duration;

/// Sizes of the growth curve: nodes and sessions.
const SIZES: [(u64, u64); 4] = [(10, 2_000), (25, 2_500), (50, 5_000), (100, 10_000)];
/// How long a quiet fleet is watched.
const WATCH: Duration = Duration::from_secs(20);
/// The bar for placing 500 sessions.
const PLACE_BAR_S: f64 = 0.5;

fn main() -> anyhow::Result<()> {
    let (mut plot, mut sizes) = (None, SIZES.to_vec());
    let mut args = std::env::args().skip(1);
    while let Some(flag) = args.next() {
        match flag.as_str() {
            "--svg" => plot = Some(PathBuf::from(args.next().ok_or_else(|| anyhow::anyhow!("--svg needs a file"))?)),
            "--quick" => sizes = SIZES[SIZES.len() - 1..].to_vec(),
            "--size" => {
                let mut number = || -> anyhow::Result<u64> {
                    Ok(args.next().ok_or_else(|| anyhow::anyhow!("--size needs NODES SESSIONS"))?.parse()?)
                };
                sizes = vec![(number()?, number()?)];
            }
            other => anyhow::bail!("{other} is not known; usage: fleet-scale [--quick | --size NODES SESSIONS] [--svg FILE]"),
        }
    }
    let mut all: Vec<Figures> = Vec::new();
    for (nodes, sessions) in sizes {
        let dir = std::env::temp_dir().join(format!("ks-fleet-scale-{}-{nodes}", std::process::id()));
        std::fs::create_dir_all(&dir)?;
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        let figures = runtime.block_on(measure(Size { nodes, sessions, watch: WATCH }, &dir));
        runtime.shutdown_timeout(Duration::from_secs(5));
        std::fs::remove_dir_all(&dir)?;
        let figures = figures?;
        eprintln!("{}", serde_json::to_string(&figures)?);
        all.push(figures);
    }
    if let Some(file) = plot {
        std::fs::write(&file, svg(&all))?;
    }
    let largest = all.last().ok_or_else(|| anyhow::anyhow!("nothing was measured"))?;
    let mut report = serde_json::to_value(largest)?;
    report["bench"] = json!("fleet-scale");
    report["place_500_bar_s"] = json!(PLACE_BAR_S);
    report["growth"] = serde_json::to_value(&all)?;
    println!("{report}");
    Ok(())
}
