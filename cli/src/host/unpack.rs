//! Unpacks a tar stream from a session beneath one folder, whatever the stream says.
//!
//! Every path is opened beneath the folder with openat2 (RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS): chained links, `..`
//! and absolute names lead nowhere. Each file is written under another name and then renamed: old or new, never half.
//! Devices, pipes and sockets are left out; modes survive without set-user-id and the like.

use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, linkat, mkdirat, openat2, renameat, symlinkat, unlinkat};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

const BENEATH: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS);
/// Name of a file that is not whole yet.
const PARTIAL: &str = ".ks-partial";

/// What came.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Unpacked {
    /// Files and links.
    pub files: u64,
    /// Bytes of files.
    pub bytes: u64,
    /// Entries that were left out, with the reason.
    pub left_out: Vec<String>,
}

/// Unpacks beneath `root` (made if missing). With `only`, the archive must hold one file, which gets that name.
pub fn unpack(from: impl Read, root: &Path, only: Option<&Path>) -> io::Result<Unpacked> {
    std::fs::create_dir_all(root)?;
    let root = OwnedFd::from(File::open(root)?);
    let mut done = Unpacked::default();
    let mut archive = tar::Archive::new(from);
    for entry in archive.entries()? {
        let mut entry = entry?;
        let named = entry.path()?.into_owned();
        let path = match (only, plain(&named)) {
            (Some(_), _) if done.files > 0 => return Err(io::Error::other("the session sent more than the one file asked for")),
            (Some(name), Some(_)) => name.to_path_buf(),
            (None, Some(p)) if p.as_os_str().is_empty() => continue,
            (None, Some(p)) => p,
            (_, None) => {
                done.left_out.push(format!("{}: leads out of the folder", named.display()));
                continue;
            }
        };
        if let Err(e) = one(&root, &path, &mut entry, &mut done) {
            match e.raw_os_error().map(rustix::io::Errno::from_raw_os_error) {
                Some(rustix::io::Errno::LOOP | rustix::io::Errno::XDEV) => {
                    done.left_out.push(format!("{}: a link is in the way", path.display()));
                }
                _ => return Err(io::Error::new(e.kind(), format!("{}: {e}", path.display()))),
            }
        }
    }
    Ok(done)
}

/// The path with only plain components; None if it has others.
fn plain(path: &Path) -> Option<PathBuf> {
    path.components().filter(|c| *c != Component::CurDir).try_fold(PathBuf::new(), |p, c| match c {
        Component::Normal(n) => Some(p.join(n)),
        Component::CurDir | Component::ParentDir | Component::RootDir | Component::Prefix(_) => None,
    })
}

/// The folder of `path` beneath the root, made if missing.
fn parent(root: &OwnedFd, path: &Path) -> io::Result<OwnedFd> {
    let mut at = root.try_clone()?;
    for c in path.parent().into_iter().flat_map(Path::components) {
        at = folder(&at, Path::new(c.as_os_str()))?;
    }
    Ok(at)
}

fn folder(at: &OwnedFd, name: &Path) -> io::Result<OwnedFd> {
    match mkdirat(at, name, Mode::from_raw_mode(0o755)) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => {}
        Err(e) => return Err(e.into()),
    }
    Ok(openat2(at, name, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty(), BENEATH)?)
}

