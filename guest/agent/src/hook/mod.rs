//! The restore hook: entropy, wall clock, on a fork a new identity; then the user's processes go on.
//!
//! The order is the point: nothing of the user runs before the random generator and the identity are new.

mod clock;
mod identity;

pub use clock::unix_ns;

use std::sync::Arc;

use ks_proto::guest::HookKind;

use crate::{agent::Agent, refusal::Refusal, sys};

/// The least entropy that a hook must bring, in bytes.
const ENTROPY_BYTES_MIN: usize = 32;

/// What the node asks for.
#[derive(Debug)]
pub struct Wanted {
    /// Why the hook runs.
    pub kind: HookKind,
    /// The host's wall clock.
    pub wall_unix_ns: u64,
    /// Fresh entropy.
    pub entropy_hex: String,
    /// The new host name, for a fork.
    pub hostname: String,
    /// The new machine id, for a fork.
    pub machine_id_hex: String,
}

/// Runs the hook. Outside a VM only the request is checked.
pub async fn run(agent: &Arc<Agent>, wanted: Wanted) -> Result<(), Refusal> {
    let seed = hex::decode(&wanted.entropy_hex).map_err(|e| Refusal::bad("run the restore hook", format!("entropy: {e}")))?;
    let needs_seed = !matches!(wanted.kind, HookKind::AfterPause);
    if needs_seed && !(ENTROPY_BYTES_MIN..=sys::ENTROPY_BYTES_MAX).contains(&seed.len()) {
        let why = format!("{} bytes of entropy; {ENTROPY_BYTES_MIN} to {} are needed", seed.len(), sys::ENTROPY_BYTES_MAX);
        return Err(Refusal::bad("run the restore hook", why));
    }
    let identity = match wanted.kind {
        HookKind::Fork => Some(identity::Identity::new(&wanted.hostname, &wanted.machine_id_hex)?),
        HookKind::Boot | HookKind::Resume | HookKind::AfterPause => None,
    };
    if !agent.in_vm {
        agent.note_outside();
        begin_timeline(agent, wanted.kind);
        return Ok(());
    }
    if !seed.is_empty() {
        sys::add_entropy(&seed).map_err(|e| Refusal::io("add entropy", e))?;
    }
    clock::set(wanted.wall_unix_ns, wanted.kind).map_err(|e| Refusal::io("set the clock", e))?;
    if let Some(identity) = identity {
        identity.apply(agent).map_err(|e| Refusal::io("take on the new identity", e))?;
    }
    begin_timeline(agent, wanted.kind);
    match (wanted.kind, &agent.cgroup) {
        (HookKind::AfterPause, _) | (_, None) => Ok(()),
        (HookKind::Boot | HookKind::Resume | HookKind::Fork, Some(group)) => {
            group.thaw().map_err(|e| Refusal::io("thaw the user's processes", e))
        }
    }
}

/// The relay's next calls belong to this run; the name is drawn from the renewed pool.
fn begin_timeline(agent: &Agent, kind: HookKind) {
    match kind {
        HookKind::AfterPause => {}
        HookKind::Boot | HookKind::Resume | HookKind::Fork => agent.relay.restored(crate::agent::nonce()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(kind: HookKind, entropy: &str, hostname: &str, id: &str) -> Wanted {
        Wanted { kind, wall_unix_ns: 0, entropy_hex: entropy.into(), hostname: hostname.into(), machine_id_hex: id.into() }
    }

    #[tokio::test]
    async fn bad_requests_are_refused_before_anything_changes() {
        let dir = tempfile::tempdir().unwrap();
        let agent = Agent::outside(dir.path());
        let good = "ab".repeat(64);
        let id = "0123456789abcdef0123456789abcdef";
        let cases = [
            (wanted(HookKind::Resume, "", "", ""), false),
            (wanted(HookKind::Resume, "zz", "", ""), false),
            (wanted(HookKind::Resume, &good, "", ""), true),
            (wanted(HookKind::AfterPause, "", "", ""), true),
            (wanted(HookKind::Fork, &good, "quiet-otter", id), true),
            (wanted(HookKind::Fork, &good, "", id), false),
            (wanted(HookKind::Fork, &good, "a\nb", id), false),
            (wanted(HookKind::Fork, &good, "quiet-otter", "0123"), false),
            (wanted(HookKind::Fork, &good, "quiet-otter", &"0".repeat(32)), false),
        ];
        for (wanted, ok) in cases {
            let text = format!("{wanted:?}");
            assert_eq!(run(&agent, wanted).await.is_ok(), ok, "{text}");
        }
    }
}
