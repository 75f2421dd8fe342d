//! Unit and property tests of the replicated state, all through `apply`.

mod fleet;
mod proposals;
mod sessions;

use crate::*;
use ks_proto::api::{Checkpoint, ForkPoint, Interruption};
use ks_proto::manifest::EngineKind;
use ks_proto::{CheckpointId, ImageId, RunToken, SessionId};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const IMAGE: ImageId = ImageId([9; 32]);

fn sid(n: u8) -> SessionId {
    SessionId([n; 16])
}
fn cid(n: u8) -> CheckpointId {
    CheckpointId([n; 32])
}
fn image(name: &str, id: ImageId) -> Command {
    let image = ImageRecord {
        name: name.into(),
        id,
        kernel: "6.1".into(),
        cmdline: String::new(),
        profile: String::new(),
        disk_bytes: 1,
        disk_used_bytes: 1,
        disk: CheckpointId(id.0),
        created_unix_ms: 0,
        holders: vec![],
    };
    Command::PutImage { image }
}
fn create(n: u8, name: &str, from: Option<(u8, u8)>) -> Command {
    Command::CreateSession {
        id: sid(n),
        name: name.parse().unwrap(),
        owner: 0,
        params: SessionParams {
            image: "default".into(),
            image_id: IMAGE,
            memory_mib: 512,
            vcpus: 1,
            engine: EngineKind::Qemu,
            profile: "tcg".into(),
            engine_why: String::new(),
        },
        cadence_s: 60,
        idle_park_s: 0,
        command: None,
        forked_from: from.map(|(s, c)| ForkPoint { session: sid(s), name: "p".into(), number: 1, checkpoint: cid(c) }),
        head: from.map_or(cid(255), |(_, c)| cid(c)),
        now_unix_ms: 5,
    }
}
fn point(id: u8) -> Checkpoint {
    Checkpoint {
        number: 0,
        id: cid(id),
        parent: None,
        created_unix_ms: 1,
        message: String::new(),
        reason: "demand".into(),
        pinned: false,
        durability: "durable".into(),
        logical_bytes: 1,
        stored_bytes: 1,
        pause_us: 1,
        total_us: 1,
        holders: vec![],
        branch: false,
    }
}
fn commit(n: u8, run: u64, id: u8) -> Command {
    Command::CommitCheckpoint { id: sid(n), token: RunToken { generation: 0, epoch: 1, run }, info: point(id), holders: vec![] }
}
fn begin(n: u8, from: u8) -> Command {
    Command::BeginRun { id: sid(n), from: cid(from), expected_epoch: None, node: None }
}
fn assign(n: u8, to: u64) -> Command {
    let (expected_epoch, from_lapsed, now_unix_ms, cause) = (None, false, 0, String::new());
    Command::Assign(Assignment { id: sid(n), to, expected_epoch, from_lapsed, now_unix_ms, cause })
}
fn word(r: &Response) -> String {
    match r {
        Response::Done => "done".into(),
        Response::Token { token } => token.to_string(),
        Response::Checkpoint { number } => format!("c{number}"),
        Response::Member { number } => format!("member {number}"),
        Response::Many { answers } => answers.iter().map(word).collect::<Vec<_>>().join("; "),
        Response::Refused { refusal } => refusal.to_string(),
    }
}

/// Applies all commands to a state with one image and compares what each answered.
fn check(steps: Vec<(Command, &str)>) -> FleetState {
    let mut s = FleetState::default();
    s.apply(image("default", IMAGE));
    for (n, (c, want)) in steps.into_iter().enumerate() {
        let got = word(&s.apply(c.clone()));
        assert!(got.contains(want), "step {n}: {c:?}\n got: {got}\nwant: {want}");
    }
    s
}

#[test]
fn a_stale_run_cannot_commit_a_checkpoint() {
    let s = check(vec![
        (create(1, "a", None), "0.1.0"),
        (begin(1, 255), "0.1.1"),
        (commit(1, 1, 10), "c1"),
        (commit(1, 1, 10), "c1"),
        (begin(1, 10), "0.1.2"),
        (commit(1, 1, 11), "run 0.1.1 of session a is over (the current run is 0.1.2)"),
        (commit(1, 2, 12), "c2"),
        (assign(1, 4), "0.2.2"),
        (commit(1, 2, 13), "is over"),
        (Command::RaiseGeneration {}, "done"),
        (begin(1, 12), "1.2.3"),
    ]);
    assert_eq!(s.sessions[&sid(1)].head, cid(12));
    assert_eq!(s.sessions[&sid(1)].checkpoints.keys().copied().collect::<Vec<_>>(), [1, 2]);
}

