//! `ksd bench-replicate`: the bulk plane's own measurement, with a question over a real control plane every 20 ms beside it.
//!
//! Two control planes on loopback, as two nodes have them, in the process whose processors the transfer uses: what a renewal of
//! a lease would wait for while a checkpoint travels.

use anyhow::{Context, Result};
use futures::FutureExt;
use futures::future::BoxFuture;
use ks_bulk::bench;
use ks_net::{ControlConfig, ControlPlane, Handler, Keypair, PeerId, Proto, control_addr};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Between questions.
const EVERY: Duration = Duration::from_millis(20);
/// An answer that takes longer counts as that long.
const ANSWER_MAX: Duration = Duration::from_secs(5);
/// Bytes of a question: as a renewal's.
const QUESTION: usize = 64;

struct Echo;

impl Handler for Echo {
    fn handle(&self, _: PeerId, _: Proto, request: Vec<u8>) -> BoxFuture<'static, Vec<u8>> {
        futures::future::ready(request).boxed()
    }
}

/// The lines to print: one of JSON for each round, one of JSON with `control_calls`, `control_p50_ms` and `control_p99_ms` of the
/// questions that were asked while our side of a round ran, and the medians in words.
///
/// # Errors
/// If a part of it fails.
pub async fn replicate(dir: &Path, mib: u32, rounds: u32) -> Result<Vec<String>> {
    let busy = Arc::new(AtomicBool::new(false));
    let (asking, answering) = (start().await?, start().await?);
    let at = |c: &ControlPlane| BTreeMap::from([(c.me(), c.listening())]);
    asking.allow(at(&answering));
    answering.allow(at(&asking));
    tokio::time::timeout(ANSWER_MAX, asking.connected(answering.me())).await.context("connecting two control planes")??;
    let (stop, stopped) = tokio::sync::oneshot::channel();
    let questions = tokio::spawn(ask(asking.clone(), answering.me(), busy.clone(), stopped));
    let done = bench::report(dir, mib, rounds, &busy).await;
    drop(stop);
    let mut took = questions.await?;
    asking.shutdown().await;
    answering.shutdown().await;
    let mut lines = done?;
    took.sort_by(f64::total_cmp);
    let percentile = |p: f64| took.get(((took.len() as f64 - 1.0) * p).round() as usize).copied();
    let control = serde_json::json!({
        "control_calls": took.len(), "control_p50_ms": percentile(0.5), "control_p99_ms": percentile(0.99),
    });
    lines.push(control.to_string());
    Ok(lines)
}

/// Milliseconds of each question that was asked and answered while `busy`, until `stopped`.
async fn ask(control: ControlPlane, peer: PeerId, busy: Arc<AtomicBool>, mut stopped: oneshot::Receiver<()>) -> Vec<f64> {
    let mut took = Vec::new();
    let mut tick = tokio::time::interval(EVERY);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = &mut stopped => return took,
            _ = tick.tick() => {}
        }
        let before = busy.load(Ordering::Acquire);
        let begun = Instant::now();
        let answer = control.call(peer, Proto::Raft, vec![7; QUESTION], ANSWER_MAX).await;
        let ms = if answer.is_ok() { begun.elapsed() } else { ANSWER_MAX }.as_secs_f64() * 1000.0;
        if before && busy.load(Ordering::Acquire) {
            took.push(ms);
        }
    }
}

async fn start() -> Result<ControlPlane> {
    let listen = control_addr(std::net::SocketAddr::from(([127, 0, 0, 1], 0)));
    Ok(ControlPlane::start(ControlConfig::new(Keypair::generate_ed25519(), vec![listen]), Arc::new(Echo)).await?)
}
