//! An incremental reader of one JSON document. It holds no more than the open containers' kinds, the names on the way to
//! the current value (the first [`PATH_MAX`] levels, [`NAME_MAX`] bytes each), and [`TEXT_MAX`] bytes of a text.
//!
//! ```text
//! Value ─{─► KeyOrEnd ─"─► Key ─"─► Colon ─:─► Value        any state ──what cannot be there──► Broken
//!   │ └─[─► ValueOrEnd                                      after the outermost value: Done (white space may follow)
//!   └─scalar─► After ─,─► Key | Value      After ─} ]─► After | Done
//! ```
//!
//! It is lenient about numbers' and literals' inner form and about control characters in texts, and strict about structure:
//! a document is done only when every container was closed. Source: RFC 8259.

use super::DEPTH_MAX;
use memchr::memchr2;

/// Levels whose names are kept; values below are not told.
const PATH_MAX: usize = 8;
/// Bytes of a name that are kept; a longer one matches nothing.
const NAME_MAX: usize = 40;
/// Bytes of a text, number or literal that are told.
const TEXT_MAX: usize = 256;

/// Hears what is in the document.
pub trait Sink {
    /// A container begins.
    fn open(&mut self, path: &Path<'_>, array: bool);
    /// A container ended.
    fn close(&mut self, path: &Path<'_>);
    /// A scalar.
    fn scalar(&mut self, path: &Path<'_>, value: &Scalar<'_>);
}

/// One value that is no container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scalar<'a> {
    /// `null`
    Null,
    /// `true`, `false`
    Bool(bool),
    /// Its lexeme.
    Number(&'a str),
    /// Its first bytes, unescaped.
    Text(&'a str),
}

impl Scalar<'_> {
    /// A whole number that is not negative.
    pub fn count(&self) -> Option<u64> {
        match self {
            Scalar::Number(n) => n.parse().ok(),
            Scalar::Null | Scalar::Bool(_) | Scalar::Text(_) => None,
        }
    }
    /// A text that is not empty.
    pub fn text(&self) -> Option<&str> {
        match self {
            Scalar::Text(t) if !t.is_empty() => Some(t),
            Scalar::Text(_) | Scalar::Null | Scalar::Bool(_) | Scalar::Number(_) => None,
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Level {
    array: bool,
    /// Length of the name; more than `NAME_MAX` is a name that was too long.
    len: u8,
    name: [u8; NAME_MAX],
}

/// Where a value is: names from the outermost object on, `#` for an element of an array.
#[derive(Debug)]
pub struct Path<'a> {
    levels: &'a [Level],
    at: u64,
}

impl Path<'_> {
    /// Offset in the document: of the first byte of a container that begins, else of the byte behind what is told.
    pub fn at(&self) -> u64 {
        self.at
    }
    /// The names, in `room`. `?` stands for a name too long to be kept.
    pub fn names<'b>(&'b self, room: &'b mut [&'b str; PATH_MAX]) -> &'b [&'b str] {
        for (slot, level) in room.iter_mut().zip(self.levels) {
            *slot = if level.array {
                "#"
            } else {
                level.name.get(..usize::from(level.len)).and_then(|n| std::str::from_utf8(n).ok()).unwrap_or("?")
            };
        }
        &room[..self.levels.len().min(PATH_MAX)]
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Value,
    ValueOrEnd,
    KeyOrEnd,
    Key,
    Colon,
    After,
    Text { key: bool },
    Escape { key: bool },
    Unicode { key: bool, left: u8, code: u16 },
    Word,
    Done,
    Broken,
}

/// The reader.
#[derive(Debug, Clone)]
pub struct Scan {
    state: State,
    levels: Vec<Level>,
    text: Vec<u8>,
    cut: bool,
    read: u64,
    end: Option<u64>,
}

impl Default for Scan {
    fn default() -> Self {
        Self { state: State::Value, levels: Vec::new(), text: Vec::new(), cut: false, read: 0, end: None }
    }
}

impl Scan {
    /// Back to the beginning, for the next document.
    pub fn reset(&mut self) {
        self.levels.clear();
        self.text.clear();
        *self = Self { levels: std::mem::take(&mut self.levels), text: std::mem::take(&mut self.text), ..Self::default() };
    }
    /// Offset just after the document's last byte, once it is whole and nothing but white space followed.
    pub fn end(&self) -> Option<u64> {
        (self.state == State::Done).then_some(self.end).flatten()
    }
    /// Nothing but white space has come.
    pub fn is_empty(&self) -> bool {
        self.state == State::Value && self.levels.is_empty()
    }
    /// How many containers are open.
    pub fn depth(&self) -> usize {
        self.levels.len()
    }
    /// The next bytes.
    pub fn push(&mut self, bytes: &[u8], sink: &mut dyn Sink) {
        let mut at = 0;
        while at < bytes.len() && self.state != State::Broken {
            at += self.step(&bytes[at..], sink);
        }
        self.read += (bytes.len() - at) as u64;
    }
    /// Takes at least one byte; returns how many.
    fn step(&mut self, bytes: &[u8], sink: &mut dyn Sink) -> usize {
        let b = bytes[0];
        match self.state {
            State::Text { key } => return self.in_text(bytes, key, sink),
            State::Escape { key } => self.in_escape(b, key),
            State::Unicode { key, left, code } => self.in_unicode(b, key, left, code),
            State::Word => {
                if matches!(b, b' ' | b'\t' | b'\n' | b'\r' | b',' | b']' | b'}') {
                    self.word(sink);
                    // The same byte again, in the state behind the value.
                    if self.state != State::Broken {
                        return self.step(bytes, sink);
                    }
                } else {
                    self.keep(b);
                }
            }
            State::Value
            | State::ValueOrEnd
            | State::KeyOrEnd
            | State::Key
            | State::Colon
            | State::After
            | State::Done
            | State::Broken => self.structure(b, sink),
        }
        self.read += 1;
        1
    }
    fn structure(&mut self, b: u8, sink: &mut dyn Sink) {
        self.state = match (self.state, b) {
            (s, b' ' | b'\t' | b'\n' | b'\r') => s,
            (State::Value | State::ValueOrEnd, b'{') => return self.open(false, sink),
            (State::Value | State::ValueOrEnd, b'[') => return self.open(true, sink),
            (State::Value | State::ValueOrEnd, b'"') => {
                self.begin();
                State::Text { key: false }
            }
            (State::Value | State::ValueOrEnd, b'-' | b'0'..=b'9' | b't' | b'f' | b'n') => {
                self.begin();
                self.text.push(b);
                State::Word
            }
            (State::KeyOrEnd | State::Key, b'"') => {
                self.begin();
                State::Text { key: true }
            }
            (State::Colon, b':') => State::Value,
            (State::After, b',') => match self.levels.last() {
                Some(l) if l.array => State::Value,
                Some(_) => State::Key,
                None => State::Broken,
            },
            (State::ValueOrEnd, b']') | (State::KeyOrEnd, b'}') => return self.close(b == b']', sink),
            (State::After, b']' | b'}') => return self.close(b == b']', sink),
            (
                State::Value
                | State::ValueOrEnd
                | State::KeyOrEnd
                | State::Key
                | State::Colon
                | State::After
                | State::Done
                | State::Broken
                | State::Text { .. }
                | State::Escape { .. }
                | State::Unicode { .. }
                | State::Word,
                _,
            ) => State::Broken,
        };
    }
    fn begin(&mut self) {
        self.text.clear();
        self.cut = false;
    }
    fn keep(&mut self, b: u8) {
        if self.text.len() < TEXT_MAX {
            self.text.push(b);
        } else {
            self.cut = true;
        }
    }
    fn in_text(&mut self, bytes: &[u8], key: bool, sink: &mut dyn Sink) -> usize {
        let n = memchr2(b'"', b'\\', bytes).unwrap_or(bytes.len());
        let room = TEXT_MAX - self.text.len().min(TEXT_MAX);
        self.text.extend_from_slice(&bytes[..n.min(room)]);
        self.cut |= n > room;
        let used = match bytes.get(n) {
            Some(b'\\') => {
                self.state = State::Escape { key };
                n + 1
            }
            Some(_) => {
                self.text_ended(key, n as u64 + 1, sink);
                n + 1
            }
            None => n,
        };
        self.read += used as u64;
        used
    }
    fn in_escape(&mut self, b: u8, key: bool) {
        self.state = match super::escaped(b) {
            Some(plain) => {
                self.keep(plain);
                State::Text { key }
            }
            None if b == b'u' => State::Unicode { key, left: 4, code: 0 },
            None => State::Broken,
        };
    }
    fn in_unicode(&mut self, b: u8, key: bool, left: u8, code: u16) {
        let Some(digit) = char::from(b).to_digit(16).and_then(|d| u16::try_from(d).ok()) else {
            self.state = State::Broken;
            return;
        };
        let code = code << 4 | digit;
        if left > 1 {
            self.state = State::Unicode { key, left: left - 1, code };
            return;
        }
        // Nothing that is compared here is outside the basic plane: half a pair is told as the replacement character.
        let c = char::from_u32(u32::from(code)).unwrap_or(char::REPLACEMENT_CHARACTER);
        for b in c.encode_utf8(&mut [0; 4]).bytes() {
            self.keep(b);
        }
        self.state = State::Text { key };
    }
    fn text_ended(&mut self, key: bool, used: u64, sink: &mut dyn Sink) {
        if key {
            if let Some(level) = self.levels.last_mut() {
                let fits = !self.cut && self.text.len() <= NAME_MAX;
                level.len = if fits { u8::try_from(self.text.len()).unwrap_or(u8::MAX) } else { u8::MAX };
                if fits {
                    level.name[..self.text.len()].copy_from_slice(&self.text);
                }
            }
            self.state = State::Colon;
            return;
        }
        if self.levels.len() <= PATH_MAX {
            let text = String::from_utf8_lossy(&self.text);
            sink.scalar(&Path { levels: &self.levels, at: self.read + used }, &Scalar::Text(&text));
        }
        self.value_ended(used);
    }
    fn word(&mut self, sink: &mut dyn Sink) {
        let text = std::str::from_utf8(&self.text).unwrap_or("");
        let value = match text {
            "null" => Scalar::Null,
            "true" => Scalar::Bool(true),
            "false" => Scalar::Bool(false),
            n if !self.cut && n.bytes().all(|b| matches!(b, b'0'..=b'9' | b'-' | b'+' | b'.' | b'e' | b'E')) && !n.is_empty() => {
                Scalar::Number(n)
            }
            _ => {
                self.state = State::Broken;
                return;
            }
        };
        if self.levels.len() <= PATH_MAX {
            sink.scalar(&Path { levels: &self.levels, at: self.read }, &value);
        }
        self.value_ended(0);
    }
    fn open(&mut self, array: bool, sink: &mut dyn Sink) {
        if self.levels.len() >= DEPTH_MAX {
            self.state = State::Broken;
            return;
        }
        if self.levels.len() <= PATH_MAX {
            sink.open(&Path { levels: &self.levels, at: self.read }, array);
        }
        self.levels.push(Level { array, len: 0, name: [0; NAME_MAX] });
        self.state = if array { State::ValueOrEnd } else { State::KeyOrEnd };
    }
    fn close(&mut self, array: bool, sink: &mut dyn Sink) {
        if self.levels.pop().is_none_or(|l| l.array != array) {
            self.state = State::Broken;
            return;
        }
        if self.levels.len() <= PATH_MAX {
            sink.close(&Path { levels: &self.levels, at: self.read + 1 });
        }
        self.value_ended(1);
    }
    /// A value ended `used` bytes after what is counted as read.
    fn value_ended(&mut self, used: u64) {
        if self.levels.is_empty() {
            self.end = Some(self.read + used);
            self.state = State::Done;
        } else {
            self.state = State::After;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Default)]
    struct Heard(Vec<String>);
    impl Sink for Heard {
        fn open(&mut self, path: &Path<'_>, array: bool) {
            let mut room = [""; PATH_MAX];
            self.0.push(format!("{}{}", path.names(&mut room).join("."), if array { "[" } else { "{" }));
        }
        fn close(&mut self, path: &Path<'_>) {
            let mut room = [""; PATH_MAX];
            self.0.push(format!("{}/", path.names(&mut room).join(".")));
        }
        fn scalar(&mut self, path: &Path<'_>, value: &Scalar<'_>) {
            let mut room = [""; PATH_MAX];
            self.0.push(format!("{}={value:?}", path.names(&mut room).join(".")));
        }
    }
    fn heard(pieces: &[&[u8]]) -> (Vec<String>, Option<u64>) {
        let (mut scan, mut h) = (Scan::default(), Heard::default());
        for p in pieces {
            scan.push(p, &mut h);
        }
        (h.0, scan.end())
    }

