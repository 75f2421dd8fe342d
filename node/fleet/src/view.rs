//! What the machines see of the replicated state and of the gossip: small, plain, ordered.
//!
//! Hard facts ([`View`]) come from the applied state and decide; soft facts ([`FactsView`]) come from gossip and only rank.

use crate::lease::Tracked;
use ks_proto::{CheckpointId, RunToken, SessionId};
use ks_raft::{FleetState, Member, MemberState, SessionRecord, Wanted};
use std::collections::{BTreeMap, BTreeSet};

/// How a member stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Standing {
    /// Takes sessions and copies.
    Active,
    /// On its way out: its sessions are handed over and it gets no new ones; what it holds still counts.
    Draining,
    /// Left or was removed.
    Gone,
}

/// One member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberView {
    /// Node number.
    pub number: u64,
    /// How it stands.
    pub standing: Standing,
    /// CPU profiles that it can run.
    pub profiles: Vec<String>,
    /// What fails together (a rack, a host): copies and voters are spread over different ones.
    pub domain: String,
    /// The start of the node's daemon to which the lease was last given: written at the join, and then only by a re-grant.
    pub incarnation: u64,
}

/// One kept checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckpointView {
    /// Id.
    pub id: CheckpointId,
    /// The run that took it.
    pub token: RunToken,
    /// Nodes that have all of it on stable storage.
    pub holders: Vec<u64>,
    /// Set aside at a reassignment: kept and copied, never started from by itself.
    pub branch: bool,
}

/// One session that is not removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionView {
    /// Id.
    pub id: SessionId,
    /// Node that may run it.
    pub owner: u64,
    /// Fencing number of the assignment.
    pub epoch: u64,
    /// The newest run.
    pub token: RunToken,
    /// Owner first, then the other nodes that keep copies; may be empty.
    pub replicas: Vec<u64>,
    /// Copies that its policy asks for, at least 1.
    pub copies: u16,
    /// CPU profile.
    pub profile: String,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// It should be running now (not parked, stopped or failed).
    pub running: bool,
    /// It was given up; a person has to look. It is never placed by itself.
    pub failed: bool,
    /// Kept checkpoints, oldest first.
    pub checkpoints: Vec<CheckpointView>,
}

impl SessionView {
    /// The view of one record.
    pub fn of(state: &FleetState, s: &SessionRecord) -> Self {
        let copies = if s.copies == 0 { state.policy.copies } else { s.copies };
        let checkpoint = |c: &ks_raft::CheckpointRecord| CheckpointView {
            id: c.info.id,
            token: c.token,
            holders: state.holders(s, c),
            branch: c.branch,
        };
        Self {
            id: s.id,
            owner: s.owner,
            epoch: s.token.epoch,
            token: s.token,
            replicas: s.replicas.clone(),
            copies: copies.max(1),
            profile: s.params.profile.clone(),
            memory_mib: s.params.memory_mib,
            running: s.wanted == Wanted::Running,
            failed: s.wanted == Wanted::Failed,
            checkpoints: s.checkpoints.values().map(checkpoint).collect(),
        }
    }
}

/// The sessions that a step looks at, so that a view of ten thousand need not be built for one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Scope {
    /// All of these nodes.
    pub owners: BTreeSet<u64>,
    /// And these.
    pub sessions: BTreeSet<SessionId>,
}

/// The part of the replicated state that the machines decide on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct View {
    /// Members by number.
    pub members: BTreeMap<u64, MemberView>,
    /// Sessions that are not removed.
    pub sessions: BTreeMap<SessionId, SessionView>,
    /// Lease length in milliseconds.
    pub lease_ms: u64,
    /// Voters that the policy asks for: 1, 3 or 5.
    pub voters: u16,
}

impl From<MemberState> for Standing {
    fn from(state: MemberState) -> Self {
        match state {
            MemberState::Active => Self::Active,
            MemberState::Draining => Self::Draining,
            MemberState::Gone => Self::Gone,
        }
    }
}

impl From<&Member> for MemberView {
    fn from(m: &Member) -> Self {
        Self {
            number: m.number,
            standing: m.state.into(),
            profiles: m.profiles.clone(),
            domain: m.domain().to_owned(),
            incarnation: m.incarnation,
        }
    }
}

impl From<&FleetState> for View {
    /// The whole state. Before a fleet is founded it has no members, and so nothing to decide.
    fn from(state: &FleetState) -> Self {
        Self::of(state, |_| true)
    }
}

impl View {
    /// The sessions that `wants` picks, with all members.
    pub fn of(state: &FleetState, wants: impl Fn(&SessionRecord) -> bool) -> Self {
        let sessions = state.sessions.values().filter(|s| !s.tombstone && wants(s));
        Self {
            members: state.members.values().map(|m| (m.number, m.into())).collect(),
            sessions: sessions.map(|s| (s.id, SessionView::of(state, s))).collect(),
            lease_ms: state.policy.lease_ms.into(),
            voters: state.policy.voters,
        }
    }
    /// The sessions in `scope`, with all members. Looks at all sessions only if it names an owner.
    pub fn within(state: &FleetState, scope: &Scope) -> Self {
        if !scope.owners.is_empty() {
            return Self::of(state, |s| scope.owners.contains(&s.owner) || scope.sessions.contains(&s.id));
        }
        let mut view = Self::of(state, |_| false);
        let named = scope.sessions.iter().filter_map(|id| state.sessions.get(id)).filter(|s| !s.tombstone);
        view.sessions = named.map(|s| (s.id, SessionView::of(state, s))).collect();
        view
    }
    /// Numbers of members with this standing.
    pub fn with_standing(&self, standing: Standing) -> BTreeSet<u64> {
        self.members.values().filter(|m| m.standing == standing).map(|m| m.number).collect()
    }
    /// True if the node is an active member.
    pub fn is_active(&self, node: u64) -> bool {
        self.members.get(&node).is_some_and(|m| m.standing == Standing::Active)
    }
    /// True for a fleet of one: its only member needs no lease (see [`crate::lease::HolderInput::Alone`]).
    pub fn is_alone(&self) -> bool {
        self.members.values().filter(|m| m.standing != Standing::Gone).count() <= 1
    }
    /// What the granter tracks: all members, and those that are gone and still own sessions.
    pub fn tracked(&self) -> BTreeMap<u64, Tracked> {
        let owners: BTreeSet<u64> = self.sessions.values().map(|s| s.owner).collect();
        let matters = |m: &&MemberView| m.standing != Standing::Gone || owners.contains(&m.number);
        let tracked = |m: &MemberView| Tracked { incarnation: m.incarnation, admitted: m.standing != Standing::Gone };
        self.members.values().filter(matters).map(|m| (m.number, tracked(m))).collect()
    }
    /// The failure domain of a member ("" for a stranger).
    pub fn domain(&self, node: u64) -> &str {
        self.members.get(&node).map_or("", |m| m.domain.as_str())
    }
}

/// What gossip says about one node. It ranks candidates and never decides ownership.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FactsView {
    /// Milliseconds since it was last heard.
    pub seen_ms_ago: u64,
    /// Run queue per CPU, in thousandths.
    pub load_milli: u64,
    /// Memory that a new session could have, MiB.
    pub mem_free_mib: u64,
    /// Space for packs, MiB.
    pub disk_free_mib: u64,
    /// Sessions that it runs.
    pub sessions: u64,
}
