//! Leaving for another node, being disowned, and starts that have to wait.

use super::tests::{check_from, demand, error, running, stored, token};
use super::{Input, Request};

fn disowned() -> Input {
    Input::Disowned { to: "n2".into() }
}

#[test]
fn leaving_checkpoints_ends_and_waits_for_the_next_owner() {
    check_from(
        running(),
        vec![
            (1, Input::Ask(1, Request::Leave), "take:move+hold"),
            (2, Input::Ask(2, Request::AwaitRunning), ""),
            (3, stored(1, 2), "end"),
            (4, Input::ProcessGone, "[recovering] ok1"),
            // Nobody wakes it here: that would be a second run beside the next owner's.
            (5, Input::Ask(3, Request::AwaitRunning), ""),
            (6, Input::Ask(4, demand(false)), "no4:moving"),
            (7, disowned(), "no2:moving no3:moving end"),
            (8, Input::ProcessGone, "letgo"),
        ],
    );
}

#[test]
fn a_move_that_fails_goes_on_here() {
    check_from(
        running(),
        vec![
            (1, Input::Ask(1, Request::Leave), "take:move+hold"),
            (2, stored(1, 2), "end"),
            (3, Input::ProcessGone, "[recovering] ok1"),
            (4, Input::Ask(2, Request::Stay), "want:Running [recovering] end"),
            (5, Input::ProcessGone, "begin:2"),
            (6, Input::RunBegan { token: token(2) }, "launch:2:2:Own"),
            (7, Input::Ready { token: token(2) }, "back:2 [running] ok2"),
        ],
    );
}

#[test]
fn leaving_is_given_up_when_its_checkpoint_fails() {
    check_from(
        running(),
        vec![
            (1, Input::Ask(1, Request::Leave), "take:move+hold"),
            (2, Input::NotStored { token: token(1), error: error("disk-full") }, "no1:disk-full"),
            (3, Input::Ask(2, Request::AwaitRunning), "ok2"),
        ],
    );
}

#[test]
fn a_disowned_session_ends_whatever_it_does_and_records_nothing() {
    check_from(
        running(),
        vec![
            (1, Input::Ask(1, demand(false)), "take:demand"),
            (2, disowned(), "no1:moving end"),
            (3, disowned(), ""),
            (4, Input::Ask(2, Request::AwaitRunning), "no2:moving"),
            (5, stored(1, 2), ""),
            (6, Input::ProcessStays { why: "stuck".into() }, "letgo"),
        ],
    );
}

#[test]
fn a_start_that_the_fleet_cannot_decide_now_waits_and_is_no_fault_of_the_session() {
    check_from(
        running(),
        vec![
            (20_000, Input::Lost { token: token(1), cause: "gone".into() }, "lost [recovering] end"),
            (20_001, Input::ProcessGone, "begin:1"),
            (20_002, Input::RunRefused { error: error("no-quorum") }, "[recovering]"),
            (20_500, Input::Tick, ""),
            (21_002, Input::Tick, "[recovering] end"),
            (21_003, Input::ProcessGone, "begin:1"),
            (21_004, Input::RunBegan { token: token(2) }, "launch:2:1:Own"),
            (21_005, Input::StartFailed { token: token(2), error: error("unreachable"), retry: true }, "[recovering] end"),
            (21_006, Input::ProcessGone, ""),
            (21_106, Input::Tick, "[recovering] end"),
            (21_107, Input::ProcessGone, "begin:1"),
            (21_108, Input::RunBegan { token: token(3) }, "launch:3:1:Own"),
            (21_109, Input::Ready { token: token(3) }, "back:1 [running]"),
        ],
    );
}
