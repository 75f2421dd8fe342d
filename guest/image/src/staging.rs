//! The staging tree: the only place that an import writes to.
//!
//! Directories are opened by openat2(2) with RESOLVE_IN_ROOT, so the kernel itself keeps every symlink of
//! the image inside the tree; the last component of a path is never followed. Owners are kept when the
//! program may set them.

use std::{
    ffi::OsStr,
    fs::File,
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, ResolveFlags, Timespec, Timestamps, Uid, XattrFlags};

/// A directory that stands for the image's `/`.
pub(crate) struct Staging {
    path: PathBuf,
    root: OwnedFd,
    keep_owners: bool,
}

/// Owner, permission bits and modification time of an entry.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Attributes {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) mode: u32,
    pub(crate) mtime_s: i64,
}

impl Staging {
    /// Uses the existing directory at `path`.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let root = rustix::fs::open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Self { path: path.to_owned(), root, keep_owners: rustix::process::geteuid().is_root() })
    }

    /// Where it is, for programs that read the finished tree.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Opens the directory `relative` (no `..`), making missing ones when `create`.
    pub(crate) fn dir(&self, relative: &Path, create: bool) -> io::Result<OwnedFd> {
        match self.resolve(relative) {
            Err(e) if create && e.kind() == io::ErrorKind::NotFound => {}
            other => return other,
        }
        let parent = self.dir(relative.parent().unwrap_or(Path::new("")), true)?;
        let name = relative.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        match rustix::fs::mkdirat(&parent, name, Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => self.resolve(relative),
            Err(e) => Err(e.into()),
        }
    }

    fn resolve(&self, relative: &Path) -> io::Result<OwnedFd> {
        let path = if relative.as_os_str().is_empty() { Path::new(".") } else { relative };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        Ok(rustix::fs::openat2(&self.root, path, flags, Mode::empty(), resolve)?)
    }

    /// Whether `relative` leads to something, symlinks included, inside the tree.
    pub(crate) fn exists(&self, relative: &str) -> bool {
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        rustix::fs::openat2(&self.root, relative, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), resolve).is_ok()
    }

    /// Reads a text file, following symlinks inside the tree only; None when it is not there.
    pub(crate) fn read(&self, relative: &str) -> io::Result<Option<String>> {
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        match rustix::fs::openat2(&self.root, relative, flags, Mode::empty(), resolve) {
            Ok(fd) => io::read_to_string(File::from(fd)).map(Some),
            Err(rustix::io::Errno::NOENT) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    /// Replaces what is at `relative` by a file.
    pub(crate) fn write(&self, relative: &str, content: &str, attributes: Attributes) -> io::Result<()> {
        let path = Path::new(relative);
        let dir = self.dir(path.parent().unwrap_or(Path::new("")), true)?;
        let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        remove(dir.as_fd(), name)?;
        self.file(dir.as_fd(), name, &mut content.as_bytes(), attributes, &[])?;
        Ok(())
    }

    /// Makes a new file `name` in `dir`; the bytes written.
    pub(crate) fn file(
        &self,
        dir: BorrowedFd<'_>,
        name: &OsStr,
        content: &mut dyn io::Read,
        attributes: Attributes,
        xattrs: &[(String, Vec<u8>)],
    ) -> io::Result<u64> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut file = File::from(rustix::fs::openat(dir, name, flags, Mode::from_raw_mode(0o600))?);
        let bytes = io::copy(content, &mut file)?;
        // The owner first: changing it clears set-uid bits and capabilities.
        self.own(file.as_fd(), attributes)?;
        for (key, value) in xattrs {
            rustix::fs::fsetxattr(&file, key.as_str(), value, XattrFlags::empty())?;
        }
        rustix::fs::fchmod(&file, Mode::from_raw_mode(attributes.mode & 0o7777))?;
        set_time(dir, name, attributes)?;
        Ok(bytes)
    }

    /// Makes the directory `name`, or takes over the one that is there; anything else there is replaced.
    pub(crate) fn make_dir(&self, dir: BorrowedFd<'_>, name: &OsStr, attributes: Attributes) -> io::Result<()> {
        if kind(dir, name)? != Some(FileType::Directory) {
            remove(dir, name)?;
            rustix::fs::mkdirat(dir, name, Mode::from_raw_mode(0o700))?;
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let made = rustix::fs::openat(dir, name, flags, Mode::empty())?;
        self.own(made.as_fd(), attributes)?;
        Ok(rustix::fs::fchmod(&made, Mode::from_raw_mode(attributes.mode & 0o7777))?)
    }

    /// Makes a symlink; where it points is the guest's affair.
    pub(crate) fn symlink(&self, dir: BorrowedFd<'_>, name: &OsStr, target: &OsStr, attributes: Attributes) -> io::Result<()> {
        rustix::fs::symlinkat(target, dir, name)?;
        self.own_link(dir, name, attributes)?;
        set_time(dir, name, attributes)
    }

    /// Makes a hard link to the entry `target_name` of `target_dir`, not following it.
    pub(crate) fn hard_link(
        &self,
        target_dir: BorrowedFd<'_>,
        target_name: &OsStr,
        dir: BorrowedFd<'_>,
        name: &OsStr,
    ) -> io::Result<()> {
        Ok(rustix::fs::linkat(target_dir, target_name, dir, name, AtFlags::empty())?)
    }

    /// Makes a named pipe.
    pub(crate) fn fifo(&self, dir: BorrowedFd<'_>, name: &OsStr, attributes: Attributes) -> io::Result<()> {
        rustix::fs::mknodat(dir, name, FileType::Fifo, Mode::from_raw_mode(attributes.mode & 0o777), 0)?;
        self.own_link(dir, name, attributes)
    }

    fn own(&self, fd: BorrowedFd<'_>, a: Attributes) -> io::Result<()> {
        if self.keep_owners {
            rustix::fs::fchown(fd, Some(Uid::from_raw(a.uid)), Some(Gid::from_raw(a.gid)))?;
        }
        Ok(())
    }

    fn own_link(&self, dir: BorrowedFd<'_>, name: &OsStr, a: Attributes) -> io::Result<()> {
        if self.keep_owners {
            let (uid, gid) = (Uid::from_raw(a.uid), Gid::from_raw(a.gid));
            rustix::fs::chownat(dir, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
        }
        Ok(())
    }
}

fn set_time(dir: BorrowedFd<'_>, name: &OsStr, attributes: Attributes) -> io::Result<()> {
    let time = Timespec { tv_sec: attributes.mtime_s, tv_nsec: 0 };
    let times = Timestamps { last_access: time, last_modification: time };
    Ok(rustix::fs::utimensat(dir, name, &times, AtFlags::SYMLINK_NOFOLLOW)?)
}

/// The kind of the entry itself; None when it is not there.
pub(crate) fn kind(dir: BorrowedFd<'_>, name: &OsStr) -> io::Result<Option<FileType>> {
    match rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(Some(FileType::from_raw_mode(stat.st_mode))),
        Err(rustix::io::Errno::NOENT) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// Removes the entry and all below it; it may be missing. Symlinks are removed, not followed.
pub(crate) fn remove(dir: BorrowedFd<'_>, name: &OsStr) -> io::Result<()> {
    match kind(dir, name)? {
        None => Ok(()),
        Some(FileType::Directory) => {
            let mut path = PathBuf::from(format!("/proc/self/fd/{}", dir.as_raw_fd()));
            path.push(name);
            std::fs::remove_dir_all(path)
        }
        Some(_) => Ok(rustix::fs::unlinkat(dir, name, AtFlags::empty())?),
    }
}

/// Names in an open directory.
pub(crate) fn names(dir: BorrowedFd<'_>) -> io::Result<Vec<std::ffi::OsString>> {
    let mut found = Vec::new();
    for entry in rustix::fs::Dir::read_from(dir)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            found.push(OsStr::from_bytes(name).to_owned());
        }
    }
    found.sort();
    Ok(found)
}
