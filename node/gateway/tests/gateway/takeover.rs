//! Three gateways joined by stand-ins for their nodes' daemons: what a dead owner bought is served by the next one, unbought.

use crate::harness::*;
use ks_gwd::host::node::Config;
use ks_gwd::host::wire;
use ks_proto::copies::{CopyAnswer, PEERS_SOCKET, PeersAnswer, PeersAsk};
use ks_proto::gateway::{AdminAnswer, AdminAsk, Began, Provider as Settings};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use tokio::net::{UnixListener, UnixStream};

/// What the replicated state would say of the one session.
struct State {
    owner: u64,
    epoch: u64,
    /// Who must have a line, of each owner.
    holders: BTreeMap<u64, Vec<u64>>,
    sockets: BTreeMap<u64, PathBuf>,
    /// They are not named any more, reach nobody and are not reached.
    dead: BTreeSet<u64>,
    /// They are named, and do not answer.
    silent: BTreeSet<u64>,
}

type Shared = Arc<Mutex<State>>;

/// The daemon of node `me`.
async fn daemon(me: u64, listener: UnixListener, state: Shared) {
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        tokio::spawn(connection(me, stream, state.clone()));
    }
}

async fn connection(me: u64, mut stream: UnixStream, state: Shared) {
    while let Ok(Some(ask)) = wire::read_message::<PeersAsk>(&mut stream).await {
        let answer = match ask {
            PeersAsk::Set { .. } => {
                let s = state.lock().unwrap();
                let members = s.sockets.keys().copied().filter(|n| *n != me && !s.dead.contains(n)).collect();
                PeersAnswer::Set { epoch: s.epoch, holders: s.holders.get(&me).cloned().unwrap_or_default(), members }
            }
            PeersAsk::Bought { .. } => PeersAnswer::Done {},
            PeersAsk::Copy { to, session, epoch, copy } => {
                let (way, owns, newest) = {
                    let s = state.lock().unwrap();
                    let cut = |n| s.dead.contains(n) || s.silent.contains(n);
                    let way = (!cut(&me) && !cut(&to)).then(|| s.sockets[&to].clone());
                    (way, (s.owner, s.epoch) == (me, epoch), s.epoch)
                };
                match way {
                    None => PeersAnswer::Away { why: "it is not reached".into() },
                    Some(_) if newest > epoch => PeersAnswer::Copy { copy: CopyAnswer::Sealed { epoch: newest } },
                    Some(_) if !owns => PeersAnswer::Away { why: "it does not own the session".into() },
                    Some(socket) => match Admin::connect(&socket).await.ask(AdminAsk::Copy { session, epoch, copy }).await {
                        AdminAnswer::Copy { copy } => PeersAnswer::Copy { copy },
                        other => panic!("{other:?}"),
                    },
                }
            }
        };
        if wire::write_message(&mut stream, &answer).await.is_err() {
            return;
        }
    }
}

struct Three {
    worlds: Vec<World>,
    state: Shared,
}

impl Three {
    /// Three gateways with one provider; node 1 owns the session at epoch 1.
    async fn new(holders: &[(u64, &[u64])]) -> Self {
        let mut worlds = Vec::new();
        let holders = holders.iter().map(|(n, of)| (*n, of.to_vec())).collect();
        let (dead, silent) = (BTreeSet::new(), BTreeSet::new());
        let state = Arc::new(Mutex::new(State { owner: 1, epoch: 1, holders, sockets: BTreeMap::new(), dead, silent }));
        for n in 1..=3 {
            let world = World::with("anthropic", None, |c| {
                let fleet = Config::in_fleet(&c.dir);
                (c.replicas, c.peers) = (fleet.replicas, fleet.peers);
            })
            .await;
            let listener = UnixListener::bind(world.dir.path().join(PEERS_SOCKET)).unwrap();
            tokio::spawn(daemon(n, listener, state.clone()));
            state.lock().unwrap().sockets.insert(n, world.socket());
            worlds.push(world);
        }
        let base_url = format!("http://{}", worlds[0].provider.address);
        for world in &worlds {
            let (name, dialect) = ("test".to_owned(), "anthropic".to_owned());
            let provider =
                Settings { name, dialect, base_url: base_url.clone(), include_usage: false, ca_pem: None, builtin: false };
            Admin::connect(&world.socket()).await.done(AdminAsk::ProviderAdd { provider }).await;
        }
        Self { worlds, state }
    }

    fn world(&self, n: u64) -> &World {
        &self.worlds[n as usize - 1]
    }

    /// The session is this node's from now on.
    fn assign(&self, to: u64) {
        let mut s = self.state.lock().unwrap();
        (s.owner, s.epoch) = (to, s.epoch + 1);
    }

    /// The guest on its owner, with a lease.
    async fn on_owner(&self, mut guest: Guest) -> Guest {
        let (owner, epoch) = {
            let s = self.state.lock().unwrap();
            (s.owner, s.epoch)
        };
        guest.socket = self.world(owner).socket();
        guest.stamp.token.epoch = epoch;
        guest.stamp.replicas = vec![owner];
        let lease = AdminAsk::Lease { session: guest.session(), token: guest.stamp.token, deadline_boottime_ms: None };
        Admin::connect(&guest.socket).await.done(lease).await;
        guest
    }

