//! What people type: exit codes, exact bytes, wrong names, and files in and out.

use crate::harness::{node, show};
use std::io::Write;
use std::process::Stdio;

#[test]
fn exec_is_byte_exact_and_passes_codes_and_eof() {
    let Some(n) = node() else { return };
    n.run("ex", &["sleep", "infinity"]);
    let all: Vec<u8> = (0..=255u8).cycle().take(300_000).collect();
    let mut c =
        n.command().args(["exec", "ex", "--", "cat"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("ks starts");
    let mut stdin = c.stdin.take().expect("piped");
    let input = all.clone();
    let writer = std::thread::spawn(move || stdin.write_all(&input));
    let out = c.wait_with_output().expect("ks ends");
    writer.join().expect("the writer ends").expect("all input was taken");
    assert!(out.status.success());
    assert_eq!(out.stdout, all, "bytes out equal bytes in");
    for (line, code) in [("exit 7", 7), ("kill -TERM $$", 143), ("echo err >&2; exit 1", 1)] {
        assert_eq!(n.ks(&["exec", "ex", "--", "sh", "-c", line]).status.code(), Some(code), "{line}");
    }
    let split = n.ks(&["exec", "ex", "--", "sh", "-c", "echo out; echo err >&2"]);
    assert_eq!((split.stdout.as_slice(), split.stderr.as_slice()), (&b"out\n"[..], &b"err\n"[..]));
    assert_eq!(n.ks(&["exec", "ex", "--", "/no/such/program"]).status.code(), Some(127));
    assert_eq!(n.ks(&["exec", "ex", "--", "/etc/passwd"]).status.code(), Some(126));
    assert_eq!(n.ks(&["exec", "ex", "--", "grep", "-q", "no such line", "/etc/passwd"]).status.code(), Some(1));
    assert_eq!(
        n.ks(&["exec", "no-such-session", "--", "true"]).status.code(),
        Some(125),
        "not the same as a grep without a match"
    );
    n.remove("ex");
}

#[test]
fn files_go_in_and_out_whole() {
    let Some(n) = node() else { return };
    let dir = tempfile::tempdir().expect("a scratch folder");
    let tree = dir.path().join("tree");
    std::fs::create_dir_all(tree.join("sub")).expect("made");
    std::fs::write(tree.join("sub/a.bin"), (0..100_000u32).flat_map(u32::to_le_bytes).collect::<Vec<u8>>()).expect("written");
    std::fs::write(tree.join(".gitignore"), "skipped\n").expect("written");
    std::fs::write(tree.join("skipped"), "x").expect("written");
    std::os::unix::fs::symlink("/etc/passwd", tree.join("link")).expect("linked");
    let o = n
        .command()
        .args(["run", "--name", "syn", "--memory", "512", "--cadence", "0", "-d", "--sync"])
        .arg(&tree)
        .args(["--", "sleep", "infinity"])
        .output()
        .expect("ks starts");
    assert!(o.status.success(), "{}", show(&o));
    n.wait_for("syn", "running");
    assert_eq!(n.sh("syn", "readlink /workspace/tree/link"), "/etc/passwd", "link text is copied, never followed");
    assert_eq!(n.sh("syn", "stat -c %s /workspace/tree/sub/a.bin"), "400000");
    n.ok(&["cp", "syn:/workspace/tree/sub/a.bin", &dir.path().join("back.bin").display().to_string()]);
    assert_eq!(
        std::fs::read(dir.path().join("back.bin")).expect("came back"),
        std::fs::read(tree.join("sub/a.bin")).expect("is there")
    );
    n.remove("syn");
}

#[test]
fn wrong_input_gets_an_answer_that_helps() {
    let Some(n) = node() else { return };
    let o = n.ks(&["chekpoint", "x"]);
    assert_eq!(o.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&o.stderr).contains("checkpoint"), "a suggestion: {}", show(&o));
    assert_eq!(n.ks(&["show", "nobody"]).status.code(), Some(125));
    n.run("dup", &["sleep", "infinity"]);
    let o = n.ks(&["run", "--name", "dup", "-d", "--", "true"]);
    assert!(
        !o.status.success() && String::from_utf8_lossy(&o.stderr).contains("attach"),
        "a taken name offers attach: {}",
        show(&o)
    );
    let o = n.ks(&["restore", "dup@c99"]);
    assert!(!o.status.success() && String::from_utf8_lossy(&o.stderr).contains("c99"), "{}", show(&o));
    n.remove("dup");
}

/// Figures are for benchmarks, not for tests; that each of them still runs to its last line is for this one.
#[test]
fn every_benchmark_of_one_node_runs_to_its_last_line() {
    let Some(n) = node() else { return };
    for (args, fields) in [
        (&["soak", "--checkpoints", "2", "--memory", "512"][..], &["/dedup_ratio", "/baseline/memory_4mib_sha256_bytes"][..]),
        (&["checkpoint", "--samples", "2", "--dirty", "16", "--memory", "512"], &["/pause_p95_s", "/baseline/full_copy_p95_s"]),
        (
            &["resume", "--samples", "1", "--used", "32", "--memory", "512"],
            &["/warm/ready_p95_s", "/cold/exec_p95_s", "/baseline/reassembly_p95_s"],
        ),
        (&["start", "--samples", "1", "--fork-rounds", "1", "--memory", "512"], &["/ready_p95_s", "/fork8_exec_s"]),
    ] {
        let mut all = vec!["bench"];
        all.extend(args);
        let out = n.ok(&all);
        let v: serde_json::Value = serde_json::from_str(out.lines().last().unwrap_or_default()).expect("JSON on the last line");
        for f in fields {
            assert!(v.pointer(f).and_then(serde_json::Value::as_f64).is_some_and(|x| x > 0.0), "{f} of {args:?}: {v:#}");
        }
    }
}
