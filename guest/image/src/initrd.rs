//! The initramfs: `/init` (the guest agent), `/ks/modules/NAME.ko` and `/ks/modules.list`.
//!
//! The list has one file name a line, in the order of loading; it is empty for kernels with everything
//! built in. Those get a plain cpio, because inflating is slow where kernel code is emulated.

use std::path::{Path, PathBuf};

use crate::{
    cpio::Cpio,
    elf::Elf,
    error::{ImageError, IoContext},
    tools,
};

/// Compression level for the initramfs: 0.5 s for 3 MB, and a fifth smaller than the default.
const ZSTD_LEVEL: i32 = 19;

/// How the archive is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Packing {
    Zstd,
    Plain,
}

/// The initramfs bytes for `agent` and the modules at `modules`, in that order.
pub(crate) fn assemble(agent: &Path, modules: &[PathBuf], packing: Packing) -> Result<Vec<u8>, ImageError> {
    let program = agent_bytes(agent)?;
    let mut cpio = Cpio::new();
    for dir in ["dev", "proc", "sys", "ks", "ks/modules"] {
        cpio.dir(dir);
    }
    // The kernel opens this for the first program before devtmpfs is mounted.
    cpio.char_device("dev/console", 5, 1);
    let mut list = String::new();
    for path in modules {
        let name = path
            .file_name()
            .and_then(|n| n.to_str())
            .ok_or_else(|| ImageError::KernelPackage { what: "plain module names".into() })?;
        let bytes = std::fs::read(path).doing("read the module", path)?;
        cpio.file(&format!("ks/modules/{name}"), 0o644, &bytes);
        list.push_str(name);
        list.push('\n');
    }
    cpio.file("ks/modules.list", 0o644, list.as_bytes());
    cpio.file("init", 0o755, &program);
    let bytes = cpio.finish();
    match packing {
        Packing::Plain => Ok(bytes),
        Packing::Zstd => zstd::bulk::compress(&bytes, ZSTD_LEVEL).doing("compress the initramfs for", agent),
    }
}

/// The agent, checked to be static and without symbols when the host has `strip`.
fn agent_bytes(agent: &Path) -> Result<Vec<u8>, ImageError> {
    let bytes = std::fs::read(agent).doing("read the guest agent", agent)?;
    let refuse = |why| ImageError::Agent { path: agent.to_owned(), why };
    let elf = Elf::parse(&bytes).ok_or_else(|| refuse("it is not a 64-bit x86 ELF program"))?;
    match elf.has_interpreter() {
        Some(false) => {}
        Some(true) => return Err(refuse("it is linked dynamically")),
        None => return Err(refuse("its program headers are damaged")),
    }
    if tools::find("strip").is_none() {
        return Ok(bytes);
    }
    let dir = tempfile::tempdir().doing("make a directory in", &std::env::temp_dir())?;
    let stripped = dir.path().join("init");
    tools::run(tools::command("strip").arg("--strip-all").arg("-o").arg(&stripped).arg(agent), "stripping the guest agent")?;
    std::fs::read(&stripped).doing("read", &stripped)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dynamic_program_is_refused() {
        let error = assemble(Path::new("/bin/sh"), &[], Packing::Plain).unwrap_err();
        assert!(error.to_string().contains("linked dynamically"), "{error}");
    }

    #[test]
    fn a_script_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent");
        std::fs::write(&path, "#!/bin/sh\n").unwrap();
        let error = assemble(&path, &[], Packing::Plain).unwrap_err();
        assert!(error.to_string().contains("not a 64-bit x86 ELF"), "{error}");
    }
}
