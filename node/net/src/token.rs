//! The text that lets a node join: a secret of one use, which fleet it must meet, and where.
//!
//! `ks1.<secret>.<fingerprint>.<host:port>`: see `docs/formats.md`. The fleet keeps only BLAKE3 of the secret. Whoever holds the
//! text can add one node until it expires, so `Debug` hides the secret; the fingerprint makes sure that the secret is told to the
//! right fleet and to nobody between.

use std::{fmt, str::FromStr};

use thiserror::Error;

/// Longest accepted `host:port` of a token.
const HOST_BYTES_MAX: usize = 300;

/// A join token.
#[derive(Clone, PartialEq, Eq)]
pub struct JoinToken {
    /// 16 random bytes.
    pub secret: [u8; 16],
    /// BLAKE3 of the fleet's CA certificate (DER); see [`crate::tls::fingerprint`].
    pub ca: [u8; 32],
    /// `host:port` of a member's HTTPS API; IPv6 in brackets.
    pub api: String,
}

/// Why a text is not a join token. Never carries the text: it may hold a secret.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum TokenError {
    /// Another program's text, or another version.
    #[error("this is not a join token: it must begin with `ks1.`; copy it whole from `ks node token`")]
    Kind,
    /// A part is missing.
    #[error(
        "the join token is cut short: it has four parts (ks1.secret.fingerprint.host:port); copy it whole from `ks node token`"
    )]
    Parts,
    /// Not hex, or of the wrong length.
    #[error("the {0} in the join token is damaged: it must be {1} lower-case hex digits; copy it again from `ks node token`")]
    Hex(&'static str, usize),
    /// Not `host:port`.
    #[error("the address in the join token is not host:port; copy it again from `ks node token`")]
    Address,
}

impl JoinToken {
    /// What the fleet stores and compares: BLAKE3 of the secret.
    #[must_use]
    pub fn hash(&self) -> [u8; 32] {
        *blake3::hash(&self.secret).as_bytes()
    }
}

impl fmt::Display for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ks1.{}.{}.{}", hex::encode(self.secret), hex::encode(self.ca), self.api)
    }
}

impl fmt::Debug for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JoinToken").field("ca", &hex::encode(self.ca)).field("api", &self.api).finish_non_exhaustive()
    }
}

impl FromStr for JoinToken {
    type Err = TokenError;

    fn from_str(text: &str) -> Result<Self, TokenError> {
        let rest = text.trim().strip_prefix("ks1.").ok_or(TokenError::Kind)?;
        let mut parts = rest.splitn(3, '.');
        let (Some(secret), Some(ca), Some(api)) = (parts.next(), parts.next(), parts.next()) else {
            return Err(TokenError::Parts);
        };
        check_api(api)?;
        Ok(Self { secret: bytes("secret", secret)?, ca: bytes("fingerprint", ca)?, api: api.to_owned() })
    }
}

fn bytes<const N: usize>(what: &'static str, text: &str) -> Result<[u8; N], TokenError> {
    let mut out = [0; N];
    let lower = !text.bytes().any(|byte| byte.is_ascii_uppercase());
    if !lower || hex::decode_to_slice(text, &mut out).is_err() {
        return Err(TokenError::Hex(what, 2 * N));
    }
    Ok(out)
}

fn check_api(api: &str) -> Result<(), TokenError> {
    let (host, port) = api.rsplit_once(':').ok_or(TokenError::Address)?;
    let port_ok = port.bytes().all(|b| b.is_ascii_digit()) && port.parse::<u16>().is_ok_and(|port| port != 0);
    let host_ok = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(ip) => ip.parse::<std::net::Ipv6Addr>().is_ok(),
        None => !host.is_empty() && host.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'.' || b == b'-'),
    };
    if api.len() <= HOST_BYTES_MAX && port_ok && host_ok { Ok(()) } else { Err(TokenError::Address) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(api: &str) -> JoinToken {
        JoinToken { secret: [0xa5; 16], ca: [7; 32], api: api.into() }
    }

    /// Golden text of version 1.
    #[test]
    fn text_is_stable_and_comes_back() {
        let text = format!("ks1.{}.{}.10.0.0.7:7450", "a5".repeat(16), "07".repeat(32));
        assert_eq!(token("10.0.0.7:7450").to_string(), text);
        for api in ["10.0.0.7:7450", "node-1.example.org:1", "[fd00::1]:65535"] {
            let token = token(api);
            assert_eq!(format!("  {token}\n").parse(), Ok(token));
        }
        assert_eq!(token("h:1").hash(), *blake3::hash(&[0xa5; 16]).as_bytes());
    }

    #[test]
    fn damaged_texts_are_refused_by_name() {
        let (secret, ca) = ("a5".repeat(16), "07".repeat(32));
        let cases = [
            (String::new(), TokenError::Kind),
            (format!("ks2.{secret}.{ca}.h:1"), TokenError::Kind),
            (format!("ks1.{secret}"), TokenError::Parts),
            (format!("ks1.{secret}.{ca}"), TokenError::Parts),
            (format!("ks1.{}.{ca}.h:1", &secret[2..]), TokenError::Hex("secret", 32)),
            (format!("ks1.{}.{ca}.h:1", secret.to_uppercase()), TokenError::Hex("secret", 32)),
            (format!("ks1.{secret}.{}00.h:1", &ca), TokenError::Hex("fingerprint", 64)),
            (format!("ks1.{secret}.{ca}.h"), TokenError::Address),
            (format!("ks1.{secret}.{ca}.h:0"), TokenError::Address),
            (format!("ks1.{secret}.{ca}.h:+1"), TokenError::Address),
            (format!("ks1.{secret}.{ca}.h:65536"), TokenError::Address),
            (format!("ks1.{secret}.{ca}.:1"), TokenError::Address),
            (format!("ks1.{secret}.{ca}.a/b:1"), TokenError::Address),
            (format!("ks1.{secret}.{ca}.[x]:1"), TokenError::Address),
            (format!("ks1.{secret}.{ca}.{}:1", "h".repeat(301)), TokenError::Address),
        ];
        for (text, error) in cases {
            assert_eq!(text.parse::<JoinToken>(), Err(error), "{text}");
        }
    }

    #[test]
    fn debug_hides_the_secret() {
        assert!(!format!("{:?}", token("h:1")).contains("a5a5"));
    }
}
