//! The session machine: what happens next in a session's life. Pure; time is an argument.
//!
//! ```text
//!            Begin              Ready
//!  Creating ───────► Starting ─────────► Running ◄──────────────┐ Ready
//!                       ▲  │ failed for good  │ │ Lost, Kill    │
//!                  Wake │  ▼                  │ └─────────► Recovering ──► Failed (attempts used up)
//!     Parked, Stopped, Failed ◄───────────────┘ Park, Stop (checkpoint first)
//!
//!  Every start passes the same three steps, so that there are never two runs (ONE-OWNER):
//!     EndProcess ─ProcessGone─► BeginRun ─RunBegan─► Launch ─Ready─► Running
//! ```
//!
//! A checkpoint that cannot be started is skipped and the next older one is tried, in words (see `fallback`).
//! At most one checkpoint is being stored; requests that come meanwhile are served together by the next one.

use super::fallback::Falls;
use super::input::{Answer, AskId, Checkpointed, Effect, Head, HeadKind, Input, Job, Now, Request};
use super::stage::{Policy, Rest, Stage, Then, done, gone_error, refuse};
use ks_proto::RunToken;
use ks_proto::api::{ApiError, SessionState};
use ks_raft::Wanted;

/// Refusals that pass by themselves.
const WAITS: [&str; 4] = ["no-quorum", "moving", "unreachable", "busy"];
/// Wait before asking again after one of them.
const WAIT_MS: u64 = 1000;
/// After a bought model call a checkpoint is taken, so that little is asked again after a crash; at most one in so long.
const AFTER_CALL_MS: u64 = 5000;

/// See the module.
#[derive(Debug, Clone)]
pub struct Machine {
    policy: Policy,
    state: SessionState,
    stage: Stage,
    /// The run in force. // Invariant: only RunBegan changes it, and only upwards.
    token: RunToken,
    /// Where the next start begins.
    head: Head,
    verify_eager: bool,
    attempts: u32,
    since_ms: u64,
    checkpoint_tried_ms: u64,
    /// A model call was bought since the last checkpoint was begun.
    bought: bool,
    active_ms: u64,
    storing: Option<Job>,
    queued: Option<Job>,
    then: Option<Then>,
    /// Checkpoints that were skipped because they could not be started.
    falls: Falls,
    /// Callers that are answered when it runs.
    awaiting: Vec<AskId>,
    /// Callers that are answered when its process is gone for now, or for good.
    resting: Vec<AskId>,
}

impl Machine {
    /// A machine for a session whose record says `state`, `token` and `head`.
    pub fn new(policy: Policy, state: SessionState, token: RunToken, head: Head) -> Self {
        Self {
            policy,
            state,
            stage: if state == SessionState::Starting { Stage::Looking } else { Stage::Still },
            token,
            head,
            verify_eager: false,
            attempts: 0,
            since_ms: 0,
            checkpoint_tried_ms: 0,
            bought: false,
            active_ms: 0,
            storing: None,
            queued: None,
            then: None,
            falls: Falls::default(),
            awaiting: Vec::new(),
            resting: Vec::new(),
        }
    }

    /// The same with what its record says of an earlier fall back, so that people still see it.
    #[must_use]
    pub fn noting(mut self, note: &str) -> Self {
        self.falls.note = note.to_owned();
        self
    }

    /// The state that people see.
    pub fn state(&self) -> SessionState {
        self.state
    }

    /// When to step with Tick, on the monotonic clock.
    pub fn deadline(&self) -> Option<u64> {
        if let Stage::BackingOff { until_ms } = self.stage {
            return Some(until_ms);
        }
        if self.state != SessionState::Running {
            return None;
        }
        let every = if self.bought { self.policy.cadence_ms.min(AFTER_CALL_MS) } else { self.policy.cadence_ms };
        let cadence = (self.policy.cadence_ms > 0 && self.storing.is_none()).then(|| self.checkpoint_tried_ms + every);
        let idle = (self.policy.idle_park_ms > 0 && self.then.is_none()).then(|| self.active_ms + self.policy.idle_park_ms);
        cadence.into_iter().chain(idle).min()
    }