#[test]
fn what_a_session_may_reach_and_spend_goes_with_it_and_a_child_may_reach_the_same() {
    let outside = |allow: Option<&[&str]>, budget: Option<&str>| Command::SetOutside {
        id: sid(1),
        allow: allow.map(|a| a.iter().map(|s| (*s).to_owned()).collect()),
        budget: budget.map(str::to_owned),
    };
    let many: Vec<&str> = vec!["example.org"; limits::ALLOW_MAX + 1];
    let long = "x".repeat(limits::ALLOW_BYTES_MAX + 1);
    let s = check(vec![
        (outside(Some(&[]), None), "no session"),
        (create(1, "a", None), "0.1.0"),
        (outside(Some(&["pypi.org", "*.debian.org"]), None), "done"),
        (outside(None, Some("2.50")), "done"),
        (outside(Some(&many), None), "at most 1024"),
        (outside(Some(&[&long]), None), "at most 1024"),
        (outside(None, Some(&long)), "longer than"),
        (begin(1, 255), "0.1.1"),
        (commit(1, 1, 10), "c1"),
        (assign(1, 4), "0.2.1"),
        (create(2, "b", Some((1, 10))), "0.1.0"),
    ]);
    let of = |n: u8| (s.sessions[&sid(n)].allow.clone().unwrap_or_default().len(), s.sessions[&sid(n)].budget.clone());
    assert_eq!((of(1), of(2)), ((2, Some("2.50".into())), (2, None)));
    // A record and a command of a version that knew of neither.
    let mut old = serde_json::to_value(&s.sessions[&sid(1)]).unwrap();
    old.as_object_mut().unwrap().retain(|k, _| k != "allow" && k != "budget");
    let old: SessionRecord = serde_json::from_value(old).unwrap();
    assert_eq!((old.allow, old.budget), (None, None));
}

#[test]
fn names_are_unique_among_live_sessions_and_free_again_after_removal() {
    check(vec![
        (create(1, "a", None), "0.1.0"),
        (create(2, "a", None), "the name a is taken"),
        (create(1, "b", None), "exists"),
        (Command::RemoveSession { id: sid(1) }, "done"),
        (Command::RemoveSession { id: sid(1) }, "no session"),
        (create(2, "a", None), "0.1.0"),
    ]);
}

#[test]
fn a_removed_parent_leaves_a_tombstone_with_its_fork_points_only() {
    let mut s = check(vec![
        (create(1, "a", None), ""),
        (begin(1, 255), ""),
        (commit(1, 1, 10), "c1"),
        (commit(1, 1, 11), "c2"),
        (create(2, "a.1", Some((1, 10))), "0.1.0"),
        (create(3, "x", Some((1, 77))), "no checkpoint"),
        (Command::DropCheckpoints { id: sid(1), numbers: vec![1] }, "kept: a fork begins there"),
        (Command::RemoveSession { id: sid(1) }, "done"),
    ]);
    let grave = &s.sessions[&sid(1)];
    assert!(grave.tombstone && s.find("a").is_none());
    assert_eq!(grave.checkpoints.keys().copied().collect::<Vec<_>>(), [1]);
    assert!(s.roots().contains(&cid(10)) && !s.roots().contains(&cid(11)));
    s.apply(begin(2, 10));
    s.apply(commit(2, 1, 20));
    s.apply(create(3, "a.1.1", Some((2, 20))));
    s.apply(Command::RemoveSession { id: sid(2) });
    assert_eq!(s.sessions.len(), 3, "lineage of a grandchild stays");
    s.apply(Command::RemoveSession { id: sid(3) });
    assert!(s.sessions.is_empty(), "nobody descends from them any more");
}

#[test]
fn retention_never_drops_pinned_latest_or_head() {
    let s = check(vec![
        (create(1, "a", None), ""),
        (begin(1, 255), ""),
        (commit(1, 1, 10), "c1"),
        (commit(1, 1, 11), "c2"),
        (commit(1, 1, 12), "c3"),
        (Command::Pin { id: sid(1), number: 2, pinned: true }, "done"),
        (Command::Pin { id: sid(1), number: 8, pinned: true }, "no checkpoint c8"),
        (begin(1, 10), "0.1.2"),
        (Command::DropCheckpoints { id: sid(1), numbers: vec![1] }, "the session goes on from it"),
        (Command::DropCheckpoints { id: sid(1), numbers: vec![2] }, "pinned"),
        (Command::DropCheckpoints { id: sid(1), numbers: vec![3] }, "latest"),
        (commit(1, 2, 14), "c4"),
        (Command::DropCheckpoints { id: sid(1), numbers: vec![1, 3] }, "done"),
        (commit(1, 2, 15), "c5"),
    ]);
    assert_eq!(s.sessions[&sid(1)].checkpoints.keys().copied().collect::<Vec<_>>(), [2, 4, 5]);
}

