//! Answers of the terminal to questions that a program asked over a link that has since been lost. Pure.
//!
//! Programs ask the terminal what it is; the terminal answers on the keyboard side. When the link breaks between
//! question and answer, the answer would reach the next program as typed text. So: questions are counted by kind on
//! their way out, answers on their way in; after a reconnect the first answers of each kind that is still owed
//! belong to the old link (a terminal answers in order) and are dropped. Nothing that a person types looks like them.

use crate::sequences::{Parser, Seq, Step, csi_parts};
use std::collections::BTreeMap;

/// How long after a reconnect answers can still be late, milliseconds.
pub const LATE_MS: u64 = 5000;
/// How long the beginning of an answer may wait for its rest, milliseconds. The Escape key waits as long, and only
/// while late answers are owed.
pub const REST_MS: u64 = 50;
const HELD_MAX: usize = 64 * 1024;
const KINDS_MAX: usize = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Device1,
    Device2,
    Device3,
    Status,
    Cursor,
    CursorPage,
    Mode,
    Version,
    Keyboard,
    Window,
    Setting,
    Capability,
    Scheme,
    Osc(u16),
}

/// The counter and filter.
#[derive(Debug, Default)]
pub struct Replies {
    out: Parser,
    inp: Parser,
    asked: BTreeMap<Kind, u32>,
    late: BTreeMap<Kind, u32>,
    held: Vec<u8>,
}

impl Replies {
    /// Looks at output on its way to the terminal.
    pub fn watch_output(&mut self, bytes: &[u8]) {
        for &b in bytes {
            if let Step::Done(seq) = self.out.push(b)
                && let Some(k) = question(&seq)
                && (self.asked.len() < KINDS_MAX || self.asked.contains_key(&k))
            {
                *self.asked.entry(k).or_default() += 1;
            }
        }
    }
    /// The link was lost: what is still unanswered is owed to nobody.
    pub fn link_lost(&mut self) {
        for (k, n) in std::mem::take(&mut self.asked) {
            *self.late.entry(k).or_default() += n;
        }
        self.out.reset();
    }
    /// [`LATE_MS`] have passed since the reconnect.
    pub fn expire(&mut self) -> Vec<u8> {
        self.late.clear();
        self.release()
    }
    /// True while answers are owed to nobody.
    pub fn expecting_late(&self) -> bool {
        !self.late.is_empty()
    }
    /// True while a question has no answer yet.
    pub fn expecting(&self) -> bool {
        !self.asked.is_empty() || !self.late.is_empty()
    }
    /// True while the beginning of a sequence is kept; call [`Replies::release`] after [`REST_MS`].
    pub fn holding(&self) -> bool {
        !self.held.is_empty()
    }
    /// The rest did not come: what was kept goes on.
    pub fn release(&mut self) -> Vec<u8> {
        self.inp.reset();
        std::mem::take(&mut self.held)
    }
    /// Takes one read of the keyboard side and returns what may go on.
    pub fn filter_input(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut pass = Vec::with_capacity(bytes.len());
        for &b in bytes {
            let step = self.inp.push(b);
            self.held.push(b);
            match step {
                Step::Inside if self.late.is_empty() || self.held.len() > HELD_MAX => pass.append(&mut self.held),
                Step::Inside => {}
                Step::Plain => pass.append(&mut self.held),
                Step::Done(seq) => {
                    if answer(&seq).is_some_and(|k| self.take(k)) {
                        self.held.clear();
                    }
                    pass.append(&mut self.held);
                }
            }
        }
        pass
    }

    /// Counts an answer; true if it is a late one.
    fn take(&mut self, k: Kind) -> bool {
        let one = |m: &mut BTreeMap<Kind, u32>| match m.get_mut(&k) {
            Some(n) if *n > 1 => {
                *n -= 1;
                true
            }
            Some(_) => m.remove(&k).is_some(),
            None => false,
        };
        if one(&mut self.late) {
            return true;
        }
        one(&mut self.asked);
        false
    }
}

fn osc_number(body: &[u8]) -> Option<u16> {
    let digits = body.iter().take_while(|b| b.is_ascii_digit()).count();
    std::str::from_utf8(&body[..digits]).ok()?.parse().ok()
}