fn one<R: Read>(root: &OwnedFd, path: &Path, entry: &mut tar::Entry<'_, R>, done: &mut Unpacked) -> io::Result<()> {
    let at = parent(root, path)?;
    let name = Path::new(path.file_name().ok_or_else(|| io::Error::other("an entry without a name"))?);
    let kind = entry.header().entry_type();
    match kind {
        tar::EntryType::Directory => {
            folder(&at, name)?;
            return Ok(());
        }
        tar::EntryType::Symlink => {
            let to = entry.link_name()?.ok_or_else(|| io::Error::other("a link without a target"))?.into_owned();
            replace(&at, name, |partial| Ok(symlinkat(&to, at.as_fd(), partial)?))?;
        }
        tar::EntryType::Link => {
            let to = entry.link_name()?.and_then(|t| plain(&t)).ok_or_else(|| io::Error::other("a link that leads out"))?;
            let source = parent(root, &to)?;
            let source_name = to.file_name().ok_or_else(|| io::Error::other("a link without a target"))?;
            // Flags are empty: a symbolic link is linked as itself, never followed.
            replace(&at, name, |partial| Ok(linkat(source.as_fd(), source_name, at.as_fd(), partial, AtFlags::empty())?))?;
        }
        tar::EntryType::Regular | tar::EntryType::Continuous | tar::EntryType::GNUSparse => {
            let mode = Mode::from_raw_mode(entry.header().mode().unwrap_or(0o644) & 0o777);
            done.bytes += entry.size();
            replace(&at, name, |partial| {
                let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
                let mut file = File::from(openat2(&at, partial, flags, Mode::from_raw_mode(0o600), BENEATH)?);
                let size = entry.size();
                if copy(entry, &mut file)? != size {
                    return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the stream ended within the file"));
                }
                rustix::fs::fchmod(&file, mode)?;
                Ok(())
            })?;
        }
        other => {
            done.left_out.push(format!("{}: no file, folder or link ({other:?})", path.display()));
            return Ok(());
        }
    }
    done.files += 1;
    Ok(())
}

/// Copies with holes where there are whole blocks of zeros; returns the length.
fn copy(from: &mut impl Read, to: &mut File) -> io::Result<u64> {
    use std::io::{Seek, SeekFrom, Write};
    let mut block = vec![0; 64 * 1024];
    let mut end = 0u64;
    loop {
        let n = from.read(&mut block)?;
        if n == 0 {
            to.set_len(end)?;
            return Ok(end);
        }
        end += n as u64;
        if n >= 4096 && block[..n].iter().all(|b| *b == 0) {
            to.seek(SeekFrom::Start(end))?;
        } else {
            to.write_all(&block[..n])?;
        }
    }
}

/// Makes something under another name and moves it into place.
fn replace(at: &OwnedFd, name: &Path, make: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    let partial = PathBuf::from(format!("{PARTIAL}-{}", std::process::id()));
    match unlinkat(at, &partial, AtFlags::empty()) {
        Ok(()) | Err(rustix::io::Errno::NOENT) => {}
        Err(e) => return Err(e.into()),
    }
    let made = make(&partial).and_then(|()| Ok(renameat(at, &partial, at, name)?));
    if made.is_err() {
        // The first error is the one to tell.
        let _ = unlinkat(at, &partial, AtFlags::empty());
    }
    made
}

#[cfg(test)]
mod tests {
    use super::*;

