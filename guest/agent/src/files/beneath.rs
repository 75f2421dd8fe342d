//! Opening paths that cannot leave a directory, whatever links the guest's programs make meanwhile (openat2).

use std::{
    ffi::OsString,
    io,
    os::fd::{AsFd, OwnedFd},
    path::{Component, Path, PathBuf},
};

use rustix::{
    fs::{Mode, OFlags, ResolveFlags},
    io::Errno,
};

const DIR: OFlags = OFlags::DIRECTORY.union(OFlags::RDONLY).union(OFlags::CLOEXEC);
/// openat2 says EAGAIN when a rename raced with it.
const RETRIES_MAX: usize = 16;

/// The parts of a relative path; refuses absolute ones and `..`.
pub(super) fn parts(path: &Path) -> io::Result<Vec<OsString>> {
    let mut parts = Vec::new();
    for component in path.components() {
        match component {
            Component::Normal(name) => parts.push(name.to_owned()),
            Component::CurDir => {}
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => {
                let why = format!("{} would leave the destination", path.display());
                return Err(io::Error::new(io::ErrorKind::InvalidData, why));
            }
        }
    }
    Ok(parts)
}

/// Opens `path` below `root` without ever leaving it.
fn open(root: impl AsFd, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    for _ in 0..RETRIES_MAX {
        match rustix::fs::openat2(root.as_fd(), path, flags | OFlags::CLOEXEC, Mode::empty(), resolve) {
            Err(Errno::AGAIN) => {}
            Err(Errno::XDEV) => {
                let why = format!("{} goes through a link that leaves the destination", path.display());
                return Err(io::Error::new(io::ErrorKind::InvalidData, why));
            }
            other => return Ok(other?),
        }
    }
    Err(io::ErrorKind::ResourceBusy.into())
}

/// Opens the directory `parts` below `root`, which must be there.
pub(super) fn existing(root: &OwnedFd, parts: &[OsString]) -> io::Result<OwnedFd> {
    let mut path = PathBuf::from(".");
    path.extend(parts);
    open(root, &path, DIR)
}

/// Opens the directory `parts` below `root`, making what is missing; `made` sees each new directory.
pub(super) fn directory(
    root: &OwnedFd,
    parts: &[OsString],
    mut made: impl FnMut(&OwnedFd) -> io::Result<()>,
) -> io::Result<OwnedFd> {
    match existing(root, parts) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        other => return other,
    }
    let mut dir = root.try_clone()?;
    for (depth, name) in parts.iter().enumerate() {
        let created = match rustix::fs::mkdirat(&dir, name, Mode::from_raw_mode(0o755)) {
            Ok(()) => true,
            Err(Errno::EXIST) => false,
            Err(e) => return Err(e.into()),
        };
        // From the root each time: a link on the way is followed only as far as it stays beneath.
        dir = existing(root, &parts[..=depth])?;
        if created {
            made(&dir)?;
        }
    }
    Ok(dir)
}
