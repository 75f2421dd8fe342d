//! Golden checkpoints: an image is booted once per shape, warmed, frozen and captured; sessions start from that.

use super::guest::{GuestInfo, HELLO_BOOTED};
use super::image::image_dir;
use super::launch;
use super::upload::Sink;
use super::vm::{LiveVm, Origin, Owned, Spec, launch as launch_vm};
use super::{clock, engine::EngineChoice, files};
use crate::node::Node;
use crate::progress::Steps;
use crate::session::Job;
use ks_blobs::IMAGE_DOMAIN;
use ks_proto::api::ApiError;
use ks_proto::control::VmConfig;
use ks_proto::guest::HookKind;
use ks_proto::{CheckpointId, RunToken, SessionId};
use ks_raft::{Command, GoldenRecord, ImageRecord};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Programs whose files and first steps are put into the guest's page cache; absent ones are skipped.
const WARM: [&[&str]; 7] = [
    &["tmux", "-V"],
    &["bash", "-lc", "true"],
    &["git", "--version"],
    &["python3", "-c", "import json, re, subprocess"],
    &["node", "-e", "0"],
    &["sh", "-c", "ls / >/dev/null; cat /etc/passwd >/dev/null"],
    &["tar", "--version"],
];

/// How long a booted guest may take to change over to its final clock source.
const CLOCK_SETTLES: Duration = Duration::from_secs(30);

type Key = (String, u64, u16, String);

/// Which are being made: at most one at a time per key.
#[derive(Default)]
pub struct GoldenWork {
    locks: Mutex<BTreeMap<Key, Arc<tokio::sync::Mutex<()>>>>,
}

/// A VM's shape.
#[derive(Debug, Clone)]
pub struct Shape {
    /// Image.
    pub image: ImageRecord,
    /// MiB.
    pub memory_mib: u64,
    /// CPUs.
    pub vcpus: u16,
    /// Engine.
    pub engine: EngineChoice,
}

impl Shape {
    fn record(&self, node: &Node, checkpoint: CheckpointId) -> GoldenRecord {
        GoldenRecord {
            image_id: self.image.id,
            memory_mib: self.memory_mib,
            vcpus: self.vcpus,
            engine: self.engine.engine,
            profile: self.engine.profile.clone(),
            engine_version: self.engine.version.clone(),
            checkpoint,
            created_unix_ms: clock::unix_ms(),
            holders: vec![node.fleet.number()],
        }
    }
    fn find(&self, node: &Node) -> Option<CheckpointId> {
        let like = self.record(node, CheckpointId([0; 32]));
        node.state.read().golden.iter().find(|g| g.same_key(&like)).map(|g| g.checkpoint)
    }
}

/// The golden checkpoint of `shape`, made now if there is none.
///
/// # Errors
/// Why the image does not come up.
pub async fn ensure(node: &Arc<Node>, shape: &Shape, steps: &Steps) -> Result<CheckpointId, ApiError> {
    if let Some(id) = shape.find(node) {
        return Ok(id);
    }
    let key =
        (shape.image.id.to_hex(), shape.memory_mib, shape.vcpus, format!("{}/{}", shape.engine.engine, shape.engine.version));
    let lock = node.golden.locks.lock().unwrap_or_else(PoisonError::into_inner).entry(key).or_default().clone();
    steps.step("waiting for the image's first boot", 0, 0);
    let _one = lock.lock().await;
    if let Some(id) = shape.find(node) {
        return Ok(id);
    }
    let id = make(node, shape, steps).await?;
    node.state.propose(Command::PutGolden { golden: shape.record(node, id) }).await?;
    node.state.event("", "golden", &format!("image {} is ready with {} MiB", shape.image.name, shape.memory_mib));
    Ok(id)
}

async fn make(node: &Arc<Node>, shape: &Shape, steps: &Steps) -> Result<CheckpointId, ApiError> {
    crate::fleet::fetch::ensure_boot(node, &shape.image, steps).await?;
    let session = SessionId(files::random());
    let dir = node.layout.run().join(format!("golden-{}", session.short()));
    let files = image_dir(node, &shape.image.id);
    let config = VmConfig {
        session,
        name: "golden".into(),
        token: RunToken { generation: 0, epoch: 0, run: 1 },
        engine: shape.engine.engine,
        vcpus: shape.vcpus,
        memory_bytes: shape.memory_mib << 20,
        cmdline: shape.image.cmdline.clone(),
        verify_eager: false,
    };
    let origin = Origin::Boot { disk: shape.image.disk };
    let spec = Spec {
        config,
        origin,
        kernel: files.join("kernel"),
        initrd: files.join("initrd"),
        write_domain: IMAGE_DOMAIN,
        owned: Owned::always(),
    };
    steps.step(format!("booting image {} with {} MiB (once)", shape.image.name, shape.memory_mib), 0, 4);
    let vm = Arc::new(launch_vm(&node.supply, &dir, &spec, Sink::Golden).await?);
    let mut ended = vm.ended.clone();
    let result = tokio::select! {
        r = capture(&vm, steps) => r,
        _ = ended.wait_for(Option::is_some) => {
            let why = vm.ended.borrow().clone().unwrap_or_default();
            let console = super::guest::tail(&dir.join("console.log"), 12);
            let why = if console.is_empty() { why } else { format!("{why}; the end of its console:\n{console}") };
            Err(ApiError::new("internal", format!("image {} did not come up", shape.image.name), why, "build the image again"))
        }
    };
    if let Err(why) = vm.end().await {
        node.state.event("", "process-stays", &why);
    }
    let _ = std::fs::remove_dir_all(&dir);
    result
}

/// The guest's greeting once its clock is the TSC, or the last one before the deadline: a kernel that boots quickly begins
/// with `tsc-early` and changes over a second later.
async fn settled(vm: &Arc<LiveVm>) -> Result<GuestInfo, ApiError> {
    let deadline = tokio::time::Instant::now() + CLOCK_SETTLES;
    loop {
        let info = vm.guest.hello(HELLO_BOOTED).await?;
        if info.clocksource == "tsc" || tokio::time::Instant::now() > deadline {
            return Ok(info);
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

async fn capture(vm: &Arc<LiveVm>, steps: &Steps) -> Result<CheckpointId, ApiError> {
    let info = settled(vm).await?;
    if info.clocksource != "tsc" {
        let why =
            format!("the guest's clocksource is {:?}, whose clock would jump at a restore; it must be tsc", info.clocksource);
        let next = "boot the kernel with tsc=reliable tsc_early_khz=<host kHz>";
        return Err(ApiError::new("incompatible", "this image cannot be checkpointed", why, next));
    }
    vm.guest.hook(HookKind::Boot, "keepstate", &[0; 16]).await?;
    for (n, argv) in WARM.iter().enumerate() {
        steps.step(format!("warming {}", argv[0]), 1 + n as u64, WARM.len() as u64 + 3);
        // One that is not in this image is no fault.
        if let Err(e) = vm.guest.run(argv, Duration::from_secs(120)).await
            && e.code == "guest-silent"
        {
            return Err(e);
        }
    }
    steps.step("storing the golden checkpoint", WARM.len() as u64 + 1, WARM.len() as u64 + 3);
    vm.guest.sync().await?;
    let job = Job { freeze: true, ..Job::quiet("golden") };
    Ok(launch::checkpoint(vm, "golden", None, job).await?.id)
}
