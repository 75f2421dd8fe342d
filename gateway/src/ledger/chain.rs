//! The chain of a ledger's lines: appending, reading back, and everything that can be checked.
//!
//! A line is a JSON object that ends with its hash: `{…,"hash":"<64 digits>"}`. The hash is BLAKE3 of the 32 bytes of the previous
//! line's hash and of the line's text before `,"hash"`. Before the first line stands BLAKE3 of `keepstate ledger 1 <session>`; a fork
//! whose parent's journal was at hand begins with the hash of the parent's line at the fork point instead.

use super::{Entry, Line};
use crate::dialect::Outcome;
use crate::names::{CallId, Digest, Hex};
use crate::price::PriceTable;
use std::collections::{BTreeMap, BTreeSet};

/// Bytes of one line.
pub const LINE_BYTES_MAX: usize = 256 * 1024;
/// Length of `,"hash":"` + 64 + `"}`.
const SUFFIX: usize = 75;

/// Why a ledger is not in order.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LedgerError {
    /// The text of a line.
    #[error("line {at} of the ledger of session {session}: {why}")]
    Line {
        /// Whose.
        session: String,
        /// The line's number, as counted.
        at: u64,
        /// What is wrong.
        why: String,
    },
    /// A fork and its parent do not fit.
    #[error("the ledger of session {child} does not go on from line {at} of its parent {parent}")]
    Tree {
        /// The fork.
        child: String,
        /// The parent.
        parent: String,
        /// The fork point.
        at: u64,
    },
}

fn genesis(session: &str) -> Digest {
    Digest::of(format!("keepstate ledger 1 {session}").as_bytes())
}

fn link(before: &Digest, text: &str) -> Digest {
    let mut h = blake3::Hasher::new();
    h.update(&before.0);
    h.update(text.as_bytes());
    Hex(*h.finalize().as_bytes())
}

/// The end of a ledger, to which lines are appended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    session: String,
    next: u64,
    hash: Digest,
}

impl Chain {
    /// Before the first line of an ordinary session.
    pub fn new(session: &str) -> Self {
        Self { session: session.to_owned(), next: 1, hash: genesis(session) }
    }
    /// Before the first line of a fork, which must be [`Entry::Origin`] with the same figures.
    pub fn fork(session: &str, at_seq: u64, at_hash: Option<Digest>) -> Self {
        let hash = at_hash.unwrap_or_else(|| genesis(session));
        Self { session: session.to_owned(), next: at_seq.saturating_add(1), hash }
    }
    /// The number that the next line will have.
    pub fn next(&self) -> u64 {
        self.next
    }
    /// Hash of the last line.
    pub fn hash(&self) -> Digest {
        self.hash
    }
    /// The next line and its text, without a line feed. Nothing is durable yet.
    pub fn append(&mut self, at_ms: u64, entry: Entry) -> (Line, String) {
        let line = Line { seq: self.next, at_ms, session: self.session.clone(), entry };
        let mut text = serde_json::to_string(&line).expect("a line has string keys and finite numbers");
        text.pop();
        self.hash = link(&self.hash, &text);
        self.next += 1;
        text.push_str(&format!(",\"hash\":\"{}\"}}", self.hash));
        (line, text)
    }
    /// Takes a line that was appended elsewhere, if it is the next one.
    pub fn follow(&mut self, text: &str) -> Result<Line, LedgerError> {
        let bad = |why: String| LedgerError::Line { session: self.session.clone(), at: self.next, why };
        if text.len() > LINE_BYTES_MAX {
            return Err(bad(format!("it has {} bytes, at most {LINE_BYTES_MAX} are read", text.len())));
        }
        let cut = text.len().checked_sub(SUFFIX).filter(|c| text.is_char_boundary(*c));
        let (body, suffix) = cut.map(|c| text.split_at(c)).ok_or_else(|| bad("it has no hash at its end".into()))?;
        let hash: Digest = suffix
            .strip_prefix(",\"hash\":\"")
            .and_then(|s| s.strip_suffix("\"}"))
            .and_then(|h| h.parse().ok())
            .ok_or_else(|| bad("it has no hash at its end".into()))?;
        let line: Line = serde_json::from_str(text).map_err(|e| bad(format!("it is no line of this format: {e}")))?;
        if line.session != self.session {
            return Err(bad(format!("it is of session {}", line.session)));
        }
        if line.seq != self.next {
            return Err(bad(format!("it has number {}", line.seq)));
        }
        if link(&self.hash, body) != hash {
            return Err(bad("its hash does not fit: it, or one before it, was changed".into()));
        }
        self.hash = hash;
        self.next += 1;
        Ok(line)
    }
}

/// A ledger that was read.
#[derive(Debug, Clone, PartialEq)]
pub struct Ledger {
    /// The session.
    pub session: String,
    /// Its lines and their hashes.
    pub lines: Vec<(Line, Digest)>,
    /// Bytes of whole lines; what follows is a line that was being written when its process died.
    pub whole_bytes: usize,
    chain: Chain,
}

