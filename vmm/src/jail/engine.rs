//! The jail of an engine's process: what is asked for, what this host allows, and the words that tell both.
//!
//! TCG is no isolation boundary in QEMU's own words, so the child gets as little as the host lets us take away: its own
//! pid, mount, network, ipc and uts namespaces, a root that holds the system's libraries read-only and nothing else,
//! another uid, no new privileges, limits, and only the descriptors that it was handed. What is missing is said.

use crate::spawn::{MountStep, Spawn, SpawnError};
use std::ffi::CString;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

const NOFILE: u64 = 512;
const ALL_NAMESPACES: u64 =
    (libc::CLONE_NEWNS | libc::CLONE_NEWNET | libc::CLONE_NEWPID | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS) as u64;

/// Files of the host that the child must see, and where it sees them.
#[derive(Debug, Clone, Default)]
pub struct Visible {
    /// (file on the host, file in the jail), beside /usr and its links.
    pub files: Vec<(PathBuf, PathBuf)>,
}

impl Visible {
    /// Where `host` is seen in the jail: itself below /usr, else under /ks.
    pub fn add(&mut self, host: &Path) -> PathBuf {
        if host.starts_with("/usr") {
            return host.to_path_buf();
        }
        let inside = Path::new("/ks").join(host.file_name().unwrap_or(host.as_os_str()));
        self.files.push((host.to_path_buf(), inside.clone()));
        inside
    }
}

/// A jail as this host allows it.
#[derive(Debug, Clone)]
pub struct Jail {
    /// What is in force, and `missing:…` for what is not.
    pub words: Vec<String>,
    namespaces: u64,
    mounts: Vec<MountStep>,
    uid: Option<u32>,
    rlimits: Vec<(u32, u64)>,
    rooted: bool,
}

fn c(path: impl AsRef<Path>) -> CString {
    CString::new(path.as_ref().as_os_str().as_bytes()).unwrap_or_default()
}

/// The steps of the new root at `root`, an empty folder.
fn mounts(root: &Path, visible: &Visible) -> Vec<MountStep> {
    let at = |p: &str| c(root.join(p));
    let mut steps = vec![MountStep::Private, MountStep::Tmpfs(c(root))];
    for dir in ["usr", "dev", "proc", "ks"] {
        steps.push(MountStep::Dir(at(dir)));
    }
    steps.push(MountStep::Bind { from: c("/usr"), to: at("usr"), devices: false });
    for name in ["lib", "lib64", "lib32", "bin"] {
        let host = Path::new("/").join(name);
        match std::fs::read_link(&host) {
            Ok(target) => steps.push(MountStep::Link(c(target), at(name))),
            Err(_) if host.is_dir() => {
                steps.push(MountStep::Dir(at(name)));
                steps.push(MountStep::Bind { from: c(&host), to: at(name), devices: false });
            }
            Err(_) => {}
        }
    }
    for dev in ["null", "urandom"] {
        let place = c(root.join("dev").join(dev));
        steps.push(MountStep::File(place.clone()));
        steps.push(MountStep::Bind { from: c(Path::new("/dev").join(dev)), to: place, devices: true });
    }
    for (host, inside) in &visible.files {
        let place = c(root.join(inside.strip_prefix("/").unwrap_or(inside)));
        steps.push(MountStep::File(place.clone()));
        steps.push(MountStep::Bind { from: c(host), to: place, devices: false });
    }
    steps.push(MountStep::Proc { at: at("proc"), processes: false });
    steps.push(MountStep::Enter(c(root)));
    steps
}

impl Jail {
    /// The strongest jail that this host allows, found by trying it with a program that is not there.
    pub fn probe(uid: Option<u32>, run_dir: &Path, visible: &Visible) -> Self {
        let mut missing = Vec::new();
        let root = rustix::process::geteuid().is_root();
        let mut jail = Self {
            words: Vec::new(),
            namespaces: 0,
            mounts: Vec::new(),
            uid: None,
            rlimits: vec![(libc::RLIMIT_CORE, 0), (libc::RLIMIT_NOFILE, NOFILE)],
            rooted: false,
        };
        match uid {
            Some(0) | None => missing.push("uid (none was given)".to_owned()),
            Some(_) if !root => missing.push("uid (not started as root)".to_owned()),
            Some(u) => jail.uid = Some(u),
        }
        let root_dir = run_dir.join("jail");
        let full = Self { namespaces: ALL_NAMESPACES, mounts: mounts(&root_dir, visible), rooted: true, ..jail.clone() };
        let bare = Self { namespaces: ALL_NAMESPACES, ..jail.clone() };
        if !root {
            missing.push("namespaces (not started as root)".to_owned());
        } else if let Err(e) = std::fs::create_dir_all(&root_dir) {
            missing.push(format!("root (cannot make {}: {e})", root_dir.display()));
        } else if let Err(e) = full.works() {
            missing.push(format!("root ({e})"));
            match bare.works() {
                Ok(()) => jail = bare,
                Err(e) => missing.push(format!("namespaces ({e})")),
            }
        } else {
            jail = full;
        }
        jail.words = jail.describe();
        jail.words.extend(missing.into_iter().map(|m| format!("missing:{m}")));
        jail
    }

