//! virtio-rng: bytes of the host's generator. Source: virtio 1.2, 5.4.

use super::{Device, DeviceError, Io, Progress, buffers, write_all};

const QUEUE_SIZES: &[u16] = &[16];
const BYTES_MAX: usize = 4096;

/// The device; it has no state.
pub struct Entropy;

impl Device for Entropy {
    fn id(&self) -> u32 {
        4
    }
    fn name(&self) -> &'static str {
        "entropy"
    }
    fn features(&self) -> u64 {
        0
    }
    fn queue_sizes(&self) -> &'static [u16] {
        QUEUE_SIZES
    }
    fn config(&self) -> Vec<u8> {
        Vec::new()
    }
    fn step(&mut self, io: &mut Io<'_>) -> Result<Progress, DeviceError> {
        let Some(chain) = io.pop(0)? else { return Ok(Progress::Idle) };
        let head = chain.head_index();
        let list = buffers(chain)?;
        let wanted: usize = list.iter().filter(|b| b.writable).map(|b| b.len as usize).sum();
        let mut random = vec![0; wanted.min(BYTES_MAX)];
        // Zero bytes used tells the driver that there was nothing; it is never given bytes that are not random.
        let n = match getrandom::fill(&mut random) {
            Ok(()) => write_all(io.ram.memory(), &list, &random)?,
            Err(e) => {
                tracing::error!("entropy: {e}");
                0
            }
        };
        io.used(0, head, n as u32)?;
        Ok(Progress::More)
    }
}
