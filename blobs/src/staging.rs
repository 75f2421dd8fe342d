//! Packs on their way in from a peer. What has arrived of one survives the process, and the next attempt goes on from there.
//!
//! ```text
//!   stage ──> staging/<pack id>.part ──write──> … ──adopt: verify, fsync──> packs/
//!                       └── a crash, a lost peer: stays; wrong bytes, a full disk: removed; unused for long: removed by a collection
//! ```
//! Bytes that a part had when it was opened are not trusted: the whole pack is hashed again before it is adopted.

use crate::error::{At, StoreError};
use crate::store::Store;
use ks_proto::ids::PackId;
use ks_proto::pack::{HEADER_BYTES, PACK_BYTES_MAX, TRAILER_BYTES};
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

/// Verified bytes that are written at once.
const WRITE: usize = 1 << 20;
/// Parts that stay in memory until they are adopted, so that nothing is read back: 128 MiB at most, over all receptions.
const KEPT_MAX: usize = 4;

/// A resumed part begins at a multiple of this, the size of a verified group.
const ALIGN: u64 = 16 * 1024;

/// A pack that is being received. One at a time per pack; dropping it leaves what was written for the next attempt.
pub struct Part {
    store: Arc<Store>,
    id: PackId,
    bytes: u64,
    path: PathBuf,
    file: File,
    at: u64,
    resumed: u64,
    /// What arrived and is not written yet; with `kept`, all that arrived.
    buffer: Vec<u8>,
    /// How much of the buffer is in the file.
    written: usize,
    kept: bool,
}

impl std::fmt::Debug for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Part").field("id", &self.id).field("at", &self.at).field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl Store {
    /// Begins, or goes on, to receive the pack `id` of `bytes` bytes.
    ///
    /// # Errors
    /// If no pack has that size, it is being received already, or the disk refuses.
    pub(crate) fn stage(self: &Arc<Self>, id: PackId, bytes: u64) -> Result<Part, StoreError> {
        if bytes < (HEADER_BYTES + TRAILER_BYTES) as u64 || bytes > PACK_BYTES_MAX as u64 {
            return Err(StoreError::Pack { id, why: format!("a peer says that it has {bytes} bytes, which no pack has") });
        }
        if !self.state_mut().staging.insert(id) {
            return Err(StoreError::Refused { what: "receive a pack", why: format!("pack {} is being received", id.short()) });
        }
        let path = self.root.join("staging").join(format!("{id}.part"));
        let opened = self.open_part(&path, bytes);
        if opened.is_err() {
            self.state_mut().staging.remove(&id);
        }
        let (file, at) = opened?;
        let kept = {
            let mut s = self.state_mut();
            let kept = at == 0 && s.kept_parts < KEPT_MAX;
            s.kept_parts += usize::from(kept);
            kept
        };
        let room = if kept { usize::try_from(bytes).unwrap_or(0) } else { WRITE };
        let buffer = Vec::with_capacity(room);
        Ok(Part { store: self.clone(), id, bytes, path, file, at, resumed: at, buffer, written: 0, kept })
    }

    fn open_part(&self, path: &std::path::Path, bytes: u64) -> Result<(File, u64), StoreError> {
        match self.disk.reopen(path) {
            Ok(file) => {
                let len = self.disk.len(&file).at("stat", path)?;
                if len <= bytes {
                    return Ok((file, len / ALIGN * ALIGN));
                }
                self.disk.unlink(path).at("remove", path)?;
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            Err(e) => return Err(StoreError::io("open", path, e)),
        }
        Ok((self.disk.create(path).at("create", path)?, 0))
    }

    /// Removes parts that nobody has gone on with since `old_enough`.
    pub(crate) fn drop_stale_parts(&self, old_enough: u64) -> Result<(), StoreError> {
        let dir = self.root.join("staging");
        for f in self.disk.list(&dir).at("list", &dir)?.into_iter().filter(|f| f.modified_ms < old_enough) {
            let id = f.name.strip_suffix(".part").and_then(|n| n.parse::<PackId>().ok());
            // Taken, as `stage` would: nobody goes on with it while it is removed.
            if id.is_some_and(|id| !self.state_mut().staging.insert(id)) {
                continue;
            }
            let path = dir.join(&f.name);
            let removed = match self.disk.unlink(&path) {
                // Adopted or discarded since it was listed.
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
                other => other.at("remove", &path),
            };
            if let Some(id) = id {
                self.state_mut().staging.remove(&id);
            }
            removed?;
        }
        Ok(())
    }
}

impl Part {
    /// The pack.
    pub fn id(&self) -> PackId {
        self.id
    }
    /// Everything before it has arrived and is in the file.
    pub fn at(&self) -> u64 {
        self.at
    }
    /// Where the next byte goes.
    pub fn next(&self) -> u64 {
        self.at + (self.buffer.len() - self.written) as u64
    }
    /// The pack's size.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
    /// How much had arrived before, in an earlier attempt.
    pub fn resumed(&self) -> u64 {
        self.resumed
    }

    /// Appends bytes that were verified against the pack's name. They reach the file in large blocks, the rest with
    /// [`Self::flush`].
    ///
    /// # Errors
    /// If the disk refuses; then what is not in the file is forgotten.
    ///
    /// # Panics
    /// If there would be more than the pack's size.
    pub fn push(&mut self, bytes: &[u8]) -> Result<(), StoreError> {
        assert!(self.next() + bytes.len() as u64 <= self.bytes, "the receiver counts");
        self.buffer.extend_from_slice(bytes);
        if self.buffer.len() - self.written >= WRITE { self.flush() } else { Ok(()) }
    }

    /// Writes what arrived and is not in the file.
    ///
    /// # Errors
    /// As [`Self::push`].
    pub fn flush(&mut self) -> Result<(), StoreError> {
        let waiting = &self.buffer[self.written..];
        if waiting.is_empty() {
            return Ok(());
        }
        let (done, length) = (self.store.disk.append(&self.file, self.at, waiting).at("write", &self.path), waiting.len());
        match (&done, self.kept) {
            (Err(_), _) => self.buffer.truncate(self.written),
            (Ok(()), true) => self.written += length,
            (Ok(()), false) => self.buffer.clear(),
        }
        if done.is_ok() {
            self.at += length as u64;
        }
        done
    }

    /// [`Self::push`] and [`Self::flush`].
    ///
    /// # Errors
    /// If the disk refuses.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), StoreError> {
        self.push(bytes)?;
        self.flush()
    }

    /// The whole pack as it arrived, if it was kept in memory; each byte was verified as it came.
    pub(crate) fn whole(&self) -> Option<&[u8]> {
        (self.kept && self.buffer.len() as u64 == self.bytes).then_some(self.buffer.as_slice())
    }

    /// Removes what has arrived: it is wrong, or there is no room.
    pub fn discard(self) {
        let _ = self.store.disk.unlink(&self.path); // a part that stays is never trusted
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }
    pub(crate) fn path(&self) -> &std::path::Path {
        &self.path
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        let mut s = self.store.state_mut();
        s.staging.remove(&self.id);
        s.kept_parts -= usize::from(self.kept);
    }
}
