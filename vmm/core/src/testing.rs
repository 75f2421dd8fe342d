//! A node in memory for tests: stores packs in memfds, answers what is known, and fails where it is told to.

use crate::host_link::{Fetched, HostLink};
use crate::source::{ChunkSource, lock};
use ks_proto::chunk::DomainKey;
use ks_proto::control::{CheckpointStats, Fault};
use ks_proto::pack::{PackBuilder, decode_index};
use ks_proto::plan::{Plan, PlanRow};
use ks_proto::{CheckpointId, ChunkId, Manifest, ObjectKind, PackId};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};

/// What a [`MemoryNode`] was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Call {
    NewPack,
    PackDone,
    Known,
    Commit,
    Fetch,
}

#[derive(Default)]
struct Store {
    packs: Vec<(File, Vec<u8>, u32)>,
    open: Option<File>,
    pending: Vec<(File, Vec<u8>, u32)>,
    manifests: BTreeMap<CheckpointId, Vec<u8>>,
    aborts: Vec<String>,
    fail: BTreeMap<Call, Fault>,
    calls: BTreeMap<Call, usize>,
    broken: BTreeSet<ChunkId>,
}

/// An in-memory node. Clones share it.
#[derive(Clone, Default)]
pub struct MemoryNode(Arc<Mutex<Store>>);

impl MemoryNode {
    /// An empty node.
    pub fn new() -> Self {
        Self::default()
    }
    /// From now on `call` fails with `fault` (None: works again).
    pub fn fail(&self, call: Call, fault: Option<Fault>) {
        let mut s = lock(&self.0);
        match fault {
            Some(f) => s.fail.insert(call, f),
            None => s.fail.remove(&call),
        };
    }
    /// How often `call` was made.
    pub fn calls(&self, call: Call) -> usize {
        lock(&self.0).calls.get(&call).copied().unwrap_or(0)
    }
    /// Reasons of all aborts.
    pub fn aborts(&self) -> Vec<String> {
        lock(&self.0).aborts.clone()
    }
    /// The bytes of a committed manifest.
    pub fn manifest(&self, id: &CheckpointId) -> Option<Manifest> {
        lock(&self.0).manifests.get(id).map(|b| Manifest::decode_verified(id, b).expect("committed manifests decode"))
    }
    /// Bytes of all committed packs.
    pub fn stored_bytes(&self) -> usize {
        lock(&self.0).packs.iter().map(|p| p.1.len()).sum()
    }
    /// Flips one byte of the stored object in the pack files handed out from now on; `everywhere` breaks fetches too.
    pub fn corrupt(&self, id: &ChunkId, everywhere: bool) {
        let mut s = lock(&self.0);
        for (file, bytes, _) in &s.packs {
            let index = decode_index(bytes).expect("stored packs decode");
            if let Some(e) = index.entries.iter().find(|e| e.id == *id) {
                let at = u64::from(e.offset) + u64::from(e.stored_len) - 1;
                let mut b = [0];
                file.read_exact_at(&mut b, at).expect("read a memfd");
                file.write_all_at(&[b[0] ^ 1], at).expect("write a memfd");
            }
        }
        if everywhere {
            s.broken.insert(*id);
        }
    }
    /// Puts `chunks` into packs of `key`'s domain; returns their references (zeros are [`ChunkId::ZERO`]).
    pub fn import(&self, key: &DomainKey, kind: ObjectKind, chunks: &[Vec<u8>]) -> Vec<ChunkId> {
        let mut refs = Vec::new();
        let mut open: Option<(PackBuilder, Vec<u8>)> = None;
        for plain in chunks {
            let id = key.name(kind, plain);
            refs.push(id);
            if id.is_zero() || self.has(&id) {
                continue;
            }
            if open.as_ref().is_some_and(|(b, _)| b.is_full_for(plain.len())) {
                self.close(key.domain(), open.take());
            }
            let (builder, bytes) = open.get_or_insert_with(|| PackBuilder::start(key.domain()));
            let mut nonce = [0; 24];
            getrandom::fill(&mut nonce).expect("the system gives random bytes");
            bytes.extend(builder.add(key, kind, id, plain, nonce));
        }
        self.close(key.domain(), open);
        refs
    }
    /// A source over everything committed, as the node would hand it to a new VMM.
    pub fn source(&self, keys: &[DomainKey]) -> Arc<ChunkSource> {
        let (plan, packs) = self.plan();
        Arc::new(ChunkSource::new(keys.to_vec(), plan, packs, Arc::new(self.clone())))
    }
    /// Plan and pack files of everything committed.
    pub fn plan(&self) -> (Plan, Vec<File>) {
        let s = lock(&self.0);
        let mut rows = Vec::new();
        let mut files = Vec::new();
        for (n, (file, bytes, domain)) in s.packs.iter().enumerate() {
            files.push(file.try_clone().expect("dup of a memfd"));
            let index = decode_index(bytes).expect("stored packs decode");
            let pack = u32::try_from(n).expect("few packs");
            rows.extend(index.entries.into_iter().map(|entry| PlanRow { entry, pack, domain: *domain }));
        }
        (Plan::new(rows), files)
    }

