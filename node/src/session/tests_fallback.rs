//! A checkpoint that cannot be started: the session goes on from an older one, and says so.

use super::tests::{check_from, cid, error, head, older, policy, running, stored, token};
use super::{Effect, HeadKind, Input, Link, Machine, Now, Request, next_older};
use ks_proto::api::SessionState;

fn lost(run: u64) -> Input {
    Input::Lost { token: token(run), cause: "gone".into() }
}
fn failed(run: u64, code: &str, retry: bool) -> Input {
    Input::StartFailed { token: token(run), error: error(code), retry }
}
/// Runs as run 1 from its own checkpoint 5, since time 0; then the VM is lost and that checkpoint proves corrupt.
fn broken_at_5() -> Machine {
    let m = Machine::new(policy(), SessionState::Starting, token(0), head(5, HeadKind::Own));
    check_from(
        m,
        vec![
            (0, Input::Begin, "[starting] end"),
            (0, Input::ProcessGone, "begin:5"),
            (0, Input::RunBegan { token: token(1) }, "launch:1:5:Own"),
            (0, Input::Ready { token: token(1) }, "back:5 [running]"),
            (20_000, lost(1), "lost [recovering] end"),
            (20_000, Input::ProcessGone, "begin:5"),
            (20_000, Input::RunBegan { token: token(2) }, "launch:2:5:Own"),
            (20_000, failed(2, "corrupt", false), "end"),
            (20_000, Input::ProcessGone, "older:5-0"),
        ],
    )
}

/// Events and reasons of one input.
fn told(m: &mut Machine, at: u64, input: Input) -> Vec<String> {
    let line = |e: Effect| match e {
        Effect::Event { kind, text } => Some(format!("{kind}: {text}")),
        Effect::Show { state, reason } => Some(format!("[{state}] {reason}")),
        Effect::SetWanted { wanted, reason } => Some(format!("want {wanted:?}: {reason}")),
        _ => None,
    };
    m.step(Now { mono_ms: at, unix_ms: at }, input).into_iter().filter_map(line).collect()
}

#[test]
fn a_corrupt_newest_checkpoint_is_skipped_and_never_silently() {
    let mut m = broken_at_5();
    let lines = told(&mut m, 20_001, older("c5", Some(4)));
    let note = "went on from the older checkpoint c4, because what is newer could not be started: c5: w (y); it is still \
                listed: ks restore work@c5";
    assert_eq!(lines, [format!("fell-back: {note}"), format!("want Running: {note}"), format!("[recovering] {note}")]);
    let mut m = check_from(
        m,
        vec![(20_002, Input::ProcessGone, "begin:4"), (20_003, Input::RunBegan { token: token(3) }, "launch:3:4:Own")],
    );
    let lines = told(&mut m, 20_004, Input::Ready { token: token(3) });
    assert_eq!(lines[0], format!("[running] {note}"), "it is told for as long as the session lives on from there");
    // After parking and waking too, and by a later node.
    let m = check_from(m, vec![(20_005, Input::Ask(1, Request::Park), "take:park+hold")]);
    let mut m = check_from(m, vec![(20_006, stored(3, 6), "want:Parked end")]);
    assert_eq!(told(&mut m, 20_007, Input::ProcessGone)[0], format!("want Parked: {note}"));
    let mut later = Machine::new(policy(), SessionState::Starting, token(3), head(6, HeadKind::Own)).noting(note);
    assert_eq!(told(&mut later, 0, Input::Adopted)[0], format!("[running] {note}"));
    // A person who chooses a checkpoint has read it.
    let restore = Request::Restore { to: head(5, HeadKind::Own), verify_eager: false };
    let lines = told(&mut m, 20_008, Input::Ask(2, restore));
    assert_eq!(lines, ["want Running: ", "[starting] "]);
}

#[test]
fn a_skipped_checkpoint_is_not_chosen_again_once_the_session_went_on() {
    check_from(
        broken_at_5(),
        vec![
            (20_001, older("c5", Some(4)), "want:Running [recovering] end"),
            (20_002, Input::ProcessGone, "begin:4"),
            (20_003, Input::RunBegan { token: token(3) }, "launch:3:4:Own"),
            (20_004, Input::Ready { token: token(3) }, "back:4 [running]"),
            (80_004, Input::Tick, "take:cadence"),
            (80_005, stored(3, 6), ""),
            (90_000, lost(3), "lost [recovering] end"),
            (90_000, Input::ProcessGone, "begin:6"),
            (90_000, Input::RunBegan { token: token(4) }, "launch:4:6:Own"),
            (90_000, failed(4, "corrupt", false), "end"),
            (90_000, Input::ProcessGone, "older:6-1"),
        ],
    );
}

