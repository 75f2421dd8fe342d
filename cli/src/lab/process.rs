//! The processes of one node, and what is done to them: SIGKILL, SIGSTOP, SIGCONT. Found by what they are (the node's
//! folder on their command line, its namespace, their parents), never by name alone: others may run nodes here too.

use super::Lab;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Some of a node's processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// ksd and its supervisor.
    Daemon,
    /// ks-vmm with all below it, and its qemu.
    Machines,
    /// Everything.
    All,
}

#[derive(Debug)]
struct Process {
    parent: i32,
    name: String,
    words: String,
    zombie: bool,
}

fn table() -> BTreeMap<i32, Process> {
    let mut all = BTreeMap::new();
    for e in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = e.file_name().to_str().and_then(|n| n.parse::<i32>().ok()) else { continue };
        // A process that ends meanwhile is not one any more.
        let Ok(stat) = std::fs::read_to_string(e.path().join("stat")) else { continue };
        let Some((head, tail)) = stat.rsplit_once(") ") else { continue };
        let mut fields = tail.split(' ');
        let zombie = fields.next() == Some("Z");
        let parent = fields.next().and_then(|p| p.parse().ok()).unwrap_or(0);
        let name = head.split_once('(').map_or("", |h| h.1).to_owned();
        let words = std::fs::read(e.path().join("cmdline")).unwrap_or_default();
        let words = String::from_utf8_lossy(&words).replace('\0', " ");
        all.insert(pid, Process { parent, name, words, zombie });
    }
    all
}

/// Is the node's folder one of the words, or the beginning of one?
fn names(words: &str, home: &Path) -> bool {
    let home = home.display().to_string();
    words.split([' ', '=', ',', ':']).any(|w| w == home || w.strip_prefix(&home).is_some_and(|rest| rest.starts_with('/')))
}

impl Lab {
    /// Process ids of a part of machine `i`, and nobody else's.
    pub fn process_ids(&self, i: usize, part: Part) -> Vec<i32> {
        let all = table();
        let me = std::process::id().cast_signed();
        // A `ks` call of ours on that machine is not the machine.
        let ours = |p: &Process| matches!(p.name.as_str(), "ks" | "timeout" | "nsenter" | "bash" | "sh" | "ip");
        let mut found: BTreeSet<i32> = self.net().map(|n| n.processes(i)).unwrap_or_default().into_iter().collect();
        found.extend(all.iter().filter(|(_, p)| names(&p.words, &self.machines[i].home)).map(|(pid, _)| *pid));
        found.retain(|pid| *pid != me && all.get(pid).is_some_and(|p| !ours(p)));
        loop {
            let more: Vec<i32> =
                all.iter().filter(|(pid, p)| found.contains(&p.parent) && !found.contains(pid)).map(|(pid, _)| *pid).collect();
            if more.is_empty() {
                break;
            }
            found.extend(more);
        }
        let daemon = |p: &Process| p.name.starts_with("ksd") || p.name.starts_with("tokio-");
        found
            .into_iter()
            .filter(|pid| {
                all.get(pid).is_some_and(|p| {
                    !p.zombie
                        && match part {
                            Part::All => true,
                            Part::Daemon => daemon(p),
                            Part::Machines => !daemon(p),
                        }
                })
            })
            .collect()
    }
    fn signal(&self, i: usize, part: Part, name: &str) -> usize {
        let all: Vec<String> = self.process_ids(i, part).iter().map(ToString::to_string).collect();
        if !all.is_empty() {
            // Some may have ended since; those that are left are counted below.
            let _ = Command::new("kill").arg(name).args(&all).stderr(Stdio::null()).status();
        }
        all.len()
    }
    /// SIGKILL to a part of machine `i`, until nothing of it is left; how many there were at first.
    pub fn kill(&self, i: usize, part: Part) -> usize {
        let first = self.signal(i, part, "-KILL");
        let until = Instant::now() + Duration::from_secs(10);
        while !self.process_ids(i, part).is_empty() && Instant::now() < until {
            self.signal(i, part, "-KILL");
            std::thread::park_timeout(Duration::from_millis(5));
        }
        first
    }
    /// SIGSTOP to a part of machine `i`; how many.
    pub fn stop(&self, i: usize, part: Part) -> usize {
        self.signal(i, part, "-STOP")
    }
    /// SIGCONT to all of machine `i`.
    pub fn thaw(&self, i: usize) -> usize {
        self.signal(i, Part::All, "-CONT")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_named_whole_or_by_what_is_below_it() {
        let home = Path::new("/tmp/lab/n1");
        assert!(names("ksd --data-dir /tmp/lab/n1", home) && names("ks-vmm --run-dir /tmp/lab/n1/run/a", home));
        assert!(names("qemu -chardev socket,path=/tmp/lab/n1/x", home));
        assert!(!names("ksd --data-dir /tmp/lab/n10", home) && !names("vi /tmp/lab/n", home));
    }
}
