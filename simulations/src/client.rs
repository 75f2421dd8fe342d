//! The client: makes sessions, and believes what it reads through whatever node answers. It is the oracle of what must
//! never be lost.

use crate::host::GOLDEN;
use crate::world::World;
use ks_proto::api::Checkpoint;
use ks_proto::manifest::EngineKind;
use ks_proto::{CheckpointId, ImageId, SessionId};
use ks_raft::{Command, ImageRecord, Response, SessionParams};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::sleep;

const IMAGE: ImageId = ImageId([9; 32]);

/// Proposes through any node until there is an answer.
pub async fn propose(world: &Arc<World>, command: Command) -> Response {
    loop {
        let up: Vec<_> = world.with(|w| w.nodes.values().filter(|n| n.up).filter_map(|n| n.peer.clone()).collect());
        if !up.is_empty() {
            let at = usize::try_from(world.roll(up.len() as u64)).unwrap_or(0);
            if let Ok(answer) = up[at].propose(command.clone()).await {
                return answer;
            }
        }
        sleep(Duration::from_millis(200)).await;
    }
}

/// The image that all sessions use.
pub fn image() -> Command {
    let image = ImageRecord {
        name: "default".into(),
        id: IMAGE,
        kernel: "6.1".into(),
        cmdline: String::new(),
        profile: String::new(),
        disk_bytes: 1,
        disk_used_bytes: 1,
        disk: GOLDEN,
        created_unix_ms: 0,
        holders: Vec::new(),
    };
    Command::PutImage { image }
}

/// Session `n` on node `owner`.
pub fn session(n: u8, owner: u64, now_unix_ms: u64) -> Option<Command> {
    Some(Command::CreateSession {
        id: SessionId([n; 16]),
        name: format!("s{n}").parse().ok()?,
        owner,
        params: SessionParams {
            image: "default".into(),
            image_id: IMAGE,
            memory_mib: 512,
            vcpus: 1,
            engine: EngineKind::Qemu,
            profile: "v2".into(),
            engine_why: String::new(),
        },
        cadence_s: 10,
        idle_park_s: 0,
        command: None,
        forked_from: None,
        head: GOLDEN,
        now_unix_ms,
    })
}

/// What a capture writes into the list.
pub fn checkpoint(id: CheckpointId, now_unix_ms: u64) -> Checkpoint {
    Checkpoint {
        number: 0,
        id,
        parent: None,
        created_unix_ms: now_unix_ms,
        message: String::new(),
        reason: "cadence".into(),
        pinned: false,
        durability: String::new(),
        logical_bytes: 1,
        stored_bytes: 1,
        pause_us: 1,
        total_us: 1,
        holders: Vec::new(),
        branch: false,
    }
}

/// Reads the list of checkpoints through one node, as a person would.
pub fn read(world: &World) {
    let up: Vec<_> = world.with(|w| w.nodes.values().filter(|n| n.up).filter_map(|n| n.peer.clone()).collect());
    if up.is_empty() {
        return;
    }
    let state = up[usize::try_from(world.roll(up.len() as u64)).unwrap_or(0)].state();
    world.with(|w| {
        let captured = std::mem::take(&mut w.invariants.no_torn.captured);
        w.invariants.durable.client_reads(&state, &captured);
        w.invariants.no_torn.captured = captured;
    });
}
