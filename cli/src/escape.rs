//! The keys that `ks` keeps for itself while a terminal is attached. Pure: bytes and the passing of time in, actions out.
//!
//! ```text
//!  Line ──Enter──▶ Start ──~──▶ Held ──d──▶ Detach        Held ──HOLD_MS pass──▶ Passed (the `~` went on)
//!   ▲                │           ├──.──▶ Cut              Passed ──d──▶ Detach, ──.──▶ Cut, else as Start/Line
//!   └──other byte────┘           ├──~──▶ one `~` goes on
//!                                └──else─▶ `~` and the byte go on
//! ```
//! A lone prefix key is not held back: it goes on at the next byte, or by itself after [`HOLD_MS`]. After that the
//! second key still works; the `~` has then been typed into the program, which did not ask for anything else.
//!
//! Pasted text is never searched: what lies inside a bracketed paste, and any read of more than [`TYPED_MAX`] bytes.
//! Mouse, focus and other reports of the terminal between Enter and the prefix do not count as keys.

/// How long the prefix key waits for a second key, milliseconds.
pub const HOLD_MS: u64 = 300;
/// A read of more bytes than this is a paste, not typing.
pub const TYPED_MAX: usize = 32;
const PREFIX: u8 = b'~';

/// What is to be done with what was typed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Send these bytes.
    Send(Vec<u8>),
    /// Leave the session running and end with success.
    Detach,
    /// Give up the link.
    Cut,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    Line,
    Start,
    Held,
    Passed,
}

/// Where an escape sequence sent by the terminal itself stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Report {
    No,
    Esc,
    Csi { digits: u32, private: bool },
}

/// The machine.
#[derive(Debug)]
pub struct Escape {
    at: At,
    report: Report,
    before_report: At,
    pasting: bool,
    /// Is `d` a key of ours? Not for `ks exec -t`, whose program would die.
    detach: bool,
}

impl Escape {
    /// Starts as if Enter had just been pressed.
    pub fn new(detach: bool) -> Self {
        Self { at: At::Start, report: Report::No, before_report: At::Start, pasting: false, detach }
    }
    /// True while a prefix key waits; call [`Escape::tick`] after [`HOLD_MS`] then.
    pub fn holding(&self) -> bool {
        self.at == At::Held
    }
    /// The wait is over: the prefix key goes on.
    pub fn tick(&mut self) -> Vec<u8> {
        if self.at == At::Held {
            self.at = At::Passed;
            return vec![PREFIX];
        }
        vec![]
    }
    /// Takes one read of the terminal. Nothing follows a [`Action::Detach`] or [`Action::Cut`].
    pub fn feed(&mut self, read: &[u8]) -> Vec<Action> {
        let typed = read.len() <= TYPED_MAX;
        let mut send = Vec::with_capacity(read.len() + 1);
        for &b in read {
            let act = if typed && !self.pasting { self.key(b, &mut send) } else { self.other(b, &mut send) };
            if let Some(end) = act {
                // The prefix was part of the chord: it does not go on.
                self.at = At::Line;
                return if send.is_empty() { vec![end] } else { vec![Action::Send(send), end] };
            }
        }
        if send.is_empty() { vec![] } else { vec![Action::Send(send)] }
    }

    fn key(&mut self, b: u8, send: &mut Vec<u8>) -> Option<Action> {
        match (self.at, b) {
            (At::Held | At::Passed, b'.') => return Some(Action::Cut),
            (At::Held | At::Passed, b'd') if self.detach => return Some(Action::Detach),
            (At::Held, PREFIX) => {
                send.push(PREFIX);
                self.at = At::Line;
                return None;
            }
            (At::Held, _) => send.push(PREFIX),
            (At::Start, PREFIX) if self.report == Report::No => {
                self.at = At::Held;
                return None;
            }
            (At::Line | At::Start | At::Passed, _) => {}
        }
        self.pass(b, send);
        None
    }

    /// A byte of a paste: it is only watched for the paste's end.
    fn other(&mut self, b: u8, send: &mut Vec<u8>) -> Option<Action> {
        if self.at == At::Held {
            send.push(PREFIX);
        }
        self.pass(b, send);
        None
    }

