//! How a timeline begins: what it may use, what it abandons; and how a fork begins from its parent's calls.

use super::machine::{Bound, Client, Replay, Timeline};
use super::{Began, ReplayMode};
use crate::names::{EntryRef, Nonce};
use std::collections::{BTreeMap, BTreeSet};

impl Replay {
    pub(super) fn open_timeline(&mut self, nonce: Nonce, prior: Option<Nonce>, position: u64, mode: ReplayMode, began: Began) {
        if self.timelines.contains_key(&nonce) {
            return;
        }
        // A guest that says it knows more than there is knows everything.
        let position = position.min(self.last);
        // A boot has no past: whatever a guest before it bought is not this one's.
        let boot = began == Began::Boot;
        let mut coming: BTreeSet<_> =
            self.calls.iter().filter(|(_, c)| c.bound == Bound::Pending && !c.abandoned).map(|(id, _)| *id).collect();
        let mut pool = if boot { self.available(None, 0) } else { self.available(prior.as_ref(), position) };
        if boot || mode == ReplayMode::Off {
            for entry in std::mem::take(&mut pool) {
                if let Some(e) = self.entries.get_mut(&entry) {
                    e.abandoned = true;
                }
            }
        }
        if boot || mode == ReplayMode::Off {
            for call in std::mem::take(&mut coming) {
                if let Some(c) = self.calls.get_mut(&call) {
                    c.abandoned = true;
                }
            }
        }
        let fresh = !boot && mode == ReplayMode::Off;
        self.timelines.insert(nonce, Timeline { pool, coming, used: BTreeMap::new(), diverged: false, fresh });
    }
    /// What a guest that lived in `prior` and was told of lines up to `position` has not had.
    fn available(&self, prior: Option<&Nonce>, position: u64) -> BTreeSet<EntryRef> {
        let after = self.entries.keys().filter(|r| match &r.session {
            None => r.seq > position,
            Some(s) => r.seq > position && self.forked_at.get(s).is_some_and(|at| position <= *at),
        });
        let mut all: BTreeSet<EntryRef> = after.cloned().collect();
        if let Some((nonce, t)) = prior.and_then(|p| Some((p, self.timelines.get(p)?))) {
            let had = |e: &EntryRef| t.used.get(e).is_some_and(|(_, told)| told.is_some_and(|n| n <= position));
            all.extend(t.pool.iter().filter(|e| !had(e)).cloned());
            all.extend(self.left_at(nonce, position));
        }
        all.retain(|r| self.entries.get(r).is_some_and(|e| !e.abandoned));
        all
    }
    /// Entries whose clients left before the last byte, and whom nobody had followed at that position: a retry may be under way.
    fn left_at<'a>(&'a self, prior: &'a Nonce, position: u64) -> impl Iterator<Item = EntryRef> + 'a {
        self.calls.values().filter_map(move |c| {
            let followed = c.superseded.and_then(|s| self.calls.get(&s)?.told).is_some_and(|n| n <= position);
            match &c.bound {
                Bound::Entry(e) if c.timeline == *prior && c.client == Client::Closed && !followed => Some(e.clone()),
                Bound::Entry(_) | Bound::Pending | Bound::Waits(_) => None,
            }
        })
    }
    /// The calls of a fork of `parent` at line `at`: the parent's calls and timelines so far, under the parent's name. The fork's own
    /// lines go on from `at`, which is never more than the parent's last.
    pub fn fork_of(parent_session: &str, parent: &Replay, at: u64) -> Replay {
        let at = at.min(parent.last);
        let foreign = |r: &EntryRef| match &r.session {
            None => EntryRef { session: Some(parent_session.to_owned()), seq: r.seq },
            Some(_) => r.clone(),
        };
        let mut child = Replay { last: at, forked_at: parent.forked_at.clone(), ..Replay::default() };
        child.forked_at.insert(parent_session.to_owned(), at);
        for (r, e) in &parent.entries {
            let mut e = e.clone();
            // Its readers are the parent's.
            e.connected.clear();
            e.cut.clear();
            e.held = 0;
            child.entries.insert(foreign(r), e);
        }
        for (id, c) in &parent.calls {
            let mut c = c.clone();
            if let Bound::Entry(r) = &c.bound {
                c.bound = Bound::Entry(foreign(r));
            }
            // A number behind the fork point means another line here.
            c.told = c.told.filter(|n| *n <= at);
            if matches!(c.bound, Bound::Entry(_)) {
                child.calls.insert(*id, c);
            }
        }
        for (nonce, t) in &parent.timelines {
            let mut t = t.clone();
            t.coming.clear();
            t.pool = t.pool.iter().map(foreign).collect();
            t.used = t.used.into_iter().map(|(r, (by, told))| (foreign(&r), (by, told.filter(|n| *n <= at)))).collect();
            child.timelines.insert(*nonce, t);
        }
        child
    }
    /// The calls of a fork whose parent's journal is not at hand: nothing of it can be joined or served.
    pub fn fork_of_unknown(at: u64) -> Replay {
        Replay { last: at, ..Replay::default() }
    }
}
