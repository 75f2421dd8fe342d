//! Copies of other nodes' journals, kept for the case that their owner dies.
//!
//! ```text
//! DIR/copies/SESSION/ledger.jsonl, bodies/…   as in a journal of its own
//!                    copy.json                 {"sealed": E, "written": E}
//! ```
//!
//! `sealed` is the newest owner's epoch that was heard of: nothing of an older one is taken. `written` is the epoch of the owner whose
//! whole ledger stood here last. Lines are appended in order, and are durable when it is answered. A line that differs from what is
//! there replaces it, and all after it, only under an epoch above `written`: the newer owner has settled what stands.
//! A copy becomes a journal, and a journal a copy, by renaming its folder; there is never both.

use super::files;
use super::locked;
use crate::limits::ANSWER_BYTES_MAX;
use ks_gateway::ledger::LINE_BYTES_MAX;
use ks_proto::SessionId;
use ks_proto::copies::{BodyPart, CopyAnswer, CopyAsk, LINES_BYTES_MAX, PIECE_BYTES_MAX};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

const META: &str = "copy.json";
const LEDGER: &str = "ledger.jsonl";

/// Which epochs a folder knows of.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Epochs {
    /// Nothing of an older owner is taken.
    pub sealed: u64,
    /// The owner whose whole ledger this was last; in a journal, the one that writes it.
    pub written: u64,
}

/// The epochs of a folder; zeros if it says nothing.
///
/// # Errors
/// If the file cannot be read as what it is.
pub fn epochs(dir: &Path) -> io::Result<Epochs> {
    match std::fs::read(dir.join(META)) {
        Ok(bytes) => Ok(serde_json::from_slice(&bytes)?),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Epochs::default()),
        Err(e) => Err(e),
    }
}

fn note(dir: &Path, epochs: Epochs) -> io::Result<()> {
    files::write_atomic(&dir.join(META), &serde_json::to_vec(&epochs)?)
}

/// The hash with which a line ends: `"hash":"<64 digits>"}`.
pub fn end_hash(line: &str) -> Option<&str> {
    let (_, hash) = line.strip_suffix("\"}")?.split_at_checked(line.len().checked_sub(66)?)?;
    hash.bytes().all(|b| b.is_ascii_hexdigit()).then_some(hash)
}

type Slot = Arc<Mutex<Option<Held>>>;

/// All copies of a node. Every call blocks on the disk.
pub struct Copies {
    dir: PathBuf,
    journals: PathBuf,
    free_bytes: u64,
    held: Mutex<BTreeMap<SessionId, Slot>>,
}

/// One copy, as it was read.
struct Held {
    dir: PathBuf,
    file: File,
    /// Where each line ends, its line feed counted.
    ends: Vec<u64>,
    epochs: Epochs,
}

impl Copies {
    /// Below the gateway's folder.
    pub fn new(gateway: &Path, free_bytes: u64) -> Self {
        Self { dir: gateway.join("copies"), journals: gateway.join("journal"), free_bytes, held: Mutex::default() }
    }

    fn slot(&self, id: SessionId) -> Slot {
        locked(&self.held).entry(id).or_default().clone()
    }

    /// Sessions of which there is a copy.
    ///
    /// # Errors
    /// As the disk says.
    pub fn list(&self) -> io::Result<Vec<SessionId>> {
        let entries = match std::fs::read_dir(&self.dir) {
            Ok(e) => e,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
            Err(e) => return Err(e),
        };
        entries.map(|e| Ok(e?.file_name().to_str().and_then(|n| n.parse().ok()))).filter_map(Result::transpose).collect()
    }

    /// Drops a copy.
    ///
    /// # Errors
    /// As the disk says.
    pub fn forget(&self, id: SessionId) -> io::Result<()> {
        let slot = self.slot(id);
        let mut held = locked(&slot);
        *held = None;
        locked(&self.held).remove(&id);
        files::gone(std::fs::remove_dir_all(self.dir.join(id.to_hex())))
    }

    /// Carries out what the owner at `epoch` asks.
    pub fn answer(&self, id: SessionId, epoch: u64, ask: CopyAsk) -> CopyAnswer {
        let slot = self.slot(id);
        let mut held = locked(&slot);
        let done = (|| {
            if held.is_none() {
                *held = Some(Held::open(&self.dir.join(id.to_hex()))?);
            }
            let Some(copy) = held.as_mut() else { return Err(io::Error::other("it was not opened")) };
            copy.heard(epoch)?;
            if copy.epochs.sealed > epoch {
                return Ok(CopyAnswer::Sealed { epoch: copy.epochs.sealed });
            }
            if matches!(ask, CopyAsk::Append { .. } | CopyAsk::Body { .. }) {
                copy.room(self.free_bytes)?;
            }
            copy.carry_out(epoch, ask)
        })();
        done.unwrap_or_else(|e| {
            // What is on the disk is read again before anything else is done with it.
            *held = None;
            CopyAnswer::Away { why: e.to_string() }
        })
    }

