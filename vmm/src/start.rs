//! Builds a VM from what the node handed over: keys, plan, packs, manifest, kernel. Runs on the run loop's thread.

use crate::jail::own::Place;
use crate::qemu;
use crate::shared::Shared;
use crate::starter::Ask;
use ks_proto::chunk::DomainKey;
use ks_proto::control::{Fault, KeyMaterial, VmConfig};
use ks_proto::manifest::{EngineKind, MANIFEST_BYTES_MAX, Manifest, Map};
use ks_proto::plan::Plan;
use ks_proto::{CheckpointId, ChunkId};
use ks_vmm_core::checkpoint::{Parts, Pipeline};
use ks_vmm_core::disk::Disk;
use ks_vmm_core::engine::{Engine, EngineSetup};
use ks_vmm_core::host_link::HostLink;
use ks_vmm_core::memory::{Memory, OnFatal};
use ks_vmm_core::source::ChunkSource;
use ks_vmm_kvm::Devices;
use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The largest restore plan.
const PLAN_BYTES_MAX: u64 = 1 << 30;
/// How long a start waits for the first heartbeat.
pub const LEASE_WAIT: Duration = Duration::from_secs(30);
/// vCPUs at most.
const VCPUS_MAX: u16 = 64;

/// What was handed over before the start.
#[derive(Default)]
pub struct Handed {
    /// Keys of all domains.
    pub keys: Vec<DomainKey>,
    /// Domain of new objects.
    pub write_domain: u32,
    /// Pack files in plan order.
    pub packs: Vec<File>,
}

impl Handed {
    /// Takes key material.
    pub fn take_keys(&mut self, keys: &[KeyMaterial], write_domain: u32) -> Result<(), Fault> {
        let mut out = Vec::new();
        for k in keys {
            let mut master = [0u8; 32];
            hex::decode_to_slice(&k.master_hex, &mut master).map_err(|_| {
                Fault::new("protocol", "take a key", "it is not 32 bytes in hex", "send the domain's master secret")
            })?;
            out.push(DomainKey::new(k.domain, master));
        }
        if !out.iter().any(|k| k.domain() == write_domain) {
            let why = format!("there is no key for domain {write_domain}, in which new objects are written");
            return Err(Fault::new("protocol", "take keys", why, "send the key of the write domain"));
        }
        (self.keys, self.write_domain) = (out, write_domain);
        Ok(())
    }
}

/// Boot or restore.
pub enum Origin {
    /// The image's disk manifest.
    Image { manifest_hex: String },
    /// The checkpoint's id and manifest file.
    Checkpoint { id: CheckpointId, manifest: OwnedFd },
}

/// A start that was asked for.
pub struct StartRequest {
    /// Shape.
    pub config: VmConfig,
    /// From where.
    pub origin: Origin,
    /// Kernel file.
    pub kernel: OwnedFd,
    /// Initramfs file, empty when none.
    pub initrd: OwnedFd,
    /// Restore plan.
    pub plan: OwnedFd,
}

/// What a start needs of the process.
pub struct Context {
    /// Shared state.
    pub shared: Arc<Shared>,
    /// The node.
    pub link: Arc<dyn HostLink>,
    /// Where this process finds its files.
    pub place: Place,
    /// Settings of the qemu engine.
    pub qemu: qemu::Settings,
    /// For the kvm engine; taken by the first start.
    pub kvm: Mutex<Kvm>,
    /// Called when guest memory cannot be served.
    pub on_fatal: OnFatal,
    /// Sentences for the operator.
    pub warn: Arc<dyn Fn(String) + Send + Sync>,
}

/// What the kvm engine inherits from before the jail.
#[derive(Default)]
pub struct Kvm {
    /// /dev/kvm, or why not.
    pub device: Option<Result<OwnedFd, String>>,
    /// /dev/userfaultfd, /proc/self/pagemap, the host's profile.
    pub devices: Devices,
}

/// A VM that is ready to run.
pub struct Built {
    /// The engine, stopped.
    pub engine: Box<dyn Engine>,
    /// Its checkpoints.
    pub pipeline: Arc<Pipeline>,
}

