//! Starting a session's VM, adopting one, and taking a checkpoint of it.

use super::gateway::{began, carry};
use super::guest::{HELLO_RESTORED, SHORT};
use super::image::image_dir;
use super::session::{Steer, run_dir};
use super::upload::Sink;
use super::vm::{LiveVm, Origin, Owned, Spec, fault, launch};
use crate::fleet::fetch;
use crate::node::{Node, head_of};
use crate::session::{Checkpointed, Head, HeadKind, Job};
use ks_blobs::USER_DOMAIN;
use ks_proto::api::ApiError;
use ks_proto::control::{VmConfig, VmmReply, VmmRequest};
use ks_proto::guest::HookKind;
use ks_proto::{CheckpointId, RunToken, SessionId};
use ks_raft::SessionRecord;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// How long the VMM may take to stop or start its guest.
const PAUSE_DEADLINE: Duration = Duration::from_secs(30);
const CHECKPOINT_DEADLINE: Duration = Duration::from_secs(900);

/// A session's machine id: the same for its life, another for every fork.
pub fn machine_id(id: &SessionId) -> [u8; 16] {
    let mut out = [0; 16];
    out.copy_from_slice(&blake3::derive_key("keepstate 2026-11 guest machine id", &id.0)[..16]);
    out
}

fn spec(node: &Node, r: &SessionRecord, token: RunToken, checkpoint: CheckpointId, verify_eager: bool) -> Spec {
    let dir = image_dir(node, &r.params.image_id);
    let config = VmConfig {
        session: r.id,
        name: r.name.to_string(),
        token,
        engine: r.params.engine,
        vcpus: r.params.vcpus,
        memory_bytes: r.params.memory_mib << 20,
        cmdline: String::new(),
        verify_eager,
    };
    let origin = Origin::Restore { checkpoint };
    let (state, me, id) = (node.state.clone(), node.fleet.number(), r.id);
    let owned = move || state.read().sessions.get(&id).is_some_and(|r| r.owner == me && r.token.epoch == token.epoch);
    let owned = Owned(Arc::new(owned));
    Spec { config, origin, kernel: dir.join("kernel"), initrd: dir.join("initrd"), write_domain: USER_DOMAIN, owned }
}

fn sink(node: &Node, id: SessionId, token: RunToken) -> Sink {
    Sink::Session { state: node.state.clone(), id, token }
}

/// Restores `from` as run `token` and brings the guest to where it counts as ready: it answers, a fork's child has its
/// files, and the restore hook is done. Gives the VM and how long that last part took, from its first word on.
///
/// # Errors
/// What failed; then nothing of that run is left.
pub async fn launch_session(
    node: &Arc<Node>,
    id: SessionId,
    token: RunToken,
    from: Head,
    verify_eager: bool,
    steer: &Steer,
) -> Result<(LiveVm, Duration), ApiError> {
    let notes = node.notes.read(&id);
    let gone = || ApiError::new("not-found", "the session is gone", "it was removed meanwhile", "ks ls");
    let record = node.state.read().sessions.get(&id).cloned().ok_or_else(gone)?;
    fetch::ensure_start(node, id, token, from.id).await?;
    let dir = run_dir(node, id, token);
    let vm = launch(&node.supply, &dir, &spec(node, &record, token, from.id, verify_eager), sink(node, id, token)).await?;
    let restored = tokio::time::Instant::now();
    let stamp = began::stamp(&record, token, from.id, from.kind, &notes, !node.fleet.alone());
    if let Err(e) = began::keep(&dir, &stamp) {
        vm.kill();
        return Err(ApiError::new("disk-full", "the run's stamp is not kept", e.to_string(), "free space in the data folder"));
    }
    carry::attach(node, &vm, stamp);
    match make_ready(&vm, &record, from.kind, steer).await {
        Ok(()) => Ok((vm, restored.elapsed())),
        Err(e) => {
            vm.kill();
            Err(e)
        }
    }
}

async fn make_ready(vm: &LiveVm, r: &SessionRecord, kind: HeadKind, steer: &Steer) -> Result<(), ApiError> {
    let mut ended = vm.ended.clone();
    let work = async {
        vm.guest.hello(HELLO_RESTORED).await?;
        if !steer.is_empty() {
            // The hook thaws at its end: until then the child's programs do not see half of what is put in.
            vm.guest.freeze().await?;
            for (path, bytes) in steer {
                vm.guest.put_file(path, bytes).await?;
            }
        }
        let hook = match kind {
            HeadKind::Golden | HeadKind::ForkPoint => HookKind::Fork,
            HeadKind::Own => HookKind::Resume,
        };
        vm.guest.hook(hook, r.name.as_str(), &machine_id(&r.id)).await
    };
    tokio::select! {
        done = work => done,
        _ = ended.wait_for(Option::is_some) => {
            let why = vm.ended.borrow().clone().unwrap_or_default();
            Err(ApiError::new("internal", "the VM ended while it started", why, "see `ks events`"))
        }
    }
}

