//! The seam between an engine (kvm or qemu) and everything that both share: control, lease, memory, disk, checkpoint.
//!
//! An engine supplies running, stopping, device state and the guest's port. Memory and disk belong to the core; an
//! engine only maps the memory file and forwards block requests. Nothing here decides when to run: the run loop does.

use crate::disk::Disk;
use crate::lease::LeaseGate;
use crate::memory::Memory;
use ks_proto::control::{Fault, VmConfig};
use ks_proto::manifest::{EngineKind, Machine};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// What an engine needs to build its machine.
pub struct EngineSetup {
    /// Shape of the VM.
    pub config: VmConfig,
    /// Kernel image (bzImage or vmlinux), readable.
    pub kernel: OwnedFd,
    /// BLAKE3 of the kernel and the initramfs, hex, for [`Machine`].
    pub kernel_hash: String,
    /// See `kernel_hash`; "" when there is none.
    pub initrd_hash: String,
    /// Initramfs; an empty file when there is none.
    pub initrd: OwnedFd,
    /// Guest memory: one memfd, addressed by offset.
    pub memory: Arc<Memory>,
    /// Root disk.
    pub disk: Arc<Disk>,
    /// Checked before each entry into the guest and each byte in or out.
    pub lease: Arc<LeaseGate>,
    /// Folder of this run's logs, as this process sees it (`console.log` gets the serial console).
    pub run_dir: PathBuf,
    /// State to load, with the machine that it was saved on. None boots.
    pub restore: Option<(Machine, Vec<u8>)>,
}

/// Why an engine is no more.
#[derive(Debug, Clone)]
pub struct EngineExit {
    /// Told to the node.
    pub fault: Fault,
}

/// One virtual machine. Calls come from one thread, but `stopper` works from any.
pub trait Engine: Send {
    /// Which engine.
    fn kind(&self) -> EngineKind;
    /// What a restore of this VM needs; goes into the manifest.
    fn machine(&self) -> Machine;
    /// Starts the vCPUs, first or again after `pause`. Legal when stopped; refuses when the lease has ended.
    fn run(&mut self) -> Result<(), Fault>;
    /// Stops the vCPUs and drains device work, at most `bound`. On return no guest memory and no disk block changes
    /// until `run`. On an error the VM is running again or dead (then `exited` says so).
    fn pause(&mut self, bound: Duration) -> Result<(), Fault>;
    /// Device and vCPU state. Legal only while paused; may be called again after each pause.
    fn save_state(&mut self) -> Result<Vec<u8>, Fault>;
    /// The host's end of the guest port `ks.channel`, connected anew: the guest sees the port close and open. Legal
    /// while running. The previous stream is dead afterwards.
    fn connect_port(&mut self) -> Result<UnixStream, Fault>;
    /// Stops the vCPUs at once from any thread, without waiting for device work (lease watchdog).
    fn stopper(&self) -> Arc<dyn Stopper>;
    /// Some once the VM is gone (guest power-off, panic, engine death).
    fn exited(&mut self) -> Option<EngineExit>;
    /// A descriptor that becomes readable when `exited` may have changed.
    fn exit_fd(&self) -> std::os::fd::RawFd;
    /// Counters of the engine: (assists, first guest-caused exit in microseconds after `run`).
    fn counters(&self) -> (u64, Option<u64>) {
        (0, None)
    }
    /// Ends everything at once; idempotent.
    fn kill(&mut self);
}

/// Stops and lets go vCPUs without the engine's cooperation.
pub trait Stopper: Send + Sync {
    /// After return no guest instruction runs (qemu: SIGSTOP and observed stopped; kvm: every vCPU out of KVM_RUN).
    fn freeze(&self);
    /// Undo `freeze`.
    fn thaw(&self);
}
