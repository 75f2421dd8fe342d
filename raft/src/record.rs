//! Records of the replicated state.

use crate::error::Refusal;
use ks_proto::api::{Checkpoint, ForkPoint, Interruption};
use ks_proto::manifest::EngineKind;
use ks_proto::{CheckpointId, ImageId, RunToken, SessionId, SessionName};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What the owner wants of a session; what it *is* at the moment only its node knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Wanted {
    /// It should run, and is brought back when it does not.
    Running,
    /// It waits, with its memory and CPU given back, until somebody comes.
    Parked,
    /// It was ended by its owner.
    Stopped,
    /// It could not be brought back; a person has to look.
    Failed,
}

/// What is fixed for the life of a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionParams {
    /// Image by name at the time of creation.
    pub image: String,
    /// Image by content.
    pub image_id: ImageId,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Virtual CPUs.
    pub vcpus: u16,
    /// Engine, with `auto` resolved.
    pub engine: EngineKind,
    /// CPU profile.
    pub profile: String,
    /// Why that engine.
    pub engine_why: String,
}

/// A VM that was lost and is not back yet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lost {
    /// When, Unix milliseconds.
    pub at_unix_ms: u64,
    /// Why.
    pub cause: String,
    /// How its node's lease ended, when that is why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lapse: Option<Lapse>,
}

/// How a node's lease ended, as the leader that called it lapsed knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lapse {
    /// The last grant; when this leader granted none, when the node was last heard of. Unix milliseconds by the leader's clock.
    pub seen_unix_ms: u64,
    /// From there to the lapse, milliseconds.
    pub lease_ms: u64,
    /// What of it was this leader's own wait since it took office, milliseconds; None when it led all the while.
    pub election_ms: Option<u64>,
}

/// One checkpoint of a session.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct CheckpointRecord {
    /// As it is listed.
    pub info: Checkpoint,
    /// The run that took it.
    pub token: RunToken,
    /// Nodes that have its whole closure, fsynced. Empty in records of a lone node's earlier versions: its owner has it.
    #[serde(default)]
    pub holders: Vec<u64>,
    /// Not on the line that the session goes on from: newer than the head at a reassignment, or left behind by a restore
    /// of an older one. Listed, and never chosen by itself.
    #[serde(default)]
    pub branch: bool,
}

/// One session.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SessionRecord {
    /// Id.
    pub id: SessionId,
    /// Name, unique among sessions that are not removed.
    pub name: SessionName,
    /// Node that runs it; 0 on a lone node that never founded a fleet.
    pub owner: u64,
    /// Copies of its checkpoints; 0 is the fleet's policy.
    #[serde(default)]
    pub copies: u16,
    /// Nodes that keep its checkpoints, the owner first.
    #[serde(default)]
    pub replicas: Vec<u64>,
    /// The newest run. // Invariant: never falls.
    pub token: RunToken,
    /// Shape.
    pub params: SessionParams,
    /// Seconds between cadence checkpoints; 0 is never.
    pub cadence_s: u64,
    /// Idle seconds before it is parked; 0 is never.
    pub idle_park_s: u64,
    /// Command of the main window; None until it was started.
    pub command: Option<Vec<String>>,
    /// What its owner wants.
    pub wanted: Wanted,
    /// Why, in words ("" when there is nothing to say).
    pub reason: String,
    /// Created, Unix milliseconds.
    pub created_unix_ms: u64,
    /// Parent, for forks of another session's checkpoint.
    pub forked_from: Option<ForkPoint>,
    /// The checkpoint that the next start begins from: the newest one of this run's history.
    pub head: CheckpointId,
    /// Number that the next checkpoint gets. // Invariant: never falls, so that `c7` never means two things.
    pub next_number: u64,
    /// Kept checkpoints by number.
    pub checkpoints: BTreeMap<u64, CheckpointRecord>,
    /// Set from the loss of a VM until the session answers again.
    pub lost: Option<Lost>,
    /// The last interruption.
    pub last_interruption: Option<Interruption>,
    /// Removed, and kept only because forks of it remain.
    pub tombstone: bool,
    /// What it may reach outside; None: never said in the replicated state (nothing, or what an earlier version keeps on its node).
    #[serde(default)]
    pub allow: Option<Vec<String>>,
    /// The most that its model calls may cost, in dollars; "" is no limit, None was never said.
    #[serde(default)]
    pub budget: Option<String>,
}

impl SessionRecord {
    /// Its newest kept checkpoint.
    pub fn latest(&self) -> Option<&CheckpointRecord> {
        self.checkpoints.values().next_back()
    }
    /// Refuses a decision that was made under another epoch.
    pub(crate) fn expect_epoch(&self, expected: Option<u64>) -> Result<(), Refusal> {
        match expected {
            Some(expected) if expected != self.token.epoch => {
                Err(Refusal::StaleEpoch { name: self.name.to_string(), expected, current: self.token.epoch })
            }
            _ => Ok(()),
        }
    }
    /// The next run begins from `from`: what is newer is a side branch from now on.
    pub(crate) fn go_on_from(&mut self, from: CheckpointId) {
        self.head = from;
        let at = self.by_id(&from).map(|c| c.info.number);
        for (number, c) in &mut self.checkpoints {
            match at {
                Some(at) if *number < at => {}
                Some(at) if *number == at => c.branch = false,
                _ => c.branch = true,
            }
        }
    }
    /// The checkpoint with this id.
    pub fn by_id(&self, id: &CheckpointId) -> Option<&CheckpointRecord> {
        self.checkpoints.values().find(|c| c.info.id == *id)
    }
}

/// One image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageRecord {
    /// Name; a newer image of the same name replaces it for new sessions.
    pub name: String,
    /// Content id.
    pub id: ImageId,
    /// Kernel release or file name.
    pub kernel: String,
    /// Recommended kernel command line.
    pub cmdline: String,
    /// `general` or `soft`: which engines it is for. Records of earlier versions have none, which is `general`.
    #[serde(default)]
    pub profile: String,
    /// Root disk, bytes.
    pub disk_bytes: u64,
    /// Bytes in use.
    pub disk_used_bytes: u64,
    /// The disk's manifest in the chunk store.
    pub disk: CheckpointId,
    /// Added, Unix milliseconds.
    pub created_unix_ms: u64,
    /// Nodes that have its files and its disk.
    #[serde(default)]
    pub holders: Vec<u64>,
}

/// A booted, warm, frozen VM of one image and shape, that sessions start from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GoldenRecord {
    /// Image.
    pub image_id: ImageId,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Virtual CPUs.
    pub vcpus: u16,
    /// Engine.
    pub engine: EngineKind,
    /// CPU profile.
    pub profile: String,
    /// Version line of the engine.
    pub engine_version: String,
    /// The checkpoint.
    pub checkpoint: CheckpointId,
    /// Made, Unix milliseconds.
    pub created_unix_ms: u64,
    /// Nodes that have its whole closure.
    #[serde(default)]
    pub holders: Vec<u64>,
}

impl GoldenRecord {
    /// True if it serves the same image on the same kind of VM.
    pub fn same_key(&self, o: &GoldenRecord) -> bool {
        (self.image_id, self.memory_mib, self.vcpus, self.engine) == (o.image_id, o.memory_mib, o.vcpus, o.engine)
            && self.profile == o.profile
            && self.engine_version == o.engine_version
    }
}
