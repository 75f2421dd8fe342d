//! Limits for a child through cgroups, version 1 or 2, as far as this host lets us: best effort, and said.

use crate::jail::Limits;
use std::path::{Path, PathBuf};

const MOUNT: &str = "/sys/fs/cgroup";
const PREFIX: &str = "ks-vmm-";

/// One controller's folder and what to write there.
struct Wanted {
    word: &'static str,
    dir: PathBuf,
    settings: Vec<(&'static str, String)>,
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
            Ok(()) => {
                words.push(w.word.to_owned());
                dirs.push(w.dir);
            }
            Err(e) => {
                let _ = std::fs::remove_dir(&w.dir);
                words.push(format!("missing:{} ({e})", w.word));
            }
        }
    }
    if dirs.is_empty() && words.is_empty() {
        words.push("missing:cgroup (no memory, cpu or pids controller found)".to_owned());
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
                out.push(Wanted { word, dir: Path::new(MOUNT).join(controller).join(path).join(&folder), settings });
            }
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
        out.push(Wanted { word: "cgroup2", dir: parent.join(&folder), settings });
    }
    out
}

fn apply(w: &Wanted) -> std::io::Result<()> {
    std::fs::create_dir_all(&w.dir)?;
    w.settings.iter().try_for_each(|(file, value)| std::fs::write(w.dir.join(file), value))
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
                r#"cgroup-pids /sys/fs/cgroup/pids/ks-vmm-7 [("pids.max", "9")]"#,
                r#"cgroup-memory /sys/fs/cgroup/memory/a/b/ks-vmm-7 [("memory.limit_in_bytes", "1073741824")]"#,
                r#"cgroup-cpu /sys/fs/cgroup/cpu/c/ks-vmm-7 [("cpu.cfs_period_us", "100000"), ("cpu.cfs_quota_us", "200000")]"#,
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
