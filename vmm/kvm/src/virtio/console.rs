//! virtio-serial (virtio-console with MULTIPORT): one port, number 1, named `ks.channel`. Source: virtio 1.2, 5.3.
//!
//! The port's host end is one half of a socket pair, made anew by each [`Console::connect`]: the guest sees the port
//! close and open, and bytes that were under way in either direction are dropped. Bytes move only while the lease is
//! open. A full socket leaves the guest's buffers in its ring, an empty ring leaves the host's bytes in the socket.

use super::{Device, DeviceError, Io, Progress, buffers, read_all, write_all};
use ks_vmm_core::lease::LeaseGate;
use rustix::event::PollFlags;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// Name of the port in the guest (`/sys/class/virtio-ports/*/name`).
pub const PORT_NAME: &str = "ks.channel";
const PORT: u32 = 1;
const PORTS_MAX: u32 = 2;
const QUEUE_SIZES: &[u16] = &[64, 64, 64, 64, 64, 64];
const PORT0_OUT: usize = 1;
const CONTROL_IN: usize = 2;
const CONTROL_OUT: usize = 3;
const PORT_IN: usize = 4;
const PORT_OUT: usize = 5;
const FEATURE_MULTIPORT: u64 = 1 << 1;
const INBOX_BYTES: usize = 32 * 1024;
/// The most that one chain of the guest carries out.
const OUT_BYTES_MAX: usize = 1 << 20;
/// Control messages waiting for the guest's buffers; more than this many means that the guest does not read them.
const CONTROL_WAITING_MAX: usize = 64;

const DEVICE_READY: u16 = 0;
const PORT_ADD: u16 = 1;
const PORT_READY: u16 = 3;
const PORT_OPEN: u16 = 6;
const PORT_NAMED: u16 = 7;

/// What the guest knows, and what it has still to be told.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Known {
    port_ready: bool,
    guest_open: bool,
    told_connected: bool,
    control: VecDeque<Vec<u8>>,
}

/// The device.
pub struct Console {
    lease: Arc<LeaseGate>,
    host: Option<Arc<UnixStream>>,
    known: Known,
    // From the guest, not yet taken by the host's socket.
    outbox: Vec<u8>,
    // From the host, not yet given to the guest.
    inbox: Vec<u8>,
    // Buffers that the guest sent before the present connection are thrown away.
    stale_out: bool,
    /// Bytes passed, both ways.
    pub bytes: u64,
}

fn message(event: u16, value: u16) -> Vec<u8> {
    let mut m = PORT.to_le_bytes().to_vec();
    m.extend_from_slice(&event.to_le_bytes());
    m.extend_from_slice(&value.to_le_bytes());
    m
}

impl Console {
    /// A device whose port is not connected.
    pub fn new(lease: Arc<LeaseGate>) -> Self {
        Self { lease, host: None, known: Known::default(), outbox: Vec::new(), inbox: Vec::new(), stale_out: false, bytes: 0 }
    }

