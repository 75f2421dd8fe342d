//! One live VM: its process, control socket and guest, from start or adoption to its end.

use super::control::{Control, Incoming};
use super::guest::{Guest, tail};
use super::heartbeat::Pulse;
use super::process::{self, Proc};
use super::upload::{Sink, Uploader};
use crate::fleet::board::Place;
use ks_blobs::{KeyRing, Store};
use ks_proto::api::ApiError;
use ks_proto::control::{
    FRAME_FDS_MAX, Fault, KeyMaterial, PROTOCOL, VmConfig, VmPhase, VmStats, VmmEvent, VmmReply, VmmRequest,
};
use ks_proto::{CheckpointId, RunToken};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};

const START_DEADLINE: Duration = Duration::from_secs(15);
const ORDER_DEADLINE: Duration = Duration::from_secs(30);
const RESTORE_DEADLINE: Duration = Duration::from_secs(120);
const EAGER_DEADLINE: Duration = Duration::from_secs(1200);
const END_DEADLINE: Duration = Duration::from_secs(15);
/// How long a start waits for the node's lease.
const LEASE_DEADLINE: Duration = Duration::from_secs(20);

/// Where a VM's state comes from.
#[derive(Debug, Clone, Copy)]
pub enum Origin {
    /// Cold boot from an image's disk manifest.
    Boot { disk: CheckpointId },
    /// A checkpoint.
    Restore { checkpoint: CheckpointId },
}

/// How to start one.
#[derive(Debug, Clone)]
pub struct Spec {
    /// Shape, session and token.
    pub config: VmConfig,
    /// State.
    pub origin: Origin,
    /// Kernel file.
    pub kernel: PathBuf,
    /// Initramfs file; a missing one is handed over as an empty file.
    pub initrd: PathBuf,
    /// Domain of new objects.
    pub write_domain: u32,
    /// Whether this run may still go on; asked before each heartbeat, so that a lease never keeps a run of another epoch.
    pub owned: Owned,
}

/// See [`Spec::owned`].
#[derive(Clone)]
pub struct Owned(pub Arc<dyn Fn() -> bool + Send + Sync>);

impl Owned {
    /// For a VM that belongs to no session.
    pub fn always() -> Self {
        Self(Arc::new(|| true))
    }
}
impl std::fmt::Debug for Owned {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Owned")
    }
}

/// What every VM needs from the node.
#[derive(Clone)]
pub struct Supply {
    /// Chunk store.
    pub store: Arc<Store>,
    /// Keys.
    pub keys: KeyRing,
    /// Which deadline each VM has taken.
    pub board: crate::fleet::board::Board,
    /// The node's lease: a CLOCK_BOOTTIME in milliseconds; `u64::MAX` on a lone node, 0 before the first grant.
    pub lease: watch::Receiver<u64>,
}

/// See the module.
pub struct LiveVm {
    /// Its run.
    pub token: RunToken,
    /// Run folder.
    pub dir: PathBuf,
    /// Process id of ks-vmm.
    pub pid: u32,
    /// Jail measures that are in force, in words.
    pub jail: Vec<String>,
    /// Version line of the engine, when this node started it.
    pub engine_version: String,
    /// Control socket.
    pub control: Control,
    /// The guest.
    pub guest: Guest,
    /// What checkpoints go through.
    pub uploader: Arc<Uploader>,
    /// None while it lives; then why it ended.
    pub ended: watch::Receiver<Option<String>>,
    /// Pauses that ended, counted.
    pub resumed: watch::Receiver<u64>,
    /// Whether its process answers.
    pub pulse: Pulse,
}

/// A fault of the VMM in the API's words.
pub fn fault(f: Fault) -> ApiError {
    let code = match f.code.as_str() {
        "corrupt" | "missing" | "lost" | "key" => "corrupt",
        "incompatible" => "incompatible",
        "disk-full" => "disk-full",
        "busy" => "busy",
        "timeout" => "timeout",
        "engine-missing" => "engine-missing",
        "not-found" => "not-found",
        _ => "internal",
    };
    ApiError::new(code, f.what, f.why, f.next)
}

