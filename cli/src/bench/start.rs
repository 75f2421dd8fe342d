//! `ks bench start`: from `ks run` to a session that can be attached, and eight forks of one checkpoint at once.

use super::figures::Samples;
use crate::demo::drive::{fresh_name, json, ok, say, shown};
use crate::demo::report;
use anyhow::{Result, ensure};
use clap::Args;
use serde_json::{Map, json};
use std::time::Instant;

/// What to run.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// auto, kvm or qemu
    #[arg(long, default_value = "auto")]
    engine: String,
    /// Starts
    #[arg(long, default_value_t = 20)]
    samples: u32,
    /// Rounds of eight forks
    #[arg(long, default_value_t = 5)]
    fork_rounds: u32,
    /// Guest memory, MiB
    #[arg(long, default_value_t = 1024)]
    memory: u64,
}

/// Children made at once.
const FORKS: usize = 8;

/// Runs the benchmark.
pub fn run(o: &Options) -> Result<()> {
    super::image_for(&o.engine)?;
    let memory = o.memory.to_string();
    let start = |name: &str| {
        shown(&["run", "--name", name, "--memory", &memory, "--engine", &o.engine, "--cadence", "0", "--detach", "--", "true"])
    };
    let first = fresh_name("start");
    say("the first start makes the golden checkpoint; it is not counted");
    start(&first)?;
    let (mut ready, mut exec, mut fork, mut fork_exec) =
        (Samples::default(), Samples::default(), Samples::default(), Samples::default());
    for i in 0..o.samples {
        let name = format!("{first}-{i}");
        let t = Instant::now();
        start(&name)?;
        ready.push(t.elapsed().as_secs_f64());
        ok(&["exec", &name, "--", "true"])?;
        exec.push(t.elapsed().as_secs_f64());
        ok(&["rm", &name, "--force"])?;
    }
    say(&format!("ready p50 {:.3} s, p95 {:.3} s", ready.percentile(50.0).unwrap_or(0.0), ready.percentile(95.0).unwrap_or(0.0)));
    let c = json(&["checkpoint", &first])?;
    let point = format!("{first}@c{}", c["number"]);
    for round in 0..o.fork_rounds {
        let t = Instant::now();
        shown(&["fork", &point, "-n", &FORKS.to_string()])?;
        fork.push(t.elapsed().as_secs_f64());
        let kids: Vec<String> = json(&["ls"])?["sessions"]
            .as_array()
            .cloned()
            .unwrap_or_default()
            .iter()
            .filter_map(|s| s["name"].as_str())
            .filter(|n| n.strip_prefix(&first).is_some_and(|r| r.starts_with('.')))
            .map(str::to_owned)
            .collect();
        ensure!(kids.len() == FORKS, "round {round}: {} children of {FORKS}", kids.len());
        let answers: Vec<_> = kids
            .iter()
            .map(|k| {
                let k = k.clone();
                std::thread::spawn(move || ok(&["exec", &k, "--", "true"]))
            })
            .collect();
        for a in answers {
            a.join().map_err(|_| anyhow::anyhow!("a caller panicked"))??;
        }
        fork_exec.push(t.elapsed().as_secs_f64());
        for k in &kids {
            ok(&["rm", k, "--force"])?;
        }
        say(&format!(
            "round {} of {}: eight forks answered after {:.2} s (median)",
            round + 1,
            o.fork_rounds,
            fork_exec.percentile(50.0).unwrap_or(0.0)
        ));
    }
    let session = json(&["show", &first])?;
    ok(&["rm", &first, "--force"])?;
    let mut m = Map::new();
    ready.report("ready", "_s", &mut m);
    exec.report("exec", "_s", &mut m);
    fork.report("fork8", "_s", &mut m);
    fork_exec.report("fork8_exec", "_s", &mut m);
    m.extend([
        ("bench".to_owned(), json!("start")),
        ("fork8_exec_s".to_owned(), json!(fork_exec.percentile(50.0))),
        ("samples".to_owned(), json!(o.samples)),
        ("memory_mib".to_owned(), json!(o.memory)),
        ("engine".to_owned(), session["engine"].clone()),
        (
            "measured".to_owned(),
            json!("ready: `ks run --detach -- true` from start to end, the main window running; process starts included"),
        ),
        ("conditions".to_owned(), report::conditions()?),
    ]);
    println!("{}", serde_json::Value::Object(m));
    Ok(())
}
