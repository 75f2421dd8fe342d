//! Starts one jailed child: namespaces by clone3, only the descriptors that are handed, another uid, then exec. Also the
//! mounts of a jail's root, for the child and for this process itself.
//!
//! Everything the child needs is prepared before clone3; between clone3 and exec it makes only raw system calls. It
//! dies with the thread that started it (PDEATHSIG, and a look at the parent's pidfd in case that came too late).
#![expect(unsafe_code, reason = "clone3, mount and the steps between clone and exec are raw system calls")]

use std::ffi::{CStr, CString};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::PathBuf;

/// One prepared step of building the child's root.
#[derive(Debug, Clone)]
pub enum MountStep {
    /// Nothing that happens here shows outside.
    Private,
    /// A small tmpfs at this place.
    Tmpfs(CString),
    /// A folder.
    Dir(CString),
    /// An empty file, to bind over.
    File(CString),
    /// A symbolic link: (target, place).
    Link(CString, CString),
    /// (source, place), read-only, no devices unless `devices`.
    Bind { from: CString, to: CString, devices: bool },
    /// (source, place), writable; no programs, no devices.
    Share { from: CString, to: CString },
    /// A proc of the child's own pid namespace, with processes only if `processes`.
    Proc { at: CString, processes: bool },
    /// Make this read-only and the root of everything.
    Enter(CString),
}

/// What to start and in what jail.
pub struct Spawn {
    /// Program file, as seen inside the jail's root.
    pub program: CString,
    /// Arguments with the name first.
    pub args: Vec<CString>,
    /// The whole environment, `KEY=value`.
    pub env: Vec<CString>,
    /// Descriptors that the child gets as 3, 4, 5, … in this order.
    pub fds: Vec<OwnedFd>,
    /// Becomes standard output and error.
    pub log: OwnedFd,
    /// CLONE_NEW* flags.
    pub namespaces: u64,
    /// Steps in the new mount namespace, in order.
    pub mounts: Vec<MountStep>,
    /// Uid and gid to take, dropping all groups. Capabilities are dropped in any case.
    pub uid: Option<u32>,
    /// The child becomes one of this process's parent, not of this process.
    pub for_parent: bool,
    /// (resource, soft and hard limit).
    pub rlimits: Vec<(u32, u64)>,
    /// `cgroup.procs` or `tasks` files that the child's pid is written to before it goes on.
    pub cgroups: Vec<PathBuf>,
}

/// A started child.
#[derive(Debug)]
pub struct Child {
    /// Process id as seen here.
    pub pid: i32,
    /// Readable once it is dead.
    pub pidfd: OwnedFd,
}

/// Why nothing was started.
#[derive(Debug, thiserror::Error)]
#[error("{step}: {}", std::io::Error::from_raw_os_error(*errno))]
pub struct SpawnError {
    /// The step that failed.
    pub step: &'static str,
    /// Why.
    pub errno: i32,
}

/// Numbers of capabilities, with room for new ones; the kernel refuses those that it does not have.
const CAPABILITIES: libc::c_ulong = 64;

/// Descriptors that one child may be handed.
const HANDED_MAX: usize = 64;

/// Names of the child's steps, by the number that it reports.
const STEPS: [&str; 11] = [
    "wait for the parent",
    "private mounts",
    "build the jail's root",
    "enter the jail's root",
    "hand over descriptors",
    "resource limits",
    "take the uid",
    "no new privileges",
    "parent-death signal",
    "look whether the parent lives",
    "start the program",
];

fn last(step: &'static str) -> SpawnError {
    SpawnError { step, errno: std::io::Error::last_os_error().raw_os_error().unwrap_or(0) }
}

fn pipe() -> Result<(OwnedFd, OwnedFd), SpawnError> {
    rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map_err(|e| SpawnError { step: "pipe", errno: e.raw_os_error() })
}

