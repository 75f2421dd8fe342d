//! Accepts connections from the node and turns its requests into commands for the run loop. Lease, stats, hello and
//! the hand-over are answered here, so that they never wait for the engine.

use super::link::{Conn, Link};
use crate::mailbox::Mailbox;
use crate::phase::{legal, name};
use crate::runner::{Asker, Command, PAUSE_BOUND, exit_code};
use crate::shared::{Heartbeat, Shared};
use crate::start::{Handed, Origin, StartRequest};
use ks_proto::control::{Fault, Frame, PROTOCOL, VmConfig, VmPhase, VmmReply, VmmRequest};
use ks_vmm_core::checkpoint::Request;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pack files of one plan at most.
const PACKS_MAX: usize = 100_000;
/// A stop that the run loop does not carry out by then ends the process anyway (QEMU dies with it).
const STOP_BOUND: Duration = Duration::from_secs(3);

/// What a connection's reader works with.
pub struct Server {
    /// The node.
    pub link: Arc<Link>,
    /// Shared state.
    pub shared: Arc<Shared>,
    /// The run loop.
    pub mail: Arc<Mailbox<Command>>,
    /// The process that the node started, in the node's numbers.
    pub pid: u32,
}

/// Accepts for ever; the newest connection replaces the one before.
pub fn serve(server: Arc<Server>, listener: UnixListener) -> std::io::Result<()> {
    std::thread::Builder::new().name("ks-accept".into()).spawn(move || {
        loop {
            let adopted = listener.accept().and_then(|(stream, _)| server.link.adopt(stream));
            let conn = match adopted {
                Ok(c) => c,
                Err(e) => {
                    tracing::warn!("a control connection was lost: {e}");
                    // Out of descriptors: give others the time to free some.
                    std::thread::park_timeout(Duration::from_millis(100));
                    continue;
                }
            };
            let server = server.clone();
            let reader = move || {
                server.converse(&conn);
                server.link.ended(&conn);
            };
            if let Err(e) = std::thread::Builder::new().name("ks-control".into()).spawn(reader) {
                tracing::error!("a control connection is not served: {e}");
            }
        }
    })?;
    Ok(())
}

/// Asks the run loop to stop, and sees to it that the process ends.
pub fn stop(mail: &Mailbox<Command>, asker: Option<Asker>) {
    // A full mailbox is as good as a loop that does not answer.
    let _ = mail.push(Command::Stop(asker));
    let force = || {
        std::thread::sleep(STOP_BOUND);
        tracing::warn!("the run loop did not stop in time");
        std::process::exit(exit_code::STOPPED);
    };
    if std::thread::Builder::new().name("ks-stop".into()).spawn(force).is_err() {
        std::process::exit(exit_code::STOPPED);
    }
}

fn protocol(what: &str, why: impl Into<String>) -> Fault {
    Fault::new("protocol", what, why, "node and VMM must be of one version")
}

impl Server {
    fn converse(&self, conn: &Arc<Conn>) {
        let mut greeted = false;
        let mut handed = Handed::default();
        loop {
            match conn.receive() {
                Ok((Frame::Request { id, request, .. }, fds)) => {
                    let is_hello = matches!(request, VmmRequest::Hello { .. });
                    if !greeted && !is_hello {
                        conn.reply(id, Err(protocol(name(&request), "hello must come first on every connection")));
                        continue;
                    }
                    let answer = self.handle(conn, id, request, fds, &mut handed);
                    greeted |= is_hello && !matches!(answer, Some(Err(_)));
                    if let Some(result) = answer {
                        conn.reply(id, result);
                    }
                }
                Ok((Frame::HostReply { id, result, .. }, fds)) => self.link.answered(id, result.map(|r| (r, fds))),
                Ok((Frame::Reply { .. } | Frame::Event { .. } | Frame::HostRequest { .. }, _)) => {
                    return tracing::warn!("the node sent a frame that only a VMM sends");
                }
                Err(e) => return tracing::info!("control connection {}: {e}", conn.number),
            }
        }
    }

