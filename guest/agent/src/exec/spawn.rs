//! Starting a program: own session, user, cgroup, terminal or pipes.
#![expect(unsafe_code, reason = "code between fork and exec")]

use std::{
    ffi::OsString,
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::process::CommandExt as _,
    },
    path::PathBuf,
    process::Stdio,
};

use rustix::{
    fs::{Mode, OFlags},
    process::{Gid, Pid, Resource, Rlimit, Uid},
    pty::OpenptFlags,
    termios::Winsize,
};

use super::{Account, fds::Fd};

/// Open files that programs may have: soft and hard limit.
const FILES_MAX: (u64, u64) = (65_536, 1_048_576);

/// What to run.
#[derive(Debug, Clone)]
pub struct Launch {
    /// Program and arguments; never empty.
    pub argv: Vec<String>,
    /// The whole environment.
    pub env: Vec<(String, String)>,
    /// Where it starts.
    pub cwd: PathBuf,
    /// Who it runs as; None leaves the user as it is.
    pub account: Option<Account>,
    /// Columns and rows of a terminal; None for pipes.
    pub size: Option<(u16, u16)>,
}

/// The parent's ends.
#[derive(Debug)]
pub enum Streams {
    /// Three pipes.
    Pipes { stdin: Fd, stdout: Fd, stderr: Fd },
    /// The master of a terminal.
    Terminal(Fd),
}

/// A command that is ready to start.
#[derive(Debug)]
pub struct Command {
    inner: std::process::Command,
}

impl Command {
    /// Prepares `launch`; `cgroup` is an open `cgroup.procs` that the program joins.
    pub fn prepare(launch: &Launch, cgroup: Option<OwnedFd>) -> io::Result<(Self, Streams)> {
        let (program, args) = launch.argv.split_first().ok_or(io::ErrorKind::InvalidInput)?;
        let mut inner = std::process::Command::new(OsString::from(program));
        inner.args(args).env_clear().envs(launch.env.iter().cloned()).current_dir(&launch.cwd);
        let streams = match launch.size {
            Some(size) => terminal(&mut inner, size, launch.account.as_ref())?,
            None => pipes(&mut inner, launch.account.as_ref())?,
        };
        let child = ChildSetup { cgroup, account: launch.account.clone(), terminal: launch.size.is_some() };
        // SAFETY: `ChildSetup::run` only makes system calls on data prepared here: no allocation, no locks.
        unsafe { inner.pre_exec(move || child.run()) };
        Ok((Self { inner }, streams))
    }

    /// Forks and executes. The child is reaped by the caller.
    pub(super) fn start(mut self) -> io::Result<Pid> {
        let child = self.inner.spawn()?;
        i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }
}

/// Sends signal `number` to the process group of `pid`.
pub(super) fn signal_group(pid: Pid, number: u8) -> io::Result<()> {
    crate::sys::signal(-pid.as_raw_nonzero().get(), i32::from(number))
}

fn pipes(inner: &mut std::process::Command, user: Option<&Account>) -> io::Result<Streams> {
    let pipe = || rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC);
    let ((in_read, in_write), (out_read, out_write), (err_read, err_write)) = (pipe()?, pipe()?, pipe()?);
    // So that the program may open /dev/stdin, /dev/stdout and /dev/stderr again.
    if let Some(user) = user {
        for end in [&in_read, &out_write, &err_write] {
            rustix::fs::fchown(end, Some(Uid::from_raw(user.uid)), None)?;
        }
    }
    inner.stdin(Stdio::from(in_read)).stdout(Stdio::from(out_write)).stderr(Stdio::from(err_write));
    Ok(Streams::Pipes { stdin: Fd::new(in_write)?, stdout: Fd::new(out_read)?, stderr: Fd::new(err_read)? })
}

fn terminal(inner: &mut std::process::Command, (cols, rows): (u16, u16), user: Option<&Account>) -> io::Result<Streams> {
    let master = rustix::pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
    rustix::pty::grantpt(&master)?;
    rustix::pty::unlockpt(&master)?;
    rustix::termios::tcsetwinsize(&master, winsize(cols, rows))?;
    let name = rustix::pty::ptsname(&master, Vec::new())?;
    let slave = rustix::fs::open(name.as_c_str(), OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty())?;
    if let Some(user) = user {
        rustix::fs::fchown(&slave, Some(Uid::from_raw(user.uid)), None)?;
    }
    utf8_input(&slave)?;
    inner.stdin(Stdio::from(slave.try_clone()?)).stdout(Stdio::from(slave.try_clone()?)).stderr(Stdio::from(slave));
    Ok(Streams::Terminal(Fd::new(master)?))
}

/// Erasing in line mode removes whole characters.
fn utf8_input(slave: &OwnedFd) -> io::Result<()> {
    let mut modes = rustix::termios::tcgetattr(slave)?;
    modes.input_modes |= rustix::termios::InputModes::IUTF8;
    Ok(rustix::termios::tcsetattr(slave, rustix::termios::OptionalActions::Now, &modes)?)
}

/// A window size without pixels; a size of nothing becomes 80 by 24.
pub(super) fn winsize(cols: u16, rows: u16) -> Winsize {
    let (cols, rows) = if cols == 0 || rows == 0 { (80, 24) } else { (cols, rows) };
    Winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 }
}

/// What the child does between fork and exec.
#[derive(Debug)]
struct ChildSetup {
    cgroup: Option<OwnedFd>,
    account: Option<Account>,
    terminal: bool,
}

impl ChildSetup {
    fn run(&self) -> io::Result<()> {
        rustix::process::setsid()?;
        if self.terminal {
            // Descriptor 0 is the terminal by now.
            rustix::process::ioctl_tiocsctty(rustix::stdio::stdin())?;
        }
        if let Some(procs) = &self.cgroup {
            rustix::io::write(procs.as_fd(), b"0")?;
        }
        let Some(user) = &self.account else { return Ok(()) };
        // PID 1 is exempt from the out-of-memory killer; its children are not.
        if let Ok(score) = rustix::fs::open(c"/proc/self/oom_score_adj", OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty()) {
            let _ = rustix::io::write(&score, b"0");
        }
        let limit = Rlimit { current: Some(FILES_MAX.0), maximum: Some(FILES_MAX.1) };
        let _ = rustix::process::setrlimit(Resource::Nofile, limit);
        rustix::process::umask(Mode::from_raw_mode(0o022));
        let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
        self.set_groups(user)?;
        rustix::thread::set_thread_res_gid(gid, gid, gid)?;
        Ok(rustix::thread::set_thread_res_uid(uid, uid, uid)?)
    }

    fn set_groups(&self, user: &Account) -> io::Result<()> {
        // SAFETY: the array outlives the call and its length is given; the raw call changes this thread only, which
        // after fork is the process.
        let result = unsafe { libc::syscall(libc::SYS_setgroups, user.groups.len(), user.groups.as_ptr()) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}
