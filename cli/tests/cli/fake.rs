//! A node made of canned answers: HTTP by hand, WebSockets by the same library that `ks` uses.

use futures::{SinkExt, StreamExt};
use ks_proto::guest::ExecFrame;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;

pub const DEADLINE: Duration = Duration::from_secs(30);
pub const TOKEN: &str = "a-token";

/// A request as it came.
#[derive(Debug, Clone)]
pub struct Request {
    pub line: String,
    pub body: Vec<u8>,
}

/// An answer: status and body; a body may end before it is complete.
pub struct Answer {
    pub status: u16,
    pub body: Vec<u8>,
    pub cut: bool,
}

impl Answer {
    pub fn json(v: &Value) -> Self {
        Self { status: 200, body: v.to_string().into_bytes(), cut: false }
    }
    pub fn lines(all: &[Value]) -> Self {
        let body = all.iter().map(|v| format!("{v}\n")).collect::<String>().into_bytes();
        Self { status: 200, body, cut: false }
    }
    pub fn error(status: u16, code: &str) -> Self {
        let v = json!({"schema": "ks.error.v1", "code": code, "what": "the what", "why": "the why", "next": "the next"});
        Self { status, body: v.to_string().into_bytes(), cut: false }
    }
    pub fn not_found() -> Self {
        Self::error(404, "not-found")
    }
    pub fn cut(mut self) -> Self {
        self.cut = true;
        self
    }
}

/// What a WebSocket does, on its own thread of the fake.
pub type Socket = WebSocketStream<TcpStream>;
type Http = dyn Fn(&Request) -> Answer + Send + Sync;
type Ws = dyn Fn(String, Socket, Shared) -> futures::future::BoxFuture<'static, ()> + Send + Sync;

/// What tests and the fake both see.
#[derive(Clone, Default)]
pub struct Shared(Arc<(Mutex<State>, Condvar)>);

#[derive(Default)]
pub struct State {
    pub requests: Vec<Request>,
    /// Bytes that came as Stdin frames, over all links.
    pub stdin: Vec<u8>,
    /// Other frames and the start messages, in words.
    pub said: Vec<String>,
    /// Links opened so far.
    pub links: usize,
    /// A gate that tests open for the fake.
    pub go: bool,
}

impl Shared {
    pub fn with<T>(&self, f: impl FnOnce(&mut State) -> T) -> T {
        let out = f(&mut self.0.0.lock().unwrap());
        self.0.1.notify_all();
        out
    }
    /// Waits until `ok` holds, with a deadline.
    pub fn wait(&self, what: &str, ok: impl Fn(&State) -> bool) {
        let until = Instant::now() + DEADLINE;
        let mut state = self.0.0.lock().unwrap();
        while !ok(&state) {
            let left = until.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "never: {what}; said {:?}, {} bytes of stdin", state.said, state.stdin.len());
            state = self.0.1.wait_timeout(state, left).unwrap().0;
        }
    }
    pub async fn gate(&self) {
        let me = self.clone();
        tokio::task::spawn_blocking(move || me.wait("the gate", |s| s.go)).await.unwrap();
    }
    pub fn asked(&self, line: &str) -> usize {
        self.with(|s| s.requests.iter().filter(|r| r.line.starts_with(line)).count())
    }
}

pub struct Fake {
    pub shared: Shared,
    pub home: tempfile::TempDir,
    pub address: SocketAddr,
    _runtime: tokio::runtime::Runtime,
}

impl Fake {
    pub fn new(http: impl Fn(&Request) -> Answer + Send + Sync + 'static) -> Self {
        Self::with_links(http, |_, _, _| Box::pin(async {}))
    }
    pub fn with_links(
        http: impl Fn(&Request) -> Answer + Send + Sync + 'static,
        ws: impl Fn(String, Socket, Shared) -> futures::future::BoxFuture<'static, ()> + Send + Sync + 'static,
    ) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Shared::default();
        let (http, ws): (Arc<Http>, Arc<Ws>) = (Arc::new(http), Arc::new(ws));
        let for_task = shared.clone();
        runtime.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, http.clone(), ws.clone(), for_task.clone()));
            }
        });
        let home = tempfile::tempdir().unwrap();
        let api = json!({"url": format!("http://{address}"), "token": TOKEN, "pid": 1});
        std::fs::write(home.path().join("api.json"), api.to_string()).unwrap();
        Self { shared, home, address, _runtime: runtime }
    }
    /// `ks` pointed at this node, with nothing of the caller's environment.
    pub fn command(&self) -> Command {
        ks(self.home.path())
    }
    pub fn ks(&self, args: &[&str]) -> Output {
        self.command().args(args).stdin(Stdio::null()).output().unwrap()
    }
}

/// `ks` with this folder as its node's.
pub fn ks(home: &Path) -> Command {
    let mut c = Command::new(env!("CARGO_BIN_EXE_ks"));
    c.env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap())
        .env("KS_HOME", home)
        .env("HOME", home)
        .env("TERM", "xterm-256color");
    c.current_dir(home);
    c
}

