//! Puts a kernel, its initramfs, command line, zero page and ACPI tables into guest memory, and the boot CPU's
//! registers for 64-bit entry. Source: Linux Documentation/arch/x86/boot.rst.

use crate::layout;
use crate::sys::ram::Ram;
use kvm_bindings::{kvm_regs, kvm_segment, kvm_sregs};
use linux_loader::loader::bootparam::{boot_e820_entry, boot_params};
use linux_loader::loader::{BzImage, Elf, KernelLoader, KernelLoaderResult};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

const E820_RAM: u32 = 1;
const E820_ACPI: u32 = 3;
/// `xloadflags`: the kernel has the 64-bit entry point at 0x200.
const XLF_KERNEL_64: u16 = 1;
/// The page tables map this much, one to one.
const IDENTITY_GIB: u64 = 4;

/// Why the machine cannot be booted so.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// Not an ELF vmlinux and not a bzImage that this loader takes.
    #[error("the kernel is neither an x86-64 vmlinux nor a 64-bit bzImage: {0}")]
    Kernel(String),
    /// Memory is too small.
    #[error("{what} of {bytes} bytes does not fit into {memory} bytes of memory")]
    Room {
        /// What was to be placed.
        what: &'static str,
        /// Its size.
        bytes: u64,
        /// Guest memory below the hole.
        memory: u64,
    },
    /// Too many words.
    #[error("the kernel command line has {0} bytes, the most is 2047")]
    CmdlineLength(usize),
    /// Reading the files or writing guest memory.
    #[error("{what}: {source}")]
    Io {
        /// Which step.
        what: &'static str,
        /// Cause.
        source: std::io::Error,
    },
}

fn io<E: Into<Box<dyn std::error::Error + Send + Sync>>>(what: &'static str) -> impl Fn(E) -> BootError {
    move |e| BootError::Io { what, source: std::io::Error::other(e) }
}

/// What to load.
pub struct Boot<'a> {
    /// Kernel image.
    pub kernel: &'a mut File,
    /// Initramfs, maybe empty.
    pub initrd: &'a mut File,
    /// Command line.
    pub cmdline: &'a str,
    /// From [`crate::acpi::tables`].
    pub acpi: &'a [u8],
}

/// Loads everything; returns the entry point's address.
pub fn load(ram: &Ram, boot: Boot<'_>) -> Result<u64, BootError> {
    let memory = ram.memory();
    if boot.cmdline.len() >= layout::CMDLINE_BYTES_MAX {
        return Err(BootError::CmdlineLength(boot.cmdline.len()));
    }
    let low = layout::ram_slots(ram.bytes())[0].bytes;
    let (loaded, entry) = kernel(memory, boot.kernel)?;
    let mut params = boot_params { hdr: loaded.setup_header.unwrap_or_default(), ..Default::default() };
    if loaded.setup_header.is_none() {
        params.hdr.boot_flag = 0xaa55;
        params.hdr.header = 0x5372_6448;
        params.hdr.kernel_alignment = 0x0100_0000;
    }
    params.hdr.type_of_loader = 0xff;
    params.hdr.cmd_line_ptr = layout::CMDLINE_ADDR as u32;
    params.hdr.cmdline_size = boot.cmdline.len() as u32;
    // An unpacking bzImage uses init_size bytes from where it ends up.
    let kernel_end = loaded.kernel_end.max(layout::HIGH_MEMORY_START + u64::from(params.hdr.init_size) + (16 << 20));
    let (at, bytes) = initrd(memory, boot.initrd, low, kernel_end)?;
    params.hdr.ramdisk_image = at as u32;
    params.hdr.ramdisk_size = bytes as u32;
    params.acpi_rsdp_addr = layout::ACPI_ADDR;
    let map = e820(ram.bytes());
    params.e820_entries = map.len() as u8;
    params.e820_table[..map.len()].copy_from_slice(&map);
    let mut cmdline = boot.cmdline.as_bytes().to_vec();
    cmdline.push(0);
    memory.write_slice(&cmdline, GuestAddress(layout::CMDLINE_ADDR)).map_err(io("command line"))?;
    memory.write_slice(boot.acpi, GuestAddress(layout::ACPI_ADDR)).map_err(io("ACPI tables"))?;
    memory.write_obj(params, GuestAddress(layout::BOOT_PARAMS_ADDR)).map_err(io("zero page"))?;
    page_tables(memory).map_err(io("page tables"))?;
    Ok(entry)
}

