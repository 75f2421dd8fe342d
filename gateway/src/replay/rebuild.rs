//! The machine as the ledger's lines leave it, for a process that starts.

use super::machine::{Bound, Call, Client, Entry, Replay};
use crate::dialect::Outcome;
use crate::key::Matched;
use crate::ledger;
use crate::names::{CallId, Digest, EntryRef, Nonce};

impl Replay {
    /// Takes one line of the session's ledger, in order. Lines of a fork come after [`Replay::fork_of`]. All clients count as cut
    /// off: they come back by themselves.
    pub fn load(&mut self, line: &ledger::Line) {
        self.last = self.last.max(line.seq);
        match &line.entry {
            ledger::Entry::Timeline { nonce, prior, position, mode, began, token: _ } => {
                self.open_timeline(*nonce, *prior, *position, *mode, *began);
            }
            ledger::Entry::Intent(i) => self.load_intent(line.seq, i),
            ledger::Entry::Completed(c) => {
                if let Some(e) = self.entries.get_mut(&EntryRef::own(c.of)) {
                    e.stored = c.body_bytes;
                    e.outcome = Some(c.outcome);
                }
            }
            ledger::Entry::Served { call, timeline, of, matched, body_hash } => {
                let bound = Bound::Entry(of.clone());
                match self.calls.get_mut(call) {
                    Some(c) => {
                        c.bound = bound;
                        c.timeline = *timeline;
                        c.matched = *matched;
                    }
                    None => self.load_served((line.seq, *call), *timeline, of, *matched, *body_hash),
                }
                let told = self.calls.get_mut(call).map(|c| *c.told.get_or_insert(line.seq));
                self.load_used(timeline, of, *call, told);
            }
            ledger::Entry::Diverged { timeline, call: _ } => {
                if let Some(t) = self.timelines.get_mut(timeline) {
                    t.diverged = true;
                }
            }
            ledger::Entry::Origin { .. } | ledger::Entry::Resolved { .. } | ledger::Entry::Egress { .. } => {}
        }
    }
    /// Entries without an end: their process is gone, and they become unknown once that is durable.
    pub fn open_entries(&self) -> Vec<u64> {
        self.entries.iter().filter(|(r, e)| r.session.is_none() && e.outcome.is_none()).map(|(r, _)| r.seq).collect()
    }
    /// How an entry of this session ended, if it has.
    pub fn outcome(&self, entry: &EntryRef) -> Option<Outcome> {
        self.entries.get(entry).and_then(|e| e.outcome)
    }
    fn load_intent(&mut self, seq: u64, i: &ledger::Intent) {
        let entry = EntryRef::own(seq);
        let mut e = Entry::new(i.keys, i.stateful);
        e.cut.insert(i.call);
        self.entries.insert(entry.clone(), e);
        if let super::Why::NotReplayable { of } = &i.why {
            self.load_used(&i.timeline, of, i.call, Some(seq));
        }
        let c = Call {
            timeline: i.timeline,
            keys: i.keys,
            body_hash: i.body_hash,
            stateful: i.stateful,
            bound: Bound::Entry(entry),
            matched: Matched::Call,
            told: Some(seq),
            client: Client::Cut,
            superseded: None,
            offset: 0,
            abandoned: false,
        };
        self.calls.insert(i.call, c);
    }
    fn load_served(&mut self, (seq, call): (u64, CallId), timeline: Nonce, of: &EntryRef, matched: Matched, body_hash: Digest) {
        // The request was like the one that bought the entry.
        let Some(bought) = self.calls.values().find(|c| c.bound == Bound::Entry(of.clone())) else { return };
        let c = Call {
            timeline,
            matched,
            body_hash,
            told: Some(seq),
            client: Client::Cut,
            superseded: None,
            offset: 0,
            ..bought.clone()
        };
        self.calls.insert(call, c);
    }
    fn load_used(&mut self, timeline: &Nonce, entry: &EntryRef, call: CallId, told: Option<u64>) {
        if let Some(t) = self.timelines.get_mut(timeline)
            && t.pool.contains(entry)
        {
            t.used.insert(entry.clone(), (call, told));
        }
    }
}
