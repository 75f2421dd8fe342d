//! Acts for one session machine: feeds it inputs, carries out its effects, and keeps its VM at hand.

use super::clock;
use super::gateway::began::Notes;
use super::heartbeat;
use super::launch;
use super::process;
use super::vm::{LiveVm, is_final};
use crate::fleet::placing::{self, Notice};
use crate::node::{Node, head_of, policy_of};
use crate::session::{Answer, AskId, Effect, Input, Job, Link, Machine, Request, next_older};
use ks_proto::api::{ApiError, Interruption, InterruptionParts, SessionState};
use ks_proto::{CheckpointId, RunToken, SessionId};
use ks_raft::{Command, Lapse, Lost, Response, SessionRecord, Wanted};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot, watch};

/// Messages that may wait for one session.
const MAILBOX_MAX: usize = 256;
/// How often an idle policy looks at the VM's CPU time.
const IDLE_PROBE: Duration = Duration::from_secs(5);
/// Share of one CPU above which a guest counts as active.
const ACTIVE_CPU_SHARE: f64 = 0.25;

/// Files put into a fork's child before it goes on.
pub type Steer = Vec<(String, Vec<u8>)>;

/// What others see of a session.
#[derive(Clone)]
pub struct View {
    /// State.
    pub state: SessionState,
    /// Why.
    pub reason: String,
    /// Its VM while it runs.
    pub vm: Option<Arc<LiveVm>>,
}

enum Message {
    Input(Input),
    Ask(Request, oneshot::Sender<Result<Answer, ApiError>>),
    /// A VM, and how long its restore hook took; None when it was running already.
    Launched(Arc<LiveVm>, Option<Duration>),
}

/// The way to one session's machine.
#[derive(Clone)]
pub struct SessionHandle {
    /// Session.
    pub id: SessionId,
    /// The assignment that its machine is for.
    pub epoch: u64,
    tx: mpsc::Sender<Message>,
    /// What others see.
    pub view: watch::Receiver<View>,
}

impl SessionHandle {
    /// Asks and waits for the answer.
    ///
    /// # Errors
    /// The machine's refusal.
    pub async fn ask(&self, request: Request) -> Result<Answer, ApiError> {
        let gone = || ApiError::new("not-found", "the session is gone", "it was removed meanwhile", "ks ls");
        let (tx, rx) = oneshot::channel();
        self.tx.send(Message::Ask(request, tx)).await.map_err(|_| gone())?;
        rx.await.map_err(|_| gone())?
    }
    /// Asks for a checkpoint nobody waits for.
    pub fn ask_quietly(&self, request: Request) {
        let this = self.clone();
        tokio::spawn(async move {
            // A failure is told as an event by the machine.
            let _ = this.ask(request).await;
        });
    }
    /// Feeds an input that needs no answer.
    pub async fn input(&self, input: Input) {
        let _ = self.tx.send(Message::Input(input)).await;
    }
    /// Wakes the session if need be and gives its VM.
    ///
    /// # Errors
    /// Why it does not run.
    pub async fn running(&self) -> Result<Arc<LiveVm>, ApiError> {
        for _ in 0..3 {
            self.ask(Request::AwaitRunning).await?;
            if let Some(vm) = self.view.borrow().vm.clone() {
                return Ok(vm);
            }
        }
        Err(ApiError::new("busy", "the session does not stay up", self.view.borrow().reason.clone(), "see `ks events`"))
    }
}

/// How a machine begins.
pub enum First {
    /// A new session.
    Begin(Steer),
    /// After the node's restart: adopt what lives.
    Resume,
}

/// Starts a machine for the session and registers it with the node.
pub fn start(node: &Arc<Node>, record: &SessionRecord, state: SessionState, first: First) -> SessionHandle {
    let note = if state == SessionState::Failed { "" } else { record.reason.as_str() };
    let machine = Machine::new(policy_of(record), state, record.token, head_of(record, record.head)).noting(note);
    let (tx, rx) = mpsc::channel(MAILBOX_MAX);
    let view = View { state, reason: record.reason.clone(), vm: None };
    let (view_tx, view) = watch::channel(view);
    let handle = SessionHandle { id: record.id, epoch: record.token.epoch, tx: tx.clone(), view };
    node.adopt_handle(handle.clone());
    let steer = match &first {
        First::Begin(files) => files.clone(),
        First::Resume => vec![],
    };
    let actor = Actor {
        node: Arc::downgrade(node),
        id: record.id,
        name: record.name.to_string(),
        machine,
        tx: tx.downgrade(),
        view: view_tx,
        asks: BTreeMap::new(),
        next_ask: 1,
        steer: Arc::new(steer),
        run_token: record.token,
        epoch: record.token.epoch,
        since: tokio::time::Instant::now(),
        back: None,
        rewind: None,
    };
    let node = node.clone();
    let record = record.clone();
    let to_actor = tx;
    tokio::spawn(actor.run(rx));
    tokio::spawn(async move {
        let first = match first {
            First::Begin(_) => Some(Input::Begin),
            First::Resume => resume(&node, &record, state, &to_actor).await,
        };
        if let Some(input) = first {
            let _ = to_actor.send(Message::Input(input)).await;
        }
        // The mailbox stays open through the node's handle.
    });
    handle
}