/// A store error in the API's words.
pub fn store_error(e: &ks_blobs::StoreError) -> ApiError {
    let code = match e.code() {
        "corrupt" | "missing" | "lost" | "key" => "corrupt",
        "not-found" => "not-found",
        "incompatible" => "incompatible",
        "disk-full" => "disk-full",
        _ => "internal",
    };
    let next = match code {
        "corrupt" => "restore another checkpoint: ks checkpoints NAME",
        "disk-full" => "free space in the data folder",
        _ => "see ksd's log",
    };
    ApiError::new(code, "the chunk store refused", e.to_string(), next)
}

/// True if trying the same start again cannot help.
pub fn is_final(e: &ApiError) -> bool {
    matches!(e.code.as_str(), "corrupt" | "incompatible" | "not-found" | "usage" | "engine-missing" | "not-allowed")
}

/// Starts `ks-vmm` in the fresh run folder `dir` and lets the VM go. On an error nothing of it is left running.
///
/// # Errors
/// What the store or the VMM refused, with the end of its log when it died.
pub async fn launch(supply: &Supply, dir: &Path, spec: &Spec, sink: Sink) -> Result<LiveVm, ApiError> {
    match try_launch(supply, dir, spec, sink).await {
        Ok(vm) => Ok(vm),
        Err(mut e) => {
            if let Err(stays) = process::end_run_dir(dir, END_DEADLINE).await {
                e.why = format!("{}; and {stays}", e.why);
            }
            Err(e)
        }
    }
}

async fn try_launch(supply: &Supply, dir: &Path, spec: &Spec, sink: Sink) -> Result<LiveVm, ApiError> {
    make_run_dir(dir)?;
    let id = match spec.origin {
        Origin::Boot { disk } => disk,
        Origin::Restore { checkpoint } => checkpoint,
    };
    let (store, keys) = (supply.store.clone(), supply.keys.clone());
    let work = move || -> Result<_, ks_blobs::StoreError> {
        let (plan, packs) = store.closure_plan(&id, &keys)?;
        Ok((plan.encode(), packs, store.manifest_bytes(&id)?.0))
    };
    let prepared = tokio::task::spawn_blocking(work);
    let child = process::start_vmm(dir, &spec.config.session).map_err(|e| {
        let program = process::libexec().join("ks-vmm");
        let next = "install KeepState's programs side by side, or set KS_LIBEXEC to their folder";
        ApiError::new("engine-missing", format!("cannot start {}", program.display()), e.to_string(), next)
    })?;
    let pid = child.id().unwrap_or_default();
    let exited = reap(child);
    let (control, incoming) = connect(dir, exited).await?;
    let jail = hello(&control).await?.jail;
    let (plan, packs, manifest) = prepared.await.map_err(join_error)?.map_err(|e| store_error(&e))?;
    let vm = assemble(supply, dir, spec, sink, (pid, control, incoming, jail), id);
    vm.begin(supply, spec, &plan, &packs, &manifest).await
}

fn join_error(e: impl std::fmt::Display) -> ApiError {
    ApiError::new("internal", "a task of the node ended early", e.to_string(), "report this")
}

fn make_run_dir(dir: &Path) -> Result<(), ApiError> {
    let made = std::fs::remove_dir_all(dir).or_else(|e| if e.kind() == std::io::ErrorKind::NotFound { Ok(()) } else { Err(e) });
    made.and_then(|()| {
        use std::os::unix::fs::DirBuilderExt;
        std::fs::DirBuilder::new().mode(0o700).recursive(true).create(dir)
    })
    .map_err(|e| {
        ApiError::new("internal", format!("cannot make the run folder {}", dir.display()), e.to_string(), "check the data folder")
    })
}

