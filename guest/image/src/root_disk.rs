//! Root disks: a Debian tree by mmdebstrap, and any tree into a sparse ext4 file.
//!
//! A disk's digest is BLAKE3 over (block index as u64 little-endian, block) of each 64 KiB block that is not
//! all zero, in order, so that holes cost nothing and zeros count the same as holes.

use std::{
    fs::File,
    io::Read,
    os::unix::fs::{FileExt, MetadataExt},
    path::Path,
};

use rustix::fs::SeekFrom;

use crate::{
    cache::Cache,
    error::{ImageError, IoContext},
    image_info::{PackageInfo, RootInfo},
    recipe, tools,
};

const DIGEST_BLOCK: usize = 64 * 1024;
const GIB: u64 = 1 << 30;

/// The cached default root disk: a directory with `root.ext4` and `root.json`.
pub(crate) fn debian_root(cache: &Cache, size_gib: u32, refresh: bool) -> Result<std::path::PathBuf, ImageError> {
    cache.entry(&format!("images/root-{}", recipe::root_key(size_gib)), refresh, |dir| {
        tools::require(tools::FOR_DEBIAN)?;
        let packages_file = dir.join("packages.txt");
        // A directory of root's own beside the disk: file owners must survive, so not every /tmp will do.
        let staging = dir.join("tree");
        install_packages(&staging, &packages_file)?;
        let packages = PackageInfo::from_list(&packages_file)?;
        let info = make_disk(&staging, &dir.join("root.ext4"), size_gib)?;
        crate::cache::remove_tree(&staging)?;
        write_root_json(dir, &RootInfo { packages: Some(packages), ..info })
    })
}

/// Writes `root.json`, what is known of the disk beside it.
pub(crate) fn write_root_json(dir: &Path, info: &RootInfo) -> Result<(), ImageError> {
    let text = serde_json::to_vec_pretty(info).doing("write root.json in", dir)?;
    std::fs::write(dir.join("root.json"), text).doing("write root.json in", dir)
}

/// Reads `root.json`.
pub(crate) fn read_root_json(dir: &Path) -> Result<RootInfo, ImageError> {
    let path = dir.join("root.json");
    let text = std::fs::read(&path).doing("read", &path)?;
    serde_json::from_slice(&text).doing("understand", &path)
}

fn install_packages(staging: &Path, packages_file: &Path) -> Result<(), ImageError> {
    let scratch = tempfile::tempdir().doing("make a directory in", &std::env::temp_dir())?;
    let script = scratch.path().join("customize.sh");
    std::fs::write(&script, recipe::CUSTOMIZE).doing("write", &script)?;
    let mut command = tools::command("mmdebstrap");
    command
        .args(["--quiet", "--variant=minbase", "--format=directory", "--architectures=amd64"])
        .arg(format!("--include={}", recipe::lines(recipe::PACKAGES).join(",")))
        .args(recipe::lines(recipe::EXCLUDES).iter().map(|line| format!("--dpkgopt={line}")))
        .arg("--aptopt=Acquire::Languages \"none\"")
        // Our hook removes the lists itself; this step fails in a user namespace.
        .arg("--skip=cleanup/apt")
        .arg(format!("--customize-hook=sh {} \"$1\"", tools::shell_quote(script.as_os_str())))
        .arg(recipe::SUITE)
        .arg(staging)
        .env("SOURCE_DATE_EPOCH", recipe::EPOCH_S)
        .env("KS_PACKAGES", packages_file);
    tools::run(&command, "installing the root disk's packages (is the network there?)")?;
    Ok(())
}

