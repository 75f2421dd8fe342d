//! [`KvmEngine`]: builds a machine (booting or restoring), runs it, pauses it, saves it, ends it.
//!
//! A pause stops the vCPUs first and the devices second; nothing in guest memory or on the disk changes after it. The
//! machine is built paused. What a checkpoint of it needs from another host is in [`Engine::machine`].

use crate::acpi::{self, MmioNode};
use crate::bus::Bus;
use crate::cpu_state::{self, StateError};
use crate::host::{self, Host};
use crate::profile::{self, Profile};
use crate::serial::{Com1, ConsoleLog, LogHandle};
use crate::state::{DeviceStates, MachineState};
use crate::sys::ram::Ram;
use crate::vcpu::{Control, Vcpu};
use crate::virtio::{
    Device, Slot,
    balloon::Balloon,
    block::{Block, Warn},
    console::Console,
    entropy::Entropy,
    mmio, worker,
};
use crate::{boot, layout, lock, sys};
use ks_proto::control::Fault;
use ks_proto::manifest::{EngineKind, Machine};
use ks_vmm_core::engine::{Engine, EngineExit, EngineSetup, Stopper};
use ks_vmm_core::lease::LeaseGate;
use ks_vmm_core::memory::Tracked;
use kvm_bindings::{KVM_PIT_SPEAKER_DUMMY, kvm_msr_entry, kvm_pit_config};
use kvm_ioctls::{IoEventAddress, VcpuFd, VmFd};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vmm_sys_util::eventfd::EventFd;

/// Names the state's meaning; a restore needs the same.
pub const ENGINE_VERSION: &str = "ks-vmm-kvm 1";
/// How far two hosts' TSC frequencies may differ, in parts per million.
const TSC_TOLERANCE_PPM: u64 = 250;
/// MTRR default type: enabled, write-back.
const MSR_MTRR_DEF_TYPE: (u32, u64) = (0x2ff, 1 << 11 | 6);
/// Order of the virtio windows.
const CONSOLE_SLOT: usize = 1;
const NEXT_RESTORE: &str = "restore on a host that has it, or boot the image anew";

/// Device files that a jailed process inherits instead of opening them.
#[derive(Default)]
pub struct Devices {
    /// /dev/kvm.
    pub kvm: Option<OwnedFd>,
    /// /dev/userfaultfd.
    pub userfaultfd: Option<OwnedFd>,
    /// This process's own /proc/self/pagemap.
    pub pagemap: Option<File>,
    /// The host's profile, as [`Profile::of_this_host`] found it while it could look.
    pub profile: Option<Profile>,
}

/// One machine on /dev/kvm.
pub struct KvmEngine {
    machine: Machine,
    control: Arc<Control>,
    lease: Arc<LeaseGate>,
    bus: Arc<Bus>,
    vcpus: Vec<Arc<Mutex<VcpuFd>>>,
    threads: Vec<JoinHandle<()>>,
    msr_indices: Vec<u32>,
    xsave_bytes: usize,
    has_run: bool,
    vm: VmFd,
    // Invariant: last, so that the mapping outlives the VM that uses it.
    ram: Arc<Ram>,
}