/// Collects the child's exit so that it is no zombie, and tells.
fn reap(mut child: tokio::process::Child) -> watch::Receiver<Option<String>> {
    let (tx, rx) = watch::channel(None);
    tokio::spawn(async move {
        let how = match child.wait().await {
            Ok(status) => status.to_string(),
            Err(e) => e.to_string(),
        };
        let _ = tx.send(Some(how));
    });
    rx
}

async fn connect(
    dir: &Path,
    mut exited: watch::Receiver<Option<String>>,
) -> Result<(Control, mpsc::Receiver<Incoming>), ApiError> {
    let socket = dir.join("control.sock");
    let end = tokio::time::Instant::now() + START_DEADLINE;
    loop {
        let last = match Control::connect(&socket).await {
            Ok(c) => return Ok(c),
            Err(e) => e,
        };
        let died = exited.borrow().clone();
        let why = match died {
            Some(status) => format!("ks-vmm ended ({status}); the end of its log:\n{}", tail(&dir.join("vmm.log"), 12)),
            None if tokio::time::Instant::now() >= end => format!("no control socket in {} s: {last}", START_DEADLINE.as_secs()),
            None => {
                let _ = tokio::time::timeout(Duration::from_millis(3), exited.changed()).await;
                continue;
            }
        };
        return Err(ApiError::new("internal", "the VM's process did not start", why, "run `ks doctor`"));
    }
}

struct Greeting {
    pid: u32,
    phase: VmPhase,
    config: Option<VmConfig>,
    jail: Vec<String>,
}

async fn hello(control: &Control) -> Result<Greeting, ApiError> {
    match control.ask(VmmRequest::Hello { protocol: PROTOCOL }, &[], START_DEADLINE).await.map_err(fault)? {
        VmmReply::Hello { protocol: PROTOCOL, pid, phase, config, jail } => Ok(Greeting { pid, phase, config, jail }),
        other => {
            let why = format!("it answered {other:?} to protocol {PROTOCOL}");
            Err(ApiError::new("incompatible", "the VM's process", why, "install programs of one version"))
        }
    }
}

/// Hands every lease of the node on to the VM, at once and for as long as the run is this node's. A VMM that is busy gets
/// the newest one next.
async fn heartbeat(
    control: Control,
    token: RunToken,
    mut lease: watch::Receiver<u64>,
    owned: Owned,
    mut ended: watch::Receiver<Option<String>>,
    place: Place,
) {
    loop {
        let deadline = *lease.borrow_and_update();
        if deadline > super::clock::boottime_ms() && owned.0() {
            let request = VmmRequest::Lease { token, deadline_boottime_ms: deadline };
            match control.order(request, &[], ORDER_DEADLINE).await {
                Ok(()) => place.took(deadline),
                Err(e) => tracing::debug!("a heartbeat of run {token} was not taken: {e}"),
            }
        }
        tokio::select! {
            changed = lease.changed() => if changed.is_err() { return },
            _ = ended.wait_for(Option::is_some) => return,
        }
    }
}

type Parts = (u32, Control, mpsc::Receiver<Incoming>, Vec<String>);

fn assemble(supply: &Supply, dir: &Path, spec: &Spec, sink: Sink, parts: Parts, base: CheckpointId) -> LiveVm {
    let (pid, control, incoming, jail) = parts;
    let uploader = Arc::new(Uploader::new(supply, spec.write_domain, vec![base], sink));
    let (ended_tx, ended) = watch::channel(None);
    let (resumed_tx, resumed) = watch::channel(0);
    tokio::spawn(serve(control.clone(), incoming, uploader.clone(), ended_tx, resumed_tx));
    let place = supply.board.enter(pid);
    tokio::spawn(heartbeat(control.clone(), spec.config.token, supply.lease.clone(), spec.owned.clone(), ended.clone(), place));
    let (token, dir, guest) = (spec.config.token, dir.to_path_buf(), Guest::of(dir));
    let engine_version = String::new();
    LiveVm { token, dir, pid, jail, engine_version, control, guest, uploader, ended, resumed, pulse: Pulse::default() }
}

