//! The vCPU threads: KVM_RUN while the run state and the lease allow it, exits to the bus, assists on `soft` hosts.
//!
//! States of one thread (kept in [`Control`] under one lock):
//!
//! ```text
//! parked --run wanted, not frozen, lease open--> in guest --exit handled--> in guest
//! in guest --run no longer wanted, frozen, or lease closed; pending I/O completed--> parked
//! any --end wanted, or the guest ended--> gone
//! ```

use crate::assist::{self, Assist, xsave as xs};
use crate::bus::{Bus, Ending};
use crate::lock;
use crate::profile::Profile;
use crate::sys::kick::{ImmediateExit, ThreadId};
use crate::sys::ram::Ram;
use crate::sys::{run, xsave};
use ks_proto::control::Fault;
use ks_vmm_core::confine;
use ks_vmm_core::lease::LeaseGate;
use kvm_ioctls::{VcpuExit, VcpuFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

/// A parked thread looks at a closed lease this often.
const LEASE_POLL: Duration = Duration::from_millis(5);
/// KVM_INTERNAL_ERROR_EMULATION.
const SUBERROR_EMULATION: u32 = 1;
/// Number of XCR0 among the extended control registers.
const XCR0: u32 = 0;

/// What all vCPUs of one VM share.
pub struct Control {
    state: Mutex<State>,
    moved: Condvar,
    // Mirrors "something in `state` wants the threads out", read before each KVM_RUN without the lock.
    stop: AtomicBool,
    kickers: Mutex<Vec<(Arc<ImmediateExit>, Option<ThreadId>)>>,
    /// Instructions done for the guest.
    pub assists: AtomicU64,
    // Microseconds from `run` to the first exit that the guest caused; u64::MAX until then.
    first_exit_us: AtomicU64,
    /// Readable once `exited` is some.
    pub exit_event: EventFd,
}

#[derive(Default)]
struct State {
    run: bool,
    frozen: bool,
    end: bool,
    vcpus: usize,
    parked: usize,
    gone: usize,
    run_since: Option<Instant>,
    exited: Option<Fault>,
}

impl Control {
    /// For `vcpus` threads, all of them parked when they start.
    pub fn new(vcpus: usize) -> std::io::Result<Self> {
        Ok(Self {
            state: Mutex::new(State { vcpus, ..State::default() }),
            moved: Condvar::new(),
            stop: AtomicBool::new(true),
            kickers: Mutex::new(Vec::new()),
            assists: AtomicU64::new(0),
            first_exit_us: AtomicU64::new(u64::MAX),
            exit_event: EventFd::new(libc::EFD_NONBLOCK)?,
        })
    }
    fn change(&self, f: impl FnOnce(&mut State)) -> MutexGuard<'_, State> {
        let mut state = lock(&self.state);
        f(&mut state);
        let stop = !state.run || state.frozen || state.end;
        self.stop.store(stop, Ordering::SeqCst);
        if stop {
            // Under the state's lock: a thread that has just left the parking clears its byte there, before this.
            for (exit, thread) in lock(&self.kickers).iter() {
                exit.set(true);
                if let Some(thread) = thread {
                    thread.interrupt();
                }
            }
        }
        self.moved.notify_all();
        state
    }
    /// Lets the threads into the guest.
    pub fn run(&self) {
        self.first_exit_us.store(u64::MAX, Ordering::SeqCst);
        drop(self.change(|s| {
            s.run = true;
            s.run_since = Some(Instant::now());
        }));
    }
    /// Gets them out and waits. False after `bound`: some thread is still busy; they are let go again.
    pub fn pause(&self, bound: Duration) -> bool {
        let deadline = Instant::now() + bound;
        let state = self.change(|s| s.run = false);
        let (state, out) = self.wait_parked(state, deadline);
        drop(state);
        if !out {
            drop(self.change(|s| s.run = true));
        }
        out
    }
    fn wait_parked<'a>(&'a self, mut state: MutexGuard<'a, State>, deadline: Instant) -> (MutexGuard<'a, State>, bool) {
        while state.parked + state.gone < state.vcpus {
            let left = deadline.saturating_duration_since(Instant::now());
            if left == Duration::ZERO {
                return (state, false);
            }
            state = self.moved.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        (state, true)
    }
    /// Stops them until [`Control::thaw`], whatever else is wanted; returns when none is in the guest.
    pub fn freeze(&self) {
        let mut state = self.change(|s| s.frozen = true);
        while state.parked + state.gone < state.vcpus {
            state = self.moved.wait_timeout(state, LEASE_POLL).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
    /// Undoes `freeze`.
    pub fn thaw(&self) {
        drop(self.change(|s| s.frozen = false));
    }
    /// Makes the threads end.
    pub fn end(&self) {
        drop(self.change(|s| s.end = true));
    }
    /// Forgets the run pages, before the vCPUs are closed and after the threads were joined.
    pub fn forget_vcpus(&self) {
        lock(&self.kickers).clear();
    }
    /// The machine is gone: the first reason counts.
    pub fn exit(&self, fault: Fault) {
        drop(self.change(|s| {
            s.end = true;
            s.exited.get_or_insert(fault);
        }));
        let _ = self.exit_event.write(1);
    }
    /// Why it is gone.
    pub fn exited(&self) -> Option<Fault> {
        lock(&self.state).exited.clone()
    }
    /// True if no thread is in the guest and none is wanted there.
    pub fn is_paused(&self) -> bool {
        let s = lock(&self.state);
        !s.run && s.parked + s.gone == s.vcpus
    }
    /// Microseconds from the last `run` to the first exit that the guest caused.
    pub fn first_exit_us(&self) -> Option<u64> {
        Some(self.first_exit_us.load(Ordering::SeqCst)).filter(|v| *v != u64::MAX)
    }

    fn guest_caused_exit(&self) {
        if self.first_exit_us.load(Ordering::Relaxed) == u64::MAX
            && let Some(since) = lock(&self.state).run_since
        {
            self.first_exit_us.store(since.elapsed().as_micros() as u64, Ordering::SeqCst);
        }
    }
}

/// What a vCPU thread works with.
pub struct Vcpu {
    /// Number, 0 is the boot CPU.
    pub index: usize,
    /// Locked while in the guest; the engine takes it when parked.
    pub fd: Arc<Mutex<VcpuFd>>,
    /// Shared by all.
    pub control: Arc<Control>,
    /// Devices.
    pub bus: Arc<Bus>,
    /// Guest memory; also keeps the slots alive.
    pub ram: Arc<Ram>,
    /// Checked before each KVM_RUN.
    pub lease: Arc<LeaseGate>,
    /// Assists are for `soft` only.
    pub profile: Profile,
    /// Where state components lie on this host.
    pub layout: Arc<xs::Layout>,
    /// Length of the XSAVE area.
    pub xsave_bytes: usize,
}

/// What an exit asks for.
enum Outcome {
    /// Into the guest again.
    Again,
    /// KVM_RUN was interrupted.
    Interrupted,
    /// The machine ends.
    End(Fault),
}

impl Vcpu {
    /// Starts the thread, parked.
    pub fn spawn(self) -> std::io::Result<std::thread::JoinHandle<()>> {
        crate::sys::kick::install();
        let exit = Arc::new(ImmediateExit::of(&mut lock(&self.fd)));
        lock(&self.control.kickers).push((exit.clone(), None));
        let slot = self.index;
        std::thread::Builder::new().name(format!("ks-vcpu{slot}")).spawn(move || {
            confine::enter(confine::Kind::Vcpu);
            if let Some(entry) = lock(&self.control.kickers).get_mut(slot) {
                entry.1 = Some(ThreadId::current());
            }
            self.work(&exit);
            // From here on nobody may signal this thread: it is about to end.
            if let Some(entry) = lock(&self.control.kickers).get_mut(slot) {
                entry.1 = None;
            }
            let mut state = lock(&self.control.state);
            state.gone += 1;
            drop(state);
            self.control.moved.notify_all();
        })
    }

    fn work(&self, exit: &ImmediateExit) {
        while self.park(exit) {
            let mut fd = lock(&self.fd);
            let ended = loop {
                let stop = self.control.stop.load(Ordering::SeqCst) || !self.lease.may_run();
                if stop {
                    // Completes what the last exit began (a read's result reaches the register), runs no instruction.
                    exit.set(true);
                }
                match self.enter(&mut fd) {
                    Outcome::Again => {}
                    Outcome::Interrupted if stop => break None,
                    Outcome::Interrupted => {}
                    Outcome::End(fault) => break Some(fault),
                }
            };
            drop(fd);
            if let Some(fault) = ended {
                self.control.exit(fault);
                self.bus.machine_ended();
                return;
            }
        }
    }

    /// Waits until this thread may go into the guest. False: it ends.
    fn park(&self, exit: &ImmediateExit) -> bool {
        let mut state = lock(&self.control.state);
        state.parked += 1;
        self.control.moved.notify_all();
        loop {
            if state.end {
                state.parked -= 1;
                return false;
            }
            let wanted = state.run && !state.frozen;
            if wanted && self.lease.may_run() {
                state.parked -= 1;
                exit.set(false);
                return true;
            }
            // Only a closed lease changes without notice.
            let wait = if wanted { LEASE_POLL } else { Duration::from_secs(3600) };
            state = self.control.moved.wait_timeout(state, wait).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn enter(&self, fd: &mut VcpuFd) -> Outcome {
        let exit = fd.run();
        if exit.is_ok() {
            self.control.guest_caused_exit();
        }
        match exit {
            Ok(VcpuExit::IoOut(port, data)) => match self.bus.port_write(port, data) {
                None => Outcome::Again,
                Some(ending) => Outcome::End(self.ended(ending)),
            },
            Ok(VcpuExit::IoIn(port, data)) => {
                self.bus.port_read(port, data);
                Outcome::Again
            }
            Ok(VcpuExit::MmioRead(addr, data)) => {
                self.bus.mmio_read(addr, data);
                Outcome::Again
            }
            Ok(VcpuExit::MmioWrite(addr, data)) => {
                self.bus.mmio_write(addr, data);
                Outcome::Again
            }
            Ok(VcpuExit::Hlt | VcpuExit::Intr | VcpuExit::IrqWindowOpen) => Outcome::Again,
            Ok(VcpuExit::InternalError) => {
                let suberror = run::internal_suberror(fd);
                if suberror == SUBERROR_EMULATION && self.profile == Profile::Soft {
                    self.assist(fd).map_or_else(|f| Outcome::End(*f), |()| Outcome::Again)
                } else {
                    let rip = fd.get_regs().map_or(0, |r| r.rip);
                    Outcome::End(engine_fault(format!("KVM internal error {suberror} at RIP {rip:#x}")))
                }
            }
            Ok(VcpuExit::Shutdown) => Outcome::End(self.ended(Ending::Reset)),
            Ok(VcpuExit::SystemEvent(kind, _)) => {
                let ending = if kind == kvm_bindings::KVM_SYSTEM_EVENT_SHUTDOWN { Ending::PowerOff } else { Ending::Reset };
                Outcome::End(self.ended(ending))
            }
            Ok(other) => Outcome::End(engine_fault(format!("unexpected KVM exit {other:?}"))),
            Err(e) if matches!(e.errno(), libc::EINTR | libc::EAGAIN) => Outcome::Interrupted,
            Err(e) => Outcome::End(engine_fault(format!("KVM_RUN of vCPU {}: {e}", self.index))),
        }
    }

    fn ended(&self, ending: Ending) -> Fault {
        let next = "read console.log of this run; restore the last checkpoint to go on";
        match (self.bus.com1.log().panic_line(), ending) {
            (Some(line), _) => Fault::new("guest-panic", "the guest's kernel", line, next),
            (None, Ending::Reset) => Fault::new("guest-reset", "the guest", "it reset itself (a reboot or a triple fault)", next),
            (None, Ending::PowerOff) => Fault::new("guest-off", "the guest", "it powered off", next),
        }
    }

    /// Does the instruction at RIP for the guest.
    fn assist(&self, fd: &mut VcpuFd) -> Result<(), Box<Fault>> {
        self.control.assists.fetch_add(1, Ordering::Relaxed);
        let failed = |e: String| Box::new(engine_fault(e));
        let kvm = |what: &'static str| move |e: kvm_ioctls::Error| Box::new(engine_fault(format!("{what}: {e}")));
        let mut regs = fd.get_regs().map_err(kvm("KVM_GET_REGS"))?;
        let sregs = fd.get_sregs().map_err(kvm("KVM_GET_SREGS"))?;
        let base = if sregs.cs.l != 0 { 0 } else { sregs.cs.base };
        let mut code = [0; assist::INSTRUCTION_BYTES_MAX];
        let got = self.read_linear(fd, base.wrapping_add(regs.rip), &mut code);
        let step = assist::decode(&code[..got], &regs, &sregs).map_err(|e| failed(e.to_string()))?;
        match step.assist {
            Assist::Skip | Assist::Breakpoint => {}
            Assist::X87Init => {
                let mut area = self.area(fd)?;
                xs::x87_init(&mut area);
                xsave::set(fd, &area, self.xsave_bytes).map_err(|e| failed(format!("KVM_SET_XSAVE: {e}")))?;
            }
            Assist::Save { address } => self.xsave(fd, address, self.rfbm(fd, regs.rax, regs.rdx)?)?,
            Assist::Restore { address } => self.xrstor(fd, address, self.rfbm(fd, regs.rax, regs.rdx)?)?,
        }
        regs.rip = step.next_rip;
        fd.set_regs(&regs).map_err(kvm("KVM_SET_REGS"))?;
        if step.assist == Assist::Breakpoint {
            let mut events = fd.get_vcpu_events().map_err(kvm("KVM_GET_VCPU_EVENTS"))?;
            events.exception.injected = 1;
            events.exception.nr = 3;
            events.exception.has_error_code = 0;
            fd.set_vcpu_events(&events).map_err(kvm("KVM_SET_VCPU_EVENTS"))?;
        }
        Ok(())
    }

    fn area(&self, fd: &VcpuFd) -> Result<Vec<u8>, Box<Fault>> {
        xsave::get(fd, self.xsave_bytes).map_err(|e| Box::new(engine_fault(format!("KVM_GET_XSAVE2: {e}"))))
    }

    /// Requested components: EDX:EAX, XCR0, and what this host has.
    fn rfbm(&self, fd: &VcpuFd, rax: u64, rdx: u64) -> Result<u64, Box<Fault>> {
        let xcrs = fd.get_xcrs().map_err(|e| Box::new(engine_fault(format!("KVM_GET_XCRS: {e}"))))?;
        let xcr0 = xcrs.xcrs.iter().take(xcrs.nr_xcrs as usize).find(|x| x.xcr == XCR0).map_or(3, |x| x.value);
        Ok(((rdx & 0xffff_ffff) << 32 | rax & 0xffff_ffff) & xcr0 & self.layout.mask)
    }

    fn xsave(&self, fd: &VcpuFd, address: u64, rfbm: u64) -> Result<(), Box<Fault>> {
        let area = self.area(fd)?;
        let mut old = [0; 8];
        self.read_exact(fd, address + xs::HEADER as u64, &mut old)?;
        let (spans, bv) = xs::save(&self.layout, &area, rfbm, u64::from_le_bytes(old));
        for (at, n) in spans {
            self.write_exact(fd, address + at as u64, &area[at..at + n])?;
        }
        self.write_exact(fd, address + xs::HEADER as u64, &bv.to_le_bytes())
    }

    fn xrstor(&self, fd: &VcpuFd, address: u64, rfbm: u64) -> Result<(), Box<Fault>> {
        let mut area = vec![0; self.layout.area_bytes(rfbm)];
        self.read_exact(fd, address, &mut area)?;
        let mut register = self.area(fd)?;
        xs::restore(&self.layout, &mut register, &area, rfbm)
            .map_err(|why| Box::new(engine_fault(assist::AssistError::BadArea { address, why }.to_string())))?;
        xsave::set(fd, &register, self.xsave_bytes).map_err(|e| Box::new(engine_fault(format!("KVM_SET_XSAVE: {e}"))))
    }

    /// Guest-physical address of a linear one.
    fn translate(fd: &VcpuFd, linear: u64) -> Option<u64> {
        fd.translate_gva(linear).ok().filter(|t| t.valid != 0).map(|t| t.physical_address)
    }

    /// Reads up to `out.len()` bytes, page by page; returns how many could be read.
    fn read_linear(&self, fd: &VcpuFd, linear: u64, out: &mut [u8]) -> usize {
        let mut done = 0;
        while done < out.len() {
            let at = linear.wrapping_add(done as u64);
            let n = (out.len() - done).min((crate::layout::PAGE - at % crate::layout::PAGE) as usize);
            let Some(physical) = Self::translate(fd, at) else { break };
            if self.ram.memory().read_slice(&mut out[done..done + n], GuestAddress(physical)).is_err() {
                break;
            }
            done += n;
        }
        done
    }

    fn read_exact(&self, fd: &VcpuFd, linear: u64, out: &mut [u8]) -> Result<(), Box<Fault>> {
        if self.read_linear(fd, linear, out) == out.len() {
            Ok(())
        } else {
            Err(Box::new(engine_fault(format!("{} bytes at linear address {linear:#x} are not mapped", out.len()))))
        }
    }

    fn write_exact(&self, fd: &VcpuFd, linear: u64, data: &[u8]) -> Result<(), Box<Fault>> {
        let mut done = 0;
        while done < data.len() {
            let at = linear.wrapping_add(done as u64);
            let n = (data.len() - done).min((crate::layout::PAGE - at % crate::layout::PAGE) as usize);
            let physical = Self::translate(fd, at);
            let written = physical.is_some_and(|p| self.ram.memory().write_slice(&data[done..done + n], GuestAddress(p)).is_ok());
            if !written {
                return Err(Box::new(engine_fault(format!("{n} bytes at linear address {at:#x} are not mapped"))));
            }
            done += n;
        }
        Ok(())
    }
}

fn engine_fault(why: String) -> Fault {
    Fault::new("engine-died", "the virtual CPU", why, "restore the last checkpoint; report this if it happens again")
}
