//! NO-TORN: a checkpoint is whole or absent. What is read back is what was captured, and all of one instant.

use ks_proto::CheckpointId;
use std::collections::BTreeMap;

/// What it saw.
#[derive(Debug, Default)]
pub struct NoTorn {
    /// The counter at the instant of each capture.
    pub captured: BTreeMap<CheckpointId, u64>,
    /// Checkpoints that were read back.
    pub restored: u64,
    /// What it found.
    pub violations: Vec<String>,
}

impl NoTorn {
    /// A node read the checkpoint to start from it.
    pub fn read_back(&mut self, at_ms: u64, id: CheckpointId, counter: u64, one_instant: bool) {
        self.restored += 1;
        if !one_instant || self.captured.get(&id) != Some(&counter) {
            let was = self.captured.get(&id);
            self.violations
                .push(format!("at {at_ms} ms {} reads {counter} (one instant: {one_instant}), captured {was:?}", id.short()));
        }
    }
}
