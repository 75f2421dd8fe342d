//! The durable state of a lone node: the log of commands, a snapshot of what they give, and events, in one redb file.
//!
//! A command is appended in one durable transaction and only then applied, so that after a crash the log replays to the
//! same state. With more nodes openraft takes the place of this log; `FleetState::apply` stays.

use ks_proto::api::{ApiError, Event};
use ks_raft::{Command, FleetState, Refusal, Response};
use redb::{Database, Durability, ReadableDatabase, ReadableTable, TableDefinition};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use tokio::sync::broadcast;

const LOG: TableDefinition<u64, &[u8]> = TableDefinition::new("log");
const SNAPSHOT: TableDefinition<&str, &[u8]> = TableDefinition::new("snapshot");
const EVENTS: TableDefinition<u64, &[u8]> = TableDefinition::new("events");
/// Commands between two snapshots.
const SNAPSHOT_EVERY: u64 = 256;
/// Events kept.
const EVENTS_MAX: u64 = 20_000;

/// Why the database refused.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// redb or the disk.
    #[error("the state database: {0}")]
    Redb(#[from] redb::Error),
    /// What is stored cannot be read by this program.
    #[error("the state database holds what this program cannot read: {0}")]
    Decode(#[from] serde_json::Error),
}

impl From<StateError> for ApiError {
    fn from(e: StateError) -> Self {
        let full = matches!(&e, StateError::Redb(redb::Error::Io(io)) if io.kind() == std::io::ErrorKind::StorageFull);
        let (code, next) = if full { ("disk-full", "free space in the data folder") } else { ("internal", "see ksd's log") };
        ApiError::new(code, "the node's state cannot be written", e.to_string(), next)
    }
}

fn redb_err<E: Into<redb::Error>>(e: E) -> StateError {
    StateError::Redb(e.into())
}

/// The state of this node, shared.
#[derive(Clone)]
pub struct StateStore {
    inner: Arc<Inner>,
}

struct Inner {
    /// None after an I/O error: redb refuses every later call until it is opened again.
    db: Mutex<Option<Database>>,
    path: std::path::PathBuf,
    fleet: RwLock<FleetState>,
    /// Serializes writers; holds the next log position and event number.
    writer: Mutex<Writer>,
    events: broadcast::Sender<Event>,
}

struct Writer {
    log_next: u64,
    event_next: u64,
}

impl StateStore {
    /// Opens or makes the database, and replays.
    ///
    /// # Errors
    /// If it cannot be opened or read.
    pub fn open(path: &Path) -> Result<Self, StateError> {
        let db = Database::create(path).map_err(redb_err)?;
        let tx = db.begin_write().map_err(redb_err)?;
        tx.open_table(LOG).map_err(redb_err)?;
        tx.open_table(SNAPSHOT).map_err(redb_err)?;
        tx.open_table(EVENTS).map_err(redb_err)?;
        tx.commit().map_err(redb_err)?;
        let (fleet, log_next, event_next) = replay(&db)?;
        let writer = Mutex::new(Writer { log_next, event_next });
        let (events, _) = broadcast::channel(1024);
        // The file holds no secret that the key file does not guard, but names and commands are private all the same.
        let _ = std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o600));
        let inner = Inner { db: Mutex::new(Some(db)), path: path.to_owned(), fleet: RwLock::new(fleet), writer, events };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Runs `f` on the database. After an I/O error (a full disk) it is closed, and opened again by the next call, so that
    /// the node works on once there is space.
    fn with_db<T>(&self, f: impl FnOnce(&Database) -> Result<T, StateError>) -> Result<T, StateError> {
        let mut slot = self.inner.db.lock().unwrap_or_else(PoisonError::into_inner);
        let db = match slot.take() {
            Some(db) => db,
            None => Database::create(&self.inner.path).map_err(redb_err)?,
        };
        let done = f(&db);
        let broken = matches!(&done, Err(StateError::Redb(redb::Error::Io(_) | redb::Error::PreviousIo)));
        if !broken {
            *slot = Some(db);
        }
        done
    }

    /// The state as it is now; hold it shortly.
    pub fn read(&self) -> RwLockReadGuard<'_, FleetState> {
        self.inner.fleet.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn writer(&self) -> MutexGuard<'_, Writer> {
        self.inner.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes `command` durable, then applies it. Blocks for a disk write.
    ///
    /// # Errors
    /// The database's error, or the state's refusal.
    pub fn apply(&self, command: Command) -> Result<Response, ApiError> {
        let mut w = self.writer();
        self.append(&mut w, &command)?;
        let response = self.inner.fleet.write().unwrap_or_else(PoisonError::into_inner).apply(command);
        if w.log_next.is_multiple_of(SNAPSHOT_EVERY) {
            self.snapshot(&w)?;
        }
        response.ok().map_err(refusal)
    }

    fn append(&self, w: &mut Writer, command: &Command) -> Result<(), StateError> {
        let bytes = serde_json::to_vec(command)?;
        // A command whose commit failed is overwritten by the next one: it was refused, so it must not replay.
        self.with_db(|db| {
            let tx = db.begin_write().map_err(redb_err)?;
            tx.open_table(LOG).map_err(redb_err)?.insert(w.log_next, bytes.as_slice()).map_err(redb_err)?;
            tx.commit().map_err(redb_err)
        })?;
        w.log_next += 1;
        Ok(())
    }

    /// The snapshot and the removal of the log before it are one transaction.
    fn snapshot(&self, w: &Writer) -> Result<(), StateError> {
        let bytes = serde_json::to_vec(&(w.log_next, &*self.read()))?;
        self.with_db(|db| {
            let tx = db.begin_write().map_err(redb_err)?;
            tx.open_table(SNAPSHOT).map_err(redb_err)?.insert("fleet", bytes.as_slice()).map_err(redb_err)?;
            tx.open_table(LOG).map_err(redb_err)?.retain_in(..w.log_next, |_, _| false).map_err(redb_err)?;
            tx.commit().map_err(redb_err)
        })
    }

    /// Records an event and tells everybody who follows. An event may be lost in a power cut; it decides nothing.
    pub fn event(&self, session: &str, kind: &str, text: &str) {
        let mut w = self.writer();
        let unix_ms = super::clock::unix_ms();
        let event = Event { seq: w.event_next, unix_ms, session: session.into(), kind: kind.into(), text: text.into() };
        w.event_next += 1;
        if let Err(e) = self.put_event(&event) {
            tracing::warn!("event {kind} of {session} is not recorded: {e}");
        }
        tracing::info!(session, kind, "{text}");
        let _ = self.inner.events.send(event);
    }

    fn put_event(&self, event: &Event) -> Result<(), StateError> {
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
    pub fn events(&self, from: u64) -> Result<(Vec<Event>, broadcast::Receiver<Event>), StateError> {
        let _w = self.writer();
        let rx = self.inner.events.subscribe();
        let out = self.with_db(|db| {
            let tx = db.begin_read().map_err(redb_err)?;
            let t = tx.open_table(EVENTS).map_err(redb_err)?;
            let mut out = Vec::new();
            for row in t.range(from..).map_err(redb_err)? {
                out.push(serde_json::from_slice(row.map_err(redb_err)?.1.value())?);
            }
            Ok(out)
        })?;
        Ok((out, rx))
    }
}

fn replay(db: &Database) -> Result<(FleetState, u64, u64), StateError> {
    let tx = db.begin_read().map_err(redb_err)?;
    let snapshot = tx.open_table(SNAPSHOT).map_err(redb_err)?;
    let (mut next, mut fleet) = match snapshot.get("fleet").map_err(redb_err)? {
        Some(v) => serde_json::from_slice::<(u64, FleetState)>(v.value())?,
        None => (0, FleetState::default()),
    };
    for row in tx.open_table(LOG).map_err(redb_err)?.range(next..).map_err(redb_err)? {
        let (at, bytes) = row.map_err(redb_err)?;
        fleet.apply(serde_json::from_slice(bytes.value())?);
        next = at.value() + 1;
    }
    let events = tx.open_table(EVENTS).map_err(redb_err)?;
    let event_next = events.last().map_err(redb_err)?.map_or(0, |(k, _)| k.value() + 1);
    Ok((fleet, next, event_next))
}

/// A refusal of the replicated state in the API's words.
pub fn refusal(r: Refusal) -> ApiError {
    let why = r.to_string();
    let (code, what, next) = match r {
        Refusal::NameTaken { .. } => {
            ("exists", "the session cannot be made", "choose another --name, or `ks attach` to that one")
        }
        Refusal::IdTaken { .. } => ("exists", "the session cannot be made", "try again"),
        Refusal::NoSession { .. } => ("not-found", "the session is not there", "ks ls shows what there is"),
        Refusal::NoCheckpoint { .. } => ("not-found", "the checkpoint is not there", "ks checkpoints NAME shows what there is"),
        Refusal::Fenced { .. } => ("not-allowed", "a run that is over wanted to commit", "nothing: the newer run goes on"),
        Refusal::Kept { .. } => ("not-allowed", "the checkpoint cannot be dropped", "unpin it, or remove the forks first"),
        Refusal::NoImage { .. } => ("not-found", "the image is not there", "ks image ls; ks image build"),
        Refusal::ImageUsed { .. } => ("busy", "the image is in use", "remove those sessions first"),
        other => return fleet_refusal(&other),
    };
    ApiError::new(code, what, why, next)
}

/// A refusal that concerns nodes, tokens and users, in the API's words.
fn fleet_refusal(r: &Refusal) -> ApiError {
    let (code, what, next) = match r {
        Refusal::StaleEpoch { .. } | Refusal::NotOwner { .. } | Refusal::ProposalOver { .. } => {
            ("not-allowed", "the decision is out of date", "try again")
        }
        Refusal::NothingToRestore { .. } => ("busy", "the session cannot move", "start a node again that has its checkpoints"),
        Refusal::NoMember { .. } => ("not-found", "the node is not there", "ks node ls shows what there is"),
        Refusal::MemberNotFit { .. } => ("not-allowed", "the node is not in the state for that", "ks node ls shows its state"),
        Refusal::OwnsSessions { .. } => {
            ("busy", "the node cannot leave yet", "ks node drain it first, or remove it with --force")
        }
        Refusal::LastMember { .. } => ("not-allowed", "the node cannot leave", "let another node join first"),
        Refusal::PeerTaken { .. } => ("exists", "the node cannot join", "remove that member first"),
        Refusal::NoToken | Refusal::TokenExpired { .. } | Refusal::TokenUsed { .. } => {
            ("not-allowed", "the join token is refused", "make another one with ks node token")
        }
        Refusal::NoUser { .. } => ("not-found", "the user is not there", "ks user ls shows who there is"),
        Refusal::AlreadyFounded { .. } => ("exists", "the fleet cannot be founded", "join it instead"),
        Refusal::NotFounded => ("not-allowed", "there is no fleet yet", "start the node with ks up"),
        Refusal::NoRoot { .. } => ("not-found", "the manifest is not there", "try again"),
        Refusal::LastHolder { .. } => ("not-allowed", "the last copy is not given up", "wait until another node has it"),
        Refusal::BadValue { .. } => ("usage", "the value is not allowed", "choose another one"),
        Refusal::TooMany { .. } => ("not-allowed", "a limit is reached", "remove what is not needed"),
        Refusal::NameTaken { .. }
        | Refusal::IdTaken { .. }
        | Refusal::NoSession { .. }
        | Refusal::NoCheckpoint { .. }
        | Refusal::Fenced { .. }
        | Refusal::Kept { .. }
        | Refusal::NoImage { .. }
        | Refusal::ImageUsed { .. } => ("internal", "the command is refused", "report this"),
    };
    ApiError::new(code, what, r.to_string(), next)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ks_raft::ImageRecord;

    fn image(n: u32) -> Command {
        let (id, disk) = (ks_proto::ImageId([1; 32]), ks_proto::CheckpointId([2; 32]));
        let (kernel, cmdline, profile) = (String::new(), String::new(), String::new());
        let name = format!("i{n}");
        let created_unix_ms = u64::from(n);
        let (disk_bytes, disk_used_bytes, holders) = (1, 1, Vec::new());
        let image =
            ImageRecord { name, id, kernel, cmdline, profile, disk_bytes, disk_used_bytes, disk, created_unix_ms, holders };
        Command::PutImage { image }
    }

    #[test]
    fn the_state_reads_back_after_reopening_across_snapshots() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.redb");
        for round in 0..3u32 {
            let s = StateStore::open(&path).unwrap();
            assert_eq!(s.read().images.len() as u32, round * 200);
            for n in 0..200 {
                s.apply(image(round * 200 + n)).unwrap();
            }
            assert_eq!(s.read().applied, u64::from(round + 1) * 200);
        }
    }

    #[test]
    fn a_refused_command_is_an_api_error_and_events_number_on_after_reopening() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.redb");
        let s = StateStore::open(&path).unwrap();
        let e = s.apply(Command::RemoveImage { name: "no".into() }).unwrap_err();
        assert_eq!((e.code.as_str(), e.status()), ("not-found", 404));
        s.event("a", "one", "1");
        s.apply(image(1)).unwrap();
        drop(s);
        let s = StateStore::open(&path).unwrap();
        s.event("a", "two", "2");
        let kinds: Vec<_> = s.events(0).unwrap().0.into_iter().map(|e| (e.seq, e.kind)).collect();
        assert_eq!(kinds, [(0, "one".to_owned()), (1, "two".to_owned())]);
    }

    #[test]
    fn after_an_io_error_the_database_is_opened_again_and_nothing_is_lost() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.redb");
        let s = StateStore::open(&path).unwrap();
        s.apply(image(1)).unwrap();
        let full = std::io::Error::from(std::io::ErrorKind::StorageFull);
        let e: ApiError = s.with_db::<()>(|_| Err(StateError::Redb(redb::Error::Io(full)))).unwrap_err().into();
        assert_eq!(e.code, "disk-full");
        assert!(s.inner.db.lock().unwrap().is_none(), "it is closed");
        s.apply(image(2)).unwrap();
        drop(s);
        assert_eq!(StateStore::open(&path).unwrap().read().images.len(), 2);
    }
}
