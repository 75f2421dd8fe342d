//! What goes wrong between nodes and on their disks: wrong bytes, lost peers, full disks, rot, kills.

use super::world::*;
use crate::{BulkEvent, BulkLimits, BulkPeers, FetchError, Fetcher, Holder, PeerId};
use ks_blobs::host::{Disk, Found, RealDisk};
use ks_blobs::{Store, StoreError};
use ks_proto::ids::CheckpointId;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A disk that fills up, that waits, and that lies.
#[derive(Default)]
struct OddDisk {
    /// Bytes that still fit; negative: no limit.
    room: Option<AtomicI64>,
    /// Called before each write, with all bytes written so far.
    on_write: Option<Box<dyn Fn(u64) + Send + Sync>>,
    written: AtomicU64,
}
impl OddDisk {
    fn space(&self, n: usize) -> io::Result<()> {
        let n = i64::try_from(n).unwrap();
        match &self.room {
            Some(room) if room.fetch_sub(n, Ordering::SeqCst) < n => Err(io::ErrorKind::StorageFull.into()),
            _ => Ok(()),
        }
    }
}
impl Disk for OddDisk {
    fn create(&self, path: &Path) -> io::Result<File> {
        RealDisk.create(path)
    }
    fn open(&self, path: &Path) -> io::Result<File> {
        RealDisk.open(path)
    }
    fn reopen(&self, path: &Path) -> io::Result<File> {
        RealDisk.reopen(path)
    }
    fn append(&self, file: &File, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.space(bytes.len())?;
        let so_far = self.written.fetch_add(bytes.len() as u64, Ordering::SeqCst);
        if let Some(f) = &self.on_write {
            f(so_far);
        }
        RealDisk.append(file, offset, bytes)
    }
    fn read_at(&self, file: &File, buf: &mut [u8], offset: u64) -> io::Result<()> {
        RealDisk.read_at(file, buf, offset)
    }
    fn len(&self, file: &File) -> io::Result<u64> {
        RealDisk.len(file)
    }
    fn sync(&self, file: &File) -> io::Result<()> {
        RealDisk.sync(file)
    }
    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        RealDisk.sync_dir(dir)
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        RealDisk.rename(from, to)
    }
    fn unlink(&self, path: &Path) -> io::Result<()> {
        RealDisk.unlink(path)
    }
    fn make_dir(&self, path: &Path) -> io::Result<bool> {
        RealDisk.make_dir(path)
    }
    fn list(&self, dir: &Path) -> io::Result<Vec<Found>> {
        RealDisk.list(dir)
    }
    fn lock(&self, path: &Path) -> io::Result<File> {
        RealDisk.lock(path)
    }
    fn now_ms(&self) -> u64 {
        RealDisk.now_ms()
    }
}