async fn serve(mut stream: TcpStream, http: Arc<Http>, ws: Arc<Ws>, shared: Shared) {
    let mut peeked = vec![0; 16 * 1024];
    let head = loop {
        let Ok(n) = stream.peek(&mut peeked).await else { return };
        if n == 0 {
            return;
        }
        let text = String::from_utf8_lossy(&peeked[..n]).into_owned();
        if let Some(end) = text.find("\r\n\r\n") {
            break text[..end].to_owned();
        }
        tokio::task::yield_now().await;
    };
    let line = head.lines().next().unwrap().to_owned();
    assert!(head.to_ascii_lowercase().contains(&format!("authorization: bearer {TOKEN}")), "no token in {head}");
    if head.to_ascii_lowercase().contains("upgrade: websocket") {
        let socket = tokio_tungstenite::accept_async(stream).await.unwrap();
        shared.with(|s| s.links += 1);
        return ws(line, socket, shared).await;
    }
    let mut skip = vec![0; head.len() + 4];
    stream.read_exact(&mut skip).await.unwrap();
    let body = read_body(&mut stream, &head.to_ascii_lowercase()).await;
    let request = Request { line, body };
    shared.with(|s| s.requests.push(request.clone()));
    let answer = tokio::task::spawn_blocking(move || http(&request)).await.unwrap();
    let length = if answer.cut { answer.body.len() + 1000 } else { answer.body.len() };
    let head = format!("HTTP/1.1 {} X\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n", answer.status);
    // A client that has gone away is part of some tests.
    let _ = stream.write_all(head.as_bytes()).await;
    let _ = stream.write_all(&answer.body).await;
}

async fn read_body(stream: &mut TcpStream, head: &str) -> Vec<u8> {
    let field = |name: &str| head.lines().find_map(|l| l.strip_prefix(name)).map(|v| v.trim().to_owned());
    if let Some(n) = field("content-length:") {
        let mut body = vec![0; n.parse().unwrap()];
        stream.read_exact(&mut body).await.unwrap();
        return body;
    }
    if field("transfer-encoding:").as_deref() != Some("chunked") {
        return vec![];
    }
    let mut body = vec![];
    loop {
        let mut size = String::new();
        while !size.ends_with("\r\n") {
            match stream.read_u8().await {
                Ok(b) => size.push(char::from(b)),
                // The client broke the upload off.
                Err(_) => return body,
            }
        }
        let n = usize::from_str_radix(size.trim(), 16).unwrap();
        let mut part = vec![0; n + 2];
        if stream.read_exact(&mut part).await.is_err() {
            return body;
        }
        if n == 0 {
            return body;
        }
        body.extend_from_slice(&part[..n]);
    }
}

/// Takes the start message of a link and notes it.
pub async fn started(socket: &mut Socket, shared: &Shared) -> Value {
    loop {
        match socket.next().await {
            Some(Ok(Message::Text(t))) => {
                shared.with(|s| s.said.push(format!("start {t}")));
                return serde_json::from_str(&t).unwrap();
            }
            Some(Ok(_)) => {}
            _ => return Value::Null,
        }
    }
}

/// The next frame, noted; None at the end of the link.
pub async fn frame(socket: &mut Socket, shared: &Shared) -> Option<ExecFrame> {
    loop {
        match socket.next().await? {
            Ok(Message::Binary(b)) => {
                let f = ExecFrame::decode_message(&b).unwrap();
                shared.with(|s| match &f {
                    ExecFrame::Stdin(b) => s.stdin.extend_from_slice(b),
                    other => s.said.push(format!("{other:?}")),
                });
                return Some(f);
            }
            Ok(_) => {}
            Err(_) => return None,
        }
    }
}

pub async fn send(socket: &mut Socket, f: ExecFrame) -> bool {
    socket.send(Message::binary(f.encode_message())).await.is_ok()
}

pub async fn out(socket: &mut Socket, text: &str) -> bool {
    send(socket, ExecFrame::Stdout(text.as_bytes().to_vec())).await
}

pub fn session(name: &str, state: &str, run: u64) -> Value {
    json!({
        "schema": "ks.session.v1", "id": "07".repeat(16), "name": name, "state": state, "reason": "", "engine": "qemu",
        "profile": "tcg", "engine_why": "no hardware", "image": "default", "memory_mib": 512, "vcpus": 1,
        "token": {"generation": 0, "epoch": 1, "run": run}, "created_unix_ms": 1_700_000_000_000u64, "forked_from": null,
        "last_checkpoint": null, "checkpoints": 0, "cadence_s": 60, "idle_park_s": 0, "command": ["sleep", "9"],
        "last_interruption": null, "vmm_pid": 5
    })
}

pub fn checkpoint(number: u64) -> Value {
    json!({
        "number": number, "id": "ab".repeat(32), "parent": null, "created_unix_ms": 1_700_000_000_000u64, "message": "tests green",
        "reason": "demand", "pinned": false, "durability": "durable", "logical_bytes": 440_401_920u64, "stored_bytes": 32_505_856u64,
        "pause_us": 12_345, "total_us": 99_000
    })
}

/// Checks an exit code and shows everything when it is another.
pub fn expect(o: &Output, code: i32) -> (String, String) {
    let (out, err) = (String::from_utf8_lossy(&o.stdout).into_owned(), String::from_utf8_lossy(&o.stderr).into_owned());
    assert_eq!(o.status.code(), Some(code), "stdout: {out}\nstderr: {err}");
    (out, err)
}
