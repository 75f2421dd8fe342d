//! Other holders as the store's source of what is damaged or missing here (NO-ROT, V11).

use super::call::wrong;
use super::endpoint::{Bulk, Holder};
use super::receive::{self, Watch};
use crate::error::CallError;
use ks_blobs::{FetchedObject, KeyRing, PackPlace, PeerSource};
use ks_proto::ids::{CheckpointId, ChunkId, PackId};
use ks_proto::pack::PackEntry;
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

/// A paging guest waits no longer for an object; then it is an error that names it.
const OBJECT_MAX: Duration = Duration::from_secs(20);
/// A whole pack or manifest takes no longer.
const WHOLE_MAX: Duration = Duration::from_secs(120);
type Work<T> = Pin<Box<dyn Future<Output = Option<T>> + Send>>;

/// Asks the other holders, one after another, those that never sent wrong bytes first. Give it to [`ks_blobs::Store::set_peers`].
/// Its methods block, so they are for the store's threads only; they never panic inside a runtime.
#[derive(Clone)]
pub struct BulkPeers {
    bulk: Bulk,
    holders: Arc<dyn Fn() -> Vec<Holder> + Send + Sync>,
    keys: Arc<dyn Fn() -> KeyRing + Send + Sync>,
    runtime: Handle,
}

impl std::fmt::Debug for BulkPeers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BulkPeers").finish_non_exhaustive()
    }
}

impl BulkPeers {
    /// `holders` names the nodes to ask at that moment (this node is left out by itself).
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn new(
        bulk: Bulk,
        holders: Arc<dyn Fn() -> Vec<Holder> + Send + Sync>,
        keys: Arc<dyn Fn() -> KeyRing + Send + Sync>,
    ) -> Self {
        Self { bulk, holders, keys, runtime: Handle::current() }
    }

    /// Runs `work` on the runtime and waits for it, at most `patience`.
    fn wait<T: Send + 'static>(&self, patience: Duration, work: Work<T>) -> Option<T> {
        let (tx, rx) = sync_channel(1);
        self.runtime.spawn(async move {
            let done = tokio::time::timeout(patience, work).await;
            let _ = tx.send(done.ok().flatten());
        });
        // The runtime may be gone; then nothing is ever sent, and the sender is dropped.
        rx.recv_timeout(patience + Duration::from_secs(5)).ok().flatten()
    }

    fn each<T, F, Fut>(&self, patience: Duration, what: String, ask: F) -> Option<T>
    where
        T: Send + 'static,
        F: Fn(Bulk, Holder) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<T, CallError>> + Send,
    {
        let bulk = self.bulk.clone();
        let holders = bulk.inner.in_order(&(self.holders)());
        self.wait(
            patience,
            Box::pin(async move {
                for h in holders {
                    match ask(bulk.clone(), h).await {
                        Ok(got) => return Some(got),
                        Err(CallError::Absent { .. }) => {}
                        Err(CallError::Wrong { peer, wrong }) => bulk.inner.mark(peer, &wrong),
                        Err(e) => tracing::info!("{what}: {e}"),
                    }
                }
                None
            }),
        )
    }
}

/// What one holder has of `ids`, verified, a pack of its at a time; what came before an error is kept in `got`.
async fn from_holder(
    bulk: &Bulk,
    holder: &Holder,
    ids: &BTreeSet<ChunkId>,
    keys: &KeyRing,
    got: &mut Vec<(ChunkId, FetchedObject)>,
) -> Result<(), CallError> {
    let inner = &bulk.inner;
    let asked: Vec<ChunkId> = ids.iter().copied().collect();
    let places = inner.locate(holder, &asked).await?;
    let mut packs: BTreeMap<PackId, (u64, u32, Vec<PackEntry>)> = BTreeMap::new();
    for p in places.into_iter().filter_map(|all| all.into_iter().next()) {
        packs.entry(p.pack).or_insert_with(|| (p.pack_bytes, p.domain, Vec::new())).2.push(p.entry);
    }
    for (pack, (bytes, domain, mut rows)) in packs {
        rows.sort_by_key(|e| e.offset);
        let watch = Watch { stop: &CancellationToken::new(), progress: &|_| () };
        for (id, object) in receive::fetch_objects(inner, holder, (&pack, bytes, domain), &rows, &watch).await? {
            // The pack's hash says that these are the holder's bytes; only opening says that they are this object.
            if let Some(key) = keys.get(object.domain)
                && let Err(e) = key.open(object.kind, object.codec, &id, object.plain_len as usize, &object.stored)
            {
                return Err(wrong(holder.peer, format!("object {}", id.short()), e));
            }
            got.push((id, object));
        }
    }
    Ok(())
}

impl PeerSource for BulkPeers {
    fn fetch_object(&self, id: &ChunkId) -> Option<FetchedObject> {
        let (id, keys) = (*id, (self.keys)());
        self.each(OBJECT_MAX, format!("object {}", id.short()), move |bulk, holder| {
            let keys = keys.clone();
            async move {
                let inner = &bulk.inner;
                let places = inner.locate(&holder, &[id]).await?;
                let absent = || CallError::Absent { peer: holder.peer, what: format!("object {}", id.short()) };
                let p: PackPlace = places.into_iter().flatten().next().ok_or_else(absent)?;
                let watch = Watch { stop: &CancellationToken::new(), progress: &|_| () };
                let got = receive::fetch_objects(inner, &holder, (&p.pack, p.pack_bytes, p.domain), &[p.entry], &watch).await?;
                let (_, object) = got.into_iter().next().ok_or_else(absent)?;
                // The pack's hash says that these are the holder's bytes; only opening says that they are this object.
                if let Some(key) = keys.get(object.domain)
                    && let Err(e) = key.open(object.kind, object.codec, &id, object.plain_len as usize, &object.stored)
                {
                    return Err(wrong(holder.peer, format!("object {}", id.short()), e));
                }
                Ok(object)
            }
        })
    }

    fn fetch_objects(&self, ids: &[ChunkId]) -> Vec<(ChunkId, FetchedObject)> {
        let (bulk, keys, holders) = (self.bulk.clone(), (self.keys)(), self.bulk.inner.in_order(&(self.holders)()));
        let ids = ids.to_vec();
        let got = self.wait(
            WHOLE_MAX,
            Box::pin(async move {
                let (mut left, mut got): (BTreeSet<ChunkId>, Vec<_>) = (ids.into_iter().collect(), Vec::new());
                for h in holders {
                    if left.is_empty() {
                        break;
                    }
                    match from_holder(&bulk, &h, &left, &keys, &mut got).await {
                        Ok(()) | Err(CallError::Absent { .. }) => {}
                        Err(CallError::Wrong { peer, wrong }) => bulk.inner.mark(peer, &wrong),
                        Err(e) => tracing::info!("{} objects: {e}", left.len()),
                    }
                    for (id, _) in &got {
                        left.remove(id);
                    }
                }
                Some(got)
            }),
        );
        got.unwrap_or_default()
    }

    fn fetch_manifest(&self, id: &CheckpointId) -> Option<Vec<u8>> {
        let id = *id;
        self.each(WHOLE_MAX, format!("manifest {}", id.short()), move |bulk, holder| async move {
            bulk.inner.fetch_manifest(&holder, &id).await
        })
    }

    fn fetch_pack(&self, id: &PackId) -> Option<Vec<u8>> {
        let id = *id;
        self.each(WHOLE_MAX, format!("pack {}", id.short()), move |bulk, holder| async move {
            receive::fetch_whole(&bulk.inner, &holder, &id).await
        })
    }
}