#[test]
fn when_no_checkpoint_starts_the_session_fails_at_its_newest_with_a_hint() {
    let mut m = check_from(
        broken_at_5(),
        vec![
            (20_001, Input::Ask(7, Request::AwaitRunning), ""),
            (20_001, older("c5", Some(4)), "want:Running [recovering] end"),
            (20_002, Input::ProcessGone, "begin:4"),
            (20_003, Input::RunBegan { token: token(3) }, "launch:3:4:Own"),
            // An older one is tried twice where an error may pass.
            (20_004, failed(3, "timeout", true), "[recovering] end"),
            (20_005, Input::ProcessGone, ""),
            (20_105, Input::Tick, "[recovering] end"),
            (20_105, Input::ProcessGone, "begin:4"),
            (20_105, Input::RunBegan { token: token(4) }, "launch:4:4:Own"),
            (20_106, failed(4, "timeout", true), "end"),
            (20_107, Input::ProcessGone, "older:4-1"),
            // The record names the newest again before the failure is told: the next wake begins there.
            (20_108, older("c4", None), "begin:5"),
        ],
    );
    let lines = told(&mut m, 20_109, Input::RunBegan { token: token(5) });
    assert!(lines[0].contains("none of its checkpoints could be started: c5: w (y); c4: w (y)"), "{lines:?}");
    assert!(lines[0].contains("ks restore work@c5"), "{lines:?}");
    assert_eq!(m.state(), SessionState::Failed);
    check_from(
        m,
        vec![(30_000, Input::Ask(8, Request::Wake), "want:Running [starting] end"), (30_000, Input::ProcessGone, "begin:5")],
    );
}

#[test]
fn a_fault_of_the_host_skips_no_checkpoint() {
    for code in ["engine-missing", "not-allowed", "usage", "disk-full"] {
        check_from(
            running(),
            vec![
                (20_000, lost(1), "lost [recovering] end"),
                (20_000, Input::ProcessGone, "begin:1"),
                (20_000, Input::RunBegan { token: token(2) }, "launch:2:1:Own"),
                (20_000, failed(2, code, false), "end"),
                (20_000, Input::ProcessGone, "want:Failed [failed]"),
            ],
        );
    }
    // In the middle of a fall it ends the fall, and the newest is named again.
    check_from(
        broken_at_5(),
        vec![
            (20_001, older("c5", Some(4)), "want:Running [recovering] end"),
            (20_002, Input::ProcessGone, "begin:4"),
            (20_003, Input::RunBegan { token: token(3) }, "launch:3:4:Own"),
            (20_004, failed(3, "disk-full", false), "end"),
            (20_005, Input::ProcessGone, "older:4-1"),
            (20_006, older("c4", Some(3)), "begin:5"),
            (20_007, Input::RunBegan { token: token(4) }, "want:Failed [failed]"),
        ],
    );
}

#[test]
fn what_a_person_asked_for_is_not_replaced_by_another() {
    let restore = Request::Restore { to: head(3, HeadKind::Own), verify_eager: true };
    check_from(
        running(),
        vec![
            (1, Input::Ask(1, restore), "take:demand+hold"),
            (2, stored(1, 8), "want:Running [starting] end"),
            (3, Input::ProcessGone, "begin:3"),
            (4, Input::RunBegan { token: token(2) }, "launch:2:3:Own"),
            (5, failed(2, "corrupt", false), "end"),
            (6, Input::ProcessGone, "want:Failed [failed] no1:corrupt"),
        ],
    );
    // A fork that never had a checkpoint of its own has nothing older either.
    let child = Machine::new(policy(), SessionState::Creating, token(0), head(9, HeadKind::ForkPoint));
    check_from(
        child,
        vec![
            (0, Input::Begin, "[creating] end"),
            (0, Input::ProcessGone, "begin:9"),
            (0, Input::RunBegan { token: token(1) }, "launch:1:9:ForkPoint"),
            (0, failed(1, "corrupt", false), "end"),
            (0, Input::ProcessGone, "want:Failed [failed]"),
        ],
    );
}

#[test]
fn a_request_that_comes_while_an_older_one_is_looked_for_wins() {
    check_from(
        broken_at_5(),
        vec![
            (20_001, Input::Ask(1, Request::Park), "want:Parked end"),
            (20_002, older("c5", Some(4)), ""),
            (20_003, Input::ProcessGone, "want:Parked [parked] ok1"),
        ],
    );
}

#[test]
fn the_next_older_one_is_of_the_same_line_of_work() {
    let link = |number: u64, parent: u8| Link { number, id: cid(number as u8), parent: Some(cid(parent)) };
    // c3 was restored when c5 was the newest; c6 and c7 go on from c3. 99 is the golden one; c2's parent was thinned.
    let links = [link(1, 99), link(3, 2), link(4, 3), link(5, 4), link(6, 3), link(7, 6)];
    let older = |than: u8, skipped: &[u8]| {
        let skipped: Vec<_> = skipped.iter().map(|n| cid(*n)).collect();
        next_older(&links, &cid(than), &skipped).map(|l| l.number)
    };
    assert_eq!(older(7, &[]), Some(6));
    assert_eq!(older(6, &[7]), Some(3), "c5 and c4 are what the restore left behind");
    assert_eq!(older(7, &[6]), Some(3));
    assert_eq!(older(3, &[]), Some(1), "its parent is thinned away: the next by number");
    assert_eq!(older(3, &[1]), None);
    assert_eq!(older(1, &[]), None);
    assert_eq!(older(42, &[]), None, "not a checkpoint of this session");
    // Hostile or damaged links end too.
    let circle = [link(1, 2), link(2, 1)];
    assert_eq!(next_older(&circle, &cid(1), &[]), None);
    assert_eq!(next_older(&circle, &cid(2), &[cid(1)]), None);
}
