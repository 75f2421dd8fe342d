//! `ks-image import`: an image from an OCI archive or a root directory.
//!
//! The kernel and the initramfs are those of the default build unless a kernel is given.

use std::path::PathBuf;

use crate::{
    build::choose_kernel,
    cache::{self, Cache},
    error::{ImageError, IoContext},
    image_info::{ImageInfo, RootInfo},
    initrd, oci,
    output::{self, Parts},
    progress::Progress,
    recipe::Profile,
    root_disk, root_finish,
    staging::Staging,
    tools,
};

/// Where the root tree comes from.
#[derive(Debug, Clone)]
pub enum RootSource {
    /// An OCI layout or `docker save` archive.
    Oci(PathBuf),
    /// A directory; other file systems mounted below it are left out.
    Dir(PathBuf),
}

/// What to import.
#[derive(Debug, Clone)]
pub struct ImportRequest {
    /// The image directory to make or replace.
    pub out: PathBuf,
    /// Name for people.
    pub name: String,
    /// The tree.
    pub source: RootSource,
    /// Engines it is for.
    pub profile: Profile,
    /// The static guest agent.
    pub guest_agent: PathBuf,
    /// Size of the root disk as the guest sees it.
    pub size_gib: u32,
    /// A kernel in place of the profile's own.
    pub kernel: Option<PathBuf>,
}

/// Imports a root tree. On an error or a crash the place `out` is as it was.
pub fn import(cache: &Cache, request: &ImportRequest, progress: &mut Progress) -> Result<ImageInfo, ImageError> {
    output::check_place(&request.out)?;
    tools::require(tools::FOR_DISK)?;
    let (kernel, packing) = choose_kernel(cache, request.profile, request.kernel.as_deref(), false, progress)?;
    progress.step("initrd", "the initramfs with the guest agent");
    let initrd = initrd::assemble(&request.guest_agent, &kernel.modules, packing)?;

    // Beside the output: the disk is then moved, not copied, and a crash leaves only this directory.
    let work = cache::with_suffix(&std::path::absolute(&request.out).doing("find", &request.out)?, ".import");
    cache::remove_tree(&work)?;
    let result = import_in(&work, request, progress, &kernel.file, &initrd);
    let cleaned = cache::remove_tree(&work);
    let info = result?;
    cleaned?;
    Ok(info)
}

fn import_in(
    work: &std::path::Path,
    request: &ImportRequest,
    progress: &mut Progress,
    kernel: &std::path::Path,
    initrd: &[u8],
) -> Result<ImageInfo, ImageError> {
    let tree = work.join("tree");
    std::fs::create_dir_all(&tree).doing("make", &tree)?;
    let staging = Staging::open(&tree).doing("open", &tree)?;
    let (name, env) = match &request.source {
        RootSource::Oci(archive) => {
            progress.step("unpack", &archive.display().to_string());
            // Layers may hold what later ones hide, so more than the disk's size may pass through.
            let unpacked_max = (u64::from(request.size_gib) << 30).saturating_mul(2);
            let env = oci::unpack(archive, &staging, unpacked_max)
                .map_err(|source| ImageError::Oci { path: archive.clone(), source })?;
            ("oci", env)
        }
        RootSource::Dir(dir) => {
            progress.step("copy", &dir.display().to_string());
            tools::run(
                tools::command("cp")
                    .args(["--archive", "--one-file-system", "--reflink=auto", "--sparse=auto", "--"])
                    .arg(dir.join("."))
                    .arg(&tree),
                "copying the root directory",
            )?;
            ("rootdir", Vec::new())
        }
    };
    progress.step("prepare", "the user agent, mount points, no foreign identity");
    let warnings = root_finish::finish(&staging, &env)?;
    progress.step("disk", &format!("ext4 of {} GiB", request.size_gib));
    let root = root_disk::make_disk(&tree, &work.join("root.ext4"), request.size_gib)?;
    progress.step("write", &request.out.display().to_string());
    output::write(
        &request.out,
        &Parts {
            name: &request.name,
            source: name,
            profile: request.profile,
            kernel,
            initrd,
            root_dir: work,
            root: RootInfo { warnings, ..root },
            take_root: true,
        },
    )
}