impl Ledger {
    /// Reads a file. A last line without a line feed is torn: not read, not an error.
    pub fn read(session: &str, file: &str) -> Result<Self, LedgerError> {
        let mut chain = Chain::new(session);
        let (mut lines, mut at) = (Vec::new(), 0);
        while let Some(n) = file[at..].find('\n') {
            let text = &file[at..at + n];
            if lines.is_empty() {
                chain = Self::beginning(session, text);
            }
            let line = chain.follow(text)?;
            if let (Entry::Origin { .. }, true) = (&line.entry, !lines.is_empty()) {
                let why = "a fork's origin is its first line".to_owned();
                return Err(LedgerError::Line { session: session.to_owned(), at: line.seq, why });
            }
            lines.push((line, chain.hash()));
            at += n + 1;
        }
        Ok(Self { session: session.to_owned(), lines, whole_bytes: at, chain })
    }
    /// Before the first line, which says itself whether this is a fork.
    fn beginning(session: &str, text: &str) -> Chain {
        match serde_json::from_str::<Line>(text) {
            Ok(Line { entry: Entry::Origin { at_seq, at_hash, .. }, .. }) => Chain::fork(session, at_seq, at_hash),
            Ok(_) | Err(_) => Chain::new(session),
        }
    }
    /// Where the next line goes.
    pub fn chain(&self) -> Chain {
        self.chain.clone()
    }
    /// Checks what lines say of one another, and every cost of these price tables.
    pub fn check(&self, tables: &[PriceTable]) -> Result<(), LedgerError> {
        let mut c = Checked::default();
        for (line, _) in &self.lines {
            c.line(line, tables).map_err(|why| LedgerError::Line { session: self.session.clone(), at: line.seq, why })?;
        }
        Ok(())
    }
}

#[derive(Default)]
struct Checked<'a> {
    intents: BTreeMap<u64, &'a super::Intent>,
    calls: BTreeSet<CallId>,
    outcomes: BTreeMap<u64, Outcome>,
    resolved: BTreeSet<u64>,
}

impl<'a> Checked<'a> {
    fn line(&mut self, line: &'a Line, tables: &[PriceTable]) -> Result<(), String> {
        match &line.entry {
            Entry::Intent(i) => {
                if !self.calls.insert(i.call) {
                    return Err(format!("call {} of timeline {} is bought a second time", i.call.counter, i.call.nonce));
                }
                self.intents.insert(line.seq, i);
            }
            Entry::Completed(c) => self.completed(c, tables)?,
            Entry::Served { of, .. } if of.session.is_none() && !self.intents.contains_key(&of.seq) => {
                return Err(format!("it serves {}, which is no purchase", of.seq));
            }
            Entry::Resolved { of, .. } => {
                if self.outcomes.get(of) != Some(&Outcome::Unknown) {
                    return Err(format!("it resolves {of}, which is not unknown"));
                }
                if !self.resolved.insert(*of) {
                    return Err(format!("{of} was resolved already"));
                }
            }
            Entry::Origin { .. }
            | Entry::Timeline { .. }
            | Entry::Served { .. }
            | Entry::Diverged { .. }
            | Entry::Egress { .. } => {}
        }
        Ok(())
    }
    fn completed(&mut self, c: &super::Completed, tables: &[PriceTable]) -> Result<(), String> {
        let intent = self.intents.get(&c.of).ok_or_else(|| format!("it ends {}, which is no purchase", c.of))?;
        if self.outcomes.insert(c.of, c.outcome).is_some() {
            return Err(format!("{} ended already", c.of));
        }
        if c.usage.is_some_and(|u| u.reasoning > u.output) {
            return Err("its reasoning is more than its output".into());
        }
        let (Some(usage), Some(table)) = (&c.usage, tables.iter().find(|t| t.hash() == c.price_table)) else {
            return match c.cost {
                Some(_) if c.usage.is_none() => Err("it has a cost without usage".into()),
                Some(_) | None => Ok(()),
            };
        };
        let model = c.model.as_deref().or(intent.model.as_deref()).unwrap_or("");
        let due = table.cost(&intent.provider, model, c.tier.as_deref(), usage);
        if due == c.cost {
            return Ok(());
        }
        let show = |m: Option<crate::money::Money>| m.map_or("unpriced".to_owned(), |m| m.to_string());
        Err(format!("its cost is {}, by its usage and price table it is {}", show(c.cost), show(due)))
    }
}

/// Checks that every fork among these goes on from its parent, where both are here.
pub fn verify_tree(ledgers: &[Ledger]) -> Result<(), LedgerError> {
    let by_session: BTreeMap<&str, &Ledger> = ledgers.iter().map(|l| (l.session.as_str(), l)).collect();
    for child in ledgers {
        let Some((Line { entry: Entry::Origin { from, at_seq, at_hash: Some(hash) }, .. }, _)) = child.lines.first() else {
            continue;
        };
        let Some(parent) = by_session.get(from.as_str()) else { continue };
        if !parent.lines.iter().any(|(line, h)| line.seq == *at_seq && h == hash) {
            return Err(LedgerError::Tree { child: child.session.clone(), parent: from.clone(), at: *at_seq });
        }
    }
    Ok(())
}
