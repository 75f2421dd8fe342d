//! Messages between `ksd` and `ks-vmm` on one Unix stream socket.
//!
//! A frame is a u32 little-endian length and that many bytes of JSON; file descriptors ride (SCM_RIGHTS) with the
//! first byte of the frame that names their count. Both ends may ask; ids belong to the asking side.

use crate::ids::{ChunkId, PackId, RunToken, SessionId};
use crate::manifest::EngineKind;
use serde::{Deserialize, Serialize};

/// The largest frame: a reader refuses longer ones.
pub const FRAME_BYTES_MAX: usize = 8 * 1024 * 1024;
/// Descriptors in one frame at most (the kernel's limit is 253).
pub const FRAME_FDS_MAX: usize = 200;
/// Hashes in one [`HostRequest::Known`].
pub const KNOWN_BATCH_MAX: usize = 4096;
/// Spoken by both ends; another one is refused at `Hello`.
pub const PROTOCOL: u32 = 1;

/// One frame.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "frame", rename_all = "kebab-case")]
pub enum Frame {
    /// From the node to the VMM.
    Request {
        id: u64,
        #[serde(default)]
        fds: u32,
        request: VmmRequest,
    },
    /// The VMM's answer to `Request`.
    Reply {
        id: u64,
        #[serde(default)]
        fds: u32,
        result: Result<VmmReply, Fault>,
    },
    /// From the VMM, unasked.
    Event { event: VmmEvent },
    /// From the VMM to the node.
    HostRequest {
        id: u64,
        #[serde(default)]
        fds: u32,
        request: HostRequest,
    },
    /// The node's answer to `HostRequest`.
    HostReply {
        id: u64,
        #[serde(default)]
        fds: u32,
        result: Result<HostReply, Fault>,
    },
}

/// A refusal that crosses the socket: `code` for programs, the rest for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{what}: {why}; {next}")]
pub struct Fault {
    /// Stable, kebab-case: `corrupt`, `incompatible`, `disk-full`, `engine-died`, `busy`, `lease-ended`, `not-ready`, `timeout`, `internal`…
    pub code: String,
    /// What failed.
    pub what: String,
    /// Why.
    pub why: String,
    /// What to do next.
    pub next: String,
}
impl Fault {
    /// A fault from its four parts.
    pub fn new(code: &str, what: impl Into<String>, why: impl Into<String>, next: impl Into<String>) -> Self {
        Self { code: code.to_owned(), what: what.into(), why: why.into(), next: next.into() }
    }
}

/// How a VM is shaped; fixed for its life.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmConfig {
    /// The session it runs.
    pub session: SessionId,
    /// The session's name, for logs and process titles.
    pub name: String,
    /// Fencing number of this run.
    pub token: RunToken,
    /// Engine to use (`auto` is resolved before).
    pub engine: EngineKind,
    /// Virtual CPUs.
    pub vcpus: u16,
    /// Memory in bytes, a multiple of 2 MiB.
    pub memory_bytes: u64,
    /// Extra kernel command line at boot (ignored on restore).
    pub cmdline: String,
    /// Whether every object is verified before the first instruction.
    pub verify_eager: bool,
}

/// The keys of one domain, for a VMM that must open and name its objects.
#[derive(Clone, Serialize, Deserialize)]
pub struct KeyMaterial {
    /// Domain number.
    pub domain: u32,
    /// 32 bytes, hex.
    pub master_hex: String,
}
impl std::fmt::Debug for KeyMaterial {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "KeyMaterial({}, secret)", self.domain)
    }
}

/// What the node asks of a VMM. Legal order: Hello; Keys; Packs*; Lease; Boot or Restore; then anything. The lease must come
/// before: a start waits half a minute for it and then fails with `lease-ended`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "kebab-case")]
pub enum VmmRequest {
    /// First on every connection; answered with [`VmmReply::Hello`]. A newer connection replaces the older one.
    Hello { protocol: u32 },
    /// Keys for the domains that the plan names; `write_domain` is used for new objects.
    Keys { keys: Vec<KeyMaterial>, write_domain: u32 },
    /// The next read-only pack files, in plan order: `fds` of the frame.
    Packs {},
    /// Cold boot. fds: kernel, initrd, plan memfd. `manifest` is the image's disk manifest, hex of its bytes.
    Boot { config: VmConfig, image_manifest_hex: String },
    /// Restore. fds: kernel, initrd, plan memfd, manifest memfd.
    Restore { config: VmConfig, checkpoint: crate::ids::CheckpointId },
    /// Stop the vCPUs.
    Pause {},
    /// Let them go on.
    Resume {},
    /// Capture. Answered with [`VmmReply::Checkpoint`] once the node has stored it (see [`HostRequest`]).
    Checkpoint { parent: Option<crate::ids::CheckpointId>, journal_position: u64 },
    /// The lease: `deadline_boottime_ms` on this host's CLOCK_BOOTTIME; u64::MAX on a lone node.
    Lease { token: RunToken, deadline_boottime_ms: u64 },
    /// Counters.
    Stats {},
    /// End the VM at once and exit.
    Stop {},
}

