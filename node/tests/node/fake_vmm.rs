//! The stand-in for `ks-vmm`: this test program again, started by a script of that name (see `harness`).

use crate::fake_guest::{FakeGuest, Memory};
use ks_node::host::control::{FrameReader, encode, send_frame};
use ks_node::host::files::{memfd, random, read_fd};
use ks_proto::CheckpointId;
use ks_proto::chunk::{CHUNK_BYTES, DomainKey, ObjectKind};
use ks_proto::control::{
    CheckpointStats, Fault, Frame, HostReply, HostRequest, PROTOCOL, VmConfig, VmPhase, VmStats, VmmEvent, VmmReply, VmmRequest,
};
use ks_proto::ids::ChunkId;
use ks_proto::manifest::{EngineKind, Machine, Manifest, Map, SEGMENT_CHUNKS, decode_segment};
use ks_proto::pack::PackBuilder;
use ks_proto::plan::Plan;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, oneshot};

/// Not a test: does nothing unless the script started it with a VMM's arguments.
#[test]
fn main_when_started_as_ks_vmm() {
    let args: Vec<String> = std::env::args().collect();
    let value = |name: &str| args.windows(2).find(|w| w[0] == name).map(|w| PathBuf::from(&w[1]));
    let (Some(control), Some(channel), Some(dir)) = (value("--control-socket"), value("--channel-socket"), value("--run-dir"))
    else {
        return;
    };
    std::fs::write(dir.join("vmm.pid"), std::process::id().to_string()).unwrap();
    std::fs::write(dir.join("console.log"), "fake console line\n").unwrap();
    let faults = PathBuf::from(std::env::var_os("KS_FAKE_FAULTS").unwrap());
    tokio::runtime::Runtime::new().unwrap().block_on(async move {
        let guest = FakeGuest { memory: Arc::default(), faults: faults.clone() };
        let (control, channel) = (UnixListener::bind(control).unwrap(), UnixListener::bind(channel).unwrap());
        let serving = guest.clone();
        tokio::spawn(async move {
            while let Ok((socket, _)) = channel.accept().await {
                tokio::spawn(serving.clone().serve(socket));
            }
        });
        let vm = Arc::new(Vmm { guest, faults, state: Mutex::default() });
        while let Ok((socket, _)) = control.accept().await {
            tokio::spawn(vm.clone().connection(socket));
        }
    });
}

#[derive(Default)]
struct State {
    config: Option<VmConfig>,
    lease: Option<ks_proto::RunToken>,
    keys: BTreeMap<u32, DomainKey>,
    write_domain: u32,
    packs: Vec<File>,
    disk: Map,
}

struct Vmm {
    guest: FakeGuest,
    faults: PathBuf,
    state: Mutex<State>,
}

type Asked = (HostRequest, Vec<OwnedFd>, oneshot::Sender<(Result<HostReply, Fault>, Vec<OwnedFd>)>);

impl Vmm {
    /// A fault that happens once.
    fn once(&self, name: &str) -> bool {
        std::fs::remove_file(self.faults.join(name)).is_ok()
    }

    async fn connection(self: Arc<Self>, socket: UnixStream) {
        let socket = Arc::new(socket);
        let (out, mut frames) = mpsc::channel::<(Frame, Vec<OwnedFd>)>(16);
        let writer = socket.clone();
        tokio::spawn(async move {
            while let Some((frame, fds)) = frames.recv().await {
                let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
                send_frame(&writer, &encode(&frame, fds.len()).unwrap(), &fds).await.ok();
            }
        });
        let (ask, mut asked) = mpsc::channel::<Asked>(16);
        let mut waiting = BTreeMap::new();
        let mut next = 0u64;
        let mut reader = FrameReader::default();
        loop {
            tokio::select! {
                Some((request, fds, tx)) = asked.recv() => {
                    next += 1;
                    waiting.insert(next, tx);
                    let frame = Frame::HostRequest { id: next, fds: fds.len() as u32, request };
                    out.send((frame, fds)).await.unwrap();
                }
                frame = reader.next(&socket) => match frame {
                    Ok(Some((Frame::Request { id, request, .. }, fds))) => {
                        let (this, out, ask) = (self.clone(), out.clone(), ask.clone());
                        tokio::spawn(async move {
                            let stop = matches!(request, VmmRequest::Stop {});
                            let result = this.serve(request, fds, &ask, &out).await;
                            out.send((Frame::Reply { id, fds: 0, result }, vec![])).await.ok();
                            if stop {
                                tokio::task::yield_now().await;
                                std::process::exit(0);
                            }
                        });
                    }
                    Ok(Some((Frame::HostReply { id, result, .. }, fds))) => {
                        let tx: oneshot::Sender<_> = waiting.remove(&id).unwrap();
                        tx.send((result, fds)).ok();
                    }
                    _ => return,
                },
            }
        }
    }

