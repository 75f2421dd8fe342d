//! What a thread of each kind can and cannot do in the jail, tried for real: `ks-vmm … --jail-probe KIND:ACTION`.
//!
//! The process enters the jail as always; then one thread of that kind tries the action. It prints one line: what
//! happened, or nothing when the filter ended the process (exit code [`super::jail::trap::EXIT_CODE`], a line in vmm.log).
#![expect(unsafe_code, reason = "raw system calls, because the point is what the kernel answers")]

use ks_vmm_core::confine::{self, Kind};
use std::str::FromStr;

/// What to try, and as what.
#[derive(Debug, Clone)]
pub struct Probe {
    kind: Kind,
    action: Action,
}

#[derive(Debug, Clone, Copy)]
enum Action {
    /// Nothing: prints the jail's words.
    Words,
    OpenPasswd,
    OpenRoot,
    SocketInet,
    Execve,
    Ptrace,
    MapExecutable,
    Signal,
    Handler,
    Fork,
    Mount,
}

const ACTIONS: [(&str, Action); 11] = [
    ("words", Action::Words),
    ("open-passwd", Action::OpenPasswd),
    ("open-root", Action::OpenRoot),
    ("socket", Action::SocketInet),
    ("execve", Action::Execve),
    ("ptrace", Action::Ptrace),
    ("map-executable", Action::MapExecutable),
    ("signal", Action::Signal),
    ("handler", Action::Handler),
    ("fork", Action::Fork),
    ("mount", Action::Mount),
];

impl FromStr for Probe {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        let (kind, action) = s.split_once(':').ok_or("KIND:ACTION is needed")?;
        let kind = Kind::ALL.into_iter().find(|k| k.name() == kind).ok_or_else(|| format!("no kind {kind:?}"))?;
        let action = ACTIONS.into_iter().find(|(n, _)| *n == action).ok_or_else(|| format!("no action {action:?}"))?.1;
        Ok(Self { kind, action })
    }
}

impl Probe {
    /// Tries it; returns the exit code.
    pub fn run(&self, words: &[String]) -> i32 {
        let (kind, action) = (self.kind, self.action);
        if matches!(action, Action::Words) {
            println!("{}", words.join(", "));
        }
        let tried = std::thread::spawn(move || {
            confine::enter(kind);
            attempt(action)
        });
        match tried.join() {
            Ok(line) => println!("{}: {line}", kind.name()),
            Err(_) => println!("{}: the thread panicked", kind.name()),
        }
        0
    }
}

fn answer(r: libc::c_long) -> String {
    if r >= 0 { "it worked".to_owned() } else { std::io::Error::last_os_error().to_string() }
}

fn attempt(action: Action) -> String {
    let null = std::ptr::null::<libc::c_void>();
    let path = |p: &std::ffi::CStr| p.as_ptr();
    // SAFETY: each call gets pointers to constant strings or null, and changes nothing that Rust relies on: what
    // succeeds is a new descriptor, a new mapping, or another process that leaves at once.
    unsafe {
        match action {
            Action::Words => "alive".to_owned(),
            Action::OpenPasswd => answer(libc::syscall(libc::SYS_openat, libc::AT_FDCWD, path(c"/etc/passwd"), libc::O_RDONLY)),
            Action::OpenRoot => {
                answer(libc::syscall(libc::SYS_openat, libc::AT_FDCWD, path(c"/proc/1/root/etc"), libc::O_RDONLY))
            }
            Action::SocketInet => answer(libc::syscall(libc::SYS_socket, libc::AF_INET, libc::SOCK_STREAM, 0)),
            Action::Execve => answer(libc::syscall(libc::SYS_execve, path(c"/bin/true"), null, null)),
            Action::Ptrace => answer(libc::syscall(libc::SYS_ptrace, libc::PTRACE_ATTACH, 1, 0, 0)),
            Action::MapExecutable => {
                let (prot, flags) = (libc::PROT_READ | libc::PROT_EXEC, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
                answer(libc::syscall(libc::SYS_mmap, 0, 4096, prot, flags, -1, 0))
            }
            Action::Signal => answer(libc::syscall(libc::SYS_kill, -1, 0)),
            Action::Handler => answer(libc::syscall(libc::SYS_rt_sigaction, libc::SIGSYS, null, null, 8)),
            Action::Fork => {
                let r = libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0);
                if r == 0 {
                    libc::_exit(0);
                }
                answer(r)
            }
            Action::Mount => answer(libc::syscall(libc::SYS_mount, null, path(c"/"), null, libc::MS_REMOUNT, null)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probes_are_named_by_kind_and_action() {
        let p: Probe = "vcpu:execve".parse().unwrap();
        assert!(p.kind == Kind::Vcpu && matches!(p.action, Action::Execve));
        for bad in ["vcpu", "nobody:execve", "vcpu:dance"] {
            assert!(bad.parse::<Probe>().is_err(), "{bad}");
        }
    }
}
