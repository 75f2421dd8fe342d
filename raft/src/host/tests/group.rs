//! Agreement of several nodes.

use super::harness::*;
use crate::host::{ChangeError, Timing};
use crate::*;
use std::collections::BTreeSet;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::Instant;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lone_node_goes_on_after_a_restart() {
    let mut g = Group::new(Timing { snapshot_entries: 20, kept_entries: 5, ..timing() });
    let mut node = g.start(1).await;
    node.found().await.unwrap();
    with_session(&node).await;
    for round in 1..=3u64 {
        for n in 1..=30 {
            assert_eq!(run(node.propose(begin(1)).await.unwrap()), (round - 1) * 30 + n);
        }
        let before = json(&node);
        g.stop(node).await;
        node = g.start(1).await;
        node.found().await.unwrap();
        node.catch_up().await.unwrap();
        assert_eq!(json(&node)["sessions"], before["sessions"]);
    }
    g.stop(node).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_proposal_of_any_node_is_applied_and_is_then_part_of_its_state() {
    let mut g = Group::new(timing());
    let nodes = g.voters(3).await;
    with_session(&nodes[2]).await;
    for (n, node) in (1..).zip(nodes.iter().cycle().take(9)) {
        assert_eq!(run(node.propose(begin(1)).await.unwrap()), n);
        assert_eq!(node.state().sessions[&sid(1)].token.run, n, "the proposer reads its own change");
    }
    nodes[1].catch_up().await.unwrap();
    assert_eq!(nodes[1].state().sessions[&sid(1)].token.run, 9);
    assert!(nodes[1].propose(create(1)).await.unwrap().ok().is_err(), "a refusal is an answer");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_forwarded_proposal_whose_answer_is_lost_is_applied_once() {
    let mut g = Group::new(timing());
    let nodes = g.voters(3).await;
    with_session(&nodes[0]).await;
    let led = leader(&nodes).await.number();
    let follower = nodes.iter().find(|n| n.number() != led).unwrap();
    for n in 1..=3 {
        g.net.lose_answers(1);
        assert_eq!(run(follower.propose(begin(1)).await.unwrap()), n);
        assert_eq!(g.net.lost_answers(), n as u32, "the answer was lost, and asked for again");
    }
    assert_eq!(follower.state().sessions[&sid(1)].token.run, 3);
    assert!(follower.state().answers_kept() < 16, "answers that are known are forgotten");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn proposals_under_way_while_the_leader_dies_are_each_applied_once() {
    let mut g = Group::new(timing());
    let mut nodes = g.voters(3).await;
    with_session(&nodes[0]).await;
    let led = leader(&nodes).await.number();
    let at = nodes.iter().position(|n| n.number() == led).unwrap();
    let dying = nodes.remove(at);
    let mut work = JoinSet::new();
    for n in 0..100 {
        let node = nodes[n % 2].clone();
        work.spawn(async move { run(node.propose(begin(1)).await.unwrap()) });
    }
    // Dies once some of them are decided.
    until("some runs", &nodes[0], |s| s.sessions.get(&sid(1)).is_some_and(|s| s.token.run >= 10)).await;
    g.stop(dying).await;
    let runs: BTreeSet<u64> = within("all answers", work.join_all()).await.into_iter().collect();
    assert_eq!(runs, (1..=100).collect(), "each once, and each proposer has its own answer");
    leader(&nodes).await;
    for node in &nodes {
        node.catch_up().await.unwrap();
        assert_eq!(node.state().sessions[&sid(1)].token.run, 100);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_isolated_leader_cannot_show_that_it_leads_and_decides_nothing() {
    let mut g = Group::new(timing());
    let nodes = g.voters(3).await;
    with_session(&nodes[0]).await;
    let old = leader(&nodes).await;
    g.net.isolate(old.number());
    let rest: Vec<_> = nodes.iter().filter(|n| n.number() != old.number()).cloned().collect();
    let stale = {
        let old = old.clone();
        tokio::spawn(async move { old.propose(begin(1)).await })
    };
    assert!(old.quorum_round().await.is_err());
    let new = leader(&rest).await;
    assert!(old.quorum_round().await.is_err(), "it believes that it leads, and cannot show it");
    assert!(new.leadership().borrow().term > old.leadership().borrow().term);
    assert_eq!(run(new.propose(begin(1)).await.unwrap()), 1);
    g.net.heal();
    // The stale proposal gets through in the end, behind what was decided meanwhile, or gives up; never before it.
    match within("the stale proposal", stale).await.unwrap() {
        Ok(response) => assert_eq!(run(response), 2),
        Err(e) => assert!(matches!(e, crate::host::ProposeError::NoQuorum { .. }), "{e}"),
    }
}

/// F2: an election takes less than a lease, so that no lease runs out because of it alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_election_is_over_well_within_a_lease() {
    let mut g = Group::new(Timing::default());
    let mut nodes = g.voters(3).await;
    let lease = Duration::from_millis(FleetPolicy::default().lease_ms.into());
    let led = leader(&nodes).await.number();
    let at = nodes.iter().position(|n| n.number() == led).unwrap();
    let dying = nodes.remove(at);
    let start = Instant::now();
    g.net.isolate(dying.number());
    leader(&nodes).await;
    let took = start.elapsed();
    assert!(took < lease, "the first quorum round of a new leader came after {took:?}");
}

/// F3: a change of voters that is half done when its leader is cut off does not keep a leader from appearing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_that_restarts_leads_again_only_in_a_later_term() {
    let mut g = Group::new(timing());
    let nodes = g.voters(3).await;
    let led = leader(&nodes).await;
    let (number, term) = (led.number(), led.leadership().borrow().term);
    for node in nodes {
        g.stop(node).await;
    }
    // The old leader is back first, so nobody was elected meanwhile.
    let mut nodes = vec![g.start(number).await];
    assert!(!nodes[0].leadership().borrow().me);
    for other in (1..=3).filter(|n| *n != number) {
        nodes.push(g.start(other).await);
    }
    let now = leader(&nodes).await.leadership().borrow().term;
    assert!(now > term, "term {now} follows term {term}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_appears_after_a_membership_change_in_flight() {
    let mut g = Group::new(timing());
    let mut nodes = g.voters(3).await;
    nodes.push(g.start(4).await);
    let old = leader(&nodes).await;
    old.ensure_learner(4).await.unwrap();
    until("node 4 has the fleet", &nodes[3], FleetState::is_founded).await;
    let voters: BTreeSet<u64> = [1, 2, 3, 4].into_iter().filter(|n| *n != old.number() % 3 + 1).collect();
    for _ in 0..3 {
        let led = leader(&nodes).await;
        g.net.isolate(led.number());
        let change = {
            let (led, voters, guard) = (led.clone(), voters.clone(), led.membership().guard);
            tokio::spawn(async move { led.set_voters(&voters, guard).await })
        };
        let rest: Vec<_> = nodes.iter().filter(|n| n.number() != led.number()).cloned().collect();
        leader(&rest).await;
        g.net.heal();
        drop(change);
        let led = leader(&nodes).await;
        assert!(led.propose(image()).await.unwrap().ok().is_ok());
    }
    let done = async {
        loop {
            let led = leader(&nodes).await;
            let guard = led.membership().guard;
            match led.set_voters(&voters, guard).await {
                Ok(()) => return led,
                Err(e) => assert!(!matches!(e, ChangeError::Stopped(_)), "{e}"),
            }
        }
    };
    let led = within("the change is made", done).await;
    let now = led.membership();
    assert!(now.voters == voters && !now.joint);
    assert_eq!(led.progress().map(|p| p.matched.len() >= 3), Some(true));
}

/// F4: the log that a member misses was purged: it gets a snapshot, in pieces.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_missed_purged_entries_catches_up_from_a_snapshot() {
    let mut g = Group::new(Timing { snapshot_entries: 20, kept_entries: 5, ..timing() });
    let mut nodes = g.voters(3).await;
    with_session(&nodes[0]).await;
    let led = leader(&nodes).await;
    let at = nodes.iter().position(|n| n.number() != led.number()).unwrap();
    let (away, number) = (nodes.remove(at), (at + 1) as u64);
    assert_eq!(away.number(), number);
    let missed = away.applied();
    g.stop(away).await;
    // Large enough for several pieces.
    let long: Vec<String> = (0..5).map(|n| n.to_string().repeat(1 << 20)).collect();
    led.propose(Command::SetCommand { id: sid(1), command: long.clone() }).await.unwrap().ok().unwrap();
    for _ in 0..60 {
        led.propose(begin(1)).await.unwrap();
    }
    let purged = async {
        let mut metrics = led.inner.raft.metrics();
        use openraft::async_runtime::watch::WatchReceiver;
        loop {
            if metrics.borrow_watched().purged.is_some_and(|p| p.index() > missed) {
                return;
            }
            metrics.changed().await.unwrap();
        }
    };
    within("the log is purged", purged).await;
    let back = g.start(number).await;
    until("the runs are there", &back, |s| s.sessions.get(&sid(1)).is_some_and(|s| s.token.run == 60)).await;
    back.catch_up().await.unwrap();
    led.catch_up().await.unwrap();
    assert_eq!(json(&back), json(&led));
    assert_eq!(back.state().sessions[&sid(1)].command.as_ref(), Some(&long));
    g.stop(back).await;
    // And what it stored is enough to go on from.
    let again = g.start(number).await;
    assert!(again.state().sessions.contains_key(&sid(1)), "the snapshot is loaded before anybody is asked");
    assert_eq!(run(again.propose(begin(1)).await.unwrap()), 61);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changes_of_voters_are_guarded_and_for_the_leader_only() {
    let mut g = Group::new(timing());
    let nodes = g.voters(3).await;
    let led = leader(&nodes).await;
    let old = led.membership();
    assert_eq!((old.voters.len(), old.learners.len(), old.joint), (3, 0, false));
    let two: BTreeSet<u64> = [led.number(), led.number() % 3 + 1].into();
    led.set_voters(&two, old.guard).await.unwrap();
    assert_eq!(led.set_voters(&old.voters, old.guard).await, Err(ChangeError::Changed));
    let now = led.membership();
    assert_eq!((now.voters.clone(), now.learners.len()), (two.clone(), 1), "who votes no more still learns");
    let follower = nodes.iter().find(|n| n.number() != led.number() && two.contains(&n.number())).unwrap();
    let refused = follower.ensure_learner(9).await;
    assert!(matches!(refused, Err(ChangeError::NotLeader(_))), "{refused:?}");
    let voter = led.drop_learner(follower.number()).await;
    assert!(matches!(voter, Err(ChangeError::Refused(_))), "{voter:?}");
    let learner = *now.learners.first().unwrap();
    led.drop_learner(learner).await.unwrap();
    assert!(led.membership().learners.is_empty());
    led.hand_over(follower.number()).await.unwrap();
    let mut leadership = follower.leadership();
    within("the follower leads", leadership.wait_for(|l| l.me)).await.unwrap();
}
