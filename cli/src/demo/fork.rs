//! `ks demo fork`: one parent, three children of one checkpoint; what one child writes is absent in the others.

use super::drive::{fresh_name, json, ok, say, sh, shown, wait};
use super::report;
use anyhow::{Result, ensure};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::time::Instant;

/// What must differ between children, and how to read it in the guest.
const OWN: &[(&str, &str)] = &[
    ("entropy", "head -c 16 /dev/urandom | od -An -tx1 | tr -d ' '"),
    ("uuid", "cat /proc/sys/kernel/random/uuid"),
    ("machine id", "cat /etc/machine-id"),
    ("hostname", "hostname"),
];

/// Runs the demonstration; fails when children share what they must not, or miss what they must share.
pub fn run(keep: bool) -> Result<()> {
    let parent = fresh_name("fork");
    say(&format!("session {parent}: a parent with a process that remembers a number"));
    let line = "n=$(od -An -N4 -tu4 /dev/urandom | tr -d ' '); echo $n > /workspace/number; while :; do [ -e /workspace/ask ] && { echo $n > /workspace/answer; rm -f /workspace/ask; }; sleep 0.1; done";
    shown(&["run", "--name", &parent, "--cadence", "0", "--detach", "--", "sh", "-c", line])?;
    let number = wait("the parent's number", 60, || Ok(Some(sh(&parent, "cat /workspace/number")?).filter(|s| !s.is_empty())))?;
    let t = Instant::now();
    shown(&["fork", &parent, "-n", "3"])?;
    let kids: Vec<String> = (1..=3).map(|i| format!("{parent}.{i}")).collect();
    for k in &kids {
        wait(k, 60, || Ok((sh(k, "echo up")? == "up").then_some(())))?;
    }
    let fork_s = t.elapsed().as_secs_f64();
    say(&format!("three children answered after {fork_s:.2} s"));
    sh(&kids[0], "echo only here > /workspace/written-in-a")?;
    let present = kids
        .iter()
        .map(|k| Ok(sh(k, "test -e /workspace/written-in-a && echo yes || echo no")? == "yes"))
        .collect::<Result<Vec<bool>>>()?;
    let isolated =
        present == [true, false, false] && sh(&parent, "test -e /workspace/written-in-a && echo yes || echo no")? == "no";
    let mut remember = true;
    for k in &kids {
        remember &= sh(
            k,
            "touch /workspace/ask; i=0; while [ ! -e /workspace/answer ] && [ $i -lt 100 ]; do i=$((i+1)); sleep 0.1; done; cat /workspace/answer",
        )? == number;
    }
    let mut shared = Vec::new();
    for (what, line) in OWN {
        let values = kids.iter().map(|k| sh(k, line)).collect::<Result<BTreeSet<String>>>()?;
        if values.len() != kids.len() {
            shared.push(*what);
        }
    }
    let tree = json(&["tree", &parent])?;
    let lineage = kids.iter().all(|k| forked_from(&tree, k).is_some_and(|p| p == parent));
    let figures = json!({ "parent": parent, "children": kids, "fork3_exec_s": fork_s, "isolated": isolated, "process_memory_shared_past": remember, "differ": OWN.iter().map(|o| o.0).collect::<Vec<_>>(), "not_different": shared, "lineage_recorded": lineage });
    let mut text = format!("ks demo fork: {parent} and three children\n");
    writeln!(text, "  all three answered            after {fork_s:.2} s")?;
    writeln!(text, "  a file written in A           {}", if isolated { "is absent in B, C and the parent" } else { "LEAKED" })?;
    writeln!(
        text,
        "  the parent's process goes on  {}",
        if remember { "in each child, with its memory" } else { "NOT in every child" }
    )?;
    writeln!(
        text,
        "  entropy, uuid, ids, hostname  {}",
        if shared.is_empty() { "all differ".to_owned() } else { format!("SHARED: {shared:?}") }
    )?;
    writeln!(text, "  lineage                       {}", if lineage { "recorded" } else { "MISSING" })?;
    let path = report::write("demo-fork", &figures, &text)?;
    eprint!("\n{text}");
    eprintln!("report: {}", path.display());
    if !keep {
        for s in kids.iter().chain([&parent]) {
            ok(&["rm", s, "--force"])?;
        }
    }
    ensure!(isolated && remember && shared.is_empty() && lineage, "a promise about forks does not hold: see the report");
    println!("{}", serde_json::to_string(&figures)?);
    Ok(())
}

/// The parent's name that the tree records for session `name`.
fn forked_from(tree: &Value, name: &str) -> Option<String> {
    let sessions = tree["sessions"].as_array()?;
    let s = sessions.iter().map(|s| &s["session"]).find(|s| s["name"] == name)?;
    s["forked_from"]["name"].as_str().map(str::to_owned)
}
