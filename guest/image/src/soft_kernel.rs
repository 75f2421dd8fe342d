//! `ks-image soft-kernel`: the small kernel of the `soft` profile, from the distribution's source package.
//!
//! allnoconfig with our fragment over it, and our scripted edits. The result says nothing about the machine
//! that compiled it. Cached by the fragment and the edits.

use std::path::{Path, PathBuf};

use crate::{
    cache::Cache,
    error::{ImageError, IoContext},
    kernel_package,
    progress::Progress,
    recipe, soft_edits, tools,
};

/// The compiler yields to everything else on the machine.
const NICENESS: &str = "10";

/// What to build.
#[derive(Debug, Clone)]
pub struct SoftKernelRequest {
    /// Where to put a copy.
    pub out: Option<PathBuf>,
    /// For more than one vCPU; the kernel for one is quicker.
    pub smp: bool,
    /// Build again with the distribution's newest source.
    pub refresh: bool,
}

/// Builds the kernel, or finds it in the cache; where the file is.
pub fn soft_kernel(cache: &Cache, request: &SoftKernelRequest, progress: &mut Progress) -> Result<PathBuf, ImageError> {
    progress.step("kernel", "compiling the soft kernel (3 to 8 minutes on two cores when not cached)");
    let file = cached(cache, request)?;
    let Some(out) = &request.out else { return Ok(file) };
    progress.step("write", &out.display().to_string());
    let partial = crate::cache::with_suffix(out, ".partial");
    std::fs::copy(&file, &partial).doing("copy the kernel to", &partial)?;
    std::fs::rename(&partial, out).doing("rename to", out)?;
    Ok(out.clone())
}

/// The cached kernel file.
pub(crate) fn cached(cache: &Cache, request: &SoftKernelRequest) -> Result<PathBuf, ImageError> {
    let name = format!("soft-kernel/{}", recipe::soft_kernel_key(request.smp));
    let entry = cache.entry(&name, request.refresh, |dir| {
        tools::require(tools::FOR_COMPILING)?;
        compile(dir, request.smp)
    })?;
    Ok(entry.join("vmlinux"))
}

fn compile(dir: &Path, smp: bool) -> Result<(), ImageError> {
    let scratch = tempfile::tempdir().doing("make a directory in", &std::env::temp_dir())?;
    let package = kernel_package::fetch_package(scratch.path(), recipe::FETCH_SOURCE, "linux-source-")?;
    let tree = scratch.path().join("tree");
    tools::run(tools::command("dpkg-deb").arg("-x").arg(&package).arg(&tree), "unpacking the source package")?;
    let archive = kernel_package::only_match(&tree.join("usr/src"), "linux-source-6.1.tar")?;
    let unpack_dir = scratch.path().join("source");
    std::fs::create_dir(&unpack_dir).doing("make", &unpack_dir)?;
    tools::run(tools::command("tar").arg("-xf").arg(&archive).arg("-C").arg(&unpack_dir), "unpacking the kernel source")?;
    let source = kernel_package::only_match(&unpack_dir, "linux-source-")?;
    soft_edits::apply(&source, recipe::SOFT_EDITS)?;

    let fragment = scratch.path().join("fragment");
    let wanted = fragment_text(smp);
    std::fs::write(&fragment, &wanted).doing("write", &fragment)?;
    tools::run(
        tools::command("make").arg("-C").arg(&source).arg("allnoconfig").env("KCONFIG_ALLCONFIG", &fragment),
        "configuring the kernel",
    )?;
    let config_path = source.join(".config");
    let config = std::fs::read_to_string(&config_path).doing("read", &config_path)?;
    check_config(&wanted, &config)?;

    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    tools::run(
        tools::command("nice")
            .args(["-n", NICENESS, "make", "-C"])
            .arg(&source)
            .arg(format!("-j{jobs}"))
            .arg("vmlinux")
            .env("KBUILD_BUILD_TIMESTAMP", "1970-01-01 00:00:00 UTC")
            .env("KBUILD_BUILD_USER", "keepstate")
            .env("KBUILD_BUILD_HOST", "keepstate"),
        "compiling the kernel (it needs the packages libelf-dev and libssl-dev too)",
    )?;
    std::fs::copy(source.join("vmlinux"), dir.join("vmlinux")).doing("copy the kernel from", &source)?;
    std::fs::write(dir.join("config"), config).doing("write the configuration in", dir)
}

fn fragment_text(smp: bool) -> String {
    let mut text = recipe::SOFT_CONFIG.to_owned();
    if smp {
        text.push_str("CONFIG_SMP=y\nCONFIG_NR_CPUS=8\n");
    }
    text
}

/// Every option that the fragment sets must have survived the dependencies.
fn check_config(wanted: &str, config: &str) -> Result<(), ImageError> {
    let lost: Vec<&str> = recipe::lines(wanted)
        .into_iter()
        .filter(|line| match line.strip_suffix("=n") {
            Some(name) => config.lines().any(|l| l.starts_with(&format!("{name}="))),
            None => !config.lines().any(|l| l == *line),
        })
        .collect();
    if lost.is_empty() {
        return Ok(());
    }
    Err(ImageError::KernelPackage { what: format!("support for {}", lost.join(", ")) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_options_are_named() {
        check_config("A=y\nB=n\n", "A=y\n# B is not set\n").unwrap();
        let error = check_config("A=y\nB=n\n", "B=y\n").unwrap_err();
        assert!(error.to_string().contains("A=y, B=n"), "{error}");
    }

    #[test]
    fn the_fragment_has_each_option_once() {
        let text = fragment_text(true);
        let mut names: Vec<&str> = recipe::lines(&text).iter().filter_map(|l| l.split('=').next()).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
