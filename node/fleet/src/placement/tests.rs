//! The placer on tables, and on random fleets.

use super::*;
use crate::view::{CheckpointView, MemberView};
use ks_proto::{CheckpointId, RunToken};
use proptest::prelude::*;

fn sid(n: u64) -> SessionId {
    let mut b = [0; 16];
    b[8..].copy_from_slice(&n.to_be_bytes());
    SessionId(b)
}
fn member(number: u64) -> MemberView {
    MemberView {
        number,
        standing: Standing::Active,
        profiles: vec!["v2".into()],
        domain: format!("d{number}"),
        incarnation: number,
    }
}
fn session(n: u64, owner: u64, holders: &[u64]) -> SessionView {
    let token = RunToken { generation: 0, epoch: 1, run: 1 };
    let c = CheckpointView { id: CheckpointId([n as u8; 32]), token, holders: holders.to_vec(), branch: false };
    SessionView {
        id: sid(n),
        owner,
        epoch: 1,
        token,
        replicas: holders.to_vec(),
        copies: 2,
        profile: "v2".into(),
        memory_mib: 512,
        running: true,
        failed: false,
        checkpoints: if holders.is_empty() { vec![] } else { vec![c] },
    }
}
fn view(nodes: u64, sessions: Vec<SessionView>) -> View {
    View {
        members: (1..=nodes).map(|n| (n, member(n))).collect(),
        sessions: sessions.into_iter().map(|s| (s.id, s)).collect(),
        lease_ms: 3000,
        voters: 3,
    }
}
fn facts(sessions: u64, mem_free_mib: u64) -> FactsView {
    FactsView { sessions, mem_free_mib, ..FactsView::default() }
}
fn nodes(of: &[(u64, u64, u64)]) -> Input {
    Input::Nodes {
        held: of.iter().map(|(n, _, _)| *n).collect(),
        facts: of.iter().map(|(n, s, m)| (*n, facts(*s, *m))).collect(),
    }
}
fn leader(view: &View, of: &[(u64, u64, u64)]) -> Placer {
    let mut p = Placer::new();
    assert_eq!(p.step(0, view, Input::BecameLeader { term: 4 }), vec![]);
    assert_eq!(p.step(0, view, nodes(of)), vec![]);
    p
}
fn lapsed(node: u64) -> Input {
    Input::Lapsed { node, term: 4 }
}
fn assign(from: u64, cause: Cause, moves: &[(u64, u64, u64)]) -> Effect {
    let moves = moves.iter().map(|(s, to, e)| Move { session: sid(*s), to: *to, expected_epoch: *e }).collect();
    Effect::Assign { moves, from, cause, term: 4 }
}
fn started_elsewhere(v: &mut View, n: u64, to: u64) {
    let s = v.sessions.get_mut(&sid(n)).unwrap();
    (s.owner, s.epoch) = (to, s.epoch + 1);
}

#[test]
fn a_lapsed_nodes_session_goes_to_its_replica_however_busy_that_is() {
    let v = view(3, vec![session(1, 1, &[1, 3])]);
    let mut p = leader(&v, &[(2, 0, 9999), (3, 50, 2000)]);
    assert_eq!(p.step(10, &v, lapsed(1)), vec![assign(1, Cause::Lapsed, &[(1, 3, 1)])]);
    assert_eq!(p.step(20, &v, Input::Tick), vec![], "one proposal at a time");
    assert_eq!(p.step(10 + ASSIGN_PATIENCE_MS, &v, Input::Tick), vec![assign(1, Cause::Lapsed, &[(1, 3, 1)])]);
}

