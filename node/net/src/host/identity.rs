//! The node's ed25519 key: made once, kept in `node.key`, never replaced silently.
//!
//! Layout in `docs/formats.md`. Refuses a file that others can read, a link, and a damaged file: a node that came up with another
//! key would be a stranger to its own fleet, so each of these stops the node with an error instead.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

use libp2p::identity::{Keypair, ed25519};
use thiserror::Error;

/// Name of the key file in the node's state directory.
pub const NODE_KEY_FILE: &str = "node.key";
const MAGIC: &[u8; 8] = b"KSNKEY\r\n";
const VERSION: u32 = 1;
const BYTES: usize = 8 + 4 + 32 + 8;

/// Why there is no usable node key.
#[derive(Debug, Error)]
pub enum IdentityError {
    /// Anyone on this machine could act as this node.
    #[error(
        "{path} can be read by others (mode {mode:04o}): run `chmod 600 {path}`; if others may have read it, remove this node from its fleet and join it again with a new key"
    )]
    Exposed {
        /// The key file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// Not a plain file (a link, a directory).
    #[error("{0} is not a plain file: move it away, or put the node's key file in its place")]
    NotAFile(PathBuf),
    /// Wrong magic, version, length or checksum.
    #[error("{path} is damaged ({what}): restore it from a copy, or delete it and join the fleet again as a new node")]
    Damaged {
        /// The key file.
        path: PathBuf,
        /// What did not fit.
        what: &'static str,
    },
    /// Could not be read or written.
    #[error("cannot {doing} {path}")]
    Io {
        /// "read" or "write".
        doing: &'static str,
        /// The key file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
}

/// The key in `dir/node.key`, made (mode 0600, synced with its directory) if there is none.
///
/// # Errors
/// [`IdentityError`]; an existing file is never overwritten.
pub fn load_or_create(dir: &Path) -> Result<Keypair, IdentityError> {
    let path = dir.join(NODE_KEY_FILE);
    match fs::symlink_metadata(&path) {
        Ok(_) => load(&path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => create(dir, &path),
        Err(source) => Err(IdentityError::Io { doing: "read", path, source }),
    }
}

fn load(path: &Path) -> Result<Keypair, IdentityError> {
    let failed = |source| IdentityError::Io { doing: "read", path: path.to_owned(), source };
    let meta = fs::symlink_metadata(path).map_err(failed)?;
    if !meta.is_file() {
        return Err(IdentityError::NotAFile(path.to_owned()));
    }
    let mode = meta.permissions().mode() & 0o7777;
    if mode & 0o077 != 0 {
        return Err(IdentityError::Exposed { path: path.to_owned(), mode });
    }
    if meta.len() != BYTES as u64 {
        return Err(IdentityError::Damaged { path: path.to_owned(), what: "wrong length" });
    }
    let bytes = fs::read(path).map_err(failed)?;
    decode(&bytes).map_err(|what| IdentityError::Damaged { path: path.to_owned(), what })
}

fn create(dir: &Path, path: &Path) -> Result<Keypair, IdentityError> {
    let failed = |source| IdentityError::Io { doing: "write", path: path.to_owned(), source };
    let key = ed25519::Keypair::generate();
    let temporary = dir.join(format!("{NODE_KEY_FILE}.{}", std::process::id()));
    let written = (|| {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
        file.write_all(&encode(&key))?;
        file.sync_all()?;
        // A link, unlike a rename, never replaces a key that another process made meanwhile.
        fs::hard_link(&temporary, path)
    })();
    let _ = fs::remove_file(&temporary);
    match written {
        Ok(()) => File::open(dir).and_then(|dir| dir.sync_all()).map_err(failed)?,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.exists() => return load(path),
        Err(source) => return Err(failed(source)),
    }
    Ok(key.into())
}

fn encode(key: &ed25519::Keypair) -> [u8; BYTES] {
    let mut out = [0; BYTES];
    out[..8].copy_from_slice(MAGIC);
    out[8..12].copy_from_slice(&VERSION.to_le_bytes());
    out[12..44].copy_from_slice(key.secret().as_ref());
    let sum = blake3::hash(&out[..44]);
    out[44..].copy_from_slice(&sum.as_bytes()[..8]);
    out
}

fn decode(bytes: &[u8]) -> Result<Keypair, &'static str> {
    if bytes.len() != BYTES {
        return Err("wrong length");
    }
    if &bytes[..8] != MAGIC {
        return Err("not a node key");
    }
    if bytes[8..12] != VERSION.to_le_bytes() {
        return Err("a version that this program does not know");
    }
    if bytes[44..] != blake3::hash(&bytes[..44]).as_bytes()[..8] {
        return Err("checksum");
    }
    let mut secret = [0; 32];
    secret.copy_from_slice(&bytes[12..44]);
    Keypair::ed25519_from_bytes(secret).map_err(|_| "not an ed25519 key")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_is_made_once_and_kept_private() {
        let dir = tempfile::tempdir().unwrap();
        let first = load_or_create(dir.path()).unwrap().public().to_peer_id();
        let again = load_or_create(dir.path()).unwrap().public().to_peer_id();
        assert_eq!(first, again);
        let mode = fs::metadata(dir.path().join(NODE_KEY_FILE)).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o600);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary file is left");
    }

    #[test]
    fn exposed_linked_and_damaged_files_are_refused_and_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        load_or_create(dir.path()).unwrap();
        let path = dir.path().join(NODE_KEY_FILE);
        let good = fs::read(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        assert!(matches!(load_or_create(dir.path()), Err(IdentityError::Exposed { mode: 0o640, .. })));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        for at in 0..BYTES {
            let mut bad = good.clone();
            bad[at] ^= 1;
            fs::write(&path, &bad).unwrap();
            assert!(matches!(load_or_create(dir.path()), Err(IdentityError::Damaged { .. })), "flipped byte {at}");
            assert_eq!(fs::read(&path).unwrap(), bad);
        }
        fs::write(&path, &good[..20]).unwrap();
        assert!(matches!(load_or_create(dir.path()), Err(IdentityError::Damaged { what: "wrong length", .. })));
        fs::rename(&path, dir.path().join("elsewhere")).unwrap();
        std::os::unix::fs::symlink("elsewhere", &path).unwrap();
        assert!(matches!(load_or_create(dir.path()), Err(IdentityError::NotAFile(_))));
    }

    /// Golden bytes of version 1.
    #[test]
    fn the_file_is_stable() {
        let mut secret = [1; 32];
        let key: ed25519::Keypair = ed25519::SecretKey::try_from_bytes(&mut secret).unwrap().into();
        let bytes = encode(&key);
        let mut want = b"KSNKEY\r\n\x01\0\0\0".to_vec();
        want.extend([1; 32]);
        let sum = blake3::hash(&want);
        want.extend(&sum.as_bytes()[..8]);
        assert_eq!(bytes.to_vec(), want);
        let peer = decode(&bytes).unwrap().public().to_peer_id();
        assert_eq!(peer.to_string(), "12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5");
    }
}