    /// Takes one input; returns what to do, in order.
    pub fn step(&mut self, now: Now, input: Input) -> Vec<Effect> {
        let mut out = Vec::new();
        match input {
            Input::Begin => self.start(&mut out),
            Input::Adopted => self.adopted(now, &mut out),
            Input::Ask(ask, request) => self.asked(now, ask, request, &mut out),
            Input::ProcessGone => self.process_gone(now, &mut out),
            Input::Committed { token, checkpoint } => self.committed(token, checkpoint, &mut out),
            Input::ProcessStays { why } => self.process_stays(why, &mut out),
            Input::RunBegan { token } => self.run_began(token, &mut out),
            Input::RunRefused { error } => self.run_refused(now, error, &mut out),
            Input::Older { session, failed, older } => self.older(&session, &failed, older, &mut out),
            Input::Ready { token } => self.ready(now, token, &mut out),
            Input::StartFailed { token, error, retry } => self.start_failed(token, error, retry, &mut out),
            Input::Lost { token, cause } => self.lost(now, token, cause, &mut out),
            Input::Stored { token, checkpoint } => self.stored(token, checkpoint, &mut out),
            Input::NotStored { token, error } => self.not_stored(token, error, &mut out),
            Input::Disowned { to } => self.disowned(&to, &mut out),
            Input::Bought => self.bought(now, &mut out),
            Input::Activity => self.active_ms = now.mono_ms,
            Input::Policy { cadence_ms, idle_park_ms } => {
                (self.policy.cadence_ms, self.policy.idle_park_ms) = (cadence_ms, idle_park_ms);
            }
            Input::Tick => self.tick(now, &mut out),
        }
        out
    }

    fn tick(&mut self, now: Now, out: &mut Vec<Effect>) {
        if let Stage::BackingOff { until_ms } = self.stage {
            if now.mono_ms >= until_ms {
                self.start(out);
            }
            return;
        }
        if self.deadline().is_none_or(|d| now.mono_ms < d) {
            return;
        }
        let idle = self.policy.idle_park_ms;
        if idle > 0 && now.mono_ms >= self.active_ms + idle && self.then.is_none() {
            out.push(Effect::Event { kind: "idle", text: format!("nothing happened for {} s: parking", idle / 1000) });
            self.rest(now, Rest::Parked, None, out);
        } else if self.storing.is_none() {
            self.take(now, Job::quiet(if self.bought { "call" } else { "cadence" }), out);
        }
    }

    /// One of a session without checkpoints by itself changes nothing; one that comes while a checkpoint is being stored may have come
    /// after that one's instant.
    fn bought(&mut self, now: Now, out: &mut Vec<Effect>) {
        if self.state == SessionState::Running && self.policy.cadence_ms > 0 {
            self.bought = true;
            self.tick(now, out);
        }
    }

