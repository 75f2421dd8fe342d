//! The small messages of the bulk plane, and their limits. Pure.
//!
//! A stream begins with one byte: [`BLOBS`], then iroh-blobs' protocol; or [`ASK`], then one [`Ask`] in postcard until the
//! asker's end of stream. The answer to an `Ask` is a u32 (little-endian) length and that many bytes, an [`Answer`] in
//! postcard; after `Manifest` and `File` that many raw bytes follow.

use ks_blobs::PackPlace;
use ks_proto::chunk::{Codec, OBJECT_BYTES_MAX, ObjectKind, SEAL_OVERHEAD};
use ks_proto::ids::{ChunkId, PackId};
use ks_proto::pack::{HEADER_BYTES, PACK_BYTES_MAX, PackEntry};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// First byte of a stream that carries iroh-blobs' protocol.
pub const BLOBS: u8 = 1;
/// First byte of a stream that carries an [`Ask`].
pub const ASK: u8 = 2;
/// Objects in one [`Ask::Locate`].
pub const LOCATE_MAX: usize = 4096;
/// Places of one object in an answer.
pub const PLACES_MAX: usize = 2;
/// The largest encoded [`Ask`].
pub const ASK_BYTES_MAX: usize = LOCATE_MAX * 33 + 1024;
/// The largest encoded [`Answer`], without what follows it.
pub const ANSWER_BYTES_MAX: usize = LOCATE_MAX * PLACES_MAX * (32 + 40) + 4096;
/// The longest name of a file of an image.
pub const WHICH_MAX: usize = 64;
/// The largest file of an image.
pub const IMAGE_FILE_BYTES_MAX: u64 = 4 << 30;

/// Code of a reset stream: not here, or not intact here.
pub const CODE_ABSENT: u32 = 16;
/// Code of a reset stream: this request is not served.
pub const CODE_REFUSED: u32 = 1;

/// A question to a peer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ask {
    /// The bytes of a manifest.
    Manifest { id: [u8; 32] },
    /// Where these objects lie; at most [`LOCATE_MAX`].
    Locate { ids: Vec<[u8; 32]> },
    /// Is the manifest's whole closure there?
    HaveClosure { id: [u8; 32] },
    /// A file of an image (kernel, initramfs), by name, from a byte on.
    ImageFile { image: [u8; 32], which: String, from: u64 },
}

/// A peer's answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// That many bytes follow.
    Manifest { bytes: u64 },
    /// One list of places per object asked for.
    Located(Located),
    /// See [`Ask::HaveClosure`].
    Closure { whole: bool },
    /// The file's size and BLAKE3; its bytes from the one asked for follow.
    File { bytes: u64, hash: [u8; 32] },
    /// Not there.
    Absent,
    /// Not served, and why.
    Refused { why: String },
}

/// A pack in an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pack {
    /// Its name.
    pub id: [u8; 32],
    /// Its size.
    pub bytes: u64,
    /// Its key domain.
    pub domain: u32,
}

/// One place of an object: which pack, and its row there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Index in [`Located::packs`].
    pub pack: u16,
    /// Offset in the pack.
    pub offset: u32,
    /// Sealed length.
    pub stored_len: u32,
    /// Plain length.
    pub plain_len: u32,
    /// [`ObjectKind`] as a byte.
    pub kind: u8,
    /// [`Codec`] as a byte.
    pub codec: u8,
}

/// Where objects lie.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Located {
    /// The packs that the places refer to.
    pub packs: Vec<Pack>,
    /// For each object, in the order asked; empty: not there.
    pub places: Vec<Vec<Place>>,
}

/// Why an answer was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// Not postcard of the expected shape.
    #[error("not a message of this protocol ({0})")]
    Shape(String),
    /// A value that cannot be.
    #[error("{0}")]
    Value(String),
}

/// Encodes a message.
pub fn encode<T: Serialize>(message: &T) -> Vec<u8> {
    postcard::to_stdvec(message).expect("plain structures always encode into memory")
}