/// Takes over the VM that an earlier ksd started in `dir`.
///
/// # Errors
/// Why that is not possible.
pub async fn adopt(node: &Arc<Node>, r: &SessionRecord, dir: &Path) -> Result<LiveVm, String> {
    let spec = spec(node, r, r.token, r.head, false);
    let vm = LiveVm::adopt(&node.supply, dir, &spec, r.head, sink(node, r.id, r.token)).await?;
    // One of an earlier version has none: then it is as after a crash.
    let head = head_of(r, r.head);
    let stamp = began::kept(dir)
        .unwrap_or_else(|| began::stamp(r, r.token, head.id, head.kind, &began::Notes::default(), !node.fleet.alone()));
    carry::attach(node, &vm, stamp);
    let guest = &vm.guest;
    let work = async {
        guest.hello(SHORT).await?;
        // A run that never became ready has still to get its identity; the hook does no harm to one that has.
        if head_of(r, r.head).kind == HeadKind::Own || r.next_number > 1 || r.command.is_some() {
            guest.hook(HookKind::AfterPause, r.name.as_str(), &machine_id(&r.id)).await?;
        } else {
            guest.hook(HookKind::Fork, r.name.as_str(), &machine_id(&r.id)).await?;
        }
        // The earlier ksd may have died between a freeze and its thaw.
        guest.thaw().await
    };
    match work.await {
        Ok(()) => Ok(vm),
        Err(e) => Err(e.to_string()),
    }
}

/// Takes one checkpoint and waits until it is durable and recorded. The guest goes on as soon as its pause is over; with
/// `job.hold` it stays stopped at that instant, unless the checkpoint fails.
///
/// # Errors
/// Why it is absent; the session runs on.
pub async fn checkpoint(vm: &Arc<LiveVm>, name: &str, parent: Option<CheckpointId>, job: Job) -> Result<Checkpointed, ApiError> {
    if job.freeze {
        vm.guest.freeze().await?;
    }
    let (frozen, hold) = (job.freeze, job.hold);
    if hold && let Err(f) = vm.control.order(VmmRequest::Pause {}, &[], PAUSE_DEADLINE).await {
        go_on(vm, name).await;
        return Err(fault(f));
    }
    let mut resumed = vm.resumed.clone();
    resumed.mark_unchanged();
    vm.uploader.expect(job);
    let after = tokio::spawn({
        let (vm, name) = (vm.clone(), name.to_owned());
        async move {
            let _ = resumed.changed().await;
            after_pause(&vm, &name, frozen).await;
        }
    });
    let ask = vm.control.ask(VmmRequest::Checkpoint { parent, journal_position: 0 }, &[], CHECKPOINT_DEADLINE).await;
    let result = match ask {
        Ok(VmmReply::Checkpoint { .. }) => vm.uploader.committed().ok_or_else(|| {
            ApiError::new("internal", "the checkpoint", "the VM calls it stored and the node has no record", "take another")
        }),
        Ok(other) => Err(ApiError::new("internal", "the VM's answer", format!("unexpected {other:?}"), "report this")),
        Err(f) => Err(fault(f)),
    };
    if result.is_err() {
        vm.uploader.give_up();
        if !after.is_finished() {
            // It failed before or in its pause: nobody may stay frozen.
            after.abort();
            if hold {
                resume(vm, name).await;
            }
            after_pause(vm, name, frozen).await;
        }
    }
    if hold {
        // A held guest never tells that it goes on.
        after.abort();
    }
    result
}

async fn resume(vm: &LiveVm, name: &str) {
    if let Err(e) = vm.control.order(VmmRequest::Resume {}, &[], PAUSE_DEADLINE).await {
        tracing::warn!(session = name, "the guest does not go on: {e}");
    }
}

/// A guest that a checkpoint with `hold` left stopped goes on.
pub async fn go_on(vm: &LiveVm, name: &str) {
    resume(vm, name).await;
    after_pause(vm, name, false).await;
}

/// The guest goes on: its clock is stepped over the pause, and frozen programs go on too.
async fn after_pause(vm: &LiveVm, name: &str, frozen: bool) {
    if let Err(e) = vm.guest.hook(HookKind::AfterPause, name, &[0; 16]).await {
        tracing::warn!(session = name, "the clock was not stepped after a pause: {e}");
    }
    if frozen && let Err(e) = vm.guest.thaw().await {
        tracing::warn!(session = name, "the user's programs were not thawed: {e}");
    }
}
