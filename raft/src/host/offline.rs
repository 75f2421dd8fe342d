//! Explicit repairs of a stopped node's database.
//!
//! - *recover*: most voters are lost for good. One survivor becomes the only voter of a new lineage: it applies every
//!   entry that it has (one that it has may have been acknowledged, so none is thrown away), raises the generation, so
//!   that all run tokens of before are stale, and keeps members and sessions. Nodes of the old lineage are not listened to
//!   any more, whatever majority they find among themselves.
//! - *forget*: a node of an older lineage gives up its log, and comes back as an empty learner of the new lineage, under its number.
//! - *import*: the state of a lone node's earlier database becomes the first snapshot of a one-voter group.
//!
//! Each can be cut short at any point and run again.

use super::consensus::{BOOT, LINEAGE, NUMBER};
use super::disk::{Disk, LogBatch};
use super::error::OfflineError;
use super::log::{COMMITTED, PURGED, VOTE, decode, encode, read_note};
use super::machine::{stored, to_store};
use super::redb::RedbDisk;
use super::types::{Entry, LeaderId, LogId, SnapshotMeta, StoredMembership, Vote};
use crate::{Applied, Command, FleetState};
use openraft::entry::RaftEntry;
use openraft::{EmptyNode, EntryPayload};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::sync::Arc;

/// Bytes of entries that are read at once.
const READ_BYTES: usize = 4 << 20;

/// What a recovery did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recovered {
    /// Generation of the state from now on.
    pub generation: u64,
    /// Lineage of the log from now on.
    pub lineage: u64,
    /// Entries that were applied, of which it was not known whether they were committed.
    pub applied: u64,
    /// Members that the state names, this one included; those that are lost must be removed.
    pub members: Vec<u64>,
}

/// Makes node `number`, which is stopped, the only voter of a new lineage, from what its database in `dir` holds.
///
/// # Errors
/// If the database cannot be used, is another node's, or holds nothing.
pub async fn recover_alone(dir: &Path, number: u64) -> Result<Recovered, OfflineError> {
    let disk = open(dir, number)?;
    let done = recover(&disk, number).await.map_err(|source| OfflineError::Disk { dir: dir.to_owned(), source })?;
    done.ok_or_else(|| OfflineError::Empty { dir: dir.to_owned() })
}

/// Makes node `number`, which is stopped, an empty learner of `lineage` (see `Consensus::superseded`). Its count of starts
/// goes on.
///
/// # Errors
/// If the database cannot be used or is another node's.
pub async fn forget(dir: &Path, number: u64, lineage: u64) -> Result<(), OfflineError> {
    let failed = |source| OfflineError::Disk { dir: dir.to_owned(), source };
    drop(open(dir, number)?);
    // First the snapshot: a log without it is refused when opened, and this can be run again.
    match std::fs::remove_file(dir.join("state.redb")) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(failed(e)),
        _ => {}
    }
    let disk = open(dir, number)?;
    let nothing = || b"null".to_vec();
    // Not "any lineage": members of the old one may be the first to speak.
    let lineage = (LINEAGE, encode(&lineage).map_err(failed)?);
    let notes = vec![(VOTE, nothing()), (COMMITTED, nothing()), (PURGED, nothing()), lineage];
    disk.write(LogBatch { cut_from: Some(0), notes, ..LogBatch::default() }).await.map_err(failed)
}

/// Makes `state` the beginning of a one-voter group of node 1 in `dir`, which holds nothing yet.
///
/// # Errors
/// If the database cannot be used or holds a state.
pub async fn import_alone(dir: &Path, state: &FleetState) -> Result<(), OfflineError> {
    let number = super::consensus::FOUNDER;
    let failed = |source| OfflineError::Disk { dir: dir.to_owned(), source };
    let disk = open(dir, number)?;
    let begun = read_note::<Vote>(&disk, VOTE).map_err(failed)?.is_some() || disk.last().map_err(failed)?.is_some();
    if begun {
        return Err(OfflineError::NotEmpty { dir: dir.to_owned() });
    }
    let last = LogId::new(LeaderId { term: 1, node_id: number }, 1);
    let body = encode(state).map_err(failed)?;
    let lineage = 1;
    begin(&disk, number, last, body, lineage, Some(Vote::new(1, number))).await.map_err(failed)
}

