//! What can go wrong in the chunk store, in terms of what the caller can do about it.

use ks_proto::bytes::DecodeError;
use ks_proto::ids::{CheckpointId, ChunkId, PackId};
use std::io;
use std::path::{Path, PathBuf};

/// An error of the chunk store. The text says what, why and what next; the cause is the `source`.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The operating system refused.
    #[error("{op} {}: {source}", path.display())]
    Io { op: &'static str, path: PathBuf, source: io::Error },
    /// No space (or quota) left. What was being stored is dropped; everything stored before is untouched.
    #[error(
        "disk full at {} ({op}): nothing of this checkpoint was kept and earlier ones are intact; free space there (`ks rm`, \
         `ks checkpoints`), or move the data folder to a larger disk",
        path.display()
    )]
    DiskFull { op: &'static str, path: PathBuf, source: io::Error },
    /// Another process has the store open.
    #[error("the store {} is in use by another ksd; stop that one first, or give this one its own --data folder", path.display())]
    Locked { path: PathBuf },
    /// The folder was written by another version.
    #[error("{} says {found:?}, this program reads {known:?}; use the KeepState that wrote it", path.display())]
    Format { path: PathBuf, found: String, known: &'static str },
    /// Bytes of a file were refused.
    #[error("{}: {source}", path.display())]
    Decode { path: PathBuf, source: DecodeError },
    /// A manifest to commit was refused before anything was written.
    #[error("the manifest to commit was refused: {source}")]
    Manifest { source: DecodeError },
    /// No such manifest here.
    #[error("checkpoint {id} is not on this node (no file {})", path.display())]
    NoManifest { id: CheckpointId, path: PathBuf },
    /// An object that a manifest needs is not here, or is here in a form that cannot be right.
    #[error("{needed_by} needs {what} {id}, and {why}")]
    Missing { what: &'static str, id: ChunkId, needed_by: String, why: String },
    /// No intact copy of an object is left.
    #[error("chunk {chunk} is lost: {why} (pack {}, holder {holder}); restore another checkpoint, or bring back a node that holds this one",
        pack.as_ref().map_or_else(|| "unknown".to_owned(), |p| p.display().to_string()))]
    Lost { chunk: ChunkId, pack: Option<PathBuf>, holder: String, why: String },
    /// A pack that was handed in is not what its name says.
    #[error("pack {id} refused: {why}; the checkpoint that it belongs to must be taken again")]
    Pack { id: PackId, why: String },
    /// The key ring has no key for a domain.
    #[error("no key for domain {domain} is at hand, which {what} is sealed under")]
    NoKey { domain: u32, what: String },
    /// The key file is not safe to use.
    #[error("key file {}: {why}; {next}", path.display())]
    KeyFile { path: PathBuf, why: String, next: String },
    /// The caller asked for something that cannot be.
    #[error("{what}: {why}")]
    Refused { what: &'static str, why: String },
}

impl StoreError {
    /// Sorts an I/O error: a full disk or quota apart from the rest.
    pub fn io(op: &'static str, path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::DiskFull { op, path, source },
            _ => Self::Io { op, path, source },
        }
    }
    /// A stable word for programs: the `code` of a control-socket fault.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Io { .. } => "io",
            Self::DiskFull { .. } => "disk-full",
            Self::Locked { .. } => "busy",
            Self::Format { .. } => "incompatible",
            Self::Decode { .. } | Self::Manifest { .. } | Self::Pack { .. } => "corrupt",
            Self::NoManifest { .. } => "not-found",
            Self::Missing { .. } => "missing",
            Self::Lost { .. } => "lost",
            Self::NoKey { .. } | Self::KeyFile { .. } => "key",
            Self::Refused { .. } => "bad-request",
        }
    }
}

/// Attaches the operation and path to an I/O result.
pub(crate) trait At<T> {
    fn at(self, op: &'static str, path: &Path) -> Result<T, StoreError>;
}
impl<T> At<T> for io::Result<T> {
    fn at(self, op: &'static str, path: &Path) -> Result<T, StoreError> {
        self.map_err(|e| StoreError::io(op, path, e))
    }
}

/// One damaged or missing object, as a report names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectFault {
    /// The object.
    pub chunk: ChunkId,
    /// The pack that should hold it, if one is known.
    pub pack: Option<PackId>,
    /// That pack's file.
    pub file: Option<PathBuf>,
    /// Who holds it.
    pub holder: String,
    /// What is wrong.
    pub why: String,
}
