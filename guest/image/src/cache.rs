//! The build cache: directories named by their recipe's key, made whole or not at all.
//!
//! An entry is built in `KEY.partial` under a lock and renamed when it is complete and synced, so a crash
//! leaves at most a `.partial` that the next build removes.

use std::{
    fs::File,
    path::{Path, PathBuf},
};

use crate::error::{ImageError, IoContext};

/// A cache directory.
#[derive(Debug, Clone)]
pub struct Cache {
    dir: PathBuf,
}

impl Cache {
    /// The cache at `dir`, or the user's own: `$XDG_CACHE_HOME/keepstate`, else `~/.cache/keepstate`.
    pub fn open(dir: Option<PathBuf>) -> Result<Self, ImageError> {
        let dir = match dir {
            Some(dir) => dir,
            None => user_cache().join("keepstate"),
        };
        std::fs::create_dir_all(&dir).doing("make the cache", &dir)?;
        let dir = dir.canonicalize().doing("find the cache", &dir)?;
        Ok(Self { dir })
    }

    /// The entry `name`, made by `make` in an empty directory when it is missing or `refresh` is set.
    ///
    /// One process builds an entry at a time; others wait and then find it.
    pub(crate) fn entry(
        &self,
        name: &str,
        refresh: bool,
        make: impl FnOnce(&Path) -> Result<(), ImageError>,
    ) -> Result<PathBuf, ImageError> {
        let entry = self.dir.join(name);
        if entry.is_dir() && !refresh {
            return Ok(entry);
        }
        let parent = entry.parent().unwrap_or(&self.dir);
        std::fs::create_dir_all(parent).doing("make", parent)?;
        let lock_path = with_suffix(&entry, ".lock");
        let lock = File::create(&lock_path).doing("make the lock", &lock_path)?;
        lock.lock().doing("lock", &lock_path)?;
        if entry.is_dir() && !refresh {
            return Ok(entry);
        }
        let partial = with_suffix(&entry, ".partial");
        remove_tree(&partial)?;
        std::fs::create_dir(&partial).doing("make", &partial)?;
        if let Err(error) = make(&partial).and_then(|()| sync_dir(&partial)) {
            let _ = remove_tree(&partial); // the next build removes it if this cannot
            return Err(error);
        }
        replace_dir(&partial, &entry)?;
        Ok(entry)
    }
}

fn user_cache() -> PathBuf {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache"))).unwrap_or_else(std::env::temp_dir)
}

/// `path` with `suffix` after its last component.
pub(crate) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// Removes a tree that may not exist.
pub(crate) fn remove_tree(path: &Path) -> Result<(), ImageError> {
    match std::fs::remove_dir_all(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(e).doing("remove", path),
        _ => Ok(()),
    }
}

/// Syncs the regular files of one directory, then the directory.
pub(crate) fn sync_dir(dir: &Path) -> Result<(), ImageError> {
    for entry in std::fs::read_dir(dir).doing("list", dir)? {
        let path = entry.doing("list", dir)?.path();
        if path.is_file() {
            File::open(&path).and_then(|f| f.sync_all()).doing("sync", &path)?;
        }
    }
    File::open(dir).and_then(|f| f.sync_all()).doing("sync", dir)
}

/// Puts the complete directory `from` in the place of `to`, which may exist.
pub(crate) fn replace_dir(from: &Path, to: &Path) -> Result<(), ImageError> {
    let old = with_suffix(to, ".old");
    remove_tree(&old)?;
    if to.exists() {
        std::fs::rename(to, &old).doing("move away", to)?;
    }
    std::fs::rename(from, to).doing("rename to", to)?;
    if let Some(parent) = to.parent() {
        let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
        File::open(parent).and_then(|f| f.sync_all()).doing("sync", parent)?;
    }
    remove_tree(&old)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_made_once_and_a_failed_one_is_not_kept() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::open(Some(dir.path().join("c"))).unwrap();
        let fail = |_: &Path| Err(ImageError::NeedsRoot { why: "test".into() });
        assert!(cache.entry("images/a", false, fail).is_err());
        assert!(!dir.path().join("c/images/a.partial").exists());
        let write = |text: &'static str| move |p: &Path| std::fs::write(p.join("f"), text).doing("write", p);
        let path = cache.entry("images/a", false, write("1")).unwrap();
        cache.entry("images/a", false, write("2")).unwrap();
        assert_eq!(std::fs::read_to_string(path.join("f")).unwrap(), "1");
        cache.entry("images/a", true, write("3")).unwrap();
        assert_eq!(std::fs::read_to_string(path.join("f")).unwrap(), "3");
        assert!(!with_suffix(&path, ".old").exists() && !with_suffix(&path, ".partial").exists());
    }
}