fn open(dir: &Path, number: u64) -> Result<RedbDisk, OfflineError> {
    let failed = |source| OfflineError::Disk { dir: dir.to_owned(), source };
    let disk = RedbDisk::open(dir).map_err(failed)?;
    match read_note::<u64>(&disk, NUMBER).map_err(failed)? {
        Some(stored) if stored != number => Err(OfflineError::OtherNode { stored, asked: number }),
        _ => Ok(disk),
    }
}

/// The core of [`recover_alone`], over any disk; None if it holds nothing.
///
/// # Errors
/// The disk's, or what is on it.
pub async fn recover(disk: &dyn Disk, number: u64) -> io::Result<Option<Recovered>> {
    let (mut state, mut last) = match stored(disk)? {
        Some((meta, body)) => (decode::<FleetState>("the snapshot of the fleet's state", &body)?, meta.last_log_id),
        None => (FleetState::default(), None),
    };
    let committed = read_note::<LogId>(disk, COMMITTED)?.map_or(0, |c| c.index());
    let mut applied = 0;
    loop {
        let from = last.map_or(0, |l| l.index() + 1);
        let entries = disk.entries(from, u64::MAX, READ_BYTES)?;
        if entries.is_empty() {
            break;
        }
        for (expected, (index, bytes)) in (from..).zip(entries) {
            let entry: Entry = decode(&format!("entry {index} of the log"), &bytes)?;
            let id = entry.log_id();
            if id.index() != expected {
                let what = format!("the log has a hole: entry {} stands where {expected} should", id.index());
                return Err(io::Error::new(io::ErrorKind::InvalidData, what));
            }
            if let EntryPayload::Normal(proposal) = entry.payload {
                state.apply_proposal(Applied { index: id.index() }, proposal);
            }
            applied += u64::from(id.index() > committed);
            last = Some(id);
        }
    }
    let Some(last) = last else {
        return Ok(None);
    };
    state.apply_at(Applied { index: last.index() }, Command::RaiseGeneration {});
    let lineage = read_note::<u64>(disk, LINEAGE)?.unwrap_or(0) + 1;
    begin(disk, number, last, encode(&state)?, lineage, None).await?;
    let members = state.members.values().filter(|m| m.is_member()).map(|m| m.number).collect();
    Ok(Some(Recovered { generation: state.generation, lineage, applied, members }))
}

/// Stores `body` as everything up to `last`, with one voter. The snapshot first: until the log follows, it is the end of
/// the same log.
async fn begin(disk: &dyn Disk, number: u64, last: LogId, body: Vec<u8>, lineage: u64, vote: Option<Vote>) -> io::Result<()> {
    let nodes = BTreeMap::from([(number, EmptyNode::default())]);
    let membership = openraft::Membership::new(vec![BTreeSet::from([number])], nodes).map_err(io::Error::other)?;
    let last_membership = StoredMembership::new(Some(last), membership);
    let meta = SnapshotMeta { last_log_id: Some(last), last_membership };
    disk.write_snapshot(to_store(&meta, Arc::new(body))?).await?;
    let boot = read_note::<u64>(disk, BOOT)?.unwrap_or(0);
    let mut notes = vec![
        (NUMBER, encode(&number)?),
        (BOOT, encode(&boot)?),
        (LINEAGE, encode(&lineage)?),
        (PURGED, encode(&last)?),
        (COMMITTED, encode(&last)?),
    ];
    if let Some(vote) = vote {
        notes.push((VOTE, encode(&vote)?));
    }
    disk.write(LogBatch { cut_from: Some(0), notes, ..LogBatch::default() }).await
}
