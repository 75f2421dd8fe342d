//! What can go wrong while an image is made, with what to do about it.

use std::path::{Path, PathBuf};

use crate::{oci::OciError, soft_edits::EditError};

/// Failure of a build, an import or a kernel build. The output directory is untouched in every case.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// Host programs are missing.
    #[error("missing host programs: {programs}; install them with: apt-get install {packages}")]
    MissingTools { programs: String, packages: String },
    /// A host program ended with a failure; its last lines are kept.
    #[error("{program} failed ({status}) while {doing}; its last output:\n{tail}")]
    ToolFailed { program: String, doing: String, status: String, tail: String },
    /// A file operation failed.
    #[error("cannot {doing} {}", path.display())]
    Io {
        doing: &'static str,
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// The guest agent is not usable as the first program of a VM.
    #[error("{} cannot be the guest's first program: {why}; build it with RUSTFLAGS='-C target-feature=+crt-static' \
             cargo build --release -p ks-guest --target x86_64-unknown-linux-gnu", path.display())]
    Agent { path: PathBuf, why: &'static str },
    /// The kernel file is not one that a VM can start.
    #[error("{} is not a kernel this program knows: {why}; give an x86-64 bzImage (vmlinuz) or an uncompressed ELF vmlinux", path.display())]
    Kernel { path: PathBuf, why: &'static str },
    /// The distribution's kernel package does not have the expected content.
    #[error("the kernel package lacks {what}; the distribution may have changed its layout, try --kernel FILE")]
    KernelPackage { what: String },
    /// The root tree is not a usable root disk.
    #[error("the imported tree is not a usable root disk: {why}")]
    NotARoot { why: String },
    /// The tree does not fit the disk.
    #[error("the tree holds {used_mib} MiB, too much for a disk of {size_gib} GiB; raise --size-gib")]
    TooBig { used_mib: u64, size_gib: u32 },
    /// An OCI archive was refused.
    #[error("the archive {} was refused", path.display())]
    Oci {
        path: PathBuf,
        #[source]
        source: OciError,
    },
    /// The kernel source does not match the scripted edits.
    #[error("the kernel source does not match recipes/soft-kernel.edits")]
    Edits(#[from] EditError),
    /// The output place holds something that is not an image.
    #[error("{} exists and is not an image directory (no image.json); choose another --out or remove it", path.display())]
    OutputTaken { path: PathBuf },
    /// Building needs root's view of file owners.
    #[error(
        "cannot work without root: {why}; run as root, or install uidmap and give the user ranges in /etc/subuid and /etc/subgid"
    )]
    NeedsRoot { why: String },
}

/// Gives an I/O result its path and what was being done.
pub(crate) trait IoContext<T> {
    fn doing(self, doing: &'static str, path: &Path) -> Result<T, ImageError>;
}

impl<T, E: Into<std::io::Error>> IoContext<T> for Result<T, E> {
    fn doing(self, doing: &'static str, path: &Path) -> Result<T, ImageError> {
        self.map_err(|source| ImageError::Io { doing, path: path.to_owned(), source: source.into() })
    }
}