    fn asked(&mut self, now: Now, ask: AskId, request: Request, out: &mut Vec<Effect>) {
        self.active_ms = now.mono_ms;
        if self.stage == Stage::EndingToForget {
            out.push(refuse(ask, "not-found", "the session is being removed", "wait for `ks rm` to end"));
            return;
        }
        if self.stage == Stage::EndingToLetGo {
            out.push(refuse(ask, "moving", "the session has moved to another node", "try again"));
            return;
        }
        if self.is_leaving() {
            return self.asked_while_leaving(ask, request, out);
        }
        if self.stage == Stage::Looking
            && matches!(request, Request::Park | Request::Stop | Request::Leave | Request::Restore { .. } | Request::Kill)
        {
            // Its VM may live with work that no checkpoint has.
            out.push(refuse(ask, "busy", "the node has just come back and looks after its VM", "try again in a moment"));
            return;
        }
        let running = self.state == SessionState::Running && self.stage == Stage::Still;
        let resting = self.stage == Stage::Still
            && matches!(self.state, SessionState::Parked | SessionState::Stopped | SessionState::Failed);
        match request {
            Request::AwaitRunning | Request::Wake => {
                self.awaiting.push(ask);
                if matches!(&self.then, Some(Then::Rest(Rest::Parked, asks)) if asks.is_empty()) {
                    self.then = None; // nobody asked for that park: it was only idle
                }
                if running && self.then.is_none() {
                    self.release(out);
                } else if resting {
                    self.wake(out);
                }
            }
            Request::Checkpoint { reason, message, pin, freeze } => {
                let job = Job { reason, message, pin, freeze, hold: false, asks: vec![ask] };
                if resting {
                    out.push(refuse(
                        ask,
                        "busy",
                        format!("the session is {}: it changes nothing now", self.state),
                        "wake it first: ks wake NAME",
                    ));
                } else if running {
                    self.take(now, job, out);
                } else {
                    self.enqueue(job);
                }
            }
            Request::Restore { .. } if matches!(self.stage, Stage::EndingToRest(_)) => {
                out.push(refuse(ask, "busy", "the session is being parked or stopped", "try again when it is done"));
            }
            Request::Restore { to, verify_eager } => {
                let then = Then::Restore { to, verify_eager, ask };
                if running && self.then.is_some() {
                    out.push(refuse(ask, "busy", "another restore, park or stop is under way", "try again when it is done"));
                } else if running {
                    self.then = Some(then);
                    let message = format!("before restore to {}", to.id.short());
                    self.take(now, Job { message, ..Job::last("demand") }, out);
                } else {
                    self.restore_now(to, verify_eager, ask, out);
                }
            }
            Request::Park => self.rest(now, Rest::Parked, Some(ask), out),
            Request::Stop => self.rest(now, Rest::Stopped, Some(ask), out),
            Request::Leave => self.rest(now, Rest::Leaving, Some(ask), out),
            Request::Stay => out.push(done(ask)),
            Request::Kill => self.kill(ask, out),
            Request::Remove => self.remove(ask, out),
        }
    }

    fn kill(&mut self, ask: AskId, out: &mut Vec<Effect>) {
        if self.state != SessionState::Running || self.stage != Stage::Still {
            let next = match self.state {
                SessionState::Parked | SessionState::Stopped => "ks wake it first, if you want to see it crash",
                SessionState::Failed => "ks wake tries it again, ks restore NAME@cN goes back further",
                _ => "wait until it runs",
            };
            out.push(refuse(ask, "busy", format!("the session is {}, so there is no VM to kill", self.state), next));
        } else if self.head.kind == HeadKind::Golden {
            let next = "take a checkpoint first: ks checkpoint NAME";
            out.push(refuse(ask, "never-checkpointed", "it has no checkpoint yet and would lose everything", next));
        } else {
            self.awaiting.push(ask);
            let cause = "killed by request".to_owned();
            out.push(Effect::NoteLost { cause: cause.clone() });
            out.push(Effect::KillProcess);
            self.recover(cause, out);
        }
    }

    fn remove(&mut self, ask: AskId, out: &mut Vec<Effect>) {
        self.drop_work(&gone_error("the session is being removed"), out);
        let waiting = [std::mem::take(&mut self.awaiting), std::mem::take(&mut self.resting)];
        for a in waiting.into_iter().flatten() {
            out.push(refuse(a, "not-found", "the session is being removed", "nothing to do"));
        }
        self.resting.push(ask);
        self.stage = Stage::EndingToForget;
        out.push(Effect::EndProcess);
    }

