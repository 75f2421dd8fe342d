//! The slow scrub: one pack after the other is read and checked, so that rot is found before a restore needs the bytes. Or all of
//! them at once, when a person asks.
//!
//! A pack in which something is damaged is no base for new checkpoints from then on, and what is damaged is stored again by
//! the next checkpoint whose VM still has it changed.

use crate::fleet::call;
use crate::node::Node;
use crate::progress::Steps;
use ks_blobs::ScrubStep;
use ks_proto::PackId;
use ks_proto::api::ApiError;
use ks_proto::blobs::{BlobReport, DAMAGED_MAX, DamagedObject, VerifyBlobs};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Time between two packs: at most 32 MiB are read in each.
const EVERY: Duration = Duration::from_secs(5);

/// Goes round and round for as long as the node lives.
pub async fn run(node: Weak<Node>) {
    let mut after: Option<PackId> = None;
    let mut tick = tokio::time::interval_at(tokio::time::Instant::now() + EVERY, EVERY);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        let Some(node) = node.upgrade() else { return };
        let done = tokio::task::spawn_blocking(move || step(&node, after)).await;
        match done {
            Ok(Ok(s)) => after = s.pack,
            Ok(Err(e)) => tracing::warn!("scrub: {e}"),
            Err(_) => return,
        }
    }
}

/// Reads every pack of a node now: this one, or the one that is named. One run at a time on each.
///
/// # Errors
/// `not-found` or `unreachable` for the other node; `busy` when it is being done already; `internal` if the store cannot be read.
pub async fn verify(node: &Arc<Node>, v: VerifyBlobs, steps: &Steps) -> Result<BlobReport, ApiError> {
    static ONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());
    let to = match &v.node {
        Some(text) => super::fleet::find(&node.state.read(), text)?.number,
        None => node.fleet.number(),
    };
    if to != node.fleet.number() {
        return call::post_long(&node.fleet, to, "/v1/blobs/verify", &VerifyBlobs::default(), steps).await;
    }
    let Ok(_one) = ONE.try_lock() else {
        let why = "somebody else has asked for it, and it is under way";
        return Err(ApiError::new("busy", "the store is being verified already", why, "wait for it: ks events"));
    };
    let (begun, total) = (std::time::Instant::now(), node.supply.store.stats().packs);
    let name = node.fleet.name_of(node.fleet.number());
    let mut r = BlobReport { schema: "ks.blobs.v1".into(), node: name, ..BlobReport::default() };
    let mut after = None;
    loop {
        let this = node.clone();
        let done = tokio::task::spawn_blocking(move || step(&this, after)).await.map_err(|e| e.to_string()).and_then(|s| s);
        let done =
            done.map_err(|why| ApiError::new("internal", "the store cannot be verified", why, "check the data folder's disk"))?;
        after = done.pack;
        if after.is_none() || steps.is_abandoned() {
            break;
        }
        add(&mut r, &done);
        steps.step(format!("{} of {total} packs", r.packs), r.packs, total.max(r.packs));
    }
    r.took_ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
    Ok(r)
}

fn add(r: &mut BlobReport, s: &ScrubStep) {
    r.packs += 1;
    r.bytes += s.bytes;
    r.damaged_objects += s.faults.len() as u64;
    r.mended_objects += s.repaired.len() as u64;
    let room = DAMAGED_MAX.saturating_sub(r.damaged.len());
    let row = |f: &ks_blobs::ObjectFault| DamagedObject {
        object: f.chunk.to_hex(),
        pack: f.pack.map(|p| p.to_hex()),
        file: f.file.as_ref().map(|p| p.display().to_string()),
        why: f.why.clone(),
        mended: s.repaired.contains(&f.chunk),
    };
    r.damaged.extend(s.faults.iter().take(room).map(row));
}

/// Checks the pack after `after` and tells of each damaged object.
///
/// # Errors
/// If this machine cannot read at all.
pub fn step(node: &Arc<Node>, after: Option<PackId>) -> Result<ScrubStep, String> {
    let done = node.supply.store.scrub(after, &node.supply.keys).map_err(|e| e.to_string())?;
    for f in &done.faults {
        let file = f.file.as_ref().map_or_else(String::new, |p| format!(" in {}", p.display()));
        let text = format!("chunk {}{file} on {}: {}", f.chunk, f.holder, f.why);
        node.state.event("", "damaged", &text);
    }
    Ok(done)
}