#[test]
fn each_rule_of_the_ranking() {
    /// What is special, the session, (node, load, free memory) of those that live, where it goes or why not.
    type Case = (&'static str, SessionView, Vec<(u64, u64, u64)>, Result<u64, &'static str>);
    let cases: Vec<Case> = vec![
        ("fewer sessions", session(1, 1, &[]), vec![(2, 5, 9000), (3, 1, 900)], Ok(3)),
        ("more free memory at equal load", session(1, 1, &[]), vec![(2, 1, 900), (3, 1, 9000)], Ok(3)),
        ("replica set without room", session(1, 1, &[1, 2]), vec![(2, 1, 100), (3, 9, 9000)], Ok(3)),
        ("nobody has room", session(1, 1, &[1, 2]), vec![(2, 1, 100)], Err("no live node has 512 MiB of memory free")),
        ("not back to the lost node", session(1, 1, &[1, 2]), vec![(1, 0, 9000)], Err("no live node has the CPU profile v2")),
        (
            "all copies are lost with the node",
            session(1, 1, &[1]),
            vec![(2, 0, 9000)],
            Err("all copies of its checkpoints are on node 1, which does not answer"),
        ),
        (
            "other CPUs only",
            SessionView { profile: "v4".into(), ..session(1, 1, &[1, 2]) },
            vec![(2, 0, 9000)],
            Err("no live node has the CPU profile v4"),
        ),
    ];
    for (what, s, of, want) in cases {
        let v = view(3, vec![s]);
        let mut p = leader(&v, &of);
        let got = p.step(10, &v, lapsed(1));
        match want {
            Ok(to) => assert_eq!(got, vec![assign(1, Cause::Lapsed, &[(1, to, 1)])], "{what}"),
            Err(why) => assert_eq!(got, vec![Effect::Waiting { session: sid(1), why: why.into() }], "{what}"),
        }
    }
}

#[test]
fn a_session_that_waits_is_told_once_and_placed_when_a_node_comes() {
    let v = view(3, vec![session(1, 1, &[1, 2])]);
    let mut p = leader(&v, &[]);
    let why = "no live node has the CPU profile v2".to_owned();
    assert_eq!(p.step(10, &v, lapsed(1)), vec![Effect::Waiting { session: sid(1), why }]);
    assert_eq!(p.step(3000, &v, Input::Tick), vec![]);
    assert_eq!(p.step(9000, &v, nodes(&[(2, 0, 9000)])), vec![assign(1, Cause::Lapsed, &[(1, 2, 1)])]);
}

#[test]
fn a_start_that_fails_is_tried_elsewhere_with_growing_waits_and_then_given_up() {
    let mut v = view(3, vec![session(1, 2, &[2, 3])]);
    let mut p = leader(&v, &[(1, 0, 9000), (2, 0, 9000), (3, 0, 9000)]);
    let fail = |epoch, node| Input::StartFailed { session: sid(1), epoch, node, reason: "no qemu".into() };
    let mut now = 100;
    let mut seen = vec![];
    for attempt in 1..START_ATTEMPTS_MAX {
        let (owner, epoch) = (v.sessions[&sid(1)].owner, v.sessions[&sid(1)].epoch);
        assert_eq!(p.step(now, &v, fail(epoch, owner)), vec![], "it waits first");
        assert_eq!(p.step(now, &v, fail(epoch, owner)), vec![], "said twice, counted once");
        now = p.wake_ms().expect("a back-off is running");
        let got = p.step(now, &v, Input::Tick);
        let [Effect::Assign { moves, cause: Cause::StartFailed, .. }] = &got[..] else { panic!("attempt {attempt}: {got:?}") };
        assert_ne!(moves[0].to, owner);
        seen.push(moves[0].to);
        started_elsewhere(&mut v, 1, moves[0].to);
    }
    assert_eq!(&seen[..2], [3, 1], "the replica first, then the rest");
    let (owner, epoch) = (v.sessions[&sid(1)].owner, v.sessions[&sid(1)].epoch);
    let got = p.step(now, &v, fail(epoch, owner));
    let reason = format!("it could not be started 6 times; last, node {owner}: no qemu");
    assert_eq!(got, vec![Effect::GiveUp { session: sid(1), expected_epoch: epoch, reason }]);
    assert!(now > 100 + 1000 + 2000 + 4000 + 8000, "the waits grow: it is {now}");
}

