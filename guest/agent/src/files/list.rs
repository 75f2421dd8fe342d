//! Sizes, times and hashes of files, one JSON object a line: of all below a path in the order of their paths, or of
//! those that were asked for. A walk without hashes opens directories only and asks once per entry for its metadata.

use std::{
    fs::{DirEntry, File, Metadata},
    io::{self, Read, Write},
    os::unix::{
        ffi::OsStrExt as _,
        fs::{MetadataExt as _, OpenOptionsExt as _},
    },
    path::{Path, PathBuf},
};

use ks_proto::guest::FileEntry;

const READ_BYTES: usize = 64 * 1024;

/// What is listed.
pub(super) struct Listing {
    what: What,
    hash: bool,
}

enum What {
    Below { root: PathBuf, metadata: Metadata },
    These(Vec<String>),
}

impl Listing {
    /// Everything below `path`, on its file system.
    pub(super) fn below(path: &Path, hash: bool) -> io::Result<Self> {
        let what = What::Below { root: path.to_owned(), metadata: path.symlink_metadata()? };
        Ok(Self { what, hash })
    }

    /// These files, in their order.
    pub(super) fn of(paths: Vec<String>, hash: bool) -> Self {
        Self { what: What::These(paths), hash }
    }

    /// Writes all entries.
    pub(super) fn write(self, sink: impl Write) -> io::Result<()> {
        let mut out = Out { sink, hash: self.hash, buf: Vec::new() };
        match self.what {
            What::Below { root, metadata } if metadata.is_dir() => out.directory(&root, metadata.dev())?,
            What::Below { root, metadata } => out.entry(&root, &metadata)?,
            What::These(paths) => {
                for path in paths.iter().map(Path::new) {
                    if let Ok(metadata) = path.symlink_metadata() {
                        out.entry(path, &metadata)?;
                    }
                }
            }
        }
        out.sink.flush()
    }
}

struct Out<W> {
    sink: W,
    hash: bool,
    /// For reading files; allocated with the first.
    buf: Vec<u8>,
}

impl<W: Write> Out<W> {
    fn directory(&mut self, dir: &Path, device: u64) -> io::Result<()> {
        // A directory that is gone or closed to us has no files to list.
        let Ok(entries) = std::fs::read_dir(dir) else { return Ok(()) };
        let mut entries: Vec<DirEntry> = entries.flatten().collect();
        entries.sort_by_cached_key(DirEntry::file_name);
        // Relative to the open directory, not by the whole path again for every entry.
        let all: Vec<(PathBuf, Metadata)> = entries.iter().filter_map(|e| Some((e.path(), e.metadata().ok()?))).collect();
        // The entries hold the directory open: closed here, so that depth costs no descriptors.
        drop(entries);
        for (path, metadata) in all {
            if metadata.dev() != device {
                continue;
            }
            if metadata.is_dir() {
                self.directory(&path, device)?;
            } else {
                self.entry(&path, &metadata)?;
            }
        }
        Ok(())
    }

    fn entry(&mut self, path: &Path, metadata: &Metadata) -> io::Result<()> {
        if !metadata.is_symlink() && !metadata.is_file() {
            return Ok(());
        }
        // What JSON cannot name cannot be asked for later.
        let hash = if self.hash || path.to_str().is_none() { self.hash_of(path, metadata) } else { Ok(String::new()) };
        let entry = FileEntry {
            path: path.to_string_lossy().into_owned(),
            bytes: metadata.len(),
            hash: hash.unwrap_or_default(),
            mode: metadata.mode(),
            mtime_ns: nanoseconds(metadata.mtime(), metadata.mtime_nsec()),
            ctime_ns: nanoseconds(metadata.ctime(), metadata.ctime_nsec()),
            ino: metadata.ino(),
        };
        serde_json::to_writer(&mut self.sink, &entry)?;
        self.sink.write_all(b"\n")
    }

    fn hash_of(&mut self, path: &Path, metadata: &Metadata) -> io::Result<String> {
        if metadata.is_symlink() {
            return Ok(blake3::hash(path.read_link()?.as_os_str().as_bytes()).to_hex().to_string());
        }
        let mut file = File::options().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
        self.buf.resize(READ_BYTES, 0);
        let mut hasher = blake3::Hasher::new();
        loop {
            match file.read(&mut self.buf)? {
                0 => return Ok(hasher.finalize().to_hex().to_string()),
                n => hasher.update(&self.buf[..n]),
            };
        }
    }
}

fn nanoseconds(seconds: i64, rest: i64) -> i64 {
    seconds.saturating_mul(1_000_000_000).saturating_add(rest)
}
