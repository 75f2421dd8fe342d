//! The map of sessions: ordered like a `BTreeMap`, but a clone costs nothing and a change copies one record.
//!
//! Every batch of log entries publishes the state to readers. With 10,000 sessions a plain map would be copied whole
//! each time, so records sit behind `Arc`s in 256 buckets by the first byte of the id (ids are random): a change after a
//! clone copies 256 pointers, one bucket of pointers, and one record. Beside the records each bucket holds two indexes,
//! so that a name and the forks of a session are found without looking at all sessions.

use crate::record::SessionRecord;
use ks_proto::{SessionId, SessionName};
use serde::de::{MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Index;
use std::sync::Arc;

const BUCKETS: usize = 256;

#[derive(Clone, Default)]
struct Bucket {
    records: BTreeMap<SessionId, Arc<SessionRecord>>,
    /// By the hash of the name. May point at a removed session, so a hit is checked.
    names: BTreeMap<SessionName, SessionId>,
    /// By the parent's id: the sessions that were forked from it.
    children: BTreeMap<SessionId, BTreeSet<SessionId>>,
}

/// Sessions by id. Cloning is O(1); names and lineage of a record do not change after it was inserted.
#[derive(Clone)]
pub struct SessionMap {
    buckets: Arc<Vec<Arc<Bucket>>>,
    len: usize,
}

fn at(id: &SessionId) -> usize {
    usize::from(id.0[0])
}

/// FNV-1a, folded to a bucket: only spreads names, so its quality hardly matters.
fn name_at(name: &str) -> usize {
    let hash = name.bytes().fold(0x811c_9dc5_u32, |h, b| (h ^ u32::from(b)).wrapping_mul(0x0100_0193));
    hash.to_le_bytes().iter().fold(0usize, |a, b| a ^ usize::from(*b))
}

impl Default for SessionMap {
    fn default() -> Self {
        Self { buckets: Arc::new(vec![Arc::default(); BUCKETS]), len: 0 }
    }
}

impl SessionMap {
    /// Sessions and tombstones.
    pub fn len(&self) -> usize {
        self.len
    }
    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
    /// The record of `id`.
    pub fn get(&self, id: &SessionId) -> Option<&SessionRecord> {
        self.buckets[at(id)].records.get(id).map(|r| &**r)
    }
    /// The record of `id`, shared.
    pub fn shared(&self, id: &SessionId) -> Option<Arc<SessionRecord>> {
        self.buckets[at(id)].records.get(id).cloned()
    }
    /// True if `id` is there.
    pub fn contains_key(&self, id: &SessionId) -> bool {
        self.buckets[at(id)].records.contains_key(id)
    }
    /// The record of `id`, to be changed. Its id, name and parent must stay what they are.
    pub fn get_mut(&mut self, id: &SessionId) -> Option<&mut SessionRecord> {
        if !self.contains_key(id) {
            return None;
        }
        self.bucket(at(id)).records.get_mut(id).map(Arc::make_mut)
    }
    /// Puts a record in, under its own id.
    pub fn insert(&mut self, record: SessionRecord) {
        self.remove(&record.id);
        self.len += 1;
        let id = record.id;
        if !record.tombstone {
            self.bucket(name_at(record.name.as_str())).names.insert(record.name.clone(), id);
        }
        if let Some(f) = &record.forked_from {
            self.bucket(at(&f.session)).children.entry(f.session).or_default().insert(id);
        }
        self.bucket(at(&id)).records.insert(id, Arc::new(record));
    }
    /// Takes a record out.
    pub fn remove(&mut self, id: &SessionId) -> Option<Arc<SessionRecord>> {
        let record = self.shared(id)?;
        self.len -= 1;
        self.bucket(at(id)).records.remove(id);
        let names = &mut self.bucket(name_at(record.name.as_str())).names;
        if names.get(&record.name) == Some(id) {
            names.remove(&record.name);
        }
        if let Some(f) = &record.forked_from {
            let children = &mut self.bucket(at(&f.session)).children;
            if let Some(set) = children.get_mut(&f.session) {
                set.remove(id);
                if set.is_empty() {
                    children.remove(&f.session);
                }
            }
        }
        Some(record)
    }
    /// The live session of that name.
    pub fn by_name(&self, name: &SessionName) -> Option<&SessionRecord> {
        let id = self.buckets[name_at(name.as_str())].names.get(name)?;
        self.get(id).filter(|s| !s.tombstone)
    }
    /// The sessions that were forked from a checkpoint of `parent`.
    pub fn children(&self, parent: &SessionId) -> impl Iterator<Item = &SessionRecord> {
        self.buckets[at(parent)].children.get(parent).into_iter().flatten().filter_map(|id| self.get(id))
    }
    /// All records in the order of their ids.
    pub fn values(&self) -> impl Iterator<Item = &SessionRecord> {
        self.buckets.iter().flat_map(|b| b.records.values()).map(|r| &**r)
    }
    /// All ids in order.
    pub fn keys(&self) -> impl Iterator<Item = &SessionId> {
        self.buckets.iter().flat_map(|b| b.records.keys())
    }
    /// All ids and records in order.
    pub fn iter(&self) -> impl Iterator<Item = (&SessionId, &SessionRecord)> {
        self.buckets.iter().flat_map(|b| b.records.iter()).map(|(k, r)| (k, &**r))
    }
    /// Changes every record that `wants` says yes to; the others are not copied.
    pub fn edit_all(&mut self, wants: impl Fn(&SessionRecord) -> bool, mut change: impl FnMut(&mut SessionRecord)) {
        let ids: Vec<SessionId> = self.values().filter(|s| wants(s)).map(|s| s.id).collect();
        for id in ids {
            if let Some(s) = self.get_mut(&id) {
                change(s);
            }
        }
    }

    fn bucket(&mut self, at: usize) -> &mut Bucket {
        Arc::make_mut(&mut Arc::make_mut(&mut self.buckets)[at])
    }
}

impl Index<&SessionId> for SessionMap {
    type Output = SessionRecord;
    /// Panics if it is not there, as other maps do.
    fn index(&self, id: &SessionId) -> &SessionRecord {
        self.get(id).expect("the caller knows that the session is there")
    }
}

impl fmt::Debug for SessionMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

impl FromIterator<SessionRecord> for SessionMap {
    fn from_iter<T: IntoIterator<Item = SessionRecord>>(records: T) -> Self {
        let mut map = Self::default();
        records.into_iter().for_each(|r| map.insert(r));
        map
    }
}

impl Serialize for SessionMap {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        let mut map = s.serialize_map(Some(self.len))?;
        for (id, record) in self.iter() {
            map.serialize_entry(id, record)?;
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for SessionMap {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = SessionMap;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("sessions by id")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<SessionMap, A::Error> {
                let mut map = SessionMap::default();
                while let Some((id, record)) = entries.next_entry::<SessionId, SessionRecord>()? {
                    if id != record.id {
                        return Err(serde::de::Error::custom(format!("session {} is listed under the id {id}", record.id)));
                    }
                    map.insert(record);
                }
                Ok(map)
            }
        }
        d.deserialize_map(Entries)
    }
}
