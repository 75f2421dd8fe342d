//! Recognises kernel files: bzImage (Linux/x86 boot protocol, Documentation/arch/x86/boot.rst) and ELF vmlinux.

use std::path::Path;

use crate::{
    elf::Elf,
    error::{ImageError, IoContext},
};

/// Format of a kernel file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KernelFormat {
    /// Compressed, with the boot-protocol header.
    Bzimage,
    /// Uncompressed ELF.
    Vmlinux,
}

/// Format and release (`uname -r`) of the kernel at `path`; the release is empty when it is not found.
pub fn inspect_kernel(path: &Path) -> Result<(KernelFormat, String), ImageError> {
    let bytes = std::fs::read(path).doing("read the kernel", path)?;
    classify(&bytes).map_err(|why| ImageError::Kernel { path: path.to_owned(), why })
}

fn classify(bytes: &[u8]) -> Result<(KernelFormat, String), &'static str> {
    if bytes.starts_with(b"\x7fELF") {
        let elf = Elf::parse(bytes).ok_or("it is ELF, but not for 64-bit x86")?;
        return match (elf.program_headers(), elf.has_interpreter()) {
            (Some(1..), Some(false)) => Ok((KernelFormat::Vmlinux, banner_release(bytes))),
            (Some(1..), Some(true)) => Err("it is an ordinary program, not a kernel"),
            _ => Err("it is ELF without program headers"),
        };
    }
    if bytes.get(0x202..0x206) == Some(b"HdrS") && bytes.get(0x1fe..0x200) == Some(&[0x55, 0xaa]) {
        return Ok((KernelFormat::Bzimage, bzimage_release(bytes)));
    }
    match bytes.get(..4) {
        None => Err("it is empty or too short"),
        Some([0x1f, 0x8b, ..]) => Err("it is a gzip file, unpack it first"),
        Some([0x28, 0xb5, 0x2f, 0xfd]) => Err("it is a zstd file, unpack it first"),
        Some(b"MZ\x00\x00") => Err("it is an EFI program without the Linux boot header (another architecture?)"),
        Some(_) => Err("its first bytes are neither ELF nor a Linux boot sector"),
    }
}

/// The release from the boot header's version string: a pointer at 0x20e, counted from 0x200.
fn bzimage_release(bytes: &[u8]) -> String {
    let text = || {
        let pointer = u16::from_le_bytes(bytes.get(0x20e..0x210)?.try_into().ok()?);
        first_word(bytes.get(0x200 + usize::from(pointer)..)?)
    };
    text().unwrap_or_default()
}

/// The release from the banner `Linux version RELEASE (...` of an uncompressed kernel.
fn banner_release(bytes: &[u8]) -> String {
    const BANNER: &[u8] = b"Linux version ";
    bytes
        .windows(BANNER.len() + 1)
        .position(|w| w.starts_with(BANNER) && w[BANNER.len()].is_ascii_digit())
        .and_then(|at| first_word(bytes.get(at + BANNER.len()..)?))
        .unwrap_or_default()
}

fn first_word(bytes: &[u8]) -> Option<String> {
    let end = bytes.iter().take(128).position(|b| !b.is_ascii_graphic())?;
    Some(String::from_utf8_lossy(&bytes[..end]).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bzimage() -> Vec<u8> {
        let mut b = vec![0u8; 0x400];
        b[0x1fe..0x200].copy_from_slice(&[0x55, 0xaa]);
        b[0x202..0x206].copy_from_slice(b"HdrS");
        b[0x20e..0x210].copy_from_slice(&0x100u16.to_le_bytes());
        b[0x300..0x311].copy_from_slice(b"6.1.0-test (made)");
        b
    }

    #[test]
    fn bzimage_is_known_with_its_release() {
        assert_eq!(classify(&bzimage()), Ok((KernelFormat::Bzimage, "6.1.0-test".into())));
    }

    #[test]
    fn vmlinux_is_known_with_its_release() {
        let mut b = vec![0u8; 256];
        b[..6].copy_from_slice(b"\x7fELF\x02\x01");
        b[18..20].copy_from_slice(&62u16.to_le_bytes());
        b[32..40].copy_from_slice(&64u64.to_le_bytes());
        b[54..56].copy_from_slice(&56u16.to_le_bytes());
        b[56..58].copy_from_slice(&1u16.to_le_bytes());
        b[64..68].copy_from_slice(&1u32.to_le_bytes());
        b[128..156].copy_from_slice(b"Linux version 6.1.9-ks (x) \n");
        assert_eq!(classify(&b), Ok((KernelFormat::Vmlinux, "6.1.9-ks".into())));
    }

    #[test]
    fn other_files_are_refused_with_the_reason() {
        assert!(classify(b"").unwrap_err().contains("short"));
        assert!(classify(&[0x1f, 0x8b, 8, 0, 0]).unwrap_err().contains("gzip"));
        assert!(classify(b"#!/bin/sh\n").unwrap_err().contains("neither"));
        let mut cut = bzimage();
        cut.truncate(0x203);
        assert!(classify(&cut).is_err());
        assert!(classify(b"\x7fELF\x01\x01aaaaaaaaaaaaaaaaaaaaaaaa").unwrap_err().contains("64-bit"));
        let program = std::fs::read("/bin/sh").unwrap();
        assert!(classify(&program).unwrap_err().contains("ordinary program"));
    }
}
