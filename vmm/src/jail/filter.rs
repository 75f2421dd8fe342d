//! Which system calls each kind of thread may make. Tables, their compilation, and putting them on a thread.
//!
//! The main thread takes the filter of [`Kind::Control`], the union of all, before any other thread is there, so every
//! thread has it from its first instruction. Each thread then adds the filter of its kind; the kernel allows what all
//! of a thread's filters allow. No kind may execute programs, open sockets to anywhere, map memory that can be
//! executed, trace, mount, or change its rights. What is not allowed ends the process: [`super::trap`].

use super::trap;
use ks_vmm_core::confine::Kind;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen as Len, SeccompCmpOp as Op, SeccompCondition as Condition, SeccompFilter,
    SeccompRule, TargetArch,
};
use std::collections::BTreeMap;
use std::sync::OnceLock;

/// A system call's number and its libc name.
type Call = (i64, &'static str);

macro_rules! calls {
    ($($name:ident)*) => { &[$((libc::$name, stringify!($name))),*] };
}

/// Memory, locks, time, ending, and the descriptors that a thread was given: every kind.
const EVERY: &[Call] = calls! {
    SYS_read SYS_write SYS_writev SYS_close SYS_futex SYS_exit SYS_exit_group SYS_rt_sigreturn SYS_rt_sigprocmask
    SYS_sigaltstack SYS_munmap SYS_madvise SYS_brk SYS_mremap SYS_clock_gettime SYS_clock_nanosleep SYS_nanosleep
    SYS_sched_yield SYS_sched_getaffinity SYS_gettid SYS_getpid SYS_restart_syscall SYS_rseq SYS_set_robust_list
    SYS_getrandom SYS_lseek SYS_ftruncate SYS_shutdown
};
const VCPU: &[Call] = &[];
const PAGER: &[Call] = calls! { SYS_poll SYS_ppoll SYS_pread64 SYS_fallocate SYS_sendmsg };
const DEVICE: &[Call] = calls! {
    SYS_poll SYS_ppoll SYS_readv SYS_recvfrom SYS_sendto SYS_recvmsg SYS_sendmsg SYS_pread64 SYS_pwrite64 SYS_fallocate
};
const STORE: &[Call] = calls! {
    SYS_pread64 SYS_pwrite64 SYS_fallocate SYS_memfd_create SYS_sendmsg SYS_fstat SYS_newfstatat SYS_statx
};
const CHANNEL: &[Call] = calls! {
    SYS_poll SYS_ppoll SYS_accept4 SYS_recvfrom SYS_sendto SYS_recvmsg SYS_sendmsg
};
const LEASE: &[Call] = calls! {
    SYS_poll SYS_ppoll SYS_timerfd_settime SYS_pidfd_send_signal SYS_openat SYS_getdents64 SYS_fstat SYS_newfstatat
    SYS_statx SYS_sendmsg
};
/// What only the run loop and the node's connections need, beside all of the above.
const CONTROL: &[Call] = calls! {
    SYS_open SYS_waitid SYS_eventfd2 SYS_timerfd_create SYS_setsockopt SYS_getsockopt SYS_unlink SYS_unlinkat SYS_userfaultfd
    SYS_seccomp SYS_prlimit64 SYS_copy_file_range SYS_sendfile
};

/// A few that an attacker would try, for the words of the log.
const FORBIDDEN: &[Call] = calls! {
    SYS_execve SYS_execveat SYS_fork SYS_vfork SYS_clone SYS_clone3 SYS_ptrace SYS_open SYS_openat SYS_openat2 SYS_socket SYS_connect
    SYS_bind SYS_mount SYS_umount2 SYS_setns SYS_unshare SYS_chroot SYS_pivot_root SYS_setuid SYS_setresuid SYS_capset
    SYS_kill SYS_tkill SYS_tgkill SYS_mmap SYS_mprotect SYS_ioctl SYS_prctl SYS_socketpair SYS_process_vm_readv
    SYS_process_vm_writev SYS_bpf SYS_perf_event_open SYS_io_uring_setup SYS_keyctl SYS_rt_sigaction SYS_pidfd_open
    SYS_pidfd_getfd SYS_dup SYS_dup2 SYS_dup3 SYS_pipe2 SYS_rename SYS_access SYS_readlink SYS_fcntl
};

/// The name of a system call as far as the tables know it.
pub fn name_of(number: i64) -> &'static str {
    let tables = [EVERY, PAGER, DEVICE, STORE, CHANNEL, LEASE, CONTROL, FORBIDDEN];
    let found = tables.into_iter().flatten().find(|(n, _)| *n == number);
    found.map_or("unknown", |(_, name)| name.strip_prefix("SYS_").unwrap_or(name))
}

