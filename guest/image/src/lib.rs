//! Builds and imports guest images: a kernel, an initramfs and an ext4 root disk, described by `image.json`.
//!
//! Owns the recipes (`recipes/`), the build cache and the output directory's format. It runs on the host,
//! calls the distribution's own tools, and never starts a VM. What comes from outside (OCI archives, kernel
//! files) is read as hostile bytes: digests are checked and nothing is written outside the staging tree.

mod build;
mod cache;
mod cpio;
mod elf;
mod error;
mod image_info;
mod import;
mod initrd;
mod kernel_file;
mod kernel_package;
mod layer;
mod modules;
mod oci;
mod output;
mod progress;
mod recipe;
mod root_disk;
mod root_finish;
mod soft_edits;
mod soft_kernel;
mod staging;
mod tools;

pub use build::{BuildRequest, build};
pub use cache::Cache;
pub use error::ImageError;
pub use image_info::{FileInfo, ImageInfo, PackageInfo, RootInfo};
pub use import::{ImportRequest, RootSource, import};
pub use kernel_file::{KernelFormat, inspect_kernel};
pub use oci::OciError;
pub use progress::Progress;
pub use recipe::Profile;
pub use soft_edits::EditError;
pub use soft_kernel::{SoftKernelRequest, soft_kernel};
pub use tools::require_user_namespaces;
