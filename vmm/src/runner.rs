//! The run loop: the one thread that owns the engine. It starts the VM, pauses, resumes and captures on request, and
//! sees the engine's death. Storing a checkpoint runs on a thread of its own, so that this loop stays free.

use crate::channel::PortAnswer;
use crate::control::link::{Conn, Link};
use crate::mailbox::Mailbox;
use crate::shared::Shared;
use crate::start::{Built, Context, Handed, StartRequest, build};
use ks_proto::control::{CheckpointStats, Fault, VmPhase, VmmEvent, VmmReply};
use ks_proto::manifest::{EngineKind, Machine};
use ks_vmm_core::checkpoint::{Captured, Pipeline, Request};
use ks_vmm_core::engine::{Engine, EngineExit, Stopper};
use rustix::event::{PollFd, PollFlags, poll};
use std::os::fd::{AsFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The longest a pause may take before the request fails and the guest goes on.
pub const PAUSE_BOUND: Duration = Duration::from_secs(10);

/// Exit codes of the process.
pub mod exit_code {
    /// Stopped on request.
    pub const STOPPED: i32 = 0;
    /// The VM could not be started.
    pub const START_FAILED: i32 = 10;
    /// The guest or its engine ended.
    pub const DIED: i32 = 11;
    /// A newer run of the session exists.
    pub const SUPERSEDED: i32 = 12;
}

/// Where an answer goes.
pub struct Asker {
    /// The connection that asked.
    pub conn: Arc<Conn>,
    /// Its request.
    pub id: u64,
}
impl Asker {
    fn answer(self, result: Result<VmmReply, Fault>) {
        self.conn.reply(self.id, result);
    }
}

/// What the loop is asked to do.
pub enum Command {
    /// Boot or restore.
    Start { request: Box<StartRequest>, handed: Box<Handed>, asker: Asker, at: Instant },
    /// Stop the vCPUs.
    Pause(Asker),
    /// Let them go on.
    Resume(Asker),
    /// Capture and store.
    Checkpoint { request: Request, asker: Asker },
    /// The thread that stores is done.
    Stored { result: Result<CheckpointStats, Fault>, asker: Asker },
    /// The channel wants the guest's port.
    Port(u64),
    /// Tell the counters as they are now.
    Stats(Asker),
    /// End because of this.
    End { fault: Fault, code: i32 },
    /// End because it was asked for.
    Stop(Option<Asker>),
}

/// The loop's state.
pub struct Runner {
    /// What it is asked to do.
    pub mail: Arc<Mailbox<Command>>,
    /// Shared state.
    pub shared: Arc<Shared>,
    /// The node.
    pub link: Arc<Link>,
    /// For starting.
    pub context: Context,
    /// The channel.
    pub ports: Arc<Mailbox<PortAnswer>>,
    /// Once started.
    pub vm: Option<Built>,
    /// A wish for the port that waits until the guest runs.
    pub wish: Option<u64>,
    /// A capture found the lease ended and left the engine stopped: it runs again once the lease is back.
    pub run_pending: bool,
}

/// The engine as a capture sees it: the channel stands still while the guest does, and a guest that is paused on
/// request is neither stopped nor let go.
struct Captive<'a> {
    engine: &'a mut dyn Engine,
    shared: &'a Shared,
    stays_paused: bool,
}

impl Engine for Captive<'_> {
    fn kind(&self) -> EngineKind {
        self.engine.kind()
    }
    fn machine(&self) -> Machine {
        self.engine.machine()
    }
    fn run(&mut self) -> Result<(), Fault> {
        if self.stays_paused {
            return Ok(());
        }
        self.engine.run()?;
        self.shared.release_port();
        Ok(())
    }
    fn pause(&mut self, bound: Duration) -> Result<(), Fault> {
        if self.stays_paused {
            return Ok(());
        }
        self.shared.hold_port();
        // On an error the guest runs on.
        self.engine.pause(bound).inspect_err(|_| self.shared.release_port())
    }
    fn save_state(&mut self) -> Result<Vec<u8>, Fault> {
        self.engine.save_state()
    }
    fn connect_port(&mut self) -> Result<UnixStream, Fault> {
        self.engine.connect_port()
    }
    fn stopper(&self) -> Arc<dyn Stopper> {
        self.engine.stopper()
    }
    fn exited(&mut self) -> Option<EngineExit> {
        self.engine.exited()
    }
    fn exit_fd(&self) -> RawFd {
        self.engine.exit_fd()
    }
    fn kill(&mut self) {
        self.engine.kill();
    }
}

