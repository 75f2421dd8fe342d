//! A VM without vCPUs: its guest is test code that writes memory and disk between `enter` and `leave` of a gate.

use super::super::*;
use crate::engine::{EngineExit, Stopper};
use crate::lease::LeaseGate;
use crate::memory::map::GuestMap;
use crate::memory::{OnFatal, Tracked};
use crate::testing::MemoryNode;
use ks_proto::manifest::EngineKind;
use ks_proto::{Manifest, RunToken};
use std::os::unix::net::UnixStream;
use std::sync::{Condvar, PoisonError};

pub const CHUNK: u64 = CHUNK_BYTES as u64;

/// Writers are inside; the engine waits until none is and lets none in while paused.
#[derive(Default)]
pub struct Gate {
    state: Mutex<(bool, u32)>,
    changed: Condvar,
}

impl Gate {
    pub fn inside<T>(&self, work: impl FnOnce() -> T) -> T {
        let mut s = self.changed.wait_while(lock(&self.state), |s| s.0).unwrap_or_else(PoisonError::into_inner);
        s.1 += 1;
        drop(s);
        let out = work();
        lock(&self.state).1 -= 1;
        self.changed.notify_all();
        out
    }
    fn pause(&self) {
        lock(&self.state).0 = true;
        drop(self.changed.wait_while(lock(&self.state), |s| s.1 > 0).unwrap_or_else(PoisonError::into_inner));
    }
    fn run(&self) {
        lock(&self.state).0 = false;
        self.changed.notify_all();
    }
    pub fn paused(&self) -> bool {
        lock(&self.state).0
    }
}

/// What the fake engine does wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wrong {
    Pause,
    Save,
}

pub struct FakeEngine {
    pub gate: Arc<Gate>,
    pub state: Box<dyn FnMut() -> Vec<u8> + Send>,
    pub wrong: Option<Wrong>,
    exit: UnixStream,
}

struct NoVcpus;
impl Stopper for NoVcpus {
    fn freeze(&self) {}
    fn thaw(&self) {}
}

fn wrong(what: &str) -> Fault {
    Fault::new("timeout", what, "told to fail", "try again")
}

impl Engine for FakeEngine {
    fn kind(&self) -> EngineKind {
        EngineKind::Kvm
    }
    fn machine(&self) -> Machine {
        Machine {
            engine: EngineKind::Kvm,
            profile: "fake".into(),
            engine_version: "1".into(),
            cpu_model: "none".into(),
            features: Vec::new(),
            tsc_khz: 1,
            vcpus: 1,
            cmdline: String::new(),
            kernel_hash: String::new(),
            initrd_hash: String::new(),
        }
    }
    fn run(&mut self) -> Result<(), Fault> {
        self.gate.run();
        Ok(())
    }
    fn pause(&mut self, _bound: Duration) -> Result<(), Fault> {
        if self.wrong == Some(Wrong::Pause) {
            return Err(wrong("pause"));
        }
        self.gate.pause();
        Ok(())
    }
    fn save_state(&mut self) -> Result<Vec<u8>, Fault> {
        assert!(self.gate.paused(), "state is saved only while paused");
        if self.wrong == Some(Wrong::Save) {
            return Err(wrong("save state"));
        }
        Ok((self.state)())
    }
    fn connect_port(&mut self) -> Result<UnixStream, Fault> {
        Err(wrong("connect port"))
    }
    fn stopper(&self) -> Arc<dyn Stopper> {
        Arc::new(NoVcpus)
    }
    fn exited(&mut self) -> Option<EngineExit> {
        None
    }
    fn exit_fd(&self) -> std::os::fd::RawFd {
        std::os::fd::AsRawFd::as_raw_fd(&self.exit)
    }
    fn kill(&mut self) {}
}

/// How memory comes back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    Lazy,
    Eager,
    /// No userfaultfd: loaded eagerly, dirty chunks by hashing.
    Detached,
}

pub struct Vm {
    pub node: MemoryNode,
    pub memory: Arc<Memory>,
    pub map: Arc<GuestMap>,
    pub disk: Arc<Disk>,
    pub engine: FakeEngine,
    pub pipeline: Arc<Pipeline>,
    _dir: tempfile::TempDir,
}

pub fn user_key() -> DomainKey {
    DomainKey::new(1, [1; 32])
}
pub fn keys() -> Vec<DomainKey> {
    vec![DomainKey::new(0, [8; 32]), user_key()]
}

fn lease() -> Arc<LeaseGate> {
    let gate = LeaseGate::new(RunToken::default());
    gate.renew(RunToken::default(), u64::MAX).unwrap();
    Arc::new(gate)
}

