//! The gateway of one node: everything that its connections share.

use super::copies::{Copies, epochs};
use super::files;
use super::locked;
use super::peers::{FleetReplica, Peers};
use super::providers::{ProviderError, Providers};
use super::replica::Replica;
use super::session::{ForkedFrom, OpenError, Session, read_allow, write_allow};
use super::takeover::Takeover;
use super::upstream::Upstreams;
use super::vault::{Vault, VaultError};
use crate::limits::{CALLS_MAX, FINISH_PATIENCE, FREE_SPACE_BYTES, INTENT_PATIENCE, REQUEST_BYTES_MAX};
use ks_gateway::budget::{Account, Budgets};
use ks_gateway::dialect::{Outcome, RequestFacts};
use ks_gateway::ledger::{Entry, Ledger, Line};
use ks_gateway::money::Money;
use ks_gateway::names::{Digest, EntryRef};
use ks_gateway::price::PriceTable;
use ks_gateway::replay::Input;
use ks_gateway::usage::Usage;
use ks_proto::copies::{CopyAnswer, CopyAsk, PEERS_SOCKET};
use ks_proto::gateway::{Provider, Stamp};
use ks_proto::{RunToken, SessionId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use zeroize::Zeroizing;

/// How often sessions' machines are told that time passed.
const TICK: Duration = Duration::from_millis(500);
/// Output tokens that a call reserves when it declares no maximum.
pub const OUTPUT_DEFAULT: u64 = 8192;

/// Makes the replica set of a session; None on a lone node.
pub type Replicas = Box<dyn Fn(&Stamp) -> Option<Arc<dyn Replica>> + Send + Sync>;

/// What a gateway is made with.
pub struct Config {
    /// Its folder: vault, journals, settings.
    pub dir: PathBuf,
    /// A price table over the built-in one.
    pub prices: Option<PathBuf>,
    /// Space that calls leave free on the journal's disk.
    pub free_bytes: u64,
    /// Where copies of journals go.
    pub replicas: Replicas,
    /// The way to the other nodes' copies, for sessions of a fleet.
    pub peers: Option<Arc<Peers>>,
    /// How long copies are waited for: of an intent, and of a finished answer.
    pub patience: (Duration, Duration),
}

impl Config {
    /// Of a lone node, in `dir`.
    pub fn alone(dir: &Path) -> Self {
        Self {
            dir: dir.to_owned(),
            prices: None,
            free_bytes: FREE_SPACE_BYTES,
            replicas: Box::new(|_| None),
            peers: None,
            patience: (INTENT_PATIENCE, FINISH_PATIENCE),
        }
    }
}

impl Config {
    /// Of a node whose sessions may have copies on others, which its daemon reaches by `peers.sock` in `dir`.
    pub fn in_fleet(dir: &Path) -> Self {
        let peers = Peers::new(dir.join(PEERS_SOCKET));
        let (to, journals) = (peers.clone(), dir.join("journal"));
        let replicas: Replicas = Box::new(move |stamp| {
            // A lone node's stamps name no replicas.
            let fleet = !stamp.replicas.is_empty();
            fleet.then(|| Arc::new(FleetReplica::new(to.clone(), stamp.session, &journals)) as Arc<dyn Replica>)
        });
        Self { replicas, peers: Some(peers), ..Self::alone(dir) }
    }
}

/// Why a gateway cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The disk.
    #[error("cannot use {path}")]
    Io {
        /// What.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Another one runs.
    #[error("another gateway uses {0}; end it first")]
    Taken(PathBuf),
    /// The providers' file.
    #[error(transparent)]
    Providers(#[from] ProviderError),
    /// The price table.
    #[error("the price table: {0}")]
    Prices(String),
}

/// A limit, as stored.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Limit {
    account: Account,
    limit: Money,
}

/// One node's gateway.
pub struct Node {
    config: Config,
    vault: Mutex<Vault>,
    providers: Mutex<Providers>,
    /// Connections to providers.
    pub upstreams: Upstreams,
    budgets: Mutex<Budgets>,
    prices: PriceTable,
    sessions: Mutex<BTreeMap<SessionId, Arc<Session>>>,
    leases: Mutex<BTreeMap<SessionId, (RunToken, Option<u64>)>>,
    opening: tokio::sync::Mutex<()>,
    copies: Arc<Copies>,
    /// One takeover of a session at a time.
    taking: Mutex<BTreeMap<SessionId, Arc<tokio::sync::Mutex<()>>>>,
    room: Arc<Semaphore>,
    calls: Arc<Semaphore>,
    /// Connections that are open, and when the last one came or went.
    used: Mutex<(usize, Instant)>,
    _lock: std::fs::File,
}

/// One connection, counted while it is there.
pub struct Used(Arc<Node>);
impl Drop for Used {
    fn drop(&mut self) {
        let mut used = locked(&self.0.used);
        *used = (used.0.saturating_sub(1), Instant::now());
    }
}

impl Node {
    /// Opens the folder, and books what its journals say was spent. Blocks on the disk.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn start(config: Config) -> Result<Arc<Self>, StartError> {
        let io = |path: &Path| {
            let path = path.to_owned();
            move |source| StartError::Io { path, source }
        };
        let journals = config.dir.join("journal");
        files::make_dir(&journals).map_err(io(&journals))?;
        let lock_path = config.dir.join("ksgw.lock");
        let lock =
            std::fs::OpenOptions::new().write(true).create(true).truncate(false).open(&lock_path).map_err(io(&lock_path))?;
        if rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_err() {
            return Err(StartError::Taken(config.dir.clone()));
        }
        let overlay = match &config.prices {
            Some(path) => Some(std::fs::read_to_string(path).map_err(io(path))?),
            None => None,
        };
        let own = PriceTable::built_in();
        let prices = match overlay {
            Some(text) => own.overlay(&text).map_err(|e| StartError::Prices(e.to_string()))?,
            None => own,
        };
        let mut budgets = Budgets::default();
        let limits_path = config.dir.join("budgets.json");
        for l in read_limits(&limits_path).map_err(io(&limits_path))? {
            budgets.set_limit(l.account, Some(l.limit));
        }
        book_past(&journals, &mut budgets).map_err(io(&journals))?;
        let node = Arc::new(Self {
            vault: Mutex::new(Vault::new(&config.dir)),
            providers: Mutex::new(Providers::open(&config.dir)?),
            upstreams: Upstreams::default(),
            budgets: Mutex::new(budgets),
            prices,
            sessions: Mutex::default(),
            leases: Mutex::default(),
            opening: tokio::sync::Mutex::new(()),
            copies: Arc::new(Copies::new(&config.dir, config.free_bytes)),
            taking: Mutex::default(),
            room: Arc::new(Semaphore::new(REQUEST_BYTES_MAX)),
            calls: Arc::new(Semaphore::new(CALLS_MAX)),
            used: Mutex::new((0, Instant::now())),
            config,
            _lock: lock,
        });
        Ok(node)
    }

    /// Tells all machines that time passes, for as long as the node is there.
    pub async fn tick(self: Arc<Self>) {
        let weak = Arc::downgrade(&self);
        drop(self);
        let mut every = tokio::time::interval(TICK);
        loop {
            every.tick().await;
            let Some(node) = weak.upgrade() else { return };
            for session in node.open_sessions() {
                session.step(Input::Tick);
            }
        }
    }

    /// Its folder.
    pub fn dir(&self) -> &Path {
        &self.config.dir
    }
    /// How long copies are waited for: of an intent, and of a finished answer.
    pub fn patience(&self) -> (Duration, Duration) {
        self.config.patience
    }
    /// The vault.
    pub fn vault(&self) -> MutexGuard<'_, Vault> {
        locked(&self.vault)
    }
    /// The providers.
    pub fn providers(&self) -> MutexGuard<'_, Providers> {
        locked(&self.providers)
    }
    /// A provider by name.
    pub fn provider(&self, name: &str) -> Option<Provider> {
        self.providers().get(name).cloned()
    }
    /// The key with which `user` asks a provider.
    ///
    /// # Errors
    /// If the vault is sealed.
    pub fn key(&self, user: &str, provider: &str) -> Result<Option<Zeroizing<String>>, VaultError> {
        self.vault().key(user, provider)
    }
    /// The accounts.
    pub fn budgets(&self) -> MutexGuard<'_, Budgets> {
        locked(&self.budgets)
    }
    /// The price table.
    pub fn prices(&self) -> &PriceTable {
        &self.prices
    }
    /// Its hash.
    pub fn price_table(&self) -> Digest {
        self.prices.hash()
    }
    /// What this usage costs; None is unpriced.
    pub fn price(&self, provider: &Provider, model: Option<&str>, tier: Option<&str>, usage: &Usage) -> Option<Money> {
        self.prices.cost(&provider.name, model?, tier, usage)
    }
    /// What a call may cost at most, as far as its request says.
    pub fn reservation(&self, provider: &Provider, facts: &RequestFacts) -> Option<Money> {
        let output = facts.max_output.unwrap_or(OUTPUT_DEFAULT).saturating_mul(facts.choices.max(1));
        self.prices.reserve(&provider.name, facts.model.as_deref()?, facts.input_estimate, output)
    }

    /// Sets or removes a limit; durable when this returns.
    ///
    /// # Errors
    /// As the disk says; the limit is then not set.
    pub fn set_limit(&self, account: Account, limit: Option<Money>) -> io::Result<()> {
        let path = self.config.dir.join("budgets.json");
        let mut budgets = self.budgets();
        let mut all = read_limits(&path)?;
        all.retain(|l| l.account != account);
        all.extend(limit.map(|limit| Limit { account: account.clone(), limit }));
        files::write_atomic(&path, &serde_json::to_vec_pretty(&all)?)?;
        budgets.set_limit(account, limit);
        Ok(())
    }

    /// Waits for room for a request's body.
    pub async fn request_room(&self, bytes: u64) -> Option<OwnedSemaphorePermit> {
        let n = u32::try_from(bytes.min(REQUEST_BYTES_MAX as u64)).ok()?;
        self.room.clone().acquire_many_owned(n).await.ok()
    }
    /// A slot for a purchase, if one is free.
    pub fn call_slot(&self) -> Option<OwnedSemaphorePermit> {
        self.calls.clone().try_acquire_owned().ok()
    }

    /// Sessions whose journals are open.
    pub fn open_sessions(&self) -> Vec<Arc<Session>> {
        locked(&self.sessions).values().cloned().collect()
    }

    /// The session of a stamp, opened if it is not. `position` is the relay's.
    ///
    /// # Errors
    /// [`OpenError`].
    pub async fn session(self: &Arc<Self>, stamp: &Stamp, position: u64) -> Result<Arc<Session>, OpenError> {
        if let Some(peers) = self.config.peers.clone().filter(|_| !stamp.replicas.is_empty()) {
            self.take_over(&peers, stamp, position).await?;
        }
        let open = locked(&self.sessions).get(&stamp.session).cloned();
        if let Some(open) = open {
            open.attach(|| (self.config.replicas)(stamp));
            return Ok(open);
        }
        let origin = stamp.origin.as_ref().map(|o| (o.session, o.at_seq.unwrap_or(position)));
        let replica = (self.config.replicas)(stamp);
        self.open(stamp.session, origin, replica).await
    }

    /// Makes the journal this node's under the stamp's epoch, if it is not yet.
    async fn take_over(self: &Arc<Self>, peers: &Peers, stamp: &Stamp, position: u64) -> Result<(), OpenError> {
        let (session, epoch) = (stamp.session, stamp.token.epoch);
        if locked(&self.sessions).get(&session).is_some_and(|open| open.owned() >= epoch) {
            return Ok(());
        }
        let turn = locked(&self.taking).entry(session).or_default().clone();
        let _turn = turn.lock().await;
        let dir = self.journal_dir(session);
        let owned = epochs(&dir).map_err(|source| OpenError::Io { session, source })?.written;
        let ours = owned >= epoch;
        if !ours {
            self.demote(session, epoch).await.map_err(|source| OpenError::Io { session, source })?;
            let takeover = Takeover { copies: &self.copies, peers, stamp, position };
            takeover.run().await.map_err(|why| OpenError::Elsewhere { session, why })?;
            let journals = self.config.dir.join("journal");
            let spent = tokio::task::spawn_blocking(move || spent_in(&journals, session)).await.unwrap_or_default();
            self.budgets().rebook(&session.to_hex(), &spent);
        }
        locked(&self.taking).remove(&session);
        Ok(())
    }

    fn journal_dir(&self, id: SessionId) -> PathBuf {
        self.config.dir.join("journal").join(id.to_hex())
    }

    /// The journal here becomes a copy, if there is one: a newer owner has spoken.
    async fn demote(&self, id: SessionId, epoch: u64) -> io::Result<()> {
        let _one_at_a_time = self.opening.lock().await;
        if !self.journal_dir(id).join("ledger.jsonl").exists() {
            return Ok(());
        }
        let open = locked(&self.sessions).remove(&id);
        let copies = self.copies.clone();
        let work = tokio::task::spawn_blocking(move || {
            if let Some(session) = open {
                session.freeze(epoch);
            }
            copies.demote(id)
        });
        work.await.unwrap_or_else(|e| Err(io::Error::other(e)))
    }

    /// What the owner of a session, on another node, asks of the copy here.
    pub async fn copy(&self, id: SessionId, epoch: u64, ask: CopyAsk) -> CopyAnswer {
        let away = |e: io::Error| CopyAnswer::Away { why: e.to_string() };
        let dir = self.journal_dir(id);
        if dir.join("ledger.jsonl").exists() {
            match epochs(&dir) {
                Ok(own) if own.written >= epoch => return CopyAnswer::Sealed { epoch: own.written },
                Ok(_) => {}
                Err(e) => return away(e),
            }
            if let Err(e) = self.demote(id, epoch).await {
                return away(e);
            }
        }
        let copies = self.copies.clone();
        let work = tokio::task::spawn_blocking(move || copies.answer(id, epoch, ask));
        work.await.unwrap_or_else(|e| away(io::Error::other(e)))
    }
    /// Copies that are kept here.
    pub fn copies(&self) -> &Copies {
        &self.copies
    }

    /// A session that has a journal here.
    pub async fn known(self: &Arc<Self>, id: SessionId) -> Option<Arc<Session>> {
        if let Some(open) = locked(&self.sessions).get(&id) {
            return Some(open.clone());
        }
        if !self.config.dir.join("journal").join(id.to_hex()).join("ledger.jsonl").exists() {
            return None;
        }
        self.open(id, None, None)
            .await
            .inspect_err(|e| tracing::error!(session = %id, error = %e, "a journal cannot be used"))
            .ok()
    }

    /// Replaces a session's allow-list. Its journal is not opened for it: where a fork comes from is said by its first stream.
    ///
    /// # Errors
    /// In words.
    pub async fn set_allow(&self, id: SessionId, all: &[String]) -> Result<(), String> {
        let _one_at_a_time = self.opening.lock().await;
        let open = locked(&self.sessions).get(&id).cloned();
        match open {
            Some(session) => session.set_allow(all),
            None => write_allow(&self.config.dir.join("journal").join(id.to_hex()), all).map(|_| ()),
        }
    }
    /// A session's allow-list.
    pub fn allow(&self, id: SessionId) -> Vec<String> {
        let open = locked(&self.sessions).get(&id).cloned();
        match open {
            Some(session) => session.allow_text(),
            None => {
                let all = read_allow(&self.config.dir.join("journal").join(id.to_hex())).unwrap_or_default();
                all.into_iter().map(|(text, _)| text).collect()
            }
        }
    }

    /// The lease of a session. One whose journal is not open yet is remembered until it is.
    pub fn told(&self, id: SessionId, token: RunToken, deadline_boottime_ms: Option<u64>) {
        let open = locked(&self.sessions).get(&id).cloned();
        if let Some(session) = open {
            session.told(token, deadline_boottime_ms);
        }
        // One that is opened again, after a takeover, is told too.
        locked(&self.leases).insert(id, (token, deadline_boottime_ms));
    }

    async fn open(
        self: &Arc<Self>,
        id: SessionId,
        origin: Option<(SessionId, u64)>,
        replica: Option<Arc<dyn Replica>>,
    ) -> Result<Arc<Session>, OpenError> {
        let dir = self.config.dir.join("journal");
        let parent = match origin_of(&dir, id).or(origin) {
            None => None,
            // Parents first: a fork begins with its parent's machine.
            Some((session, at_seq)) => {
                let open = Box::pin(self.known(session)).await;
                let known = open.map(|p| (p.replay(), p.ancestors().to_vec()));
                // A position that the parent never reached is a guest's word: all of the parent is its past then.
                let at_seq = known.as_ref().map_or(at_seq, |(machine, _)| at_seq.min(machine.last()));
                let at_hash = hash_of(&dir, session, at_seq);
                Some(ForkedFrom { session, at_seq, at_hash, known })
            }
        };
        let _one_at_a_time = self.opening.lock().await;
        if let Some(open) = locked(&self.sessions).get(&id) {
            return Ok(open.clone());
        }
        let free = self.config.free_bytes;
        let work = tokio::task::spawn_blocking(move || Session::open(&dir, id, parent.as_ref(), replica, free));
        let opened = work.await.unwrap_or_else(|e| Err(OpenError::Io { session: id, source: io::Error::other(e) }))?;
        locked(&self.sessions).insert(id, opened.clone());
        let lease = locked(&self.leases).get(&id).copied();
        if let Some((token, deadline)) = lease {
            opened.told(token, deadline);
        }
        Ok(opened)
    }

    /// A purchase moved on: its session's machine is told, and those of its forks.
    pub fn changed(&self, session: &Session, seq: u64, stored: u64, outcome: Option<Outcome>) {
        session.step(Input::Changed { entry: EntryRef::own(seq), stored, outcome });
        for fork in self.open_sessions().iter().filter(|s| s.ancestors().contains(&session.id())) {
            let entry = EntryRef { session: Some(session.name().to_owned()), seq };
            fork.step(Input::Changed { entry, stored, outcome });
        }
    }
    /// Tells the daemon that a call of the session was bought whole, so that it may take a checkpoint. Calls that end while the
    /// word of an earlier one waits to be said are told with it.
    pub fn tell_bought(&self, session: &Arc<Session>) {
        let Some(peers) = self.config.peers.clone().filter(|_| session.may_tell()) else { return };
        let session = session.clone();
        tokio::spawn(async move {
            session.tells();
            peers.bought(session.id()).await;
        });
    }
    /// Tells a session's machine how far the answers are that it may join.
    pub fn tell_stored(&self, session: &Session) {
        session.tell_stored(session);
        for id in session.ancestors() {
            let parent = locked(&self.sessions).get(id).cloned();
            if let Some(parent) = parent {
                parent.tell_stored(session);
            }
        }
    }

    /// Removes a session and its journal.
    ///
    /// # Errors
    /// As the disk says.
    pub async fn forget(&self, id: SessionId) -> io::Result<()> {
        let _one_at_a_time = self.opening.lock().await;
        if let Some(session) = locked(&self.sessions).remove(&id) {
            session.abort_all();
        }
        locked(&self.leases).remove(&id);
        self.copies.forget(id)?;
        files::gone(std::fs::remove_dir_all(self.journal_dir(id)))
    }

    /// A connection came.
    pub fn used(self: &Arc<Self>) -> Used {
        let mut used = locked(&self.used);
        *used = (used.0 + 1, Instant::now());
        drop(used);
        Used(self.clone())
    }
    /// For how long nobody has been connected and nothing was under way.
    pub fn idle(&self) -> Duration {
        let (open, since) = *locked(&self.used);
        if open > 0 || self.under_way() > 0 { Duration::ZERO } else { since.elapsed() }
    }
    /// Purchases under way.
    pub fn under_way(&self) -> usize {
        self.open_sessions().iter().map(|s| s.under_way()).sum()
    }
}

