//! The map of sessions: ordered like a `BTreeMap`, but a clone costs nothing and a change copies one record.
//!
//! Every batch of log entries publishes the state to readers. With 10,000 sessions a plain map would be copied whole
//! each time, so records sit behind `Arc`s in 256 buckets by the first byte of the id (ids are random): a change after a
//! clone copies 256 pointers, one bucket of pointers, and one record. Two indexes, so that a name and the forks of a session are
//! found without looking at all sessions, are in buckets of their own: a change of a record copies none of their strings.

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

/// Maps that are copied one by one, when they are changed after a clone.
type Buckets<K, V> = Arc<Vec<Arc<BTreeMap<K, V>>>>;

/// Sessions by id. Cloning is O(1); names and lineage of a record do not change after it was inserted.
#[derive(Clone)]
pub struct SessionMap {
    records: Buckets<SessionId, Arc<SessionRecord>>,
    /// By the hash of the name. May point at a removed session, so a hit is checked.
    names: Buckets<SessionName, SessionId>,
    /// By the parent's id: the sessions that were forked from it.
    children: Buckets<SessionId, BTreeSet<SessionId>>,
    len: usize,
}

fn bucket<K: Clone, V: Clone>(buckets: &mut Buckets<K, V>, at: usize) -> &mut BTreeMap<K, V> {
    Arc::make_mut(&mut Arc::make_mut(buckets)[at])
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
        fn empty<K, V>() -> Buckets<K, V> {
            Arc::new((0..BUCKETS).map(|_| Arc::default()).collect())
        }
        Self { records: empty(), names: empty(), children: empty(), len: 0 }
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
        self.records[at(id)].get(id).map(|r| &**r)
    }
    /// The record of `id`, shared.
    pub fn shared(&self, id: &SessionId) -> Option<Arc<SessionRecord>> {
        self.records[at(id)].get(id).cloned()
    }
    /// True if `id` is there.
    pub fn contains_key(&self, id: &SessionId) -> bool {
        self.records[at(id)].contains_key(id)
    }
    /// The record of `id`, to be changed. Its id, name and parent must stay what they are.
    pub fn get_mut(&mut self, id: &SessionId) -> Option<&mut SessionRecord> {
        if !self.contains_key(id) {
            return None;
        }
        bucket(&mut self.records, at(id)).get_mut(id).map(Arc::make_mut)
    }
    /// Puts a record in, under its own id.
    pub fn insert(&mut self, record: SessionRecord) {
        self.remove(&record.id);
        self.len += 1;
        let id = record.id;
        if !record.tombstone {
            bucket(&mut self.names, name_at(record.name.as_str())).insert(record.name.clone(), id);
        }
        if let Some(f) = &record.forked_from {
            bucket(&mut self.children, at(&f.session)).entry(f.session).or_default().insert(id);
        }
        bucket(&mut self.records, at(&id)).insert(id, Arc::new(record));
    }
    /// Takes a record out.
    pub fn remove(&mut self, id: &SessionId) -> Option<Arc<SessionRecord>> {
        let record = self.shared(id)?;
        self.len -= 1;
        bucket(&mut self.records, at(id)).remove(id);
        let names = bucket(&mut self.names, name_at(record.name.as_str()));
        if names.get(&record.name) == Some(id) {
            names.remove(&record.name);
        }
        if let Some(f) = &record.forked_from {
            let children = bucket(&mut self.children, at(&f.session));
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
        let id = self.names[name_at(name.as_str())].get(name)?;
        self.get(id).filter(|s| !s.tombstone)
    }
    /// The sessions that were forked from a checkpoint of `parent`.
    pub fn children(&self, parent: &SessionId) -> impl Iterator<Item = &SessionRecord> {
        self.children[at(parent)].get(parent).into_iter().flatten().filter_map(|id| self.get(id))
    }
    /// All records in the order of their ids.
    pub fn values(&self) -> impl Iterator<Item = &SessionRecord> {
        self.records.iter().flat_map(|b| b.values()).map(|r| &**r)
    }
    /// All ids in order.
    pub fn keys(&self) -> impl Iterator<Item = &SessionId> {
        self.records.iter().flat_map(|b| b.keys())
    }
    /// All ids and records in order.
    pub fn iter(&self) -> impl Iterator<Item = (&SessionId, &SessionRecord)> {
        self.records.iter().flat_map(|b| b.iter()).map(|(k, r)| (k, &**r))
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
