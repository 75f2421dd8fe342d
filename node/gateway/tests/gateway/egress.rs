//! Egress: nowhere unless it is allowed, inside only by name, and every connection in the ledger.

use crate::harness::*;
use ks_gwd::host::wire;
use ks_proto::gateway::{AdminAnswer, AdminAsk};
use ks_proto::relay::{RelayAnswer, RelayAsk};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, UnixStream};

async fn ask(guest: &Guest, host: &str, port: u16) -> (UnixStream, RelayAnswer) {
    let mut s = guest.open().await;
    wire::write_message(&mut s, &RelayAsk::Egress { host: host.into(), port }).await.unwrap();
    let answer = soon("an answer", wire::read_message(&mut s)).await.unwrap().unwrap();
    (s, answer)
}

fn code(answer: &RelayAnswer) -> &str {
    match answer {
        RelayAnswer::Refused { code, .. } => code,
        RelayAnswer::Ok {} => "ok",
        _ => "?",
    }
}

/// Default deny; an allowed address is reached both ways with half-close passed on; what resolves to the inside is refused.
#[tokio::test(flavor = "multi_thread")]
async fn only_allowed_places_are_reached_and_all_is_logged() {
    let world = World::new("openai").await;
    let guest = Guest::new(&world.socket(), 1);
    let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = server.local_addr().unwrap().port();
    assert_eq!(code(&ask(&guest, "127.0.0.1", port).await.1), "not-allowed");
    let mut admin = Admin::connect(&world.socket()).await;
    let allow = vec![format!("127.0.0.1:{port}"), format!("localhost:{}", port ^ 1)];
    admin.done(AdminAsk::EgressSet { session: guest.session(), allow: allow.clone() }).await;
    let AdminAnswer::Egress { allow: listed } = admin.ask(AdminAsk::EgressList { session: guest.session() }).await else {
        panic!("no list")
    };
    assert_eq!(listed, allow);
    let (mut s, answer) = ask(&guest, "127.0.0.1", port).await;
    assert_eq!(code(&answer), "ok");
    let (mut far, _) = soon("a connection", server.accept()).await.unwrap();
    s.write_all(b"question").await.unwrap();
    s.shutdown().await.unwrap();
    let mut got = Vec::new();
    soon("the question", far.read_to_end(&mut got)).await.unwrap();
    assert_eq!(got, b"question");
    far.write_all(b"the answer").await.unwrap();
    drop(far);
    let mut got = Vec::new();
    soon("the answer", s.read_to_end(&mut got)).await.unwrap();
    assert_eq!(got, b"the answer");
    // A name that is allowed but is inside.
    assert_eq!(code(&ask(&guest, "localhost", port ^ 1).await.1), "not-allowed");
    let lines = || world.kind(guest.session(), "egress");
    until("three lines", || lines().len() == 3).await;
    let all = lines();
    let done = all.iter().find(|l| l["allowed"] == true).unwrap();
    assert_eq!((done["bytes_out"].as_u64(), done["bytes_in"].as_u64()), (Some(8), Some(10)));
    world.in_order(&[guest.session()]).await;
}
