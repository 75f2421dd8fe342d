//! Measures the core on this host: the pause with a given dirty set, hashing and sealing, and lazy paging.
//!
//! `cargo run --release -p ks-vmm-core --features testing --example measure [dirty MiB]`. The guest is a mapping that this program
//! writes; a third of each page is random, the rest repeats, which compresses about as code and heaps do.

use ks_proto::chunk::DomainKey;
use ks_proto::control::{CheckpointStats, Fault};
use ks_proto::manifest::{EngineKind, Machine, Map};
use ks_proto::{CHUNK_BYTES, ChunkId, ObjectKind, RunToken, SessionId};
use ks_vmm_core::checkpoint::{Parts, Pipeline, Request, Step};
use ks_vmm_core::disk::Disk;
use ks_vmm_core::engine::{Engine, EngineExit, Stopper};
use ks_vmm_core::lease::LeaseGate;
use ks_vmm_core::memory::map::GuestMap;
use ks_vmm_core::memory::{Memory, Tracked};
use ks_vmm_core::testing::MemoryNode;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

const CHUNK: u64 = CHUNK_BYTES as u64;
const MEMORY: u64 = 1 << 30;

struct Idle;
impl Stopper for Idle {
    fn freeze(&self) {}
    fn thaw(&self) {}
}
impl Engine for Idle {
    fn kind(&self) -> EngineKind {
        EngineKind::Kvm
    }
    fn machine(&self) -> Machine {
        Machine {
            engine: EngineKind::Kvm,
            profile: "none".into(),
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
        Ok(())
    }
    fn pause(&mut self, _: Duration) -> Result<(), Fault> {
        Ok(())
    }
    fn save_state(&mut self) -> Result<Vec<u8>, Fault> {
        Ok(vec![7; 50_000])
    }
    fn connect_port(&mut self) -> Result<UnixStream, Fault> {
        Err(Fault::new("internal", "port", "there is none", ""))
    }
    fn stopper(&self) -> Arc<dyn Stopper> {
        Arc::new(Idle)
    }
    fn exited(&mut self) -> Option<EngineExit> {
        None
    }
    fn exit_fd(&self) -> i32 {
        -1
    }
    fn kill(&mut self) {}
}

fn fill(map: &GuestMap, from: u64, bytes: u64, seed: u64) {
    let mut x = seed | 1;
    let mut chunk = vec![0u8; CHUNK_BYTES];
    for at in (from..from + bytes).step_by(CHUNK_BYTES) {
        for page in chunk.chunks_exact_mut(4096) {
            for word in page[..1360].chunks_exact_mut(8) {
                x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                word.copy_from_slice(&(x ^ x >> 29).to_le_bytes());
            }
            for (n, b) in page[1360..].iter_mut().enumerate() {
                *b = (n % 61) as u8 ^ seed as u8;
            }
        }
        map.write(at, &chunk);
    }
}

fn show(what: &str, s: &CheckpointStats) {
    let mib = s.dirty_memory_bytes as f64 / (1 << 20) as f64;
    println!(
        "{what}: {mib:.0} MiB dirty, pause {:.1} ms, total {:.2} s, {:.0} MiB/s, stored {:.0} MiB, new {} known {} zero {} ({})",
        s.pause_us as f64 / 1e3,
        s.total_us as f64 / 1e6,
        mib / (s.total_us as f64 / 1e6),
        s.stored_bytes as f64 / (1 << 20) as f64,
        s.chunks_new,
        s.chunks_known,
        s.chunks_zero,
        s.tracker
    );
}

fn main() -> anyhow_free::Result {
    let dirty = std::env::args().nth(1).and_then(|a| a.parse().ok()).unwrap_or(256u64) << 20;
    let key = DomainKey::new(1, [1; 32]);
    let node = MemoryNode::new();
    let lease = LeaseGate::new(RunToken::default());
    lease.renew(RunToken::default(), u64::MAX)?;
    let memory = Memory::create(MEMORY)?;
    let map = GuestMap::new(&memory)?;
    memory.attach(Tracked::in_this_process(None, None, map.base(), map.len(), false)?)?;
    let source = node.source(std::slice::from_ref(&key));
    let dir = std::env::temp_dir();
    let disk = Arc::new(Disk::new(vec![ChunkId::ZERO; 16], 16 * CHUNK, Arc::clone(&source), &dir, Arc::new(lease))?);
    let disk_map = Map { bytes: 16 * CHUNK, segments: vec![ChunkId::ZERO] };
    let parts = Parts {
        session: SessionId([1; 16]),
        write_domain: 1,
        memory: Arc::clone(&memory),
        disk,
        source,
        link: Arc::new(node.clone()),
        memory_map: None,
        disk_map,
    };
    let pipeline = Arc::new(Pipeline::new(parts)?);
    let request = Request { parent: None, journal_position: 0, pause_bound: Duration::from_secs(1) };
    let began = Instant::now();
    let last_step = std::sync::Mutex::new(0.0);
    pipeline.set_probe(Some(Box::new(move |step| {
        let now = began.elapsed().as_secs_f64() * 1e3;
        if let Ok(mut last) = last_step.lock() {
            if step <= Step::Run {
                println!("  +{:.1} ms until {step:?}", now - *last);
            }
            *last = now;
        }
        Ok(())
    })));
    let checkpoint = |what: &str| -> Result<CheckpointStats, Fault> {
        let stats = pipeline.store(pipeline.capture(&mut Idle, &request)?)?;
        show(what, &stats);
        Ok(stats)
    };
    fill(&map, 0, 512 << 20, 3);
    checkpoint("first, 512 MiB in use")?;
    fill(&map, 64 << 20, dirty, 5);
    let last = checkpoint("next")?;
    fill(&map, 0, 1 << 20, 6);
    let small = checkpoint("1 MiB")?;
    drop(last);
    measure_lazy(&node, &key, &small.id)
}

fn measure_lazy(node: &MemoryNode, key: &DomainKey, id: &str) -> anyhow_free::Result {
    let manifest = node.manifest(&id.parse()?).ok_or("the checkpoint is stored")?;
    let source = node.source(std::slice::from_ref(key));
    let begun = Instant::now();
    let memory = Memory::create(MEMORY)?;
    let refs = source.load_map(&manifest.memory)?;
    memory.restore_lazy(source, refs, Vec::new(), Arc::new(|f| panic!("{f}")))?;
    let map = GuestMap::new(&memory)?;
    let tracked = Tracked::in_this_process(None, None, map.base(), map.len(), true)?;
    memory.attach(tracked)?;
    println!("lazy restore of 1 GiB (512 MiB in use) ready in {:.1} ms", begun.elapsed().as_secs_f64() * 1e3);
    let mut byte = [0];
    let mut touch = |offsets: &mut dyn Iterator<Item = u64>| {
        let mut t: Vec<f64> = offsets
            .map(|at| {
                let t = Instant::now();
                map.read(at, &mut byte);
                t.elapsed().as_secs_f64() * 1e6
            })
            .collect();
        t.sort_by(f64::total_cmp);
        (t.len(), t[t.len() / 2], t[t.len() * 99 / 100])
    };
    let (n, p50, p99) = touch(&mut (0..1000u64).map(|i| (511 << 20) - i * 3 * CHUNK));
    println!("touching {n} chunks that are not there: p50 {p50:.0} us, p99 {p99:.0} us");
    let (n, p50, p99) = touch(&mut (0..4000u64).map(|i| (600 << 20) + i * 4096));
    println!("touching {n} fresh pages while paging: p50 {p50:.1} us, p99 {p99:.0} us");
    while memory.paging().missing > 0 {
        std::thread::yield_now();
    }
    println!("all loaded after {:.2} s: {:?}", begun.elapsed().as_secs_f64(), memory.paging());
    let t = Instant::now();
    let found = memory.collect()?;
    println!("collect: {:.1} ms, {} dirty chunks", t.elapsed().as_secs_f64() * 1e3, found.chunks.len());
    let (n, p50, p99) = touch(&mut (0..4000u64).map(|i| (700 << 20) + i * 4096));
    println!("touching {n} fresh pages afterwards: p50 {p50:.1} us, p99 {p99:.0} us");
    let plain = vec![5u8; CHUNK_BYTES];
    assert!(!key.name(ObjectKind::Data, &plain).is_zero());
    Ok(())
}

/// `main`'s error, printed by the runtime.
mod anyhow_free {
    /// Any error.
    pub type Result = std::result::Result<(), Box<dyn std::error::Error>>;
}