    async fn serve(
        &self,
        request: VmmRequest,
        mut fds: Vec<OwnedFd>,
        ask: &mpsc::Sender<Asked>,
        out: &mpsc::Sender<(Frame, Vec<OwnedFd>)>,
    ) -> Result<VmmReply, Fault> {
        if let VmmRequest::Boot { config, .. } | VmmRequest::Restore { config, .. } = &request {
            assert_eq!(self.state.lock().unwrap().lease, Some(config.token), "the lease comes before the start");
        }
        let started = || Ok(VmmReply::Started { first_run_us: 1, engine_version: "fake 1".into() });
        match request {
            VmmRequest::Hello { .. } => {
                let config = self.state.lock().unwrap().config.clone();
                let phase = if config.is_some() { VmPhase::Running } else { VmPhase::Empty };
                Ok(VmmReply::Hello { protocol: PROTOCOL, pid: std::process::id(), phase, config, jail: vec!["none".into()] })
            }
            VmmRequest::Keys { keys, write_domain } => {
                let mut s = self.state.lock().unwrap();
                s.write_domain = write_domain;
                for k in keys {
                    let master: [u8; 32] = hex::decode(k.master_hex).unwrap().try_into().unwrap();
                    s.keys.insert(k.domain, DomainKey::new(k.domain, master));
                }
                Ok(VmmReply::Done {})
            }
            VmmRequest::Packs {} => {
                self.state.lock().unwrap().packs.extend(fds.into_iter().map(File::from));
                Ok(VmmReply::Done {})
            }
            VmmRequest::Boot { config, image_manifest_hex } => {
                let m = Manifest::decode(&hex::decode(image_manifest_hex).unwrap()).unwrap();
                Plan::decode(&read_fd(fds.remove(2), 1 << 30).unwrap()).unwrap();
                let mut s = self.state.lock().unwrap();
                (s.disk, s.config) = (m.disk, Some(config));
                started()
            }
            VmmRequest::Restore { config, checkpoint } => {
                if self.once("fail-restore") || self.faults.join("fail-every-restore").exists() {
                    return Err(Fault::new("internal", "the restore", "told to fail", "nothing"));
                }
                let manifest = read_fd(fds.remove(3), 1 << 30).unwrap();
                let plan = Plan::decode(&read_fd(fds.remove(2), 1 << 30).unwrap()).unwrap();
                self.restore(config, &checkpoint, &manifest, &plan);
                started()
            }
            VmmRequest::Checkpoint { parent, .. } => self.checkpoint(parent, ask, out).await,
            VmmRequest::Stats {} => {
                Ok(VmmReply::Stats { stats: VmStats { memory_present_bytes: 7 << 20, ..VmStats::default() } })
            }
            VmmRequest::Lease { token, .. } => {
                let mut s = self.state.lock().unwrap();
                assert!(s.config.as_ref().is_none_or(|c| c.token == token));
                s.lease = Some(token);
                Ok(VmmReply::Done {})
            }
            VmmRequest::Pause {} | VmmRequest::Resume {} | VmmRequest::Stop {} => Ok(VmmReply::Done {}),
        }
    }

    fn object(s: &State, plan: &Plan, id: &ChunkId) -> Vec<u8> {
        let row = plan.find(id).expect("the plan has the whole closure");
        let mut stored = vec![0; row.entry.stored_len as usize];
        s.packs[row.pack as usize].read_exact_at(&mut stored, u64::from(row.entry.offset)).unwrap();
        row.entry.open(&s.keys[&row.domain], &stored).unwrap()
    }

