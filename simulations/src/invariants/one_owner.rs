//! ONE-OWNER: at any moment the effects of at most one run of a session leave for the outside. Seen in true time, a run
//! that was followed by a newer one lets nothing out any more.

use ks_proto::{RunToken, SessionId};
use std::collections::BTreeMap;

/// What it saw.
#[derive(Debug, Default)]
pub struct OneOwner {
    newest: BTreeMap<SessionId, (RunToken, u64)>,
    /// What it found.
    pub violations: Vec<String>,
}

impl OneOwner {
    /// An effect left a VM on `node`.
    pub fn emitted(&mut self, at_ms: u64, session: SessionId, token: RunToken, node: u64) {
        let newest = self.newest.entry(session).or_insert((token, node));
        if token < newest.0 {
            let (other, there) = *newest;
            let (s, t) = (session.short(), token);
            self.violations.push(format!("at {at_ms} ms run {t} of {s} on node {node} writes after run {other} on node {there}"));
        } else if token == newest.0 && node != newest.1 {
            self.violations.push(format!("at {at_ms} ms run {token} of {} is on nodes {node} and {}", session.short(), newest.1));
        } else {
            *newest = (token, node);
        }
    }
}
