//! Measures `replicate`: `replicate [MiB per round] [rounds] [folder]`. Prints one JSON line per round, then the medians.

use anyhow::Context;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let mut args = std::env::args().skip(1);
    let mut number = |default: u32| args.next().map_or(Ok(default), |a| a.parse::<u32>());
    let (mib, rounds) = (number(512)?, number(5)?);
    let parent = args.next().unwrap_or_else(|| ".".into());
    let dir = tempfile::tempdir_in(&parent).with_context(|| format!("a folder in {parent}"))?;
    for line in ks_bulk::bench::report(dir.path(), mib, rounds, &std::sync::atomic::AtomicBool::new(false)).await? {
        println!("{line}");
    }
    Ok(())
}
