//! Damage and sudden death: every one ends in a repair or in a refusal that names what is wrong.

use crate::harness::{node, show};
use serde_json::Value;
use std::path::{Path, PathBuf};

fn walk(dir: &Path, out: &mut Vec<PathBuf>) {
    for e in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let p = e.path();
        if p.is_dir() { walk(&p, out) } else { out.push(p) }
    }
}

fn packs(home: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    walk(home, &mut all);
    all.retain(|p| p.extension().is_some_and(|e| e == "pack"));
    all.sort();
    all
}

#[test]
fn no_rot_a_flipped_byte_is_refused_by_name() {
    let Some(n) = node() else { return };
    n.run("rot", &["sleep", "infinity"]);
    n.wait_until("rot", "checkpointed once", |s| !s["last_checkpoint"].is_null());
    let before = packs(&n.home);
    n.sh("rot", "head -c 3000000 /dev/urandom > /workspace/blob; sync; cat /workspace/blob >/dev/null");
    n.ok(&["checkpoint", "rot"]);
    let new: Vec<PathBuf> = packs(&n.home).into_iter().filter(|p| !before.contains(p)).collect();
    assert!(!new.is_empty(), "the checkpoint stored something");
    n.ok(&["stop", "rot"]);
    for p in &new {
        let mut bytes = std::fs::read(p).expect("a pack is readable");
        let step = 4096;
        for at in (64..bytes.len().saturating_sub(4096)).step_by(step) {
            bytes[at] ^= 0x10;
        }
        std::fs::write(p, bytes).expect("damage is written");
    }
    let o = n.ks(&["--json", "restore", "rot@c2", "--verify"]);
    let text = format!("{}{}", String::from_utf8_lossy(&o.stdout), String::from_utf8_lossy(&o.stderr));
    assert!(!o.status.success(), "a damaged checkpoint must not start: {text}");
    assert!(text.contains("corrupt"), "{text}");
    assert!(new.iter().any(|p| text.contains(&*p.file_stem().expect("a name").to_string_lossy())), "the pack is named: {text}");
    let s = n.session("rot");
    assert_ne!(s["state"], "running", "{s}");
    n.remove("rot");
}

#[test]
fn recovers_when_qemu_alone_dies() {
    let Some(n) = node() else { return };
    n.run("qd", &["sleep", "infinity"]);
    let s = n.session("qd");
    if s["engine"] != "qemu" {
        println!("skipped: this host's engine is not qemu");
        n.remove("qd");
        return;
    }
    n.sh("qd", "echo here > /workspace/here");
    n.ok(&["checkpoint", "qd"]);
    let vmm = s["vmm_pid"].as_i64().expect("a pid");
    let children = std::fs::read_to_string(format!("/proc/{vmm}/task/{vmm}/children")).expect("ks-vmm has children");
    let all = descendants(children.split_whitespace().filter_map(|p| p.parse().ok()).collect());
    let qemu = all
        .into_iter()
        .find(|p| std::fs::read_to_string(format!("/proc/{p}/comm")).is_ok_and(|c| c.starts_with("qemu")))
        .expect("qemu runs");
    n.sigkill(qemu);
    n.wait_until("qd", "running again", |s| s["state"] == "running" && !s["last_interruption"].is_null());
    assert_eq!(n.sh("qd", "cat /workspace/here"), "here");
    n.remove("qd");
}

fn descendants(mut todo: Vec<i64>) -> Vec<i64> {
    let mut all = Vec::new();
    while let Some(p) = todo.pop() {
        all.push(p);
        for task in std::fs::read_dir(format!("/proc/{p}/task")).into_iter().flatten().flatten() {
            let kids = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
            todo.extend(kids.split_whitespace().filter_map(|k| k.parse::<i64>().ok()));
        }
    }
    all
}

#[test]
fn ks_vmm_killed_alone_leaves_no_orphan() {
    let Some(n) = node() else { return };
    n.run("orp", &["sleep", "infinity"]);
    n.ok(&["checkpoint", "orp"]);
    let vmm = n.session("orp")["vmm_pid"].as_i64().expect("a pid");
    let kids = descendants(vec![vmm]);
    n.sigkill(vmm);
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    for k in &kids {
        let alive = || std::fs::read_to_string(format!("/proc/{k}/stat")).is_ok_and(|s| !s.contains(") Z "));
        while alive() {
            assert!(std::time::Instant::now() < deadline, "process {k} outlived ks-vmm {vmm}");
            std::thread::park_timeout(std::time::Duration::from_millis(50));
        }
    }
    n.wait_until("orp", "running again", |s| s["state"] == "running" && !s["last_interruption"].is_null());
    n.remove("orp");
}

#[test]
fn a_crash_while_storing_leaves_the_previous_checkpoint() {
    let Some(n) = node() else { return };
    n.run("torn", &["sleep", "infinity"]);
    n.sh("torn", "echo one > /workspace/one");
    n.ok(&["checkpoint", "torn"]);
    for round in 0..3 {
        n.sh("torn", "head -c 40000000 /dev/urandom > /workspace/big");
        let mut c = n
            .command()
            .args(["checkpoint", "torn"])
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .spawn()
            .expect("ks starts");
        std::thread::park_timeout(std::time::Duration::from_millis(40 + 90 * round));
        let ksd = n.ksd_pid();
        let vmm = n.session("torn")["vmm_pid"].as_i64();
        n.sigkill(ksd);
        if let Some(v) = vmm {
            n.sigkill(v);
        }
        let _ = c.wait();
        n.wait_for_new_ksd(ksd);
        n.wait_until("torn", "running again", |s| s["state"] == "running");
        assert_eq!(n.sh("torn", "cat /workspace/one"), "one");
        let listed = n.json(&["checkpoints", "torn"]);
        let rows = listed.as_array().cloned().or_else(|| listed["checkpoints"].as_array().cloned()).unwrap_or_default();
        assert!(!rows.is_empty(), "{listed}");
    }
    let o = n.ks(&["restore", "torn@c2", "--verify"]);
    assert!(o.status.success(), "{}", show(&o));
    n.wait_for("torn", "running");
    assert_eq!(n.sh("torn", "cat /workspace/one"), "one");
    n.remove("torn");
}

#[test]
fn removal_refuses_to_lose_work_silently() {
    let Some(n) = node() else { return };
    n.run("rm1", &["sleep", "infinity"]);
    n.ok(&["checkpoint", "rm1"]);
    let o = n.ks(&["--json", "rm", "rm1"]);
    assert!(!o.status.success(), "a running session is not removed without --force");
    let text = format!("{}{}", String::from_utf8_lossy(&o.stdout), String::from_utf8_lossy(&o.stderr));
    let v: Value = text
        .lines()
        .find_map(|l| serde_json::from_str(l).ok())
        .or_else(|| serde_json::from_str(&text).ok())
        .unwrap_or_else(|| panic!("not JSON: {text}"));
    assert!(v.to_string().contains("running"), "{v}");
    assert_eq!(n.session("rm1")["state"], "running");
    n.remove("rm1");
    assert!(!n.ks(&["show", "rm1"]).status.success());
}