#[test]
fn failures_of_long_ago_and_of_other_epochs_do_not_count() {
    let v = view(3, vec![session(1, 2, &[2, 3])]);
    let mut p = leader(&v, &[(2, 0, 9000), (3, 0, 9000)]);
    let fail = |epoch, node| Input::StartFailed { session: sid(1), epoch, node, reason: "x".into() };
    assert_eq!(p.step(1, &v, fail(7, 2)), vec![]);
    assert_eq!(p.step(1, &v, fail(1, 3)), vec![]);
    assert!(!p.is_busy());
    assert_eq!(p.step(1, &v, fail(1, 2)), vec![]);
    assert!(p.is_busy());
    assert_eq!(p.step(2, &v, Input::Started { session: sid(1), epoch: 1 }), vec![]);
    assert!(!p.is_busy());
}

#[test]
fn a_node_that_returns_keeps_what_was_not_assigned() {
    let v = view(3, vec![session(1, 1, &[1, 3])]);
    let mut p = leader(&v, &[]);
    let _ = p.step(10, &v, lapsed(1));
    assert_eq!(p.step(20, &v, Input::Returning { node: 1 }), vec![]);
    assert_eq!(p.step(9000, &v, nodes(&[(3, 0, 9000)])), vec![]);
}

#[test]
fn a_lapse_of_another_term_places_nothing() {
    let v = view(3, vec![session(1, 1, &[1, 3])]);
    let mut p = leader(&v, &[(3, 0, 9000)]);
    assert_eq!(p.step(10, &v, Input::Lapsed { node: 1, term: 3 }), vec![]);
    assert_eq!(p.step(10, &v, Input::Deposed), vec![]);
    assert_eq!(p.step(10, &v, lapsed(1)), vec![]);
}

#[test]
fn a_draining_node_hands_over_a_few_at_a_time() {
    let mut v = view(3, (1..=6).map(|n| session(n, 1, &[1, 2])).collect());
    v.members.get_mut(&1).unwrap().standing = Standing::Draining;
    let mut p = Placer::new();
    let _ = p.step(0, &v, Input::BecameLeader { term: 4 });
    let got = p.step(0, &v, nodes(&[(1, 6, 0), (2, 0, 9000), (3, 0, 9000)]));
    let want: Vec<Effect> = (1..=4).map(|n| Effect::HandOver { session: sid(n), from: 1, to: 2, expected_epoch: 1 }).collect();
    assert_eq!(got, want);
    started_elsewhere(&mut v, 2, 2);
    let next = Effect::HandOver { session: sid(5), from: 1, to: 2, expected_epoch: 1 };
    assert_eq!(p.step(50, &v, Input::Tick), vec![next]);
    assert_eq!(
        p.step(60, &v, Input::NotAssigned { session: sid(3), expected_epoch: 1 }),
        vec![Effect::HandOver { session: sid(6), from: 1, to: 2, expected_epoch: 1 }]
    );
    // The node dies while it drains: the rest goes the other way.
    let got = p.step(61 + HANDOVER_PATIENCE_MS, &v, lapsed(1));
    let [Effect::Assign { moves, .. }] = &got[..] else { panic!("{got:?}") };
    assert_eq!(moves.len(), 5);
}

#[test]
fn five_hundred_sessions_are_spread_in_one_entry() {
    let v = view(100, (0..10_000).map(|n| session(n, n % 100 + 1, &[])).collect());
    let of: Vec<(u64, u64, u64)> = (2..=100).map(|n| (n, 100, 100_000)).collect();
    let mut p = leader(&v, &of);
    let got = p.step(10, &v, lapsed(1));
    let [Effect::Assign { moves, .. }] = &got[..] else { panic!("{} effects", got.len()) };
    let mut per: BTreeMap<u64, u32> = BTreeMap::new();
    moves.iter().for_each(|m| *per.entry(m.to).or_default() += 1);
    assert_eq!(moves.len(), 100);
    assert!(per.values().all(|n| *n <= 2), "{per:?}");
}

