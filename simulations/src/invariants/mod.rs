//! What must hold, one promise a file. Each keeps what it saw and the violations that it found.

pub mod durable_means_peers;
pub mod fenced;
pub mod no_torn;
pub mod one_owner;
pub mod recovers;
pub mod same_state;

/// All of them.
#[derive(Debug, Default)]
pub struct Invariants {
    /// ONE-OWNER.
    pub one_owner: one_owner::OneOwner,
    /// FENCED.
    pub fenced: fenced::Fenced,
    /// DURABLE-MEANS-PEERS.
    pub durable: durable_means_peers::DurableMeansPeers,
    /// NO-TORN.
    pub no_torn: no_torn::NoTorn,
    /// RECOVERS.
    pub recovers: recovers::Recovers,
    /// SAME-STATE.
    pub same_state: same_state::SameState,
}

impl Invariants {
    /// Everything that was found, each with its promise.
    pub fn violations(&self) -> Vec<String> {
        let all = [
            ("ONE-OWNER", &self.one_owner.violations),
            ("FENCED", &self.fenced.violations),
            ("DURABLE-MEANS-PEERS", &self.durable.violations),
            ("NO-TORN", &self.no_torn.violations),
            ("RECOVERS", &self.recovers.violations),
            ("SAME-STATE", &self.same_state.violations),
        ];
        all.iter().flat_map(|(promise, v)| v.iter().map(move |v| format!("{promise}: {v}"))).collect()
    }
}
