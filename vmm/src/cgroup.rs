//! Limits for one VM (its ks-vmm and its engine's process) through cgroups, version 1 or 2, as far as this host lets
//! us: best effort, and said.

use std::path::{Path, PathBuf};

const MOUNT: &str = "/sys/fs/cgroup";
const PREFIX: &str = "ks-vmm-";
/// Ours, in version 1: its owner may remove what is in it without any capability, which the hierarchy's own root refuses.
const FOLDER: &str = "keepstate";
/// Memory of QEMU beside the guest's: code cache (see `qemu::command`), heap, libraries.
const ENGINE_BYTES: u64 = 768 << 20;
/// Memory of ks-vmm beside the guest's and the copy that a checkpoint makes of what changed: caches, plan, packs.
const VMM_BYTES: u64 = 512 << 20;
/// Tasks beside the vCPUs: ks-vmm's threads, QEMU's workers, and room.
const TASKS: u64 = 256;
/// Processors beside the vCPUs: for paging, for storing a checkpoint.
const CPUS: u64 = 2;
/// Share of the disk, where 100 is what others have.
const IO_WEIGHT: u64 = 50;

/// What one VM may use.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Bytes.
    pub memory: u64,
    /// Tasks.
    pub pids: u64,
    /// Whole processors.
    pub cpus: u64,
}

impl Limits {
    /// For a guest of this shape. Its memory counts twice: a checkpoint may have to copy all of it aside.
    pub fn of(memory_bytes: u64, vcpus: u16) -> Self {
        let memory = memory_bytes.saturating_mul(2).saturating_add(ENGINE_BYTES + VMM_BYTES);
        Self { memory, pids: TASKS + u64::from(vcpus), cpus: u64::from(vcpus) + CPUS }
    }
}

/// One controller's folder and what to write there.
struct Wanted {
    word: &'static str,
    dir: PathBuf,
    settings: Vec<(&'static str, String)>,
    /// Names of the one setting that does not exist everywhere; the first that is there is written.
    io: Option<(&'static [&'static str], String)>,
}

/// The folders that [`make`] may make for `name`, from this process's cgroups.
pub fn places(name: &str) -> Vec<PathBuf> {
    let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    plan(&own, name, &Limits::of(0, 0)).into_iter().map(|w| w.dir).collect()
}

/// Puts a process into the folders of [`make`].
pub fn add(dirs: &[PathBuf], pid: i32) {
    for dir in dirs {
        if let Err(e) = std::fs::write(dir.join("cgroup.procs"), pid.to_string()) {
            tracing::warn!("cgroup {}: {e}", dir.display());
        }
    }
}

/// Makes the folders; returns those that hold a limit, and words for all.
pub fn make(name: &str, limits: &Limits) -> (Vec<PathBuf>, Vec<String>) {
    let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let (mut dirs, mut words) = (Vec::new(), Vec::new());
    for w in plan(&own, name, limits) {
        if let Some(parent) = w.dir.parent() {
            sweep(parent);
        }
        match apply(&w) {
            Ok(io) => {
                words.push(w.word.to_owned());
                words.extend(io);
                dirs.push(w.dir);
            }
            Err(e) => {
                let _ = std::fs::remove_dir(&w.dir);
                words.push(format!("missing:{} ({e})", w.word));
            }
        }
    }
    if dirs.is_empty() && words.is_empty() {
        words.push("missing:cgroup (no memory, cpu, pids or io controller found)".to_owned());
    }
    (dirs, words)
}