/// After a restart: the VM of the newest run is adopted if it lives; every other process of the session is ended.
async fn resume(node: &Arc<Node>, r: &SessionRecord, state: SessionState, tx: &mpsc::Sender<Message>) -> Option<Input> {
    // Until its VM is found, or its end is sure, it counts as one whose deadline is not known.
    let _place = node.fleet.board().enter(0);
    let keep = run_dir(node, r.id, r.token);
    for dir in run_dirs(node, r.id).into_iter().filter(|d| *d != keep || state != SessionState::Starting) {
        if let Err(why) = end_dir(&dir).await {
            node.state.event(r.name.as_str(), "process-stays", &why);
        }
    }
    if state != SessionState::Starting {
        return None;
    }
    if r.lost.is_none() && !keep.exists() {
        // Nothing of this run was ever here: it was moved to this node on purpose.
        return Some(Input::Begin);
    }
    match launch::adopt(node, r, &keep).await {
        Ok(vm) => {
            let _ = tx.send(Message::Launched(Arc::new(vm), None)).await;
            Some(Input::Adopted)
        }
        Err(why) => {
            if let Err(stays) = end_dir(&keep).await {
                node.state.event(r.name.as_str(), "process-stays", &stays);
            }
            let cause = match &r.lost {
                Some(lost) => lost.cause.clone(),
                None => format!("the VM did not outlive the node: {why}"),
            };
            Some(Input::Lost { token: r.token, cause })
        }
    }
}

/// The run folder of one run.
pub fn run_dir(node: &Node, id: SessionId, token: RunToken) -> PathBuf {
    node.layout.run().join(format!("{}.{}", &id.to_hex()[..12], token.run))
}

fn run_dirs(node: &Node, id: SessionId) -> Vec<PathBuf> {
    let prefix = format!("{}.", &id.to_hex()[..12]);
    let entries = std::fs::read_dir(node.layout.run()).into_iter().flatten().flatten();
    entries.filter(|e| e.file_name().to_string_lossy().starts_with(&prefix)).map(|e| e.path()).collect()
}

/// Ends what runs in a run folder and removes it.
async fn end_dir(dir: &std::path::Path) -> Result<(), String> {
    process::end_run_dir(dir, Duration::from_secs(15)).await?;
    let _ = std::fs::remove_dir_all(dir);
    Ok(())
}

struct Actor {
    node: Weak<Node>,
    id: SessionId,
    name: String,
    machine: Machine,
    tx: mpsc::WeakSender<Message>,
    view: watch::Sender<View>,
    asks: BTreeMap<AskId, oneshot::Sender<Result<Answer, ApiError>>>,
    next_ask: AskId,
    steer: Arc<Steer>,
    run_token: RunToken,
    epoch: u64,
    /// When this node learned that the session has to be brought up.
    since: tokio::time::Instant,
    /// From there to a restored VM, and what its hook took.
    back: Option<(Duration, Duration)>,
    /// The restore that a person waits for.
    rewind: Option<AskId>,
}

