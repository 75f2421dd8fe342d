//! Which modes a program has set in the terminal, and the bytes that undo them. Pure.
//!
//! The bytes are right at every moment: after a crash, a kill or a lost link the terminal is as it was. What is
//! harmless to reset is always reset; what is not (leaving the alternate screen moves the cursor, popping keyboard
//! flags takes the shell's) only when the program has set it.

use crate::sequences::{Parser, Seq, Step, csi_parts};
use std::collections::BTreeSet;

/// Private modes that are on in a fresh terminal.
const ON_BY_DEFAULT: [u32; 2] = [7, 25];
/// The modes whose reset is harmless: mouse (1000-1006, 1015, 1016), focus, paste, cursor keys.
const ALWAYS_OFF: &[u8] =
    b"\x1b[?1000l\x1b[?1001l\x1b[?1002l\x1b[?1003l\x1b[?1004l\x1b[?1005l\x1b[?1006l\x1b[?1015l\x1b[?1016l\x1b[?2004l\x1b[?1l";
const ALWAYS_OFF_MODES: [u32; 11] = [1, 1000, 1001, 1002, 1003, 1004, 1005, 1006, 1015, 1016, 2004];
/// Keypad numeric, autowrap on, cursor visible, plain text, ASCII in G0 and G0 in use.
const ALWAYS_AFTER: &[u8] = b"\x1b>\x1b[?7h\x1b[?25h\x1b[0m\x1b(B\x0f";
/// Modes that swap screens.
const SCREENS: [u32; 3] = [47, 1047, 1049];
/// Modes whose default differs between terminals: a person's setting, left alone.
const NOT_OURS: [u32; 11] = [2, 3, 8, 12, 40, 45, 1007, 1034, 1035, 1036, 1039];
/// Modes remembered; a hostile stream cannot make the set grow without end.
const MODES_MAX: usize = 64;

/// The tracker.
#[derive(Debug, Default)]
pub struct Modes {
    parser: Parser,
    /// Private modes that differ from a fresh terminal, screens apart.
    changed: BTreeSet<u32>,
    screen: Option<u32>,
    /// Keyboard flags pushed (kitty protocol), on the main and the alternate screen.
    pushed: [u32; 2],
    other_keys: bool,
    cursor_style: bool,
    region: bool,
}

impl Modes {
    /// Looks at output on its way to the terminal. True when [`Modes::reset`] has changed.
    pub fn watch(&mut self, bytes: &[u8]) -> bool {
        let mut changed = false;
        for &b in bytes {
            if let Step::Done(seq) = self.parser.push(b) {
                changed |= match seq {
                    Seq::Csi(body) => self.csi(&body),
                    Seq::Esc(e) if e == b"c" => self.forget(),
                    Seq::Osc(_) | Seq::Dcs(_) | Seq::Esc(_) => false,
                };
            }
        }
        changed
    }

    /// What undoes all of it.
    pub fn reset(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(256);
        // End a sequence that was cut in the middle, else the first reset would be taken as its rest.
        out.extend_from_slice(b"\x18");
        for m in &self.changed {
            let on = ON_BY_DEFAULT.contains(m);
            out.extend_from_slice(format!("\x1b[?{m}{}", if on { 'h' } else { 'l' }).as_bytes());
        }
        out.extend_from_slice(ALWAYS_OFF);
        if self.other_keys {
            out.extend_from_slice(b"\x1b[>4m");
        }
        if self.cursor_style {
            out.extend_from_slice(b"\x1b[0 q");
        }
        if self.region {
            out.extend_from_slice(b"\x1b7\x1b[r\x1b8");
        }
        if let Some(s) = self.screen {
            Self::pop(self.pushed[1], &mut out);
            out.extend_from_slice(format!("\x1b[?{s}l").as_bytes());
        }
        Self::pop(self.pushed[0], &mut out);
        out.extend_from_slice(ALWAYS_AFTER);
        out
    }

    /// The terminal has been reset; nothing is set any more.
    pub fn forget(&mut self) -> bool {
        *self = Self::default();
        true
    }

    fn pop(n: u32, out: &mut Vec<u8>) {
        if n > 0 {
            out.extend_from_slice(format!("\x1b[<{n}u").as_bytes());
        }
    }

