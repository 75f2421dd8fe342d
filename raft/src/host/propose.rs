//! Proposals: to the leader, wherever it is, and again until there is an answer.
//!
//! ```text
//!   begin: take a number ──► leader known? ── this node ──► append, commit, apply ──► answer
//!              ▲                 │  │                               │ deposed
//!              │                 │  └── another ──► over the wire ──┤ no answer
//!              │                 └── none: wait for one             │
//!              └──────────── same number, until the deadline ◄──────┘
//! ```
//!
//! Repeating is safe, since the state remembers the answers of numbers that are not done (see [`crate::Proposal`]). A
//! caller has its own change in the state once it has the answer.

use super::consensus::Consensus;
use super::error::ProposeError;
use super::frame::{Ask, Process, Tell};
use super::log::Health;
use super::network::CallError;
use super::wire::MESSAGE_BYTES_MAX;
use crate::limits::{IN_FLIGHT_MAX, WINDOW};
use crate::{Command, Proposal, ProposalId, Response};
use openraft::AsyncRuntime;
use openraft::async_runtime::watch::WatchReceiver;
use openraft::errors::{ClientWriteError, Fatal, RaftError};
use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, Semaphore, SemaphorePermit};
use tokio::time::{Instant, sleep_until, timeout_at};

/// Longest wait for the answer to a proposal or a read.
pub(super) const PROPOSE_WAIT: Duration = Duration::from_secs(10);
/// Longest wait for one leader's answer, before whoever leads then is asked.
const TRY_WAIT: Duration = Duration::from_secs(3);
/// Pause before the next try, unless the leader changes sooner.
const RETRY_PAUSE: Duration = Duration::from_millis(100);
/// Room for a message's head around a command.
const HEAD_ROOM: usize = 4096;

/// The proposals of this process that have no answer yet.
pub(super) struct Flight {
    numbers: Mutex<Numbers>,
    changed: Notify,
    permits: Semaphore,
}

#[derive(Default)]
struct Numbers {
    next: u64,
    open: BTreeSet<u64>,
}

impl Numbers {
    fn lowest(&self) -> u64 {
        self.open.first().copied().unwrap_or(self.next)
    }
}

impl Default for Flight {
    fn default() -> Self {
        let permits = Semaphore::new(usize::try_from(IN_FLIGHT_MAX).unwrap_or(usize::MAX));
        Self { numbers: Mutex::default(), changed: Notify::new(), permits }
    }
}

/// A number that is taken; given back when dropped.
pub(super) struct Ticket<'a> {
    flight: &'a Flight,
    seq: u64,
    _permit: SemaphorePermit<'a>,
}

impl Ticket<'_> {
    pub(super) fn seq(&self) -> u64 {
        self.seq
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        self.flight.numbers().open.remove(&self.seq);
        self.flight.changed.notify_waiters();
    }
}

impl Flight {
    fn numbers(&self) -> MutexGuard<'_, Numbers> {
        self.numbers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the next number, once few enough are open and the oldest of them is near enough.
    pub(super) async fn begin(&self) -> Result<Ticket<'_>, ProposeError> {
        let permit = self.permits.acquire().await.map_err(|_| ProposeError::Shutdown)?;
        loop {
            let changed = self.changed.notified();
            {
                let mut n = self.numbers();
                if n.next - n.lowest() < WINDOW {
                    let seq = n.next;
                    n.next += 1;
                    n.open.insert(seq);
                    return Ok(Ticket { flight: self, seq, _permit: permit });
                }
            }
            changed.await;
        }
    }

    pub(super) fn done_below(&self) -> u64 {
        self.numbers().lowest()
    }
}

