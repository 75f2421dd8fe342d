//! All of the store's I/O: the trait that the store acts through, and the real file system behind it.
//!
//! No policy lives here. Tests put a modelled disk behind the same trait (crash at every step, full disk).

pub mod keyfile;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// One name in a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Its name; names that are not UTF-8 are shown with replacements and match nothing of ours.
    pub name: String,
    /// A folder rather than a file.
    pub is_dir: bool,
    /// Length in bytes.
    pub bytes: u64,
    /// Last change, Unix milliseconds.
    pub modified_ms: u64,
}

/// The file system, as far as the store needs it. Nothing is durable before its `sync` (contents) and `sync_dir` (names).
pub trait Disk: Send + Sync {
    /// Creates a new file (error if it exists), mode 0600, for reading and writing.
    fn create(&self, path: &Path) -> io::Result<File>;
    /// Opens for reading.
    fn open(&self, path: &Path) -> io::Result<File>;
    /// Opens an unfinished file again, for reading and writing.
    fn reopen(&self, path: &Path) -> io::Result<File>;
    /// Writes all of `bytes` at `offset`, which is the file's end, or within a file that was reopened.
    fn append(&self, file: &File, offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// Fills `buf` from `offset`.
    fn read_at(&self, file: &File, buf: &mut [u8], offset: u64) -> io::Result<()>;
    /// Length in bytes.
    fn len(&self, file: &File) -> io::Result<u64>;
    /// Makes a file's contents durable.
    fn sync(&self, file: &File) -> io::Result<()>;
    /// Makes a folder's names durable.
    fn sync_dir(&self, dir: &Path) -> io::Result<()>;
    /// Renames within the store, replacing.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file's name.
    fn unlink(&self, path: &Path) -> io::Result<()>;
    /// Makes a folder, mode 0700; true if it is new.
    fn make_dir(&self, path: &Path) -> io::Result<bool>;
    /// The names in a folder, sorted.
    fn list(&self, dir: &Path) -> io::Result<Vec<Found>>;
    /// Takes the exclusive lock on the file at `path` (made if missing), held while the file is open.
    fn lock(&self, path: &Path) -> io::Result<File>;
    /// Wall clock, Unix milliseconds.
    fn now_ms(&self) -> u64;
}

/// The operating system's file system.
#[derive(Debug, Default)]
pub struct RealDisk;

impl Disk for RealDisk {
    fn create(&self, path: &Path) -> io::Result<File> {
        OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)
    }
    fn open(&self, path: &Path) -> io::Result<File> {
        File::open(path)
    }
    fn reopen(&self, path: &Path) -> io::Result<File> {
        OpenOptions::new().read(true).write(true).open(path)
    }
    fn append(&self, file: &File, offset: u64, bytes: &[u8]) -> io::Result<()> {
        file.write_all_at(bytes, offset)
    }
    fn read_at(&self, file: &File, buf: &mut [u8], offset: u64) -> io::Result<()> {
        file.read_exact_at(buf, offset)
    }
    fn len(&self, file: &File) -> io::Result<u64> {
        Ok(file.metadata()?.len())
    }
    fn sync(&self, file: &File) -> io::Result<()> {
        file.sync_all()
    }
    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        File::open(dir)?.sync_all()
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        std::fs::rename(from, to)
    }
    fn unlink(&self, path: &Path) -> io::Result<()> {
        std::fs::remove_file(path)
    }
    fn make_dir(&self, path: &Path) -> io::Result<bool> {
        match std::fs::DirBuilder::new().mode(0o700).create(path) {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(false),
            Err(e) => Err(e),
        }
    }
    fn list(&self, dir: &Path) -> io::Result<Vec<Found>> {
        let mut out = Vec::new();
        for entry in std::fs::read_dir(dir)? {
            let entry = entry?;
            let meta = match entry.metadata() {
                // Gone since it was listed.
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                other => other?,
            };
            let modified_ms =
                u64::try_from(meta.mtime()).unwrap_or(0) * 1000 + u64::try_from(meta.mtime_nsec()).unwrap_or(0) / 1_000_000;
            let name = entry.file_name().to_string_lossy().into_owned();
            out.push(Found { name, is_dir: meta.is_dir(), bytes: meta.len(), modified_ms });
        }
        out.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(out)
    }
    fn lock(&self, path: &Path) -> io::Result<File> {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
        rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive)?;
        Ok(file)
    }
    fn now_ms(&self) -> u64 {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
    }
}

/// Fresh random bytes from the operating system.
///
/// # Errors
/// If the system has no entropy source, which is fatal to sealing anything.
pub fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut out = [0u8; N];
    getrandom::fill(&mut out).map_err(|e| io::Error::other(format!("no random bytes: {e}")))?;
    Ok(out)
}

/// The next range of data at or after `from`, skipping holes without reading them; None at the end.
pub fn next_data(file: &File, from: u64, len: u64) -> io::Result<Option<(u64, u64)>> {
    use rustix::fs::SeekFrom;
    if from >= len {
        return Ok(None);
    }
    let start = match rustix::fs::seek(file, SeekFrom::Data(from)) {
        Ok(at) => at,
        Err(rustix::io::Errno::NXIO) => return Ok(None),
        // A file system without hole support: everything is data.
        Err(rustix::io::Errno::INVAL) => return Ok(Some((from, len))),
        Err(e) => return Err(e.into()),
    };
    let end = rustix::fs::seek(file, SeekFrom::Hole(start))?;
    Ok(Some((start.min(len), end.min(len))))
}
