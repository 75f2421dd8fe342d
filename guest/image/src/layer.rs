//! Applies one OCI layer to the staging tree (OCI image-spec, layer.md): entries, whiteouts, opaque directories.
//!
//! Refuses absolute names, `..`, and hard links out of the tree. Device nodes are left out, as the guest has
//! devtmpfs. A whiteout hides what lower layers had, never what the same layer brings.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    io::Read,
    os::fd::{AsFd, BorrowedFd},
    os::unix::ffi::OsStrExt,
    path::{Component, Path, PathBuf},
};

use rustix::fs::FileType;

use crate::{
    oci::OciError,
    staging::{self, Attributes, Staging},
};

const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
const RESERVED: &[u8] = b".wh..wh.";
/// A path deeper than this is refused.
const DEPTH_MAX: usize = 256;
/// More entries than this in one layer are refused.
const ENTRIES_MAX: usize = 2_000_000;
const XATTR_PREFIX: &str = "SCHILY.xattr.";

/// Unpacks `layer`, an uncompressed tar stream, over what is there.
pub(crate) fn apply(staging: &Staging, layer: &mut dyn Read) -> Result<(), OciError> {
    let mut archive = tar::Archive::new(layer);
    let mut state = Layer { staging, seen: BTreeSet::new() };
    for (count, entry) in archive.entries().map_err(OciError::Read)?.enumerate() {
        if count >= ENTRIES_MAX {
            return Err(OciError::TooMany { limit: ENTRIES_MAX });
        }
        state.entry(&mut entry.map_err(OciError::Read)?)?;
    }
    Ok(())
}

struct Layer<'a> {
    staging: &'a Staging,
    /// Paths that this layer brought, parents included.
    seen: BTreeSet<PathBuf>,
}

impl Layer<'_> {
    fn entry(&mut self, entry: &mut tar::Entry<'_, &mut dyn Read>) -> Result<(), OciError> {
        let raw = entry.path_bytes().into_owned();
        let path = safe_path(&raw)?;
        let Some(name) = path.file_name().map(OsStr::to_owned) else {
            return Ok(()); // the root itself
        };
        let parent = path.parent().unwrap_or(Path::new("")).to_owned();
        let write_error = |source| OciError::Write { path: path.clone(), source };

        if name.as_bytes().starts_with(WHITEOUT) {
            return self.whiteout(&parent, name.as_bytes()).map_err(write_error);
        }
        let dir = self.staging.dir(&parent, true).map_err(write_error)?;
        self.note(&path);
        let attributes = attributes(entry.header())?;
        let kind = entry.header().entry_type();
        if kind.is_dir() {
            return self.staging.make_dir(dir.as_fd(), &name, attributes).map_err(write_error);
        }
        if kind == tar::EntryType::Link {
            return self.link(entry, dir.as_fd(), &path, &name);
        }
        staging::remove(dir.as_fd(), &name).map_err(write_error)?;
        let made = match kind {
            tar::EntryType::Symlink => {
                let target = entry.link_name_bytes().ok_or_else(|| OciError::BadPath { path: lossy(&raw) })?;
                self.staging.symlink(dir.as_fd(), &name, OsStr::from_bytes(&target), attributes)
            }
            tar::EntryType::Fifo => self.staging.fifo(dir.as_fd(), &name, attributes),
            tar::EntryType::Char | tar::EntryType::Block => Ok(()),
            tar::EntryType::Regular | tar::EntryType::Continuous | tar::EntryType::GNUSparse => {
                let xattrs = xattrs(entry)?;
                self.staging.file(dir.as_fd(), &name, entry, attributes, &xattrs).map(drop)
            }
            _ => return Err(OciError::EntryKind { path: lossy(&raw) }),
        };
        made.map_err(write_error)
    }

    fn link(
        &self,
        entry: &tar::Entry<'_, &mut dyn Read>,
        dir: BorrowedFd<'_>,
        path: &Path,
        name: &OsStr,
    ) -> Result<(), OciError> {
        let raw = entry.link_name_bytes().ok_or_else(|| OciError::BadPath { path: path.display().to_string() })?;
        let target = safe_path(&raw)?;
        if target == path {
            return Ok(());
        }
        let target_name = target.file_name().ok_or_else(|| OciError::BadPath { path: lossy(&raw) })?;
        let write_error = |source| OciError::Write { path: path.to_owned(), source };
        let target_dir = self.staging.dir(target.parent().unwrap_or(Path::new("")), false).map_err(write_error)?;
        staging::remove(dir, name).map_err(write_error)?;
        self.staging.hard_link(target_dir.as_fd(), target_name, dir, name).map_err(write_error)
    }

    fn whiteout(&self, parent: &Path, name: &[u8]) -> std::io::Result<()> {
        let Ok(dir) = self.staging.dir(parent, false) else {
            return Ok(()); // nothing there to hide
        };
        if name == OPAQUE {
            return self.hide_lower(parent, dir.as_fd());
        }
        if name.starts_with(RESERVED) {
            return Ok(()); // bookkeeping of old storage drivers
        }
        let hidden = OsStr::from_bytes(&name[WHITEOUT.len()..]);
        if hidden.is_empty() || hidden == "." || hidden == ".." {
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, "a whiteout of no name"));
        }
        self.hide(&parent.join(hidden), dir.as_fd(), hidden)
    }

    /// Removes from `dir` all that this layer did not bring.
    fn hide_lower(&self, path: &Path, dir: BorrowedFd<'_>) -> std::io::Result<()> {
        for name in staging::names(dir)? {
            self.hide(&path.join(&name), dir, &name)?;
        }
        Ok(())
    }

    fn hide(&self, path: &Path, dir: BorrowedFd<'_>, name: &OsStr) -> std::io::Result<()> {
        if !self.seen.contains(path) {
            return staging::remove(dir, name);
        }
        if staging::kind(dir, name)? == Some(FileType::Directory) {
            let below = self.staging.dir(path, false)?;
            return self.hide_lower(path, below.as_fd());
        }
        Ok(())
    }

    fn note(&mut self, path: &Path) {
        for part in path.ancestors() {
            if part.as_os_str().is_empty() || !self.seen.insert(part.to_owned()) {
                break;
            }
        }
    }
}

