//! The virtio-mmio transport, version 2: registers, queues, and the gate that keeps the worker out during a pause.
//!
//! Source: virtio 1.2, 4.2. `QueueNotify` never arrives here: each queue's kick is an ioeventfd.

use super::{Device, DeviceError, INTERRUPT_CONFIG, Interrupt, Io, Progress};
use crate::lock;
use crate::sys::ram::Ram;
use rustix::event::PollFlags;
use serde::{Deserialize, Serialize};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};
use virtio_queue::{Queue, QueueState, QueueT};
use vmm_sys_util::eventfd::EventFd;

/// Offset of QueueNotify in the window.
pub const NOTIFY_OFFSET: u64 = 0x50;
const CONFIG_OFFSET: u64 = 0x100;
const MAGIC: u32 = 0x7472_6976;
const VENDOR: u32 = 0x4b53_4b53;
const FEATURE_VERSION_1: u64 = 1 << 32;
const FEATURE_EVENT_IDX: u64 = 1 << 29;
const STATUS_FEATURES_OK: u32 = 8;
const STATUS_DRIVER_OK: u32 = 4;
const STATUS_NEEDS_RESET: u32 = 0x40;

/// Registers that the driver set.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registers {
    features_select: u32,
    acked_select: u32,
    acked: u64,
    queue_select: u32,
    status: u32,
    generation: u32,
}

/// One queue's registers and positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedQueue {
    max_size: u16,
    next_avail: u16,
    next_used: u16,
    event_idx: bool,
    size: u16,
    ready: bool,
    desc_table: u64,
    avail_ring: u64,
    used_ring: u64,
}

/// The state of one slot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedSlot {
    /// Device name: a state is refused by another device.
    pub name: String,
    registers: Registers,
    interrupt_status: u32,
    queues: Vec<SavedQueue>,
    device: serde_json::Value,
}

/// What the worker and the vCPUs share under one lock.
pub struct Core {
    registers: Registers,
    queues: Vec<Queue>,
    /// The device model.
    pub device: Box<dyn Device>,
}

impl Core {
    /// True while the driver runs the device.
    pub fn active(&self) -> bool {
        self.registers.status & (STATUS_DRIVER_OK | STATUS_NEEDS_RESET) == STATUS_DRIVER_OK
    }
}

#[derive(Default)]
struct Gate {
    paused: bool,
    busy: bool,
    ended: bool,
}

/// One device in its window.
pub struct MmioSlot {
    /// Window start.
    pub base: u64,
    /// Interrupt line.
    pub gsi: u32,
    /// One per queue.
    pub kicks: Vec<EventFd>,
    /// Wakes the worker for anything else.
    pub control: EventFd,
    interrupt: Arc<Interrupt>,
    core: Mutex<Core>,
    gate: Mutex<Gate>,
    gate_moved: Condvar,
    ram: Arc<Ram>,
}

fn queues_of(device: &dyn Device) -> Vec<Queue> {
    device.queue_sizes().iter().map(|n| Queue::new(*n).expect("the sizes are powers of two")).collect()
}

impl MmioSlot {
    /// A reset device at `base`.
    pub fn new(base: u64, gsi: u32, device: Box<dyn Device>, edge: EventFd, ram: Arc<Ram>) -> std::io::Result<Self> {
        let queues = queues_of(&*device);
        let kicks = queues.iter().map(|_| EventFd::new(libc::EFD_NONBLOCK)).collect::<Result<_, _>>()?;
        Ok(Self {
            base,
            gsi,
            kicks,
            control: EventFd::new(libc::EFD_NONBLOCK)?,
            interrupt: Arc::new(Interrupt::new(edge)),
            core: Mutex::new(Core { registers: Registers::default(), queues, device }),
            gate: Mutex::new(Gate::default()),
            gate_moved: Condvar::new(),
            ram,
        })
    }
    /// Works on the device model under the lock.
    pub fn with_core<T>(&self, f: impl FnOnce(&mut Core) -> T) -> T {
        f(&mut lock(&self.core))
    }
    /// Wakes the worker.
    pub fn wake(&self) {
        // The counter can only be full if the worker is about to wake anyway.
        let _ = self.control.write(1);
    }