    fn file(&self, n: u64, kind: &str, guest: &Guest, name: &str) -> Vec<u8> {
        std::fs::read(self.world(n).dir.path().join(kind).join(guest.session().to_hex()).join(name)).unwrap_or_default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_dead_host_bought_is_served_by_the_next_owner_and_bought_once() {
    let t = Three::new(&[(1, &[2]), (2, &[3])]).await;
    let provider = &t.world(1).provider;
    let guest = t.on_owner(Guest::new(&t.world(1).socket(), 1)).await;
    let (path, body) = streamed("anthropic", "tokens=10");
    let first = guest.call(1, &path, &body).await.to_end().await;
    assert_eq!(first.end, Some(Ok(())), "{:?}", first.refused);
    let copy = t.file(2, "copies", &guest, "ledger.jsonl");
    assert!(!copy.is_empty() && copy == t.file(1, "journal", &guest, "ledger.jsonl"));
    // One more is in flight when the host dies.
    let (stalled_path, stalled) = streamed("anthropic", "tokens=10,stall=4");
    let mut lost = guest.call(2, &stalled_path, &stalled).await;
    lost.at_least(100).await;
    t.state.lock().unwrap().dead.insert(1);
    t.assign(2);
    assert_eq!(provider.purchases(), 2);
    // The checkpoint was taken before both.
    let next = t.on_owner(guest.resumed(2, 0)).await;
    let again = next.call(1, &path, &body).await.to_end().await;
    assert_eq!((again.end.clone(), again.status(), again.refused.clone()), (Some(Ok(())), 200, None));
    assert!(again.body == first.body && !again.body.is_empty());
    assert_eq!(provider.purchases(), 2);
    let ends = t.world(2).kind(guest.session(), "completed");
    assert_eq!((&ends[0]["outcome"], &ends[1]["outcome"]), (&"complete".into(), &"unknown".into()));
    // What is bought now has a copy again, at a node that had nothing: it gets all that there was.
    let (path, body) = streamed("anthropic", "tokens=12");
    let third = next.call(2, &path, &body).await.to_end().await;
    assert_eq!((third.end, provider.purchases()), (Some(Ok(())), 3));
    let own = t.file(2, "journal", &guest, "ledger.jsonl");
    assert!(t.file(3, "copies", &guest, "ledger.jsonl") == own && own.starts_with(&copy));
    for (seq, answer) in [(first.seq.unwrap(), &first.body), (third.seq.unwrap(), &third.body)] {
        assert!(t.file(3, "copies", &guest, &format!("bodies/{seq}.resp")) == *answer, "the answer of {seq}");
    }
    t.world(2).in_order(&[guest.session()]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_copy_within_reach_nothing_is_bought_until_there_is_one() {
    let t = Three::new(&[(1, &[3])]).await;
    let provider = &t.world(1).provider;
    let guest = t.on_owner(Guest::new(&t.world(1).socket(), 1)).await;
    let (path, body) = streamed("anthropic", "tokens=10");
    let first = guest.call(1, &path, &body).await.to_end().await;
    assert_eq!(first.end, Some(Ok(())), "{:?}", first.refused);
    {
        let mut s = t.state.lock().unwrap();
        s.dead.insert(1);
        s.silent.insert(3);
    }
    t.assign(2);
    let next = t.on_owner(guest.resumed(2, 0)).await;
    let (status, code, why) = next.call(1, &path, &body).await.to_end().await.refused.unwrap();
    assert_eq!((status, code.as_str(), provider.purchases()), (503, "journal", 1));
    assert!(why.contains("[3]"), "{why}");
    t.state.lock().unwrap().silent.clear();
    let again = next.call(1, &path, &body).await.to_end().await;
    assert_eq!((again.end, provider.purchases()), (Some(Ok(())), 1));
    assert!(again.body == first.body);
    // Nor when its guest knows of more than any copy has.
    t.state.lock().unwrap().dead.insert(2);
    t.assign(3);
    let far = t.on_owner(next.resumed(3, 99)).await;
    let (status, code, why) = far.call(1, &path, &body).await.to_end().await.refused.unwrap();
    assert_eq!((status, code.as_str(), provider.purchases()), (503, "journal", 1));
    assert!(why.contains("99"), "{why}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_planned_move_takes_the_journal_along_there_and_back_and_the_old_owner_buys_no_more() {
    let t = Three::new(&[]).await;
    let provider = &t.world(1).provider;
    let guest = t.on_owner(Guest::new(&t.world(1).socket(), 1)).await;
    let (path, body) = streamed("anthropic", "tokens=10");
    let first = guest.call(1, &path, &body).await.to_end().await;
    assert_eq!(first.end, Some(Ok(())), "{:?}", first.refused);
    t.assign(2);
    let moved = t.on_owner(guest.resumed(2, 0)).await;
    assert!(moved.call(1, &path, &body).await.to_end().await.body == first.body);
    // The old run, if it still were there, gets nothing from the old node.
    let (other_path, other) = streamed("anthropic", "tokens=11");
    let refused = guest.call(2, &other_path, &other).await.to_end().await.refused;
    assert_eq!(refused.map(|r| r.0), Some(503));
    assert_eq!(moved.call(2, &other_path, &other).await.to_end().await.end, Some(Ok(())));
    assert_eq!(provider.purchases(), 2);
    t.assign(1);
    let back = t.on_owner(moved.resumed(3, 0)).await;
    assert!(back.call(1, &path, &body).await.to_end().await.body == first.body);
    assert_eq!(back.call(2, &other_path, &other).await.to_end().await.end, Some(Ok(())));
    assert_eq!(provider.purchases(), 2);
    assert_eq!(back.stamp.began, Began::Resume);
    t.world(1).in_order(&[guest.session()]).await;
}
