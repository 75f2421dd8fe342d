//! Finds control sequences in a terminal's byte stream (ECMA-48 and xterm's ctlseqs page). Pure and bounded: it keeps at
//! most [`KEEP_MAX`] bytes of a sequence, and never changes what passes.

/// Bytes kept of one sequence; longer ones are recognised by their beginning.
pub const KEEP_MAX: usize = 128;

/// A complete control sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Seq {
    /// `CSI …`: parameters, intermediates and the final byte.
    Csi(Vec<u8>),
    /// `OSC …` without its end.
    Osc(Vec<u8>),
    /// `DCS …` without its end.
    Dcs(Vec<u8>),
    /// `ESC` and what follows, of any other kind.
    Esc(Vec<u8>),
}

/// What one byte was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Not part of a sequence.
    Plain,
    /// Part of a sequence that is not complete.
    Inside,
    /// The last byte of this sequence.
    Done(Seq),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Ground,
    Esc,
    EscMiddle,
    Csi,
    Text { kind: u8 },
    TextEsc { kind: u8 },
}

/// The parser.
#[derive(Debug)]
pub struct Parser {
    state: State,
    kept: Vec<u8>,
}

impl Default for Parser {
    fn default() -> Self {
        Self { state: State::Ground, kept: vec![] }
    }
}

impl Parser {
    /// Forgets a sequence in progress.
    pub fn reset(&mut self) {
        *self = Self::default();
    }
    /// Takes the next byte.
    pub fn push(&mut self, b: u8) -> Step {
        match (self.state, b) {
            (State::TextEsc { kind }, b'\\') => self.done(|k| text(kind, k)),
            (State::Text { kind }, 0x1b) => self.go(State::TextEsc { kind }),
            (State::Text { kind: b']' }, 0x07) => self.done(Seq::Osc),
            (_, 0x1b) => {
                self.kept.clear();
                self.go(State::Esc)
            }
            (State::Ground, _) => Step::Plain,
            (_, 0x18 | 0x1a) => {
                self.reset();
                Step::Plain
            }
            (State::Text { .. }, _) => self.keep(b),
            (State::Esc | State::TextEsc { .. }, b'[') => self.go(State::Csi),
            (State::Esc | State::TextEsc { .. }, b']' | b'P' | b'_' | b'^' | b'X') => self.go(State::Text { kind: b }),
            (State::Esc | State::TextEsc { .. } | State::EscMiddle, 0x20..=0x2f) => {
                self.state = State::EscMiddle;
                self.keep(b)
            }
            (State::Csi, 0x40..=0x7e) => {
                self.keep_last(b);
                self.done(Seq::Csi)
            }
            (State::Csi, _) => self.keep(b),
            (State::Esc | State::TextEsc { .. } | State::EscMiddle, _) => {
                self.keep_last(b);
                self.done(Seq::Esc)
            }
        }
    }

    fn go(&mut self, to: State) -> Step {
        if !matches!(to, State::TextEsc { .. }) {
            self.kept.clear();
        }
        self.state = to;
        Step::Inside
    }
    fn keep(&mut self, b: u8) -> Step {
        if self.kept.len() < KEEP_MAX {
            self.kept.push(b);
        }
        Step::Inside
    }
    fn keep_last(&mut self, b: u8) {
        self.kept.truncate(KEEP_MAX);
        self.kept.push(b);
    }
    fn done(&mut self, make: impl FnOnce(Vec<u8>) -> Seq) -> Step {
        self.state = State::Ground;
        Step::Done(make(std::mem::take(&mut self.kept)))
    }
}

fn text(kind: u8, kept: Vec<u8>) -> Seq {
    match kind {
        b']' => Seq::Osc(kept),
        b'P' => Seq::Dcs(kept),
        _ => Seq::Esc(vec![kind]),
    }
}

/// The parts of a CSI sequence: private marker (0 if none), numbers (0 if empty), intermediates, final byte.
pub fn csi_parts(body: &[u8]) -> Option<(u8, Vec<u32>, Vec<u8>, u8)> {
    let (&last, rest) = body.split_last()?;
    let (mark, rest) = match rest.first() {
        Some(m @ b'<'..=b'?') => (*m, &rest[1..]),
        _ => (0, rest),
    };
    let params = rest.iter().take_while(|b| (0x30..=0x3b).contains(*b)).count();
    let numbers = rest[..params]
        .split(|b| *b == b';')
        .map(|n| {
            let main = n.split(|b| *b == b':').next().unwrap_or_default();
            main.iter().fold(0u32, |a, d| a.saturating_mul(10).saturating_add(u32::from(d.saturating_sub(b'0'))))
        })
        .collect();
    Some((mark, numbers, rest[params..].to_vec(), last))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(bytes: &[u8]) -> Vec<Seq> {
        let mut p = Parser::default();
        bytes
            .iter()
            .filter_map(|b| match p.push(*b) {
                Step::Done(s) => Some(s),
                Step::Plain | Step::Inside => None,
            })
            .collect()
    }

    #[test]
    fn sequences_of_every_kind_are_found() {
        assert_eq!(
            all(b"a\x1b[?25lb\x1b]11;?\x07c\x1bP$qm\x1b\\\x1b(0\x1b=\x1b]10;?\x1b\\\x1b[1 q"),
            vec![
                Seq::Csi(b"?25l".to_vec()),
                Seq::Osc(b"11;?".to_vec()),
                Seq::Dcs(b"$qm".to_vec()),
                Seq::Esc(b"(0".to_vec()),
                Seq::Esc(b"=".to_vec()),
                Seq::Osc(b"10;?".to_vec()),
                Seq::Csi(b"1 q".to_vec()),
            ]
        );
    }

    #[test]
    fn broken_and_endless_sequences_do_not_grow_or_hide_the_next() {
        let mut bytes = b"\x1b]".to_vec();
        bytes.extend(std::iter::repeat_n(b'x', 100_000));
        bytes.extend_from_slice(b"\x1b[?1049h\x1b[12\x1b[?25l\x1b[3\x18m");
        let mut p = Parser::default();
        let mut found = vec![];
        for b in bytes {
            if let Step::Done(s) = p.push(b) {
                found.push(s);
            }
            assert!(p.kept.len() <= KEEP_MAX + 1);
        }
        assert_eq!(found, vec![Seq::Csi(b"?1049h".to_vec()), Seq::Csi(b"?25l".to_vec())]);
    }

    #[test]
    fn csi_parts_are_read() {
        assert_eq!(csi_parts(b"?1000;1006h"), Some((b'?', vec![1000, 1006], vec![], b'h')));
        assert_eq!(csi_parts(b"c"), Some((0, vec![0], vec![], b'c')));
        assert_eq!(csi_parts(b"?25$p"), Some((b'?', vec![25], b"$".to_vec(), b'p')));
        assert_eq!(csi_parts(b"99999999999999m").map(|p| p.1), Some(vec![u32::MAX]));
        assert_eq!(csi_parts(b""), None);
    }
}
