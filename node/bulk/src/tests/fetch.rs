//! A checkpoint goes from one node to another, whole.

use super::world::*;
use crate::{CallError, FetchError, Holder, Keypair};
use std::collections::BTreeSet;
use std::sync::Arc;

fn some_image() -> Image {
    Image { memory: (1..40).collect(), disk: vec![100, 0, 101, 0, 0, 102] }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_arrives_whole_under_the_same_packs_and_is_pinned() {
    let tmp = tempfile::tempdir().unwrap();
    let members = Members::default();
    let (a, b) = (Node::start(&tmp.path().join("a"), &members), Node::start(&tmp.path().join("b"), &members));
    let im = some_image();
    let id = checkpoint(&a.store, &im, 10);
    assert!(!b.bulk.have_closure(&a.holder(), &[0; 32].into_id()).await.unwrap());
    assert!(b.bulk.have_closure(&a.holder(), &id).await.unwrap());
    let told = Arc::new(std::sync::Mutex::new(Vec::new()));
    let sink = told.clone();
    let on_progress = Arc::new(move |p| sink.lock().unwrap().push(p));
    let got = b.fetcher.fetch_checkpoint(&id, &[a.holder()], &ring(), &pin(7), on_progress).await.unwrap();
    assert_whole(&b.store, &id, &im);
    let file_names =
        |dir: &std::path::Path| packs(dir).iter().map(|p| p.file_name().unwrap().to_owned()).collect::<BTreeSet<_>>();
    assert_eq!(file_names(&a.dir), file_names(&b.dir));
    assert_eq!((got.packs, got.objects, got.resumed, got.merged), (packs(&a.dir).len() as u64, 0, 0, 0));
    assert_eq!(b.store.pins(), [(id, pin(7))]);
    let last = *told.lock().unwrap().last().unwrap();
    assert_eq!(last.received, got.bytes);
    assert!(last.wanted > 0 && last.received >= last.wanted, "{last:?}");
    // Again: nothing is sent.
    let sent = a.bulk.traffic().0;
    let again = b.fetcher.fetch_checkpoint(&id, &[a.holder()], &ring(), &pin(8), quiet()).await.unwrap();
    assert_eq!((again.bytes, again.packs, a.bulk.traffic().0), (0, 0, sent));
    assert!(a.bulk.have_closure(&b.holder(), &id).await.unwrap());
    // A store that opens again knows all of it.
    b.bulk.close().await;
    let dir = b.dir.clone();
    drop(b);
    let store = reopened(&dir).await;
    assert_eq!(store.warnings(), &[] as &[String]);
    assert_whole(&store, &id, &im);
    assert_eq!(store.pins(), [(id, pin(7)), (id, pin(8))]);
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_and_impostors_are_refused_and_a_removed_member_is_cut_off() {
    let tmp = tempfile::tempdir().unwrap();
    let members = Members::default();
    let (a, b) = (Node::start(&tmp.path().join("a"), &members), Node::start(&tmp.path().join("b"), &members));
    let id = checkpoint(&a.store, &some_image(), 10);
    assert!(b.bulk.have_closure(&a.holder(), &id).await.unwrap());
    // Another node answers at that address.
    let other = Keypair::generate_ed25519().public().to_peer_id();
    members.lock().unwrap().insert(other);
    let e = b.bulk.have_closure(&Holder { peer: other, ..a.holder() }, &id).await.unwrap_err();
    assert!(matches!(e, CallError::Unreachable { .. }), "{e}");
    // A is told that B is a member no more: the open connection ends, and a new one is refused.
    let b_id = b.bulk.peer_id();
    members.lock().unwrap().remove(&b_id);
    a.bulk.recheck_allowed();
    for _ in 0..3 {
        let e = b.bulk.have_closure(&a.holder(), &id).await.unwrap_err();
        assert!(matches!(e, CallError::Lost { .. } | CallError::Unreachable { .. }), "{e}");
    }
    members.lock().unwrap().insert(b_id);
    assert!(b.bulk.have_closure(&a.holder(), &id).await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_holder_that_has_it_the_error_says_so() {
    let tmp = tempfile::tempdir().unwrap();
    let members = Members::default();
    let (a, b) = (Node::start(&tmp.path().join("a"), &members), Node::start(&tmp.path().join("b"), &members));
    let id = checkpoint(&b.store, &some_image(), 10);
    let fetch = |holders: Vec<Holder>| {
        let a = a.fetcher.clone();
        async move { a.fetch_checkpoint(&id, &holders, &ring(), &pin(1), quiet()).await.unwrap_err() }
    };
    assert!(matches!(fetch(vec![]).await, FetchError::NoHolders { .. }));
    let nobody = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let gone = Holder { addrs: vec![nobody.local_addr().unwrap()], ..b.holder() };
    let e = fetch(vec![gone]).await;
    assert!(e.to_string().contains("no answer in 5 s"), "{e}");
    let c = Node::start(&tmp.path().join("c"), &members);
    let e = fetch(vec![c.holder()]).await;
    assert!(e.to_string().contains("does not have manifest"), "{e}");
    assert_eq!(a.store.stats().manifests, 0);
}
