//! Opening a store: its version, and the state built from what its folder holds. Reads pack tables, never objects.

use crate::error::{At, StoreError};
use crate::host::{Disk, Found};
use crate::pins;
use crate::store::{ManifestInfo, State, pack_path};
use ks_proto::bytes::DecodeError;
use ks_proto::ids::{CheckpointId, PackId};
use ks_proto::pack::{self, HEADER_BYTES, PACK_BYTES_MAX, PackIndex, TRAILER_BYTES};
use std::fs::File;
use std::path::{Path, PathBuf};

const FORMAT: &str = "keepstate store 1";

/// Checks the folder's version and reads what is in it. Returns the state, and what was found wrong, one line each.
pub(crate) fn load(disk: &dyn Disk, root: &Path) -> Result<(State, Vec<String>), StoreError> {
    check_format(disk, root)?;
    let mut loader = Loader { disk, root, state: State::default(), warnings: Vec::new() };
    loader.packs()?;
    loader.manifests()?;
    loader.pins()?;
    Ok((loader.state, loader.warnings))
}

fn check_format(disk: &dyn Disk, dir: &Path) -> Result<(), StoreError> {
    let path = dir.join("format");
    match disk.open(&path) {
        Ok(file) => {
            let bytes = read_all(disk, &file, &path, 4096)?;
            let found = String::from_utf8_lossy(&bytes).trim_end().to_owned();
            if found == FORMAT { Ok(()) } else { Err(StoreError::Format { path, found, known: FORMAT }) }
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            let tmp = dir.join("incoming").join("format");
            let file = disk.create(&tmp).at("create", &tmp)?;
            disk.append(&file, 0, format!("{FORMAT}\n").as_bytes()).at("write", &tmp)?;
            disk.sync(&file).at("sync", &tmp)?;
            disk.rename(&tmp, &path).at("rename", &path)?;
            disk.sync_dir(dir).at("sync", dir)
        }
        Err(e) => Err(StoreError::io("open", &path, e)),
    }
}

/// All bytes of a file of at most `max` bytes.
pub(crate) fn read_all(disk: &dyn Disk, file: &File, path: &Path, max: u64) -> Result<Vec<u8>, StoreError> {
    let len = disk.len(file).at("stat", path)?;
    if len > max {
        let why = format!("{len} bytes, the most is {max}");
        return Err(StoreError::Decode { path: path.to_owned(), source: DecodeError::Value { what: "file", why } });
    }
    let mut bytes = vec![0u8; usize::try_from(len).expect("bounded above")];
    disk.read_at(file, &mut bytes, 0).at("read", path)?;
    Ok(bytes)
}

/// Reads a pack's index: header, trailer and table only.
pub(crate) fn read_pack_index(disk: &dyn Disk, file: &File, path: &Path) -> Result<(u64, PackIndex), StoreError> {
    let refused = |source| StoreError::Decode { path: path.to_owned(), source };
    let len = disk.len(file).at("stat", path)?;
    if len < (HEADER_BYTES + TRAILER_BYTES) as u64 || len > PACK_BYTES_MAX as u64 {
        return Err(refused(DecodeError::Value { what: "pack", why: format!("a file of {len} bytes") }));
    }
    let mut header = [0u8; HEADER_BYTES];
    disk.read_at(file, &mut header, 0).at("read", path)?;
    let domain = pack::decode_header(&header).map_err(refused)?;
    let mut trailer = [0u8; TRAILER_BYTES];
    disk.read_at(file, &mut trailer, len - TRAILER_BYTES as u64).at("read", path)?;
    let (at, table_len) = pack::decode_trailer(&trailer, len).map_err(refused)?;
    let mut table = vec![0u8; table_len];
    disk.read_at(file, &mut table, at).at("read", path)?;
    Ok((len, pack::decode_table(domain, &table, &trailer).map_err(refused)?))
}

/// Builds the state from the folder.
struct Loader<'a> {
    disk: &'a dyn Disk,
    root: &'a Path,
    state: State,
    warnings: Vec<String>,
}

impl Loader<'_> {
    fn packs(&mut self) -> Result<(), StoreError> {
        for (path, found) in self.files("packs", ".pack")? {
            let Some(id) = name_of::<PackId>(&found.name, ".pack").filter(|id| pack_path(self.root, id) == path) else {
                self.quarantine(&path, &found.name, "its name is not a pack's")?;
                continue;
            };
            let file = self.disk.open(&path).at("open", &path)?;
            match read_pack_index(self.disk, &file, &path) {
                Ok((bytes, index)) => {
                    self.state.index.add(id, bytes, found.modified_ms, None, index);
                }
                Err(StoreError::Decode { source: e @ DecodeError::Version { .. }, .. }) => {
                    self.warnings.push(format!("pack {} is left alone and not used: {e}", path.display()));
                }
                Err(StoreError::Decode { source, .. }) => self.quarantine(&path, &found.name, &source.to_string())?,
                Err(other) => return Err(other),
            }
        }
        Ok(())
    }

    fn manifests(&mut self) -> Result<(), StoreError> {
        for (path, found) in self.files("manifests", ".manifest")? {
            match name_of::<CheckpointId>(&found.name, ".manifest") {
                Some(id) if path.parent().is_some_and(|p| p.ends_with(&id.to_hex()[..2])) => {
                    let info = ManifestInfo { bytes: found.bytes, since_ms: found.modified_ms };
                    self.state.manifests.insert(id, info);
                }
                _ => self.quarantine(&path, &found.name, "its name is not a manifest's")?,
            }
        }
        Ok(())
    }

    fn pins(&mut self) -> Result<(), StoreError> {
        let dir = self.root.join("pins");
        for f in self.disk.list(&dir).at("list", &dir)? {
            match pins::parse(&f.name) {
                Some(pin) if self.state.manifests.contains_key(&pin.0) => drop(self.state.pins.insert(pin)),
                Some(_) => {
                    // The process died before the manifest got its name, so nobody was told that it is held.
                    let path = dir.join(&f.name);
                    self.disk.unlink(&path).at("remove", &path)?;
                }
                None => self.warnings.push(format!("{} is not a pin and is ignored", dir.join(&f.name).display())),
            }
        }
        Ok(())
    }

    fn files(&mut self, sub: &str, suffix: &str) -> Result<Vec<(PathBuf, Found)>, StoreError> {
        let top = self.root.join(sub);
        let mut out = Vec::new();
        for d in self.disk.list(&top).at("list", &top)? {
            let dir = top.join(&d.name);
            if !d.is_dir {
                self.warnings.push(format!("{} is not part of the store and is ignored", dir.display()));
                continue;
            }
            for f in self.disk.list(&dir).at("list", &dir)? {
                if f.is_dir || !f.name.ends_with(suffix) {
                    self.warnings.push(format!("{} is not part of the store and is ignored", dir.join(&f.name).display()));
                } else {
                    out.push((dir.join(&f.name), f));
                }
            }
        }
        Ok(out)
    }

    fn quarantine(&mut self, path: &Path, name: &str, why: &str) -> Result<(), StoreError> {
        let to = self.root.join("quarantine").join(name);
        self.disk.rename(path, &to).at("quarantine", path)?;
        self.warnings.push(format!("{} could not be read ({why}); moved to {}", path.display(), to.display()));
        Ok(())
    }
}

fn name_of<T: std::str::FromStr>(name: &str, suffix: &str) -> Option<T> {
    name.strip_suffix(suffix)?.parse().ok()
}