    fn csi(&mut self, body: &[u8]) -> bool {
        let Some((mark, numbers, middle, last)) = csi_parts(body) else { return false };
        match (mark, middle.as_slice(), last) {
            (b'?', b"", b'h') => numbers.iter().fold(false, |c, m| self.private(*m, true) | c),
            (b'?', b"", b'l') => numbers.iter().fold(false, |c, m| self.private(*m, false) | c),
            (b'>', b"", b'u') => {
                let n = &mut self.pushed[usize::from(self.screen.is_some())];
                *n = n.saturating_add(1);
                true
            }
            (b'<', b"", b'u') => {
                let n = &mut self.pushed[usize::from(self.screen.is_some())];
                *n = n.saturating_sub(numbers.first().copied().unwrap_or(0).max(1));
                true
            }
            (b'>', b"", b'm') if numbers.first() == Some(&4) => {
                self.other_keys = numbers.get(1).is_some_and(|v| *v > 0);
                true
            }
            (0, b" ", b'q') => {
                self.cursor_style = numbers.first().is_some_and(|v| *v > 0);
                true
            }
            (0, b"", b'r') => {
                self.region = numbers.iter().any(|n| *n > 0);
                true
            }
            (0, b"!", b'p') => {
                let screen = self.screen;
                self.forget();
                self.screen = screen;
                true
            }
            _ => false,
        }
    }

    fn private(&mut self, mode: u32, on: bool) -> bool {
        if NOT_OURS.contains(&mode) || ALWAYS_OFF_MODES.contains(&mode) {
            return false;
        }
        if SCREENS.contains(&mode) {
            let was = self.screen;
            self.screen = on.then_some(mode);
            if !on {
                self.pushed[1] = 0;
            }
            return was != self.screen;
        }
        let differs = on != ON_BY_DEFAULT.contains(&mode);
        if !differs {
            return self.changed.remove(&mode);
        }
        self.changed.len() < MODES_MAX && self.changed.insert(mode)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(bytes: &[u8]) -> String {
        let mut m = Modes::default();
        m.watch(bytes);
        String::from_utf8(m.reset()).unwrap()
    }

    #[test]
    fn everything_a_full_screen_program_sets_is_undone() {
        let got = after(b"\x1b[?1049h\x1b[?1000;1002;1006h\x1b[?2004h\x1b[?1004h\x1b[?25l\x1b[?1h\x1b=\x1b[>1u\x1b[>4;2m\x1b[2 q\x1b[1;20r\x1b[?2026h");
        for want in [
            "\x1b[?1000l",
            "\x1b[?1002l",
            "\x1b[?1003l",
            "\x1b[?1005l",
            "\x1b[?1006l",
            "\x1b[?1004l",
            "\x1b[?2004l",
            "\x1b[?25h",
            "\x1b[?1l",
            "\x1b>",
            "\x1b[<1u\x1b[?1049l",
            "\x1b[>4m",
            "\x1b[0 q",
            "\x1b[r",
            "\x1b[?2026l",
            "\x1b[0m",
        ] {
            assert!(got.contains(want), "{want:?} not in {got:?}");
        }
    }

    #[test]
    fn what_is_not_harmless_is_undone_only_when_set() {
        let got = after(b"plain text\x1b[31mred");
        for no in ["?1049l", "u", "\x1b[r"] {
            assert!(!got.contains(no), "{no} in {got:?}");
        }
        let got = after(b"\x1b[?1049h\x1b[>1u\x1b[<u\x1b[?1049l\x1b[>5u\x1b[>5u\x1b[<u");
        assert!(!got.contains("?1049l") && got.contains("\x1b[<1u"), "{got:?}");
        let got = after(b"\x1b[?12h\x1b[?1007l");
        assert!(!got.contains("?12") && !got.contains("?1007"), "{got:?}");
    }

    #[test]
    fn sequences_split_over_reads_count_and_a_hostile_stream_does_not_grow() {
        let mut m = Modes::default();
        assert!(!m.watch(b"\x1b[?10"));
        assert!(m.watch(b"49h"));
        assert!(String::from_utf8(m.reset()).unwrap().contains("?1049l"));
        for n in 3000..9000 {
            m.watch(format!("\x1b[?{n}h").as_bytes());
        }
        assert!(m.reset().len() < 2000, "{}", m.reset().len());
    }

    #[test]
    fn the_programs_own_reset_is_believed() {
        assert_eq!(after(b"\x1b[?1049h\x1b[?25l\x1b[?2026h\x1bc"), after(b""));
    }
}
