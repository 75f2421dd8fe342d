//! The fleet's part of the HTTP API: nodes, joining, users, policy. Every field that came after the first release has a
//! default, so that nodes of neighbouring versions understand each other.
//!
//! ```text
//! GET    /v1/fleet                        FleetInfo
//! POST   /v1/fleet/token                  MakeToken -> JoinToken
//! POST   /v1/fleet/join                   Join -> Progress NDJSON, result Joined      (local API of the joining node)
//! POST   /v1/fleet/admit                  Admit -> Admitted                           (HTTPS; the token is the only credential)
//! POST   /v1/fleet/leave                  Leave -> Progress NDJSON, result Left       (local API of the leaving node)
//! POST   /v1/fleet/recover                Recover -> Progress NDJSON, result FleetInfo
//! PUT    /v1/fleet/policy                 PolicyChange -> FleetPolicy
//! POST   /v1/fleet/nodes/N/drain          {} -> Progress NDJSON, result Drained; goes on if the client leaves
//! POST   /v1/fleet/nodes/N/undrain        {} -> NodeView
//! DELETE /v1/fleet/nodes/N?force=1        NodeView
//! GET    /v1/users                        [UserView]
//! POST   /v1/users                        PutUser -> NewUser
//! DELETE /v1/users/NAME                   {}
//! ```
//! N is a node's number or name. The public API is HTTPS with a certificate of the fleet's own authority; clients pin that
//! authority by its fingerprint (lower-case hex BLAKE3 of its certificate's DER).

use serde::{Deserialize, Serialize};

/// The server name in every node's certificate; clients ask for it whatever the address is.
pub const NODE_SERVER_NAME: &str = "ks-node";

/// What a user may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// See.
    Viewer,
    /// See, and make and use sessions.
    User,
    /// Everything, nodes and users too.
    Admin,
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Viewer => "viewer",
            Self::User => "user",
            Self::Admin => "admin",
        })
    }
}

impl std::str::FromStr for Role {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "viewer" => Ok(Self::Viewer),
            "user" => Ok(Self::User),
            "admin" => Ok(Self::Admin),
            other => Err(format!("a role is admin, user or viewer, not {:?}", other.chars().take(40).collect::<String>())),
        }
    }
}

/// A node's place in the fleet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NodeState {
    /// Takes sessions.
    #[default]
    Active,
    /// Gives its sessions away and takes none.
    Draining,
    /// Removed; its number is never used again.
    Gone,
}

impl std::fmt::Display for NodeState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Active => "active",
            Self::Draining => "draining",
            Self::Gone => "gone",
        })
    }
}

/// A node's part in consensus.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NodeRole {
    /// Counts for the quorum.
    Voter,
    /// Has the whole state, does not count.
    #[default]
    Learner,
}

impl std::fmt::Display for NodeRole {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Voter => "voter",
            Self::Learner => "learner",
        })
    }
}

/// A node as the answering node sees it.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeView {
    /// Raft id; never reused.
    pub number: u64,
    /// Name, unique in the fleet.
    pub name: String,
    /// libp2p id of its key.
    pub peer_id: String,
    /// Place in the fleet.
    pub state: NodeState,
    /// Part in consensus.
    pub role: NodeRole,
    /// Does it lead?
    pub leader: bool,
    /// Heard of within the liveness time.
    pub live: bool,
    /// Milliseconds since it was last heard of; None is never (since the answering node's start).
    pub seen_ms_ago: Option<u64>,
    /// Round trip on the control plane, microseconds, when connected.
    pub rtt_us: Option<u64>,
    /// URLs of its HTTPS API.
    pub api: Vec<String>,
    /// Its control and bulk addresses.
    pub addrs: Vec<String>,
    /// Failure domain.
    pub domain: String,
    /// Sessions that it owns.
    pub sessions: u64,
    /// Free memory, MiB.
    pub mem_free_mib: u64,
    /// All memory, MiB.
    pub mem_total_mib: u64,
    /// Processors.
    pub cpus: u32,
    /// Load average of one minute.
    pub load: f64,
    /// Free disk under its data folder, MiB.
    pub disk_free_mib: u64,
    /// Profiles that it can run.
    pub profiles: Vec<String>,
    /// Program version.
    pub version: String,
    /// Incarnation (hex); new at each start of ksd.
    pub incarnation: String,
    /// Joined, Unix milliseconds.
    pub joined_unix_ms: u64,
}