fn what(config: &VmConfig, origin: &Origin) -> String {
    match origin {
        Origin::Image { .. } => format!("boot {:?}", config.name),
        Origin::Checkpoint { id, .. } => format!("restore {:?} from {}", config.name, id.short()),
    }
}

fn check_shape(config: &VmConfig, what: &str) -> Result<(), Fault> {
    let bad = |why: String| Err(Fault::new("bad-request", what, why, "correct the VM's configuration"));
    if config.memory_bytes == 0 || !config.memory_bytes.is_multiple_of(2 << 20) {
        return bad(format!("{} bytes of memory are not a multiple of 2 MiB", config.memory_bytes));
    }
    if config.vcpus == 0 || config.vcpus > VCPUS_MAX {
        return bad(format!("{} virtual CPUs (1 to {VCPUS_MAX} can be given)", config.vcpus));
    }
    Ok(())
}

fn read_all(fd: OwnedFd, max: u64, what: &str, name: &str) -> Result<Vec<u8>, Fault> {
    let bad = |why: String| Fault::new("protocol", what, why, "hand over a readable file");
    let mut file = File::from(fd);
    file.rewind().map_err(|e| bad(format!("{name}: {e}")))?;
    let mut bytes = Vec::new();
    let n = file.take(max + 1).read_to_end(&mut bytes).map_err(|e| bad(format!("{name}: {e}")))?;
    if n as u64 > max { Err(bad(format!("{name} is longer than {max} bytes"))) } else { Ok(bytes) }
}

fn manifest_of(origin: Origin, what: &str) -> Result<Manifest, Fault> {
    let corrupt = |e: String| Fault::new("corrupt", what, e, "fetch the manifest from another holder");
    match origin {
        Origin::Image { manifest_hex } => {
            let bytes = hex::decode(manifest_hex).map_err(|e| corrupt(e.to_string()))?;
            Manifest::decode(&bytes).map_err(|e| corrupt(e.to_string()))
        }
        Origin::Checkpoint { id, manifest } => {
            let bytes = read_all(manifest, MANIFEST_BYTES_MAX as u64, what, "the manifest")?;
            let m = Manifest::decode_verified(&id, &bytes).map_err(|e| corrupt(e.to_string()))?;
            if m.machine.is_none() {
                return Err(corrupt("the manifest is an image's disk, without a machine".into()));
            }
            Ok(m)
        }
    }
}

/// Refuses what cannot fit before anything is loaded.
fn check_against(config: &VmConfig, m: &Manifest, what: &str) -> Result<(), Fault> {
    let Some(machine) = &m.machine else { return Ok(()) };
    let no =
        |why: String| Err(Fault::new("incompatible", what, why, "restore it with the shape and engine that it was saved with"));
    if machine.engine != config.engine {
        return no(format!("it was saved by the {} engine, this VM is to use {}", machine.engine, config.engine));
    }
    if m.memory.bytes != config.memory_bytes {
        return no(format!("it has {} bytes of memory, {} were asked for", m.memory.bytes, config.memory_bytes));
    }
    if machine.vcpus != config.vcpus {
        return no(format!("it has {} virtual CPUs, {} were asked for", machine.vcpus, config.vcpus));
    }
    Ok(())
}

fn hash_file(fd: &OwnedFd, what: &str) -> Result<String, Fault> {
    let bad = |e: std::io::Error| Fault::new("protocol", what, format!("kernel or initramfs: {e}"), "hand over readable files");
    let mut file = File::from(fd.try_clone().map_err(bad)?);
    file.rewind().map_err(bad)?;
    let mut hash = blake3::Hasher::new();
    let bytes = hash.update_reader(&mut file).map_err(bad)?.count();
    file.rewind().map_err(bad)?;
    Ok(if bytes == 0 { String::new() } else { hash.finalize().to_hex().to_string() })
}