fn big() -> Image {
    Image { memory: (1..200).collect(), disk: (300..340).collect() }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rotten_pack_is_not_served_and_another_holder_serves_it() {
    let tmp = tempfile::tempdir().unwrap();
    let members = Members::default();
    let (a, b) = (Node::start(&tmp.path().join("a"), &members), Node::start(&tmp.path().join("b"), &members));
    let im = big();
    let id = checkpoint(&a.store, &im, 40);
    b.fetcher.fetch_checkpoint(&id, &[a.holder()], &ring(), &pin(1), quiet()).await.unwrap();
    let rotten = packs(&a.dir);
    flip(&rotten[0]);
    flip(&rotten[1]);
    let c = Node::start(&tmp.path().join("c"), &members);
    let got = c.fetcher.fetch_checkpoint(&id, &[a.holder(), b.holder()], &ring(), &pin(1), quiet()).await.unwrap();
    assert_whole(&c.store, &id, &im);
    assert_eq!(got.packs, packs(&b.dir).len() as u64);
    // A found its own damage, told of it, and is no liar.
    let damaged =
        a.events.lock().unwrap().iter().filter(|e| matches!(e, BulkEvent::Damaged { faults, .. } if !faults.is_empty())).count();
    assert!(damaged >= 1, "{:?}", a.events.lock().unwrap());
    assert!(c.bulk.marked().is_empty() && c.events.lock().unwrap().is_empty());
    // Alone, A cannot give it.
    let d = Node::start(&tmp.path().join("d"), &members);
    let e = d.fetcher.fetch_checkpoint(&id, &[a.holder()], &ring(), &pin(1), quiet()).await.unwrap_err();
    assert!(matches!(e, FetchError::Incomplete { missing, .. } if missing > 0), "{e}");
    assert_eq!((d.store.stats().manifests, d.store.pins()), (0, vec![]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_sends_wrong_bytes_is_marked_and_asked_last() {
    let tmp = tempfile::tempdir().unwrap();
    let members = Members::default();
    let (b, c) = (Node::start(&tmp.path().join("b"), &members), Node::start(&tmp.path().join("c"), &members));
    let im = big();
    let id = checkpoint(&b.store, &im, 40);
    let liar = liar(&tmp.path().join("liar"), &members, &id, &im);
    let got = c.fetcher.fetch_checkpoint(&id, &[liar.clone(), b.holder()], &ring(), &pin(1), quiet()).await.unwrap();
    assert_whole(&c.store, &id, &im);
    assert!(got.packs > 0);
    let events = c.events.lock().unwrap().clone();
    assert!(matches!(events.first(), Some(BulkEvent::WrongBytes { peer, .. }) if *peer == liar.peer), "{events:?}");
    assert_eq!(c.bulk.marked().keys().copied().collect::<Vec<PeerId>>(), [liar.peer]);
    assert_eq!(c.bulk.inner.in_order(&[liar.clone(), b.holder()]), [b.holder(), liar.clone()]);
    c.bulk.forgive(&liar.peer);
    assert!(c.bulk.marked().is_empty());
    // With the liar alone nothing is adopted, and nothing is left.
    let d = Node::start(&tmp.path().join("d"), &members);
    let e = d.fetcher.fetch_checkpoint(&id, std::slice::from_ref(&liar), &ring(), &pin(1), quiet()).await.unwrap_err();
    assert!(e.to_string().contains("sent wrong bytes"), "{e}");
    assert_eq!(d.store.stats().manifests, 0);
}

/// A member that speaks the protocol and answers with packs in which every bit after the first group is turned.
fn liar(dir: &Path, members: &Members, id: &CheckpointId, im: &Image) -> Holder {
    use crate::wire::{self, ASK, Answer, Ask, Located};
    let keypair = crate::Keypair::generate_ed25519();
    let peer = keypair.public().to_peer_id();
    members.lock().unwrap().insert(peer);
    let store = Store::open(dir).unwrap();
    assert_eq!(checkpoint(&store, im, 40), *id);
    let identity = crate::host::tls::Identity::new(keypair).unwrap();
    let config = identity.server(Arc::new(|_| true)).unwrap();
    let endpoint = quinn::Endpoint::server(config, "127.0.0.1:0".parse().unwrap()).unwrap();
    let addrs = vec![endpoint.local_addr().unwrap()];
    tokio::spawn(async move {
        while let Some(incoming) = endpoint.accept().await {
            let Ok(c) = incoming.await else { continue };
            let store = store.clone();
            tokio::spawn(async move {
                while let Ok((mut send, mut recv)) = c.accept_bi().await {
                    let request = recv.read_to_end(1 << 20).await.unwrap();
                    if request[0] == ASK {
                        let (told, body) = match wire::decode::<Ask>(&request[1..]).unwrap() {
                            Ask::Manifest { id } => {
                                let bytes = store.manifest_here(&CheckpointId(id)).unwrap().0;
                                (Answer::Manifest { bytes: bytes.len() as u64 }, bytes)
                            }
                            Ask::Locate { ids } => {
                                let ids: Vec<_> = ids.into_iter().map(ks_proto::ids::ChunkId).collect();
                                (Answer::Located(Located::of(&store.places(&ids, 2))), vec![])
                            }
                            other => panic!("{other:?}"),
                        };
                        crate::host::provider::answer(&mut send, &told).await.unwrap();
                        let _ = send.write_all(&body).await;
                    } else {
                        let (request, _) =
                            iroh_blobs::protocol::Request::read_async(&mut bytes::Bytes::from(request[1..].to_vec()))
                                .await
                                .unwrap();
                        let iroh_blobs::protocol::Request::Get(get) = request else { panic!() };
                        let mut file = std::fs::read(store.pack_path(&ks_proto::ids::PackId(*get.hash.as_bytes()))).unwrap();
                        let right = bao_tree::io::outboard::PreOrderMemOutboard::create(&file, crate::host::provider::GROUP);
                        let at = file.len() / 2;
                        file[at..].iter_mut().for_each(|b| *b = !*b);
                        let mut out = (file.len() as u64).to_le_bytes().to_vec();
                        bao_tree::io::sync::encode_ranges(&file[..], &right, &bao_tree::ChunkRanges::all(), &mut out).unwrap();
                        let _ = send.write_all(&out).await;
                    }
                    let _ = send.finish();
                }
            });
        }
    });
    Holder { peer, addrs }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_on_the_receiver_is_named_and_leaves_nothing() {
    let tmp = tempfile::tempdir().unwrap();
    let members = Members::default();
    let a = Node::start(&tmp.path().join("a"), &members);
    let im = big();
    let id = checkpoint(&a.store, &im, 40);
    for room in [0, 100_000, 3_000_000, 7_000_000, 13_000_000] {
        let dir = tmp.path().join(format!("b-{room}"));
        drop(Store::open(&dir).unwrap());
        let disk = Arc::new(OddDisk { room: Some(AtomicI64::new(room)), ..OddDisk::default() });
        let b = Node::with(&dir, &members, Setup { disk, ..Setup::default() });
        let e = b.fetcher.fetch_checkpoint(&id, &[a.holder()], &ring(), &pin(1), quiet()).await.unwrap_err();
        assert!(matches!(e, FetchError::DiskFull { .. }), "{room}: {e}");
        assert_eq!(e.code(), "disk-full");
        assert!(e.to_string().contains("disk full at /"), "{e}");
        assert_eq!((b.store.stats(), b.store.pins()), (ks_blobs::StoreStats::default(), vec![]), "{room}");
        for folder in ["staging", "incoming", "pins"] {
            assert_eq!(names(&dir.join(folder)), [] as [&str; 0], "{room}: {folder}");
        }
        assert_eq!(packs(&dir), [] as [&Path; 0]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fetch_that_is_killed_goes_on_where_it_was() {
    let tmp = tempfile::tempdir().unwrap();
    let members = Members::default();
    let a = Node::start(&tmp.path().join("a"), &members);
    let im = Image { memory: (1..500).collect(), disk: (600..700).collect() };
    let id = checkpoint(&a.store, &im, 200);
    let total: u64 = packs(&a.dir).iter().map(|p| p.metadata().unwrap().len()).sum();
    let dir = tmp.path().join("b");
    // The runtime goes away in the middle of the transfer, with all its tasks, as in a kill.
    let (told, when) = std::sync::mpsc::channel();
    let on_write = move |so_far: u64| {
        if so_far >= 20 << 20 {
            let _ = told.send(());
        }
    };
    let setup =
        Setup { disk: Arc::new(OddDisk { on_write: Some(Box::new(on_write)), ..OddDisk::default() }), ..Setup::default() };
    let (d, m, holder) = (dir.clone(), members.clone(), a.holder());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.spawn(async move {
        let b = Node::with(&d, &m, setup);
        let _ = b.fetcher.fetch_checkpoint(&id, &[holder], &ring(), &pin(1), quiet()).await;
    });
    tokio::task::spawn_blocking(move || {
        when.recv_timeout(Duration::from_secs(60)).unwrap();
        runtime.shutdown_timeout(Duration::from_secs(10));
    })
    .await
    .unwrap();
    let store = reopened(&dir).await;
    assert_eq!(store.warnings(), &[] as &[String]);
    let there: u64 = packs(&dir).iter().map(|p| p.metadata().unwrap().len()).sum();
    drop(store);
    let before = a.bulk.traffic().0;
    let b = Node::start(&dir, &members);
    let got = b.fetcher.fetch_checkpoint(&id, &[a.holder()], &ring(), &pin(2), quiet()).await.unwrap();
    assert_whole(&b.store, &id, &im);
    let sent = a.bulk.traffic().0 - before;
    assert!(there + got.resumed > 15 << 20, "{there} bytes in packs, {} in parts", got.resumed);
    assert!(
        sent < total - there - got.resumed + (2 << 20),
        "{sent} of {total} sent again; {there} and {} were there",
        got.resumed
    );
    assert_eq!(names(&dir.join("staging")), [] as [&str; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_that_dies_in_the_middle_is_replaced_by_another() {
    let tmp = tempfile::tempdir().unwrap();
    let members = Members::default();
    let (a, b) = (Node::start(&tmp.path().join("a"), &members), Node::start(&tmp.path().join("b"), &members));
    let im = Image { memory: (1..500).collect(), disk: (600..700).collect() };
    let id = checkpoint(&a.store, &im, 100);
    b.fetcher.fetch_checkpoint(&id, &[a.holder()], &ring(), &pin(1), quiet()).await.unwrap();
    let dying = a.bulk.clone();
    let once = Mutex::new(Some(tokio::runtime::Handle::current()));
    let on_write = move |so_far: u64| {
        if so_far >= 8 << 20
            && let Some(runtime) = once.lock().unwrap().take()
        {
            let dying = dying.clone();
            runtime.spawn(async move { dying.close().await });
        }
    };
    let setup =
        Setup { disk: Arc::new(OddDisk { on_write: Some(Box::new(on_write)), ..OddDisk::default() }), ..Setup::default() };
    let c = Node::with(&tmp.path().join("c"), &members, setup);
    let got = c.fetcher.fetch_checkpoint(&id, &[a.holder(), b.holder()], &ring(), &pin(1), quiet()).await.unwrap();
    assert_whole(&c.store, &id, &im);
    assert!(b.bulk.traffic().0 > 0, "the second holder served the rest of {got:?}");
    assert!(c.bulk.marked().is_empty(), "dying is no lie");
}

#[tokio::test(flavor = "multi_thread")]
async fn two_fetches_of_the_same_packs_send_them_once() {
    let tmp = tempfile::tempdir().unwrap();
    let members = Members::default();
    let a = Node::start(&tmp.path().join("a"), &members);
    let (im, other) = (Image { memory: (1..400).collect(), disk: vec![] }, Image { memory: (1..400).collect(), disk: vec![7] });
    let (id, id2) = (checkpoint(&a.store, &im, 100), checkpoint(&a.store, &other, 100));
    let b = Node::start(&tmp.path().join("b"), &members);
    let total: u64 = packs(&a.dir).iter().map(|p| p.metadata().unwrap().len()).sum();
    let fetch = |id: CheckpointId, n: u64| {
        let (fetcher, holder): (Fetcher, Holder) = (b.fetcher.clone(), a.holder());
        async move { fetcher.fetch_checkpoint(&id, &[holder], &ring(), &pin(n), quiet()).await }
    };
    let (x, y, z) = tokio::join!(fetch(id, 1), fetch(id, 2), fetch(id2, 3));
    let (x, y, z) = (x.unwrap(), y.unwrap(), z.unwrap());
    assert_whole(&b.store, &id, &im);
    assert_whole(&b.store, &id2, &other);
    let sent = a.bulk.traffic().0;
    assert!(sent < total + total / 50 + 200_000, "{sent} bytes were sent of {total}: {x:?} {y:?} {z:?}");
    assert_eq!(x.packs + y.packs + z.packs, packs(&b.dir).len() as u64);
    assert_eq!(b.store.pins().len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn of_a_pack_that_is_mostly_of_no_use_only_the_objects_come() {
    let tmp = tempfile::tempdir().unwrap();
    let members = Members::default();
    let (a, b) = (Node::start(&tmp.path().join("a"), &members), Node::start(&tmp.path().join("b"), &members));
    // One pack of A holds what the second checkpoint shares a little of.
    checkpoint(&a.store, &Image { memory: (1..400).collect(), disk: vec![] }, 999);
    let im = Image { memory: vec![17, 0, 300, 301], disk: vec![1000] };
    let id = checkpoint(&a.store, &im, 999);
    let got = b.fetcher.fetch_checkpoint(&id, &[a.holder()], &ring(), &pin(1), quiet()).await.unwrap();
    assert_whole(&b.store, &id, &im);
    assert!(got.objects == 3 || got.objects == 4, "{got:?}");
    assert!(got.bytes < 600_000, "{got:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn v11_rot_is_mended_from_another_holder_by_reading_and_by_scrubbing() {
    let tmp = tempfile::tempdir().unwrap();
    let members = Members::default();
    let (a, b) = (Node::start(&tmp.path().join("a"), &members), Node::start(&tmp.path().join("b"), &members));
    let im = big();
    let id = checkpoint(&a.store, &im, 40);
    b.fetcher.fetch_checkpoint(&id, &[a.holder()], &ring(), &pin(1), quiet()).await.unwrap();
    let other = a.holder();
    let peers = BulkPeers::new(b.bulk.clone(), Arc::new(move || vec![other.clone()]), Arc::new(ring));
    b.store.set_peers(Arc::new(peers));
    let store = b.store.clone();
    let (dir, manifest) = (b.dir.clone(), b.store.manifest_path(&id));
    let work = move || {
        let files = packs(&dir);
        // Scrub: the damaged pack comes whole and takes its old place.
        flip(&files[0]);
        let (mut after, mut faults, mut repaired) = (None, 0, 0);
        loop {
            let step = store.scrub(after, &ring()).unwrap();
            faults += step.faults.len();
            repaired += step.repaired.len();
            after = step.pack;
            if after.is_none() {
                break;
            }
        }
        assert_eq!((faults, repaired), (1, 1));
        assert_eq!(packs(&dir), files);
        assert_whole(&store, &id, &im);
        // A pack and the manifest gone, another pack rotten: a plan and a read bring them back.
        std::fs::remove_file(&files[1]).unwrap();
        std::fs::remove_file(&manifest).unwrap();
        flip(&files[2]);
        store.closure_plan(&id, &ring()).unwrap();
        assert_eq!(store.verify(&id, &ring()).unwrap().faults, []);
        assert_whole(&store, &id, &im);
        assert_eq!(store.scrub(None, &ring()).unwrap().faults, []);
    };
    tokio::task::spawn_blocking(work).await.unwrap();
    // With the other holder gone, what is damaged is an error that names it, and never wrong bytes.
    a.bulk.close().await;
    let store = b.store.clone();
    let dir = b.dir.clone();
    let lost = move || {
        packs(&dir).iter().for_each(|p| flip(p));
        let faults = store.verify(&id, &ring());
        match faults {
            Ok(r) => assert!(!r.faults.is_empty()),
            Err(e) => assert!(matches!(e, StoreError::Lost { .. }), "{e}"),
        }
    };
    tokio::task::spawn_blocking(lost).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cap_on_bandwidth_holds() {
    let tmp = tempfile::tempdir().unwrap();
    let members = Members::default();
    let rate = 8 << 20;
    let limits = BulkLimits { send_bytes_per_s: Some(rate), receive_bytes_per_s: None };
    let a = Node::with(&tmp.path().join("a"), &members, Setup { limits, ..Setup::default() });
    let im = Image { memory: (1..200).collect(), disk: vec![] };
    let id = checkpoint(&a.store, &im, 100);
    for (name, receive_bytes_per_s) in [("sender", None), ("receiver", Some(rate / 2))] {
        let limits = BulkLimits { send_bytes_per_s: None, receive_bytes_per_s };
        let b = Node::with(&tmp.path().join(name), &members, Setup { limits, ..Setup::default() });
        let begin = Instant::now();
        let got = b.fetcher.fetch_checkpoint(&id, &[a.holder()], &ring(), &pin(1), quiet()).await.unwrap();
        let took = begin.elapsed();
        let least = Duration::from_millis((got.bytes * 1000 / receive_bytes_per_s.unwrap_or(rate)).saturating_sub(300));
        assert!(took >= least, "{name}: {} bytes in {took:?}", got.bytes);
        assert_whole(&b.store, &id, &im);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_holders_that_are_both_damaged_give_it_all_together() {
    let tmp = tempfile::tempdir().unwrap();
    let members = Members::default();
    let (a, b) = (Node::start(&tmp.path().join("a"), &members), Node::start(&tmp.path().join("b"), &members));
    let im = big();
    let id = checkpoint(&a.store, &im, 20);
    b.fetcher.fetch_checkpoint(&id, &[a.holder()], &ring(), &pin(1), quiet()).await.unwrap();
    let all = packs(&a.dir);
    assert!(all.len() > 8, "{}", all.len());
    all[..4].iter().for_each(|p| flip(p));
    packs(&b.dir)[4..8].iter().for_each(|p| flip(p));
    let c = Node::start(&tmp.path().join("c"), &members);
    c.fetcher.fetch_checkpoint(&id, &[a.holder(), b.holder()], &ring(), &pin(1), quiet()).await.unwrap();
    assert_whole(&c.store, &id, &im);
    assert!(c.bulk.marked().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_key_a_fetch_ends_and_says_what_may_be_missing() {
    let tmp = tempfile::tempdir().unwrap();
    let members = Members::default();
    let (a, b) = (Node::start(&tmp.path().join("a"), &members), Node::start(&tmp.path().join("b"), &members));
    let id = checkpoint(&a.store, &big(), 40);
    let none = ks_blobs::KeyRing::default();
    let e = b.fetcher.fetch_checkpoint(&id, &[a.holder()], &none, &pin(1), quiet()).await.unwrap_err();
    assert_eq!(e.code(), "key", "{e}");
    assert_eq!((b.store.stats().manifests, b.store.pins()), (0, vec![]));
}
