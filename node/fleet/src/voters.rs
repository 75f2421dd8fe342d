//! Which members should be Raft voters.
//!
//! Source: Raft's joint consensus changes any set into any other, as long as a majority of both is there; the choice is
//! ours. Rules: an odd number, at most the policy's (1, 3 or 5); two members have one voter; a voter that is dead, draining
//! or gone is replaced by a learner that has caught up (its matched index is checked: a fresh learner is not one); the
//! number never falls because a voter died; voters are spread over failure domains; the leader stays while it is a member.

use crate::view::{Standing, View};
use std::collections::{BTreeMap, BTreeSet};

/// A voter that was silent for this long is replaced, if somebody can take its place.
pub const VOTER_DEAD_MS: u64 = 10_000;
/// A learner that lacks at most this many entries has caught up.
pub const LAG_MAX: u64 = 64;

/// What the leader knows about the group.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Group {
    /// This node, the leader.
    pub leader: u64,
    /// Voters of the committed membership. No change may be under way.
    pub voters: BTreeSet<u64>,
    /// Learners of the committed membership.
    pub learners: BTreeSet<u64>,
    /// Log index known to be stored at each node.
    pub matched: BTreeMap<u64, u64>,
    /// The leader's last log index.
    pub last_log: u64,
    /// Milliseconds since each other node was last heard; absent is never.
    pub silent_ms: BTreeMap<u64, u64>,
    /// Every VM of the leader has a finite deadline ([`crate::lease::Holder::is_finite`]).
    pub leader_is_finite: bool,
}

/// One change of the group; the next is asked for when it is committed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Nothing to do.
    None,
    /// Let this member receive the log.
    AddLearner(u64),
    /// Stop sending the log to this node, which is no member.
    DropLearner(u64),
    /// Make exactly these the voters; void if the voters are not `guard` any more.
    SetVoters { voters: BTreeSet<u64>, guard: BTreeSet<u64> },
}

/// The next change that brings the group nearer to what it should be.
pub fn wanted_voters(view: &View, group: &Group) -> Change {
    let member = |n: &u64| view.members.get(n).is_some_and(|m| m.standing != Standing::Gone);
    let in_group = |n: &u64| group.voters.contains(n) || group.learners.contains(n);
    if let Some(n) = view.members.keys().find(|n| member(n) && !in_group(n)) {
        return Change::AddLearner(*n);
    }
    let voters = chosen(view, group);
    let enough = voters.iter().filter(|n| alive(group, **n)).count() * 2 > voters.len();
    let second_needs_deadline = group.voters.len() == 1 && voters.len() > 1 && !group.leader_is_finite;
    if voters != group.voters && enough && !second_needs_deadline {
        return Change::SetVoters { voters, guard: group.voters.clone() };
    }
    group.learners.iter().find(|n| !member(n)).map_or(Change::None, |n| Change::DropLearner(*n))
}

fn alive(group: &Group, n: u64) -> bool {
    n == group.leader || group.silent_ms.get(&n).is_some_and(|ms| *ms < VOTER_DEAD_MS)
}

fn caught_up(group: &Group, n: u64) -> bool {
    group.matched.get(&n).is_some_and(|m| m.saturating_add(LAG_MAX) >= group.last_log)
}

/// The largest odd number of voters for so many members.
fn target(view: &View, actives: usize) -> usize {
    let most = actives.min(usize::from(view.voters.max(1)));
    if most % 2 == 0 { most.saturating_sub(1).max(1) } else { most }
}

fn chosen(view: &View, group: &Group) -> BTreeSet<u64> {
    let actives = view.with_standing(Standing::Active);
    let size = target(view, actives.len());
    let mut set = BTreeSet::new();
    let add = |set: &mut BTreeSet<u64>, from: &BTreeSet<u64>, upto: usize| {
        let mut left: BTreeSet<u64> = from.difference(set).copied().collect();
        while set.len() < upto && !left.is_empty() {
            let domains: BTreeSet<&str> = set.iter().map(|n| view.domain(*n)).collect();
            let best = left.iter().min_by_key(|n| (**n != group.leader, domains.contains(view.domain(**n)), **n)).copied();
            let Some(best) = best else { break };
            left.remove(&best);
            set.insert(best);
        }
    };
    let well: BTreeSet<u64> = group.voters.intersection(&actives).copied().filter(|n| alive(group, *n)).collect();
    let fresh: BTreeSet<u64> =
        group.learners.intersection(&actives).copied().filter(|n| alive(group, *n) && caught_up(group, *n)).collect();
    let kept = spread(view, group, &well, &fresh, size);
    add(&mut set, &kept, size);
    add(&mut set, &fresh, size);
    // Nobody can take their place: the dead stay voters, and then the draining.
    let dead: BTreeSet<u64> = group.voters.intersection(&actives).copied().collect();
    add(&mut set, &dead, size);
    let leaving: BTreeSet<u64> =
        group.voters.iter().copied().filter(|n| view.members.get(n).is_some_and(|m| m.standing == Standing::Draining)).collect();
    add(&mut set, &leaving, size);
    if set.is_empty() {
        return group.voters.clone();
    }
    if set.len() % 2 == 0 {
        // Two of three that are caught up: it stays with one, unless there were more before.
        let before = group.voters.len();
        let keep = if set.len() > before { before.max(1) } else { set.len() - 1 };
        return trimmed(view, group, set, keep);
    }
    set
}

