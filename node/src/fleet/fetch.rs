//! Making a checkpoint whole on this node: the files of its image, then its closure from whoever holds it.

use super::{call, copying};
use crate::api::internal::IMAGE_FILES;
use crate::host::image::image_dir;
use crate::node::Node;
use crate::progress::Steps;
use ks_proto::api::ApiError;
use ks_proto::{CheckpointId, ImageId, RunToken, SessionId};
use ks_raft::{Command, FleetState, ImageRecord};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::io::AsyncWriteExt;

/// The largest file of an image that is taken from a peer.
const IMAGE_FILE_MAX: u64 = 1 << 30;

/// What a member is asked to hold.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct FetchOrder {
    /// Session.
    pub session: SessionId,
    /// The run that took it: a holder's acknowledgement is for this one.
    pub token: RunToken,
    /// Checkpoint.
    pub checkpoint: CheckpointId,
    /// Members to fetch from, best first; empty: whoever is recorded as a holder.
    #[serde(default)]
    pub from: Vec<u64>,
}

/// What it took.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct FetchDone {
    /// Bytes that came over the network.
    pub bytes: u64,
}

/// Fetches. When it is done, the checkpoint and the files of its image are whole, durable and pinned on this node; whoever
/// ordered it records that.
///
/// # Errors
/// Who could not give what, or what this disk refused; nothing half is listed.
pub async fn run(node: &Arc<Node>, order: FetchOrder, steps: &Steps) -> Result<FetchDone, ApiError> {
    let bytes = ensure(node, &order, steps).await?;
    Ok(FetchDone { bytes })
}

/// Makes the checkpoint restorable here. Returns the bytes that came over the network.
///
/// # Errors
/// See [`run`].
pub async fn ensure(node: &Arc<Node>, order: &FetchOrder, steps: &Steps) -> Result<u64, ApiError> {
    let state = node.state.read();
    let record = state
        .sessions
        .get(&order.session)
        .ok_or_else(|| ApiError::new("not-found", "the session is gone", "it was removed meanwhile", "nothing to do"))?;
    ensure_image(node, &state, record.params.image_id).await?;
    let me = node.fleet.number();
    let from = if order.from.is_empty() { holders(&state, me, &order.checkpoint) } else { order.from.clone() };
    copying::fetch_closure(node, order.checkpoint, &from, (order.session, order.token), steps).await
}

/// As [`ensure`] for a start: a node that has it all does not ask anybody.
///
/// # Errors
/// See [`run`].
pub async fn ensure_start(
    node: &Arc<Node>,
    session: SessionId,
    token: RunToken,
    checkpoint: CheckpointId,
) -> Result<(), ApiError> {
    if node.fleet.alone() {
        return Ok(());
    }
    let (store, keys) = (node.supply.store.clone(), node.supply.keys.clone());
    let whole = tokio::task::spawn_blocking(move || store.closure_plan(&checkpoint, &keys).map(drop)).await;
    let state = node.state.read();
    let image = state.sessions.get(&session).map(|r| r.params.image_id);
    if matches!(whole, Ok(Ok(()))) {
        return match image {
            Some(id) => ensure_image(node, &state, id).await,
            None => Ok(()),
        };
    }
    let (steps, mut told) = Steps::channel();
    tokio::spawn(async move { while told.recv().await.is_some() {} });
    ensure(node, &FetchOrder { session, token, checkpoint, from: vec![] }, &steps).await.map(drop)
}

/// Makes an image bootable here: its kernel and initramfs, and its disk. A node that has them asks nobody.
///
/// # Errors
/// See [`run`].
pub async fn ensure_boot(node: &Arc<Node>, image: &ImageRecord, steps: &Steps) -> Result<(), ApiError> {
    if node.fleet.alone() {
        return Ok(());
    }
    let state = node.state.read();
    ensure_image(node, &state, image.id).await?;
    let (store, keys, disk) = (node.supply.store.clone(), node.supply.keys.clone(), image.disk);
    let whole = tokio::task::spawn_blocking(move || store.closure_plan(&disk, &keys).map(drop)).await;
    if matches!(whole, Ok(Ok(()))) {
        return Ok(());
    }
    let me = node.fleet.number();
    let held = image.holders.iter().copied().filter(|n| *n != me);
    let others = state.members.keys().copied().filter(|n| *n != me && !image.holders.contains(n));
    let from: Vec<u64> = held.chain(others).collect();
    let nobody = (SessionId([0; 16]), RunToken::default());
    copying::fetch_closure(node, image.disk, &from, nobody, steps).await?;
    node.state.propose(Command::AddRootHolder { manifest: image.disk, node: me }).await.map(drop)
}

