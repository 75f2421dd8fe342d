//! `ks bench resume`: a parked guest comes back, warm and cold in turn.

use super::figures::Samples;
use super::{Asker, image, in_session};
use crate::demo::drive::{fresh_name, json, ok, say};
use crate::demo::report;
use anyhow::{Context, Result};
use clap::Args;
use serde_json::{Map, Value, json};
use std::time::Instant;

/// What to run.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// auto, kvm or qemu
    #[arg(long, default_value = "auto")]
    engine: String,
    /// Resumes of each kind
    #[arg(long, default_value_t = 20)]
    samples: u32,
    /// Guest memory, MiB
    #[arg(long, default_value_t = 2048)]
    memory: u64,
    /// Memory filled with data that no chunk shares, MiB
    #[arg(long, default_value_t = 512)]
    used: u64,
}

#[derive(Default)]
struct Kind {
    first: Samples,
    ready: Samples,
    exec: Samples,
}

impl Kind {
    fn report(&self) -> Value {
        let mut m = Map::new();
        self.first.report("first_instruction", "_s", &mut m);
        self.ready.report("ready", "_s", &mut m);
        self.exec.report("exec", "_s", &mut m);
        Value::Object(m)
    }
}

/// A program that fills memory and stays; text-like bytes, so that compression sees what it would see in life. The bytes
/// are made by user code: the kernel's random numbers come at less than 0.1 MiB/s on software KVM.
pub fn fill(mib: u64) -> String {
    format!(
        "import random,time\nb=bytearray()\nwhile len(b)<{mib}<<20: b+=random.randbytes(1<<19).hex().encode()\nopen('/workspace/filled','w').write(str(len(b)))\ntime.sleep(10**9)"
    )
}

/// Runs the benchmark.
pub fn run(o: &Options, asker: &Asker) -> Result<()> {
    let name = fresh_name("resume");
    say(&format!("session {name}: {} MiB of memory, {} MiB filled", o.memory, o.used));
    in_session(&name, o.memory, &o.engine, &["python3", "-c", &fill(o.used)], || measure(o, asker, &name))
}

fn measure(o: &Options, asker: &Asker, name: &str) -> Result<()> {
    crate::demo::drive::wait("the guest fills its memory", 600, || {
        Ok(ok(&["exec", name, "--", "test", "-s", "/workspace/filled"]).is_ok().then_some(()))
    })?;
    let session = json(&["show", name])?;
    let scratch = tempfile::tempdir().context("a scratch folder")?;
    let memory = image::open(session["vmm_pid"].as_u64().context("a VMM process")?)?;
    let in_use = image::nonzero_bytes(&memory)?;
    let names = image::store_reference(&memory, scratch.path())?;
    let len = memory.metadata().context("size")?.len();
    drop(memory);
    let (mut warm, mut cold) = (Kind::default(), Kind::default());
    let (mut rebuild_warm, mut rebuild_cold) = (Samples::default(), Samples::default());
    for i in 0..o.samples {
        for is_cold in [false, true] {
            ok(&["park", name])?;
            if is_cold {
                image::drop_caches()?;
            }
            one(asker, name, if is_cold { &mut cold } else { &mut warm })?;
            if is_cold {
                image::drop_caches()?;
            }
            let t = image::rebuild_reference(&names, len, scratch.path())?;
            if is_cold { rebuild_cold.push(t.as_secs_f64()) } else { rebuild_warm.push(t.as_secs_f64()) }
        }
        say(&format!(
            "{} of {} pairs: warm ready {:.3} s, cold ready {:.3} s (medians so far)",
            i + 1,
            o.samples,
            warm.ready.percentile(50.0).unwrap_or(0.0),
            cold.ready.percentile(50.0).unwrap_or(0.0)
        ));
    }
    let mut baseline = Map::new();
    rebuild_warm.report("reassembly", "_s", &mut baseline);
    rebuild_cold.report("reassembly_cold", "_s", &mut baseline);
    baseline.insert("method".into(), json!("whole memory rebuilt from 4 MiB chunks named by SHA-256, each checked, before the VM could start; starting it is not included"));
    let ratio =
        |a: &Samples, b: &Samples| a.percentile(95.0).zip(b.percentile(95.0)).map(|(a, b)| (a / b * 100.0).round() / 100.0);
    let figures = json!({
        "bench": "resume", "engine": session["engine"], "profile": session["profile"], "samples": o.samples, "memory_mib": o.memory, "memory_in_use_bytes": in_use,
        "warm": warm.report(), "cold": cold.report(), "baseline": baseline,
        "baseline_over_ready": { "warm": ratio(&rebuild_warm, &warm.ready), "cold": ratio(&rebuild_cold, &cold.ready) },
        "measured": "ready: `ks wake` from start to end; exec: until a following `ks exec true` ended, process starts included; first_instruction: reported by the VMM from its request to the first exit that the guest caused (kvm) or to running (qemu)",
        "conditions": report::conditions()?,
    });
    println!("{figures}");
    Ok(())
}

fn one(asker: &Asker, name: &str, into: &mut Kind) -> Result<()> {
    let t = Instant::now();
    ok(&["wake", name])?;
    into.ready.push(t.elapsed().as_secs_f64());
    ok(&["exec", name, "--", "true"])?;
    into.exec.push(t.elapsed().as_secs_f64());
    let stats = asker.get(&format!("/v1/sessions/{name}/stats"))?;
    if let Some(us) = stats["first_exit_us"].as_f64() {
        into.first.push(us / 1e6);
    }
    Ok(())
}
