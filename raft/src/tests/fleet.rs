//! Members, tokens, holders, reassignment: all through `apply`.

use super::*;
use ks_proto::FleetId;

const FLEET: FleetId = FleetId([3; 16]);

fn member(peer: &str, name: &str) -> Member {
    serde_json::from_value(serde_json::json!({"peer_id": peer, "name": name})).unwrap()
}
fn found(peer: &str) -> Command {
    Command::Found { fleet_id: FLEET, member: member(peer, "a"), ca_cert_hex: "ca".into(), now_unix_ms: 7 }
}
fn create_on(n: u8, to: u64) -> Command {
    let mut command = create(n, &format!("s{n}"), None);
    if let Command::CreateSession { owner, .. } = &mut command {
        *owner = to;
    }
    command
}
fn hash(n: u64) -> String {
    format!("{n:064x}")
}
fn token(n: u64, now_unix_ms: u64, expires_unix_ms: u64) -> Command {
    Command::AddToken { token_hash: hash(n), made_by: "root".into(), expires_unix_ms, now_unix_ms }
}
fn join(n: u64, peer: &str, name: &str, now_unix_ms: u64) -> Command {
    Command::AddMember { token_hash: hash(n), member: member(peer, name), now_unix_ms }
}
fn add_holder(n: u8, c: u8, node: u64) -> Command {
    let token = RunToken { generation: 0, epoch: 1, run: 1 };
    Command::AddHolder { session: sid(n), checkpoint: cid(c), token, node }
}
fn lapse(n: u8, to: u64) -> Command {
    Command::Assign(lapsed(n, to, None))
}
fn lapsed(n: u8, to: u64, expected_epoch: Option<u64>) -> Assignment {
    Assignment { id: sid(n), to, expected_epoch, from_lapsed: true, now_unix_ms: 9, cause: "node 1 was lost".into() }
}

/// A fleet of members 1, `b` and `c`, given back with their numbers.
fn fleet(steps: Vec<(Command, &str)>) -> (FleetState, u64, u64) {
    let mut s = check(vec![(found("p1"), "member 1")]);
    let mut numbers = Vec::new();
    for (n, peer) in [(1, "p2"), (2, "p3")] {
        s.apply(token(n, 0, 1000));
        match s.apply(join(n, peer, &peer.replace('p', "n"), 10)) {
            Response::Member { number } => numbers.push(number),
            other => panic!("{other:?}"),
        }
    }
    for (n, (c, want)) in steps.into_iter().enumerate() {
        let got = word(&s.apply(c.clone()));
        assert!(got.contains(want), "step {n}: {c:?}\n got: {got}\nwant: {want}");
    }
    (s, numbers[0], numbers[1])
}

#[test]
fn the_founder_takes_what_the_lone_node_had() {
    let s = check(vec![
        (create(1, "a", None), ""),
        (begin(1, 255), ""),
        (commit(1, 1, 10), "c1"),
        (token(1, 0, 9), "not founded"),
        (found("p1"), "member 1"),
        (found("p1"), "member 1"),
        (found("p2"), "this is fleet 03030303"),
        (create_on(2, 9), "no member 9"),
    ]);
    let r = &s.sessions[&sid(1)];
    assert_eq!((r.owner, &r.replicas[..], &r.checkpoints[&1].holders[..]), (1, &[1][..], &[1][..]));
    assert_eq!(s.images["default"].holders, [1]);
    assert_eq!((s.members[&1].joined_unix_ms, s.ca_cert_hex.as_str()), (7, "ca"));
    assert_eq!(s.durability(r, &r.checkpoints[&1]), Durability::Durable, "one copy of one possible");
}

#[test]
fn a_join_token_lets_one_node_in_until_it_expires() {
    let s = check(vec![
        (join(1, "p2", "b", 10), "not founded"),
        (found("p1"), "member 1"),
        (join(1, "p2", "b", 10), "not known"),
        (token(1, 10, 10), "expired 0 ms ago"),
        (token(1, 10, 1000), "done"),
        (token(1, 10, 1000), "added before"),
        (token(2, 10, 1000), "done"),
        (join(1, "p2", "b", 1003), "expired 3 ms ago"),
        (join(1, "p1", "b", 20), "peer p1 is member 1 already"),
        // Entry 10: the image, this check's first entry, is number 1.
        (join(1, "p2", "a", 20), "member 11"),
        (join(1, "p2", "a", 2000), "member 11"),
        (join(1, "p3", "b", 20), "used by node 11"),
        (Command::DropToken { token_hash: hash(2) }, "done"),
        (join(2, "p3", "b", 20), "not known"),
        (Command::AddToken { token_hash: "A".repeat(64), made_by: "x".into(), expires_unix_ms: 9, now_unix_ms: 1 }, "hex digits"),
    ]);
    assert_eq!(s.members[&11].name, "a-11", "another member is called a");
    assert_eq!(s.tokens[&hash(1)].used_by, Some(11));
    assert_eq!(s.find_member("a-11").map(|m| m.number), Some(11));
    assert_eq!(s.find_member("1").map(|m| m.number), Some(1));
    let mut s = s;
    s.apply(token(9, 90_000_000, 90_000_001));
    assert_eq!(s.tokens.len(), 1, "a day after their end tokens are forgotten");
}

