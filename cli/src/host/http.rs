//! The node's HTTP API as a client sees it: finding the node, calls, long calls with progress, byte streams.
//!
//! A fleet has several addresses. A connection is made to the first that answers (conn.rs); a request that changes nothing
//! is asked again elsewhere when its node dies or has lost its quorum, one that may change something only when nothing
//! of it was sent.

use super::conn::{Endpoints, Unreachable, Wire};
use super::{contexts, tls};
use crate::config::Address;
use crate::context::{Context, Fingerprint};
use crate::failure::{Failure, Res};
use crate::output::{Bar, Ctx};
use bytes::Bytes;
use futures::{Stream, StreamExt};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::client::conn::http1;
use hyper::{Method, Response};
use hyper_util::rt::TokioIo;
use ks_proto::api::{ApiError, ApiFile, Session};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Largest single answer or line of an answer.
const ANSWER_MAX: usize = 256 * 1024 * 1024;
/// Longest wait for a whole short answer.
const SHORT_CALL: Duration = Duration::from_secs(60);
/// Longest wait for the beginning of a short answer while there are other addresses to ask.
const NEXT_AFTER: Duration = Duration::from_secs(5);

type Body = UnsyncBoxBody<Bytes, std::io::Error>;

/// A node that we can call, or a fleet of them.
#[derive(Debug, Clone)]
pub struct Node {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    endpoints: Endpoints,
    token: String,
    /// What to say when nobody answers.
    hint: String,
    /// The context that it comes from.
    context: Option<String>,
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
    Failure::new("node-down", what, why, "start one with `ks up`, or say where it is with KS_ADDR and KS_TOKEN, or `ks login`")
}

/// Where the address that answered last is remembered, by fleet.
fn memory(fingerprint: Fingerprint) -> Option<std::path::PathBuf> {
    let text = |k: &str| std::env::var_os(k).map(std::path::PathBuf::from).filter(|p| p.is_absolute());
    let base = text("XDG_STATE_HOME").or_else(|| text("HOME").map(|h| h.join(".local/state")))?;
    Some(base.join("keepstate/answered").join(&fingerprint.to_string()[..16]))
}

impl Node {
    /// The node that the settings point to: an address, a context, this machine's.
    pub fn find(ctx: &Ctx) -> Res<Self> {
        let s = &ctx.settings;
        let file = s.api_file.clone().unwrap_or_else(|| ctx.data_dir.join("api.json"));
        if let Some(address) = &s.address {
            return Self::at(ctx, address, &file);
        }
        if s.context.as_deref() == Some(crate::context::LOCAL) {
            return Self::from_file(&file);
        }
        // A folder that was named is meant, whatever context is in use.
        let named = s.api_file.is_some() || ctx.home_given;
        let all = match &s.context {
            None if named => return Self::from_file(&file),
            _ => contexts::load(&contexts::file())?,
        };
        match s.context.as_deref().or(all.in_use()) {
            Some(name) => Self::in_context(name, all.named(name)?),
            None => Self::from_file(&file),
        }
    }
    /// The node of this machine, whatever the settings say.
    pub fn here(ctx: &Ctx) -> Res<Self> {
        Self::from_file(&ctx.settings.api_file.clone().unwrap_or_else(|| ctx.data_dir.join("api.json")))
    }
    fn at(ctx: &Ctx, address: &str, file: &Path) -> Res<Self> {
        let s = &ctx.settings;
        let all = Address::list(address)?;
        let fingerprint: Option<Fingerprint> = s.fingerprint.as_deref().map(str::parse).transpose()?;
        let urls: Vec<String> = all.iter().map(|a| a.url(fingerprint.is_some())).collect();
        if let Some(token) = &s.token {
            return Self::new(urls, token.clone(), fingerprint, "the address comes from your settings".into(), None);
        }
        match read_api_file(file) {
            Ok(api) if urls == [Address::read(&api.url)?.url(false)] => Self::new(urls, api.token, None, String::new(), None),
            _ => Err(Failure::usage(
                format!("no token for {}", urls.join(", ")),
                "an address was given without one",
                "set KS_TOKEN as well, or `ks login` once",
            )),
        }
    }
    /// A fleet as `ks login` noted it.
    pub fn in_context(name: &str, c: &Context) -> Res<Self> {
        let urls = c.addresses.iter().map(|a| Ok(Address::read(a)?.url(true))).collect::<Res<Vec<_>>>()?;
        if urls.is_empty() {
            return Err(Failure::usage(format!("context {name} has no address"), "its list is empty", "`ks login` again"));
        }
        let fingerprint = c.fingerprint.parse()?;
        Self::new(urls, c.token.clone(), Some(fingerprint), format!("context {name}"), Some(name.to_owned()))
    }
    /// The node whose api.json this is.
    pub fn from_file(file: &Path) -> Res<Self> {
        let api = read_api_file(file)?;
        Self::new(vec![Address::read(&api.url)?.url(false)], api.token, None, format!("its process was {}", api.pid), None)
    }
    fn new(
        urls: Vec<String>,
        token: String,
        fingerprint: Option<Fingerprint>,
        hint: String,
        context: Option<String>,
    ) -> Res<Self> {
        let bad = |e: rustls::Error| Failure::local("cannot start TLS", e, "report this");
        let tls = fingerprint.map(|f| tls::pinned(f, None)).transpose().map_err(bad)?;
        let endpoints = Endpoints::new(urls, tls, fingerprint.and_then(memory));
        Ok(Self { inner: Arc::new(Inner { endpoints, token, hint, context }) })
    }
    /// `http://HOST:PORT` of the address that answered last.
    pub fn base(&self) -> &str {
        self.inner.endpoints.url()
    }
    /// All addresses.
    pub fn endpoints(&self) -> &Endpoints {
        &self.inner.endpoints
    }
    /// The bearer token.
    pub fn token(&self) -> &str {
        &self.inner.token
    }
    /// The context that it comes from, if it does.
    pub fn context(&self) -> Option<&str> {
        self.inner.context.as_deref()
    }

