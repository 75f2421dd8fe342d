//! The replicator on tables, and against a small model of peers that fail.

use super::*;
use crate::view::MemberView;
use proptest::prelude::*;

fn sid(n: u8) -> SessionId {
    SessionId([n; 16])
}
fn cid(n: u8) -> CheckpointId {
    CheckpointId([n; 32])
}
const TOKEN: RunToken = RunToken { generation: 0, epoch: 1, run: 1 };

fn member(number: u64, domain: &str) -> MemberView {
    MemberView { number, standing: Standing::Active, profiles: vec![], domain: domain.into(), incarnation: number }
}
fn session(n: u8, replicas: &[u64], checkpoints: &[(u8, &[u64])]) -> SessionView {
    let c =
        |(id, holders): &(u8, &[u64])| CheckpointView { id: cid(*id), token: TOKEN, holders: holders.to_vec(), branch: false };
    SessionView {
        id: sid(n),
        owner: 1,
        epoch: 1,
        token: TOKEN,
        replicas: replicas.to_vec(),
        copies: 2,
        profile: "v2".into(),
        memory_mib: 512,
        running: true,
        failed: false,
        checkpoints: checkpoints.iter().map(c).collect(),
    }
}
fn view(sessions: Vec<SessionView>) -> View {
    View {
        members: (1..=4).map(|n| (n, member(n, &format!("d{n}")))).collect(),
        sessions: sessions.into_iter().map(|s| (s.id, s)).collect(),
        lease_ms: 3000,
        voters: 3,
    }
}
fn heard(of: &[(u64, u64)]) -> Input {
    let fact = |ago: u64| FactsView { seen_ms_ago: ago, disk_free_mib: 50_000, ..FactsView::default() };
    Input::Nodes(of.iter().map(|(n, ago)| (*n, fact(*ago))).collect())
}
fn fetch(peer: u64, s: u8, c: u8, from: &[u64]) -> Effect {
    Effect::Fetch { peer, session: sid(s), checkpoint: cid(c), token: TOKEN, from: from.to_vec() }
}
fn add(s: u8, c: u8, node: u64) -> Effect {
    Effect::AddHolder { session: sid(s), checkpoint: cid(c), token: TOKEN, node }
}
fn set(s: u8, replicas: &[u64]) -> Effect {
    Effect::SetReplicas { session: sid(s), expected_epoch: 1, replicas: replicas.to_vec() }
}
fn done(peer: u64, c: u8) -> Input {
    Input::FetchDone { peer, checkpoint: cid(c) }
}

#[test]
fn a_new_session_gets_a_set_then_copies_newest_first_one_at_a_time() {
    let mut r = Replicator::new(1);
    let v = view(vec![session(1, &[], &[(1, &[1]), (2, &[1])])]);
    assert_eq!(r.step(0, &v, heard(&[(2, 0), (3, 0)])), vec![set(1, &[1, 2])]);
    assert_eq!(r.step(10, &v, Input::Tick), vec![], "proposed once");
    let v = view(vec![session(1, &[1, 2], &[(1, &[1]), (2, &[1])])]);
    assert_eq!(r.step(20, &v, Input::Tick), vec![fetch(2, 1, 2, &[1])]);
    assert_eq!(r.step(30, &v, Input::Tick), vec![]);
    assert_eq!(r.step(40, &v, done(2, 2)), vec![add(1, 2, 2), fetch(2, 1, 1, &[1])]);
    assert_eq!(r.step(50, &v, done(2, 2)), vec![], "said twice");
    assert_eq!(r.step(60, &v, done(2, 1)), vec![add(1, 1, 2)]);
    let v = view(vec![session(1, &[1, 2], &[(1, &[1, 2]), (2, &[1, 2])])]);
    assert_eq!(r.step(70, &v, Input::Tick), vec![]);
    assert!(r.proposed.is_empty() && r.failed.is_empty() && r.busy.is_empty());
}

#[test]
fn the_newest_of_every_session_goes_before_older_ones_and_branches_last() {
    let mut one = session(1, &[1, 2], &[(1, &[1]), (2, &[1, 2])]);
    one.checkpoints.push(CheckpointView { id: cid(9), token: TOKEN, holders: vec![1], branch: true });
    let v = view(vec![one, session(2, &[1, 2], &[(3, &[1]), (4, &[1])])]);
    let mut r = Replicator::new(1);
    assert_eq!(r.step(0, &v, heard(&[(2, 0)])), vec![fetch(2, 2, 4, &[1])]);
    assert_eq!(r.step(1, &v, done(2, 4)), vec![add(2, 4, 2), fetch(2, 2, 3, &[1])]);
    assert_eq!(r.step(2, &v, done(2, 3)), vec![add(2, 3, 2), fetch(2, 1, 1, &[1])]);
    assert_eq!(r.step(3, &v, done(2, 1)), vec![add(1, 1, 2), fetch(2, 1, 9, &[1])]);
}

