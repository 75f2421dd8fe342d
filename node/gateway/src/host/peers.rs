//! The nodes that keep copies of this node's journals, reached by way of the node's daemon, and the rule of what counts as copied.
//!
//! A line counts when every holder that the daemon names has it on its disk. The daemon names as many as the session is to have
//! copies besides this one: live nodes of its replica set first, then other live ones, then dead ones, which make calls wait and be
//! refused. A holder that is new, or was away, gets what it missed, bodies and all, before it counts.

use super::copies::end_hash;
use super::locked;
use super::replica::{Part, Replica, ReplicaError, Reply};
use super::wire::{WireError, read_message, write_message};
use bytes::Bytes;
use futures::future::join_all;
use ks_gateway::ledger::{Entry, Line};
use ks_proto::SessionId;
use ks_proto::copies::{BodyPart, CopyAnswer, CopyAsk, LINES_BYTES_MAX, PIECE_BYTES_MAX, PeersAnswer, PeersAsk};
use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::net::UnixStream;

/// Connections to the daemon that are kept for the next ask.
const IDLE_MAX: usize = 32;
/// The daemon and the node behind it have so long to answer.
const ANSWER_PATIENCE: Duration = Duration::from_secs(5);
/// A session's holders are asked for again after so long.
const SET_AGE: Duration = Duration::from_secs(1);
/// A holder that is behind is set back at most so often within one append.
const BACK_MAX: usize = 4;

fn away(why: impl ToString) -> ReplicaError {
    ReplicaError::Away(why.to_string())
}

/// Who keeps a session's copies, as the daemon says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Set {
    /// The session's epoch there.
    pub epoch: u64,
    /// Nodes that must have a line.
    pub holders: Vec<u64>,
    /// All others that are heard of.
    pub members: Vec<u64>,
}

/// The daemon's socket. A daemon that is away for a moment makes answers [`ReplicaError::Away`], nothing worse.
pub struct Peers {
    socket: PathBuf,
    idle: Mutex<Vec<UnixStream>>,
}

impl Peers {
    /// At this path; nobody need listen yet.
    pub fn new(socket: PathBuf) -> Arc<Self> {
        Arc::new(Self { socket, idle: Mutex::default() })
    }

    async fn exchange(&self, mut stream: UnixStream, ask: &PeersAsk) -> Result<PeersAnswer, WireError> {
        write_message(&mut stream, ask).await?;
        let answer = read_message(&mut stream).await?;
        let answer = answer.ok_or_else(|| io::Error::new(io::ErrorKind::UnexpectedEof, "the daemon hung up"))?;
        let mut idle = locked(&self.idle);
        if idle.len() < IDLE_MAX {
            idle.push(stream);
        }
        Ok(answer)
    }

    async fn ask(&self, ask: &PeersAsk) -> Result<PeersAnswer, ReplicaError> {
        let work = async {
            // One that was kept may be of a daemon that is gone. All that is asked may be asked twice.
            let kept = locked(&self.idle).pop();
            if let Some(stream) = kept
                && let Ok(answer) = self.exchange(stream, ask).await
            {
                return Ok(answer);
            }
            let stream = UnixStream::connect(&self.socket).await.map_err(|e| away(format!("this node's daemon: {e}")))?;
            self.exchange(stream, ask).await.map_err(|e| away(format!("this node's daemon: {e}")))
        };
        tokio::time::timeout(ANSWER_PATIENCE, work).await.unwrap_or_else(|_| Err(away("this node's daemon does not answer")))
    }

    /// Who keeps this session's copies.
    ///
    /// # Errors
    /// [`ReplicaError::Away`].
    pub async fn set(&self, session: SessionId) -> Result<Set, ReplicaError> {
        match self.ask(&PeersAsk::Set { session }).await? {
            PeersAnswer::Set { epoch, holders, members } => Ok(Set { epoch, holders, members }),
            PeersAnswer::Away { why } => Err(away(why)),
            PeersAnswer::Copy { .. } | PeersAnswer::Done {} => Err(away("the daemon answered something else")),
        }
    }

    /// Says that a call of this session was bought whole. A daemon that is away takes its checkpoints by its own times.
    pub async fn bought(&self, session: SessionId) {
        if let Err(e) = self.ask(&PeersAsk::Bought { session }).await {
            tracing::debug!(session = %session, error = %e, "the daemon was not told of a bought call");
        }
    }

    /// Asks a holder; never gives `Sealed` or `Away` as an answer.
    ///
    /// # Errors
    /// [`ReplicaError`].
    pub async fn copy(&self, to: u64, session: SessionId, epoch: u64, copy: CopyAsk) -> Result<CopyAnswer, ReplicaError> {
        match self.ask(&PeersAsk::Copy { to, session, epoch, copy }).await? {
            PeersAnswer::Copy { copy: CopyAnswer::Sealed { epoch } } => Err(ReplicaError::Sealed(epoch)),
            PeersAnswer::Copy { copy: CopyAnswer::Away { why } } => Err(away(format!("node {to}: {why}"))),
            PeersAnswer::Copy { copy } => Ok(copy),
            PeersAnswer::Away { why } => Err(away(format!("node {to}: {why}"))),
            PeersAnswer::Set { .. } | PeersAnswer::Done {} => Err(away("the daemon answered something else")),
        }
    }
}