/// Makes the sparse file `disk` of `size_gib` with the content of `tree`; its figures.
pub(crate) fn make_disk(tree: &Path, disk: &Path, size_gib: u32) -> Result<RootInfo, ImageError> {
    tools::require(tools::FOR_DISK)?;
    let used = tree_bytes(tree)?;
    // A tenth and 64 MiB are left for inode tables, the journal and directories.
    let room = u64::from(size_gib) * GIB / 10 * 9;
    if used + (64 << 20) > room {
        return Err(ImageError::TooBig { used_mib: used >> 20, size_gib });
    }
    let dense = crate::cache::with_suffix(disk, ".dense");
    tools::run(
        tools::command("mkfs.ext4")
            .args(recipe::MKFS_OPTIONS)
            .arg("-d")
            .arg(tree)
            .arg(&dense)
            .arg(format!("{size_gib}G"))
            .env("E2FSPROGS_FAKE_TIME", recipe::EPOCH_S),
        "making the ext4 file system",
    )?;
    // mkfs writes zeros for the inode tables and the journal (150 MB); the copy makes them holes.
    copy_sparse(&dense, disk)?;
    std::fs::remove_file(&dense).doing("remove", &dense)?;
    let meta = std::fs::metadata(disk).doing("read", disk)?;
    Ok(RootInfo {
        bytes: meta.len(),
        used_bytes: meta.blocks() * 512,
        digest: disk_digest(disk)?,
        packages: None,
        warnings: Vec::new(),
    })
}

/// Copies a file with its zeros as holes, sharing blocks where the file system can.
pub(crate) fn copy_sparse(from: &Path, to: &Path) -> Result<(), ImageError> {
    tools::run(tools::command("cp").args(["--sparse=always", "--reflink=auto"]).arg("--").arg(from).arg(to), "copying the disk")?;
    Ok(())
}

fn tree_bytes(dir: &Path) -> Result<u64, ImageError> {
    let mut sum = 0;
    for entry in std::fs::read_dir(dir).doing("list", dir)? {
        let entry = entry.doing("list", dir)?;
        let path = entry.path();
        let meta = entry.metadata().doing("read", &path)?;
        sum += if meta.is_dir() { 4096 + tree_bytes(&path)? } else { meta.blocks() * 512 };
    }
    Ok(sum)
}

/// The digest that the module header defines, reading only what is allocated.
pub(crate) fn disk_digest(disk: &Path) -> Result<String, ImageError> {
    let file = File::open(disk).doing("open", disk)?;
    let len = file.metadata().doing("read", disk)?.len();
    let block_len = DIGEST_BLOCK as u64;
    let mut hasher = blake3::Hasher::new();
    let mut block = vec![0u8; DIGEST_BLOCK];
    let mut at = 0;
    while at < len {
        let Some(data) = next_data(&file, at).doing("read", disk)? else { break };
        at = data / block_len * block_len;
        let want = usize::try_from((len - at).min(block_len)).expect("at most a block");
        file.read_exact_at(&mut block[..want], at).doing("read", disk)?;
        if block[..want].iter().any(|b| *b != 0) {
            hasher.update(&(at / block_len).to_le_bytes());
            hasher.update(&block[..want]);
        }
        at += block_len;
    }
    Ok(hasher.finalize().to_hex().to_string())
}

/// Where data begins at or after `at`; None when only holes follow.
fn next_data(file: &File, at: u64) -> std::io::Result<Option<u64>> {
    match rustix::fs::seek(file, SeekFrom::Data(at)) {
        Ok(data) => Ok(Some(data)),
        Err(rustix::io::Errno::NXIO) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// BLAKE3 of a whole file, hex.
pub(crate) fn file_digest(path: &Path) -> Result<String, ImageError> {
    let mut file = File::open(path).doing("open", path)?;
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0u8; DIGEST_BLOCK];
    loop {
        match file.read(&mut buffer).doing("read", path)? {
            0 => return Ok(hasher.finalize().to_hex().to_string()),
            n => hasher.update(&buffer[..n]),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holes_and_zeros_digest_alike() {
        let dir = tempfile::tempdir().unwrap();
        let (sparse, dense) = (dir.path().join("s"), dir.path().join("d"));
        let mut bytes = vec![0u8; 5 * DIGEST_BLOCK + 100];
        bytes[3 * DIGEST_BLOCK + 7] = 1;
        std::fs::write(&dense, &bytes).unwrap();
        let file = File::create(&sparse).unwrap();
        file.set_len(bytes.len() as u64).unwrap();
        file.write_all_at(&[1], 3 * DIGEST_BLOCK as u64 + 7).unwrap();
        assert_eq!(disk_digest(&sparse).unwrap(), disk_digest(&dense).unwrap());
        file.write_all_at(&[2], 3 * DIGEST_BLOCK as u64 + 7).unwrap();
        assert_ne!(disk_digest(&sparse).unwrap(), disk_digest(&dense).unwrap());
    }
}
