//! virtio-blk over the core's layered disk. Source: virtio 1.2, 5.2.
//!
//! A request runs to its end in one step; while the lease is closed none is taken, so the guest sees no error of ours. One that
//! finds the host's disk full, or whose lease ends under it, goes back into the ring and is taken again later: a guest's file
//! system would not survive the error, and a checkpoint meanwhile has the request as one that was never taken.

use super::{Buffer, Device, DeviceError, Io, Progress, buffers, read_all, write_all};
use ks_vmm_core::disk::{Disk, DiskError};
use ks_vmm_core::lease::LeaseGate;
use rustix::io::Errno;
use std::sync::Arc;
use vm_memory::{Bytes, GuestMemoryMmap};

const SECTOR: u64 = 512;
const QUEUE_SIZES: &[u16] = &[128];
const SEGMENTS_MAX: u32 = 126;
const BOUNCE: usize = 64 * 1024;
const DISCARD_SEGMENTS_MAX: u32 = 32;
const DISCARD_SECTORS_MAX: u32 = 1 << 22;
/// Requests' features: SEG_MAX, BLK_SIZE, FLUSH, TOPOLOGY, DISCARD, WRITE_ZEROES, INDIRECT_DESC.
const FEATURES: u64 = 1 << 2 | 1 << 6 | 1 << 9 | 1 << 10 | 1 << 13 | 1 << 14 | 1 << 28;

const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;

const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPPORTED: u8 = 2;
const ID: &[u8; 20] = b"ks-root\0\0\0\0\0\0\0\0\0\0\0\0\0";

/// A request that waits for space on the host is tried this often, milliseconds.
const SPACE_LOOK_MS: u16 = 250;
/// One that waits for the lease, or for its turn after the lease came back.
const HELD_LOOK_MS: u16 = 20;

/// Called with a sentence that the operator should read.
pub type Warn = Arc<dyn Fn(String) + Send + Sync>;

/// What the device needs of the disk below it; the core's layered [`Disk`], and a model in tests.
pub trait Backing: Send + Sync {
    /// Size, bytes.
    fn bytes(&self) -> u64;
    /// Fills `buf` from `offset`.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), DiskError>;
    /// Stores `data` at `offset`. May be repeated as a whole after an error.
    fn write_at(&self, offset: u64, data: &[u8]) -> Result<(), DiskError>;
    /// Zeros a range.
    fn write_zeroes(&self, offset: u64, len: u64) -> Result<(), DiskError>;
    /// Forgets a range.
    fn discard(&self, offset: u64, len: u64) -> Result<(), DiskError>;
    /// Syncs.
    fn flush(&self) -> Result<(), DiskError>;
}

impl Backing for Disk {
    fn bytes(&self) -> u64 {
        Self::bytes(self)
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), DiskError> {
        Self::read_at(self, offset, buf)
    }
    fn write_at(&self, offset: u64, data: &[u8]) -> Result<(), DiskError> {
        Self::write_at(self, offset, data)
    }
    fn write_zeroes(&self, offset: u64, len: u64) -> Result<(), DiskError> {
        Self::write_zeroes(self, offset, len)
    }
    fn discard(&self, offset: u64, len: u64) -> Result<(), DiskError> {
        Self::discard(self, offset, len)
    }
    fn flush(&self) -> Result<(), DiskError> {
        Self::flush(self)
    }
}

/// The root disk.
pub struct Block<B: Backing = Disk> {
    disk: Arc<B>,
    lease: Arc<LeaseGate>,
    warn: Warn,
    /// The operator was told that writes wait for space, and they still do.
    told: bool,
}

/// Why a request fails: told to the guest as a status, put off, or a broken driver.
enum Failure {
    Status(u8),
    /// Without a trace for the guest. The reason is told to the operator, if there is one.
    Later(u16, Option<String>),
    Device(DeviceError),
}
impl<E: Into<DeviceError>> From<E> for Failure {
    fn from(e: E) -> Self {
        Self::Device(e.into())
    }
}

impl<B: Backing> Block<B> {
    /// A device over `disk`.
    pub fn new(disk: Arc<B>, lease: Arc<LeaseGate>, warn: Warn) -> Self {
        Self { disk, lease, warn, told: false }
    }

