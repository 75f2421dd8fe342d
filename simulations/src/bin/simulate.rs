//! `./dev simulate --seeds N [--seed S]`: runs seeds (from S on) and the planted bugs; progress on stderr, JSON on the last
//! line. Each seed runs twice, and both runs must be the same. `--seed S` alone shows all counts of one seed.

use anyhow::{Context, bail, ensure};
use ks_simulations::child::{self, Job};
use ks_simulations::{Mutant, Outcome};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Seeds, if none are named.
const SEEDS: u64 = 100;
/// Simulated time of one seed.
const MINUTES: u64 = 10;
/// Least simulated time of one seed.
const MINUTES_MIN: u64 = 3;
/// Simulated time of one try of a planted bug.
const MUTANT_MINUTES: u64 = 5;
/// Seeds that a planted bug is tried with.
const MUTANT_SEEDS: u64 = 40;
/// Violations that are shown of one seed.
const SHOWN_MAX: usize = 10;

struct Args {
    first: u64,
    seeds: u64,
    minutes: u64,
    mutants: bool,
    verbose: bool,
    // This program, for its children.
    program: PathBuf,
}

fn args(mut given: impl Iterator<Item = String>) -> anyhow::Result<Args> {
    let program = std::env::current_exe()?;
    let (mut first, mut seeds, mut minutes, mut mutants) = (None, None, MINUTES, true);
    let usage = "usage: simulate [--seeds N] [--seed S] [--minutes M] [--no-mutants]";
    while let Some(flag) = given.next() {
        let mut number =
            || given.next().and_then(|v| v.parse::<u64>().ok()).with_context(|| format!("{flag} needs a number\n{usage}"));
        match flag.as_str() {
            "--seeds" => seeds = Some(number()?),
            "--seed" => first = Some(number()?),
            "--minutes" => minutes = number()?,
            "--no-mutants" => mutants = false,
            other => bail!("{other} is not known\n{usage}"),
        }
    }
    ensure!(minutes >= MINUTES_MIN, "a run needs {MINUTES_MIN} minutes: faults, and then time to recover from them");
    // One seed alone is for a closer look.
    let verbose = first.is_some() && seeds.is_none_or(|n| n == 1);
    let seeds = seeds.unwrap_or(if first.is_some() { 1 } else { SEEDS });
    ensure!(seeds > 0, "--seeds needs at least 1");
    let first = first.unwrap_or(1);
    ensure!(first.checked_add(seeds).is_some(), "--seed is too large");
    Ok(Args { first, seeds, minutes, mutants: mutants && !verbose, verbose, program })
}

/// Does `work` for each of `jobs` on all cores, in any order.
fn on_all_cores<J: Sync, T: Send>(jobs: &[J], work: impl Fn(&J) -> T + Sync) -> Vec<T> {
    let (next, out) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|s| {
        for _ in 0..cores.min(jobs.len()) {
            s.spawn(|| {
                while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let done = work(job);
                    out.lock().unwrap_or_else(PoisonError::into_inner).push(done);
                }
            });
        }
    });
    out.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a seed twice: what came of it, and whether both runs were the same.
fn one_seed(seed: u64, a: &Args) -> anyhow::Result<(Outcome, bool)> {
    let job = Job::of(seed, a.minutes * 60_000);
    let (o, again) = (job.run(&a.program)?, job.run(&a.program)?);
    let same = (&o.trace, &o.counts, &o.violations) == (&again.trace, &again.counts, &again.violations) && !o.trace.is_empty();
    let faults: u64 = o.faults.values().sum();
    eprintln!(
        "seed {seed}: {} after {} simulated s in {:.1} s, {faults} faults{}",
        if o.violations.is_empty() { "good" } else { "VIOLATIONS" },
        o.simulated_ms / 1000,
        o.wall_ms as f64 / 1000.0,
        if same { "" } else { ", NOT REPRODUCIBLE" }
    );
    for v in o.violations.iter().take(SHOWN_MAX) {
        eprintln!("  {v}");
    }
    if a.verbose {
        eprintln!("trace {}\nfaults {:#?}\ncounts {:#?}", o.trace, o.faults, o.counts);
    }
    Ok((o, same))
}

fn caught(mutant: Mutant, a: &Args) -> anyhow::Result<Option<u64>> {
    for seed in 1..=MUTANT_SEEDS {
        let job = Job { mutant: Some(mutant), ..Job::of(seed, MUTANT_MINUTES * 60_000) };
        let violations = job.run(&a.program)?.violations;
        if let Some(v) = violations.iter().find(|v| v.starts_with(mutant.breaks())) {
            eprintln!("planted: {mutant}: caught by seed {seed}: {v}");
            return Ok(Some(seed));
        }
    }
    eprintln!("planted: {mutant}: NOT CAUGHT by {MUTANT_SEEDS} seeds");
    Ok(None)
}

fn sum(all: &[(Outcome, bool)], of: impl Fn(&Outcome) -> &BTreeMap<String, u64>) -> BTreeMap<String, u64> {
    let mut out = BTreeMap::new();
    for (k, v) in all.iter().flat_map(|(o, _)| of(o)) {
        *out.entry(k.clone()).or_default() += v;
    }
    out
}

fn main() -> anyhow::Result<()> {
    let given: Vec<String> = std::env::args().skip(1).collect();
    if given.first().is_some_and(|a| a == child::CHILD) {
        return child::serve(&given[1..]);
    }
    let a = args(given.into_iter())?;
    let begun = Instant::now();
    let seeds: Vec<u64> = (a.first..a.first + a.seeds).collect();
    let all: Vec<(Outcome, bool)> = on_all_cores(&seeds, |seed| one_seed(*seed, &a)).into_iter().collect::<Result<_, _>>()?;
    let mutants: &[Mutant] = if a.mutants { &Mutant::ALL } else { &[] };
    let tried: Vec<Option<u64>> = on_all_cores(mutants, |m| caught(*m, &a)).into_iter().collect::<Result<_, _>>()?;
    let mutants_caught = tried.iter().flatten().count();
    let bad: Vec<u64> = all.iter().filter(|(o, _)| !o.violations.is_empty()).map(|(o, _)| o.seed).collect();
    let violations: usize = all.iter().map(|(o, _)| o.violations.len()).sum();
    let reproducible = all.iter().filter(|(_, same)| *same).count();
    let faults = sum(&all, |o| &o.faults);
    let report = json!({
        "seeds": a.seeds,
        "simulated_s": all.iter().map(|(o, _)| o.simulated_ms / 1000).sum::<u64>(),
        "violations": violations,
        "violating_seeds": bad,
        "seeds_reproducible": reproducible,
        "mutants": mutants.len(),
        "mutants_caught": mutants_caught,
        "faults_total": faults.values().sum::<u64>(),
        "faults": faults,
        "counts": sum(&all, |o| &o.counts),
        "wall_s": begun.elapsed().as_secs_f64(),
    });
    println!("{report}");
    let good = violations == 0 && mutants_caught == mutants.len() && reproducible as u64 == a.seeds;
    std::process::exit(i32::from(!good));
}