    /// The text of a copy; "" if there is none.
    ///
    /// # Errors
    /// As the disk says.
    pub fn text(&self, id: SessionId) -> io::Result<String> {
        match std::fs::read_to_string(self.dir.join(id.to_hex()).join(LEDGER)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(String::new()),
            other => other,
        }
    }

    /// Puts another node's ledger in the place of the one here.
    ///
    /// # Errors
    /// As the disk says; the old one is then still there.
    pub fn replace(&self, id: SessionId, text: &str) -> io::Result<()> {
        let slot = self.slot(id);
        let mut held = locked(&slot);
        *held = None;
        let dir = self.dir.join(id.to_hex());
        files::make_dir(&dir)?;
        files::write_atomic(&dir.join(LEDGER), text.as_bytes())
    }

    /// Length of a body here.
    pub fn body_len(&self, id: SessionId, seq: u64, part: BodyPart) -> Option<u64> {
        std::fs::metadata(body_path(&self.dir.join(id.to_hex()), seq, part)).ok().map(|m| m.len())
    }

    /// The copy becomes this node's journal, which it writes under `epoch`. Without a copy an empty one is begun.
    ///
    /// # Errors
    /// As the disk says; it can be tried again.
    pub fn promote(&self, id: SessionId, epoch: u64) -> io::Result<()> {
        let slot = self.slot(id);
        let mut held = locked(&slot);
        *held = None;
        let (from, to) = (self.dir.join(id.to_hex()), self.journals.join(id.to_hex()));
        files::make_dir(&from)?;
        // An allow-list may have been set before there was a journal.
        files::gone(std::fs::rename(to.join("egress.json"), from.join("egress.json")))?;
        note(&from, Epochs { sealed: epoch, written: epoch })?;
        files::gone(std::fs::remove_dir_all(&to))?;
        std::fs::rename(&from, &to)?;
        files::sync_dir(&self.journals)?;
        files::sync_dir(&self.dir)
    }

    /// This node's journal becomes a copy. Nothing may have it open.
    ///
    /// # Errors
    /// As the disk says.
    pub fn demote(&self, id: SessionId) -> io::Result<()> {
        let slot = self.slot(id);
        let mut held = locked(&slot);
        *held = None;
        files::make_dir(&self.dir)?;
        let (from, to) = (self.journals.join(id.to_hex()), self.dir.join(id.to_hex()));
        files::gone(std::fs::remove_dir_all(&to))?;
        std::fs::rename(&from, &to)?;
        files::sync_dir(&self.dir)?;
        files::sync_dir(&self.journals)
    }
}

fn body_path(dir: &Path, seq: u64, part: BodyPart) -> PathBuf {
    let kind = match part {
        BodyPart::Request => "req",
        BodyPart::Head => "head",
        BodyPart::Answer => "resp",
    };
    dir.join("bodies").join(format!("{seq}.{kind}"))
}

fn damaged(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why.to_owned())
}

impl Held {
    /// Reads a copy, or begins one. A torn last line was never answered for and is cut off.
    fn open(dir: &Path) -> io::Result<Self> {
        files::make_dir(&dir.join("bodies"))?;
        let path = dir.join(LEDGER);
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
        let (mut ends, mut at, mut line) = (Vec::new(), 0, Vec::new());
        let mut reader = BufReader::new(&file);
        loop {
            line.clear();
            let n = reader.read_until(b'\n', &mut line)? as u64;
            if n == 0 {
                break;
            }
            if line.last() != Some(&b'\n') {
                tracing::warn!(copy = %dir.display(), bytes = n, "the copy's last line was torn and is cut off");
                file.set_len(at)?;
                file.sync_data()?;
                break;
            }
            at += n;
            ends.push(at);
        }
        files::sync_dir(dir)?;
        dir.parent().map_or(Ok(()), files::sync_dir)?;
        Ok(Self { dir: dir.to_owned(), file, ends, epochs: epochs(dir)? })
    }