/// The replica set of one session of this node.
pub struct FleetReplica {
    peers: Arc<Peers>,
    session: SessionId,
    /// The session's journal folder.
    dir: PathBuf,
    /// Lines that a holder is known to have, all of this owner's.
    have: Mutex<BTreeMap<u64, u64>>,
    set: Mutex<Option<(Instant, Set)>>,
    /// The hash at the end of so many lines: those of the last append.
    end: Mutex<(u64, String)>,
}

impl FleetReplica {
    /// Of the session whose journal is below `journals`.
    pub fn new(peers: Arc<Peers>, session: SessionId, journals: &Path) -> Self {
        let dir = journals.join(session.to_hex());
        Self { peers, session, dir, have: Mutex::default(), set: Mutex::default(), end: Mutex::default() }
    }

    async fn holders(&self, epoch: u64) -> Result<Vec<u64>, ReplicaError> {
        let kept = locked(&self.set).clone().filter(|(at, _)| at.elapsed() < SET_AGE).map(|(_, set)| set);
        let set = match kept {
            Some(set) => set,
            None => {
                let set = self.peers.set(self.session).await?;
                *locked(&self.set) = Some((Instant::now(), set.clone()));
                set
            }
        };
        if set.epoch > epoch {
            return Err(ReplicaError::Sealed(set.epoch));
        }
        Ok(set.holders)
    }

    /// All must have done it; what any of them has done stays done.
    fn all<T>(&self, done: Vec<Result<T, ReplicaError>>) -> Result<Vec<T>, ReplicaError> {
        let (mut good, mut bad) = (Vec::new(), None);
        for d in done {
            match (d, &bad) {
                (Ok(t), _) => good.push(t),
                (Err(e), Some(ReplicaError::Sealed(_))) => drop(e),
                (Err(e), _) => bad = Some(e),
            }
        }
        match bad {
            None => Ok(good),
            Some(e) => {
                // Others may keep the copies by now.
                *locked(&self.set) = None;
                Err(e)
            }
        }
    }

    async fn ask(&self, to: u64, epoch: u64, copy: CopyAsk) -> Result<CopyAnswer, ReplicaError> {
        self.peers.copy(to, self.session, epoch, copy).await
    }

    /// Brings one holder up to the end of `lines`, the first of which is line `from`.
    async fn bring(&self, to: u64, epoch: u64, from: u64, lines: &[Vec<u8>]) -> Result<(), ReplicaError> {
        let end = from + lines.len() as u64;
        let known = locked(&self.have).get(&to).copied();
        let (mut at, mut catching_up) = match known {
            Some(n) => (n.min(end), n < from),
            None => match self.ask(to, epoch, CopyAsk::Seal {}).await? {
                CopyAnswer::Stands { lines, .. } => (lines.min(end), true),
                other => return Err(away(format!("node {to} answered {other:?}"))),
            },
        };
        locked(&self.have).remove(&to);
        let mut back = 0;
        loop {
            let (before, some) = self.slice(at, from, lines).await?;
            let next = at + some.len() as u64;
            if catching_up {
                self.bodies_of(to, epoch, &some).await?;
            }
            match self.ask(to, epoch, CopyAsk::Append { from: at, before, lines: some, all: next == end }).await? {
                CopyAnswer::Stands { .. } if next == end => break,
                CopyAnswer::Stands { .. } => at = next,
                CopyAnswer::Behind { lines } if back < BACK_MAX => {
                    (at, catching_up) = (lines.min(end), true);
                    back += 1;
                }
                other => return Err(away(format!("node {to} answered {other:?}"))),
            }
        }
        locked(&self.have).insert(to, end);
        Ok(())
    }

    /// The hash before line `at`, and lines from there on, as many as a message takes.
    async fn slice(&self, at: u64, from: u64, lines: &[Vec<u8>]) -> Result<(String, Vec<String>), ReplicaError> {
        let text = |l: &Vec<u8>| String::from_utf8(l.clone()).map(|t| t.trim_end_matches('\n').to_owned()).map_err(away);
        let here = usize::try_from(at.saturating_sub(from)).unwrap_or(usize::MAX);
        let of = |line: Option<String>| line.as_deref().and_then(end_hash).unwrap_or("").to_owned();
        let known = Some(locked(&self.end).clone()).filter(|(n, hash)| *n == at && !hash.is_empty());
        let before = if at > from {
            of(lines.get(here - 1).map(text).transpose()?)
        } else if let Some((_, hash)) = known {
            hash
        } else if at > 0 {
            of(self.read(at - 1, 1, u64::MAX).await?.pop())
        } else {
            String::new()
        };
        if at < from {
            return Ok((before, self.read(at, LINES_BYTES_MAX, from - at).await?));
        }
        let (mut out, mut bytes) = (Vec::new(), 0);
        for line in lines.get(here..).unwrap_or(&[]) {
            bytes += line.len();
            if bytes > LINES_BYTES_MAX && !out.is_empty() {
                break;
            }
            out.push(text(line)?);
        }
        Ok((before, out))
    }

