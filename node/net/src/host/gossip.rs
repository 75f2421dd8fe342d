//! Gossip: every node's signed facts, spread by chitchat, judged by the board.
//!
//! chitchat has asserts that a member's packets can reach, so it runs in a task of its own that is started again when it dies;
//! the board of live nodes survives that. Its state is thrown away, too, when it grows past what a fleet can need. It decides
//! nothing: not who is a member (Raft), not who owns a session (leases).

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use chitchat::{Chitchat, ChitchatConfig, ChitchatHandle, ChitchatId, FailureDetectorConfig, spawn_chitchat};
use libp2p::PeerId;
use tokio::{
    sync::watch,
    time::{Instant, MissedTickBehavior, interval, sleep},
};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::{
    control::ControlPlane,
    gossip_wire::{Post, address_of, some_member},
};
use crate::{
    board::{Board, LiveNode},
    facts::{FactsError, NodeFacts},
};

/// Runs of nodes (one per start of a node) that chitchat may know before its state is thrown away. All of them must fit in one
/// packet of chitchat's, as it asserts.
const ENTRIES_MAX: usize = 512;
/// Keys that one run of a node may have; ours have one.
const KEYS_MAX: usize = 8;
/// The key of the record.
const KEY: &str = "facts";
/// Longest pause before chitchat is started again.
const RESTART_PAUSE_MAX: Duration = Duration::from_secs(5);
const RESTART_PAUSE_MIN: Duration = Duration::from_millis(100);

/// How gossip paces itself.
#[derive(Clone, Copy, Debug)]
pub struct GossipTiming {
    /// Between two rounds with some peers, and between two looks at what came.
    pub round: Duration,
    /// How often this node signs its record anew, changed or not.
    pub refresh: Duration,
    /// A node whose record has not been renewed for this long is not live.
    pub dead_after: Duration,
    /// How long chitchat remembers the run of a node that is gone.
    pub forget_after: Duration,
}

impl Default for GossipTiming {
    fn default() -> Self {
        Self {
            round: Duration::from_millis(250),
            refresh: Duration::from_secs(1),
            dead_after: Duration::from_secs(5),
            forget_after: Duration::from_secs(30),
        }
    }
}

/// Counters, for `ks node ls --json` and tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GossipStats {
    /// Runs of nodes that chitchat knows now.
    pub entries: u64,
    /// Records that were ignored: bad signature, unreadable, or of no member. Each once.
    pub refused: u64,
    /// How often chitchat had to be started again.
    pub restarts: u64,
}

#[derive(Default)]
struct Counters {
    entries: AtomicU64,
    refused: AtomicU64,
    restarts: AtomicU64,
    generation: AtomicU64,
    /// The last record's number: it rises across restarts of chitchat whatever the clock does.
    seq: AtomicU64,
}

/// This node's part in the gossip. Cheap to clone; the last clone's drop ends it.
#[derive(Clone)]
pub struct Gossip {
    facts: Arc<watch::Sender<Option<NodeFacts>>>,
    live: watch::Receiver<Arc<BTreeMap<PeerId, LiveNode>>>,
    board: Arc<Mutex<Board>>,
    counters: Arc<Counters>,
    started: Instant,
    _guard: Arc<DropGuard>,
}

/// What each run of chitchat gets.
struct Run {
    control: ControlPlane,
    post: Post,
    fleet: String,
    timing: GossipTiming,
    facts: watch::Receiver<Option<NodeFacts>>,
    board: Arc<Mutex<Board>>,
    live: Arc<watch::Sender<Arc<BTreeMap<PeerId, LiveNode>>>>,
    counters: Arc<Counters>,
    started: Instant,
    generation: u64,
    /// Record texts that were looked at, by run of a node: each is judged, counted and logged once.
    judged: BTreeMap<ChitchatId, blake3::Hash>,
}

