//! Calls and streams between members; nothing for anybody else.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use futures::{FutureExt as _, future::BoxFuture};
use ks_net::{
    CallError, ControlConfig, ControlPlane, Handler, Keypair, MESSAGE_BYTES_MAX, OpenError, PeerId, Proto, StartError,
    StreamProto, control_addr, socket_addr,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    sync::Semaphore,
};

use super::{Mirror, Node, any_port, config, fleet, within};

#[tokio::test(flavor = "multi_thread")]
async fn members_call_each_other_both_ways_up_to_the_limits() {
    let nodes = fleet(2).await;
    let (a, b) = (&nodes[0], &nodes[1]);
    assert_eq!(a.ask(b, b"abc").await.unwrap(), b"cba");
    assert_eq!(b.ask(a, b"").await.unwrap(), b"");
    let big: Vec<u8> = (0..MESSAGE_BYTES_MAX).map(|i| (i % 251) as u8).collect();
    let mut want = big.clone();
    want.reverse();
    for proto in [Proto::Raft, Proto::Command] {
        let answer = within(30, "16 MiB", a.control.call(b.id(), proto, big.clone(), Duration::from_secs(30))).await.unwrap();
        assert!(answer == want, "16 MiB come back as they must");
    }
    let calls = b.mirror.seen().0;
    let too_large = a.control.call(b.id(), Proto::Raft, vec![0; MESSAGE_BYTES_MAX + 1], Duration::from_secs(5)).await;
    assert!(matches!(&too_large, Err(CallError::RequestTooLarge { .. })), "{too_large:?}");
    assert!(too_large.unwrap_err().not_handled());
    assert_eq!(b.mirror.seen().0, calls);
    let mut times = Vec::new();
    for _ in 0..500 {
        let start = std::time::Instant::now();
        a.ask(b, &[7; 200]).await.unwrap();
        times.push(start.elapsed());
    }
    times.sort();
    println!("500 calls of 200 bytes one after another: p50 {:?}, p99 {:?}", times[250], times[495]);
    // The round-trip time is taken by itself.
    let state = a.state(b.id(), "a round-trip time", |state| state.rtt_us.is_some()).await;
    assert!(state.rtt_us.unwrap() < 1_000_000);
}

/// How a call's answer is to be made.
struct Odd;