#[repr(C, align(8))]
#[derive(Default)]
struct CloneArgs {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

/// Starts the child; returns once it runs the program or the step that failed is known.
///
/// The calling thread (with `for_parent`: the thread that forked this process) must live as long as the child should.
pub fn spawn(s: &Spawn) -> Result<Child, SpawnError> {
    let (go_read, go_write) = pipe()?;
    let (err_read, err_write) = pipe()?;
    let parent = if s.for_parent { rustix::process::getppid() } else { Some(rustix::process::getpid()) };
    let parent = parent.ok_or(SpawnError { step: "find the parent", errno: libc::ESRCH })?;
    let parent = rustix::process::pidfd_open(parent, rustix::process::PidfdFlags::empty())
        .map_err(|e| SpawnError { step: "pidfd_open", errno: e.raw_os_error() })?;
    let argv = pointers(&s.args);
    let envp = pointers(&s.env);
    let mut pidfd: RawFd = -1;
    let mut args = CloneArgs {
        flags: libc::CLONE_PIDFD as u64 | s.namespaces | if s.for_parent { libc::CLONE_PARENT as u64 } else { 0 },
        pidfd: &raw mut pidfd as u64,
        // With CLONE_PARENT it is this process's own, SIGCHLD.
        exit_signal: if s.for_parent { 0 } else { libc::SIGCHLD as u64 },
        ..CloneArgs::default()
    };
    // SAFETY: without CLONE_VM the child has its own copy of everything, as after fork; it then calls only `child`,
    // which neither allocates nor locks.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw mut args, size_of::<CloneArgs>()) };
    if pid < 0 {
        return Err(last("clone3"));
    }
    if pid == 0 {
        let plan = ChildPlan {
            spawn: s,
            argv: &argv,
            envp: &envp,
            go: go_read.as_raw_fd(),
            errors: err_write.as_raw_fd(),
            parent: parent.as_raw_fd(),
            go_write: go_write.as_raw_fd(),
        };
        child(&plan);
    }
    // SAFETY: clone3 stored a descriptor that nobody else owns.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    drop((go_read, err_write));
    let child = Child { pid: i32::try_from(pid).expect("pids fit 32 bits"), pidfd };
    for file in &s.cgroups {
        if let Err(e) = std::fs::write(file, child.pid.to_string()) {
            tracing::warn!("cgroup {}: {e}", file.display());
        }
    }
    let _ = rustix::io::write(&go_write, b"g");
    let mut report = [0u8; 8];
    let n = loop {
        match rustix::io::read(&err_read, &mut report) {
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => break 0,
            Ok(n) => break n,
        }
    };
    if n == report.len() {
        let word = |i: usize| i32::from_le_bytes([report[i], report[i + 1], report[i + 2], report[i + 3]]);
        let step = usize::try_from(word(0)).ok().and_then(|i| STEPS.get(i)).copied().unwrap_or("start");
        reap(&child);
        return Err(SpawnError { step, errno: word(4) });
    }
    Ok(child)
}

/// Takes `steps` in this process, which has a mount namespace of its own and one thread.
pub fn take_root(steps: &[MountStep]) -> Result<(), SpawnError> {
    for step in steps {
        // SAFETY: every pointer is to a string of `step`; nothing is unmapped or freed, and no other thread runs.
        if let Err(n) = unsafe { mount_step(step) } {
            let step = usize::try_from(n).ok().and_then(|i| STEPS.get(i)).copied().unwrap_or("mount");
            return Err(last(step));
        }
    }
    Ok(())
}

/// Kills and reaps.
pub fn reap(child: &Child) -> Option<rustix::process::WaitIdStatus> {
    use std::os::fd::AsFd;
    let _ = rustix::process::pidfd_send_signal(&child.pidfd, rustix::process::Signal::KILL);
    rustix::process::waitid(rustix::process::WaitId::PidFd(child.pidfd.as_fd()), rustix::process::WaitIdOptions::EXITED)
        .ok()
        .flatten()
}

fn pointers(strings: &[CString]) -> Vec<*const libc::c_char> {
    strings.iter().map(|s| s.as_ptr()).chain([std::ptr::null()]).collect()
}

struct ChildPlan<'a> {
    spawn: &'a Spawn,
    argv: &'a [*const libc::c_char],
    envp: &'a [*const libc::c_char],
    go: RawFd,
    go_write: RawFd,
    errors: RawFd,
    parent: RawFd,
}

