//! What the guest's port and memory accesses reach: the serial console, the reset port, ACPI's PM1 block and the
//! virtio windows. Anything else reads as ones and swallows writes, as an empty bus does.

use crate::layout;
use crate::serial::Com1;
use crate::virtio::Slot;
use std::sync::atomic::{AtomicU16, Ordering};

/// The guest asks for the end of the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// Reset (reboot, or a panic with panic=-1).
    Reset,
    /// ACPI power-off.
    PowerOff,
}

/// SLP_EN with the SLP_TYP that the DSDT gives for S5.
const SLEEP_ENABLE: u16 = 1 << 13;
const SLEEP_TYPE_S5: u16 = 5;
const SCI_ENABLED: u16 = 1;

/// All devices by address.
pub struct Bus {
    /// The console.
    pub com1: Com1,
    /// Virtio windows in address order.
    pub slots: Vec<Slot>,
    // PM1 event: status (write one to clear; nothing is ever raised) and enable.
    pm1_enable: AtomicU16,
}

impl Bus {
    /// A bus with these devices.
    pub fn new(com1: Com1, slots: Vec<Slot>) -> Self {
        Self { com1, slots, pm1_enable: AtomicU16::new(0) }
    }

    fn slot(&self, addr: u64) -> Option<(&Slot, u64)> {
        let into = addr.checked_sub(layout::VIRTIO_MMIO_BASE)?;
        let slot = self.slots.get(usize::try_from(into / layout::VIRTIO_MMIO_BYTES).ok()?)?;
        Some((slot, into % layout::VIRTIO_MMIO_BYTES))
    }
    /// A read of guest-physical memory that is not RAM.
    pub fn mmio_read(&self, addr: u64, data: &mut [u8]) {
        match self.slot(addr) {
            Some((slot, offset)) => slot.read(offset, data),
            None => data.fill(0xff),
        }
    }
    /// A write there.
    pub fn mmio_write(&self, addr: u64, data: &[u8]) {
        if let Some((slot, offset)) = self.slot(addr) {
            slot.write(offset, data);
        }
    }
    /// IN; `data` may hold several units of a string instruction.
    pub fn port_read(&self, port: u16, data: &mut [u8]) {
        match port {
            p if Com1::owns(p) => data.iter_mut().for_each(|b| *b = self.com1.read((p - layout::SERIAL_PORT) as u8)),
            // No output waiting, input buffer empty: the reset code may go on.
            layout::I8042_COMMAND_PORT => data.fill(0),
            layout::PM1_CONTROL_PORT => word(data, SCI_ENABLED),
            layout::PM1_EVENT_PORT => word(data, 0),
            p if p == layout::PM1_EVENT_PORT + 2 => word(data, self.pm1_enable.load(Ordering::Relaxed)),
            // Timer 2's output bit, so that nobody waits for it for ever.
            0x61 => data.fill(0x20),
            _ => data.fill(0xff),
        }
    }
    /// OUT; Some if the guest asks for the end.
    pub fn port_write(&self, port: u16, data: &[u8]) -> Option<Ending> {
        let value = data.get(..2).map(|d| u16::from_le_bytes([d[0], d[1]]));
        match port {
            p if Com1::owns(p) => data.iter().for_each(|b| self.com1.write((p - layout::SERIAL_PORT) as u8, *b)),
            layout::I8042_COMMAND_PORT if data.contains(&0xfe) => return Some(Ending::Reset),
            p if p == layout::PM1_EVENT_PORT + 2 => {
                if let Some(v) = value {
                    self.pm1_enable.store(v, Ordering::Relaxed);
                }
            }
            layout::PM1_CONTROL_PORT if value.is_some_and(|v| v & SLEEP_ENABLE != 0 && v >> 10 & 7 == SLEEP_TYPE_S5) => {
                return Some(Ending::PowerOff);
            }
            _ => {}
        }
        None
    }
    /// The machine is gone: device work ends, and whoever holds the guest's port reads end of file.
    pub fn machine_ended(&self) {
        for slot in &self.slots {
            slot.end();
            slot.with_core(|c| c.device.hang_up());
        }
    }
    /// The PM1 enable register, for the state.
    pub fn pm1_enable(&self) -> u16 {
        self.pm1_enable.load(Ordering::Relaxed)
    }
    /// Takes it back.
    pub fn restore_pm1_enable(&self, value: u16) {
        self.pm1_enable.store(value, Ordering::Relaxed);
    }
}

fn word(data: &mut [u8], value: u16) {
    let bytes = value.to_le_bytes();
    for (i, b) in data.iter_mut().enumerate() {
        *b = bytes.get(i).copied().unwrap_or(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serial::{ConsoleLog, LogHandle};
    use vmm_sys_util::eventfd::EventFd;

    #[test]
    fn reset_and_power_off_end_the_machine_and_nothing_else_does() {
        let dir = tempfile::tempdir().unwrap();
        let log = LogHandle::new(ConsoleLog::open(&dir.path().join("c")).unwrap());
        let bus = Bus::new(Com1::new(EventFd::new(0).unwrap(), log, None).unwrap(), Vec::new());
        assert_eq!(bus.port_write(0x64, &[0xfe]), Some(Ending::Reset));
        assert_eq!(bus.port_write(0x64, &[0xd1]), None);
        assert_eq!(bus.port_write(layout::PM1_CONTROL_PORT, &(5u16 << 10 | 1 << 13).to_le_bytes()), Some(Ending::PowerOff));
        assert_eq!(bus.port_write(layout::PM1_CONTROL_PORT, &(5u16 << 10).to_le_bytes()), None);
        bus.port_write(layout::PM1_EVENT_PORT + 2, &0x120u16.to_le_bytes());
        let mut data = [0; 2];
        bus.port_read(layout::PM1_EVENT_PORT + 2, &mut data);
        assert_eq!(data, 0x120u16.to_le_bytes());
        let mut empty = [0; 4];
        bus.port_read(0xcf8, &mut empty);
        assert_eq!(empty, [0xff; 4]);
        bus.mmio_read(0xe000_0000, &mut empty);
        assert_eq!(empty, [0xff; 4]);
    }
}