impl Actor {
    async fn run(mut self, mut rx: mpsc::Receiver<Message>) {
        let mut idle = tokio::time::interval(IDLE_PROBE);
        let mut cpu = (tokio::time::Instant::now(), 0.0);
        loop {
            let deadline = self.machine.deadline();
            let input = tokio::select! {
                m = rx.recv() => match m {
                    None => return,
                    Some(Message::Input(i)) => i,
                    Some(Message::Launched(vm, hook)) => { self.launched(vm, hook); continue }
                    Some(Message::Ask(request, tx)) => {
                        let ask = self.next_ask;
                        self.next_ask += 1;
                        self.asks.insert(ask, tx);
                        if let Request::Restore { to, .. } = &request {
                            self.note_rewind(ask, to.id);
                        }
                        Input::Ask(ask, request)
                    }
                },
                () = tokio::time::sleep_until(clock::instant(deadline.unwrap_or(0))), if deadline.is_some() => Input::Tick,
                _ = idle.tick(), if self.view.borrow().vm.is_some() => match self.probe_activity(&mut cpu) {
                    Some(i) => i,
                    None => continue,
                },
            };
            let Some(node) = self.node.upgrade() else { return };
            if node.ending.load(Ordering::Acquire) {
                continue;
            }
            for effect in self.machine.step(clock::now(), input) {
                if self.perform(&node, effect).await {
                    return;
                }
            }
        }
    }

    /// The run that begins there is a person's choice, also if ksd dies before it lives: other answers are wanted.
    fn note_rewind(&mut self, ask: AskId, to: CheckpointId) {
        let Some(node) = self.node.upgrade() else { return };
        let notes = Notes { rewind: Some(to), ..node.notes.read(&self.id) };
        match node.notes.write(&self.id, &notes) {
            Ok(()) => self.rewind = Some(ask),
            Err(e) => tracing::warn!(session = self.name, "a restore is not noted, model calls may be served again: {e}"),
        }
    }

    /// A busy VM is not idle.
    fn probe_activity(&self, last: &mut (tokio::time::Instant, f64)) -> Option<Input> {
        let pid = self.view.borrow().vm.as_ref()?.pid;
        let (now, used) = (tokio::time::Instant::now(), process::group_cpu_s(pid));
        let span = (now - last.0).as_secs_f64();
        let busy = span > 0.0 && (used - last.1) / span > ACTIVE_CPU_SHARE;
        *last = (now, used);
        busy.then_some(Input::Activity)
    }

    fn launched(&mut self, vm: Arc<LiveVm>, hook: Option<Duration>) {
        self.back = hook.map(|hook| (self.since.elapsed().saturating_sub(hook), hook));
        let (mut ended, token, tx) = (vm.ended.clone(), vm.token, self.tx.clone());
        self.run_token = token;
        if let Some(node) = self.node.upgrade() {
            node.notes.rewound(&self.id);
        }
        self.view.send_modify(|v| v.vm = Some(vm.clone()));
        let beat = self.tx.clone();
        tokio::spawn(async move {
            if let Some(cause) = heartbeat::watch(&vm).await
                && let Some(tx) = beat.upgrade()
            {
                let _ = tx.send(Message::Input(Input::Lost { token, cause })).await;
            }
        });
        tokio::spawn(async move {
            let cause = ended.wait_for(Option::is_some).await.ok().and_then(|c| c.clone()).unwrap_or_default();
            if let Some(tx) = tx.upgrade() {
                let _ = tx.send(Message::Input(Input::Lost { token, cause })).await;
            }
        });
    }

    fn spawn_input(&self, work: impl Future<Output = Input> + Send + 'static) {
        let tx = self.tx.clone();
        tokio::spawn(async move {
            let input = work.await;
            if let Some(tx) = tx.upgrade() {
                let _ = tx.send(Message::Input(input)).await;
            }
        });
    }

    async fn record_it(&self, node: &Arc<Node>, command: Command) {
        if let Err(e) = node.state.propose(command).await {
            tracing::error!(session = self.name, "a change is not recorded: {e}");
        }
    }

