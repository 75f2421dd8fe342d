//! The node of the tests: a store in memory, and the node's end of the control socket.

use ks_proto::chunk::{CHUNK_BYTES, DomainKey};
use ks_proto::control::{
    CheckpointStats, Fault, Frame, HostReply, HostRequest, KeyMaterial, PROTOCOL, VmmEvent, VmmReply, VmmRequest,
};
use ks_proto::manifest::{Manifest, Map, encode_segment};
use ks_proto::{CheckpointId, ChunkId, ObjectKind, PackId, SessionId};
use ks_vmm::control::wire;
use ks_vmm_core::host_link::HostLink;
use ks_vmm_core::testing::MemoryNode;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

/// Disk of the test image.
pub const DISK_BYTES: u64 = 64 << 20;
const IMAGE_DOMAIN: u32 = 0;
const USER_DOMAIN: u32 = 1;

/// Objects and manifests of one test. Clones share them.
#[derive(Clone)]
pub struct Store {
    pub node: MemoryNode,
    /// Packs that any VMM has begun.
    pub packs_begun: Arc<AtomicUsize>,
    // Held while one upload goes into `node`, which takes one at a time.
    committing: Arc<Mutex<()>>,
    disk: Map,
    image: DomainKey,
    user: DomainKey,
}

impl Store {
    /// A store that holds the disk of the test image: its first MiB is a pattern, the rest zeros.
    pub fn new() -> Self {
        let (image, user) = (DomainKey::new(IMAGE_DOMAIN, [1; 32]), DomainKey::new(USER_DOMAIN, [2; 32]));
        let node = MemoryNode::new();
        let chunks: Vec<Vec<u8>> = (0..16u8).map(|n| (0..CHUNK_BYTES).map(|i| (i as u8) ^ n).collect()).collect();
        let mut refs = node.import(&image, ObjectKind::Data, &chunks);
        refs.resize((DISK_BYTES / CHUNK_BYTES as u64) as usize, ChunkId::ZERO);
        let segments: Vec<Vec<u8>> = refs.chunks(512).map(encode_segment).collect();
        let mut ids = node.import(&image, ObjectKind::Segment, &segments);
        // A segment of zeros has its own name in maps.
        for (id, refs) in ids.iter_mut().zip(refs.chunks(512)) {
            if refs.iter().all(ChunkId::is_zero) {
                *id = ChunkId::ZERO;
            }
        }
        let disk = Map { bytes: DISK_BYTES, segments: ids };
        Self { node, packs_begun: Arc::default(), committing: Arc::default(), disk, image, user }
    }
    pub fn image_manifest(&self) -> Manifest {
        Manifest {
            session: SessionId([0; 16]),
            parent: None,
            created_unix_ms: 0,
            journal_position: 0,
            machine: None,
            state: vec![],
            state_bytes: 0,
            memory: Map::default(),
            disk: self.disk.clone(),
        }
    }
    pub fn keys(&self) -> (Vec<KeyMaterial>, u32) {
        let material = |k: &DomainKey| KeyMaterial { domain: k.domain(), master_hex: hex::encode(k.master()) };
        (vec![material(&self.image), material(&self.user)], USER_DOMAIN)
    }
    pub fn plan(&self) -> (OwnedFd, Vec<File>) {
        let (plan, packs) = self.node.plan();
        (memfd(&plan.encode()), packs)
    }
    pub fn manifest(&self, id: &CheckpointId) -> Manifest {
        self.node.manifest(id).expect("committed")
    }
    pub fn manifest_file(&self, id: &CheckpointId) -> OwnedFd {
        memfd(&self.manifest(id).encode())
    }
}

