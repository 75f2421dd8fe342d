//! Collection: what no root reaches goes, once it is older than the grace period; packs that are mostly dead are compacted.
//!
//! ```text
//!   mark (no lock) ──> manifests go, durably ──> dead packs go ──> packs with little left are copied, verified, replaced
//! ```
//! Roots are what the caller names, every manifest younger than the grace period, what waits for the fleet's decision, and
//! what active uploads rely on or touch while this runs. Files that a VMM has open stay readable: an unlinked file lives as long as its descriptors.
//! If any root cannot be read whole, nothing is removed at all.

use crate::error::{At, StoreError};
use crate::index::{PackNo, Place};
use crate::keys::KeyRing;
use crate::store::{State, Store};
use crate::upload::Upload;
use ks_proto::ids::{CheckpointId, ChunkId};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};

/// Packs with fewer live bytes than this share are compacted, in percent.
pub const COMPACT_BELOW_PERCENT: u64 = 50;

/// Packs below this size are small.
pub const SMALL_PACK_BYTES: u64 = 4 * 1024 * 1024;
/// So many small packs of one domain are merged: a session's minutes should not need one descriptor each.
pub const MERGE_AT: usize = 32;

/// What a collection did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GcReport {
    /// Manifests removed.
    pub manifests_removed: u64,
    /// Packs removed because nothing in them was needed.
    pub packs_removed: u64,
    /// Packs whose needed objects were copied into others.
    pub packs_compacted: u64,
    /// Bytes by which the store shrank.
    pub bytes_freed: u64,
    /// What was left alone because it could not be read, one line each.
    pub warnings: Vec<String>,
}

impl Store {
    /// Collects. `roots` are all checkpoints and images that must stay, of every session, running VM's base and pin on
    /// this node. `keys` must open all of them.
    ///
    /// # Errors
    /// If a root is missing, damaged or sealed under another key: then nothing was removed. If the disk refuses midway:
    /// what was removed until then was not needed.
    pub fn gc(
        self: &Arc<Self>,
        roots: &[CheckpointId],
        keys: &KeyRing,
        grace_ms: u64,
        now_ms: u64,
    ) -> Result<GcReport, StoreError> {
        let _one = self.collecting.lock().unwrap_or_else(PoisonError::into_inner);
        let old_enough = now_ms.saturating_sub(grace_ms);
        let (keep, decided) = {
            let mut s = self.state_mut();
            s.touched = Some(s.uploads.values().flat_map(|p| p.objects.iter().chain(&p.base).copied()).collect());
            s.committed.clear();
            let young = s.manifests.iter().filter(|(_, m)| m.since_ms >= old_enough).map(|(id, _)| *id);
            // A pin comes before its manifest, and a decision may be older than the caller's list of roots.
            let pinned = s.pins.iter().map(|p| p.0).chain(s.decided.iter().copied()).filter(|id| s.manifests.contains_key(id));
            (young.chain(pinned).chain(roots.iter().copied()).collect::<BTreeSet<_>>(), s.decided.clone())
        };
        let report = self.collect(&keep, keys, old_enough);
        let mut s = self.state_mut();
        s.touched = None;
        if report.is_ok() {
            s.decided.retain(|id| !decided.contains(id));
        }
        drop(s);
        self.drop_stale_parts(old_enough)?;
        report
    }

    fn collect(self: &Arc<Self>, keep: &BTreeSet<CheckpointId>, keys: &KeyRing, old_enough: u64) -> Result<GcReport, StoreError> {
        let mut live = HashSet::new();
        for id in keep {
            let m = self.manifest(id)?;
            live.extend(self.closure(&m, keys)?.into_iter().map(|n| n.0));
        }
        let mut report = GcReport::default();
        self.drop_manifests(keep, &mut report)?;
        self.drop_dead_packs(&live, old_enough, &mut report)?;
        self.compact(&live, keys, old_enough, &mut report)?;
        Ok(report)
    }

