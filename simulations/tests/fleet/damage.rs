//! Rot on the disks of a fleet: repaired from a peer, or refused by name.

use crate::harness::{begin, checkpoint, durable, fleet, remove, sh};
use crate::lab::{Lab, json, ok, shown};
use anyhow::{Context, Result, ensure};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn walk(dir: &Path, out: &mut BTreeSet<PathBuf>) {
    for e in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let p = e.path();
        if e.file_type().is_ok_and(|t| t.is_dir()) {
            walk(&p, out);
        } else if p.extension().is_some_and(|x| x == "pack") {
            out.insert(p);
        }
    }
}

fn packs(lab: &Lab) -> BTreeSet<PathBuf> {
    let mut all = BTreeSet::new();
    lab.others(&[]).iter().for_each(|i| walk(&lab.machines[*i].home, &mut all));
    all
}

/// One bit in each page of a file.
fn damage(path: &Path) -> Result<()> {
    let mut bytes = std::fs::read(path).with_context(|| format!("reading {}", path.display()))?;
    let end = bytes.len().saturating_sub(4096);
    (64..end).step_by(4096).for_each(|at| bytes[at] ^= 0x10);
    std::fs::write(path, bytes).with_context(|| format!("damaging {}", path.display()))
}

/// A stopped session with three megabytes that only its last checkpoint has; that one's number and its packs, wherever.
fn prepare(lab: &Lab, name: &str) -> Result<(u64, Vec<PathBuf>, String)> {
    begin(lab, name, 0)?;
    durable(lab, name)?;
    let before = packs(lab);
    let sum = sh(lab, name, "head -c 3000000 /dev/urandom > /workspace/blob; sync; sha256sum < /workspace/blob")?;
    let number = durable(lab, name)?;
    let new: Vec<PathBuf> = packs(lab).difference(&before).cloned().collect();
    ensure!(new.len() >= 2, "two holders have new packs: {new:?}");
    ok(lab.anywhere(), &["stop", name])?;
    Ok((number, new, sum))
}

#[test]
fn no_rot_a_damaged_copy_is_mended_from_a_peer() {
    let Some(lab) = fleet() else { return };
    let mended = || -> Result<()> {
        let (number, new, sum) = prepare(&lab, "mend")?;
        let home = &lab.machines[lab.owner("mend")?].home;
        let own: Vec<&PathBuf> = new.iter().filter(|p| p.starts_with(home)).collect();
        ensure!(!own.is_empty(), "the owner has none of {new:?}");
        own.iter().try_for_each(|p| damage(p))?;
        ok(lab.anywhere(), &["restore", &format!("mend@c{number}"), "--verify"])?;
        ensure!(sh(&lab, "mend", "sha256sum < /workspace/blob")? == sum, "other bytes");
        remove(&lab, "mend")
    };
    mended().unwrap_or_else(|e| panic!("{e:#}"));
}

#[test]
fn no_rot_on_all_holders_is_refused_by_name() {
    let Some(lab) = fleet() else { return };
    let refused = || -> Result<()> {
        let (number, new, _) = prepare(&lab, "gone")?;
        new.iter().try_for_each(|p| damage(p))?;
        let o = lab.anywhere().args(["--json", "restore", &format!("gone@c{number}"), "--verify"]).output()?;
        ensure!(!o.status.success(), "a damaged checkpoint must not start: {}", shown(&o));
        ensure!(String::from_utf8_lossy(&o.stdout).contains("corrupt"), "{}", shown(&o));
        checkpoint(&lab, "gone", number)?;
        ensure!(json(lab.anywhere(), &["show", "gone"])?["state"] != "running");
        remove(&lab, "gone")
    };
    refused().unwrap_or_else(|e| panic!("{e:#}"));
}