/// The relative path of an entry name; absolute names, `..` and absurd depths are refused.
fn safe_path(raw: &[u8]) -> Result<PathBuf, OciError> {
    let mut path = PathBuf::new();
    let mut depth = 0;
    for part in Path::new(OsStr::from_bytes(raw)).components() {
        match part {
            Component::Normal(name) => path.push(name),
            Component::CurDir => {}
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => {
                return Err(OciError::BadPath { path: lossy(raw) });
            }
        }
        depth += 1;
    }
    if depth > DEPTH_MAX || raw.contains(&0) {
        return Err(OciError::BadPath { path: lossy(raw) });
    }
    Ok(path)
}

fn attributes(header: &tar::Header) -> Result<Attributes, OciError> {
    let id = |value: std::io::Result<u64>| {
        let value = value.map_err(OciError::Read)?;
        u32::try_from(value).ok().filter(|v| *v != u32::MAX).ok_or(OciError::BadOwner { id: value })
    };
    Ok(Attributes {
        uid: id(header.uid())?,
        gid: id(header.gid())?,
        mode: header.mode().map_err(OciError::Read)?,
        mtime_s: i64::try_from(header.mtime().unwrap_or(0)).unwrap_or(0),
    })
}

/// File capabilities and the user's own attributes; others have no meaning in the guest.
fn xattrs(entry: &mut tar::Entry<'_, &mut dyn Read>) -> Result<Vec<(String, Vec<u8>)>, OciError> {
    let mut found = Vec::new();
    let Some(extensions) = entry.pax_extensions().map_err(OciError::Read)? else { return Ok(found) };
    for extension in extensions {
        let extension = extension.map_err(OciError::Read)?;
        let Some(key) = extension.key().ok().and_then(|k| k.strip_prefix(XATTR_PREFIX)) else { continue };
        if key == "security.capability" || key.starts_with("user.") {
            found.push((key.to_owned(), extension.value_bytes().to_owned()));
        }
    }
    Ok(found)
}

fn lossy(raw: &[u8]) -> String {
    String::from_utf8_lossy(raw).escape_debug().to_string()
}
