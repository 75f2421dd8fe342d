//! Packing a file or a directory into a tar stream. Links are kept as links; other file systems are not entered.

use std::{
    fs::{File, Metadata},
    io::{self, Read, Write},
    os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

/// What is packed.
pub(super) struct Source {
    root: PathBuf,
    metadata: Metadata,
}

impl Source {
    /// Looks at `path`; a link there is followed.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let root = path.canonicalize()?;
        let metadata = root.metadata()?;
        Ok(Self { root, metadata })
    }

    /// Writes the archive, with its end.
    pub(super) fn pack(self, sink: impl Write) -> io::Result<()> {
        let mut builder = tar::Builder::new(sink);
        builder.follow_symlinks(false);
        if self.metadata.is_dir() {
            self.directory(&mut builder, &self.root, Path::new(""))?;
        } else {
            let name = self.root.file_name().map(PathBuf::from).unwrap_or_default();
            append(&mut builder, &self.root, &name, &self.metadata)?;
        }
        builder.finish()?;
        builder.get_mut().flush()
    }

    fn directory(&self, builder: &mut tar::Builder<impl Write>, dir: &Path, name: &Path) -> io::Result<()> {
        let mut entries: Vec<_> = std::fs::read_dir(dir)?.collect::<io::Result<_>>()?;
        entries.sort_by_key(std::fs::DirEntry::file_name);
        for entry in entries {
            let (path, name) = (entry.path(), name.join(entry.file_name()));
            // Entries come and go while the agent works; what is gone is left out.
            let Some(metadata) = if_there(path.symlink_metadata())? else { continue };
            append(builder, &path, &name, &metadata)?;
            if metadata.is_dir() && metadata.dev() == self.metadata.dev() && if_there(path.read_dir())?.is_some() {
                self.directory(builder, &path, &name)?;
            }
        }
        Ok(())
    }
}

fn if_there<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

fn append(builder: &mut tar::Builder<impl Write>, path: &Path, name: &Path, metadata: &Metadata) -> io::Result<()> {
    let kind = metadata.file_type();
    let mut header = tar::Header::new_gnu();
    header.set_metadata(metadata);
    if kind.is_symlink() {
        let Some(target) = if_there(path.read_link())? else { return Ok(()) };
        header.set_size(0);
        return builder.append_link(&mut header, name, target);
    }
    if kind.is_dir() {
        header.set_size(0);
        return builder.append_data(&mut header, name, io::empty());
    }
    if kind.is_fifo() || kind.is_socket() || kind.is_block_device() || kind.is_char_device() {
        return Ok(());
    }
    // Not following: the entry may have become a link since it was looked at.
    let opened = File::options().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path);
    let Some(mut file) = if_there(opened)? else { return Ok(()) };
    if metadata.blocks() * 512 < metadata.len() {
        return builder.append_file(name, &mut file);
    }
    header.set_size(metadata.len());
    builder.append_data(&mut header, name, exactly(file, metadata.len()))
}

/// As many bytes as the header promises: a file that grows is cut, one that shrinks is filled with zeros.
fn exactly(file: File, bytes: u64) -> impl Read {
    file.take(bytes).chain(io::repeat(0)).take(bytes)
}