#[test]
fn an_image_in_use_is_refused_and_a_replaced_one_lives_until_its_last_session() {
    let newer = ImageId([8; 32]);
    let golden = GoldenRecord {
        image_id: IMAGE,
        memory_mib: 512,
        vcpus: 1,
        engine: EngineKind::Qemu,
        profile: "tcg".into(),
        engine_version: "7.2".into(),
        checkpoint: cid(255),
        created_unix_ms: 0,
        holders: vec![],
    };
    let mut s = check(vec![
        (Command::PutGolden { golden: golden.clone() }, "done"),
        (Command::PutGolden { golden: GoldenRecord { checkpoint: cid(254), ..golden } }, "done"),
        (create(1, "a", None), ""),
        (Command::RemoveImage { name: "default".into() }, "used by a"),
        (Command::RemoveImage { name: "other".into() }, "no image other"),
        (image("default", newer), "done"),
    ]);
    assert_eq!(s.golden.len(), 1);
    assert!(s.image_by_id(&IMAGE).is_some() && s.roots().contains(&CheckpointId(IMAGE.0)));
    s.apply(Command::RemoveSession { id: sid(1) });
    assert!(s.image_by_id(&IMAGE).is_none() && s.golden.is_empty());
}

#[test]
fn a_loss_keeps_its_first_cause_until_the_session_is_back() {
    let lost =
        |at_unix_ms, cause: &str| Command::NoteLost { id: sid(1), lost: Lost { at_unix_ms, cause: cause.into(), lapse: None } };
    let interruption =
        Interruption { at_unix_ms: 3, cause: "killed".into(), ready_ms: 9, checkpoint: 1, lost_ms: 2, parts: None };
    let mut s = check(vec![(create(1, "a", None), ""), (lost(3, "killed"), "done"), (lost(4, "gone"), "done")]);
    assert_eq!(s.sessions[&sid(1)].lost, Some(Lost { at_unix_ms: 3, cause: "killed".into(), lapse: None }));
    s.apply(Command::NoteBack { id: sid(1), interruption });
    assert_eq!(s.sessions[&sid(1)].lost, None);
}

fn any_command() -> impl Strategy<Value = Command> {
    let s = || 1u8..5;
    prop_oneof![
        (s(), s()).prop_map(|(n, name)| create(n, &format!("n{name}"), None)),
        (s(), s(), s(), 1u8..40).prop_map(|(n, name, p, c)| create(n, &format!("n{name}"), Some((p, c)))),
        (s(), 1u8..40).prop_map(|(n, c)| begin(n, c)),
        (s(), 0u64..6, 1u8..40).prop_map(|(n, run, c)| commit(n, run, c)),
        (s(), 1u64..6, any::<bool>()).prop_map(|(n, number, pinned)| Command::Pin { id: sid(n), number, pinned }),
        (s(), prop::collection::vec(1u64..6, 0..3)).prop_map(|(n, numbers)| Command::DropCheckpoints { id: sid(n), numbers }),
        s().prop_map(|n| assign(n, 1)),
        s().prop_map(|n| Command::RemoveSession { id: sid(n) }),
        Just(Command::RaiseGeneration {}),
        Just(Command::RemoveImage { name: "default".into() }),
        Just(image("default", IMAGE)),
    ]
}

proptest! {
    #[test]
    fn promises_hold_after_any_commands(commands in prop::collection::vec(any_command(), 0..120)) {
        let mut s = FleetState::default();
        s.apply(image("default", IMAGE));
        let mut newest: BTreeMap<SessionId, (RunToken, u64)> = BTreeMap::new();
        for c in commands {
            let before = serde_json::to_value(&s).unwrap();
            let stale = match &c {
                Command::CommitCheckpoint { id, token, .. } => s.sessions.get(id).is_none_or(|r| r.token != *token),
                _ => false,
            };
            let response = s.apply(c.clone());
            if let Response::Refused { .. } = response {
                let mut after = serde_json::to_value(&s).unwrap();
                after["applied"] = before["applied"].clone();
                prop_assert_eq!(&after, &before, "a refused command changed something: {:?}", c);
            } else {
                prop_assert!(!stale, "a stale token was accepted: {:?}", c);
            }
            let names: Vec<_> = s.sessions.values().filter(|r| !r.tombstone).map(|r| &r.name).collect();
            prop_assert_eq!(names.len(), names.iter().collect::<BTreeSet<_>>().len(), "names are unique");
            newest.retain(|id, _| s.sessions.contains_key(id));
            for r in s.sessions.values() {
                let old = newest.insert(r.id, (r.token, r.next_number)).unwrap_or_default();
                prop_assert!(r.token >= old.0 && r.next_number >= old.1, "tokens and numbers only rise");
                if let Some(f) = &r.forked_from {
                    let parent = s.sessions.get(&f.session);
                    prop_assert!(parent.is_some_and(|p| p.by_id(&f.checkpoint).is_some()), "fork points are never dropped");
                    prop_assert!(s.roots().contains(&f.checkpoint));
                }
            }
        }
        // Determinism across a snapshot: what was written reads back as the same state.
        let again: FleetState = serde_json::from_value(serde_json::to_value(&s).unwrap()).unwrap();
        prop_assert_eq!(serde_json::to_value(&again).unwrap(), serde_json::to_value(&s).unwrap());
    }
}