    fn restore(&self, config: VmConfig, id: &CheckpointId, manifest: &[u8], plan: &Plan) {
        let m = Manifest::decode_verified(id, manifest).unwrap();
        let mut s = self.state.lock().unwrap();
        let segment = Self::object(&s, plan, &m.memory.segments[0]);
        let chunk = Self::object(&s, plan, &decode_segment(&segment).unwrap()[0]);
        let len = u32::from_le_bytes(chunk[..4].try_into().unwrap()) as usize;
        let memory: Memory = serde_json::from_slice(&chunk[4..4 + len]).unwrap();
        *self.guest.memory.lock().unwrap() = memory;
        (s.disk, s.config) = (m.disk, Some(config));
    }

    async fn checkpoint(
        &self,
        parent: Option<CheckpointId>,
        ask: &mpsc::Sender<Asked>,
        out: &mpsc::Sender<(Frame, Vec<OwnedFd>)>,
    ) -> Result<VmmReply, Fault> {
        if self.once("fail-checkpoint") {
            return Err(Fault::new("disk-full", "storing", "told to fail", "free space"));
        }
        let host = |request, fds| async move {
            let (tx, rx) = oneshot::channel();
            ask.send((request, fds, tx)).await.unwrap();
            rx.await.unwrap()
        };
        let (pack, id, manifest) = self.capture(parent);
        out.send((Frame::Event { event: VmmEvent::Resumed { pause_us: 5 } }, vec![])).await.unwrap();
        let (reply, mut fds) = host(HostRequest::NewPack {}, vec![]).await;
        reply?;
        let mut file = File::from(fds.remove(0));
        file.write_all(&pack).unwrap();
        host(HostRequest::PackDone { id, bytes: pack.len() as u64 }, vec![]).await.0?;
        if self.once("crash-before-commit") {
            std::process::abort();
        }
        if self.faults.join("hold-commit").exists() {
            std::fs::write(self.faults.join("held"), "").unwrap();
        }
        while self.faults.join("hold-commit").exists() {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        let stats = CheckpointStats {
            id: Manifest::id_of(&manifest).to_hex(),
            pause_us: 5,
            stored_bytes: pack.len() as u64,
            memory_used_bytes: CHUNK_BYTES as u64,
            tracker: "fake".into(),
            ..CheckpointStats::default()
        };
        let fd = memfd("manifest", &manifest).unwrap();
        host(HostRequest::Commit { stats: stats.clone() }, vec![fd.into()]).await.0?;
        Ok(VmmReply::Checkpoint { stats })
    }

    /// One pack with the memory's only chunk, its segment and the state; and the manifest.
    fn capture(&self, parent: Option<CheckpointId>) -> (Vec<u8>, ks_proto::PackId, Vec<u8>) {
        let s = self.state.lock().unwrap();
        let config = s.config.clone().unwrap();
        let key = &s.keys[&s.write_domain];
        let json = serde_json::to_vec(&*self.guest.memory.lock().unwrap()).unwrap();
        let mut chunk = u32::try_from(json.len()).unwrap().to_le_bytes().to_vec();
        chunk.extend(json);
        chunk.resize(CHUNK_BYTES, 0);
        let (mut b, mut pack) = PackBuilder::start(s.write_domain);
        let mut put = |kind, plain: &[u8]| -> ChunkId {
            let id = key.name(kind, plain);
            pack.extend(b.add(key, kind, id, plain, random()));
            id
        };
        let data = put(ObjectKind::Data, &chunk);
        let mut segment = data.0.to_vec();
        segment.resize(SEGMENT_CHUNKS * 32, 0);
        let segment = put(ObjectKind::Segment, &segment);
        let state = put(ObjectKind::State, &random::<16>());
        let (tail, id, _) = b.finish();
        pack.extend(tail);
        let mut segments = vec![ChunkId::ZERO; Map::segments_for(config.memory_bytes) as usize];
        segments[0] = segment;
        let machine = Machine {
            engine: EngineKind::Qemu,
            profile: "tcg".into(),
            engine_version: "fake 1".into(),
            cpu_model: "fake".into(),
            features: vec![],
            tsc_khz: 1,
            vcpus: config.vcpus,
            cmdline: String::new(),
            kernel_hash: String::new(),
            initrd_hash: String::new(),
        };
        let manifest = Manifest {
            session: config.session,
            parent,
            created_unix_ms: ks_node::host::clock::unix_ms(),
            journal_position: 0,
            machine: Some(machine),
            state: vec![state],
            state_bytes: 16,
            memory: Map { bytes: config.memory_bytes, segments },
            disk: s.disk.clone(),
        };
        (pack, id, manifest.encode())
    }
}
