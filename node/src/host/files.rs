//! The node's data folder: lock, token, `api.json`, and files that are whole or absent.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The longest data folder: a Unix socket's path, which lies in it, has at most 107 bytes.
pub const DATA_DIR_BYTES_MAX: usize = 60;

/// Paths of one node's data.
#[derive(Debug, Clone)]
pub struct Layout {
    /// The data folder.
    pub root: PathBuf,
}

impl Layout {
    /// Of this folder, which is made (0700) if missing.
    ///
    /// # Errors
    /// If it cannot be made, or its path is too long for the sockets in it.
    pub fn open(root: &Path) -> Result<Self, String> {
        make_dir(root).map_err(|e| format!("cannot make the data folder {}: {e}", root.display()))?;
        let root = root.canonicalize().map_err(|e| format!("{}: {e}", root.display()))?;
        let len = root.as_os_str().len();
        if len > DATA_DIR_BYTES_MAX {
            return Err(format!(
                "the data folder's path {} has {len} bytes; sockets in it allow {DATA_DIR_BYTES_MAX}: choose a shorter one with --data-dir",
                root.display()
            ));
        }
        for sub in ["run", "images", "tmp"] {
            make_dir(&root.join(sub)).map_err(|e| format!("{}/{sub}: {e}", root.display()))?;
        }
        Ok(Self { root })
    }
    /// Folder of run folders.
    pub fn run(&self) -> PathBuf {
        self.root.join("run")
    }
    /// Folder of image files (kernel and initramfs; disks are in the store).
    pub fn images(&self) -> PathBuf {
        self.root.join("images")
    }
    /// Scratch, emptied at start.
    pub fn tmp(&self) -> PathBuf {
        self.root.join("tmp")
    }
    /// The chunk store.
    pub fn store(&self) -> PathBuf {
        self.root.join("store")
    }
    /// Key file.
    pub fn keys(&self) -> PathBuf {
        self.root.join("keys")
    }
    /// Database.
    pub fn database(&self) -> PathBuf {
        self.root.join("state.redb")
    }
    /// Where clients look.
    pub fn api_file(&self) -> PathBuf {
        self.root.join("api.json")
    }
}

fn make_dir(path: &Path) -> io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// How long a lock is waited for.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);

/// Takes the folder's lock for the life of the returned file.
///
/// # Errors
/// If another ksd holds it.
pub fn lock(layout: &Layout) -> Result<File, String> {
    let path = layout.root.join("ksd.lock");
    let open = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(&path);
    let mut file = open.map_err(|e| format!("cannot open {}: {e}", path.display()))?;
    // One that was just killed holds it until the kernel has taken it down.
    let end = std::time::Instant::now() + LOCK_PATIENCE;
    let mut taken = false;
    while !taken && std::time::Instant::now() < end {
        taken = rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_ok();
        if !taken {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    if !taken {
        let mut pid = String::new();
        let _ = file.read_to_string(&mut pid);
        return Err(format!(
            "another ksd (process {}) uses {}; stop it first, or give --data-dir another folder",
            pid.trim(),
            layout.root.display()
        ));
    }
    let _ = file.set_len(0);
    let _ = write!(file, "{}", std::process::id());
    Ok(file)
}

/// Writes `bytes` to `path` (mode 0600) so that a reader sees the old or the new file, never a part, also after a crash.
///
/// # Errors
/// As the disk says.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let tmp = path.with_extension(format!("tmp{}", std::process::id()));
    let mut f = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&tmp)?;
    f.write_all(bytes)?;
    f.sync_all()?;
    std::fs::rename(&tmp, path)?;
    match path.parent() {
        Some(dir) => File::open(dir)?.sync_all(),
        None => Ok(()),
    }
}

/// The bearer token: 32 random bytes in hex, made once.
///
/// # Errors
/// If the file cannot be read or written, or does not hold a token.
pub fn token(layout: &Layout) -> Result<String, String> {
    let path = layout.root.join("token");
    match std::fs::read_to_string(&path) {
        Ok(t) if t.len() == 64 && t.bytes().all(|b| b.is_ascii_hexdigit()) => Ok(t),
        Ok(_) => Err(format!("{} does not hold a token; remove the file to get a new one", path.display())),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            let t = hex::encode(random::<32>());
            write_atomic(&path, t.as_bytes()).map_err(|e| format!("cannot write {}: {e}", path.display()))?;
            Ok(t)
        }
        Err(e) => Err(format!("cannot read {}: {e}", path.display())),
    }
}

/// Fresh random bytes.
///
/// # Panics
/// If the kernel has none, which Linux rules out once it has booted.
pub fn random<const N: usize>() -> [u8; N] {
    let mut b = [0; N];
    getrandom::fill(&mut b).expect("the kernel's random source works after boot");
    b
}

/// An anonymous file that holds `bytes`, positioned at its start.
///
/// # Errors
/// As the kernel says.
pub fn memfd(name: &str, bytes: &[u8]) -> io::Result<File> {
    let fd = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC)?;
    let mut f = File::from(fd);
    f.write_all(bytes)?;
    io::Seek::rewind(&mut f)?;
    Ok(f)
}

/// All bytes of an anonymous file from its start, refused above `max`.
///
/// # Errors
/// If it is longer, or cannot be read.
pub fn read_fd(fd: std::os::fd::OwnedFd, max: usize) -> io::Result<Vec<u8>> {
    use std::os::unix::fs::FileExt;
    let f = File::from(fd);
    let len = usize::try_from(f.metadata()?.len()).unwrap_or(usize::MAX);
    if len > max {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("{len} bytes, at most {max} are allowed")));
    }
    let mut out = vec![0; len];
    f.read_exact_at(&mut out, 0)?;
    Ok(out)
}
