//! The HTTP side: reads a request, finds its dialect and faults, and writes the answer piece by piece.

use crate::answer::{self, Asked, Dialect, Piece};
use crate::fault::Faults;
use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::{HeaderMap, Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};

/// Largest request body, decoded.
const BODY_BYTES_MAX: u64 = 128 << 20;

/// An answer that is cut waits so long for its bytes to leave.
const FLUSH: Duration = Duration::from_millis(30);

type Body = UnsyncBoxBody<Bytes, io::Error>;

/// What has been asked of the provider so far.
#[derive(Debug, Default)]
struct Books {
    purchases: BTreeMap<String, u64>,
    finished: BTreeMap<String, u64>,
    requests: u64,
    /// BLAKE3 of each key that came.
    keys: BTreeSet<String>,
    paths: BTreeSet<String>,
}

struct Shared {
    books: Mutex<Books>,
    changed: watch::Sender<u64>,
    go: watch::Sender<u64>,
}

/// A certificate authority made for this provider, to be trusted by the one who tests.
pub struct Tls {
    config: Arc<rustls::ServerConfig>,
    /// The authority, PEM.
    pub ca_pem: String,
}

impl Tls {
    /// A certificate for `name`, and the authority that signed it.
    ///
    /// # Errors
    /// If no certificate can be made.
    pub fn for_name(name: &str) -> anyhow::Result<Self> {
        let mut ca = rcgen::CertificateParams::new(Vec::new())?;
        ca.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let ca_key = rcgen::KeyPair::generate()?;
        let ca_pem = ca.self_signed(&ca_key)?.pem();
        let issuer = rcgen::Issuer::new(ca, ca_key);
        let key = rcgen::KeyPair::generate()?;
        let cert = rcgen::CertificateParams::new(vec![name.to_owned()])?.signed_by(&key, &issuer)?;
        let der = rustls::pki_types::PrivateKeyDer::Pkcs8(key.serialize_der().into());
        let config = rustls::ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(vec![cert.der().clone()], der)?;
        Ok(Self { config: Arc::new(config), ca_pem })
    }
}

