//! A UDP relay between two nodes whose directions can be cut one by one.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use tokio::net::UdpSocket;

#[derive(Default)]
pub struct Cuts {
    /// Drops what the clients send.
    pub there: AtomicBool,
    /// Drops what the target sends.
    pub back: AtomicBool,
    /// Packets that were dropped.
    pub dropped: AtomicU64,
}

impl Cuts {
    /// Cuts or joins both directions.
    pub fn all(&self, cut: bool) {
        self.there.store(cut, Ordering::SeqCst);
        self.back.store(cut, Ordering::SeqCst);
    }
}

/// Relays between whoever sends to the returned address and `target`, until the runtime ends.
pub async fn relay(target: SocketAddr) -> (SocketAddr, Arc<Cuts>) {
    let front = Arc::new(UdpSocket::bind("127.0.0.1:0").await.unwrap());
    let address = front.local_addr().unwrap();
    let cuts = Arc::new(Cuts::default());
    let seen = cuts.clone();
    tokio::spawn(async move {
        let mut clients: BTreeMap<SocketAddr, Arc<UdpSocket>> = BTreeMap::new();
        let mut buf = vec![0; 65_536];
        while let Ok((len, from)) = front.recv_from(&mut buf).await {
            if let Entry::Vacant(entry) = clients.entry(from) {
                let back = Arc::new(UdpSocket::bind("127.0.0.1:0").await.unwrap());
                tokio::spawn(answers(back.clone(), front.clone(), from, seen.clone()));
                entry.insert(back);
            }
            if seen.there.load(Ordering::SeqCst) {
                seen.dropped.fetch_add(1, Ordering::SeqCst);
            } else {
                let _ = clients[&from].send_to(&buf[..len], target).await;
            }
        }
    });
    (address, cuts)
}

async fn answers(back: Arc<UdpSocket>, front: Arc<UdpSocket>, client: SocketAddr, cuts: Arc<Cuts>) {
    let mut buf = vec![0; 65_536];
    loop {
        // A closed target port shows as an error of the socket; the target may come back.
        let Ok((len, _)) = back.recv_from(&mut buf).await else { continue };
        if cuts.back.load(Ordering::SeqCst) {
            cuts.dropped.fetch_add(1, Ordering::SeqCst);
        } else {
            let _ = front.send_to(&buf[..len], client).await;
        }
    }
}
