//! Reads OCI image archives: an `oci-layout` tar (OCI image-spec, image-layout.md) or a `docker save` tar.
//!
//! Each blob's size and SHA-256 are checked before it is used, and each layer's uncompressed SHA-256 against
//! the configuration. Archives are hostile bytes: documents and streams have limits.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, BufReader, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
};

use serde::{Deserialize, de::DeserializeOwned};
use sha2::{Digest, Sha256};

use crate::{layer, staging::Staging};

/// JSON documents larger than this are refused.
const DOCUMENT_MAX: u64 = 4 << 20;
/// Indexes nested deeper than this are refused.
const NESTING_MAX: u32 = 4;
const LAYERS_MAX: usize = 512;

/// Why an archive was refused. Nothing of it is kept.
#[derive(Debug, thiserror::Error)]
pub enum OciError {
    /// The archive or a layer cannot be read.
    #[error("it cannot be read, or is damaged")]
    Read(#[source] io::Error),
    /// The staging tree cannot be written.
    #[error("cannot unpack {}", path.display())]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// Neither layout was found.
    #[error(
        "it has neither index.json nor manifest.json at its top; make it with `docker save`, or `skopeo copy ... oci-archive:FILE`"
    )]
    NotAnImage,
    /// A document is not what the format says.
    #[error("{name} is not valid: {why}")]
    Document { name: String, why: String },
    /// A blob that is referred to is not there.
    #[error("{name} is missing; the archive is incomplete")]
    Missing { name: String },
    /// Content does not have the digest under which it is named.
    #[error("{name} does not match its digest: expected {expected}, found {found}; fetch the archive again")]
    Digest { name: String, expected: String, found: String },
    /// No image for this machine.
    #[error("it has no linux/amd64 image (found: {found})")]
    Platform { found: String },
    /// Several images in one archive.
    #[error("it holds {count} images; save only one")]
    Several { count: usize },
    /// A name that leads out of the image.
    #[error("the entry name {path:?} leads out of the image or is malformed")]
    BadPath { path: String },
    /// An entry that a root disk cannot have.
    #[error("the entry {path:?} is of an unknown kind")]
    EntryKind { path: String },
    /// An owner that does not exist.
    #[error("the owner id {id} is out of range")]
    BadOwner { id: u64 },
    /// Too many entries.
    #[error("a layer has more than {limit} entries")]
    TooMany { limit: usize },
    /// More data than the disk could hold.
    #[error("it unpacks to more than {limit_mib} MiB; raise --size-gib if that is right")]
    TooBig { limit_mib: u64 },
}

#[derive(Deserialize)]
struct Descriptor {
    #[serde(rename = "mediaType", default)]
    media_type: String,
    digest: String,
    size: u64,
    platform: Option<Platform>,
}

#[derive(Deserialize)]
struct Platform {
    architecture: String,
    os: String,
}

#[derive(Deserialize)]
struct Index {
    manifests: Vec<Descriptor>,
}

#[derive(Deserialize)]
struct Manifest {
    config: Descriptor,
    layers: Vec<Descriptor>,
}

#[derive(Deserialize)]
struct DockerEntry {
    #[serde(rename = "Config")]
    config: String,
    #[serde(rename = "Layers")]
    layers: Vec<String>,
}

#[derive(Deserialize)]
struct Config {
    architecture: String,
    os: String,
    rootfs: RootFs,
    config: Option<RunConfig>,
}

#[derive(Deserialize)]
struct RootFs {
    diff_ids: Vec<String>,
}

#[derive(Deserialize)]
struct RunConfig {
    #[serde(rename = "Env")]
    env: Option<Vec<String>>,
}

/// Where an entry's bytes lie in the archive.
#[derive(Clone, Copy)]
struct Span {
    at: u64,
    len: u64,
}

struct Archive {
    file: File,
    files: BTreeMap<String, Span>,
    links: BTreeMap<String, String>,
}

