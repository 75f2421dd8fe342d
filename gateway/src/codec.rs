//! Encodings of bodies: a decoded copy is read, the raw bytes are forwarded.

use flate2::write::{MultiGzDecoder, ZlibDecoder};
use std::io::Write;
use zstd::stream::raw::{DParameter, Decoder as Raw, InBuffer, Operation, OutBuffer};

/// An encoding that can be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encoding {
    /// None.
    Identity,
    /// gzip.
    Gzip,
    /// zlib, which HTTP calls deflate.
    Deflate,
    /// Zstandard.
    Zstd,
}

/// A body that could not be decoded.
#[derive(Debug, thiserror::Error)]
pub enum CodecError {
    /// An encoding that nobody here reads.
    #[error("the content encoding {0:?} is not one of gzip, deflate, zstd; send the body plain or in one of these")]
    Unknown(String),
    /// Not what it says it is.
    #[error("the body is not valid {0:?}")]
    Broken(Encoding, #[source] std::io::Error),
    /// More bytes than allowed.
    #[error("the decoded body has more than {max} bytes")]
    TooLong {
        /// The most.
        max: usize,
    },
}

/// What is asked of a provider, so that its answers can be read.
pub const ACCEPT_ENCODING: &str = "gzip, deflate, zstd";

impl Encoding {
    /// From the value of `content-encoding`.
    pub fn parse(value: Option<&str>) -> Result<Self, CodecError> {
        match value.unwrap_or("").trim().to_ascii_lowercase().as_str() {
            "" | "identity" => Ok(Encoding::Identity),
            "gzip" | "x-gzip" => Ok(Encoding::Gzip),
            "deflate" => Ok(Encoding::Deflate),
            "zstd" => Ok(Encoding::Zstd),
            other => Err(CodecError::Unknown(other.chars().take(80).collect())),
        }
    }
    /// A client's `accept-encoding` without what we cannot read; none if nothing is left (send `identity`).
    pub fn restrict(accept: &str) -> Option<String> {
        let kept: Vec<&str> = accept
            .split(',')
            .map(str::trim)
            .filter(|a| matches!(a.split(';').next().unwrap_or("").trim(), "gzip" | "deflate" | "zstd" | "identity"))
            .collect();
        (!kept.is_empty()).then(|| kept.join(", "))
    }
}

/// Input that is given to a deflate decoder at a time: it becomes at most a thousand times as much.
const STEP: usize = 1024;
/// Room for the output of a zstd decoder.
const ROOM: usize = 64 * 1024;
/// Largest window of a zstd frame, as a power of two: 8 MiB, what RFC 9659 lets HTTP use.
const WINDOW_LOG_MAX: u32 = 23;

/// An incremental decoder. What it hands out comes in pieces of at most about one MiB, however much the input unpacks to.
pub struct Decoder {
    encoding: Encoding,
    kind: Kind,
    begun: bool,
}

enum Kind {
    Identity,
    Gzip(Box<MultiGzDecoder<Vec<u8>>>),
    Deflate(Box<ZlibDecoder<Vec<u8>>>),
    Zstd { raw: Box<Raw<'static>>, frame_ended: bool },
}

impl Decoder {
    /// A decoder of `encoding`.
    pub fn new(encoding: Encoding) -> Result<Self, CodecError> {
        let kind = match encoding {
            Encoding::Identity => Kind::Identity,
            Encoding::Gzip => Kind::Gzip(Box::new(MultiGzDecoder::new(Vec::new()))),
            Encoding::Deflate => Kind::Deflate(Box::new(ZlibDecoder::new(Vec::new()))),
            Encoding::Zstd => {
                let broken = |e| CodecError::Broken(Encoding::Zstd, e);
                let mut raw = Raw::new().map_err(broken)?;
                raw.set_parameter(DParameter::WindowLogMax(WINDOW_LOG_MAX)).map_err(broken)?;
                Kind::Zstd { raw: Box::new(raw), frame_ended: true }
            }
        };
        Ok(Self { encoding, kind, begun: false })
    }
    /// The next raw bytes; decoded ones go to `out`.
    pub fn push(&mut self, raw: &[u8], out: &mut dyn FnMut(&[u8])) -> Result<(), CodecError> {
        self.begun |= !raw.is_empty();
        let broken = |e| CodecError::Broken(self.encoding, e);
        match &mut self.kind {
            Kind::Identity => {
                if !raw.is_empty() {
                    out(raw);
                }
            }
            Kind::Gzip(d) => {
                for step in raw.chunks(STEP) {
                    d.write_all(step).and_then(|()| d.flush()).map_err(broken)?;
                    drain(d.get_mut(), out);
                }
            }
            Kind::Deflate(d) => {
                for step in raw.chunks(STEP) {
                    d.write_all(step).and_then(|()| d.flush()).map_err(broken)?;
                    drain(d.get_mut(), out);
                }
            }
            Kind::Zstd { raw: d, frame_ended } => {
                let mut room = vec![0; ROOM];
                let mut input = InBuffer::around(raw);
                loop {
                    let mut output = OutBuffer::around(room.as_mut_slice());
                    *frame_ended = d.run(&mut input, &mut output).map_err(broken)? == 0;
                    let n = output.pos();
                    if n > 0 {
                        out(&room[..n]);
                    }
                    if input.pos() == raw.len() && (n < ROOM || *frame_ended) {
                        break;
                    }
                }
            }
        }
        Ok(())
    }
    /// The input ended; whether it was whole.
    pub fn finish(self, out: &mut dyn FnMut(&[u8])) -> bool {
        if !self.begun {
            return true;
        }
        match self.kind {
            Kind::Identity => true,
            Kind::Gzip(mut d) => {
                let whole = d.try_finish().is_ok();
                drain(d.get_mut(), out);
                whole
            }
            Kind::Deflate(mut d) => {
                let whole = d.try_finish().is_ok();
                drain(d.get_mut(), out);
                whole
            }
            Kind::Zstd { frame_ended, .. } => frame_ended,
        }
    }
}

fn drain(from: &mut Vec<u8>, out: &mut dyn FnMut(&[u8])) {
    if !from.is_empty() {
        out(from);
        from.clear();
    }
}

/// A whole body, decoded, of at most `max` bytes.
pub fn decode_all(encoding: Encoding, raw: &[u8], max: usize) -> Result<Vec<u8>, CodecError> {
    let mut all = Vec::new();
    let mut d = Decoder::new(encoding)?;
    let keep = |all: &mut Vec<u8>, piece: &[u8]| all.extend_from_slice(&piece[..piece.len().min(max + 1 - all.len())]);
    for step in raw.chunks(STEP) {
        d.push(step, &mut |piece| keep(&mut all, piece))?;
        // A bomb is not unpacked to its end.
        if all.len() > max {
            return Err(CodecError::TooLong { max });
        }
    }
    let whole = d.finish(&mut |piece| keep(&mut all, piece));
    if all.len() > max {
        return Err(CodecError::TooLong { max });
    }
    if !whole {
        return Err(CodecError::Broken(encoding, std::io::ErrorKind::UnexpectedEof.into()));
    }
    Ok(all)
}

/// Raw bytes after which a decoder had handed out so many decoded ones: what of a compressed answer may be released.
#[derive(Debug, Clone, Default)]
pub struct OffsetMap {
    /// Pairs of totals (raw, decoded), rising; those before the newest released one are forgotten.
    marks: std::collections::VecDeque<(u64, u64)>,
    released: u64,
}

impl OffsetMap {
    /// After `raw` bytes in all were pushed, `decoded` bytes in all had come out.
    pub fn note(&mut self, raw: u64, decoded: u64) {
        match self.marks.back_mut() {
            // The latest raw byte that still yields no more.
            Some(last) if last.1 == decoded => last.0 = raw,
            Some(_) | None => self.marks.push_back((raw, decoded)),
        }
    }
    /// The most raw bytes that decode to no more than `decoded` bytes. Never falls.
    pub fn raw_for(&mut self, decoded: u64) -> u64 {
        while let Some(&(raw, d)) = self.marks.front() {
            if d > decoded {
                break;
            }
            self.released = self.released.max(raw);
            // The newest mark may yet be moved.
            if self.marks.len() == 1 {
                break;
            }
            self.marks.pop_front();
        }
        self.released
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn encoded(encoding: Encoding, plain: &[u8]) -> Vec<u8> {
        match encoding {
            Encoding::Identity => plain.to_vec(),
            Encoding::Gzip => {
                let mut e = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
                e.write_all(plain).unwrap();
                e.finish().unwrap()
            }
            Encoding::Deflate => {
                let mut e = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::default());
                e.write_all(plain).unwrap();
                e.finish().unwrap()
            }
            Encoding::Zstd => zstd::encode_all(plain, 3).unwrap(),
        }
    }
    const ALL: [Encoding; 4] = [Encoding::Identity, Encoding::Gzip, Encoding::Deflate, Encoding::Zstd];

