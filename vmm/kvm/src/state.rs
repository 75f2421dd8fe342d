//! The saved state of a machine without its memory and disk: format `KSKVMST`, version 1.
//!
//! Layout, little endian: magic (8), version u32, vCPU count u32, then per vCPU its blocks in the order of
//! [`VcpuState::blocks`]; the VM's blocks in the order of [`VmState::blocks`]; one JSON block for the devices; the
//! BLAKE3 hash of all bytes before it (32). A block is a u32 length and the bytes of one KVM structure as the kernel's
//! ABI lays it out (or of an array of them). A wrong length, hash, magic or version is refused before anything is used.

use crate::serial::SavedSerial;
use crate::virtio::mmio::SavedSlot;
use ks_proto::bytes::{DecodeError, Reader, Writer};
use kvm_bindings::{
    kvm_clock_data, kvm_cpuid_entry2, kvm_debugregs, kvm_irqchip, kvm_lapic_state, kvm_mp_state, kvm_msr_entry, kvm_pit_state2,
    kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs,
};
use serde::{Deserialize, Serialize};
use zerocopy::{FromBytes, Immutable, IntoBytes};

const MAGIC: &[u8; 8] = b"KSKVMST\n";
/// The version written.
pub const VERSION: u32 = 1;
const WHAT: &str = "kvm machine state";
/// The largest state that is read: far above what 64 vCPUs with the largest XSAVE areas need.
pub const STATE_BYTES_MAX: usize = 32 * 1024 * 1024;
const HASH_BYTES: usize = 32;
const VCPUS_MAX: usize = 255;

/// One vCPU.
#[derive(Debug, Clone, Default)]
pub struct VcpuState {
    /// CPUID as it was set.
    pub cpuid: Vec<kvm_cpuid_entry2>,
    /// Running, halted, waiting for SIPI.
    pub mp_state: kvm_mp_state,
    /// General registers.
    pub regs: kvm_regs,
    /// Segment and control registers.
    pub sregs: kvm_sregs,
    /// XSAVE area.
    pub xsave: Vec<u8>,
    /// XCR0.
    pub xcrs: kvm_xcrs,
    /// Debug registers.
    pub debug_regs: kvm_debugregs,
    /// Local APIC.
    pub lapic: kvm_lapic_state,
    /// MSRs in the order in which they are set.
    pub msrs: Vec<kvm_msr_entry>,
    /// Guest TSC minus host TSC (i64 as its bits), if the host tells.
    pub tsc_offset: Option<i64>,
    /// Pending events; last of all.
    pub events: kvm_vcpu_events,
}

/// What vCPUs share.
#[derive(Debug, Clone, Default)]
pub struct VmState {
    /// PIC master, PIC slave, I/O APIC.
    pub irqchips: [kvm_irqchip; 3],
    /// PIT.
    pub pit: kvm_pit_state2,
    /// kvm-clock.
    pub clock: kvm_clock_data,
    /// Host TSC at the save.
    pub host_tsc: u64,
}

/// The VMM's own devices.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceStates {
    /// COM1.
    pub serial: SavedSerial,
    /// ACPI PM1 enable.
    pub pm1_enable: u16,
    /// Virtio, in window order.
    pub slots: Vec<SavedSlot>,
}

/// All of it.
#[derive(Debug, Clone)]
pub struct MachineState {
    /// By vCPU number.
    pub vcpus: Vec<VcpuState>,
    /// Shared.
    pub vm: VmState,
    /// Devices.
    pub devices: DeviceStates,
}

fn put<T: IntoBytes + Immutable + ?Sized>(w: &mut Writer, value: &T) {
    let bytes = value.as_bytes();
    w.count(bytes.len()).raw(bytes);
}

fn block<'a>(r: &mut Reader<'a>) -> Result<&'a [u8], DecodeError> {
    let n = r.count(1)?;
    r.take(n)
}

fn get<T: FromBytes>(r: &mut Reader<'_>, name: &'static str) -> Result<T, DecodeError> {
    let bytes = block(r)?;
    T::read_from_bytes(bytes).map_err(|_| r.bad(format!("{name} has {} bytes, not {}", bytes.len(), size_of::<T>())))
}

fn list<T: FromBytes>(r: &mut Reader<'_>, name: &'static str) -> Result<Vec<T>, DecodeError> {
    let bytes = block(r)?;
    if bytes.len() % size_of::<T>() != 0 {
        return Err(r.bad(format!("{name} has {} bytes, not a multiple of {}", bytes.len(), size_of::<T>())));
    }
    bytes
        .chunks_exact(size_of::<T>())
        .map(|c| T::read_from_bytes(c).map_err(|_| r.bad(format!("{name}: an entry of {} bytes", c.len()))))
        .collect()
}

impl VcpuState {
    /// Writes the blocks.
    fn blocks(&self, w: &mut Writer) {
        put(w, self.cpuid.as_slice());
        put(w, &self.mp_state);
        put(w, &self.regs);
        put(w, &self.sregs);
        put(w, self.xsave.as_slice());
        put(w, &self.xcrs);
        put(w, &self.debug_regs);
        put(w, &self.lapic);
        put(w, self.msrs.as_slice());
        put(w, self.tsc_offset.as_slice());
        put(w, &self.events);
    }
    fn read(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self {
            cpuid: list(r, "cpuid")?,
            mp_state: get(r, "mp state")?,
            regs: get(r, "regs")?,
            sregs: get(r, "sregs")?,
            xsave: block(r)?.to_vec(),
            xcrs: get(r, "xcrs")?,
            debug_regs: get(r, "debug registers")?,
            lapic: get(r, "lapic")?,
            msrs: list(r, "msrs")?,
            tsc_offset: list::<i64>(r, "tsc offset")?.first().copied(),
            events: get(r, "events")?,
        })
    }
}