impl Handler for Odd {
    fn handle(&self, _: PeerId, _: Proto, request: Vec<u8>) -> BoxFuture<'static, Vec<u8>> {
        async move {
            match request.as_slice() {
                b"huge" => vec![0; MESSAGE_BYTES_MAX + 1],
                b"never" => std::future::pending().await,
                b"panic" => panic!("asked for by the test"),
                _ => request,
            }
        }
        .boxed()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_without_an_answer_says_why() {
    let a = Node::start().await;
    let key = Keypair::generate_ed25519();
    let b = ControlPlane::start(config(&key, any_port()), Arc::new(Odd)).await.unwrap();
    a.control.allow(BTreeMap::from([(b.me(), b.listening())]));
    b.allow(BTreeMap::from([a.entry()]));
    within(10, "a connection", a.control.connected(b.me())).await.unwrap();
    let ask =
        async |text: &str, ms| a.control.call(b.me(), Proto::Command, text.into(), Duration::from_millis(ms)).await.unwrap_err();

    let error = ask("huge", 5_000).await;
    assert!(matches!(error, CallError::AnswerTooLarge { .. }) && !error.not_handled(), "{error}");
    let error = ask("never", 200).await;
    assert!(matches!(error, CallError::Timeout { .. }) && !error.not_handled(), "{error}");
    let error = ask("panic", 5_000).await;
    assert!(matches!(error, CallError::Lost { .. }) && !error.not_handled(), "{error}");
    assert_eq!(
        a.control.call(b.me(), Proto::Raft, b"x".to_vec(), Duration::from_secs(5)).await.unwrap(),
        b"x",
        "and calls go on"
    );

    let nobody = Keypair::generate_ed25519().public().to_peer_id();
    let error = a.control.call(nobody, Proto::Raft, Vec::new(), Duration::from_secs(5)).await.unwrap_err();
    assert!(matches!(error, CallError::NotConnected { .. }) && error.not_handled(), "{error}");
    assert!(error.to_string().contains("not a member"), "{error}");
}

/// Answers when it is let.
struct Gate(Arc<Semaphore>);

impl Handler for Gate {
    fn handle(&self, _: PeerId, _: Proto, request: Vec<u8>) -> BoxFuture<'static, Vec<u8>> {
        let gate = self.0.clone();
        async move {
            let _permit = gate.acquire().await;
            request
        }
        .boxed()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_peer_cannot_crowd_out_another_nor_one_protocol_the_other() {
    let (a, b) = (Node::start().await, Node::start().await);
    let gate = Arc::new(Semaphore::new(0));
    let key = Keypair::generate_ed25519();
    let c = ControlPlane::start(config(&key, any_port()), Arc::new(Gate(gate.clone()))).await.unwrap();
    c.allow(BTreeMap::from([a.entry(), b.entry()]));
    for node in [&a, &b] {
        node.control.allow(BTreeMap::from([(c.me(), c.listening())]));
        within(10, "a connection", node.control.connected(c.me())).await.unwrap();
    }
    let call = |node: &Node, proto| {
        let (control, to) = (node.control.clone(), c.me());
        tokio::spawn(async move { control.call(to, proto, b"x".to_vec(), Duration::from_secs(30)).await })
    };
    let mut calls: Vec<_> = (0..80).map(|_| call(&a, Proto::Raft)).collect();
    let mut busy = 0;
    while busy < 16 {
        let (first, _, rest) = within(10, "sixteen refusals", futures::future::select_all(calls)).await;
        assert!(matches!(first.unwrap(), Err(CallError::Busy { .. })));
        busy += 1;
        calls = rest;
    }
    let others = [call(&b, Proto::Raft), call(&a, Proto::Command)];
    gate.add_permits(1_000);
    for call in others.into_iter().chain(calls) {
        assert_eq!(within(10, "an answer", call).await.unwrap().unwrap(), b"x");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_carry_bytes_both_ways_and_close_half_by_half() {
    let nodes = fleet(2).await;
    let (a, b) = (&nodes[0], &nodes[1]);
    let mut incoming = b.control.incoming(StreamProto::Api).unwrap();
    assert!(b.control.incoming(StreamProto::Api).is_none(), "there is one receiver");
    let mut out = a.control.open_stream(b.id(), StreamProto::Api).await.unwrap();
    out.write_all(b"request").await.unwrap();
    out.shutdown().await.unwrap();
    let (from, mut stream) = within(5, "the stream", incoming.next()).await.unwrap();
    assert_eq!(from, a.id());
    let mut request = Vec::new();
    within(5, "the request", stream.read_to_end(&mut request)).await.unwrap();
    assert_eq!(request, b"request");
    let body: Vec<u8> = (0..3_000_000_u32).map(|i| (i % 241) as u8).collect();
    let sent = body.clone();
    tokio::spawn(async move {
        stream.write_all(&sent).await.unwrap();
        stream.shutdown().await.unwrap();
    });
    let mut answer = Vec::new();
    within(10, "the answer", out.read_to_end(&mut answer)).await.unwrap();
    assert!(answer == body);
    // A burst of streams arrives whole.
    for _ in 0..100 {
        let mut out = a.control.open_stream(b.id(), StreamProto::Api).await.unwrap();
        tokio::spawn(async move {
            out.write_all(b"1").await.unwrap();
            out.flush().await.unwrap();
            let _ = out.read_u8().await;
        });
    }
    for _ in 0..100 {
        let (_, mut stream) = within(5, "a stream of the burst", incoming.next()).await.unwrap();
        assert_eq!(stream.read_u8().await.unwrap(), b'1');
    }
    assert_eq!(b.control.dropped_streams(), 0);
    b.control.shutdown().await;
    assert!(within(5, "the end", incoming.next()).await.is_none());
}

/// Tunnels whose reader is stuck hold no call up: each stream has a window of its own and all of them fit in the connection's.
#[tokio::test(flavor = "multi_thread")]
async fn stuck_streams_do_not_block_calls() {
    let nodes = fleet(2).await;
    let (a, b) = (&nodes[0], &nodes[1]);
    let mut incoming = b.control.incoming(StreamProto::Api).unwrap();
    let mut held = Vec::new();
    let mut writers = Vec::new();
    for _ in 0..100 {
        let mut out = a.control.open_stream(b.id(), StreamProto::Api).await.unwrap();
        let (blocked, wait) = tokio::sync::oneshot::channel();
        writers.push(tokio::spawn(async move {
            let mut blocked = Some(blocked);
            loop {
                // A write that does not get on for this long has filled the window.
                let stuck = tokio::time::timeout(Duration::from_millis(300), out.write_all(&[7; 65_536])).await.is_err();
                if let Some(blocked) = blocked.take_if(|_| stuck) {
                    let _ = blocked.send(());
                }
            }
        }));
        held.push(wait);
    }
    let mut unread = Vec::new();
    for _ in 0..100 {
        unread.push(within(10, "a stream", incoming.next()).await.unwrap());
    }
    for wait in held {
        within(60, "a full window", wait).await.unwrap();
    }
    assert_eq!(within(5, "a call", a.ask(b, b"abc")).await.unwrap(), b"cba");
    for writer in writers {
        writer.abort();
    }
}

/// A stranger that knows address and PeerId gets through the handshake, which is what proves who it is, and not one byte further.
#[tokio::test(flavor = "multi_thread")]
async fn a_stranger_reaches_no_handler() {
    let nodes = fleet(2).await;
    let (a, b) = (&nodes[0], &nodes[1]);
    let mut incoming = a.control.incoming(StreamProto::Api).unwrap();
    let stranger = Node::start().await;
    stranger.allow(&[a]);
    let gossip = ks_net::Gossip::start(a.control.clone(), "f", ks_net::GossipTiming::default());
    let lies = ks_net::Gossip::start(stranger.control.clone(), "f", ks_net::GossipTiming::default());
    lies.set_facts(ks_net::NodeFacts::default());
    // It is refused again and again, and tries everything each time that it believes itself connected.
    let mut tries = 0;
    let mut peers = stranger.control.peers();
    while peers.borrow_and_update().get(&a.id()).is_none_or(|state| state.failures < 5) {
        for proto in [Proto::Raft, Proto::Command] {
            let answer = stranger.control.call(a.id(), proto, b"let me in".to_vec(), Duration::from_millis(300)).await;
            assert!(answer.is_err(), "{answer:?}");
            tries += 1;
        }
        if let Ok(mut stream) = stranger.control.open_stream(a.id(), StreamProto::Api).await {
            let _ = stream.write_all(b"GET / HTTP/1.1\r\n\r\n").await;
            let _ = stream.flush().await;
            assert!(!matches!(stream.read(&mut [0; 16]).await, Ok(1..)), "the stranger reads something");
        }
        within(10, "another refusal", peers.changed()).await.unwrap();
    }
    assert!(tries > 0);
    assert_eq!(a.mirror.seen(), (0, 0), "calls reached the handler");
    assert!(incoming.next().now_or_never().is_none(), "a stream reached the node");
    assert!(gossip.live().borrow().get(&stranger.id()).is_none());
    assert!(!a.control.peers().borrow().contains_key(&stranger.id()));
    // The members were not disturbed.
    assert_eq!(b.ask(a, b"abc").await.unwrap(), b"cba");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_removed_member_is_cut_off_at_once_and_can_come_back() {
    let nodes = fleet(3).await;
    let (a, b, c) = (&nodes[0], &nodes[1], &nodes[2]);
    let mut incoming = a.control.incoming(StreamProto::Api).unwrap();
    let mut tunnel = c.control.open_stream(a.id(), StreamProto::Api).await.unwrap();
    tunnel.write_all(b"x").await.unwrap();
    tunnel.flush().await.unwrap();
    let (_, mut inside) = within(5, "the tunnel", incoming.next()).await.unwrap();
    assert_eq!(inside.read_u8().await.unwrap(), b'x');
    let before = a.mirror.seen();

    a.allow(&[b]);
    let cut = within(5, "the tunnel's end", async { (tunnel.read(&mut [0; 8]).await, inside.read(&mut [0; 8]).await) }).await;
    assert!(!matches!(cut.0, Ok(1..)) && !matches!(cut.1, Ok(1..)), "{cut:?}");
    c.state(a.id(), "several refusals", |state| state.failures >= 3).await;
    let answer = c.control.call(a.id(), Proto::Raft, b"still here".to_vec(), Duration::from_millis(300)).await;
    assert!(answer.is_err(), "{answer:?}");
    assert!(matches!(a.control.open_stream(c.id(), StreamProto::Api).await, Err(OpenError::NotConnected { .. })));
    assert_eq!(a.mirror.seen(), before);
    assert_eq!(b.ask(a, b"abc").await.unwrap(), b"cba", "the others go on");

    a.allow(&[b, c]);
    a.up(c).await;
    c.state(a.id(), "a stable connection", |state| state.connected && state.failures == 0).await;
    assert_eq!(c.ask(a, b"abc").await.unwrap(), b"cba");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_that_is_taken_and_a_bad_address_are_named() {
    let a = Node::start().await;
    let key = Keypair::generate_ed25519();
    let start = async |listen| {
        let config = ControlConfig { bind_patience: Duration::ZERO, ..ControlConfig::new(key.clone(), listen) };
        ControlPlane::start(config, Arc::new(Mirror::default())).await.map(|_| ())
    };
    let taken = start(a.control.listening()).await;
    assert!(
        matches!(&taken, Err(StartError::Listen { source, .. }) if source.kind() == std::io::ErrorKind::AddrInUse),
        "{taken:?}"
    );
    assert!(matches!(start(vec!["/ip4/127.0.0.1/tcp/1".parse().unwrap()]).await, Err(StartError::Address(_))));
    assert!(matches!(start(vec![]).await, Err(StartError::Address(_))));
    let elsewhere = start(vec![control_addr("192.0.2.1:0".parse().unwrap())]).await;
    assert!(matches!(elsewhere, Err(StartError::Listen { .. })), "{elsewhere:?}");
    // Shut down, the port is free.
    let port = socket_addr(&a.control.listening()[0]).unwrap();
    within(5, "shutdown", a.control.shutdown()).await;
    assert!(matches!(
        a.control.call(PeerId::random(), Proto::Raft, Vec::new(), Duration::from_secs(1)).await,
        Err(CallError::Shutdown)
    ));
    let again = Node::start_with(key.clone(), control_addr(port)).await;
    assert_eq!(again.control.listening(), [control_addr(port)]);
}