    /// Park or stop: checkpoint first when there is something to keep.
    fn rest(&mut self, now: Now, rest: Rest, ask: Option<AskId>, out: &mut Vec<Effect>) {
        let asks: Vec<AskId> = ask.into_iter().collect();
        if matches!(self.stage, Stage::EndingToRest(_)) {
            self.stage = Stage::EndingToRest(rest);
            self.resting.extend(asks);
            return;
        }
        match (self.state, &mut self.then) {
            (SessionState::Running, Some(Then::Rest(r, waiting))) if *r == rest => waiting.extend(asks),
            (SessionState::Running, Some(_)) => {
                for a in asks {
                    out.push(refuse(a, "busy", "another restore, park or stop is under way", "try again when it is done"));
                }
            }
            (SessionState::Running, None) => {
                self.then = Some(Then::Rest(rest, asks));
                self.take(now, Job::last(rest.reason()), out);
            }
            (SessionState::Parked | SessionState::Stopped | SessionState::Failed, _) if rest == Rest::Leaving => {
                // Nothing runs: the next owner finds it as the record says.
                out.extend(asks.into_iter().map(done));
            }
            (SessionState::Parked | SessionState::Stopped | SessionState::Failed, _) => {
                self.resting.extend(asks);
                self.rested(rest, out);
            }
            (SessionState::Creating | SessionState::Starting | SessionState::Recovering, _) => {
                let error = gone_error("the session was parked or stopped before it ran");
                self.drop_work(&error, out);
                for a in std::mem::take(&mut self.awaiting) {
                    out.push(Effect::Reply { ask: a, result: Err(error.clone()) });
                }
                self.resting.extend(asks);
                self.end_to_rest(rest, out);
            }
        }
    }

    fn end_to_rest(&mut self, rest: Rest, out: &mut Vec<Effect>) {
        self.stage = Stage::EndingToRest(rest);
        // Durable before the process ends: a node that dies in between must not bring it back.
        if let Some(wanted) = rest.wanted() {
            self.set_wanted(wanted, "", out);
        }
        out.push(Effect::EndProcess);
    }

    /// Its process is gone. Somebody may have come meanwhile.
    fn rested(&mut self, rest: Rest, out: &mut Vec<Effect>) {
        self.state = rest.state();
        let Some(wanted) = rest.wanted() else {
            self.stage = Stage::Leaving;
            self.show(out, "it moves to another node");
            out.extend(std::mem::take(&mut self.resting).into_iter().map(done));
            return;
        };
        self.stage = Stage::Still;
        self.set_wanted(wanted, "", out);
        out.push(Effect::Event { kind: rest.word(), text: format!("from checkpoint {} it can be woken", self.head.id.short()) });
        self.show(out, "");
        out.extend(std::mem::take(&mut self.resting).into_iter().map(done));
        if !self.awaiting.is_empty() {
            self.wake(out);
        }
    }

    fn wake(&mut self, out: &mut Vec<Effect>) {
        self.attempts = 0;
        self.set_wanted(Wanted::Running, "", out);
        self.start(out);
    }

    fn release(&mut self, out: &mut Vec<Effect>) {
        out.extend(std::mem::take(&mut self.awaiting).into_iter().map(done));
    }

    /// Takes a checkpoint now, or with the next one if one is being stored.
    fn take(&mut self, now: Now, job: Job, out: &mut Vec<Effect>) {
        if self.storing.is_some() {
            self.enqueue(job);
            return;
        }
        self.checkpoint_tried_ms = now.mono_ms;
        self.bought = false;
        self.storing = Some(job.clone());
        out.push(Effect::TakeCheckpoint { token: self.token, job });
    }

    fn enqueue(&mut self, mut job: Job) {
        // Behind the run's last instant nothing happens any more.
        job.hold |= self.storing.as_ref().is_some_and(|s| s.hold);
        match &mut self.queued {
            Some(q) => q.merge(job),
            None => self.queued = Some(job),
        }
    }