    fn describe(&self) -> Vec<String> {
        let mut words = Vec::new();
        if let Some(u) = self.uid {
            words.push(format!("uid={u}"));
        }
        for (flag, word) in [
            (libc::CLONE_NEWNS, "mount-namespace"),
            (libc::CLONE_NEWNET, "no-network"),
            (libc::CLONE_NEWPID, "pid-namespace"),
            (libc::CLONE_NEWIPC, "ipc-namespace"),
        ] {
            if self.namespaces & flag as u64 != 0 {
                words.push(word.to_owned());
            }
        }
        if self.rooted {
            words.push("root=usr-read-only".to_owned());
        }
        words.extend(
            ["no-capabilities", "no-new-privileges", "handed-descriptors-only", "rlimits", "parent-death-signal"]
                .map(str::to_owned),
        );
        words
    }

    /// Starts a program that does not exist: every step before exec is taken.
    fn works(&self) -> Result<(), SpawnError> {
        let log = || {
            let no = |e: rustix::io::Errno| SpawnError { step: "open /dev/null", errno: e.raw_os_error() };
            rustix::fs::open("/dev/null", rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::CLOEXEC, rustix::fs::Mode::empty())
                .map_err(no)
        };
        match crate::spawn::spawn(&self.spawn(c("/ks-jail-probe"), vec![], vec![], vec![], log()?)) {
            Err(e) if e.step == "start the program" && e.errno == libc::ENOENT => Ok(()),
            Err(e) => Err(e),
            Ok(child) => {
                crate::spawn::reap(&child);
                Ok(())
            }
        }
    }

    /// True if a root, and with it a pid namespace and a proc of its own, can be had.
    pub fn rooted(&self) -> bool {
        self.rooted
    }
    /// True if it has namespaces.
    pub fn separate(&self) -> bool {
        self.namespaces != 0
    }
    /// The paths by which the child sees files: in the jail's root if there is one.
    pub fn seen<'a>(&self, host: &'a Path, inside: &'a Path) -> &'a Path {
        if self.rooted { inside } else { host }
    }

    /// A start of `program` in this jail.
    pub fn spawn(&self, program: CString, args: Vec<CString>, env: Vec<CString>, fds: Vec<OwnedFd>, log: OwnedFd) -> Spawn {
        Spawn {
            program,
            args,
            env,
            fds,
            log,
            namespaces: self.namespaces,
            mounts: self.mounts.clone(),
            uid: self.uid,
            rlimits: self.rlimits.clone(),
            for_parent: false,
            cgroups: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_below_usr_keep_their_place_and_others_are_bound_into_ks() {
        let mut v = Visible::default();
        assert_eq!(v.add(Path::new("/usr/bin/qemu")), Path::new("/usr/bin/qemu"));
        assert_eq!(v.add(Path::new("/opt/x/shim.so")), Path::new("/ks/shim.so"));
        assert_eq!(v.files.len(), 1);
    }

    #[test]
    fn the_probe_says_what_is_in_force_or_why_not() {
        let dir = tempfile::tempdir().unwrap();
        let jail = Jail::probe(None, dir.path(), &Visible::default());
        assert!(jail.words.iter().any(|w| w == "no-new-privileges"), "{:?}", jail.words);
        assert!(jail.words.iter().any(|w| w.starts_with("missing:uid")), "{:?}", jail.words);
        let isolated = jail.words.iter().any(|w| w == "no-network");
        let said = jail.words.iter().any(|w| w.starts_with("missing:namespaces"));
        assert!(isolated != said, "{:?}", jail.words);
    }
}