#[test]
fn members_leave_drained_and_empty_or_forced() {
    let (mut s, b, c) = fleet(vec![(create_on(1, 1), "0.1.0")]);
    let steps = |number| {
        let state = |state| Command::SetMemberState { number, state };
        (state(MemberState::Draining), state(MemberState::Gone), Command::RemoveMember { number, forced: false })
    };
    let say = |s: &mut FleetState, c: Command| word(&s.apply(c));
    let (drain, gone, remove) = steps(1);
    assert!(say(&mut s, gone).contains("leaves by RemoveMember"));
    assert!(say(&mut s, remove.clone()).contains("must be drained first"));
    assert_eq!(say(&mut s, drain), "done");
    assert!(say(&mut s, remove.clone()).contains("still owns 1 sessions"));
    assert!(say(&mut s, create_on(2, 1)).contains("gets no sessions"));
    assert_eq!(say(&mut s, assign(1, b)), "0.2.0");
    assert_eq!(say(&mut s, remove.clone()), "done");
    assert!(say(&mut s, remove).contains("not changed any more"));
    assert_eq!(s.members[&1].state, MemberState::Gone);
    assert_eq!(s.sessions[&sid(1)].replicas, [b], "its copies are gone");
    assert_eq!(say(&mut s, Command::RemoveMember { number: b, forced: true }), "done");
    assert_eq!(s.sessions[&sid(1)].owner, b, "what a dead node owned is reassigned, not lost");
    assert!(say(&mut s, Command::RemoveMember { number: c, forced: true }).contains("last active"));
    assert!(say(&mut s, Command::RemoveMember { number: 99, forced: true }).contains("no member 99"));
    // The key of a member that left may join again, under a new number.
    s.apply(token(5, 0, 1000));
    let again = say(&mut s, join(5, "p2", "b", 10));
    assert!(again.starts_with("member ") && !again.ends_with(&format!(" {b}")), "{again}");
}

#[test]
fn durability_counts_members_that_have_the_whole_checkpoint() {
    let (mut s, b, c) = fleet(vec![(create_on(1, 1), ""), (begin(1, 255), ""), (commit(1, 1, 10), "c1")]);
    let how = |s: &FleetState| {
        let r = &s.sessions[&sid(1)];
        s.durability(r, &r.checkpoints[&1])
    };
    assert_eq!(how(&s), Durability::Local);
    s.apply(Command::SetCopies { session: sid(1), copies: 3 });
    assert_eq!(word(&s.apply(add_holder(1, 10, b))), "done");
    assert_eq!(word(&s.apply(add_holder(1, 10, b))), "done");
    assert_eq!(how(&s), Durability::Replicating);
    assert!(word(&s.apply(add_holder(1, 10, 77))).contains("no member 77"));
    assert!(word(&s.apply(add_holder(1, 11, b))).contains("no checkpoint"));
    s.apply(add_holder(1, 10, c));
    assert_eq!(how(&s), Durability::Durable);
    for (node, want) in [(1, "done"), (b, "done"), (c, "only holder")] {
        assert!(word(&s.apply(Command::DropHolder { session: sid(1), checkpoint: cid(10), node })).contains(want));
    }
    s.apply(Command::RemoveMember { number: c, forced: true });
    assert_eq!(how(&s), Durability::Lost);
    assert!(word(&s.apply(Command::SetCopies { session: sid(1), copies: 8 })).contains("at most 7"));
    let policy = |copies, voters, lease_ms| Command::SetFleetPolicy { policy: FleetPolicy { copies, voters, lease_ms } };
    for (c, want) in [(policy(0, 3, 3000), "1 to 7"), (policy(2, 2, 3000), "1, 3 or 5"), (policy(2, 3, 10), "1000 to 60000")] {
        assert!(word(&s.apply(c)).contains(want), "{want}");
    }
    assert_eq!(word(&s.apply(policy(1, 1, 5000))), "done");
}

