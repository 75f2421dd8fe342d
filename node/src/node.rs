//! One node: what it holds open, and its sessions.

use crate::host::engine::{EngineChoice, HostFacts};
use crate::host::files::Layout;
use crate::host::golden::GoldenWork;
use crate::host::session::{self, SessionHandle};
use crate::host::state::StateStore;
use crate::host::vm::Supply;
use crate::session::{Head, HeadKind, Policy};
use ks_proto::api::{ApiError, NodeInfo, SessionState};
use ks_proto::{CheckpointId, SessionId};
use ks_raft::{SessionRecord, Wanted};
use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};

/// See the module. Shared by `Arc`.
pub struct Node {
    /// Paths.
    pub layout: Layout,
    /// Durable state.
    pub state: StateStore,
    /// Chunks and keys.
    pub supply: Supply,
    /// What the host has.
    pub facts: HostFacts,
    /// What `auto` means here, or why there is no engine.
    pub engine: Result<EngineChoice, ApiError>,
    /// Golden checkpoints being made.
    pub golden: GoldenWork,
    /// Set when ksd is about to end on purpose: nothing new is started.
    pub ending: AtomicBool,
    /// Told when the API should stop.
    pub shutdown: tokio::sync::Notify,
    sessions: Mutex<BTreeMap<SessionId, SessionHandle>>,
}

impl Node {
    /// A node of these parts, with no sessions looked after yet.
    pub fn new(layout: Layout, state: StateStore, supply: Supply) -> Arc<Self> {
        let facts = HostFacts::probe();
        let engine = facts.choose("auto");
        Arc::new(Self {
            layout,
            state,
            supply,
            facts,
            engine,
            golden: GoldenWork::default(),
            ending: AtomicBool::new(false),
            shutdown: tokio::sync::Notify::new(),
            sessions: Mutex::default(),
        })
    }

    /// Who this is.
    pub fn info(&self) -> NodeInfo {
        let none = |e: &ApiError| EngineChoice {
            engine: ks_proto::manifest::EngineKind::Qemu,
            profile: "none".into(),
            version: String::new(),
            why: format!("no engine works here: {}; {}", e.why, e.next),
        };
        let engine = self.engine.as_ref().map_or_else(none, EngineChoice::clone);
        NodeInfo {
            schema: "ks.node.v1".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
            data_dir: self.layout.root.display().to_string(),
            engine: engine.engine,
            profile: engine.profile,
            engine_why: engine.why,
            warning:
                "one node: every checkpoint has one copy, on this disk. If the disk or the host is lost, so are the sessions."
                    .into(),
        }
    }

    /// The live record of a session by name or id.
    ///
    /// # Errors
    /// `not-found`.
    pub fn record(&self, name_or_id: &str) -> Result<SessionRecord, ApiError> {
        self.state.read().find(name_or_id).cloned().ok_or_else(|| {
            let why = format!("no session is called {name_or_id:?} on this node");
            ApiError::new("not-found", "there is no such session", why, "ks ls shows what there is")
        })
    }

    /// The machine of a session by name or id, with its record.
    ///
    /// # Errors
    /// `not-found`.
    pub fn session(&self, name_or_id: &str) -> Result<(SessionRecord, SessionHandle), ApiError> {
        let record = self.record(name_or_id)?;
        let handle = self.handle(&record.id).ok_or_else(|| {
            ApiError::new("busy", "the session is not looked after yet", "the node is starting or removing it", "try again")
        })?;
        Ok((record, handle))
    }

    /// The machine of a session.
    pub fn handle(&self, id: &SessionId) -> Option<SessionHandle> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner).get(id).cloned()
    }

    /// Starts to look after a session.
    pub fn adopt_handle(&self, handle: SessionHandle) {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner).insert(handle.id, handle);
    }

    /// Stops to look after a session.
    pub fn drop_handle(&self, id: &SessionId) {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner).remove(id);
    }

    /// Starts a machine for every session of the records: live VMs are adopted, lost ones come back.
    pub fn resume_all(self: &Arc<Self>) {
        let records: Vec<SessionRecord> = self.state.read().sessions.values().filter(|s| !s.tombstone).cloned().collect();
        for r in records {
            let state = match r.wanted {
                Wanted::Running => SessionState::Starting,
                Wanted::Parked => SessionState::Parked,
                Wanted::Stopped => SessionState::Stopped,
                Wanted::Failed => SessionState::Failed,
            };
            session::start(self, &r, state, session::First::Resume);
        }
    }
}

/// Whose checkpoint `id` is, as the session sees it.
pub fn head_of(r: &SessionRecord, id: CheckpointId) -> Head {
    let kind = if r.by_id(&id).is_some() {
        HeadKind::Own
    } else if r.forked_from.as_ref().is_some_and(|f| f.checkpoint == id) {
        HeadKind::ForkPoint
    } else if r.next_number > 1 {
        // Thinned since: it was its own.
        HeadKind::Own
    } else {
        HeadKind::Golden
    };
    Head { id, kind }
}

/// A session's times.
pub fn policy_of(r: &SessionRecord) -> Policy {
    Policy::new(r.cadence_s, r.idle_park_s)
}