    fn stored(&mut self, token: RunToken, checkpoint: Checkpointed, out: &mut Vec<Effect>) {
        if token != self.token {
            return;
        }
        let Some(job) = self.storing.take() else { return };
        self.head = Head { id: checkpoint.id, kind: HeadKind::Own };
        self.falls.stored();
        out.extend(job.asks.iter().map(|&ask| Effect::Reply { ask, result: Ok(Answer::Checkpoint(checkpoint)) }));
        if job.hold && self.queued.is_none() && self.then.is_none() {
            // What should have followed was called off: somebody came while an idle session was being parked.
            out.push(Effect::GoOn);
        }
        self.next_job(out);
    }

    /// The run ended by itself, and had recorded more than it told.
    fn committed(&mut self, token: RunToken, checkpoint: Checkpointed, out: &mut Vec<Effect>) {
        if token != self.token || self.state != SessionState::Recovering || self.head.id == checkpoint.id {
            return;
        }
        match self.stage {
            Stage::EndingToStart | Stage::EndingToFallBack(_) => {}
            // It was thought to have none.
            Stage::EndingToFail(_) if self.head.kind == HeadKind::Golden => self.stage = Stage::EndingToStart,
            _ => return,
        }
        self.head = Head { id: checkpoint.id, kind: HeadKind::Own };
        self.falls.stored();
        out.push(Effect::Event {
            kind: "checkpoint",
            text: format!("c{} was recorded before the VM was lost", checkpoint.number),
        });
    }

    fn not_stored(&mut self, token: RunToken, error: ApiError, out: &mut Vec<Effect>) {
        if token != self.token {
            return;
        }
        let Some(job) = self.storing.take() else { return };
        out.push(Effect::Event { kind: "checkpoint-failed", text: format!("{} ({}): {}", job.reason, error.code, error.why) });
        out.extend(job.asks.iter().map(|&ask| Effect::Reply { ask, result: Err(error.clone()) }));
        if self.queued.is_none() {
            // Park, stop and restore must not throw away what could not be kept.
            self.drop_then(&error, out);
            self.release(out);
        }
        self.next_job(out);
    }

    /// After a checkpoint: the queued one, else what was to follow.
    fn next_job(&mut self, out: &mut Vec<Effect>) {
        if let Some(job) = self.queued.take() {
            self.bought = false;
            self.storing = Some(job.clone());
            out.push(Effect::TakeCheckpoint { token: self.token, job });
            return;
        }
        match self.then.take() {
            None => {}
            Some(Then::Rest(rest, asks)) => {
                self.resting.extend(asks);
                self.end_to_rest(rest, out);
            }
            Some(Then::Restore { to, verify_eager, ask }) => self.restore_now(to, verify_eager, ask, out),
        }
    }

    fn restore_now(&mut self, to: Head, verify_eager: bool, ask: AskId, out: &mut Vec<Effect>) {
        self.drop_work(&gone_error("the session was restored to another checkpoint"), out);
        self.head = to;
        self.verify_eager = verify_eager;
        self.attempts = 0;
        self.falls = Falls::asked_for();
        self.awaiting.push(ask);
        self.set_wanted(Wanted::Running, "", out);
        self.state = SessionState::Starting;
        self.start(out);
    }

    /// First step of every start.
    fn start(&mut self, out: &mut Vec<Effect>) {
        if self.state != SessionState::Recovering && self.state != SessionState::Creating {
            self.state = SessionState::Starting;
        }
        self.stage = Stage::EndingToStart;
        self.show(out, "");
        out.push(Effect::EndProcess);
    }

    fn process_gone(&mut self, now: Now, out: &mut Vec<Effect>) {
        match std::mem::replace(&mut self.stage, Stage::Still) {
            Stage::EndingToStart => {
                self.stage = Stage::Beginning;
                out.push(Effect::BeginRun { from: self.head.id });
            }
            Stage::EndingToRest(rest) => self.rested(rest, out),
            Stage::EndingToRetry => {
                let wait = self.policy.backoff_ms << (self.attempts.saturating_sub(1)).min(10);
                self.stage = Stage::BackingOff { until_ms: now.mono_ms + wait };
            }
            Stage::EndingToFail(error) => self.fail(error, out),
            Stage::EndingToFallBack(error) => self.find_older(error, out),
            Stage::EndingToLetGo => out.push(Effect::LetGo),
            Stage::EndingToForget => {
                out.push(Effect::Forget);
                out.extend(std::mem::take(&mut self.resting).into_iter().map(done));
            }
            other @ (Stage::Still
            | Stage::Looking
            | Stage::Beginning
            | Stage::Launching
            | Stage::Leaving
            | Stage::Choosing(_)
            | Stage::Returning(_)
            | Stage::BackingOff { .. }) => self.stage = other,
        }
    }

