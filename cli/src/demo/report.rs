//! Dated reports: one JSON file for programs and one text for people, with the conditions of the run.

use super::drive;
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::path::PathBuf;

/// What the run depends on: host, engine, versions.
pub fn conditions() -> Result<Value> {
    let node = drive::json(&["doctor"]).unwrap_or(Value::Null);
    let read = |p: &str| std::fs::read_to_string(p).unwrap_or_default();
    let model = read("/proc/cpuinfo")
        .lines()
        .find_map(|l| l.strip_prefix("model name").map(|r| r.trim_start_matches([' ', '\t', ':']).to_owned()));
    let memory = read("/proc/meminfo").lines().find_map(|l| l.strip_prefix("MemTotal:").map(|r| r.trim().to_owned()));
    Ok(json!({
        "cpus": std::thread::available_parallelism().map_or(0, usize::from),
        "cpu_model": model,
        "memory": memory,
        "host_kernel": read("/proc/sys/kernel/osrelease").trim(),
        "software_kvm": std::path::Path::new("/sys/module/kvm_pvm").exists(),
        "ks_version": env!("CARGO_PKG_VERSION"),
        "node": node,
    }))
}

/// Writes `NAME-UNIXSECONDS.json` and `.txt`; returns the text's path.
pub fn write(name: &str, figures: &Value, text: &str) -> Result<PathBuf> {
    let dir = reports_dir();
    std::fs::create_dir_all(&dir).with_context(|| format!("making {}", dir.display()))?;
    let secs = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let whole =
        json!({ "schema": format!("ks.report.{name}.v1"), "unix_s": secs, "conditions": conditions()?, "figures": figures });
    std::fs::write(dir.join(format!("{name}-{secs}.json")), serde_json::to_vec_pretty(&whole)?).context("writing the report")?;
    let path = dir.join(format!("{name}-{secs}.txt"));
    std::fs::write(&path, text).context("writing the report")?;
    Ok(path)
}

fn reports_dir() -> PathBuf {
    let var = |n: &str| std::env::var_os(n).map(PathBuf::from).filter(|p| p.is_absolute());
    var("KS_HOME")
        .or_else(|| var("XDG_STATE_HOME").map(|p| p.join("keepstate")))
        .or_else(|| var("HOME").map(|p| p.join(".local/state/keepstate")))
        .unwrap_or_else(std::env::temp_dir)
        .join("reports")
}