    /// The failure of having reached nobody.
    pub fn unreachable(&self, e: &Unreachable) -> Failure {
        let urls = self.inner.endpoints.urls().join(", ");
        if e.other_fleet() {
            return Failure::new(
                "untrusted",
                format!("{urls} is not the fleet that you know"),
                e.words(),
                "if the fleet was made anew, `ks login` again with its new fingerprint; else somebody stands between",
            );
        }
        let hint = if self.inner.hint.is_empty() { String::new() } else { format!(" ({})", self.inner.hint) };
        node_down(Some(&urls), &format!("{}{hint}", e.words()))
    }

    /// One request over a connection of its own, up to the head of its answer.
    async fn ask(
        &self,
        wire: Wire,
        at: usize,
        method: Method,
        path: &str,
        body: Body,
        kind: &str,
    ) -> hyper::Result<Response<Incoming>> {
        let (mut sender, connection) = http1::handshake(TokioIo::new(wire)).await?;
        tokio::spawn(connection);
        let url = self.inner.endpoints.urls().get(at).map_or("", String::as_str);
        let host = url.split_once("://").map_or(url, |u| u.1);
        let mut request = hyper::Request::new(body);
        *request.method_mut() = method;
        // Paths are ours (names are checked, values encoded); one that is none is refused by the node.
        *request.uri_mut() = path.parse().unwrap_or_default();
        let headers = request.headers_mut();
        let bearer = format!("Bearer {}", self.inner.token);
        for (name, value) in [("host", host), ("authorization", bearer.as_str()), ("content-type", kind), ("accept", "*/*")] {
            if let (false, Ok(v)) = (value.is_empty(), value.parse()) {
                headers.insert(name, v);
            }
        }
        sender.send_request(request).await
    }

    /// A request that changes nothing: asked again elsewhere until somebody answers.
    async fn look(&self, what: &str, path: &str, patience: Duration) -> Res<Response<Incoming>> {
        let mut not = vec![];
        let mut first: Option<Failure> = None;
        loop {
            let (at, wire) = match self.inner.endpoints.connect(&not).await {
                Ok(got) => got,
                Err(e) => return Err(first.unwrap_or_else(|| self.unreachable(&e))),
            };
            not.push(at);
            let others = not.len() < self.inner.endpoints.urls().len();
            let patience = if others { patience.min(NEXT_AFTER) } else { patience };
            let failure = match tokio::time::timeout(patience, self.ask(wire, at, Method::GET, path, empty(), "")).await {
                Ok(Ok(r)) if r.status().is_success() => return Ok(r),
                Ok(Ok(r)) => refused(what, r).await,
                Ok(Err(e)) => Failure::link_lost(what, root_cause(&e)),
                Err(_) => Failure::new(
                    "timeout",
                    what,
                    format!("no answer from {} in {} s", self.inner.endpoints.urls()[at], patience.as_secs()),
                    "look at `ks events` and the node's log",
                ),
            };
            if !others || !elsewhere(&failure.error.code) {
                return Err(first.unwrap_or(failure));
            }
            first.get_or_insert(failure);
        }
    }

    /// A request that may change something: sent once, over the first connection that can be had.
    async fn change(&self, what: &str, method: Method, path: &str, body: Body, kind: &str) -> Res<Response<Incoming>> {
        let (at, wire) = self.inner.endpoints.connect(&[]).await.map_err(|e| self.unreachable(&e))?;
        let r = self.ask(wire, at, method, path, body, kind).await.map_err(|e| Failure::link_lost(what, root_cause(&e)))?;
        if r.status().is_success() { Ok(r) } else { Err(refused(what, r).await) }
    }