    fn process_stays(&mut self, why: String, out: &mut Vec<Effect>) {
        if self.stage == Stage::EndingToLetGo {
            // It is fenced: its lease is not renewed under the old token, and its commits are refused.
            out.push(Effect::Event { kind: "process-stays", text: why });
            out.push(Effect::LetGo);
            return;
        }
        let error = ApiError::new(
            "internal",
            "the earlier VM of this session cannot be ended",
            why,
            "end that process by hand, then: ks wake NAME (a session never runs twice)",
        );
        self.fail(error, out);
    }

    fn run_began(&mut self, token: RunToken, out: &mut Vec<Effect>) {
        assert!(token > self.token, "run tokens only rise: {token} after {}", self.token);
        self.token = token;
        match &self.stage {
            Stage::Beginning => {
                self.stage = Stage::Launching;
                out.push(Effect::Launch { token, from: self.head, verify_eager: self.verify_eager });
            }
            Stage::Returning(error) => self.fail(error.clone(), out),
            _ => {}
        }
    }

    /// The state did not let the run begin: it cannot now (no quorum), or the session is another's, which is told next. Neither
    /// is a fault of the session, so it waits and asks again.
    fn run_refused(&mut self, now: Now, error: ApiError, out: &mut Vec<Effect>) {
        if !WAITS.contains(&error.code.as_str()) {
            return self.fail(error, out);
        }
        if self.stage == Stage::Beginning {
            self.show(out, &format!("waiting to start: {}", error.why));
            self.stage = Stage::BackingOff { until_ms: now.mono_ms + WAIT_MS };
        }
    }

    fn is_leaving(&self) -> bool {
        matches!(self.stage, Stage::Leaving | Stage::EndingToRest(Rest::Leaving))
            || matches!(self.then, Some(Then::Rest(Rest::Leaving, _)))
    }

    fn asked_while_leaving(&mut self, ask: AskId, request: Request, out: &mut Vec<Effect>) {
        match request {
            Request::Stay if self.stage == Stage::Leaving => {
                self.stage = Stage::Still;
                self.awaiting.push(ask);
                self.wake(out);
            }
            // Answered by the next owner, to whom the call is passed on.
            Request::AwaitRunning | Request::Wake => self.awaiting.push(ask),
            Request::Remove => self.remove(ask, out),
            _ => out.push(refuse(ask, "moving", "the session is moving to another node", "try again in a moment")),
        }
    }

    /// The session is another's: whatever runs ends, and whoever waits is told to ask again.
    fn disowned(&mut self, to: &str, out: &mut Vec<Effect>) {
        if matches!(self.stage, Stage::EndingToForget | Stage::EndingToLetGo) {
            return;
        }
        let why = format!("it is on {to} now");
        let error = ApiError::new("moving", "the session has moved", why, "try again");
        self.drop_work(&error, out);
        let waiting = [std::mem::take(&mut self.awaiting), std::mem::take(&mut self.resting)];
        out.extend(waiting.into_iter().flatten().map(|ask| Effect::Reply { ask, result: Err(error.clone()) }));
        self.state = SessionState::Recovering;
        self.stage = Stage::EndingToLetGo;
        out.push(Effect::Event { kind: "disowned", text: format!("the session is on {to} now: what ran here ends") });
        out.push(Effect::EndProcess);
    }

