//! The file of contexts, 0600: it holds tokens. Written whole under another name, then renamed.

use crate::context::Contexts;
use crate::failure::{Failure, Res};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Beside the user's configuration.
pub fn file() -> PathBuf {
    crate::config::user_file(|k| std::env::var(k).ok()).with_file_name("contexts.toml")
}

/// Reads them; no file is no contexts.
pub fn load(path: &Path) -> Res<Contexts> {
    let bad = |e: std::io::Error| Failure::local(format!("cannot read {}", path.display()), e, "mend or move the file");
    let meta = match std::fs::metadata(path) {
        Ok(m) => m,
        Err(e) if matches!(e.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory) => {
            return Ok(Contexts::default());
        }
        Err(e) => return Err(bad(e)),
    };
    if meta.permissions().mode() & 0o077 != 0 {
        return Err(Failure::usage(
            format!("{} can be read by others", path.display()),
            "it holds tokens; somebody may have copied them",
            format!("`chmod 600 {}`, and get new tokens if others use this machine", path.display()),
        ));
    }
    Contexts::read(&std::fs::read_to_string(path).map_err(bad)?)
}

/// Writes them.
pub fn save(path: &Path, contexts: &Contexts) -> Res<()> {
    let text = contexts.write()?;
    let write = || -> std::io::Result<()> {
        let dir = path.parent().unwrap_or(Path::new("."));
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{}", std::process::id()));
        let fresh = path.with_file_name(name);
        let mut f = std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&fresh)?;
        f.write_all(text.as_bytes())?;
        f.sync_all()?;
        std::fs::rename(&fresh, path)
    };
    write().map_err(|e| Failure::local(format!("cannot write {}", path.display()), e, "check the folder's owner and the disk"))
}
