//! The relay inside the agent: nothing leaves on a new connection before its hook, and each hook begins a timeline.

use std::sync::Arc;

use ks_proto::{
    guest::{GuestAnswer, GuestRequest, HookKind},
    relay::{RelayAnswer, RelayAsk, encode_message},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream},
    sync::mpsc,
};
use tokio_util::compat::{FuturesAsyncReadCompatExt as _, TokioAsyncReadCompatExt as _};

use crate::{
    agent::Agent,
    channel::serve_connection,
    testing::{Client, agent, within},
};

type Stream = tokio_util::compat::Compat<yamux::Stream>;

/// The node's end of one connection, and the streams that the guest opened.
struct Node {
    client: Client,
    inbound: mpsc::Receiver<yamux::Stream>,
}

fn connect(agent: &Arc<Agent>) -> Node {
    let (ours, theirs) = tokio::io::duplex(64 * 1024);
    let agent = agent.clone();
    tokio::spawn(async move { serve_connection(agent, theirs.compat()).await });
    let (client, inbound) = Client::with_inbound(ours.compat());
    Node { client, inbound }
}

impl Node {
    async fn hook(&self, kind: HookKind) {
        let (entropy_hex, id) = ("ab".repeat(64), "0123456789abcdef0123456789abcdef".to_owned());
        let hook = GuestRequest::Hook { kind, wall_unix_ns: 0, entropy_hex, hostname: "h".into(), machine_id_hex: id };
        assert!(matches!(self.client.ask(&hook).await, GuestAnswer::Ok {}));
    }
    /// The next stream of the guest and its ask.
    async fn ask(&mut self) -> (Stream, RelayAsk) {
        let mut stream = within("a stream of the guest", self.inbound.recv()).await.unwrap().compat();
        let ask = RelayAsk::decode(&message(&mut stream).await).unwrap();
        (stream, ask)
    }
    fn has_none(&mut self) -> bool {
        self.inbound.try_recv().is_err()
    }
}

async fn message(stream: &mut Stream) -> Vec<u8> {
    within("a message", async {
        let mut bytes = vec![0; stream.read_u32_le().await.unwrap() as usize];
        stream.read_exact(&mut bytes).await.unwrap();
        bytes
    })
    .await
}

/// A client that has asked and waits.
async fn client(agent: &Arc<Agent>) -> DuplexStream {
    let (mut ours, theirs) = tokio::io::duplex(64 * 1024);
    let relay = agent.relay.clone();
    tokio::spawn(async move { relay.serve_connection(theirs).await });
    ours.write_all(b"POST /openai/v1/x HTTP/1.1\r\nhost: h\r\ncontent-length: 2\r\n\r\n{}").await.unwrap();
    ours
}

#[tokio::test]
async fn nothing_leaves_before_the_hook_and_a_restored_call_is_rejoined_after_it() {
    let dir = tempfile::tempdir().unwrap();
    let agent = agent(&dir);
    let mut first = connect(&agent);
    first.hook(HookKind::Fork).await;
    let mut waiting = client(&agent).await;
    let (mut stream, ask) = first.ask().await;
    let RelayAsk::Call(call) = ask else { panic!("{ask:?}") };
    stream.write_all(&encode_message(&RelayAnswer::Accepted { seq: 1 }).unwrap()).await.unwrap();
    stream.flush().await.unwrap();
    // As after a restore: the connection is another, and the call waits.
    drop(first);
    let mut second = connect(&agent);
    assert!(matches!(second.client.ask(&GuestRequest::Hello { protocol: 1 }).await, GuestAnswer::Hello { .. }));
    assert!(second.has_none(), "no stream before the hook");
    second.hook(HookKind::Resume).await;
    let (mut stream, ask) = second.ask().await;
    let RelayAsk::Rejoin(rejoin) = ask else { panic!("{ask:?}") };
    assert_eq!((&rejoin.call, rejoin.prior.as_ref()), (&call.call, Some(&call.call.nonce_hex)));
    assert_ne!(rejoin.timeline, call.call.nonce_hex);
    let refused = RelayAnswer::Refused { status: 402, code: "budget".into(), message: "used up".into() };
    stream.write_all(&encode_message(&refused).unwrap()).await.unwrap();
    stream.flush().await.unwrap();
    let mut answer = vec![0; 12];
    within("an answer", waiting.read_exact(&mut answer)).await.unwrap();
    assert_eq!(answer, b"HTTP/1.1 402");
    // As after a restart of the node: the machine is the same, and so is the timeline.
    drop(second);
    let mut third = connect(&agent);
    assert!(matches!(third.client.ask(&GuestRequest::RelayGo {}).await, GuestAnswer::Ok {}));
    let _waiting = client(&agent).await;
    let (_stream, ask) = third.ask().await;
    let RelayAsk::Call(next) = ask else { panic!("{ask:?}") };
    assert_eq!((next.call.nonce_hex, next.call.counter), (rejoin.timeline, 1));
}
