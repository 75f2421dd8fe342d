//! The qemu engine: a supervised, jailed `qemu-system-x86_64` with TCG, for hosts without hardware virtualization.
//!
//! Unlike the seam's wording, the guest does not see its port close between two connections of the node: it sees the
//! next generation's marker.

mod command;
mod console;
mod process;
mod qmp;
mod registered;

pub use process::find;

use crate::starter::{Ask, EngineAsk, Starter};
use crate::tsc;
use command::{CPU_MODEL, Numbers};
use console::{panic, tail};
use ks_proto::control::Fault;
use ks_proto::manifest::{EngineKind, Machine};
use ks_vmm_core::engine::{Engine, EngineExit, EngineSetup, Stopper};
use ks_vmm_core::lease::LeaseGate;
use process::{Ended, Process};
use qmp::{QemuVersion, Qmp, QmpError};
use serde_json::json;
use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// With `1` in this variable memory is not tracked, as on a host that cannot: for measuring and testing the fallback.
pub const HASH_SCAN: &str = "KS_VMM_HASH_SCAN";

/// A QMP command that is not a pause must be answered within this; a busy two-core host needs seconds at the worst.
const COMMAND: Duration = Duration::from_secs(20);
/// QEMU must be ready for commands within this.
const READY: Duration = Duration::from_secs(30);
/// Turns of QEMU's main loop without change after which the guest port counts as settled, and turns at most.
const SETTLED_TURNS: usize = 3;
const SETTLE_TURNS_MAX: usize = 2000;
/// The largest device state: 64 MiB (some 60 KB are usual).
const STATE_BYTES_MAX: u64 = 64 << 20;
/// Where firmware may lie; the one that QEMU finds first is the one it uses.
const FIRMWARE: [&str; 2] = ["/usr/share/qemu/bios-microvm.bin", "/usr/share/seabios/bios-microvm.bin"];

/// See [`Settings::on_jail`].
pub type OnJail = Arc<dyn Fn(Option<&[String]>, &[String]) + Send + Sync>;

/// What the engine needs of the process around it.
pub struct Settings {
    /// Starts QEMU.
    pub starter: Mutex<Starter>,
    /// The preload shim was found.
    pub shim: bool,
    /// /dev/userfaultfd, if it could be opened.
    pub userfaultfd: Option<OwnedFd>,
    /// Told the words of QEMU's jail (None: the guest runs in this process) and those of the VM's limits.
    pub on_jail: OnJail,
}

/// One VM under QEMU.
pub struct QemuEngine {
    process: Process,
    qmp: Qmp,
    machine: Machine,
    lease: Arc<LeaseGate>,
    run_dir: PathBuf,
    // One connection for the VM's life: QEMU loses its place in a transfer when its port's socket closes or is not there
    // when a state with one in flight is loaded. Generation markers tell one client's bytes from the next's.
    port: UnixStream,
    console: Option<std::thread::JoinHandle<()>>,
    stopper: Arc<dyn Stopper>,
    exit: Option<EngineExit>,
    // Invariant: true between a pause that returned Ok and the next run.
    paused: bool,
    // Invariant: true between a save and the next run; QEMU has let go of its disk then.
    saved: bool,
}

fn io_fault(what: &str) -> impl Fn(std::io::Error) -> Fault + '_ {
    move |e| Fault::new("internal", what, e.to_string(), "free memory or descriptors on this host")
}

fn pair() -> Result<(UnixStream, UnixStream), Fault> {
    UnixStream::pair().map_err(io_fault("make a socket pair"))
}

/// A copy of a file in memory, which a jailed child of any uid can open by /proc/self/fd.
fn in_memory(name: &str, from: &OwnedFd) -> Result<OwnedFd, Fault> {
    let bad = io_fault("copy the kernel for QEMU");
    let mut source = File::from(from.try_clone().map_err(&bad)?);
    source.rewind().map_err(&bad)?;
    let fd = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC).map_err(|e| bad(e.into()))?;
    let mut copy = File::from(fd);
    std::io::copy(&mut source, &mut copy).map_err(&bad)?;
    Ok(copy.into())
}

