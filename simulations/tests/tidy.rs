//! The structure of the tree, checked: floors, file sizes, headers, and that the maps in docs/ tell the truth.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("simulations/ lies in the root").to_path_buf()
}

fn files(dir: &Path, ext: &str, out: &mut Vec<PathBuf>) {
    for e in fs::read_dir(dir).expect("a folder of the tree is readable").flatten() {
        let p = e.path();
        let name = e.file_name();
        if name == "target" || name.to_string_lossy().starts_with('.') {
            continue;
        }
        if p.is_dir() {
            files(&p, ext, out);
        } else if p.extension().is_some_and(|x| x == ext) {
            out.push(p);
        }
    }
}

fn rust_files() -> Vec<PathBuf> {
    let mut v = Vec::new();
    files(&root(), "rs", &mut v);
    assert!(v.len() > 20, "the walk found only {} files: it looks in the wrong place", v.len());
    v
}

/// Lines of the file that are not in a trailing `#[cfg(test)]` module.
fn lines_without_tests(text: &str) -> usize {
    text.lines().take_while(|l| *l != "#[cfg(test)]").count()
}

#[test]
fn every_file_opens_with_a_header_and_stays_small() {
    let mut bad = Vec::new();
    for p in rust_files() {
        let text = fs::read_to_string(&p).expect("source is UTF-8");
        let rel = p.strip_prefix(root()).expect("below the root").display().to_string();
        if !text.starts_with("//!") && !text.starts_with("#!") {
            bad.push(format!("{rel}: no //! header"));
        }
        let n = lines_without_tests(&text);
        if n > 1000 {
            bad.push(format!("{rel}: {n} lines without tests, the most is 1,000; split it by what it owns"));
        }
    }
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

/// Which of our crates each crate may link, by floor (docs/ARCHITECTURE.md).
fn may_link() -> BTreeMap<&'static str, Vec<&'static str>> {
    BTreeMap::from([
        ("ks-proto", vec![]),
        ("ks-raft", vec!["ks-proto"]),
        ("ks-blobs", vec!["ks-proto"]),
        ("ks-gateway", vec!["ks-proto"]),
        ("ks-vmm-core", vec!["ks-proto"]),
        ("ks-vmm-kvm", vec!["ks-proto", "ks-vmm-core"]),
        ("ks-vmm", vec!["ks-proto", "ks-vmm-core", "ks-vmm-kvm"]),
        ("ks-vmm-shim", vec![]),
        ("ks-relay", vec!["ks-proto"]),
        ("ks-guest", vec!["ks-proto", "ks-relay"]),
        ("ks-image", vec![]),
        ("ks-net", vec!["ks-proto"]),
        ("ks-bulk", vec!["ks-proto", "ks-blobs"]),
        ("ks-fleet", vec!["ks-proto", "ks-raft"]),
        ("ks-node", vec!["ks-proto", "ks-raft", "ks-blobs", "ks-gateway", "ks-net", "ks-bulk", "ks-fleet"]),
        ("ks-cli", vec!["ks-proto"]),
        ("ks-gwd", vec!["ks-proto", "ks-gateway"]),
        ("ks-test-provider", vec![]),
        ("ks-gateway-bench", vec!["ks-proto", "ks-relay", "ks-test-provider"]),
        ("ks-simulations", vec!["ks-proto", "ks-raft", "ks-blobs", "ks-gateway", "ks-fleet"]),
    ])
}

#[test]
fn crates_link_only_downward() {
    let allowed = may_link();
    let mut manifests = Vec::new();
    files(&root(), "toml", &mut manifests);
    let mut seen = BTreeSet::new();
    for m in manifests.into_iter().filter(|m| m.ends_with("Cargo.toml") && *m != root().join("Cargo.toml")) {
        let text = fs::read_to_string(&m).expect("a manifest is UTF-8");
        let name = text
            .lines()
            .find_map(|l| l.strip_prefix("name = \""))
            .map(|l| l.trim_end_matches('"'))
            .expect("a package has a name")
            .to_owned();
        let links = allowed
            .get(name.as_str())
            .unwrap_or_else(|| panic!("{name} is not on any floor: add it to the map and to this test"));
        let mut in_deps = false;
        for line in text.lines() {
            if line.starts_with('[') {
                in_deps = line == "[dependencies]";
            }
            if !in_deps || !line.starts_with("ks-") {
                continue;
            }
            let dep = line.split(['.', ' ', '=']).next().unwrap_or_default();
            assert!(links.contains(&dep), "{name} links {dep}, which is not below it");
        }
        seen.insert(name);
    }
    let known: BTreeSet<String> = allowed.keys().map(|s| (*s).to_owned()).collect();
    assert_eq!(seen, known, "the floors in this test and the crates on disk differ");
}

#[test]
fn every_path_in_the_map_exists() {
    let doc = fs::read_to_string(root().join("docs/ARCHITECTURE.md")).expect("the map is there");
    let mut checked = 0;
    for word in doc.split('`').skip(1).step_by(2) {
        let looks_like_path =
            word.contains('/') && word.chars().all(|c| c.is_ascii_alphanumeric() || "/._-".contains(c)) && !word.starts_with('/');
        if looks_like_path {
            assert!(root().join(word).exists(), "docs/ARCHITECTURE.md names {word}, which is not there");
            checked += 1;
        }
    }
    assert!(checked >= 15, "only {checked} paths found in the map: it says too little, or this test reads it wrongly");
}

#[test]
fn every_promise_names_tests_that_exist() {
    let doc = fs::read_to_string(root().join("docs/invariants.md")).expect("the list of promises is there");
    let source: String = rust_files().iter().map(|p| fs::read_to_string(p).expect("source is UTF-8")).collect();
    for promise in [
        "ONE-INSTANT",
        "NO-TORN",
        "NO-ROT",
        "ONE-OWNER",
        "FENCED",
        "DURABLE-MEANS-PEERS",
        "BOUGHT-ONCE",
        "LEDGER-ADDS-UP",
        "NAMED-ONLY",
        "KEY-OUTSIDE",
        "FORKS-DIFFER",
        "RECOVERS",
    ] {
        assert!(doc.contains(&format!("## {promise}")), "docs/invariants.md does not list {promise}");
    }
    let mut checked = 0;
    for line in doc.lines() {
        let Some(rest) = line.trim().strip_prefix("- test `") else { continue };
        let name = rest.split('`').next().unwrap_or_default().rsplit("::").next().unwrap_or_default();
        assert!(source.contains(&format!("fn {name}(")), "docs/invariants.md names the test {name}, which is not there");
        checked += 1;
    }
    assert!(checked >= 10, "only {checked} tests named");
}
