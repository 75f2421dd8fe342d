//! The cgroup of the user's processes (cgroup v2): joining it, freezing it, ending what is in it.

use std::{
    fs::{File, OpenOptions},
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

const FREEZE_DEADLINE: Duration = Duration::from_secs(10);

/// One cgroup below the mounted hierarchy.
#[derive(Debug)]
pub struct UserCgroup {
    dir: PathBuf,
}

impl UserCgroup {
    /// Makes `dir` (a directory of a mounted cgroup2) if it is missing.
    pub fn create(dir: &Path) -> io::Result<Self> {
        match std::fs::create_dir(dir) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(e),
            Ok(()) | Err(_) => Ok(Self { dir: dir.to_owned() }),
        }
    }

    /// Opened for a child that writes `0` to join.
    pub fn procs(&self) -> io::Result<OwnedFd> {
        OpenOptions::new().write(true).open(self.dir.join("cgroup.procs")).map(OwnedFd::from)
    }

    /// Whether a freeze was asked for.
    pub fn is_frozen(&self) -> bool {
        std::fs::read(self.dir.join("cgroup.freeze")).is_ok_and(|text| text.starts_with(b"1"))
    }

    /// Freezes all processes and waits until they are; thaws again when that takes too long.
    pub async fn freeze(&self) -> io::Result<()> {
        self.write("cgroup.freeze", b"1")?;
        let deadline = Instant::now() + FREEZE_DEADLINE;
        let mut pause = Duration::from_millis(1);
        while !self.event("frozen")? {
            if Instant::now() > deadline {
                self.thaw()?;
                let why = format!("some process did not freeze within {} s", FREEZE_DEADLINE.as_secs());
                return Err(io::Error::new(io::ErrorKind::TimedOut, why));
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Lets all processes go on.
    pub fn thaw(&self) -> io::Result<()> {
        self.write("cgroup.freeze", b"0")
    }

    /// Whether any process is inside.
    pub fn is_populated(&self) -> bool {
        self.event("populated").unwrap_or(false)
    }

    /// SIGKILL to everything inside.
    pub fn kill(&self) -> io::Result<()> {
        self.write("cgroup.kill", b"1")
    }

    /// Sends signal `number` to every process inside, also in cgroups below.
    pub fn signal_all(&self, number: i32) {
        let mut dirs = vec![self.dir.clone()];
        while let Some(dir) = dirs.pop() {
            for pid in std::fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default().lines() {
                if let Ok(pid) = pid.parse() {
                    // A process that ended meanwhile is no matter.
                    let _ = crate::sys::signal(pid, number);
                }
            }
            let entries = std::fs::read_dir(&dir).into_iter().flatten().flatten();
            dirs.extend(entries.filter(|e| e.file_type().is_ok_and(|t| t.is_dir())).map(|e| e.path()));
        }
    }

    fn event(&self, name: &str) -> io::Result<bool> {
        Ok(parse_event(&std::fs::read_to_string(self.dir.join("cgroup.events"))?, name))
    }

    fn write(&self, name: &str, value: &[u8]) -> io::Result<()> {
        io::Write::write_all(&mut File::options().write(true).open(self.dir.join(name))?, value)
    }
}

fn parse_event(text: &str, name: &str) -> bool {
    text.lines().any(|line| line.strip_prefix(name).is_some_and(|rest| rest.trim() == "1"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_read_by_name() {
        assert!(parse_event("populated 1\nfrozen 0\n", "populated"));
        assert!(!parse_event("populated 1\nfrozen 0\n", "frozen"));
        assert!(!parse_event("", "frozen"));
    }
}