/// Why the loop ends.
struct End {
    fault: Option<Fault>,
    code: i32,
    asker: Option<Asker>,
}

impl Runner {
    /// Runs until the VM is gone; returns the exit code.
    pub fn run(mut self) -> i32 {
        let end = loop {
            if let Some(end) = self.turn() {
                break end;
            }
        };
        self.shared.set_phase(VmPhase::Dead);
        if let Some(vm) = &mut self.vm {
            vm.engine.kill();
        }
        if let Some(fault) = end.fault {
            tracing::warn!("{fault}");
            self.link.event(VmmEvent::Died { fault });
        }
        if let Some(asker) = end.asker {
            asker.answer(Ok(VmmReply::Done {}));
        }
        end.code
    }

    fn turn(&mut self) -> Option<End> {
        self.wait();
        for command in self.mail.take() {
            if let Some(end) = self.carry_out(command) {
                return Some(end);
            }
        }
        self.count();
        if let Some(vm) = &mut self.vm
            && let Some(exit) = vm.engine.exited()
        {
            return Some(End { fault: Some(exit.fault), code: exit_code::DIED, asker: None });
        }
        self.run_again();
        self.give_port();
        None
    }

    fn count(&self) {
        if let Some(vm) = &self.vm {
            self.shared.set_counters(vm.engine.counters());
        }
    }

    fn run_again(&mut self) {
        let Some(vm) = self.vm.as_mut().filter(|_| self.run_pending && self.shared.may_pass()) else { return };
        if self.shared.phase() == VmPhase::Running {
            match (Captive { engine: vm.engine.as_mut(), shared: &self.shared, stays_paused: false }).run() {
                Ok(()) => self.run_pending = false,
                Err(f) => tracing::warn!("{f}"),
            }
        }
    }

    fn wait(&self) {
        let mut fds = vec![PollFd::from_borrowed_fd(self.mail.as_fd(), PollFlags::IN)];
        if let Some(vm) = &self.vm {
            fds.push(PollFd::from_borrowed_fd(crate::sys::borrow(vm.engine.as_ref()), PollFlags::IN));
        }
        if let Err(e) = poll(&mut fds, None)
            && e != rustix::io::Errno::INTR
        {
            tracing::error!("poll: {e}");
        }
    }

    fn carry_out(&mut self, command: Command) -> Option<End> {
        match command {
            Command::Start { request, mut handed, asker, at } => return self.start(*request, &mut handed, asker, at),
            Command::Pause(asker) => asker.answer(self.pause()),
            Command::Resume(asker) => asker.answer(self.resume()),
            Command::Checkpoint { request, asker } => self.checkpoint(&request, asker),
            Command::Stored { result, asker } => asker.answer(result.map(|stats| VmmReply::Checkpoint { stats })),
            Command::Port(wish) => self.wish = Some(wish),
            Command::Stats(asker) => {
                self.count();
                asker.answer(Ok(VmmReply::Stats { stats: self.shared.stats() }));
            }
            Command::End { fault, code } => return Some(End { fault: Some(fault), code, asker: None }),
            Command::Stop(asker) => return Some(End { fault: None, code: exit_code::STOPPED, asker }),
        }
        None
    }

