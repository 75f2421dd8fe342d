//! The machine itself: who asked what, which entries there are, who reads them.

use super::{Effect, Gone, Input, Why};
use crate::dialect::Outcome;
use crate::key::{Keys, Matched};
use crate::names::{CallId, Digest, EntryRef, Nonce};
use std::collections::{BTreeMap, BTreeSet};

/// How long a call whose client closed its socket is read on, and joined by a request with the same key. The longest back-off
/// of the SDKs is 8 s.
pub const GRACE_MS: u64 = 15_000;
/// How long it is then still read for its usage before it is aborted.
pub const DRAIN_MS: u64 = 60_000;

/// What a call's answer is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Bound {
    /// Told to go live; no line yet.
    Pending,
    /// The same as a pending call whose client left.
    Waits(CallId),
    /// An entry.
    Entry(EntryRef),
}

/// A call's client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Client {
    /// Reads.
    Connected,
    /// Closed its socket before the last byte.
    Closed,
    /// Its stream was cut; it may come back.
    Cut,
    /// Has had everything.
    Done,
}

#[derive(Debug, Clone)]
pub(super) struct Call {
    pub timeline: Nonce,
    pub keys: Keys,
    pub body_hash: Digest,
    pub stateful: bool,
    pub bound: Bound,
    pub matched: Matched,
    /// The number that the relay was told for it.
    pub told: Option<u64>,
    pub client: Client,
    /// The call that took its place after its client left.
    pub superseded: Option<CallId>,
    /// First byte that the client wants.
    pub offset: u64,
    /// A timeline with replay off began before it had a line: so is its entry.
    pub abandoned: bool,
}

/// How an open entry is being read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Reading,
    Grace { until_ms: u64 },
    Drain { until_ms: u64 },
    Aborting,
}

#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub keys: Keys,
    pub stateful: bool,
    pub outcome: Option<Outcome>,
    pub stored: u64,
    pub abandoned: bool,
    pub phase: Phase,
    pub connected: BTreeSet<CallId>,
    pub cut: BTreeSet<CallId>,
    /// Readers outside the session.
    pub held: u32,
}

impl Entry {
    /// Open, of this session, and about to be bought.
    pub fn new(keys: Keys, stateful: bool) -> Self {
        Self {
            keys,
            stateful,
            outcome: None,
            stored: 0,
            abandoned: false,
            phase: Phase::Reading,
            connected: BTreeSet::new(),
            cut: BTreeSet::new(),
            held: 0,
        }
    }
    /// Nobody reads it or may come back: the grace begins.
    fn left(&mut self, now_ms: u64) {
        if self.outcome.is_none()
            && self.phase == Phase::Reading
            && self.connected.is_empty()
            && self.cut.is_empty()
            && self.held == 0
        {
            self.phase = Phase::Grace { until_ms: now_ms.saturating_add(GRACE_MS) };
        }
    }
    /// It may answer another request than the one that bought it.
    pub fn replayable(&self) -> bool {
        match self.outcome {
            None => self.phase != Phase::Aborting,
            Some(Outcome::Complete) => true,
            Some(Outcome::Failed | Outcome::Partial | Outcome::Aborted | Outcome::Unknown) => false,
        }
    }
}

#[derive(Debug, Clone)]
pub(super) struct Timeline {
    /// What it may use.
    pub pool: BTreeSet<EntryRef>,
    /// Calls of earlier timelines that were about to be bought when it began: they join the pool when they have a line.
    pub coming: BTreeSet<CallId>,
    /// What it has used, and the number that the relay was told for it.
    pub used: BTreeMap<EntryRef, (CallId, Option<u64>)>,
    pub diverged: bool,
    /// Replay was switched off by a person.
    pub fresh: bool,
}

/// The calls of one session.
#[derive(Debug, Clone, Default)]
pub struct Replay {
    pub(super) entries: BTreeMap<EntryRef, Entry>,
    pub(super) calls: BTreeMap<CallId, Call>,
    pub(super) timelines: BTreeMap<Nonce, Timeline>,
    /// The highest number of this session's ledger.
    pub(super) last: u64,
    /// Positions up to which another session's numbers are this session's past.
    pub(super) forked_at: BTreeMap<String, u64>,
}

