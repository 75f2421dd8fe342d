//! The jail of ks-vmm, seen from outside in /proc and tried from inside, for both engines.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

#[allow(dead_code, reason = "each test program uses its part of the bench")]
mod common;

use common::node::Store;
use common::{Shape, Vm, children, image, start, until};
use ks_proto::control::{PROTOCOL, VmmReply, VmmRequest};
use ks_proto::manifest::EngineKind;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

const UID: u32 = 64_321;
const NAMESPACES: [&str; 5] = ["net", "pid", "mnt", "ipc", "uts"];

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A kernel that the kvm engine can start here, or None with a loud line.
fn kvm_kernel() -> Option<PathBuf> {
    if let Err(e) = std::fs::File::options().read(true).write(true).open("/dev/kvm") {
        eprintln!("skipped: no /dev/kvm ({e})");
        return None;
    }
    let home = std::env::var_os("HOME").map(PathBuf::from).unwrap_or_default();
    let cached = home.join(".cache/keepstate/soft-kernel/current/vmlinux");
    let kernel = std::env::var_os("KS_TEST_KERNEL").map_or(cached, PathBuf::from);
    if kernel.exists() {
        return Some(kernel);
    }
    eprintln!("skipped: no guest kernel at {} (set KS_TEST_KERNEL)", kernel.display());
    None
}

fn shapes() -> Vec<Shape> {
    let mut out = Vec::new();
    for uid in [Some(UID), None] {
        let args: Vec<String> = uid.map(|u| vec!["--jail-uid".to_owned(), u.to_string()]).unwrap_or_default();
        if image::get().is_some() {
            out.push(Shape { args: args.clone(), ..Shape::new(EngineKind::Qemu) });
        }
        if let Some(kernel) = kvm_kernel() {
            out.push(Shape { args, kernel: Some(kernel), ..Shape::new(EngineKind::Kvm) });
        }
    }
    out
}

/// None once the thread is gone.
fn status(path: &Path) -> Option<Vec<(String, String)>> {
    let text = std::fs::read_to_string(path.join("status")).ok()?;
    let words = text.lines().filter_map(|l| l.split_once(":\t")).map(|(k, v)| (k.to_owned(), v.trim().to_owned()));
    Some(words.collect())
}

fn field(status: &[(String, String)], name: &str) -> String {
    status.iter().find(|(k, _)| k == name).map(|(_, v)| v.clone()).unwrap_or_default()
}

fn thread_names(pid: i32) -> Vec<String> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    tasks.filter_map(|t| Some(std::fs::read_to_string(t.path().join("comm")).ok()?.trim().to_owned())).collect()
}

/// Checks every thread of a process.
fn check_threads(pid: i32, uid: Option<u32>) {
    for task in std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten() {
        let Some(s) = status(&task.path()) else { continue };
        let name = field(&s, "Name");
        for caps in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            assert_eq!(field(&s, caps), "0000000000000000", "{caps} of {name}");
        }
        assert_eq!(field(&s, "NoNewPrivs"), "1", "{name}");
        assert_eq!(field(&s, "Seccomp"), "2", "{name}");
        let own = uid.unwrap_or(0);
        assert_eq!(field(&s, "Uid"), format!("{own}\t{own}\t{own}\t{own}"), "{name}");
        assert_eq!(field(&s, "Gid"), format!("{own}\t{own}\t{own}\t{own}"), "{name}");
        let narrow = ["ks-vcpu", "ks-pager", "ks-fetch", "ks-prefetch", "ks-disk", "ks-console", "ks-channel", "ks-lease"];
        if narrow.iter().any(|n| name.starts_with(n)) {
            // It takes it as its first step, which may still be to come.
            until(&format!("{name} has a filter of its own kind"), || {
                let Some(s) = status(&task.path()) else { return Some(()) };
                (field(&s, "Seccomp_filters").parse::<u32>().unwrap() >= 3).then_some(())
            });
        }
    }
}

fn check_namespaces(pid: i32) {
    for ns in NAMESPACES {
        let own = std::fs::read_link(format!("/proc/self/ns/{ns}")).unwrap();
        assert_ne!(std::fs::read_link(format!("/proc/{pid}/ns/{ns}")).unwrap(), own, "{ns}");
    }
}

/// What a process has open must be what it was given or made.
fn check_descriptors(pid: i32, run_dir: &Path, engine: EngineKind) {
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten() {
        let Ok(target) = std::fs::read_link(entry.path()) else { continue };
        let shown = target.display().to_string();
        let made = ["socket:", "anon_inode:", "pipe:", "/memfd:", "/dev/null", "/dev/userfaultfd"];
        let own = target.starts_with(run_dir) || shown.starts_with("/run/") || shown.ends_with("/pagemap");
        // The test's own packs, kernel and initramfs, handed over; and what this test inherits from its caller.
        let handed = shown.contains(" (deleted)") || entry.file_name().to_str().is_some_and(|n| n.len() == 1 && n < "3");
        let kvm = shown == "/dev/kvm" && engine == EngineKind::Kvm || shown.ends_with("/vmlinux");
        assert!(made.iter().any(|m| shown.starts_with(m)) || own || handed || kvm, "{shown} is open");
    }
}

