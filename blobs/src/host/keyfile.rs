//! The key file of one node: created once, whole and durable, mode 0600, and never overwritten.

use crate::error::{At, StoreError};
use crate::keys::{self, KeyRing};
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use zeroize::Zeroize;

/// Reads and creates the file `keys` in a node's data folder.
#[derive(Debug)]
pub struct KeyFile {
    path: PathBuf,
}

impl KeyFile {
    /// The key file `keys` in `data_dir`.
    pub fn in_dir(data_dir: &Path) -> Self {
        Self { path: data_dir.join("keys") }
    }
    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The keys, or None if there is no file yet.
    ///
    /// # Errors
    /// If others may read the file, or its bytes are not whole. A damaged key file is never replaced.
    pub fn load(&self) -> Result<Option<KeyRing>, StoreError> {
        let file = match File::open(&self.path) {
            Ok(f) => f,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(StoreError::io("open", &self.path, e)),
        };
        let mode = file.metadata().at("stat", &self.path)?.mode();
        if mode & 0o177 != 0 {
            return Err(StoreError::KeyFile {
                path: self.path.clone(),
                why: format!("its mode is {:04o}, others may have read every secret in it", mode & 0o7777),
                next: format!("if you trust everybody on this machine: chmod 600 {}", self.path.display()),
            });
        }
        let mut bytes = Vec::new();
        let read = (&file).take(keys::FILE_BYTES_MAX + 1).read_to_end(&mut bytes);
        let ring = read.at("read", &self.path).and_then(|_| {
            keys::decode(&bytes).map_err(|source| StoreError::KeyFile {
                path: self.path.clone(),
                why: source.to_string(),
                next: "put the file back from your backup; without it no stored checkpoint can be read".into(),
            })
        });
        bytes.zeroize();
        ring.map(Some)
    }

    /// Creates the file with fresh secrets for the images (domain 0) and the lone user (domain 1).
    ///
    /// # Errors
    /// If it exists already, or the disk refuses. On return it is durable.
    pub fn create(&self) -> Result<KeyRing, StoreError> {
        let tmp = self.path.with_extension("new");
        match std::fs::remove_file(&tmp) {
            Err(e) if e.kind() != ErrorKind::NotFound => return Err(StoreError::io("remove", &tmp, e)),
            _ => {}
        }
        let mut masters = Vec::new();
        for domain in [keys::IMAGE_DOMAIN, keys::USER_DOMAIN] {
            masters.push((domain, super::random::<32>().at("draw a key for", &self.path)?));
        }
        let mut bytes = keys::encode(&masters);
        let written = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&tmp).and_then(|mut f| {
            f.write_all(&bytes)?;
            f.sync_all()
        });
        bytes.zeroize();
        let ring = KeyRing::from_masters(&masters);
        masters.iter_mut().for_each(|(_, m)| m.zeroize());
        written.at("write", &tmp)?;
        // A hard link, unlike a rename, refuses to replace keys that another process made meanwhile.
        std::fs::hard_link(&tmp, &self.path).at("create", &self.path)?;
        std::fs::remove_file(&tmp).at("remove", &tmp)?;
        let dir = self.path.parent().unwrap_or(Path::new("."));
        File::open(dir).and_then(|d| d.sync_all()).at("sync", dir)?;
        Ok(ring)
    }

    /// Loads the keys, or creates them if `may_create` (true only while the store holds nothing: new keys cannot
    /// open old objects).
    ///
    /// # Errors
    /// As [`Self::load`] and [`Self::create`], and if the file is missing and must not be created.
    pub fn load_or_create(&self, may_create: bool) -> Result<KeyRing, StoreError> {
        match self.load()? {
            Some(ring) => Ok(ring),
            None if may_create => self.create(),
            None => Err(StoreError::KeyFile {
                path: self.path.clone(),
                why: "it is gone, and the store beside it holds objects sealed under it".into(),
                next: "put it back from your backup (or move the whole data folder away to start anew)".into(),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn keys_are_made_once_and_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let kf = KeyFile::in_dir(dir.path());
        assert!(kf.load().unwrap().is_none());
        assert!(matches!(kf.load_or_create(false), Err(StoreError::KeyFile { .. })));
        std::fs::write(dir.path().join("keys.new"), b"left by a crash").unwrap();
        let made = kf.load_or_create(true).unwrap();
        let again = kf.load_or_create(true).unwrap();
        for d in [0, 1] {
            assert_eq!(made.get(d).unwrap().master(), again.get(d).unwrap().master());
        }
        assert_ne!(made.get(0).unwrap().master(), made.get(1).unwrap().master());
        assert_eq!(std::fs::metadata(kf.path()).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(kf.create().is_err(), "never replaced");
        assert!(!dir.path().join("keys.new").exists() || kf.load().is_ok());
        let shown = format!("{made:?} {kf:?}");
        let secret: String = made.get(1).unwrap().master().iter().map(|b| format!("{b:02x}")).collect();
        assert!(!shown.contains(&secret) && shown.contains("secret"));
    }

    #[test]
    fn a_readable_or_damaged_key_file_is_refused_with_the_fix() {
        let dir = tempfile::tempdir().unwrap();
        let kf = KeyFile::in_dir(dir.path());
        kf.create().unwrap();
        std::fs::set_permissions(kf.path(), std::fs::Permissions::from_mode(0o640)).unwrap();
        let text = kf.load().unwrap_err().to_string();
        assert!(text.contains("chmod 600") && text.contains("0640"), "{text}");
        std::fs::set_permissions(kf.path(), std::fs::Permissions::from_mode(0o600)).unwrap();
        let good = std::fs::read(kf.path()).unwrap();
        for i in 0..good.len() {
            let mut bad = good.clone();
            bad[i] ^= 4;
            std::fs::write(kf.path(), &bad).unwrap();
            assert!(kf.load().is_err(), "flipped byte {i}");
            std::fs::write(kf.path(), &good[..i]).unwrap();
            assert!(kf.load().is_err(), "cut to {i}");
        }
    }
}
