//! Virtio devices behind virtio-mmio (version 2): what a device implements, and what it gets to work with.
//!
//! [`mmio`] holds the registers and queues of one device, [`worker`] its thread; [`block`], [`console`], [`entropy`] and
//! [`balloon`] are the devices. A device handles one request per [`Device::step`], so that a pause waits for one at most;
//! requests still in the available ring are in guest memory and are taken after the restore.

pub mod balloon;
pub mod block;
pub mod console;
pub mod entropy;
pub mod mmio;
pub mod worker;

use crate::sys::ram::Ram;
use rustix::event::PollFlags;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

/// Interrupt status: buffers were used.
pub const INTERRUPT_VRING: u32 = 1;
/// Interrupt status: the configuration changed.
pub const INTERRUPT_CONFIG: u32 = 2;

/// A device that broke the queue protocol, or whose queue cannot be read: it stops until the driver resets it.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The driver's ring or chain makes no sense.
    #[error("virtqueue: {0}")]
    Queue(#[from] virtio_queue::Error),
    /// A buffer outside RAM.
    #[error("guest buffer: {0}")]
    Memory(#[from] vm_memory::GuestMemoryError),
    /// A request that the protocol does not allow.
    #[error("{0}")]
    Protocol(&'static str),
}

/// One interrupt line: status bits that the driver reads and acknowledges, and an edge through an irqfd.
pub struct Interrupt {
    status: AtomicU32,
    edge: EventFd,
}

impl Interrupt {
    /// A line whose edges go through `edge`.
    pub fn new(edge: EventFd) -> Self {
        Self { status: AtomicU32::new(0), edge }
    }
    /// Raises.
    pub fn raise(&self, bits: u32) {
        self.status.fetch_or(bits, Ordering::SeqCst);
        if let Err(e) = self.edge.write(1) {
            tracing::error!("interrupt: {e}");
        }
    }
    /// Status bits.
    pub fn status(&self) -> u32 {
        self.status.load(Ordering::SeqCst)
    }
    /// The driver has seen `bits`.
    pub fn acknowledge(&self, bits: u32) {
        self.status.fetch_and(!bits, Ordering::SeqCst);
    }
    /// After a restore. An edge that was on its way is in the interrupt controller's state; one more does no harm.
    pub fn restore(&self, bits: u32) {
        self.status.store(bits, Ordering::SeqCst);
        if bits != 0 {
            self.raise(0);
        }
    }
}

/// What a step works on.
pub struct Io<'a> {
    /// The device's queues, ready ones activated by the driver.
    pub queues: &'a mut [Queue],
    /// Guest memory.
    pub ram: &'a Ram,
    /// The device's line.
    pub interrupt: &'a Interrupt,
}

/// A chain taken from a queue.
pub type Chain<'a> = DescriptorChain<&'a GuestMemoryMmap>;

impl<'a> Io<'a> {
    /// The next available chain; None arms the driver's notification first, so that nothing is missed.
    pub fn pop(&mut self, queue: usize) -> Result<Option<Chain<'a>>, DeviceError> {
        let memory = self.ram.memory();
        let q = &mut self.queues[queue];
        if !q.ready() {
            return Ok(None);
        }
        loop {
            if let Some(chain) = q.iter(memory)?.next() {
                return Ok(Some(chain));
            }
            if !q.enable_notification(memory)? {
                return Ok(None);
            }
        }
    }
    /// Undoes the last [`Io::pop`] of this queue: the chain is the next to be taken again, also after a restore.
    pub fn put_back(&mut self, queue: usize) {
        let q = &mut self.queues[queue];
        q.set_next_avail(q.next_avail().wrapping_sub(1));
    }
    /// Gives a chain back with `written` bytes in it, and interrupts if the driver wants it.
    pub fn used(&mut self, queue: usize, head: u16, written: u32) -> Result<(), DeviceError> {
        let memory = self.ram.memory();
        let q = &mut self.queues[queue];
        q.add_used(memory, head, written)?;
        if q.needs_notification(memory)? {
            self.interrupt.raise(INTERRUPT_VRING);
        }
        Ok(())
    }
}