/// What [`View::within`] leaves of a view.
fn within(v: &View, p: &Placer, input: &Input) -> View {
    let scope = p.scope(v.with_standing(Standing::Draining), input);
    let mut v = v.clone();
    v.sessions.retain(|id, s| scope.owners.contains(&s.owner) || scope.sessions.contains(id));
    v
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
    /// Whatever happens: only live, active, compatible nodes other than the owner; one proposal per epoch at a time; and
    /// once nodes are there and nothing fails, every session of a lapsed node is placed. And a placer that sees no more than
    /// what it asks for decides the same.
    #[test]
    fn placement_is_safe_and_ends(
        owners in prop::collection::vec(1u64..6, 1..30),
        events in prop::collection::vec((0u8..8, 1u64..6, 0u64..30, 1u64..4000), 0..60),
    ) {
        let sessions = owners.iter().enumerate().map(|(n, o)| session(n as u64, *o, &[*o, *o % 5 + 1])).collect();
        let mut v = view(5, sessions);
        let (mut p, mut narrow) = (leader(&v, &[]), leader(&v, &[]));
        let mut now = 0;
        let mut lapsed_now: BTreeSet<u64> = BTreeSet::new();
        let mut held: BTreeSet<u64> = BTreeSet::new();
        let mut open: BTreeMap<SessionId, (u64, u64)> = BTreeMap::new();
        let everybody = (0..5).map(|n| (7u8, n, 0, 5000)).chain((0..40).map(|_| (6, 0, 0, 13_000)));
        let events: Vec<_> = events.into_iter().chain(everybody).collect();
        for (kind, node, n, wait) in events {
            now += wait;
            let (id, epoch_owner) = (sid(n), v.sessions.get(&sid(n)).map(|s| (s.epoch, s.owner)));
            let input = match (kind, epoch_owner) {
                (0, _) => { held.insert(node); lapsed_now.remove(&node); Input::Returning { node } }
                (1, _) => { held.remove(&node); lapsed_now.insert(node); lapsed(node) }
                (2, Some((epoch, owner))) => Input::StartFailed { session: id, epoch, node: owner, reason: "x".into() },
                (3, Some((epoch, _))) => Input::NotAssigned { session: id, expected_epoch: epoch },
                (4, Some((epoch, _))) => Input::Started { session: id, epoch },
                (5, Some(_)) => {
                    if let Some((epoch, to)) = open.get(&id).copied() {
                        let s = v.sessions.get_mut(&id).unwrap();
                        if s.epoch == epoch { (s.owner, s.epoch) = (to, epoch + 1); }
                    }
                    Input::Tick
                }
                (7, _) => { held = (2..=5).collect(); lapsed_now = BTreeSet::from([1]); lapsed(1) }
                _ => Input::Tick,
            };
            let of: Vec<_> = held.iter().map(|n| (*n, 0, 1_000_000)).collect();
            let mut effects = Vec::new();
            for input in [nodes(&of), input] {
                let decided = p.step(now, &v, input.clone());
                let seen = within(&v, &narrow, &input);
                prop_assert_eq!(&narrow.step(now, &seen, input), &decided);
                effects.extend(decided);
            }
            for e in effects {
                match e {
                    Effect::Assign { moves, from, term, .. } => {
                        prop_assert_eq!(term, 4);
                        for m in moves {
                            prop_assert!(m.to != from && held.contains(&m.to));
                            prop_assert_eq!(v.sessions[&m.session].epoch, m.expected_epoch);
                            open.insert(m.session, (m.expected_epoch, m.to));
                            // In the last part everything that is proposed is applied.
                            if kind >= 6 {
                                let s = v.sessions.get_mut(&m.session).unwrap();
                                (s.owner, s.epoch) = (m.to, s.epoch + 1);
                            }
                        }
                    }
                    Effect::GiveUp { session, expected_epoch, .. } => {
                        prop_assert_eq!(v.sessions[&session].epoch, expected_epoch);
                        v.sessions.get_mut(&session).unwrap().failed = true;
                    }
                    Effect::HandOver { .. } => prop_assert!(false, "nobody drains"),
                    Effect::Waiting { .. } => {}
                }
            }
        }
        for s in v.sessions.values() {
            let only_there = s.checkpoints.iter().all(|c| c.holders.iter().all(|h| *h == s.owner));
            prop_assert!(s.failed || only_there || !lapsed_now.contains(&s.owner), "{s:?} stays on a lapsed node");
        }
    }
}
