//! The session machine: inputs to effects, through one `check` helper.

use super::{Checkpointed, Effect, Head, HeadKind, Input, Machine, Now, Policy, Request};
use ks_proto::api::{ApiError, SessionState};
use ks_proto::{CheckpointId, RunToken};
use proptest::prelude::*;

pub(super) fn cid(n: u8) -> CheckpointId {
    CheckpointId([n; 32])
}
pub(super) fn token(run: u64) -> RunToken {
    RunToken { generation: 0, epoch: 1, run }
}
pub(super) fn head(n: u8, kind: HeadKind) -> Head {
    Head { id: cid(n), kind }
}
pub(super) fn error(code: &str) -> ApiError {
    ApiError::new(code, "w", "y", "n")
}
pub(super) fn stored(run: u64, n: u8) -> Input {
    Input::Stored { token: token(run), checkpoint: Checkpointed { number: u64::from(n), id: cid(n) } }
}
pub(super) fn demand(freeze: bool) -> Request {
    Request::Checkpoint { reason: "demand".into(), message: String::new(), pin: false, freeze }
}

/// One effect in a word or two; events are left out.
pub(super) fn word(e: &Effect) -> Option<String> {
    Some(match e {
        Effect::EndProcess => "end".into(),
        Effect::KillProcess => "kill".into(),
        Effect::FindOlder { than, skipped } => format!("older:{}-{}", than.0[0], skipped.len()),
        Effect::BeginRun { from } => format!("begin:{}", from.0[0]),
        Effect::Launch { token, from, .. } => format!("launch:{}:{}:{:?}", token.run, from.id.0[0], from.kind),
        Effect::TakeCheckpoint { job, .. } => {
            format!("take:{}{}{}", job.reason, if job.freeze { "+freeze" } else { "" }, if job.hold { "+hold" } else { "" })
        }
        Effect::GoOn => "go-on".into(),
        Effect::SetWanted { wanted, .. } => format!("want:{wanted:?}"),
        Effect::NoteLost { .. } => "lost".into(),
        Effect::NoteBack { from } => format!("back:{}", from.0[0]),
        Effect::Event { .. } => return None,
        Effect::Reply { ask, result: Ok(super::Answer::Done) } => format!("ok{ask}"),
        Effect::Reply { ask, result: Ok(super::Answer::Checkpoint(c)) } => format!("ok{ask}:c{}", c.number),
        Effect::Reply { ask, result: Err(e) } => format!("no{ask}:{}", e.code),
        Effect::Show { state, .. } => format!("[{state}]"),
        Effect::Forget => "forget".into(),
        Effect::LetGo => "letgo".into(),
    })
}

/// Feeds inputs at their times (ms) and compares the effects of each.
pub(super) fn check_from(mut m: Machine, steps: Vec<(u64, Input, &str)>) -> Machine {
    for (n, (at, input, want)) in steps.into_iter().enumerate() {
        let now = Now { mono_ms: at, unix_ms: 1_000_000 + at };
        let got: Vec<String> = m.step(now, input.clone()).iter().filter_map(word).collect();
        assert_eq!(got.join(" "), want, "step {n}: {input:?}");
    }
    m
}

pub(super) fn policy() -> Policy {
    Policy { cadence_ms: 60_000, idle_park_ms: 0, attempts_max: 3, backoff_ms: 100, stable_ms: 10_000 }
}
pub(super) fn fresh() -> Machine {
    Machine::new(policy(), SessionState::Creating, token(0), head(9, HeadKind::Golden))
}
/// A machine that runs as run 1 from its own checkpoint 1, since time 0.
pub(super) fn running() -> Machine {
    let m = Machine::new(policy(), SessionState::Starting, token(0), head(1, HeadKind::Own));
    check_from(
        m,
        vec![
            (0, Input::Begin, "[starting] end"),
            (0, Input::ProcessGone, "begin:1"),
            (0, Input::RunBegan { token: token(1) }, "launch:1:1:Own"),
            (0, Input::Ready { token: token(1) }, "back:1 [running]"),
        ],
    )
}