fn kernel(memory: &GuestMemoryMmap, file: &mut File) -> Result<(KernelLoaderResult, u64), BootError> {
    let mut magic = [0; 4];
    file.rewind().and_then(|()| file.read_exact(&mut magic)).map_err(|e| BootError::Kernel(e.to_string()))?;
    file.rewind().map_err(|e| BootError::Kernel(e.to_string()))?;
    let start = Some(GuestAddress(layout::HIGH_MEMORY_START));
    if magic == *b"\x7fELF" {
        let loaded = Elf::load(memory, None, file, start).map_err(|e| BootError::Kernel(e.to_string()))?;
        return Ok((loaded, loaded.kernel_load.0));
    }
    let loaded = BzImage::load(memory, None, file, start).map_err(|e| BootError::Kernel(e.to_string()))?;
    let header = loaded.setup_header.unwrap_or_default();
    let (version, flags) = (header.version, header.xloadflags);
    if version < 0x20c || flags & XLF_KERNEL_64 == 0 {
        return Err(BootError::Kernel(format!("boot protocol {version:#x} without a 64-bit entry")));
    }
    Ok((loaded, loaded.kernel_load.0 + 0x200))
}

/// Places the initramfs as high as a kernel takes it; returns its address and size.
fn initrd(memory: &GuestMemoryMmap, file: &mut File, low: u64, kernel_end: u64) -> Result<(u64, u64), BootError> {
    let bytes = file.seek(SeekFrom::End(0)).map_err(io("initramfs"))?;
    if bytes == 0 {
        return Ok((0, 0));
    }
    file.rewind().map_err(io("initramfs"))?;
    let top = low.min(0x7fff_f000);
    let at = top.checked_sub(bytes).map(|a| a / layout::PAGE * layout::PAGE).filter(|a| *a >= kernel_end);
    let at = at.ok_or(BootError::Room { what: "the initramfs", bytes, memory: low })?;
    memory.read_exact_volatile_from(GuestAddress(at), file, bytes as usize).map_err(io("initramfs"))?;
    Ok((at, bytes))
}

