//! The node's HTTP API as a client sees it: finding the node, calls, long calls with progress, byte streams.

use crate::config::base_url;
use crate::failure::{Failure, Res};
use crate::output::{Bar, Ctx};
use futures::{Stream, StreamExt};
use ks_proto::api::{ApiError, ApiFile, Session};
use reqwest::{Method, RequestBuilder, Response};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::path::Path;
use std::time::Duration;

/// Largest single answer or line of an answer.
const ANSWER_MAX: usize = 256 * 1024 * 1024;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const SHORT_CALL: Duration = Duration::from_secs(60);

/// A node that we can call.
#[derive(Debug, Clone)]
pub struct Node {
    http: reqwest::Client,
    base: String,
    token: String,
    /// What to say when nobody answers.
    hint: String,
}

/// Reads the api.json of a node's data folder.
pub fn read_api_file(path: &Path) -> Res<ApiFile> {
    let text = std::fs::read_to_string(path).map_err(|e| {
        let why = match e.kind() {
            std::io::ErrorKind::NotFound => format!("there is no {}", path.display()),
            _ => format!("{}: {e}", path.display()),
        };
        node_down(None, &why)
    })?;
    serde_json::from_str(&text)
        .map_err(|e| Failure::local(format!("cannot read {}", path.display()), e, "restart the node: `ks down`, then `ks up`"))
}

/// The failure of a node that does not answer.
pub fn node_down(base: Option<&str>, why: &str) -> Failure {
    let what = base.map_or("no node is running here".to_owned(), |b| format!("no node answers at {b}"));
    Failure::new("node-down", what, why, "start one with `ks up`, or say where it is with KS_ADDR and KS_TOKEN")
}

impl Node {
    /// The node that the settings point to.
    pub fn find(ctx: &Ctx) -> Res<Self> {
        let s = &ctx.settings;
        let file = s.api_file.clone().unwrap_or_else(|| ctx.data_dir.join("api.json"));
        let Some(address) = &s.address else { return Self::from_file(&file) };
        let base = base_url(address)?;
        if let Some(token) = &s.token {
            return Self::new(base, token.clone(), "the address comes from your settings".into());
        }
        match read_api_file(&file) {
            Ok(api) if base_url(&api.url)? == base => Self::new(base, api.token, String::new()),
            _ => Err(Failure::usage(format!("no token for {base}"), "an address was given without one", "set KS_TOKEN as well")),
        }
    }
    /// The node whose api.json this is.
    pub fn from_file(file: &Path) -> Res<Self> {
        let api = read_api_file(file)?;
        Self::new(base_url(&api.url)?, api.token, format!("its process was {}", api.pid))
    }
    fn new(base: String, token: String, hint: String) -> Res<Self> {
        let http = reqwest::Client::builder()
            .no_proxy()
            .connect_timeout(CONNECT_TIMEOUT)
            .build()
            .map_err(|e| Failure::local("cannot start the HTTP client", e, "report this"))?;
        Ok(Self { http, base, token, hint })
    }
    /// `http://HOST:PORT`.
    pub fn base(&self) -> &str {
        &self.base
    }
    /// The bearer token.
    pub fn token(&self) -> &str {
        &self.token
    }

    fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.http.request(method, format!("{}{path}", self.base)).bearer_auth(&self.token)
    }
    async fn send(&self, what: &str, request: RequestBuilder) -> Res<Response> {
        let response = request.send().await.map_err(|e| self.broken(what, &e))?;
        if response.status().is_success() {
            return Ok(response);
        }
        let status = response.status();
        let body = response.bytes().await.unwrap_or_default();
        Err(refusal(what, status.as_u16(), &body))
    }
    fn broken(&self, what: &str, e: &reqwest::Error) -> Failure {
        let why = root_cause(e);
        if e.is_connect() {
            let hint = if self.hint.is_empty() { String::new() } else { format!(" ({})", self.hint) };
            return node_down(Some(&self.base), &format!("{why}{hint}"));
        }
        if e.is_timeout() {
            return Failure::new(
                "timeout",
                what,
                format!("no answer from {} in time", self.base),
                "look at `ks events` and the node's log",
            );
        }
        Failure::link_lost(what, why)
    }

    /// A short GET.
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Res<T> {
        let what = format!("GET {path}");
        let response = self.send(&what, self.request(Method::GET, path).timeout(SHORT_CALL)).await?;
        let body = response.bytes().await.map_err(|e| self.broken(&what, &e))?;
        parse(&what, &body)
    }
    /// A short GET with its own deadline, its answer as text.
    pub async fn get_text(&self, path: &str) -> Res<Vec<u8>> {
        let what = format!("GET {path}");
        let response = self.send(&what, self.request(Method::GET, path).timeout(SHORT_CALL)).await?;
        Ok(response.bytes().await.map_err(|e| self.broken(&what, &e))?.to_vec())
    }
    /// One session.
    pub async fn session(&self, name: &str) -> Res<Session> {
        self.get(&format!("/v1/sessions/{name}")).await
    }
    /// A DELETE; whatever the node answers.
    pub async fn delete(&self, path: &str) -> Res<Value> {
        let what = format!("DELETE {path}");
        let response = self.send(&what, self.request(Method::DELETE, path)).await?;
        self.finish(&what, response, &mut |_, _, _| {}).await
    }
    /// A call that may take long: progress goes to `bar`, the result comes back.
    pub async fn call<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize, bar: &mut Bar) -> Res<T> {
        let got = self.call_steps(path, body, &mut |what, done, total| bar.step(what, done, total)).await;
        bar.clear();
        got
    }
    /// As [`Node::call`], with the steps handed to `step`.
    pub async fn call_steps<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
        step: &mut (dyn FnMut(&str, u64, u64) + Send),
    ) -> Res<T> {
        let what = format!("POST {path}");
        let text = serde_json::to_vec(body).map_err(|e| Failure::local("cannot write the request", e, "report this"))?;
        let request = self.request(Method::POST, path).header("content-type", "application/json").body(text);
        let response = self.send(&what, request).await?;
        let value = self.finish(&what, response, step).await?;
        serde_json::from_value(value).map_err(|e| not_understood(&what, &e.to_string()))
    }
    /// Sends a byte stream.
    pub async fn put_stream<S>(&self, path: &str, body: S) -> Res<()>
    where
        S: Stream<Item = std::io::Result<Vec<u8>>> + Send + 'static,
    {
        let what = format!("PUT {}", path.split('?').next().unwrap_or(path));
        let request = self.request(Method::PUT, path).header("content-type", "application/x-tar");
        let response = self.send(&what, request.body(reqwest::Body::wrap_stream(body))).await?;
        self.finish(&what, response, &mut |_, _, _| {}).await.map(|_| ())
    }
    /// Receives a byte stream.
    pub async fn get_stream(&self, path: &str) -> Res<impl Stream<Item = std::io::Result<Vec<u8>>> + Send + use<>> {
        let what = format!("GET {}", path.split('?').next().unwrap_or(path));
        let response = self.send(&what, self.request(Method::GET, path)).await?;
        Ok(response.bytes_stream().map(|r| r.map(|b| b.to_vec()).map_err(|e| std::io::Error::other(root_cause(&e)))))
    }
    /// Hands every line of an NDJSON answer to `line` until the node ends it.
    pub async fn lines(&self, path: &str, line: &mut (dyn FnMut(Value) -> Res<()> + Send)) -> Res<()> {
        let what = format!("GET {path}");
        let response = self.send(&what, self.request(Method::GET, path)).await?;
        let mut lines = Lines::default();
        let mut stream = response.bytes_stream();
        while let Some(part) = stream.next().await {
            for text in lines.push(&part.map_err(|e| self.broken(&what, &e))?)? {
                line(parse(&what, &text)?)?;
            }
        }
        for text in lines.rest() {
            line(parse(&what, &text)?)?;
        }
        Ok(())
    }

    /// Reads an answer to its end: NDJSON progress with a result, or the result itself.
    async fn finish(&self, what: &str, response: Response, step: &mut (dyn FnMut(&str, u64, u64) + Send)) -> Res<Value> {
        let mut lines = Lines::default();
        let mut last: Option<Value> = None;
        let mut progressing = false;
        let mut stream = response.bytes_stream();
        loop {
            let (texts, ended) = match stream.next().await {
                Some(part) => (lines.push(&part.map_err(|e| Failure::link_lost(what, root_cause(&e)))?)?, false),
                None => (lines.rest(), true),
            };
            for text in texts {
                match read_line(what, &text)? {
                    Line::Step { what, done, total } => {
                        progressing = true;
                        step(&what, done, total);
                    }
                    Line::Result(v) => return Ok(v),
                    Line::Other(v) => last = Some(v),
                }
            }
            if ended {
                break;
            }
        }
        match last {
            Some(v) if !progressing => Ok(v),
            None if !progressing => Ok(Value::Null),
            _ => Err(Failure::link_lost(what, "the node's answer ended before its result")),
        }
    }
}

enum Line {
    Step { what: String, done: u64, total: u64 },
    Result(Value),
    Other(Value),
}