/// What a reassignment restores: checkpoints c1.. with their holders (1 is the lost owner), and what is expected.
#[test]
fn a_reassignment_takes_the_newest_checkpoint_that_can_be_had() {
    let (base, b, c) = fleet(vec![(create_on(1, 1), ""), (begin(1, 255), "")]);
    // Copies, holders of each checkpoint, lapsed?, checkpoint that becomes the head (None: refused; 0: as it began).
    type Case = (u16, Vec<Vec<u64>>, bool, Option<u64>);
    let cases: Vec<Case> = vec![
        (2, vec![], true, Some(0)),
        (2, vec![vec![1, b], vec![1]], true, Some(1)),
        (2, vec![vec![1, b], vec![1]], false, Some(2)),
        (2, vec![vec![1, b], vec![1, c], vec![1]], true, Some(2)),
        (2, vec![vec![1], vec![1]], true, None),
        (1, vec![vec![1], vec![1]], true, Some(2)),
        (3, vec![vec![1, b, c], vec![1, c], vec![1]], true, Some(2)),
    ];
    for (copies, checkpoints, from_lapsed, want) in cases {
        let mut s = base.clone();
        s.apply(Command::SetCopies { session: sid(1), copies });
        for (at, holders) in (10..).zip(&checkpoints) {
            let mut command = commit(1, 1, at);
            if let Command::CommitCheckpoint { holders: named, .. } = &mut command {
                named.clone_from(holders);
            }
            assert!(!word(&s.apply(command)).contains("no "));
        }
        let answer = s.apply(Command::Assign(Assignment { from_lapsed, ..lapsed(1, b, Some(1)) }));
        let r = &s.sessions[&sid(1)];
        let Some(want) = want else {
            assert!(word(&answer).contains("no node that can be reached"), "{checkpoints:?}");
            assert_eq!((r.owner, r.token.epoch), (1, 1));
            continue;
        };
        assert_eq!(word(&answer), "0.2.1", "{checkpoints:?}");
        assert_eq!(r.head, if want == 0 { cid(255) } else { cid(9 + want as u8) }, "{checkpoints:?} copies {copies}");
        let branches: Vec<u64> = r.checkpoints.values().filter(|c| c.branch).map(|c| c.info.number).collect();
        let newer: Vec<u64> = r.checkpoints.keys().copied().filter(|n| *n > want).collect();
        assert_eq!(branches, newer, "what is newer is kept as a side branch");
        assert_eq!(r.lost.is_some(), from_lapsed);
        assert_eq!((r.owner, r.replicas[0]), (b, b));
        // A side branch is not chosen the next time, wherever it is.
        let again = s.apply(Command::Assign(Assignment { from_lapsed: false, ..lapsed(1, c, Some(2)) }));
        assert_eq!(word(&again), "0.3.1");
        assert_eq!(s.sessions[&sid(1)].head, if want == 0 { cid(255) } else { cid(9 + want as u8) });
    }
}