    fn settle_running(&mut self, now: Now) {
        self.state = SessionState::Running;
        self.stage = Stage::Still;
        self.verify_eager = false;
        self.bought = false;
        self.falls.started();
        (self.since_ms, self.checkpoint_tried_ms, self.active_ms) = (now.mono_ms, now.mono_ms, now.mono_ms);
    }

    fn adopted(&mut self, now: Now, out: &mut Vec<Effect>) {
        if self.stage != Stage::Looking {
            return;
        }
        self.settle_running(now);
        self.show(out, "");
        out.push(Effect::Event { kind: "adopted", text: format!("run {} goes on without interruption", self.token) });
        self.release(out);
        // How old its latest checkpoint is by now only the earlier node knew: take one.
        let cadence = (self.policy.cadence_ms > 0).then(|| Job::quiet("cadence"));
        if let Some(job) = self.queued.take().or(cadence) {
            self.take(now, job, out);
        }
    }

    fn ready(&mut self, now: Now, token: RunToken, out: &mut Vec<Effect>) {
        if token != self.token || self.stage != Stage::Launching {
            return;
        }
        self.settle_running(now);
        out.push(Effect::NoteBack { from: self.head.id });
        self.show(out, "");
        out.push(Effect::Event { kind: "running", text: format!("run {token} from checkpoint {}", self.head.id.short()) });
        self.release(out);
        if let Some(job) = self.queued.take() {
            self.take(now, job, out);
        }
    }

    fn start_failed(&mut self, token: RunToken, error: ApiError, retry: bool, out: &mut Vec<Effect>) {
        if token != self.token || self.stage != Stage::Launching {
            return;
        }
        if WAITS.contains(&error.code.as_str()) {
            // Nothing of the session failed: the holders, the lease or the fleet cannot be had now.
            self.show(out, &format!("waiting to start: {}", error.why));
            self.stage = Stage::EndingToRetry;
            out.push(Effect::EndProcess);
            return;
        }
        self.attempts += 1;
        out.push(Effect::Event { kind: "start-failed", text: format!("attempt {}: {error}", self.attempts) });
        let max = self.falls.attempts_max(self.policy.attempts_max);
        if retry && self.attempts < max {
            let reason = format!("attempt {} of {max} failed ({}); trying again", self.attempts, error.why);
            self.show(out, &reason);
            self.stage = Stage::EndingToRetry;
        } else {
            self.stage = self.given_up(error);
        }
        out.push(Effect::EndProcess);
    }

    fn lost(&mut self, now: Now, token: RunToken, cause: String, out: &mut Vec<Effect>) {
        if token != self.token
            || !matches!(self.stage, Stage::Still | Stage::Looking)
            || matches!(self.state, SessionState::Parked | SessionState::Stopped | SessionState::Failed)
        {
            return;
        }
        // Short runs use up the attempts, so that a crash loop ends.
        self.attempts = if now.mono_ms.saturating_sub(self.since_ms) >= self.policy.stable_ms { 0 } else { self.attempts + 1 };
        if self.attempts >= self.policy.attempts_max {
            out.push(Effect::NoteLost { cause: cause.clone() });
            let next = "look at `ks events`, then `ks wake NAME`, or go back further: ks restore NAME@cN";
            self.stage = self.given_up(ApiError::new("internal", "the VM dies again and again", cause, next));
            self.state = SessionState::Recovering;
            out.push(Effect::EndProcess);
            return;
        }
        self.recover(cause, out);
    }

    fn recover(&mut self, cause: String, out: &mut Vec<Effect>) {
        out.push(Effect::NoteLost { cause: cause.clone() });
        out.push(Effect::Event { kind: "lost", text: cause.clone() });
        self.drop_work(
            &gone_error(
                "the VM was lost meanwhile, and the session comes back; ks checkpoints shows whether this one was still stored",
            ),
            out,
        );
        self.state = SessionState::Recovering;
        if self.head.kind == HeadKind::Golden {
            let next = "nothing of it was kept: ks rm NAME and run it again";
            let error = ApiError::new("never-checkpointed", "the VM was lost before its first checkpoint", cause, next);
            self.stage = Stage::EndingToFail(error);
            out.push(Effect::EndProcess);
            return;
        }
        self.start(out);
    }

