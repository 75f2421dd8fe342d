//! The holder's side of a node lease.
//!
//! ```text
//!             Alone(true), as leader of a one-voter group
//!   Lapsed ───────────────────────────────► Unlimited
//!    │  ▲                                      │ Alone(false)
//!    │  │ deadline passes                      ▼
//!    │  └──────────── Leased ◄── Limited ── Limiting   (every VM gets a finite deadline; only then a second voter)
//!    └── Granted and applied ──►
//! ```
//!
//! It starts lapsed: a daemon that was restarted holds nothing until it is granted. A deadline is only ever extended, by
//! what was granted, counted from before the renewal was sent; the one exception is the step from unlimited to leased.

use super::{Answer, LEASE_MAX_MS, RENEWALS_PER_LEASE, Reason};
use std::collections::BTreeMap;

/// The deadline of a lone node.
pub const UNLIMITED: u64 = u64::MAX;
/// Renewals without an answer that are remembered; an answer to an older one is ignored.
pub const OUTSTANDING_MAX: usize = 32;

/// What the holder hears.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// Time passed.
    Tick,
    /// The leader's answer to the renewal `seq`.
    Answer { seq: u64, answer: Answer },
    /// This node has applied the log up to `index`.
    Applied { index: u64 },
    /// True: this node is the only member, the only voter, and (as leader) has completed a quorum round in this state.
    Alone(bool),
    /// Every VM has the finite deadline of [`Effect::Limit`].
    Limited,
    /// The policy's lease length in milliseconds.
    LeaseMs(u64),
}

/// What the holder wants done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Send a renewal to the leader, if one is known. The time of this step is the time before it was sent.
    SendRenewal { seq: u64, incarnation: u64 },
    /// All VMs of this node may run until then (CLOCK_BOOTTIME milliseconds); never earlier than before.
    SetDeadline { boottime_ms: u64 },
    /// The lone node got a peer: *lower* the deadline of every VM from unlimited to this, then report [`Input::Limited`].
    Limit { boottime_ms: u64 },
    /// The lease ended: nothing may leave, and what runs is paused.
    Lapsed,
    /// The lease is back until then. Sessions that this node still owns at their epoch go on; others are ended.
    Regained { boottime_ms: u64 },
    /// The leader refuses, for a reason that an operator should see.
    Refused { reason: Reason },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Unlimited,
    Limiting,
    Leased,
}

/// The holder: one per node.
#[derive(Debug)]
pub struct Holder {
    incarnation: u64,
    lease_ms: u64,
    mode: Mode,
    // Invariant: never beyond `sent + lease` of a granted renewal, except UNLIMITED while alone.
    deadline_ms: u64,
    lapsed: bool,
    seq: u64,
    next_send_ms: u64,
    sent: BTreeMap<u64, u64>,
    term: u64,
    applied: u64,
    // A grant that waits for the log: (deadline, index).
    pending: Option<(u64, u64)>,
    told: Option<Reason>,
}

impl Holder {
    /// A holder without a lease. `incarnation` is random, made at this start of the daemon.
    pub fn new(incarnation: u64, lease_ms: u64) -> Self {
        Self {
            incarnation,
            lease_ms: lease_ms.clamp(RENEWALS_PER_LEASE, LEASE_MAX_MS),
            mode: Mode::Leased,
            deadline_ms: 0,
            lapsed: true,
            seq: 0,
            next_send_ms: 0,
            sent: BTreeMap::new(),
            term: 0,
            applied: 0,
            pending: None,
            told: None,
        }
    }

    /// The deadline in force, CLOCK_BOOTTIME milliseconds; 0 while lapsed, [`UNLIMITED`] while alone.
    pub fn deadline_ms(&self) -> u64 {
        if self.lapsed { 0 } else { self.deadline_ms }
    }
    /// True while the node may run sessions.
    pub fn holds(&self, now_ms: u64) -> bool {
        !self.lapsed && now_ms < self.deadline_ms
    }
    /// True when every VM has a finite deadline: a condition of having a second voter.
    pub fn is_finite(&self) -> bool {
        self.mode == Mode::Leased
    }
    /// When the next [`Input::Tick`] is due at the latest.
    pub fn wake_ms(&self) -> u64 {
        if self.mode == Mode::Unlimited {
            return UNLIMITED;
        }
        if self.lapsed { self.next_send_ms } else { self.next_send_ms.min(self.deadline_ms) }
    }

    /// The one entrance.
    pub fn step(&mut self, now_ms: u64, input: Input) -> Vec<Effect> {
        let mut out = Vec::new();
        self.lapse_if_due(now_ms, &mut out);
        match input {
            Input::Tick => {}
            Input::Answer { seq, answer } => self.answer(now_ms, seq, answer, &mut out),
            Input::Applied { index } => {
                self.applied = self.applied.max(index);
                self.take_up(now_ms, &mut out);
            }
            Input::Alone(true) => self.alone(&mut out),
            Input::Alone(false) if self.mode == Mode::Unlimited => {
                self.mode = Mode::Limiting;
                self.deadline_ms = now_ms + self.lease_ms;
                self.next_send_ms = now_ms;
                out.push(Effect::Limit { boottime_ms: self.deadline_ms });
            }
            Input::Alone(false) => {}
            Input::Limited => {
                if self.mode == Mode::Limiting {
                    self.mode = Mode::Leased;
                }
            }
            Input::LeaseMs(ms) => self.lease_ms = ms.clamp(RENEWALS_PER_LEASE, LEASE_MAX_MS),
        }
        self.renew_if_due(now_ms, &mut out);
        out
    }