async fn serve(
    control: Control,
    mut incoming: mpsc::Receiver<Incoming>,
    uploader: Arc<Uploader>,
    ended: watch::Sender<Option<String>>,
    resumed: watch::Sender<u64>,
) {
    let mut cause = None;
    while let Some(message) = incoming.recv().await {
        match message {
            Incoming::Event(VmmEvent::Resumed { .. }) => resumed.send_modify(|n| *n += 1),
            Incoming::Event(VmmEvent::Died { fault }) => cause = Some(fault.to_string()),
            Incoming::Event(VmmEvent::Warning { text }) => tracing::warn!("VM: {text}"),
            Incoming::Event(VmmEvent::Lease { running }) => tracing::warn!("VM: lease watchdog, running: {running}"),
            Incoming::Request { id, request, fds } => {
                let (control, uploader) = (control.clone(), uploader.clone());
                tokio::spawn(async move {
                    let (result, back) = uploader.serve(request, fds).await;
                    let fds: Vec<BorrowedFd<'_>> = back.iter().map(AsFd::as_fd).collect();
                    if let Err(e) = control.answer(id, result, &fds).await {
                        tracing::debug!("an answer to the VM was lost: {e}");
                    }
                });
            }
            Incoming::Closed(why) => {
                let _ = ended.send(Some(cause.unwrap_or(why)));
                return;
            }
        }
    }
}

impl LiveVm {
    /// Keys, packs, then the start itself.
    async fn begin(
        mut self,
        supply: &Supply,
        spec: &Spec,
        plan: &[u8],
        packs: &[File],
        manifest: &[u8],
    ) -> Result<Self, ApiError> {
        let io =
            |e: std::io::Error| ApiError::new("internal", "cannot prepare the VM", e.to_string(), "check memory and open files");
        let keys = supply.keys.iter().map(|k| KeyMaterial { domain: k.domain(), master_hex: hex::encode(k.master()) }).collect();
        let control = self.control.clone();
        control.order(VmmRequest::Keys { keys, write_domain: spec.write_domain }, &[], ORDER_DEADLINE).await.map_err(fault)?;
        for batch in packs.chunks(FRAME_FDS_MAX) {
            let fds: Vec<BorrowedFd<'_>> = batch.iter().map(AsFd::as_fd).collect();
            control.order(VmmRequest::Packs {}, &fds, ORDER_DEADLINE).await.map_err(fault)?;
        }
        let kernel = File::open(&spec.kernel).map_err(|e| image_file(&spec.kernel, &e))?;
        let initrd = match File::open(&spec.initrd) {
            Ok(f) => f,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => super::files::memfd("no-initrd", b"").map_err(io)?,
            Err(e) => return Err(image_file(&spec.initrd, &e)),
        };
        let plan = super::files::memfd("ks-plan", plan).map_err(io)?;
        // The VMM starts no vCPU without a lease: the first heartbeat is out before the start is asked for.
        self.first_lease(supply, spec).await?;
        let config = spec.config.clone();
        let reply = match spec.origin {
            Origin::Boot { .. } => {
                let request = VmmRequest::Boot { config, image_manifest_hex: hex::encode(manifest) };
                control.ask(request, &[kernel.as_fd(), initrd.as_fd(), plan.as_fd()], RESTORE_DEADLINE).await
            }
            Origin::Restore { checkpoint } => {
                let manifest = super::files::memfd("ks-manifest", manifest).map_err(io)?;
                let deadline = if config.verify_eager { EAGER_DEADLINE } else { RESTORE_DEADLINE };
                let request = VmmRequest::Restore { config, checkpoint };
                control.ask(request, &[kernel.as_fd(), initrd.as_fd(), plan.as_fd(), manifest.as_fd()], deadline).await
            }
        };
        match reply.map_err(|f| self.with_log(fault(f)))? {
            VmmReply::Started { engine_version, .. } => self.engine_version = engine_version,
            other => return Err(ApiError::new("internal", "the VM's answer", format!("unexpected {other:?}"), "report this")),
        }
        // What is in force depends on the engine, which the first greeting could not know.
        self.jail = hello(&self.control).await?.jail;
        Ok(self)
    }

