//! One pool of connections per provider, and one request through it.
//!
//! No redirect is followed, nothing is retried after a byte of the request was written, and there is no deadline on an answer.

use super::tls::Connector;
use crate::headers;
use crate::limits::{ANSWER_HEADER_BYTES_MAX, ANSWER_HEADERS_MAX, POOL_IDLE, POOL_IDLE_MAX};
use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{HeaderName, HeaderValue};
use hyper::{Request, Response};
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use ks_gateway::dialect::scrub_path;
use ks_proto::gateway::Provider;
use std::collections::BTreeMap;
use std::sync::Mutex;

/// Why a request got no answer.
#[derive(Debug, thiserror::Error)]
pub enum UpstreamError {
    /// No byte of the request reached the provider.
    #[error("{provider} was not reached: {why}")]
    Unsent {
        /// Its name.
        provider: String,
        /// The reason; holds no header and no key.
        why: String,
    },
    /// It may have been taken.
    #[error("{provider} gave no answer: {why}")]
    Lost {
        /// Its name.
        provider: String,
        /// The reason; holds no header and no key.
        why: String,
    },
}

/// A request as it leaves.
pub struct Outgoing<'a> {
    /// Method.
    pub method: &'a str,
    /// Path and query behind the provider's base URL.
    pub path: &'a str,
    /// Headers that pass, without any key.
    pub headers: &'a [(String, String)],
    /// Body.
    pub body: Bytes,
    /// The key.
    pub key: &'a str,
}

type Pool = Client<Connector, Full<Bytes>>;

/// All pools.
#[derive(Default)]
pub struct Upstreams {
    pools: Mutex<BTreeMap<String, (Provider, Pool)>>,
}

impl Upstreams {
    fn pool(&self, provider: &Provider) -> std::io::Result<Pool> {
        let mut pools = super::locked(&self.pools);
        if let Some((of, pool)) = pools.get(&provider.name)
            && of == provider
        {
            return Ok(pool.clone());
        }
        let pool = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(POOL_IDLE)
            .pool_max_idle_per_host(POOL_IDLE_MAX)
            .http1_max_headers(ANSWER_HEADERS_MAX)
            .http1_max_buf_size(ANSWER_HEADER_BYTES_MAX)
            .build(Connector::new(provider.ca_pem.as_deref())?);
        pools.insert(provider.name.clone(), (provider.clone(), pool.clone()));
        Ok(pool)
    }

    /// Sends a request and waits for the answer's head.
    ///
    /// # Errors
    /// [`UpstreamError`]; none of them shows the key.
    pub async fn send(&self, provider: &Provider, out: Outgoing<'_>) -> Result<Response<Incoming>, UpstreamError> {
        let unsent = |why: String| UpstreamError::Unsent { provider: provider.name.clone(), why };
        let pool = self.pool(provider).map_err(|e| unsent(e.to_string()))?;
        let request = request(provider, out).map_err(unsent)?;
        pool.request(request).await.map_err(|e| {
            let why = chain(&e);
            if e.is_connect() { unsent(why) } else { UpstreamError::Lost { provider: provider.name.clone(), why } }
        })
    }
}

/// An error and what is behind it, in words.
pub fn chain(e: &dyn std::error::Error) -> String {
    let mut out = e.to_string();
    let mut next = e.source();
    while let Some(e) = next {
        let text = e.to_string();
        if !out.contains(&text) {
            out.push_str(": ");
            out.push_str(&text);
        }
        next = e.source();
    }
    out
}

/// Joins base URL and path. A base that ends with a version (`…/v1`) and a path that begins with the same one share it.
fn url(base: &str, path: &str) -> String {
    let first = path.split(['/', '?']).nth(1).unwrap_or_default();
    let is_version = first.starts_with('v') && first[1..].bytes().next().is_some_and(|b| b.is_ascii_digit());
    match base.strip_suffix(first).filter(|_| is_version).and_then(|b| b.strip_suffix('/')) {
        Some(shorter) => format!("{shorter}{path}"),
        None => format!("{base}{path}"),
    }
}

fn request(provider: &Provider, out: Outgoing<'_>) -> Result<Request<Full<Bytes>>, String> {
    let mut builder = Request::builder().method(out.method).uri(url(&provider.base_url, &scrub_path(out.path)));
    let list = builder.headers_mut().ok_or("the request's method or path is none")?;
    for (name, value) in headers::upward(out.headers) {
        let name = HeaderName::try_from(&name).map_err(|_| format!("{name:?} is no header name"))?;
        let value = HeaderValue::try_from(&value).map_err(|_| format!("the value of {name} is none"))?;
        list.append(name, value);
    }
    let secret = |text: &str| {
        let mut v = HeaderValue::try_from(text).map_err(|_| "the stored key cannot stand in a header".to_owned())?;
        v.set_sensitive(true);
        Ok::<_, String>(v)
    };
    match provider.dialect.as_str() {
        "anthropic" => {
            list.insert("x-api-key", secret(out.key)?);
            list.entry("anthropic-version").or_insert(HeaderValue::from_static("2023-06-01"));
        }
        "gemini" => {
            list.insert("x-goog-api-key", secret(out.key)?);
        }
        _ => {
            list.insert("authorization", secret(&zeroize::Zeroizing::new(format!("Bearer {}", out.key)))?);
        }
    }
    builder.body(Full::new(out.body)).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base_and_path_meet_once() {
        assert_eq!(url("https://api.openai.com", "/v1/chat/completions"), "https://api.openai.com/v1/chat/completions");
        assert_eq!(url("http://127.0.0.1:8000/v1", "/v1/models"), "http://127.0.0.1:8000/v1/models");
        assert_eq!(url("https://x.example/api", "/v1/models"), "https://x.example/api/v1/models");
        assert_eq!(url("https://x.example/api", "/?x"), "https://x.example/api/?x");
    }

    #[test]
    fn the_key_is_the_vaults_and_the_host_the_providers() {
        let provider = Provider {
            name: "p".into(),
            dialect: "openai".into(),
            base_url: "https://right.example".into(),
            include_usage: false,
            ca_pem: None,
            builtin: false,
        };
        let headers = [("Host".to_owned(), "evil.example".to_owned()), ("authorization".to_owned(), "Bearer dummy".to_owned())];
        let out = Outgoing { method: "POST", path: "/v1/x?key=dummy", headers: &headers, body: Bytes::new(), key: "sk-real" };
        let r = request(&provider, out).unwrap();
        assert_eq!(r.uri().to_string(), "https://right.example/v1/x");
        assert_eq!(r.headers().get_all("authorization").iter().count(), 1);
        assert_eq!(r.headers()["authorization"], "Bearer sk-real");
        assert!(!r.headers().contains_key("host") && !format!("{r:?}").contains("sk-real"));
        // What is sent and what is written down end the same parameters.
        for name in ks_gateway::dialect::SECRET_PARAMETERS {
            for name in [(*name).to_owned(), name.to_uppercase(), name.bytes().map(|b| format!("%{b:02x}")).collect()] {
                let path = format!("/v1/x?alt=sse&{name}=guests-own&include%5B%5D=a");
                let out = Outgoing { method: "POST", path: &path, headers: &headers, body: Bytes::new(), key: "sk-real" };
                let sent = request(&provider, out).unwrap().uri().path_and_query().unwrap().to_string();
                assert_eq!(
                    (sent.as_str(), scrub_path(&path).as_str()),
                    ("/v1/x?alt=sse&include%5B%5D=a", sent.as_str()),
                    "{name}"
                );
            }
        }
    }
}
