//! Ranks the candidates for one session.

use crate::view::{FactsView, SessionView, Standing, View};
use std::collections::{BTreeMap, BTreeSet};

/// One candidate, with what this round has given it already.
#[derive(Debug)]
struct Seat<'a> {
    number: u64,
    profiles: &'a [String],
    facts: Option<&'a FactsView>,
    reserved_mib: u64,
    reserved: u64,
}

/// The candidates of one round of placement.
#[derive(Debug)]
pub(super) struct Desk<'a> {
    seats: BTreeMap<u64, Seat<'a>>,
}

impl<'a> Desk<'a> {
    /// Active members whose lease is in force.
    pub(super) fn new(view: &'a View, held: &BTreeSet<u64>, facts: &'a BTreeMap<u64, FactsView>) -> Self {
        let members = view.members.values().filter(|m| m.standing == Standing::Active && held.contains(&m.number));
        let seat = |m: &'a crate::view::MemberView| Seat {
            number: m.number,
            profiles: &m.profiles,
            facts: facts.get(&m.number),
            reserved_mib: 0,
            reserved: 0,
        };
        Self { seats: members.map(|m| (m.number, seat(m))).collect() }
    }

    /// Counts the session as placed there.
    pub(super) fn reserve(&mut self, node: u64, s: &SessionView) {
        if let Some(seat) = self.seats.get_mut(&node) {
            seat.reserved += 1;
            seat.reserved_mib += s.memory_mib;
        }
    }

    /// The best node for it, or why there is none. Nodes to avoid are used only when no other is left. With `owner_lost`, a
    /// session whose every copy is on its lost owner waits for that node, and is not begun anew from something older.
    pub(super) fn choose(&self, s: &SessionView, avoid: Option<&BTreeSet<u64>>, owner_lost: bool) -> Result<u64, String> {
        let others = self.seats.values().filter(|seat| seat.number != s.owner);
        let newest = s.checkpoints.iter().rev().find(|c| !c.branch);
        if owner_lost && newest.is_some() {
            let elsewhere = |n: &u64| *n != s.owner;
            if !s.checkpoints.iter().filter(|c| !c.branch).any(|c| c.holders.iter().any(elsewhere)) {
                return Err(format!("all copies of its checkpoints are on node {}, which does not answer", s.owner));
            }
        }
        let compatible: Vec<&Seat> = others.filter(|seat| seat.profiles.contains(&s.profile)).collect();
        if compatible.is_empty() {
            return Err(format!("no live node has the CPU profile {}", s.profile));
        }
        let room = |seat: &&Seat| seat.facts.is_none_or(|f| f.mem_free_mib >= seat.reserved_mib + s.memory_mib);
        let avoided = |seat: &Seat| avoid.is_some_and(|a| a.contains(&seat.number));
        let has_newest = |seat: &Seat| newest.is_some_and(|c| c.holders.contains(&seat.number));
        let in_set = |seat: &Seat| s.replicas.contains(&seat.number);
        let rank = |seat: &&Seat| {
            let facts = seat.facts;
            let sessions = facts.map_or(0, |f| f.sessions) + seat.reserved;
            let load = facts.map_or(0, |f| f.load_milli) / 1000;
            let free = facts.map_or(0, |f| f.mem_free_mib).saturating_sub(seat.reserved_mib);
            (avoided(seat), !in_set(seat), !has_newest(seat), facts.is_none(), load + sessions, u64::MAX - free, seat.number)
        };
        let best = compatible.iter().copied().filter(room).min_by_key(rank);
        best.map(|seat| seat.number).ok_or_else(|| format!("no live node has {} MiB of memory free", s.memory_mib))
    }
}