    fn drop_manifests(&self, keep: &BTreeSet<CheckpointId>, report: &mut GcReport) -> Result<(), StoreError> {
        let _names = self.naming();
        let gone: Vec<(CheckpointId, u64)> = {
            let s = self.state();
            let gone = s.manifests.iter().filter(|(id, _)| !keep.contains(id) && !s.committed.contains(id));
            gone.map(|(id, m)| (*id, m.bytes)).collect()
        };
        let mut dirs = BTreeSet::new();
        for (id, bytes) in &gone {
            let path = self.manifest_path(id);
            self.unlink(&path)?;
            dirs.extend(path.parent().map(Path::to_owned));
            report.manifests_removed += 1;
            report.bytes_freed += bytes;
        }
        // Durable before any pack goes: a manifest that comes back after a crash must not lack its chunks.
        dirs.iter().try_for_each(|d| self.sync_dir(d))?;
        let mut s = self.state_mut();
        for (id, _) in &gone {
            s.manifests.remove(id);
        }
        Ok(())
    }

    fn unlink(&self, path: &Path) -> Result<(), StoreError> {
        match self.disk.unlink(path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            other => other.at("remove", path)?,
        }
        if let Some(dir) = path.parent() {
            self.names_changed(dir);
        }
        Ok(())
    }

    /// Forgets, then unlinks: nobody is given a pack whose file is about to go.
    fn forget(&self, choose: impl Fn(&State) -> Vec<PackNo>) -> Result<(u64, u64), StoreError> {
        let _names = self.naming();
        let gone: Vec<(PathBuf, u64)> = {
            let mut s = self.state_mut();
            let nos = choose(&s);
            nos.into_iter().filter_map(|no| s.index.remove(no)).map(|p| (self.pack_path(&p.id), p.bytes)).collect()
        };
        for (path, _) in &gone {
            self.unlink(path)?;
        }
        Ok((gone.len() as u64, gone.iter().map(|g| g.1).sum()))
    }

    fn drop_dead_packs(&self, live: &HashSet<ChunkId>, old_enough: u64, report: &mut GcReport) -> Result<(), StoreError> {
        let dead = |s: &State, no: PackNo| live_bytes(s, no, live) == 0 && !last_trace(s, no, live);
        let found: Vec<PackNo> = {
            let s = self.state();
            let old = s.index.packs().filter(|(_, p)| p.since_ms < old_enough && p.unclaimed_by.is_none());
            old.map(|(no, _)| no).filter(|no| dead(&s, *no)).collect()
        };
        // Looked at again, now that nobody can come to need one.
        let (packs, bytes) = self.forget(|s| found.iter().copied().filter(|no| dead(s, *no)).collect())?;
        report.packs_removed += packs;
        report.bytes_freed += bytes;
        Ok(())
    }

    fn compact(
        self: &Arc<Self>,
        live: &HashSet<ChunkId>,
        keys: &KeyRing,
        old_enough: u64,
        report: &mut GcReport,
    ) -> Result<(), StoreError> {
        let (sparse, domains) = choose(&self.state(), live, old_enough);
        for domain in domains {
            self.compact_domain(domain, &sparse, live, keys, report)?;
        }
        Ok(())
    }

    fn compact_domain(
        self: &Arc<Self>,
        domain: u32,
        sparse: &[PackNo],
        live: &HashSet<ChunkId>,
        keys: &KeyRing,
        report: &mut GcReport,
    ) -> Result<(), StoreError> {
        let upload = Upload::internal(self, domain);
        let before = self.stats().bytes;
        let mut writer = upload.writer();
        let mut copied = BTreeSet::new();
        for no in sparse {
            match self.copy_live(*no, domain, live, keys, &mut writer) {
                Ok(true) => drop(copied.insert(*no)),
                Ok(false) => {}
                Err(e @ (StoreError::Lost { .. } | StoreError::Decode { .. })) => report.warnings.push(e.to_string()),
                Err(e) => return Err(e),
            }
        }
        writer.finish()?;
        upload.keep();
        // The copies are durable, so the old packs may go, but for those of which more became needed meanwhile.
        let (packs, _) = self.forget(|s| copied.iter().copied().filter(|no| all_elsewhere(s, *no, &copied, live)).collect())?;
        report.packs_compacted += packs;
        report.bytes_freed += before.saturating_sub(self.stats().bytes);
        Ok(())
    }

