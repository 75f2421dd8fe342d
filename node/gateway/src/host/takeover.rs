//! A node begins to serve a session that another one served, or may have: it ends the older epochs wherever a copy may be, takes the
//! best copy that verifies, and makes it its journal. Until that is done no call of the session passes.
//!
//! Best is the copy of the newest owner's whole ledger, then the longest, as in Raft. Since a line counts only when all holders have
//! it, any one of them has all that counted. Calls without an end in it are then `unknown`, as after a crash of one's own.

use super::copies::Copies;
use super::peers::{Peers, Set};
use super::replica::ReplicaError;
use crate::limits::{ANSWER_BYTES_MAX, COPY_BYTES_MAX, TAKEOVER_PATIENCE};
use futures::future::join_all;
use ks_gateway::dialect::Outcome;
use ks_gateway::ledger::{Completed, Entry, Ledger};
use ks_gateway::names::Digest;
use ks_proto::SessionId;
use ks_proto::copies::{BodyPart, CopyAnswer, CopyAsk, PIECE_BYTES_MAX};
use ks_proto::gateway::{Began, Stamp};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Between two tries at a node that does not answer.
const PAUSE: Duration = Duration::from_millis(100);

/// What is taken over, and by whom.
pub struct Takeover<'a> {
    /// The copies here; an older journal of one's own is among them already.
    pub copies: &'a Arc<Copies>,
    /// The way to the other nodes.
    pub peers: &'a Peers,
    /// The run that begins.
    pub stamp: &'a Stamp,
    /// The highest number that its guest was ever told.
    pub position: u64,
}

struct Candidate {
    written: u64,
    lines: u64,
    /// None is this node's own.
    node: Option<u64>,
}

type Why = String;

