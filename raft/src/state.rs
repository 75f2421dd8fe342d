//! The replicated state and its readers.

use crate::fleet::{Durability, FleetPolicy, Member, MemberState, TokenRecord, UserRecord};
use crate::proposal::Proposers;
use crate::record::{CheckpointRecord, GoldenRecord, ImageRecord, SessionRecord};
use crate::sessions::SessionMap;
use ks_proto::{CheckpointId, FleetId, ImageId, SessionId, SessionName};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Everything that the fleet agrees on. A clone shares the sessions, so it is cheap however many there are.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct FleetState {
    /// Rises with `ks fleet recover`.
    pub generation: u64,
    /// Commands applied so far, refused ones included.
    pub applied: u64,
    /// Sessions and tombstones.
    pub sessions: SessionMap,
    /// Images by name.
    pub images: BTreeMap<String, ImageRecord>,
    /// Images that lost their name to a newer one while sessions use them.
    pub old_images: BTreeMap<ImageId, ImageRecord>,
    /// Golden checkpoints.
    pub golden: Vec<GoldenRecord>,
    /// Set when the fleet is founded.
    #[serde(default)]
    pub fleet_id: Option<FleetId>,
    /// Certificate of the fleet's CA, DER in hex; "" before it is founded.
    #[serde(default)]
    pub ca_cert_hex: String,
    /// Members by number, with those that left. Empty before the fleet is founded.
    #[serde(default)]
    pub members: BTreeMap<u64, Member>,
    /// Join tokens by the BLAKE3 of their secret, hex.
    #[serde(default)]
    pub tokens: BTreeMap<String, TokenRecord>,
    /// Users by name.
    #[serde(default)]
    pub users: BTreeMap<String, UserRecord>,
    /// What holds for the whole fleet.
    #[serde(default)]
    pub policy: FleetPolicy,
    /// Answers that proposers may still ask for again.
    #[serde(default)]
    pub(crate) proposers: Proposers,
}

impl FleetState {
    /// A live session by name, or by id in hex (whole, or its first 8 digits and more when unique).
    pub fn find(&self, name_or_id: &str) -> Option<&SessionRecord> {
        let by_name = name_or_id.parse::<SessionName>().ok().and_then(|n| self.sessions.by_name(&n));
        by_name.or_else(|| {
            let live = self.sessions.values().filter(|s| !s.tombstone);
            let mut hits = live.filter(|s| name_or_id.len() >= 8 && s.id.to_hex().starts_with(name_or_id));
            hits.next().filter(|_| hits.next().is_none())
        })
    }

    /// The member that is not gone, by name or by number.
    pub fn find_member(&self, name_or_number: &str) -> Option<&Member> {
        let mut live = self.members.values().filter(|m| m.is_member());
        live.clone().find(|m| m.name == name_or_number).or_else(|| {
            let number = name_or_number.parse::<u64>().ok()?;
            live.find(|m| m.number == number)
        })
    }

    /// Members that sessions may be placed on.
    pub fn active(&self) -> impl Iterator<Item = &Member> {
        self.members.values().filter(|m| m.state == MemberState::Active)
    }

    /// The member with that key, if it did not leave.
    pub fn member_by_peer(&self, peer_id: &str) -> Option<&Member> {
        self.members.values().find(|m| m.is_member() && m.peer_id == peer_id)
    }

    /// True once a fleet was founded: from then on owners and holders are members' numbers.
    pub fn is_founded(&self) -> bool {
        self.fleet_id.is_some()
    }

    /// Copies that a checkpoint of `s` should have: what it or the fleet's policy asks for, but no more than there are
    /// active members, and at least one.
    pub fn copies_wanted(&self, s: &SessionRecord) -> usize {
        let asked = if s.copies == 0 { self.policy.copies } else { s.copies };
        usize::from(asked).min(self.active().count()).max(1)
    }

    /// Holders whose copy counts: all but nodes that left. A lone node's earlier records name none: the owner has it.
    pub fn holders<'a>(&'a self, s: &'a SessionRecord, c: &'a CheckpointRecord) -> Vec<u64> {
        if !self.is_founded() && c.holders.is_empty() {
            return vec![s.owner];
        }
        let counts = |n: &u64| !self.is_founded() || self.members.get(n).is_some_and(Member::is_member);
        c.holders.iter().copied().filter(counts).collect()
    }

    /// How safe a checkpoint is.
    pub fn durability(&self, s: &SessionRecord, c: &CheckpointRecord) -> Durability {
        match self.holders(s, c).len() {
            0 => Durability::Lost,
            n if n >= self.copies_wanted(s) => Durability::Durable,
            1 => Durability::Local,
            _ => Durability::Replicating,
        }
    }

    /// The image with this content, by whatever name, or replaced.
    pub fn image_by_id(&self, id: &ImageId) -> Option<&ImageRecord> {
        self.images.values().find(|i| i.id == *id).or_else(|| self.old_images.get(id))
    }

    /// Checkpoints of `parent` that other records began from.
    pub fn fork_points(&self, parent: &SessionId) -> BTreeSet<CheckpointId> {
        self.sessions.children(parent).filter_map(|s| s.forked_from.as_ref()).map(|f| f.checkpoint).collect()
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
