//! The closure of a manifest: all objects that it needs, checked and located.

use crate::error::{At, StoreError};
use crate::index::{Index, PackNo};
use crate::keys::KeyRing;
use crate::store::{State, Store, THIS_NODE};
use ks_proto::chunk::{CHUNK_BYTES, ObjectKind};
use ks_proto::ids::{CheckpointId, ChunkId};
use ks_proto::manifest::{Manifest, decode_segment};
use ks_proto::pack::PackEntry;
use ks_proto::plan::{Plan, PlanRow};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::sync::Arc;

/// An object that a manifest needs.
pub(crate) type Need = (ChunkId, ObjectKind);

/// What hinders a closure from being whole.
enum Gap {
    /// An object has no place: it may come from a peer.
    Object(Need),
    /// A pack's file is gone.
    Pack(PackNo),
    /// Not to be mended by fetching.
    Error(StoreError),
}

impl Store {
    /// Every object that `m` needs, each once, sorted. Segments are read and verified on the way.
    pub(crate) fn closure(self: &Arc<Self>, m: &Manifest, keys: &KeyRing) -> Result<Vec<Need>, StoreError> {
        let segments: BTreeSet<ChunkId> =
            m.memory.segments.iter().chain(&m.disk.segments).filter(|s| !s.is_zero()).copied().collect();
        let mut needs: Vec<Need> = m.state.iter().map(|id| (*id, ObjectKind::State)).collect();
        self.fill(&segments.iter().map(|id| (*id, ObjectKind::Segment)).collect::<Vec<_>>(), keys);
        for id in segments {
            needs.push((id, ObjectKind::Segment));
            let refs = self.segment(&id, keys)?;
            needs.extend(refs.iter().filter(|c| !c.is_zero()).map(|c| (*c, ObjectKind::Data)));
        }
        needs.sort_unstable();
        needs.dedup();
        Ok(needs)
    }

    /// The references of a segment, verified.
    pub(crate) fn segment(self: &Arc<Self>, id: &ChunkId, keys: &KeyRing) -> Result<Arc<Vec<ChunkId>>, StoreError> {
        // The cache must not open what the key ring cannot.
        let ours = self.state().index.find(id, ObjectKind::Segment, |d| keys.get(d).is_some()).is_some();
        if ours && let Some(refs) = self.segment_cache().get(id) {
            return Ok(refs);
        }
        let found = self.obtain(id, Some(ObjectKind::Segment), keys, None)?;
        let path = self.pack_path(&found.pack);
        let refs = decode_segment(&found.plain).map_err(|source| StoreError::Decode { path, source })?;
        let refs = Arc::new(refs);
        self.segment_cache().put(*id, refs.clone());
        Ok(refs)
    }

    /// The restore plan of a checkpoint (or image) and its packs, read-only, in the plan's order. Objects that are missing
    /// here are fetched from peers.
    ///
    /// # Errors
    /// [`StoreError::NoManifest`]; [`StoreError::Lost`] or [`StoreError::Missing`] naming the object, its pack and file.
    pub fn closure_plan(self: &Arc<Self>, id: &CheckpointId, keys: &KeyRing) -> Result<(Plan, Vec<File>), StoreError> {
        let m = self.manifest(id)?;
        let needs = self.closure(&m, keys)?;
        self.complete(
            |s| {
                let packs = check(&s.index, id, &m, &needs, keys)?;
                self.plan_of(s, &needs, &packs, keys)
            },
            &needs,
            keys,
        )
    }

    /// Runs `attempt` under the read lock; mends what it lacks and tries again, until it has no gap or one that stays.
    fn complete<T>(
        self: &Arc<Self>,
        attempt: impl Fn(&State) -> Result<T, Gap>,
        needs: &[Need],
        keys: &KeyRing,
    ) -> Result<T, StoreError> {
        loop {
            let gap = match attempt(&self.state()) {
                Ok(done) => return Ok(done),
                Err(gap) => gap,
            };
            match gap {
                Gap::Error(e) => return Err(e),
                Gap::Object((id, kind)) => {
                    self.fill(needs, keys);
                    drop(self.obtain(&id, Some(kind), keys, None)?);
                }
                Gap::Pack(no) if self.refetch_pack(no) => {}
                Gap::Pack(no) => {
                    let mut s = self.state_mut();
                    let rows = s.index.pack(no).map_or(0, |p| p.rows.len());
                    for row in 0..rows {
                        s.index.mark_bad(crate::index::Place { pack: no, row: u32::try_from(row).unwrap_or(u32::MAX) });
                    }
                }
            }
        }
    }

