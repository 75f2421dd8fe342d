//! Records of the fleet itself: members, join tokens, users, policy.

use serde::{Deserialize, Serialize};
use std::net::SocketAddr;

/// Where a member stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MemberState {
    /// Sessions may be placed on it.
    #[default]
    Active,
    /// It hands its sessions over and gets no new ones; its copies count.
    Draining,
    /// It left or was removed: its copies do not count, and it is not let in again under this number.
    Gone,
}

/// One node of the fleet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Its raft id: the log index of the entry that let it in (the founder's is 1). Given by apply; never reused.
    #[serde(default)]
    pub number: u64,
    /// libp2p id of its ed25519 key, in text form. // Invariant: unique among members that are not gone.
    pub peer_id: String,
    /// Name for people; apply makes it unique among members that are not gone.
    pub name: String,
    /// Addresses of its control plane (multiaddr text).
    #[serde(default)]
    pub control: Vec<String>,
    /// Addresses of its bulk plane.
    #[serde(default)]
    pub bulk: Vec<SocketAddr>,
    /// URLs of its HTTPS API.
    #[serde(default)]
    pub api: Vec<String>,
    /// CPU profiles whose checkpoints it can restore.
    #[serde(default)]
    pub profiles: Vec<String>,
    /// Failure domain; "" is a domain of its own.
    #[serde(default)]
    pub domain: String,
    /// When it was let in, Unix milliseconds.
    #[serde(default)]
    pub joined_unix_ms: u64,
    /// Where it stands.
    #[serde(default)]
    pub state: MemberState,
    /// Random number of its present process.
    #[serde(default)]
    pub incarnation: u64,
}

impl Member {
    /// The failure domain, with the name in place of an empty one.
    pub fn domain(&self) -> &str {
        if self.domain.is_empty() { &self.name } else { &self.domain }
    }
    /// True unless it left.
    pub fn is_member(&self) -> bool {
        self.state != MemberState::Gone
    }
}

/// A join token: the secret itself is not stored, only its BLAKE3 (the key of the map, in hex).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenRecord {
    /// End of its life, Unix milliseconds.
    pub expires_unix_ms: u64,
    /// User that made it.
    pub made_by: String,
    /// The member that used it.
    #[serde(default)]
    pub used_by: Option<u64>,
}

/// What a user may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// Sees everything, changes nothing.
    Viewer,
    /// Works with sessions.
    User,
    /// Everything, members and users too.
    Admin,
}

/// A user of the fleet's API.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserRecord {
    /// What the user may do.
    pub role: Role,
    /// BLAKE3 of each access token, hex.
    pub token_hashes: Vec<String>,
    /// Created, Unix milliseconds.
    pub created_unix_ms: u64,
}

/// What holds for the whole fleet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FleetPolicy {
    /// Copies of each checkpoint, the owner's included.
    pub copies: u16,
    /// Voters wanted: 1, 3 or 5 (a smaller fleet has fewer).
    pub voters: u16,
    /// Length of a node lease, milliseconds.
    pub lease_ms: u32,
}

impl Default for FleetPolicy {
    fn default() -> Self {
        Self { copies: 2, voters: 3, lease_ms: 3000 }
    }
}

/// How many nodes have a checkpoint, measured against how many should.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Durability {
    /// No member has it: the nodes that had it left.
    Lost,
    /// Its owner alone has it, and more copies are wanted.
    Local,
    /// Several have it, and more copies are wanted.
    Replicating,
    /// Every wanted copy is there and fsynced.
    Durable,
}

impl Durability {
    /// The word for listings.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Lost => "lost",
            Self::Local => "local",
            Self::Replicating => "replicating",
            Self::Durable => "durable",
        }
    }
}