    #[test]
    fn bombs_and_cuts_are_refused() {
        let zeros = vec![0; 8 << 20];
        for e in ALL {
            let bytes = encoded(e, &zeros);
            assert!(matches!(decode_all(e, &bytes, 1 << 20), Err(CodecError::TooLong { .. })), "{e:?}");
            assert_eq!(decode_all(e, &bytes, 8 << 20).unwrap().len(), 8 << 20);
            if e != Encoding::Identity {
                assert!(decode_all(e, &bytes[..bytes.len() - 1], 8 << 20).is_err(), "{e:?}");
                let (mut d, mut largest) = (Decoder::new(e).unwrap(), 0);
                d.push(&bytes, &mut |p| largest = largest.max(p.len())).unwrap();
                assert!(largest <= 2 << 20, "{e:?} {largest}");
            }
        }
        assert!(matches!(Encoding::parse(Some("br")), Err(CodecError::Unknown(_))));
        assert_eq!(Encoding::restrict("gzip, br;q=1, zstd;q=0.5").as_deref(), Some("gzip, zstd;q=0.5"));
        assert_eq!(Encoding::restrict("br"), None);
    }

    #[test]
    fn a_compressed_answer_is_released_by_its_raw_bytes() {
        let mut m = OffsetMap::default();
        for (raw, decoded) in [(10, 0), (20, 100), (30, 100), (40, 250)] {
            m.note(raw, decoded);
        }
        assert_eq!([m.raw_for(0), m.raw_for(99), m.raw_for(100), m.raw_for(249)], [10, 10, 30, 30]);
        m.note(50, 250);
        assert_eq!([m.raw_for(250), m.raw_for(1000)], [50, 50]);
    }

    proptest! {
        #[test]
        fn any_split_decodes_the_same(plain in proptest::collection::vec(0u8..4, 0..5000), cut in 1usize..64) {
            for e in ALL {
                let bytes = encoded(e, &plain);
                let (mut d, mut all) = (Decoder::new(e).unwrap(), Vec::new());
                for piece in bytes.chunks(cut) { d.push(piece, &mut |p| all.extend_from_slice(p)).unwrap(); }
                prop_assert!(d.finish(&mut |p| all.extend_from_slice(p)));
                prop_assert_eq!(&all, &plain);
            }
        }
        #[test]
        fn hostile_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300), flip in any::<u8>(), at in 0usize..300) {
            for e in ALL {
                let _ = decode_all(e, &bytes, 1000);
                let mut good = encoded(e, &bytes);
                if let Some(b) = good.get_mut(at) { *b ^= flip; }
                let _ = decode_all(e, &good, 1000);
            }
        }
    }
}
