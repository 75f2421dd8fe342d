//! Packs a plan into a tar stream. Link text is copied, never followed; a file that changes while it is read keeps the
//! archive whole.

use super::files::Item;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use tokio::sync::mpsc;

const PART: usize = 256 * 1024;

/// A writer whose other end is a byte stream.
struct Pipe {
    tx: mpsc::Sender<io::Result<Vec<u8>>>,
    part: Vec<u8>,
}

impl Write for Pipe {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.part.extend_from_slice(bytes);
        if self.part.len() >= PART {
            self.flush()?;
        }
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        let part = std::mem::take(&mut self.part);
        if part.is_empty() {
            return Ok(());
        }
        self.tx.blocking_send(Ok(part)).map_err(|_| io::Error::new(io::ErrorKind::BrokenPipe, "the node stopped reading"))
    }
}

/// Packs on a thread of its own; `packed` learns of every item's bytes. The stream ends with an error if packing does.
pub fn stream(
    items: impl IntoIterator<Item = (PathBuf, Item), IntoIter: Send> + Send + 'static,
    mut packed: impl FnMut(u64) + Send + 'static,
) -> impl futures::Stream<Item = io::Result<Vec<u8>>> + Send + 'static {
    let (tx, rx) = mpsc::channel(4);
    let items = items.into_iter();
    tokio::task::spawn_blocking(move || {
        let pipe = Pipe { tx: tx.clone(), part: Vec::with_capacity(PART) };
        if let Err(e) = pack(pipe, items, &mut packed) {
            // A reader that has gone away knows already.
            let _ = tx.blocking_send(Err(e));
        }
    });
    futures::stream::unfold(rx, |mut rx| async move { rx.recv().await.map(|part| (part, rx)) })
}

fn pack(pipe: impl Write, items: impl Iterator<Item = (PathBuf, Item)>, packed: &mut dyn FnMut(u64)) -> io::Result<()> {
    let mut tar = tar::Builder::new(pipe);
    for (to, item) in items {
        append(&mut tar, &to, &item.source).map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", item.source.display())))?;
        packed(item.bytes);
    }
    tar.into_inner()?.flush()
}

fn append(tar: &mut tar::Builder<impl Write>, to: &Path, source: &Path) -> io::Result<()> {
    let meta = match source.symlink_metadata() {
        // Deleted since the plan was made.
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    let mut head = tar::Header::new_gnu();
    head.set_metadata_in_mode(&meta, tar::HeaderMode::Complete);
    head.set_uid(0);
    head.set_gid(0);
    if meta.is_symlink() {
        head.set_size(0);
        return tar.append_link(&mut head, to, std::fs::read_link(source)?);
    }
    if meta.is_dir() {
        head.set_size(0);
        return tar.append_data(&mut head, to, io::empty());
    }
    // The path may have become a link since; then it is not opened.
    let flags = i32::try_from((rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK).bits()).unwrap_or(0);
    let mut file = std::fs::OpenOptions::new().read(true).custom_flags(flags).open(source)?;
    let meta = file.metadata()?;
    if !meta.is_file() {
        return Ok(());
    }
    if meta.len() > 1 << 20 && meta.blocks().saturating_mul(512) < meta.len() / 2 {
        return tar.append_file(to, &mut file);
    }
    head.set_size(meta.len());
    tar.append_data(&mut head, to, Exactly { file, left: meta.len() })
}

/// Exactly so many bytes of a file: cut if it has grown, zeros if it has shrunk.
struct Exactly {
    file: File,
    left: u64,
}

impl Read for Exactly {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let want = buffer.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        if want == 0 {
            return Ok(0);
        }
        let got = match self.file.read(&mut buffer[..want])? {
            0 => {
                buffer[..want].fill(0);
                want
            }
            n => n,
        };
        self.left -= got as u64;
        Ok(got)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(items: Vec<(&str, PathBuf)>) -> Vec<u8> {
        let mut out = vec![];
        let items = items.into_iter().map(|(to, source)| (PathBuf::from(to), Item { source, bytes: 0 }));
        pack(&mut out, items, &mut |_| {}).unwrap();
        out
    }

    #[test]
    fn links_are_text_modes_survive_and_long_names_pass() {
        use std::os::unix::fs::PermissionsExt;
        let t = tempfile::tempdir().unwrap();
        let long = "n".repeat(200);
        std::fs::write(t.path().join(&long), "x").unwrap();
        std::fs::set_permissions(t.path().join(&long), std::fs::Permissions::from_mode(0o755)).unwrap();
        std::os::unix::fs::symlink("/etc/shadow", t.path().join("l")).unwrap();
        let bytes = packed(vec![(&long, t.path().join(&long)), ("l", t.path().join("l")), ("gone", t.path().join("gone"))]);
        let mut a = tar::Archive::new(bytes.as_slice());
        let got: Vec<_> = a
            .entries()
            .unwrap()
            .map(|e| {
                let e = e.unwrap();
                let link = e.link_name().unwrap().map(|l| l.display().to_string());
                (e.path().unwrap().display().to_string(), e.header().mode().unwrap() & 0o777, link)
            })
            .collect();
        assert_eq!(got[0], (long, 0o755, None));
        assert_eq!((got[1].0.as_str(), got[1].2.as_deref()), ("l", Some("/etc/shadow")));
        assert_eq!(got.len(), 2);
    }

    #[test]
    fn a_file_that_shrinks_or_grows_keeps_the_archive_whole() {
        let t = tempfile::tempdir().unwrap();
        let path = t.path().join("f");
        std::fs::write(&path, "12345").unwrap();
        for (left, want) in [(3, "123"), (8, "12345\0\0\0")] {
            let mut s = String::new();
            Exactly { file: File::open(&path).unwrap(), left }.read_to_string(&mut s).unwrap();
            assert_eq!(s, want);
        }
    }

    #[test]
    fn a_sparse_file_stays_small_on_the_way() {
        let t = tempfile::tempdir().unwrap();
        let path = t.path().join("sparse");
        let f = File::create(&path).unwrap();
        f.set_len(1 << 34).unwrap();
        let bytes = packed(vec![("sparse", path)]);
        assert!(bytes.len() < 100_000, "{} bytes for 16 GiB of holes", bytes.len());
    }
}