    fn lapse_if_due(&mut self, now_ms: u64, out: &mut Vec<Effect>) {
        if !self.lapsed && now_ms >= self.deadline_ms {
            self.lapsed = true;
            self.pending = None;
            out.push(Effect::Lapsed);
        }
    }

    fn renew_if_due(&mut self, now_ms: u64, out: &mut Vec<Effect>) {
        if self.mode == Mode::Unlimited || now_ms < self.next_send_ms {
            return;
        }
        self.seq += 1;
        self.next_send_ms = now_ms + self.lease_ms / RENEWALS_PER_LEASE;
        self.sent.insert(self.seq, now_ms);
        if self.sent.len() > OUTSTANDING_MAX {
            self.sent.pop_first();
        }
        out.push(Effect::SendRenewal { seq: self.seq, incarnation: self.incarnation });
    }

    fn answer(&mut self, now_ms: u64, seq: u64, answer: Answer, out: &mut Vec<Effect>) {
        let (Answer::Granted { term, .. } | Answer::Refused { term, .. }) = &answer;
        if *term < self.term || self.mode == Mode::Unlimited {
            return;
        }
        let Some(sent_ms) = self.sent.remove(&seq) else { return };
        self.term = *term;
        match answer {
            Answer::Granted { lease_ms, index, .. } => {
                // What was sent before this one cannot extend further.
                self.sent = self.sent.split_off(&seq);
                self.told = None;
                let deadline = sent_ms + lease_ms.min(LEASE_MAX_MS);
                if !self.lapsed {
                    self.extend(deadline, out);
                } else if deadline > now_ms {
                    let (d, i) = self.pending.unwrap_or((0, 0));
                    self.pending = Some((deadline.max(d), index.max(i)));
                    self.take_up(now_ms, out);
                }
            }
            Answer::Refused { reason, .. } => {
                let worth_telling = matches!(reason, Reason::NotMember | Reason::OtherInstance { .. });
                let same = self.told.as_ref().is_some_and(|t| std::mem::discriminant(t) == std::mem::discriminant(&reason));
                if worth_telling && !same {
                    self.told = Some(reason.clone());
                    out.push(Effect::Refused { reason });
                }
            }
        }
    }

    fn extend(&mut self, deadline_ms: u64, out: &mut Vec<Effect>) {
        if deadline_ms > self.deadline_ms {
            self.deadline_ms = deadline_ms;
            out.push(Effect::SetDeadline { boottime_ms: deadline_ms });
        }
    }

    fn take_up(&mut self, now_ms: u64, out: &mut Vec<Effect>) {
        let Some((deadline_ms, index)) = self.pending else { return };
        if now_ms >= deadline_ms {
            self.pending = None;
        } else if self.applied >= index {
            self.pending = None;
            self.lapsed = false;
            self.deadline_ms = deadline_ms;
            out.push(Effect::SetDeadline { boottime_ms: deadline_ms });
            out.push(Effect::Regained { boottime_ms: deadline_ms });
        }
    }