#[test]
fn a_new_session_starts_from_the_golden_checkpoint_in_three_steps() {
    check_from(
        fresh(),
        vec![
            (0, Input::Begin, "[creating] end"),
            (1, Input::Ask(1, Request::AwaitRunning), ""),
            (2, Input::ProcessGone, "begin:9"),
            (3, Input::RunBegan { token: token(1) }, "launch:1:9:Golden"),
            (4, Input::Ready { token: token(1) }, "back:9 [running] ok1"),
            (5, Input::Ask(2, demand(false)), "take:demand"),
            (6, stored(1, 1), "ok2:c1"),
        ],
    );
}

#[test]
fn a_lost_vm_comes_back_by_itself_under_a_new_token() {
    check_from(
        running(),
        vec![
            (20_000, Input::Lost { token: token(1), cause: "gone".into() }, "lost [recovering] end"),
            (20_001, Input::Lost { token: token(1), cause: "again".into() }, ""),
            (20_002, Input::ProcessGone, "begin:1"),
            (20_003, Input::RunBegan { token: token(2) }, "launch:2:1:Own"),
            (20_004, Input::Ready { token: token(1) }, ""),
            (20_005, Input::Ready { token: token(2) }, "back:1 [running]"),
        ],
    );
}

#[test]
fn a_kill_is_recorded_before_it_is_done_and_answered_when_the_session_is_back() {
    check_from(
        running(),
        vec![
            (1, Input::Ask(1, Request::Kill), "lost kill lost [recovering] end"),
            (2, Input::Ask(2, Request::Kill), "no2:busy"),
            (3, Input::ProcessGone, "begin:1"),
            (4, Input::RunBegan { token: token(2) }, "launch:2:1:Own"),
            (5, Input::Ready { token: token(2) }, "back:1 [running] ok1"),
        ],
    );
    let m = check_from(
        fresh(),
        vec![
            (0, Input::Begin, "[creating] end"),
            (0, Input::ProcessGone, "begin:9"),
            (0, Input::RunBegan { token: token(1) }, "launch:1:9:Golden"),
            (0, Input::Ready { token: token(1) }, "back:9 [running]"),
        ],
    );
    check_from(m, vec![(1, Input::Ask(1, Request::Kill), "no1:never-checkpointed")]);
}

#[test]
fn without_a_checkpoint_a_lost_vm_is_a_failure_and_not_a_blank_session() {
    let m = check_from(
        fresh(),
        vec![
            (0, Input::Begin, "[creating] end"),
            (0, Input::ProcessGone, "begin:9"),
            (0, Input::RunBegan { token: token(1) }, "launch:1:9:Golden"),
            (0, Input::Ready { token: token(1) }, "back:9 [running]"),
            (1, Input::Lost { token: token(1), cause: "gone".into() }, "lost end"),
            (2, Input::ProcessGone, "want:Failed [failed]"),
        ],
    );
    assert_eq!(m.state(), SessionState::Failed);
}

#[test]
fn while_the_node_looks_for_a_live_vm_nothing_ends_it_and_callers_wait() {
    let looking = || Machine::new(policy(), SessionState::Starting, token(4), head(1, HeadKind::Own));
    check_from(
        looking(),
        vec![
            (0, Input::Ask(1, Request::AwaitRunning), ""),
            (0, Input::Ask(2, demand(false)), ""),
            (0, Input::Ask(3, Request::Park), "no3:busy"),
            (0, Input::Ask(4, Request::Kill), "no4:busy"),
            (1, Input::Adopted, "[running] ok1 take:demand"),
            (2, Input::Adopted, ""),
            (3, stored(4, 2), "ok2:c2"),
        ],
    );
    check_from(looking(), vec![(1, Input::Adopted, "[running] take:cadence")]);
    check_from(
        looking(),
        vec![
            (0, Input::Ask(1, Request::AwaitRunning), ""),
            (1, Input::Lost { token: token(4), cause: "gone".into() }, "lost [recovering] end"),
            (2, Input::ProcessGone, "begin:1"),
            (3, Input::RunBegan { token: token(5) }, "launch:5:1:Own"),
            (4, Input::Ready { token: token(5) }, "back:1 [running] ok1"),
        ],
    );
}

