//! The replicated state and its readers.

use crate::record::{GoldenRecord, ImageRecord, SessionRecord};
use ks_proto::{CheckpointId, ImageId, SessionId};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Everything that the fleet agrees on.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct FleetState {
    /// Rises with `ks fleet recover`.
    pub generation: u64,
    /// Commands applied so far, refused ones included.
    pub applied: u64,
    /// Sessions and tombstones.
    pub sessions: BTreeMap<SessionId, SessionRecord>,
    /// Images by name.
    pub images: BTreeMap<String, ImageRecord>,
    /// Images that lost their name to a newer one while sessions use them.
    pub old_images: BTreeMap<ImageId, ImageRecord>,
    /// Golden checkpoints.
    pub golden: Vec<GoldenRecord>,
}

impl FleetState {
    /// A live session by name, or by id in hex (whole, or its first 8 digits and more when unique).
    pub fn find(&self, name_or_id: &str) -> Option<&SessionRecord> {
        let live = || self.sessions.values().filter(|s| !s.tombstone);
        live().find(|s| s.name.as_str() == name_or_id).or_else(|| {
            let mut hits = live().filter(|s| name_or_id.len() >= 8 && s.id.to_hex().starts_with(name_or_id));
            hits.next().filter(|_| hits.next().is_none())
        })
    }

    /// The image with this content, by whatever name, or replaced.
    pub fn image_by_id(&self, id: &ImageId) -> Option<&ImageRecord> {
        self.images.values().find(|i| i.id == *id).or_else(|| self.old_images.get(id))
    }

    /// Checkpoints of `parent` that other records began from.
    pub fn fork_points(&self, parent: &SessionId) -> BTreeSet<CheckpointId> {
        self.sessions
            .values()
            .filter_map(|s| s.forked_from.as_ref())
            .filter(|f| f.session == *parent)
            .map(|f| f.checkpoint)
            .collect()
    }

    /// The numbers that must not be dropped, each with why.
    pub fn kept(&self, s: &SessionRecord) -> BTreeMap<u64, &'static str> {
        let forks = self.fork_points(&s.id);
        let latest = s.latest().map(|c| c.info.number);
        let why = |c: &crate::CheckpointRecord| {
            if forks.contains(&c.info.id) {
                Some("a fork begins there")
            } else if s.tombstone {
                None
            } else if c.info.pinned {
                Some("it is pinned")
            } else if Some(c.info.number) == latest {
                Some("it is the latest")
            } else if c.info.id == s.head {
                Some("the session goes on from it")
            } else {
                None
            }
        };
        s.checkpoints.values().filter_map(|c| why(c).map(|w| (c.info.number, w))).collect()
    }

    /// Every manifest that must stay readable: all checkpoint records, heads, golden checkpoints and image disks.
    pub fn roots(&self) -> BTreeSet<CheckpointId> {
        let mut roots = BTreeSet::new();
        for s in self.sessions.values() {
            roots.extend(s.checkpoints.values().map(|c| c.info.id));
            if !s.tombstone {
                roots.insert(s.head);
            }
        }
        roots.extend(self.golden.iter().map(|g| g.checkpoint));
        roots.extend(self.images.values().chain(self.old_images.values()).map(|i| i.disk));
        roots
    }
}
