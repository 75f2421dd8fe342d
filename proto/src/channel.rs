//! Generations on the guest channel: how both ends drop what belongs to before a restore.
//!
//! The guest port is one byte pipe that survives a checkpoint with bytes in flight in both directions. `ks-vmm`
//! begins each connection from the node with a marker that carries a fresh generation; the guest answers with the
//! same marker; each reader throws away everything before it. So that no payload can look like a marker, the
//! eight-byte escape inside data is followed by a literal sign. Framing on the pipe:
//!
//! ```text
//!   data byte*                       as they are, but
//!   ESC 0x00                         the eight escape bytes themselves
//!   ESC 0x01 generation(16) check(8) a marker; check = first 8 bytes of BLAKE3(generation)
//!   ESC other                        the rest of a cut-off stream: dropped, scanning goes on at `other`
//! ```

/// The escape. No proper prefix of it is a suffix, so a search never has to look back.
pub const ESC: [u8; 8] = [0x9c, 0x4b, 0xe1, 0x53, 0xd7, 0x21, 0xaa, 0x06];
const LITERAL: u8 = 0;
const MARKER: u8 = 1;
/// Bytes of a whole marker on the pipe.
pub const MARKER_BYTES: usize = 8 + 1 + 16 + 8;

/// Names one connection between node and guest: 16 random bytes.
pub type Generation = [u8; 16];

/// The marker that begins generation `g`.
pub fn marker(g: &Generation) -> [u8; MARKER_BYTES] {
    let mut m = [0u8; MARKER_BYTES];
    m[..8].copy_from_slice(&ESC);
    m[8] = MARKER;
    m[9..25].copy_from_slice(g);
    m[25..].copy_from_slice(&check(g));
    m
}

fn check(g: &Generation) -> [u8; 8] {
    let mut c = [0u8; 8];
    c.copy_from_slice(&blake3::hash(g).as_bytes()[..8]);
    c
}

/// Escapes data on its way into the pipe. Keeps how much of ESC the last bytes matched.
#[derive(Debug, Default)]
pub struct Escaper {
    matched: usize,
}

impl Escaper {
    /// Appends `data`, escaped, to `out`.
    pub fn push(&mut self, data: &[u8], out: &mut Vec<u8>) {
        out.reserve(data.len());
        for &b in data {
            out.push(b);
            self.matched = next_match(self.matched, b);
            if self.matched == ESC.len() {
                out.push(LITERAL);
                self.matched = 0;
            }
        }
    }
}

fn next_match(matched: usize, b: u8) -> usize {
    if b == ESC[matched] { matched + 1 } else { usize::from(b == ESC[0]) }
}

/// What a [`Deframer`] found, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// Bytes of the current generation.
    Data(Vec<u8>),
    /// A new generation begins: drop every stream of the old one.
    Marker(Generation),
}

/// Undoes [`Escaper`] and finds markers; data before the first marker is dropped.
#[derive(Debug, Default)]
pub struct Deframer {
    state: State,
    live: bool,
}

#[derive(Debug)]
enum State {
    Data { matched: usize },
    Sign,
    Body { got: Vec<u8> },
}
impl Default for State {
    fn default() -> Self {
        Self::Data { matched: 0 }
    }
}