    /// Copies what is needed of a pack, verified; false if the pack is of another domain or gone.
    fn copy_live(
        self: &Arc<Self>,
        no: PackNo,
        domain: u32,
        live: &HashSet<ChunkId>,
        keys: &KeyRing,
        writer: &mut crate::upload::PackWriter<'_>,
    ) -> Result<bool, StoreError> {
        let (path, rows) = {
            let s = self.state();
            let Some(p) = s.index.pack(no).filter(|p| p.domain == domain) else { return Ok(false) };
            let rows = p.rows.iter().zip(0u32..).filter(|(e, row)| serves(&s, Place { pack: no, row: *row }, &e.id, live));
            (self.pack_path(&p.id), rows.map(|(e, row)| (*e, row)).collect::<Vec<_>>())
        };
        let key = keys.get(domain).ok_or_else(|| StoreError::NoKey { domain, what: path.display().to_string() })?;
        let file = self.disk.open(&path).at("open", &path)?;
        for (e, row) in rows {
            let stored = self.read_stored(&file, &e).at("read", &path)?;
            if let Err(source) = e.open(key, &stored) {
                // Copied as it is, the damage would hide in a pack whose own hash is right.
                self.take_out(Place { pack: no, row });
                return Err(StoreError::Decode { path, source });
            }
            writer.put(e.kind, e.codec, e.id, e.plain_len, &stored)?;
        }
        Ok(true)
    }
}

fn needed(s: &State, id: &ChunkId, live: &HashSet<ChunkId>) -> bool {
    live.contains(id) || s.touched.as_ref().is_some_and(|t| t.contains(id))
}

/// Packs to rewrite: those with little left, and small ones once there are many. With their domains.
fn choose(s: &State, live: &HashSet<ChunkId>, old_enough: u64) -> (Vec<PackNo>, BTreeSet<u32>) {
    let old = s.index.packs().filter(|(_, p)| p.since_ms < old_enough && p.unclaimed_by.is_none());
    let mut small: BTreeMap<u32, Vec<PackNo>> = BTreeMap::new();
    let (mut chosen, mut domains) = (Vec::new(), BTreeSet::new());
    for (no, p) in old.filter(|(no, _)| !last_trace(s, *no, live)) {
        let all: u64 = p.rows.iter().map(|e| u64::from(e.stored_len)).sum();
        if live_bytes(s, no, live) * 100 < all * COMPACT_BELOW_PERCENT {
            chosen.push(no);
            domains.insert(p.domain);
        } else if p.bytes < SMALL_PACK_BYTES {
            small.entry(p.domain).or_default().push(no);
        }
    }
    for (domain, nos) in small {
        if nos.len() >= MERGE_AT {
            chosen.extend(nos);
            domains.insert(domain);
        }
    }
    chosen.sort_unstable();
    (chosen, domains)
}

/// True if this place is the one from which a needed object of its domain is served.
fn serves(s: &State, place: Place, id: &ChunkId, live: &HashSet<ChunkId>) -> bool {
    let domain = |p: Place| s.index.pack(p.pack).map(|i| i.domain);
    needed(s, id, live) && s.index.places(id).find(|p| domain(*p) == domain(place)) == Some(place)
}

fn live_bytes(s: &State, no: PackNo, live: &HashSet<ChunkId>) -> u64 {
    let Some(p) = s.index.pack(no) else { return 0 };
    let rows = p.rows.iter().zip(0u32..).filter(|(e, row)| serves(s, Place { pack: no, row: *row }, &e.id, live));
    rows.map(|(e, _)| u64::from(e.stored_len)).sum()
}

/// True if every needed object of this pack has a place outside the packs that are to go.
fn all_elsewhere(s: &State, no: PackNo, going: &BTreeSet<PackNo>, live: &HashSet<ChunkId>) -> bool {
    let elsewhere = |id: &ChunkId| s.index.places(id).any(|p| !going.contains(&p.pack));
    s.index.pack(no).is_some_and(|p| p.rows.iter().filter(|e| needed(s, &e.id, live)).all(|e| elsewhere(&e.id)))
}

/// True if the pack holds the only copy, a damaged one, of a needed object: it is kept for a person, and to be named.
fn last_trace(s: &State, no: PackNo, live: &HashSet<ChunkId>) -> bool {
    s.index.bad_of(no).any(|id| needed(s, &id, live) && s.index.places(&id).next().is_none())
}
