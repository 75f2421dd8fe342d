//! Each run in a process of its own. Libraries keep counters and keys for a whole process (tokio seeds its choice in
//! `select!` with one), so a run is the same every time only as the first of its process.
//!
//! The child is the `simulate` program, called as `simulate one SEED MS [MUTANT]`; it prints its [`Outcome`] as JSON. A panic
//! in it becomes a violation, with the seed that gives it again.

use crate::mutants::Mutant;
use crate::run::{Outcome, run};
use anyhow::{Context, bail, ensure};
use std::path::Path;
use std::process::{Command, Stdio};

/// First argument of a child.
pub const CHILD: &str = "one";
/// Last lines of a child's complaints that are kept.
const COMPLAINT_LINES: usize = 12;

/// What one child runs.
#[derive(Debug, Clone, Copy)]
pub struct Job {
    /// Its seed.
    pub seed: u64,
    /// Simulated time.
    pub simulated_ms: u64,
    /// The planted bug; the run ends when it is caught.
    pub mutant: Option<Mutant>,
}

impl Job {
    /// A seed without a planted bug.
    pub fn of(seed: u64, simulated_ms: u64) -> Self {
        Self { seed, simulated_ms, mutant: None }
    }

    /// Runs it in a process of `program`, the path of `simulate`.
    ///
    /// # Errors
    /// If the process cannot be started or prints nonsense.
    pub fn run(&self, program: &Path) -> anyhow::Result<Outcome> {
        let mut child = Command::new(program);
        child.args([CHILD, &self.seed.to_string(), &self.simulated_ms.to_string()]);
        child.args(self.mutant.iter().map(|m| m.to_string()));
        let out = child.stdin(Stdio::null()).output().with_context(|| format!("{} cannot be started", program.display()))?;
        if !out.status.success() {
            let text = String::from_utf8_lossy(&out.stderr);
            let mut last: Vec<&str> = text.lines().rev().take(COMPLAINT_LINES).collect();
            last.reverse();
            let violation = format!("RECOVERS: the run ended with {}: {}", out.status, last.join(" | "));
            return Ok(Outcome { seed: self.seed, violations: vec![violation], ..Outcome::default() });
        }
        serde_json::from_slice(&out.stdout).with_context(|| format!("seed {} printed no outcome", self.seed))
    }
}

/// The child's side: runs what `args` (without [`CHILD`]) say and prints what came of it.
///
/// # Errors
/// If the arguments are not those of a job.
pub fn serve(args: &[String]) -> anyhow::Result<()> {
    let number = |at: usize| args.get(at).and_then(|v| v.parse::<u64>().ok()).context("usage: simulate one SEED MS [MUTANT]");
    let (seed, simulated_ms) = (number(0)?, number(1)?);
    let mutant = match args.get(2) {
        None => None,
        Some(name) => match Mutant::ALL.iter().find(|m| m.to_string() == *name) {
            None => bail!("no planted bug is called {name:?}; there are: {}", Mutant::ALL.map(|m| m.to_string()).join(", ")),
            found => found.copied(),
        },
    };
    ensure!(args.len() <= 3, "too many arguments; usage: simulate one SEED MS [MUTANT]");
    println!("{}", serde_json::to_string(&run(seed, simulated_ms, mutant))?);
    Ok(())
}
