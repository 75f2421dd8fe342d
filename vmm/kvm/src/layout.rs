//! Where everything is in the guest's physical address space and on its I/O ports. Pure; fixed for format version 1 of
//! the state, because a restored guest goes on using these addresses.

/// Bytes in one small page.
pub const PAGE: u64 = 4096;
/// RAM below this address is slot 0; the rest of the memory file continues at 4 GiB (slot 1).
pub const LOW_RAM_END_MAX: u64 = 0xd000_0000;
/// Where slot 1 begins.
pub const HIGH_RAM_START: u64 = 1 << 32;
/// First virtio-mmio window; one page each.
pub const VIRTIO_MMIO_BASE: u64 = 0xd000_0000;
/// Bytes of one virtio-mmio window.
pub const VIRTIO_MMIO_BYTES: u64 = 0x1000;
/// GSIs of the virtio devices, in device order: ISA lines that no legacy device of ours uses.
pub const VIRTIO_GSIS: [u32; 4] = [5, 10, 11, 12];
/// GSI of the serial console.
pub const SERIAL_GSI: u32 = 4;
/// GSI of ACPI's SCI; never raised, but the table must name one.
pub const SCI_GSI: u32 = 9;
/// First port of COM1 (8 ports).
pub const SERIAL_PORT: u16 = 0x3f8;
/// The keyboard controller's command port: 0xfe resets.
pub const I8042_COMMAND_PORT: u16 = 0x64;
/// ACPI PM1a event block (status, enable: 2 bytes each).
pub const PM1_EVENT_PORT: u16 = 0x600;
/// ACPI PM1a control block (2 bytes).
pub const PM1_CONTROL_PORT: u16 = 0x604;
/// The I/O APIC.
pub const IOAPIC_ADDR: u32 = 0xfec0_0000;
/// The local APICs.
pub const LAPIC_ADDR: u32 = 0xfee0_0000;
/// Three pages that KVM needs on Intel hosts.
pub const TSS_ADDR: usize = 0xfffb_d000;
/// One page that KVM needs on Intel hosts.
pub const IDENTITY_MAP_ADDR: u64 = 0xffff_c000;

/// The initial GDT.
pub const GDT_ADDR: u64 = 0x500;
/// Linux's zero page.
pub const BOOT_PARAMS_ADDR: u64 = 0x7000;
/// Stack of the first instructions.
pub const BOOT_STACK: u64 = 0x8ff0;
/// Page tables of the first instructions: PML4, PDPT, four page directories.
pub const PAGE_TABLES_ADDR: u64 = 0x9000;
/// Kernel command line.
pub const CMDLINE_ADDR: u64 = 0x2_0000;
/// Longest command line with its NUL (COMMAND_LINE_SIZE of x86).
pub const CMDLINE_BYTES_MAX: usize = 2048;
/// End of conventional memory.
pub const LOW_MEMORY_END: u64 = 0x9_fc00;
/// ACPI tables; the RSDP is first.
pub const ACPI_ADDR: u64 = 0xe_0000;
/// Room for them.
pub const ACPI_BYTES_MAX: u64 = 0x2_0000;
/// RAM above the legacy hole; a bzImage is loaded here.
pub const HIGH_MEMORY_START: u64 = 0x10_0000;

/// One stretch of guest RAM: guest-physical start, offset in the memory file, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RamSlot {
    /// Guest-physical address.
    pub guest: u64,
    /// Offset in the memory file.
    pub offset: u64,
    /// Length.
    pub bytes: u64,
}

/// The slots of a memory file of `bytes`: one below 3.25 GiB, a second from 4 GiB when it is longer.
pub fn ram_slots(bytes: u64) -> Vec<RamSlot> {
    let low = bytes.min(LOW_RAM_END_MAX);
    let mut slots = vec![RamSlot { guest: 0, offset: 0, bytes: low }];
    if bytes > low {
        slots.push(RamSlot { guest: HIGH_RAM_START, offset: low, bytes: bytes - low });
    }
    slots
}

/// Offset in the memory file of guest-physical `addr`, if `len` bytes there are RAM of one slot.
pub fn file_offset(slots: &[RamSlot], addr: u64, len: u64) -> Option<u64> {
    slots.iter().find_map(|s| {
        let into = addr.checked_sub(s.guest)?;
        (into.checked_add(len)? <= s.bytes).then_some(s.offset + into)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_splits_at_the_hole_and_every_byte_has_one_address() {
        assert_eq!(ram_slots(1 << 30), vec![RamSlot { guest: 0, offset: 0, bytes: 1 << 30 }]);
        let slots = ram_slots(4 << 30);
        assert_eq!(slots.iter().map(|s| s.bytes).sum::<u64>(), 4 << 30);
        assert_eq!(slots[1], RamSlot { guest: 1 << 32, offset: LOW_RAM_END_MAX, bytes: (4 << 30) - LOW_RAM_END_MAX });
        assert_eq!(file_offset(&slots, LOW_RAM_END_MAX - 1, 1), Some(LOW_RAM_END_MAX - 1));
        assert_eq!(file_offset(&slots, LOW_RAM_END_MAX - 1, 2), None, "into the hole");
        assert_eq!(file_offset(&slots, LOW_RAM_END_MAX, 1), None);
        assert_eq!(file_offset(&slots, 1 << 32, 8), Some(LOW_RAM_END_MAX));
        assert_eq!(file_offset(&slots, u64::MAX, 2), None);
    }
}