impl Takeover<'_> {
    fn id(&self) -> SessionId {
        self.stamp.session
    }
    fn epoch(&self) -> u64 {
        self.stamp.token.epoch
    }

    /// Does it; the session's journal is then there, and is this epoch's.
    ///
    /// # Errors
    /// Why the journal is not at hand. Nothing was lost, and it may be tried again.
    pub async fn run(&self) -> Result<(), Why> {
        let give_up = Instant::now() + TAKEOVER_PATIENCE;
        let own = match self.here(CopyAsk::Seal {}).await? {
            CopyAnswer::Stands { lines, written } => Candidate { written, lines, node: None },
            CopyAnswer::Sealed { epoch } => return Err(format!("the session was taken over by epoch {epoch}")),
            other => return Err(format!("the copy here: {other:?}")),
        };
        // Nothing can have been bought before a session's first run.
        let first = self.stamp.token.run <= 1 && matches!(self.stamp.began, Began::Boot | Began::Fork) && own.lines == 0;
        if !first {
            let set = self.set(give_up).await?;
            let (mut found, silent) = self.ask_all(&set, give_up).await?;
            found.push(own);
            found.retain(|c| c.lines > 0);
            // Own first among equals: it need not be fetched.
            found.sort_by_key(|c| std::cmp::Reverse((c.written, c.lines, c.node.is_none())));
            self.take(&found, &silent).await?;
        }
        let (copies, id, epoch) = (self.copies.clone(), self.id(), self.epoch());
        blocking(move || copies.promote(id, epoch)).await
    }

    async fn here(&self, ask: CopyAsk) -> Result<CopyAnswer, Why> {
        let (copies, id, epoch) = (self.copies.clone(), self.id(), self.epoch());
        blocking(move || Ok(copies.answer(id, epoch, ask))).await
    }

    async fn set(&self, give_up: Instant) -> Result<Set, Why> {
        loop {
            match self.peers.set(self.id()).await {
                Ok(set) if set.epoch > self.epoch() => {
                    return Err(format!("the session was taken over by epoch {}", set.epoch));
                }
                Ok(set) if set.epoch == self.epoch() => return Ok(set),
                Ok(_) | Err(_) if Instant::now() < give_up => tokio::time::sleep(PAUSE).await,
                Ok(set) => return Err(format!("this node's daemon knows only of epoch {}", set.epoch)),
                Err(e) => return Err(e.to_string()),
            }
        }
    }

    /// What all others have, and who did not say.
    async fn ask_all(&self, set: &Set, give_up: Instant) -> Result<(Vec<Candidate>, Vec<u64>), Why> {
        let asked = join_all(set.members.iter().map(|node| self.ask_one(*node, give_up))).await;
        let (mut found, mut silent) = (Vec::new(), Vec::new());
        for (node, answer) in set.members.iter().zip(asked) {
            match answer {
                Ok(CopyAnswer::Stands { lines, written }) => found.push(Candidate { written, lines, node: Some(*node) }),
                Err(ReplicaError::Sealed(epoch)) => return Err(format!("the session was taken over by epoch {epoch}")),
                Ok(_) | Err(ReplicaError::Away(_)) => silent.push(*node),
            }
        }
        Ok((found, silent))
    }

    async fn ask_one(&self, node: u64, give_up: Instant) -> Result<CopyAnswer, ReplicaError> {
        loop {
            match self.peers.copy(node, self.id(), self.epoch(), CopyAsk::Seal {}).await {
                Err(ReplicaError::Away(why)) if Instant::now() < give_up => {
                    tracing::debug!(session = %self.id(), node, why, "a copy is not sealed yet");
                    tokio::time::sleep(PAUSE).await;
                }
                other => return other,
            }
        }
    }

    /// Makes the copy here the best one that verifies.
    async fn take(&self, found: &[Candidate], silent: &[u64]) -> Result<(), Why> {
        let needed = if self.stamp.origin.is_none() { self.position } else { 0 };
        if found.is_empty() {
            return match (silent, needed) {
                ([], 0) => Ok(()),
                ([], n) => Err(format!("its guest knows of {n} entries, and no node that is heard of has a copy")),
                (nodes, _) => {
                    Err(format!("no copy is here, and nodes {nodes:?} may have one but did not answer in {TAKEOVER_PATIENCE:?}"))
                }
            };
        }
        let mut why = String::new();
        for c in found {
            match self.verified(c).await {
                Ok((text, ledger)) => {
                    let last = ledger.chain().next() - 1;
                    if last < needed {
                        why = format!("its guest knows of {needed} entries, and the best copy ends at {last}");
                        continue;
                    }
                    if c.node.is_some() {
                        let (copies, id) = (self.copies.clone(), self.id());
                        blocking(move || copies.replace(id, &text)).await?;
                    }
                    let from: Vec<u64> = found.iter().filter_map(|c| c.node).collect();
                    self.bodies(&ledger, &from).await;
                    tracing::info!(session = %self.id(), epoch = self.epoch(), lines = ledger.lines.len(), from = ?c.node,
                        "the session's journal was taken over");
                    return Ok(());
                }
                Err(e) => {
                    tracing::warn!(session = %self.id(), node = ?c.node, error = e, "a copy cannot be used");
                    why = e;
                }
            }
        }
        Err(why)
    }

    async fn verified(&self, c: &Candidate) -> Result<(String, Ledger), Why> {
        let text = match c.node {
            None => {
                let (copies, id) = (self.copies.clone(), self.id());
                blocking(move || copies.text(id)).await?
            }
            Some(node) => self.fetch(node).await?,
        };
        let ledger = Ledger::read(&self.id().to_hex(), &text).map_err(|e| e.to_string())?;
        let (got, said) = (ledger.lines.len() as u64, c.lines);
        if got < said {
            return Err(format!("a copy that was said to have {said} lines has {got}"));
        }
        Ok((text, ledger))
    }

    async fn fetch(&self, node: u64) -> Result<String, Why> {
        let (mut text, mut at) = (String::new(), 0);
        loop {
            let ask = CopyAsk::Lines { from: at };
            let answer = self.peers.copy(node, self.id(), self.epoch(), ask).await.map_err(|e| e.to_string())?;
            let CopyAnswer::Lines { lines, more } = answer else { return Err(format!("node {node} answered something else")) };
            at += lines.len() as u64;
            for line in &lines {
                text.push_str(line);
                text.push('\n');
            }
            if text.len() > COPY_BYTES_MAX {
                return Err(format!("the copy at node {node} has more than {COPY_BYTES_MAX} bytes"));
            }
            if !more || lines.is_empty() {
                return Ok(text);
            }
        }
    }

    /// Gets the answers that may be served again and are not here. One that nobody has is bought again, and the ledger says so.
    async fn bodies(&self, ledger: &Ledger, from: &[u64]) {
        for (line, _) in &ledger.lines {
            let Entry::Completed(c) = &line.entry else { continue };
            if c.outcome != Outcome::Complete || self.has(c) {
                continue;
            }
            let mut got = false;
            for node in from {
                match self.body(*node, c).await {
                    Ok(()) => {
                        got = true;
                        break;
                    }
                    Err(why) => tracing::debug!(session = %self.id(), seq = c.of, node, why, "an answer was not got there"),
                }
            }
            if !got {
                tracing::warn!(session = %self.id(), seq = c.of, "no node has this answer any more: it cannot be served again");
            }
        }
    }

    fn has(&self, c: &Completed) -> bool {
        let len = |part| self.copies.body_len(self.id(), c.of, part);
        len(BodyPart::Answer) == Some(c.body_bytes) && len(BodyPart::Head).is_some_and(|n| n > 0)
    }

    async fn body(&self, node: u64, c: &Completed) -> Result<(), Why> {
        for (part, want) in [(BodyPart::Head, c.head_hash), (BodyPart::Answer, c.body_hash)] {
            let bytes = self.read(node, c.of, part).await?;
            if Digest::of(&bytes) != want {
                return Err("its hash is another one".into());
            }
            let (mut offset, len) = (0, bytes.len());
            // An empty body is a file too.
            let pieces: Vec<&[u8]> = if len == 0 { vec![&[]] } else { bytes.chunks(PIECE_BYTES_MAX).collect() };
            for piece in pieces {
                let last = offset as usize + piece.len() == len;
                match self.here(CopyAsk::Body { seq: c.of, part, offset, hex: hex::encode(piece), last }).await? {
                    CopyAnswer::Stands { .. } => offset += piece.len() as u64,
                    other => return Err(format!("it cannot be stored: {other:?}")),
                }
            }
        }
        Ok(())
    }

    async fn read(&self, node: u64, seq: u64, part: BodyPart) -> Result<Vec<u8>, Why> {
        let mut out = Vec::new();
        loop {
            let ask = CopyAsk::Read { seq, part, offset: out.len() as u64 };
            let answer = self.peers.copy(node, self.id(), self.epoch(), ask).await.map_err(|e| e.to_string())?;
            let CopyAnswer::Bytes { hex, total: Some(total) } = answer else { return Err("it has none".into()) };
            let piece = hex::decode(hex).map_err(|e| e.to_string())?;
            out.extend_from_slice(&piece);
            if out.len() as u64 >= total {
                return Ok(out);
            }
            if piece.is_empty() || total > ANSWER_BYTES_MAX {
                return Err("its length is not that of an answer".into());
            }
        }
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> std::io::Result<T> + Send + 'static) -> Result<T, Why> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done.map_err(|e| format!("this node's disk: {e}")),
        Err(e) => Err(e.to_string()),
    }
}
