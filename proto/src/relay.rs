//! What the relay in a guest and the gateway outside say to each other about model calls and other egress.
//!
//! The relay opens one stream per call. Both ends write messages (a u32 little-endian length and that many bytes of
//! JSON) and body frames (kind, u32 little-endian length, payload):
//!
//! ```text
//!   relay                                     gateway
//!   Call, DATA* END            ──►
//!                              ◄──            Accepted, Head, DATA* (END | ABORT)      or Refused
//!   GONE                       ──►            (the client closed its socket; the stream ends)
//!   Rejoin                     ──►
//!                              ◄──            Accepted, Head, DATA* from `offset` (END | ABORT)
//!                                             or Unknown, or Refused
//!   Egress                     ──►
//!                              ◄──            Ok, then raw bytes both ways, half-close passed on; or Refused
//! ```
//!
//! - A stream that breaks without GONE says nothing about the client: the relay comes back with `Rejoin`.
//! - After `Unknown` the relay sends the call anew, under a new call id, if nothing of an answer has reached the client;
//!   else it cuts the client's connection. It does the same when `Accepted` names another entry than before.
//! - `Head` is sent to every `Rejoin` too; the relay ignores it when `head_sent`.
//! - A relay keeps a call's client connection open for as long as the client does: there is no deadline here.
//!
//! Everything from the guest is hostile: lengths are checked before anything is allocated.

use crate::bytes::DecodeError;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// The largest JSON message.
pub const MESSAGE_BYTES_MAX: usize = 1024 * 1024;
/// The largest payload of a body frame.
pub const PAYLOAD_BYTES_MAX: usize = 64 * 1024;
/// Kind and length of a body frame.
pub const FRAME_HEADER_BYTES: usize = 5;
/// The largest request body.
pub const BODY_BYTES_MAX: u64 = 64 * 1024 * 1024;
/// Header lines of one request or answer.
pub const HEADERS_MAX: usize = 200;
/// Bytes of all names and values of one request's or answer's headers.
pub const HEADER_BYTES_MAX: usize = 64 * 1024;
/// Bytes of path and query.
pub const PATH_BYTES_MAX: usize = 16 * 1024;
/// Calls that a relay has under way at once.
pub const CALLS_MAX: usize = 1000;

/// A call's name: made by the relay, unique within its session.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct CallId {
    /// The timeline it was made in: 16 random bytes as 32 lower-case hex digits, new at each hook that restores.
    pub nonce_hex: String,
    /// Rises by one with each call of the timeline.
    pub counter: u64,
}

impl std::fmt::Display for CallId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.nonce_hex, self.counter)
    }
}

/// First message on a stream that the guest opened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "kebab-case")]
pub enum RelayAsk {
    /// A new call; its raw request body follows in body frames.
    Call(Call),
    /// The client is still connected; go on with its answer.
    Rejoin(Rejoin),
    /// HTTP CONNECT or SOCKS5.
    Egress {
        /// Name or address, as the client wrote it.
        host: String,
        /// TCP port.
        port: u16,
    },
}

/// A new call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// Its name; `nonce_hex` is the current timeline.
    pub call: CallId,
    /// Highest entry that the relay knew of at the hook that began this timeline.
    pub position: u64,
    /// The timeline before that hook.
    pub prior: Option<String>,
    /// First segment of the path: which provider.
    pub provider: String,
    /// HTTP method.
    pub method: String,
    /// Path and query after the provider's segment, beginning with `/`.
    pub path: String,
    /// Headers in their order; values that are not UTF-8 are refused by the relay.
    pub headers: Vec<(String, String)>,
    /// Bytes of the raw body, at most [`BODY_BYTES_MAX`].
    pub body_bytes: u64,
    /// BLAKE3 of the raw body, 64 hex digits.
    pub body_hash: String,
}

/// The rest of an answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rejoin {
    /// The call's name as it was first sent: after a restore its nonce is an older one than `timeline`.
    pub call: CallId,
    /// The current timeline.
    pub timeline: String,
    /// The timeline before it.
    pub prior: Option<String>,
    /// Highest entry that the relay knew of at the hook that began `timeline`.
    pub position: u64,
    /// The entry of [`RelayAnswer::Accepted`], if the relay had got it.
    pub seq: Option<u64>,
    /// Bytes of the answer's body that the relay has.
    pub offset: u64,
    /// The answer's status and headers have reached the client.
    pub head_sent: bool,
    /// As in [`Call`].
    pub body_hash: String,
}

