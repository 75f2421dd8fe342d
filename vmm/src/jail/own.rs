//! The jail of ks-vmm itself: its own uid, namespaces, an almost empty root, no capabilities, no new privileges, and a
//! system call filter per kind of thread.
//!
//! [`prepare`] runs in the keeper, with all rights, before the fork. [`enter`] runs in the forked process while it has
//! one thread, and takes the rights away. What could not be had is said in words, as for an engine.

use super::engine::Jail;
use super::{filter, trap};
use crate::spawn::{MountStep, take_root};
use rustix::fs::{Gid, Uid};
use rustix::process::{DumpableBehavior, Resource, Rlimit, Signal};
use rustix::thread::{CapabilitySet, CapabilitySets, UnshareFlags};
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The files of the run folder that the jailed process writes by name.
const LOGS: [&str; 3] = ["console.log", "console.log.old", "qemu.log"];
/// The folder for the disk's scratch layers.
const SCRATCH: &str = "scratch";
/// Where the jailed process sees them.
const INSIDE: &str = "/run";

/// What is to be taken away.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Uid and gid to take; None keeps ksd's.
    pub uid: Option<u32>,
    /// Namespaces and a root of its own, found possible by the probe of an engine's jail.
    pub rooted: bool,
    /// Namespaces only.
    pub separate: bool,
    /// The run folder on the host.
    pub run_dir: PathBuf,
    /// `missing:…` words known before.
    pub missing: Vec<String>,
}

/// Where the process finds its files once it is in its jail.
#[derive(Debug, Clone)]
pub struct Place {
    /// Folder of logs.
    pub logs: PathBuf,
    /// Folder of scratch layers.
    pub scratch: PathBuf,
}

/// Why the jail could not be entered; nothing may run then.
#[derive(Debug, thiserror::Error)]
#[error("the jail of ks-vmm: {step}: {why}")]
pub struct JailError {
    step: &'static str,
    why: String,
}

fn no<E: std::fmt::Display>(step: &'static str) -> impl Fn(E) -> JailError {
    move |e| JailError { step, why: e.to_string() }
}

impl Plan {
    /// As strong as `engine`, the jail that this host was found to allow.
    pub fn like(engine: &Jail, uid: Option<u32>, run_dir: &Path) -> Self {
        let root = rustix::process::geteuid().is_root();
        let missing = engine.words.iter().filter(|w| w.starts_with("missing:")).cloned().collect();
        Self {
            uid: uid.filter(|u| root && *u != 0),
            rooted: engine.rooted(),
            separate: engine.separate(),
            run_dir: run_dir.to_owned(),
            missing,
        }
    }
}

/// Makes the log files and the scratch folder, owned by the uid that the process will have.
pub fn prepare(plan: &Plan) -> std::io::Result<()> {
    let owner = plan.uid.map(|u| (Uid::from_raw(u), Gid::from_raw(u)));
    for name in LOGS {
        let file = std::fs::OpenOptions::new().create(true).append(true).mode(0o600).open(plan.run_dir.join(name))?;
        if let Some((uid, gid)) = owner {
            rustix::fs::fchown(&file, Some(uid), Some(gid))?;
        }
    }
    let scratch = plan.run_dir.join(SCRATCH);
    std::fs::DirBuilder::new().mode(0o700).recursive(true).create(&scratch)?;
    if let Some((uid, gid)) = owner {
        rustix::fs::chown(&scratch, Some(uid), Some(gid))?;
    }
    if plan.rooted {
        std::fs::create_dir_all(plan.run_dir.join("jail"))?;
    }
    Ok(())
}

fn c(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).unwrap_or_default()
}

/// A root that holds the logs, the scratch folder, and a proc with this process and its engine in it.
fn mounts(run_dir: &Path) -> Vec<MountStep> {
    let root = run_dir.join("jail");
    let at = |p: &str| c(&root.join(p));
    let mut steps = vec![MountStep::Private, MountStep::Tmpfs(c(&root)), MountStep::Dir(at("proc")), MountStep::Dir(at("run"))];
    for name in LOGS {
        let place = at(&format!("run/{name}"));
        steps.push(MountStep::File(place.clone()));
        steps.push(MountStep::Share { from: c(&run_dir.join(name)), to: place });
    }
    steps.push(MountStep::Dir(at("run/scratch")));
    steps.push(MountStep::Share { from: c(&run_dir.join(SCRATCH)), to: at("run/scratch") });
    steps.push(MountStep::Proc { at: at("proc"), processes: true });
    steps.push(MountStep::Enter(c(&root)));
    steps
}

