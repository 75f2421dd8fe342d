//! Unpacking a tar stream. Each file appears whole or not at all; nothing is written outside the target.

use std::{
    ffi::{OsStr, OsString},
    fs::File,
    io::{self, Read, Seek, SeekFrom, Write},
    os::fd::OwnedFd,
    path::Path,
};

use rustix::{
    fs::{AtFlags, Gid, Mode, OFlags, Timespec, Timestamps, Uid},
    io::Errno,
};
use tar::EntryType;

use super::beneath;

/// Runs of zeros of this size become holes.
const HOLE_BYTES: usize = 64 * 1024;
/// An archive ends with two blocks of zeros.
const END_BYTES: usize = 1024;

/// What an entry's header says.
struct Facts {
    bytes: u64,
    mode: u32,
    mtime: u64,
}

/// A directory that an archive is unpacked into.
pub(super) struct Target {
    root: OwnedFd,
    owner: Option<(u32, u32)>,
    /// For names of temporary files.
    counter: u64,
}

impl Target {
    /// Opens `path`, made if missing.
    pub(super) fn open(path: &Path, owner: Option<(u32, u32)>) -> io::Result<Self> {
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        let root = match rustix::fs::open(path, flags, Mode::empty()) {
            Err(Errno::NOENT) => {
                make_missing(path, owner)?;
                rustix::fs::open(path, flags, Mode::empty())?
            }
            other => other?,
        };
        Ok(Self { root, owner, counter: 0 })
    }

    /// Unpacks everything; directories get their times last, as files change them.
    pub(super) fn unpack(mut self, source: impl Read) -> io::Result<()> {
        let mut archive = tar::Archive::new(ZeroTail { source, zeros: 0 });
        let mut directories = Vec::new();
        for entry in archive.entries()? {
            let mut entry = entry?;
            let path = entry.path()?.into_owned();
            let what = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", path.display()));
            self.entry(&path, &mut entry, &mut directories).map_err(what)?;
        }
        let mut tail = archive.into_inner();
        // Padding after the end of the archive belongs to it.
        io::copy(&mut tail, &mut io::sink())?;
        if tail.zeros < END_BYTES {
            return Err(invalid("the archive was cut off before its end"));
        }
        for (parts, mtime) in directories.into_iter().rev() {
            set_time(&self.directory(&parts)?, mtime)?;
        }
        Ok(())
    }

