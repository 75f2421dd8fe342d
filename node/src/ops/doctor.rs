//! Checks of the host, and of a session from inside and outside.

use crate::host::process::libexec;
use crate::node::Node;
use ks_proto::api::{ApiError, DoctorReport, SessionState};
use ks_proto::guest::Check;
use std::sync::Arc;

/// Free bytes below which a checkpoint may fail soon.
const DISK_FREE_MIN: u64 = 2 << 30;

fn check(name: &str, ok: bool, detail: impl Into<String>, fix: &str) -> Check {
    Check { name: name.into(), ok, detail: detail.into(), fix: if ok { String::new() } else { fix.into() } }
}

fn report(checks: Vec<Check>) -> DoctorReport {
    DoctorReport { schema: "ks.doctor.v1".into(), ok: checks.iter().all(|c| c.ok), checks }
}

/// Checks of this host.
pub fn host(node: &Node) -> DoctorReport {
    let f = &node.facts;
    let engine = match &node.engine {
        Ok(e) => check("engine", true, format!("auto is {} ({}): {}", e.engine, e.profile, e.why), ""),
        Err(e) => check("engine", false, e.why.clone(), &e.next),
    };
    // KVM is a must only where it is the engine.
    let needs_kvm = node.engine.as_ref().is_ok_and(|e| e.engine == ks_proto::manifest::EngineKind::Kvm);
    let kvm = match &f.kvm {
        Ok(()) if f.software_kvm => check("kvm", true, "/dev/kvm is usable, in software (kvm_pvm)", ""),
        Ok(()) => check("kvm", true, "/dev/kvm is usable", ""),
        Err(why) => check("kvm", !needs_kvm, why.clone(), "enable virtualization in the firmware; add yourself to the group kvm"),
    };
    let qemu = match &f.qemu {
        Ok((path, version)) => check("qemu", true, format!("{} ({version})", path.display()), ""),
        Err(why) => check("qemu", needs_kvm, why.clone(), "apt-get install qemu-system-x86"),
    };
    let paging = match &f.userfaultfd {
        Ok(()) => check("userfaultfd", true, "/dev/userfaultfd is usable: memory is paged in lazily", ""),
        Err(why) => check(
            "userfaultfd",
            false,
            why.clone(),
            "load the device (Linux 6.1 or newer) and allow ksd to open it: restores are slower without",
        ),
    };
    report(vec![engine, kvm, qemu, paging, disk(node), programs(), jail(node), image(node), store(node)])
}

fn disk(node: &Node) -> Check {
    match rustix::fs::statvfs(&node.layout.root) {
        Ok(s) => {
            let free = s.f_bavail.saturating_mul(s.f_frsize);
            let detail = format!("{} MiB free in {}", free >> 20, node.layout.root.display());
            check("disk", free >= DISK_FREE_MIN, detail, "free space there, or move the data folder with --data-dir")
        }
        Err(e) => check("disk", false, e.to_string(), "check the data folder"),
    }
}

fn programs() -> Check {
    let dir = libexec();
    let missing: Vec<&str> = ["ks-vmm", "ks-image"].into_iter().filter(|p| !dir.join(p).is_file()).collect();
    let detail = if missing.is_empty() {
        format!("all in {}", dir.display())
    } else {
        format!("{} not in {}", missing.join(", "), dir.display())
    };
    check("programs", missing.is_empty(), detail, "install KeepState's programs side by side, or set KS_LIBEXEC")
}

fn jail(node: &Node) -> Check {
    let root = rustix::process::geteuid().is_root();
    let tcg = node.engine.as_ref().is_ok_and(|e| e.profile == "tcg");
    let bound = if tcg { "; QEMU's emulation is no isolation boundary, so the jail is what holds a guest" } else { "" };
    let detail = if root {
        format!(
            "ksd is root: each VM (ks-vmm and QEMU) gets its own uid, namespaces and cgroup, no capabilities, and system call filters{bound}"
        )
    } else {
        format!(
            "ksd is not root: a smaller jail (no capabilities, system call filters; no uid, namespaces or cgroup of its own){bound}"
        )
    };
    // Said plainly, but a small jail is a choice and not a fault.
    check("jail", true, detail, "")
}

fn image(node: &Node) -> Check {
    let state = node.state.read();
    let names: Vec<&str> = state.images.keys().map(String::as_str).collect();
    let detail = if names.is_empty() { "none yet".to_owned() } else { names.join(", ") };
    let wanted = crate::host::image::default_for(node.engine.as_ref().map_or("", |e| e.profile.as_str()));
    let fix =
        if wanted == crate::host::image::SOFT { "ks image build --profile soft" } else { "ks image build (about two minutes)" };
    check("images", state.images.contains_key(wanted), detail, fix)
}

fn store(node: &Node) -> Check {
    let s = node.supply.store.stats();
    let warnings = node.supply.store.warnings();
    let detail = format!("{} MiB in {} packs, {} manifests", s.bytes >> 20, s.packs, s.manifests);
    let detail = if warnings.is_empty() { detail } else { format!("{detail}; {}", warnings.join("; ")) };
    check("store", warnings.is_empty(), detail, "look into store/quarantine in the data folder")
}

/// Checks of one session: state, latest checkpoint, VM and, when it runs, from inside its guest.
///
/// # Errors
/// `not-found`.
pub async fn session(node: &Arc<Node>, name: &str) -> Result<DoctorReport, ApiError> {
    let (record, handle) = node.session(name)?;
    let view = handle.view.borrow().clone();
    let healthy = !matches!(view.state, SessionState::Failed | SessionState::Recovering);
    let state = format!("{} {}", view.state, view.reason).trim().to_owned();
    let mut checks = vec![check("state", healthy, state, "see `ks events`; `ks wake NAME` tries again")];
    let latest =
        record.latest().map(|c| (c.info.number, crate::host::clock::unix_ms().saturating_sub(c.info.created_unix_ms) / 1000));
    let detail = latest.map_or("none yet".to_owned(), |(n, age)| format!("c{n}, {age} s old"));
    let late = record.cadence_s > 0
        && view.state == SessionState::Running
        && latest.is_none_or(|(_, age)| age > record.cadence_s * 3 + 30);
    checks.push(check("checkpoint", !late, detail, "ks checkpoint NAME shows why none is stored"));
    if let Some(vm) = view.vm {
        match vm.stats().await {
            Ok(s) => {
                let detail = format!(
                    "process {}, {} MiB of memory present, {} chunks not yet paged in, jail: {}",
                    vm.pid,
                    s.memory_present_bytes >> 20,
                    s.chunks_missing,
                    if vm.jail.is_empty() { "none".to_owned() } else { vm.jail.join(", ") }
                );
                checks.push(check("vm", true, detail, ""));
            }
            Err(e) => checks.push(check("vm", false, e.why, "ks kill NAME brings it back")),
        }
        match vm.guest.doctor().await {
            Ok(inside) => checks.extend(inside),
            Err(e) => checks.push(check("guest", false, e.why, "ks kill NAME brings it back from its latest checkpoint")),
        }
    }
    Ok(report(checks))
}
