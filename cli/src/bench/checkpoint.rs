//! `ks bench checkpoint`: a guest that dirties 256 MiB between checkpoints: pause, time to stored, bytes kept, the VMM's own memory.

use super::figures::Samples;
use super::{Asker, image, in_session};
use crate::demo::drive::{fresh_name, json, ok, say, sh, wait};
use crate::demo::report;
use anyhow::{Context, Result, ensure};
use clap::Args;
use serde_json::{Map, json};
use std::time::Instant;

/// What to run.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// auto, kvm or qemu
    #[arg(long, default_value = "auto")]
    engine: String,
    /// Checkpoints
    #[arg(long, default_value_t = 20)]
    samples: u32,
    /// MiB dirtied before each
    #[arg(long, default_value_t = 256)]
    dirty: u64,
    /// Guest memory, MiB
    #[arg(long, default_value_t = 1024)]
    memory: u64,
    /// Measure the qemu engine's hash scan; the node must have been started with KS_VMM_HASH_SCAN=1
    #[arg(long)]
    fallback: bool,
}

/// Changes every page of a buffer each time it is asked, so that no page is what it was.
fn writer(mib: u64) -> String {
    format!(
        "import os,time\nn={mib}<<20\nb=bytearray(n)\nrow=os.urandom(2048)\nk=0\nwhile True:\n  if os.path.exists('/workspace/ask'):\n    k+=1\n    for o in range(0,n,4096): b[o:o+8]=(k*n+o).to_bytes(8,'little'); b[o+8:o+2056]=row\n    os.remove('/workspace/ask'); open('/workspace/done','w').write(str(k))\n  time.sleep(0.02)"
    )
}

/// Runs the benchmark.
pub fn run(o: &Options, asker: &Asker) -> Result<()> {
    let name = fresh_name("ckpt");
    say(&format!("session {name}: {} MiB dirtied before each of {} checkpoints", o.dirty, o.samples));
    in_session(&name, o.memory, &o.engine, &["python3", "-c", &writer(o.dirty)], || measure(o, asker, &name))
}

fn dirty(name: &str, round: u32) -> Result<()> {
    sh(name, "touch /workspace/ask")?;
    wait("the guest dirties its memory", 120, || {
        Ok((sh(name, "cat /workspace/done 2>/dev/null || true")? == round.to_string()).then_some(()))
    })
}

fn measure(o: &Options, asker: &Asker, name: &str) -> Result<()> {
    let way = asker.get(&format!("/v1/sessions/{name}/stats"))?["dirty_set"].as_str().unwrap_or_default().to_owned();
    let wanted = if o.fallback { "hash-scan" } else { "tracked" };
    ensure!(
        way == wanted,
        "the dirty set of this session is {way:?}, not {wanted:?}: start the node {} KS_VMM_HASH_SCAN=1 and with --engine qemu",
        if o.fallback { "with" } else { "without" }
    );
    dirty(name, 1)?;
    ok(&["checkpoint", name])?;
    let (mut pause, mut total, mut per_mib, mut rss, mut wall) =
        (Samples::default(), Samples::default(), Samples::default(), Samples::default(), Samples::default());
    for i in 0..o.samples {
        dirty(name, i + 2)?;
        let t = Instant::now();
        let c = json(&["checkpoint", name])?;
        wall.push(t.elapsed().as_secs_f64());
        pause.push(c["pause_us"].as_f64().context("pause_us")? / 1e6);
        total.push(c["total_us"].as_f64().context("total_us")? / 1e6);
        per_mib.push(c["stored_bytes"].as_f64().context("stored_bytes")? / o.dirty as f64);
        let stats = asker.get(&format!("/v1/sessions/{name}/stats"))?;
        if let Some(b) = stats["vmm_rss_bytes"].as_f64() {
            rss.push(b / (1 << 20) as f64);
        }
        say(&format!("{} of {}: pause p50 {:.1} ms", i + 1, o.samples, pause.percentile(50.0).unwrap_or(0.0) * 1000.0));
    }
    let session = json(&["show", name])?;
    let memory = image::open(session["vmm_pid"].as_u64().context("a VMM process")?)?;
    let mut copy = Samples::default();
    for _ in 0..3 {
        let t = Instant::now();
        image::store_reference(&memory, tempfile::tempdir().context("a scratch folder")?.path())?;
        copy.push(t.elapsed().as_secs_f64());
    }
    let mut m = Map::new();
    pause.report("pause", "_s", &mut m);
    total.report("stored", "_s", &mut m);
    wall.report("command", "_s", &mut m);
    per_mib.report("bytes_per_dirtied_mib", "", &mut m);
    rss.report("vmm_rss_mib", "", &mut m);
    let mut base = Map::new();
    copy.report("full_copy", "_s", &mut base);
    base.insert("method".into(), json!("all memory in use cut into 4 MiB chunks, SHA-256 named, written to files"));
    m.extend([
        ("bench".to_owned(), json!("checkpoint")),
        ("engine".to_owned(), session["engine"].clone()),
        ("dirty_set".to_owned(), json!(way)),
        ("samples".to_owned(), json!(o.samples)),
        ("dirty_mib".to_owned(), json!(o.dirty)),
        ("memory_mib".to_owned(), json!(o.memory)),
        ("baseline".to_owned(), base.into()),
        ("conditions".to_owned(), report::conditions()?),
    ]);
    println!("{}", serde_json::Value::Object(m));
    Ok(())
}
