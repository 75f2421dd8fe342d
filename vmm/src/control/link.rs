//! The connection to the node: which one is current, requests to the node and their answers, events.
//!
//! The newest connection replaces an older one. An upload whose connection ends fails with `node-gone`, also when the
//! node is back before its next request; a fetch for the pager waits, at most [`NODE_RETURN`], for the node to come back and asks again.

use super::wire::{self, WireError};
use ks_proto::control::{CheckpointStats, Fault, Frame, HostReply, HostRequest, VmmEvent, VmmReply};
use ks_proto::manifest::Manifest;
use ks_proto::pack::PackEntry;
use ks_proto::{CheckpointId, ChunkId, PackId};
use ks_vmm_core::host_link::{Fetched, HostLink};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The node must answer a small request within this.
pub const ANSWER: Duration = Duration::from_secs(30);
/// The node must have synced a pack or a manifest within this.
pub const SYNC: Duration = Duration::from_secs(180);
/// How long paging waits for a node that went away.
pub const NODE_RETURN: Duration = Duration::from_secs(60);
/// A node that does not read for this long is dropped.
pub const SEND: Duration = Duration::from_secs(10);

type Answer = Result<(HostReply, Vec<OwnedFd>), Fault>;

/// One connection from the node.
pub struct Conn {
    /// Rises with every connection.
    pub number: u64,
    stream: UnixStream,
    sending: Mutex<()>,
}

