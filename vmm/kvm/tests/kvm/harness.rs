//! A tiny guest over the real core: an in-memory node, a disk, guest memory, and engines that boot and restore.
//!
//! Booting takes half a minute where kernel code is emulated, so one boot serves all tests; each restores its
//! checkpoint into an engine of its own.

use ks_proto::chunk::DomainKey;
use ks_proto::control::{Fault, VmConfig};
use ks_proto::manifest::{EngineKind, Machine, Manifest, Map};
use ks_proto::{CHUNK_BYTES, CheckpointId, ChunkId, RunToken, SessionId};
use ks_vmm_core::checkpoint::{Parts, Pipeline, Request};
use ks_vmm_core::disk::Disk;
use ks_vmm_core::engine::{Engine, EngineSetup};
use ks_vmm_core::lease::LeaseGate;
use ks_vmm_core::memory::Memory;
use ks_vmm_core::source::ChunkSource;
use ks_vmm_core::testing::MemoryNode;
use ks_vmm_kvm::KvmEngine;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Linux reports free pages only while more than 128 MiB are free.
pub const MEMORY_BYTES: u64 = 256 << 20;
pub const DISK_BYTES: u64 = 8 << 20;
/// The longest wait for anything: the host may be shared and its kernel code emulated.
pub const DEADLINE: Duration = Duration::from_secs(240);
const DOMAIN: u32 = 1;

/// How guest memory comes back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loading {
    Lazy,
    Eager,
}

/// What all tests share.
pub struct Fixture {
    pub node: MemoryNode,
    pub key: DomainKey,
    pub golden: CheckpointId,
    pub console_at_boot: String,
    /// CLOCK_MONOTONIC in the guest just before the checkpoint, and the instant here.
    pub clock: (u64, Instant),
}

/// One machine and what it runs on.
pub struct Vm {
    pub engine: Box<dyn Engine>,
    pub memory: Arc<Memory>,
    pub lease: Arc<LeaseGate>,
    pub token: RunToken,
    pub pipeline: Arc<Pipeline>,
    pub dir: tempfile::TempDir,
}

impl Drop for Vm {
    fn drop(&mut self) {
        self.engine.kill();
        self.memory.shutdown();
    }
}

/// Why the guest tests cannot run here, if they cannot.
fn obstacle() -> Result<PathBuf, String> {
    File::options().read(true).write(true).open("/dev/kvm").map_err(|e| format!("no /dev/kvm ({e})"))?;
    let home = std::env::var_os("HOME").map(PathBuf::from).unwrap_or_default();
    let cached = home.join(".cache/keepstate/soft-kernel/current/vmlinux");
    let kernel = std::env::var_os("KS_TEST_KERNEL").map_or(cached, PathBuf::from);
    if kernel.exists() { Ok(kernel) } else { Err(format!("no guest kernel at {} (set KS_TEST_KERNEL)", kernel.display())) }
}

/// The checkpoint of the booted guest; None (and a loud line) where there is no KVM.
pub fn fixture() -> Option<&'static Fixture> {
    static FIXTURE: OnceLock<Option<Fixture>> = OnceLock::new();
    FIXTURE
        .get_or_init(|| match obstacle() {
            Ok(kernel) => Some(golden(&kernel)),
            Err(why) => {
                eprintln!("skipped: {why}");
                None
            }
        })
        .as_ref()
}

fn golden(kernel: &Path) -> Fixture {
    let node = MemoryNode::new();
    let key = DomainKey::new(DOMAIN, [7; 32]);
    let mut vm = boot(&node, &key, kernel).expect("the machine is built");
    vm.engine.run().expect("it runs");
    let mut port = Port::connect(&mut vm);
    assert_eq!(port.count(), 1, "console:\n{}", vm.console());
    assert_eq!(port.write_disk(0x41), 0);
    let clock = (port.monotonic_ns(), Instant::now());
    let golden = vm.checkpoint(None);
    Fixture { node, key, golden, console_at_boot: vm.console(), clock }
}

fn config(token: RunToken) -> VmConfig {
    VmConfig {
        session: SessionId([3; 16]),
        name: "test".into(),
        token,
        engine: EngineKind::Kvm,
        vcpus: 1,
        memory_bytes: MEMORY_BYTES,
        cmdline: "quiet console=ttyS0 panic=-1".into(),
        verify_eager: false,
    }
}

fn lease() -> (RunToken, Arc<LeaseGate>) {
    let token = RunToken { generation: 0, epoch: 1, run: 1 };
    let lease = LeaseGate::new(token);
    lease.renew(token, u64::MAX).expect("its own token");
    (token, Arc::new(lease))
}