pub fn memfd(bytes: &[u8]) -> OwnedFd {
    let mut f = File::from(rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    f.write_all(bytes).unwrap();
    f.into()
}

#[derive(Default)]
struct Heard {
    answers: BTreeMap<u64, Result<VmmReply, Fault>>,
    events: Vec<VmmEvent>,
    closed: bool,
    next_id: u64,
}

/// The node's end of one control connection; a thread answers what the VMM asks.
pub struct Connection {
    stream: Arc<UnixStream>,
    heard: Arc<(Mutex<Heard>, Condvar)>,
}

impl Connection {
    /// Connects (waiting for the socket to appear) and says hello.
    pub fn open(path: &Path, store: &Store) -> Self {
        let stream = Arc::new(super::until("the control socket", || UnixStream::connect(path).ok()));
        let heard = Arc::new((Mutex::new(Heard::default()), Condvar::new()));
        let (s, h, upload) = (stream.clone(), heard.clone(), Upload { store: store.clone(), open: None, done: vec![] });
        std::thread::spawn(move || listen(&s, &h, upload));
        let c = Self { stream, heard };
        c.ask(VmmRequest::Hello { protocol: PROTOCOL }, &[]).unwrap();
        c
    }
    /// Sends a request without waiting.
    pub fn send(&self, request: VmmRequest, fds: &[BorrowedFd<'_>]) -> u64 {
        let id = {
            let mut h = self.heard.0.lock().unwrap();
            h.next_id += 1;
            h.next_id
        };
        // The VMM may be gone: then nobody answers.
        let _ = wire::send(&self.stream, &Frame::Request { id, fds: fds.len() as u32, request }, fds);
        id
    }
    /// Waits for the answer to `send`.
    pub fn answer(&self, id: u64) -> Result<VmmReply, Fault> {
        let deadline = Instant::now() + super::BOUND;
        let mut h = self.heard.0.lock().unwrap();
        loop {
            if let Some(a) = h.answers.remove(&id) {
                return a;
            }
            if h.closed {
                return Err(Fault::new("closed", "test", "the VMM closed the connection", ""));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "no answer from the VMM");
            h = self.heard.1.wait_timeout(h, left).unwrap().0;
        }
    }
    pub fn ask(&self, request: VmmRequest, fds: &[BorrowedFd<'_>]) -> Result<VmmReply, Fault> {
        self.answer(self.send(request, fds))
    }
    /// Waits for an event and takes it.
    pub fn event<T>(&self, what: &str, wanted: impl Fn(&VmmEvent) -> Option<T>) -> T {
        let deadline = Instant::now() + super::BOUND;
        let mut h = self.heard.0.lock().unwrap();
        loop {
            let found = h.events.iter().position(|e| wanted(e).is_some());
            if let Some(t) = found.and_then(|i| wanted(&h.events.remove(i))) {
                return t;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "no event {what}; got {:?}", h.events);
            h = self.heard.1.wait_timeout(h, left).unwrap().0;
        }
    }
    pub fn events(&self) -> Vec<VmmEvent> {
        self.heard.0.lock().unwrap().events.clone()
    }
    pub fn close(&self) {
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }
}

/// What one connection has uploaded and not committed.
struct Upload {
    store: Store,
    open: Option<File>,
    done: Vec<(PackId, Vec<u8>)>,
}

fn read(file: &File, bytes: usize) -> Vec<u8> {
    let mut all = vec![0; bytes];
    std::os::unix::fs::FileExt::read_exact_at(file, &mut all, 0).unwrap();
    all
}

impl Upload {
    fn commit(&mut self, manifest: &[u8], stats: &CheckpointStats) -> Result<(), Fault> {
        let _one = self.store.committing.lock().unwrap();
        let node = &self.store.node;
        for (id, bytes) in self.done.drain(..) {
            node.new_pack()?.write_all(&bytes).unwrap();
            node.pack_done(id, bytes.len() as u64)?;
        }
        assert_eq!(node.commit(manifest, stats)?.to_hex(), stats.id);
        Ok(())
    }
}

fn listen(stream: &UnixStream, heard: &(Mutex<Heard>, Condvar), mut upload: Upload) {
    while let Ok((frame, fds)) = wire::receive(stream) {
        match frame {
            Frame::Reply { id, result, .. } => drop(heard.0.lock().unwrap().answers.insert(id, result)),
            Frame::Event { event } => heard.0.lock().unwrap().events.push(event),
            Frame::HostRequest { id, request, .. } => {
                let (result, file) = match answer(&mut upload, request, fds) {
                    Ok((r, f)) => (Ok(r), f),
                    Err(f) => (Err(f), None),
                };
                let fds: Vec<_> = file.iter().map(AsFd::as_fd).collect();
                let _ = wire::send(stream, &Frame::HostReply { id, fds: fds.len() as u32, result }, &fds);
            }
            other => panic!("a VMM does not send {other:?}"),
        }
        heard.1.notify_all();
    }
    let mut h = heard.0.lock().unwrap();
    h.closed = true;
    drop(h);
    heard.1.notify_all();
}

fn answer(upload: &mut Upload, request: HostRequest, fds: Vec<OwnedFd>) -> Result<(HostReply, Option<File>), Fault> {
    let node = upload.store.node.clone();
    Ok(match request {
        HostRequest::NewPack {} => {
            let file = File::from(memfd(&[]));
            upload.open = Some(file.try_clone().unwrap());
            upload.store.packs_begun.fetch_add(1, Ordering::SeqCst);
            (HostReply::Pack {}, Some(file))
        }
        HostRequest::PackDone { id, bytes } => {
            let file = upload.open.take().expect("a pack was handed out");
            upload.done.push((id, read(&file, bytes as usize)));
            (HostReply::Done {}, None)
        }
        HostRequest::Known { ids } => (HostReply::Known { known: node.known(&ids)? }, None),
        HostRequest::Commit { stats } => {
            let file = File::from(fds.into_iter().next().expect("a manifest comes along"));
            let manifest = read(&file, file.metadata().unwrap().len() as usize);
            upload.commit(&manifest, &stats)?;
            (HostReply::Done {}, None)
        }
        HostRequest::Abort { why } => {
            upload.done.clear();
            let _one = upload.store.committing.lock().unwrap();
            node.abort(&why);
            (HostReply::Done {}, None)
        }
        HostRequest::Fetch { id, broken } => {
            let f = node.fetch(&id, broken.as_deref())?;
            let e = f.entry;
            let reply = HostReply::Object {
                offset: e.offset,
                stored_len: e.stored_len,
                plain_len: e.plain_len,
                kind: e.kind as u8,
                codec: e.codec as u8,
                domain: f.domain,
            };
            (reply, Some(f.pack))
        }
    })
}