    /// A read by a vCPU at `offset` in the window.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        if offset >= CONFIG_OFFSET {
            let config = lock(&self.core).device.config();
            let at = (offset - CONFIG_OFFSET) as usize;
            for (i, b) in data.iter_mut().enumerate() {
                *b = config.get(at + i).copied().unwrap_or(0);
            }
            return;
        }
        let value = if data.len() == 4 { self.read_register(offset) } else { 0 };
        let n = data.len().min(4);
        data.fill(0);
        data[..n].copy_from_slice(&value.to_le_bytes()[..n]);
    }

    fn read_register(&self, offset: u64) -> u32 {
        if offset == 0x60 {
            return self.interrupt.status();
        }
        let core = lock(&self.core);
        let r = &core.registers;
        let offered = core.device.features() | FEATURE_VERSION_1 | FEATURE_EVENT_IDX;
        let queue = core.queues.get(r.queue_select as usize);
        match offset {
            0x00 => MAGIC,
            0x04 => 2,
            0x08 => core.device.id(),
            0x0c => VENDOR,
            0x10 => match r.features_select {
                0 => offered as u32,
                1 => (offered >> 32) as u32,
                _ => 0,
            },
            0x34 => queue.map_or(0, |q| u32::from(q.max_size())),
            0x44 => queue.map_or(0, |q| u32::from(q.ready())),
            0x70 => r.status,
            // No shared memory regions.
            0xb0 | 0xb4 | 0xb8 | 0xbc => u32::MAX,
            0xfc => r.generation,
            _ => 0,
        }
    }

    /// A write by a vCPU at `offset` in the window.
    pub fn write(&self, offset: u64, data: &[u8]) {
        if offset >= CONFIG_OFFSET {
            lock(&self.core).device.write_config((offset - CONFIG_OFFSET) as usize, data);
            self.wake();
            return;
        }
        let Ok(bytes) = <[u8; 4]>::try_from(data) else { return };
        let value = u32::from_le_bytes(bytes);
        match offset {
            0x64 => self.interrupt.acknowledge(value),
            NOTIFY_OFFSET => {
                if let Some(kick) = self.kicks.get(value as usize) {
                    let _ = kick.write(1);
                }
            }
            _ => self.write_register(offset, value),
        }
    }

    fn write_register(&self, offset: u64, value: u32) {
        let mut core = lock(&self.core);
        let core = &mut *core;
        let r = &mut core.registers;
        match offset {
            0x14 => r.features_select = value,
            0x20 if r.status & STATUS_FEATURES_OK == 0 => match r.acked_select {
                0 => r.acked = (r.acked & !0xffff_ffff) | u64::from(value),
                1 => r.acked = (r.acked & 0xffff_ffff) | u64::from(value) << 32,
                _ => {}
            },
            0x24 => r.acked_select = value,
            0x30 => r.queue_select = value,
            0x70 => Self::write_status(core, value, &self.interrupt, || self.wake()),
            _ => {
                let setting_up = r.status & (STATUS_FEATURES_OK | STATUS_DRIVER_OK) == STATUS_FEATURES_OK;
                let event_idx = r.acked & FEATURE_EVENT_IDX != 0;
                if let Some(q) = core.queues.get_mut(r.queue_select as usize).filter(|_| setting_up) {
                    write_queue(q, offset, value, event_idx);
                }
            }
        }
    }

    fn write_status(core: &mut Core, value: u32, interrupt: &Interrupt, wake: impl FnOnce()) {
        if value == 0 {
            core.registers = Registers::default();
            core.queues = queues_of(&*core.device);
            core.device.reset();
            interrupt.acknowledge(u32::MAX);
            return;
        }
        let offered = core.device.features() | FEATURE_VERSION_1 | FEATURE_EVENT_IDX;
        let acked = core.registers.acked;
        let mut value = value | core.registers.status & STATUS_NEEDS_RESET;
        if value & STATUS_FEATURES_OK != 0 && (acked & !offered != 0 || acked & FEATURE_VERSION_1 == 0) {
            value &= !STATUS_FEATURES_OK;
        }
        let starts = value & !core.registers.status & STATUS_DRIVER_OK != 0;
        core.registers.status = value;
        if starts {
            wake();
        }
    }

    /// One step of the worker. None: the slot is paused, inactive or at its end.
    pub fn step(&self) -> Option<Progress> {
        {
            let mut gate = lock(&self.gate);
            if gate.paused || gate.ended {
                return None;
            }
            gate.busy = true;
        }
        let progress = self.step_core();
        lock(&self.gate).busy = false;
        self.gate_moved.notify_all();
        progress
    }

    fn step_core(&self) -> Option<Progress> {
        let mut core = lock(&self.core);
        let core = &mut *core;
        if !core.active() {
            return None;
        }
        let mut io = Io { queues: &mut core.queues, ram: &self.ram, interrupt: &self.interrupt };
        match core.device.step(&mut io) {
            Ok(progress) => Some(progress),
            Err(e) => {
                self.broken(&mut core.registers, core.device.name(), &e);
                None
            }
        }
    }

    fn broken(&self, registers: &mut Registers, name: &str, error: &DeviceError) {
        tracing::error!("virtio {name}: {error}; the device stops until the guest resets it");
        registers.status |= STATUS_NEEDS_RESET;
        registers.generation = registers.generation.wrapping_add(1);
        self.interrupt.raise(INTERRUPT_CONFIG);
    }

    /// Keeps the worker out; waits for the request under way until `deadline`. False: it is still under way, and the
    /// device runs on.
    pub fn pause(&self, deadline: Instant) -> bool {
        let mut gate = lock(&self.gate);
        gate.paused = true;
        while gate.busy {
            let left = deadline.saturating_duration_since(Instant::now());
            if left == Duration::ZERO {
                gate.paused = false;
                drop(gate);
                self.wake();
                return false;
            }
            gate = self.gate_moved.wait_timeout(gate, left).unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
        true
    }
    /// Lets the worker in again; it looks at every queue.
    pub fn resume(&self) {
        lock(&self.gate).paused = false;
        self.gate_moved.notify_all();
        self.wake();
    }
    /// Tells the worker to end.
    pub fn end(&self) {
        lock(&self.gate).ended = true;
        self.gate_moved.notify_all();
        self.wake();
    }
    /// True after [`MmioSlot::end`].
    pub fn ended(&self) -> bool {
        lock(&self.gate).ended
    }

    /// What else the worker waits for: nothing while paused or inactive.
    pub fn watch(&self) -> Option<(Arc<UnixStream>, PollFlags)> {
        if lock(&self.gate).paused {
            return None;
        }
        let core = lock(&self.core);
        if core.active() { core.device.watch() } else { None }
    }

    /// The state. Only while paused.
    pub fn save(&self) -> SavedSlot {
        let core = lock(&self.core);
        SavedSlot {
            name: core.device.name().to_owned(),
            registers: core.registers.clone(),
            interrupt_status: self.interrupt.status(),
            queues: core.queues.iter().map(|q| saved(&q.state())).collect(),
            device: core.device.save(),
        }
    }
    /// Takes a state back. Refuses another device's or one that does not hold together.
    pub fn load(&self, state: &SavedSlot) -> Result<(), String> {
        let mut core = lock(&self.core);
        let name = core.device.name();
        if state.name != name || state.queues.len() != core.queues.len() {
            return Err(format!("state of {} with {} queues for {name}", state.name, state.queues.len()));
        }
        let queues: Result<Vec<Queue>, _> = state.queues.iter().map(|q| Queue::try_from(live(q))).collect();
        let queues = queues.map_err(|e| format!("{name}: {e}"))?;
        if let Some(i) = (0..queues.len()).find(|i| queues[*i].max_size() != core.queues[*i].max_size()) {
            return Err(format!("{name}: queue {i} of size {}", queues[i].max_size()));
        }
        if let Some(i) = queues.iter().position(|q| q.ready() && !q.is_valid(self.ram.memory())) {
            return Err(format!("{name}: queue {i} lies outside memory"));
        }
        core.queues = queues;
        core.registers = state.registers.clone();
        core.device.load(&state.device)?;
        self.interrupt.restore(state.interrupt_status);
        Ok(())
    }
}

