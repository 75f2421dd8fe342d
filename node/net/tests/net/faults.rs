//! Restarts and outages: the control plane finds its peers again by itself.

use std::{
    collections::BTreeMap,
    sync::{Arc, atomic::Ordering, mpsc},
    time::{Duration, Instant},
};

use ks_net::{ControlPlane, Keypair, Multiaddr, PeerId, Proto, control_addr, socket_addr};

use super::{Mirror, Node, any_port, config, relay, within};

/// A node on a runtime of its own, so that it can be killed.
struct Mortal {
    runtime: Option<tokio::runtime::Runtime>,
    listening: Vec<Multiaddr>,
}

impl Mortal {
    fn start(key: Keypair, listen: Multiaddr, peer: (PeerId, Vec<Multiaddr>)) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let (sender, receiver) = mpsc::channel();
        runtime.spawn(async move {
            let control = ControlPlane::start(config(&key, listen), Arc::new(Mirror::default())).await.unwrap();
            control.allow(BTreeMap::from([peer]));
            sender.send(control.listening()).unwrap();
            std::future::pending::<()>().await;
            drop(control);
        });
        let listening = receiver.recv_timeout(Duration::from_secs(10)).unwrap();
        Self { runtime: Some(runtime), listening }
    }

    /// Ends every task where it stands; when this returns, the port is free.
    fn kill(&mut self) {
        let runtime = self.runtime.take().unwrap();
        std::thread::spawn(move || runtime.shutdown_timeout(Duration::from_secs(5))).join().unwrap();
    }
}

