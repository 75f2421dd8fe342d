//! A hash of a JSON document that sees neither the order of keys nor how strings are escaped, and sees everything else: number
//! lexemes, the order of arrays, names that occur twice.
//!
//! Each value's hash is BLAKE3 of a tag and its content: `n`/`t`/`f`; `d` and a number's lexeme; `s` and a text's bytes; `a` and
//! its elements' hashes; `o` and, sorted by name (equal names in their order), each name's hash and its value's. So nothing of the
//! document is copied, and memory is bounded by the names of the open objects.

use super::DEPTH_MAX;
use std::borrow::Cow;

/// Why there is no canonical hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum JsonError {
    /// Not one JSON document.
    #[error("byte {at} is not JSON")]
    Syntax {
        /// Where.
        at: usize,
    },
    /// Nested deeper than [`DEPTH_MAX`].
    #[error("the JSON is nested deeper than {DEPTH_MAX} levels")]
    Deep,
}

/// What a rule says of one value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Canonical {
    /// It counts.
    Keep,
    /// It does not; neither does its name.
    Drop,
}

/// Decides by path (`#` for an element) which values count, and what of a text counts.
pub trait Rule {
    /// Whether an object's member counts.
    fn member(&self, path: &[&str]) -> Canonical;
    /// The part of a text that counts.
    fn text<'a>(&self, path: &[&str], text: &'a [u8]) -> &'a [u8];
}

/// The hash of a document.
pub fn digest(doc: &[u8], rule: &dyn Rule) -> Result<[u8; 32], JsonError> {
    let mut p = Parser { doc, at: 0, rule };
    p.space();
    let hash = p.value(&mut Vec::new())?;
    p.space();
    if p.at == doc.len() { Ok(hash) } else { Err(p.bad()) }
}

struct Parser<'a> {
    doc: &'a [u8],
    at: usize,
    rule: &'a dyn Rule,
}

fn tagged(tag: u8, content: &[u8]) -> [u8; 32] {
    let mut h = blake3::Hasher::new();
    h.update(&[tag]);
    h.update(content);
    *h.finalize().as_bytes()
}

impl<'a> Parser<'a> {
    fn bad(&self) -> JsonError {
        JsonError::Syntax { at: self.at }
    }
    fn peek(&self) -> Option<u8> {
        self.doc.get(self.at).copied()
    }
    fn space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }
    fn expect(&mut self, b: u8) -> Result<(), JsonError> {
        if self.peek() == Some(b) {
            self.at += 1;
            self.space();
            Ok(())
        } else {
            Err(self.bad())
        }
    }
    fn value(&mut self, path: &mut Vec<Cow<'a, str>>) -> Result<[u8; 32], JsonError> {
        if path.len() > DEPTH_MAX {
            return Err(JsonError::Deep);
        }
        match self.peek() {
            Some(b'{') => self.object(path),
            Some(b'[') => self.array(path),
            Some(b'"') => {
                let text = self.string()?;
                let names: Vec<&str> = path.iter().map(AsRef::as_ref).collect();
                Ok(tagged(b's', self.rule.text(&names, &text)))
            }
            Some(b'-' | b'0'..=b'9') => {
                let from = self.at;
                while matches!(self.peek(), Some(b'0'..=b'9' | b'-' | b'+' | b'.' | b'e' | b'E')) {
                    self.at += 1;
                }
                Ok(tagged(b'd', &self.doc[from..self.at]))
            }
            Some(first) => {
                let word: &[u8] = match first {
                    b'n' => b"null",
                    b't' => b"true",
                    b'f' => b"false",
                    _ => return Err(self.bad()),
                };
                if !self.doc[self.at..].starts_with(word) {
                    return Err(self.bad());
                }
                self.at += word.len();
                Ok(tagged(first, b""))
            }
            None => Err(self.bad()),
        }
    }
    fn array(&mut self, path: &mut Vec<Cow<'a, str>>) -> Result<[u8; 32], JsonError> {
        let mut h = blake3::Hasher::new();
        h.update(b"a");
        self.expect(b'[')?;
        path.push(Cow::Borrowed("#"));
        if self.peek() == Some(b']') {
            self.at += 1;
        } else {
            loop {
                h.update(&self.value(path)?);
                self.space();
                match self.peek() {
                    Some(b',') => self.expect(b',')?,
                    Some(b']') => break self.at += 1,
                    Some(_) | None => return Err(self.bad()),
                }
            }
        }
        path.pop();
        Ok(*h.finalize().as_bytes())
    }
    fn object(&mut self, path: &mut Vec<Cow<'a, str>>) -> Result<[u8; 32], JsonError> {
        let mut members: Vec<([u8; 32], [u8; 32])> = Vec::new();
        self.expect(b'{')?;
        if self.peek() == Some(b'}') {
            self.at += 1;
        } else {
            loop {
                if self.peek() != Some(b'"') {
                    return Err(self.bad());
                }
                let name = self.string()?;
                let name_hash = tagged(b's', &name);
                path.push(match name {
                    Cow::Borrowed(b) => String::from_utf8_lossy(b),
                    Cow::Owned(b) => Cow::Owned(String::from_utf8_lossy(&b).into_owned()),
                });
                self.space();
                self.expect(b':')?;
                let value = self.value(path)?;
                let names: Vec<&str> = path.iter().map(AsRef::as_ref).collect();
                if self.rule.member(&names) == Canonical::Keep {
                    members.push((name_hash, value));
                }
                path.pop();
                self.space();
                match self.peek() {
                    Some(b',') => self.expect(b',')?,
                    Some(b'}') => break self.at += 1,
                    Some(_) | None => return Err(self.bad()),
                }
            }
        }
        // Stable: a name that occurs twice keeps its order.
        members.sort_by_key(|m| m.0);
        let mut h = blake3::Hasher::new();
        h.update(b"o");
        for (name, value) in &members {
            h.update(name);
            h.update(value);
        }
        Ok(*h.finalize().as_bytes())
    }
    /// A string's bytes, unescaped; half a surrogate pair becomes the three bytes that its code would have.
    fn string(&mut self) -> Result<Cow<'a, [u8]>, JsonError> {
        self.at += 1;
        let rest = &self.doc[self.at..];
        let n = memchr::memchr2(b'"', b'\\', rest).ok_or(JsonError::Syntax { at: self.doc.len() })?;
        if rest[n] == b'"' {
            self.at += n + 1;
            return Ok(Cow::Borrowed(&rest[..n]));
        }
        let mut out = Vec::new();
        loop {
            let rest = &self.doc[self.at..];
            let n = memchr::memchr2(b'"', b'\\', rest).ok_or(JsonError::Syntax { at: self.doc.len() })?;
            out.extend_from_slice(&rest[..n]);
            self.at += n + 1;
            if rest[n] == b'"' {
                return Ok(Cow::Owned(out));
            }
            self.escape(&mut out)?;
        }
    }
    fn escape(&mut self, out: &mut Vec<u8>) -> Result<(), JsonError> {
        let b = self.peek().ok_or_else(|| self.bad())?;
        self.at += 1;
        match super::escaped(b) {
            Some(plain) => out.push(plain),
            None if b == b'u' => {
                let mut code = self.four_digits()?;
                if (0xd800..0xdc00).contains(&code) && self.doc[self.at..].starts_with(b"\\u") {
                    let back = self.at;
                    self.at += 2;
                    let low = self.four_digits()?;
                    if (0xdc00..0xe000).contains(&low) {
                        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
                    } else {
                        self.at = back;
                    }
                }
                push_code(code, out);
            }
            None => return Err(self.bad()),
        }
        Ok(())
    }
    fn four_digits(&mut self) -> Result<u32, JsonError> {
        let digits = self.doc.get(self.at..self.at + 4).and_then(|d| std::str::from_utf8(d).ok());
        let code = digits.filter(|d| d.bytes().all(|b| b.is_ascii_hexdigit())).and_then(|d| u32::from_str_radix(d, 16).ok());
        let code = code.ok_or_else(|| self.bad())?;
        self.at += 4;
        Ok(code)
    }
}

