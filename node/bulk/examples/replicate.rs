//! Measures `replicate`: `replicate [MiB per round] [rounds] [folder]`. Prints one JSON line per round, then the medians.

use anyhow::Context;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let mut args = std::env::args().skip(1);
    let mut number = |default: u32| args.next().map_or(Ok(default), |a| a.parse::<u32>());
    let (mib, rounds) = (number(512)?, number(5)?);
    let parent = args.next().unwrap_or_else(|| ".".into());
    let dir = tempfile::tempdir_in(&parent).with_context(|| format!("a folder in {parent}"))?;
    let done = ks_bulk::bench::replicate(dir.path(), mib, rounds).await?;
    for r in &done {
        println!(
            "{{\"bytes\":{},\"ours_mib_s\":{:.1},\"plain_mib_s\":{:.1},\"percent\":{:.1}}}",
            r.bytes,
            r.ours_mib_s(),
            r.plain_mib_s(),
            r.percent()
        );
    }
    let median = |mut v: Vec<f64>| {
        v.sort_by(f64::total_cmp);
        v.get(v.len() / 2).copied().unwrap_or(f64::NAN)
    };
    println!(
        "median: ours {:.1} MiB/s, plain {:.1} MiB/s, {:.1} percent",
        median(done.iter().map(ks_bulk::bench::Round::ours_mib_s).collect()),
        median(done.iter().map(ks_bulk::bench::Round::plain_mib_s).collect()),
        median(done.iter().map(ks_bulk::bench::Round::percent).collect())
    );
    Ok(())
}
