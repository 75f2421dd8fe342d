//! File systems of the guest, and the cgroup of the user's processes.

use std::{io, os::unix::fs::symlink, path::Path};

use rustix::{
    fs::Mode,
    io::Errno,
    mount::{MountFlags, mount},
};

use crate::cgroup::UserCgroup;

const TMPFS_MAGIC: u64 = 0x0102_1994;
const RAMFS_MAGIC: u64 = 0x8584_58f6;

/// One file system to mount.
struct Mount {
    kind: &'static str,
    at: &'static str,
    flags: MountFlags,
    data: &'static std::ffi::CStr,
}

/// A step of the boot that failed.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {why}")]
pub(super) struct BootError {
    pub(super) what: String,
    pub(super) why: io::Error,
}

impl BootError {
    pub(super) fn new(what: impl Into<String>, why: impl Into<io::Error>) -> Self {
        Self { what: what.into(), why: why.into() }
    }
}

/// /proc, /sys and /dev, wherever the kernel has not mounted them.
pub(super) fn early() -> Result<(), BootError> {
    let quiet = MountFlags::NOSUID | MountFlags::NOEXEC | MountFlags::NODEV;
    let all = [
        Mount { kind: "proc", at: "/proc", flags: quiet, data: c"" },
        Mount { kind: "sysfs", at: "/sys", flags: quiet, data: c"" },
        Mount { kind: "devtmpfs", at: "/dev", flags: MountFlags::NOSUID, data: c"mode=0755" },
    ];
    all.iter().try_for_each(mount_one)
}

/// Whether `/` is an initramfs.
pub(super) fn root_is_memory() -> io::Result<bool> {
    let kind = u64::try_from(rustix::fs::statfs("/")?.f_type).unwrap_or_default() & 0xffff_ffff;
    Ok(kind == TMPFS_MAGIC || kind == RAMFS_MAGIC)
}

/// Everything else, once `/` is the root disk. /tmp stays on the disk, so that it survives a restart.
pub(super) fn on_root() -> Result<UserCgroup, BootError> {
    let quiet = MountFlags::NOSUID | MountFlags::NOEXEC | MountFlags::NODEV;
    let all = [
        Mount {
            kind: "devpts",
            at: "/dev/pts",
            flags: MountFlags::NOSUID | MountFlags::NOEXEC,
            data: c"gid=5,mode=0620,ptmxmode=0666",
        },
        Mount { kind: "tmpfs", at: "/dev/shm", flags: MountFlags::NOSUID | MountFlags::NODEV, data: c"mode=1777" },
        Mount { kind: "tmpfs", at: "/run", flags: MountFlags::NOSUID | MountFlags::NODEV, data: c"mode=0755" },
        Mount { kind: "cgroup2", at: "/sys/fs/cgroup", flags: quiet, data: c"" },
    ];
    all.iter().try_for_each(mount_one)?;
    for (link, target) in [("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")] {
        // Already there when the kernel mounted /dev for us.
        let _ = symlink(target, Path::new("/dev").join(link));
    }
    for (dir, mode) in [("/run/keepstate", 0o755), ("/run/lock", 0o1777), ("/tmp", 0o1777)] {
        directory(Path::new(dir), mode)?;
    }
    let group = Path::new("/sys/fs/cgroup/user");
    UserCgroup::create(group).map_err(|e| BootError::new(format!("make the cgroup {}", group.display()), e))
}

fn directory(path: &Path, mode: u32) -> Result<(), BootError> {
    let fail = |e| BootError::new(format!("make {}", path.display()), e);
    std::fs::create_dir_all(path).map_err(fail)?;
    rustix::fs::chmod(path, Mode::from_raw_mode(mode)).map_err(|e| fail(e.into()))
}

fn mount_one(m: &Mount) -> Result<(), BootError> {
    let fail = |e: io::Error| BootError::new(format!("mount {} on {}", m.kind, m.at), e);
    // A read-only root may lack the directory; mount then says so.
    let _ = std::fs::create_dir_all(m.at);
    match mount(m.kind, m.at, m.kind, m.flags, m.data) {
        Ok(()) | Err(Errno::BUSY) => Ok(()),
        Err(e) => Err(fail(e.into())),
    }
}