impl Conn {
    fn send(&self, frame: &Frame, fds: &[BorrowedFd<'_>]) -> Result<(), WireError> {
        let _one_at_a_time = lock(&self.sending);
        wire::send(&self.stream, frame, fds).inspect_err(|_| self.shut())
    }
    /// The next frame from the node; blocks.
    pub fn receive(&self) -> Result<(Frame, Vec<OwnedFd>), WireError> {
        wire::receive(&self.stream)
    }
    fn shut(&self) {
        // An error means that it is shut already.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }
    /// Answers a request of this connection; a failure ends the connection, and the node asks again on the next one.
    pub fn reply(&self, id: u64, result: Result<VmmReply, Fault>) {
        if let Err(e) = self.send(&Frame::Reply { id, fds: 0, result }, &[]) {
            tracing::info!("answer {id} was not delivered: {e}");
        }
    }
}

#[derive(Default)]
struct State {
    current: Option<Arc<Conn>>,
    connections: u64,
    next_id: u64,
    /// The connection that the upload under way began on. A node that came back knows nothing of it.
    upload: Option<u64>,
    // Invariant: holds an entry exactly while some thread waits for it.
    waiting: BTreeMap<u64, Option<Answer>>,
}

/// Shared by every thread that talks to the node.
#[derive(Default)]
pub struct Link {
    state: Mutex<State>,
    changed: Condvar,
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

fn gone(what: &str) -> Fault {
    Fault::new("node-gone", what, "the node's connection ended", "start the checkpoint again once the node is back")
}

impl Link {
    /// Makes `stream` the current connection and ends the one before.
    pub fn adopt(&self, stream: UnixStream) -> std::io::Result<Arc<Conn>> {
        stream.set_write_timeout(Some(SEND))?;
        let mut s = lock(&self.state);
        s.connections += 1;
        let conn = Arc::new(Conn { number: s.connections, stream, sending: Mutex::new(()) });
        if let Some(old) = s.current.replace(conn.clone()) {
            old.shut();
        }
        self.changed.notify_all();
        Ok(conn)
    }
    /// The connection ended: those who wait on it are told.
    pub fn ended(&self, conn: &Conn) {
        conn.shut();
        let mut s = lock(&self.state);
        if s.current.as_ref().is_some_and(|c| c.number == conn.number) {
            s.current = None;
        }
        self.changed.notify_all();
    }
    /// Hands an answer of the node to the thread that waits for it; late ones are dropped.
    pub fn answered(&self, id: u64, answer: Answer) {
        if let Some(slot) = lock(&self.state).waiting.get_mut(&id) {
            *slot = Some(answer);
            self.changed.notify_all();
        }
    }
    /// Tells the node, if it is there.
    pub fn event(&self, event: VmmEvent) {
        let current = lock(&self.state).current.clone();
        if let Some(c) = current
            && let Err(e) = c.send(&Frame::Event { event }, &[])
        {
            tracing::info!("an event was not delivered: {e}");
        }
    }

    fn ask(&self, request: HostRequest, fds: &[BorrowedFd<'_>], bound: Duration) -> Answer {
        let what = operation(&request);
        let deadline = Instant::now() + bound;
        let (id, conn) = {
            let mut s = lock(&self.state);
            let conn = s.current.clone().ok_or_else(|| gone(what))?;
            if is_upload(&request) && *s.upload.get_or_insert(conn.number) != conn.number {
                return Err(gone(what));
            }
            s.next_id += 1;
            let id = s.next_id;
            s.waiting.insert(id, None);
            (id, conn)
        };
        let count = u32::try_from(fds.len()).expect("a request carries at most one descriptor");
        let sent = conn.send(&Frame::HostRequest { id, fds: count, request }, fds);
        let mut s = lock(&self.state);
        let outcome = loop {
            if let Some(answer) = s.waiting.get_mut(&id).and_then(Option::take) {
                break answer;
            }
            if sent.is_err() || s.current.as_ref().is_none_or(|c| c.number != conn.number) {
                break Err(gone(what));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let why = format!("no answer within {} s", bound.as_secs());
                break Err(Fault::new("timeout", what, why, "look at the node's log and load"));
            }
            s = self.changed.wait_timeout(s, left).unwrap_or_else(PoisonError::into_inner).0;
        };
        s.waiting.remove(&id);
        outcome
    }

    /// Waits until the node is connected; false when it did not come back by `deadline`.
    fn wait_for_node(&self, deadline: Instant) -> bool {
        let mut s = lock(&self.state);
        loop {
            if s.current.is_some() {
                return true;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            s = self.changed.wait_timeout(s, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn done(&self, request: HostRequest, fds: &[BorrowedFd<'_>]) -> Result<(), Fault> {
        let what = operation(&request);
        match self.ask(request, fds, SYNC)? {
            (HostReply::Done {}, _) => Ok(()),
            (other, _) => Err(unexpected(what, &other)),
        }
    }
}

fn operation(r: &HostRequest) -> &'static str {
    match r {
        HostRequest::NewPack {} => "ask the node for a pack file",
        HostRequest::PackDone { .. } => "hand a pack to the node",
        HostRequest::Known { .. } => "ask the node which objects it has",
        HostRequest::Commit { .. } => "hand the manifest to the node",
        HostRequest::Abort { .. } => "drop an upload",
        HostRequest::Fetch { .. } => "fetch an object through the node",
    }
}

/// Part of one upload, which lives and dies with its connection.
fn is_upload(r: &HostRequest) -> bool {
    match r {
        HostRequest::NewPack {} | HostRequest::PackDone { .. } | HostRequest::Known { .. } | HostRequest::Commit { .. } => true,
        HostRequest::Abort { .. } | HostRequest::Fetch { .. } => false,
    }
}

fn unexpected(what: &str, got: &HostReply) -> Fault {
    Fault::new("protocol", what, format!("the node answered with something else: {got:?}"), "node and VMM must be of one version")
}

impl HostLink for Link {
    fn new_pack(&self) -> Result<File, Fault> {
        match self.ask(HostRequest::NewPack {}, &[], ANSWER)? {
            (HostReply::Pack {}, fds) if fds.len() == 1 => Ok(fds.into_iter().next().map(File::from).expect("counted")),
            (other, _) => Err(unexpected("ask the node for a pack file", &other)),
        }
    }
    fn pack_done(&self, id: PackId, bytes: u64) -> Result<(), Fault> {
        self.done(HostRequest::PackDone { id, bytes }, &[])
    }
    fn known(&self, ids: &[ChunkId]) -> Result<Vec<bool>, Fault> {
        match self.ask(HostRequest::Known { ids: ids.to_vec() }, &[], ANSWER)? {
            (HostReply::Known { known }, _) if known.len() == ids.len() => Ok(known),
            (other, _) => Err(unexpected("ask the node which objects it has", &other)),
        }
    }
    fn commit(&self, manifest: &[u8], stats: &CheckpointStats) -> Result<CheckpointId, Fault> {
        let id = Manifest::id_of(manifest);
        let local =
            |e: std::io::Error| Fault::new("internal", "hand the manifest to the node", e.to_string(), "free some memory");
        let fd = rustix::fs::memfd_create("ks-manifest", rustix::fs::MemfdFlags::CLOEXEC).map_err(|e| local(e.into()))?;
        let mut file = File::from(fd);
        file.write_all(manifest).map_err(local)?;
        let stats = CheckpointStats { id: id.to_hex(), ..stats.clone() };
        self.done(HostRequest::Commit { stats }, &[file.as_fd()])?;
        lock(&self.state).upload = None;
        Ok(id)
    }
    fn abort(&self, why: &str) {
        lock(&self.state).upload = None;
        if let Err(f) = self.done(HostRequest::Abort { why: why.to_owned() }, &[]) {
            tracing::info!("{f}");
        }
    }
    fn fetch(&self, id: &ChunkId, broken: Option<&str>) -> Result<Fetched, Fault> {
        let what = "fetch an object through the node";
        let deadline = Instant::now() + NODE_RETURN;
        loop {
            let request = HostRequest::Fetch { id: *id, broken: broken.map(str::to_owned) };
            match self.ask(request, &[], SYNC) {
                Ok((HostReply::Object { offset, stored_len, plain_len, kind, codec, domain }, fds)) if fds.len() == 1 => {
                    let bad = |e: ks_proto::bytes::DecodeError| Fault::new("protocol", what, e.to_string(), "update the node");
                    let kind = ks_proto::chunk::ObjectKind::from_u8(kind).map_err(bad)?;
                    let codec = ks_proto::chunk::Codec::from_u8(codec).map_err(bad)?;
                    let entry = PackEntry { id: *id, offset, stored_len, plain_len, kind, codec };
                    return Ok(Fetched { pack: fds.into_iter().next().map(File::from).expect("counted"), entry, domain });
                }
                Ok((other, _)) => return Err(unexpected(what, &other)),
                Err(f) if f.code == "node-gone" && self.wait_for_node(deadline) => {}
                Err(f) => return Err(f),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers `Done` to everything on one connection until it ends; sends the names of what was asked.
    fn node(link: &Arc<Link>, number: u64, seen: std::sync::mpsc::Sender<(u64, &'static str)>) -> Arc<Conn> {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let conn = link.adopt(ours).unwrap();
        assert_eq!(conn.number, number);
        std::thread::spawn(move || {
            while let Ok((Frame::HostRequest { id, request, .. }, _)) = wire::receive(&theirs) {
                seen.send((number, operation(&request))).unwrap();
                let result = match request {
                    HostRequest::Known { ids } => Ok(HostReply::Known { known: vec![false; ids.len()] }),
                    _ => Ok(HostReply::Done {}),
                };
                wire::send(&theirs, &Frame::HostReply { id, fds: 0, result }, &[]).unwrap();
            }
        });
        let (l, c) = (link.clone(), conn.clone());
        std::thread::spawn(move || {
            while let Ok((Frame::HostReply { id, result, .. }, fds)) = c.receive() {
                l.answered(id, result.map(|r| (r, fds)));
            }
            l.ended(&c);
        });
        conn
    }

    #[test]
    fn an_upload_never_goes_on_with_a_node_that_came_back() {
        let link = Arc::new(Link::default());
        assert_eq!(link.known(&[]).unwrap_err().code, "node-gone", "before any node");
        let (tx, rx) = std::sync::mpsc::channel();
        node(&link, 1, tx.clone());
        assert_eq!(link.known(&[ChunkId::ZERO]), Ok(vec![false]));
        node(&link, 2, tx);
        assert_eq!(link.pack_done(PackId([0; 32]), 1).unwrap_err().code, "node-gone");
        assert_eq!(link.commit(b"m", &CheckpointStats::default()).unwrap_err().code, "node-gone");
        link.abort("node-gone");
        assert!(link.pack_done(PackId([0; 32]), 1).is_ok(), "the next upload");
        assert!(link.commit(b"m", &CheckpointStats::default()).is_ok());
        let asked: Vec<u64> = rx.try_iter().map(|(n, _)| n).collect();
        assert_eq!(asked, [1, 2, 2, 2], "one question to the first node; abort, pack and commit to the second");
    }

    #[test]
    fn a_request_that_waits_when_its_connection_ends_fails_at_once() {
        let link = Arc::new(Link::default());
        let (ours, theirs) = UnixStream::pair().unwrap();
        let conn = link.adopt(ours).unwrap();
        let asking = link.clone();
        let waiter = std::thread::spawn(move || asking.new_pack().map(drop));
        wire::receive(&theirs).unwrap();
        link.ended(&conn);
        assert_eq!(waiter.join().unwrap().unwrap_err().code, "node-gone");
    }
}
