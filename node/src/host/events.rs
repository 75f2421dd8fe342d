//! What happened on this node, for people: events in one redb file, and the commands that a node of an earlier version left
//! in it. Events decide nothing; a crash may lose those of the last [`FLUSH_EVERY`], an orderly end loses none.

use ks_proto::api::{ApiError, Event};
use ks_raft::{Command, FleetState};
use redb::{Database, Durability, ReadableDatabase, ReadableTable, TableDefinition};
use std::path::{Path, PathBuf};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::broadcast;

/// Of earlier versions, where a lone node kept its commands here.
const LOG: TableDefinition<u64, &[u8]> = TableDefinition::new("log");
/// See [`LOG`].
const SNAPSHOT: TableDefinition<&str, &[u8]> = TableDefinition::new("snapshot");
const EVENTS: TableDefinition<u64, &[u8]> = TableDefinition::new("events");
/// Events kept.
const EVENTS_MAX: u64 = 20_000;

/// Events reach the disk together, at most this long after they were recorded.
const FLUSH_EVERY: Duration = Duration::from_millis(500);

/// Why the database refused.
#[derive(Debug, thiserror::Error)]
pub enum EventsError {
    /// redb or the disk.
    #[error("the event database: {0}")]
    Redb(#[from] redb::Error),
    /// What is stored cannot be read by this program.
    #[error("the event database holds what this program cannot read: {0}")]
    Decode(#[from] serde_json::Error),
}

impl From<EventsError> for ApiError {
    fn from(e: EventsError) -> Self {
        let full = matches!(&e, EventsError::Redb(redb::Error::Io(io)) if io.kind() == std::io::ErrorKind::StorageFull);
        let (code, next) = if full { ("disk-full", "free space in the data folder") } else { ("internal", "see ksd's log") };
        ApiError::new(code, "the node's events cannot be read", e.to_string(), next)
    }
}

fn redb_err<E: Into<redb::Error>>(e: E) -> EventsError {
    EventsError::Redb(e.into())
}

/// The events of this node, shared.
#[derive(Clone)]
pub struct EventLog {
    inner: Arc<Inner>,
}

struct Inner {
    /// None after an I/O error: redb refuses every later call until it is opened again.
    db: Mutex<Option<Database>>,
    path: PathBuf,
    next: Mutex<u64>,
    live: broadcast::Sender<Event>,
    /// Wakes the thread that syncs; full means that it is woken already.
    unsynced: SyncSender<()>,
}

impl EventLog {
    /// Opens or makes the database.
    ///
    /// # Errors
    /// If it cannot be opened or read.
    pub fn open(path: &Path) -> Result<Self, EventsError> {
        let db = Database::create(path).map_err(redb_err)?;
        let tx = db.begin_write().map_err(redb_err)?;
        tx.open_table(EVENTS).map_err(redb_err)?;
        tx.commit().map_err(redb_err)?;
        let tx = db.begin_read().map_err(redb_err)?;
        let last = tx.open_table(EVENTS).map_err(redb_err)?.last().map_err(redb_err)?.map(|(k, _)| k.value());
        drop(tx);
        let (live, _) = broadcast::channel(1024);
        // Names and commands are private.
        let _ = std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o600));
        let next = Mutex::new(last.map_or(0, |l| l + 1));
        let (unsynced, woken) = std::sync::mpsc::sync_channel(1);
        let this = Self { inner: Arc::new(Inner { db: Mutex::new(Some(db)), path: path.to_owned(), next, live, unsynced }) };
        let weak = Arc::downgrade(&this.inner);
        let flusher = move || {
            // Ends with the log: then there is nobody to send.
            while woken.recv().is_ok() {
                std::thread::sleep(FLUSH_EVERY);
                let Some(inner) = weak.upgrade() else { return };
                if let Err(e) = (Self { inner }).flush() {
                    tracing::warn!("the last events are not on the disk yet: {e}");
                }
            }
        };
        std::thread::Builder::new().name("events".into()).spawn(flusher).map_err(redb::Error::Io)?;
        Ok(this)
    }