/// The VMM's life, as seen from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VmPhase {
    /// Started, no VM yet.
    Empty,
    /// Boot or restore under way.
    Starting,
    /// vCPUs run.
    Running,
    /// vCPUs stopped on request.
    Paused,
    /// vCPUs stopped because the lease ended.
    LeaseEnded,
    /// The VM is gone; the process exits.
    Dead,
}

/// Answers.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "ok", rename_all = "kebab-case")]
pub enum VmmReply {
    /// To Hello.
    Hello { protocol: u32, pid: u32, phase: VmPhase, config: Option<VmConfig>, jail: Vec<String> },
    /// Done.
    Done {},
    /// To Boot and Restore: the vCPUs run. Times in microseconds since the request arrived.
    Started { first_run_us: u64, engine_version: String },
    /// To Checkpoint.
    Checkpoint { stats: CheckpointStats },
    /// To Stats.
    Stats { stats: VmStats },
}

/// Figures of one checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointStats {
    /// The checkpoint's id, hex.
    pub id: String,
    /// vCPUs stopped, microseconds.
    pub pause_us: u64,
    /// From the request to stored, microseconds.
    pub total_us: u64,
    /// Memory bytes in dirty chunks.
    pub dirty_memory_bytes: u64,
    /// Disk bytes in dirty chunks.
    pub dirty_disk_bytes: u64,
    /// Bytes of new packs.
    pub stored_bytes: u64,
    /// Chunks written, chunks already known, chunks of zeros.
    pub chunks_new: u64,
    /// See `chunks_new`.
    pub chunks_known: u64,
    /// See `chunks_new`.
    pub chunks_zero: u64,
    /// Memory in use in the guest's memory file, bytes (what is not a hole).
    pub memory_used_bytes: u64,
    /// How the dirty set was found: `wp-async` or `hash-scan`.
    pub tracker: String,
}

/// Counters of a running VM.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmStats {
    /// Phase.
    pub phase: Option<VmPhase>,
    /// Guest memory present, bytes.
    pub memory_present_bytes: u64,
    /// Chunks paged in by faults and by the prefetcher, and not yet there.
    pub chunks_faulted: u64,
    /// See `chunks_faulted`.
    pub chunks_prefetched: u64,
    /// See `chunks_faulted`.
    pub chunks_missing: u64,
    /// Dirty disk bytes since the last stored checkpoint.
    pub disk_dirty_bytes: u64,
    /// Resident memory of ks-vmm without guest memory, bytes.
    pub vmm_rss_bytes: u64,
    /// Bytes through the guest channel, both ways.
    pub channel_bytes: u64,
    /// Instructions done for the guest by the soft profile's assist.
    pub assists: u64,
    /// Microseconds from the request to start to the first exit that the guest caused (kvm) or to running (qemu).
    pub first_exit_us: Option<u64>,
    /// How the dirty set is found: `tracked` by the kernel, or `hash-scan` of all memory where it cannot be.
    #[serde(default)]
    pub dirty_set: String,
}

/// Told unasked.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum VmmEvent {
    /// The vCPUs were stopped, or let go, by the lease watchdog.
    Lease { running: bool },
    /// The guest is running again after a checkpoint's pause: `pause_us`.
    Resumed { pause_us: u64 },
    /// The VM is gone and why; the process exits next.
    Died { fault: Fault },
    /// Something the operator should read.
    Warning { text: String },
}

/// What a VMM asks of its node while it stores a checkpoint or pages.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "kebab-case")]
pub enum HostRequest {
    /// A new, empty, writable pack file: one fd comes back.
    NewPack {},
    /// That pack is written (not yet synced): verify, sync and index it.
    PackDone { id: PackId, bytes: u64 },
    /// Which of these objects need not be stored again?
    Known { ids: Vec<ChunkId> },
    /// All packs are done; here is the manifest (one fd, a memfd). Answered when it is durable here.
    Commit { stats: CheckpointStats },
    /// Drop what was uploaded since the last Commit.
    Abort { why: String },
    /// An object that the plan's packs could not give (missing or corrupt): plain `fds` 1, a pack holding it.
    Fetch { id: ChunkId, broken: Option<String> },
}

/// The node's answers.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "ok", rename_all = "kebab-case")]
pub enum HostReply {
    /// Done.
    Done {},
    /// To NewPack; one fd.
    Pack {},
    /// To Known: one flag per id, in order.
    Known { known: Vec<bool> },
    /// To Fetch: a good copy's place in the pack whose fd comes along.
    Object { offset: u32, stored_len: u32, plain_len: u32, kind: u8, codec: u8, domain: u32 },
}
