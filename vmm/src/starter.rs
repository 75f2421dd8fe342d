//! The starter: a process that keeps ksd's rights for one request of the jailed ks-vmm, and ends.
//!
//! It is forked before ks-vmm drops its rights, reads one message, makes the cgroups, starts the engine's process in
//! its jail as a child of ks-vmm (CLONE_PARENT), and answers. The program, the uid and the jail are its own knowledge;
//! the asker gives arguments, environment and descriptors, which the jailed program alone sees.

use crate::cgroup::{self, Limits};
use crate::jail::{Jail, Visible};
use crate::qemu;
use crate::spawn::Child;
use ks_proto::control::Fault;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketFlags, SocketType,
};
use serde::{Deserialize, Serialize};
use std::ffi::CString;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// The largest message: a command line of some kilobytes.
const MESSAGE_BYTES_MAX: usize = 128 * 1024;
/// Descriptors of one message at most.
const FDS_MAX: usize = 16;

/// What is asked for, once.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Ask {
    /// Guest memory.
    pub memory_bytes: u64,
    /// Its processors.
    pub vcpus: u16,
    /// The process to start; None when the guest runs in ks-vmm itself. Descriptors: the log, then 3, 4, …
    pub engine: Option<EngineAsk>,
}

/// An engine's process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct EngineAsk {
    /// Arguments with the name first.
    pub args: Vec<String>,
    /// Environment, `KEY=value`.
    pub env: Vec<String>,
    /// Preload the shim.
    pub shim: bool,
}

#[derive(Debug, Serialize, Deserialize)]
struct Answer {
    words: Vec<String>,
    cgroup: Vec<String>,
    firmware: String,
    /// Pid as ks-vmm sees it; then descriptors: the pidfd, and the pagemap if `pagemap`.
    pid: Option<i32>,
    pagemap: Result<(), String>,
    fault: Option<Fault>,
}

/// An engine's process that was started.
pub struct Started {
    /// The process.
    pub child: Child,
    /// Its /proc/PID/pagemap, or why not.
    pub pagemap: Result<OwnedFd, String>,
    /// Which firmware it uses.
    pub firmware: String,
    /// Words of its jail.
    pub words: Vec<String>,
}

/// What came of an [`Ask`].
pub struct Begun {
    /// Words of the limits.
    pub cgroup: Vec<String>,
    /// The engine's process, if one was asked for.
    pub engine: Option<Started>,
}

/// What the starter knows by itself.
pub struct Knowledge {
    /// `--qemu`, or what was found in PATH.
    pub qemu: Option<PathBuf>,
    /// The preload shim.
    pub shim: Option<PathBuf>,
    /// The engine's jail.
    pub jail: Jail,
    /// Name of the cgroups.
    pub cgroup: String,
}

/// The jailed process's end.
pub struct Starter {
    socket: OwnedFd,
    process: Option<rustix::process::Pid>,
}

/// Both ends.
pub fn pair() -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}

