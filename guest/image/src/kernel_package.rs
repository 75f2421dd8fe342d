//! The distribution's cloud kernel: fetched with the package lists of the release, not those of the host.
//!
//! A cache entry holds `kernel`, `modules/*.ko`, `modules.list` (order of loading) and `release`.

use std::path::{Path, PathBuf};

use crate::{
    cache::Cache,
    error::{ImageError, IoContext},
    modules, recipe, tools,
};

/// A kernel ready for an image.
pub(crate) struct Kernel {
    pub(crate) file: PathBuf,
    /// In the order of loading; empty when everything is built in.
    pub(crate) modules: Vec<PathBuf>,
}

/// The cached distribution kernel, fetched when needed.
pub(crate) fn distribution_kernel(cache: &Cache, refresh: bool) -> Result<Kernel, ImageError> {
    let entry = cache.entry(&format!("images/kernel-{}", recipe::kernel_key()), refresh, |dir| {
        tools::require(tools::FOR_KERNEL_PACKAGE)?;
        fetch_and_unpack(dir)
    })?;
    let list_path = entry.join("modules.list");
    let list = std::fs::read_to_string(&list_path).doing("read", &list_path)?;
    let modules = list.lines().map(|name| entry.join("modules").join(name)).collect();
    Ok(Kernel { file: entry.join("kernel"), modules })
}

fn fetch_and_unpack(dir: &Path) -> Result<(), ImageError> {
    let scratch = tempfile::tempdir().doing("make a directory in", &std::env::temp_dir())?;
    let package = fetch_package(scratch.path(), recipe::FETCH_KERNEL, "linux-image-")?;
    let tree = scratch.path().join("tree");
    tools::run(tools::command("dpkg-deb").arg("-x").arg(&package).arg(&tree), "unpacking the kernel package")?;

    let image = only_match(&tree.join("boot"), "vmlinuz-")?;
    std::fs::copy(&image, dir.join("kernel")).doing("copy the kernel", &image)?;
    let lib = ["lib/modules", "usr/lib/modules"].map(|p| tree.join(p)).into_iter().find(|p| p.is_dir());
    let lib = lib.ok_or_else(|| ImageError::KernelPackage { what: "lib/modules".into() })?;
    let release_dir = only_match(&lib, "")?;
    let order = modules::in_load_order(&release_dir, &recipe::lines(recipe::MODULES))?;

    let modules_dir = dir.join("modules");
    std::fs::create_dir(&modules_dir).doing("make", &modules_dir)?;
    let mut list = String::new();
    for path in &order {
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        std::fs::copy(path, modules_dir.join(name)).doing("copy the module", path)?;
        list.push_str(name);
        list.push('\n');
    }
    crate::cache::sync_dir(&modules_dir)?;
    std::fs::write(dir.join("modules.list"), list).doing("write the module list in", dir)
}

/// Downloads with a hook script in an empty tree of the release; the one `.deb` that begins with `prefix`.
pub(crate) fn fetch_package(dir: &Path, hook: &str, prefix: &str) -> Result<PathBuf, ImageError> {
    let script = dir.join("fetch.sh");
    std::fs::write(&script, hook).doing("write", &script)?;
    let run_hook = format!("--customize-hook=sh {}", tools::shell_quote(script.as_os_str()));
    tools::run(
        tools::command("mmdebstrap")
            .args(["--quiet", "--variant=custom", "--format=null", "--architectures=amd64"])
            .arg("--aptopt=Acquire::Languages \"none\"")
            .arg(run_hook)
            .args([recipe::SUITE, "/dev/null"])
            .env("KS_FETCH_DIR", dir),
        "downloading a package (is the network there?)",
    )?;
    only_match(dir, prefix)
}

/// The one entry of `dir` whose name begins with `prefix`.
pub(crate) fn only_match(dir: &Path, prefix: &str) -> Result<PathBuf, ImageError> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).doing("list", dir)? {
        let entry = entry.doing("list", dir)?;
        if entry.file_name().to_string_lossy().starts_with(prefix) {
            found.push(entry.path());
        }
    }
    match found.len() {
        1 => Ok(found.remove(0)),
        n => Err(ImageError::KernelPackage { what: format!("exactly one {prefix}* (found {n})") }),
    }
}
