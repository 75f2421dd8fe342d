//! virtio-balloon with free-page reporting: pages that the guest gives back become holes of the memory file.
//! Source: virtio 1.2, 5.5. The host never asks for an inflation; a driver that inflates anyway is honoured.

use super::{Device, DeviceError, Io, Progress, buffers, read_all};
use crate::layout::PAGE;
use crate::sys::ram::Ram;
use ks_vmm_core::memory::Memory;
use std::sync::Arc;

const QUEUE_SIZES: &[u16] = &[128, 128, 128];
const INFLATE: usize = 0;
const DEFLATE: usize = 1;
const REPORTING: usize = 2;
/// DEFLATE_ON_OOM, REPORTING.
const FEATURES: u64 = 1 << 2 | 1 << 5;
const PFN_BYTES_MAX: usize = 4096;

/// The device.
pub struct Balloon {
    memory: Arc<Memory>,
    actual: u32,
    /// Bytes given back in this run.
    pub returned: u64,
}

impl Balloon {
    /// A balloon over `memory`.
    pub fn new(memory: Arc<Memory>) -> Self {
        Self { memory, actual: 0, returned: 0 }
    }

    /// Gives back the whole pages of a guest-physical range.
    fn give_back(&mut self, ram: &Ram, addr: u64, len: u64) -> Result<(), DeviceError> {
        let start = addr.next_multiple_of(PAGE);
        let end = addr.saturating_add(len) / PAGE * PAGE;
        if end <= start {
            return Ok(());
        }
        let offset = ram.file_offset(start, end - start).ok_or(DeviceError::Protocol("free pages outside memory"))?;
        match self.memory.discard(offset, end - start) {
            Ok(()) => self.returned += end - start,
            // The pages keep their content: allowed, only not thrifty.
            Err(e) => tracing::warn!("balloon: {e}"),
        }
        Ok(())
    }
}

impl Device for Balloon {
    fn id(&self) -> u32 {
        5
    }
    fn name(&self) -> &'static str {
        "balloon"
    }
    fn features(&self) -> u64 {
        FEATURES
    }
    fn queue_sizes(&self) -> &'static [u16] {
        QUEUE_SIZES
    }
    fn config(&self) -> Vec<u8> {
        let mut c = vec![0; 16];
        c[4..8].copy_from_slice(&self.actual.to_le_bytes());
        c
    }
    fn write_config(&mut self, offset: usize, data: &[u8]) {
        if let (4, Ok(value)) = (offset, <[u8; 4]>::try_from(data)) {
            self.actual = u32::from_le_bytes(value);
        }
    }
    fn reset(&mut self) {
        self.actual = 0;
    }
    fn step(&mut self, io: &mut Io<'_>) -> Result<Progress, DeviceError> {
        for queue in [REPORTING, INFLATE, DEFLATE] {
            let Some(chain) = io.pop(queue)? else { continue };
            let head = chain.head_index();
            let list = buffers(chain)?;
            if queue == REPORTING {
                for b in list.iter().filter(|b| b.writable) {
                    self.give_back(io.ram, b.addr.0, u64::from(b.len))?;
                }
            } else if queue == INFLATE {
                for pfn in read_all(io.ram.memory(), &list, PFN_BYTES_MAX)?.chunks_exact(4) {
                    let pfn = u32::from_le_bytes([pfn[0], pfn[1], pfn[2], pfn[3]]);
                    self.give_back(io.ram, u64::from(pfn) * PAGE, PAGE)?;
                }
            }
            io.used(queue, head, 0)?;
            return Ok(Progress::More);
        }
        Ok(Progress::Idle)
    }
    fn save(&self) -> serde_json::Value {
        serde_json::json!({ "actual": self.actual })
    }
    fn load(&mut self, state: &serde_json::Value) -> Result<(), String> {
        let actual = state.get("actual").and_then(serde_json::Value::as_u64).and_then(|v| u32::try_from(v).ok());
        self.actual = actual.ok_or_else(|| format!("balloon: no page count in {state}"))?;
        Ok(())
    }
}
