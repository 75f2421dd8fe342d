//! Timelines and call ids: pure.
//!
//! A timeline goes from one restore to the next. `position` is the highest journal entry the relay had been told of when
//! it began: it is kept in guest memory, hence exact in every checkpoint.

use ks_proto::relay::CallId;

/// 16 random bytes that name a timeline.
pub type Nonce = [u8; 16];

/// The current timeline.
#[derive(Debug)]
pub(crate) struct Timeline {
    nonce: String,
    prior: Option<String>,
    position: u64,
    highest: u64,
    calls: u64,
}

/// What each ask tells about the current timeline.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Facts {
    pub nonce: String,
    pub prior: Option<String>,
    pub position: u64,
}

impl Timeline {
    pub fn new(nonce: Nonce) -> Self {
        Self { nonce: hex::encode(nonce), prior: None, position: 0, highest: 0, calls: 0 }
    }

    /// A new timeline. A fork's journal goes on from its parent's numbers, so the position stays true there too.
    pub fn restored(&mut self, nonce: Nonce) {
        self.prior = Some(std::mem::replace(&mut self.nonce, hex::encode(nonce)));
        self.position = self.highest;
        self.calls = 0;
    }

    /// The gateway told of an entry.
    pub fn told(&mut self, seq: u64) {
        self.highest = self.highest.max(seq);
    }

    /// A name for a new call.
    pub fn next_call(&mut self) -> CallId {
        self.calls += 1;
        CallId { nonce_hex: self.nonce.clone(), counter: self.calls }
    }

    pub fn facts(&self) -> Facts {
        Facts { nonce: self.nonce.clone(), prior: self.prior.clone(), position: self.position }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restore_keeps_the_position_and_begins_a_new_count() {
        let mut t = Timeline::new([1; 16]);
        assert_eq!(t.next_call().counter, 1);
        t.told(4);
        t.told(2);
        assert_eq!(t.facts(), Facts { nonce: "01".repeat(16), prior: None, position: 0 });
        t.restored([2; 16]);
        let next = t.next_call();
        assert_eq!((next.nonce_hex.as_str(), next.counter), ("02".repeat(16).as_str(), 1));
        assert_eq!(t.facts(), Facts { nonce: "02".repeat(16), prior: Some("01".repeat(16)), position: 4 });
    }
}