    /// Carries out one effect; true if it was the last of this machine.
    async fn perform(&mut self, node: &Arc<Node>, effect: Effect) -> bool {
        match effect {
            Effect::EndProcess => self.end_process(node),
            Effect::KillProcess => {
                if let Some(vm) = self.view.borrow().vm.clone() {
                    vm.kill();
                }
            }
            Effect::BeginRun { from } => {
                let (node, id, epoch) = (node.clone(), self.id, self.epoch);
                self.spawn_input(async move {
                    let me = node.fleet.number();
                    let command = Command::BeginRun { id, from, expected_epoch: Some(epoch), node: Some(me) };
                    match node.state.propose(command).await {
                        Ok(Response::Token { token }) => Input::RunBegan { token },
                        Ok(other) => Input::RunRefused { error: unexpected(&other) },
                        Err(error) => Input::RunRefused { error },
                    }
                });
            }
            Effect::Launch { token, from, verify_eager } => {
                let (node, id, tx, steer) = (node.clone(), self.id, self.tx.clone(), self.steer.clone());
                self.spawn_input(async move {
                    match launch::launch_session(&node, id, token, from, verify_eager, &steer).await {
                        Ok((vm, hook)) => {
                            if let Some(tx) = tx.upgrade() {
                                let _ = tx.send(Message::Launched(Arc::new(vm), Some(hook))).await;
                            }
                            Input::Ready { token }
                        }
                        Err(error) => Input::StartFailed { token, retry: !is_final(&error), error },
                    }
                });
            }
            Effect::FindOlder { than, skipped } => {
                let input = self.find_older(node, &than, &skipped);
                self.spawn_input(async { input });
            }
            Effect::TakeCheckpoint { token, job } => self.take_checkpoint(token, job),
            Effect::GoOn => {
                if let Some(vm) = self.view.borrow().vm.clone() {
                    let name = self.name.clone();
                    tokio::spawn(async move { launch::go_on(&vm, &name).await });
                }
            }
            // A node that cannot start it lets the leader try another one first.
            Effect::SetWanted { wanted: Wanted::Failed, reason } if others_could(node, &self.id) => {
                let (node, session, epoch) = (node.clone(), self.id, self.epoch);
                let notice = Notice::StartFailed { session, epoch, node: node.fleet.number(), reason };
                tokio::spawn(async move { placing::tell(&node, notice).await });
            }
            Effect::SetWanted { wanted, reason } => {
                self.record_it(node, Command::SetWanted { id: self.id, wanted, reason }).await;
            }
            Effect::NoteLost { cause } => {
                self.since = tokio::time::Instant::now();
                let lost = Lost { at_unix_ms: clock::unix_ms(), cause, lapse: None };
                self.record_it(node, Command::NoteLost { id: self.id, lost }).await;
            }
            Effect::NoteBack { from } => self.note_back(node, from).await,
            Effect::Event { kind, text } => {
                let (state, name) = (node.state.clone(), self.name.clone());
                let _ = tokio::task::spawn_blocking(move || state.event(&name, kind, &text)).await;
            }
            Effect::Reply { ask, result } => {
                if self.rewind == Some(ask) {
                    self.rewind = None;
                    // Refused: no run begins there because of it.
                    node.notes.rewound(&self.id);
                }
                if let Some(tx) = self.asks.remove(&ask) {
                    let _ = tx.send(result);
                }
            }
            Effect::Show { state, reason } => self.view.send_modify(|v| (v.state, v.reason) = (state, reason)),
            Effect::LetGo => {
                node.drop_handle(&self.id);
                node.fleet.owning.notify_one();
                for (_, tx) in std::mem::take(&mut self.asks) {
                    let _ =
                        tx.send(Err(ApiError::new("moving", "the session has moved", "another node has it now", "try again")));
                }
                return true;
            }
            Effect::Forget => {
                let line = line_of(node, self.id);
                self.record_it(node, Command::RemoveSession { id: self.id }).await;
                node.drop_handle(&self.id);
                forget_calls(node, &line).await;
                for (_, tx) in std::mem::take(&mut self.asks) {
                    let _ = tx.send(Ok(Answer::Done));
                }
                return true;
            }
        }
        false
    }

    fn end_process(&mut self, node: &Arc<Node>) {
        let vm = self.view.borrow().vm.clone();
        self.view.send_modify(|v| v.vm = None);
        let dirs = run_dirs(node, self.id);
        let tx = self.tx.clone();
        self.spawn_input(async move {
            if let Some(vm) = vm {
                if let Err(why) = vm.end().await {
                    return Input::ProcessStays { why };
                }
                let (uploader, token) = (vm.uploader.clone(), vm.token);
                let last = tokio::task::spawn_blocking(move || uploader.close()).await;
                if let (Ok(Some(checkpoint)), Some(tx)) = (last, tx.upgrade()) {
                    let _ = tx.send(Message::Input(Input::Committed { token, checkpoint })).await;
                }
            }
            for dir in dirs {
                if let Err(why) = end_dir(&dir).await {
                    return Input::ProcessStays { why };
                }
            }
            Input::ProcessGone
        });
    }