impl<R: AsyncRuntime> Consensus<R> {
    /// Has `command` applied, once, and gives back the answer. On return the change is part of [`Consensus::state`].
    /// Waits at most 10 s.
    ///
    /// # Errors
    /// If there is no answer. [`ProposeError::NoQuorum`] with `maybe`, and [`ProposeError::DiskFull`], leave open whether
    /// the command will be applied: what it speaks of must be kept until the state shows it or a newer decision rules it
    /// out.
    pub async fn propose(&self, command: Command) -> Result<Response, ProposeError> {
        let deadline = Instant::now() + PROPOSE_WAIT;
        let waited_ms = PROPOSE_WAIT.as_millis() as u64;
        let bytes = serde_json::to_vec(&command).map_or(usize::MAX, |b| b.len());
        if bytes > MESSAGE_BYTES_MAX - HEAD_ROOM {
            return Err(ProposeError::TooLarge { bytes, max: MESSAGE_BYTES_MAX - HEAD_ROOM });
        }
        let begun = timeout_at(deadline, self.inner.flight.begin()).await;
        let ticket = begun.map_err(|_| ProposeError::NoQuorum { waited_ms, maybe: false })??;
        let (node, Process { boot, incarnation: nonce }) = (self.inner.number, self.inner.courier.process);
        let id = ProposalId { node, boot, nonce, seq: ticket.seq };
        let mut maybe = false;
        while Instant::now() < deadline {
            if self.blocked() {
                return Err(ProposeError::DiskFull);
            }
            let proposal = Proposal { id, done_below: self.inner.flight.done_below(), command: command.clone() };
            let leadership = *self.inner.leadership.borrow();
            let wait = TRY_WAIT.min(deadline - Instant::now());
            let told = match leadership.leader {
                Some(leader) if leader != node => self.forward(leader, proposal, wait, &mut maybe).await,
                Some(_) => {
                    maybe = true;
                    self.lead_unless_blocked(proposal).await
                }
                None => None,
            };
            match told {
                Some(Tell::Applied { index, response }) => {
                    self.wait_applied(index, deadline).await;
                    return Ok(response);
                }
                _ => self.stopped()?,
            }
            self.wait_for_leader(leadership.leader, deadline).await;
        }
        if self.blocked() { Err(ProposeError::DiskFull) } else { Err(ProposeError::NoQuorum { waited_ms, maybe }) }
    }

    /// [`Consensus::propose`] for threads outside the runtime.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Panics
    /// On a thread that runs the runtime's tasks.
    pub fn propose_blocking(&self, command: Command) -> Result<Response, ProposeError> {
        self.inner.runtime.block_on(self.propose(command))
    }

    /// Waits until the state holds everything that was committed when this was called, wherever the leader is.
    ///
    /// # Errors
    /// As of [`Consensus::propose`], but nothing is ever `maybe`.
    pub async fn catch_up(&self) -> Result<(), ProposeError> {
        let deadline = Instant::now() + PROPOSE_WAIT;
        while Instant::now() < deadline {
            let leader = self.inner.leadership.borrow().leader;
            let wait = TRY_WAIT.min(deadline - Instant::now());
            let index = match leader {
                Some(leader) if leader != self.inner.number => {
                    match self.inner.courier.ask::<R>(leader, Ask::Read, &[], wait).await {
                        Ok(Tell::Read { index }) => Some(index),
                        _ => None,
                    }
                }
                Some(_) => self.read_index().await.ok(),
                None => None,
            };
            if let Some(index) = index
                && self.wait_applied(index, deadline).await
            {
                return Ok(());
            }
            self.stopped()?;
            self.wait_for_leader(leader, deadline).await;
        }
        Err(ProposeError::NoQuorum { waited_ms: PROPOSE_WAIT.as_millis() as u64, maybe: false })
    }

    /// Applies a proposal if this node leads.
    pub(super) async fn lead(&self, proposal: Proposal) -> Tell<R> {
        let write = self.inner.raft.client_write(proposal);
        let failed = |why: String| Tell::Refused(super::frame::No::Failed(why));
        match timeout_at(Instant::now() + TRY_WAIT, write).await {
            Ok(Ok(done)) => Tell::Applied { index: done.log_id.index(), response: done.data },
            Ok(Err(RaftError::APIError(ClientWriteError::ForwardToLeader(f) | ClientWriteError::LogEntryDiscarded(f)))) => {
                Tell::NotLeader { leader: f.leader_id }
            }
            Ok(Err(e)) => failed(e.to_string()),
            Err(_) => failed("no quorum in time".into()),
        }
    }