    const DOC: &str = r#" {"a":[1,{"b\n":null},[]],"c":"x\u00e9\"","d":{},"e":-1.5e3,"f":true} "#;

    #[test]
    fn it_tells_paths_and_the_end() {
        let (h, end) = heard(&[DOC.as_bytes()]);
        assert_eq!(
            h,
            [
                "{",
                "a[",
                "a.#=Number(\"1\")",
                "a.#{",
                "a.#.b\n=Null",
                "a.#/",
                "a.#[",
                "a.#/",
                "a/",
                "c=Text(\"xé\\\"\")",
                "d{",
                "d/",
                "e=Number(\"-1.5e3\")",
                "f=Bool(true)",
                "/"
            ]
        );
        assert_eq!(end, Some(DOC.len() as u64 - 1));
    }

    #[test]
    fn what_is_not_whole_or_not_json_has_no_end() {
        for bad in
            ["", "{", "[1,", "{\"a\"}", "[1}", "{}{}", "{]", "nul ", "[1]x", "\"a", "[\"\\q\"]", "[\"\\ug\"]", "01a ", "{\"a\":}"]
        {
            assert_eq!(heard(&[bad.as_bytes()]).1, None, "{bad}");
        }
        let deep = "[".repeat(DEPTH_MAX + 1) + &"]".repeat(DEPTH_MAX + 1);
        assert_eq!(heard(&[deep.as_bytes()]).1, None);
    }