    /// A short GET.
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Res<T> {
        parse(&format!("GET {path}"), &self.get_text(path).await?)
    }
    /// A short GET, its answer as text.
    pub async fn get_text(&self, path: &str) -> Res<Vec<u8>> {
        let what = format!("GET {path}");
        let late =
            || Failure::new("timeout", &what, format!("no whole answer in {} s", SHORT_CALL.as_secs()), "look at `ks events`");
        let whole = async {
            let response = self.look(&what, path, SHORT_CALL).await?;
            collect(&what, response).await
        };
        tokio::time::timeout(SHORT_CALL, whole).await.map_err(|_| late())?
    }
    /// One session.
    pub async fn session(&self, name: &str) -> Res<Session> {
        self.get(&format!("/v1/sessions/{name}")).await
    }
    /// A DELETE; whatever the node answers.
    pub async fn delete(&self, path: &str) -> Res<Value> {
        let what = format!("DELETE {path}");
        let response = self.change(&what, Method::DELETE, path, empty(), "").await?;
        self.finish(&what, response, &mut |_, _, _| {}).await
    }
    /// A PUT of JSON.
    pub async fn put<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Res<T> {
        let what = format!("PUT {path}");
        let response = self.change(&what, Method::PUT, path, json_body(body)?, "application/json").await?;
        let value = self.finish(&what, response, &mut |_, _, _| {}).await?;
        serde_json::from_value(value).map_err(|e| not_understood(&what, &e.to_string()))
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
        let response = self.change(&what, Method::POST, path, json_body(body)?, "application/json").await?;
        let value = self.finish(&what, response, step).await?;
        serde_json::from_value(value).map_err(|e| not_understood(&what, &e.to_string()))
    }
    /// Sends a byte stream.
    pub async fn put_stream<S>(&self, path: &str, body: S) -> Res<()>
    where
        S: Stream<Item = std::io::Result<Vec<u8>>> + Send + 'static,
    {
        let what = format!("PUT {}", path.split('?').next().unwrap_or(path));
        let body = StreamBody::new(body.map(|r| r.map(|b| Frame::data(Bytes::from(b)))));
        let response = self.change(&what, Method::PUT, path, body.boxed_unsync(), "application/x-tar").await?;
        self.finish(&what, response, &mut |_, _, _| {}).await.map(|_| ())
    }
    /// Receives a byte stream.
    pub async fn get_stream(&self, path: &str) -> Res<impl Stream<Item = std::io::Result<Vec<u8>>> + Send + use<>> {
        let what = format!("GET {}", path.split('?').next().unwrap_or(path));
        let response = self.look(&what, path, SHORT_CALL).await?;
        let stream = response.into_body().into_data_stream();
        Ok(stream.map(|r| r.map(|b| b.to_vec()).map_err(|e| std::io::Error::other(root_cause(&e)))))
    }
    /// Hands every line of an NDJSON answer to `line` until the node ends it.
    pub async fn lines(&self, path: &str, line: &mut (dyn FnMut(Value) -> Res<()> + Send)) -> Res<()> {
        let what = format!("GET {path}");
        let response = self.look(&what, path, SHORT_CALL).await?;
        let mut lines = Lines::default();
        let mut stream = response.into_body().into_data_stream();
        while let Some(part) = stream.next().await {
            for text in lines.push(&part.map_err(|e| Failure::link_lost(&what, root_cause(&e)))?)? {
                line(parse(&what, &text)?)?;
            }
        }
        for text in lines.rest() {
            line(parse(&what, &text)?)?;
        }
        Ok(())
    }

    /// Reads an answer to its end: NDJSON progress with a result, or the result itself.
    async fn finish(
        &self,
        what: &str,
        response: Response<Incoming>,
        step: &mut (dyn FnMut(&str, u64, u64) + Send),
    ) -> Res<Value> {
        let mut lines = Lines::default();
        let mut last: Option<Value> = None;
        let mut progressing = false;
        let mut stream = response.into_body().into_data_stream();
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

/// Refusals of one node that another may not share: it is cut off, or its peer is.
fn elsewhere(code: &str) -> bool {
    matches!(code, "no-quorum" | "lapsed" | "unreachable" | "link-lost" | "timeout")
}

fn empty() -> Body {
    Full::new(Bytes::new()).map_err(|never| match never {}).boxed_unsync()
}

fn json_body(body: &impl Serialize) -> Res<Body> {
    let text = serde_json::to_vec(body).map_err(|e| Failure::local("cannot write the request", e, "report this"))?;
    Ok(Full::new(Bytes::from(text)).map_err(|never| match never {}).boxed_unsync())
}

async fn collect(what: &str, response: Response<Incoming>) -> Res<Vec<u8>> {
    let mut all = vec![];
    let mut stream = response.into_body().into_data_stream();
    while let Some(part) = stream.next().await {
        all.extend_from_slice(&part.map_err(|e| Failure::link_lost(what, root_cause(&e)))?);
        if all.len() > ANSWER_MAX {
            return Err(not_understood(what, "it has no end"));
        }
    }
    Ok(all)
}

async fn refused(what: &str, response: Response<Incoming>) -> Failure {
    let status = response.status().as_u16();
    // What cannot be read of a refusal is not missed: the status says enough.
    let body = collect(what, response).await.unwrap_or_default();
    refusal(what, status, &body)
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
