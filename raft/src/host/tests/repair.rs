//! Recovery after the loss of a quorum, reset, import, and what strangers to the lineage are told.

use super::harness::*;
use crate::host::frame::{self, Answer, Ask, No, Process, Question, Tell};
use crate::host::{OfflineError, TokioRuntime, forget, import_alone, recover_alone};
use crate::*;
use std::collections::BTreeSet;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_survivor_is_recovered_and_the_others_come_back_as_learners_only() {
    let mut g = Group::new(timing());
    let nodes = g.voters(3).await;
    with_session(&nodes[0]).await;
    assert_eq!(run(nodes[0].propose(begin(1)).await.unwrap()), 1);
    let lineage = nodes[0].inner.lineage();
    for node in &nodes {
        node.catch_up().await.unwrap();
    }
    for node in nodes {
        g.stop(node).await;
    }
    let done = recover_alone(&g.dir(3), 3).await.unwrap();
    assert_eq!((done.generation, done.lineage, done.members), (1, lineage + 1, vec![1]));
    let survivor = g.start(3).await;
    leader(std::slice::from_ref(&survivor)).await;
    let token = survivor.state().sessions[&sid(1)].token;
    assert_eq!((token.generation, token.run), (1, 1), "every run of before is over");
    assert_eq!(run(survivor.propose(begin(1)).await.unwrap()), 2);

    // The other two are a majority of the old lineage, and do not get to disturb the new one.
    let (one, two) = (g.start(1).await, g.start(2).await);
    let old = leader(&[one.clone(), two.clone()]).await;
    old.propose(begin(1)).await.unwrap();
    assert!(survivor.quorum_round().await.is_ok());
    assert_eq!(survivor.state().sessions[&sid(1)].token.run, 2);

    // The new lineage reaches one of them: it says that it must be reset, and is, and learns.
    survivor.ensure_learner(2).await.unwrap();
    let mut superseded = two.superseded();
    let newer = within("it notices", superseded.wait_for(Option::is_some)).await.unwrap().unwrap();
    assert_eq!(newer, done.lineage);
    g.stop(two).await;
    forget(&g.dir(2), 2, newer).await.unwrap();
    let two = g.start(2).await;
    until("it learns", &two, |s| s.generation == 1 && s.sessions[&sid(1)].token.run == 2).await;
    set_voters(&survivor, [2, 3]).await;
    assert_eq!(run(two.propose(begin(1)).await.unwrap()), 3);
    assert_eq!(two.membership().voters, BTreeSet::from([2, 3]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn recovery_keeps_entries_that_may_have_been_acknowledged_and_can_run_again() {
    let mut g = Group::new(timing());
    let node = g.start(1).await;
    node.found().await.unwrap();
    with_session(&node).await;
    for _ in 0..5 {
        node.propose(begin(1)).await.unwrap();
    }
    g.stop(node).await;
    let first = recover_alone(&g.dir(1), 1).await.unwrap();
    assert!(first.applied > 0, "the last entries were not known to be committed");
    let second = recover_alone(&g.dir(1), 1).await.unwrap();
    assert_eq!((second.generation, second.lineage, second.applied), (2, first.lineage + 1, 0));
    let node = g.start(1).await;
    node.found().await.unwrap();
    assert_eq!(run(node.propose(begin(1)).await.unwrap()), 6);
    g.stop(node).await;
    let other = recover_alone(&g.dir(1), 2).await;
    assert!(matches!(other, Err(OfflineError::OtherNode { stored: 1, asked: 2 })));
    let empty = recover_alone(&g.dir(9), 9).await;
    assert!(matches!(empty, Err(OfflineError::Empty { .. })));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lone_nodes_earlier_state_is_imported_once_and_grows_into_a_fleet() {
    let mut g = Group::new(timing());
    let mut before = FleetState::default();
    before.apply(image());
    before.apply(create(1)).ok().unwrap();
    before.apply(begin(1)).ok().unwrap();
    import_alone(&g.dir(1), &before).await.unwrap();
    let again = import_alone(&g.dir(1), &before).await;
    assert!(matches!(again, Err(OfflineError::NotEmpty { .. })));
    let node = g.start(1).await;
    node.found().await.unwrap();
    assert_eq!(json(&node)["sessions"], serde_json::to_value(&before.sessions).unwrap());
    node.propose(found()).await.unwrap().ok().unwrap();
    assert_eq!(node.state().sessions[&sid(1)].replicas, [1]);
    let two = g.start(2).await;
    node.ensure_learner(2).await.unwrap();
    until("it has the session", &two, |s| s.sessions.contains_key(&sid(1)) && s.is_founded()).await;
    assert_eq!(run(two.propose(begin(1)).await.unwrap()), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn malformed_and_misdirected_requests_are_refused_by_name() {
    let mut g = Group::new(timing());
    let node = g.start(1).await;
    node.found().await.unwrap();
    let ask = async |from: u64, request: Vec<u8>| {
        let answer = node.serve(from, &request).await;
        match frame::decode::<Answer<TokioRuntime>>(&answer).unwrap().0.tell {
            Tell::Refused(no) => no,
            _ => panic!("it was carried out"),
        }
    };
    let question = |lineage, to, ask| {
        let question: Question<TokioRuntime> = Question { lineage, to, process: Process { incarnation: 5, boot: 1 }, ask };
        frame::encode(&question, &[]).unwrap()
    };
    assert!(matches!(ask(2, vec![1, 2, 3]).await, No::Malformed(_)));
    assert_eq!(ask(2, question(1, 9, Ask::Read)).await, No::NotMe { to: 9, me: 1 });
    assert_eq!(ask(2, question(0, 1, Ask::Read)).await, No::OldLineage { theirs: 0, mine: 1 });
    assert_eq!(ask(2, question(4, 1, Ask::Read)).await, No::NewLineage { theirs: 4, mine: 1 });
    assert_eq!(*node.superseded().borrow(), Some(4));
    let id = ProposalId { node: 3, boot: 1, nonce: 1, seq: 0 };
    let forged = Ask::Propose(Proposal { id, done_below: 0, command: Command::RaiseGeneration {} });
    assert!(matches!(ask(2, question(1, 1, forged)).await, No::Malformed(_)), "in another node's name");
    assert_eq!(node.state().generation, 0);
}

/// A member whose database was lost or put back from an older copy is not believed, and does not stop the leader.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_lost_its_database_is_refused_and_the_others_go_on() {
    let mut g = Group::new(timing());
    let mut nodes = g.voters(3).await;
    with_session(&nodes[0]).await;
    let led = leader(&nodes).await;
    let at = nodes.iter().position(|n| n.number() != led.number()).unwrap();
    let wiped = nodes.remove(at);
    let number = wiped.number();
    wiped.propose(begin(1)).await.unwrap();
    g.stop(wiped).await;
    std::fs::remove_dir_all(g.dir(number)).unwrap();
    let wiped = g.start(number).await;
    let refused = async {
        while led.suspects().get(&number).is_none_or(|s| s.rolled_back == 0) {
            led.quorum_round().await.unwrap();
        }
    };
    within("the leader notices", refused).await;
    for n in 2..=5 {
        assert_eq!(run(led.propose(begin(1)).await.unwrap()), n);
    }
    assert!(wiped.state().sessions.is_empty(), "it takes no part");
    assert_eq!(wiped.membership().voters.len(), 0);
}
