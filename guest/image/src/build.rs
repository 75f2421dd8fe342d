//! `ks-image build`: the default image.
//!
//! The root disk, the kernel and the soft kernel are cached on their own, so that a new guest agent costs
//! only a new initramfs.

use std::path::PathBuf;

use crate::{
    cache::Cache,
    error::ImageError,
    image_info::ImageInfo,
    initrd::{self, Packing},
    kernel_file::inspect_kernel,
    kernel_package::{self, Kernel},
    output::{self, Parts},
    progress::Progress,
    recipe::Profile,
    root_disk,
    soft_kernel::{self, SoftKernelRequest},
};

/// What to build.
#[derive(Debug, Clone)]
pub struct BuildRequest {
    /// The image directory to make or replace.
    pub out: PathBuf,
    /// Name for people.
    pub name: String,
    /// Engines it is for.
    pub profile: Profile,
    /// The static guest agent.
    pub guest_agent: PathBuf,
    /// Size of the root disk as the guest sees it.
    pub size_gib: u32,
    /// A kernel in place of the profile's own; all that the guest needs must be built into it.
    pub kernel: Option<PathBuf>,
    /// Fetch the distribution's packages again.
    pub refresh: bool,
}

/// Builds the default image. On an error or a crash the place `out` is as it was.
pub fn build(cache: &Cache, request: &BuildRequest, progress: &mut Progress) -> Result<ImageInfo, ImageError> {
    output::check_place(&request.out)?;
    let (kernel, packing) = choose_kernel(cache, request.profile, request.kernel.as_deref(), request.refresh, progress)?;
    progress.step("root", "the root disk, from Debian packages (about a minute when not cached)");
    let root_dir = root_disk::debian_root(cache, request.size_gib, request.refresh)?;
    let root = root_disk::read_root_json(&root_dir)?;
    progress.step("initrd", "the initramfs with the guest agent");
    let initrd = initrd::assemble(&request.guest_agent, &kernel.modules, packing)?;
    progress.step("write", &request.out.display().to_string());
    output::write(
        &request.out,
        &Parts {
            name: &request.name,
            source: "debian",
            profile: request.profile,
            kernel: &kernel.file,
            initrd: &initrd,
            root_dir: &root_dir,
            root,
            take_root: false,
        },
    )
}

/// The kernel for a profile, or the one that was given, with how its initramfs is stored.
pub(crate) fn choose_kernel(
    cache: &Cache,
    profile: Profile,
    given: Option<&std::path::Path>,
    refresh: bool,
    progress: &mut Progress,
) -> Result<(Kernel, Packing), ImageError> {
    if let Some(file) = given {
        progress.step("kernel", &format!("checking {}", file.display()));
        inspect_kernel(file)?;
        return Ok((Kernel { file: file.to_owned(), modules: Vec::new() }, Packing::Plain));
    }
    match profile {
        Profile::General => {
            progress.step("kernel", "the distribution's cloud kernel");
            Ok((kernel_package::distribution_kernel(cache, refresh)?, Packing::Zstd))
        }
        Profile::Soft => {
            progress.step("kernel", "the soft kernel (minutes when not cached)");
            let request = SoftKernelRequest { out: None, smp: false, refresh: false };
            let file = soft_kernel::cached(cache, &request)?;
            Ok((Kernel { file, modules: Vec::new() }, Packing::Plain))
        }
    }
}
