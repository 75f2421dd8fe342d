//! The node's way to the replicated state: what is applied here to read, proposals to change it, and this node's events.

use super::events::EventLog;
use ks_proto::api::{ApiError, Event};
use ks_raft::host::{Consensus, ProposeError};
use ks_raft::{Command, FleetState, Refusal, Response};
use std::sync::Arc;
use tokio::sync::broadcast;

/// See the module. Clones share it.
#[derive(Clone)]
pub struct StateStore {
    consensus: Consensus,
    events: EventLog,
    runtime: tokio::runtime::Handle,
}

impl StateStore {
    /// Over these two; called on the runtime that consensus runs on.
    pub fn new(consensus: Consensus, events: EventLog) -> Self {
        Self { consensus, events, runtime: tokio::runtime::Handle::current() }
    }

    /// The state as applied here: on a node that is behind, or cut off, an older one. What must be decided on the newest
    /// state is decided inside a command.
    pub fn read(&self) -> Arc<FleetState> {
        self.consensus.state()
    }

    /// Changes the state. When this returns, the change is durable on a majority of the voters and applied here.
    ///
    /// # Errors
    /// The state's refusal; `no-quorum` when no majority answered in time.
    pub async fn propose(&self, command: Command) -> Result<Response, ApiError> {
        self.consensus.propose(command).await.map_err(unproposed)?.ok().map_err(refusal)
    }

    /// As [`Self::propose`], for threads that may block.
    ///
    /// # Errors
    /// See there.
    ///
    /// # Panics
    /// On a thread of the async runtime.
    pub fn apply(&self, command: Command) -> Result<Response, ApiError> {
        self.runtime.block_on(self.propose(command))
    }

    /// Records an event of this node.
    pub fn event(&self, session: &str, kind: &str, text: &str) {
        self.events.record(session, kind, text);
    }

    /// All events until now are on the disk when this returns. Blocks for a sync.
    ///
    /// # Errors
    /// If the database refuses.
    pub fn flush_events(&self) -> Result<(), ApiError> {
        Ok(self.events.flush()?)
    }
    /// Events of this node from `from` on, oldest first, and the live ones after them.
    ///
    /// # Errors
    /// If the database cannot be read.
    pub fn events(&self, from: u64) -> Result<(Vec<Event>, broadcast::Receiver<Event>), ApiError> {
        self.events.read(from).map_err(ApiError::from)
    }
}

fn unproposed(e: ProposeError) -> ApiError {
    let why = e.to_string();
    let next = "ks fleet status; it goes on by itself when most voters are back";
    match e {
        ProposeError::NoQuorum { .. } => ApiError::new("no-quorum", "the fleet cannot decide now", why, next),
        ProposeError::Shutdown => ApiError::new("busy", "the node is ending", why, "try again in a moment"),
        _ => ApiError::new("internal", "the fleet's state", why, "see ksd's log"),
    }
}

/// A refusal of the replicated state in the API's words.
pub fn refusal(r: Refusal) -> ApiError {
    let why = r.to_string();
    let (code, what, next) = match r {
        Refusal::NameTaken { .. } => {
            ("exists", "the session cannot be made", "choose another --name, or `ks attach` to that one")
        }
        Refusal::IdTaken { .. } => ("exists", "the session cannot be made", "try again"),
        Refusal::NoSession { .. } => ("not-found", "the session is not there", "ks ls shows what there is"),
        Refusal::NoCheckpoint { .. } => ("not-found", "the checkpoint is not there", "ks checkpoints NAME shows what there is"),
        Refusal::Fenced { .. } => ("fenced", "a run that is over wanted to commit", "nothing: the newer run goes on"),
        Refusal::StaleEpoch { .. } | Refusal::NotOwner { .. } => {
            ("moving", "the session has moved", "try again; ks ls shows where it is")
        }
        Refusal::NothingToRestore { .. } => {
            ("unreachable", "the session cannot move", "wait until a node that has a checkpoint is back")
        }
        Refusal::Kept { .. } => ("not-allowed", "the checkpoint cannot be dropped", "unpin it, or remove the forks first"),
        Refusal::NoImage { .. } | Refusal::NoRoot { .. } => {
            ("not-found", "the image is not there", "ks image ls; ks image build")
        }
        Refusal::ImageUsed { .. } => ("busy", "the image is in use", "remove those sessions first"),
        Refusal::NoMember { .. } => ("not-found", "there is no such node", "ks node ls shows what there is"),
        Refusal::MemberNotFit { .. } | Refusal::OwnsSessions { .. } => {
            ("busy", "the node cannot do that now", "ks node drain first")
        }
        Refusal::LastMember { .. } => ("usage", "the node stays", "a fleet has one node at least"),
        Refusal::PeerTaken { .. } => ("exists", "the node is a member already", "ks node ls; a copied data folder cannot join"),
        Refusal::NoToken | Refusal::TokenExpired { .. } | Refusal::TokenUsed { .. } => {
            ("token-refused", "the admission is refused", "make a new token: ks node token")
        }
        Refusal::NoUser { .. } => ("not-found", "there is no such user", "ks user ls shows what there is"),
        Refusal::AlreadyFounded { .. } | Refusal::NotFounded => ("busy", "the fleet", "try again in a moment"),
        Refusal::LastHolder { .. } => ("not-allowed", "the copy is kept", "it is the only one"),
        Refusal::BadValue { .. } => ("usage", "the value is not allowed", "see the user's guide"),
        Refusal::TooMany { .. } => ("usage", "the limit is reached", "remove what is not needed"),
        Refusal::ProposalOver { .. } => ("busy", "the change was given up", "look whether it was made, then try again"),
    };
    ApiError::new(code, what, why, next)
}