/// The answering node's lease.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LeaseView {
    /// `unlimited` (lone node), `held` or `lapsed` (its sessions stand still).
    pub state: String,
    /// Milliseconds until it ends; None when unlimited, 0 when lapsed.
    pub remaining_ms: Option<u64>,
}

/// What holds for the whole fleet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FleetPolicy {
    /// Copies of a checkpoint, its owner's included, that make it durable.
    pub copies: u16,
    /// Voters wanted: 1, 3 or 5.
    pub voters: u16,
    /// Length of a node's lease, milliseconds.
    pub lease_ms: u64,
}

impl Default for FleetPolicy {
    fn default() -> Self {
        Self { copies: 2, voters: 3, lease_ms: 3000 }
    }
}

/// A change of policy; None leaves a setting as it is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PolicyChange {
    /// See [`FleetPolicy`].
    pub copies: Option<u16>,
    /// See [`FleetPolicy`].
    pub voters: Option<u16>,
    /// See [`FleetPolicy`].
    pub lease_ms: Option<u64>,
}

/// The fleet as the answering node sees it.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct FleetInfo {
    /// `ks.fleet.v1`.
    pub schema: String,
    /// 32 hex digits; "" on a node that never founded or joined one.
    pub fleet_id: String,
    /// Rises with `ks fleet recover`.
    pub generation: u64,
    /// Number of the leader, if the answering node knows one.
    pub leader: Option<u64>,
    /// Raft term.
    pub term: u64,
    /// Number of the answering node.
    pub me: u64,
    /// Numbers of the voters.
    pub voters: Vec<u64>,
    /// Has the answering node heard of a leader that has a quorum, within the last lease?
    pub quorum: bool,
    /// The answering node's lease.
    pub lease: LeaseView,
    /// Policy.
    pub policy: FleetPolicy,
    /// Fingerprint of the fleet's certificate authority; "" without one.
    pub fingerprint: String,
    /// Members, by number.
    pub nodes: Vec<NodeView>,
    /// What this fleet cannot survive, in words; "" when there is nothing to say.
    pub warning: String,
}

/// Ask for a join token.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct MakeToken {
    /// Seconds that it is good for; 0 is one hour.
    pub ttl_s: u64,
}

/// A join token: one use.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct JoinToken {
    /// `ks.token.v1`.
    pub schema: String,
    /// The text for `ks node join`: secret, fingerprint and address.
    pub token: String,
    /// When it ends, Unix milliseconds.
    pub expires_unix_ms: u64,
    /// Fingerprint of the fleet's certificate authority.
    pub fingerprint: String,
    /// `HOST:PORT` of the API that the token names.
    pub addr: String,
}

/// Told to a node by its own owner: join the fleet that gave this token.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Join {
    /// The token's text.
    pub token: String,
    /// `HOST:PORT` instead of the token's.
    pub addr: Option<String>,
    /// Name wanted; None is the host's name, made unique.
    pub name: Option<String>,
    /// Failure domain; None is the name.
    pub domain: Option<String>,
}

/// The node is a member.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Joined {
    /// `ks.joined.v1`.
    pub schema: String,
    /// Fleet.
    pub fleet_id: String,
    /// Its number.
    pub number: u64,
    /// Its name.
    pub name: String,
    /// What the fleet now cannot survive.
    pub warning: String,
}

/// A joining node asks a member to be admitted.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Admit {
    /// The token's secret, as it stands in the token.
    pub secret: String,
    /// libp2p id of its key.
    pub peer_id: String,
    /// Public key, protobuf, hex; its hash is `peer_id`.
    pub public_key: String,
    /// Signature by that key over the request without this field, hex: the asker has the key.
    pub signature: String,
    /// Name wanted; made unique by the fleet.
    pub name: String,
    /// Failure domain; "" is the name.
    pub domain: String,
    /// Multiaddresses of its control plane.
    pub control: Vec<String>,
    /// `IP:PORT` of its bulk plane.
    pub bulk: Vec<String>,
    /// URLs of its HTTPS API.
    pub api: Vec<String>,
    /// Profiles that it can run.
    pub profiles: Vec<String>,
    /// Incarnation (hex).
    pub incarnation: String,
    /// Program version.
    pub version: String,
    /// Public half of its HTTPS key (an uncompressed P-256 point, hex): the leaf is made for it.
    pub api_public: String,
}