    enum What<'a> {
        File(&'a str),
        Link(&'a str),
        Hard(&'a str),
        Dir,
        Pipe,
    }

    /// An archive with names that the tar crate itself would refuse to write.
    fn archive(entries: &[(&str, What<'_>)]) -> Vec<u8> {
        let mut b = tar::Builder::new(vec![]);
        for (name, what) in entries {
            let mut h = tar::Header::new_gnu();
            h.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
            h.set_mode(0o4755);
            let (kind, data, link) = match what {
                What::File(d) => (tar::EntryType::Regular, *d, None),
                What::Link(t) => (tar::EntryType::Symlink, "", Some(t)),
                What::Hard(t) => (tar::EntryType::Link, "", Some(t)),
                What::Dir => (tar::EntryType::Directory, "", None),
                What::Pipe => (tar::EntryType::Fifo, "", None),
            };
            h.set_entry_type(kind);
            h.set_size(data.len() as u64);
            if let Some(t) = link {
                h.as_old_mut().linkname[..t.len()].copy_from_slice(t.as_bytes());
            }
            h.set_cksum();
            b.append(&h, data.as_bytes()).unwrap();
        }
        b.into_inner().unwrap()
    }

    #[test]
    fn nothing_lands_outside_whatever_the_guest_sends() {
        let t = tempfile::tempdir().unwrap();
        let outside = t.path().join("outside");
        std::fs::create_dir(&outside).unwrap();
        std::fs::write(outside.join("f"), "mine").unwrap();
        let root = t.path().join("root");
        let out = outside.to_str().unwrap();
        let bytes = archive(&[
            ("../outside/f", What::File("evil")),
            ("/etc/ks-evil", What::File("evil")),
            ("a", What::Link("b")),
            ("b", What::Link(out)),
            ("b/f", What::File("evil")),
            ("a/f", What::File("evil")),
            ("b/new/x", What::File("evil")),
            ("c", What::Hard("../outside/f")),
        ]);
        let got = unpack(bytes.as_slice(), &root, None);
        assert!(got.is_err(), "a hard link that leads out is an error: {got:?}");
        let got = unpack(
            &archive(&[
                ("../outside/f", What::File("evil")),
                ("a", What::Link("b")),
                ("b", What::Link(out)),
                ("b/f", What::File("evil")),
                ("a/f", What::File("evil")),
                ("b/new/x", What::File("evil")),
                ("pipe", What::Pipe),
                ("ok/deep/f", What::File("fine")),
            ])[..],
            &root,
            None,
        )
        .unwrap();
        assert_eq!(got.left_out.len(), 5, "{got:?}");
        assert_eq!(std::fs::read_to_string(outside.join("f")).unwrap(), "mine");
        assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 1);
        assert_eq!(std::fs::read_to_string(root.join("ok/deep/f")).unwrap(), "fine");
        assert_eq!(std::fs::read_link(root.join("b")).unwrap(), outside);
    }

    #[test]
    fn files_replace_links_and_old_files_whole_and_lose_special_modes() {
        use std::os::unix::fs::PermissionsExt;
        let t = tempfile::tempdir().unwrap();
        let root = t.path().join("root");
        std::fs::create_dir(&root).unwrap();
        std::fs::write(t.path().join("target"), "mine").unwrap();
        std::os::unix::fs::symlink(t.path().join("target"), root.join("f")).unwrap();
        unpack(&archive(&[("./", What::Dir), ("f", What::File("new")), ("g", What::Hard("f"))])[..], &root, None).unwrap();
        assert_eq!(std::fs::read_to_string(t.path().join("target")).unwrap(), "mine", "the link was replaced, not followed");
        assert_eq!(std::fs::read_to_string(root.join("g")).unwrap(), "new");
        assert_eq!(root.join("f").metadata().unwrap().permissions().mode() & 0o7777, 0o755);
        assert_eq!(std::fs::read_dir(&root).unwrap().count(), 2, "no partial file is left");
    }

    #[test]
    fn one_file_takes_the_name_asked_for_and_a_cut_stream_leaves_the_old_one() {
        let t = tempfile::tempdir().unwrap();
        let bytes = archive(&[("remote-name", What::File("hello"))]);
        unpack(&bytes[..], t.path(), Some(Path::new("mine"))).unwrap();
        assert_eq!(std::fs::read_to_string(t.path().join("mine")).unwrap(), "hello");
        let two = archive(&[("a", What::File("x")), ("b", What::File("y"))]);
        assert!(unpack(&two[..], t.path(), Some(Path::new("two"))).is_err());
        let long = "z".repeat(5000);
        let cut = archive(&[("remote-name", What::File(&long))]);
        assert!(unpack(&cut[..2000], t.path(), Some(Path::new("mine"))).is_err());
        assert_eq!(std::fs::read_to_string(t.path().join("mine")).unwrap(), "hello");
        assert_eq!(std::fs::read_dir(t.path()).unwrap().count(), 2);
    }
}
