//! One node's part in the fleet's agreement.

use super::disk::{Disk, LogBatch};
use super::error::{NotLeader, OpenError};
use super::frame::Process;
use super::log::{Health, LogStore, encode, read_note};
use super::machine::Machine;
use super::network::{Courier, Links};
use super::propose::Flight;
use super::redb::RedbDisk;
use super::serve::Arriving;
use super::types::Types;
use super::wire::Wire;
use crate::FleetState;
use openraft::async_runtime::watch::WatchReceiver;
use openraft::{AsyncRuntime, Config, EmptyNode, Raft, ReadPolicy, SnapshotPolicy};
use openraft_rt_tokio::TokioRuntime;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

/// The founder's number.
pub(super) const FOUNDER: u64 = 1;
/// Lineage of a fleet that was never recovered.
const FIRST_LINEAGE: u64 = 1;
/// Longest wait for the leader of a one-voter group.
const FOUND_WAIT: Duration = Duration::from_secs(10);

pub(super) const NUMBER: &str = "number";
pub(super) const BOOT: &str = "boot";
pub(super) const LINEAGE: &str = "lineage";

/// Timing and sizes. Defaults are for nodes on one continent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// Between heartbeats of a leader, milliseconds.
    pub heartbeat_ms: u64,
    /// Shortest silence after which a node asks for votes.
    pub election_min_ms: u64,
    /// Longest such silence.
    pub election_max_ms: u64,
    /// Entries between two snapshots.
    pub snapshot_entries: u64,
    /// Entries that are kept behind a snapshot, for followers that are a little late.
    pub kept_entries: u64,
}

impl Default for Timing {
    fn default() -> Self {
        Self { heartbeat_ms: 150, election_min_ms: 500, election_max_ms: 1000, snapshot_entries: 8192, kept_entries: 2048 }
    }
}

impl Timing {
    fn config(&self) -> Result<Arc<Config>, OpenError> {
        let config = Config {
            cluster_name: "keepstate".into(),
            heartbeat_interval: self.heartbeat_ms,
            election_timeout_min: self.election_min_ms,
            election_timeout_max: self.election_max_ms,
            enable_pre_vote: Some(true),
            // A restarted leader has lost what it had sent to others and not yet written here. Leading on in the same term,
            // it would give the same numbers to other entries, and nobody could tell them apart.
            enable_leader_restore: Some(false),
            snapshot_policy: SnapshotPolicy::LogsSinceLast(self.snapshot_entries),
            max_in_snapshot_log_to_keep: self.kept_entries,
            purge_batch_size: self.kept_entries.clamp(1, 256),
            max_payload_entries: 512,
            api_channel_size: Some(4096),
            install_snapshot_timeout: 120_000,
            ..Config::default()
        };
        config.validate().map(Arc::new).map_err(|e| OpenError::Timing(e.to_string()))
    }
}

/// What a node needs to take part.
#[derive(Debug, Clone)]
pub struct ConsensusConfig {
    /// This node's number.
    pub number: u64,
    /// Random number of this process.
    pub incarnation: u64,
    /// Folder of its database.
    pub dir: PathBuf,
    /// Timing.
    pub timing: Timing,
}

/// Who leads, as this node sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Leadership {
    /// The term.
    pub term: u64,
    /// The leader of that term, if one is known.
    pub leader: Option<u64>,
    /// This node leads.
    pub me: bool,
    /// When this became so.
    pub since: Instant,
}

pub(super) struct Inner<R: AsyncRuntime> {
    pub number: u64,
    pub raft: Raft<Types<R>, Machine>,
    pub machine: Machine,
    pub disk: Arc<dyn Disk>,
    pub courier: Arc<Courier>,
    pub leadership: watch::Receiver<Leadership>,
    pub health: watch::Receiver<Health>,
    pub superseded: watch::Sender<Option<u64>>,
    pub arriving: Mutex<Option<Arriving>>,
    pub flight: Flight,
    pub runtime: tokio::runtime::Handle,
}

/// One node's part in the fleet's agreement. Clones are the same one.
pub struct Consensus<R: AsyncRuntime = TokioRuntime> {
    pub(super) inner: Arc<Inner<R>>,
}