/// Of the voters that are well, those to keep: one of two in the same domain makes way for a learner of another one.
fn spread(view: &View, group: &Group, well: &BTreeSet<u64>, fresh: &BTreeSet<u64>, size: usize) -> BTreeSet<u64> {
    let mut kept = well.clone();
    if kept.len() < size || size == 1 {
        return kept;
    }
    let mut domains: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
    for n in &kept {
        domains.entry(view.domain(*n)).or_default().push(*n);
    }
    let new_domain = fresh.iter().any(|n| !domains.contains_key(view.domain(*n)));
    let double = domains.values().filter(|v| v.len() > 1).flatten().filter(|n| **n != group.leader).max().copied();
    if let Some(n) = double.filter(|_| new_domain && kept.len() == size) {
        kept.remove(&n);
    }
    kept
}

fn trimmed(view: &View, group: &Group, set: BTreeSet<u64>, keep: usize) -> BTreeSet<u64> {
    let mut v: Vec<u64> = set.into_iter().collect();
    v.sort_by_key(|n| (*n != group.leader, !group.voters.contains(n), !view.is_active(*n), !alive(group, *n), *n));
    v.into_iter().take(keep).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::MemberView;
    use proptest::prelude::*;

    fn view(members: &[(u64, &str, Standing)], voters: u16) -> View {
        let m = |(number, domain, standing): &(u64, &str, Standing)| {
            let m =
                MemberView { number: *number, standing: *standing, profiles: vec![], domain: (*domain).into(), incarnation: 0 };
            (*number, m)
        };
        View { members: members.iter().map(m).collect(), voters, ..View::default() }
    }
    fn group(voters: &[u64], learners: &[u64], silent: &[u64], behind: &[u64]) -> Group {
        let all = || voters.iter().chain(learners).copied();
        Group {
            leader: voters[0],
            voters: voters.iter().copied().collect(),
            learners: learners.iter().copied().collect(),
            matched: all().map(|n| (n, if behind.contains(&n) { 10 } else { 990 })).collect(),
            last_log: 1000,
            silent_ms: all().map(|n| (n, if silent.contains(&n) { VOTER_DEAD_MS } else { 100 })).collect(),
            leader_is_finite: true,
        }
    }
    fn set(of: &[u64], guard: &[u64]) -> Change {
        Change::SetVoters { voters: of.iter().copied().collect(), guard: guard.iter().copied().collect() }
    }

    #[test]
    fn each_rule() {
        use Standing::{Active as A, Draining as D, Gone as G};
        let abc = [(1, "a", A), (2, "b", A), (3, "c", A)];
        let abcd = [(1, "a", A), (2, "b", A), (3, "c", A), (4, "d", A)];
        let five = [(1, "a", A), (2, "b", A), (3, "c", A), (4, "d", A), (5, "e", A)];
        type Case<'a> = (&'a str, View, Group, Change);
        let cases: Vec<Case> = vec![
            ("alone", view(&abc[..1], 3), group(&[1], &[], &[], &[]), Change::None),
            ("a new member learns first", view(&abc[..2], 3), group(&[1], &[], &[], &[]), Change::AddLearner(2)),
            ("two members have one voter", view(&abc[..2], 3), group(&[1], &[2], &[], &[]), Change::None),
            ("three have three", view(&abc, 3), group(&[1], &[2, 3], &[], &[]), set(&[1, 2, 3], &[1])),
            ("not before both have caught up", view(&abc, 3), group(&[1], &[2, 3], &[], &[3]), Change::None),
            ("not while a learner is silent", view(&abc, 3), group(&[1], &[2, 3], &[3], &[]), Change::None),
            ("policy of one", view(&abc, 1), group(&[1], &[2, 3], &[], &[]), Change::None),
            ("a dead voter is replaced", view(&abcd, 3), group(&[1, 2, 3], &[4], &[2], &[]), set(&[1, 3, 4], &[1, 2, 3])),
            ("not by one that is behind", view(&abcd, 3), group(&[1, 2, 3], &[4], &[2], &[4]), Change::None),
            ("the number never falls by a death", view(&abc, 3), group(&[1, 2, 3], &[], &[2], &[]), Change::None),
            (
                "no change that the living could not carry",
                view(&five, 5),
                group(&[1, 2, 3], &[4, 5], &[2, 3], &[5]),
                Change::None,
            ),
            ("five", view(&five, 5), group(&[1, 2, 3], &[4, 5], &[], &[]), set(&[1, 2, 3, 4, 5], &[1, 2, 3])),
            ("four make three", view(&abcd, 5), group(&[1, 2, 3], &[4], &[], &[]), Change::None),
            (
                "a draining voter is replaced",
                view(&[(1, "a", A), (2, "b", D), (3, "c", A), (4, "d", A)], 3),
                group(&[1, 2, 3], &[4], &[], &[]),
                set(&[1, 3, 4], &[1, 2, 3]),
            ),
            (
                "three of which one leaves make one",
                view(&[(1, "a", A), (2, "b", A), (3, "c", D)], 3),
                group(&[1, 2, 3], &[], &[], &[]),
                set(&[1], &[1, 2, 3]),
            ),
            (
                "a removed voter goes, then it gets no log",
                view(&[(1, "a", A), (2, "b", A), (3, "c", G)], 3),
                group(&[1, 2, 3], &[], &[], &[]),
                set(&[1], &[1, 2, 3]),
            ),
            (
                "after that",
                view(&[(1, "a", A), (2, "b", A), (3, "c", G)], 3),
                group(&[1], &[2, 3], &[], &[]),
                Change::DropLearner(3),
            ),
            (
                "two voters in one domain make way for another domain",
                view(&[(1, "a", A), (2, "b", A), (3, "b", A), (4, "d", A)], 3),
                group(&[1, 2, 3], &[4], &[], &[]),
                set(&[1, 2, 4], &[1, 2, 3]),
            ),
            ("the policy came down", view(&five, 3), group(&[1, 2, 3, 4, 5], &[], &[], &[]), set(&[1, 2, 3], &[1, 2, 3, 4, 5])),
        ];
        for (what, v, g, want) in cases {
            assert_eq!(wanted_voters(&v, &g), want, "{what}");
        }
    }

    #[test]
    fn a_lone_leader_gets_a_deadline_before_it_gets_a_second_voter() {
        let v = view(&[(1, "a", Standing::Active), (2, "b", Standing::Active), (3, "c", Standing::Active)], 3);
        let g = Group { leader_is_finite: false, ..group(&[1], &[2, 3], &[], &[]) };
        assert_eq!(wanted_voters(&v, &g), Change::None);
    }

    proptest! {
        /// From any group of a fleet whose nodes answer, repeated changes end, and end well.
        #[test]
        fn changes_end_in_an_odd_spread_set(
            standings in prop::collection::vec((0u8..6, 0u8..4), 1..9),
            voters in prop::collection::btree_set(1u64..9, 1..6),
            policy in prop::sample::select(vec![1u16, 3, 5]),
        ) {
            let members: Vec<(u64, String, Standing)> = standings.iter().enumerate().map(|(i, (s, d))| {
                let standing = match s { 0 => Standing::Draining, 1 => Standing::Gone, _ => Standing::Active };
                (i as u64 + 1, format!("d{d}"), if i == 0 { Standing::Active } else { standing })
            }).collect();
            let named: Vec<(u64, &str, Standing)> = members.iter().map(|(n, d, s)| (*n, d.as_str(), *s)).collect();
            let v = view(&named, policy);
            let mut first: Vec<u64> = vec![1];
            first.extend(voters.iter().filter(|n| **n != 1 && v.members.contains_key(n)));
            let mut g = group(&first, &[], &[], &[]);
            for _ in 0..30 {
                match wanted_voters(&v, &g) {
                    Change::None => break,
                    Change::AddLearner(n) => { g.learners.insert(n); g.matched.insert(n, 1000); g.silent_ms.insert(n, 0); }
                    Change::DropLearner(n) => { g.learners.remove(&n); }
                    Change::SetVoters { voters, guard } => {
                        prop_assert_eq!(&guard, &g.voters);
                        prop_assert!(voters.len() % 2 == 1 && voters.contains(&1));
                        g.learners = g.learners.union(&g.voters).copied().filter(|n| !voters.contains(n)).collect();
                        g.voters = voters;
                    }
                }
            }
            prop_assert_eq!(wanted_voters(&v, &g), Change::None);
            let actives = v.with_standing(Standing::Active);
            prop_assert_eq!(g.voters.len(), target(&v, actives.len()));
            prop_assert!(g.voters.iter().all(|n| actives.contains(n)));
        }
    }
}