/// From the gateway, before body frames.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "kebab-case")]
pub enum RelayAnswer {
    /// The call has an entry of the session's journal, or is served from one. Sent once, before `Head`.
    Accepted {
        /// The entry, from 1.
        seq: u64,
    },
    /// The answer's beginning. Body frames follow.
    Head {
        /// HTTP status.
        status: u16,
        /// Headers that pass to the client: no hop-by-hop ones, no content-length.
        headers: Vec<(String, String)>,
        /// The entry.
        seq: u64,
        /// Length of the whole body, when it is known.
        body_bytes: Option<u64>,
    },
    /// To a `Rejoin` that no entry matches.
    Unknown {},
    /// Not done. The relay answers the client in the words of the provider's dialect.
    Refused {
        /// HTTP status.
        status: u16,
        /// Stable, kebab-case: `budget`, `no-key`, `no-provider`, `replica`, `disk-full`, `lapsed`, `not-allowed`, `bad-request`…
        code: String,
        /// What, why and what next, in words.
        message: String,
    },
    /// To `Egress`: connected.
    Ok {},
}

/// One body frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BodyFrame {
    /// Bytes of the body.
    Data(Vec<u8>),
    /// The body is whole.
    End,
    /// The body will never be whole; why, in words.
    Abort(String),
    /// From the relay: the client closed its connection.
    Gone,
}

const DATA: u8 = 0;
const END: u8 = 1;
const ABORT: u8 = 2;
const GONE: u8 = 3;

fn bad(what: &'static str, why: impl Into<String>) -> DecodeError {
    DecodeError::Value { what, why: why.into() }
}

impl BodyFrame {
    /// The frame's bytes. Data longer than [`PAYLOAD_BYTES_MAX`] is the caller's mistake: a reader refuses it.
    pub fn encode(&self) -> Vec<u8> {
        let (kind, payload): (u8, &[u8]) = match self {
            Self::Data(b) => (DATA, b),
            Self::End => (END, &[]),
            Self::Abort(why) => (ABORT, why.as_bytes()),
            Self::Gone => (GONE, &[]),
        };
        let mut out = Vec::with_capacity(FRAME_HEADER_BYTES + payload.len());
        out.extend_from_slice(&data_header_of(kind, payload.len()));
        out.extend_from_slice(payload);
        out
    }

    /// The header of a DATA frame with `len` bytes, for writers that do not want to copy the payload.
    pub fn data_header(len: usize) -> [u8; FRAME_HEADER_BYTES] {
        data_header_of(DATA, len)
    }

    /// Kind and checked length from a header; read that many bytes, then call [`BodyFrame::from_parts`].
    ///
    /// # Errors
    /// On an unknown kind or a length that this kind cannot have.
    pub fn header(bytes: [u8; FRAME_HEADER_BYTES]) -> Result<(u8, usize), DecodeError> {
        let [kind, a, b, c, d] = bytes;
        let len = u32::from_le_bytes([a, b, c, d]) as usize;
        let max = match kind {
            DATA | ABORT => PAYLOAD_BYTES_MAX,
            END | GONE => 0,
            other => return Err(bad("body frame", format!("kind {other} is not known"))),
        };
        if len > max {
            return Err(bad("body frame", format!("{len} bytes in a frame of kind {kind}, at most {max} are allowed")));
        }
        Ok((kind, len))
    }

    /// From kind and payload.
    ///
    /// # Errors
    /// As [`BodyFrame::header`]; a reason that is not UTF-8.
    pub fn from_parts(kind: u8, payload: Vec<u8>) -> Result<Self, DecodeError> {
        let len = u32::try_from(payload.len()).unwrap_or(u32::MAX).to_le_bytes();
        Self::header([kind, len[0], len[1], len[2], len[3]])?;
        Ok(match kind {
            DATA => Self::Data(payload),
            END => Self::End,
            ABORT => Self::Abort(String::from_utf8(payload).map_err(|e| bad("body frame", format!("reason: {e}")))?),
            _ => Self::Gone,
        })
    }
}

fn data_header_of(kind: u8, len: usize) -> [u8; FRAME_HEADER_BYTES] {
    let [a, b, c, d] = u32::try_from(len).unwrap_or(u32::MAX).to_le_bytes();
    [kind, a, b, c, d]
}

/// A message as on the stream: length, JSON.
///
/// # Errors
/// If it is longer than [`MESSAGE_BYTES_MAX`].
pub fn encode_message<T: Serialize>(message: &T) -> Result<Vec<u8>, DecodeError> {
    let json = serde_json::to_vec(message).map_err(|e| bad("relay message", e.to_string()))?;
    if json.len() > MESSAGE_BYTES_MAX {
        return Err(bad("relay message", format!("{} bytes, at most {MESSAGE_BYTES_MAX} are allowed", json.len())));
    }
    let mut out = Vec::with_capacity(4 + json.len());
    out.extend_from_slice(&u32::try_from(json.len()).unwrap_or(u32::MAX).to_le_bytes());
    out.extend_from_slice(&json);
    Ok(out)
}