/// Lines of a journal's file that read as lines; for figures, not for decisions.
pub fn read_lines(dir: &Path, id: SessionId) -> Vec<Line> {
    let path = dir.join(id.to_hex()).join("ledger.jsonl");
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines().map_while(|row| serde_json::from_str(row).ok()).collect()
}

/// Where a journal's first line says that it goes on from.
fn origin_of(dir: &Path, id: SessionId) -> Option<(SessionId, u64)> {
    use std::io::BufRead;
    let file = std::fs::File::open(dir.join(id.to_hex()).join("ledger.jsonl")).ok()?;
    let mut first = String::new();
    io::BufReader::new(file).read_line(&mut first).ok()?;
    match serde_json::from_str::<Line>(&first).ok()?.entry {
        Entry::Origin { from, at_seq, .. } => Some((from.parse().ok()?, at_seq)),
        _ => None,
    }
}

/// The hash of a line in a journal here.
fn hash_of(dir: &Path, session: SessionId, seq: u64) -> Option<Digest> {
    let text = std::fs::read_to_string(dir.join(session.to_hex()).join("ledger.jsonl")).ok()?;
    let ledger = Ledger::read(&session.to_hex(), &text).ok()?;
    ledger.lines.iter().find(|(line, _)| line.seq == seq).map(|(_, hash)| *hash)
}

