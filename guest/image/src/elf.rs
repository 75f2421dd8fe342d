//! The little of ELF that is needed: program headers and one named section of a 64-bit little-endian file.
//!
//! Every offset is checked; a damaged file gives `None`, never a panic.

/// A parsed view of an ELF64 file.
pub(crate) struct Elf<'a> {
    bytes: &'a [u8],
}

const PT_INTERP: u32 = 3;
const MACHINE_X86_64: u16 = 62;

impl<'a> Elf<'a> {
    /// The file, when it is ELF64, little-endian, x86-64.
    pub(crate) fn parse(bytes: &'a [u8]) -> Option<Self> {
        let elf = Self { bytes };
        let right = bytes.get(..6)? == b"\x7fELF\x02\x01" && elf.u16(18)? == MACHINE_X86_64;
        right.then_some(elf)
    }

    /// Whether the program asks for a dynamic loader.
    pub(crate) fn has_interpreter(&self) -> Option<bool> {
        let (table, size, count) = (self.u64(32)?, self.u16(54)?, self.u16(56)?);
        for i in 0..u64::from(count) {
            let at = table.checked_add(i.checked_mul(u64::from(size))?)?;
            if self.u32(usize::try_from(at).ok()?)? == PT_INTERP {
                return Some(true);
            }
        }
        Some(false)
    }

    /// Number of program headers.
    pub(crate) fn program_headers(&self) -> Option<u16> {
        self.u16(56)
    }

    /// The content of the section named `name`.
    pub(crate) fn section(&self, name: &str) -> Option<&'a [u8]> {
        let (size, count, names) = (self.u16(58)?, self.u16(60)?, self.u16(62)?);
        let name_table = self.section_bytes(names, size)?;
        for i in 0..count {
            let header = self.section_header(i, size)?;
            let start = usize::try_from(self.u32(header)?).ok()?;
            let rest = name_table.get(start..)?;
            if rest.split(|b| *b == 0).next()? == name.as_bytes() {
                return self.section_bytes(i, size);
            }
        }
        None
    }

    fn section_header(&self, index: u16, size: u16) -> Option<usize> {
        let at = self.u64(40)?.checked_add(u64::from(index).checked_mul(u64::from(size))?)?;
        usize::try_from(at).ok()
    }

    fn section_bytes(&self, index: u16, size: u16) -> Option<&'a [u8]> {
        let header = self.section_header(index, size)?;
        let start = usize::try_from(self.u64(header.checked_add(24)?)?).ok()?;
        let len = usize::try_from(self.u64(header.checked_add(32)?)?).ok()?;
        self.bytes.get(start..start.checked_add(len)?)
    }

    fn u16(&self, at: usize) -> Option<u16> {
        Some(u16::from_le_bytes(self.bytes.get(at..at.checked_add(2)?)?.try_into().ok()?))
    }

    fn u32(&self, at: usize) -> Option<u32> {
        Some(u32::from_le_bytes(self.bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
    }

    fn u64(&self, at: usize) -> Option<u64> {
        Some(u64::from_le_bytes(self.bytes.get(at..at.checked_add(8)?)?.try_into().ok()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damaged_headers_give_none() {
        assert!(Elf::parse(b"").is_none());
        assert!(Elf::parse(b"\x7fELF\x02\x01").is_none());
        let mut bytes = vec![0xff; 64];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        bytes[18..20].copy_from_slice(&62u16.to_le_bytes());
        let elf = Elf::parse(&bytes).expect("header is right");
        assert_eq!(elf.has_interpreter(), None);
        assert!(elf.section(".modinfo").is_none());
    }

    #[test]
    fn this_test_program_is_elf() {
        let bytes = std::fs::read("/proc/self/exe").unwrap();
        let elf = Elf::parse(&bytes).unwrap();
        assert!(elf.program_headers().unwrap() > 0);
        assert!(elf.section(".text").is_some());
    }
}
