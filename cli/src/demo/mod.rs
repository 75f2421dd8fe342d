//! Demonstrations that drive the product through its own command line, as a person would, and write a dated report.
//!
//! Nothing in the product knows the demos: the agent is a program inside the guest that a real agent could replace.

pub mod drive;
pub mod fleet;
mod fork;
mod kill;
mod replay;
mod repo;
pub mod report;

use crate::failure::{Failure, Res};
use crate::output::Ctx;
use clap::{Args, Subcommand};

/// Arguments of `ks demo`.
#[derive(Debug, Args)]
pub struct DemoArgs {
    #[command(subcommand)]
    which: Option<Demo>,
}

/// Which demonstration; without one, kill and then fork.
#[derive(Debug, Clone, Subcommand)]
enum Demo {
    /// An agent works on a git repository; its VM and the daemon are killed between two steps; it goes on
    Kill {
        /// Seconds that the stand-in agent thinks before each step
        #[arg(long, default_value_t = PACE_S)]
        pace: f64,
        /// Leave the session for a look around
        #[arg(long)]
        keep: bool,
    },
    /// Three nodes on this machine; every process of a session's owner is killed; a peer goes on
    Fleet {
        /// Seconds that the stand-in agent thinks before each step
        #[arg(long, default_value_t = PACE_S)]
        pace: f64,
        /// Give each node a network namespace of its own (needs root)
        #[arg(long)]
        netns: bool,
        /// Leave the nodes running for a look around; the report says how to speak to them
        #[arg(long)]
        keep: bool,
    },
    /// A program streams ten answers of a model; VM and daemon are killed in one; every byte comes, nothing is bought twice
    Replay {
        /// Tokens of each answer
        #[arg(long, default_value_t = 60)]
        tokens: u64,
        /// Milliseconds between two tokens of the stand-in provider
        #[arg(long, default_value_t = 60, value_name = "MS")]
        slow: u64,
        /// Leave the session for a look around
        #[arg(long)]
        keep: bool,
    },
    /// One parent, three children: the same past, nothing shared after
    Fork {
        /// Leave the sessions for a look around
        #[arg(long)]
        keep: bool,
    },
}

/// Thinking time of the stand-in agent, seconds.
const PACE_S: f64 = 1.5;

/// Runs a demonstration; fails when a check of it fails.
pub async fn run(args: DemoArgs, _ctx: &Ctx) -> Res<u8> {
    let work = tokio::task::spawn_blocking(move || match args.which {
        Some(Demo::Kill { pace, keep }) => kill::run(pace, keep),
        Some(Demo::Fleet { pace, netns, keep }) => fleet::run(pace, netns, keep),
        Some(Demo::Replay { tokens, slow, keep }) => replay::run(tokens, slow, keep),
        Some(Demo::Fork { keep }) => fork::run(keep),
        None => kill::run(PACE_S, false).and_then(|()| fork::run(false)),
    });
    finish("the demonstration", work.await)
}

/// The outcome of blocking work as `ks` reports it.
pub fn finish(what: &str, outcome: Result<anyhow::Result<()>, tokio::task::JoinError>) -> Res<u8> {
    let next = "look at `ks ls`, `ks events` and the report, then run it again";
    match outcome {
        Ok(Ok(())) => Ok(0),
        Ok(Err(e)) => Err(Failure::local(format!("{what} failed"), format!("{e:#}"), next)),
        Err(e) => Err(Failure::local(format!("{what} failed"), e, "report this")),
    }
}
