//! A member that does not keep to the protocols: odd frames, other people's records, packets that reach chitchat's asserts.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use chitchat::{ChitchatId, DeletionStatus, VersionedValue, spawn_chitchat};
use futures::{AsyncReadExt as _, AsyncWriteExt as _, FutureExt as _, future::BoxFuture};
use libp2p::{PeerId, identity::Keypair};
use tokio::time::timeout;

use super::{
    call::{Handler, MESSAGE_BYTES_MAX, Proto},
    control::{ControlConfig, ControlPlane, GOSSIP},
    gossip::{Gossip, GossipTiming},
    gossip_wire::{Post, address_of, some_member},
};
use crate::{NodeFacts, control_addr};

const TIMING: GossipTiming = GossipTiming {
    round: Duration::from_millis(40),
    refresh: Duration::from_millis(120),
    dead_after: Duration::from_millis(3_000),
    forget_after: Duration::from_millis(3_000),
};

#[derive(Default)]
struct Count(AtomicU64);

impl Handler for Count {
    fn handle(&self, _: PeerId, _: Proto, request: Vec<u8>) -> BoxFuture<'static, Vec<u8>> {
        self.0.fetch_add(1, Ordering::SeqCst);
        async move { request }.boxed()
    }
}

async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    timeout(Duration::from_secs(20), future).await.unwrap_or_else(|_| panic!("not in time: {what}"))
}

async fn start() -> (ControlPlane, Arc<Count>) {
    let count = Arc::new(Count::default());
    let config = ControlConfig::new(Keypair::generate_ed25519(), vec![control_addr(([127, 0, 0, 1], 0).into())]);
    (ControlPlane::start(config, count.clone()).await.unwrap(), count)
}

