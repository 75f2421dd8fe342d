//! Where a session may go through the egress proxy: default deny; pure.
//!
//! A pattern is `host`, `host:port`, `*.domain`, or an address, each with or without a port. Without one, only ports 80 and 443 are
//! meant. Addresses that are private, link-local, loopback or otherwise not of the public internet are refused unless a pattern
//! names that very address, also when a permitted name resolves to one.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// A pattern that is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a place: write host, host:port, *.domain, or an address")]
pub struct PatternError(String);

/// Ports that a pattern without one means.
const PORTS: [u16; 2] = [80, 443];

/// One entry of an allow-list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pattern {
    host: String,
    below: bool,
    address: Option<IpAddr>,
    port: Option<u16>,
}

impl Pattern {
    /// From text.
    ///
    /// # Errors
    /// If it is none.
    pub fn parse(text: &str) -> Result<Self, PatternError> {
        let bad = || PatternError(text.chars().take(80).collect());
        let lower = text.trim().to_ascii_lowercase();
        if let Ok(address) = lower.trim_matches(['[', ']']).parse::<IpAddr>() {
            return Ok(Self { host: String::new(), below: false, address: Some(address), port: None });
        }
        let (host, port) = match lower.rsplit_once(':') {
            Some((h, p)) => (h, Some(p.parse::<u16>().ok().filter(|p| *p > 0).ok_or_else(bad)?)),
            None => (lower.as_str(), None),
        };
        if let Ok(address) = host.trim_matches(['[', ']']).parse::<IpAddr>() {
            return Ok(Self { host: String::new(), below: false, address: Some(address), port });
        }
        let (below, name) = host.strip_prefix("*.").map_or((false, host), |h| (true, h));
        let label =
            |l: &str| !l.is_empty() && l.len() <= 63 && l.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_');
        let ok = name.len() <= 253 && name.split('.').all(label) && (!below || name.contains('.'));
        if ok { Ok(Self { host: name.to_owned(), below, address: None, port }) } else { Err(bad()) }
    }

    fn meets(&self, host: &str, port: u16) -> bool {
        let port_ok = self.port.map_or_else(|| PORTS.contains(&port), |p| p == port);
        let literal = host.trim_matches(['[', ']']).parse::<IpAddr>().ok();
        let host_ok = match (self.address, literal) {
            (Some(a), Some(b)) => a == b,
            (Some(_), None) | (None, Some(_)) => false,
            (None, None) if self.below => host.strip_suffix(&self.host).is_some_and(|rest| rest.ends_with('.')),
            (None, None) => host == self.host,
        };
        port_ok && host_ok
    }
}

/// Whether a list permits this place, before its name is resolved. `host` as the client wrote it.
pub fn permits(list: &[Pattern], host: &str, port: u16) -> bool {
    let host = host.trim_end_matches('.').to_ascii_lowercase();
    list.iter().any(|p| p.meets(&host, port))
}

/// Whether a list permits this address of a permitted place.
pub fn permits_address(list: &[Pattern], address: IpAddr, port: u16) -> bool {
    public(address) || list.iter().any(|p| p.address == Some(address) && p.meets(&address.to_string(), port))
}

/// An address of the public internet.
pub fn public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(a) => public_v4(a),
        IpAddr::V6(a) => a.to_ipv4_mapped().map_or_else(|| public_v6(a), public_v4),
    }
}

fn public_v4(a: Ipv4Addr) -> bool {
    let [x, y, z, _] = a.octets();
    let special = x == 0
        || (x == 100 && (64..128).contains(&y))
        || (x == 192 && y == 0 && z == 0)
        || (x == 198 && (18..20).contains(&y))
        || x >= 224;
    !(special || a.is_private() || a.is_loopback() || a.is_link_local() || a.is_documentation())
}

fn public_v6(a: Ipv6Addr) -> bool {
    // Global unicast, without documentation, and without addresses that carry an IPv4 one (6to4, Teredo, NAT64).
    let [first, second, ..] = a.segments();
    (first & 0xe000) == 0x2000 && first != 0x2002 && !(first == 0x2001 && (second == 0 || second == 0x0db8))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(all: &[&str]) -> Vec<Pattern> {
        all.iter().map(|p| Pattern::parse(p).unwrap()).collect()
    }

    #[test]
    fn default_deny_and_patterns_mean_what_they_say() {
        assert!(!permits(&[], "example.com", 443));
        let l = list(&["example.com", "*.pypi.org", "git.example:9418", "127.0.0.1:8080"]);
        for (host, port) in
            [("example.com", 443), ("Example.com.", 80), ("a.b.pypi.org", 443), ("git.example", 9418), ("127.0.0.1", 8080)]
        {
            assert!(permits(&l, host, port), "{host}:{port}");
        }
        for (host, port) in [
            ("example.com", 22),
            ("a.example.com", 443),
            ("pypi.org", 443),
            ("evilpypi.org", 443),
            ("git.example", 443),
            ("127.0.0.1", 80),
        ] {
            assert!(!permits(&l, host, port), "{host}:{port}");
        }
        for bad in ["", "*", "*.com", "a b", "a:0", "a:99999", "http://x", "a..b"] {
            assert!(Pattern::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn addresses_inside_are_refused_unless_named() {
        for inside in [
            "127.0.0.1",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "100.64.0.1",
            "0.0.0.0",
            "224.0.0.1",
            "::1",
            "fe80::1",
            "fd00::1",
            "::ffff:10.0.0.1",
            "2002:7f00:1::",
            "64:ff9b::7f00:1",
        ] {
            let a: IpAddr = inside.parse().unwrap();
            assert!(!public(a) && !permits_address(&list(&["example.com"]), a, 443), "{inside}");
        }
        assert!(public("93.184.216.34".parse().unwrap()) && public("2606:4700::1111".parse().unwrap()));
        let l = list(&["127.0.0.1:8080"]);
        assert!(permits_address(&l, "127.0.0.1".parse().unwrap(), 8080));
        assert!(!permits_address(&l, "127.0.0.1".parse().unwrap(), 8081));
    }
}
