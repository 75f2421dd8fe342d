//! A VM, modelled: a counter in memory and on disk that writes each step to the outside with its run token.
//!
//! It lives outside its node's daemon, as ks-vmm does: it outlives a crash of the daemon, checks its deadline before every
//! step, and pauses when that has passed. Its effects take a while to reach the outside, where the token is checked.

use crate::world::World;
use ks_proto::{RunToken, SessionId};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::time::sleep;

/// One VM.
#[derive(Debug)]
pub struct Vm {
    /// Its session.
    pub session: SessionId,
    /// The run.
    pub token: RunToken,
    /// Its node.
    pub node: u64,
    /// CLOCK_BOOTTIME of its node at which it pauses.
    pub deadline_ms: AtomicU64,
    /// Where it is.
    pub counter: AtomicU64,
    /// Set when it was ended.
    pub ended: AtomicBool,
}

impl Vm {
    /// Starts one.
    pub fn start(world: &Arc<World>, node: u64, session: SessionId, token: RunToken, from: u64, deadline_ms: u64) -> Arc<Self> {
        let vm = Arc::new(Self {
            session,
            token,
            node,
            deadline_ms: AtomicU64::new(deadline_ms),
            counter: AtomicU64::new(from),
            ended: AtomicBool::new(false),
        });
        let (w, v) = (world.clone(), vm.clone());
        world.spawn(async move { v.run(w).await });
        vm
    }

    async fn run(&self, world: Arc<World>) {
        loop {
            sleep(Duration::from_millis(100 + world.roll(100))).await;
            world.thaw_vm(self.node).await;
            if self.ended.load(Ordering::SeqCst) {
                return;
            }
            if world.clock_ms(self.node) >= self.deadline_ms.load(Ordering::SeqCst) {
                continue;
            }
            let value = self.counter.fetch_add(1, Ordering::SeqCst) + 1;
            world.effect(self.session, self.token, self.node, value);
        }
    }

    /// Raises its deadline; an earlier one changes nothing.
    pub fn extend(&self, deadline_ms: u64) {
        self.deadline_ms.fetch_max(deadline_ms, Ordering::SeqCst);
    }
    /// The one lowering: from no deadline to one.
    pub fn limit(&self, deadline_ms: u64) {
        self.deadline_ms.store(deadline_ms, Ordering::SeqCst);
    }
    /// Ends it.
    pub fn end(&self) {
        self.ended.store(true, Ordering::SeqCst);
    }
}