    fn refused(error: &DiskError) -> Failure {
        match error {
            DiskError::LeaseEnded => Failure::Later(HELD_LOOK_MS, None),
            DiskError::Scratch { errno: Errno::NOSPC | Errno::DQUOT, .. } => {
                Failure::Later(SPACE_LOOK_MS, Some(error.to_string()))
            }
            _ => {
                tracing::error!("disk: {error}");
                Failure::Status(IOERR)
            }
        }
    }

    /// Serves one request: the bytes that the guest may look at, or why it is not done yet.
    fn request(&self, memory: &GuestMemoryMmap, list: &[Buffer]) -> Result<u32, Failure> {
        let Some((status, data)) = list.split_last().filter(|(s, _)| s.writable && s.len >= 1) else {
            return Err(DeviceError::Protocol("a disk request without a status byte").into());
        };
        let head = read_all(memory, data, 16)?;
        if head.len() < 16 {
            return Err(DeviceError::Protocol("a disk request without a header").into());
        }
        let kind = u32::from_le_bytes([head[0], head[1], head[2], head[3]]);
        let mut sector = [0; 8];
        sector.copy_from_slice(&head[8..16]);
        let data = after(data, 16);
        let (code, written) = match self.transfer(memory, kind, u64::from_le_bytes(sector), &data) {
            Ok(n) => (OK, n),
            Err(Failure::Status(code)) => (code, 0),
            Err(put_off_or_broken) => return Err(put_off_or_broken),
        };
        memory.write_obj(code, status.addr)?;
        Ok(written + 1)
    }

    fn transfer(&self, memory: &GuestMemoryMmap, kind: u32, sector: u64, data: &[Buffer]) -> Result<u32, Failure> {
        match kind {
            IN => self.read(memory, sector, data),
            OUT => self.write(memory, sector, data),
            FLUSH => self.disk.flush().map(|()| 0).map_err(|e| Self::refused(&e)),
            GET_ID => Ok(write_all(memory, data, ID)? as u32),
            DISCARD | WRITE_ZEROES => self.clear(memory, kind, data),
            _ => Err(Failure::Status(UNSUPPORTED)),
        }
    }

    fn read(&self, memory: &GuestMemoryMmap, sector: u64, data: &[Buffer]) -> Result<u32, Failure> {
        let mut offset = sector.checked_mul(SECTOR).ok_or(Failure::Status(IOERR))?;
        let mut bounce = vec![0; BOUNCE];
        let mut total = 0u32;
        for b in data.iter().filter(|b| b.writable) {
            for (at, n) in pieces(b.len) {
                self.disk.read_at(offset, &mut bounce[..n]).map_err(|e| Self::refused(&e))?;
                memory.write_slice(&bounce[..n], vm_memory::GuestAddress(b.addr.0.wrapping_add(at)))?;
                offset += n as u64;
            }
            total = total.saturating_add(b.len);
        }
        Ok(total)
    }

    fn write(&self, memory: &GuestMemoryMmap, sector: u64, data: &[Buffer]) -> Result<u32, Failure> {
        let mut offset = sector.checked_mul(SECTOR).ok_or(Failure::Status(IOERR))?;
        let mut bounce = vec![0; BOUNCE];
        for b in data.iter().filter(|b| !b.writable) {
            for (at, n) in pieces(b.len) {
                memory.read_slice(&mut bounce[..n], vm_memory::GuestAddress(b.addr.0.wrapping_add(at)))?;
                self.disk.write_at(offset, &bounce[..n]).map_err(|e| Self::refused(&e))?;
                offset += n as u64;
            }
        }
        Ok(0)
    }

    fn clear(&self, memory: &GuestMemoryMmap, kind: u32, data: &[Buffer]) -> Result<u32, Failure> {
        let list = read_all(memory, data, DISCARD_SEGMENTS_MAX as usize * 16)?;
        for s in list.chunks_exact(16) {
            let mut sector = [0; 8];
            sector.copy_from_slice(&s[..8]);
            let sectors = u32::from_le_bytes([s[8], s[9], s[10], s[11]]);
            let offset = u64::from_le_bytes(sector).checked_mul(SECTOR).ok_or(Failure::Status(IOERR))?;
            let len = u64::from(sectors) * SECTOR;
            let done = if kind == DISCARD { self.disk.discard(offset, len) } else { self.disk.write_zeroes(offset, len) };
            done.map_err(|e| Self::refused(&e))?;
        }
        Ok(0)
    }
}

