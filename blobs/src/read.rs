//! Reading one object: every copy here is tried and verified, then the peers; a damaged copy is taken out of service.

use crate::error::{At, StoreError};
use crate::index::{Index, Place};
use crate::keys::KeyRing;
use crate::load::read_all;
use crate::peers::FetchedObject;
use crate::store::{Store, THIS_NODE};
use crate::upload::Upload;
use ks_proto::chunk::{OBJECT_BYTES_MAX, ObjectKind, SEAL_OVERHEAD};
use ks_proto::ids::{ChunkId, PackId};
use ks_proto::pack::{PACK_BYTES_MAX, PackEntry};
use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// A verified copy of an object and where it lies.
#[derive(Debug)]
pub struct Located {
    /// Its row in the pack.
    pub entry: PackEntry,
    /// The pack.
    pub pack: PackId,
    /// Key domain of the pack.
    pub domain: u32,
    /// The pack's file, read-only.
    pub file: File,
    /// The object's plain bytes, verified.
    pub plain: Vec<u8>,
}

/// What this node has of an object.
pub(crate) enum Here {
    Found(Located),
    /// No good copy; the last damaged one and what is wrong with it, if one was read just now.
    Gone(Option<(PathBuf, String)>),
}

/// Why one copy did not serve.
enum Copy {
    Bad { pack: PathBuf, why: String },
    Error(StoreError),
}

/// A place with what is needed to read it without the lock.
#[derive(Clone, Copy)]
pub(crate) struct Spot {
    pub place: Place,
    pub entry: PackEntry,
    pub pack: PackId,
    pub domain: u32,
}

pub(crate) fn spot(index: &Index, place: Place) -> Option<Spot> {
    let p = index.pack(place.pack)?;
    Some(Spot { place, entry: *p.rows.get(place.row as usize)?, pack: p.id, domain: p.domain })
}

impl Store {
    /// A verified copy of `id` and its place, for a VMM whose plan could not give it. `except` is the pack that it found
    /// wanting: tried last here, and taken out of service for this object if it is damaged indeed.
    ///
    /// # Errors
    /// [`StoreError::Lost`] if neither this node nor a peer has an intact copy; [`StoreError::NoKey`].
    pub fn locate(self: &Arc<Self>, id: &ChunkId, keys: &KeyRing, except: Option<PackId>) -> Result<Located, StoreError> {
        self.obtain(id, None, keys, except)
    }

    /// The plain bytes of an object, verified.
    ///
    /// # Errors
    /// As [`Self::locate`].
    pub fn read_object(self: &Arc<Self>, id: &ChunkId, keys: &KeyRing) -> Result<Vec<u8>, StoreError> {
        Ok(self.obtain(id, None, keys, None)?.plain)
    }

    /// The first good copy of `id`, of `kind` if one is given: from here, else from a peer.
    pub(crate) fn obtain(
        self: &Arc<Self>,
        id: &ChunkId,
        kind: Option<ObjectKind>,
        keys: &KeyRing,
        except: Option<PackId>,
    ) -> Result<Located, StoreError> {
        let last = match self.obtain_here(id, kind, keys, except)? {
            Here::Found(found) => return Ok(found),
            Here::Gone(last) => last,
        };
        self.mend_around(id, keys)?;
        if let Here::Found(found) = self.obtain_here(id, kind, keys, None)? {
            return Ok(found);
        }
        if let Some(found) = self.peers().fetch_object(id) {
            return self.repair(id, kind, keys, found);
        }
        let (pack, why) = last
            .or_else(|| self.known_bad(id))
            .map_or_else(|| (None, format!("no pack in {} holds it", self.root.join("packs").display())), |(p, w)| (Some(p), w));
        Err(StoreError::Lost { chunk: *id, pack, holder: THIS_NODE.into(), why })
    }

    /// As [`Self::obtain`], without asking peers.
    pub(crate) fn obtain_here(
        &self,
        id: &ChunkId,
        kind: Option<ObjectKind>,
        keys: &KeyRing,
        except: Option<PackId>,
    ) -> Result<Here, StoreError> {
        let mut spots: Vec<Spot> = {
            let s = self.state();
            s.index.places(id).filter_map(|p| spot(&s.index, p)).filter(|c| kind.is_none_or(|k| c.entry.kind == k)).collect()
        };
        spots.sort_by_key(|c| Some(c.pack) == except);
        let mut last = None;
        let mut no_key = None;
        for c in spots {
            match self.try_spot(&c, keys) {
                Ok(found) => return Ok(Here::Found(found)),
                Err(Copy::Bad { pack, why }) => {
                    self.take_out(c.place);
                    last = Some((pack, why));
                }
                Err(Copy::Error(e @ StoreError::NoKey { .. })) => no_key = Some(e),
                Err(Copy::Error(e)) => return Err(e),
            }
        }
        no_key.map_or(Ok(Here::Gone(last)), Err)
    }

    fn known_bad(&self, id: &ChunkId) -> Option<(PathBuf, String)> {
        let s = self.state();
        let bad = s.index.bad_place(id)?;
        Some((self.pack_path(&s.index.pack(bad.pack)?.id), "its only copy here was found damaged before".into()))
    }

