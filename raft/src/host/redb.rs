//! The disk of a real node: two redb files, `log.redb` and `state.redb`, so that writing a large snapshot does not hold up
//! the log. Every commit is synced. Layout: docs/formats.md.

use super::disk::{Disk, LogBatch, StoredSnapshot};
use futures::FutureExt;
use futures::future::BoxFuture;
use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

const LOG: TableDefinition<u64, &[u8]> = TableDefinition::new("log");
const NOTES: TableDefinition<&str, &[u8]> = TableDefinition::new("notes");
const PIECES: TableDefinition<u64, &[u8]> = TableDefinition::new("snapshot");
/// The snapshot is cut into values of this size.
const PIECE_BYTES: usize = 1 << 20;
/// Memory of redb's cache for each file.
const CACHE_BYTES: usize = 16 << 20;

fn fail<E: Into<redb::Error>>(e: E) -> io::Error {
    match e.into() {
        redb::Error::Io(e) => e,
        other => io::Error::other(other),
    }
}

/// One redb file, opened again after an I/O error (a full disk), since redb refuses all work after one.
struct File {
    path: PathBuf,
    slot: Mutex<Slot>,
}

enum Slot {
    Open(Database),
    /// It failed: the next call opens it again.
    Failed,
    /// It was closed for good.
    Closed,
}

impl File {
    fn open(path: PathBuf) -> io::Result<Arc<Self>> {
        let db = Self::database(&path)?;
        Ok(Arc::new(Self { path, slot: Mutex::new(Slot::Open(db)) }))
    }

    fn database(path: &Path) -> io::Result<Database> {
        let db = redb::Builder::new().set_cache_size(CACHE_BYTES).create(path).map_err(|e| fail(redb::Error::from(e)))?;
        // Names and commands of sessions are private.
        std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
        let tx = db.begin_write().map_err(fail)?;
        tx.open_table(LOG).map_err(fail)?;
        tx.open_table(NOTES).map_err(fail)?;
        tx.open_table(PIECES).map_err(fail)?;
        tx.commit().map_err(fail)?;
        Ok(db)
    }

    fn with<T>(&self, f: impl FnOnce(&Database) -> Result<T, redb::Error>) -> io::Result<T> {
        let mut slot = self.slot.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*slot, Slot::Failed) {
            *slot = Slot::Open(Self::database(&self.path)?);
        }
        let Slot::Open(db) = &*slot else {
            return Err(io::Error::new(io::ErrorKind::BrokenPipe, "the database was closed"));
        };
        let done = f(db);
        if matches!(done, Err(redb::Error::Io(_) | redb::Error::PreviousIo)) {
            *slot = Slot::Failed;
        }
        done.map_err(fail)
    }

    fn close(&self) {
        *self.slot.lock().unwrap_or_else(PoisonError::into_inner) = Slot::Closed;
    }
}

/// The two files of one node.
pub struct RedbDisk {
    log: Arc<File>,
    state: Arc<File>,
}

impl RedbDisk {
    /// Opens or makes the files in `dir`.
    ///
    /// # Errors
    /// If they cannot be made or read, or another process has them open.
    pub fn open(dir: &Path) -> io::Result<Self> {
        std::fs::create_dir_all(dir)?;
        let filled = |name: &str| std::fs::metadata(dir.join(name)).is_ok_and(|m| m.len() > 0);
        if filled("state.redb") && !filled("log.redb") {
            // The log is made first. A state without one has lost votes and entries: a blank log would deny them.
            let path = dir.join("log.redb");
            let why = format!("{} is missing or empty, and state.redb beside it is not: put it back from a copy", path.display());
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        let disk = Self { log: File::open(dir.join("log.redb"))?, state: File::open(dir.join("state.redb"))? };
        // The names of the files must survive a power cut as well.
        std::fs::File::open(dir)?.sync_all()?;
        Ok(disk)
    }
}

fn blocking<T: Send + 'static>(f: impl FnOnce() -> io::Result<T> + Send + 'static) -> BoxFuture<'static, io::Result<T>> {
    let task = tokio::task::spawn_blocking(f);
    async move { task.await.unwrap_or_else(|e| Err(io::Error::other(e))) }.boxed()
}