impl Vm {
    /// A booted VM over an image's disk.
    pub fn boot(node: &MemoryNode, memory_chunks: u64, disk: &[Vec<u8>], tracked: bool) -> Vm {
        let golden = &keys()[0];
        let refs = node.import(golden, ObjectKind::Data, disk);
        let segments = refs
            .chunks(ks_proto::manifest::SEGMENT_CHUNKS)
            .map(|part| node.import(golden, ObjectKind::Segment, &[ks_proto::manifest::encode_segment(part)])[0])
            .collect();
        let disk_map = Map { bytes: refs.len() as u64 * CHUNK, segments };
        let memory = Memory::create(memory_chunks * CHUNK).unwrap();
        Self::build(node, memory, None, disk_map, tracked)
    }
    /// The VM of a checkpoint.
    pub fn restore(node: &MemoryNode, id: &str, how: How) -> Vm {
        let manifest = node.manifest(&id.parse().unwrap()).expect("it was committed");
        let source = node.source(&keys());
        let memory = Memory::create(manifest.memory.bytes).unwrap();
        let refs = source.load_map(&manifest.memory).unwrap();
        match how {
            How::Lazy => {
                let fatal: OnFatal = Arc::new(|f| panic!("the pager died: {f}"));
                memory.restore_lazy(source, refs, vec![1], fatal).unwrap();
            }
            How::Eager | How::Detached => memory.restore_eager(source, refs).unwrap(),
        }
        Self::build(node, memory, Some(manifest.memory), manifest.disk, how != How::Detached)
    }
    fn build(node: &MemoryNode, memory: Arc<Memory>, memory_map: Option<Map>, disk_map: Map, tracked: bool) -> Vm {
        let dir = tempfile::tempdir().unwrap();
        let source = node.source(&keys());
        let refs = source.load_map(&disk_map).unwrap();
        let disk = Arc::new(Disk::new(refs, disk_map.bytes, Arc::clone(&source), dir.path(), lease()).unwrap());
        let map = Arc::new(GuestMap::new(&memory).unwrap());
        if tracked {
            memory.attach(Tracked::in_this_process(None, None, map.base(), map.len(), memory.wants_missing()).unwrap()).unwrap();
        } else {
            memory.detached().unwrap();
        }
        let parts = Parts {
            session: SessionId([5; 16]),
            write_domain: 1,
            memory: Arc::clone(&memory),
            disk: Arc::clone(&disk),
            source,
            link: Arc::new(node.clone()),
            memory_map,
            disk_map,
        };
        let pipeline = Arc::new(Pipeline::new(parts).unwrap());
        let engine = FakeEngine {
            gate: Arc::default(),
            state: Box::new(|| vec![1, 2, 3]),
            wrong: None,
            exit: UnixStream::pair().unwrap().0,
        };
        Vm { node: node.clone(), memory, map, disk, engine, pipeline, _dir: dir }
    }
    pub fn capture(&mut self) -> Result<Captured, Fault> {
        let request = Request { parent: None, journal_position: 7, pause_bound: Duration::from_secs(1) };
        self.pipeline.capture(&mut self.engine, &request)
    }
    pub fn checkpoint(&mut self) -> Result<CheckpointStats, Fault> {
        let captured = self.capture()?;
        self.pipeline.store(captured)
    }
    /// Memory as the file has it (all of it loaded).
    pub fn memory_now(&self) -> Vec<u8> {
        let mut all = vec![0; self.memory.bytes() as usize];
        for (c, part) in all.chunks_exact_mut(CHUNK_BYTES).enumerate() {
            self.memory.read_chunk(c as u32, part).unwrap();
        }
        all
    }
    pub fn disk_now(&self) -> Vec<u8> {
        let mut all = vec![0; self.disk.bytes() as usize];
        self.disk.read_at(0, &mut all).unwrap();
        all
    }
}

/// Memory, disk and state of a checkpoint, from nothing but what the node stored.
pub fn rebuild(node: &MemoryNode, id: &str) -> (Vec<u8>, Vec<u8>, Vec<u8>) {
    let m: Manifest = node.manifest(&id.parse().unwrap()).expect("it was committed");
    let source = node.source(&keys());
    let all = |map: &Map| source.load_map(map).unwrap().iter().flat_map(|c| source.read(c).unwrap()).collect::<Vec<u8>>();
    (all(&m.memory), all(&m.disk), source.load_state(&m.state, m.state_bytes).unwrap())
}

/// Panics at the first different byte.
#[track_caller]
pub fn same(got: &[u8], want: &[u8], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    if let Some(at) = got.iter().zip(want).position(|(a, b)| a != b) {
        panic!("{what}: byte {at} (chunk {}) is {:#x}, should be {:#x}", at / CHUNK_BYTES, got[at], want[at]);
    }
}