fn fault(code: &str, what: &str) -> impl Fn(std::io::Error) -> Fault {
    let (code, what) = (code.to_owned(), what.to_owned());
    move |e| Fault::new(&code, what.clone(), e.to_string(), "see vmm.log of this run")
}
fn kvm_fault(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> Fault {
    move |e| fault("internal", what)(std::io::Error::from_raw_os_error(e.errno()))
}
fn state_fault(what: &'static str) -> impl Fn(StateError) -> Fault {
    move |e| match e {
        StateError::Msr { .. } => Fault::new("incompatible", what, e.to_string(), NEXT_RESTORE),
        StateError::Step { .. } => Fault::new("internal", what, e.to_string(), "see vmm.log of this run"),
    }
}

/// Everything of the virtual machine but its vCPUs' state.
struct Built {
    vm: VmFd,
    ram: Arc<Ram>,
    bus: Arc<Bus>,
    vcpus: Vec<VcpuFd>,
}

impl KvmEngine {
    /// Builds the machine with this process's own device files.
    #[expect(clippy::new_ret_no_self, reason = "the seam's callers hold engines as trait objects")]
    pub fn new(setup: EngineSetup) -> Result<Box<dyn Engine>, Fault> {
        let warn = Arc::new(|text| tracing::warn!("{text}"));
        Self::with_devices(setup, Devices::default(), warn)
    }

    /// Builds the machine, booting the kernel or loading `setup.restore`; it stands still until `run`. `warn` is told what the
    /// operator should read.
    pub fn with_devices(setup: EngineSetup, devices: Devices, warn: Warn) -> Result<Box<dyn Engine>, Fault> {
        let Devices { kvm, userfaultfd, pagemap, profile } = devices;
        let host = Host::look(kvm, profile).map_err(|e| {
            let next = "use --engine qemu, or give this process access to /dev/kvm";
            Fault::new("no-kvm", "/dev/kvm", e.to_string(), next)
        })?;
        let vcpus = setup.config.vcpus;
        if vcpus == 0 || vcpus > host.profile.vcpus_max() {
            let why = format!("{vcpus} vCPUs; the profile {} runs 1 to {}", host.profile.name(), host.profile.vcpus_max());
            return Err(Fault::new("unsupported", "the VM's shape", why, "ask for fewer vCPUs, or use --engine qemu"));
        }
        let saved = setup.restore.as_ref().map(|(machine, bytes)| decode(machine, bytes, vcpus)).transpose()?;
        let built = build(&host, &setup, (userfaultfd, pagemap), saved.as_ref(), warn)?;
        let msr_indices = cpu_state::msr_indices(&host.kvm).map_err(state_fault("MSR list"))?;
        let xsave_bytes = sys::xsave::area_bytes(&built.vm);
        let tsc_khz = built.vcpus[0].get_tsc_khz().unwrap_or(0);
        let machine = match (&saved, &setup.restore) {
            (Some(state), Some((machine, _))) => {
                check_host(&host, machine, tsc_khz, &built)?;
                check_soft_tsc(&host, state)?;
                load(&built, state, machine, &host, xsave_bytes)?;
                machine.clone()
            }
            _ => start(&host, &setup, &built, tsc_khz)?,
        };
        let engine = Self::spawn(&host, setup.lease, built, machine, msr_indices, xsave_bytes)?;
        Ok(Box::new(engine))
    }

    fn spawn(
        host: &Host,
        lease: Arc<LeaseGate>,
        built: Built,
        machine: Machine,
        msr_indices: Vec<u32>,
        xsave_bytes: usize,
    ) -> Result<Self, Fault> {
        let control = Arc::new(Control::new(built.vcpus.len()).map_err(fault("internal", "event descriptor"))?);
        let layout = Arc::new(host::xsave_layout(xsave_bytes));
        let mut engine = Self {
            machine,
            control,
            lease,
            bus: built.bus,
            vcpus: built.vcpus.into_iter().map(|v| Arc::new(Mutex::new(v))).collect(),
            threads: Vec::new(),
            msr_indices,
            xsave_bytes,
            has_run: false,
            vm: built.vm,
            ram: built.ram,
        };
        for slot in &engine.bus.slots {
            engine.threads.push(worker::spawn(slot.clone()).map_err(fault("internal", "device thread"))?);
        }
        for (index, fd) in engine.vcpus.iter().enumerate() {
            let vcpu = Vcpu {
                index,
                fd: fd.clone(),
                control: engine.control.clone(),
                bus: engine.bus.clone(),
                ram: engine.ram.clone(),
                lease: engine.lease.clone(),
                profile: host.profile,
                layout: layout.clone(),
                xsave_bytes,
            };
            engine.threads.push(vcpu.spawn().map_err(fault("internal", "vCPU thread"))?);
        }
        Ok(engine)
    }

    fn resume_devices(&self) {
        self.bus.slots.iter().for_each(|s| s.resume());
    }
}

/// Refuses a state that is not this engine's, before anything is built.
fn decode(machine: &Machine, bytes: &[u8], vcpus: u16) -> Result<MachineState, Fault> {
    let wrong = |why: String| Fault::new("incompatible", "the checkpoint's machine", why, NEXT_RESTORE);
    if machine.engine != EngineKind::Kvm || machine.engine_version != ENGINE_VERSION {
        return Err(wrong(format!("it was saved by {} ({}), this is {ENGINE_VERSION}", machine.engine, machine.engine_version)));
    }
    let state = MachineState::decode(bytes)
        .map_err(|e| Fault::new("corrupt", "the checkpoint's machine state", e.to_string(), "restore another checkpoint"))?;
    if machine.vcpus != vcpus || state.vcpus.len() != usize::from(vcpus) {
        return Err(wrong(format!("it has {} vCPUs, {vcpus} are asked for", machine.vcpus)));
    }
    Ok(state)
}

/// Refuses a host that lacks what the guest found when it booted.
fn check_host(host: &Host, machine: &Machine, tsc_khz: u32, built: &Built) -> Result<(), Fault> {
    let wrong = |why: String| Fault::new("incompatible", "this host", why, NEXT_RESTORE);
    if machine.profile != host.profile.name() {
        return Err(wrong(format!("its profile is {}, the checkpoint's is {}", host.profile.name(), machine.profile)));
    }
    let have = host.features(&host.supported);
    let missing = profile::missing_features(&machine.features, &have);
    if !missing.is_empty() {
        return Err(wrong(format!("its CPU lacks {}", missing.join(", "))));
    }
    let (a, b) = (u64::from(machine.tsc_khz), u64::from(tsc_khz));
    if a.abs_diff(b) * 1_000_000 <= a * TSC_TOLERANCE_PPM {
        return Ok(());
    }
    if !host.tsc_control {
        return Err(wrong(format!("its TSC runs at {b} kHz, the checkpoint's at {a}, and it cannot scale")));
    }
    built.vcpus.iter().try_for_each(|v| v.set_tsc_khz(machine.tsc_khz)).map_err(kvm_fault("KVM_SET_TSC_KHZ"))
}

/// On `soft` the guest's TSC is the host's whatever offset is set, and a clock that runs on it would stand still until
/// a host that booted later has caught up.
fn check_soft_tsc(host: &Host, state: &MachineState) -> Result<(), Fault> {
    let now = sys::run::host_tsc();
    if host.profile == Profile::Hardware || now >= state.vm.host_tsc {
        return Ok(());
    }
    let why = format!("its TSC is behind the checkpoint's ({now} < {}), and software KVM cannot shift it", state.vm.host_tsc);
    let next = "restore on the host that saved it before that host boots again, or on one that has run longer";
    Err(Fault::new("incompatible", "this host", why, next))
}

fn nodes() -> Vec<MmioNode> {
    let base = |i: usize| layout::VIRTIO_MMIO_BASE + i as u64 * layout::VIRTIO_MMIO_BYTES;
    layout::VIRTIO_GSIS.iter().enumerate().map(|(i, gsi)| MmioNode { base: base(i), gsi: *gsi }).collect()
}

fn build(
    host: &Host,
    setup: &EngineSetup,
    (uffd, pagemap): (Option<OwnedFd>, Option<File>),
    saved: Option<&MachineState>,
    warn: Warn,
) -> Result<Built, Fault> {
    let memory = &setup.memory;
    let ram = Ram::map(memory.clone()).map_err(fault("internal", "mapping guest memory"))?;
    let ram = Arc::new(ram);
    let own = if uffd.is_none() { File::open("/dev/userfaultfd").ok().map(OwnedFd::from) } else { uffd };
    let dev = own.as_ref().map(AsFd::as_fd);
    match Tracked::in_this_process(dev, pagemap, ram.base(), ram.bytes(), memory.wants_missing()) {
        Ok(tracked) => memory.attach(tracked)?,
        Err(e) => {
            tracing::warn!("no userfaultfd ({e}): memory is loaded whole, and checkpoints find changes by hashing");
            memory.detached()?;
        }
    }
    let vm = host.kvm.create_vm().map_err(kvm_fault("KVM_CREATE_VM"))?;
    vm.set_tss_address(layout::TSS_ADDR).map_err(kvm_fault("KVM_SET_TSS_ADDR"))?;
    vm.set_identity_map_address(layout::IDENTITY_MAP_ADDR).map_err(kvm_fault("KVM_SET_IDENTITY_MAP_ADDR"))?;
    vm.create_irq_chip().map_err(kvm_fault("KVM_CREATE_IRQCHIP"))?;
    let pit = kvm_pit_config { flags: KVM_PIT_SPEAKER_DUMMY, ..Default::default() };
    vm.create_pit2(pit).map_err(kvm_fault("KVM_CREATE_PIT2"))?;
    ram.register(&vm).map_err(kvm_fault("KVM_SET_USER_MEMORY_REGION"))?;
    let bus = Arc::new(bus(&vm, setup, &ram, saved, warn)?);
    let vcpus = (0..u64::from(setup.config.vcpus)).map(|i| vm.create_vcpu(i)).collect::<Result<Vec<_>, _>>();
    let vcpus = vcpus.map_err(kvm_fault("KVM_CREATE_VCPU"))?;
    Ok(Built { vm, ram, bus, vcpus })
}

fn edge(vm: &VmFd, gsi: u32) -> Result<EventFd, Fault> {
    let event = EventFd::new(libc::EFD_NONBLOCK).map_err(fault("internal", "event descriptor"))?;
    vm.register_irqfd(&event, gsi).map_err(kvm_fault("KVM_IRQFD"))?;
    Ok(event)
}

fn bus(vm: &VmFd, setup: &EngineSetup, ram: &Arc<Ram>, saved: Option<&MachineState>, warn: Warn) -> Result<Bus, Fault> {
    let path = setup.run_dir.join("console.log");
    let log = LogHandle::new(ConsoleLog::open(&path).map_err(fault("internal", "console.log"))?);
    let serial = saved.map(|s| &s.devices.serial);
    let com1 = Com1::new(edge(vm, layout::SERIAL_GSI)?, log, serial).map_err(fault("corrupt", "serial console"))?;
    let models: Vec<Box<dyn Device>> = vec![
        Box::new(Block::new(setup.disk.clone(), setup.lease.clone(), warn)),
        Box::new(Console::new(setup.lease.clone())),
        Box::new(Entropy),
        Box::new(Balloon::new(setup.memory.clone())),
    ];
    let mut slots: Vec<Slot> = Vec::new();
    for (node, model) in nodes().iter().zip(models) {
        let slot = mmio::MmioSlot::new(node.base, node.gsi, model, edge(vm, node.gsi)?, ram.clone())
            .map_err(fault("internal", "virtio device"))?;
        for (queue, kick) in slot.kicks.iter().enumerate() {
            let at = IoEventAddress::Mmio(node.base + mmio::NOTIFY_OFFSET);
            vm.register_ioevent(kick, &at, queue as u32).map_err(kvm_fault("KVM_IOEVENTFD"))?;
        }
        // Nothing is busy yet; the machine is built paused.
        slot.pause(Instant::now());
        slots.push(Arc::new(slot));
    }
    Ok(Bus::new(com1, slots))
}

/// A cold boot: CPUID, memory contents, registers.
fn start(host: &Host, setup: &EngineSetup, built: &Built, tsc_khz: u32) -> Result<Machine, Fault> {
    let vcpus = setup.config.vcpus;
    let cmdline = profile::cmdline(host.profile, &setup.config.cmdline, tsc_khz, &nodes());
    let file = |fd: &OwnedFd, what| fd.try_clone().map(File::from).map_err(fault("internal", what));
    let (mut kernel, mut initrd) = (file(&setup.kernel, "kernel")?, file(&setup.initrd, "initramfs")?);
    let acpi = acpi::tables(vcpus, &nodes());
    let parts = boot::Boot { kernel: &mut kernel, initrd: &mut initrd, cmdline: &cmdline, acpi: &acpi };
    let entry = boot::load(&built.ram, parts).map_err(|e| {
        Fault::new("bad-image", "booting the kernel", e.to_string(), "check the image, or give the VM more memory")
    })?;
    let mut features = Vec::new();
    for (i, vcpu) in built.vcpus.iter().enumerate() {
        let cpuid = profile::guest_cpuid(&host.supported, host.profile, i as u8, vcpus, host.tsc_deadline);
        features = host.features(&cpuid);
        let state = crate::state::VcpuState { cpuid, ..Default::default() };
        cpu_state::load_cpuid(vcpu, &state).map_err(state_fault("CPUID"))?;
        if host.profile == Profile::Hardware {
            let (index, data) = MSR_MTRR_DEF_TYPE;
            let entries = [kvm_msr_entry { index, data, ..Default::default() }];
            let msrs = kvm_bindings::Msrs::from_entries(&entries)
                .map_err(|e| fault("internal", "MSR list")(std::io::Error::other(format!("{e:?}"))))?;
            vcpu.set_msrs(&msrs).map_err(kvm_fault("KVM_SET_MSRS"))?;
        }
    }
    let first = &built.vcpus[0];
    let sregs = boot::boot_sregs(first.get_sregs().map_err(kvm_fault("KVM_GET_SREGS"))?);
    first.set_sregs(&sregs).map_err(kvm_fault("KVM_SET_SREGS"))?;
    first.set_regs(&boot::boot_regs(entry)).map_err(kvm_fault("KVM_SET_REGS"))?;
    Ok(Machine {
        engine: EngineKind::Kvm,
        profile: host.profile.name().to_owned(),
        engine_version: ENGINE_VERSION.to_owned(),
        cpu_model: "host".to_owned(),
        features,
        tsc_khz,
        vcpus,
        cmdline,
        kernel_hash: setup.kernel_hash.clone(),
        initrd_hash: setup.initrd_hash.clone(),
    })
}

/// Loads a saved machine: vCPUs, in-kernel devices, events, then our devices.
fn load(built: &Built, state: &MachineState, machine: &Machine, host: &Host, xsave_bytes: usize) -> Result<(), Fault> {
    let what = "loading the machine state";
    for (vcpu, s) in built.vcpus.iter().zip(&state.vcpus) {
        cpu_state::load_vcpu(vcpu, s, xsave_bytes, state.vm.host_tsc).map_err(state_fault(what))?;
    }
    cpu_state::load_vm(&built.vm, &state.vm).map_err(state_fault(what))?;
    for (vcpu, s) in built.vcpus.iter().zip(&state.vcpus) {
        cpu_state::load_events(vcpu, s).map_err(state_fault(what))?;
        cpu_state::was_stopped(vcpu);
    }
    let corrupt = |why: String| Fault::new("corrupt", "the checkpoint's device state", why, "restore another checkpoint");
    if state.devices.slots.len() != built.bus.slots.len() {
        return Err(corrupt(format!("{} devices, {} are here", state.devices.slots.len(), built.bus.slots.len())));
    }
    for (slot, s) in built.bus.slots.iter().zip(&state.devices.slots) {
        slot.load(s).map_err(corrupt)?;
    }
    built.bus.restore_pm1_enable(state.devices.pm1_enable);
    tracing::debug!(profile = host.profile.name(), vcpus = machine.vcpus, "machine state loaded");
    Ok(())
}

impl Engine for KvmEngine {
    fn kind(&self) -> EngineKind {
        EngineKind::Kvm
    }
    fn machine(&self) -> Machine {
        self.machine.clone()
    }
    fn run(&mut self) -> Result<(), Fault> {
        if let Some(fault) = self.control.exited() {
            return Err(fault);
        }
        if !self.lease.may_run() {
            let next = "send a lease for this run, or restore the session where it is owned now";
            return Err(Fault::new("lease-ended", "starting the vCPUs", "the lease of this run has ended", next));
        }
        if self.has_run {
            self.vcpus.iter().for_each(|v| cpu_state::was_stopped(&lock(v)));
        }
        self.has_run = true;
        self.resume_devices();
        self.control.run();
        Ok(())
    }
    fn pause(&mut self, bound: Duration) -> Result<(), Fault> {
        if let Some(fault) = self.control.exited() {
            return Err(fault);
        }
        let deadline = Instant::now() + bound;
        let late =
            |what: &str| Fault::new("timeout", "pausing the VM", format!("{what} within {bound:?}"), "the VM runs on; try again");
        if !self.control.pause(bound) {
            return Err(late("a vCPU did not stop"));
        }
        if let Some(slot) = self.bus.slots.iter().find(|s| !s.pause(deadline)) {
            let name = slot.with_core(|c| c.device.name());
            self.resume_devices();
            self.control.run();
            return Err(late(&format!("a {name} request did not finish")));
        }
        self.control.exited().map_or(Ok(()), Err)
    }
    fn save_state(&mut self) -> Result<Vec<u8>, Fault> {
        if !self.control.is_paused() {
            return Err(Fault::new("not-ready", "saving the machine state", "the VM is not paused", "pause it first"));
        }
        let what = "saving the machine state";
        let mut vcpus = Vec::new();
        for vcpu in &self.vcpus {
            let state = cpu_state::save_vcpu(&lock(vcpu), self.xsave_bytes, &self.msr_indices);
            vcpus.push(state.map_err(state_fault(what))?);
        }
        let vm = cpu_state::save_vm(&self.vm).map_err(state_fault(what))?;
        let devices = DeviceStates {
            serial: self.bus.com1.save(),
            pm1_enable: self.bus.pm1_enable(),
            slots: self.bus.slots.iter().map(|s| s.save()).collect(),
        };
        let bytes = MachineState { vcpus, vm, devices }.encode();
        bytes.map_err(|e| Fault::new("internal", what, e.to_string(), "report this"))
    }
    fn connect_port(&mut self) -> Result<UnixStream, Fault> {
        let slot = &self.bus.slots[CONSOLE_SLOT];
        let stream = slot.with_core(|c| c.device.connect_port());
        slot.wake();
        let stream = stream.unwrap_or_else(|| Err(std::io::Error::other("this device has no port")));
        stream.map_err(fault("internal", "connecting the guest port"))
    }
    fn stopper(&self) -> Arc<dyn Stopper> {
        Arc::new(VcpuStopper(self.control.clone()))
    }
    fn exited(&mut self) -> Option<EngineExit> {
        self.control.exited().map(|fault| EngineExit { fault })
    }
    fn exit_fd(&self) -> RawFd {
        self.control.exit_event.as_raw_fd()
    }
    fn counters(&self) -> (u64, Option<u64>) {
        (self.control.assists.load(std::sync::atomic::Ordering::Relaxed), self.control.first_exit_us())
    }
    fn kill(&mut self) {
        self.control.end();
        self.bus.slots.iter().for_each(|s| s.end());
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread of the VM had panicked");
            }
        }
        self.control.forget_vcpus();
    }
}

impl Drop for KvmEngine {
    fn drop(&mut self) {
        self.kill();
    }
}

struct VcpuStopper(Arc<Control>);

impl Stopper for VcpuStopper {
    fn freeze(&self) {
        self.0.freeze();
    }
    fn thaw(&self) {
        self.0.thaw();
    }
}
