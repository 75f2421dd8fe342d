//! How each run of a session began, for the stamp on its guest's streams: pure decisions, and two small files.
//!
//! - `gateway/runs/SESSION.json`: what a person asked for that the next run must know, kept until that run lives, so that
//!   a restore that is cut short by a crash of ksd is still a restore.
//! - `stamp.json` in a run folder: the stamp of that run, for a ksd that adopts its VM.

use crate::host::files::write_atomic;
use crate::session::HeadKind;
use ks_proto::gateway::{Began, Origin, ReplayMode, Stamp};
use ks_proto::{CheckpointId, RunToken, SessionId};
use ks_raft::SessionRecord;
use serde::{Deserialize, Serialize};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

const STAMP: &str = "stamp.json";

/// What a person asked for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Notes {
    /// `ks restore` to this checkpoint: the run that begins there is served nothing of what came after it.
    pub rewind: Option<CheckpointId>,
    /// `ks fork --replay parent`: the child is served what its parent bought after the fork point.
    pub replay_parent: bool,
}

/// Notes of all sessions of a node.
#[derive(Debug, Clone)]
pub struct NoteBook {
    dir: PathBuf,
}

impl NoteBook {
    /// In the gateway's folder.
    pub fn new(gateway: &Path) -> Self {
        Self { dir: gateway.join("runs") }
    }

    fn path(&self, id: &SessionId) -> PathBuf {
        self.dir.join(format!("{}.json", id.to_hex()))
    }

    /// Of one session; none were taken down when there is no file.
    pub fn read(&self, id: &SessionId) -> Notes {
        std::fs::read(self.path(id)).ok().and_then(|b| serde_json::from_slice(&b).ok()).unwrap_or_default()
    }

    /// The run that a person's restore asked for lives.
    pub fn rewound(&self, id: &SessionId) {
        let mut notes = self.read(id);
        if notes.rewind.take().is_some()
            && let Err(e) = self.write(id, &notes)
        {
            tracing::warn!(session = %id, "a note about a restore stays: {e}");
        }
    }

    /// Takes down or forgets; durable when it returns.
    ///
    /// # Errors
    /// As the disk says.
    pub fn write(&self, id: &SessionId, notes: &Notes) -> io::Result<()> {
        let path = self.path(id);
        if *notes == Notes::default() {
            return match std::fs::remove_file(&path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
                Ok(()) | Err(_) => Ok(()),
            };
        }
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.dir)?;
        write_atomic(&path, &serde_json::to_vec(notes)?)
    }
}

/// The stamp of run `token`, which begins at a checkpoint of this kind. `fleet` is false on a lone node.
pub fn stamp(r: &SessionRecord, token: RunToken, head: CheckpointId, kind: HeadKind, notes: &Notes, fleet: bool) -> Stamp {
    let first = token.run <= 1;
    let rewound = notes.rewind == Some(head);
    let (began, replay) = match kind {
        _ if rewound => (Began::Rewind, ReplayMode::Off),
        HeadKind::Golden if first => (Began::Boot, ReplayMode::Off),
        HeadKind::ForkPoint if first && notes.replay_parent => (Began::Fork, ReplayMode::On),
        HeadKind::ForkPoint if first => (Began::Fork, ReplayMode::Off),
        HeadKind::Golden | HeadKind::ForkPoint | HeadKind::Own => (Began::Resume, ReplayMode::On),
    };
    let parent = r.forked_from.as_ref().filter(|_| kind == HeadKind::ForkPoint);
    let origin = parent.map(|f| Origin { session: f.session, at_seq: None });
    let replicas = if fleet { r.replicas.clone() } else { vec![] };
    Stamp { session: r.id, token, began, origin, replay, user: String::new(), replicas }
}

/// Keeps the stamp of a run beside its VM. Not synced: what ends the host ends the VM too.
///
/// # Errors
/// As the disk says.
pub fn keep(run_dir: &Path, stamp: &Stamp) -> io::Result<()> {
    std::fs::write(run_dir.join(STAMP), serde_json::to_vec(stamp)?)
}

/// The stamp that an earlier ksd kept.
pub fn kept(run_dir: &Path) -> Option<Stamp> {
    serde_json::from_slice(&std::fs::read(run_dir.join(STAMP)).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_are_kept_until_they_are_empty_again() {
        let dir = tempfile::tempdir().unwrap();
        let (book, id) = (NoteBook::new(dir.path()), SessionId([1; 16]));
        assert_eq!(book.read(&id), Notes::default());
        let notes = Notes { rewind: Some(CheckpointId([2; 32])), replay_parent: true };
        book.write(&id, &notes).unwrap();
        assert_eq!(NoteBook::new(dir.path()).read(&id), notes);
        book.write(&id, &Notes::default()).unwrap();
        assert!(!book.path(&id).exists());
    }
}