    fn try_spot(&self, c: &Spot, keys: &KeyRing) -> Result<Located, Copy> {
        let path = self.pack_path(&c.pack);
        let file = self.disk.open(&path).map_err(|e| sort_read_error("open", &path, e))?;
        let Some(key) = keys.get(c.domain) else {
            // The domain stands in the header, which only the pack's own hash covers.
            let whole = read_all(&*self.disk, &file, &path, PACK_BYTES_MAX as u64).map_err(Copy::Error)?;
            if blake3::hash(&whole).as_bytes() != &c.pack.0 {
                return Err(Copy::Bad { pack: path, why: "the pack's bytes do not match its name".into() });
            }
            return Err(Copy::Error(StoreError::NoKey { domain: c.domain, what: format!("chunk {}", c.entry.id) }));
        };
        let stored = self.read_stored(&file, &c.entry).map_err(|e| sort_read_error("read", &path, e))?;
        match c.entry.open(key, &stored) {
            Ok(plain) => Ok(Located { entry: c.entry, pack: c.pack, domain: c.domain, file, plain }),
            Err(e) => Err(Copy::Bad { pack: path, why: e.to_string() }),
        }
    }

    /// What is wrong with one copy: its pack's file and why; None if it is good.
    pub(crate) fn damage(&self, c: &Spot, keys: &KeyRing) -> Result<Option<(PathBuf, String)>, StoreError> {
        match self.try_spot(c, keys) {
            Ok(_) => Ok(None),
            Err(Copy::Bad { pack, why }) => Ok(Some((pack, why))),
            Err(Copy::Error(e)) => Err(e),
        }
    }

    /// The sealed bytes of a row.
    pub(crate) fn read_stored(&self, file: &File, e: &PackEntry) -> io::Result<Vec<u8>> {
        if e.stored_len as usize > OBJECT_BYTES_MAX + SEAL_OVERHEAD {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "a row longer than any object"));
        }
        let mut stored = vec![0u8; e.stored_len as usize];
        self.disk.read_at(file, &mut stored, u64::from(e.offset))?;
        Ok(stored)
    }

    /// Takes a damaged copy out of service: it is not offered, nor called known, again.
    pub(crate) fn take_out(&self, place: Place) {
        self.state_mut().index.mark_bad(place);
    }

    /// Verifies what a peer sent and stores it here.
    fn repair(
        self: &Arc<Self>,
        id: &ChunkId,
        kind: Option<ObjectKind>,
        keys: &KeyRing,
        got: FetchedObject,
    ) -> Result<Located, StoreError> {
        let lost = |why: String| StoreError::Lost { chunk: *id, pack: None, holder: "a peer".into(), why };
        if kind.is_some_and(|k| k != got.kind) {
            return Err(lost(format!("a peer sent an object of kind {:?}", got.kind)));
        }
        let domain = got.domain;
        let (pack, plain) = self.store_objects(&[(*id, got)], keys, None)?.pop().expect("one object was stored");
        let path = self.pack_path(&pack);
        let file = self.disk.open(&path).at("open", &path)?;
        let entry = {
            let s = self.state();
            let no = s.index.number(&pack);
            no.and_then(|no| s.index.pack(no)).and_then(|p| p.rows.first().copied())
        };
        let entry = entry.ok_or_else(|| lost("the repaired pack was collected meanwhile".into()))?;
        Ok(Located { entry, pack, domain, file, plain })
    }

    /// Verifies objects that peers sent and stores them in packs of our own, durably, on behalf of an upload if one is given.
    /// Returns, for each, the last pack that was written when it was done, and its plain bytes.
    pub(crate) fn store_objects(
        self: &Arc<Self>,
        objects: &[(ChunkId, FetchedObject)],
        keys: &KeyRing,
        on_behalf: Option<&Upload>,
    ) -> Result<Vec<(PackId, Vec<u8>)>, StoreError> {
        let domains: std::collections::BTreeSet<u32> = objects.iter().map(|(_, o)| o.domain).collect();
        let mut out = Vec::with_capacity(objects.len());
        for domain in domains {
            let key = keys.get(domain).ok_or_else(|| StoreError::NoKey { domain, what: "what a peer sent".into() })?;
            let upload = Upload::internal(self, domain);
            let mut w = upload.writer();
            let mut plains = Vec::new();
            for (id, got) in objects.iter().filter(|(_, o)| o.domain == domain) {
                let lost = |why: String| StoreError::Lost { chunk: *id, pack: None, holder: "a peer".into(), why };
                let plain = key
                    .open(got.kind, got.codec, id, got.plain_len as usize, &got.stored)
                    .map_err(|e| lost(format!("what a peer sent does not verify: {e}")))?;
                w.put(got.kind, got.codec, *id, got.plain_len, &got.stored)?;
                plains.push(plain);
            }
            let pack = w.finish()?.expect("at least one object was put");
            match on_behalf {
                Some(of) => {
                    let mut s = self.state_mut();
                    s.pin(of.no(), objects.iter().filter(|(_, o)| o.domain == domain).map(|(id, _)| *id));
                    s.index.hand_over(upload.no(), of.no());
                }
                None => upload.keep(),
            }
            out.extend(plains.into_iter().map(|plain| (pack, plain)));
        }
        Ok(out)
    }
}

/// Damage (gone, cut short, unreadable sectors) is about this copy; anything else is about this machine.
fn sort_read_error(op: &'static str, path: &std::path::Path, e: io::Error) -> Copy {
    let damaged = matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::UnexpectedEof)
        || e.raw_os_error() == Some(rustix::io::Errno::IO.raw_os_error());
    if damaged {
        Copy::Bad { pack: path.to_owned(), why: format!("{op}: {e}") }
    } else {
        Copy::Error(StoreError::io(op, path, e))
    }
}
