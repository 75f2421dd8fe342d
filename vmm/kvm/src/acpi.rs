//! The ACPI tables: RSDP, XSDT, FADT, FACS, MADT and a DSDT that names the serial port and one LNRO0005 device per
//! virtio-mmio window. Pure: from the shape of the machine to bytes and their address.
//!
//! Full (not hardware-reduced) ACPI on purpose: the reduced kind makes Linux drop the legacy interrupts 0-15, and then
//! a kernel without a PNP driver for the serial port has no console. Source: ACPI 6.5; Linux arch/x86/kernel/acpi.

use crate::layout;
use acpi_tables::{Aml, aml, facs::FACS, fadt, gas, rsdp::Rsdp, sdt::Sdt, xsdt::XSDT};

const OEM: [u8; 6] = *b"KEEPST";
const TABLE_ID: [u8; 8] = *b"KSVMMKVM";
const OEM_REVISION: u32 = 1;

/// One virtio-mmio device as the tables name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MmioNode {
    /// Window start.
    pub base: u64,
    /// Interrupt line.
    pub gsi: u32,
}

/// All tables as one blob to be put at [`layout::ACPI_ADDR`].
pub fn tables(vcpus: u16, nodes: &[MmioNode]) -> Vec<u8> {
    let mut blob = Vec::new();
    let mut put = |table: &dyn Aml| -> u64 {
        let at = blob.len();
        table.to_aml_bytes(&mut blob);
        let end = blob.len().next_multiple_of(64);
        blob.resize(end, 0);
        layout::ACPI_ADDR + at as u64
    };
    // The RSDP must come first, so it is written twice: once to keep its place.
    put(&Rsdp::new(OEM, 0));
    let dsdt = put(&dsdt(nodes));
    let facs = put(&FACS::new());
    let fadt = put(&fadt(dsdt, facs));
    let madt = put(&madt(vcpus));
    let mut xsdt = XSDT::new(OEM, TABLE_ID, OEM_REVISION);
    xsdt.add_entry(fadt);
    xsdt.add_entry(madt);
    let xsdt = put(&xsdt);
    let mut rsdp = Vec::new();
    Rsdp::new(OEM, xsdt).to_aml_bytes(&mut rsdp);
    blob[..rsdp.len()].copy_from_slice(&rsdp);
    assert!(blob.len() as u64 <= layout::ACPI_BYTES_MAX, "the tables fit their window");
    blob
}

fn io(port: u16, bytes: u8, access: gas::AccessSize) -> gas::GAS {
    gas::GAS::new(gas::AddressSpace::SystemIo, bytes * 8, 0, access, u64::from(port))
}

fn fadt(dsdt: u64, facs: u64) -> fadt::FADT {
    let mut t = fadt::FADTBuilder::new(OEM, TABLE_ID, OEM_REVISION)
        .dsdt_64(dsdt)
        .firmware_ctrl_64(facs)
        .flag(fadt::Flags::Wbinvd)
        .flag(fadt::Flags::ProcC1)
        .flag(fadt::Flags::PwrButton)
        .flag(fadt::Flags::SlpButton)
        .flag(fadt::Flags::ResetRegSup)
        .flag(fadt::Flags::Headless);
    t.sci_int = (layout::SCI_GSI as u16).into();
    // No SMI command port: the machine is in ACPI mode from the start.
    t.pm1a_evt_blk = u32::from(layout::PM1_EVENT_PORT).into();
    t.pm1a_cnt_blk = u32::from(layout::PM1_CONTROL_PORT).into();
    t.pm1_evt_len = 4;
    t.pm1_cnt_len = 2;
    t.x_pm1a_evt_blk = io(layout::PM1_EVENT_PORT, 4, gas::AccessSize::WordAccess);
    t.x_pm1a_cnt_blk = io(layout::PM1_CONTROL_PORT, 2, gas::AccessSize::WordAccess);
    t.p_lvl2_lat = 0xffff.into();
    t.p_lvl3_lat = 0xffff.into();
    // Legacy devices; no 8042 to probe (its reset port works), no VGA, no CMOS clock.
    t.iapc_boot_arch = 0b10_0101u16.into();
    t.reset_reg = io(layout::I8042_COMMAND_PORT, 1, gas::AccessSize::ByteAccess);
    t.reset_value = 0xfe;
    t.finalize()
}