    /// Durable lines of the journal's file: at least one, then as many as fit in `bytes`, at most `count`.
    async fn read(&self, at: u64, bytes: usize, count: u64) -> Result<Vec<String>, ReplicaError> {
        let path = self.dir.join("ledger.jsonl");
        let work = tokio::task::spawn_blocking(move || {
            let mut reader = BufReader::new(std::fs::File::open(path)?);
            let mut skipped = Vec::new();
            for _ in 0..at {
                skipped.clear();
                reader.read_until(b'\n', &mut skipped)?;
            }
            let (mut out, mut sum) = (Vec::new(), 0);
            while (out.len() as u64) < count {
                let mut line = String::new();
                sum += reader.by_ref().read_line(&mut line)?;
                if !line.ends_with('\n') || (sum > bytes && !out.is_empty()) {
                    break;
                }
                line.pop();
                out.push(line);
                if sum >= bytes {
                    break;
                }
            }
            Ok::<_, io::Error>(out)
        });
        work.await.map_err(away)?.map_err(away)
    }

    /// Gives a holder that catches up the answers that these lines speak of.
    async fn bodies_of(&self, to: u64, epoch: u64, lines: &[String]) -> Result<(), ReplicaError> {
        for line in lines {
            let Ok(Line { entry: Entry::Completed(c), .. }) = serde_json::from_str::<Line>(line) else { continue };
            for (part, kind) in [(BodyPart::Head, "head"), (BodyPart::Answer, "resp")] {
                let Ok(file) = std::fs::File::open(self.dir.join("bodies").join(format!("{}.{kind}", c.of))) else { continue };
                let len = file.metadata().map_err(away)?.len();
                let mut at = 0;
                while at < len {
                    let n = usize::try_from(len - at).unwrap_or(usize::MAX).min(PIECE_BYTES_MAX);
                    let mut piece = vec![0; n];
                    file.read_exact_at(&mut piece, at).map_err(away)?;
                    let last = at + n as u64 == len;
                    let ask = CopyAsk::Body { seq: c.of, part, offset: at, hex: hex::encode(piece), last };
                    self.ask(to, epoch, ask).await?;
                    at += n as u64;
                }
            }
        }
        Ok(())
    }

    async fn put(
        &self,
        to: u64,
        epoch: u64,
        seq: u64,
        part: BodyPart,
        (mut offset, bytes): (u64, &Bytes),
    ) -> Result<(), ReplicaError> {
        let mut left = bytes.len();
        for piece in bytes.chunks(PIECE_BYTES_MAX) {
            left -= piece.len();
            let ask = CopyAsk::Body { seq, part, offset, hex: hex::encode(piece), last: left == 0 };
            match self.ask(to, epoch, ask).await? {
                CopyAnswer::Stands { .. } => offset += piece.len() as u64,
                other => return Err(away(format!("node {to} answered {other:?}"))),
            }
        }
        Ok(())
    }
}

impl Replica for FleetReplica {
    fn append(&self, _: SessionId, epoch: u64, from: u64, lines: Arc<Vec<Vec<u8>>>) -> Reply<'_, ()> {
        Box::pin(async move {
            let holders = self.holders(epoch).await?;
            let done = join_all(holders.iter().map(|to| self.bring(*to, epoch, from, &lines))).await;
            self.all(done)?;
            let last = lines.last().map(|l| String::from_utf8_lossy(l).trim_end().to_owned());
            if let Some(hash) = last.as_deref().and_then(end_hash) {
                *locked(&self.end) = (from + lines.len() as u64, hash.to_owned());
            }
            Ok(())
        })
    }

    fn body(&self, _: SessionId, epoch: u64, seq: u64, part: Part, offset: u64, bytes: Bytes) -> Reply<'_, ()> {
        let part = match part {
            Part::Request => BodyPart::Request,
            Part::Head => BodyPart::Head,
            Part::Answer => BodyPart::Answer,
        };
        Box::pin(async move {
            let holders = self.holders(epoch).await?;
            let done = join_all(holders.iter().map(|to| self.put(*to, epoch, seq, part, (offset, &bytes)))).await;
            self.all(done).map(|_| ())
        })
    }

    fn seal(&self, _: SessionId, epoch: u64) -> Reply<'_, u64> {
        Box::pin(async move {
            let holders = self.holders(epoch).await?;
            let done = join_all(holders.iter().map(|to| self.ask(*to, epoch, CopyAsk::Seal {}))).await;
            let lines = |a: &CopyAnswer| if let CopyAnswer::Stands { lines, .. } = a { *lines } else { 0 };
            Ok(self.all(done)?.iter().map(lines).max().unwrap_or(0))
        })
    }
}