/// Builds the VM; it does not run yet.
pub fn build(cx: &Context, handed: &mut Handed, request: StartRequest) -> Result<Built, Fault> {
    let StartRequest { config, origin, kernel, initrd, plan } = request;
    let what = what(&config, &origin);
    check_shape(&config, &what)?;
    let manifest = manifest_of(origin, &what)?;
    check_against(&config, &manifest, &what)?;
    let lease = cx.shared.open_gate(config.token);
    let plan = Plan::decode(&read_all(plan, PLAN_BYTES_MAX, &what, "the restore plan")?)
        .map_err(|e| Fault::new("corrupt", what.as_str(), e.to_string(), "ask the node for a new plan"))?;
    let keys = std::mem::take(&mut handed.keys);
    let packs = std::mem::take(&mut handed.packs);
    let source = Arc::new(ChunkSource::new(keys, plan, packs, cx.link.clone()));
    let disk_refs = source.load_map(&manifest.disk)?;
    let memory = Memory::create(config.memory_bytes)?;
    let mut restore = None;
    if let Some(machine) = manifest.machine.clone() {
        let refs = source.load_map(&manifest.memory)?;
        if config.verify_eager {
            verify_all(&source, &refs, &disk_refs)?;
        }
        memory.restore_lazy(source.clone(), refs, Vec::new(), cx.on_fatal.clone())?;
        restore = Some((machine, source.load_state(&manifest.state, manifest.state_bytes)?));
    } else if config.verify_eager {
        verify_all(&source, &[], &disk_refs)?;
    }
    let disk = Disk::new(disk_refs, manifest.disk.bytes, source.clone(), &cx.place.scratch, lease.clone())?;
    let disk = Arc::new(disk);
    cx.shared.set_parts(memory.clone(), disk.clone());
    let parts = Parts {
        session: config.session,
        write_domain: handed.write_domain,
        memory: memory.clone(),
        disk: disk.clone(),
        source,
        link: cx.link.clone(),
        memory_map: manifest.machine.is_some().then(|| manifest.memory.clone()),
        disk_map: Map { bytes: manifest.disk.bytes, segments: manifest.disk.segments },
    };
    // A restored QEMU gets its kernel from memory, so the file is not read again.
    let (kernel_hash, initrd_hash) = match &restore {
        Some((m, _)) if config.engine == EngineKind::Qemu => (m.kernel_hash.clone(), m.initrd_hash.clone()),
        _ => (hash_file(&kernel, &what)?, hash_file(&initrd, &what)?),
    };
    if !cx.shared.wait_for_lease(LEASE_WAIT) {
        let why = format!("no heartbeat with the token of run {} came within {} s", config.token, LEASE_WAIT.as_secs());
        return Err(Fault::new("lease-ended", what, why, "send the lease before boot or restore"));
    }
    let run_dir = cx.place.logs.clone();
    let setup = EngineSetup { config, kernel, kernel_hash, initrd_hash, initrd, memory, disk, lease, run_dir, restore };
    let engine = engine_for(cx, setup)?;
    cx.shared.set_stopper(engine.stopper());
    Ok(Built { engine, pipeline: Arc::new(Pipeline::new(parts)?) })
}

fn verify_all(source: &ChunkSource, memory: &[ChunkId], disk: &[ChunkId]) -> Result<(), Fault> {
    source.verify(&[memory, disk].concat())
}

fn engine_for(cx: &Context, setup: EngineSetup) -> Result<Box<dyn Engine>, Fault> {
    // Each engine gets what it needs; the rest closes here.
    let kvm = std::mem::take(&mut *cx.kvm.lock().unwrap_or_else(PoisonError::into_inner));
    match setup.config.engine {
        EngineKind::Qemu => Ok(Box::new(qemu::QemuEngine::new(setup, &cx.qemu, cx.warn.clone())?)),
        EngineKind::Kvm => {
            let device = match kvm.device {
                Some(Ok(fd)) => Some(fd),
                Some(Err(why)) => {
                    let next = "use --engine qemu, or give this process access to /dev/kvm";
                    return Err(Fault::new("no-kvm", "/dev/kvm", why, next));
                }
                None => None,
            };
            let ask = Ask { memory_bytes: setup.config.memory_bytes, vcpus: setup.config.vcpus, engine: None };
            let begun = cx.qemu.starter.lock().unwrap_or_else(PoisonError::into_inner).ask(&ask, &[])?;
            (cx.qemu.on_jail)(None, &begun.cgroup);
            ks_vmm_kvm::KvmEngine::with_devices(setup, Devices { kvm: device, ..kvm.devices }, cx.warn.clone())
        }
    }
}