/// `n` control planes that are connected with each other.
async fn fleet(n: usize) -> Vec<(ControlPlane, Arc<Count>)> {
    let mut all = Vec::new();
    for _ in 0..n {
        all.push(start().await);
    }
    let members: BTreeMap<_, _> = all.iter().map(|(control, _)| (control.me(), control.listening())).collect();
    for (control, _) in &all {
        control.allow(members.clone());
    }
    for (control, _) in &all {
        for peer in members.keys().filter(|peer| **peer != control.me()) {
            within("a connection", control.connected(*peer)).await.unwrap();
        }
    }
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn frames_that_lie_are_refused_and_reach_no_handler() {
    let all = fleet(2).await;
    let ((a, _), (b, count)) = (&all[0], &all[1]);
    let too_long = u32::try_from(MESSAGE_BYTES_MAX + 1).unwrap();
    // A length above the limit is refused unread; one that is not kept is not waited for once the stream ends.
    for (bytes, want) in [
        (u32::MAX.to_le_bytes().to_vec(), Some(2)),
        (too_long.to_le_bytes().to_vec(), Some(2)),
        ([&1000_u32.to_le_bytes()[..], b"short"].concat(), None),
        (vec![1, 0], None),
        (vec![], None),
    ] {
        let mut stream = a.open(b.me(), Proto::Raft.name()).await.unwrap();
        stream.write_all(&bytes).await.unwrap();
        stream.close().await.unwrap();
        let mut answer = Vec::new();
        let read = within("an end", stream.read_to_end(&mut answer)).await;
        assert_eq!(answer.first().copied(), want, "{bytes:?} {read:?}");
    }
    assert_eq!(count.0.load(Ordering::SeqCst), 0);
    // Sixteen megabytes announced on each of 64 calls, nothing sent: nothing is kept for them, and other protocols go on.
    let mut held = Vec::new();
    for _ in 0..64 {
        let mut stream = a.open(b.me(), Proto::Raft.name()).await.unwrap();
        stream.write_all(&u32::try_from(MESSAGE_BYTES_MAX).unwrap().to_le_bytes()).await.unwrap();
        stream.flush().await.unwrap();
        held.push(stream);
    }
    let answer = a.call(b.me(), Proto::Command, b"x".to_vec(), Duration::from_secs(5)).await.unwrap();
    assert_eq!(answer, b"x");
    drop(held);
    let free = async { while a.call(b.me(), Proto::Raft, b"x".to_vec(), Duration::from_secs(5)).await.is_err() {} };
    within("the reset calls are forgotten", free).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listener_that_is_lost_comes_back_at_its_port() {
    let (a, _) = start().await;
    let before = a.listening();
    for _ in 0..2 {
        let mut listening = a.listening_changes();
        listening.borrow_and_update();
        a.drop_listeners().await;
        within("the loss", listening.changed()).await.unwrap();
        within("the return", listening.wait_for(|all| *all == before)).await.unwrap();
        let (b, _) = start().await;
        a.allow(BTreeMap::from([(b.me(), vec![])]));
        b.allow(BTreeMap::from([(a.me(), before.clone())]));
        within("a connection", b.connected(a.me())).await.unwrap();
        let answer = b.call(a.me(), Proto::Raft, b"x".to_vec(), Duration::from_secs(5)).await.unwrap();
        assert_eq!(answer, b"x");
    }
}

/// Runs chitchat as `liar`, with a state that claims things of others.
async fn lie(liar: &ControlPlane, about: ChitchatId, text: &str, version: u64) -> chitchat::ChitchatHandle {
    let post = Post::new(liar.clone()).unwrap();
    let me = liar.me();
    let config = chitchat::ChitchatConfig {
        chitchat_id: ChitchatId::new(me.to_base58(), 1, address_of(&me)),
        cluster_id: "fleet".into(),
        gossip_interval: TIMING.round,
        listen_addr: address_of(&me),
        seed_nodes: vec![some_member().to_string()],
        failure_detector_config: chitchat::FailureDetectorConfig { initial_interval: TIMING.round, ..Default::default() },
        marked_for_deletion_grace_period: Duration::from_secs(60),
        catchup_callback: None,
        extra_liveness_predicate: None,
    };
    let handle = spawn_chitchat(config, Vec::new(), &post).await.unwrap();
    let value = VersionedValue { value: text.to_owned(), version, status: DeletionStatus::Set };
    handle
        .with_chitchat(|state| {
            let values = [("facts".to_owned(), value.clone())];
            state.reset_node_state_if_update(&about, values.into_iter(), version, 0);
        })
        .await;
    handle
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_forged_for_another_member_is_ignored_and_counted() {
    let all = fleet(3).await;
    let (a, victim, liar) = (&all[0].0, &all[1].0, &all[2].0);
    let gossip = Gossip::start(a.clone(), "fleet", TIMING);
    gossip.set_facts(NodeFacts { number: 1, ..NodeFacts::default() });
    // The liar signs, well, with its own key, for a run of the victim that never was; then it replays nothing but lies.
    let forged = NodeFacts { number: 2, seq: u64::MAX, sessions: 666, ..NodeFacts::default() }.sign(liar.key(), "fleet").unwrap();
    let about = ChitchatId::new(victim.me().to_base58(), 5, address_of(&victim.me()));
    let handle = lie(liar, about, &forged, 3).await;
    let refused = async {
        let mut live = gossip.live();
        while gossip.stats().refused == 0 {
            live.changed().await.unwrap();
        }
    };
    within("the forged record arrives", refused).await;
    assert!(!gossip.live().borrow().contains_key(&victim.me()));
    // The victim speaks for itself and is heard; the lie stays one, counted once.
    let honest = Gossip::start(victim.clone(), "fleet", TIMING);
    honest.set_facts(NodeFacts { number: 2, sessions: 1, ..NodeFacts::default() });
    let mut live = gossip.live();
    let heard = live.wait_for(|live| live.get(&victim.me()).is_some_and(|node| node.facts.sessions == 1));
    within("the victim is heard", heard).await.unwrap();
    assert_eq!(gossip.stats().refused, 1);
    assert_eq!(gossip.stats().restarts, 0);
    handle.abort();
}

/// A member claims that the victim's own entry has the highest version there is: the victim's chitchat cannot count on and dies on
/// an assert. Only its task does: it starts again with an empty state, and the board is filled all the while.
#[tokio::test(flavor = "multi_thread")]
async fn a_packet_that_reaches_an_assert_restarts_gossip_and_nothing_else() {
    let all = fleet(3).await;
    let (victim, honest, liar) = (&all[0].0, &all[1].0, &all[2].0);
    let gossip = Gossip::start(victim.clone(), "fleet", TIMING);
    let other = Gossip::start(honest.clone(), "fleet", TIMING);
    gossip.set_facts(NodeFacts { number: 1, ..NodeFacts::default() });
    other.set_facts(NodeFacts { number: 2, ..NodeFacts::default() });
    let mut live = gossip.live();
    within("both", live.wait_for(|live| live.len() == 2)).await.unwrap();
    let generation = gossip.generation();
    let about = ChitchatId::new(victim.me().to_base58(), generation, address_of(&victim.me()));
    let handle = lie(liar, about, "x", u64::MAX).await;
    let restarted = async {
        while gossip.stats().restarts == 0 {
            live.changed().await.unwrap();
        }
    };
    within("the restart", restarted).await;
    handle.abort();
    let now = gossip.now_ms();
    let fresh = live.wait_for(|live| live.len() == 2 && live.get(&honest.me()).is_some_and(|node| node.seen_ms > now));
    within("gossip goes on", fresh).await.unwrap();
    let mut theirs = other.live();
    let now = other.now_ms();
    let heard = theirs.wait_for(|live| live.get(&victim.me()).is_some_and(|node| node.seen_ms > now));
    within("the victim is heard again", heard).await.unwrap();
    assert_eq!(victim.call(honest.me(), Proto::Raft, b"x".to_vec(), Duration::from_secs(5)).await.unwrap(), b"x");
}

#[tokio::test(flavor = "multi_thread")]
async fn packets_that_are_none_are_ignored() {
    let all = fleet(2).await;
    let (a, liar) = (&all[0].0, &all[1].0);
    let gossip = Gossip::start(a.clone(), "fleet", TIMING);
    gossip.set_facts(NodeFacts::default());
    for packet in [vec![], vec![0xff; 100], vec![0, 0, 0], vec![1; 65_507]] {
        let mut stream = liar.open(a.me(), GOSSIP).await.unwrap();
        stream.write_all(&u32::try_from(packet.len()).unwrap().to_le_bytes()).await.unwrap();
        stream.write_all(&packet).await.unwrap();
        stream.flush().await.unwrap();
        drop(stream);
    }
    // One above the limit: the stream is closed unread.
    let mut stream = liar.open(a.me(), GOSSIP).await.unwrap();
    stream.write_all(&u32::MAX.to_le_bytes()).await.unwrap();
    stream.flush().await.unwrap();
    assert!(!matches!(within("the end", stream.read(&mut [0; 1])).await, Ok(1..)));
    // An honest gossip of the same peer is heard after all that.
    let other = Gossip::start(liar.clone(), "fleet", TIMING);
    other.set_facts(NodeFacts { number: 2, ..NodeFacts::default() });
    let mut live = gossip.live();
    within("both", live.wait_for(|live| live.len() == 2)).await.unwrap();
    assert_eq!(gossip.stats().restarts, 0);
}