impl Drop for Mortal {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

async fn until_answered(a: &Node, peer: PeerId) -> Duration {
    let start = Instant::now();
    let answered = async {
        loop {
            match a.control.call(peer, Proto::Raft, b"abc".to_vec(), Duration::from_millis(200)).await {
                Ok(answer) => return assert_eq!(answer, b"cba"),
                Err(_) => tokio::task::yield_now().await,
            }
        }
    };
    within(20, "an answer", answered).await;
    start.elapsed()
}

/// F5: a peer dies and comes back at the same address, and nothing of its death arrives: the pooled connection is dead and this
/// node believes in it. The restarted peer dials its members, as every node does, and that ends the dead connection at once.
#[tokio::test(flavor = "multi_thread")]
async fn f5_a_killed_peer_is_found_again_after_its_restart() {
    let a = Node::start().await;
    let key = Keypair::generate_ed25519();
    let peer = key.public().to_peer_id();
    let (to_a, cuts_to_a) = relay::relay(socket_addr(&a.control.listening()[0]).unwrap()).await;
    let entry = || (a.id(), vec![control_addr(to_a)]);
    let mut b = Mortal::start(key.clone(), any_port(), entry());
    let address = b.listening[0].clone();
    let (to_b, cuts_to_b) = relay::relay(socket_addr(&address).unwrap()).await;
    a.control.allow(BTreeMap::from([(peer, vec![control_addr(to_b)])]));
    until_answered(&a, peer).await;
    for round in 0..3 {
        cuts_to_a.all(true);
        cuts_to_b.all(true);
        b.kill();
        assert!(a.control.peers().borrow()[&peer].connected, "this node still believes in the connection");
        cuts_to_a.all(false);
        cuts_to_b.all(false);
        b = Mortal::start(key.clone(), address.clone(), entry());
        let outage = until_answered(&a, peer).await;
        println!("restart {round}: answered {outage:?} after the peer listened again");
        assert!(outage < Duration::from_millis(1_200), "{outage:?}");
    }
}

/// F5, where only this node can dial: its dead connection ends by its silence, and that is the longest that it can take.
#[tokio::test(flavor = "multi_thread")]
async fn f5_a_restarted_peer_that_cannot_dial_is_found_within_the_idle_timeout() {
    let a = Node::start().await;
    let key = Keypair::generate_ed25519();
    let peer = key.public().to_peer_id();
    let mut b = Mortal::start(key.clone(), any_port(), (a.id(), vec![]));
    let address = b.listening[0].clone();
    let (front, cuts) = relay::relay(socket_addr(&address).unwrap()).await;
    a.control.allow(BTreeMap::from([(peer, vec![control_addr(front)])]));
    until_answered(&a, peer).await;
    cuts.all(true);
    b.kill();
    let _b = Mortal::start(key, address, (a.id(), vec![]));
    assert!(a.control.peers().borrow()[&peer].connected, "this node still believes in the connection");
    cuts.all(false);
    let outage = until_answered(&a, peer).await;
    println!("answered {outage:?} after the peer could be reached again");
    assert!(outage < Duration::from_millis(2_500), "{outage:?}");
}

/// F5, the other way round: the peer comes back at another port and dials; the connection that this node still believes in goes.
#[tokio::test(flavor = "multi_thread")]
async fn f5_a_peer_that_comes_back_elsewhere_replaces_its_dead_connection() {
    let a = Node::start().await;
    let key = Keypair::generate_ed25519();
    let peer = key.public().to_peer_id();
    let (front, cuts) = relay::relay(socket_addr(&a.control.listening()[0]).unwrap()).await;
    a.control.allow(BTreeMap::from([(peer, vec![])]));
    let mut b = Mortal::start(key.clone(), any_port(), (a.id(), vec![control_addr(front)]));
    until_answered(&a, peer).await;
    cuts.all(true);
    b.kill();
    assert!(a.control.peers().borrow()[&peer].connected, "this node still believes in the connection");
    let _b = Mortal::start(key, any_port(), a.entry());
    let outage = until_answered(&a, peer).await;
    println!("answered {outage:?} after the peer listened again");
    assert!(outage < Duration::from_millis(1_200), "{outage:?}");
}

/// F9: an outage many times longer than the longest pause between dials; the way back needs nobody.
#[tokio::test(flavor = "multi_thread")]
async fn f9_after_an_outage_of_any_length_the_peers_meet_again() {
    let a = Node::start().await;
    let key = Keypair::generate_ed25519();
    let peer = key.public().to_peer_id();
    let mut b = Mortal::start(key.clone(), any_port(), a.entry());
    let address = b.listening[0].clone();
    a.control.allow(BTreeMap::from([(peer, vec![address.clone()])]));
    until_answered(&a, peer).await;
    b.kill();
    // 12 failures reach the longest pause (100 ms here); each dial of a dead port takes its handshake timeout on top.
    let state = a.state(peer, "many failed dials", |state| state.failures >= 16).await;
    assert!(!state.connected && state.error.is_some(), "{state:?}");
    let _b = Mortal::start(key, address, (PeerId::random(), vec![]));
    // The restarted peer knows nobody: it neither dials nor lets in. Still no loop, still no end.
    let failures = a.control.peers().borrow()[&peer].failures;
    a.state(peer, "refused dials", |state| state.failures >= failures + 5).await;
    drop(_b);
}

/// As F9, and the peer is back for good: met within one pause and a handshake.
#[tokio::test(flavor = "multi_thread")]
async fn f9_the_way_back_takes_one_pause() {
    let a = Node::start().await;
    let key = Keypair::generate_ed25519();
    let peer = key.public().to_peer_id();
    let spare = Node::start().await;
    let address = spare.control.listening()[0].clone();
    spare.control.shutdown().await;
    a.control.allow(BTreeMap::from([(peer, vec![address.clone()])]));
    a.state(peer, "many failed dials", |state| state.failures >= 12).await;
    let entry = (a.id(), vec![]);
    let _b = Mortal::start(key, address, entry);
    let outage = until_answered(&a, peer).await;
    println!("answered {outage:?} after the peer listened, having been away from the start");
    assert!(outage < Duration::from_millis(1_500), "{outage:?}");
}

/// One direction lost: both sides see the connection end, and meet again when the packets flow again.
#[tokio::test(flavor = "multi_thread")]
async fn a_one_way_outage_is_noticed_on_both_sides_and_heals() {
    let (a, b) = (Node::start().await, Node::start().await);
    let (front, cuts) = relay::relay(socket_addr(&b.control.listening()[0]).unwrap()).await;
    a.control.allow(BTreeMap::from([(b.id(), vec![control_addr(front)])]));
    b.control.allow(BTreeMap::from([(a.id(), vec![])]));
    a.up(&b).await;
    for (name, cut) in [("there", &cuts.there), ("back", &cuts.back)] {
        assert_eq!(a.ask(&b, b"abc").await.unwrap(), b"cba");
        cut.store(true, Ordering::SeqCst);
        let start = Instant::now();
        let lost = a.control.call(b.id(), Proto::Raft, b"abc".to_vec(), Duration::from_millis(500)).await;
        assert!(lost.is_err(), "{name}: {lost:?}");
        for (node, peer) in [(&a, b.id()), (&b, a.id())] {
            node.state(peer, "the end of the connection", |state| !state.connected).await;
        }
        println!("cut {name}: both sides know after {:?}", start.elapsed());
        a.state(b.id(), "failed dials", |state| state.failures >= 2).await;
        cut.store(false, Ordering::SeqCst);
        a.up(&b).await;
        b.up(&a).await;
        until_answered(&a, b.id()).await;
    }
    assert!(cuts.dropped.load(Ordering::SeqCst) > 0);
}

/// A member that the other side does not know yet keeps trying, with pauses, and gets in as soon as it is known.
#[tokio::test(flavor = "multi_thread")]
async fn a_member_that_is_not_known_yet_gets_in_when_it_is() {
    let (a, b) = (Node::start().await, Node::start().await);
    a.allow(&[&b]);
    a.state(b.id(), "some refusals", |state| state.failures >= 4).await;
    b.control.allow(BTreeMap::from([(a.id(), vec![])]));
    a.state(b.id(), "a stable connection", |state| state.connected && state.failures == 0).await;
    assert_eq!(a.ask(&b, b"abc").await.unwrap(), b"cba");
}