#[test]
fn a_crash_loop_ends_in_failed_with_backoff_between() {
    let fail = |run, retry| Input::StartFailed { token: token(run), error: error("internal"), retry };
    let m = check_from(
        running(),
        vec![
            (20_000, Input::Lost { token: token(1), cause: "gone".into() }, "lost [recovering] end"),
            (20_000, Input::ProcessGone, "begin:1"),
            (20_000, Input::RunBegan { token: token(2) }, "launch:2:1:Own"),
            (20_000, fail(2, true), "[recovering] end"),
            (20_000, Input::ProcessGone, ""),
            (20_050, Input::Tick, ""),
            (20_100, Input::Tick, "[recovering] end"),
            (20_100, Input::ProcessGone, "begin:1"),
            (20_100, Input::RunBegan { token: token(3) }, "launch:3:1:Own"),
            (20_100, fail(3, true), "[recovering] end"),
            (20_100, Input::ProcessGone, ""),
            (20_300, Input::Tick, "[recovering] end"),
            (20_300, Input::ProcessGone, "begin:1"),
            (20_300, Input::RunBegan { token: token(4) }, "launch:4:1:Own"),
            (20_300, Input::Ask(7, Request::AwaitRunning), ""),
            (20_300, fail(4, true), "end"),
            (20_300, Input::ProcessGone, "older:1-0"),
            (20_300, older("c1", None), "want:Failed [failed] no7:internal"),
            (20_400, Input::Ask(8, Request::Wake), "want:Running [starting] end"),
            (20_400, Input::ProcessGone, "begin:1"),
            (20_400, Input::RunBegan { token: token(5) }, "launch:5:1:Own"),
            (20_400, fail(5, false), "end"),
            (20_400, Input::ProcessGone, "older:1-0"),
            (20_400, older("c1", None), "want:Failed [failed] no8:internal"),
        ],
    );
    assert_eq!(m.deadline(), None);
    let mut m = running();
    for n in 1..=2u64 {
        let at = n * 1000;
        let last = Input::Ready { token: token(n + 1) };
        m = check_from(
            m,
            vec![
                (at, Input::Lost { token: token(n), cause: "gone".into() }, "lost [recovering] end"),
                (at, Input::ProcessGone, "begin:1"),
                (at, Input::RunBegan { token: token(n + 1) }, &format!("launch:{}:1:Own", n + 1)),
                (at, last, "back:1 [running]"),
            ],
        );
    }
    check_from(
        m,
        vec![
            (3000, Input::Lost { token: token(3), cause: "gone".into() }, "lost end"),
            (3000, Input::ProcessGone, "older:1-0"),
            (3000, older("c1", None), "want:Failed [failed]"),
        ],
    );
}

#[test]
fn an_old_process_that_stays_forbids_a_new_run() {
    let m = check_from(
        running(),
        vec![
            (20_000, Input::Lost { token: token(1), cause: "gone".into() }, "lost [recovering] end"),
            (20_001, Input::ProcessStays { why: "pid 7".into() }, "want:Failed [failed]"),
        ],
    );
    assert_eq!(m.state(), SessionState::Failed);
}

#[test]
fn restore_takes_a_checkpoint_first_and_then_starts_from_the_wanted_one() {
    let restore = |ask| Input::Ask(ask, Request::Restore { to: head(3, HeadKind::Own), verify_eager: false });
    check_from(
        running(),
        vec![
            (1, restore(1), "take:demand+hold"),
            (2, restore(2), "no2:busy"),
            (3, stored(1, 8), "want:Running [starting] end"),
            (4, Input::ProcessGone, "begin:3"),
            (5, Input::RunBegan { token: token(2) }, "launch:2:3:Own"),
            (6, Input::Ready { token: token(2) }, "back:3 [running] ok1"),
            // A crash now goes back to what was restored, not to the newest number.
            (20_000, Input::Lost { token: token(2), cause: "gone".into() }, "lost [recovering] end"),
            (20_000, Input::ProcessGone, "begin:3"),
        ],
    );
    check_from(
        running(),
        vec![
            (1, restore(1), "take:demand+hold"),
            (2, Input::NotStored { token: token(1), error: error("disk-full") }, "no1:disk-full"),
            (3, Input::Ask(4, Request::AwaitRunning), "ok4"),
        ],
    );
}