/// Unpacks the one linux/amd64 image of the archive into `staging`; the environment that it asks for.
///
/// `unpacked_max` bounds the bytes of all uncompressed layers together.
pub(crate) fn unpack(archive: &Path, staging: &Staging, unpacked_max: u64) -> Result<Vec<String>, OciError> {
    let archive = Archive::open(archive)?;
    let (config, layers) = if archive.span("index.json").is_some() {
        archive.read_layout()?
    } else if archive.span("manifest.json").is_some() {
        archive.read_docker()?
    } else {
        return Err(OciError::NotAnImage);
    };
    if (config.os.as_str(), config.architecture.as_str()) != ("linux", "amd64") {
        return Err(OciError::Platform { found: format!("{}/{}", config.os, config.architecture) });
    }
    if config.rootfs.diff_ids.len() != layers.len() || layers.len() > LAYERS_MAX {
        let why = format!("{} layers for {} diff_ids", layers.len(), config.rootfs.diff_ids.len());
        return Err(OciError::Document { name: "the configuration".into(), why });
    }
    let mut left = unpacked_max;
    for (name, diff_id) in layers.iter().zip(&config.rootfs.diff_ids) {
        archive.apply_layer(name, diff_id, staging, &mut left, unpacked_max)?;
    }
    Ok(config.config.and_then(|c| c.env).unwrap_or_default())
}

impl Archive {
    fn open(path: &Path) -> Result<Self, OciError> {
        let file = File::open(path).map_err(OciError::Read)?;
        let (mut files, mut links) = (BTreeMap::new(), BTreeMap::new());
        let mut tar = tar::Archive::new(BufReader::new(&file));
        for entry in tar.entries_with_seek().map_err(OciError::Read)? {
            let entry = entry.map_err(OciError::Read)?;
            let raw = entry.path_bytes().into_owned();
            let name = String::from_utf8_lossy(&raw).trim_start_matches("./").to_owned();
            match entry.header().entry_type() {
                tar::EntryType::Regular => {
                    let span = Span { at: entry.raw_file_position(), len: entry.size() };
                    files.insert(name, span);
                }
                tar::EntryType::Symlink | tar::EntryType::Link => {
                    let target = entry.link_name_bytes().unwrap_or_default();
                    links.insert(name, String::from_utf8_lossy(&target).into_owned());
                }
                _ => {}
            }
        }
        Ok(Self { file, files, links })
    }

    /// The bytes of `name`; one link is followed, as old `docker save` links repeated layers.
    fn span(&self, name: &str) -> Option<Span> {
        if let Some(span) = self.files.get(name) {
            return Some(*span);
        }
        let target = self.links.get(name)?;
        let beside = Path::new(name).parent()?.join(target);
        let mut parts = Vec::new();
        for part in beside.components() {
            match part {
                std::path::Component::ParentDir => drop(parts.pop()?),
                std::path::Component::Normal(p) => parts.push(p.to_str()?),
                _ => {}
            }
        }
        self.files.get(&parts.join("/")).or_else(|| self.files.get(target.as_str())).copied()
    }

    fn reader(&self, name: &str) -> Result<io::Take<&File>, OciError> {
        let span = self.span(name).ok_or_else(|| OciError::Missing { name: name.to_owned() })?;
        let mut file = &self.file;
        file.seek(SeekFrom::Start(span.at)).map_err(OciError::Read)?;
        Ok(file.take(span.len))
    }

    fn document<T: DeserializeOwned>(&self, name: &str) -> Result<T, OciError> {
        let invalid = |why: String| OciError::Document { name: name.to_owned(), why };
        let reader = self.reader(name)?;
        if reader.limit() > DOCUMENT_MAX {
            return Err(invalid(format!("larger than {DOCUMENT_MAX} bytes")));
        }
        serde_json::from_reader(BufReader::new(reader)).map_err(|e| invalid(e.to_string()))
    }

    /// The name of a blob whose size and digest have been checked.
    fn checked_blob(&self, descriptor: &Descriptor) -> Result<String, OciError> {
        let hex = sha256_hex(&descriptor.digest)?;
        let name = format!("blobs/sha256/{hex}");
        let reader = self.reader(&name)?;
        if reader.limit() != descriptor.size {
            let (expected, found) = (format!("{} bytes", descriptor.size), format!("{} bytes", reader.limit()));
            return Err(OciError::Digest { name, expected, found });
        }
        check_digest(reader, &name, hex)?;
        Ok(name)
    }

    fn read_layout(&self) -> Result<(Config, Vec<String>), OciError> {
        let mut index: Index = self.document("index.json")?;
        for _ in 0..NESTING_MAX {
            let chosen = choose(index)?;
            let name = self.checked_blob(&chosen)?;
            if chosen.media_type.contains("index") || chosen.media_type.contains("manifest.list") {
                index = self.document(&name)?;
                continue;
            }
            let manifest: Manifest = self.document(&name)?;
            let config = self.document(&self.checked_blob(&manifest.config)?)?;
            let layers = manifest.layers.iter().map(|l| self.checked_blob(l)).collect::<Result<_, _>>()?;
            return Ok((config, layers));
        }
        Err(OciError::Document { name: "index.json".into(), why: "nested too deeply".into() })
    }

