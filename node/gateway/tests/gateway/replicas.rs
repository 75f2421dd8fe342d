//! Copies of the journal: what is refused, what waits, and what is marked when there is no second copy.

use crate::harness::*;
use bytes::Bytes;
use ks_gwd::host::node::Config;
use ks_gwd::host::replica::{Part, Replica, ReplicaError, Reply};
use ks_proto::SessionId;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

#[derive(Default)]
struct Peer {
    away: bool,
    sealed: Option<u64>,
    lines: Vec<Vec<u8>>,
    bodies: BTreeMap<u64, Vec<u8>>,
}

#[derive(Clone, Default)]
struct Fake(Arc<Mutex<Peer>>);

impl Fake {
    fn with<T>(&self, f: impl FnOnce(&mut Peer) -> T) -> T {
        f(&mut self.0.lock().unwrap())
    }
    fn answer(&self, epoch: u64, take: impl FnOnce(&mut Peer)) -> Reply<'_, ()> {
        let result = self.with(|p| match p.sealed {
            Some(sealed) if epoch < sealed => Err(ReplicaError::Sealed(sealed)),
            Some(_) | None if p.away => Err(ReplicaError::Away("away".into())),
            Some(_) | None => {
                take(p);
                Ok(())
            }
        });
        Box::pin(std::future::ready(result))
    }
}

impl Replica for Fake {
    fn append(&self, _: SessionId, epoch: u64, from: u64, lines: Arc<Vec<Vec<u8>>>) -> Reply<'_, ()> {
        self.answer(epoch, |p| {
            p.lines.truncate(from as usize);
            p.lines.extend(lines.iter().cloned());
        })
    }
    fn body(&self, _: SessionId, epoch: u64, seq: u64, part: Part, _: u64, bytes: Bytes) -> Reply<'_, ()> {
        self.answer(epoch, |p| {
            if part == Part::Answer {
                p.bodies.entry(seq).or_default().extend_from_slice(&bytes);
            }
        })
    }
    fn seal(&self, _: SessionId, epoch: u64) -> Reply<'_, u64> {
        self.with(|p| p.sealed = Some(epoch));
        Box::pin(std::future::ready(Ok(self.with(|p| p.lines.len() as u64))))
    }
}

fn with_peer(peer: Fake) -> impl FnOnce(&mut Config) {
    move |config| {
        config.replicas = Box::new(move |_| Some(Arc::new(peer.clone())));
        config.patience = (Duration::from_millis(300), Duration::from_millis(600));
    }
}

/// The replica set has every line before anything is sent, and the answer before its end is released; without it nothing is sent.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_sent_before_the_copies_have_it_and_a_single_copy_is_marked() {
    let peer = Fake::default();
    let world = World::with("anthropic", None, with_peer(peer.clone())).await;
    let guest = Guest::new(&world.socket(), 1);
    let (path, body) = streamed("anthropic", "tokens=10");
    let got = guest.call(1, &path, &body).await.to_end().await;
    assert_eq!(got.end, Some(Ok(())), "{:?}", got.refused);
    let file = std::fs::read(world.dir.path().join("journal").join(guest.session().to_hex()).join("ledger.jsonl")).unwrap();
    assert_eq!(peer.with(|p| p.lines.concat()), file);
    assert!(peer.with(|p| p.bodies[&got.seq.unwrap()].clone()) == got.body);
    // Away: refused, unsent, and the entry says so.
    peer.with(|p| p.away = true);
    let got = guest.call(2, &path, &body).await.to_end().await;
    assert_eq!(got.refused.map(|r| (r.0, r.1)), Some((503, "replica".into())));
    assert_eq!(world.provider.purchases(), 1);
    assert_eq!(world.kind(guest.session(), "completed")[1]["outcome"], "failed");
    // Back for the intent, away for the end: released late, and marked.
    peer.with(|p| p.away = false);
    let (path, body) = streamed("anthropic", "tokens=10,stall=4");
    let mut got = guest.call(3, &path, &body).await;
    got.at_least(400).await;
    peer.with(|p| p.away = true);
    world.provider.go();
    let got = got.to_end().await;
    assert_eq!(got.end, Some(Ok(())));
    let ends = world.kind(guest.session(), "completed");
    assert_eq!((&ends[2]["outcome"], &ends[2]["single_copy"]), (&"complete".into(), &true.into()));
    world.in_order(&[guest.session()]).await;
}

/// Another node took the session over: what this one still wants to buy is refused.
#[tokio::test(flavor = "multi_thread")]
async fn a_sealed_epoch_buys_nothing_more() {
    let peer = Fake::default();
    let world = World::with("anthropic", None, with_peer(peer.clone())).await;
    let guest = Guest::new(&world.socket(), 1);
    let (path, body) = streamed("anthropic", "tokens=10");
    assert_eq!(guest.call(1, &path, &body).await.to_end().await.end, Some(Ok(())));
    assert!(peer.seal(guest.session(), 2).await.unwrap() >= 3);
    let got = guest.call(2, &path, &body).await.to_end().await;
    let (status, code, message) = got.refused.unwrap();
    assert_eq!((status, code.as_str(), world.provider.purchases()), (503, "replica", 1));
    assert!(message.contains("epoch 2"), "{message}");
}