#[test]
fn a_failed_transfer_is_tried_again_for_ever_with_growing_waits() {
    let v = view(vec![session(1, &[1, 2], &[(1, &[1])])]);
    let mut r = Replicator::new(1);
    let (mut now, mut waits) = (0, vec![]);
    assert_eq!(r.step(now, &v, heard(&[(2, 0)])), vec![fetch(2, 1, 1, &[1])]);
    for _ in 0..9 {
        assert_eq!(r.step(now, &v, Input::FetchFailed { peer: 2, checkpoint: cid(1) }), vec![]);
        let from = now;
        loop {
            now += 500;
            if r.step(now, &v, heard(&[(2, 0)])) == vec![fetch(2, 1, 1, &[1])] {
                break;
            }
            assert!(now < from + 2 * BACKOFF_MAX_MS, "given up");
        }
        waits.push((now - from) / 1000);
    }
    assert_eq!(waits, [1, 2, 4, 8, 16, 32, 60, 60, 60]);
}

#[test]
fn a_transfer_that_falls_silent_has_failed_and_progress_keeps_it() {
    let v = view(vec![session(1, &[1, 2], &[(1, &[1])])]);
    let mut r = Replicator::new(1);
    assert_eq!(r.step(0, &v, heard(&[(2, 0)])), vec![fetch(2, 1, 1, &[1])]);
    assert_eq!(r.step(50_000, &v, Input::FetchProgress { peer: 2, checkpoint: cid(1) }), vec![]);
    assert_eq!(r.step(TRANSFER_SILENCE_MS, &v, heard(&[(2, 0)])), vec![]);
    assert_eq!(r.under_way().count(), 1);
    assert_eq!(r.step(50_000 + TRANSFER_SILENCE_MS, &v, heard(&[(2, 0)])), vec![]);
    assert_eq!(r.under_way().count(), 0);
}

#[test]
fn a_silent_holder_is_replaced_after_a_while_and_kept_if_nobody_can_take_its_place() {
    let v = view(vec![session(1, &[1, 2], &[(1, &[1, 2])])]);
    let mut r = Replicator::new(1);
    assert_eq!(r.step(0, &v, heard(&[(2, 0), (3, 0), (4, 0)])), vec![]);
    assert_eq!(r.step(REPAIR_AFTER_MS - 1, &v, heard(&[(3, 0)])), vec![]);
    assert_eq!(r.step(REPAIR_AFTER_MS, &v, heard(&[])), vec![], "nobody is there");
    assert_eq!(r.step(REPAIR_AFTER_MS + 10_000, &v, heard(&[(3, 0)])), vec![set(1, &[1, 3])]);
    let v = view(vec![session(1, &[1, 3], &[(1, &[1, 2])])]);
    assert_eq!(r.step(50_000, &v, heard(&[(3, 0)])), vec![fetch(3, 1, 1, &[1, 2])]);
    // The full set holds it: only now may the old copy go.
    let v = view(vec![session(1, &[1, 3], &[(1, &[1, 2, 3])])]);
    let drop = Effect::DropHolder { session: sid(1), checkpoint: cid(1), node: 2 };
    assert_eq!(r.step(51_000, &v, done(3, 1)), vec![drop]);
}

#[test]
fn after_a_failover_the_new_owner_leads_the_set_and_gets_what_it_lacks() {
    // Node 1 took over from 3; the older checkpoint is on 2 only.
    let v = view(vec![session(1, &[3, 1, 2], &[(1, &[2, 3]), (2, &[1, 2, 3])])]);
    let v = View { sessions: v.sessions.into_iter().map(|(k, s)| (k, SessionView { copies: 3, ..s })).collect(), ..v };
    let mut r = Replicator::new(1);
    assert_eq!(r.step(0, &v, heard(&[(2, 0)])), vec![set(1, &[1, 3, 2]), fetch(1, 1, 1, &[2, 3])]);
    assert_eq!(r.step(1, &v, done(1, 1)), vec![add(1, 1, 1)]);
}