/// After clone3: nothing here allocates, locks or returns.
fn child(p: &ChildPlan<'_>) -> ! {
    let fail = |step: i32| -> ! {
        // SAFETY: reads this thread's errno, writes a local buffer, exits.
        unsafe {
            let errno = *libc::__errno_location();
            let mut report = [0u8; 8];
            report[..4].copy_from_slice(&step.to_le_bytes());
            report[4..].copy_from_slice(&errno.to_le_bytes());
            libc::write(p.errors, report.as_ptr().cast(), 8);
            libc::_exit(127)
        }
    };
    // SAFETY: each call gets pointers to live buffers prepared by the parent, or plain numbers.
    unsafe {
        libc::close(p.go_write);
        let mut byte = 0u8;
        if libc::read(p.go, (&raw mut byte).cast(), 1) != 1 {
            fail(0);
        }
        for step in &p.spawn.mounts {
            if let Err(n) = mount_step(step) {
                fail(n);
            }
        }
        let errors = match hand_over(p) {
            Ok(fd) => fd,
            Err(()) => fail(4),
        };
        let fail = |step: i32| -> ! {
            let errno = *libc::__errno_location();
            let mut report = [0u8; 8];
            report[..4].copy_from_slice(&step.to_le_bytes());
            report[4..].copy_from_slice(&errno.to_le_bytes());
            libc::write(errors.0, report.as_ptr().cast(), 8);
            libc::_exit(127)
        };
        for (resource, limit) in &p.spawn.rlimits {
            let l = libc::rlimit { rlim_cur: *limit, rlim_max: *limit };
            if libc::setrlimit(*resource as libc::__rlimit_resource_t, &raw const l) != 0 {
                fail(5);
            }
        }
        // Without these a program that stays root would get everything back at exec.
        for capability in 0..CAPABILITIES {
            libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0);
        }
        if let Some(uid) = p.spawn.uid {
            // Raw calls: the C library's would try to change threads that do not exist here.
            if libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<libc::gid_t>()) != 0
                || libc::syscall(libc::SYS_setresgid, uid, uid, uid) != 0
                || libc::syscall(libc::SYS_setresuid, uid, uid, uid) != 0
            {
                fail(6);
            }
        }
        if libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 {
            fail(7);
        }
        if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) != 0 {
            fail(8);
        }
        let mut look = libc::pollfd { fd: errors.1, events: libc::POLLIN, revents: 0 };
        if libc::poll(&raw mut look, 1, 0) != 0 {
            *libc::__errno_location() = libc::ESRCH;
            fail(9);
        }
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        libc::execve(p.spawn.program.as_ptr(), p.argv.as_ptr(), p.envp.as_ptr());
        fail(10)
    }
}

/// Puts the handed descriptors at 3.., the log at 1 and 2, nothing at 0, and closes the rest on exec. Returns where
/// the error pipe and the parent's pidfd are now.
///
/// # Safety
/// Only between clone3 and exec.
unsafe fn hand_over(p: &ChildPlan<'_>) -> Result<(RawFd, RawFd), ()> {
    const HIGH: RawFd = 400;
    let count = p.spawn.fds.len() as RawFd;
    let check = |r: RawFd| if r < 0 { Err(()) } else { Ok(r) };
    // SAFETY: plain descriptor calls; nothing else runs in this process.
    unsafe {
        // First out of the way, then down, so that no target is a source still needed.
        let errors = check(libc::fcntl(p.errors, libc::F_DUPFD_CLOEXEC, HIGH))?;
        let parent = check(libc::fcntl(p.parent, libc::F_DUPFD_CLOEXEC, HIGH))?;
        let log = check(libc::fcntl(p.spawn.log.as_raw_fd(), libc::F_DUPFD_CLOEXEC, HIGH))?;
        // Wherever there is room: a VMM that serves many packs has hundreds of descriptors open.
        let mut high = [-1; HANDED_MAX];
        if p.spawn.fds.len() > HANDED_MAX {
            *libc::__errno_location() = libc::E2BIG;
            return Err(());
        }
        for (at, fd) in high.iter_mut().zip(&p.spawn.fds) {
            *at = check(libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, HIGH))?;
        }
        for (i, at) in high.iter().take(p.spawn.fds.len()).enumerate() {
            check(libc::dup2(*at, 3 + i as RawFd))?;
        }
        check(libc::dup2(log, 1))?;
        check(libc::dup2(log, 2))?;
        let null = check(libc::open(c"/dev/null".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC))?;
        check(libc::dup2(null, 0))?;
        let rc = libc::syscall(libc::SYS_close_range, 3 + count, u32::MAX, 1u32 << 2);
        if rc != 0 { Err(()) } else { Ok((errors, parent)) }
    }
}