impl Replay {
    /// The highest line number that it knows of.
    pub fn last(&self) -> u64 {
        self.last
    }
    /// Whether the timeline was opened.
    pub fn has_timeline(&self, nonce: &Nonce) -> bool {
        self.timelines.contains_key(nonce)
    }
    /// Entries of other sessions that were open when last heard of: their journals have what became of them.
    pub fn foreign_open(&self) -> impl Iterator<Item = &EntryRef> {
        self.entries.iter().filter(|(r, e)| r.session.is_some() && e.outcome.is_none()).map(|(r, _)| r)
    }
    /// When [`Input::Tick`] is next due.
    pub fn next_tick_ms(&self) -> Option<u64> {
        self.entries
            .values()
            .filter_map(|e| match e.phase {
                Phase::Grace { until_ms } | Phase::Drain { until_ms } if e.outcome.is_none() => Some(until_ms),
                Phase::Grace { .. } | Phase::Drain { .. } | Phase::Reading | Phase::Aborting => None,
            })
            .min()
    }
    /// One thing happened at `now_ms` of the caller's monotonic clock.
    pub fn step(&mut self, now_ms: u64, input: Input) -> Vec<Effect> {
        match input {
            Input::OpenTimeline { nonce, prior, position, mode, began } => {
                self.open_timeline(nonce, prior, position, mode, began);
                vec![]
            }
            Input::Ask { call, timeline, keys, body_hash, stateful } => match self.calls.get(&call) {
                Some(c) if c.body_hash == body_hash => self.rejoin(call, timeline, 0, false, body_hash),
                Some(_) => vec![Effect::Unknown { call }],
                None => self.decide(call, timeline, keys, body_hash, stateful),
            },
            Input::Rejoin { call, timeline, offset, head_sent, body_hash } => {
                self.rejoin(call, timeline, offset, head_sent, body_hash)
            }
            Input::Bought { call, seq } => self.bought(now_ms, call, seq),
            Input::Noted { call, seq } => {
                self.noted(&call, seq);
                vec![]
            }
            Input::Withdrawn { call } => self.withdrawn(call),
            Input::Changed { entry, stored, outcome } => {
                if let Some(e) = self.entries.get_mut(&entry) {
                    e.stored = e.stored.max(stored);
                    e.outcome = e.outcome.or(outcome);
                }
                vec![]
            }
            Input::Delivered { call } => {
                self.leave(now_ms, &call, Client::Done);
                vec![]
            }
            Input::ClientGone { call, how } => {
                self.leave(now_ms, &call, if how == Gone::Closed { Client::Closed } else { Client::Cut });
                vec![]
            }
            Input::Held { entry } => {
                if let Some(e) = self.entries.get_mut(&entry) {
                    e.held = e.held.saturating_add(1);
                    if e.phase != Phase::Aborting {
                        e.phase = Phase::Reading;
                    }
                }
                vec![]
            }
            Input::LetGo { entry } => {
                if let Some(e) = self.entries.get_mut(&entry) {
                    e.held = e.held.saturating_sub(1);
                    e.left(now_ms);
                }
                vec![]
            }
            Input::Tick => self.tick(now_ms),
        }
    }
    fn noted(&mut self, call: &CallId, seq: u64) {
        self.last = self.last.max(seq);
        let Some(c) = self.calls.get_mut(call) else { return };
        let told = *c.told.get_or_insert(seq);
        if let Bound::Entry(entry) = &c.bound
            && let Some(t) = self.timelines.get_mut(&c.timeline)
            && let Some((by, n)) = t.used.get_mut(entry)
            && by == call
        {
            *n = Some(told);
        }
    }
    /// A new request.
    fn decide(&mut self, call: CallId, timeline: Nonce, keys: Keys, body_hash: Digest, stateful: bool) -> Vec<Effect> {
        let mut effects = vec![];
        let decision = if let Some((earlier, matched)) = self.left_alone(&timeline, &keys) {
            if let Some(c) = self.calls.get_mut(&earlier) {
                c.superseded = Some(call);
            }
            match self.calls.get(&earlier).map(|c| c.bound.clone()) {
                Some(Bound::Entry(e)) => Ok((Bound::Entry(e), matched)),
                Some(Bound::Waits(first)) => Ok((Bound::Waits(first), matched)),
                Some(Bound::Pending) | None => Ok((Bound::Waits(earlier), matched)),
            }
        } else {
            self.pooled(&timeline, &keys, stateful)
        };
        let (bound, matched) = match decision {
            Ok(found) => found,
            Err(why) => {
                if why == Why::Diverged
                    && let Some(t) = self.timelines.get_mut(&timeline)
                    && !std::mem::replace(&mut t.diverged, true)
                {
                    effects.push(Effect::Diverged { timeline, call });
                }
                if let Why::NotReplayable { of } = &why
                    && let Some(t) = self.timelines.get_mut(&timeline)
                {
                    t.used.insert(of.clone(), (call, None));
                }
                effects.push(Effect::Live { call, why });
                (Bound::Pending, Matched::Call)
            }
        };
        let new = Call {
            timeline,
            keys,
            body_hash,
            stateful,
            bound,
            matched,
            told: None,
            client: Client::Connected,
            superseded: None,
            offset: 0,
            abandoned: false,
        };
        if let Bound::Waits(first) = &new.bound
            && let Some(t) = self.timelines.get_mut(&timeline)
        {
            t.coming.remove(first);
        }
        self.calls.insert(call, new);
        if matched != Matched::Call {
            effects.extend(self.attach(call));
        }
        effects
    }
    /// A call like this one in the same timeline whose client closed its socket before it had everything.
    fn left_alone(&self, timeline: &Nonce, keys: &Keys) -> Option<(CallId, Matched)> {
        let of = |wanted: Matched| {
            self.calls.iter().find_map(|(id, c)| {
                let alone = c.timeline == *timeline && c.client == Client::Closed && c.superseded.is_none();
                let usable = || match &c.bound {
                    Bound::Entry(e) => self.entries.get(e).is_some_and(Entry::replayable),
                    Bound::Pending | Bound::Waits(_) => true,
                };
                (alone && c.keys.matches(keys) == Some(wanted) && usable()).then_some((*id, wanted))
            })
        };
        of(Matched::Raw).or_else(|| of(Matched::Canonical))
    }
    /// The first unused entry of the timeline's pool that is like this.
    fn pooled(&self, timeline: &Nonce, keys: &Keys, stateful: bool) -> Result<(Bound, Matched), Why> {
        let Some(t) = self.timelines.get(timeline) else { return Err(Why::New) };
        // Another session's entries are the older ones.
        let mut unused: Vec<(&EntryRef, &Entry)> =
            t.pool.iter().filter(|e| !t.used.contains_key(e)).filter_map(|e| Some((e, self.entries.get(e)?))).collect();
        unused.sort_by_key(|(r, _)| (r.session.is_none(), r.seq));
        let like = |wanted: Matched, replayable: bool| {
            unused
                .iter()
                .find(|(_, e)| e.replayable() == replayable && e.keys.matches(keys) == Some(wanted))
                .map(|f| (*f, wanted))
        };
        if let Some(((entry, e), matched)) = like(Matched::Raw, true).or_else(|| like(Matched::Canonical, true)) {
            if t.diverged && (stateful || e.stateful) {
                return Err(Why::Stateful { of: entry.clone() });
            }
            return Ok((Bound::Entry(entry.clone()), matched));
        }
        // The same, about to be bought by a guest that died: later than all that has a line.
        let coming = |wanted: Matched| {
            t.coming
                .iter()
                .find(|id| self.calls.get(id).is_some_and(|c| c.keys.matches(keys) == Some(wanted)))
                .map(|id| (*id, wanted))
        };
        if !(t.diverged && stateful)
            && let Some((first, matched)) = coming(Matched::Raw).or_else(|| coming(Matched::Canonical))
        {
            return Ok((Bound::Waits(first), matched));
        }
        if let Some(((entry, _), _)) = like(Matched::Raw, false).or_else(|| like(Matched::Canonical, false)) {
            return Err(Why::NotReplayable { of: entry.clone() });
        }
        if t.diverged || !t.coming.is_empty() || unused.iter().any(|(_, e)| e.replayable()) {
            return Err(Why::Diverged);
        }
        Err(if t.fresh { Why::ReplayOff } else { Why::New })
    }
    /// A call that is bound gets its entry's bytes from its offset on.
    fn attach(&mut self, call: CallId) -> Vec<Effect> {
        let Some(c) = self.calls.get_mut(&call) else { return vec![] };
        c.client = Client::Connected;
        let Bound::Entry(entry) = c.bound.clone() else { return vec![] };
        let (timeline, matched, offset, told) = (c.timeline, c.matched, c.offset, c.told);
        let Some(e) = self.entries.get_mut(&entry) else { return vec![] };
        e.cut.remove(&call);
        e.connected.insert(call);
        if e.phase != Phase::Aborting {
            e.phase = Phase::Reading;
        }
        let complete = e.outcome == Some(Outcome::Complete);
        let mut note = told.is_none();
        if let Some(t) = self.timelines.get_mut(&timeline)
            && t.pool.contains(&entry)
            && !t.used.contains_key(&entry)
        {
            t.used.insert(entry.clone(), (call, told));
            note = true;
        }
        // A call that came back in another timeline is told its old number, and the ledger shows that it was served there.
        note |= timeline != call.nonce && matched == Matched::Call;
        vec![if complete {
            Effect::Serve { call, entry, matched, offset, told, note }
        } else {
            Effect::Join { call, entry, matched, offset, told, note }
        }]
    }
    /// A client that is still there.
    fn rejoin(&mut self, call: CallId, timeline: Nonce, offset: u64, head_sent: bool, body_hash: Digest) -> Vec<Effect> {
        let unknown = vec![Effect::Unknown { call }];
        let Some(c) = self.calls.get(&call).filter(|c| c.body_hash == body_hash) else { return unknown };
        if let Bound::Entry(entry) = &c.bound {
            let Some(e) = self.entries.get(entry) else { return unknown };
            let there = match e.outcome {
                None => e.phase != Phase::Aborting,
                Some(Outcome::Complete | Outcome::Failed | Outcome::Partial) => true,
                Some(Outcome::Aborted | Outcome::Unknown) => false,
            };
            if !there || offset > e.stored {
                return unknown;
            }
            // Another call of this timeline has its entry, and this client has had nothing: the next one like it, or a new one.
            let taken = self.timelines.get(&timeline).and_then(|t| t.used.get(entry)).is_some_and(|(by, _)| *by != call);
            if taken && timeline != c.timeline && offset == 0 && !head_sent {
                let (keys, stateful) = (c.keys, c.stateful);
                return self.decide(call, timeline, keys, body_hash, stateful);
            }
        }
        let mut effects = vec![];
        if !matches!(c.bound, Bound::Entry(_)) && c.timeline != timeline {
            effects = self.reclaim(&call, &timeline);
        }
        if let Some(c) = self.calls.get_mut(&call) {
            c.offset = offset;
            c.client = Client::Connected;
            if c.timeline != timeline {
                c.timeline = timeline;
                c.matched = Matched::Call;
                // Whoever followed it did so in another life.
                c.superseded = None;
            }
        }
        // A call that waits for its line is answered when it has one.
        effects.extend(self.attach(call));
        effects
    }
    /// A call without a line comes back in a later timeline: what is bought for it is its own, and a request of that timeline that was
    /// to share it is decided anew.
    fn reclaim(&mut self, call: &CallId, timeline: &Nonce) -> Vec<Effect> {
        let first = match self.calls.get(call).map(|c| &c.bound) {
            Some(Bound::Waits(first)) => *first,
            Some(Bound::Pending | Bound::Entry(_)) | None => *call,
        };
        if let Some(t) = self.timelines.get_mut(timeline) {
            t.coming.remove(&first);
        }
        let mut effects = vec![];
        for waiter in self.waiters(&first) {
            let shares = waiter != *call && self.calls.get(&waiter).is_some_and(|w| w.timeline == *timeline);
            if shares && let Some(w) = self.calls.remove(&waiter) {
                effects.extend(self.decide(waiter, w.timeline, w.keys, w.body_hash, w.stateful));
            }
        }
        effects
    }
    fn bought(&mut self, now_ms: u64, call: CallId, seq: u64) -> Vec<Effect> {
        self.last = self.last.max(seq);
        let Some(c) = self.calls.get_mut(&call) else { return vec![] };
        let entry = EntryRef::own(seq);
        c.told = Some(seq);
        c.bound = Bound::Entry(entry.clone());
        let mut e = Entry::new(c.keys, c.stateful);
        e.abandoned = c.abandoned;
        let client = c.client;
        self.entries.insert(entry.clone(), e);
        let waiters = self.waiters(&call);
        for (nonce, t) in &mut self.timelines {
            // What could not be replayed is used up by the call that was bought in its place.
            t.used.values_mut().filter(|(by, told)| *by == call && told.is_none()).for_each(|(_, told)| *told = Some(seq));
            let waited = waiters.iter().any(|w| self.calls.get(w).is_some_and(|w| w.timeline == *nonce));
            if t.coming.remove(&call) || waited {
                t.pool.insert(entry.clone());
            }
        }
        let mut effects = vec![];
        if client == Client::Connected {
            effects.extend(self.attach(call));
        } else {
            self.leave(now_ms, &call, client);
        }
        for waiter in waiters {
            if let Some(w) = self.calls.get_mut(&waiter) {
                w.bound = Bound::Entry(entry.clone());
                if w.client == Client::Connected {
                    effects.extend(self.attach(waiter));
                }
            }
        }
        effects
    }
    fn waiters(&self, call: &CallId) -> Vec<CallId> {
        self.calls.iter().filter(|(_, c)| c.bound == Bound::Waits(*call)).map(|(id, _)| *id).collect()
    }
    /// As if the call had never been asked.
    fn withdrawn(&mut self, call: CallId) -> Vec<Effect> {
        let Some(c) = self.calls.remove(&call) else { return vec![] };
        for t in self.timelines.values_mut() {
            t.coming.remove(&call);
        }
        if let Some(t) = self.timelines.get_mut(&c.timeline) {
            t.used.retain(|_, (by, told)| *by != call || told.is_some());
        }
        if let Bound::Entry(e) = &c.bound
            && let Some(e) = self.entries.get_mut(e)
        {
            e.connected.remove(&call);
            e.cut.remove(&call);
        }
        for c in self.calls.values_mut() {
            if c.superseded == Some(call) {
                c.superseded = None;
            }
        }
        let mut effects = vec![];
        for waiter in self.waiters(&call) {
            if let Some(w) = self.calls.remove(&waiter) {
                effects.extend(self.decide(waiter, w.timeline, w.keys, w.body_hash, w.stateful));
            }
        }
        effects
    }
    /// A client left, in whichever way.
    fn leave(&mut self, now_ms: u64, call: &CallId, how: Client) {
        let Some(c) = self.calls.get_mut(call) else { return };
        if c.client == Client::Done || (c.client == Client::Closed && how == Client::Cut) {
            return;
        }
        c.client = how;
        let Bound::Entry(entry) = &c.bound else { return };
        let Some(e) = self.entries.get_mut(entry) else { return };
        e.connected.remove(call);
        e.cut.remove(call);
        if how == Client::Cut {
            e.cut.insert(*call);
        }
        // A parent's entry is the parent's to give up.
        if entry.session.is_none() {
            e.left(now_ms);
        }
    }
    fn tick(&mut self, now_ms: u64) -> Vec<Effect> {
        let mut effects = vec![];
        for (entry, e) in self.entries.iter_mut().filter(|(_, e)| e.outcome.is_none()) {
            if let Phase::Grace { until_ms } = e.phase
                && until_ms <= now_ms
            {
                let until_ms = now_ms.saturating_add(DRAIN_MS);
                e.phase = Phase::Drain { until_ms };
                effects.push(Effect::Drain { entry: entry.clone(), until_ms });
            } else if let Phase::Drain { until_ms } = e.phase
                && until_ms <= now_ms
            {
                e.phase = Phase::Aborting;
                effects.push(Effect::Abort { entry: entry.clone() });
            }
        }
        effects
    }
}