fn read_line(what: &str, text: &[u8]) -> Res<Line> {
    let mut v: Value = parse(what, text)?;
    match v.get("type").and_then(Value::as_str) {
        Some("step") => Ok(Line::Step {
            what: v["what"].as_str().unwrap_or_default().to_owned(),
            done: v["done"].as_u64().unwrap_or(0),
            total: v["total"].as_u64().unwrap_or(0),
        }),
        Some("result") => Ok(Line::Result(v["result"].take())),
        Some("error") => {
            let e: ApiError = serde_json::from_value(v["error"].take()).map_err(|e| not_understood(what, &e.to_string()))?;
            Err(e.into())
        }
        _ => Ok(Line::Other(v)),
    }
}

fn parse<T: DeserializeOwned>(what: &str, body: &[u8]) -> Res<T> {
    serde_json::from_slice(body).map_err(|e| not_understood(what, &e.to_string()))
}

fn not_understood(what: &str, why: &str) -> Failure {
    Failure::new(
        "internal",
        format!("{what}: the answer is not understood"),
        why,
        "are `ks` and the node of the same version? compare `ks version` and `ks doctor`",
    )
}

/// A refusal from its HTTP status and body.
pub fn refusal(what: &str, status: u16, body: &[u8]) -> Failure {
    if let Ok(e) = serde_json::from_slice::<ApiError>(body) {
        return e.into();
    }
    let text: String = String::from_utf8_lossy(body).chars().take(200).collect();
    let why =
        if text.trim().is_empty() { format!("HTTP status {status}") } else { format!("HTTP status {status}: {}", text.trim()) };
    let (code, next) = match status {
        401 | 403 => ("not-allowed", "the token is not the node's: unset KS_TOKEN, or restart the node"),
        404 => ("not-found", "does the node speak this version? compare `ks version` and `ks doctor`"),
        _ => ("internal", "look at the node's log"),
    };
    Failure::new(code, what, why, next)
}

/// The innermost cause of an error, which is the one that tells something.
pub fn root_cause(e: &dyn std::error::Error) -> String {
    let mut cause = e;
    while let Some(next) = cause.source() {
        cause = next;
    }
    cause.to_string()
}

/// Percent-encodes a query value.
pub fn encode(text: &str) -> String {
    text.bytes().fold(String::with_capacity(text.len()), |mut out, b| {
        if b.is_ascii_alphanumeric() || b"-_.~/".contains(&b) {
            out.push(char::from(b));
        } else {
            out.push_str(&format!("%{b:02X}"));
        }
        out
    })
}

/// Cuts a byte stream into lines.
#[derive(Debug, Default)]
struct Lines {
    kept: Vec<u8>,
}

impl Lines {
    fn push(&mut self, part: &[u8]) -> Res<Vec<Vec<u8>>> {
        let mut out = vec![];
        for piece in part.split_inclusive(|b| *b == b'\n') {
            self.kept.extend_from_slice(piece);
            if self.kept.len() > ANSWER_MAX {
                return Err(not_understood("the node", "a line of its answer has no end"));
            }
            if piece.ends_with(b"\n") {
                out.push(std::mem::take(&mut self.kept));
            }
        }
        out.retain(|l| !l.trim_ascii().is_empty());
        Ok(out)
    }
    fn rest(&mut self) -> Vec<Vec<u8>> {
        let rest = std::mem::take(&mut self.kept);
        if rest.trim_ascii().is_empty() { vec![] } else { vec![rest] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_cut_wherever_the_parts_end() {
        let mut l = Lines::default();
        assert_eq!(l.push(b"{\"a\":").unwrap(), Vec::<Vec<u8>>::new());
        assert_eq!(l.push(b"1}\n\n{}\n{").unwrap(), vec![b"{\"a\":1}\n".to_vec(), b"{}\n".to_vec()]);
        assert_eq!(l.rest(), vec![b"{".to_vec()]);
    }

    #[test]
    fn query_values_are_encoded() {
        assert_eq!(encode("/a b/é?&=%"), "/a%20b/%C3%A9%3F%26%3D%25");
    }

    #[test]
    fn refusals_carry_the_nodes_words_or_the_status() {
        let e = refusal("x", 404, br#"{"schema":"ks.error.v1","code":"not-found","what":"no session a","why":"w","next":"n"}"#);
        assert_eq!((e.error.what.as_str(), e.exit), ("no session a", 125));
        assert_eq!(refusal("x", 401, b"").exit, 4);
        assert!(refusal("x", 502, b"Bad Gateway").error.why.contains("Bad Gateway"));
    }
}