/// Members other than `me` that hold `checkpoint`, whatever it belongs to; every active member when none is recorded.
fn holders(state: &FleetState, me: u64, checkpoint: &CheckpointId) -> Vec<u64> {
    let mut found: Vec<u64> = state
        .sessions
        .values()
        .filter_map(|s| s.by_id(checkpoint))
        .flat_map(|c| c.holders.iter().copied())
        .chain(state.golden.iter().filter(|g| g.checkpoint == *checkpoint).flat_map(|g| g.holders.iter().copied()))
        .filter(|n| *n != me)
        .collect();
    found.sort_unstable();
    found.dedup();
    if found.is_empty() {
        found = state.members.keys().copied().filter(|n| *n != me).collect();
    }
    found
}

/// Locks by image, so that one file is fetched once.
static FETCHING: Mutex<BTreeMap<ImageId, Arc<tokio::sync::Mutex<()>>>> = Mutex::new(BTreeMap::new());

/// Gets the kernel and the initramfs of an image from a member that has them.
///
/// # Errors
/// `unreachable` or `not-found` when nobody gives them.
pub async fn ensure_image(node: &Arc<Node>, state: &FleetState, id: ImageId) -> Result<(), ApiError> {
    let dir = image_dir(node, &id);
    if dir.join("kernel").is_file() || node.fleet.alone() {
        return Ok(());
    }
    let lock = FETCHING.lock().unwrap_or_else(PoisonError::into_inner).entry(id).or_default().clone();
    let _one = lock.lock().await;
    if dir.join("kernel").is_file() {
        return Ok(());
    }
    let mut last = ApiError::new("not-found", format!("image {}", id.short()), "no other member is known", "ks node ls");
    for peer in state.members.keys().copied().filter(|n| *n != node.fleet.number()) {
        match fetch_image(node, peer, &id, &dir).await {
            Ok(()) => {
                node.state.event("", "image", &format!("files of image {} came from node {peer}", id.short()));
                return Ok(());
            }
            Err(e) => last = e,
        }
    }
    Err(last)
}

async fn fetch_image(node: &Arc<Node>, peer: u64, id: &ImageId, dir: &Path) -> Result<(), ApiError> {
    let io = |e: std::io::Error| {
        let code = if e.kind() == std::io::ErrorKind::StorageFull { "disk-full" } else { "internal" };
        ApiError::new(code, "the image's files cannot be kept", e.to_string(), "check the data folder's disk")
    };
    let tmp = node.layout.tmp().join(format!("image-{}-{peer}", id.to_hex()));
    tokio::fs::create_dir_all(&tmp).await.map_err(io)?;
    for file in IMAGE_FILES {
        let path = format!("/v1/internal/images/{}/{file}", id.to_hex());
        let body = match call::get_stream(&node.fleet, peer, &path).await {
            Ok(b) => b,
            // Some images boot without an initramfs.
            Err(e) if e.code == "not-found" && file == "initrd" => continue,
            Err(e) => return Err(e),
        };
        let mut out = tokio::fs::File::create(tmp.join(file)).await.map_err(io)?;
        let mut reader = std::pin::pin!(body);
        let copied =
            tokio::io::copy(&mut tokio::io::AsyncReadExt::take(&mut reader, IMAGE_FILE_MAX), &mut out).await.map_err(io)?;
        if copied == IMAGE_FILE_MAX {
            return Err(ApiError::new(
                "corrupt",
                "the image's file",
                format!("{file} has more than {IMAGE_FILE_MAX} bytes"),
                "ask another node",
            ));
        }
        out.flush().await.map_err(io)?;
        out.sync_all().await.map_err(io)?;
    }
    let (tmp, dir) = (tmp.clone(), dir.to_owned());
    let moved = tokio::task::spawn_blocking(move || {
        std::fs::File::open(&tmp)?.sync_all()?;
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::rename(&tmp, &dir)?;
        dir.parent().map_or(Ok(()), |p| std::fs::File::open(p)?.sync_all())
    });
    moved.await.map_err(|e| ApiError::new("internal", "keeping the image's files", e.to_string(), "try again"))?.map_err(io)
}
