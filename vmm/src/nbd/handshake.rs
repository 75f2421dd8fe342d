//! The first part of a connection: options until the client goes on to transmission.

use super::PAYLOAD_BYTES_MAX;
use std::io::{self, Read, Write};

const IHAVEOPT: u64 = 0x4948_4156_454f_5054;
const REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Options longer than this are refused.
const OPTION_BYTES_MAX: u32 = 64 * 1024;
/// Options before a client that never starts is dropped.
const OPTIONS_MAX: usize = 64;
const REP_ACK: u32 = 1;
const REP_SERVER: u32 = 2;
const REP_INFO: u32 = 3;
const ERR_UNSUPPORTED: u32 = 0x8000_0001;
const ERR_INVALID: u32 = 0x8000_0003;
/// HAS_FLAGS, SEND_FLUSH, SEND_FUA, SEND_TRIM, SEND_WRITE_ZEROES.
const EXPORT_FLAGS: u16 = 1 | 4 | 8 | 32 | 64;

fn bad(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why.to_owned())
}

fn u32_from(s: &mut impl Read) -> io::Result<u32> {
    let mut b = [0; 4];
    s.read_exact(&mut b)?;
    Ok(u32::from_be_bytes(b))
}

/// Speaks the handshake for a disk of `bytes`; true when transmission begins, false when the client left.
pub fn handshake<S: Read + Write>(s: &mut S, bytes: u64) -> io::Result<bool> {
    s.write_all(b"NBDMAGICIHAVEOPT\x00\x03")?;
    let client = u32_from(s)?;
    if client & 1 == 0 || client & !3 != 0 {
        return Err(bad("the client does not speak the fixed newstyle handshake"));
    }
    for _ in 0..OPTIONS_MAX {
        let mut magic = [0; 8];
        s.read_exact(&mut magic)?;
        if u64::from_be_bytes(magic) != IHAVEOPT {
            return Err(bad("an option without its magic"));
        }
        let (option, len) = (u32_from(s)?, u32_from(s)?);
        if len > OPTION_BYTES_MAX {
            return Err(bad("an option that is too long"));
        }
        let mut data = vec![0; len as usize];
        s.read_exact(&mut data)?;
        match option {
            1 => {
                let mut reply = export(bytes);
                if client & 2 == 0 {
                    reply.extend([0; 124]);
                }
                s.write_all(&reply)?;
                return Ok(true);
            }
            2 => {
                reply(s, option, REP_ACK, &[])?;
                return Ok(false);
            }
            3 if data.is_empty() => {
                reply(s, option, REP_SERVER, &0u32.to_be_bytes())?;
                reply(s, option, REP_ACK, &[])?;
            }
            6 | 7 if info_is_sound(&data) => {
                reply(s, option, REP_INFO, &[&0u16.to_be_bytes()[..], &export(bytes)].concat())?;
                let sizes = [1u32, 4096, PAYLOAD_BYTES_MAX].map(u32::to_be_bytes).concat();
                reply(s, option, REP_INFO, &[&3u16.to_be_bytes()[..], &sizes].concat())?;
                reply(s, option, REP_ACK, &[])?;
                if option == 7 {
                    return Ok(true);
                }
            }
            3 | 6 | 7 => reply(s, option, ERR_INVALID, b"malformed option")?,
            _ => reply(s, option, ERR_UNSUPPORTED, b"not offered")?,
        }
    }
    Err(bad("too many options"))
}

/// name length(4) name, count(2), count kinds of 2 bytes. Any name is our one export.
fn info_is_sound(data: &[u8]) -> bool {
    let Some((head, rest)) = data.split_first_chunk::<4>() else { return false };
    let name = u32::from_be_bytes(*head) as usize;
    let Some(after) = rest.get(name..) else { return false };
    let Some((count, kinds)) = after.split_first_chunk::<2>() else { return false };
    kinds.len() == usize::from(u16::from_be_bytes(*count)) * 2
}

fn export(bytes: u64) -> Vec<u8> {
    [&bytes.to_be_bytes()[..], &EXPORT_FLAGS.to_be_bytes()].concat()
}

fn reply(s: &mut impl Write, option: u32, kind: u32, data: &[u8]) -> io::Result<()> {
    let len = u32::try_from(data.len()).map_err(|_| bad("a reply that is too long"))?;
    let head = [&REPLY_MAGIC.to_be_bytes()[..], &option.to_be_bytes(), &kind.to_be_bytes(), &len.to_be_bytes()];
    s.write_all(&[&head.concat(), data].concat())
}