impl Gossip {
    /// Takes part, with the members of `control`'s allow-list and nobody else. `fleet`: an id that two fleets never share. Once per
    /// control plane: a second one hears nothing. Says nothing of this node before [`Self::set_facts`].
    #[must_use]
    pub fn start(control: ControlPlane, fleet: &str, timing: GossipTiming) -> Self {
        let (facts, facts_seen) = watch::channel(None);
        let (live, live_seen) = watch::channel(Arc::new(BTreeMap::new()));
        let counters = Arc::new(Counters::default());
        let started = Instant::now();
        let stop = control.stopping().child_token();
        let dead_ms = u64::try_from(timing.dead_after.as_millis()).unwrap_or(u64::MAX);
        let board = Arc::new(Mutex::new(Board::new(fleet.to_owned(), dead_ms)));
        if let Some(post) = Post::new(control.clone()) {
            let supervisor = Supervisor {
                control,
                post,
                fleet: fleet.to_owned(),
                timing,
                facts: facts_seen,
                board: board.clone(),
                live: Arc::new(live),
                counters: counters.clone(),
                started,
            };
            tokio::spawn(supervisor.run(stop.clone()));
        } else {
            tracing::error!("gossip was started twice on one control plane; the second one stays silent");
        }
        Self { facts: Arc::new(facts), live: live_seen, board, counters, started, _guard: Arc::new(stop.drop_guard()) }
    }

    /// What this node says of itself from now on; `seq` is filled in. A record above [`crate::FACTS_BYTES_MAX`] is logged and not
    /// sent.
    pub fn set_facts(&self, facts: NodeFacts) {
        self.facts.send_replace(Some(facts));
    }

    /// The live nodes, this one among them: changes with every new record and every death.
    #[must_use]
    pub fn live(&self) -> watch::Receiver<Arc<BTreeMap<PeerId, LiveNode>>> {
        self.live.clone()
    }

    /// When a member was heard last, by the clock of [`LiveNode::seen_ms`]; also of one that is not live any more. None: never since
    /// this began.
    #[must_use]
    pub fn seen_ms(&self, peer: &PeerId) -> Option<u64> {
        self.board.lock().unwrap_or_else(PoisonError::into_inner).seen_ms(peer)
    }

    /// The clock of [`LiveNode::seen_ms`].
    #[must_use]
    pub fn now_ms(&self) -> u64 {
        now_ms(self.started)
    }

    #[cfg(test)]
    pub(crate) fn generation(&self) -> u64 {
        self.counters.generation.load(Ordering::Relaxed)
    }

    /// Counters.
    #[must_use]
    pub fn stats(&self) -> GossipStats {
        GossipStats {
            entries: self.counters.entries.load(Ordering::Relaxed),
            refused: self.counters.refused.load(Ordering::Relaxed),
            restarts: self.counters.restarts.load(Ordering::Relaxed),
        }
    }
}

fn now_ms(started: Instant) -> u64 {
    u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX)
}

fn unix_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

struct Supervisor {
    control: ControlPlane,
    post: Post,
    fleet: String,
    timing: GossipTiming,
    facts: watch::Receiver<Option<NodeFacts>>,
    board: Arc<Mutex<Board>>,
    live: Arc<watch::Sender<Arc<BTreeMap<PeerId, LiveNode>>>>,
    counters: Arc<Counters>,
    started: Instant,
}

impl Supervisor {
    /// Runs chitchat, again and again.
    async fn run(self, stop: CancellationToken) {
        let mut pause = RESTART_PAUSE_MIN;
        let mut generation = 0;
        while !stop.is_cancelled() {
            // chitchat tells the runs of a node apart by this number; a new run must have a higher one.
            generation = unix_ms().max(generation + 1);
            self.counters.generation.store(generation, Ordering::Relaxed);
            let began = Instant::now();
            // In a task of its own: a panic in it, of chitchat's code or ours on its behalf, ends only this run.
            let mut task = tokio::spawn(self.session(generation).run());
            let why = tokio::select! {
                () = stop.cancelled() => {
                    task.abort();
                    return;
                }
                ended = &mut task => match ended {
                    Ok(why) => why.to_string(),
                    Err(panic) => panic.to_string(),
                },
            };
            self.counters.restarts.fetch_add(1, Ordering::Relaxed);
            pause = if began.elapsed() > RESTART_PAUSE_MAX * 4 { RESTART_PAUSE_MIN } else { (pause * 2).min(RESTART_PAUSE_MAX) };
            tracing::error!(why, ?pause, "gossip ended and is started again with an empty state");
            sleep(pause).await;
        }
    }

    fn session(&self, generation: u64) -> Run {
        Run {
            control: self.control.clone(),
            post: self.post.clone(),
            fleet: self.fleet.clone(),
            timing: self.timing,
            facts: self.facts.clone(),
            board: self.board.clone(),
            live: self.live.clone(),
            counters: self.counters.clone(),
            started: self.started,
            generation,
            judged: BTreeMap::new(),
        }
    }
}

