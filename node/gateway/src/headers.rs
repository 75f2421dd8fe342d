//! Which headers pass: from the guest to a provider, and from a provider to the guest.
//!
//! Hop-by-hop headers end here. Everything by which a guest could say who it is or where the call goes (authorization, keys, cookies,
//! Host, forwarding) ends here too: the key is the vault's and the host the provider's. What a path says of keys ends in
//! [`ks_gateway::dialect::scrub_path`], for what is sent and for what is written down.

/// Names that no request carries on.
const NOT_UP: [&str; 26] = [
    "authorization",
    "proxy-authorization",
    "x-api-key",
    "api-key",
    "x-goog-api-key",
    "cookie",
    "host",
    "content-length",
    "connection",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "expect",
    "forwarded",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-forwarded-proto",
    "x-real-ip",
    "via",
    "openai-organization",
    "openai-project",
    "x-goog-user-project",
    "http2-settings",
];

/// Names that no answer carries on.
const NOT_DOWN: [&str; 13] = [
    "location",
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "content-length",
    "set-cookie",
    "alt-svc",
    "strict-transport-security",
];

fn named_by_connection(headers: &[(String, String)], name: &str) -> bool {
    headers
        .iter()
        .filter(|(n, _)| n.eq_ignore_ascii_case("connection"))
        .any(|(_, v)| v.split(',').any(|t| t.trim().eq_ignore_ascii_case(name)))
}

/// The request headers that go on, in their order.
pub fn upward(headers: &[(String, String)]) -> Vec<(String, String)> {
    let passes = |name: &str| !NOT_UP.iter().any(|n| name.eq_ignore_ascii_case(n)) && !named_by_connection(headers, name);
    headers.iter().filter(|(n, _)| passes(n)).cloned().collect()
}

/// The answer's headers that go on, in their order.
pub fn downward(headers: &[(String, String)]) -> Vec<(String, String)> {
    let passes = |name: &str| !NOT_DOWN.iter().any(|n| name.eq_ignore_ascii_case(n)) && !named_by_connection(headers, name);
    headers.iter().filter(|(n, _)| passes(n)).cloned().collect()
}

/// Those of an answer's headers without which a client would act wrongly.
pub fn needed(headers: &[(String, String)]) -> Vec<(String, String)> {
    let keep = ["retry-after", "retry-after-ms", "x-should-retry", "x-request-id", "request-id"];
    headers.iter().filter(|(n, _)| keep.iter().any(|k| n.eq_ignore_ascii_case(k))).cloned().collect()
}

/// The first value of a header.
pub fn value<'a>(headers: &'a [(String, String)], name: &str) -> Option<&'a str> {
    headers.iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, v)| v.as_str())
}

/// A WebSocket or any other upgrade is asked for.
pub fn wants_upgrade(headers: &[(String, String)]) -> bool {
    value(headers, "upgrade").is_some() || named_by_connection(headers, "upgrade")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_says_who_or_where_ends_here() {
        let h = |n: &str, v: &str| (n.to_owned(), v.to_owned());
        let asked = [
            h("Host", "evil.example"),
            h("Authorization", "Bearer dummy"),
            h("X-Api-Key", "dummy"),
            h("x-goog-api-key", "dummy"),
            h("Connection", "close, X-Private"),
            h("x-private", "1"),
            h("Content-Type", "application/json"),
            h("anthropic-beta", "a"),
            h("anthropic-beta", "b"),
        ];
        let names: Vec<String> = upward(&asked).into_iter().map(|(n, _)| n).collect();
        assert_eq!(names, ["Content-Type", "anthropic-beta", "anthropic-beta"]);
        let answered = [h("retry-after", "7"), h("x-should-retry", "true"), h("set-cookie", "a=b"), h("content-length", "5")];
        let names: Vec<String> = downward(&answered).into_iter().map(|(n, _)| n).collect();
        assert_eq!(names, ["retry-after", "x-should-retry"]);
        assert!(wants_upgrade(&[h("connection", "Upgrade")]) && !wants_upgrade(&asked));
    }
}
