//! What is on the disk when a session is opened: the chain checked, a torn last line cut off, open purchases marked unknown.

use super::bodies::Bodies;
use super::commit::Journal;
use crate::host::files;
use crate::host::session::{ForkedFrom, OpenError, never_sent};
use ks_gateway::ledger::{Chain, Completed, Entry, Ledger, LedgerError, Line};
use ks_gateway::replay::Replay;
use ks_proto::SessionId;
use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// An opened journal.
pub struct Recovered {
    /// It, ready to be written.
    pub journal: Journal,
    /// Its lines.
    pub lines: Vec<Line>,
    /// The machine as it stood.
    pub replay: Replay,
}

/// Reads the journal in `dir`, or makes one: of a fork if `parent` is given.
///
/// # Errors
/// [`OpenError`]; nothing is changed then but a torn end.
pub fn recover(dir: &Path, id: SessionId, parent: Option<&ForkedFrom>, free_bytes: u64) -> Result<Recovered, OpenError> {
    let failed = |source| OpenError::Io { session: id, source };
    let bodies_dir = dir.join("bodies");
    files::make_dir(&bodies_dir).map_err(failed)?;
    let path = dir.join("ledger.jsonl");
    let open = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(&path);
    let mut file = open.map_err(failed)?;
    let text = whole_lines(&mut file).map_err(failed)?;
    let damaged = |e: LedgerError| OpenError::Damaged { session: id, why: e.to_string() };
    let ledger = Ledger::read(&id.to_hex(), &text).map_err(damaged)?;
    let mut chain = ledger.chain();
    let mut lines: Vec<Line> = ledger.lines.into_iter().map(|(line, _)| line).collect();
    if let (Some(p), true) = (parent, lines.is_empty()) {
        chain = Chain::fork(&id.to_hex(), p.at_seq, p.at_hash);
    }
    let more = additions(id, parent, &mut chain, &mut lines);
    if !more.is_empty() {
        file.write_all_at(&more, text.len() as u64).map_err(failed)?;
    }
    file.sync_data().map_err(failed)?;
    files::sync_dir(dir).map_err(failed)?;
    let mut replay = match parent {
        None => Replay::default(),
        Some(ForkedFrom { session, at_seq, known: Some((machine, _)), .. }) => {
            Replay::fork_of(&session.to_hex(), machine, *at_seq)
        }
        Some(ForkedFrom { at_seq, known: None, .. }) => Replay::fork_of_unknown(*at_seq),
    };
    lines.iter().for_each(|l| replay.load(l));
    let count = lines.len() as u64;
    let journal = Journal::new(path, file, chain, count, Bodies::new(bodies_dir), free_bytes).map_err(failed)?;
    Ok(Recovered { journal, lines, replay })
}

/// The file's whole lines; what follows the last newline was never durable and is cut off.
fn whole_lines(file: &mut File) -> io::Result<String> {
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    let whole = bytes.iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1);
    if whole < bytes.len() {
        tracing::warn!(bytes = bytes.len() - whole, "the journal's last line was torn and is cut off");
        file.set_len(whole as u64)?;
        bytes.truncate(whole);
    }
    String::from_utf8(bytes).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e.to_string()))
}

/// Lines that are missing: where a fork comes from, and the unknown end of each open purchase.
fn additions(id: SessionId, parent: Option<&ForkedFrom>, chain: &mut Chain, lines: &mut Vec<Line>) -> Vec<u8> {
    let mut out = Vec::new();
    let mut add = |entry: Entry, lines: &mut Vec<Line>| {
        let (line, text) = chain.append(files::unix_ms(), entry);
        out.extend_from_slice(text.as_bytes());
        out.push(b'\n');
        lines.push(line);
    };
    if let Some(p) = parent.filter(|_| lines.is_empty()) {
        add(Entry::Origin { from: p.session.to_hex(), at_seq: p.at_seq, at_hash: p.at_hash }, lines);
    }
    let mut open = BTreeSet::new();
    for line in lines.iter() {
        match &line.entry {
            Entry::Intent(_) => drop(open.insert(line.seq)),
            Entry::Completed(c) => drop(open.remove(&c.of)),
            Entry::Origin { .. }
            | Entry::Timeline { .. }
            | Entry::Served { .. }
            | Entry::Diverged { .. }
            | Entry::Resolved { .. }
            | Entry::Egress { .. } => {}
        }
    }
    for of in open {
        tracing::warn!(session = %id, seq = of, "a call was under way when the gateway ended: its end is unknown");
        add(Entry::Completed(Box::new(unknown(of))), lines);
    }
    out
}

fn unknown(of: u64) -> Completed {
    Completed { error: Some("the gateway's process ended while the call was under way".to_owned()), ..never_sent(of) }
}
