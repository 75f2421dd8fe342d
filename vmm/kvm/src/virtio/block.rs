//! virtio-blk over the core's layered disk. Source: virtio 1.2, 5.2.
//!
//! A request runs to its end in one step; while the lease is closed none is taken, so the guest sees no error of ours.

use super::{Buffer, Device, DeviceError, Io, Progress, buffers, read_all, write_all};
use ks_vmm_core::disk::{Disk, DiskError};
use ks_vmm_core::lease::LeaseGate;
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

/// The root disk.
pub struct Block {
    disk: Arc<Disk>,
    lease: Arc<LeaseGate>,
}

/// Why a request fails: told to the guest as a status, or a broken driver.
enum Failure {
    Status(u8),
    Device(DeviceError),
}
impl<E: Into<DeviceError>> From<E> for Failure {
    fn from(e: E) -> Self {
        Self::Device(e.into())
    }
}

impl Block {
    /// A device over `disk`.
    pub fn new(disk: Arc<Disk>, lease: Arc<LeaseGate>) -> Self {
        Self { disk, lease }
    }

    fn refused(error: &DiskError) -> Failure {
        tracing::error!("disk: {error}");
        Failure::Status(IOERR)
    }

    fn request(&self, memory: &GuestMemoryMmap, list: &[Buffer]) -> Result<u32, DeviceError> {
        let Some((status, data)) = list.split_last().filter(|(s, _)| s.writable && s.len >= 1) else {
            return Err(DeviceError::Protocol("a disk request without a status byte"));
        };
        let head = read_all(memory, data, 16)?;
        if head.len() < 16 {
            return Err(DeviceError::Protocol("a disk request without a header"));
        }
        let kind = u32::from_le_bytes([head[0], head[1], head[2], head[3]]);
        let mut sector = [0; 8];
        sector.copy_from_slice(&head[8..16]);
        let data = after(data, 16);
        let (code, written) = match self.transfer(memory, kind, u64::from_le_bytes(sector), &data) {
            Ok(n) => (OK, n),
            Err(Failure::Status(code)) => (code, 0),
            Err(Failure::Device(e)) => return Err(e),
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

impl Device for Block {
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
        let written = self.request(io.ram.memory(), &list)?;
        io.used(0, head, written)?;
        Ok(Progress::More)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::GuestAddress;

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
}