    fn find_older(&self, node: &Arc<Node>, than: &CheckpointId, skipped: &[CheckpointId]) -> Input {
        let state = node.state.read();
        let record = state.sessions.get(&self.id);
        let infos = || record.into_iter().flat_map(|r| r.checkpoints.values()).map(|c| &c.info);
        let links: Vec<Link> = infos().map(|i| Link { number: i.number, id: i.id, parent: i.parent }).collect();
        let failed = infos().find(|i| i.id == *than).map_or_else(|| than.short(), |i| format!("c{}", i.number));
        let older = record.zip(next_older(&links, than, skipped)).map(|(r, l)| (head_of(r, l.id), format!("c{}", l.number)));
        Input::Older { session: self.name.clone(), failed, older }
    }

    fn take_checkpoint(&self, token: RunToken, job: Job) {
        let Some(vm) = self.view.borrow().vm.clone() else {
            let error = ApiError::new("busy", "the checkpoint", "the VM is gone", "the session comes back by itself");
            return self.spawn_input(async move { Input::NotStored { token, error } });
        };
        let name = self.name.clone();
        let parent = self.node.upgrade().and_then(|n| n.state.read().sessions.get(&self.id).map(|s| s.head));
        self.spawn_input(async move {
            match launch::checkpoint(&vm, &name, parent, job).await {
                Ok(checkpoint) => Input::Stored { token, checkpoint },
                Err(error) => Input::NotStored { token, error },
            }
        });
    }

    async fn note_back(&mut self, node: &Arc<Node>, from: CheckpointId) {
        self.steer = Arc::new(vec![]);
        if !node.fleet.alone() {
            let (node, notice) = (node.clone(), Notice::Started { session: self.id, epoch: self.epoch });
            tokio::spawn(async move { placing::tell(&node, notice).await });
        }
        let found = {
            let state = node.state.read();
            state.sessions.get(&self.id).and_then(|r| {
                let lost = r.lost.clone()?;
                let own = r.by_id(&from).map(|c| (c.info.number, c.info.created_unix_ms));
                let point = r.forked_from.as_ref().map(|f| (f.number, r.created_unix_ms));
                Some((lost, own.or(point).unwrap_or_default()))
            })
        };
        let Some((lost, (checkpoint, taken_ms))) = found else { return };
        let interruption = Interruption {
            at_unix_ms: lost.at_unix_ms,
            cause: lost.cause,
            ready_ms: clock::unix_ms().saturating_sub(lost.at_unix_ms),
            checkpoint,
            lost_ms: lost.at_unix_ms.saturating_sub(taken_ms),
            parts: Some(parts(lost.lapse, self.back)),
        };
        let text = format!(
            "back after {} ms from c{}, {} ms of work lost ({})",
            interruption.ready_ms, interruption.checkpoint, interruption.lost_ms, interruption.cause
        );
        self.record_it(node, Command::NoteBack { id: self.id, interruption }).await;
        let (state, name) = (node.state.clone(), self.name.clone());
        let _ = tokio::task::spawn_blocking(move || state.event(&name, "recovered", &text)).await;
    }
}

/// What the time of an interruption went into.
fn parts(lapse: Option<Lapse>, back: Option<(Duration, Duration)>) -> InterruptionParts {
    let ms = |d: Duration| u64::try_from(d.as_millis()).unwrap_or(u64::MAX);
    InterruptionParts {
        lease_ms: lapse.map(|l| l.lease_ms),
        election_ms: lapse.and_then(|l| l.election_ms),
        restore_ms: back.map(|b| ms(b.0)),
        hook_ms: back.map(|b| ms(b.1)),
    }
}

/// The session and those it was forked from, the nearest first.
fn line_of(node: &Node, id: SessionId) -> Vec<SessionId> {
    let state = node.state.read();
    let parent = |id: &SessionId| state.sessions.get(id)?.forked_from.as_ref().map(|f| f.session);
    std::iter::successors(Some(id), parent).collect()
}

/// A removed session's journal goes with it, unless a fork goes on from it; then it goes with the last of these.
async fn forget_calls(node: &Arc<Node>, line: &[SessionId]) {
    for id in line {
        if node.state.read().sessions.contains_key(id) {
            return;
        }
        let _ = node.notes.write(id, &Notes::default());
        node.gateway.forget(*id).await;
    }
}

/// True if another member might start the session.
fn others_could(node: &Node, id: &SessionId) -> bool {
    let (state, me) = (node.state.read(), node.fleet.number());
    let Some(r) = state.sessions.get(id) else { return false };
    state.active().any(|m| m.number != me && m.profiles.contains(&r.params.profile))
}

fn unexpected(r: &Response) -> ApiError {
    ApiError::new("internal", "the node's state", format!("unexpected answer {r:?}"), "report this")
}