fn write_queue(q: &mut Queue, offset: u64, value: u32, event_idx: bool) {
    match offset {
        0x38 => q.set_size(u16::try_from(value).unwrap_or(0)),
        0x44 => {
            q.set_event_idx(event_idx);
            q.set_ready(value == 1);
        }
        0x80 => q.set_desc_table_address(Some(value), None),
        0x84 => q.set_desc_table_address(None, Some(value)),
        0x90 => q.set_avail_ring_address(Some(value), None),
        0x94 => q.set_avail_ring_address(None, Some(value)),
        0xa0 => q.set_used_ring_address(Some(value), None),
        0xa4 => q.set_used_ring_address(None, Some(value)),
        _ => {}
    }
}

fn saved(s: &QueueState) -> SavedQueue {
    SavedQueue {
        max_size: s.max_size,
        next_avail: s.next_avail,
        next_used: s.next_used,
        event_idx: s.event_idx_enabled,
        size: s.size,
        ready: s.ready,
        desc_table: s.desc_table,
        avail_ring: s.avail_ring,
        used_ring: s.used_ring,
    }
}

fn live(s: &SavedQueue) -> QueueState {
    QueueState {
        max_size: s.max_size,
        next_avail: s.next_avail,
        next_used: s.next_used,
        event_idx_enabled: s.event_idx,
        size: s.size,
        ready: s.ready,
        desc_table: s.desc_table,
        avail_ring: s.avail_ring,
        used_ring: s.used_ring,
    }
}