/// A running provider; it ends when this is dropped.
pub struct Provider {
    /// Where it listens.
    pub address: SocketAddr,
    shared: Arc<Shared>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Provider {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Provider {
    /// How often requests were accepted, in all.
    pub fn purchases(&self) -> u64 {
        self.shared.lock().purchases.values().sum()
    }
    /// How often each request was accepted, by hash of its body.
    pub fn purchases_by_request(&self) -> BTreeMap<String, u64> {
        self.shared.lock().purchases.clone()
    }
    /// Answers that were written to their end.
    pub fn finished(&self) -> u64 {
        self.shared.lock().finished.values().sum()
    }
    /// Requests of any kind that came.
    pub fn requests(&self) -> u64 {
        self.shared.lock().requests
    }
    /// BLAKE3 (hex) of each key that came.
    pub fn keys(&self) -> BTreeSet<String> {
        self.shared.lock().keys.clone()
    }
    /// Waits until `what` holds of the purchases and finished answers; no deadline of its own.
    pub async fn until(&self, what: impl Fn(u64, u64) -> bool) {
        let mut changed = self.shared.changed.subscribe();
        while !what(self.purchases(), self.finished()) {
            if changed.changed().await.is_err() {
                return;
            }
        }
    }
    /// Lets stalled answers go on.
    pub fn go(&self) {
        self.shared.go.send_modify(|n| *n += 1);
    }
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn note(&self, change: impl FnOnce(&mut Books)) {
        change(&mut self.lock());
        self.changed.send_modify(|n| *n += 1);
    }
}

/// Serves on `listen`, over TLS if `tls` is given.
///
/// # Errors
/// If it cannot listen there.
pub async fn start(listen: SocketAddr, tls: Option<&Tls>) -> io::Result<Provider> {
    let listener = TcpListener::bind(listen).await?;
    let address = listener.local_addr()?;
    let shared = Arc::new(Shared { books: Mutex::default(), changed: watch::Sender::new(0), go: watch::Sender::new(0) });
    let acceptor = tls.map(|t| tokio_rustls::TlsAcceptor::from(t.config.clone()));
    let task = tokio::spawn(accept(listener, acceptor, shared.clone()));
    Ok(Provider { address, shared, task })
}

async fn accept(listener: TcpListener, acceptor: Option<tokio_rustls::TlsAcceptor>, shared: Arc<Shared>) {
    // Connections end with the provider: they hang on this set.
    let mut open = tokio::task::JoinSet::new();
    loop {
        let Ok((tcp, _)) = listener.accept().await else { return };
        tcp.set_nodelay(true).ok();
        let (acceptor, shared) = (acceptor.clone(), shared.clone());
        open.spawn(async move {
            match acceptor {
                None => connection(tcp, shared).await,
                Some(a) => {
                    if let Ok(tls) = a.accept(tcp).await {
                        connection(tls, shared).await;
                    }
                }
            }
        });
        while open.try_join_next().is_some() {}
    }
}

async fn connection(io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, shared: Arc<Shared>) {
    let service = hyper::service::service_fn(move |request| handle(request, shared.clone()));
    let _ = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(io), service).await;
}

fn full(status: u16, value: &Value) -> Response<Body> {
    let body = Full::new(Bytes::from(value.to_string())).map_err(|never| match never {}).boxed_unsync();
    let mut response = Response::new(body);
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    response.headers_mut().insert("content-type", hyper::header::HeaderValue::from_static("application/json"));
    response
}

fn dialect(path: &str) -> Option<Dialect> {
    match path {
        "/v1/chat/completions" => Some(Dialect::Chat),
        "/v1/responses" => Some(Dialect::Responses),
        "/v1/messages" => Some(Dialect::Anthropic),
        p if p.starts_with("/v1beta/models/") && p.to_ascii_lowercase().contains("generatecontent") => Some(Dialect::Gemini),
        _ => None,
    }
}

fn key(headers: &HeaderMap) -> String {
    let text = |name: &str| headers.get(name).and_then(|v| v.to_str().ok()).unwrap_or_default().to_owned();
    let bearer = text("authorization");
    let all = [text("x-api-key"), text("x-goog-api-key"), bearer.trim_start_matches("Bearer ").to_owned()];
    all.into_iter().find(|k| !k.is_empty()).unwrap_or_default()
}

fn decoded(headers: &HeaderMap, raw: &[u8]) -> io::Result<Vec<u8>> {
    let mut out = Vec::new();
    match headers.get("content-encoding").and_then(|v| v.to_str().ok()) {
        Some("gzip") => flate2::read::MultiGzDecoder::new(raw).take(BODY_BYTES_MAX).read_to_end(&mut out)?,
        Some("zstd") => zstd::stream::read::Decoder::new(raw)?.take(BODY_BYTES_MAX).read_to_end(&mut out)?,
        _ => raw.take(BODY_BYTES_MAX).read_to_end(&mut out)?,
    };
    Ok(out)
}

async fn handle(request: Request<Incoming>, shared: Arc<Shared>) -> Result<Response<Body>, io::Error> {
    let (head, body) = request.into_parts();
    let path = head.uri.path().to_owned();
    match (&head.method, path.as_str()) {
        (&Method::GET, "/purchases") => return Ok(full(200, &books(&shared))),
        (&Method::POST, "/go") => {
            shared.go.send_modify(|n| *n += 1);
            return Ok(full(200, &json!({})));
        }
        _ => {}
    }
    let raw = body.collect().await.map_err(io::Error::other)?.to_bytes();
    let key = key(&head.headers);
    shared.note(|b| {
        b.requests += 1;
        b.keys.insert(blake3::hash(key.as_bytes()).to_hex().to_string());
        b.paths.insert(path.clone());
    });
    if head.method == Method::GET && path.ends_with("/models") {
        return Ok(full(200, &json!({"object": "list", "data": [{"id": "test", "object": "model"}], "models": []})));
    }
    let Some(dialect) = dialect(&path) else {
        return Ok(full(404, &json!({"error": {"message": format!("{path} is not served here"), "type": "not_found"}})));
    };
    let Some(asked) = asked(dialect, &head.uri, &head.headers, &raw) else {
        return Ok(full(400, &json!({"error": {"message": "the body is not a request this provider reads", "type": "bad"}})));
    };
    if key.is_empty() {
        return Ok(full(401, &answer::error_body(dialect, 401, "")));
    }
    Ok(respond(asked, &key, &shared))
}

fn books(shared: &Shared) -> Value {
    let b = shared.lock();
    json!({"purchases": b.purchases, "finished": b.finished, "total": b.purchases.values().sum::<u64>(), "requests": b.requests})
}

fn asked(dialect: Dialect, uri: &hyper::Uri, headers: &HeaderMap, raw: &[u8]) -> Option<Asked> {
    let plain = decoded(headers, raw).ok()?;
    let mut v: Value = serde_json::from_slice(&plain).ok()?;
    let include_usage = v["stream_options"]["include_usage"].as_bool().unwrap_or(false);
    // Asking for the usage changes nothing of the answer but one chunk.
    if let Some(all) = v.as_object_mut() {
        all.remove("stream_options");
    }
    let asked = v.to_string();
    let (name, stream) = match dialect {
        Dialect::Gemini => {
            let (model, verb) = uri.path().strip_prefix("/v1beta/models/")?.rsplit_once(':')?;
            (model.to_owned(), verb == "streamGenerateContent")
        }
        Dialect::Chat | Dialect::Responses | Dialect::Anthropic => {
            (v["model"].as_str()?.to_owned(), v["stream"].as_bool().unwrap_or(false))
        }
    };
    let (model, listed) = name.split_once('!').unwrap_or((&name, ""));
    let header = headers.get("x-test-fault").and_then(|v| v.to_str().ok());
    Some(Asked {
        dialect,
        model: model.to_owned(),
        stream,
        include_usage,
        input: asked.len() / 4,
        hash: blake3::hash(asked.as_bytes()),
        faults: Faults::parse(header.unwrap_or(listed)).ok()?,
    })
}

fn respond(asked: Asked, key: &str, shared: &Arc<Shared>) -> Response<Body> {
    if asked.faults.redirect {
        let mut r = full(307, &json!({}));
        r.headers_mut().insert("location", hyper::header::HeaderValue::from_static("http://127.0.0.1:9/elsewhere"));
        return r;
    }
    if let Some(status) = asked.faults.status {
        let mut r = full(status, &answer::error_body(asked.dialect, status, key));
        if status == 429 || status == 529 {
            r.headers_mut().insert("retry-after", hyper::header::HeaderValue::from_static("7"));
            r.headers_mut().insert("x-should-retry", hyper::header::HeaderValue::from_static("true"));
        }
        return r;
    }
    let hash = asked.hash.to_hex().to_string();
    shared.note(|b| *b.purchases.entry(hash).or_default() += 1);
    let (tx, rx) = mpsc::channel::<Result<Frame<Bytes>, io::Error>>(64);
    let stream = futures::stream::unfold(rx, |mut rx| async move { rx.recv().await.map(|f| (f, rx)) });
    let mut response = Response::new(BodyExt::boxed_unsync(StreamBody::new(stream)));
    let kind = if asked.stream { "text/event-stream; charset=utf-8" } else { "application/json" };
    let headers = response.headers_mut();
    headers.insert("content-type", hyper::header::HeaderValue::from_static(kind));
    if let Ok(id) = format!("req_{}", &asked.hash.to_hex()[..16]).parse() {
        headers.insert("x-request-id", id);
    }
    if let Some(coding) = asked.faults.coding {
        headers.insert("content-encoding", hyper::header::HeaderValue::from_static(coding));
    }
    for n in 0..asked.faults.headers {
        if let Ok(name) = hyper::header::HeaderName::try_from(format!("x-many-{n}")) {
            headers.insert(name, hyper::header::HeaderValue::from_static("v"));
        }
    }
    tokio::spawn(write(asked, tx, shared.clone()));
    response
}

/// Compresses piece by piece, each flushed, as real providers do with streams.
enum Coder {
    Plain(Vec<u8>),
    Gzip(flate2::write::GzEncoder<Vec<u8>>),
    Zstd(zstd::stream::write::Encoder<'static, Vec<u8>>),
}

impl Coder {
    fn new(coding: Option<&str>) -> io::Result<Self> {
        Ok(match coding {
            Some("gzip") => Self::Gzip(flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast())),
            Some("zstd") => Self::Zstd(zstd::stream::write::Encoder::new(Vec::new(), 1)?),
            _ => Self::Plain(Vec::new()),
        })
    }
    fn push(&mut self, bytes: &[u8]) -> io::Result<Vec<u8>> {
        match self {
            Self::Plain(v) => {
                v.extend_from_slice(bytes);
                Ok(std::mem::take(v))
            }
            Self::Gzip(e) => {
                e.write_all(bytes)?;
                e.flush()?;
                Ok(std::mem::take(e.get_mut()))
            }
            Self::Zstd(e) => {
                e.write_all(bytes)?;
                e.flush()?;
                Ok(std::mem::take(e.get_mut()))
            }
        }
    }
    fn finish(self) -> io::Result<Vec<u8>> {
        match self {
            Self::Plain(v) => Ok(v),
            Self::Gzip(e) => e.finish(),
            Self::Zstd(e) => e.finish(),
        }
    }
}

struct Writer {
    tx: mpsc::Sender<Result<Frame<Bytes>, io::Error>>,
    chunk: Option<usize>,
    cut: Option<usize>,
    written: usize,
}

impl Writer {
    /// False if the answer ends here: the reader is gone, or the cut was reached.
    async fn put(&mut self, mut bytes: &[u8]) -> bool {
        let left = self.cut.map(|c| c - self.written.min(c));
        let cuts = left.is_some_and(|l| bytes.len() >= l);
        if let Some(l) = left.filter(|_| cuts) {
            bytes = &bytes[..l];
        }
        for part in bytes.chunks(self.chunk.unwrap_or(usize::MAX)) {
            if self.tx.send(Ok(Frame::data(Bytes::copy_from_slice(part)))).await.is_err() {
                return false;
            }
        }
        self.written += bytes.len();
        if cuts {
            // What was handed over before is written once the body has nothing more to give.
            tokio::time::sleep(FLUSH).await;
            let _ = self.tx.send(Err(io::Error::other("cut as asked"))).await;
        }
        !cuts
    }
}

async fn write(asked: Asked, tx: mpsc::Sender<Result<Frame<Bytes>, io::Error>>, shared: Arc<Shared>) {
    let mut go = shared.go.subscribe();
    let mut out = Writer { tx, chunk: asked.faults.chunk, cut: asked.faults.cut, written: 0 };
    let pieces = if asked.stream { answer::pieces(&asked) } else { vec![Piece::Frame(answer::whole(&asked).to_string())] };
    let Ok(mut coder) = Coder::new(asked.faults.coding) else { return };
    let mut tokens = 0;
    let stalls = asked.faults.stall;
    // Without a stream there is no token to stall after: it stalls before the body.
    if stalls.is_some() && !asked.stream && go.changed().await.is_err() {
        return;
    }
    for piece in pieces {
        let (text, is_token) = match piece {
            Piece::Frame(t) => (t, false),
            Piece::Token(t) => (t, true),
        };
        if is_token && stalls == Some(tokens) && go.changed().await.is_err() {
            return;
        }
        if is_token && asked.faults.slow_ms > 0 {
            tokio::time::sleep(Duration::from_millis(asked.faults.slow_ms)).await;
        }
        tokens += usize::from(is_token);
        let Ok(bytes) = coder.push(text.as_bytes()) else { return };
        if !out.put(&bytes).await {
            return;
        }
    }
    let Ok(rest) = coder.finish() else { return };
    if out.put(&rest).await {
        shared.note(|b| *b.finished.entry(asked.hash.to_hex().to_string()).or_default() += 1);
    }
}