    /// Some(answer) now, or None when the run loop answers.
    fn handle(
        &self,
        conn: &Arc<Conn>,
        id: u64,
        request: VmmRequest,
        fds: Vec<OwnedFd>,
        handed: &mut Handed,
    ) -> Option<Result<VmmReply, Fault>> {
        if let Err(f) = legal(self.shared.phase(), &request) {
            return Some(Err(f));
        }
        let asker = Asker { conn: conn.clone(), id };
        let command = match request {
            VmmRequest::Hello { protocol: p } => return Some(self.hello(p)),
            VmmRequest::Keys { keys, write_domain } => {
                return Some(handed.take_keys(&keys, write_domain).map(|()| VmmReply::Done {}));
            }
            VmmRequest::Packs {} => return Some(take_packs(handed, fds)),
            VmmRequest::Lease { token, deadline_boottime_ms } => return Some(self.lease(token, deadline_boottime_ms)),
            VmmRequest::Stats {} => match self.shared.own_phase() {
                VmPhase::Running | VmPhase::Paused => Command::Stats(asker),
                // A start keeps the run loop busy for long.
                _ => return Some(Ok(VmmReply::Stats { stats: self.shared.stats() })),
            },
            VmmRequest::Stop {} => {
                stop(&self.mail, Some(asker));
                return None;
            }
            VmmRequest::Boot { config, image_manifest_hex } => {
                match self.begin(config, Origin::Image { manifest_hex: image_manifest_hex }, fds, 3, handed) {
                    Ok((request, handed)) => Command::Start { request, handed, asker, at: Instant::now() },
                    Err(f) => return Some(Err(f)),
                }
            }
            VmmRequest::Restore { config, checkpoint } => {
                let mut fds = fds;
                let Some(manifest) = (fds.len() == 4).then(|| fds.pop()).flatten() else {
                    return Some(Err(protocol("restore", format!("{} descriptors came, 4 are needed", fds.len()))));
                };
                match self.begin(config, Origin::Checkpoint { id: checkpoint, manifest }, fds, 3, handed) {
                    Ok((request, handed)) => Command::Start { request, handed, asker, at: Instant::now() },
                    Err(f) => return Some(Err(f)),
                }
            }
            VmmRequest::Pause {} => Command::Pause(asker),
            VmmRequest::Resume {} => Command::Resume(asker),
            VmmRequest::Checkpoint { parent, journal_position } => {
                Command::Checkpoint { request: Request { parent, journal_position, pause_bound: PAUSE_BOUND }, asker }
            }
        };
        match self.mail.push(command) {
            Ok(()) => None,
            Err(_) => Some(Err(Fault::new("busy", "take a request", "too many wait already", "wait for their answers"))),
        }
    }

    fn hello(&self, p: u32) -> Result<VmmReply, Fault> {
        if p != PROTOCOL {
            return Err(protocol("hello", format!("this VMM speaks protocol {PROTOCOL}, the node {p}")));
        }
        Ok(VmmReply::Hello {
            protocol: PROTOCOL,
            pid: self.pid,
            phase: self.shared.phase(),
            config: self.shared.config(),
            jail: self.shared.jail(),
        })
    }

    fn lease(&self, token: ks_proto::RunToken, deadline_ms: u64) -> Result<VmmReply, Fault> {
        match self.shared.renew_lease(token, deadline_ms)? {
            Heartbeat::Renewed => Ok(VmmReply::Done {}),
            Heartbeat::Superseded(fault) => {
                if let Some(s) = self.shared.stopper() {
                    s.freeze();
                }
                let _ = self.mail.push(Command::End { fault: fault.clone(), code: exit_code::SUPERSEDED });
                Err(fault)
            }
        }
    }

    fn begin(
        &self,
        config: VmConfig,
        origin: Origin,
        fds: Vec<OwnedFd>,
        need: usize,
        handed: &mut Handed,
    ) -> Result<(Box<StartRequest>, Box<Handed>), Fault> {
        let got = fds.len();
        let Ok([kernel, initrd, plan]) = <[OwnedFd; 3]>::try_from(fds) else {
            return Err(protocol("start a VM", format!("{got} descriptors came, {need} are needed")));
        };
        if handed.keys.is_empty() {
            return Err(Fault::new("not-ready", "start a VM", "no keys were handed over", "send keys and packs first"));
        }
        if !self.shared.advance(VmPhase::Empty, VmPhase::Starting) {
            return Err(Fault::new("not-legal", "start a VM", "this process has its VM already", "start another ks-vmm"));
        }
        self.shared.set_config(config.clone());
        Ok((Box::new(StartRequest { config, origin, kernel, initrd, plan }), Box::new(std::mem::take(handed))))
    }
}

fn take_packs(handed: &mut Handed, fds: Vec<OwnedFd>) -> Result<VmmReply, Fault> {
    if handed.packs.len() + fds.len() > PACKS_MAX {
        let why = format!("more than {PACKS_MAX} pack files");
        return Err(Fault::new("bad-request", "take packs", why, "compact the packs of this session"));
    }
    handed.packs.extend(fds.into_iter().map(File::from));
    Ok(VmmReply::Done {})
}
