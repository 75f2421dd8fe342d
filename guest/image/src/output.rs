//! The output directory `{kernel, initrd, root.ext4, image.json}`: written beside its place, then renamed.

use std::path::{Path, PathBuf};

use crate::{
    cache,
    error::{ImageError, IoContext},
    image_info::{FileInfo, ImageInfo, RootInfo, SCHEMA},
    kernel_file::inspect_kernel,
    recipe::Profile,
    root_disk,
};

/// Everything that an image directory is made from.
pub(crate) struct Parts<'a> {
    pub(crate) name: &'a str,
    pub(crate) source: &'a str,
    pub(crate) profile: Profile,
    pub(crate) kernel: &'a Path,
    pub(crate) initrd: &'a [u8],
    /// Directory with `root.ext4` and its figures.
    pub(crate) root_dir: &'a Path,
    pub(crate) root: RootInfo,
    /// Whether `root_dir` is the caller's own, so that the disk may be moved instead of copied.
    pub(crate) take_root: bool,
}

/// Refuses a place that holds something other than an image, before any work is done.
pub(crate) fn check_place(out: &Path) -> Result<(), ImageError> {
    let empty = || std::fs::read_dir(out).is_ok_and(|mut entries| entries.next().is_none());
    if out.exists() && !out.join("image.json").is_file() && !empty() {
        return Err(ImageError::OutputTaken { path: out.to_owned() });
    }
    Ok(())
}

/// Writes the image; when `out` already holds the very same content, nothing is touched.
pub(crate) fn write(out: &Path, parts: &Parts<'_>) -> Result<ImageInfo, ImageError> {
    let (kernel_format, kernel_release) = inspect_kernel(parts.kernel)?;
    let mut info = ImageInfo {
        schema: SCHEMA.to_owned(),
        name: parts.name.to_owned(),
        id: String::new(),
        source: parts.source.to_owned(),
        profile: parts.profile,
        kernel_release,
        kernel_format,
        cmdline: parts.profile.cmdline().to_owned(),
        kernel: FileInfo::of(parts.kernel)?,
        initrd: FileInfo { bytes: parts.initrd.len() as u64, blake3: blake3::hash(parts.initrd).to_hex().to_string() },
        root: parts.root.clone(),
    };
    info.id = info.content_id();
    let out = absolute(out)?;
    if is_current(&out, &info) {
        return Ok(info);
    }

    let partial = cache::with_suffix(&out, ".partial");
    cache::remove_tree(&partial)?;
    std::fs::create_dir_all(&partial).doing("make", &partial)?;
    let kernel = partial.join("kernel");
    std::fs::copy(parts.kernel, &kernel).doing("copy the kernel to", &kernel)?;
    let initrd = partial.join("initrd");
    std::fs::write(&initrd, parts.initrd).doing("write", &initrd)?;
    let (from, to) = (parts.root_dir.join("root.ext4"), partial.join("root.ext4"));
    if !(parts.take_root && std::fs::rename(&from, &to).is_ok()) {
        root_disk::copy_sparse(&from, &to)?;
    }
    let json = partial.join("image.json");
    let text = serde_json::to_vec_pretty(&info).doing("write", &json)?;
    std::fs::write(&json, text).doing("write", &json)?;
    cache::sync_dir(&partial)?;
    cache::replace_dir(&partial, &out)?;
    Ok(info)
}

/// `out` with its parent made and resolved, so that the rename stays on one file system.
fn absolute(out: &Path) -> Result<PathBuf, ImageError> {
    let full = std::path::absolute(out).doing("find", out)?;
    if let Some(parent) = full.parent() {
        std::fs::create_dir_all(parent).doing("make", parent)?;
    }
    Ok(full)
}

fn is_current(out: &Path, info: &ImageInfo) -> bool {
    let sizes_match = |name: &str, bytes: u64| std::fs::metadata(out.join(name)).is_ok_and(|m| m.len() == bytes);
    std::fs::read(out.join("image.json"))
        .ok()
        .and_then(|text| serde_json::from_slice::<ImageInfo>(&text).ok())
        .is_some_and(|old| old == *info)
        && sizes_match("kernel", info.kernel.bytes)
        && sizes_match("initrd", info.initrd.bytes)
        && sizes_match("root.ext4", info.root.bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_foreign_directory_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        check_place(dir.path()).unwrap();
        check_place(&dir.path().join("new")).unwrap();
        std::fs::write(dir.path().join("thesis.txt"), "x").unwrap();
        assert!(matches!(check_place(dir.path()), Err(ImageError::OutputTaken { .. })));
    }
}