/// Names the firmware that QEMU uses.
pub fn firmware_note() -> String {
    for path in FIRMWARE {
        if let Ok(bytes) = std::fs::read(path) {
            let hash = blake3::hash(&bytes).to_hex();
            return format!("firmware bios-microvm.bin {}", &hash[..16]);
        }
    }
    "firmware unknown".to_owned()
}

fn version_line(v: &QemuVersion, firmware: &str) -> String {
    let package = if v.package.is_empty() { String::new() } else { format!(" ({})", v.package) };
    format!("QEMU {}{package}, {firmware}", v.number)
}

/// Refuses a state that another machine saved.
fn check_machine(saved: &Machine, ours: &Machine) -> Result<(), Fault> {
    let no = |why: String, next: &str| Err(Fault::new("incompatible", "restore this checkpoint", why, next));
    if saved.engine != ours.engine || saved.profile != ours.profile {
        let why = format!("it was saved under {}/{}, this is {}/{}", saved.engine, saved.profile, ours.engine, ours.profile);
        return no(why, "restore it on a node with that engine");
    }
    if saved.engine_version != ours.engine_version {
        let why = format!("it was saved under {:?}, here runs {:?}", saved.engine_version, ours.engine_version);
        return no(why, "restore it on a node with the same QEMU, or install that version here");
    }
    if saved.cpu_model != ours.cpu_model || saved.vcpus != ours.vcpus {
        let why =
            format!("it has {} CPUs of model {:?}, not {} of {:?}", saved.vcpus, saved.cpu_model, ours.vcpus, ours.cpu_model);
        return no(why, "restore it with the shape that it was saved with");
    }
    if !tsc::same(saved.tsc_khz, ours.tsc_khz) {
        let why = format!("its clock counts {} kHz, this host's TSC {} kHz", saved.tsc_khz, ours.tsc_khz);
        return no(why, "restore it on a host with the same TSC frequency");
    }
    Ok(())
}

/// Both ends of everything that connects us with the child.
struct Wires {
    qmp: UnixStream,
    console: UnixStream,
    disk: UnixStream,
    port: UnixStream,
    child: Vec<OwnedFd>,
    numbers: Numbers,
}

fn wires(setup: &EngineSetup) -> Result<Wires, Fault> {
    let (qmp, qmp_child) = pair()?;
    let (console, console_child) = pair()?;
    let (disk, disk_child) = pair()?;
    let (port, port_child) = pair()?;
    let memory = setup.memory.fd().try_clone_to_owned().map_err(io_fault("share guest memory"))?;
    let mut child: Vec<OwnedFd> = vec![memory, qmp_child.into(), console_child.into(), disk_child.into(), port_child.into()];
    let mut numbers = Numbers { memory: 3, qmp: 4, console: 5, disk: 6, port: 7, boot: None };
    if setup.restore.is_none() {
        child.push(in_memory("ks-kernel", &setup.kernel)?);
        child.push(in_memory("ks-initrd", &setup.initrd)?);
        numbers.boot = Some((8, 9));
    }
    Ok(Wires { qmp, console, disk, port, child, numbers })
}

