//! The seeded simulation as tests: a few seeds and every planted bug. `./dev simulate --seeds 100` is the long run.

#![allow(clippy::unwrap_used, reason = "helpers of tests: they fail where they panic")]

use ks_simulations::child::Job;
use ks_simulations::{Mutant, Outcome};
use std::path::Path;
use std::sync::OnceLock;

const SEEDS: u64 = 6;
const SIMULATED_MS: u64 = 5 * 60_000;
const MUTANT_SEEDS: u64 = 40;

fn run(seed: u64, simulated_ms: u64, mutant: Option<Mutant>) -> Outcome {
    Job { mutant, ..Job::of(seed, simulated_ms) }.run(Path::new(env!("CARGO_BIN_EXE_simulate"))).unwrap()
}

/// The same runs for all promises.
fn outcomes() -> &'static [Outcome] {
    static OUTCOMES: OnceLock<Vec<Outcome>> = OnceLock::new();
    OUTCOMES.get_or_init(|| {
        let half = |from: u64| {
            std::thread::spawn(move || (from..=SEEDS).step_by(2).map(|s| run(s, SIMULATED_MS, None)).collect::<Vec<_>>())
        };
        let (odd, even) = (half(1), half(2));
        let mut all = odd.join().unwrap();
        all.extend(even.join().unwrap());
        all
    })
}

fn holds(promise: &str) {
    for o in outcomes() {
        let broken: Vec<&String> = o.violations.iter().filter(|v| v.starts_with(promise)).collect();
        assert!(broken.is_empty(), "seed {}: {broken:#?}", o.seed);
    }
}

/// Sum of one count over all runs.
fn total(what: &str) -> u64 {
    outcomes().iter().map(|o| o.counts.get(what).or(o.faults.get(what)).copied().unwrap_or(0)).sum()
}

#[test]
fn one_owner_in_seeded_fleets() {
    holds("ONE-OWNER");
    assert!(total("reassignments") > 20 && total("leases lapsed") > 20, "too few sessions moved for the promise to be tried");
}

#[test]
fn fenced_in_seeded_fleets() {
    holds("FENCED");
    assert!(total("effects refused as stale") > 0, "no stale effect arrived, so the gate was not tried");
}

#[test]
fn durable_means_peers_in_seeded_fleets() {
    holds("DURABLE-MEANS-PEERS");
    assert!(total("durable checkpoints read by the client") > 100 && total("power cut") > 5);
}

#[test]
fn no_torn_in_seeded_fleets() {
    holds("NO-TORN");
    assert!(total("checkpoints restored") > 20);
}

#[test]
fn recovers_in_seeded_fleets() {
    holds("RECOVERS");
    assert!(total("host killed") > 5 && total("node cut off") > 5 && total("rot") > 0 && total("mended by a scrub") > 0);
}

#[test]
fn every_node_has_the_same_state_in_seeded_fleets() {
    holds("SAME-STATE");
    assert!(total("power cut of the whole site") > 0, "the moment at which a leader could lead on was not tried");
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    let (a, b) = (run(11, 60_000, None), run(11, 60_000, None));
    assert_eq!((&a.trace, &a.counts, &a.faults), (&b.trace, &b.counts, &b.faults));
    assert_ne!(a.trace, run(12, 60_000, None).trace);
}

fn caught(mutant: Mutant, seed: u64) -> bool {
    run(seed, SIMULATED_MS, Some(mutant)).violations.iter().any(|v| v.starts_with(mutant.breaks()))
}

#[test]
fn every_planted_bug_is_caught() {
    let missed: Vec<String> =
        Mutant::ALL.iter().filter(|m| !(1..=MUTANT_SEEDS).any(|seed| caught(**m, seed))).map(|m| format!("{m}")).collect();
    assert!(missed.is_empty(), "not caught: {missed:?}");
}
