//! What can be checked of this machine without a node: `ks doctor` before `ks up`.

use super::daemon;
use ks_proto::guest::Check;
use rustix::fs::{Access, access, statvfs};
use std::path::Path;

const DISK_WANTED: u64 = 4 << 30;

fn check(name: &str, got: Result<String, (String, &str)>) -> Check {
    match got {
        Ok(detail) => Check { name: name.into(), ok: true, detail, fix: String::new() },
        Err((detail, fix)) => Check { name: name.into(), ok: false, detail, fix: fix.into() },
    }
}

/// All of them; the node itself is the caller's to ask.
pub fn all(data_dir: &Path) -> Vec<Check> {
    vec![
        check("kvm", kvm()),
        check(
            "userfaultfd",
            device(
                "/dev/userfaultfd",
                "let your user open it, or set the sysctl vm.unprivileged_userfaultfd=1; without it restores read all memory first",
            ),
        ),
        check("qemu", qemu()),
        check("disk", disk(data_dir)),
        check(
            "programs",
            daemon::program()
                .map(|p| format!("{} is there", p.display()))
                .map_err(|f| (f.error.why, "install all programs in one folder, or set KS_LIBEXEC to it")),
        ),
    ]
}

fn device(path: &str, fix: &'static str) -> Result<String, (String, &'static str)> {
    match access(path, Access::READ_OK | Access::WRITE_OK) {
        Ok(()) => Ok(format!("{path} can be opened")),
        Err(e) => Err((format!("{path}: {e}"), fix)),
    }
}

fn kvm() -> Result<String, (String, &'static str)> {
    let seen = device("/dev/kvm", "load the kvm module or join the group kvm; without it sessions run on qemu, which is slower")?;
    let soft = Path::new("/sys/module/kvm_pvm").exists();
    Ok(if soft { format!("{seen}; software KVM, so `auto` means qemu here") } else { seen })
}

fn qemu() -> Result<String, (String, &'static str)> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|d| d.join("qemu-system-x86_64")).find(|p| access(p, Access::EXEC_OK).is_ok());
    found.map(|p| format!("{} is there", p.display())).ok_or((
        "qemu-system-x86_64 is not in PATH".into(),
        "install it (Debian: apt-get install qemu-system-x86); it is needed where there is no hardware KVM",
    ))
}

fn disk(data_dir: &Path) -> Result<String, (String, &'static str)> {
    let fix = "free some disk, or set KS_HOME to a folder on another";
    let there = data_dir.ancestors().find(|p| p.exists()).unwrap_or(Path::new("/"));
    let v = statvfs(there).map_err(|e| (format!("{}: {e}", there.display()), fix))?;
    let free = v.f_bavail.saturating_mul(v.f_frsize);
    let said = format!("{} free at {}", crate::human::mib(free), there.display());
    if free >= DISK_WANTED { Ok(said) } else { Err((said, fix)) }
}
