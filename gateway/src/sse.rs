//! Server-sent events, cut into pieces byte for byte: data, ends of events, everything else. Nothing is buffered but the event's
//! name; offsets are the caller's to count, one piece after another.
//!
//! Lines end at CR, LF or CRLF; U+2028 is data like any other; lines that begin with a colon are comments; one space after a
//! field's colon is not data. Source: WHATWG HTML, section 9.2.6.

use memchr::memchr2;

/// Bytes of a field's or event's name that are kept.
const NAME_MAX: usize = 64;

/// What the next bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Piece<'a> {
    /// Bytes of the event's data.
    Data(&'a [u8]),
    /// Another `data` line's colon: a line feed in the data.
    Newline,
    /// Field names, comments, line ends.
    Other,
    /// The blank line that ends an event; these bytes are its last.
    End,
    /// The LF of a CRLF whose CR was an [`Piece::End`]: belongs to the event that ended.
    Tail,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    /// The first bytes of the stream, where a byte-order mark may be; so many of its bytes have come.
    Bom(usize),
    /// A line begins.
    Line,
    /// In a field's name.
    Name,
    /// Behind the colon, where one space is skipped.
    Colon,
    /// In a value.
    Value,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Field {
    Data,
    Event,
    Ignored,
}

/// The splitter.
#[derive(Debug, Clone)]
pub struct Splitter {
    at: At,
    field: Field,
    name: Vec<u8>,
    event: Vec<u8>,
    had_data: bool,
    /// The last byte was a CR that ended a line, and whether that line was blank.
    cr: Option<bool>,
    /// Bytes have come since the last event ended.
    begun: bool,
}

impl Default for Splitter {
    fn default() -> Self {
        Self {
            at: At::Bom(0),
            field: Field::Ignored,
            name: Vec::new(),
            event: Vec::new(),
            had_data: false,
            cr: None,
            begun: false,
        }
    }
}

impl Splitter {
    /// The name of the event that is being read or has just ended; empty without one.
    pub fn event(&self) -> &str {
        std::str::from_utf8(&self.event).unwrap_or("")
    }
    /// In the middle of an event.
    pub fn in_event(&self) -> bool {
        self.begun
    }
    /// The next piece of `bytes`, which must not be empty, and how many bytes it is.
    pub fn next<'a>(&mut self, bytes: &'a [u8]) -> (usize, Piece<'a>) {
        let b = bytes[0];
        if let Some(blank) = self.cr.take()
            && b == b'\n'
        {
            return (1, if blank { Piece::Tail } else { Piece::Other });
        }
        if let At::Bom(n) = self.at {
            if b == b"\xef\xbb\xbf"[n] {
                self.at = if n == 2 { At::Line } else { At::Bom(n + 1) };
                return (1, Piece::Other);
            }
            self.at = At::Line;
        }
        if matches!(b, b'\r' | b'\n') {
            return (1, self.line_ended(b == b'\r'));
        }
        match self.at {
            At::Bom(_) | At::Line => self.line_begins(b),
            At::Name => return (1, self.in_name(b)),
            At::Colon => {
                self.at = At::Value;
                if b != b' ' {
                    return self.value(bytes);
                }
            }
            At::Value => return self.value(bytes),
        }
        (1, Piece::Other)
    }
    fn line_begins(&mut self, b: u8) {
        if !self.begun {
            self.begun = true;
            self.had_data = false;
            self.event.clear();
        }
        self.name.clear();
        self.field = Field::Ignored;
        if b == b':' {
            self.at = At::Value;
        } else {
            self.name.push(b);
            self.at = At::Name;
        }
    }
    fn in_name(&mut self, b: u8) -> Piece<'static> {
        if b != b':' {
            if self.name.len() <= NAME_MAX {
                self.name.push(b);
            }
            return Piece::Other;
        }
        self.field = match self.name.as_slice() {
            b"data" => Field::Data,
            b"event" => {
                self.event.clear();
                Field::Event
            }
            _ => Field::Ignored,
        };
        self.at = At::Colon;
        if self.field == Field::Data && self.had_data { Piece::Newline } else { Piece::Other }
    }
    fn value<'a>(&mut self, bytes: &'a [u8]) -> (usize, Piece<'a>) {
        let n = memchr2(b'\r', b'\n', bytes).unwrap_or(bytes.len());
        match self.field {
            Field::Data => return (n, Piece::Data(&bytes[..n])),
            Field::Event => {
                let room = NAME_MAX - self.event.len().min(NAME_MAX);
                self.event.extend_from_slice(&bytes[..n.min(room)]);
            }
            Field::Ignored => {}
        }
        (n, Piece::Other)
    }
    fn line_ended(&mut self, cr: bool) -> Piece<'static> {
        let blank = matches!(self.at, At::Line | At::Bom(_));
        if cr {
            self.cr = Some(blank);
        }
        if !blank && self.field == Field::Data && self.at != At::Name {
            self.had_data = true;
        }
        self.at = At::Line;
        if !blank {
            return Piece::Other;
        }
        self.begun = false;
        self.had_data = false;
        Piece::End
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Events as (name, data), and whether one is half there.
    fn events(pieces: &[&[u8]]) -> (Vec<(String, Vec<u8>)>, bool) {
        let (mut s, mut out, mut data, mut total) = (Splitter::default(), Vec::new(), Vec::new(), 0);
        for piece in pieces {
            let mut at = 0;
            while at < piece.len() {
                let (n, p) = s.next(&piece[at..]);
                match p {
                    Piece::Data(d) => data.extend_from_slice(d),
                    Piece::Newline => data.push(b'\n'),
                    Piece::End => out.push((s.event().to_owned(), std::mem::take(&mut data))),
                    Piece::Other | Piece::Tail => {}
                }
                at += n;
            }
            total += at;
        }
        assert_eq!(total, pieces.iter().map(|p| p.len()).sum::<usize>());
        (out, s.in_event())
    }

    const STREAM: &str =
        "\u{feff}: hello\ndata: a\u{2028}é\n\nevent: x\r\ndata:  b \r\ndata: c\r\n\r\ndata\rdata:d\r\rid: 1\n\n\ndata: [DONE]";

    #[test]
    fn lines_end_in_three_ways_and_data_is_kept_to_the_byte() {
        let (e, half) = events(&[STREAM.as_bytes()]);
        let want = [("", "a\u{2028}é"), ("x", " b \nc"), ("", "d"), ("", ""), ("", "")];
        assert_eq!(e, want.map(|(n, d)| (n.to_owned(), d.as_bytes().to_vec())));
        assert!(half);
    }

    proptest! {
        #[test]
        fn any_split_gives_the_same_events(cuts in proptest::collection::vec(0..STREAM.len(), 0..12)) {
            let mut cuts = cuts;
            cuts.sort_unstable();
            let (mut pieces, mut from) = (Vec::new(), 0);
            for c in cuts { pieces.push(&STREAM.as_bytes()[from..c]); from = c; }
            pieces.push(&STREAM.as_bytes()[from..]);
            prop_assert_eq!(events(&pieces), events(&[STREAM.as_bytes()]));
        }
        #[test]
        fn hostile_bytes_never_panic_and_every_byte_is_in_a_piece(bytes in proptest::collection::vec(
            proptest::sample::select(b"data: event\r\n:\xef\xbb\xbf x".to_vec()), 0..400)) {
            let pieces: Vec<&[u8]> = bytes.chunks(3).collect();
            prop_assert_eq!(events(&pieces), events(&[&bytes]));
        }
    }
}