fn madt(vcpus: u16) -> Sdt {
    let mut t = Sdt::new(*b"APIC", 44, 4, OEM, TABLE_ID, OEM_REVISION);
    t.write_u32(36, layout::LAPIC_ADDR);
    t.write_u32(40, 1); // a dual 8259 is there too
    for cpu in 0..vcpus {
        let id = cpu as u8;
        t.append_slice(&[0, 8, id, id, 1, 0, 0, 0]);
    }
    let mut ioapic = vec![1, 12, vcpus as u8, 0];
    ioapic.extend_from_slice(&layout::IOAPIC_ADDR.to_le_bytes());
    ioapic.extend_from_slice(&0u32.to_le_bytes());
    t.append_slice(&ioapic);
    // The SCI: level, active high.
    let mut over = vec![2, 10, 0, layout::SCI_GSI as u8];
    over.extend_from_slice(&layout::SCI_GSI.to_le_bytes());
    over.extend_from_slice(&0x000d_u16.to_le_bytes());
    t.append_slice(&over);
    t
}

fn dsdt(nodes: &[MmioNode]) -> Sdt {
    let mut body = Vec::new();
    for (i, node) in nodes.iter().enumerate() {
        let window = aml::Memory32Fixed::new(true, node.base as u32, layout::VIRTIO_MMIO_BYTES as u32);
        let interrupt = aml::Interrupt::new(true, true, false, false, node.gsi);
        aml::Device::new(
            format!("_SB_.VR{i:02X}").as_str().into(),
            vec![
                &aml::Name::new("_HID".into(), &"LNRO0005"),
                &aml::Name::new("_UID".into(), &(i as u32)),
                &aml::Name::new("_CCA".into(), &aml::ONE),
                &aml::Name::new("_CRS".into(), &aml::ResourceTemplate::new(vec![&window, &interrupt])),
            ],
        )
        .to_aml_bytes(&mut body);
    }
    let ports = aml::IO::new(layout::SERIAL_PORT, layout::SERIAL_PORT, 0, 8);
    let interrupt = aml::Interrupt::new(true, true, false, false, layout::SERIAL_GSI);
    aml::Device::new(
        "_SB_.COM1".into(),
        vec![
            &aml::Name::new("_HID".into(), &aml::EISAName::new("PNP0501")),
            &aml::Name::new("_UID".into(), &aml::ONE),
            &aml::Name::new("_CRS".into(), &aml::ResourceTemplate::new(vec![&ports, &interrupt])),
        ],
    )
    .to_aml_bytes(&mut body);
    let five = 5u8;
    let off = aml::Package::new(vec![&five, &five, &aml::ZERO, &aml::ZERO]);
    aml::Name::new("_S5_".into(), &off).to_aml_bytes(&mut body);
    let mut t = Sdt::new(*b"DSDT", 36, 2, OEM, TABLE_ID, OEM_REVISION);
    t.append_slice(&body);
    t
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(b: &[u8]) -> u8 {
        b.iter().fold(0u8, |a, x| a.wrapping_add(*x))
    }
    fn table(blob: &[u8], addr: u64) -> &[u8] {
        let at = (addr - layout::ACPI_ADDR) as usize;
        let len = u32::from_le_bytes(blob[at + 4..at + 8].try_into().unwrap()) as usize;
        &blob[at..at + len]
    }

    #[test]
    fn every_table_is_reachable_from_the_rsdp_and_its_checksum_holds() {
        let nodes: Vec<_> = (0..4)
            .map(|i| MmioNode { base: layout::VIRTIO_MMIO_BASE + i * 0x1000, gsi: layout::VIRTIO_GSIS[i as usize] })
            .collect();
        let blob = tables(2, &nodes);
        assert_eq!(&blob[..8], b"RSD PTR ");
        assert_eq!(sum(&blob[..20]), 0);
        assert_eq!(sum(&blob[..36]), 0);
        let xsdt = table(&blob, u64::from_le_bytes(blob[24..32].try_into().unwrap()));
        assert_eq!((&xsdt[..4], sum(xsdt)), (&b"XSDT"[..], 0));
        let entries: Vec<_> =
            xsdt[36..].chunks_exact(8).map(|c| table(&blob, u64::from_le_bytes(c.try_into().unwrap()))).collect();
        assert_eq!(entries.iter().map(|t| &t[..4]).collect::<Vec<_>>(), [b"FACP", b"APIC"]);
        assert!(entries.iter().all(|t| sum(t) == 0));
        let dsdt = table(&blob, u64::from_le_bytes(entries[0][140..148].try_into().unwrap()));
        assert_eq!((&dsdt[..4], sum(dsdt)), (&b"DSDT"[..], 0));
        for node in &nodes {
            let base = (node.base as u32).to_le_bytes();
            assert!(dsdt.windows(4).any(|w| w == base), "window {:#x} is named", node.base);
        }
        // Two local APICs of 8 bytes, one I/O APIC of 12, one override of 10.
        assert_eq!(entries[1].len(), 44 + 2 * 8 + 12 + 10);
    }
}