    /// Replaces the host's end; returns the other half. The previous one reads end of file.
    pub fn connect(&mut self) -> std::io::Result<UnixStream> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        self.disconnect();
        self.host = Some(Arc::new(ours));
        self.stale_out = true;
        self.tell_connected(true);
        Ok(theirs)
    }

    /// True while the guest has the port open.
    pub fn guest_open(&self) -> bool {
        self.known.guest_open
    }

    fn disconnect(&mut self) {
        if let Some(host) = self.host.take() {
            // Also ends a poll on it.
            let _ = host.shutdown(std::net::Shutdown::Both);
        }
        self.outbox.clear();
        self.inbox.clear();
        self.tell_connected(false);
    }

    fn tell_connected(&mut self, connected: bool) {
        if self.known.port_ready && self.known.told_connected != connected {
            self.known.told_connected = connected;
            self.tell(message(PORT_OPEN, u16::from(connected)));
        }
    }

    fn tell(&mut self, m: Vec<u8>) {
        if self.known.control.len() >= CONTROL_WAITING_MAX {
            // Old news of opening and closing; the last two messages say what holds now.
            self.known.control.pop_front();
        }
        self.known.control.push_back(m);
    }

    fn control(&mut self, m: &[u8]) -> Result<(), DeviceError> {
        if m.len() < 8 {
            return Err(DeviceError::Protocol("a short control message"));
        }
        let id = u32::from_le_bytes([m[0], m[1], m[2], m[3]]);
        let (event, value) = (u16::from_le_bytes([m[4], m[5]]), u16::from_le_bytes([m[6], m[7]]));
        match (event, id, value) {
            (DEVICE_READY, _, 1) => self.tell(message(PORT_ADD, 1)),
            (PORT_READY, PORT, 1) => {
                let mut name = message(PORT_NAMED, 1);
                name.extend_from_slice(PORT_NAME.as_bytes());
                self.tell(name);
                self.known.port_ready = true;
                self.known.told_connected = false;
                self.tell_connected(self.host.is_some());
            }
            (PORT_OPEN, PORT, value) => self.known.guest_open = value == 1,
            _ => tracing::debug!("console: control event {event} value {value} of port {id}"),
        }
        Ok(())
    }

    fn step_control(&mut self, io: &mut Io<'_>) -> Result<bool, DeviceError> {
        if let Some(chain) = io.pop(CONTROL_OUT)? {
            let head = chain.head_index();
            let m = read_all(io.ram.memory(), &buffers(chain)?, 64)?;
            self.control(&m)?;
            io.used(CONTROL_OUT, head, 0)?;
            return Ok(true);
        }
        if !self.known.control.is_empty()
            && let Some(chain) = io.pop(CONTROL_IN)?
        {
            let head = chain.head_index();
            let m = self.known.control.pop_front().unwrap_or_default();
            let n = write_all(io.ram.memory(), &buffers(chain)?, &m)?;
            io.used(CONTROL_IN, head, n as u32)?;
            return Ok(true);
        }
        Ok(false)
    }

    /// Takes one chain of `queue` and throws its bytes away.
    fn drop_one(io: &mut Io<'_>, queue: usize) -> Result<bool, DeviceError> {
        let Some(chain) = io.pop(queue)? else { return Ok(false) };
        let head = chain.head_index();
        io.used(queue, head, 0)?;
        Ok(true)
    }

    /// Guest to host.
    fn step_out(&mut self, io: &mut Io<'_>) -> Result<bool, DeviceError> {
        let Some(host) = self.host.clone() else { return Self::drop_one(io, PORT_OUT) };
        if self.outbox.is_empty() {
            let Some(chain) = io.pop(PORT_OUT)? else { return Ok(false) };
            let head = chain.head_index();
            self.outbox = read_all(io.ram.memory(), &buffers(chain)?, OUT_BYTES_MAX)?;
            io.used(PORT_OUT, head, 0)?;
            if self.outbox.is_empty() {
                return Ok(true);
            }
        }
        match (&*host).write(&self.outbox) {
            Ok(n) => {
                self.outbox.drain(..n);
                self.bytes += n as u64;
                Ok(true)
            }
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(false),
            Err(_) => {
                self.disconnect();
                Ok(true)
            }
        }
    }

    /// Host to guest.
    fn step_in(&mut self, io: &mut Io<'_>) -> Result<bool, DeviceError> {
        let Some(host) = self.host.clone() else { return Ok(false) };
        // A Linux guest throws away what arrives while nobody has the port open, so it waits in the socket.
        if !self.known.guest_open {
            return Ok(false);
        }
        if self.inbox.is_empty() {
            let mut buffer = vec![0; INBOX_BYTES];
            match (&*host).read(&mut buffer) {
                Ok(0) => {
                    self.disconnect();
                    return Ok(true);
                }
                Ok(n) => {
                    buffer.truncate(n);
                    self.inbox = buffer;
                }
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => return Ok(false),
                Err(_) => {
                    self.disconnect();
                    return Ok(true);
                }
            }
        }
        let Some(chain) = io.pop(PORT_IN)? else { return Ok(false) };
        let head = chain.head_index();
        let n = write_all(io.ram.memory(), &buffers(chain)?, &self.inbox)?;
        self.inbox.drain(..n);
        self.bytes += n as u64;
        io.used(PORT_IN, head, n as u32)?;
        Ok(true)
    }
}

impl Device for Console {
    fn id(&self) -> u32 {
        3
    }
    fn name(&self) -> &'static str {
        "console"
    }
    fn features(&self) -> u64 {
        FEATURE_MULTIPORT
    }
    fn queue_sizes(&self) -> &'static [u16] {
        QUEUE_SIZES
    }
    fn config(&self) -> Vec<u8> {
        let mut c = vec![0; 12];
        c[4..8].copy_from_slice(&PORTS_MAX.to_le_bytes());
        c
    }
    fn reset(&mut self) {
        self.known = Known::default();
        self.outbox.clear();
        self.inbox.clear();
    }
    fn step(&mut self, io: &mut Io<'_>) -> Result<Progress, DeviceError> {
        // Before the guest can hear of the new connection, so that nothing it sends on it is dropped.
        if self.stale_out {
            self.stale_out = Self::drop_one(io, PORT_OUT)?;
            return Ok(Progress::More);
        }
        if self.step_control(io)? || Self::drop_one(io, PORT0_OUT)? {
            return Ok(Progress::More);
        }
        if !self.lease.may_run() {
            return Ok(Progress::Later(20));
        }
        let out = self.step_out(io)?;
        let moved = self.step_in(io)?;
        Ok(if out || moved { Progress::More } else { Progress::Idle })
    }
    fn watch(&self) -> Option<(Arc<UnixStream>, PollFlags)> {
        let host = self.host.clone()?;
        let mut events = PollFlags::empty();
        if self.inbox.is_empty() && self.known.guest_open {
            events |= PollFlags::IN;
        }
        if !self.outbox.is_empty() {
            events |= PollFlags::OUT;
        }
        (!events.is_empty()).then_some((host, events))
    }
    fn connect_port(&mut self) -> Option<std::io::Result<UnixStream>> {
        Some(self.connect())
    }
    fn hang_up(&mut self) {
        self.disconnect();
    }
    fn save(&self) -> serde_json::Value {
        serde_json::to_value(&self.known).unwrap_or_default()
    }
    fn load(&mut self, state: &serde_json::Value) -> Result<(), String> {
        let known: Known = serde_json::from_value(state.clone()).map_err(|e| format!("console: {e}"))?;
        if known.control.len() > CONTROL_WAITING_MAX {
            return Err(format!("console: {} waiting messages", known.control.len()));
        }
        self.known = known;
        // The old connection is gone with the old process; the guest learns it first of all.
        self.tell_connected(false);
        Ok(())
    }
}
