//! Which kernel modules the initramfs carries, and in which order they load.
//!
//! The dependencies come from each module's own `.modinfo` section, as the package has no modules.dep
//! (depmod makes that on installation).

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use crate::{
    elf::Elf,
    error::{ImageError, IoContext},
};

/// Names are compared as the kernel does: `-` is `_`.
fn canonical(name: &str) -> String {
    name.replace('-', "_")
}

/// Files of the wanted modules and all that they need, in the order of loading.
///
/// `tree` is `lib/modules/RELEASE`. A wanted module that is neither there nor built in is an error.
pub(crate) fn in_load_order(tree: &Path, wanted: &[&str]) -> Result<Vec<PathBuf>, ImageError> {
    let mut files = BTreeMap::new();
    collect(&tree.join("kernel"), &mut files)?;
    let builtin_path = tree.join("modules.builtin");
    let text = std::fs::read_to_string(&builtin_path).doing("read", &builtin_path)?;
    let builtin: Vec<String> = text.lines().filter_map(|l| module_name(Path::new(l))).collect();

    let mut order = Vec::new();
    let mut done = Vec::new();
    for name in wanted {
        visit(&canonical(name), &files, &builtin, &mut done, &mut order)?;
    }
    Ok(order)
}

fn visit(
    name: &str,
    files: &BTreeMap<String, PathBuf>,
    builtin: &[String],
    done: &mut Vec<String>,
    order: &mut Vec<PathBuf>,
) -> Result<(), ImageError> {
    if done.iter().any(|d| d == name) || builtin.iter().any(|b| b == name) {
        return Ok(());
    }
    done.push(name.to_owned());
    let file = files.get(name).ok_or_else(|| ImageError::KernelPackage { what: format!("the module {name}") })?;
    let bytes = std::fs::read(file).doing("read the module", file)?;
    let needs =
        depends(&bytes).ok_or_else(|| ImageError::KernelPackage { what: format!("readable module information in {name}") })?;
    for need in needs {
        visit(&need, files, builtin, done, order)?;
    }
    order.push(file.clone());
    Ok(())
}

fn collect(dir: &Path, files: &mut BTreeMap<String, PathBuf>) -> Result<(), ImageError> {
    for entry in std::fs::read_dir(dir).doing("list", dir)? {
        let path = entry.doing("list", dir)?.path();
        if path.is_dir() && !path.is_symlink() {
            collect(&path, files)?;
        } else if let Some(name) = module_name(&path) {
            files.insert(name, path);
        }
    }
    Ok(())
}

fn module_name(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?.strip_suffix(".ko")?;
    Some(canonical(name))
}

/// The names after `depends=` in `.modinfo`.
fn depends(bytes: &[u8]) -> Option<Vec<String>> {
    let info = Elf::parse(bytes)?.section(".modinfo")?;
    let line = info.split(|b| *b == 0).find_map(|l| l.strip_prefix(b"depends="))?;
    let text = std::str::from_utf8(line).ok()?;
    Some(text.split(',').filter(|n| !n.is_empty()).map(canonical).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A minimal relocatable file with one `.modinfo` section.
    fn module(depends: &str) -> Vec<u8> {
        let names = b"\0.modinfo\0.shstrtab\0";
        let info = format!("license=GPL\0depends={depends}\0");
        let (info_at, names_at) = (64, 64 + info.len());
        let headers_at = names_at + names.len();
        let mut b = vec![0u8; headers_at + 3 * 64];
        b[..6].copy_from_slice(b"\x7fELF\x02\x01");
        b[18..20].copy_from_slice(&62u16.to_le_bytes());
        b[40..48].copy_from_slice(&(headers_at as u64).to_le_bytes());
        b[58..60].copy_from_slice(&64u16.to_le_bytes());
        b[60..62].copy_from_slice(&3u16.to_le_bytes());
        b[62..64].copy_from_slice(&2u16.to_le_bytes());
        b[info_at..names_at].copy_from_slice(info.as_bytes());
        b[names_at..headers_at].copy_from_slice(names);
        for (i, name, at, len) in [(1, 1u32, info_at, info.len()), (2, 10, names_at, names.len())] {
            let h = headers_at + i * 64;
            b[h..h + 4].copy_from_slice(&name.to_le_bytes());
            b[h + 24..h + 32].copy_from_slice(&(at as u64).to_le_bytes());
            b[h + 32..h + 40].copy_from_slice(&(len as u64).to_le_bytes());
        }
        b
    }

    fn tree() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let kernel = dir.path().join("kernel/drivers");
        std::fs::create_dir_all(&kernel).unwrap();
        std::fs::write(dir.path().join("modules.builtin"), "kernel/fs/ext4/ext4.ko\n").unwrap();
        std::fs::write(kernel.join("virtio_ring.ko"), module("")).unwrap();
        std::fs::write(kernel.join("virtio.ko"), module("virtio_ring")).unwrap();
        std::fs::write(kernel.join("virtio-rng.ko"), module("virtio,virtio_ring")).unwrap();
        dir
    }

    #[test]
    fn needs_come_first_and_builtin_is_left_out() {
        let dir = tree();
        let order = in_load_order(dir.path(), &["virtio-rng", "ext4", "virtio"]).unwrap();
        let names: Vec<_> = order.iter().map(|p| p.file_name().unwrap().to_str().unwrap()).collect();
        assert_eq!(names, ["virtio_ring.ko", "virtio.ko", "virtio-rng.ko"]);
    }

    #[test]
    fn a_missing_module_is_named() {
        let dir = tree();
        let error = in_load_order(dir.path(), &["overlay"]).unwrap_err();
        assert!(error.to_string().contains("the module overlay"), "{error}");
    }
}