    fn pass(&mut self, b: u8, send: &mut Vec<u8>) {
        send.push(b);
        let was = if matches!(self.at, At::Held | At::Passed) { At::Line } else { self.at };
        let plain = if b == b'\r' || b == b'\n' { At::Start } else { At::Line };
        (self.report, self.at) = match (self.report, b) {
            (_, 0x1b) => {
                self.before_report = was;
                (Report::Esc, At::Line)
            }
            (Report::Esc, b'[') => (Report::Csi { digits: 0, private: false }, At::Line),
            (Report::Csi { private, .. }, b'<' | b'?' | b'>') if !private => (Report::Csi { digits: 0, private: true }, At::Line),
            (Report::Csi { digits, private }, b'0'..=b'9') => {
                (Report::Csi { digits: digits.saturating_mul(10).saturating_add(u32::from(b - b'0')), private }, At::Line)
            }
            (Report::Csi { private, .. }, b';' | b'$') => (Report::Csi { digits: 0, private }, At::Line),
            (Report::Csi { digits: 200, private: false }, b'~') => {
                self.pasting = true;
                (Report::No, At::Line)
            }
            (Report::Csi { digits: 201, private: false }, b'~') => {
                self.pasting = false;
                (Report::No, At::Line)
            }
            // Mouse (CSI < … M/m), focus (CSI I/O) and answers to queries (CSI ? …, CSI > …, CSI r;c R) are not typed.
            (Report::Csi { private: true, .. }, _) | (Report::Csi { .. }, b'I' | b'O' | b'R') => (Report::No, self.before_report),
            (Report::Csi { .. } | Report::Esc, _) => (Report::No, At::Line),
            (Report::No, _) => (Report::No, plain),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Feeds the reads one by one; text is what would be sent, `<D>` and `<C>` the actions.
    fn check(detach: bool, reads: &[&[u8]], expected: &str) {
        let mut m = Escape::new(detach);
        let mut got = String::new();
        for r in reads {
            for a in m.feed(r) {
                match a {
                    Action::Send(b) => got.push_str(&String::from_utf8_lossy(&b)),
                    Action::Detach => got.push_str("<D>"),
                    Action::Cut => got.push_str("<C>"),
                }
            }
        }
        assert_eq!(got, expected, "{reads:?}");
    }

    #[test]
    fn enter_prefix_and_key_act_at_once_or_in_pieces() {
        check(true, &[b"ls\r~d"], "ls\r<D>");
        check(true, &[b"ls\r", b"~", b"d"], "ls\r<D>");
        check(true, &[b"~."], "<C>");
        check(true, &[b"\n~."], "\n<C>");
        let mut m = Escape::new(true);
        m.feed(b"~");
        m.feed(b"d");
        assert!(!m.holding() && m.tick().is_empty(), "the prefix was part of the chord");
    }

    #[test]
    fn the_prefix_elsewhere_is_text() {
        check(true, &[b"ls ~d\r"], "ls ~d\r");
        check(true, &[b"a~."], "a~.");
        check(true, &[b"\r~/bin\r"], "\r~/bin\r");
        check(true, &[b"\r~~."], "\r~.");
        check(true, &[b"\r~~d"], "\r~d");
        check(false, &[b"\r~d"], "\r~d");
        check(false, &[b"\r~."], "\r<C>");
        check(true, &[b"\r~\r~d"], "\r~\r<D>");
    }

    #[test]
    fn a_lone_prefix_goes_on_after_the_wait_and_the_key_still_works() {
        let mut m = Escape::new(true);
        assert_eq!(m.feed(b"\r~"), vec![Action::Send(b"\r".to_vec())]);
        assert!(m.holding());
        assert_eq!(m.tick(), b"~");
        assert!(!m.holding());
        assert_eq!(m.tick(), b"", "it goes on once");
        assert_eq!(m.feed(b"d"), vec![Action::Detach]);

        let mut m = Escape::new(true);
        m.feed(b"\r~");
        m.tick();
        assert_eq!(m.feed(b"/x\r"), vec![Action::Send(b"/x\r".to_vec())]);
        assert_eq!(m.feed(b"~."), vec![Action::Cut]);
    }

    #[test]
    fn pasted_text_is_never_searched() {
        check(true, &[b"\x1b[200~a\r~d\r~.\x1b[201~"], "\x1b[200~a\r~d\r~.\x1b[201~");
        check(true, &[b"\x1b[200~", b"x\r", b"~", b".", b"\x1b[201~", b"\r~."], "\x1b[200~x\r~.\x1b[201~\r<C>");
        let long = b"line\r~d line\r~. line\r~d line\r~. end".to_vec();
        assert!(long.len() > TYPED_MAX);
        check(true, &[&long], &String::from_utf8(long.clone()).unwrap());
    }

    #[test]
    fn reports_of_the_terminal_do_not_break_the_chord() {
        check(true, &[b"\r", b"\x1b[<35;10;20M", b"~d"], "\r\x1b[<35;10;20M<D>");
        check(true, &[b"\r", b"\x1b[I", b"~."], "\r\x1b[I<C>");
        check(true, &[b"\r", b"\x1b[A", b"~."], "\r\x1b[A~.");
    }

    #[test]
    fn every_byte_that_is_no_chord_arrives_in_order_whatever_the_reads() {
        let mut seed = 7u32;
        let mut all = Vec::new();
        let mut out = Vec::new();
        let mut m = Escape::new(true);
        for _ in 0..2000 {
            let mut read = Vec::new();
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            for _ in 0..(seed >> 20) % 60 + 1 {
                seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                // Any byte but the prefix, so that nothing is taken away.
                let b = (seed >> 24) as u8;
                read.push(if b == PREFIX { b'x' } else { b });
            }
            all.extend_from_slice(&read);
            for a in m.feed(&read) {
                match a {
                    Action::Send(b) => out.extend_from_slice(&b),
                    Action::Detach | Action::Cut => panic!("no chord was typed"),
                }
            }
        }
        assert!(all == out, "{} bytes in, {} out", all.len(), out.len());
    }
}