impl Deframer {
    /// A reader that drops everything until the first marker.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes bytes from the pipe. Bytes that might be the start of an escape are held back until the next call.
    pub fn push(&mut self, input: &[u8]) -> Vec<Piece> {
        let mut out = Vec::new();
        let mut data: Vec<u8> = Vec::new();
        let mut i = 0;
        while i < input.len() {
            let b = input[i];
            match &mut self.state {
                State::Data { matched: 0 } => {
                    // The common case: copy up to the next possible escape in one go.
                    let end = memchr::memchr(ESC[0], &input[i..]).map_or(input.len(), |n| i + n);
                    data.extend_from_slice(&input[i..end]);
                    if end < input.len() {
                        self.state = State::Data { matched: 1 };
                    }
                    i = end + usize::from(end < input.len());
                    continue;
                }
                State::Data { matched } => {
                    let was = *matched;
                    *matched = next_match(was, b);
                    if *matched == ESC.len() {
                        self.state = State::Sign;
                    } else if *matched <= was {
                        data.extend_from_slice(&ESC[..was]);
                        if *matched == 0 {
                            data.push(b);
                        }
                    }
                }
                State::Sign => match b {
                    LITERAL => {
                        data.extend_from_slice(&ESC);
                        self.state = State::default();
                    }
                    MARKER => self.state = State::Body { got: Vec::with_capacity(24) },
                    _ => {
                        self.state = State::default();
                        continue;
                    }
                },
                State::Body { got } => {
                    got.push(b);
                    if got.len() == 24 {
                        let mut g = [0u8; 16];
                        g.copy_from_slice(&got[..16]);
                        if got[16..] == check(&g) {
                            if self.live && !data.is_empty() {
                                out.push(Piece::Data(std::mem::take(&mut data)));
                            }
                            data.clear();
                            self.live = true;
                            out.push(Piece::Marker(g));
                            self.state = State::default();
                        } else {
                            // A marker cut short by a newer stream: look for that stream inside what was taken.
                            let again = std::mem::take(got);
                            self.state = State::default();
                            if self.live && !data.is_empty() {
                                out.push(Piece::Data(std::mem::take(&mut data)));
                            }
                            out.extend(self.push(&again));
                        }
                    }
                }
            }
            i += 1;
        }
        if self.live && !data.is_empty() {
            out.push(Piece::Data(data));
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn feed(d: &mut Deframer, bytes: &[u8], step: usize) -> (Vec<u8>, Vec<Generation>) {
        let (mut data, mut marks) = (Vec::new(), Vec::new());
        for c in bytes.chunks(step.max(1)) {
            for p in d.push(c) {
                match p {
                    Piece::Data(b) => data.extend(b),
                    Piece::Marker(g) => {
                        data.clear();
                        marks.push(g)
                    }
                }
            }
        }
        (data, marks)
    }

    fn spiky() -> impl Strategy<Value = Vec<u8>> {
        proptest::collection::vec(
            prop_oneof![
                any::<u8>().prop_map(|b| vec![b]),
                Just(ESC.to_vec()),
                (0usize..8).prop_map(|n| ESC[..n].to_vec()),
                Just(vec![0]),
                Just(vec![1])
            ],
            0..60,
        )
        .prop_map(|v| v.concat())
    }

    proptest! {
        #[test]
        fn data_comes_out_as_it_went_in(data in spiky(), step in 1usize..50, cut in any::<usize>()) {
            let mut wire = marker(&[5; 16]).to_vec();
            let mut e = Escaper::default();
            let cut = if data.is_empty() { 0 } else { cut % data.len() };
            e.push(&data[..cut], &mut wire);
            e.push(&data[cut..], &mut wire);
            wire.extend([1, 2, 3]); // flush what a reader may hold back
            let mut want = data.clone();
            want.extend([1, 2, 3]);
            let (got, marks) = feed(&mut Deframer::new(), &wire, step);
            prop_assert_eq!(marks, vec![[5; 16]]);
            prop_assert_eq!(got, want);
        }
        #[test]
        fn a_cut_old_stream_never_leaks_into_the_new_generation(old in spiky(), keep in any::<usize>(), with_mark in any::<bool>(), data in proptest::collection::vec(0u8..0x80, 0..40), step in 1usize..50) {
            let mut wire = if with_mark { marker(&[4; 16]).to_vec() } else { vec![] };
            Escaper::default().push(&old, &mut wire);
            let keep = if wire.is_empty() { 0 } else { keep % (wire.len() + 1) };
            wire.truncate(keep);
            wire.extend(marker(&[7; 16]));
            Escaper::default().push(&data, &mut wire);
            let (got, marks) = feed(&mut Deframer::new(), &wire, step);
            prop_assert_eq!(marks.last(), Some(&[7; 16]));
            prop_assert_eq!(got, data);
        }
    }
}
