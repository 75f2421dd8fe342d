//! Keys of the providers: sealed on disk, zeroized in memory, shown only as fingerprints.
//!
//! One file, `vault`, replaced whole: magic, nonce, and an XChaCha20-Poly1305 seal of a JSON list under the data key that ksd hands
//! over. Without that key nothing is read, added or used. A file that does not open under it is left alone and named in the
//! error: a vault is never replaced because it could not be read.

use chacha20poly1305::aead::{Aead, KeyInit, Payload};
use chacha20poly1305::{XChaCha20Poly1305, XNonce};
use ks_proto::gateway::KeyInfo;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use zeroize::{Zeroize, Zeroizing};

use crate::limits::KEYS_MAX;

const MAGIC: &[u8; 8] = b"KSVAULT\x01";
const NONCE_BYTES: usize = 24;
/// Characters of a key at most.
pub const KEY_CHARS_MAX: usize = 4096;

/// Why the vault did not do it.
#[derive(Debug, thiserror::Error)]
pub enum VaultError {
    /// No data key yet.
    #[error("the keys are still sealed: the node has not handed over the key that opens them")]
    Sealed,
    /// The data key does not fit the file.
    #[error(
        "{0} does not open under this node's data key: restore the file that belongs to it, or remove it and add the keys again"
    )]
    Foreign(PathBuf),
    /// Not 32 bytes in hex.
    #[error("the data key is not 64 hex digits")]
    BadKey,
    /// A key that cannot be one.
    #[error("a key has 1 to {KEY_CHARS_MAX} visible ASCII characters; this one has others, or is too long")]
    BadSecret,
    /// Too many.
    #[error("the vault holds {KEYS_MAX} keys already; remove one first")]
    Full,
    /// The disk.
    #[error("cannot {doing} {path}")]
    Io {
        /// "read" or "write".
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

#[derive(Serialize, Deserialize)]
struct Stored {
    user: String,
    provider: String,
    secret: String,
    added_unix_ms: u64,
}

impl Drop for Stored {
    fn drop(&mut self) {
        self.secret.zeroize();
    }
}

struct Open {
    data_key: Zeroizing<[u8; 32]>,
    keys: BTreeMap<(String, String), Stored>,
}

/// The vault of one node.
pub struct Vault {
    path: PathBuf,
    open: Option<Open>,
}

impl Vault {
    /// In `dir`; sealed.
    pub fn new(dir: &Path) -> Self {
        Self { path: dir.join("vault"), open: None }
    }

    /// True once a data key was accepted.
    pub fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// Opens it with `key_hex`; a vault without a file is empty.
    ///
    /// # Errors
    /// If the key is none, or does not open the file.
    pub fn unseal(&mut self, key_hex: &str) -> Result<(), VaultError> {
        let mut data_key = Zeroizing::new([0; 32]);
        hex::decode_to_slice(key_hex, &mut data_key[..]).map_err(|_| VaultError::BadKey)?;
        let keys = match fs::read(&self.path) {
            Ok(bytes) => self.decode(&bytes, &data_key)?,
            Err(e) if e.kind() == io::ErrorKind::NotFound => BTreeMap::new(),
            Err(source) => return Err(VaultError::Io { doing: "read", path: self.path.clone(), source }),
        };
        self.open = Some(Open { data_key, keys });
        Ok(())
    }

    fn decode(&self, bytes: &[u8], key: &[u8; 32]) -> Result<BTreeMap<(String, String), Stored>, VaultError> {
        let foreign = || VaultError::Foreign(self.path.clone());
        if bytes.len() < MAGIC.len() + NONCE_BYTES || &bytes[..MAGIC.len()] != MAGIC {
            return Err(foreign());
        }
        let (nonce, sealed) = bytes[MAGIC.len()..].split_at(NONCE_BYTES);
        let nonce = <[u8; NONCE_BYTES]>::try_from(nonce).map_err(|_| foreign())?;
        let cipher = XChaCha20Poly1305::new(key.into());
        let plain = cipher.decrypt(&XNonce::from(nonce), Payload { msg: sealed, aad: MAGIC }).map_err(|_| foreign())?;
        let plain = Zeroizing::new(plain);
        let all: Vec<Stored> = serde_json::from_slice(&plain).map_err(|_| foreign())?;
        Ok(all.into_iter().map(|s| ((s.user.clone(), s.provider.clone()), s)).collect())
    }

    fn store(&self) -> Result<(), VaultError> {
        let open = self.open.as_ref().ok_or(VaultError::Sealed)?;
        let io = |source| VaultError::Io { doing: "write", path: self.path.clone(), source };
        let all: Vec<&Stored> = open.keys.values().collect();
        let plain = Zeroizing::new(serde_json::to_vec(&all).map_err(|e| io(io::Error::other(e)))?);
        let mut nonce = [0; NONCE_BYTES];
        getrandom::fill(&mut nonce).map_err(|e| io(io::Error::other(e.to_string())))?;
        let cipher = XChaCha20Poly1305::new((&*open.data_key).into());
        let sealed = cipher
            .encrypt(&XNonce::from(nonce), Payload { msg: &plain, aad: MAGIC })
            .map_err(|_| io(io::Error::other("sealing failed")))?;
        let bytes = [MAGIC.as_slice(), nonce.as_slice(), sealed.as_slice()].concat();
        super::files::write_atomic(&self.path, &bytes).map_err(io)
    }

    /// Adds or replaces a key; durable when this returns.
    ///
    /// # Errors
    /// If the vault is sealed or full, the key cannot be one, or the disk refuses.
    pub fn add(&mut self, user: &str, provider: &str, secret: &str, now_unix_ms: u64) -> Result<KeyInfo, VaultError> {
        let secret = secret.trim();
        if secret.is_empty() || secret.len() > KEY_CHARS_MAX || !secret.bytes().all(|b| b.is_ascii_graphic()) {
            return Err(VaultError::BadSecret);
        }
        let open = self.open.as_mut().ok_or(VaultError::Sealed)?;
        let place = (user.to_owned(), provider.to_owned());
        if open.keys.len() >= KEYS_MAX && !open.keys.contains_key(&place) {
            return Err(VaultError::Full);
        }
        let stored =
            Stored { user: user.into(), provider: provider.into(), secret: secret.to_owned(), added_unix_ms: now_unix_ms };
        let info = info(&stored, &open.data_key);
        let before = open.keys.insert(place.clone(), stored);
        if let Err(e) = self.store() {
            if let Some(open) = self.open.as_mut() {
                match before {
                    Some(old) => open.keys.insert(place, old),
                    None => open.keys.remove(&place),
                };
            }
            return Err(e);
        }
        Ok(info)
    }

    /// Drops a key; false if there was none.
    ///
    /// # Errors
    /// If the vault is sealed or the disk refuses.
    pub fn remove(&mut self, user: &str, provider: &str) -> Result<bool, VaultError> {
        let open = self.open.as_mut().ok_or(VaultError::Sealed)?;
        let there = open.keys.remove(&(user.to_owned(), provider.to_owned())).is_some();
        if there {
            self.store()?;
        }
        Ok(there)
    }

    /// Fingerprints: of `user`, or of everybody with "".
    ///
    /// # Errors
    /// If the vault is sealed.
    pub fn list(&self, user: &str) -> Result<Vec<KeyInfo>, VaultError> {
        let open = self.open.as_ref().ok_or(VaultError::Sealed)?;
        let theirs = open.keys.values().filter(|k| user.is_empty() || k.user == user);
        Ok(theirs.map(|k| info(k, &open.data_key)).collect())
    }

    /// The key of `user` for a provider; the operator's ("") where a user has none of their own.
    ///
    /// # Errors
    /// If the vault is sealed.
    pub fn key(&self, user: &str, provider: &str) -> Result<Option<Zeroizing<String>>, VaultError> {
        let open = self.open.as_ref().ok_or(VaultError::Sealed)?;
        let of = |user: &str| open.keys.get(&(user.to_owned(), provider.to_owned()));
        Ok(of(user).or_else(|| of("")).map(|k| Zeroizing::new(k.secret.clone())))
    }
}

/// A keyed hash: of the same key on another fleet it is another one, so that it proves nothing to a stranger.
fn info(key: &Stored, data_key: &[u8; 32]) -> KeyInfo {
    let hash = blake3::keyed_hash(data_key, key.secret.as_bytes());
    KeyInfo {
        user: key.user.clone(),
        provider: key.provider.clone(),
        fingerprint: hash.to_hex()[..12].to_owned(),
        added_unix_ms: key.added_unix_ms,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MARKED: &str = "sk-marked-7f3a91c2e4";

    #[test]
    fn keys_are_sealed_at_rest_and_open_again_under_the_same_data_key_only() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (hex::encode([1; 32]), hex::encode([2; 32]));
        let mut v = Vault::new(dir.path());
        assert!(matches!(v.key("", "openai"), Err(VaultError::Sealed)));
        v.unseal(&one).unwrap();
        let info = v.add("", "openai", &format!("{MARKED}\n"), 5).unwrap();
        assert_eq!(info.fingerprint.len(), 12);
        let file = fs::read(dir.path().join("vault")).unwrap();
        assert!(!file.windows(MARKED.len()).any(|w| w == MARKED.as_bytes()));
        let mut again = Vault::new(dir.path());
        assert!(matches!(again.unseal(&two), Err(VaultError::Foreign(_))));
        again.unseal(&one).unwrap();
        assert_eq!(again.key("alice", "openai").unwrap().unwrap().as_str(), MARKED);
        assert_eq!(again.list("").unwrap(), vec![info]);
        assert!(again.key("", "anthropic").unwrap().is_none());
        assert!(again.remove("", "openai").unwrap() && !again.remove("", "openai").unwrap());
    }

    #[test]
    fn what_cannot_be_a_key_is_refused_and_a_damaged_vault_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let key = hex::encode([1; 32]);
        let mut v = Vault::new(dir.path());
        v.unseal(&key).unwrap();
        for bad in ["", "  ", "a b", "schlüssel", &"x".repeat(KEY_CHARS_MAX + 1)] {
            assert!(matches!(v.add("", "openai", bad, 0), Err(VaultError::BadSecret)), "{bad:?}");
        }
        v.add("bob", "openai", "sk-1", 0).unwrap();
        let path = dir.path().join("vault");
        let mut bytes = fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&path, &bytes).unwrap();
        assert!(matches!(Vault::new(dir.path()).unseal(&key), Err(VaultError::Foreign(_))));
        assert_eq!(fs::read(&path).unwrap(), bytes);
    }
}