/// One stretch of a chain.
#[derive(Debug, Clone, Copy)]
pub struct Buffer {
    /// Guest-physical address.
    pub addr: GuestAddress,
    /// Length.
    pub len: u32,
    /// True if the device may write it.
    pub writable: bool,
}

/// The stretches of a chain, readable before writable as the protocol wants.
pub fn buffers(chain: Chain<'_>) -> Result<Vec<Buffer>, DeviceError> {
    let list: Vec<Buffer> = chain.map(|d| Buffer { addr: d.addr(), len: d.len(), writable: d.is_write_only() }).collect();
    if list.is_empty() {
        return Err(DeviceError::Protocol("an empty chain"));
    }
    if list.windows(2).any(|w| w[0].writable && !w[1].writable) {
        return Err(DeviceError::Protocol("a readable buffer after a writable one"));
    }
    Ok(list)
}

/// Copies the readable part of `list` out, at most `limit` bytes.
pub fn read_all(memory: &GuestMemoryMmap, list: &[Buffer], limit: usize) -> Result<Vec<u8>, DeviceError> {
    let mut out = Vec::new();
    for b in list.iter().filter(|b| !b.writable) {
        let n = (b.len as usize).min(limit - out.len());
        let at = out.len();
        out.resize(at + n, 0);
        memory.read_slice(&mut out[at..], b.addr)?;
    }
    Ok(out)
}

/// Copies `data` into the writable part of `list`; returns the bytes that fitted.
pub fn write_all(memory: &GuestMemoryMmap, list: &[Buffer], data: &[u8]) -> Result<usize, DeviceError> {
    let mut done = 0;
    for b in list.iter().filter(|b| b.writable) {
        let n = (b.len as usize).min(data.len() - done);
        memory.write_slice(&data[done..done + n], b.addr)?;
        done += n;
    }
    Ok(done)
}

/// What a step leaves to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// There may be more: step again.
    More,
    /// Nothing to do until a queue is kicked, the control descriptor or [`Device::watch`] fires.
    Idle,
    /// Nothing to do now, but try again in so many milliseconds (the lease is closed, or the host's disk is full).
    Later(u16),
}

/// One device model. Called by its worker and by the vCPUs, never at the same time.
pub trait Device: Send {
    /// Virtio device id.
    fn id(&self) -> u32;
    /// Short name for logs and the state.
    fn name(&self) -> &'static str;
    /// Feature bits offered besides VERSION_1 and EVENT_IDX.
    fn features(&self) -> u64;
    /// Largest size of each queue.
    fn queue_sizes(&self) -> &'static [u16];
    /// The configuration space.
    fn config(&self) -> Vec<u8>;
    /// A write to the configuration space.
    fn write_config(&mut self, _offset: usize, _data: &[u8]) {}
    /// Back to power-on; host connections stay.
    fn reset(&mut self) {}
    /// One request.
    fn step(&mut self, io: &mut Io<'_>) -> Result<Progress, DeviceError>;
    /// A descriptor besides the queues and the poll events to wait for.
    fn watch(&self) -> Option<(Arc<UnixStream>, PollFlags)> {
        None
    }
    /// Makes the guest port anew; only the console has one.
    fn connect_port(&mut self) -> Option<std::io::Result<UnixStream>> {
        None
    }
    /// The machine is gone: lets go of the host's side.
    fn hang_up(&mut self) {}
    /// State beyond registers and queues.
    fn save(&self) -> serde_json::Value {
        serde_json::Value::Null
    }
    /// Takes it back. Refuses what does not fit.
    fn load(&mut self, _state: &serde_json::Value) -> Result<(), String> {
        Ok(())
    }
}

/// A device slot shared by vCPUs, worker and engine.
pub type Slot = Arc<mmio::MmioSlot>;