/// The pieces of at most the bounce buffer's size: (offset in the buffer, bytes).
fn pieces(len: u32) -> impl Iterator<Item = (u64, usize)> {
    let len = len as usize;
    (0..len).step_by(BOUNCE).map(move |at| (at as u64, BOUNCE.min(len - at)))
}

/// `list` without its first `skip` readable bytes.
fn after(list: &[Buffer], skip: u32) -> Vec<Buffer> {
    let mut left = skip;
    let mut out = Vec::new();
    for b in list {
        if b.writable || left == 0 {
            out.push(*b);
        } else {
            let n = left.min(b.len);
            left -= n;
            if n < b.len {
                out.push(Buffer { addr: vm_memory::GuestAddress(b.addr.0.wrapping_add(u64::from(n))), len: b.len - n, ..*b });
            }
        }
    }
    out
}

impl<B: Backing> Device for Block<B> {
    fn id(&self) -> u32 {
        2
    }
    fn name(&self) -> &'static str {
        "block"
    }
    fn features(&self) -> u64 {
        FEATURES
    }
    fn queue_sizes(&self) -> &'static [u16] {
        QUEUE_SIZES
    }
    fn config(&self) -> Vec<u8> {
        let mut c = vec![0; 60];
        c[..8].copy_from_slice(&(self.disk.bytes() / SECTOR).to_le_bytes());
        c[12..16].copy_from_slice(&SEGMENTS_MAX.to_le_bytes());
        c[20..24].copy_from_slice(&(SECTOR as u32).to_le_bytes());
        c[24] = 3; // 4 KiB physical blocks
        c[36..40].copy_from_slice(&DISCARD_SECTORS_MAX.to_le_bytes());
        c[40..44].copy_from_slice(&DISCARD_SEGMENTS_MAX.to_le_bytes());
        c[44..48].copy_from_slice(&8u32.to_le_bytes());
        c[48..52].copy_from_slice(&DISCARD_SECTORS_MAX.to_le_bytes());
        c[52..56].copy_from_slice(&DISCARD_SEGMENTS_MAX.to_le_bytes());
        c[56] = 1;
        c
    }
    fn step(&mut self, io: &mut Io<'_>) -> Result<Progress, DeviceError> {
        if !self.lease.may_run() {
            return Ok(Progress::Later(20));
        }
        let Some(chain) = io.pop(0)? else { return Ok(Progress::Idle) };
        let head = chain.head_index();
        let list = buffers(chain)?;
        let written = match self.request(io.ram.memory(), &list) {
            Ok(written) => written,
            Err(Failure::Later(ms, why)) => {
                io.put_back(0);
                if let Some(why) = why.filter(|_| !std::mem::replace(&mut self.told, true)) {
                    (self.warn)(format!("the guest's disk: {why}; the guest's writes wait until there is space"));
                }
                return Ok(Progress::Later(ms));
            }
            Err(Failure::Device(e)) => return Err(e),
            Err(Failure::Status(_)) => return Err(DeviceError::Protocol("a status without a place for it")),
        };
        self.told = false;
        io.used(0, head, written)?;
        Ok(Progress::More)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Interrupt;
    use super::*;
    use crate::sys::ram::Ram;
    use ks_proto::RunToken;
    use ks_vmm_core::memory::Memory;
    use std::sync::Mutex;
    use virtio_queue::Queue;
    use virtio_queue::desc::{RawDescriptor, split::Descriptor as SplitDescriptor};
    use virtio_queue::mock::MockSplitQueue;
    use vm_memory::GuestAddress;
    use vmm_sys_util::eventfd::EventFd;

    #[test]
    fn the_header_may_share_a_buffer_with_data_or_be_split() {
        let b = |addr, len, writable| Buffer { addr: GuestAddress(addr), len, writable };
        let show = |l: Vec<Buffer>| l.iter().map(|b| (b.addr.0, b.len)).collect::<Vec<_>>();
        assert_eq!(show(after(&[b(0, 16, false), b(100, 8, true)], 16)), [(100, 8)]);
        assert_eq!(show(after(&[b(0, 528, false)], 16)), [(16, 512)]);
        assert_eq!(show(after(&[b(0, 8, false), b(50, 16, false)], 16)), [(58, 8)]);
        assert_eq!(pieces(BOUNCE as u32 + 5).collect::<Vec<_>>(), [(0, BOUNCE), (BOUNCE as u64, 5)]);
        assert_eq!(pieces(0).count(), 0);
    }

    const MEMORY: u64 = 256 << 20;
    const OWN: RunToken = RunToken { generation: 1, epoch: 1, run: 1 };

    /// A disk of one MiB that refuses as told.
    #[derive(Default)]
    struct Model {
        bytes: Mutex<Vec<u8>>,
        refuse: Mutex<Option<fn() -> DiskError>>,
    }
    impl Backing for Model {
        fn bytes(&self) -> u64 {
            1 << 20
        }
        fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), DiskError> {
            buf.copy_from_slice(&self.bytes.lock().unwrap()[offset as usize..][..buf.len()]);
            Ok(())
        }
        fn write_at(&self, offset: u64, data: &[u8]) -> Result<(), DiskError> {
            if let Some(refuse) = *self.refuse.lock().unwrap() {
                return Err(refuse());
            }
            self.bytes.lock().unwrap()[offset as usize..][..data.len()].copy_from_slice(data);
            Ok(())
        }
        fn write_zeroes(&self, offset: u64, len: u64) -> Result<(), DiskError> {
            self.write_at(offset, &vec![0; len as usize])
        }
        fn discard(&self, _: u64, _: u64) -> Result<(), DiskError> {
            Ok(())
        }
        fn flush(&self) -> Result<(), DiskError> {
            Ok(())
        }
    }

    #[test]
    fn a_write_that_finds_the_host_full_or_the_lease_gone_waits_and_is_done_later() {
        let disk = Arc::new(Model { bytes: Mutex::new(vec![0; 1 << 20]), ..Model::default() });
        let lease = Arc::new(LeaseGate::new(OWN));
        lease.renew(OWN, u64::MAX).unwrap();
        let said = Arc::new(Mutex::new(Vec::new()));
        let sink = said.clone();
        let mut device = Block::new(disk.clone(), lease, Arc::new(move |w| sink.lock().unwrap().push(w)));
        let ram = Ram::map(Memory::create(MEMORY).unwrap()).unwrap();
        let memory = ram.memory();
        let interrupt = Interrupt::new(EventFd::new(libc::EFD_NONBLOCK).unwrap());
        let mock = MockSplitQueue::new(memory, 8);
        let mut head = 1u32.to_le_bytes().to_vec();
        head.extend([0; 4]);
        head.extend(3u64.to_le_bytes());
        memory.write_slice(&head, GuestAddress(0x10_0000)).unwrap();
        memory.write_slice(&[7; 512], GuestAddress(0x10_1000)).unwrap();
        memory.write_obj(0xffu8, GuestAddress(0x10_2000)).unwrap();
        let part = |addr, len, flags, next| RawDescriptor::from(SplitDescriptor::new(addr, len, flags, next));
        let chain = [part(0x10_0000, 16, 1, 1), part(0x10_1000, 512, 1, 2), part(0x10_2000, 1, 2, 0)];
        mock.build_desc_chain(&chain).unwrap();
        let mut queues = [mock.create_queue::<Queue>().unwrap()];
        let mut step = || device.step(&mut Io { queues: &mut queues, ram: &ram, interrupt: &interrupt }).unwrap();

        let full = || DiskError::Scratch { what: "write", errno: Errno::NOSPC };
        *disk.refuse.lock().unwrap() = Some(full);
        assert_eq!((step(), step()), (Progress::Later(SPACE_LOOK_MS), Progress::Later(SPACE_LOOK_MS)));
        *disk.refuse.lock().unwrap() = Some(|| DiskError::LeaseEnded);
        assert_eq!(step(), Progress::Later(HELD_LOOK_MS));
        assert_eq!(memory.read_obj::<u8>(GuestAddress(0x10_2000)).unwrap(), 0xff, "the guest was told nothing");
        assert_eq!(said.lock().unwrap().len(), 1, "the operator was told once: {said:?}");
        *disk.refuse.lock().unwrap() = None;
        assert_eq!((step(), step()), (Progress::More, Progress::Idle), "done once");
        assert_eq!(memory.read_obj::<u8>(GuestAddress(0x10_2000)).unwrap(), OK);
        assert_eq!(disk.bytes.lock().unwrap()[3 * 512..4 * 512], [7; 512]);
    }
}