/// The cgroups of a VM that this test started.
fn groups(keeper: i32) -> Vec<PathBuf> {
    ks_vmm::cgroup::places(&keeper.to_string()).into_iter().filter(|d| d.exists()).collect()
}

fn jail_words(vm: &Vm) -> Vec<String> {
    match vm.ask(VmmRequest::Hello { protocol: PROTOCOL }) {
        Ok(VmmReply::Hello { jail, .. }) => jail,
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_thread_of_both_engines_is_jailed() {
    if !is_root() {
        return eprintln!("skipped: the whole jail needs root");
    }
    // A file that this process would leave open in what it starts.
    let leak = tempfile::NamedTempFile::new().unwrap();
    rustix::io::fcntl_setfd(leak.as_file(), rustix::io::FdFlags::empty()).unwrap();
    for shape in shapes() {
        let uid = shape.args.get(1).map(|_| UID);
        let vm = Vm::boot(&Store::new(), &shape);
        let (keeper, jailed) = (vm.process.id() as i32, vm.jailed_pid());
        // A thread that has just begun still has the main thread's name.
        let wanted = if shape.engine == EngineKind::Kvm { "ks-vcpu0" } else { "ks-disk" };
        until("every thread has begun", || {
            let names = thread_names(jailed);
            let has = |name: &str| names.iter().any(|n| n == name);
            (has(wanted) && has("ks-pager") && names.iter().filter(|n| *n == "ks-vmm").count() == 1).then_some(())
        });
        check_threads(jailed, uid);
        check_namespaces(jailed);
        check_descriptors(jailed, &vm.run_dir(), shape.engine);
        let mut root: Vec<_> =
            std::fs::read_dir(format!("/proc/{jailed}/root")).unwrap().map(|e| e.unwrap().file_name()).collect();
        root.sort();
        assert_eq!(root, ["proc", "run"]);
        // The keeper stays ksd's user, and can do nothing with it.
        check_threads(keeper, None);
        let words = jail_words(&vm);
        println!("{:?} {words:?}", shape.engine);
        let of_vmm = |w: &str| if shape.engine == EngineKind::Kvm { w.to_owned() } else { format!("vmm-{w}") };
        for word in
            ["pid-namespace", "mount-namespace", "no-network", "no-capabilities", "no-new-privileges", "seccomp-per-thread"]
        {
            assert!(words.contains(&of_vmm(word)), "{word} in {words:?}");
        }
        match uid {
            Some(u) => assert!(words.contains(&of_vmm(&format!("uid={u}"))), "{words:?}"),
            None => assert!(words.iter().any(|w| w.starts_with("missing:") && w.contains("uid")), "{words:?}"),
        }
        if shape.engine == EngineKind::Qemu {
            let qemu = vm.engine_pid();
            check_threads(qemu, uid);
            check_namespaces(qemu);
            for ns in NAMESPACES {
                let own = std::fs::read_link(format!("/proc/{jailed}/ns/{ns}")).unwrap();
                assert_ne!(std::fs::read_link(format!("/proc/{qemu}/ns/{ns}")).unwrap(), own, "{ns} of QEMU and of ks-vmm");
            }
        }
        let starter_gone = children(jailed)
            .into_iter()
            .all(|p| std::fs::read_to_string(format!("/proc/{p}/comm")).is_ok_and(|c| c.starts_with("qemu")));
        assert!(starter_gone, "nothing with ksd's rights is left");
        assert_eq!(groups(keeper).is_empty(), !words.iter().any(|w| w.starts_with("cgroup")), "{words:?}");
        let mut vm = vm;
        vm.ask(VmmRequest::Stop {}).unwrap();
        assert_eq!(vm.exit_code(), 0);
        assert_eq!(groups(keeper), Vec::<PathBuf>::new(), "the keeper removes them");
    }
}

/// Starts a probe in a fresh run folder; its output and its log.
fn probe(what: &str, args: &[&str], user: Option<u32>) -> (Output, String) {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("ks-vmm");
    std::fs::copy(env!("CARGO_BIN_EXE_ks-vmm"), &program).unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let run = dir.path().join("run");
    std::fs::create_dir(&run).unwrap();
    let mut command = Command::new(&program);
    if let Some(user) = user {
        std::os::unix::process::CommandExt::uid(&mut command, user);
        std::os::unix::fs::chown(&run, Some(user), Some(user)).unwrap();
    }
    command
        .args(["--control-socket".as_ref(), run.join("control").as_os_str(), "--channel-socket".as_ref()])
        .arg(run.join("channel"))
        .args(["--run-dir".as_ref(), run.as_os_str()])
        .args(args)
        .args(["--jail-probe", what])
        .stdin(Stdio::null());
    let out = start(|| command.output());
    assert!(!run.join("control").exists(), "the keeper cleans up");
    (out, std::fs::read_to_string(run.join("vmm.log")).unwrap())
}

#[test]
fn a_forbidden_call_ends_the_process_with_its_name_in_the_log() {
    let forbidden = [
        ("vcpu:open-passwd", "openat"),
        ("vcpu:socket", "socket"),
        ("vcpu:execve", "execve"),
        ("pager:open-passwd", "openat"),
        ("device:open-passwd", "openat"),
        ("device:ptrace", "ptrace"),
        ("device:fork", "clone"),
        ("store:execve", "execve"),
        ("channel:socket", "socket"),
        ("channel:map-executable", "mmap"),
        ("lease:execve", "execve"),
        ("lease:signal", "kill"),
        ("control:execve", "execve"),
        ("control:socket", "socket"),
        ("control:ptrace", "ptrace"),
        ("control:fork", "clone"),
        ("control:mount", "mount"),
        ("control:handler", "rt_sigaction"),
        ("control:map-executable", "mmap"),
    ];
    for (what, call) in forbidden {
        let (out, log) = probe(what, &["--jail-uid", "64321"], None);
        let kind = what.split(':').next().unwrap();
        assert_eq!(out.status.code(), Some(13), "{what}: {out:?}\n{log}");
        assert!(out.stdout.is_empty(), "{what}: {out:?}");
        let line = log.lines().find(|l| l.starts_with("FORBIDDEN")).unwrap_or_else(|| panic!("{what}: {log}"));
        assert!(line.contains(&format!("kind {kind} ")) && line.contains(&format!("({call})")), "{what}: {line}");
    }
}

#[test]
fn who_may_open_files_finds_none_of_the_host() {
    if !is_root() {
        return eprintln!("skipped: a root of its own needs root");
    }
    for kind in ["control", "lease"] {
        for action in ["open-passwd", "open-root"] {
            let (out, log) = probe(&format!("{kind}:{action}"), &["--jail-uid", "64321"], None);
            let said = String::from_utf8_lossy(&out.stdout).into_owned();
            assert_eq!(out.status.code(), Some(0), "{said}{log}");
            assert!(said.contains("No such file") || said.contains("Permission denied"), "{kind}:{action}: {said}");
        }
    }
}

#[test]
fn without_root_the_jail_is_smaller_and_says_so() {
    let user = is_root().then_some(65_534);
    let (out, log) = probe("control:words", &["--jail-uid", "64321"], user);
    let said = String::from_utf8_lossy(&out.stdout).into_owned();
    assert_eq!(out.status.code(), Some(0), "{said}{log}");
    println!("{said}");
    for word in ["no-capabilities", "no-new-privileges", "seccomp-per-thread", "no-core-dumps"] {
        assert!(said.contains(word), "{word}: {said}");
    }
    for word in ["missing:uid (not started as root)", "missing:namespaces (not started as root)"] {
        assert!(said.contains(word), "{word}: {said}");
    }
    for word in ["pid-namespace", "no-network,", "uid=64321"] {
        assert!(!said.contains(word), "{word}: {said}");
    }
    let (out, log) = probe("vcpu:execve", &[], user);
    assert_eq!(out.status.code(), Some(13), "{log}");
}

#[test]
fn without_root_a_guest_runs_checkpoints_and_comes_back() {
    if image::get().is_none() {
        return;
    }
    image::shim();
    let open = tempfile::tempdir().unwrap();
    std::fs::set_permissions(open.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let built = Path::new(env!("CARGO_BIN_EXE_ks-vmm"));
    for name in ["ks-vmm", "libks_vmm_shim.so"] {
        std::fs::copy(built.with_file_name(name), open.path().join(name)).unwrap();
    }
    let mut shape = Shape::new(EngineKind::Qemu);
    shape.program = Some(open.path().join("ks-vmm"));
    shape.user = is_root().then_some(65_534);
    let store = Store::new();
    let vm = Vm::boot(&store, &shape);
    let mut guest = vm.guest();
    assert!(guest.say("ping").starts_with("pong"));
    let memory = guest.say("hash");
    let words = jail_words(&vm);
    println!("{words:?}");
    assert!(words.iter().any(|w| w == "vmm-seccomp-per-thread"), "{words:?}");
    assert!(words.iter().any(|w| w.starts_with("missing:vmm-namespaces")), "{words:?}");
    let (id, _) = vm.checkpoint(None);
    drop(vm);
    let vm = Vm::restore(&store, &shape, id);
    assert_eq!(vm.guest().say("hash"), memory);
}