    /// An owner's epoch: those below it are over.
    fn heard(&mut self, epoch: u64) -> io::Result<()> {
        if epoch > self.epochs.sealed {
            let epochs = Epochs { sealed: epoch, ..self.epochs };
            note(&self.dir, epochs)?;
            self.epochs = epochs;
        }
        Ok(())
    }

    fn room(&self, free_bytes: u64) -> io::Result<()> {
        let fs = rustix::fs::fstatvfs(&self.file)?;
        let free = fs.f_bavail * fs.f_frsize;
        if free < free_bytes {
            return Err(io::Error::new(io::ErrorKind::StorageFull, format!("{free} bytes are free, {free_bytes} are needed")));
        }
        Ok(())
    }

    fn lines(&self) -> u64 {
        self.ends.len() as u64
    }
    fn stands(&self) -> CopyAnswer {
        CopyAnswer::Stands { lines: self.lines(), written: self.epochs.written }
    }
    fn start(&self, line: usize) -> u64 {
        line.checked_sub(1).and_then(|before| self.ends.get(before)).copied().unwrap_or(0)
    }
    fn line(&self, line: usize) -> io::Result<String> {
        let (from, to) = (self.start(line), self.ends.get(line).copied().unwrap_or(0));
        let len = usize::try_from(to.saturating_sub(from)).unwrap_or(usize::MAX);
        if len == 0 || len > LINE_BYTES_MAX {
            return Err(damaged("a line of the copy is too long"));
        }
        let mut bytes = vec![0; len - 1];
        self.file.read_exact_at(&mut bytes, from)?;
        String::from_utf8(bytes).map_err(|_| damaged("a line of the copy is no text"))
    }
    fn hash(&self, line: usize) -> io::Result<String> {
        let text = self.line(line)?;
        end_hash(&text).map(str::to_owned).ok_or_else(|| damaged("a line of the copy has no hash"))
    }

    fn carry_out(&mut self, epoch: u64, ask: CopyAsk) -> io::Result<CopyAnswer> {
        match ask {
            CopyAsk::Seal {} => Ok(self.stands()),
            CopyAsk::Append { from, before, lines, all } => self.append(epoch, from, &before, &lines, all),
            CopyAsk::Body { seq, part, offset, hex, last } => self.body(seq, part, offset, &hex, last),
            CopyAsk::Lines { from } => self.give_lines(from),
            CopyAsk::Read { seq, part, offset } => self.give_body(seq, part, offset),
        }
    }

    fn append(&mut self, epoch: u64, from: u64, before: &str, lines: &[String], all: bool) -> io::Result<CopyAnswer> {
        if from > self.lines() {
            return Ok(CopyAnswer::Behind { lines: self.lines() });
        }
        let first = usize::try_from(from).unwrap_or(usize::MAX);
        if first > 0 && self.hash(first - 1)? != before {
            return Ok(CopyAnswer::Behind { lines: 0 });
        }
        let good = |l: &String| l.len() < LINE_BYTES_MAX && !l.contains('\n') && end_hash(l).is_some();
        if !lines.iter().all(good) {
            return Err(damaged("what is to be appended is no line of a ledger"));
        }
        let mut same = 0;
        while same < lines.len() && first + same < self.ends.len() {
            if self.line(first + same)? != lines[same] {
                break;
            }
            same += 1;
        }
        let (at, rest) = (first + same, &lines[same..]);
        if at < self.ends.len() && (!rest.is_empty() || (all && epoch > self.epochs.written)) {
            if epoch <= self.epochs.written {
                return Err(damaged("one owner wrote two different lines at the same place"));
            }
            tracing::warn!(copy = %self.dir.display(), lines = self.ends.len() - at, "lines of an ended epoch that do not stand go");
            self.ends.truncate(at);
            self.file.set_len(self.start(at))?;
            self.file.sync_data()?;
        }
        let mut text = String::new();
        let mut end = self.start(self.ends.len());
        let begins = end;
        let mut ends = Vec::with_capacity(rest.len());
        for line in rest {
            text.push_str(line);
            text.push('\n');
            end += line.len() as u64 + 1;
            ends.push(end);
        }
        if !text.is_empty() {
            self.file.write_all_at(text.as_bytes(), begins)?;
            self.file.sync_data()?;
            self.ends.extend(ends);
        }
        if all && epoch > self.epochs.written {
            let epochs = Epochs { written: epoch, ..self.epochs };
            note(&self.dir, epochs)?;
            self.epochs = epochs;
        }
        Ok(self.stands())
    }