impl<R: AsyncRuntime> Clone for Consensus<R> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone() }
    }
}

impl Consensus {
    /// Opens or makes the database in `config.dir` and takes part. Blocks no task for the disk.
    ///
    /// # Errors
    /// If the database cannot be used, or is another node's.
    pub async fn open(config: ConsensusConfig, wire: Arc<dyn Wire>) -> Result<Self, OpenError> {
        let dir = config.dir.clone();
        let opened = tokio::task::spawn_blocking(move || RedbDisk::open(&dir)).await;
        let disk = opened.unwrap_or_else(|e| Err(io::Error::other(e)))?;
        Self::open_on(config, Arc::new(disk), wire).await
    }
}

impl<R: AsyncRuntime> Consensus<R> {
    /// As `Consensus::open`, over any disk and runtime. `config.dir` is not looked at.
    ///
    /// # Errors
    /// If what is on the disk cannot be used, or is another node's.
    pub async fn open_on(config: ConsensusConfig, disk: Arc<dyn Disk>, wire: Arc<dyn Wire>) -> Result<Self, OpenError> {
        let ConsensusConfig { number, incarnation, timing, .. } = config;
        let stored = read_note::<u64>(&*disk, NUMBER)?.unwrap_or(number);
        if stored != number {
            return Err(OpenError::OtherNode { stored, asked: number });
        }
        let boot = read_note::<u64>(&*disk, BOOT)?.unwrap_or(0) + 1;
        let lineage = read_note::<u64>(&*disk, LINEAGE)?.unwrap_or(0);
        // Durable before the first proposal is numbered by it.
        let notes = vec![(NUMBER, encode(&number)?), (BOOT, encode(&boot)?)];
        disk.write(LogBatch { notes, ..LogBatch::default() }).await?;
        let machine = Machine::open(disk.clone())?;
        let (log, health) = LogStore::<R>::open(disk.clone())?;
        let (process, peers) = (Process { incarnation, boot }, Mutex::default());
        let courier = Courier { wire, process, peers, machine: machine.clone(), lineage: AtomicU64::new(lineage) };
        let courier = Arc::new(courier);
        let raft = Raft::new(number, timing.config()?, Links(courier.clone()), log, machine.clone()).await;
        let raft = raft.map_err(|e| OpenError::Raft(e.to_string()))?;
        let leadership = watch_leadership(&raft);
        let inner = Inner {
            number,
            raft,
            machine,
            disk,
            courier,
            leadership,
            health,
            superseded: watch::Sender::new(None),
            arriving: Mutex::default(),
            flight: Flight::default(),
            runtime: tokio::runtime::Handle::current(),
        };
        let consensus = Self { inner: Arc::new(inner) };
        if consensus.sole_voter() {
            // Nobody else can lead, so there is no silence to wait for.
            let elected = consensus.inner.raft.trigger().elect(false).await;
            elected.map_err(|e| OpenError::Raft(e.to_string()))?;
        }
        Ok(consensus)
    }