    /// Everything recorded until now is on the disk when this returns. Blocks for a sync.
    ///
    /// # Errors
    /// If the database refuses.
    pub fn flush(&self) -> Result<(), EventsError> {
        // A commit that is durable takes all earlier ones along.
        self.with_db(|db| db.begin_write().map_err(redb_err)?.commit().map_err(redb_err))
    }

    /// Runs `f` on the database. After an I/O error (a full disk) it is closed, and opened again by the next call.
    fn with_db<T>(&self, f: impl FnOnce(&Database) -> Result<T, EventsError>) -> Result<T, EventsError> {
        let mut slot = self.inner.db.lock().unwrap_or_else(PoisonError::into_inner);
        let db = match slot.take() {
            Some(db) => db,
            None => Database::create(&self.inner.path).map_err(redb_err)?,
        };
        let done = f(&db);
        if !matches!(&done, Err(EventsError::Redb(redb::Error::Io(_) | redb::Error::PreviousIo))) {
            *slot = Some(db);
        }
        done
    }

    fn next(&self) -> MutexGuard<'_, u64> {
        self.inner.next.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records an event and tells everybody who follows.
    pub fn record(&self, session: &str, kind: &str, text: &str) {
        let mut next = self.next();
        let unix_ms = super::clock::unix_ms();
        let event = Event { seq: *next, unix_ms, session: session.into(), kind: kind.into(), text: text.into() };
        *next += 1;
        if let Err(e) = self.put(&event) {
            tracing::warn!("event {kind} of {session} is not recorded: {e}");
        }
        let _ = self.inner.unsynced.try_send(());
        tracing::info!(session, kind, "{text}");
        let _ = self.inner.live.send(event);
    }

    fn put(&self, event: &Event) -> Result<(), EventsError> {
        let bytes = serde_json::to_vec(event)?;
        self.with_db(|db| {
            let mut tx = db.begin_write().map_err(redb_err)?;
            tx.set_durability(Durability::None).map_err(redb_err)?;
            let mut t = tx.open_table(EVENTS).map_err(redb_err)?;
            t.insert(event.seq, bytes.as_slice()).map_err(redb_err)?;
            if event.seq >= EVENTS_MAX {
                t.remove(event.seq - EVENTS_MAX).map_err(redb_err)?;
            }
            drop(t);
            tx.commit().map_err(redb_err)
        })
    }

    /// Events from `from` on, oldest first, and the live ones after them.
    ///
    /// # Errors
    /// If the database cannot be read.
    pub fn read(&self, from: u64) -> Result<(Vec<Event>, broadcast::Receiver<Event>), EventsError> {
        let _next = self.next();
        let live = self.inner.live.subscribe();
        let past = self.with_db(|db| {
            let tx = db.begin_read().map_err(redb_err)?;
            let t = tx.open_table(EVENTS).map_err(redb_err)?;
            let mut out = Vec::new();
            for row in t.range(from..).map_err(redb_err)? {
                out.push(serde_json::from_slice(row.map_err(redb_err)?.1.value())?);
            }
            Ok(out)
        })?;
        Ok((past, live))
    }