fn e820(bytes: u64) -> Vec<boot_e820_entry> {
    let entry = |addr, end: u64, kind| boot_e820_entry { addr, size: end - addr, r#type: kind };
    let mut map = vec![
        entry(0, layout::LOW_MEMORY_END, E820_RAM),
        entry(layout::ACPI_ADDR, layout::ACPI_ADDR + layout::ACPI_BYTES_MAX, E820_ACPI),
    ];
    for slot in layout::ram_slots(bytes) {
        map.push(entry(slot.guest.max(layout::HIGH_MEMORY_START), slot.guest + slot.bytes, E820_RAM));
    }
    map
}

/// Maps the first 4 GiB one to one with 2 MiB pages, and a flat GDT.
fn page_tables(memory: &GuestMemoryMmap) -> Result<(), vm_memory::GuestMemoryError> {
    let at = |n: u64| layout::PAGE_TABLES_ADDR + n * layout::PAGE;
    memory.write_obj(at(1) | 3, GuestAddress(at(0)))?;
    for gib in 0..IDENTITY_GIB {
        memory.write_obj(at(2 + gib) | 3, GuestAddress(at(1) + gib * 8))?;
        let directory: Vec<u8> = (0..512u64).flat_map(|i| (((gib * 512 + i) << 21) | 0x83).to_le_bytes()).collect();
        memory.write_slice(&directory, GuestAddress(at(2 + gib)))?;
    }
    for (i, descriptor) in [0, 0, 0x00af_9b00_0000_ffff_u64, 0x00cf_9300_0000_ffff].into_iter().enumerate() {
        memory.write_obj(descriptor, GuestAddress(layout::GDT_ADDR + i as u64 * 8))?;
    }
    Ok(())
}

/// Sets long mode, flat segments and the identity map.
pub fn boot_sregs(mut s: kvm_sregs) -> kvm_sregs {
    s.cr3 = layout::PAGE_TABLES_ADDR;
    s.cr4 = 1 << 5; // PAE
    s.cr0 = 1 << 31 | 1 << 4 | 1; // PG, ET, PE
    s.efer = 1 << 10 | 1 << 8; // LMA, LME
    s.gdt.base = layout::GDT_ADDR;
    s.gdt.limit = 31;
    let code = kvm_segment { limit: u32::MAX, selector: 0x10, type_: 11, present: 1, s: 1, l: 1, g: 1, ..Default::default() };
    let data = kvm_segment { selector: 0x18, type_: 3, l: 0, db: 1, ..code };
    s.cs = code;
    (s.ds, s.es, s.fs, s.gs, s.ss) = (data, data, data, data, data);
    s
}

/// The first instruction.
pub fn boot_regs(entry: u64) -> kvm_regs {
    kvm_regs { rip: entry, rflags: 2, rsi: layout::BOOT_PARAMS_ADDR, rsp: layout::BOOT_STACK, ..Default::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_map_covers_all_ram_but_the_legacy_hole() {
        let map = e820(4 << 30);
        let ram: u64 = map
            .iter()
            .filter(|e| {
                let t = e.r#type;
                t == E820_RAM
            })
            .map(|e| e.size)
            .sum();
        assert_eq!(ram, (4 << 30) - (layout::HIGH_MEMORY_START - layout::LOW_MEMORY_END));
        let last = map.last().unwrap();
        let (addr, size) = (last.addr, last.size);
        assert_eq!((addr, size), (1 << 32, (4 << 30) - layout::LOW_RAM_END_MAX));
    }

    fn file(bytes: &[u8]) -> File {
        let mut f = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut f, bytes).unwrap();
        f
    }
    fn load_into(bytes: u64, kernel: &[u8], initrd: &[u8], cmdline: &str) -> (Ram, Result<u64, BootError>) {
        let ram = Ram::map(ks_vmm_core::memory::Memory::create(bytes).unwrap()).unwrap();
        let parts = Boot { kernel: &mut file(kernel), initrd: &mut file(initrd), cmdline, acpi: b"RSD PTR " };
        let entry = load(&ram, parts);
        (ram, entry)
    }
    /// A bzImage of one setup sector and a small body.
    fn bzimage(xloadflags: u16) -> Vec<u8> {
        let mut k = vec![0; 1024];
        k[0x1f1] = 1;
        k[0x202..0x206].copy_from_slice(b"HdrS");
        k[0x206..0x208].copy_from_slice(&0x20fu16.to_le_bytes());
        k[0x211] = 1;
        k[0x214..0x218].copy_from_slice(&0x10_0000u32.to_le_bytes());
        k[0x236..0x238].copy_from_slice(&xloadflags.to_le_bytes());
        k.extend_from_slice(&[0xab; 3000]);
        k
    }

    #[test]
    fn a_bzimage_enters_at_its_64_bit_entry_and_its_header_reaches_the_zero_page() {
        let (ram, entry) = load_into(64 << 20, &bzimage(1), &[7; 5000], "quiet");
        assert_eq!(entry.unwrap(), layout::HIGH_MEMORY_START + 0x200);
        let memory = ram.memory();
        let params: boot_params = memory.read_obj(GuestAddress(layout::BOOT_PARAMS_ADDR)).unwrap();
        let (at, bytes, line, version) =
            (params.hdr.ramdisk_image, params.hdr.ramdisk_size, params.hdr.cmd_line_ptr, params.hdr.version);
        assert_eq!((bytes, version, u64::from(at) % layout::PAGE), (5000, 0x20f, 0));
        assert_eq!(memory.read_obj::<u8>(GuestAddress(u64::from(at) + 4999)).unwrap(), 7);
        assert_eq!(memory.read_obj::<[u8; 6]>(GuestAddress(u64::from(line))).unwrap(), *b"quiet\0");
        assert_eq!(memory.read_obj::<u8>(GuestAddress(layout::HIGH_MEMORY_START + 2999)).unwrap(), 0xab);
    }

    #[test]
    fn what_cannot_boot_is_refused() {
        assert!(matches!(load_into(64 << 20, b"not a kernel at all", b"", "").1, Err(BootError::Kernel(_))));
        assert!(matches!(load_into(64 << 20, b"", b"", "").1, Err(BootError::Kernel(_))));
        assert!(matches!(load_into(64 << 20, &bzimage(0), b"", "").1, Err(BootError::Kernel(_))), "no 64-bit entry");
        assert!(matches!(load_into(16 << 20, &bzimage(1), &[0; 1 << 20], "").1, Err(BootError::Room { .. })));
        assert!(matches!(load_into(64 << 20, &bzimage(1), b"", &"x".repeat(2048)).1, Err(BootError::CmdlineLength(2048))));
    }
}
