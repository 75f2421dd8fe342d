//! `ks bench soak`: many checkpoints of an agent-like workload (edit, build, test, commit), and what they cost to keep.

use super::{Asker, image, in_session};
use crate::demo::drive::{fresh_name, json, say, sh};
use crate::demo::report;
use anyhow::{Context, Result};
use clap::Args;
use serde_json::json;
use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// What to run.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// auto, kvm or qemu
    #[arg(long, default_value = "auto")]
    engine: String,
    /// Checkpoints
    #[arg(long, default_value_t = 82)]
    checkpoints: u32,
    /// Guest memory, MiB
    #[arg(long, default_value_t = 1024)]
    memory: u64,
}

const SETUP: &str = "mkdir -p /workspace/app && cd /workspace/app && git init -q . && git config user.name a && git config user.email a@localhost && \
    printf 'int f0(int x){return x;}\\n' > f0.c && printf 'all: app\\napp: $(wildcard *.c)\\n\\tcc -O1 -o app $^\\n' > Makefile && \
    printf '#include <stdio.h>\\nint f0(int);\\nint main(void){printf(\"%%d\\\\n\",f0(41));return 0;}\\n' > main.c && make -s && git add -A && git commit -q -m start";

/// One step of the workload: a new source file, a changed one, a build, a test, a commit.
fn step(i: u32) -> String {
    format!(
        "cd /workspace/app && printf 'int f{i}(int x){{return x+{i};}}\\n' > f{i}.c && printf '/* step {i} */\\nint f0(int x){{return x+{i};}}\\n' > f0.c && \
         make -s && test $(./app) = $((41+{i})) && python3 -c 'import json; json.dump(list(range({i}*100)), open(\"state.json\",\"w\"))' && git add -A && git commit -q -m 'step {i}'"
    )
}

/// Runs the benchmark. The node's store must hold nothing but the image, its golden checkpoint and this session.
pub fn run(o: &Options, asker: &Asker) -> Result<()> {
    let name = fresh_name("soak");
    in_session(&name, o.memory, &o.engine, &["bash"], || measure(o, asker, &name))
}

fn measure(o: &Options, asker: &Asker, name: &str) -> Result<()> {
    sh(name, SETUP)?;
    let data = asker.get("/v1/node")?["data_dir"].as_str().context("the node's data folder")?.to_owned();
    let others = json(&["ls"])?;
    let (mut logical, mut memory_nonzero, mut stored_by_session, mut disk_logical) = (0u64, 0u64, 0u64, 0u64);
    let mut reference = HashMap::new();
    for i in 1..=o.checkpoints {
        sh(name, &step(i))?;
        let c = json(&["checkpoint", name])?;
        let bytes = c["logical_bytes"].as_u64().context("logical_bytes")?;
        logical += bytes;
        stored_by_session += c["stored_bytes"].as_u64().context("stored_bytes")?;
        let pid = json(&["show", name])?["vmm_pid"].as_u64().context("a VMM process")?;
        let memory = image::open(pid)?;
        let nonzero = image::nonzero_bytes(&memory)?;
        memory_nonzero += nonzero;
        // What the checkpoint counted for memory is what the file held at that instant, a moment ago.
        let held = memory.metadata().context("guest memory's size")?.blocks() * 512;
        disk_logical += bytes.saturating_sub(held);
        image::reference_chunks(&memory, &mut reference)?;
        say(&format!(
            "{i} of {}: {} MiB logical so far, {} MiB of new packs",
            o.checkpoints,
            logical >> 20,
            stored_by_session >> 20
        ));
    }
    let store = image::disk_bytes(&Path::new(&data).join("store"));
    let reference_bytes: u64 = reference.values().sum();
    let round = |x: f64| (x * 100.0).round() / 100.0;
    let figures = json!({
        "bench": "soak", "checkpoints": o.checkpoints, "memory_mib": o.memory, "logical_bytes": logical, "disk_logical_bytes": disk_logical, "stored_bytes": store,
        "stored_by_session_bytes": stored_by_session, "dedup_ratio": round(logical as f64 / store as f64),
        "dedup_ratio_nonzero": round((memory_nonzero + disk_logical) as f64 / store as f64),
        "baseline": { "memory_4mib_sha256_bytes": reference_bytes, "memory_nonzero_bytes": memory_nonzero, "memory_ratio": round(memory_nonzero as f64 / reference_bytes as f64),
            "method": "memory of the same instants cut into 4 MiB chunks named by SHA-256, uncompressed; the disk is not counted for it" },
        "stored": "everything in the store folder: packs with their tables, manifests, the image and its golden checkpoint included",
        "other_sessions": others, "engine": json(&["show", name])?["engine"], "conditions": report::conditions()?,
    });
    println!("{figures}");
    Ok(())
}
