//! The granter, step by step.

use super::*;

const L: u64 = 3000;
const WHOLE: u64 = 3300;

fn members(of: &[(u64, u64)]) -> Input {
    Input::Members(of.iter().map(|(n, incarnation)| (*n, Tracked { incarnation: *incarnation, admitted: true })).collect())
}
fn ask(node: u64, incarnation: u64, request: u64) -> Input {
    Input::Renewal { node, incarnation, request }
}
fn done(round: u64, index: u64) -> Input {
    Input::RoundDone { round, result: Some((1, index)) }
}
fn failed(round: u64) -> Input {
    Input::RoundDone { round, result: None }
}
fn start(round: u64) -> Effect {
    Effect::StartRound { round }
}
fn granted(request: u64, index: u64) -> Effect {
    Effect::Answer { request, answer: Answer::Granted { term: 1, lease_ms: L, index } }
}
fn refused(request: u64, term: u64, reason: Reason) -> Effect {
    Effect::Answer { request, answer: Answer::Refused { term, reason } }
}
fn lapse(node: u64) -> Effect {
    Effect::Lapse { node, term: 1 }
}

/// A leader since 0 in term 1 of nodes 1 and 2, whose instances are 10 and 20, and then the table.
fn check(table: Vec<(u64, Input, Vec<Effect>)>) -> Granter {
    let mut g = Granter { spaced: false, ..Granter::new(L) };
    assert_eq!(g.step(0, members(&[(1, 10), (2, 20)])), vec![]);
    assert_eq!(g.step(0, Input::BecameLeader { term: 1 }), vec![]);
    for (row, (now, input, want)) in table.into_iter().enumerate() {
        assert_eq!(g.step(now, input.clone()), want, "row {row}: at {now} {input:?}");
    }
    g
}

