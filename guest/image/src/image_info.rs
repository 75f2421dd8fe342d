//! `image.json`: what an image directory holds.
//!
//! The image's id is BLAKE3 over the canonical lines of [`ImageInfo::content_id`]; it changes whenever
//! anything that a VM would see changes, and with nothing else.

use std::path::Path;

use crate::{
    error::{ImageError, IoContext},
    kernel_file::KernelFormat,
    recipe::Profile,
};

/// Format name of `image.json`.
pub(crate) const SCHEMA: &str = "ks.image.v1";

/// The content of `image.json`. Digests are BLAKE3 in hex.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ImageInfo {
    /// `ks.image.v1`.
    pub schema: String,
    /// Name for people.
    pub name: String,
    /// Content id, 32 bytes in hex.
    pub id: String,
    /// `debian`, `oci` or `rootdir`.
    pub source: String,
    /// Which engines it is for.
    pub profile: Profile,
    /// `uname -r` of the kernel; empty when unknown.
    pub kernel_release: String,
    /// Format of the file `kernel`.
    pub kernel_format: KernelFormat,
    /// Recommended kernel command line; `{tsc_khz}` stands for the host's TSC rate.
    pub cmdline: String,
    /// The file `kernel`.
    pub kernel: FileInfo,
    /// The file `initrd`.
    pub initrd: FileInfo,
    /// The file `root.ext4`.
    pub root: RootInfo,
}

/// Size and digest of a file.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct FileInfo {
    /// Length.
    pub bytes: u64,
    /// Digest of the whole file.
    pub blake3: String,
}

/// The root disk.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct RootInfo {
    /// Size that the guest sees.
    pub bytes: u64,
    /// Allocated on the host.
    pub used_bytes: u64,
    /// Digest over the non-zero blocks (see root_disk.rs).
    pub digest: String,
    /// Installed packages, when they are known.
    pub packages: Option<PackageInfo>,
    /// What a session will miss on this disk, for people.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// The installed packages.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct PackageInfo {
    /// How many.
    pub count: u32,
    /// Digest of the sorted list `NAME VERSION ARCHITECTURE`, one a line.
    pub blake3: String,
}

impl ImageInfo {
    /// The id that the other fields give.
    pub fn content_id(&self) -> String {
        let format = match self.kernel_format {
            KernelFormat::Bzimage => "bzimage",
            KernelFormat::Vmlinux => "vmlinux",
        };
        let profile = match self.profile {
            Profile::General => "general",
            Profile::Soft => "soft",
        };
        let text = format!(
            "{SCHEMA}\nprofile {profile}\nkernel {format} {}\ninitrd {}\nroot {} {}\ncmdline {}\n",
            self.kernel.blake3, self.initrd.blake3, self.root.bytes, self.root.digest, self.cmdline
        );
        blake3::hash(text.as_bytes()).to_hex().to_string()
    }
}

impl FileInfo {
    /// Of the file at `path`.
    pub(crate) fn of(path: &Path) -> Result<Self, ImageError> {
        let bytes = std::fs::metadata(path).doing("read", path)?.len();
        Ok(Self { bytes, blake3: crate::root_disk::file_digest(path)? })
    }
}

impl PackageInfo {
    /// Of a list file with one package a line.
    pub(crate) fn from_list(path: &Path) -> Result<Self, ImageError> {
        let text = std::fs::read_to_string(path).doing("read the package list", path)?;
        let count = u32::try_from(text.lines().count()).unwrap_or(u32::MAX);
        Ok(Self { count, blake3: blake3::hash(text.as_bytes()).to_hex().to_string() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info() -> ImageInfo {
        let file = FileInfo { bytes: 1, blake3: "aa".into() };
        ImageInfo {
            schema: SCHEMA.into(),
            name: "n".into(),
            id: String::new(),
            source: "debian".into(),
            profile: Profile::General,
            kernel_release: "6.1".into(),
            kernel_format: KernelFormat::Bzimage,
            cmdline: "quiet".into(),
            kernel: file.clone(),
            initrd: file,
            root: RootInfo { bytes: 8, used_bytes: 1, digest: "bb".into(), packages: None, warnings: vec![] },
        }
    }

    #[test]
    fn the_id_follows_content_and_not_names() {
        let a = info();
        let renamed = ImageInfo { name: "other".into(), ..info() };
        assert_eq!(a.content_id(), renamed.content_id());
        let changed = ImageInfo { cmdline: "debug".into(), ..info() };
        assert_ne!(a.content_id(), changed.content_id());
        assert_eq!(a.content_id().len(), 64);
    }

    #[test]
    fn golden_json() {
        let text = serde_json::to_string(&info()).unwrap();
        assert_eq!(
            text,
            r#"{"schema":"ks.image.v1","name":"n","id":"","source":"debian","profile":"general","kernel_release":"6.1","kernel_format":"bzimage","cmdline":"quiet","kernel":{"bytes":1,"blake3":"aa"},"initrd":{"bytes":1,"blake3":"aa"},"root":{"bytes":8,"used_bytes":1,"digest":"bb","packages":null}}"#
        );
    }
}