fn question(seq: &Seq) -> Option<Kind> {
    match seq {
        Seq::Csi(body) => {
            let (mark, n, middle, last) = csi_parts(body)?;
            let first = n.first().copied().unwrap_or(0);
            match (mark, middle.as_slice(), last, first) {
                (0, b"", b'c', 0) => Some(Kind::Device1),
                (b'>', b"", b'c', 0) => Some(Kind::Device2),
                (b'=', b"", b'c', 0) => Some(Kind::Device3),
                (0, b"", b'n', 5) => Some(Kind::Status),
                (0, b"", b'n', 6) => Some(Kind::Cursor),
                (b'?', b"", b'n', 6) => Some(Kind::CursorPage),
                (b'?', b"", b'n', 996) => Some(Kind::Scheme),
                (_, b"$", b'p', _) => Some(Kind::Mode),
                (b'>', b"", b'q', 0) => Some(Kind::Version),
                (b'?', b"", b'u', _) => Some(Kind::Keyboard),
                (0, b"", b't', 11 | 13..=16 | 18 | 19) => Some(Kind::Window),
                _ => None,
            }
        }
        Seq::Osc(body) if body.ends_with(b";?") => osc_number(body).map(Kind::Osc),
        Seq::Dcs(body) if body.starts_with(b"$q") => Some(Kind::Setting),
        Seq::Dcs(body) if body.starts_with(b"+q") => Some(Kind::Capability),
        Seq::Osc(_) | Seq::Dcs(_) | Seq::Esc(_) => None,
    }
}

fn answer(seq: &Seq) -> Option<Kind> {
    match seq {
        Seq::Csi(body) => {
            let (mark, n, middle, last) = csi_parts(body)?;
            match (mark, middle.as_slice(), last) {
                (b'?', b"", b'c') => Some(Kind::Device1),
                (b'>', b"", b'c') => Some(Kind::Device2),
                (0, b"", b'n') => Some(Kind::Status),
                (0, b"", b'R') => Some(Kind::Cursor),
                (b'?', b"", b'R') => Some(Kind::CursorPage),
                (b'?', b"", b'n') if n.first() == Some(&997) => Some(Kind::Scheme),
                (_, b"$", b'y') => Some(Kind::Mode),
                (b'?', b"", b'u') => Some(Kind::Keyboard),
                (0, b"", b't') => Some(Kind::Window),
                _ => None,
            }
        }
        Seq::Osc(body) => osc_number(body).map(Kind::Osc),
        Seq::Dcs(body) if body.starts_with(b"!|") => Some(Kind::Device3),
        Seq::Dcs(body) if body.starts_with(b">|") => Some(Kind::Version),
        Seq::Dcs(body) if body.get(1..3) == Some(b"$r") => Some(Kind::Setting),
        Seq::Dcs(body) if body.get(1..3) == Some(b"+r") => Some(Kind::Capability),
        Seq::Dcs(_) | Seq::Esc(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_to_the_old_link_are_dropped_and_to_the_new_one_pass() {
        let mut r = Replies::default();
        r.watch_output(b"\x1b[c\x1b[>c\x1b]11;?\x07hello\x1b[>q");
        assert_eq!(r.filter_input(b"\x1b[>41;1c"), b"\x1b[>41;1c", "answered on the old link");
        r.link_lost();
        assert!(r.expecting_late());
        r.watch_output(b"\x1b[c\x1b]11;?\x07");
        let late = b"\x1b[?62c\x1b]11;rgb:0/0/0\x1b\\\x1bP>|term 1\x1b\\";
        assert_eq!(r.filter_input(late), b"", "owed to the old link");
        let own = b"\x1b[?62c\x1b]11;rgb:0/0/0\x1b\\";
        assert_eq!(r.filter_input(own), own);
        assert!(!r.expecting());
    }

    #[test]
    fn typed_keys_pass_even_while_answers_are_owed() {
        let mut r = Replies::default();
        r.watch_output(b"\x1b[6n\x1b[c");
        r.link_lost();
        assert_eq!(r.filter_input(b"ls\r\x1b[A\x1b[1;5C\x1bx"), b"ls\r\x1b[A\x1b[1;5C\x1bx");
        assert_eq!(r.filter_input(b"a\x1b[12;4"), b"a");
        assert!(r.holding());
        assert_eq!(r.filter_input(b"0Rb"), b"b", "split over reads");
        assert_eq!(r.filter_input(b"\x1b"), b"", "the Escape key waits for what may follow");
        assert_eq!(r.release(), b"\x1b");
        assert_eq!(r.expire(), b"");
        assert_eq!(r.filter_input(b"\x1b"), b"\x1b", "and does not wait when nothing is owed");
        assert_eq!(r.filter_input(b"[?62c"), b"[?62c");
    }

    #[test]
    fn answers_that_come_while_the_link_is_down_are_counted() {
        let mut r = Replies::default();
        r.watch_output(b"\x1b[c");
        r.link_lost();
        r.filter_input(b"\x1b[?62c");
        assert!(!r.expecting_late());
    }
}
