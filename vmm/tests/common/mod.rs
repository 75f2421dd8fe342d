//! A test bench around a real `ks-vmm`: a node in memory that speaks the control protocol, an image whose init is
//! examples/test_guest.rs, and the guest's line protocol. Meant for both engines.

pub mod guest;
pub mod image;
pub mod node;

use ks_proto::control::{Fault, VmConfig, VmPhase, VmStats, VmmEvent, VmmReply, VmmRequest};
use ks_proto::manifest::EngineKind;
use ks_proto::{CheckpointId, RunToken, SessionId};
use node::{Connection, Store};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Everything here must happen within this on a busy two-core machine.
pub const BOUND: Duration = Duration::from_secs(120);
/// The run token of tests.
pub const TOKEN: RunToken = RunToken { generation: 1, epoch: 1, run: 1 };

/// Calls `look` until it gives something; panics after [`BOUND`] with `what`.
pub fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + BOUND;
    loop {
        if let Some(t) = look() {
            return t;
        }
        assert!(Instant::now() < deadline, "not within {BOUND:?}: {what}");
        std::thread::park_timeout(Duration::from_millis(5));
    }
}

/// Starts a program that may have been copied just now: while another test's fork has not come to its exec, that
/// child still has the copy open for writing.
pub fn start<T>(mut begin: impl FnMut() -> std::io::Result<T>) -> T {
    until("the program starts", || match begin() {
        Err(e) if e.kind() == std::io::ErrorKind::ExecutableFileBusy => None,
        other => Some(other.unwrap()),
    })
}

/// The live children of a process.
pub fn children(pid: i32) -> Vec<i32> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let lists = tasks.map(|t| std::fs::read_to_string(t.path().join("children")).unwrap_or_default());
    lists.flat_map(|l| l.split_whitespace().filter_map(|p| p.parse().ok()).collect::<Vec<i32>>()).collect()
}

/// How a VM of a test is shaped.
#[derive(Clone)]
pub struct Shape {
    pub engine: EngineKind,
    pub memory_mib: u64,
    pub vcpus: u16,
    pub cmdline: String,
    /// More arguments for ks-vmm.
    pub args: Vec<String>,
    /// Another program than the one that cargo built.
    pub program: Option<PathBuf>,
    /// Another kernel than the image's, without an initramfs.
    pub kernel: Option<PathBuf>,
    /// Start ks-vmm as this user.
    pub user: Option<u32>,
}

impl Shape {
    pub fn new(engine: EngineKind) -> Self {
        Self { engine, memory_mib: 256, vcpus: 1, cmdline: String::new(), args: vec![], program: None, kernel: None, user: None }
    }
}

/// A running ks-vmm with its node's connection.
pub struct Vm {
    pub process: Child,
    pub dir: tempfile::TempDir,
    pub node: Connection,
    pub store: Store,
    pub shape: Shape,
}