#[test]
fn park_stores_first_and_whoever_comes_wakes_it() {
    check_from(
        running(),
        vec![
            (1, Input::Ask(1, Request::Park), "take:park+hold"),
            (2, Input::Ask(2, Request::Park), ""),
            (3, stored(1, 2), "want:Parked end"),
            (4, Input::ProcessGone, "want:Parked [parked] ok1 ok2"),
            (5, Input::Ask(3, demand(false)), "no3:busy"),
            (6, Input::Ask(4, Request::AwaitRunning), "want:Running [starting] end"),
            (7, Input::ProcessGone, "begin:2"),
            (8, Input::RunBegan { token: token(2) }, "launch:2:2:Own"),
            (9, Input::Ready { token: token(2) }, "back:2 [running] ok4"),
            (10, Input::Ask(5, Request::Stop), "take:stop+hold"),
            (11, Input::NotStored { token: token(2), error: error("disk-full") }, "no5:disk-full"),
        ],
    );
    // Somebody who comes while it is being parked gets it back.
    check_from(
        running(),
        vec![
            (1, Input::Ask(1, Request::Park), "take:park+hold"),
            (2, stored(1, 2), "want:Parked end"),
            (3, Input::Ask(2, Request::AwaitRunning), ""),
            (4, Input::ProcessGone, "want:Parked [parked] ok1 want:Running [starting] end"),
        ],
    );
}

#[test]
fn requests_during_a_checkpoint_are_served_together_by_the_next() {
    check_from(
        running(),
        vec![
            (1, Input::Ask(1, demand(false)), "take:demand"),
            (2, Input::Ask(2, demand(false)), ""),
            (3, Input::Ask(3, demand(true)), ""),
            (4, stored(1, 2), "ok1:c2 take:demand+freeze"),
            (5, stored(1, 3), "ok2:c3 ok3:c3"),
            (6, stored(1, 3), ""),
        ],
    );
}

#[test]
fn a_checkpoint_that_a_crash_cut_off_is_absent_for_its_caller() {
    check_from(
        running(),
        vec![
            (1, Input::Ask(1, demand(false)), "take:demand"),
            (20_000, Input::Lost { token: token(1), cause: "gone".into() }, "lost no1:busy [recovering] end"),
            (20_001, stored(1, 2), ""),
            (20_002, Input::ProcessGone, "begin:1"),
        ],
    );
}

#[test]
fn a_bought_call_is_followed_by_a_checkpoint_but_not_more_often_than_every_five_seconds() {
    let m = check_from(
        running(),
        vec![
            (4_999, Input::Bought, ""),
            (5_000, Input::Tick, "take:call"),
            // These came while that one is being stored: its instant may have been before them.
            (5_100, Input::Bought, ""),
            (5_200, Input::Bought, ""),
            (5_300, stored(1, 2), ""),
            (9_999, Input::Tick, ""),
            (10_000, Input::Tick, "take:call"),
            (10_100, stored(1, 3), ""),
            (20_000, Input::Bought, "take:call"),
            (20_100, Input::NotStored { token: token(1), error: error("disk-full") }, ""),
            (24_000, Input::Bought, ""),
            // What a person asks for serves it too.
            (24_500, Input::Ask(1, demand(false)), "take:demand"),
            (24_600, stored(1, 4), "ok1:c4"),
            (60_000, Input::Tick, ""),
        ],
    );
    assert_eq!(m.deadline(), Some(84_500), "the cadence goes on from the last one");
    // Not where no checkpoint is taken by itself, and not of a run that is over.
    let off = Input::Policy { cadence_ms: 0, idle_park_ms: 0 };
    let m = check_from(running(), vec![(1, off, ""), (9_000, Input::Bought, ""), (90_000, Input::Tick, "")]);
    assert_eq!(m.deadline(), None);
    check_from(fresh(), vec![(1, Input::Bought, ""), (90_000, Input::Tick, "")]);
}