/// The checked length of a message from its first four bytes.
///
/// # Errors
/// If it is longer than [`MESSAGE_BYTES_MAX`].
pub fn message_length(bytes: [u8; 4]) -> Result<usize, DecodeError> {
    let len = u32::from_le_bytes(bytes) as usize;
    if len > MESSAGE_BYTES_MAX {
        return Err(bad("relay message", format!("{len} bytes, at most {MESSAGE_BYTES_MAX} are allowed")));
    }
    Ok(len)
}

/// A message from its JSON.
///
/// # Errors
/// If it is no message of this type.
pub fn decode_message<T: DeserializeOwned>(json: &[u8]) -> Result<T, DecodeError> {
    serde_json::from_slice(json).map_err(|e| bad("relay message", e.to_string()))
}

impl RelayAsk {
    /// From JSON, with every limit of this module checked.
    ///
    /// # Errors
    /// On a message that is none, or above a limit.
    pub fn decode(json: &[u8]) -> Result<Self, DecodeError> {
        let ask: Self = decode_message(json)?;
        match &ask {
            Self::Call(call) => call.check()?,
            Self::Rejoin(rejoin) => rejoin.check()?,
            Self::Egress { host, .. } => {
                if host.is_empty() || host.len() > 255 || host.bytes().any(|b| b <= b' ' || b == 0x7f || b == b'/') {
                    return Err(bad("egress", "the host is empty, too long, or has characters that no host name has"));
                }
            }
        }
        Ok(ask)
    }
}

fn hex_digits(what: &'static str, text: &str, digits: usize) -> Result<(), DecodeError> {
    let ok = text.len() == digits && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
    if ok { Ok(()) } else { Err(bad(what, format!("not {digits} lower-case hex digits"))) }
}

impl Call {
    fn check(&self) -> Result<(), DecodeError> {
        hex_digits("call nonce", &self.call.nonce_hex, 32)?;
        if let Some(prior) = &self.prior {
            hex_digits("call prior", prior, 32)?;
        }
        hex_digits("call body hash", &self.body_hash, 64)?;
        if self.provider.is_empty() || self.provider.len() > 64 {
            return Err(bad("call provider", "empty or longer than 64 bytes"));
        }
        if self.method.is_empty() || self.method.len() > 16 || !self.method.bytes().all(|b| b.is_ascii_uppercase()) {
            return Err(bad("call method", "not 1 to 16 capital letters"));
        }
        if !self.path.starts_with('/') || self.path.len() > PATH_BYTES_MAX || self.path.bytes().any(|b| b <= b' ' || b == 0x7f) {
            return Err(bad("call path", "it must begin with `/` and be at most 16 KiB without spaces"));
        }
        if self.body_bytes > BODY_BYTES_MAX {
            return Err(bad("call body", format!("{} bytes, at most {BODY_BYTES_MAX} are allowed", self.body_bytes)));
        }
        check_headers(&self.headers)
    }
}

impl Rejoin {
    fn check(&self) -> Result<(), DecodeError> {
        hex_digits("rejoin nonce", &self.call.nonce_hex, 32)?;
        hex_digits("rejoin timeline", &self.timeline, 32)?;
        if let Some(prior) = &self.prior {
            hex_digits("rejoin prior", prior, 32)?;
        }
        hex_digits("rejoin body hash", &self.body_hash, 64)
    }
}

/// Refuses more or larger headers than allowed.
///
/// # Errors
/// Which limit.
pub fn check_headers(headers: &[(String, String)]) -> Result<(), DecodeError> {
    if headers.len() > HEADERS_MAX {
        return Err(bad("headers", format!("{} lines, at most {HEADERS_MAX} are allowed", headers.len())));
    }
    let bytes: usize = headers.iter().map(|(n, v)| n.len() + v.len()).sum();
    if bytes > HEADER_BYTES_MAX {
        return Err(bad("headers", format!("{bytes} bytes, at most {HEADER_BYTES_MAX} are allowed")));
    }
    let name_ok = |n: &str| !n.is_empty() && n.bytes().all(|b| b.is_ascii_graphic() && !b"()<>@,;:\\\"/[]?={}".contains(&b));
    let value_ok = |v: &str| !v.bytes().any(|b| b == b'\r' || b == b'\n' || b == 0);
    match headers.iter().find(|(n, v)| !name_ok(n) || !value_ok(v)) {
        Some((name, _)) => Err(bad("headers", format!("{:?} is not a header", name.chars().take(80).collect::<String>()))),
        None => Ok(()),
    }
}

#[cfg(test)]
#[path = "relay_tests.rs"]
mod tests;