fn read_limits(path: &Path) -> io::Result<Vec<Limit>> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(serde_json::from_slice(&bytes)?),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(e),
    }
}

/// Books the past of all journals.
fn book_past(journals: &Path, budgets: &mut Budgets) -> io::Result<()> {
    for entry in std::fs::read_dir(journals)? {
        let name = entry?.file_name();
        let Some(id) = name.to_str().and_then(|n| n.parse::<SessionId>().ok()) else { continue };
        for (user, spent) in spent_in(journals, id) {
            budgets.book(Account::Session(id.to_hex()), spent);
            budgets.book(Account::User(user), spent);
        }
    }
    Ok(())
}

/// What a session's journal says was spent, by user: what was paid, and what was reserved for calls whose cost nobody knows.
fn spent_in(journals: &Path, id: SessionId) -> BTreeMap<String, Money> {
    let (mut open, mut by_user) = (BTreeMap::new(), BTreeMap::new());
    let mut book = |user: String, spent: Money| {
        let sum = by_user.entry(user).or_insert(Money::ZERO);
        *sum = *sum + spent;
    };
    for line in read_lines(journals, id) {
        match line.entry {
            Entry::Intent(i) => drop(open.insert(line.seq, (i.user, i.reserved))),
            Entry::Completed(c) => {
                let Some((user, reserved)) = open.remove(&c.of) else { continue };
                let known = c.outcome != Outcome::Unknown && c.cost.is_some();
                book(user, if known { c.cost } else { reserved }.unwrap_or(Money::ZERO));
            }
            _ => {}
        }
    }
    for (user, reserved) in open.into_values() {
        book(user, reserved.unwrap_or(Money::ZERO));
    }
    by_user
}
