//! Contexts: the fleets that this person can speak to, each with its addresses, pinned certificate and token. Pure; the
//! file's text is an argument (host/contexts.rs reads and writes it).

use crate::failure::{Failure, Res};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::str::FromStr;

/// The name that means the node on this machine.
pub const LOCAL: &str = "local";
/// Addresses kept of one fleet.
pub const ADDRESSES_MAX: usize = 32;

/// BLAKE3 of a certificate's DER.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    /// From a hash.
    pub fn of(hash: [u8; 32]) -> Self {
        Self(hash)
    }
}

impl std::fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

impl FromStr for Fingerprint {
    type Err = Failure;
    fn from_str(text: &str) -> Res<Self> {
        let bad = |why: &str| {
            Failure::usage(
                "this is no fingerprint",
                format!("{why}: {:?}", text.chars().take(80).collect::<String>()),
                "`ks fleet status` on a node shows it: 64 hex digits",
            )
        };
        let digits: Vec<u8> = text.bytes().filter(|b| *b != b':').map(|b| b.to_ascii_lowercase()).collect();
        if digits.len() != 64 {
            return Err(bad(&format!("it has {} digits, not 64", digits.len())));
        }
        let mut out = [0; 32];
        for (byte, pair) in out.iter_mut().zip(digits.chunks_exact(2)) {
            let text = std::str::from_utf8(pair).map_err(|_| bad("it has other characters than hex digits"))?;
            *byte = u8::from_str_radix(text, 16).map_err(|_| bad("it has other characters than hex digits"))?;
        }
        Ok(Self(out))
    }
}

/// One fleet.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Context {
    /// `HOST:PORT` of its nodes' HTTPS API.
    pub addresses: Vec<String>,
    /// Fingerprint of its certificate authority.
    pub fingerprint: String,
    /// Bearer token.
    pub token: String,
}

/// All of them, and which one is meant when none is named.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Contexts {
    /// Name of the one in use; None or `local` is the node on this machine.
    pub current: Option<String>,
    /// By name.
    pub contexts: BTreeMap<String, Context>,
}

impl Contexts {
    /// Reads the file's text.
    pub fn read(text: &str) -> Res<Self> {
        toml::from_str(text).map_err(|e| {
            let next = "mend it, or move it away and `ks login` again";
            Failure::usage("the file of contexts is not understood", e.to_string().trim().replace('\n', "\n    "), next)
        })
    }
    /// The file's text.
    pub fn write(&self) -> Res<String> {
        toml::to_string(self).map_err(|e| Failure::local("cannot write the contexts", e, "report this"))
    }
    /// The one of this name.
    pub fn named(&self, name: &str) -> Res<&Context> {
        self.contexts.get(name).ok_or_else(|| {
            let all: Vec<&str> = self.contexts.keys().map(String::as_str).chain([LOCAL]).collect();
            Failure::usage(format!("no context {name:?}"), format!("there are {}", all.join(", ")), "make one with `ks login`")
        })
    }
    /// The one in use, unless that is this machine.
    pub fn in_use(&self) -> Option<&str> {
        self.current.as_deref().filter(|c| *c != LOCAL)
    }
}

/// A context's name: what can be typed without quotes.
pub fn name(text: &str) -> Res<String> {
    let ok = (1..=63).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
    if ok && text != LOCAL {
        return Ok(text.to_owned());
    }
    Err(Failure::usage(
        format!("{text:?} is no name for a context"),
        format!("it has 1-63 letters, digits, '-', '_' and '.', and is not {LOCAL}, which means this machine"),
        "choose another with --name",
    ))
}

/// The addresses to keep: those learned from the fleet, the one that was typed first among them, bounded.
pub fn merge(typed: &[String], learned: impl IntoIterator<Item = String>) -> Vec<String> {
    let mut all: Vec<String> = vec![];
    for a in typed.iter().cloned().chain(learned) {
        if !all.contains(&a) && all.len() < ADDRESSES_MAX {
            all.push(a);
        }
    }
    all
}

/// A join token's parts: `ks1.SECRET.FINGERPRINT.HOST:PORT`.
pub fn join_token(text: &str) -> Res<(Fingerprint, String)> {
    let bad =
        |why: &str| Failure::usage("this is no join token", why, "make one with `ks node token` on a member, and copy it whole");
    let parts: Vec<&str> = text.splitn(4, '.').collect();
    let [kind, secret, fingerprint, address] = parts[..] else {
        return Err(bad("it does not have four parts with dots between them"));
    };
    if kind != "ks1" {
        return Err(bad("it does not begin with ks1."));
    }
    if secret.is_empty() || !secret.bytes().all(|b| b.is_ascii_alphanumeric()) {
        return Err(bad("its secret has odd characters"));
    }
    let fingerprint = fingerprint.parse().map_err(|_| bad("its fingerprint is not 64 hex digits"))?;
    crate::config::Address::read(address).map_err(|_| bad("its last part is no HOST:PORT"))?;
    Ok((fingerprint, address.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fingerprints_round_trip_and_others_are_refused() {
        let f = Fingerprint::of([0xab; 32]);
        assert_eq!(f.to_string().parse(), Ok(f));
        assert_eq!("AB:".repeat(32).parse(), Ok(f), "as other programs write them");
        for bad in ["", "ab", &"g".repeat(64), &"é".repeat(32), &"ab".repeat(33)] {
            assert_eq!(bad.parse::<Fingerprint>().unwrap_err().exit, 2, "{bad:?}");
        }
    }

    #[test]
    fn contexts_round_trip_and_missing_ones_are_named() {
        let one = Context { addresses: vec!["a:1".into()], fingerprint: "ab".repeat(32), token: "t".into() };
        let all = Contexts { current: Some("prod".into()), contexts: [("prod".into(), one.clone())].into() };
        let back = Contexts::read(&all.write().unwrap()).unwrap();
        assert_eq!((back.in_use(), back.named("prod").unwrap()), (Some("prod"), &one));
        assert!(back.named("test").unwrap_err().error.why.contains("prod, local"));
        assert_eq!(Contexts { current: Some(LOCAL.into()), ..all }.in_use(), None);
        assert_eq!(Contexts::read("contexts = 5").unwrap_err().exit, 2);
        for bad in ["", LOCAL, "a b", "a/b", &"a".repeat(64)] {
            assert!(name(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn addresses_are_kept_once_and_bounded() {
        let got = merge(&["b:1".into()], ["a:1", "b:1", "a:1"].map(String::from));
        assert_eq!(got, ["b:1", "a:1"]);
        assert_eq!(merge(&[], (0..99).map(|i| format!("n:{i}"))).len(), ADDRESSES_MAX);
    }

    #[test]
    fn join_tokens_are_whole_or_refused() {
        let f = "cd".repeat(32);
        let (got, addr) = join_token(&format!("ks1.secret.{f}.10.0.0.1:7700")).unwrap();
        assert_eq!((got.to_string(), addr.as_str()), (f.clone(), "10.0.0.1:7700"));
        for bad in ["", "ks1.a.b", &format!("ks2.s.{f}.h:1"), &format!("ks1..{f}.h:1"), &format!("ks1.s.{f}.h"), "ks1.s.abc.h:1"]
        {
            assert_eq!(join_token(bad).unwrap_err().exit, 2, "{bad}");
        }
    }
}
