//! Gossip between real nodes: convergence, death, restart, churn.

use std::{collections::BTreeMap, time::Duration};

use ks_net::{Gossip, GossipTiming, LiveNode, NodeFacts, PeerId};

use super::{Node, fleet, within};

const TIMING: GossipTiming = GossipTiming {
    round: Duration::from_millis(40),
    refresh: Duration::from_millis(120),
    dead_after: Duration::from_millis(1_500),
    forget_after: Duration::from_millis(2_500),
};

fn facts(number: u64, incarnation: u64) -> NodeFacts {
    NodeFacts { number, incarnation, profiles: vec!["p".into()], ..NodeFacts::default() }
}

async fn see(gossip: &Gossip, what: &str, wanted: impl Fn(&BTreeMap<PeerId, LiveNode>) -> bool) {
    let mut live = gossip.live();
    within(20, what, live.wait_for(|live| wanted(live))).await.unwrap();
}

fn start(node: &Node, number: u64, incarnation: u64) -> Gossip {
    let gossip = Gossip::start(node.control.clone(), "fleet", TIMING);
    gossip.set_facts(facts(number, incarnation));
    gossip
}

#[tokio::test(flavor = "multi_thread")]
async fn three_nodes_see_each_other_each_change_and_each_death() {
    let nodes = fleet(3).await;
    let mut gossips: Vec<_> = nodes.iter().zip(1..).map(|(node, number)| start(node, number, 7)).collect();
    let start_of_all = tokio::time::Instant::now();
    for gossip in &gossips {
        see(gossip, "three nodes", |live| live.len() == 3).await;
    }
    println!("three nodes see three after {:?}", start_of_all.elapsed());
    let first = nodes[0].id();
    gossips[0].set_facts(NodeFacts { sessions: 42, ..facts(1, 7) });
    for gossip in &gossips {
        see(gossip, "a changed record", |live| live.get(&first).is_some_and(|node| node.facts.sessions == 42)).await;
    }
    let record = gossips[2].live().borrow()[&first].clone();
    assert_eq!((record.facts.number, record.facts.incarnation, record.facts.profiles), (1, 7, vec!["p".to_owned()]));
    assert!(gossips[2].now_ms() - record.seen_ms < 10_000);

    // The third one leaves without a word.
    let gone = nodes[2].id();
    drop(gossips.pop());
    nodes[2].control.shutdown().await;
    for gossip in &gossips {
        see(gossip, "a death", |live| !live.contains_key(&gone)).await;
        assert_eq!(gossip.live().borrow().len(), 2);
    }
    // It comes back at another address, with the same key and as another incarnation.
    let back = Node::start_with(nodes[2].key.clone(), super::any_port()).await;
    back.allow(&[&nodes[0], &nodes[1]]);
    let gossip = start(&back, 3, 8);
    see(&gossip, "all three", |live| live.len() == 3).await;
    for gossip in &gossips {
        see(gossip, "the new incarnation", |live| live.get(&gone).is_some_and(|node| node.facts.incarnation == 8)).await;
    }
    // A node that is no longer a member is gone from the board at once, alive or not.
    nodes[0].allow(&[&nodes[1]]);
    see(&gossips[0], "the removal", |live| !live.contains_key(&gone)).await;
    assert_eq!(gossips.iter().map(|gossip| gossip.stats().restarts).sum::<u64>(), 0);
}

/// F9 for gossip: everybody has forgotten everybody, and then the members can reach each other again.
#[tokio::test(flavor = "multi_thread")]
async fn f9_after_all_is_forgotten_the_members_meet_again() {
    let nodes = fleet(2).await;
    let gossips = [start(&nodes[0], 1, 7), start(&nodes[1], 2, 7)];
    for gossip in &gossips {
        see(gossip, "both", |live| live.len() == 2).await;
    }
    for node in &nodes {
        node.control.allow(BTreeMap::new());
    }
    for gossip in &gossips {
        see(gossip, "solitude", |live| live.len() == 1).await;
        let forgotten = async {
            let mut live = gossip.live();
            while gossip.stats().entries != 1 {
                live.changed().await.unwrap();
            }
        };
        within(20, "chitchat forgets", forgotten).await;
    }
    nodes[0].allow(&[&nodes[1]]);
    nodes[1].allow(&[&nodes[0]]);
    for gossip in &gossips {
        see(gossip, "both again", |live| live.len() == 2).await;
    }
}

/// F6: 200 joins and leaves; what is kept of them stays bounded and vanishes.
#[tokio::test(flavor = "multi_thread")]
async fn f6_two_hundred_joins_and_leaves_leave_nothing_behind() {
    let stay = fleet(2).await;
    let gossips = [start(&stay[0], 1, 7), start(&stay[1], 2, 7)];
    let all = stay.iter().map(Node::entry);
    let mut most = 0;
    for round in 0..20_u64 {
        // Ten members at a time, new keys each time.
        let mut guests = Vec::new();
        for _ in 0..10 {
            guests.push(Node::start().await);
        }
        let members: BTreeMap<_, _> = all.clone().chain(guests.iter().map(Node::entry)).collect();
        for node in stay.iter().chain(&guests) {
            node.control.allow(members.clone());
        }
        let theirs: Vec<_> = guests.iter().zip(0..).map(|(node, i)| start(node, 100 + round * 10 + i, round)).collect();
        for gossip in &gossips {
            see(gossip, "twelve nodes", |live| live.len() == 12).await;
            most = most.max(gossip.stats().entries);
        }
        drop(theirs);
        for node in &stay {
            node.control.allow(all.clone().collect());
        }
        for guest in guests {
            guest.control.shutdown().await;
        }
    }
    println!("at most {most} entries while 200 nodes came and went");
    for gossip in &gossips {
        see(gossip, "the two that stay", |live| live.len() == 2).await;
        let mut live = gossip.live();
        let empty = async {
            while gossip.stats().entries != 2 {
                live.changed().await.unwrap();
            }
        };
        within(30, "dead incarnations vanish", empty).await;
        assert_eq!(gossip.stats().restarts, 0);
    }
    for node in &stay {
        assert_eq!(node.control.peers().borrow().len(), 1);
    }
}
