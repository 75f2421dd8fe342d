//! Looking for rot: one checkpoint in full, or all packs step by step.

use crate::error::{At, ObjectFault, StoreError};
use crate::index::{PackNo, Place};
use crate::keys::KeyRing;
use crate::load::read_all;
use crate::read::{Spot, spot};
use crate::store::{Store, THIS_NODE};
use ks_proto::ids::{CheckpointId, ChunkId, PackId};
use ks_proto::pack::PACK_BYTES_MAX;
use std::sync::Arc;

/// What [`Store::verify`] read and found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VerifyReport {
    /// Objects read and verified.
    pub objects: u64,
    /// Their plain bytes.
    pub bytes: u64,
    /// What is damaged or missing.
    pub faults: Vec<ObjectFault>,
}

/// One step of [`Store::scrub`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ScrubStep {
    /// The pack that was read; None: the round is over, begin anew with None.
    pub pack: Option<PackId>,
    /// Bytes read.
    pub bytes: u64,
    /// What is damaged in it.
    pub faults: Vec<ObjectFault>,
    /// Which of the damaged objects peers gave again, verified and stored.
    pub repaired: Vec<ChunkId>,
}

impl Store {
    /// Reads every object of a checkpoint. Damaged ones are fetched from peers where possible, and are faults otherwise.
    ///
    /// # Errors
    /// If the manifest or a segment cannot be had (without it nobody knows what to read), or a key is missing.
    pub fn verify(self: &Arc<Self>, id: &CheckpointId, keys: &KeyRing) -> Result<VerifyReport, StoreError> {
        let m = self.manifest(id)?;
        let mut report = VerifyReport::default();
        let needs = self.closure(&m, keys)?;
        self.fill(&needs, keys);
        for (object, kind) in needs {
            match self.obtain(&object, Some(kind), keys, None) {
                Ok(found) => {
                    report.objects += 1;
                    report.bytes += found.plain.len() as u64;
                }
                Err(StoreError::Lost { chunk, pack: file, holder, why }) => {
                    let pack = file.as_ref().and_then(|p| p.file_stem()?.to_str()?.parse().ok());
                    report.faults.push(ObjectFault { chunk, pack, file, holder, why });
                }
                Err(e) => return Err(e),
            }
        }
        Ok(report)
    }

    /// Reads the pack after `after` (None: the first) and checks it against its name; if that fails, every object in it.
    /// Damaged objects are taken out of service; peers are asked for the pack, then for each object, and what they give is
    /// verified and stored. What they do not have the next upload may bring again.
    ///
    /// # Errors
    /// If this machine cannot read at all; damage is no error.
    pub fn scrub(self: &Arc<Self>, after: Option<PackId>, keys: &KeyRing) -> Result<ScrubStep, StoreError> {
        let next = self.state().index.pack_after(after);
        let Some((id, no)) = next else { return Ok(ScrubStep::default()) };
        let path = self.pack_path(&id);
        let whole = self.disk.open(&path).at("open", &path).and_then(|f| read_all(&*self.disk, &f, &path, PACK_BYTES_MAX as u64));
        let (bytes, intact) = match &whole {
            Ok(content) => (content.len() as u64, blake3::hash(content).as_bytes() == &id.0),
            Err(_) => (0, false),
        };
        drop(whole);
        let faults = if intact { Vec::new() } else { self.faults_in(no, keys)? };
        let repaired = if intact { Vec::new() } else { self.mend(no, &faults, keys) };
        Ok(ScrubStep { pack: Some(id), bytes, faults, repaired })
    }

    pub(crate) fn faults_in(self: &Arc<Self>, no: PackNo, keys: &KeyRing) -> Result<Vec<ObjectFault>, StoreError> {
        let spots: Vec<Spot> = {
            let s = self.state();
            let rows = s.index.pack(no).map_or(0, |p| p.rows.len());
            let places = (0..rows).map(|row| Place { pack: no, row: u32::try_from(row).unwrap_or(u32::MAX) });
            places.filter_map(|p| spot(&s.index, p)).collect()
        };
        let mut faults = Vec::new();
        for c in spots {
            if let Some((file, why)) = self.damage(&c, keys)? {
                self.take_out(c.place);
                let (pack, file) = (Some(c.pack), Some(file));
                faults.push(ObjectFault { chunk: c.entry.id, pack, file, holder: THIS_NODE.into(), why });
            }
        }
        Ok(faults)
    }
}