/// Compiles the guest's init and packs it into an uncompressed initramfs.
fn initramfs(dir: &Path) -> File {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/kvm/guest/init.c");
    let out = dir.join("init");
    let flags = "-static -nostdlib -O1 -fno-stack-protector -fno-pie -no-pie -mno-sse -ffreestanding";
    let mut compiler = Command::new("cc");
    compiler.args(flags.split(' ')).arg("-fno-tree-loop-distribute-patterns").arg("-o").arg(&out).arg(source);
    let status = compiler.status().expect("cc runs");
    assert!(status.success(), "the guest's init compiles");
    let init = std::fs::read(&out).expect("the compiler wrote it");
    let mut cpio = Vec::new();
    entry(&mut cpio, "dev", 0o040_755, (0, 0), &[]);
    entry(&mut cpio, "dev/console", 0o020_600, (5, 1), &[]);
    entry(&mut cpio, "init", 0o100_755, (0, 0), &init);
    entry(&mut cpio, "TRAILER!!!", 0, (0, 0), &[]);
    let path = dir.join("initramfs");
    std::fs::write(&path, cpio).expect("the scratch folder is writable");
    File::open(path).expect("just written")
}

fn entry(out: &mut Vec<u8>, name: &str, mode: u32, device: (u32, u32), data: &[u8]) {
    let fields = [0, mode, 0, 0, 1, 0, data.len() as u32, 0, 0, device.0, device.1, name.len() as u32 + 1, 0];
    out.extend_from_slice(b"070701");
    for f in fields {
        out.extend_from_slice(format!("{f:08x}").as_bytes());
    }
    out.extend_from_slice(name.as_bytes());
    out.push(0);
    out.resize(out.len().next_multiple_of(4), 0);
    out.extend_from_slice(data);
    out.resize(out.len().next_multiple_of(4), 0);
}

fn setup(dir: &Path, memory: &Arc<Memory>, disk: &Arc<Disk>, lease: &Arc<LeaseGate>, token: RunToken) -> EngineSetup {
    let empty = dir.join("empty");
    std::fs::write(&empty, b"").expect("the scratch folder is writable");
    EngineSetup {
        config: config(token),
        kernel: File::open(&empty).expect("just written").into(),
        kernel_hash: "kernel".into(),
        initrd_hash: "initrd".into(),
        initrd: File::open(&empty).expect("just written").into(),
        memory: memory.clone(),
        disk: disk.clone(),
        lease: lease.clone(),
        run_dir: dir.to_owned(),
        restore: None,
    }
}

fn boot(node: &MemoryNode, key: &DomainKey, kernel: &Path) -> Result<Vm, Fault> {
    let dir = tempfile::tempdir().expect("a scratch folder");
    let (token, lease) = lease();
    let memory = Memory::create(MEMORY_BYTES)?;
    let source = node.source(std::slice::from_ref(key));
    let refs = vec![ChunkId::ZERO; (DISK_BYTES / CHUNK_BYTES as u64) as usize];
    let disk = Arc::new(Disk::new(refs, DISK_BYTES, source.clone(), dir.path(), lease.clone())?);
    let mut setup = setup(dir.path(), &memory, &disk, &lease, token);
    setup.kernel = File::open(kernel).expect("the kernel is readable").into();
    setup.initrd = initramfs(dir.path()).into();
    let engine = KvmEngine::new(setup)?;
    let disk_map = Map { bytes: DISK_BYTES, segments: vec![ChunkId::ZERO; Map::segments_for(DISK_BYTES) as usize] };
    let pipeline = pipeline(node, source, &memory, &disk, None, disk_map)?;
    Ok(Vm { engine, memory, lease, token, pipeline, dir })
}

fn pipeline(
    node: &MemoryNode,
    source: Arc<ChunkSource>,
    memory: &Arc<Memory>,
    disk: &Arc<Disk>,
    memory_map: Option<Map>,
    disk_map: Map,
) -> Result<Arc<Pipeline>, Fault> {
    let link = Arc::new(node.clone());
    let session = SessionId([3; 16]);
    let (memory, disk) = (memory.clone(), disk.clone());
    Ok(Arc::new(Pipeline::new(Parts { session, write_domain: DOMAIN, memory, disk, source, link, memory_map, disk_map })?))
}