fn write_batch(db: &Database, batch: &LogBatch) -> Result<(), redb::Error> {
    let tx = db.begin_write()?;
    {
        let mut log = tx.open_table(LOG)?;
        if let Some(from) = batch.cut_from {
            log.retain_in(from.., |_, _| false)?;
        }
        if let Some(to) = batch.purge_to {
            log.retain_in(..=to, |_, _| false)?;
        }
        for (index, bytes) in &batch.put {
            log.insert(index, bytes.as_slice())?;
        }
        let mut notes = tx.open_table(NOTES)?;
        for (key, bytes) in &batch.notes {
            notes.insert(key, bytes.as_slice())?;
        }
    }
    Ok(tx.commit()?)
}

impl Disk for RedbDisk {
    fn write(&self, batch: LogBatch) -> BoxFuture<'static, io::Result<()>> {
        let log = self.log.clone();
        blocking(move || log.with(|db| write_batch(db, &batch)))
    }

    fn entries(&self, start: u64, end: u64, bytes_max: usize) -> io::Result<Vec<(u64, Vec<u8>)>> {
        self.log.with(|db| {
            let tx = db.begin_read()?;
            let log = tx.open_table(LOG)?;
            let (mut out, mut bytes) = (Vec::new(), 0);
            for row in log.range(start..end)? {
                let (index, value) = row?;
                bytes += value.value().len();
                if bytes > bytes_max && !out.is_empty() {
                    break;
                }
                out.push((index.value(), value.value().to_vec()));
            }
            Ok(out)
        })
    }

    fn last(&self) -> io::Result<Option<(u64, Vec<u8>)>> {
        self.log.with(|db| {
            let tx = db.begin_read()?;
            let log = tx.open_table(LOG)?;
            Ok(log.last()?.map(|(index, value)| (index.value(), value.value().to_vec())))
        })
    }

    fn note(&self, key: &'static str) -> io::Result<Option<Vec<u8>>> {
        self.log.with(|db| {
            let tx = db.begin_read()?;
            let notes = tx.open_table(NOTES)?;
            Ok(notes.get(key)?.map(|value| value.value().to_vec()))
        })
    }

    fn write_snapshot(&self, snapshot: StoredSnapshot) -> BoxFuture<'static, io::Result<()>> {
        let state = self.state.clone();
        blocking(move || {
            state.with(|db| {
                let tx = db.begin_write()?;
                {
                    let mut pieces = tx.open_table(PIECES)?;
                    pieces.retain(|_, _| false)?;
                    for (at, piece) in snapshot.body.chunks(PIECE_BYTES).enumerate() {
                        pieces.insert(at as u64, piece)?;
                    }
                    tx.open_table(NOTES)?.insert("snapshot", snapshot.meta.as_slice())?;
                }
                Ok(tx.commit()?)
            })
        })
    }

    fn snapshot(&self) -> io::Result<Option<StoredSnapshot>> {
        self.state.with(|db| {
            let tx = db.begin_read()?;
            let notes = tx.open_table(NOTES)?;
            let Some(meta) = notes.get("snapshot")?.map(|value| value.value().to_vec()) else {
                return Ok(None);
            };
            let mut body = Vec::new();
            for row in tx.open_table(PIECES)?.iter()? {
                body.extend_from_slice(row?.1.value());
            }
            Ok(Some(StoredSnapshot { meta, body: Arc::new(body) }))
        })
    }

    fn offload(&self, work: Box<dyn FnOnce() + Send>) -> BoxFuture<'static, ()> {
        let task = tokio::task::spawn_blocking(work);
        async move { drop(task.await) }.boxed()
    }

    fn close(&self) {
        self.log.close();
        self.state.close();
    }
}
