//! How guest memory inside QEMU gets its userfaultfd: the preload shim's environment, its one message, the fallback.

use ks_proto::control::Fault;
use ks_vmm_core::memory::uffd::{FEATURES, Uffd};
use ks_vmm_core::memory::{Memory, Tracked};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use std::fs::File;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// First word of the shim's message; the same number is in ks-vmm-shim.
const MAGIC: u64 = 0x4b53_5348_494d_3031;
/// The shim speaks while QEMU sets itself up.
const SPEAK: Timespec = Timespec { tv_sec: 30, tv_nsec: 0 };
const MODE_MISSING: u64 = 1;
const MODE_WP: u64 = 2;

/// What is set up before QEMU starts.
pub struct Hook {
    /// QEMU's environment.
    pub env: Vec<String>,
    ours: Option<UnixStream>,
    missing_why: String,
}

/// What the shim told.
enum Told {
    Registered { uffd: OwnedFd, base: u64, len: u64 },
    Failed(String),
}

impl Hook {
    /// Adds the shim's descriptors to `child` (whose first becomes number 3): a socket, and `device`, an open
    /// /dev/userfaultfd. Without a shim memory is not tracked.
    pub fn new(
        shim: bool,
        device: Option<OwnedFd>,
        memory_fd: u32,
        memory: &Memory,
        child: &mut Vec<OwnedFd>,
    ) -> Result<Self, Fault> {
        if !shim {
            let missing_why = "libks_vmm_shim.so is not beside ks-vmm, or KS_VMM_HASH_SCAN=1 is set".to_owned();
            return Ok(Self { env: Vec::new(), ours: None, missing_why });
        }
        let (ours, theirs) = super::pair()?;
        let number = |child: &Vec<OwnedFd>| 3 + child.len();
        let mut env = vec![
            format!("KS_MEM_FD={memory_fd}"),
            format!("KS_SHIM_FD={}", number(child)),
            format!("KS_UFFD_FEATURES={FEATURES}"),
            format!("KS_UFFD_MODE={}", if memory.wants_missing() { MODE_WP | MODE_MISSING } else { MODE_WP }),
        ];
        child.push(theirs.into());
        // Without the device the shim tries the system call.
        if let Some(dev) = device {
            env.push(format!("KS_UFFD_DEV={}", number(child)));
            child.push(dev);
        }
        Ok(Self { env, ours: Some(ours), missing_why: String::new() })
    }

    /// Hands the registered mapping to `memory`, or tells it (and the operator) that there is none.
    pub fn attach(
        self,
        memory: &Arc<Memory>,
        pidfd: &OwnedFd,
        pagemap: Result<OwnedFd, String>,
        warn: &(dyn Fn(String) + Send + Sync),
    ) -> Result<(), Fault> {
        let told = match self.ours {
            Some(ours) => hear(&ours, pidfd),
            None => Told::Failed(self.missing_why),
        };
        match told {
            Told::Registered { uffd, base, len } => {
                let bad =
                    |e: String| Fault::new("internal", "open QEMU's pagemap", e, "run ks-vmm as root or with CAP_SYS_PTRACE");
                let pagemap = pagemap.map_err(bad)?;
                memory.attach(Tracked { uffd: Uffd::from_fd(uffd), base, len, pagemap: File::from(pagemap) })
            }
            Told::Failed(why) => {
                warn(format!("guest memory is not tracked ({why}): it is loaded at once, and checkpoints hash all of it"));
                memory.detached()
            }
        }
    }
}

/// Waits for the message, or for QEMU's death.
fn hear(ours: &UnixStream, pidfd: &OwnedFd) -> Told {
    let mut fds = [PollFd::new(ours, PollFlags::IN), PollFd::new(pidfd, PollFlags::IN)];
    match poll(&mut fds, Some(&SPEAK)) {
        Ok(n) if n > 0 && fds[0].revents().contains(PollFlags::IN) => receive(ours),
        Ok(n) if n > 0 => Told::Failed("QEMU ended first".to_owned()),
        Ok(_) => Told::Failed("the shim did not speak".to_owned()),
        Err(e) => Told::Failed(e.to_string()),
    }
}

fn receive(ours: &UnixStream) -> Told {
    let mut bytes = [0u8; 32];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = rustix::net::recvmsg(ours, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC);
    let fd = control.drain().find_map(|m| match m {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    let mut words = [0u64; 4];
    for (w, b) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *w = b.iter().rev().fold(0, |acc, x| acc << 8 | u64::from(*x));
    }
    let [magic, base, len, rc] = words;
    match (got.map(|g| g.bytes), fd, rc.cast_signed()) {
        (Ok(32), Some(uffd), 0) if magic == MAGIC => Told::Registered { uffd, base, len },
        (Ok(32), _, rc) if magic == MAGIC && rc < 0 => {
            let errno = i32::try_from(-rc).unwrap_or(0);
            Told::Failed(format!("userfaultfd: {}", std::io::Error::from_raw_os_error(errno)))
        }
        _ => Told::Failed("the shim's message is malformed".to_owned()),
    }
}