    fn entry(
        &mut self,
        path: &Path,
        entry: &mut tar::Entry<'_, impl Read>,
        directories: &mut Vec<(Vec<OsString>, u64)>,
    ) -> io::Result<()> {
        let parts = beneath::parts(path)?;
        let header = entry.header();
        // No set-id bits: the owner is always the session's user.
        let facts = Facts { bytes: entry.size(), mode: header.mode()? & 0o777, mtime: header.mtime()? };
        let kind = entry.header().entry_type();
        let Some((name, parents)) = parts.split_last() else {
            // "./" itself: the target is as it is.
            return if kind == EntryType::Directory { Ok(()) } else { Err(invalid("an entry without a name")) };
        };
        match kind {
            EntryType::Directory => {
                let dir = self.directory(&parts)?;
                rustix::fs::fchmod(&dir, Mode::from_raw_mode(facts.mode))?;
                directories.push((parts, facts.mtime));
                Ok(())
            }
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                let dir = self.directory(parents)?;
                self.file(&dir, name, entry, &facts)
            }
            EntryType::Symlink => {
                let target = entry.link_name()?.ok_or_else(|| invalid("a link without a target"))?.into_owned();
                let dir = self.directory(parents)?;
                self.link(&dir, name, &target)
            }
            EntryType::Link => {
                let target = entry.link_name()?.ok_or_else(|| invalid("a link without a target"))?.into_owned();
                let dir = self.directory(parents)?;
                self.hard_link(&dir, name, &target)
            }
            EntryType::XGlobalHeader => Ok(()),
            _ => Err(invalid("it is neither a file, a directory nor a link")),
        }
    }

    fn directory(&self, parts: &[OsString]) -> io::Result<OwnedFd> {
        beneath::directory(&self.root, parts, |dir| self.give(dir))
    }

    fn file(&mut self, dir: &OwnedFd, name: &OsStr, from: &mut impl Read, facts: &Facts) -> io::Result<()> {
        let temp = self.temp_name();
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let fd = rustix::fs::openat(dir, &temp, flags, Mode::from_raw_mode(0o600))?;
        let written = (|| {
            let mut file = File::from(fd);
            if copy_with_holes(from, &mut file)? != facts.bytes {
                return Err(invalid("the archive was cut off inside this file"));
            }
            let fd = OwnedFd::from(file);
            self.give(&fd)?;
            rustix::fs::fchmod(&fd, Mode::from_raw_mode(facts.mode))?;
            set_time(&fd, facts.mtime)?;
            Ok(rustix::fs::renameat(dir, &temp, dir, name)?)
        })();
        if written.is_err() {
            let _ = rustix::fs::unlinkat(dir, &temp, AtFlags::empty());
        }
        written
    }

    fn link(&mut self, dir: &OwnedFd, name: &OsStr, target: &Path) -> io::Result<()> {
        let temp = self.temp_name();
        rustix::fs::symlinkat(target, dir, &temp)?;
        if let Some((uid, gid)) = self.owner {
            let (uid, gid) = (Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)));
            rustix::fs::chownat(dir, &temp, uid, gid, AtFlags::SYMLINK_NOFOLLOW)?;
        }
        self.rename(dir, &temp, name)
    }

    /// To a file that the archive named before, below the same target.
    fn hard_link(&mut self, dir: &OwnedFd, name: &OsStr, target: &Path) -> io::Result<()> {
        let parts = beneath::parts(target)?;
        let (file, parents) = parts.split_last().ok_or_else(|| invalid("a link to the destination itself"))?;
        let from = beneath::existing(&self.root, parents)?;
        let temp = self.temp_name();
        // Without following: a link is linked itself, never what it points to.
        rustix::fs::linkat(&from, file, dir, &temp, AtFlags::empty())?;
        self.rename(dir, &temp, name)
    }

    fn rename(&self, dir: &OwnedFd, temp: &OsStr, name: &OsStr) -> io::Result<()> {
        let renamed = rustix::fs::renameat(dir, temp, dir, name);
        // A rename between two names of one file does nothing and keeps both.
        let _ = rustix::fs::unlinkat(dir, temp, AtFlags::empty());
        Ok(renamed?)
    }

    fn give(&self, fd: &OwnedFd) -> io::Result<()> {
        let Some((uid, gid)) = self.owner else { return Ok(()) };
        Ok(rustix::fs::fchown(fd, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))?)
    }

    fn temp_name(&mut self) -> OsString {
        self.counter += 1;
        OsString::from(format!(".ks-put-{}-{}-{}", std::process::id(), unpack_id(), self.counter))
    }
}

/// Counts the zeros that a stream ends with: how a whole archive is told from one that was cut between two entries.
struct ZeroTail<R> {
    source: R,
    zeros: usize,
}

impl<R: Read> Read for ZeroTail<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = self.source.read(buf)?;
        let tail = buf[..n].iter().rev().take_while(|b| **b == 0).count();
        self.zeros = if tail == n { self.zeros.saturating_add(n) } else { tail };
        Ok(n)
    }
}

/// Different for each thread that unpacks at the same time.
fn unpack_id() -> i32 {
    rustix::thread::gettid().as_raw_nonzero().get()
}

fn make_missing(path: &Path, owner: Option<(u32, u32)>) -> io::Result<()> {
    let missing: Vec<&Path> = path.ancestors().take_while(|p| !p.exists()).collect();
    for dir in missing.into_iter().rev() {
        std::fs::create_dir(dir)?;
        if let Some((uid, gid)) = owner {
            std::os::unix::fs::chown(dir, Some(uid), Some(gid))?;
        }
    }
    Ok(())
}

fn invalid(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

fn set_time(fd: &OwnedFd, mtime: u64) -> io::Result<()> {
    let seconds = i64::try_from(mtime).map_err(|_| invalid("a time out of range"))?;
    let time = Timespec { tv_sec: seconds, tv_nsec: 0 };
    Ok(rustix::fs::futimens(fd, &Timestamps { last_access: time, last_modification: time })?)
}

/// Copies; long runs of zeros are skipped, so that sparse files stay sparse. Returns the size.
fn copy_with_holes(from: &mut impl Read, to: &mut File) -> io::Result<u64> {
    let mut buf = vec![0; HOLE_BYTES];
    let mut end = 0_u64;
    loop {
        let mut got = 0;
        while got < buf.len() {
            match from.read(&mut buf[got..])? {
                0 => break,
                n => got += n,
            }
        }
        if got == 0 {
            break;
        }
        end += got as u64;
        if got == buf.len() && buf.iter().all(|b| *b == 0) {
            to.seek(SeekFrom::Start(end))?;
        } else {
            to.write_all(&buf[..got])?;
        }
    }
    to.set_len(end)?;
    Ok(end)
}