/// From /proc/self/cgroup: version 1 lines name their controllers; version 2 is the line `0::PATH`.
fn plan(own: &str, name: &str, limits: &Limits) -> Vec<Wanted> {
    let mut out = Vec::new();
    let folder = format!("{PREFIX}{name}");
    let quota = (limits.cpus * 100_000).to_string();
    for line in own.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else { continue };
        let path = path.trim_start_matches('/');
        for (controller, word, settings) in [
            ("memory", "cgroup-memory", vec![("memory.limit_in_bytes", limits.memory.to_string())]),
            ("pids", "cgroup-pids", vec![("pids.max", limits.pids.to_string())]),
            ("cpu", "cgroup-cpu", vec![("cpu.cfs_period_us", "100000".to_owned()), ("cpu.cfs_quota_us", quota.clone())]),
        ] {
            if controllers.split(',').any(|c| c == controller) {
                let dir = Path::new(MOUNT).join(controller).join(path).join(FOLDER).join(&folder);
                out.push(Wanted { word, dir, settings, io: None });
            }
        }
        if controllers.split(',').any(|c| c == "blkio") {
            let io: &[&str] = &["blkio.weight", "blkio.bfq.weight"];
            let dir = Path::new(MOUNT).join("blkio").join(path).join(FOLDER).join(&folder);
            out.push(Wanted { word: "cgroup-io", dir, settings: vec![], io: Some((io, IO_WEIGHT.to_string())) });
        }
    }
    if out.is_empty() && own.lines().any(|l| l.starts_with("0::")) {
        let path = own.lines().find_map(|l| l.strip_prefix("0::/")).unwrap_or("");
        // A group with processes cannot hand controllers to children, so ours is a sibling of our own.
        let parent = Path::new(MOUNT).join(path).parent().map_or_else(|| PathBuf::from(MOUNT), Path::to_path_buf);
        let settings = vec![
            ("memory.max", limits.memory.to_string()),
            ("pids.max", limits.pids.to_string()),
            ("cpu.max", format!("{quota} 100000")),
        ];
        let io: &[&str] = &["io.weight", "io.bfq.weight"];
        let io = Some((io, IO_WEIGHT.to_string()));
        out.push(Wanted { word: "cgroup2", dir: parent.join(&folder), settings, io });
    }
    out
}

/// Makes the folder and writes the settings; some words when the share of the disk is another matter than the rest.
fn apply(w: &Wanted) -> std::io::Result<Option<String>> {
    std::fs::create_dir_all(&w.dir)?;
    w.settings.iter().try_for_each(|(file, value)| std::fs::write(w.dir.join(file), value))?;
    let Some((names, value)) = &w.io else { return Ok(None) };
    let Some(file) = names.iter().map(|n| w.dir.join(n)).find(|p| p.exists()) else {
        let why = std::io::Error::other("this host has no weights for disks");
        return if w.settings.is_empty() { Err(why) } else { Ok(Some(format!("missing:cgroup-io ({why})"))) };
    };
    match std::fs::write(&file, value) {
        Err(e) if w.settings.is_empty() => Err(e),
        Err(e) => Ok(Some(format!("missing:cgroup-io ({e})"))),
        Ok(()) => Ok((!w.settings.is_empty()).then(|| "cgroup-io".to_owned())),
    }
}

/// Removes what runs that were killed left behind: groups named by a process that is no more.
fn sweep(parent: &Path) {
    for entry in std::fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|n| n.strip_prefix(PREFIX)).and_then(|n| n.parse::<u32>().ok());
        if pid.is_some_and(|p| !Path::new("/proc").join(p.to_string()).exists()) {
            let _ = std::fs::remove_dir(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { memory: 1 << 30, pids: 9, cpus: 2 };

    fn show(own: &str) -> Vec<String> {
        plan(own, "7", &LIMITS).iter().map(|w| format!("{} {} {:?}", w.word, w.dir.display(), w.settings)).collect()
    }

    #[test]
    fn version_1_has_a_folder_per_controller_and_version_2_one_beside_ours() {
        assert_eq!(
            show("8:pids:/\n4:memory:/a/b\n2:cpuacct:/\n1:cpu,x:/c\n0::/\n"),
            [
                r#"cgroup-pids /sys/fs/cgroup/pids/keepstate/ks-vmm-7 [("pids.max", "9")]"#,
                r#"cgroup-memory /sys/fs/cgroup/memory/a/b/keepstate/ks-vmm-7 [("memory.limit_in_bytes", "1073741824")]"#,
                r#"cgroup-cpu /sys/fs/cgroup/cpu/c/keepstate/ks-vmm-7 [("cpu.cfs_period_us", "100000"), ("cpu.cfs_quota_us", "200000")]"#,
            ]
        );
        assert_eq!(
            show("0::/user.slice/ks.service\n"),
            [
                r#"cgroup2 /sys/fs/cgroup/user.slice/ks-vmm-7 [("memory.max", "1073741824"), ("pids.max", "9"), ("cpu.max", "200000 100000")]"#
            ]
        );
        assert!(show("junk").is_empty());
    }
}
