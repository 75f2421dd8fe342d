//! A bounded little-endian reader and writer, the base of every binary format here.

/// Why bytes from outside were refused. `what` names the format and field.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The bytes end before the field does.
    #[error("{what}: truncated, {need} bytes needed at offset {at} and {have} left")]
    Truncated { what: &'static str, at: usize, need: usize, have: usize },
    /// The first bytes are not this format's.
    #[error("{what}: not this format (magic {got})")]
    Magic { what: &'static str, got: String },
    /// A version that this program does not read.
    #[error("{what}: format version {got} is not known here (this program reads {known}); use a newer KeepState")]
    Version { what: &'static str, got: u32, known: u32 },
    /// A value outside its range.
    #[error("{what}: {why}")]
    Value { what: &'static str, why: String },
    /// A checksum or hash that does not match.
    #[error("{what}: hash mismatch, expected {expected}, computed {computed}")]
    Hash { what: &'static str, expected: String, computed: String },
    /// Authenticated decryption failed: wrong key or changed bytes.
    #[error("{what}: authentication failed (wrong key or changed bytes)")]
    Sealed { what: &'static str },
}

/// Reads fields in order; every read checks what is left first.
pub struct Reader<'a> {
    what: &'static str,
    buf: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    /// A reader over `buf`; `what` names the format in errors.
    pub fn new(what: &'static str, buf: &'a [u8]) -> Self {
        Self { what, buf, at: 0 }
    }
    /// Bytes not yet read.
    pub fn left(&self) -> usize {
        self.buf.len() - self.at
    }
    /// The next `n` bytes.
    pub fn take(&mut self, n: usize) -> Result<&'a [u8], DecodeError> {
        if n > self.left() {
            return Err(DecodeError::Truncated { what: self.what, at: self.at, need: n, have: self.left() });
        }
        let s = &self.buf[self.at..self.at + n];
        self.at += n;
        Ok(s)
    }
    /// The next `N` bytes as an array.
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N)?);
        Ok(out)
    }
    /// One byte.
    pub fn u8(&mut self) -> Result<u8, DecodeError> {
        Ok(self.array::<1>()?[0])
    }
    /// Two bytes, little endian.
    pub fn u16(&mut self) -> Result<u16, DecodeError> {
        Ok(u16::from_le_bytes(self.array()?))
    }
    /// Four bytes, little endian.
    pub fn u32(&mut self) -> Result<u32, DecodeError> {
        Ok(u32::from_le_bytes(self.array()?))
    }
    /// Eight bytes, little endian.
    pub fn u64(&mut self) -> Result<u64, DecodeError> {
        Ok(u64::from_le_bytes(self.array()?))
    }
    /// A u16 length and that many bytes of UTF-8.
    pub fn text(&mut self) -> Result<String, DecodeError> {
        let n = usize::from(self.u16()?);
        let what = self.what;
        let s = std::str::from_utf8(self.take(n)?)
            .map_err(|e| DecodeError::Value { what, why: format!("text is not UTF-8: {e}") })?;
        Ok(s.to_owned())
    }
    /// A u32 count of items of `item_bytes` each, refused before any allocation if they cannot all be there.
    pub fn count(&mut self, item_bytes: usize) -> Result<usize, DecodeError> {
        let n = self.u32()? as usize;
        let need = n.saturating_mul(item_bytes);
        if need > self.left() {
            return Err(DecodeError::Truncated { what: self.what, at: self.at, need, have: self.left() });
        }
        Ok(n)
    }
    /// The magic bytes, or an error that shows what is there.
    pub fn magic(&mut self, magic: &[u8]) -> Result<(), DecodeError> {
        let what = self.what;
        let got = self.take(magic.len())?;
        if got == magic { Ok(()) } else { Err(DecodeError::Magic { what, got: hex::encode(got) }) }
    }
    /// Refuses trailing bytes.
    pub fn end(&self) -> Result<(), DecodeError> {
        if self.left() == 0 {
            Ok(())
        } else {
            Err(DecodeError::Value { what: self.what, why: format!("{} bytes after the end", self.left()) })
        }
    }
    /// An error about a value of this format.
    pub fn bad(&self, why: impl Into<String>) -> DecodeError {
        DecodeError::Value { what: self.what, why: why.into() }
    }
}

/// Appends fields; the counterpart of [`Reader`].
#[derive(Default)]
pub struct Writer {
    buf: Vec<u8>,
}

impl Writer {
    /// An empty writer.
    pub fn new() -> Self {
        Self::default()
    }
    /// Raw bytes.
    pub fn raw(&mut self, b: &[u8]) -> &mut Self {
        self.buf.extend_from_slice(b);
        self
    }
    /// One byte.
    pub fn u8(&mut self, v: u8) -> &mut Self {
        self.raw(&[v])
    }
    /// Two bytes, little endian.
    pub fn u16(&mut self, v: u16) -> &mut Self {
        self.raw(&v.to_le_bytes())
    }
    /// Four bytes, little endian.
    pub fn u32(&mut self, v: u32) -> &mut Self {
        self.raw(&v.to_le_bytes())
    }
    /// Eight bytes, little endian.
    pub fn u64(&mut self, v: u64) -> &mut Self {
        self.raw(&v.to_le_bytes())
    }
    /// A u16 length and the text.
    ///
    /// # Panics
    /// If the text is longer than 65,535 bytes: the caller bounds what it stores.
    pub fn text(&mut self, s: &str) -> &mut Self {
        let n = u16::try_from(s.len()).expect("text fields are bounded to 65,535 bytes by their owners");
        self.u16(n).raw(s.as_bytes())
    }
    /// A u32 count.
    ///
    /// # Panics
    /// If there are more than 2^32 items.
    pub fn count(&mut self, n: usize) -> &mut Self {
        self.u32(u32::try_from(n).expect("counts are bounded to u32 by their owners"))
    }
    /// The bytes written.
    pub fn finish(self) -> Vec<u8> {
        self.buf
    }
}