    fn body(&mut self, seq: u64, part: BodyPart, offset: u64, hex: &str, last: bool) -> io::Result<CopyAnswer> {
        if hex.len() > 2 * PIECE_BYTES_MAX || offset > ANSWER_BYTES_MAX {
            return Err(damaged("a body is longer than any answer may be"));
        }
        let bytes = hex::decode(hex).map_err(|_| damaged("a body's bytes are no hex"))?;
        let path = body_path(&self.dir, seq, part);
        if offset == 0 {
            files::gone(std::fs::remove_file(&path))?;
        }
        let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path)?;
        if file.metadata()?.len() < offset {
            return Err(damaged("bytes of the body before these are missing"));
        }
        file.write_all_at(&bytes, offset)?;
        if last {
            file.sync_data()?;
            files::sync_dir(&self.dir.join("bodies"))?;
        }
        Ok(self.stands())
    }

    fn give_lines(&self, from: u64) -> io::Result<CopyAnswer> {
        let mut at = usize::try_from(from).unwrap_or(usize::MAX);
        let (mut lines, mut bytes) = (Vec::new(), 0);
        while at < self.ends.len() {
            let line = self.line(at)?;
            bytes += line.len();
            if bytes > LINES_BYTES_MAX && !lines.is_empty() {
                break;
            }
            lines.push(line);
            at += 1;
        }
        Ok(CopyAnswer::Lines { lines, more: at < self.ends.len() })
    }

    fn give_body(&self, seq: u64, part: BodyPart, offset: u64) -> io::Result<CopyAnswer> {
        let file = match File::open(body_path(&self.dir, seq, part)) {
            Ok(f) => f,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(CopyAnswer::Bytes { hex: String::new(), total: None }),
            Err(e) => return Err(e),
        };
        let total = file.metadata()?.len();
        let n = usize::try_from(total.saturating_sub(offset)).unwrap_or(usize::MAX).min(PIECE_BYTES_MAX);
        let mut bytes = vec![0; n];
        file.read_exact_at(&mut bytes, offset)?;
        Ok(CopyAnswer::Bytes { hex: hex::encode(bytes), total: Some(total) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: SessionId = SessionId([5; 16]);

    fn line(n: u64, who: &str) -> String {
        let text = format!("{{\"seq\":{n},\"who\":\"{who}\"");
        format!("{text},\"hash\":\"{}\"}}", blake3::hash(text.as_bytes()).to_hex())
    }

    fn append(c: &Copies, epoch: u64, from: u64, before: &str, lines: &[String], all: bool) -> CopyAnswer {
        let before = end_hash(before).unwrap_or("").to_owned();
        c.answer(ID, epoch, CopyAsk::Append { from, before, lines: lines.to_vec(), all })
    }

    fn stands(lines: u64, written: u64) -> CopyAnswer {
        CopyAnswer::Stands { lines, written }
    }

    #[test]
    fn lines_come_in_order_once_and_a_torn_end_is_cut() {
        let dir = tempfile::tempdir().unwrap();
        let c = Copies::new(dir.path(), 0);
        let l: Vec<String> = (0..5).map(|n| line(n, "a")).collect();
        assert_eq!(append(&c, 1, 1, &l[0], &l[1..2], true), CopyAnswer::Behind { lines: 0 });
        assert_eq!(append(&c, 1, 0, "", &l[..3], true), stands(3, 1));
        assert_eq!(append(&c, 1, 0, "", &l[..3], true), stands(3, 1));
        assert_eq!(append(&c, 1, 4, &l[3], &l[4..], true), CopyAnswer::Behind { lines: 3 });
        assert_eq!(append(&c, 1, 3, &l[1], &l[3..4], true), CopyAnswer::Behind { lines: 0 });
        assert_eq!(append(&c, 1, 2, &l[1], &l[2..4], true), stands(4, 1));
        // The host dies while a line is written.
        let path = dir.path().join("copies").join(ID.to_hex()).join(LEDGER);
        let whole = std::fs::read(&path).unwrap();
        for torn in 1..l[4].len() {
            std::fs::write(&path, [&whole[..], &l[4].as_bytes()[..torn]].concat()).unwrap();
            let c = Copies::new(dir.path(), 0);
            assert_eq!(c.answer(ID, 1, CopyAsk::Seal {}), stands(4, 1));
            assert_eq!(append(&c, 1, 4, &l[3], &l[4..], true), stands(5, 1));
        }
        let got = Copies::new(dir.path(), 0).answer(ID, 1, CopyAsk::Lines { from: 3 });
        assert_eq!(got, CopyAnswer::Lines { lines: l[3..].to_vec(), more: false });
        // Junk is refused and changes nothing.
        let c = Copies::new(dir.path(), 0);
        assert!(matches!(append(&c, 1, 5, &l[4], &["no line".into()], true), CopyAnswer::Away { .. }));
        assert_eq!(Copies::new(dir.path(), 0).answer(ID, 1, CopyAsk::Seal {}), stands(5, 1));
    }

    #[test]
    fn an_ended_epoch_writes_nothing_more_and_what_does_not_stand_goes() {
        let dir = tempfile::tempdir().unwrap();
        let c = Copies::new(dir.path(), 0);
        let old: Vec<String> = (0..4).map(|n| line(n, "old")).collect();
        assert_eq!(append(&c, 1, 0, "", &old, true), stands(4, 1));
        // One owner never rewrites its own lines.
        assert!(matches!(append(&c, 1, 3, &old[2], &[line(3, "other")], true), CopyAnswer::Away { .. }));
        assert_eq!(c.answer(ID, 3, CopyAsk::Seal {}), stands(4, 1));
        let c = Copies::new(dir.path(), 0);
        assert_eq!(append(&c, 2, 4, &old[3], &[line(4, "late")], true), CopyAnswer::Sealed { epoch: 3 });
        let body = CopyAsk::Body { seq: 1, part: BodyPart::Answer, offset: 0, hex: "00".into(), last: true };
        assert_eq!(c.answer(ID, 2, body), CopyAnswer::Sealed { epoch: 3 });
        // The new owner goes on from the third line: until its whole ledger is here, nothing that may stand is dropped.
        assert_eq!(append(&c, 3, 0, "", &old[..2], false), stands(4, 1));
        assert_eq!(append(&c, 3, 2, &old[1], &[old[2].clone(), line(3, "new")], false), stands(4, 1));
        assert_eq!(append(&c, 3, 4, &line(3, "new"), &[], true), stands(4, 3));
        let lines = vec![line(3, "new")];
        assert_eq!(c.answer(ID, 3, CopyAsk::Lines { from: 3 }), CopyAnswer::Lines { lines, more: false });
        // A tail beyond all that the newest owner has goes too.
        assert_eq!(append(&c, 4, 3, &old[2], &[], true), stands(3, 4));
    }

    #[test]
    fn bodies_are_whole_and_a_copy_becomes_a_journal_and_back() {
        let dir = tempfile::tempdir().unwrap();
        let c = Copies::new(dir.path(), 0);
        files::make_dir(&dir.path().join("journal")).unwrap();
        let part = BodyPart::Answer;
        let piece = |offset, hex: &str| CopyAsk::Body { seq: 7, part, offset, hex: hex.into(), last: true };
        assert_eq!(append(&c, 1, 0, "", &[line(0, "a")], true), stands(1, 1));
        assert_eq!(c.answer(ID, 1, piece(0, "0102")), stands(1, 1));
        assert!(matches!(c.answer(ID, 1, piece(3, "04")), CopyAnswer::Away { .. }));
        assert!(matches!(c.answer(ID, 1, piece(2, "zz")), CopyAnswer::Away { .. }));
        assert_eq!(c.answer(ID, 1, piece(2, "03")), stands(1, 1));
        let read = |offset| CopyAsk::Read { seq: 7, part, offset };
        assert_eq!(c.answer(ID, 1, read(1)), CopyAnswer::Bytes { hex: "0203".into(), total: Some(3) });
        c.promote(ID, 2).unwrap();
        let journal = dir.path().join("journal").join(ID.to_hex());
        assert_eq!(epochs(&journal).unwrap(), Epochs { sealed: 2, written: 2 });
        assert_eq!(std::fs::read(journal.join("bodies/7.resp")).unwrap(), [1, 2, 3]);
        c.demote(ID).unwrap();
        assert!(!journal.exists());
        assert_eq!(c.answer(ID, 1, CopyAsk::Seal {}), CopyAnswer::Sealed { epoch: 2 });
        assert_eq!(c.answer(ID, 3, CopyAsk::Seal {}), stands(1, 2));
        // A disk that is nearly full takes nothing, and says so.
        let full = Copies::new(dir.path(), u64::MAX);
        assert!(matches!(append(&full, 3, 1, &line(0, "a"), &[line(1, "a")], true), CopyAnswer::Away { .. }));
        assert_eq!(c.list().unwrap(), vec![ID]);
        c.forget(ID).unwrap();
        assert_eq!(c.list().unwrap(), vec![]);
    }
}
