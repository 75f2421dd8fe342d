//! The seam between consensus and its disk: real nodes have redb behind it, the simulation a disk that loses what was
//! not synced.
//!
//! Two stores that never have to agree: the log with a few notes, and the last snapshot. A snapshot is durable before the
//! log that it covers is purged, so either order of a crash leaves a state that can be rebuilt.

use futures::future::BoxFuture;
use std::io;
use std::sync::Arc;

/// One atomic change of the log. The parts take effect in the order of the fields.
#[derive(Debug, Clone, Default)]
pub struct LogBatch {
    /// Removes entries from this index on.
    pub cut_from: Option<u64>,
    /// Removes entries up to this index, inclusive.
    pub purge_to: Option<u64>,
    /// Adds entries, encoded.
    pub put: Vec<(u64, Vec<u8>)>,
    /// Sets notes (vote, committed, purged, boot and so on), encoded.
    pub notes: Vec<(&'static str, Vec<u8>)>,
}

/// A snapshot as it is stored.
#[derive(Debug, Clone)]
pub struct StoredSnapshot {
    /// Encoded [`super::machine::StoredMeta`].
    pub meta: Vec<u8>,
    /// The state.
    pub body: Arc<Vec<u8>>,
}

/// A disk for one node's consensus.
pub trait Disk: Send + Sync + 'static {
    /// Makes the whole batch durable, or (after a crash) none of it. Batches take effect in the order of the calls.
    fn write(&self, batch: LogBatch) -> BoxFuture<'static, io::Result<()>>;
    /// Entries `start..end` in order, at most `bytes_max` bytes of them but at least one if there is one.
    fn entries(&self, start: u64, end: u64, bytes_max: usize) -> io::Result<Vec<(u64, Vec<u8>)>>;
    /// The last entry.
    fn last(&self) -> io::Result<Option<(u64, Vec<u8>)>>;
    /// A note.
    fn note(&self, key: &'static str) -> io::Result<Option<Vec<u8>>>;
    /// Replaces the snapshot, durably.
    fn write_snapshot(&self, snapshot: StoredSnapshot) -> BoxFuture<'static, io::Result<()>>;
    /// The snapshot.
    fn snapshot(&self) -> io::Result<Option<StoredSnapshot>>;
    /// Runs long work away from the tasks that answer peers. A simulated disk runs it in place.
    fn offload(&self, work: Box<dyn FnOnce() + Send>) -> BoxFuture<'static, ()> {
        work();
        Box::pin(async {})
    }
    /// Releases the files: every later call fails.
    fn close(&self) {}
}