    fn with_log(&self, mut e: ApiError) -> ApiError {
        let log = tail(&self.dir.join("vmm.log"), 8);
        if e.code == "internal" && !log.is_empty() {
            e.why = format!("{}; the end of its log:\n{log}", e.why);
        }
        e
    }

    /// Waits for the node's lease and sends it.
    async fn first_lease(&self, supply: &Supply, spec: &Spec) -> Result<(), ApiError> {
        let mut lease = supply.lease.clone();
        let valid = lease.wait_for(|d| *d > super::clock::boottime_ms());
        let deadline = match tokio::time::timeout(LEASE_DEADLINE, valid).await {
            Ok(Ok(d)) => *d,
            Ok(Err(_)) | Err(_) => {
                let why =
                    format!("this node got no lease in {} s: most of the fleet's voters do not answer", LEASE_DEADLINE.as_secs());
                return Err(ApiError::new("no-quorum", "the VM is not started", why, "ks fleet status"));
            }
        };
        if !spec.owned.0() {
            let why = "the session was given to another node meanwhile";
            return Err(ApiError::new("not-allowed", "the VM is not started", why, "ks ls shows where it is"));
        }
        let request = VmmRequest::Lease { token: self.token, deadline_boottime_ms: deadline };
        self.control.order(request, &[], ORDER_DEADLINE).await.map_err(fault)
    }

    /// Connects to the VM that an earlier ksd left in `dir`, if it is the run `spec` and lives.
    ///
    /// # Errors
    /// Why it cannot be taken over.
    pub async fn adopt(supply: &Supply, dir: &Path, spec: &Spec, base: CheckpointId, sink: Sink) -> Result<Self, String> {
        let (control, incoming) =
            Control::connect(&dir.join("control.sock")).await.map_err(|e| format!("its process is gone ({e})"))?;
        let g = hello(&control).await.map_err(|e| e.why)?;
        let config = g.config.ok_or("its process holds no VM")?;
        if config.token != spec.config.token || config.session != spec.config.session {
            return Err(format!("it is run {} of session {}", config.token, config.session.short()));
        }
        if g.phase == VmPhase::Dead || g.phase == VmPhase::Empty {
            return Err(format!("its VM is {:?}", g.phase).to_lowercase());
        }
        let vm = assemble(supply, dir, spec, sink, (g.pid, control, incoming, g.jail), base);
        if g.phase == VmPhase::Paused {
            vm.control.order(VmmRequest::Resume {}, &[], ORDER_DEADLINE).await.map_err(|f| f.to_string())?;
        }
        Ok(vm)
    }

    /// Counters.
    ///
    /// # Errors
    /// If the VM does not answer.
    pub async fn stats(&self) -> Result<VmStats, ApiError> {
        match self.control.ask(VmmRequest::Stats {}, &[], ORDER_DEADLINE).await.map_err(fault)? {
            VmmReply::Stats { stats } => Ok(stats),
            other => Err(ApiError::new("internal", "the VM's answer", format!("unexpected {other:?}"), "report this")),
        }
    }

    /// SIGKILL to its process group.
    pub fn kill(&self) {
        if let Some(p) = Proc::of(self.pid) {
            process::kill_group(p);
        }
    }

    /// Ends it and sees it dead: asked first, then killed.
    ///
    /// # Errors
    /// If a process stays.
    pub async fn end(&self) -> Result<(), String> {
        let _ = self.control.order(VmmRequest::Stop {}, &[], Duration::from_secs(2)).await;
        process::end_run_dir(&self.dir, END_DEADLINE).await
    }
}

fn image_file(path: &Path, e: &std::io::Error) -> ApiError {
    ApiError::new(
        "not-found",
        format!("cannot open the image's file {}", path.display()),
        e.to_string(),
        "build the image again: ks image build",
    )
}