/// A member as the joiner needs it to find it.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct MemberAddrs {
    /// Raft id.
    pub number: u64,
    /// libp2p id.
    pub peer_id: String,
    /// Name.
    pub name: String,
    /// Multiaddresses of the control plane.
    pub control: Vec<String>,
    /// `IP:PORT` of the bulk plane.
    pub bulk: Vec<String>,
    /// URLs of the HTTPS API.
    pub api: Vec<String>,
}

/// The asker was admitted.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Admitted {
    /// Fleet.
    pub fleet_id: String,
    /// Generation.
    pub generation: u64,
    /// The asker's number.
    pub number: u64,
    /// The asker's name.
    pub name: String,
    /// All members, the asker too.
    pub members: Vec<MemberAddrs>,
    /// The fleet's certificate authority (DER, base64).
    pub ca: String,
    /// The asker's HTTPS leaf (DER, base64).
    pub certificate: String,
    /// What a member must hold to read the fleet's data; sealed by the TLS connection only, never logged (base64).
    pub keys: String,
    /// What the fleet now cannot survive.
    pub warning: String,
}

/// Start a new generation from this node's own state.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Recover {
    /// The person has read what may be lost.
    pub confirmed: bool,
}

/// A node was drained.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Drained {
    /// `ks.drained.v1`.
    pub schema: String,
    /// Number.
    pub number: u64,
    /// Name.
    pub name: String,
    /// Sessions that were moved to peers.
    pub moved: Vec<String>,
    /// Sessions that stay, and why.
    pub stuck: Vec<Stuck>,
}

/// A session that could not be moved.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Stuck {
    /// Session name.
    pub session: String,
    /// Why.
    pub why: String,
}

/// Take the node out of its fleet.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Leave {
    /// Without the fleet, which cannot be reached or has removed this node already.
    pub force: bool,
}

/// The node has left its fleet.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Left {
    /// `ks.left.v1`.
    pub schema: String,
    /// Its number was.
    pub number: u64,
    /// Sessions that were moved to peers.
    pub moved: Vec<String>,
    /// What to look after now.
    pub warning: String,
}

/// Make a user, or give an existing one another role and a further token.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PutUser {
    /// 1-63 characters of a-z, 0-9, '-' and '.'.
    pub name: String,
    /// Role.
    pub role: Role,
}

/// The new user's token: shown once, stored hashed.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct NewUser {
    /// `ks.user.v1`.
    pub schema: String,
    /// Name.
    pub name: String,
    /// Role.
    pub role: Role,
    /// Bearer token.
    pub token: String,
}

/// A user as listed.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct UserView {
    /// Name.
    pub name: String,
    /// Role.
    pub role: Role,
    /// Created, Unix milliseconds.
    #[serde(default)]
    pub created_unix_ms: u64,
    /// Tokens that are good.
    #[serde(default)]
    pub tokens: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_of_an_older_node_is_understood() {
        let f: FleetInfo = serde_json::from_str(r#"{"schema":"ks.fleet.v1","me":3,"nodes":[{"number":3,"name":"c","later":1}]}"#)
            .expect("missing and unknown fields are fine");
        assert_eq!((f.me, f.nodes[0].state, f.policy.copies, f.leader), (3, NodeState::Active, 2, None));
    }

    #[test]
    fn roles_are_ordered_by_what_they_may_do_and_refuse_other_text() {
        assert!(Role::Viewer < Role::User && Role::User < Role::Admin);
        for r in [Role::Viewer, Role::User, Role::Admin] {
            assert_eq!(r.to_string().parse(), Ok(r));
        }
        assert!("root".parse::<Role>().is_err());
    }
}