#[test]
fn a_loss_counts_from_when_the_dead_node_was_last_heard_of() {
    let (mut s, b, c) = fleet(vec![(create_on(1, 1), "0.1.0"), (begin(1, 255), "0.1.1"), (commit(1, 1, 10), "c1")]);
    assert_eq!(word(&s.apply(add_holder(1, 10, b))), "done");
    let lapse = Lapse { seen_unix_ms: 1_000, lease_ms: 3_300, election_ms: None };
    let answer =
        s.apply(Command::AssignLapsed { moves: vec![Assignment { now_unix_ms: 4_400, ..lapsed(1, b, Some(1)) }], lapse });
    assert_eq!(word(&answer), "0.2.1");
    let lost = s.sessions[&sid(1)].lost.clone().unwrap();
    assert_eq!((lost.at_unix_ms, lost.lapse), (1_000, Some(lapse)));
    // Its next node dies too before it was back: the interruption is one, from the first loss on.
    let later = Lapse { seen_unix_ms: 5_000, lease_ms: 3_300, election_ms: Some(3_300) };
    assert_eq!(word(&s.apply(add_holder(1, 10, c))), "done");
    let answer = s.apply(Command::AssignLapsed { moves: vec![lapsed(1, c, Some(2))], lapse: later });
    assert_eq!(word(&answer), "0.3.1");
    assert_eq!(s.sessions[&sid(1)].lost.as_ref().map(|l| l.at_unix_ms), Some(1_000));
    // What an earlier version wrote is read.
    let old: Lost = serde_json::from_str(r#"{"at_unix_ms":7,"cause":"x"}"#).unwrap();
    assert_eq!(old.lapse, None);
}

#[test]
fn a_restore_of_an_older_checkpoint_leaves_the_newer_ones_as_a_branch() {
    let (s, _, _) = fleet(vec![
        (create_on(1, 1), ""),
        (begin(1, 255), ""),
        (commit(1, 1, 10), "c1"),
        (commit(1, 1, 11), "c2"),
        (begin(1, 10), "0.1.2"),
        (lapse(1, 1), "0.2.2"),
    ]);
    let r = &s.sessions[&sid(1)];
    assert_eq!((r.head, r.checkpoints[&1].branch, r.checkpoints[&2].branch), (cid(10), false, true));
}

#[test]
fn decisions_made_under_another_epoch_or_for_another_owner_are_refused() {
    let (mut s, b, c) = fleet(vec![(create_on(1, 1), ""), (create_on(2, 1), "")]);
    let mut say = |c: Command| word(&s.apply(c));
    let run = |expected_epoch, node| Command::BeginRun { id: sid(1), from: cid(255), expected_epoch, node };
    let set =
        |expected_epoch, replicas: &[u64]| Command::SetReplicas { session: sid(1), expected_epoch, replicas: replicas.into() };
    assert!(say(run(Some(2), Some(1))).contains("has epoch 1 by now, not 2"));
    assert!(say(run(Some(1), Some(b))).contains("belongs to node 1, not to node"));
    assert_eq!(say(run(Some(1), Some(1))), "0.1.1");
    assert!(say(set(2, &[1, b])).contains("has epoch 1"));
    assert!(say(set(1, &[b, 1])).contains("comes first"));
    assert!(say(set(1, &[1, b, b])).contains("named twice"));
    assert!(say(set(1, &[1, 50])).contains("no member 50"));
    assert_eq!(say(set(1, &[1, b, c])), "done");
    let moves =
        vec![lapsed(1, b, Some(1)), lapsed(1, c, Some(1)), lapsed(2, c, Some(1)), lapsed(9, c, None), lapsed(2, 70, None)];
    let answer = say(Command::AssignMany { moves });
    let parts: Vec<&str> = answer.split("; ").collect();
    assert_eq!((parts[0], parts[2]), ("0.2.1", "0.2.0"));
    assert!(parts[1].contains("has epoch 2") && parts[3].contains("no session") && parts[4].contains("no member 70"));
    assert!(say(Command::AssignMany { moves: vec![lapsed(1, b, None); 513] }).contains("limit"));
    assert_eq!(s.sessions[&sid(1)].replicas, [b, c, 1], "the set stays, the lost owner last");
}

#[test]
fn what_an_earlier_version_wrote_reads_back() {
    let id = sid(1).to_hex();
    let old = format!(r#"{{"do":"assign","id":"{id}","owner":4}}"#);
    let Command::Assign(a) = serde_json::from_str(&old).unwrap() else { panic!() };
    assert_eq!((a.to, a.expected_epoch, a.from_lapsed), (4, None, false));
    let old = format!(r#"{{"do":"begin-run","id":"{id}","from":"{}"}}"#, cid(1));
    assert!(matches!(serde_json::from_str(&old).unwrap(), Command::BeginRun { expected_epoch: None, node: None, .. }));
    // A state without anything that came with the fleet.
    let s = check(vec![(create(1, "a", None), ""), (begin(1, 255), ""), (commit(1, 1, 10), "c1")]);
    let mut json = serde_json::to_value(&s).unwrap();
    for key in ["fleet_id", "ca_cert_hex", "members", "tokens", "users", "policy", "proposers"] {
        assert!(json.as_object_mut().unwrap().remove(key).is_some(), "{key}");
    }
    let record = &mut json["sessions"][&id];
    for key in ["copies", "replicas"] {
        assert!(record.as_object_mut().unwrap().remove(key).is_some(), "{key}");
    }
    for key in ["holders", "branch"] {
        assert!(record["checkpoints"]["1"].as_object_mut().unwrap().remove(key).is_some(), "{key}");
    }
    let old: FleetState = serde_json::from_value(json).unwrap();
    let r = &old.sessions[&sid(1)];
    assert_eq!((old.policy, old.is_founded()), (FleetPolicy::default(), false));
    assert_eq!((old.holders(r, &r.checkpoints[&1]), old.durability(r, &r.checkpoints[&1])), (vec![0], Durability::Durable));
}

fn any_fleet_command() -> impl Strategy<Value = Command> {
    let s = || 1u8..4;
    // Numbers of members are log indexes: small ones hit often enough.
    let node = || 0u64..30;
    prop_oneof![
        (s(), node()).prop_map(|(n, owner)| create_on(n, owner)),
        (s(), 1u8..9).prop_map(|(n, c)| begin(n, c)),
        (s(), 0u64..4, 1u8..9).prop_map(|(n, run, c)| commit(n, run, c)),
        (s(), 1u8..9, node()).prop_map(|(n, c, m)| add_holder(n, c, m)),
        (s(), 1u8..9, node()).prop_map(|(n, c, node)| Command::DropHolder { session: sid(n), checkpoint: cid(c), node }),
        (s(), node(), any::<bool>())
            .prop_map(|(n, to, from_lapsed)| { Command::Assign(Assignment { from_lapsed, ..lapsed(n, to, None) }) }),
        (s(), 1u64..4, prop::collection::vec(node(), 0..4)).prop_map(|(n, expected_epoch, replicas)| Command::SetReplicas {
            session: sid(n),
            expected_epoch,
            replicas
        }),
        Just(found("p1")),
        (0u64..4).prop_map(|n| token(n, 0, 1000)),
        (0u64..4, 1u64..5, 0u64..2000).prop_map(|(n, p, now)| join(n, &format!("p{p}"), "n", now)),
        (node(), any::<bool>()).prop_map(|(number, forced)| Command::RemoveMember { number, forced }),
        (node(), any::<bool>()).prop_map(|(number, drain)| {
            let state = if drain { MemberState::Draining } else { MemberState::Active };
            Command::SetMemberState { number, state }
        }),
        (node(), prop::option::of("[ab]{1,2}")).prop_map(|(number, name)| {
            Command::UpdateMember { number, change: MemberChange { name, ..MemberChange::default() } }
        }),
        Just(Command::RaiseGeneration {}),
    ]
}

proptest! {
    #[test]
    fn fleet_promises_hold_after_any_commands(commands in prop::collection::vec(any_fleet_command(), 0..100)) {
        let mut s = FleetState::default();
        s.apply(image("default", IMAGE));
        let mut tokens: BTreeMap<SessionId, RunToken> = BTreeMap::new();
        let mut ever: BTreeSet<u64> = BTreeSet::new();
        for c in commands {
            let before = serde_json::to_value(&s).unwrap();
            let shared = s.clone();
            let response = s.apply(c.clone());
            prop_assert_eq!(&serde_json::to_value(&shared).unwrap(), &before, "a state that somebody holds does not change");
            if let Response::Refused { .. } = response {
                let mut after = serde_json::to_value(&s).unwrap();
                after["applied"] = before["applied"].clone();
                prop_assert_eq!(&after, &before, "a refused command changed something: {:?}", c);
            }
            if let (Response::Member { number }, Command::AddMember { .. }) = (&response, &c) {
                let known = s.members.get(number).is_some_and(|m| m.is_member());
                prop_assert!(known && (ever.insert(*number) || before["members"].get(number.to_string()).is_some()));
            }
            let here: Vec<&Member> = s.members.values().filter(|m| m.is_member()).collect();
            prop_assert_eq!(here.iter().map(|m| &m.peer_id).collect::<BTreeSet<_>>().len(), here.len(), "keys are unique");
            prop_assert_eq!(here.iter().map(|m| &m.name).collect::<BTreeSet<_>>().len(), here.len(), "names are unique");
            prop_assert!(!s.is_founded() || s.active().count() >= 1, "somebody is active");
            for r in s.sessions.values() {
                let old = tokens.insert(r.id, r.token).unwrap_or_default();
                prop_assert!(r.token >= old, "tokens only rise");
                if s.is_founded() {
                    prop_assert_eq!(r.replicas.first(), Some(&r.owner), "the owner is the first of its set");
                    for c in r.checkpoints.values() {
                        let there = |n: &u64| s.members.get(n).is_some_and(|m| m.is_member());
                        prop_assert!(c.holders.iter().all(there), "only members hold copies");
                        prop_assert_eq!(c.holders.iter().collect::<BTreeSet<_>>().len(), c.holders.len());
                    }
                }
                let on_line: Vec<_> = r.checkpoints.values().filter(|c| !c.branch).collect();
                prop_assert!(on_line.last().is_none_or(|c| c.info.id == r.head), "the line ends at the head");
            }
        }
        let again: FleetState = serde_json::from_value(serde_json::to_value(&s).unwrap()).unwrap();
        prop_assert_eq!(serde_json::to_value(&again).unwrap(), serde_json::to_value(&s).unwrap());
    }
}
