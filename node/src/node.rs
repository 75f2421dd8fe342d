//! One node: what it holds open, and its sessions.

use crate::fleet::Fleet;
use crate::host::engine::{EngineChoice, HostFacts};
use crate::host::files::Layout;
use crate::host::gateway::Gateway;
use crate::host::gateway::began::NoteBook;
use crate::host::golden::GoldenWork;
use crate::host::session::SessionHandle;
use crate::host::state::StateStore;
use crate::host::vm::Supply;
use crate::session::{Head, HeadKind, Policy};
use ks_proto::api::{ApiError, NodeInfo};
use ks_proto::{CheckpointId, SessionId};
use ks_raft::SessionRecord;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How long an answer may take to leave before ksd ends.
const ANSWERED: Duration = Duration::from_millis(300);

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
    /// What it last read about itself, and when.
    pub told: Mutex<Option<(std::time::Instant, ks_net::NodeFacts)>>,
    /// Model calls, keys and other egress of the sessions: the process outside.
    pub gateway: Arc<Gateway>,
    /// What the next run of a session must know.
    pub notes: NoteBook,
    /// This node's part in the fleet.
    pub fleet: Arc<Fleet>,
    /// Set when ksd is about to end on purpose: nothing new is started.
    pub ending: AtomicBool,
    /// Set when ksd ends to be started again with another place in a fleet.
    pub restart: AtomicBool,
    /// Told when the API should stop.
    pub shutdown: tokio::sync::Notify,
    sessions: Mutex<BTreeMap<SessionId, SessionHandle>>,
    /// Sessions that are being made here: their machine is started by whoever makes them.
    making: Mutex<BTreeSet<SessionId>>,
}

impl Node {
    /// A node of these parts, with no sessions looked after yet.
    pub fn new(layout: Layout, state: StateStore, supply: Supply, fleet: Arc<Fleet>) -> Arc<Self> {
        let facts = HostFacts::probe();
        let engine = facts.choose("auto");
        let gateway = Gateway::new(&layout, &supply.keys);
        let notes = NoteBook::new(gateway.dir());
        Arc::new(Self {
            layout,
            state,
            supply,
            facts,
            engine,
            golden: GoldenWork::default(),
            told: Mutex::default(),
            gateway,
            notes,
            fleet,
            ending: AtomicBool::new(false),
            restart: AtomicBool::new(false),
            shutdown: tokio::sync::Notify::new(),
            sessions: Mutex::default(),
            making: Mutex::default(),
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
            warning: crate::ops::fleet::warning(&self.state.read(), self.fleet.voters().len()),
        }
    }

    /// The live record of a session by name or id.
    ///
    /// # Errors
    /// `not-found`.
    pub fn record(&self, name_or_id: &str) -> Result<SessionRecord, ApiError> {
        self.state.read().find(name_or_id).cloned().ok_or_else(|| {
            let why = format!("no session is called {name_or_id:?}");
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

    /// All sessions looked after here.
    pub fn handles(&self) -> Vec<SessionHandle> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// Says that a session is being made here, until the returned value goes.
    pub fn make(self: &Arc<Self>, id: SessionId) -> Making {
        self.making.lock().unwrap_or_else(PoisonError::into_inner).insert(id);
        Making { node: self.clone(), id }
    }

    /// True while it is being made here.
    pub fn is_making(&self, id: &SessionId) -> bool {
        self.making.lock().unwrap_or_else(PoisonError::into_inner).contains(id)
    }

    /// Ends ksd in a moment, once the present answer is out; its supervisor starts it again.
    pub fn restart_soon(self: &Arc<Self>) {
        self.ending.store(true, Ordering::Release);
        self.restart.store(true, Ordering::Release);
        let node = self.clone();
        tokio::spawn(async move {
            tokio::time::sleep(ANSWERED).await;
            node.shutdown.notify_waiters();
        });
    }
}

/// See [`Node::make`].
pub struct Making {
    node: Arc<Node>,
    id: SessionId,
}
impl Drop for Making {
    fn drop(&mut self) {
        self.node.making.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
        self.node.fleet.owning.notify_one();
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