impl Starter {
    /// Over `socket`, to the forked `process`.
    pub fn new(socket: OwnedFd, process: rustix::process::Pid) -> Self {
        Self { socket, process: Some(process) }
    }
    /// Asks; works once. The starter is gone afterwards.
    ///
    /// # Errors
    /// What it could not do, or that it is gone.
    pub fn ask(&mut self, ask: &Ask, fds: &[BorrowedFd<'_>]) -> Result<Begun, Fault> {
        let bad = |why: String| Fault::new("internal", "start the engine", why, "look at vmm.log of this run");
        let Some(process) = self.process.take() else {
            return Err(bad("it was started before".to_owned()));
        };
        let answer = send(self.socket.as_fd(), ask, fds).and_then(|()| receive::<Answer>(self.socket.as_fd()));
        // It ends after its answer, or because this end is shut.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        let _ = rustix::process::waitid(rustix::process::WaitId::Pid(process), rustix::process::WaitIdOptions::EXITED);
        let (answer, fds) = answer.map_err(|e| bad(format!("the starter: {e}")))?;
        if let Some(fault) = answer.fault {
            return Err(fault);
        }
        let mut fds = fds.into_iter();
        let engine = match answer.pid {
            None => None,
            Some(pid) => {
                let pidfd = fds.next().ok_or_else(|| bad("the starter sent no pidfd".to_owned()))?;
                let pagemap = answer.pagemap.and_then(|()| fds.next().ok_or_else(|| "it was not sent".to_owned()));
                let child = Child { pid, pidfd };
                Some(Started { child, pagemap, firmware: answer.firmware, words: answer.words })
            }
        };
        Ok(Begun { cgroup: answer.cgroup, engine })
    }
}

/// Serves the one request that comes over `socket`, for the parent of this process; returns when that is done or the
/// parent is gone.
pub fn serve(socket: &OwnedFd, known: &Knowledge) {
    let (ask, fds) = match receive::<Ask>(socket.as_fd()) {
        Ok(a) => a,
        Err(e) => return tracing::debug!("the starter ends: {e}"),
    };
    let (answer, fds) = carry_out(known, ask, fds);
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    if let Err(e) = send(socket.as_fd(), &answer, &fds) {
        tracing::warn!("the starter's answer: {e}");
    }
}

fn carry_out(known: &Knowledge, ask: Ask, fds: Vec<OwnedFd>) -> (Answer, Vec<OwnedFd>) {
    let (dirs, cgroup) = cgroup::make(&known.cgroup, &Limits::of(ask.memory_bytes, ask.vcpus));
    if let Some(parent) = rustix::process::getppid() {
        cgroup::add(&dirs, parent.as_raw_nonzero().get());
    }
    let mut answer =
        Answer { words: known.jail.words.clone(), cgroup, firmware: String::new(), pid: None, pagemap: Ok(()), fault: None };
    let Some(engine) = ask.engine else { return (answer, Vec::new()) };
    match start(known, engine, fds, &dirs) {
        Ok(child) => {
            answer.firmware = qemu::firmware_note();
            let mut fds = Vec::new();
            let pagemap = pagemap_of(&child);
            answer.pid = Some(child.pid);
            fds.push(child.pidfd);
            match pagemap {
                Ok(file) => fds.push(file.into()),
                Err(why) => answer.pagemap = Err(why),
            }
            (answer, fds)
        }
        Err(fault) => {
            answer.fault = Some(fault);
            (answer, Vec::new())
        }
    }
}

/// Of the program that runs now: a pagemap is that of the memory at the time when it is opened.
fn pagemap_of(child: &Child) -> Result<std::fs::File, String> {
    use std::os::fd::AsRawFd;
    // In the numbers of the proc that is mounted here.
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", child.pidfd.as_raw_fd())).map_err(|e| e.to_string())?;
    let pid = info.lines().find_map(|l| l.strip_prefix("Pid:")).map(str::trim).unwrap_or("-1");
    std::fs::File::open(format!("/proc/{pid}/pagemap")).map_err(|e| e.to_string())
}

fn start(known: &Knowledge, ask: EngineAsk, fds: Vec<OwnedFd>, cgroups: &[PathBuf]) -> Result<Child, Fault> {
    let program = qemu::find(known.qemu.as_deref())?;
    let bad = |why: String| Fault::new("engine-died", "start QEMU", why, "look at the jail that hello reports and at vmm.log");
    let c = |s: &[u8]| CString::new(s).map_err(|_| bad("a zero byte in an argument".into()));
    let mut visible = Visible::default();
    let inside = visible.add(&program);
    let mut env = ask.env;
    if let Some(shim) = known.shim.as_ref().filter(|_| ask.shim) {
        let at = visible.add(shim);
        env.push(format!("LD_PRELOAD={}", known.jail.seen(shim, &at).display()));
    }
    let args = ask.args.iter().map(|s| c(s.as_bytes())).collect::<Result<Vec<_>, _>>()?;
    let env = env.iter().map(|s| c(s.as_bytes())).collect::<Result<Vec<_>, _>>()?;
    let mut fds = fds.into_iter();
    let log = fds.next().ok_or_else(|| bad("no log was handed over".into()))?;
    let at = known.jail.seen(&program, &inside);
    let mut spawn = known.jail.spawn(c(at.as_os_str().as_bytes())?, args, env, fds.collect(), log);
    spawn.for_parent = true;
    spawn.cgroups = cgroups.iter().map(|d| d.join("cgroup.procs")).collect();
    crate::spawn::spawn(&spawn).map_err(|e| bad(e.to_string()))
}

fn send<T: Serialize>(socket: BorrowedFd<'_>, message: &T, fds: &[BorrowedFd<'_>]) -> std::io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    if bytes.len() > MESSAGE_BYTES_MAX || fds.len() > FDS_MAX {
        return Err(std::io::Error::other(format!("a message of {} bytes with {} descriptors", bytes.len(), fds.len())));
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(std::io::Error::other("too many descriptors"));
    }
    rustix::net::sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

fn receive<T: for<'de> Deserialize<'de>>(socket: BorrowedFd<'_>) -> std::io::Result<(T, Vec<OwnedFd>)> {
    let mut bytes = vec![0u8; MESSAGE_BYTES_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = loop {
        match rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            other => break other?,
        }
    };
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(more) = message {
            fds.extend(more);
        }
    }
    if got.bytes == 0 {
        return Err(std::io::Error::other("the other end is gone"));
    }
    if got.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(std::io::Error::other("a message that is too long"));
    }
    Ok((serde_json::from_slice(&bytes[..got.bytes])?, fds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_arrives_with_its_descriptors_and_what_is_no_message_is_refused() {
        let (a, b) = pair().unwrap();
        let ask = Ask { memory_bytes: 5, vcpus: 2, engine: Some(EngineAsk { args: vec!["x".into()], env: vec![], shim: true }) };
        let file = tempfile::tempfile().unwrap();
        send(a.as_fd(), &ask, &[file.as_fd(), file.as_fd()]).unwrap();
        let (got, fds) = receive::<Ask>(b.as_fd()).unwrap();
        assert_eq!((got.memory_bytes, got.vcpus, got.engine.unwrap().args, fds.len()), (5, 2, vec!["x".to_owned()], 2));
        rustix::io::write(&a, b"{\"memory_bytes\":").unwrap();
        assert!(receive::<Ask>(b.as_fd()).is_err());
        let many: Vec<_> = (0..FDS_MAX + 1).map(|_| file.as_fd()).collect();
        assert!(send(a.as_fd(), &ask, &many).is_err());
        drop(a);
        assert!(receive::<Ask>(b.as_fd()).unwrap_err().to_string().contains("gone"));
    }
}