    fn plan_of(&self, s: &State, needs: &[Need], packs: &BTreeSet<PackNo>, keys: &KeyRing) -> Result<(Plan, Vec<File>), Gap> {
        let mut files = Vec::with_capacity(packs.len());
        let mut order: BTreeMap<PackNo, u32> = BTreeMap::new();
        for no in packs {
            let info = s.index.pack(*no).expect("the packs were found under the same lock");
            let path = self.pack_path(&info.id);
            let file = match self.disk.open(&path) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(Gap::Pack(*no)),
                other => other.at("open", &path).map_err(Gap::Error)?,
            };
            order.insert(*no, u32::try_from(files.len()).expect("fewer packs than 2^32"));
            files.push(file);
        }
        let rows = needs
            .iter()
            .map(|(id, kind)| {
                let (place, entry) = s.index.find(id, *kind, |d| keys.get(d).is_some()).expect("checked under the same lock");
                let domain = s.index.pack(place.pack).expect("a place has its pack").domain;
                PlanRow { entry: *entry, pack: order[&place.pack], domain }
            })
            .collect();
        Ok((Plan::new(rows), files))
    }

    /// Checks the closure of a manifest to commit, and pins it for `upload` in the same breath. Returns its packs and objects.
    pub(crate) fn check_and_pin(
        self: &Arc<Self>,
        upload: u64,
        id: &CheckpointId,
        m: &Manifest,
        keys: &KeyRing,
    ) -> Result<(BTreeSet<PackNo>, Vec<Need>), StoreError> {
        let needs = self.closure(m, keys)?;
        loop {
            let mut s = self.state_mut();
            let gap = match check(&s.index, id, m, &needs, keys) {
                Ok(packs) => {
                    s.pin(upload, needs.iter().map(|n| n.0));
                    packs.iter().for_each(|no| s.index.claim(*no, Some(upload)));
                    return Ok((packs, needs));
                }
                Err(gap) => gap,
            };
            drop(s);
            match gap {
                Gap::Error(e) => return Err(e),
                Gap::Pack(_) => unreachable!("a check opens no files"),
                Gap::Object((object, kind)) => {
                    self.fill(&needs, keys);
                    match self.obtain(&object, Some(kind), keys, None) {
                        Ok(_) => {}
                        Err(StoreError::Lost { why, .. }) => {
                            let needed_by = format!("the manifest {} to commit", id.short());
                            return Err(StoreError::Missing { what: what_of(kind), id: object, needed_by, why });
                        }
                        Err(e) => return Err(e),
                    }
                }
            }
        }
    }
}

fn what_of(kind: ObjectKind) -> &'static str {
    match kind {
        ObjectKind::Data => "chunk",
        ObjectKind::Segment => "segment",
        ObjectKind::State => "state object",
    }
}

impl State {
    /// Pins objects for an upload, and tells a collection that is marking.
    pub(crate) fn pin(&mut self, upload: u64, ids: impl Iterator<Item = ChunkId> + Clone) {
        if let Some(t) = &mut self.touched {
            t.extend(ids.clone());
        }
        if let Some(p) = self.uploads.get_mut(&upload) {
            p.objects.extend(ids);
        }
    }

    /// Adds objects to the base of an upload.
    pub(crate) fn pin_base(&mut self, upload: u64, ids: impl Iterator<Item = ChunkId> + Clone) {
        if let Some(t) = &mut self.touched {
            t.extend(ids.clone());
        }
        if let Some(p) = self.uploads.get_mut(&upload) {
            p.base.extend(ids);
        }
    }
}

/// Checks that every need has a place of the right kind, size and domain. Returns the packs.
fn check(index: &Index, id: &CheckpointId, m: &Manifest, needs: &[Need], keys: &KeyRing) -> Result<BTreeSet<PackNo>, Gap> {
    let ours = |domain| keys.get(domain).is_some();
    let mut packs = BTreeSet::new();
    let mut last = None;
    for need in needs {
        // Not found, or only under keys that are not at hand: reading it tells which.
        let Some((place, entry)) = index.find(&need.0, need.1, ours) else { return Err(Gap::Object(*need)) };
        if last != Some(place.pack) {
            packs.insert(place.pack);
            last = Some(place.pack);
        }
        check_size(id, entry).map_err(Gap::Error)?;
    }
    let state =
        m.state.iter().filter_map(|s| index.find(s, ObjectKind::State, ours)).map(|(_, e)| u64::from(e.plain_len)).sum::<u64>();
    if state != m.state_bytes {
        let why = format!("its state objects hold {state} bytes where {} are promised", m.state_bytes);
        return Err(Gap::Error(StoreError::Refused { what: "manifest", why }));
    }
    Ok(packs)
}

fn check_size(id: &CheckpointId, e: &PackEntry) -> Result<(), StoreError> {
    if e.kind == ObjectKind::Data && e.plain_len as usize != CHUNK_BYTES {
        let why = format!("its copy on {THIS_NODE} has {} bytes where a chunk has {CHUNK_BYTES}", e.plain_len);
        return Err(StoreError::Missing { what: "chunk", id: e.id, needed_by: format!("checkpoint {}", id.short()), why });
    }
    Ok(())
}