impl VmState {
    /// Writes the blocks.
    fn blocks(&self, w: &mut Writer) {
        for chip in &self.irqchips {
            put(w, chip);
        }
        put(w, &self.pit);
        put(w, &self.clock);
        put(w, &self.host_tsc);
    }
    fn read(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self {
            irqchips: [get(r, "pic")?, get(r, "pic")?, get(r, "ioapic")?],
            pit: get(r, "pit")?,
            clock: get(r, "clock")?,
            host_tsc: get(r, "host tsc")?,
        })
    }
}

impl MachineState {
    /// The bytes to store.
    pub fn encode(&self) -> Result<Vec<u8>, serde_json::Error> {
        let mut w = Writer::new();
        w.raw(MAGIC).u32(VERSION).u32(self.vcpus.len() as u32);
        for v in &self.vcpus {
            v.blocks(&mut w);
        }
        self.vm.blocks(&mut w);
        put(&mut w, serde_json::to_vec(&self.devices)?.as_slice());
        let mut bytes = w.finish();
        let hash = blake3::hash(&bytes);
        bytes.extend_from_slice(hash.as_bytes());
        Ok(bytes)
    }

    /// Reads bytes that may be anything.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(WHAT, bytes);
        if bytes.len() > STATE_BYTES_MAX {
            return Err(r.bad(format!("{} bytes, the most is {STATE_BYTES_MAX}", bytes.len())));
        }
        r.magic(MAGIC)?;
        let version = r.u32()?;
        if version != VERSION {
            return Err(DecodeError::Version { what: WHAT, got: version, known: VERSION });
        }
        let end = bytes.len().checked_sub(HASH_BYTES).filter(|e| *e >= 12);
        let end = end.ok_or_else(|| r.bad("shorter than its hash"))?;
        let (expected, computed) = (&bytes[end..], blake3::hash(&bytes[..end]));
        if computed.as_bytes() != expected {
            let expected = expected.iter().map(|b| format!("{b:02x}")).collect();
            return Err(DecodeError::Hash { what: WHAT, expected, computed: computed.to_hex().to_string() });
        }
        let mut r = Reader::new(WHAT, &bytes[12..end]);
        let count = r.u32()? as usize;
        if count == 0 || count > VCPUS_MAX {
            return Err(r.bad(format!("{count} vCPUs")));
        }
        let vcpus = (0..count).map(|_| VcpuState::read(&mut r)).collect::<Result<_, _>>()?;
        let vm = VmState::read(&mut r)?;
        let devices = serde_json::from_slice(block(&mut r)?).map_err(|e| r.bad(format!("devices: {e}")))?;
        r.end()?;
        Ok(Self { vcpus, vm, devices })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> MachineState {
        let vcpu = VcpuState {
            cpuid: vec![kvm_cpuid_entry2 { function: 7, ebx: 9, ..Default::default() }],
            regs: kvm_regs { rip: 0x1234, ..Default::default() },
            xsave: vec![7; 4096],
            msrs: vec![kvm_msr_entry { index: 0x10, data: 5, ..Default::default() }],
            tsc_offset: Some(-3),
            ..Default::default()
        };
        let serial = serde_json::json!({"divisor": [12, 0], "interrupt_enable": 0, "interrupt_identification": 1,
            "line_control": 3, "line_status": 96, "modem_control": 8, "modem_status": 176, "scratch": 0});
        let devices = DeviceStates { serial: serde_json::from_value(serial).unwrap(), pm1_enable: 1, slots: Vec::new() };
        MachineState { vcpus: vec![vcpu.clone(), vcpu], vm: VmState { host_tsc: 77, ..Default::default() }, devices }
    }

    #[test]
    fn round_trip() {
        let bytes = sample().encode().unwrap();
        let back = MachineState::decode(&bytes).unwrap();
        assert_eq!(back.encode().unwrap(), bytes);
        assert_eq!((back.vcpus.len(), back.vcpus[1].regs.rip, back.vcpus[0].tsc_offset), (2, 0x1234, Some(-3)));
        assert_eq!(&bytes[..12], b"KSKVMST\n\x01\0\0\0", "magic and version of version 1");
    }

    #[test]
    fn truncated_flipped_and_newer_states_are_refused() {
        let bytes = sample().encode().unwrap();
        for n in (0..bytes.len()).step_by(7) {
            assert!(MachineState::decode(&bytes[..n]).is_err(), "{n}");
        }
        for i in (0..bytes.len()).step_by(13) {
            let mut b = bytes.clone();
            b[i] ^= 1;
            assert!(MachineState::decode(&b).is_err(), "{i}");
        }
        let mut b = bytes;
        b[8] = 2;
        assert!(matches!(MachineState::decode(&b), Err(DecodeError::Version { got: 2, .. })));
    }

    #[test]
    fn a_right_hash_over_wrong_lengths_is_refused_too() {
        let good = sample().encode().unwrap();
        for at in (12..good.len() - HASH_BYTES).step_by(11) {
            let mut b = good[..good.len() - HASH_BYTES].to_vec();
            b[at] = b[at].wrapping_add(3);
            b.truncate(b.len() - at % 5);
            let hash = blake3::hash(&b);
            b.extend_from_slice(hash.as_bytes());
            // Either refused or a machine that encodes to the same bytes again: never a panic, never half of it.
            if let Ok(m) = MachineState::decode(&b) {
                assert_eq!(m.vcpus.len(), 2);
            }
        }
    }
}