/// Decodes a message that fills `bytes`.
///
/// # Errors
/// If it does not decode, or bytes are left over.
pub fn decode<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, WireError> {
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Ok(message),
        Ok((_, rest)) => Err(WireError::Shape(format!("{} bytes after its end", rest.len()))),
        Err(e) => Err(WireError::Shape(e.to_string())),
    }
}

impl Located {
    /// From what the store says, one list per object.
    pub fn of(found: &[Vec<PackPlace>]) -> Self {
        let (mut out, mut numbers) = (Self::default(), BTreeMap::new());
        for places in found {
            let mut list = Vec::with_capacity(places.len());
            for p in places {
                let next = numbers.len();
                let pack = *numbers.entry(p.pack).or_insert_with(|| {
                    out.packs.push(Pack { id: p.pack.0, bytes: p.pack_bytes, domain: p.domain });
                    u16::try_from(next).expect("an answer has fewer packs than 2^16")
                });
                let e = p.entry;
                let (kind, codec) = (e.kind as u8, e.codec as u8);
                list.push(Place { pack, offset: e.offset, stored_len: e.stored_len, plain_len: e.plain_len, kind, codec });
            }
            out.places.push(list);
        }
        out
    }

    /// Back to the store's terms, each number checked.
    ///
    /// # Errors
    /// If it does not answer what was asked, or a number cannot be.
    pub fn check(&self, asked: &[ChunkId]) -> Result<Vec<Vec<PackPlace>>, WireError> {
        let bad = |why: String| WireError::Value(why);
        if self.places.len() != asked.len() || self.packs.len() > asked.len() * PLACES_MAX {
            return Err(bad(format!("{} places in {} packs for {} objects", self.places.len(), self.packs.len(), asked.len())));
        }
        let mut out = Vec::with_capacity(asked.len());
        for (id, places) in asked.iter().zip(&self.places) {
            let mut list = Vec::with_capacity(places.len().min(PLACES_MAX));
            for p in places.iter().take(PLACES_MAX) {
                let pack = self.packs.get(usize::from(p.pack)).ok_or_else(|| bad(format!("pack {} of its list", p.pack)))?;
                let kind = ObjectKind::from_u8(p.kind).map_err(|e| bad(e.to_string()))?;
                let codec = Codec::from_u8(p.codec).map_err(|e| bad(e.to_string()))?;
                let end = u64::from(p.offset) + u64::from(p.stored_len);
                let fits = p.offset as usize >= HEADER_BYTES && end <= pack.bytes && pack.bytes <= PACK_BYTES_MAX as u64;
                let sane = p.stored_len as usize <= OBJECT_BYTES_MAX + SEAL_OVERHEAD && p.plain_len as usize <= OBJECT_BYTES_MAX;
                if !fits || !sane {
                    return Err(bad(format!("a place at {} of {} bytes in a pack of {}", p.offset, p.stored_len, pack.bytes)));
                }
                let (offset, stored_len, plain_len) = (p.offset, p.stored_len, p.plain_len);
                let entry = PackEntry { id: *id, offset, stored_len, plain_len, kind, codec };
                list.push(PackPlace { pack: PackId(pack.id), pack_bytes: pack.bytes, domain: pack.domain, entry });
            }
            out.push(list);
        }
        Ok(out)
    }
}