    fn has(&self, id: &ChunkId) -> bool {
        let s = lock(&self.0);
        s.packs.iter().any(|p| decode_index(&p.1).expect("stored packs decode").entries.iter().any(|e| e.id == *id))
    }
    fn close(&self, domain: u32, open: Option<(PackBuilder, Vec<u8>)>) {
        let Some((builder, mut bytes)) = open else { return };
        bytes.extend(builder.finish().0);
        let file = memfd();
        file.write_all_at(&bytes, 0).expect("write a memfd");
        lock(&self.0).packs.push((file, bytes, domain));
    }
    fn called(&self, call: Call) -> Result<(), Fault> {
        let mut s = lock(&self.0);
        *s.calls.entry(call).or_default() += 1;
        s.fail.get(&call).cloned().map_or(Ok(()), Err)
    }
}

fn memfd() -> File {
    let fd = rustix::fs::memfd_create("pack", rustix::fs::MemfdFlags::CLOEXEC).expect("memfd");
    File::from(fd)
}

impl HostLink for MemoryNode {
    fn new_pack(&self) -> Result<File, Fault> {
        self.called(Call::NewPack)?;
        let file = memfd();
        lock(&self.0).open = Some(file.try_clone().expect("dup of a memfd"));
        Ok(file)
    }
    fn pack_done(&self, id: PackId, bytes: u64) -> Result<(), Fault> {
        self.called(Call::PackDone)?;
        let mut s = lock(&self.0);
        let file = s.open.take().expect("a pack was handed out");
        let mut all = vec![0; usize::try_from(bytes).expect("small")];
        file.read_exact_at(&mut all, 0).expect("the pack has that many bytes");
        assert_eq!(*blake3::hash(&all).as_bytes(), id.0, "a pack is named by its bytes");
        let domain = decode_index(&all).expect("a finished pack decodes").domain;
        s.pending.push((file, all, domain));
        Ok(())
    }
    fn known(&self, ids: &[ChunkId]) -> Result<Vec<bool>, Fault> {
        self.called(Call::Known)?;
        assert!(ids.len() <= ks_proto::control::KNOWN_BATCH_MAX);
        let s = lock(&self.0);
        let have: BTreeSet<ChunkId> =
            s.packs.iter().flat_map(|p| decode_index(&p.1).expect("stored packs decode").entries).map(|e| e.id).collect();
        Ok(ids.iter().map(|i| have.contains(i)).collect())
    }
    fn commit(&self, manifest: &[u8], _stats: &CheckpointStats) -> Result<CheckpointId, Fault> {
        self.called(Call::Commit)?;
        let mut s = lock(&self.0);
        let pending = std::mem::take(&mut s.pending);
        s.packs.extend(pending);
        let id = Manifest::id_of(manifest);
        Manifest::decode(manifest).expect("a committed manifest decodes");
        s.manifests.insert(id, manifest.to_vec());
        Ok(id)
    }
    fn abort(&self, why: &str) {
        let mut s = lock(&self.0);
        s.pending.clear();
        s.open = None;
        s.aborts.push(why.to_owned());
    }
    fn fetch(&self, id: &ChunkId, _broken: Option<&str>) -> Result<Fetched, Fault> {
        self.called(Call::Fetch)?;
        let s = lock(&self.0);
        for (_, bytes, domain) in &s.packs {
            let index = decode_index(bytes).expect("stored packs decode");
            if let Some(entry) = index.entries.iter().find(|e| e.id == *id) {
                let pack = memfd();
                let mut bytes = bytes.clone();
                if s.broken.contains(id) {
                    bytes[(entry.offset + entry.stored_len) as usize - 1] ^= 1;
                }
                pack.write_all_at(&bytes, 0).expect("write a memfd");
                return Ok(Fetched { pack, entry: *entry, domain: *domain });
            }
        }
        Err(Fault::new("not-found", format!("object {id}"), "no holder has it", "restore another checkpoint"))
    }
}