#[test]
fn a_round_begins_after_the_renewals_that_it_answers() {
    let g = check(vec![
        (100, ask(1, 10, 1), vec![start(1)]),
        // Arrives while the round runs: it must wait for the next one.
        (101, ask(2, 20, 2), vec![]),
        (105, done(1, 7), vec![granted(1, 7), start(2)]),
        (106, done(1, 7), vec![]),
        (110, done(2, 8), vec![granted(2, 8)]),
    ]);
    assert_eq!(g.held(111).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(g.wake_ms(), Some(105 + WHOLE));
}

#[test]
fn rounds_keep_a_distance_and_are_shared_by_what_arrives_meanwhile() {
    let mut g = Granter { spaced: true, ..check(vec![]) };
    assert_eq!(g.step(100, ask(1, 10, 1)), vec![start(1)]);
    assert_eq!(g.step(102, done(1, 7)), vec![granted(1, 7)]);
    assert_eq!(g.step(103, ask(2, 20, 2)), vec![]);
    assert_eq!(g.wake_ms(), Some(150));
    assert_eq!(g.step(149, ask(1, 10, 3)), vec![]);
    assert_eq!(g.step(150, Input::Tick), vec![start(2)]);
    assert_eq!(g.step(151, done(2, 8)), vec![granted(2, 8), granted(3, 8)]);
}

#[test]
fn without_a_majority_nothing_is_granted_and_nothing_lapses() {
    check(vec![
        (100, ask(1, 10, 1), vec![start(1)]),
        (600, failed(1), vec![refused(1, 1, Reason::NoQuorum)]),
        (WHOLE, Input::Tick, vec![start(2)]),
        (WHOLE + 100, failed(2), vec![]),
        (WHOLE + 200, Input::Tick, vec![]),
        (WHOLE + 600, Input::Tick, vec![start(3)]),
        // Nobody says how the round ended: given up after a lease.
        (WHOLE + 600 + L, Input::Tick, vec![]),
        (2 * L + WHOLE, done(3, 1), vec![start(4)]),
    ]);
}

#[test]
fn a_new_leader_waits_a_whole_lease_and_margin_and_confirms_before_it_declares_a_lapse() {
    check(vec![
        (WHOLE - 1, Input::Tick, vec![]),
        (WHOLE, Input::Tick, vec![start(1)]),
        (WHOLE + 3, done(1, 1), vec![lapse(1), lapse(2)]),
        (WHOLE + 9, Input::Tick, vec![]),
    ]);
}

#[test]
fn a_lapse_needs_a_round_that_began_after_the_end() {
    check(vec![
        (WHOLE - 10, ask(2, 20, 1), vec![start(1)]),
        // Node 1 ended while the round ran.
        (WHOLE + 5, done(1, 1), vec![granted(1, 1), start(2)]),
        (WHOLE + 9, done(2, 1), vec![lapse(1)]),
    ]);
}

#[test]
fn a_renewal_during_the_confirming_round_comes_too_late_and_is_regranted() {
    check(vec![
        (3000, ask(2, 20, 1), vec![start(1)]),
        (3001, done(1, 4), vec![granted(1, 4)]),
        (WHOLE, Input::Tick, vec![start(2)]),
        (WHOLE + 1, ask(1, 10, 2), vec![]),
        (WHOLE + 2, done(2, 5), vec![lapse(1), start(3)]),
        (
            WHOLE + 3,
            done(3, 6),
            vec![Effect::Returning { node: 1 }, Effect::Regrant { node: 1, incarnation: 10, regrant: 1, term: 1 }],
        ),
        (WHOLE + 4, Input::RegrantDone { node: 1, regrant: 1, index: Some(2) }, vec![start(4)]),
        (WHOLE + 5, done(4, 9), vec![granted(2, 9)]),
    ]);
}

#[test]
fn a_round_decided_before_the_regrant_does_not_hide_what_was_assigned() {
    check(vec![
        (WHOLE, Input::Tick, vec![start(1)]),
        (WHOLE, done(1, 5), vec![lapse(1), lapse(2)]),
        (4000, ask(1, 10, 1), vec![start(2)]),
        (
            4001,
            done(2, 5),
            vec![Effect::Returning { node: 1 }, Effect::Regrant { node: 1, incarnation: 10, regrant: 1, term: 1 }],
        ),
        (4002, ask(1, 10, 2), vec![start(3)]),
        // Its assignments were at 6 to 8; round 3 was decided before them.
        (4003, Input::RegrantDone { node: 1, regrant: 1, index: Some(9) }, vec![]),
        (4004, done(3, 5), vec![granted(2, 9), start(4)]),
        (4005, done(4, 9), vec![granted(1, 9)]),
    ]);
}

#[test]
fn a_regrant_that_fails_leaves_the_node_lapsed() {
    check(vec![
        (WHOLE, Input::Tick, vec![start(1)]),
        (WHOLE, done(1, 5), vec![lapse(1), lapse(2)]),
        (4000, ask(1, 10, 1), vec![start(2)]),
        (
            4001,
            done(2, 5),
            vec![Effect::Returning { node: 1 }, Effect::Regrant { node: 1, incarnation: 10, regrant: 1, term: 1 }],
        ),
        // It asks again while the re-grant is under way: one request is kept, each is answered once.
        (4500, ask(1, 10, 2), vec![start(3)]),
        (4501, done(3, 5), vec![refused(1, 1, Reason::Busy)]),
        (5000, Input::RegrantDone { node: 1, regrant: 1, index: None }, vec![lapse(1), refused(2, 1, Reason::NoQuorum)]),
    ]);
}

#[test]
fn of_two_instances_with_one_key_the_second_is_refused_for_as_long_as_the_first_renews() {
    let other = |request, wait_ms| refused(request, 1, Reason::OtherInstance { wait_ms });
    check(vec![
        (10, ask(1, 10, 1), vec![start(1)]),
        (10, done(1, 1), vec![granted(1, 1)]),
        (300, ask(1, 11, 2), vec![start(2)]),
        (300, done(2, 1), vec![other(2, WHOLE - 290)]),
        (510, ask(1, 10, 3), vec![start(3)]),
        (510, done(3, 1), vec![granted(3, 1)]),
        (800, ask(1, 11, 4), vec![start(4)]),
        (800, done(4, 1), vec![other(4, WHOLE - 290)]),
    ]);
}

#[test]
fn a_restarted_daemon_takes_over_its_former_lease_without_a_lapse() {
    let end = 10 + WHOLE;
    check(vec![
        (10, ask(1, 10, 1), vec![start(1)]),
        (10, done(1, 1), vec![granted(1, 1)]),
        (3000, ask(2, 20, 2), vec![start(2)]),
        (3000, done(2, 1), vec![granted(2, 1)]),
        (end - 100, ask(1, 11, 3), vec![start(3)]),
        (end - 100, done(3, 1), vec![refused(3, 1, Reason::OtherInstance { wait_ms: 100 })]),
        // The former lease ends; the new instance asked a moment ago, so there is no lapse.
        (end, Input::Tick, vec![start(4)]),
        (end, done(4, 1), vec![]),
        (end + 1, Input::Tick, vec![]),
        (end + 400, ask(1, 11, 4), vec![start(5)]),
        (
            end + 400,
            done(5, 1),
            vec![Effect::Returning { node: 1 }, Effect::Regrant { node: 1, incarnation: 11, regrant: 1, term: 1 }],
        ),
        (end + 410, Input::RegrantDone { node: 1, regrant: 1, index: Some(2) }, vec![start(6)]),
        (end + 420, done(6, 3), vec![granted(4, 3)]),
        // The former instance was only frozen: now it is the second one.
        (end + 500, ask(1, 10, 5), vec![start(7)]),
        (end + 500, done(7, 3), vec![refused(5, 1, Reason::OtherInstance { wait_ms: WHOLE - 80 })]),
    ]);
}

#[test]
fn a_claim_that_is_not_repeated_does_not_hold_up_the_lapse_for_long() {
    check(vec![
        (WHOLE - 1, ask(2, 20, 1), vec![start(1)]),
        (WHOLE - 1, done(1, 1), vec![granted(1, 1)]),
        (WHOLE - 1, ask(1, 11, 2), vec![start(2)]),
        (WHOLE - 1, done(2, 1), vec![refused(2, 1, Reason::OtherInstance { wait_ms: 1 })]),
        (WHOLE, Input::Tick, vec![start(3)]),
        (WHOLE, done(3, 1), vec![]),
        (WHOLE - 1 + L / 2, Input::Tick, vec![start(4)]),
        (WHOLE + L / 2, done(4, 1), vec![lapse(1)]),
    ]);
}

#[test]
fn a_leader_that_was_deposed_and_elected_again_starts_anew() {
    check(vec![
        (3000, ask(1, 10, 1), vec![start(1)]),
        (3010, ask(2, 20, 2), vec![]),
        (
            3020,
            Input::RoundDone { round: 1, result: Some((3, 9)) },
            vec![refused(1, 1, Reason::NotLeader), refused(2, 1, Reason::NotLeader)],
        ),
        // Not at 3,300, which was due in term 1.
        (WHOLE, Input::Tick, vec![]),
        (3020 + WHOLE, Input::Tick, vec![start(2)]),
        (
            3020 + WHOLE,
            Input::RoundDone { round: 2, result: Some((3, 9)) },
            vec![Effect::Lapse { node: 1, term: 3 }, Effect::Lapse { node: 2, term: 3 }],
        ),
    ]);
}

#[test]
fn who_does_not_lead_answers_so_and_strangers_get_nothing() {
    check(vec![
        (5, ask(9, 1, 1), vec![start(1)]),
        (6, done(1, 1), vec![refused(1, 1, Reason::NotMember)]),
        (7, ask(1, 10, 2), vec![start(2)]),
        (8, Input::Deposed, vec![refused(2, 1, Reason::NotLeader)]),
        (9, ask(1, 10, 3), vec![refused(3, 0, Reason::NotLeader)]),
        (10, done(2, 1), vec![]),
        (100_000, Input::Tick, vec![]),
    ]);
}

#[test]
fn a_removed_node_gets_nothing_and_its_lease_is_waited_for() {
    let removed = |admitted| {
        let two = Tracked { incarnation: 20, admitted };
        Input::Members(BTreeMap::from([(1, Tracked { incarnation: 10, admitted: true }), (2, two)]))
    };
    check(vec![
        (100, ask(2, 20, 1), vec![start(1)]),
        (100, ask(1, 10, 2), vec![]),
        (100, done(1, 1), vec![granted(1, 1), start(2)]),
        (100, done(2, 1), vec![granted(2, 1)]),
        (200, removed(false), vec![]),
        (500, ask(2, 20, 3), vec![start(3)]),
        (500, done(3, 1), vec![refused(3, 1, Reason::NotMember)]),
        (3000, ask(1, 10, 4), vec![start(4)]),
        (3000, done(4, 1), vec![granted(4, 1)]),
        // Even if the record of it goes.
        (3001, members(&[(1, 10)]), vec![]),
        (100 + WHOLE, Input::Tick, vec![start(5)]),
        (100 + WHOLE, done(5, 1), vec![lapse(2)]),
        (101 + WHOLE, Input::Tick, vec![]),
    ]);
}

#[test]
fn what_waits_is_bounded() {
    let mut g = check(vec![(0, ask(1, 10, 0), vec![start(1)])]);
    for request in 1..WAITING_MAX as u64 {
        assert_eq!(g.step(1, ask(1, 10, request)), vec![]);
    }
    assert_eq!(g.step(1, ask(1, 10, 99_999)), vec![refused(99_999, 1, Reason::Busy)]);
}