/// True for a name that a file of an image may have.
pub fn is_file_name(which: &str) -> bool {
    let ok = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'.' | b'-' | b'_');
    !which.is_empty() && which.len() <= WHICH_MAX && which.bytes().all(ok) && !which.starts_with('.')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(pack: u16) -> Place {
        Place { pack, offset: 40_000, stored_len: 100, plain_len: 60, kind: 1, codec: 0 }
    }
    fn located() -> Located {
        Located { packs: vec![Pack { id: [9; 32], bytes: 1 << 20, domain: 1 }], places: vec![vec![place(0)], vec![]] }
    }
    const ASKED: [ChunkId; 2] = [ChunkId([1; 32]), ChunkId([2; 32])];

    #[test]
    fn golden_bytes() {
        let asks = [
            (Ask::Manifest { id: [1; 32] }, format!("00{}", "01".repeat(32))),
            (Ask::Locate { ids: vec![[2; 32]] }, format!("0101{}", "02".repeat(32))),
            (Ask::HaveClosure { id: [3; 32] }, format!("02{}", "03".repeat(32))),
            (
                Ask::ImageFile { image: [4; 32], which: "kernel".into(), from: 300 },
                format!("03{}066b65726e656cac02", "04".repeat(32)),
            ),
        ];
        for (ask, hex) in asks {
            assert_eq!(hex::encode(encode(&ask)), hex);
            assert_eq!(decode::<Ask>(&encode(&ask)), Ok(ask));
        }
        let answers = [
            (Answer::Manifest { bytes: 5 }, "0005".to_owned()),
            (Answer::Located(located()), format!("0101{}8080400102010 0c0b802643c010000", "09".repeat(32)).replace(' ', "")),
            (Answer::Closure { whole: true }, "0201".into()),
            (Answer::File { bytes: 1, hash: [5; 32] }, format!("0301{}", "05".repeat(32))),
            (Answer::Absent, "04".into()),
            (Answer::Refused { why: "x".into() }, "050178".into()),
        ];
        for (answer, hex) in answers {
            assert_eq!(hex::encode(encode(&answer)), hex);
            assert_eq!(decode::<Answer>(&encode(&answer)), Ok(answer));
        }
    }

    #[test]
    fn limits_hold_for_the_largest_messages() {
        let full = vec![[0xff; 32]; LOCATE_MAX];
        assert!(encode(&Ask::Locate { ids: full }).len() <= ASK_BYTES_MAX);
        let most = Place { pack: u16::MAX, offset: u32::MAX, stored_len: u32::MAX, plain_len: u32::MAX, kind: 255, codec: 255 };
        let packs = vec![Pack { id: [0xff; 32], bytes: u64::MAX, domain: u32::MAX }; LOCATE_MAX * PLACES_MAX];
        let l = Located { packs, places: vec![vec![most; PLACES_MAX]; LOCATE_MAX] };
        assert!(encode(&Answer::Located(l)).len() <= ANSWER_BYTES_MAX);
    }

    #[test]
    fn places_that_cannot_be_are_refused() {
        assert_eq!(located().check(&ASKED).map(|p| p.iter().map(Vec::len).collect::<Vec<_>>()), Ok(vec![1, 0]));
        assert!(located().check(&ASKED[..1]).is_err(), "an answer to another question");
        let bad = |f: &dyn Fn(&mut Located)| {
            let mut l = located();
            f(&mut l);
            assert!(l.check(&ASKED).is_err(), "{l:?}");
        };
        bad(&|l| l.places[0][0].pack = 1);
        bad(&|l| l.places[0][0].offset = 31);
        bad(&|l| l.places[0][0].stored_len = 1 << 20);
        bad(&|l| l.places[0][0].offset = u32::MAX);
        bad(&|l| l.places[0][0].plain_len = u32::MAX);
        bad(&|l| l.places[0][0].kind = 0);
        bad(&|l| l.places[0][0].codec = 9);
        bad(&|l| l.packs[0].bytes = u64::MAX);
        bad(&|l| l.packs = vec![l.packs[0]; 5]);
    }

    #[test]
    fn only_plain_names_are_files_of_images() {
        assert!(["kernel", "initrd.img", "a-b_c.1"].iter().all(|n| is_file_name(n)));
        assert!(["", ".", "..", ".x", "a/b", "A", "a b", "ä", &"x".repeat(65)].iter().all(|n| !is_file_name(n)));
    }

    proptest::proptest! {
        #[test]
        fn hostile_bytes_never_panic(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..300)) {
            let _ = decode::<Ask>(&bytes);
            if let Ok(Answer::Located(l)) = decode::<Answer>(&bytes) {
                let _ = l.check(&ASKED);
            }
        }
    }
}