#[test]
fn cadence_and_idle_follow_their_timers() {
    let m =
        check_from(running(), vec![(59_999, Input::Tick, ""), (60_000, Input::Tick, "take:cadence"), (60_500, stored(1, 2), "")]);
    assert_eq!(m.deadline(), Some(120_000));
    let idle = Input::Policy { cadence_ms: 0, idle_park_ms: 5_000 };
    let m = check_from(m, vec![(61_000, idle, ""), (62_000, Input::Activity, ""), (66_999, Input::Tick, "")]);
    assert_eq!(m.deadline(), Some(67_000));
    check_from(
        m,
        vec![
            (67_000, Input::Tick, "take:park+hold"),
            // Idle only: whoever comes now keeps it awake.
            (67_001, Input::Ask(1, Request::AwaitRunning), "ok1"),
            (67_002, stored(1, 3), "go-on"),
            (72_001, Input::Tick, "take:park+hold"),
            (72_002, stored(1, 4), "want:Parked end"),
            (72_003, Input::ProcessGone, "want:Parked [parked]"),
        ],
    );
}

#[test]
fn removal_refuses_everybody_else_and_forgets_once_the_process_is_dead() {
    check_from(
        running(),
        vec![
            (1, Input::Ask(1, demand(false)), "take:demand"),
            (2, Input::Ask(2, Request::Remove), "no1:busy end"),
            (3, Input::Ask(3, Request::AwaitRunning), "no3:not-found"),
            (4, Input::ProcessGone, "forget ok2"),
        ],
    );
}

/// The host found this checkpoint recorded once the run's processes were dead.
fn committed(run: u64, n: u8) -> Input {
    let Input::Stored { token, checkpoint } = stored(run, n) else { unreachable!("it is one") };
    Input::Committed { token, checkpoint }
}

#[test]
fn what_was_recorded_before_the_vm_died_is_gone_on_from() {
    check_from(
        running(),
        vec![
            (1, Input::Ask(1, demand(false)), "take:demand"),
            (20_000, Input::Lost { token: token(1), cause: "killed".into() }, "lost no1:busy [recovering] end"),
            (20_001, committed(1, 4), ""),
            (20_002, Input::ProcessGone, "begin:4"),
        ],
    );
    // Its first one: the session was about to be given up as never checkpointed.
    let golden = Machine::new(policy(), SessionState::Starting, token(0), head(9, HeadKind::Golden));
    check_from(
        golden,
        vec![
            (0, Input::Begin, "[starting] end"),
            (0, Input::ProcessGone, "begin:9"),
            (0, Input::RunBegan { token: token(1) }, "launch:1:9:Golden"),
            (0, Input::Ready { token: token(1) }, "back:9 [running]"),
            (1, Input::Ask(1, demand(false)), "take:demand"),
            (2, Input::Lost { token: token(1), cause: "killed".into() }, "lost no1:busy end"),
            (3, committed(1, 4), ""),
            (4, Input::ProcessGone, "begin:4"),
        ],
    );
    // A person's restore is not overruled, nor is one of an earlier run believed.
    let restore = Input::Ask(1, Request::Restore { to: head(3, HeadKind::Own), verify_eager: false });
    check_from(
        running(),
        vec![
            (1, restore, "take:demand+hold"),
            (2, stored(1, 8), "want:Running [starting] end"),
            (3, committed(1, 8), ""),
            (4, Input::ProcessGone, "begin:3"),
        ],
    );
}

#[test]
fn behind_the_last_instant_nothing_happens_that_would_be_lost() {
    // What is asked for meanwhile is taken of the stopped guest, too.
    check_from(
        running(),
        vec![
            (1, Input::Ask(1, Request::Park), "take:park+hold"),
            (2, Input::Ask(2, demand(false)), ""),
            (3, stored(1, 2), "take:demand+hold"),
            (4, stored(1, 3), "ok2:c3 want:Parked end"),
        ],
    );
    // Somebody came while an idle session was being parked: it goes on.
    let mut idle = running();
    idle.step(Now { mono_ms: 0, unix_ms: 0 }, Input::Policy { cadence_ms: 0, idle_park_ms: 5_000 });
    check_from(
        idle,
        vec![
            (5_000, Input::Tick, "take:park+hold"),
            (5_001, Input::Ask(1, Request::AwaitRunning), "ok1"),
            (5_002, stored(1, 2), "go-on"),
        ],
    );
}