/// UTF-8 of a code point, also of half a pair (WTF-8), which no `char` can hold.
fn push_code(code: u32, out: &mut Vec<u8>) {
    match char::from_u32(code) {
        Some(c) => out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
        None => out.extend([0xe0 | (code >> 12) as u8 & 0x0f, 0x80 | (code >> 6) as u8 & 0x3f, 0x80 | code as u8 & 0x3f]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    struct All;
    impl Rule for All {
        fn member(&self, _: &[&str]) -> Canonical {
            Canonical::Keep
        }
        fn text<'a>(&self, _: &[&str], text: &'a [u8]) -> &'a [u8] {
            text
        }
    }
    fn d(text: &str) -> Result<[u8; 32], JsonError> {
        digest(text.as_bytes(), &All)
    }

    #[test]
    fn number_lexemes_and_array_order_count_and_key_order_does_not() {
        assert_eq!(d(r#"{"a":1,"b":{"c":[1,2],"d":"x"}}"#), d(" {\"b\" : {\"d\":\"\\u0078\",\"c\":[ 1,2 ]},\n\"a\":1 } "));
        assert_eq!(d(r#""\ud83d\ude00/""#), d("\"😀\\/\""));
        for (a, b) in [
            ("1", "1.0"),
            ("1e2", "100"),
            ("[1,2]", "[2,1]"),
            ("[[1],2]", "[1,[2]]"),
            ("\"1\"", "1"),
            (r#"{"a":1,"a":2}"#, r#"{"a":2,"a":1}"#),
            (r#""\ud83d""#, r#""\ufffd""#),
            ("{}", "[]"),
            (r#"{"a":null}"#, "{}"),
        ] {
            assert!(d(a).is_ok());
            assert_ne!(d(a), d(b), "{a} {b}");
        }
    }

    #[test]
    fn what_is_not_json_is_refused() {
        for bad in ["", "{", "[1,]", "{\"a\":1,}", "tru", "\"a", "\"\\u12\"", "\"\\x\"", "1 2", "{1:2}", "[1 2]"] {
            assert!(d(bad).is_err(), "{bad}");
        }
        assert_eq!(d(&"[".repeat(100_000)), Err(JsonError::Deep));
    }

    proptest! {
        #[test]
        fn hostile_bytes_never_panic(bytes in proptest::collection::vec(
            proptest::sample::select(b"{}[]\":,\\ud80123efalsnr\xff \n".to_vec()), 0..200)) {
            let _ = digest(&bytes, &All);
        }
        #[test]
        fn it_takes_what_serde_json_takes(bytes in proptest::collection::vec(
            proptest::sample::select(b"{}[]\"\":,a1 ".to_vec()), 0..12)) {
            if serde_json::from_slice::<serde_json::Value>(&bytes).is_ok() {
                prop_assert!(digest(&bytes, &All).is_ok());
            }
        }
    }
}