/// (mask, value) of an ioctl's request.
type Request = (u64, u64);
const EXACT: u64 = 0xffff_ffff;
/// Type and number without size and direction.
const NUMBERED: u64 = 0xffff;
/// All of one type.
const TYPED: u64 = 0xff00;

/// KVM_RUN, and the registers that answering an exit on the `soft` profile needs: regs, sregs, translate, xsave, xcrs, events.
const KVM_VCPU: &[Request] = &[
    (NUMBERED, 0xae80),
    (NUMBERED, 0xae81),
    (NUMBERED, 0xae82),
    (NUMBERED, 0xae83),
    (NUMBERED, 0xae85),
    (NUMBERED, 0xaea4),
    (NUMBERED, 0xaea5),
    (NUMBERED, 0xaecf),
    (NUMBERED, 0xaea6),
    (NUMBERED, 0xae9f),
    (NUMBERED, 0xaea0),
];
/// Those of a userfaultfd, and PAGEMAP_SCAN.
const PAGING: &[Request] = &[(TYPED, 0xaa00), (NUMBERED, 0x6610)];
/// FIONBIO.
const SOCKETS: &[Request] = &[(EXACT, 0x5421)];
/// Every KVM request, paging, FIONBIO, TIOCOUTQ.
const BUILDING: &[Request] = &[(TYPED, 0xae00), (TYPED, 0xaa00), (NUMBERED, 0x6610), (EXACT, 0x5421), (EXACT, 0x5411)];

fn table(kind: Kind) -> (Vec<Call>, &'static [Request]) {
    let all = |parts: &[&[Call]]| parts.concat();
    match kind {
        Kind::Vcpu => (all(&[EVERY, VCPU]), KVM_VCPU),
        Kind::Pager => (all(&[EVERY, PAGER]), PAGING),
        Kind::Device => (all(&[EVERY, DEVICE]), &[]),
        Kind::Store => (all(&[EVERY, STORE]), &[]),
        Kind::Channel => (all(&[EVERY, CHANNEL]), SOCKETS),
        Kind::Lease => (all(&[EVERY, LEASE]), &[]),
        Kind::Control => (all(&[EVERY, VCPU, PAGER, DEVICE, STORE, CHANNEL, LEASE, CONTROL]), BUILDING),
    }
}

/// May start threads.
fn starts_threads(kind: Kind) -> bool {
    matches!(kind, Kind::Control | Kind::Store)
}

/// Why a filter could not be made.
#[derive(Debug, thiserror::Error)]
#[error("a system call filter: {0}")]
pub struct FilterError(String);

fn bad(e: impl std::fmt::Display) -> FilterError {
    FilterError(e.to_string())
}

fn when(argument: u8, len: Len, mask: u64, value: u64) -> Result<SeccompRule, FilterError> {
    let condition = Condition::new(argument, len, Op::MaskedEq(mask), value).map_err(bad)?;
    SeccompRule::new(vec![condition]).map_err(bad)
}