    /// Makes this node the only voter of a new group, and waits until it leads. Again: only waits.
    ///
    /// # Errors
    /// If this node is not number 1, or does not come to lead (the disk is full, say).
    pub async fn found(&self) -> Result<(), OpenError> {
        let me = &self.inner;
        if me.number != FOUNDER {
            return Err(OpenError::NotFounder(me.number));
        }
        let raft = |e: &dyn std::fmt::Display| OpenError::Raft(e.to_string());
        if !me.raft.is_initialized().await.map_err(|e| raft(&e))? {
            if me.lineage() == 0 {
                me.adopt_lineage(FIRST_LINEAGE).await?;
            }
            let only = BTreeMap::from([(me.number, EmptyNode::default())]);
            me.raft.initialize(only).await.map_err(|e| raft(&e))?;
        }
        let mut leadership = self.leadership();
        let led = timeout_at(Instant::now() + FOUND_WAIT, leadership.wait_for(|l| l.leader.is_some())).await;
        match led {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(_)) => Err(OpenError::Raft("consensus has stopped".into())),
            Err(_) => Err(OpenError::NoLeader { waited_ms: FOUND_WAIT.as_millis() as u64 }),
        }
    }

    /// This node's number.
    pub fn number(&self) -> u64 {
        self.inner.number
    }

    /// The state after the last applied batch. Cheap; holding it keeps old records in memory.
    pub fn state(&self) -> Arc<FleetState> {
        self.inner.machine.state()
    }

    /// Tells of the state after every batch.
    pub fn changes(&self) -> watch::Receiver<Arc<FleetState>> {
        self.inner.machine.changes()
    }

    /// Index of the last entry that is part of [`Consensus::state`].
    pub fn applied(&self) -> u64 {
        *self.inner.machine.applied().borrow()
    }

    /// Who leads, as this node sees it. A node that was cut off may believe that it leads still.
    pub fn leadership(&self) -> watch::Receiver<Leadership> {
        self.inner.leadership.clone()
    }

    /// How the disk is.
    pub fn health(&self) -> watch::Receiver<Health> {
        self.inner.health.clone()
    }

    /// Set to the newer lineage once a member of one spoke: the fleet was recovered without this node, whose consensus
    /// must be shut down, reset with [`super::forget`], and opened again.
    pub fn superseded(&self) -> watch::Receiver<Option<u64>> {
        self.inner.superseded.subscribe()
    }

    /// Shows that this node led the fleet at some moment after this call, by a round of a quorum that began after it. Calls
    /// at the same time share rounds.
    ///
    /// # Errors
    /// If it does not lead, or no quorum answered within the longest election time-out.
    pub async fn quorum_round(&self) -> Result<(), NotLeader> {
        self.read_index().await.map(drop)
    }

    /// A quorum round; gives back the index that must be applied to read everything that was committed before it.
    pub(super) async fn read_index(&self) -> Result<u64, NotLeader> {
        match self.inner.raft.get_read_linearizer(ReadPolicy::ReadIndex).await {
            Ok(round) => Ok(round.read_log_id().log_id().index()),
            Err(e) => Err(NotLeader { leader: e.forward_to_leader().and_then(|f| f.leader_id) }),
        }
    }

    /// Stops, and releases the database. Proposals under way end with [`super::ProposeError::Shutdown`].
    pub async fn shutdown(&self) {
        if let Err(e) = self.inner.raft.shutdown().await {
            tracing::warn!("consensus did not stop in order: {e}");
        }
        self.inner.disk.close();
    }

    /// True if this node alone decides.
    pub(super) fn sole_voter(&self) -> bool {
        let metrics = self.inner.raft.metrics();
        let voters: BTreeSet<u64> = metrics.borrow_watched().membership_config.voter_ids().collect();
        voters == BTreeSet::from([self.inner.number])
    }
}

impl<R: AsyncRuntime> Inner<R> {
    pub fn lineage(&self) -> u64 {
        self.courier.lineage.load(Ordering::Acquire)
    }

    /// Durable before anything of that lineage is believed.
    pub async fn adopt_lineage(&self, lineage: u64) -> io::Result<()> {
        let notes = vec![(LINEAGE, encode(&lineage)?)];
        self.disk.write(LogBatch { notes, ..LogBatch::default() }).await?;
        self.courier.lineage.store(lineage, Ordering::Release);
        Ok(())
    }
}

fn watch_leadership<R: AsyncRuntime>(raft: &Raft<Types<R>, Machine>) -> watch::Receiver<Leadership> {
    let mut metrics = raft.server_metrics();
    let unknown = Leadership { term: 0, leader: None, me: false, since: Instant::now() };
    let (tell, seen) = watch::channel(unknown);
    let follow = async move {
        loop {
            let now = {
                let m = metrics.borrow_watched();
                let me = m.state.is_leader();
                Leadership { term: m.vote.leader_id().term, leader: m.current_leader, me, since: Instant::now() }
            };
            tell.send_if_modified(|old| {
                let same = (old.term, old.leader, old.me) == (now.term, now.leader, now.me);
                if !same {
                    *old = now;
                }
                !same
            });
            if metrics.changed().await.is_err() {
                // Stopped: it leads nothing any more.
                tell.send_modify(|l| (l.leader, l.me, l.since) = (None, false, Instant::now()));
                return;
            }
        }
    };
    drop(R::spawn(follow));
    seen
}