impl Fixture {
    pub fn manifest(&self, id: &CheckpointId) -> Manifest {
        self.node.manifest(id).expect("it was committed")
    }
    /// State and machine of a checkpoint, for tests that spoil them.
    pub fn saved(&self, id: &CheckpointId) -> (Machine, Vec<u8>) {
        let m = self.manifest(id);
        let source = self.node.source(std::slice::from_ref(&self.key));
        let state = source.load_state(&m.state, m.state_bytes).expect("the state is stored");
        (m.machine.expect("a checkpoint has a machine"), state)
    }
    /// Guest memory of a checkpoint, chunk by chunk.
    pub fn memory_image(&self, id: &CheckpointId) -> Vec<Vec<u8>> {
        let source = self.node.source(std::slice::from_ref(&self.key));
        let refs = source.load_map(&self.manifest(id).memory).expect("the map is stored");
        refs.iter().map(|r| source.read(r).expect("every chunk is stored")).collect()
    }
    /// A new engine from a checkpoint, standing still.
    pub fn restore(&self, id: &CheckpointId, loading: Loading) -> Vm {
        let (machine, state) = self.saved(id);
        self.restore_with(id, loading, machine, state).unwrap_or_else(|f| panic!("restore: {f}"))
    }
    /// The same with a given machine and state.
    pub fn restore_with(&self, id: &CheckpointId, loading: Loading, machine: Machine, state: Vec<u8>) -> Result<Vm, Fault> {
        let m = self.manifest(id);
        let dir = tempfile::tempdir().expect("a scratch folder");
        let (token, lease) = lease();
        let source = self.node.source(std::slice::from_ref(&self.key));
        let memory = Memory::create(m.memory.bytes)?;
        let refs = source.load_map(&m.memory)?;
        match loading {
            Loading::Lazy => {
                memory.restore_lazy(source.clone(), refs, Vec::new(), Arc::new(|f| panic!("the pager gave up: {f}")))?;
            }
            Loading::Eager => memory.restore_eager(source.clone(), refs)?,
        }
        let disk = Disk::new(source.load_map(&m.disk)?, m.disk.bytes, source.clone(), dir.path(), lease.clone())?;
        let disk = Arc::new(disk);
        let mut setup = setup(dir.path(), &memory, &disk, &lease, token);
        setup.restore = Some((machine, state));
        let engine = KvmEngine::new(setup)?;
        let pipeline = pipeline(&self.node, source, &memory, &disk, Some(m.memory), m.disk)?;
        Ok(Vm { engine, memory, lease, token, pipeline, dir })
    }
}

impl Vm {
    pub fn console(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(self.dir.path().join("console.log")).unwrap_or_default()).into_owned()
    }
    /// Captures, lets the guest go on, stores.
    pub fn checkpoint(&mut self, parent: Option<CheckpointId>) -> CheckpointId {
        let request = Request { parent, journal_position: 0, pause_bound: DEADLINE };
        let captured = self.pipeline.capture(&mut *self.engine, &request).unwrap_or_else(|f| panic!("capture: {f}"));
        let stats = self.pipeline.store(captured).unwrap_or_else(|f| panic!("store: {f}"));
        stats.id.parse().expect("an id in hex")
    }
    /// Waits for the end of the machine.
    pub fn wait_exit(&mut self) -> Fault {
        use rustix::event::{PollFd, PollFlags, poll};
        let fd = self.engine.exit_fd();
        // A duplicate through /proc, because the engine lends only the number.
        let watched = File::open(format!("/proc/self/fd/{fd}"));
        let deadline = Instant::now() + DEADLINE;
        loop {
            if let Some(exit) = self.engine.exited() {
                return exit.fault;
            }
            assert!(Instant::now() < deadline, "the machine ends\n{}", self.console());
            let wait = rustix::time::Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
            match &watched {
                Ok(file) => drop(poll(&mut [PollFd::new(file, PollFlags::IN)], Some(&wait))),
                Err(_) => drop(poll(&mut [], Some(&wait))),
            }
        }
    }
}

/// The host's end of the guest's port, and what its init answers.
pub struct Port(pub UnixStream);

impl Port {
    pub fn connect(vm: &mut Vm) -> Self {
        let stream = vm.engine.connect_port().expect("the port connects");
        stream.set_read_timeout(Some(DEADLINE)).expect("a timeout");
        Self(stream)
    }
    pub fn ask<const N: usize>(&mut self, command: &[u8]) -> [u8; N] {
        self.0.write_all(command).expect("the port takes bytes");
        let mut answer = [0; N];
        self.0.read_exact(&mut answer).unwrap_or_else(|e| panic!("answer to {command:?}: {e}"));
        answer
    }
    pub fn count(&mut self) -> u64 {
        u64::from_le_bytes(self.ask(b"c"))
    }
    pub fn echo(&mut self, text: &[u8]) -> Vec<u8> {
        let mut command = vec![b'e', text.len() as u8];
        command.extend_from_slice(text);
        self.0.write_all(&command).expect("the port takes bytes");
        let mut answer = vec![0; text.len()];
        self.0.read_exact(&mut answer).expect("an echo");
        answer
    }
    pub fn write_disk(&mut self, value: u8) -> u8 {
        self.ask::<1>(&[b'w', value])[0]
    }
    pub fn read_disk(&mut self) -> u8 {
        self.ask::<1>(b"r")[0]
    }
    pub fn dirty(&mut self, mib: u8) {
        assert_eq!(self.ask::<1>(&[b'd', mib]), [0]);
    }
    pub fn dirty_sum(&mut self) -> u64 {
        u64::from_le_bytes(self.ask(b"s"))
    }
    pub fn monotonic_ns(&mut self) -> u64 {
        u64::from_le_bytes(self.ask(b"t"))
    }
}