impl Vm {
    /// Starts ks-vmm, connects and says hello. No VM yet.
    pub fn launch(store: &Store, shape: &Shape) -> Self {
        image::shim();
        let dir = tempfile::Builder::new().prefix("ks-vmm-test").tempdir().unwrap();
        let (control, channel) = (dir.path().join("control"), dir.path().join("channel"));
        let program = shape.program.clone().unwrap_or_else(|| env!("CARGO_BIN_EXE_ks-vmm").into());
        let mut command = Command::new(program);
        if let Some(user) = shape.user {
            std::os::unix::process::CommandExt::uid(&mut command, user);
            std::os::unix::fs::chown(dir.path(), Some(user), Some(user)).unwrap();
        }
        command
            .args(["--control-socket".as_ref(), control.as_os_str(), "--channel-socket".as_ref(), channel.as_os_str()])
            .args(["--run-dir".as_ref(), dir.path().join("run").as_os_str()])
            .args(&shape.args)
            // The programs under test are those that cargo built, not those of an outer run.
            .env_remove("KS_LIBEXEC")
            .stdin(Stdio::null());
        let process = start(|| command.spawn());
        let node = Connection::open(&control, store);
        Self { process, dir, node, store: store.clone(), shape: shape.clone() }
    }
    pub fn config(&self) -> VmConfig {
        VmConfig {
            session: SessionId([7; 16]),
            name: "test".into(),
            token: TOKEN,
            engine: self.shape.engine,
            vcpus: self.shape.vcpus,
            memory_bytes: self.shape.memory_mib << 20,
            cmdline: self.shape.cmdline.clone(),
            verify_eager: false,
        }
    }
    pub fn ask(&self, request: VmmRequest) -> Result<VmmReply, Fault> {
        self.node.ask(request, &[])
    }
    pub fn lease(&self, deadline_boottime_ms: u64) {
        self.ask(VmmRequest::Lease { token: TOKEN, deadline_boottime_ms }).unwrap();
    }
    /// Keys, lease and packs; what every start needs.
    pub fn hand_over(&self) {
        let (keys, write_domain) = self.store.keys();
        self.ask(VmmRequest::Keys { keys, write_domain }).unwrap();
        self.lease(u64::MAX);
    }
    fn start(&self, request: VmmRequest, manifest: Option<std::os::fd::OwnedFd>) -> Result<VmmReply, Fault> {
        let (plan, packs) = self.store.plan();
        for batch in packs.chunks(100) {
            let fds: Vec<_> = batch.iter().map(AsFd::as_fd).collect();
            self.node.ask(VmmRequest::Packs {}, &fds).unwrap();
        }
        let (kernel, initrd) = match &self.shape.kernel {
            Some(kernel) => (std::fs::File::open(kernel).unwrap(), tempfile::tempfile().unwrap()),
            None => image::get().expect("looked for before").open(),
        };
        let mut fds = vec![kernel.as_fd(), initrd.as_fd(), plan.as_fd()];
        fds.extend(manifest.as_ref().map(AsFd::as_fd));
        self.node.ask(request, &fds)
    }
    pub fn try_boot(&self) -> Result<VmmReply, Fault> {
        self.hand_over();
        let image_manifest_hex = hex::encode(self.store.image_manifest().encode());
        self.start(VmmRequest::Boot { config: self.config(), image_manifest_hex }, None)
    }
    pub fn try_restore(&self, id: CheckpointId) -> Result<VmmReply, Fault> {
        self.hand_over();
        self.start_restore(id)
    }
    /// A restore whose keys and lease were sent already.
    pub fn start_restore(&self, id: CheckpointId) -> Result<VmmReply, Fault> {
        let manifest = self.store.manifest_file(&id);
        self.start(VmmRequest::Restore { config: self.config(), checkpoint: id }, Some(manifest))
    }
    pub fn boot(store: &Store, shape: &Shape) -> Self {
        let vm = Self::launch(store, shape);
        vm.try_boot().unwrap_or_else(|f| panic!("{f}\n{}", vm.logs()));
        vm
    }
    pub fn restore(store: &Store, shape: &Shape, id: CheckpointId) -> Self {
        let vm = Self::launch(store, shape);
        vm.try_restore(id).unwrap_or_else(|f| panic!("{f}\n{}", vm.logs()));
        vm
    }
    pub fn checkpoint(&self, parent: Option<CheckpointId>) -> (CheckpointId, ks_proto::control::CheckpointStats) {
        match self.ask(VmmRequest::Checkpoint { parent, journal_position: 0 }) {
            Ok(VmmReply::Checkpoint { stats }) => (stats.id.parse().unwrap(), stats),
            other => panic!("{other:?}\n{}", self.logs()),
        }
    }
    pub fn stats(&self) -> VmStats {
        match self.ask(VmmRequest::Stats {}) {
            Ok(VmmReply::Stats { stats }) => stats,
            other => panic!("{other:?}"),
        }
    }
    pub fn phase(&self) -> VmPhase {
        self.stats().phase.unwrap()
    }
    /// A connection to the guest, past the marker.
    pub fn guest(&self) -> guest::Lines {
        guest::Lines::connect(&self.dir.path().join("channel"))
    }
    pub fn run_dir(&self) -> PathBuf {
        self.dir.path().join("run")
    }
    pub fn logs(&self) -> String {
        ["vmm.log", "qemu.log", "console.log"]
            .map(|n| format!("--- {n}\n{}", std::fs::read_to_string(self.run_dir().join(n)).unwrap_or_default()))
            .join("\n")
    }
    /// Waits for the event that says that the VM is gone, then for the process.
    pub fn died(&mut self) -> (Fault, i32) {
        let fault = self.node.event("Died", |e| match e {
            VmmEvent::Died { fault } => Some(fault.clone()),
            _ => None,
        });
        (fault, self.exit_code())
    }
    pub fn exit_code(&mut self) -> i32 {
        let status = until("ks-vmm ends", || self.process.try_wait().unwrap());
        status.code().unwrap_or(-1)
    }
    /// The process that the keeper, which was started here, forked.
    pub fn jailed_pid(&self) -> i32 {
        children(self.process.id() as i32).first().copied().expect("the keeper has a child")
    }
    /// The engine's process.
    pub fn engine_pid(&self) -> i32 {
        until("the engine's process", || {
            let running = children(self.jailed_pid());
            running.into_iter().find(|p| std::fs::read_to_string(format!("/proc/{p}/comm")).is_ok_and(|c| c.starts_with("qemu")))
        })
    }
    pub fn kill(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        if std::thread::panicking() {
            eprintln!("{}", self.logs());
        }
    }
}
