//! The image of the tests: the built image's kernel, and its initramfs followed by one whose /init is the test guest.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

pub struct Image {
    kernel: PathBuf,
    initrd: Vec<u8>,
}

/// Where `./dev` keeps the image that it built.
fn folder() -> PathBuf {
    let home = std::env::var_os("HOME").map(PathBuf::from).unwrap_or_default();
    std::env::var_os("KS_TEST_IMAGE").map_or_else(|| home.join(".cache/keepstate/images/current"), PathBuf::from)
}

/// The image, or None (said aloud) where there is none.
pub fn get() -> Option<&'static Image> {
    static IMAGE: OnceLock<Option<Image>> = OnceLock::new();
    IMAGE
        .get_or_init(|| {
            let dir = folder();
            let (kernel, initrd) = (dir.join("kernel"), dir.join("initrd"));
            if !kernel.is_file() || !initrd.is_file() {
                eprintln!("skipped: no image in {} (build one with ks-image, or set KS_TEST_IMAGE)", dir.display());
                return None;
            }
            let mut bytes = std::fs::read(initrd).unwrap();
            bytes.resize(bytes.len().next_multiple_of(512), 0);
            bytes.extend(overlay());
            Some(Image { kernel, initrd: bytes })
        })
        .as_ref()
}

impl Image {
    pub fn open(&self) -> (File, File) {
        let initrd = tempfile::tempfile().unwrap();
        std::os::unix::fs::FileExt::write_all_at(&initrd, &self.initrd, 0).unwrap();
        (File::open(&self.kernel).unwrap(), initrd)
    }
}

/// The folder of built programs.
fn built() -> PathBuf {
    Path::new(env!("CARGO_BIN_EXE_ks-vmm")).parent().unwrap().to_path_buf()
}

/// Sees to it that the preload shim lies beside ks-vmm, as in an installation.
pub fn shim() {
    static ONCE: OnceLock<()> = OnceLock::new();
    ONCE.get_or_init(|| {
        let release = built().ends_with("release");
        let mut build = std::process::Command::new(env!("CARGO"));
        build.args(["build", "--quiet", "-p", "ks-vmm-shim"]).args(release.then_some("--release"));
        assert!(build.status().unwrap().success(), "the shim builds");
        assert!(built().join("libks_vmm_shim.so").is_file());
    });
}

/// An uncompressed cpio with the test guest and the libraries that it is linked with.
fn overlay() -> Vec<u8> {
    let mut out = Vec::new();
    for dir in ["lib64", "lib", "lib/x86_64-linux-gnu"] {
        entry(&mut out, dir, 0o040_755, &[]);
    }
    let guest = std::fs::read(built().join("examples/test_guest")).unwrap();
    entry(&mut out, "init", 0o100_755, &guest);
    let loader = "lib64/ld-linux-x86-64.so.2";
    entry(&mut out, loader, 0o100_755, &std::fs::read(Path::new("/").join(loader)).unwrap());
    for lib in ["libc.so.6", "libgcc_s.so.1", "libm.so.6"] {
        let path = Path::new("lib/x86_64-linux-gnu").join(lib);
        if let Ok(bytes) = std::fs::read(Path::new("/").join(&path)) {
            entry(&mut out, path.to_str().unwrap(), 0o100_755, &bytes);
        }
    }
    entry(&mut out, "TRAILER!!!", 0, &[]);
    out
}

/// One "newc" entry.
fn entry(out: &mut Vec<u8>, name: &str, mode: u32, data: &[u8]) {
    let inode = out.len();
    let fields = [inode, mode as usize, 0, 0, 1, 0, data.len(), 0, 0, 0, 0, name.len() + 1, 0];
    out.extend(b"070701");
    for f in fields {
        out.extend(format!("{f:08X}").as_bytes());
    }
    out.extend(name.as_bytes());
    out.push(0);
    out.resize(out.len().next_multiple_of(4), 0);
    out.extend(data);
    out.resize(out.len().next_multiple_of(4), 0);
}
