//! Measurements: `ks bench`. Each has a baseline in the same run, states its conditions, and prints one JSON object on the
//! last line of stdout. They drive the product through its own command line and API on a real node.

mod checkpoint;
mod failover;
mod figures;
mod gateway;
mod image;
mod observe;
mod replicate;
mod resume;
mod soak;
mod start;

use crate::demo::{drive, finish};
use crate::failure::Res;
use crate::host::http::Node;
use crate::output::Ctx;
use clap::{Args, Subcommand};
use serde_json::Value;

/// Arguments of `ks bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    which: Bench,
}

#[derive(Debug, Clone, Subcommand)]
enum Bench {
    /// Bring a 2 GiB guest with 512 MiB in use back, warm and cold, against rebuilding its memory from 4 MiB chunks
    Resume(resume::Options),
    /// Checkpoint a guest that dirties 256 MiB each time
    Checkpoint(checkpoint::Options),
    /// 82 checkpoints of an agent-like workload: what they cost to keep
    Soak(soak::Options),
    /// Three nodes, the owner's host killed again and again, then partitions and stopped processes
    Failover(failover::Options),
    /// Packs to one peer, against plain QUIC with a hash of the whole file and a sync
    Replicate(replicate::Options),
    /// From `ks run` to the first answer, and eight forks at once
    Start(start::Options),
    /// What the gateway adds to a model call's first byte, against going direct and against LiteLLM
    Gateway(gateway::Options),
    /// A stored answer of 30,000 tokens, served from the journal
    Replay(gateway::Options),
}

/// A node to ask from blocking code.
pub struct Asker {
    node: Node,
    runtime: tokio::runtime::Handle,
}

impl Asker {
    /// `GET path` as JSON.
    pub fn get(&self, path: &str) -> anyhow::Result<Value> {
        Ok(self.runtime.block_on(self.node.get::<Value>(path))?)
    }
}

/// The kvm engine on software KVM takes images of the soft profile only; one is built when the node has none.
fn image_for(engine: &str) -> anyhow::Result<()> {
    let soft = engine == "kvm" && std::path::Path::new("/sys/module/kvm_pvm").exists();
    let images = drive::json(&["image", "ls"])?;
    let has_soft = images["images"].as_array().is_some_and(|all| all.iter().any(|i| i["profile"] == "soft"));
    if soft && !has_soft {
        drive::say("this host has software KVM: building the image of the soft profile (the first time compiles a kernel)");
        drive::shown(&["image", "build", "--profile", "soft"])?;
    }
    Ok(())
}

/// Runs `measure` beside a fresh session whose main window runs `command`; the session is removed whatever the outcome.
fn in_session(
    name: &str,
    memory_mib: u64,
    engine: &str,
    command: &[&str],
    measure: impl FnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let memory = memory_mib.to_string();
    image_for(engine)?;
    let options = ["run", "--name", name, "--memory", &memory, "--engine", engine, "--cadence", "0", "--detach", "--"];
    drive::shown(&[&options, command].concat())?;
    let outcome = measure();
    drive::ok(&["rm", name, "--force"]).ok();
    outcome
}

/// Runs a benchmark; its exit code is the process's.
pub async fn run(args: BenchArgs, ctx: &Ctx) -> Res<u8> {
    let runtime = tokio::runtime::Handle::current();
    // Those of the fleet make their own nodes.
    let asker = match &args.which {
        Bench::Failover(_) | Bench::Replicate(_) | Bench::Gateway(_) | Bench::Replay(_) => None,
        Bench::Resume(_) | Bench::Checkpoint(_) | Bench::Soak(_) | Bench::Start(_) => {
            Some(Asker { node: Node::find(ctx)?, runtime })
        }
    };
    let work = tokio::task::spawn_blocking(move || match (args.which, asker) {
        (Bench::Resume(o), Some(a)) => resume::run(&o, &a),
        (Bench::Checkpoint(o), Some(a)) => checkpoint::run(&o, &a),
        (Bench::Soak(o), Some(a)) => soak::run(&o, &a),
        (Bench::Start(o), _) => start::run(&o),
        (Bench::Failover(o), _) => failover::run(&o),
        (Bench::Replicate(o), _) => replicate::run(&o),
        (Bench::Gateway(o), _) => gateway::run("gateway", &o),
        (Bench::Replay(o), _) => gateway::run("replay", &o),
        (Bench::Resume(_) | Bench::Checkpoint(_) | Bench::Soak(_), None) => anyhow::bail!("no node to ask"),
    });
    finish("the benchmark", work.await)
}