impl QemuEngine {
    /// Starts QEMU, serves its disk, takes hold of its memory, and loads the state if there is one. The VM is stopped.
    pub fn new(setup: EngineSetup, settings: &Settings, warn: Arc<dyn Fn(String) + Send + Sync>) -> Result<Self, Fault> {
        let tsc_khz = command::host_tsc_khz();
        let cmdline = match &setup.restore {
            Some((saved, _)) => saved.cmdline.clone(),
            None => command::kernel_cmdline(&setup.config.cmdline, tsc_khz),
        };
        let mut wires = wires(&setup)?;
        let args = command::arguments(&setup, &wires.numbers, &cmdline);
        let device = settings.userfaultfd.as_ref().and_then(|d| d.try_clone().ok());
        let hook = registered::Hook::new(settings.shim, device, wires.numbers.memory, &setup.memory, &mut wires.child)?;
        let log = File::create(setup.run_dir.join("qemu.log")).map_err(io_fault("make qemu.log"))?;
        let frozen = Arc::new(AtomicBool::new(false));
        let console = console::start(wires.console, &setup.run_dir.join("console.log")).map_err(io_fault("read the console"))?;
        let disk_warn = warn.clone();
        let on_fault = Arc::new(move |why| disk_warn(format!("the guest's disk: {why}")));
        crate::nbd::serve(wires.disk, setup.disk.clone(), setup.lease.clone(), on_fault).map_err(io_fault("serve the disk"))?;
        let ask = Ask {
            memory_bytes: setup.config.memory_bytes,
            vcpus: setup.config.vcpus,
            engine: Some(EngineAsk { args, env: hook.env.clone(), shim: settings.shim }),
        };
        let fds: Vec<_> = std::iter::once(log.as_fd()).chain(wires.child.iter().map(AsFd::as_fd)).collect();
        let begun = settings.starter.lock().unwrap_or_else(PoisonError::into_inner).ask(&ask, &fds)?;
        drop(wires.child);
        let Some(started) = begun.engine else {
            return Err(Fault::new("internal", "start QEMU", "the starter started nothing", "report this"));
        };
        let words = [started.words, vec!["qemu-sandbox".to_owned()]].concat();
        (settings.on_jail)(Some(&words), &begun.cgroup);
        let process = Process::new(started.child, frozen.clone());
        let stopper = process.stopper().map_err(io_fault("hold QEMU's pidfd"))?;
        let machine = Machine {
            engine: EngineKind::Qemu,
            profile: "tcg".to_owned(),
            engine_version: started.firmware,
            cpu_model: CPU_MODEL.to_owned(),
            features: Vec::new(),
            tsc_khz,
            vcpus: setup.config.vcpus,
            cmdline,
            kernel_hash: setup.kernel_hash.clone(),
            initrd_hash: setup.initrd_hash.clone(),
        };
        let mut engine = Self {
            process,
            qmp: Qmp::new(wires.qmp, frozen),
            machine,
            lease: setup.lease.clone(),
            run_dir: setup.run_dir.clone(),
            port: wires.port,
            console: Some(console),
            stopper,
            exit: None,
            paused: true,
            saved: false,
        };
        hook.attach(&setup.memory, engine.process.pidfd(), started.pagemap, &*warn)?;
        engine.prepare(setup.restore)?;
        Ok(engine)
    }

    fn prepare(&mut self, restore: Option<(Machine, Vec<u8>)>) -> Result<(), Fault> {
        let version = self.qmp.handshake(READY).map_err(|e| self.fault("start QEMU", e))?;
        // Until now it names the firmware.
        self.machine.engine_version = version_line(&version, &self.machine.engine_version);
        if let Some((saved, _)) = &restore {
            check_machine(saved, &self.machine)?;
        }
        let capabilities = json!({ "capabilities": [
            { "capability": "x-ignore-shared", "state": true },
            { "capability": "events", "state": true },
        ] });
        self.command("migrate-set-capabilities", capabilities)?;
        match restore {
            Some((saved, state)) => {
                // The frequency that the guest counts with stays the one that it was booted with.
                self.machine.tsc_khz = saved.tsc_khz;
                self.load_state(&state)
            }
            None => Ok(()),
        }
    }

    fn command(&mut self, name: &str, arguments: serde_json::Value) -> Result<serde_json::Value, Fault> {
        self.qmp.execute(name, arguments, COMMAND).map_err(|e| self.fault("control QEMU", e))
    }

    fn load_state(&mut self, state: &[u8]) -> Result<(), Fault> {
        let bad = io_fault("hand the device state to QEMU");
        let fd = rustix::fs::memfd_create("ks-state", rustix::fs::MemfdFlags::CLOEXEC).map_err(|e| bad(e.into()))?;
        std::io::Write::write_all(&mut File::from(fd.try_clone().map_err(&bad)?), state).map_err(&bad)?;
        rustix::fs::seek(&fd, rustix::fs::SeekFrom::Start(0)).map_err(|e| bad(e.into()))?;
        self.give_fd(fd)?;
        self.command("migrate-incoming", json!({ "uri": "fd:ks-state" }))?;
        self.migration_end("load the device state")
    }