    /// What a lone node of an earlier version kept in this file, replayed; None if there is nothing.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn earlier_state(&self) -> Result<Option<FleetState>, EventsError> {
        self.with_db(|db| {
            let tx = db.begin_read().map_err(redb_err)?;
            let (Ok(log), Ok(snapshots)) = (tx.open_table(LOG), tx.open_table(SNAPSHOT)) else { return Ok(None) };
            let snapshot = snapshots.get("fleet").map_err(redb_err)?;
            let (next, mut state) = match &snapshot {
                Some(v) => serde_json::from_slice::<(u64, FleetState)>(v.value())?,
                None => (0, FleetState::default()),
            };
            let mut found = snapshot.is_some();
            for row in log.range(next..).map_err(redb_err)? {
                let command: Command = serde_json::from_slice(row.map_err(redb_err)?.1.value())?;
                state.apply(command);
                found = true;
            }
            Ok(found.then_some(state))
        })
    }

    /// Forgets what [`Self::earlier_state`] gave, once it is kept elsewhere.
    ///
    /// # Errors
    /// If the database refuses.
    pub fn forget_earlier_state(&self) -> Result<(), EventsError> {
        self.with_db(|db| {
            let tx = db.begin_write().map_err(redb_err)?;
            tx.delete_table(LOG).map_err(redb_err)?;
            tx.delete_table(SNAPSHOT).map_err(redb_err)?;
            tx.commit().map_err(redb_err)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_number_on_after_reopening() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("e.redb");
        let e = EventLog::open(&path).unwrap();
        e.record("a", "one", "1");
        // What is not durable by itself is by the next durable commit, or at an orderly end.
        drop(e);
        let e = EventLog::open(&path).unwrap();
        e.record("a", "two", "2");
        let kinds: Vec<_> = e.read(0).unwrap().0.into_iter().map(|e| (e.seq, e.kind)).collect();
        assert_eq!(kinds.last().map(|k| k.1.as_str()), Some("two"));
        assert!(kinds.windows(2).all(|w| w[0].0 < w[1].0), "{kinds:?}");
    }

    /// What a killed ksd leaves: the file as it is now, and nobody who closes it.
    fn kinds_after_a_kill(path: &Path) -> Vec<String> {
        let copy = path.with_extension("copy");
        std::fs::copy(path, &copy).unwrap();
        EventLog::open(&copy).unwrap().read(0).unwrap().0.into_iter().map(|e| e.kind).collect()
    }

    #[test]
    fn events_outlive_a_killed_daemon() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("e.redb");
        let e = EventLog::open(&path).unwrap();
        e.record("a", "one", "1");
        e.record("a", "two", "2");
        e.flush().unwrap();
        assert_eq!(kinds_after_a_kill(&path), ["one", "two"]);
        // And without anybody who asks for it.
        e.record("a", "three", "3");
        let end = std::time::Instant::now() + Duration::from_secs(30);
        while kinds_after_a_kill(&path).len() < 3 {
            assert!(std::time::Instant::now() < end, "never synced by itself");
            std::thread::park_timeout(Duration::from_millis(50));
        }
    }

    #[test]
    fn after_an_io_error_the_database_is_opened_again() {
        let dir = tempfile::tempdir().unwrap();
        let e = EventLog::open(&dir.path().join("e.redb")).unwrap();
        let full = std::io::Error::from(std::io::ErrorKind::StorageFull);
        let error: ApiError = e.with_db::<()>(|_| Err(EventsError::Redb(redb::Error::Io(full)))).unwrap_err().into();
        assert_eq!(error.code, "disk-full");
        assert!(e.inner.db.lock().unwrap().is_none(), "it is closed");
        e.record("a", "one", "1");
        assert_eq!(e.read(0).unwrap().0.len(), 1);
    }

    #[test]
    fn the_commands_of_an_earlier_version_are_replayed_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("e.redb");
        let e = EventLog::open(&path).unwrap();
        assert!(e.earlier_state().unwrap().is_none());
        let command = serde_json::to_vec(&Command::RaiseGeneration {}).unwrap();
        e.with_db(|db| {
            let tx = db.begin_write().map_err(redb_err)?;
            tx.open_table(SNAPSHOT).map_err(redb_err)?;
            tx.open_table(LOG).map_err(redb_err)?.insert(0, command.as_slice()).map_err(redb_err)?;
            tx.commit().map_err(redb_err)
        })
        .unwrap();
        assert_eq!(e.earlier_state().unwrap().unwrap().generation, 1);
        e.forget_earlier_state().unwrap();
        assert!(e.earlier_state().unwrap().is_none());
    }
}