/// The rules that look at arguments.
fn rules(kind: Kind, pid: u32) -> Result<BTreeMap<i64, Vec<SeccompRule>>, FilterError> {
    let (calls, requests) = table(kind);
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = calls.into_iter().map(|(n, _)| (n, vec![])).collect();
    let mut add = |call: i64, rule: SeccompRule| rules.entry(call).or_default().push(rule);
    let exec = libc::PROT_EXEC as u64;
    add(libc::SYS_mmap, when(2, Len::Dword, exec, 0)?);
    add(libc::SYS_mprotect, when(2, Len::Dword, exec, 0)?);
    // Kicks a vCPU, or aborts: threads of this process only.
    add(libc::SYS_tgkill, when(0, Len::Dword, EXACT, u64::from(pid))?);
    for option in [libc::PR_SET_NAME, libc::PR_SET_NO_NEW_PRIVS] {
        add(libc::SYS_prctl, when(0, Len::Dword, EXACT, option as u64)?);
    }
    // Asking about a descriptor, and doubling it; no locks, leases or owners of signals.
    for command in [libc::F_GETFD, libc::F_GETFL, libc::F_SETFL, libc::F_DUPFD_CLOEXEC] {
        add(libc::SYS_fcntl, when(1, Len::Dword, EXACT, command as u64)?);
    }
    for (mask, value) in requests {
        add(libc::SYS_ioctl, when(1, Len::Dword, *mask, *value)?);
    }
    if starts_threads(kind) {
        let thread = (libc::CLONE_THREAD | libc::CLONE_VM | libc::CLONE_SIGHAND) as u64;
        add(libc::SYS_clone, when(0, Len::Dword, thread, thread)?);
        // Answered with ENOSYS by the filter below, so that the C library takes clone, whose flags can be seen.
        rules.insert(libc::SYS_clone3, vec![]);
    }
    if kind == Kind::Control {
        let seal = when(1, Len::Dword, EXACT, libc::F_ADD_SEALS as u64)?;
        rules.entry(libc::SYS_fcntl).or_default().push(seal);
        rules.insert(libc::SYS_socketpair, vec![when(0, Len::Dword, EXACT, libc::AF_UNIX as u64)?]);
    }
    Ok(rules)
}

fn program(
    rules: BTreeMap<i64, Vec<SeccompRule>>,
    otherwise: SeccompAction,
    matched: SeccompAction,
) -> Result<BpfProgram, FilterError> {
    let filter = SeccompFilter::new(rules, otherwise, matched, TargetArch::x86_64).map_err(bad)?;
    BpfProgram::try_from(filter).map_err(bad)
}

/// The filters of one process, compiled.
pub struct Filters {
    no_clone3: BpfProgram,
    kinds: BTreeMap<Kind, BpfProgram>,
}

impl Filters {
    /// For the process that has `pid` in its own pid namespace.
    ///
    /// # Errors
    /// If a table is wrong or too long.
    pub fn compile(pid: u32) -> Result<Self, FilterError> {
        let clone3 = BTreeMap::from([(libc::SYS_clone3, vec![])]);
        let no_clone3 = program(clone3, SeccompAction::Allow, SeccompAction::Errno(libc::ENOSYS as u32))?;
        let kinds = Kind::ALL.into_iter().map(|kind| {
            let rules = rules(kind, pid)?;
            Ok((kind, program(rules, SeccompAction::Trap, SeccompAction::Allow)?))
        });
        Ok(Self { no_clone3, kinds: kinds.collect::<Result<_, FilterError>>()? })
    }
}

static FILTERS: OnceLock<Filters> = OnceLock::new();

/// Puts the filter of [`Kind::Control`] on this thread, the only one, and has every later thread add that of its kind.
///
/// # Errors
/// What the kernel refused; nothing is filtered then.
pub fn confine(filters: Filters) -> Result<(), String> {
    seccompiler::apply_filter(&filters.no_clone3).map_err(|e| e.to_string())?;
    let control = filters.kinds.get(&Kind::Control).expect("every kind is compiled");
    seccompiler::apply_filter(control).map_err(|e| e.to_string())?;
    if FILTERS.set(filters).is_err() || !ks_vmm_core::confine::install(on_enter) {
        return Err("filters were installed before".to_owned());
    }
    Ok(())
}

