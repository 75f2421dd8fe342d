//! Demonstrations that drive the product through its own command line, as a person would, and write a dated report.
//!
//! Nothing in the product knows the demos: the agent is a program inside the guest that a real agent could replace.

mod drive;
mod fork;
mod kill;
mod repo;
pub mod report;

use clap::Subcommand;

/// Which demonstration.
#[derive(Debug, Clone, Subcommand)]
pub enum Demo {
    /// An agent works on a git repository; its VM and the daemon are killed between two steps; it goes on.
    Kill {
        /// Seconds that the stand-in agent thinks before each step.
        #[arg(long, default_value_t = 1.5)]
        pace: f64,
        /// Leave the session for a look around.
        #[arg(long)]
        keep: bool,
    },
    /// One parent, three children: the same past, nothing shared after.
    Fork {
        /// Leave the sessions for a look around.
        #[arg(long)]
        keep: bool,
    },
}

/// Runs one demonstration, or kill and then fork when none is named. Fails when a check of it fails.
pub fn run(which: Option<Demo>) -> anyhow::Result<()> {
    match which {
        Some(Demo::Kill { pace, keep }) => kill::run(pace, keep),
        Some(Demo::Fork { keep }) => fork::run(keep),
        None => {
            kill::run(1.5, false)?;
            fork::run(false)
        }
    }
}