/// Takes away what `plan` says, from this process while it has one thread. `log` is the number of the log's descriptor.
///
/// # Errors
/// A step that the probe found possible failed: the process must end.
pub fn enter(plan: &Plan, log: std::os::fd::RawFd) -> Result<(Place, Vec<String>), JailError> {
    let mut flags = UnshareFlags::empty();
    if plan.separate {
        flags |= UnshareFlags::NEWNET | UnshareFlags::NEWIPC | UnshareFlags::NEWUTS;
    }
    if plan.rooted {
        flags |= UnshareFlags::NEWNS;
    }
    if !flags.is_empty() {
        crate::sys::unshare(flags).map_err(no("leave the host's namespaces"))?;
    }
    let mut place = Place { logs: plan.run_dir.clone(), scratch: plan.run_dir.join(SCRATCH) };
    if plan.rooted {
        take_root(&mounts(&plan.run_dir)).map_err(no("take a root of its own"))?;
        place = Place { logs: INSIDE.into(), scratch: Path::new(INSIDE).join(SCRATCH) };
    }
    let none = Rlimit { current: Some(0), maximum: Some(0) };
    rustix::process::setrlimit(Resource::Core, none).map_err(no("forbid core dumps"))?;
    drop_rights(plan.uid)?;
    // After the change of uid, which clears it.
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).map_err(no("die with the keeper"))?;
    let filtered = filters(log);
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    Ok((place, words(plan, &status, &filtered)))
}

/// Uid, groups and capabilities, for ever.
pub fn drop_rights(uid: Option<u32>) -> Result<(), JailError> {
    for capability in CapabilitySet::all().iter() {
        // Refused to those who have none, and for numbers that this kernel does not know.
        let _ = rustix::thread::remove_capability_from_bounding_set(capability);
    }
    if let Some(u) = uid {
        let (uid, gid) = (Uid::from_raw(u), Gid::from_raw(u));
        rustix::thread::set_thread_groups(&[]).map_err(no("drop groups"))?;
        rustix::thread::set_thread_res_gid(gid, gid, gid).map_err(no("take the gid"))?;
        rustix::thread::set_thread_res_uid(uid, uid, uid).map_err(no("take the uid"))?;
    }
    let none = CapabilitySet::empty();
    let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
    rustix::thread::set_capabilities(None, sets).map_err(no("drop capabilities"))?;
    rustix::thread::set_no_new_privs(true).map_err(no("no new privileges"))?;
    // Nobody of the same uid may look into it.
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(no("forbid inspection"))
}

/// Has the libraries do now what they do once and late, by calls that the filters forbid.
fn warm_up() -> std::thread::Result<()> {
    // Else the allocator looks up the number of processors with its ninth arena.
    crate::sys::limit_arenas();
    // The time and the page size come from what the kernel told at start, which is looked up once.
    let _ = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let _ = rustix::param::page_size();
    // With the first thread comes a signal handler; with the first arena that shrinks, a look at the kernel's policy.
    let shrink = || drop(std::hint::black_box((0..32).map(|_| vec![1u8; 64 * 1024]).collect::<Vec<_>>()));
    std::thread::spawn(shrink).join()
}

fn filters(log: std::os::fd::RawFd) -> Result<(), String> {
    warm_up().map_err(|_| "a thread panicked".to_owned())?;
    let filters = filter::Filters::compile(std::process::id()).map_err(|e| e.to_string())?;
    ks_vmm_kvm::prepare_process();
    trap::install(log).map_err(|e| e.to_string())?;
    filter::confine(filters)
}

