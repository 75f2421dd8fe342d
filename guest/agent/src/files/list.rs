//! Sizes and hashes of all files below a path, one JSON object a line, in the order of their paths.

use std::{
    fs::{File, Metadata},
    io::{self, Read, Write},
    os::unix::{
        ffi::OsStrExt as _,
        fs::{MetadataExt as _, OpenOptionsExt as _},
    },
    path::{Path, PathBuf},
};

use ks_proto::guest::FileEntry;

/// What is listed.
pub(super) struct Listing {
    root: PathBuf,
    metadata: Metadata,
}

impl Listing {
    /// Looks at `path`.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        Ok(Self { root: path.to_owned(), metadata: path.symlink_metadata()? })
    }

    /// Writes all entries.
    pub(super) fn write(self, mut sink: impl Write) -> io::Result<()> {
        if self.metadata.is_dir() {
            self.directory(&self.root, &mut sink)?;
        } else {
            write_entry(&self.root, &self.metadata, &mut sink)?;
        }
        sink.flush()
    }

    fn directory(&self, dir: &Path, sink: &mut impl Write) -> io::Result<()> {
        // A directory that is gone or closed to us has no files to list.
        let Ok(entries) = std::fs::read_dir(dir) else { return Ok(()) };
        let mut paths: Vec<PathBuf> = entries.flatten().map(|e| e.path()).collect();
        paths.sort();
        for path in paths {
            let Ok(metadata) = path.symlink_metadata() else { continue };
            if metadata.dev() != self.metadata.dev() {
                continue;
            }
            if metadata.is_dir() {
                self.directory(&path, sink)?;
            } else {
                write_entry(&path, &metadata, sink)?;
            }
        }
        Ok(())
    }
}

fn write_entry(path: &Path, metadata: &Metadata, sink: &mut impl Write) -> io::Result<()> {
    let hash = if metadata.is_symlink() {
        path.read_link().map(|target| blake3::hash(target.as_os_str().as_bytes()).to_hex().to_string())
    } else if metadata.is_file() {
        hash_file(path)
    } else {
        return Ok(());
    };
    let entry = FileEntry {
        path: path.to_string_lossy().into_owned(),
        bytes: metadata.len(),
        hash: hash.unwrap_or_default(),
        mode: metadata.mode(),
    };
    serde_json::to_writer(&mut *sink, &entry)?;
    sink.write_all(b"\n")
}

fn hash_file(path: &Path) -> io::Result<String> {
    let mut file = File::options().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
    let mut hasher = blake3::Hasher::new();
    let mut buf = vec![0; 64 * 1024];
    loop {
        match file.read(&mut buf)? {
            0 => return Ok(hasher.finalize().to_hex().to_string()),
            n => hasher.update(&buf[..n]),
        };
    }
}