    fn alone(&mut self, out: &mut Vec<Effect>) {
        if self.mode == Mode::Unlimited {
            return;
        }
        self.mode = Mode::Unlimited;
        self.deadline_ms = UNLIMITED;
        self.sent.clear();
        self.pending = None;
        out.push(Effect::SetDeadline { boottime_ms: UNLIMITED });
        if std::mem::take(&mut self.lapsed) {
            out.push(Effect::Regained { boottime_ms: UNLIMITED });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const L: u64 = 3000;

    fn granted(seq: u64, term: u64, index: u64) -> Input {
        Input::Answer { seq, answer: Answer::Granted { term, lease_ms: L, index } }
    }
    fn send(seq: u64) -> Effect {
        Effect::SendRenewal { seq, incarnation: 7 }
    }
    fn until(boottime_ms: u64) -> Effect {
        Effect::SetDeadline { boottime_ms }
    }
    fn back(boottime_ms: u64) -> Effect {
        Effect::Regained { boottime_ms }
    }

    /// Steps one holder through a table of (time, input, expected effects).
    fn check(table: Vec<(u64, Input, Vec<Effect>)>) -> Holder {
        let mut h = Holder::new(7, L);
        for (row, (now, input, want)) in table.into_iter().enumerate() {
            assert_eq!(h.step(now, input.clone()), want, "row {row}: at {now} {input:?}");
        }
        h
    }

    #[test]
    fn it_is_granted_from_before_the_renewal_was_sent() {
        let h = check(vec![
            (1000, Input::Tick, vec![send(1)]),
            (1400, granted(1, 1, 0), vec![until(4000), back(4000)]),
            (1499, Input::Tick, vec![]),
            (1500, Input::Tick, vec![send(2)]),
            (1600, granted(2, 1, 0), vec![until(4500)]),
            (2000, Input::Tick, vec![send(3)]),
        ]);
        assert!(h.holds(4499) && !h.holds(4500));
    }

    #[test]
    fn late_double_and_foreign_answers_are_ignored() {
        check(vec![
            (1000, Input::Tick, vec![send(1)]),
            (1500, Input::Tick, vec![send(2)]),
            (1510, granted(2, 5, 0), vec![until(4500), back(4500)]),
            (1511, granted(2, 5, 0), vec![]),
            (1512, granted(1, 5, 0), vec![]),
            (1513, granted(9, 5, 0), vec![]),
            (2000, Input::Tick, vec![send(3)]),
            // A leader of an older term answers.
            (2001, granted(3, 4, 0), vec![]),
            // The same renewal, answered by the leader of the present term.
            (2002, granted(3, 6, 0), vec![until(5000)]),
        ]);
    }

    #[test]
    fn an_answer_that_comes_after_its_own_end_changes_nothing() {
        check(vec![
            (1000, Input::Tick, vec![send(1)]),
            (1500, granted(1, 1, 0), vec![until(4000), back(4000), send(2)]),
            (9000, granted(2, 1, 0), vec![Effect::Lapsed, send(3)]),
        ]);
    }

    #[test]
    fn after_a_lapse_it_waits_until_it_has_seen_what_it_lost() {
        check(vec![
            (0, Input::Tick, vec![send(1)]),
            (10, granted(1, 1, 4), vec![]),
            (11, Input::Applied { index: 3 }, vec![]),
            (12, Input::Applied { index: 4 }, vec![until(3000), back(3000)]),
            (3000, Input::Tick, vec![Effect::Lapsed, send(2)]),
            (3500, granted(2, 2, 9), vec![send(3)]),
            // A second grant while waiting: the later deadline, the later index.
            (3501, granted(3, 2, 8), vec![]),
            (3502, Input::Applied { index: 9 }, vec![until(6500), back(6500)]),
        ]);
    }

    #[test]
    fn a_grant_that_ran_out_while_it_waited_is_dropped() {
        check(vec![
            (0, Input::Tick, vec![send(1)]),
            (10, granted(1, 1, 4), vec![]),
            (3000, Input::Applied { index: 4 }, vec![send(2)]),
            (3001, Input::Tick, vec![]),
        ]);
    }

    #[test]
    fn a_lone_node_has_no_deadline_and_gets_one_before_a_second_voter() {
        let mut h = check(vec![
            (0, Input::Alone(true), vec![until(UNLIMITED), back(UNLIMITED)]),
            (1, Input::Alone(true), vec![]),
            (50_000, Input::Tick, vec![]),
            (50_001, Input::Alone(false), vec![Effect::Limit { boottime_ms: 53_001 }, send(1)]),
        ]);
        assert!(!h.is_finite(), "not before every VM has it");
        assert_eq!(h.step(50_002, granted(1, 1, 0)), vec![], "what was sent at 50,001 gives the same deadline");
        assert_eq!(h.step(50_003, Input::Limited), vec![]);
        assert!(h.is_finite());
        assert_eq!(h.step(53_001, Input::Tick), vec![Effect::Lapsed, send(2)]);
    }

    #[test]
    fn a_fleet_that_shrinks_to_one_frees_its_last_node() {
        check(vec![
            (0, Input::Tick, vec![send(1)]),
            (10, granted(1, 1, 0), vec![until(3000), back(3000)]),
            (20, Input::Alone(true), vec![until(UNLIMITED)]),
            (30, granted(1, 1, 0), vec![]),
        ]);
    }

    #[test]
    fn a_copied_key_is_told_once_and_only_the_known_lengths_are_believed() {
        let refused =
            |seq| Input::Answer { seq, answer: Answer::Refused { term: 1, reason: Reason::OtherInstance { wait_ms: 5 } } };
        check(vec![
            (0, Input::Tick, vec![send(1)]),
            (1, refused(1), vec![Effect::Refused { reason: Reason::OtherInstance { wait_ms: 5 } }]),
            (500, Input::Tick, vec![send(2)]),
            (501, refused(2), vec![]),
            (1000, Input::Tick, vec![send(3)]),
            (
                1001,
                Input::Answer { seq: 3, answer: Answer::Granted { term: 1, lease_ms: u64::MAX, index: 0 } },
                vec![until(1000 + LEASE_MAX_MS), back(1000 + LEASE_MAX_MS)],
            ),
        ]);
    }

    #[test]
    fn unanswered_renewals_are_bounded() {
        let mut h = Holder::new(7, L);
        for i in 0..10_000 {
            let _ = h.step(i * 500, Input::Tick);
        }
        assert_eq!(h.sent.len(), OUTSTANDING_MAX);
    }
}