/// The host's answer to FindOlder: `n` is the older checkpoint.
pub(super) fn older(failed: &str, n: Option<u8>) -> Input {
    let older = n.map(|n| (head(n, HeadKind::Own), format!("c{n}")));
    Input::Older { session: "work".into(), failed: failed.into(), older }
}

fn any_input() -> impl Strategy<Value = Input> {
    prop_oneof![
        Just(Input::ProcessGone),
        (0u64..9, 1u8..9).prop_map(|(r, n)| committed(r, n)),
        Just(Input::Tick),
        Just(Input::Activity),
        Just(Input::Bought),
        (0u64..9).prop_map(|r| Input::Ready { token: token(r) }),
        (0u64..9).prop_map(|r| Input::Lost { token: token(r), cause: "c".into() }),
        (0u64..9, any::<bool>()).prop_map(|(r, retry)| Input::StartFailed { token: token(r), error: error("internal"), retry }),
        (0u64..9, 1u8..9).prop_map(|(r, n)| stored(r, n)),
        (0u64..9).prop_map(|r| Input::NotStored { token: token(r), error: error("disk-full") }),
        any::<bool>().prop_map(|f| Input::Ask(0, demand(f))),
        Just(Input::Ask(0, Request::Park)),
        Just(Input::Ask(0, Request::Stop)),
        Just(Input::Ask(0, Request::Wake)),
        Just(Input::Ask(0, Request::Kill)),
        Just(Input::Ask(0, Request::Restore { to: head(5, HeadKind::Own), verify_eager: true })),
        Just(Input::ProcessStays { why: "w".into() }),
        prop::option::of(1u8..9).prop_map(|n| older("c9", n)),
    ]
}

proptest! {
    /// ONE-OWNER: between two launches every process was seen dead and the token rose; every ask is answered exactly once.
    #[test]
    fn never_two_runs_and_every_ask_is_answered_once(inputs in prop::collection::vec(any_input(), 0..80)) {
        let mut m = Machine::new(policy(), SessionState::Starting, token(0), head(1, HeadKind::Own));
        let (mut asks, mut answered) = (0u64, std::collections::BTreeSet::new());
        let (mut run, mut dead, mut ending, mut vm) = (0u64, true, false, false);
        let mut queue = std::collections::VecDeque::from([Input::Begin]);
        queue.extend(inputs);
        let mut at = 0;
        while let Some(mut input) = queue.pop_front() {
            at += 700;
            match &mut input {
                Input::Ask(id, _) => { asks += 1; *id = asks; }
                // The host reports an end only when it was asked for one.
                Input::ProcessGone | Input::ProcessStays { .. } if !ending => continue,
                Input::ProcessGone => { ending = false; dead = true; vm = false; }
                Input::ProcessStays { .. } => ending = false,
                _ => {}
            }
            let now = Now { mono_ms: at, unix_ms: at };
            for e in m.step(now, input) {
                match e {
                    Effect::EndProcess => ending = true,
                    Effect::BeginRun { .. } => { run += 1; queue.push_front(Input::RunBegan { token: token(run) }); }
                    Effect::Launch { token, .. } => {
                        prop_assert!(dead && !vm, "a launch while a process may live");
                        prop_assert_eq!(token.run, run);
                        (dead, vm) = (false, true);
                    }
                    Effect::Reply { ask, .. } => prop_assert!(answered.insert(ask), "ask {} answered twice", ask),
                    _ => {}
                }
            }
        }
        // Removal answers whatever still waits.
        asks += 1;
        let now = Now { mono_ms: at + 1, unix_ms: 0 };
        let mut rest = m.step(now, Input::Ask(asks, Request::Remove));
        rest.extend(m.step(now, Input::ProcessGone));
        for e in rest {
            if let Effect::Reply { ask, .. } = e {
                prop_assert!(answered.insert(ask), "ask {} answered twice", ask);
            }
        }
        prop_assert_eq!(answered.len() as u64, asks, "every ask is answered");
    }
}