/// # Safety
/// Only in a mount namespace of its own, where nothing else runs in this process.
unsafe fn mount_step(step: &MountStep) -> Result<(), i32> {
    const NONE: *const libc::c_char = std::ptr::null();
    let ok = |rc: i32, step: i32| if rc == 0 { Ok(()) } else { Err(step) };
    let plain = libc::MS_NOSUID | libc::MS_NODEV;
    // SAFETY: every pointer is to a zero-terminated string of `step`, or null where mount(2) allows it.
    unsafe {
        match step {
            MountStep::Private => {
                ok(libc::mount(NONE, c"/".as_ptr(), NONE, libc::MS_REC | libc::MS_PRIVATE, std::ptr::null()), 1)
            }
            MountStep::Tmpfs(at) => {
                let data: &CStr = c"size=1m,mode=755";
                ok(libc::mount(c"ks-jail".as_ptr(), at.as_ptr(), c"tmpfs".as_ptr(), plain, data.as_ptr().cast()), 2)
            }
            MountStep::Dir(at) => ok(libc::mkdir(at.as_ptr(), 0o755), 2),
            MountStep::File(at) => {
                let fd = libc::open(at.as_ptr(), libc::O_CREAT | libc::O_WRONLY | libc::O_CLOEXEC, 0o444);
                ok(if fd < 0 { -1 } else { libc::close(fd) }, 2)
            }
            MountStep::Link(target, at) => ok(libc::symlink(target.as_ptr(), at.as_ptr()), 2),
            MountStep::Bind { from, to, devices } => {
                ok(libc::mount(from.as_ptr(), to.as_ptr(), NONE, libc::MS_BIND, std::ptr::null()), 2)?;
                let flags = libc::MS_BIND | libc::MS_REMOUNT | libc::MS_RDONLY | libc::MS_NOSUID;
                let flags = if *devices { flags } else { flags | libc::MS_NODEV };
                ok(libc::mount(NONE, to.as_ptr(), NONE, flags, std::ptr::null()), 2)
            }
            MountStep::Share { from, to } => {
                ok(libc::mount(from.as_ptr(), to.as_ptr(), NONE, libc::MS_BIND, std::ptr::null()), 2)?;
                let flags = libc::MS_BIND | libc::MS_REMOUNT | libc::MS_NOEXEC | plain;
                ok(libc::mount(NONE, to.as_ptr(), NONE, flags, std::ptr::null()), 2)
            }
            MountStep::Proc { at, processes } => {
                let flags = plain | libc::MS_NOEXEC;
                let data = if *processes { c"subset=pid".as_ptr().cast() } else { std::ptr::null() };
                ok(libc::mount(c"proc".as_ptr(), at.as_ptr(), c"proc".as_ptr(), flags, data), 2)
            }
            MountStep::Enter(at) => {
                ok(libc::mount(NONE, at.as_ptr(), NONE, libc::MS_REMOUNT | libc::MS_RDONLY | plain, std::ptr::null()), 3)?;
                ok(libc::chdir(at.as_ptr()), 3)?;
                ok(libc::syscall(libc::SYS_pivot_root, c".".as_ptr(), c".".as_ptr()) as i32, 3)?;
                ok(libc::umount2(c".".as_ptr(), libc::MNT_DETACH), 3)?;
                ok(libc::chdir(c"/".as_ptr()), 3)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{WaitId, WaitIdOptions, waitid};
    use std::fs::File;
    use std::os::fd::AsFd;

    /// A VMM that serves a session of many packs has many descriptors open: its children get theirs all the same.
    #[test]
    fn a_child_gets_its_descriptors_however_many_the_parent_has_open() {
        rustix::process::setrlimit(
            rustix::process::Resource::Nofile,
            rustix::process::Rlimit {
                current: Some(2048),
                maximum: rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum,
            },
        )
        .unwrap();
        let many: Vec<File> = (0..900).map(|_| File::open("/dev/null").unwrap()).collect();
        let (read, write) = rustix::pipe::pipe().unwrap();
        let text = |s: &str| CString::new(s).unwrap();
        let child = spawn(&Spawn {
            program: text("/bin/sh"),
            args: vec![text("sh"), text("-c"), text("echo through >&4")],
            env: vec![],
            fds: vec![File::open("/dev/null").unwrap().into(), write],
            log: File::open("/dev/null").unwrap().into(),
            namespaces: 0,
            mounts: vec![],
            uid: None,
            for_parent: false,
            rlimits: vec![],
            cgroups: vec![],
        })
        .unwrap();
        waitid(WaitId::PidFd(child.pidfd.as_fd()), WaitIdOptions::EXITED).unwrap();
        let mut said = [0; 16];
        let n = rustix::io::read(&read, &mut said).unwrap();
        assert_eq!(&said[..n], b"through\n");
        drop(many);
    }
}
