//! The bodies of one session's calls. Space for an answer is taken before its call is sent.

use crate::host::files;
use crate::limits::ANSWER_SPACE_BYTES;
use rustix::fs::FallocateFlags;
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;

/// What came before an answer's body.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredHead {
    /// HTTP status.
    pub status: u16,
    /// Headers that pass to the client, in their order.
    pub headers: Vec<(String, String)>,
}

/// The folder of bodies.
#[derive(Debug, Clone)]
pub struct Bodies {
    dir: PathBuf,
}

impl Bodies {
    /// In `dir`, which is there.
    pub fn new(dir: PathBuf) -> Self {
        Self { dir }
    }

    fn path(&self, seq: u64, kind: &str) -> PathBuf {
        self.dir.join(format!("{seq}.{kind}"))
    }

    fn create(&self, seq: u64, kind: &str, space: u64) -> io::Result<File> {
        let path = self.path(seq, kind);
        let f = OpenOptions::new().read(true).write(true).create(true).truncate(true).mode(0o600).open(path)?;
        if space > 0 {
            rustix::fs::fallocate(&f, FallocateFlags::KEEP_SIZE, 0, space)?;
        }
        Ok(f)
    }

    /// Makes the files of a call, with their space taken; removes them again if there is not enough.
    ///
    /// # Errors
    /// As the disk says, above all that it is full.
    pub fn make(&self, seq: u64, request_bytes: u64) -> io::Result<(File, File)> {
        let made = (|| Ok((self.create(seq, "req", request_bytes)?, self.create(seq, "resp", ANSWER_SPACE_BYTES)?)))();
        if made.is_err() {
            self.remove(seq);
        }
        made
    }

    /// Takes more space for an answer that has `len` bytes.
    ///
    /// # Errors
    /// As the disk says.
    pub fn grow(file: &File, len: u64) -> io::Result<()> {
        Ok(rustix::fs::fallocate(file, FallocateFlags::KEEP_SIZE, len, ANSWER_SPACE_BYTES)?)
    }

    /// Stores the head; durable with [`Bodies::sync`].
    ///
    /// # Errors
    /// As the disk says.
    pub fn put_head(&self, seq: u64, json: &[u8]) -> io::Result<()> {
        self.create(seq, "head", 0)?.write_all_at(json, 0)
    }

    /// Makes a call's head, request and the names of its files durable. Done while the answer still comes, so that its end
    /// need not wait for it.
    ///
    /// # Errors
    /// As the disk says.
    pub fn sync_early(&self, seq: u64) -> io::Result<()> {
        for kind in ["head", "req"] {
            match File::open(self.path(seq, kind)) {
                Ok(f) => f.sync_data()?,
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(e),
            }
        }
        files::sync_dir(&self.dir)
    }

    /// Gives back space that an answer did not use, and makes it durable.
    ///
    /// # Errors
    /// As the disk says.
    pub fn sync_answer(answer: &File) -> io::Result<()> {
        answer.set_len(answer.metadata()?.len())?;
        answer.sync_data()
    }

    /// The stored answer's body.
    ///
    /// # Errors
    /// As the disk says.
    pub fn answer(&self, seq: u64) -> io::Result<File> {
        File::open(self.path(seq, "resp"))
    }

    /// The stored head and its bytes.
    ///
    /// # Errors
    /// If it is not there or damaged.
    pub fn head(&self, seq: u64) -> io::Result<(StoredHead, Vec<u8>)> {
        let bytes = std::fs::read(self.path(seq, "head"))?;
        Ok((serde_json::from_slice(&bytes)?, bytes))
    }

    /// Drops all files of a call.
    pub fn remove(&self, seq: u64) {
        for kind in ["req", "head", "resp"] {
            let _ = std::fs::remove_file(self.path(seq, kind));
        }
    }
}