    fn give_fd(&mut self, fd: OwnedFd) -> Result<(), Fault> {
        let given = self.qmp.execute_with_fd("getfd", json!({ "fdname": "ks-state" }), Some(fd.as_fd()), COMMAND);
        given.map(drop).map_err(|e| self.fault("hand a descriptor to QEMU", e))
    }

    fn migration_end(&mut self, what: &str) -> Result<(), Fault> {
        let finished = self.qmp.wait_event(what, COMMAND, |e| {
            e.name == "MIGRATION" && matches!(e.data["status"].as_str(), Some("completed" | "failed" | "cancelled"))
        });
        let event = finished.map_err(|e| self.fault(what, e))?;
        if event.data["status"] == "completed" {
            return Ok(());
        }
        let why = format!("QEMU reports {}: {}", event.data["status"], tail(&self.run_dir.join("qemu.log")));
        Err(Fault::new("corrupt", what, why, "restore an earlier checkpoint"))
    }

    /// Waits until QEMU says that it is in one of `states`.
    fn wait_status(&mut self, states: &[&str]) -> Result<(), Fault> {
        let deadline = Instant::now() + COMMAND;
        loop {
            let status = self.command("query-status", json!({}))?;
            if status["status"].as_str().is_some_and(|s| states.contains(&s)) {
                return Ok(());
            }
            if Instant::now() > deadline {
                let why = format!("QEMU stays in {}", status["status"]);
                return Err(Fault::new("timeout", "control QEMU", why, "stop this VM and restore its last checkpoint"));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn fault(&mut self, what: &str, e: QmpError) -> Fault {
        if matches!(e, QmpError::Closed { .. }) {
            self.await_death();
        }
        if let Some(exit) = self.exited() {
            return exit.fault;
        }
        let next = "stop this VM and restore its last checkpoint";
        match e {
            QmpError::Silent { .. } => {
                let why = format!("{e}; the process {} is {}", self.process.pid(), self.process.state_word());
                Fault::new("timeout", what, why, next)
            }
            QmpError::Refused { .. } | QmpError::Closed { .. } | QmpError::Garbage(_) => {
                Fault::new("internal", what, format!("{e}; {}", tail(&self.run_dir.join("qemu.log"))), next)
            }
        }
    }

    /// After a stop QEMU still moves what lies in the port's socket into guest memory, as far as the guest has room.
    /// Waits until that has ended; nobody adds bytes meanwhile.
    fn settle_port(&mut self) -> Result<(), Fault> {
        let mut last = usize::MAX;
        let mut same = 0;
        for _ in 0..SETTLE_TURNS_MAX {
            let unread = crate::sys::unread(&self.port).map_err(io_fault("look at the guest port"))?;
            same = if unread == last { same + 1 } else { 0 };
            if unread == 0 || same >= SETTLED_TURNS {
                return Ok(());
            }
            last = unread;
            // Each answer is at least one turn of QEMU's main loop.
            self.command("query-status", json!({}))?;
        }
        let why = "its port does not settle while it is stopped";
        let fault = Fault::new("timeout", "pause the guest", why, "try again");
        self.run()?;
        Err(fault)
    }

    /// QMP is closed: the process ends in the next moments.
    fn await_death(&mut self) {
        let mut fds = [rustix::event::PollFd::new(self.process.pidfd(), rustix::event::PollFlags::IN)];
        let _ = rustix::event::poll(&mut fds, Some(&rustix::event::Timespec { tv_sec: 2, tv_nsec: 0 }));
    }

    fn why_ended(&mut self, ended: Ended) -> Fault {
        let words = self.qmp.last_words();
        // QEMU's end of the console is closed: the copying ends by itself.
        if let Some(Err(_)) = self.console.take().map(std::thread::JoinHandle::join) {
            tracing::warn!("the console thread panicked");
        }
        let log = self.run_dir.join("console.log");
        let (console, panicked) = (tail(&log), panic(&log));
        let qemu = tail(&self.run_dir.join("qemu.log"));
        let reason = words.iter().rev().find(|e| e.name == "SHUTDOWN").and_then(|e| e.data["reason"].as_str().map(str::to_owned));
        let shown = if console.is_empty() { String::new() } else { format!("; its console ended with: {console}") };
        let next = "restore its last checkpoint";
        match (reason.as_deref(), ended) {
            (Some("guest-reset" | "guest-panic"), _) if panicked.is_some() => {
                Fault::new("guest-panic", "run the guest", panicked.unwrap_or_default(), next)
            }
            (Some("guest-shutdown"), _) => Fault::new("guest-poweroff", "run the guest", format!("it powered off{shown}"), next),
            (Some("guest-reset"), _) => Fault::new("guest-reboot", "run the guest", format!("it rebooted{shown}"), next),
            (_, ended) => {
                let how = match ended {
                    Ended::Code(c) => format!("QEMU exited with {c}"),
                    Ended::Signal(s) => format!("QEMU was killed by signal {s}"),
                };
                let said = if qemu.is_empty() { String::new() } else { format!("; it said: {qemu}") };
                Fault::new("engine-died", "run the guest", format!("{how}{said}{shown}"), next)
            }
        }
    }
}

impl Engine for QemuEngine {
    fn kind(&self) -> EngineKind {
        EngineKind::Qemu
    }
    fn machine(&self) -> Machine {
        self.machine.clone()
    }
    fn run(&mut self) -> Result<(), Fault> {
        if !self.lease.may_run() {
            return Err(Fault::new("lease-ended", "run the guest", "the lease of this run has ended", "renew it"));
        }
        self.command("cont", json!({}))?;
        (self.paused, self.saved) = (false, false);
        Ok(())
    }
    fn pause(&mut self, bound: Duration) -> Result<(), Fault> {
        match self.qmp.execute("stop", json!({}), bound) {
            Ok(_) => {
                self.paused = true;
                self.settle_port()
            }
            Err(e) => {
                if matches!(e, QmpError::Silent { .. }) {
                    // Carried out after the stop, whenever that ends: the guest goes on.
                    let _ = self.qmp.send("cont", json!({}), None);
                }
                Err(self.fault("pause the guest", e))
            }
        }
    }
    fn save_state(&mut self) -> Result<Vec<u8>, Fault> {
        let what = "save the device state";
        if !self.paused {
            return Err(Fault::new("internal", what, "the guest is not paused", "report this"));
        }
        if self.saved {
            // A second save in one pause: QEMU must take its disk back first, and only running does that.
            self.command("cont", json!({}))?;
            self.command("stop", json!({}))?;
        }
        self.saved = true;
        let bad = io_fault(what);
        let fd = rustix::fs::memfd_create("ks-state", rustix::fs::MemfdFlags::CLOEXEC).map_err(|e| bad(e.into()))?;
        let mut file = File::from(fd.try_clone().map_err(&bad)?);
        self.qmp.forget("MIGRATION");
        self.give_fd(fd)?;
        self.command("migrate", json!({ "uri": "fd:ks-state" }))?;
        self.migration_end(what)?;
        self.wait_status(&["postmigrate"])?;
        file.rewind().map_err(&bad)?;
        let mut state = Vec::new();
        let n = file.take(STATE_BYTES_MAX + 1).read_to_end(&mut state).map_err(&bad)?;
        if n == 0 || n as u64 > STATE_BYTES_MAX {
            return Err(Fault::new("internal", what, format!("QEMU wrote {n} bytes"), "look at qemu.log"));
        }
        Ok(state)
    }
    fn connect_port(&mut self) -> Result<UnixStream, Fault> {
        self.port.try_clone().map_err(io_fault("connect the guest port"))
    }
    fn stopper(&self) -> Arc<dyn Stopper> {
        self.stopper.clone()
    }
    fn exited(&mut self) -> Option<EngineExit> {
        if self.exit.is_none()
            && let Some(ended) = self.process.ended()
        {
            self.exit = Some(EngineExit { fault: self.why_ended(ended) });
        }
        self.exit.clone()
    }
    fn exit_fd(&self) -> RawFd {
        self.process.pidfd().as_raw_fd()
    }
    fn kill(&mut self) {
        self.process.kill();
    }
}