    proptest! {
        #[test]
        fn any_split_tells_the_same(cuts in proptest::collection::vec(0..DOC.len(), 0..10)) {
            let mut cuts = cuts;
            cuts.sort_unstable();
            let mut pieces = Vec::new();
            let mut from = 0;
            for c in cuts { pieces.push(&DOC.as_bytes()[from..c]); from = c; }
            pieces.push(&DOC.as_bytes()[from..]);
            prop_assert_eq!(heard(&pieces), heard(&[DOC.as_bytes()]));
        }
        #[test]
        fn hostile_bytes_never_panic_and_memory_is_bounded(bytes in proptest::collection::vec(
            proptest::sample::select(b"{}[]\":,\\u0truefalsn\xff \n".to_vec()), 0..3000)) {
            let (mut scan, mut h) = (Scan::default(), Heard::default());
            for piece in bytes.chunks(7) { scan.push(piece, &mut h); }
            prop_assert!(scan.levels.len() <= DEPTH_MAX && scan.text.len() <= TEXT_MAX + 4);
        }
        /// What serde_json takes as a document, this does too, and ends it at the same byte.
        #[test]
        fn it_agrees_with_serde_json(bytes in proptest::collection::vec(
            proptest::sample::select(b"{}[]\"\":,a1 ".to_vec()), 0..12)) {
            if serde_json::from_slice::<serde_json::Value>(&bytes).is_ok() && bytes.iter().any(|b| b"{[\"".contains(b)) {
                prop_assert!(heard(&[&bytes]).1.is_some());
            }
        }
    }
}
