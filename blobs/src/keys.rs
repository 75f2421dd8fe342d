//! The key ring, and the bytes of the key file.
//!
//! Key file: magic(8) ‖ version u32 ‖ count u32 ‖ (domain u32, master 32)* ‖ BLAKE3 of all before it (32).

use ks_proto::bytes::{DecodeError, Reader, Writer};
use ks_proto::chunk::DomainKey;
use std::collections::BTreeMap;

/// The domain of the fleet's images.
pub const IMAGE_DOMAIN: u32 = 0;
/// The domain of the user of a lone node.
pub const USER_DOMAIN: u32 = 1;
/// The largest key file.
pub(crate) const FILE_BYTES_MAX: u64 = 64 * 1024;
const MAGIC: &[u8; 8] = b"KSKEYS\r\n";
const VERSION: u32 = 1;
const WHAT: &str = "key file";

/// The keys at hand, by domain. Debug shows domains only.
#[derive(Debug, Clone, Default)]
pub struct KeyRing {
    keys: BTreeMap<u32, DomainKey>,
}

impl KeyRing {
    /// A ring of these keys.
    pub fn new(keys: impl IntoIterator<Item = DomainKey>) -> Self {
        Self { keys: keys.into_iter().map(|k| (k.domain(), k)).collect() }
    }
    pub(crate) fn from_masters(masters: &[(u32, [u8; 32])]) -> Self {
        Self::new(masters.iter().map(|(d, m)| DomainKey::new(*d, *m)))
    }
    /// The key of `domain`.
    pub fn get(&self, domain: u32) -> Option<&DomainKey> {
        self.keys.get(&domain)
    }
    /// Adds a key, replacing one of the same domain.
    pub fn insert(&mut self, key: DomainKey) {
        self.keys.insert(key.domain(), key);
    }
    /// All keys by domain.
    pub fn iter(&self) -> impl Iterator<Item = &DomainKey> {
        self.keys.values()
    }
    /// Only these domains, for a process that may open no others.
    #[must_use]
    pub fn only(&self, domains: &[u32]) -> Self {
        Self::new(self.keys.values().filter(|k| domains.contains(&k.domain())).cloned())
    }
}

pub(crate) fn encode(masters: &[(u32, [u8; 32])]) -> Vec<u8> {
    let mut w = Writer::new();
    w.raw(MAGIC).u32(VERSION).count(masters.len());
    for (domain, master) in masters {
        w.u32(*domain).raw(master);
    }
    let mut out = w.finish();
    let check = blake3::hash(&out);
    out.extend_from_slice(check.as_bytes());
    out
}

pub(crate) fn decode(bytes: &[u8]) -> Result<KeyRing, DecodeError> {
    let body = bytes.len().saturating_sub(32);
    let mut r = Reader::new(WHAT, bytes);
    r.magic(MAGIC)?;
    let version = r.u32()?;
    if version != VERSION {
        return Err(DecodeError::Version { what: WHAT, got: version, known: VERSION });
    }
    let n = r.count(36)?;
    let mut ring = KeyRing::default();
    for _ in 0..n {
        ring.insert(DomainKey::new(r.u32()?, r.array()?));
    }
    let check = r.array::<32>()?;
    r.end()?;
    if *blake3::hash(&bytes[..body]).as_bytes() != check {
        // Neither hash is shown: they are derived from secrets.
        return Err(DecodeError::Value { what: WHAT, why: "its check does not match: changed or damaged bytes".into() });
    }
    Ok(ring)
}
