//! Where a new session begins. Pure: the node that the caller named if it can take sessions; else the node that was asked; else,
//! when that one cannot, the best of the others.
//!
//! Soft facts (who was heard of, free memory) only choose or refuse a place here: ownership is decided by the log alone, which
//! refuses a node that is not active.

use ks_fleet::FactsView;
use ks_proto::api::ApiError;
use ks_raft::{FleetState, Member, MemberState};
use std::collections::BTreeMap;

/// What the node that was asked knows.
#[derive(Debug)]
pub struct Asked<'a> {
    /// The replicated state.
    pub state: &'a FleetState,
    /// What gossip says, this node included.
    pub facts: &'a BTreeMap<u64, FactsView>,
    /// This node.
    pub me: u64,
    /// It has an engine for this session.
    pub engine: bool,
    /// A member that was not heard of for this long is not live, ms.
    pub liveness_ms: u64,
}

impl Asked<'_> {
    /// The node to begin on: a name, a number or `#number` in `wanted`; None is the fleet's choice. `memory_mib` is what the
    /// session will have.
    ///
    /// # Errors
    /// `not-found` for no member; `busy` for one that is on its way out; `unreachable` for one that was not heard of.
    pub fn choose(&self, wanted: Option<&str>, memory_mib: u64) -> Result<u64, ApiError> {
        match wanted {
            Some(text) => self.named(text),
            None => Ok(self.any(memory_mib)),
        }
    }

    fn named(&self, text: &str) -> Result<u64, ApiError> {
        let refused = |code: &str, why: String, next: &str| Err(ApiError::new(code, "the session cannot begin there", why, next));
        let m = super::fleet::find(self.state, text)?;
        match m.state {
            MemberState::Gone => refused("not-found", format!("{} has left the fleet", m.name), "ks node ls shows what there is"),
            MemberState::Draining => refused(
                "busy",
                format!("{} is draining: it takes no sessions", m.name),
                "name another node, or let it take sessions again: ks node undrain",
            ),
            // One that was not heard of since this node started is asked: then the connection tells.
            MemberState::Active if m.number == self.me || self.silent_ms(m.number).is_none_or(|ms| ms < self.liveness_ms) => {
                Ok(m.number)
            }
            MemberState::Active => {
                let ago = self.silent_ms(m.number).unwrap_or(0) / 1000;
                let why = format!("{} is not live: it was last heard of {ago} s ago", m.name);
                refused("unreachable", why, "ks node ls; or leave --node away")
            }
        }
    }

    fn silent_ms(&self, node: u64) -> Option<u64> {
        self.facts.get(&node).map(|f| f.seen_ms_ago)
    }

    fn live(&self, node: u64) -> bool {
        self.silent_ms(node).is_some_and(|ms| ms < self.liveness_ms)
    }

    fn room(&self, node: u64, memory_mib: u64) -> bool {
        self.facts.get(&node).is_none_or(|f| f.mem_free_mib >= memory_mib)
    }

    /// This node has the images and the caller: it is left only for a reason.
    fn any(&self, memory_mib: u64) -> u64 {
        let me = self.state.members.get(&self.me);
        let active = me.is_none_or(|m| m.state == MemberState::Active);
        if active && self.engine && self.room(self.me, memory_mib) {
            return self.me;
        }
        let fit =
            |m: &&Member| m.state == MemberState::Active && m.number != self.me && self.live(m.number) && !m.profiles.is_empty();
        let rank = |m: &&Member| {
            let f = self.facts.get(&m.number);
            let busy = f.map_or(0, |f| f.load_milli / 1000 + f.sessions);
            (busy, u64::MAX - f.map_or(0, |f| f.mem_free_mib), m.number)
        };
        let best = self.state.members.values().filter(fit).filter(|m| self.room(m.number, memory_mib)).min_by_key(rank);
        // Nobody is better: what is wrong here is then said here.
        best.map_or(self.me, |m| m.number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(number: u64, state: MemberState) -> Member {
        Member {
            number,
            peer_id: format!("p{number}"),
            name: format!("n{number}"),
            control: vec![],
            bulk: vec![],
            api: vec![],
            profiles: vec!["tcg".into()],
            domain: String::new(),
            joined_unix_ms: 0,
            state,
            incarnation: number,
        }
    }

    fn facts(seen_ms_ago: u64, mem_free_mib: u64, sessions: u64) -> FactsView {
        FactsView { seen_ms_ago, mem_free_mib, sessions, ..FactsView::default() }
    }

    fn fleet() -> (FleetState, BTreeMap<u64, FactsView>) {
        let mut state = FleetState::default();
        let states = [MemberState::Active, MemberState::Active, MemberState::Draining, MemberState::Gone, MemberState::Active];
        for (n, s) in (1..).zip(states) {
            state.members.insert(n, member(n, s));
        }
        let told = [(1, facts(0, 4000, 3)), (2, facts(900, 4000, 1)), (3, facts(100, 9000, 0)), (5, facts(7_000, 9000, 0))];
        (state, told.into())
    }

    fn choose(me: u64, engine: bool, wanted: Option<&str>, memory: u64) -> Result<u64, (String, String)> {
        let (state, facts) = fleet();
        let asked = Asked { state: &state, facts: &facts, me, engine, liveness_ms: 5_000 };
        asked.choose(wanted, memory).map_err(|e| (e.code, e.why))
    }

    #[test]
    fn a_named_node_is_taken_or_refused_with_its_reason() {
        for (text, number) in [("n2", 2), ("2", 2), ("#2", 2), ("n1", 1)] {
            assert_eq!(choose(1, true, Some(text), 512), Ok(number), "{text}");
        }
        let refused = |text, code: &str, word: &str| {
            let (c, why) = choose(1, true, Some(text), 512).unwrap_err();
            assert!(c == code && why.contains(word), "{text}: {c}: {why}");
        };
        refused("n9", "not-found", "n9");
        refused("99", "not-found", "99");
        refused("4", "not-found", "has left");
        refused("n3", "busy", "draining");
        refused("n5", "unreachable", "7 s ago");
        // A node that has just started has heard of nobody yet.
        let (state, none) = (fleet().0, BTreeMap::new());
        let asked = Asked { state: &state, facts: &none, me: 1, engine: true, liveness_ms: 5_000 };
        assert_eq!(asked.choose(Some("n5"), 512).map_err(|e| e.why), Ok(5));
        // Its own word about itself needs no gossip.
        assert_eq!(choose(5, true, Some("n5"), 512), Ok(5));
    }

    #[test]
    fn without_a_name_it_begins_here_unless_this_node_cannot() {
        assert_eq!(choose(1, true, None, 512), Ok(1));
        assert_eq!(choose(1, false, None, 512), Ok(2), "no engine here");
        assert_eq!(choose(3, true, None, 512), Ok(2), "this one drains: the least busy that is live");
        assert_eq!(choose(1, true, None, 8000), Ok(1), "nobody has room: refused here, in its own words");
        let (mut state, facts) = fleet();
        state.members.clear();
        let asked = Asked { state: &state, facts: &facts, me: 1, engine: true, liveness_ms: 5_000 };
        assert_eq!(asked.choose(None, 512).map_err(|e| e.why), Ok(1), "before a fleet is founded");
    }
}