    /// `docker save` names blobs by digest only in part; the layers are checked by the configuration.
    fn read_docker(&self) -> Result<(Config, Vec<String>), OciError> {
        let mut entries: Vec<DockerEntry> = self.document("manifest.json")?;
        if entries.len() != 1 {
            return Err(OciError::Several { count: entries.len() });
        }
        let entry = entries.remove(0);
        let stem = entry.config.trim_end_matches(".json");
        let hex = stem.rsplit('/').next().unwrap_or_default();
        let digest = format!("sha256:{hex}");
        check_digest(self.reader(&entry.config)?, &entry.config, sha256_hex(&digest)?)?;
        Ok((self.document(&entry.config)?, entry.layers))
    }

    fn apply_layer(
        &self,
        name: &str,
        diff_id: &str,
        staging: &Staging,
        left: &mut u64,
        unpacked_max: u64,
    ) -> Result<(), OciError> {
        let expected = sha256_hex(diff_id)?;
        let plain = decompress(BufReader::with_capacity(1 << 18, self.reader(name)?))?;
        let mut hashing = Hashing { inner: plain.take(left.saturating_add(1)), hasher: Sha256::new(), count: 0 };
        let applied = layer::apply(staging, &mut hashing);
        // What follows the end-of-archive mark counts for the digest as well.
        let drained = if applied.is_ok() { io::copy(&mut hashing, &mut io::sink()).map(drop) } else { Ok(()) };
        if hashing.count > *left {
            return Err(OciError::TooBig { limit_mib: unpacked_max >> 20 });
        }
        applied?;
        drained.map_err(OciError::Read)?;
        *left -= hashing.count;
        let found = hex(&hashing.hasher.finalize());
        if found != expected {
            return Err(OciError::Digest { name: name.to_owned(), expected: expected.to_owned(), found });
        }
        Ok(())
    }
}

/// The manifest for linux/amd64, or the only one when no platform is given.
fn choose(index: Index) -> Result<Descriptor, OciError> {
    let known = |d: &Descriptor| d.platform.as_ref().map(|p| format!("{}/{}", p.os, p.architecture));
    let found: Vec<String> = index.manifests.iter().filter_map(known).collect();
    let (fit, other): (Vec<_>, Vec<_>) = index.manifests.into_iter().partition(|d| known(d).is_none_or(|p| p == "linux/amd64"));
    let mut fit = fit;
    match (fit.len(), other.len()) {
        (1, _) => Ok(fit.remove(0)),
        (0, _) => Err(OciError::Platform { found: found.join(", ") }),
        (count, _) => Err(OciError::Several { count }),
    }
}

fn decompress<'a>(mut reader: BufReader<io::Take<&'a File>>) -> Result<Box<dyn Read + 'a>, OciError> {
    use std::io::BufRead;
    let start = reader.fill_buf().map_err(OciError::Read)?;
    if start.starts_with(&[0x1f, 0x8b]) {
        return Ok(Box::new(flate2::bufread::MultiGzDecoder::new(reader)));
    }
    if start.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
        return Ok(Box::new(zstd::Decoder::with_buffer(reader).map_err(OciError::Read)?));
    }
    Ok(Box::new(reader))
}

fn check_digest(mut reader: impl Read, name: &str, expected: &str) -> Result<(), OciError> {
    let mut hasher = Sha256::new();
    let mut buffer = vec![0u8; 1 << 16];
    loop {
        match reader.read(&mut buffer).map_err(OciError::Read)? {
            0 => break,
            n => hasher.update(&buffer[..n]),
        }
    }
    let found = hex(&hasher.finalize());
    if found == expected {
        return Ok(());
    }
    Err(OciError::Digest { name: name.to_owned(), expected: expected.to_owned(), found })
}

/// The 64 hex digits of `sha256:...`.
fn sha256_hex(digest: &str) -> Result<&str, OciError> {
    digest
        .strip_prefix("sha256:")
        .filter(|h| h.len() == 64 && h.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)))
        .ok_or_else(|| OciError::Document { name: digest.escape_debug().to_string(), why: "not a sha256 digest".into() })
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

struct Hashing<R> {
    inner: R,
    hasher: Sha256,
    count: u64,
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buffer)?;
        self.hasher.update(&buffer[..n]);
        self.count += n as u64;
        Ok(n)
    }
}

#[cfg(test)]
#[path = "oci_tests.rs"]
mod tests;