    /// Failed for good: a person has to look.
    fn fail(&mut self, error: ApiError, out: &mut Vec<Effect>) {
        self.stage = Stage::Still;
        self.state = SessionState::Failed;
        self.falls = Falls::default();
        self.drop_work(&error, out);
        let reason = error.to_string();
        self.set_wanted(Wanted::Failed, &reason, out);
        out.push(Effect::Event { kind: "failed", text: reason.clone() });
        self.show(out, &reason);
        let waiting = [std::mem::take(&mut self.awaiting), std::mem::take(&mut self.resting)];
        for ask in waiting.into_iter().flatten() {
            out.push(Effect::Reply { ask, result: Err(error.clone()) });
        }
    }

    /// Refuses everything that waits for a checkpoint of this run.
    fn drop_work(&mut self, error: &ApiError, out: &mut Vec<Effect>) {
        let jobs = [self.storing.take(), self.queued.take()];
        for ask in jobs.into_iter().flatten().flat_map(|j| j.asks) {
            out.push(Effect::Reply { ask, result: Err(error.clone()) });
        }
        self.drop_then(error, out);
    }

    fn drop_then(&mut self, error: &ApiError, out: &mut Vec<Effect>) {
        let asks = match self.then.take() {
            None => vec![],
            Some(Then::Rest(_, asks)) => asks,
            Some(Then::Restore { ask, .. }) => vec![ask],
        };
        out.extend(asks.into_iter().map(|ask| Effect::Reply { ask, result: Err(error.clone()) }));
    }

    /// Where nothing else is to be said, a fall back is still told.
    fn set_wanted(&self, wanted: Wanted, reason: &str, out: &mut Vec<Effect>) {
        out.push(Effect::SetWanted { wanted, reason: self.falls.or_note(reason) });
    }

    fn show(&self, out: &mut Vec<Effect>, reason: &str) {
        out.push(Effect::Show { state: self.state, reason: self.falls.or_note(reason) });
    }

    /// What follows when the head cannot be started: an older checkpoint where that may help.
    fn given_up(&self, error: ApiError) -> Stage {
        let helps = self.head.kind == HeadKind::Own && self.falls.may_help(&error);
        // A fall that ends here has still to name the newest checkpoint in the record again.
        if helps || self.falls.first().is_some() { Stage::EndingToFallBack(error) } else { Stage::EndingToFail(error) }
    }

    fn find_older(&mut self, error: ApiError, out: &mut Vec<Effect>) {
        let skipped = self.falls.skipped();
        self.stage = Stage::Choosing(error);
        out.push(Effect::FindOlder { than: self.head.id, skipped });
    }

    /// Goes on from the next older checkpoint, never silently; without one the session fails with all of them kept.
    fn older(&mut self, session: &str, failed: &str, older: Option<(Head, String)>, out: &mut Vec<Effect>) {
        let Stage::Choosing(error) = &self.stage else { return };
        let error = error.clone();
        let may_help = self.falls.may_help(&error);
        self.falls.skip(self.head, session, failed, &error);
        match older.filter(|_| may_help) {
            Some((head, name)) => {
                let text = self.falls.go_on_from(&name);
                self.head = head;
                self.attempts = 0;
                out.push(Effect::Event { kind: "fell-back", text });
                self.set_wanted(Wanted::Running, "", out);
                self.start(out);
            }
            None => {
                let error = self.falls.none_starts(error);
                match self.falls.first().filter(|first| *first != self.head) {
                    Some(first) => {
                        self.head = first;
                        self.stage = Stage::Returning(error);
                        out.push(Effect::BeginRun { from: first.id });
                    }
                    None => self.fail(error, out),
                }
            }
        }
    }
}