#[test]
fn sets_are_spread_over_failure_domains_and_shun_draining_and_full_nodes() {
    let mut v = view(vec![session(1, &[1, 2], &[(1, &[1, 2])])]);
    v.members.insert(2, MemberView { standing: Standing::Draining, ..member(2, "d2") });
    v.members.insert(3, member(3, "d1"));
    let mut r = Replicator::new(1);
    assert_eq!(r.step(0, &v, heard(&[(2, 0), (3, 0), (4, 0)])), vec![set(1, &[1, 4])]);
    let mut r = Replicator::new(1);
    assert_eq!(r.step(0, &v, heard(&[(2, 0), (3, 0)])), vec![set(1, &[1, 3])], "a bad domain is better than none");
    let full = Input::Nodes(BTreeMap::from([(3, FactsView { disk_free_mib: 10, ..FactsView::default() })]));
    assert_eq!(Replicator::new(1).step(0, &v, full), vec![], "2 drains but nobody else has space");
}

#[test]
fn sessions_of_others_are_not_touched_and_a_lost_session_is_forgotten() {
    let mut v = view(vec![session(1, &[1, 2], &[(1, &[1])])]);
    let mut r = Replicator::new(1);
    assert_eq!(r.step(0, &v, heard(&[(2, 0)])), vec![fetch(2, 1, 1, &[1])]);
    v.sessions.get_mut(&sid(1)).unwrap().owner = 3;
    assert_eq!(r.step(5, &v, done(2, 1)), vec![]);
    assert!(r.busy.is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]
    /// Peers fail and fall silent at random; proposals are lost at random. A holder is proposed only after its own
    /// acknowledgement, at most one transfer per peer is under way, no copy is dropped while the set lacks one, and when the
    /// faults stop every checkpoint is on every node of a live set.
    #[test]
    fn replication_is_safe_and_ends(seed in prop::collection::vec(any::<u16>(), 300)) {
        let mut v = view(vec![
            session(1, &[], &[(1, &[1]), (2, &[1])]),
            session(2, &[1, 4], &[(3, &[1, 4])]),
            session(3, &[2, 3], &[(4, &[2])]),
        ]);
        let mut r = Replicator::new(1);
        let mut acked: BTreeSet<(u64, CheckpointId)> = BTreeSet::new();
        let mut open: Vec<(u64, CheckpointId)> = Vec::new();
        let rounds = seed.into_iter().map(Some).chain(std::iter::repeat_n(None, 500));
        for (i, dice) in rounds.enumerate() {
            let now = i as u64 * 1000;
            let d = dice.unwrap_or(0);
            let live: Vec<(u64, u64)> = (2..=4).filter(|n| dice.is_none() || d >> n & 1 == 0).map(|n| (n, 0)).collect();
            let mut effects = r.step(now, &v, heard(&live));
            if let Some((peer, c)) = (!open.is_empty() && d & 0x60 != 0x60).then(|| open.remove(usize::from(d) % open.len())) {
                let ok = d & 0x700 == 0;
                if ok {
                    acked.insert((peer, c));
                }
                let input = if ok { Input::FetchDone { peer, checkpoint: c } } else { Input::FetchFailed { peer, checkpoint: c } };
                effects.extend(r.step(now, &v, input));
            }
            let mut peers: Vec<u64> = r.under_way().map(|(p, _)| p).collect();
            peers.dedup();
            prop_assert_eq!(peers.len(), r.busy.len());
            for e in effects {
                let applied = d & 0x1800 == 0;
                match e {
                    Effect::Fetch { peer, checkpoint, from, .. } => {
                        prop_assert!(!from.is_empty() && !from.contains(&peer));
                        open.retain(|(p, _)| *p != peer);
                        open.push((peer, checkpoint));
                    }
                    Effect::AddHolder { session, checkpoint, node, .. } => {
                        prop_assert!(acked.contains(&(node, checkpoint)));
                        if applied {
                            let s = v.sessions.get_mut(&session).unwrap();
                            s.checkpoints.iter_mut().filter(|c| c.id == checkpoint).for_each(|c| c.holders.push(node));
                        }
                    }
                    Effect::DropHolder { session, checkpoint, node, .. } => {
                        let s = v.sessions.get_mut(&session).unwrap();
                        let c = s.checkpoints.iter_mut().find(|c| c.id == checkpoint).unwrap();
                        prop_assert!(!s.replicas.contains(&node) && s.replicas.iter().all(|n| c.holders.contains(n)));
                        if applied {
                            c.holders.retain(|n| *n != node);
                        }
                    }
                    Effect::SetReplicas { session, replicas, .. } => {
                        prop_assert_eq!(replicas[0], 1);
                        if applied {
                            v.sessions.get_mut(&session).unwrap().replicas = replicas;
                        }
                    }
                }
            }
        }
        for s in v.sessions.values().filter(|s| s.owner == 1) {
            for c in &s.checkpoints {
                prop_assert!(s.replicas.len() == 2 && s.replicas.iter().all(|n| c.holders.contains(n)), "{s:?}");
                prop_assert_eq!(c.holders.len(), 2);
            }
        }
    }
}