/// Ends chitchat's task with the run.
struct Abort(ChitchatHandle);

impl Drop for Abort {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Run {
    /// Returns why it ended.
    async fn run(mut self) -> &'static str {
        let chitchat = match spawn_chitchat(self.config(), Vec::new(), &self.post).await {
            Ok(handle) => Abort(handle),
            Err(_) => return "chitchat did not start",
        };
        let ended = chitchat.0.termination_watcher();
        tokio::pin!(ended);
        let mut rounds = interval(self.timing.round);
        rounds.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut signed_at: Option<Instant> = None;
        loop {
            tokio::select! {
                _ = &mut ended => return "chitchat's loop ended",
                Ok(()) = self.facts.changed() => signed_at = None,
                _ = rounds.tick() => {}
            }
            let due = signed_at.is_none_or(|at| at.elapsed() >= self.timing.refresh);
            let facts = self.facts.borrow_and_update().clone();
            let record = facts.filter(|_| due).map(|facts| {
                let seq = unix_ms().max(self.counters.seq.load(Ordering::Relaxed) + 1);
                self.counters.seq.store(seq, Ordering::Relaxed);
                NodeFacts { seq, ..facts }
            });
            let text = record.as_ref().and_then(|record| record.sign(self.control.key(), &self.fleet));
            if let (Some(record), None) = (&record, &text) {
                tracing::error!(number = record.number, "this node's record is too long and was not sent");
            }
            if record.is_some() {
                signed_at = Some(Instant::now());
            }
            let shared = chitchat.0.chitchat();
            let mut state = shared.lock().await;
            if let Some(text) = text {
                state.self_node_state().set(KEY, text);
            }
            let judged = self.look(&state, record);
            drop(state);
            if let Err(why) = judged {
                return why;
            }
            self.post.prune();
        }
    }

    fn config(&self) -> ChitchatConfig {
        let me = self.control.me();
        let round = self.timing.round;
        ChitchatConfig {
            chitchat_id: ChitchatId::new(me.to_base58(), self.generation, address_of(&me)),
            cluster_id: self.fleet.clone(),
            gossip_interval: round,
            listen_addr: address_of(&me),
            seed_nodes: vec![some_member().to_string()],
            failure_detector_config: FailureDetectorConfig {
                phi_threshold: 8.0,
                sampling_window_size: 64,
                max_interval: round * 8,
                initial_interval: round * 2,
                dead_node_grace_period: self.timing.forget_after,
            },
            marked_for_deletion_grace_period: self.timing.forget_after,
            catchup_callback: None,
            extra_liveness_predicate: None,
        }
    }

    /// Judges every record that has changed since the last look. Fails when chitchat's state is beyond its bounds.
    fn look(&mut self, state: &Chitchat, own: Option<NodeFacts>) -> Result<(), &'static str> {
        let nodes = state.node_states();
        self.counters.entries.store(nodes.len() as u64, Ordering::Relaxed);
        if nodes.len() > ENTRIES_MAX {
            return Err("there are too many entries");
        }
        let now = now_ms(self.started);
        let me = self.control.me();
        let peers = self.control.peers();
        let members = peers.borrow();
        let mut board = self.board.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = own {
            board.own(now, me, own);
        }
        self.judged.retain(|id, _| nodes.contains_key(id));
        for (id, node) in nodes {
            if node.key_values_including_deleted().count() > KEYS_MAX {
                return Err("an entry has too many keys");
            }
            if &*id.node_id == me.to_base58().as_str() {
                continue;
            }
            let Some(text) = node.get(KEY) else { continue };
            let hash = blake3::hash(text.as_bytes());
            if self.judged.get(id) == Some(&hash) {
                continue;
            }
            self.judged.insert(id.clone(), hash);
            let member = id.node_id.parse::<PeerId>().ok().filter(|peer| members.contains_key(peer));
            let Some(peer) = member else { continue };
            match board.offer(now, peer, text) {
                Ok(()) | Err(FactsError::Stale) => {}
                Err(error) => {
                    self.counters.refused.fetch_add(1, Ordering::Relaxed);
                    tracing::warn!(%peer, %error, "gossiped record ignored");
                }
            }
        }
        board.expire(now, |peer| *peer == me || members.contains_key(peer));
        let live = board.live().clone();
        self.live.send_if_modified(|old| {
            let new = **old != live;
            if new {
                *old = Arc::new(live);
            }
            new
        });
        Ok(())
    }
}