fn on_enter(kind: Kind) {
    trap::this_thread_is(kind);
    // All have the filter of the main thread already.
    if kind == Kind::Control {
        return;
    }
    let Some(filter) = FILTERS.get().and_then(|f| f.kinds.get(&kind)) else { return };
    if let Err(e) = seccompiler::apply_filter(filter) {
        tracing::error!("the filter of a {} thread: {e}; ks-vmm ends", kind.name());
        std::process::exit(trap::EXIT_CODE);
    }
}

/// The keeper's own: wait for its child, tell it to stop, clean up, end.
///
/// # Errors
/// What the kernel refused.
pub fn confine_keeper() -> Result<(), String> {
    const KEEPER: &[Call] = calls! { SYS_poll SYS_ppoll SYS_waitid SYS_unlink SYS_unlinkat SYS_rmdir };
    let compile = || {
        let plain = [EVERY, KEEPER].concat();
        let mut rules: BTreeMap<i64, Vec<SeccompRule>> = plain.into_iter().map(|(n, _)| (n, vec![])).collect();
        let exec = libc::PROT_EXEC as u64;
        rules.insert(libc::SYS_mmap, vec![when(2, Len::Dword, exec, 0)?]);
        rules.insert(libc::SYS_mprotect, vec![when(2, Len::Dword, exec, 0)?]);
        rules.insert(libc::SYS_fcntl, vec![when(1, Len::Dword, EXACT, libc::F_GETFD as u64)?]);
        program(rules, SeccompAction::Trap, SeccompAction::Allow)
    };
    let filter = compile().map_err(|e| e.to_string())?;
    seccompiler::apply_filter(&filter).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_compiles_and_control_allows_all_that_the_others_do() {
        let filters = Filters::compile(7).unwrap();
        assert_eq!(filters.kinds.len(), Kind::ALL.len());
        for (kind, program) in &filters.kinds {
            println!("{}: {} instructions", kind.name(), program.len());
        }
        let control = rules(Kind::Control, 7).unwrap();
        for kind in Kind::ALL {
            for call in rules(kind, 7).unwrap().keys() {
                assert!(control.contains_key(call), "{}: {}", kind.name(), name_of(*call));
            }
        }
    }

    #[test]
    fn no_kind_may_do_what_a_break_out_needs() {
        for kind in Kind::ALL {
            let rules = rules(kind, 7).unwrap();
            for call in [
                libc::SYS_execve,
                libc::SYS_execveat,
                libc::SYS_fork,
                libc::SYS_vfork,
                libc::SYS_socket,
                libc::SYS_connect,
                libc::SYS_bind,
                libc::SYS_ptrace,
                libc::SYS_process_vm_writev,
                libc::SYS_mount,
                libc::SYS_setns,
                libc::SYS_unshare,
                libc::SYS_kill,
                libc::SYS_rt_sigaction,
                libc::SYS_capset,
                libc::SYS_bpf,
                libc::SYS_io_uring_setup,
                libc::SYS_pidfd_open,
                libc::SYS_pidfd_getfd,
            ] {
                assert!(!rules.contains_key(&call), "{} may {}", kind.name(), name_of(call));
            }
            // Those whose arguments decide have rules; an empty list would allow all.
            for call in [libc::SYS_mmap, libc::SYS_mprotect, libc::SYS_tgkill, libc::SYS_prctl] {
                assert!(!rules[&call].is_empty(), "{}: {}", kind.name(), name_of(call));
            }
            for call in [libc::SYS_ioctl, libc::SYS_clone] {
                assert!(rules.get(&call).is_none_or(|r| !r.is_empty()), "{}: {}", kind.name(), name_of(call));
            }
        }
    }

    #[test]
    fn only_those_that_look_at_the_engine_may_open_files() {
        for kind in Kind::ALL {
            let may = rules(kind, 7).unwrap().contains_key(&libc::SYS_openat);
            assert_eq!(may, matches!(kind, Kind::Control | Kind::Lease), "{}", kind.name());
        }
    }

    #[test]
    fn calls_have_names() {
        assert_eq!(name_of(libc::SYS_execve), "execve");
        assert_eq!(name_of(libc::SYS_poll), "poll");
        assert_eq!(name_of(99_999), "unknown");
    }
}