    fn start(&mut self, request: StartRequest, handed: &mut Handed, asker: Asker, at: Instant) -> Option<End> {
        let mut built = match build(&self.context, handed, request) {
            Ok(b) => b,
            Err(fault) => return Some(Self::start_failed(fault, asker)),
        };
        let to_run_us = micros(at);
        if let Err(fault) = built.engine.run() {
            let fault = built.engine.exited().map_or(fault, |e| e.fault);
            built.engine.kill();
            return Some(Self::start_failed(fault, asker));
        }
        let first_run_us = micros(at);
        // The qemu engine does not see the guest's exits: there, running is what is known.
        self.shared.set_started(to_run_us, (built.engine.kind() == EngineKind::Qemu).then_some(first_run_us));
        let engine_version = built.engine.machine().engine_version;
        self.shared.set_phase(VmPhase::Running);
        self.vm = Some(built);
        tracing::info!("running after {first_run_us} us on {engine_version}");
        asker.answer(Ok(VmmReply::Started { first_run_us, engine_version }));
        None
    }

    fn start_failed(fault: Fault, asker: Asker) -> End {
        asker.answer(Err(fault.clone()));
        End { fault: Some(fault), code: exit_code::START_FAILED, asker: None }
    }

    fn pause(&mut self) -> Result<VmmReply, Fault> {
        self.count();
        let vm = self.vm.as_mut().ok_or_else(no_vm)?;
        if self.shared.own_phase() == VmPhase::Running {
            Captive { engine: vm.engine.as_mut(), shared: &self.shared, stays_paused: false }.pause(PAUSE_BOUND)?;
            self.shared.set_phase(VmPhase::Paused);
        }
        Ok(VmmReply::Done {})
    }

    fn resume(&mut self) -> Result<VmmReply, Fault> {
        let vm = self.vm.as_mut().ok_or_else(no_vm)?;
        if self.shared.own_phase() == VmPhase::Paused {
            Captive { engine: vm.engine.as_mut(), shared: &self.shared, stays_paused: false }.run()?;
            self.shared.set_phase(VmPhase::Running);
        }
        Ok(VmmReply::Done {})
    }

    fn checkpoint(&mut self, request: &Request, asker: Asker) {
        // The engine's first exit is that of its latest run; this ends it.
        self.count();
        let Some(vm) = self.vm.as_mut() else { return asker.answer(Err(no_vm())) };
        let paused = self.shared.own_phase() == VmPhase::Paused;
        let mut engine = Captive { engine: vm.engine.as_mut(), shared: &self.shared, stays_paused: paused };
        let captured = match vm.pipeline.capture(&mut engine, request) {
            Ok(c) => c,
            Err(fault) => {
                self.run_pending = !paused && fault.code == "lease-ended";
                return asker.answer(Err(fault));
            }
        };
        if !paused {
            self.link.event(VmmEvent::Resumed { pause_us: captured.pause_us() });
        }
        let (pipeline, mail) = (vm.pipeline.clone(), self.mail.clone());
        store_beside(pipeline, captured, asker, mail);
    }

    /// Connects the guest's port once the guest runs.
    fn give_port(&mut self) {
        let Some(vm) = self.vm.as_mut().filter(|_| self.shared.phase() == VmPhase::Running) else { return };
        if let Some(wish) = self.wish.take() {
            let port = vm.engine.connect_port();
            if self.ports.push(PortAnswer { wish, port }).is_err() {
                tracing::error!("the channel does not take its port");
            }
        }
    }
}

fn micros(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}

fn no_vm() -> Fault {
    Fault::new("not-ready", "reach the VM", "there is none", "send boot or restore first")
}

fn store_beside(pipeline: Arc<Pipeline>, captured: Captured, asker: Asker, mail: Arc<Mailbox<Command>>) {
    let conn = asker.conn.clone();
    let id = asker.id;
    let started = std::thread::Builder::new().name("ks-store".into()).spawn(move || {
        ks_vmm_core::confine::enter(ks_vmm_core::confine::Kind::Store);
        let result = pipeline.store(captured);
        if let Err(Command::Stored { result, asker }) = mail.push(Command::Stored { result, asker }) {
            asker.answer(result.map(|stats| VmmReply::Checkpoint { stats }));
        }
    });
    if let Err(e) = started {
        conn.reply(id, Err(Fault::new("internal", "store a checkpoint", e.to_string(), "free some memory")));
    }
}