/// Pure: what is in force, from the plan and /proc/self/status.
fn words(plan: &Plan, status: &str, filtered: &Result<(), String>) -> Vec<String> {
    let field = |name: &str| status.lines().find_map(|l| l.strip_prefix(name)).map(str::trim).unwrap_or_default();
    let mut words = Vec::new();
    if let Some(u) = plan.uid {
        words.push(format!("uid={u}"));
    }
    let of_root = ["mount-namespace", "pid-namespace", "root=run-files-only"].map(|w| (plan.rooted, w));
    let of_separation = ["no-network", "ipc-namespace"].map(|w| (plan.separate, w));
    let shown = |name: &str, wanted: &str| field(name) == wanted;
    let of_status = [
        (shown("CapEff:", "0000000000000000"), "no-capabilities"),
        (shown("NoNewPrivs:", "1"), "no-new-privileges"),
        (shown("Seccomp:", "2"), "seccomp-per-thread"),
        (true, "no-core-dumps"),
        (true, "handed-descriptors-only"),
        (true, "parent-death-signal"),
    ];
    for (holds, word) in of_root.into_iter().chain(of_separation).chain(of_status) {
        if holds {
            words.push(word.to_owned());
        }
    }
    words.extend(plan.missing.iter().cloned());
    if let Err(why) = filtered {
        words.push(format!("missing:seccomp ({why})"));
    }
    for (name, wanted, word) in [("CapEff:", "0000000000000000", "no-capabilities"), ("NoNewPrivs:", "1", "no-new-privileges")] {
        if !shown(name, wanted) {
            words.push(format!("missing:{word} (the kernel shows {})", field(name)));
        }
    }
    words
}

/// The words for people: of the process that runs guest code first, then of ks-vmm where that is another one.
pub fn all_words(own: &[String], engine: Option<&[String]>, cgroup: &[String]) -> Vec<String> {
    let mut out: Vec<String> = Vec::new();
    match engine {
        // The guest runs in this process.
        None => {
            out.push("in-process".to_owned());
            out.extend(own.iter().cloned());
            out.extend(cgroup.iter().cloned());
        }
        Some(engine) => {
            out.extend(engine.iter().cloned());
            out.extend(cgroup.iter().cloned());
            out.extend(own.iter().map(|w| match w.strip_prefix("missing:") {
                Some(m) => format!("missing:vmm-{m}"),
                None => format!("vmm-{w}"),
            }));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(uid: Option<u32>, rooted: bool) -> Plan {
        let missing = if rooted { vec![] } else { vec!["missing:namespaces (not started as root)".to_owned()] };
        Plan { uid, rooted, separate: rooted, run_dir: "/r".into(), missing }
    }
    const FULL: &str = "Name:\tks-vmm\nCapEff:\t0000000000000000\nNoNewPrivs:\t1\nSeccomp:\t2\nSeccomp_filters:\t1\n";

    #[test]
    fn words_say_what_the_kernel_shows_and_what_is_missing() {
        let whole = words(&plan(Some(7), true), FULL, &Ok(()));
        for w in ["uid=7", "mount-namespace", "pid-namespace", "no-network", "no-capabilities", "seccomp-per-thread"] {
            assert!(whole.iter().any(|x| x == w), "{w}: {whole:?}");
        }
        assert!(!whole.iter().any(|w| w.starts_with("missing:")), "{whole:?}");
        let small =
            words(&plan(None, false), "CapEff:\t00000000a80425fb\nNoNewPrivs:\t0\nSeccomp:\t0\n", &Err("no such call".into()));
        for w in ["missing:namespaces", "missing:seccomp (no such call)", "missing:no-capabilities", "missing:no-new-privileges"]
        {
            assert!(small.iter().any(|x| x.starts_with(w)), "{w}: {small:?}");
        }
        assert!(!small.iter().any(|w| w == "seccomp-per-thread" || w == "pid-namespace" || w.starts_with("uid=")), "{small:?}");
    }

    #[test]
    fn the_words_of_the_engine_come_first_and_those_of_ks_vmm_are_marked() {
        let own = ["uid=7".to_owned(), "missing:root (x)".to_owned()];
        let inside = all_words(&own, None, &["cgroup-pids".to_owned()]);
        assert_eq!(inside, ["in-process", "uid=7", "missing:root (x)", "cgroup-pids"]);
        let beside = all_words(&own, Some(&["uid=8".to_owned()]), &["cgroup-pids".to_owned()]);
        assert_eq!(beside, ["uid=8", "cgroup-pids", "vmm-uid=7", "missing:vmm-root (x)"]);
    }
}