    async fn lead_unless_blocked(&self, proposal: Proposal) -> Option<Tell<R>> {
        let mut health = self.inner.health.clone();
        let full = async {
            // A closed channel means that consensus stops; the write ends by itself then.
            if health.wait_for(|h| *h == Health::Full).await.is_err() || !self.sole_voter() {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            tell = self.lead(proposal) => Some(tell),
            () = full => None,
        }
    }

    async fn forward(&self, leader: u64, proposal: Proposal, wait: Duration, maybe: &mut bool) -> Option<Tell<R>> {
        match self.inner.courier.ask(leader, Ask::Propose(proposal), &[], wait).await {
            Ok(tell) => {
                *maybe |= !matches!(tell, Tell::NotLeader { .. });
                Some(tell)
            }
            Err(e) => {
                *maybe |= !matches!(e, CallError::Wire(super::wire::WireError::Unreachable { .. }));
                tracing::debug!("a proposal was not answered: {e}");
                None
            }
        }
    }

    /// Nothing can be decided while the only voter's disk is full.
    fn blocked(&self) -> bool {
        *self.inner.health.borrow() == Health::Full && self.sole_voter()
    }

    fn stopped(&self) -> Result<(), ProposeError> {
        if let Health::Broken(why) = &*self.inner.health.borrow() {
            return Err(ProposeError::Broken(why.clone()));
        }
        match &self.inner.raft.metrics().borrow_watched().running_state {
            Ok(()) => Ok(()),
            Err(Fatal::Stopped) => Err(ProposeError::Shutdown),
            Err(e) => Err(ProposeError::Broken(e.to_string())),
        }
    }

    async fn wait_for_leader(&self, last: Option<u64>, deadline: Instant) {
        let mut leadership = self.inner.leadership.clone();
        let pause = deadline.min(Instant::now() + if last.is_none() { TRY_WAIT } else { RETRY_PAUSE });
        let other = leadership.wait_for(|l| l.leader.is_some() && l.leader != last);
        tokio::select! {
            _ = other => {}
            () = sleep_until(pause) => {}
        }
    }

    /// True once the entry with that index is part of the state.
    async fn wait_applied(&self, index: u64, deadline: Instant) -> bool {
        let mut applied = self.inner.machine.applied();
        let reached = applied.wait_for(|a| *a >= index);
        matches!(timeout_at(deadline, reached).await, Ok(Ok(_)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    #[test]
    fn numbers_rise_and_what_is_done_below_follows_the_oldest_open_one() {
        let flight = Flight::default();
        let take = || flight.begin().now_or_never().expect("there is room").unwrap();
        let (a, b, c) = (take(), take(), take());
        assert_eq!((a.seq, b.seq, c.seq, flight.done_below()), (0, 1, 2, 0));
        drop(b);
        assert_eq!(flight.done_below(), 0, "the first one is open");
        drop(a);
        assert_eq!(flight.done_below(), 2);
        drop(c);
        assert_eq!((flight.done_below(), take().seq), (3, 3));
    }

    #[test]
    fn an_old_open_proposal_holds_up_numbers_that_would_leave_the_window() {
        let flight = Flight::default();
        let old = flight.begin().now_or_never().unwrap().unwrap();
        for _ in 1..WINDOW {
            drop(flight.begin().now_or_never().expect("inside the window").unwrap());
        }
        assert!(flight.begin().now_or_never().is_none());
        drop(old);
        assert!(flight.begin().now_or_never().is_some());
        let held: Vec<_> = (0..IN_FLIGHT_MAX).map(|_| flight.begin().now_or_never().unwrap().unwrap()).collect();
        assert!(flight.begin().now_or_never().is_none(), "no more than {} at once", held.len());
    }
}
