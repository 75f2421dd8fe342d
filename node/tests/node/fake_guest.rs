//! A guest whose whole memory is one small map of files, so that what a checkpoint keeps can be seen.

use futures::future::poll_fn;
use ks_node::host::guest::{read_exec_frame, read_message, write_message};
use ks_proto::guest::{Check, ExecFrame, FileEntry, GuestAnswer, GuestRequest, HookKind, PROTOCOL};
use ks_proto::relay::{BodyFrame, Call, CallId, FRAME_HEADER_BYTES, RelayAnswer, RelayAsk};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};
use tokio_util::compat::{FuturesAsyncReadCompatExt, TokioAsyncReadCompatExt};

/// What is in the guest's memory.
#[derive(Debug, Default, Clone, Serialize, Deserialize)]
pub struct Memory {
    pub files: BTreeMap<String, String>,
    /// Change times of the files, Unix nanoseconds.
    pub ctimes: BTreeMap<String, i64>,
    pub hostname: String,
    pub machine_id: String,
    pub hooks: Vec<String>,
    pub frozen: bool,
    pub main: Vec<String>,
    pub timeline: Timeline,
}

/// What the relay keeps in the guest's memory.
#[derive(Debug, Default, Clone, Serialize, Deserialize)]
pub struct Timeline {
    nonce: String,
    prior: Option<String>,
    position: u64,
    highest: u64,
    calls: u64,
}

impl Timeline {
    fn restored(&mut self, nonce: &str) {
        let before = std::mem::replace(&mut self.nonce, nonce.to_owned());
        self.prior = Some(before).filter(|b| !b.is_empty());
        (self.position, self.calls) = (self.highest, 0);
    }
}

/// What came of a model call.
#[derive(Debug, Default, Clone, Serialize, Deserialize)]
pub struct Called {
    pub seq: Option<u64>,
    pub status: u16,
    /// Code and words of a refusal.
    pub refused: Option<(String, String)>,
    pub body: String,
    /// How it ended when it did not end well.
    pub cut: Option<String>,
}

type Opens = mpsc::Sender<oneshot::Sender<yamux::Stream>>;

/// Asks for egress to `host` over a stream of the guest's own; the answer as JSON.
async fn relay(opens: &Opens, host: &str) -> std::io::Result<Vec<u8>> {
    let mut stream = open(opens).await?;
    write_message(&mut stream, &RelayAsk::Egress { host: host.into(), port: 443 }).await?;
    let answer: RelayAnswer = read_message(&mut stream).await?;
    Ok(serde_json::to_vec(&answer)?)
}

async fn open(opens: &Opens) -> std::io::Result<impl AsyncRead + AsyncWrite + Unpin> {
    let (tx, rx) = oneshot::channel();
    opens.send(tx).await.map_err(std::io::Error::other)?;
    Ok(rx.await.map_err(std::io::Error::other)?.compat())
}

/// Calls a model over a stream of the guest's own, as its relay would, and reads the answer to its end. A stream that breaks is told as
/// such: a relay would come back.
async fn call(opens: &Opens, memory: &Mutex<Memory>, path: &str, body: &str) -> Called {
    let mut called = Called::default();
    if let Err(e) = try_call(opens, memory, (path, body), &mut called).await {
        called.cut = Some(format!("{BROKE}{e}"));
    }
    called
}

/// How [`Called::cut`] begins when the stream broke.
pub const BROKE: &str = "the stream broke: ";

async fn try_call(opens: &Opens, memory: &Mutex<Memory>, (path, body): (&str, &str), called: &mut Called) -> std::io::Result<()> {
    let mut stream = open(opens).await?;
    let ask = {
        let t = &mut memory.lock().unwrap().timeline;
        t.calls += 1;
        Call {
            call: CallId { nonce_hex: t.nonce.clone(), counter: t.calls },
            position: t.position,
            prior: t.prior.clone(),
            provider: "test".into(),
            method: "POST".into(),
            path: path.into(),
            headers: vec![("content-type".into(), "application/json".into())],
            body_bytes: body.len() as u64,
            body_hash: blake3::hash(body.as_bytes()).to_hex().to_string(),
        }
    };
    write_message(&mut stream, &RelayAsk::Call(ask)).await?;
    stream.write_all(&BodyFrame::Data(body.as_bytes().to_vec()).encode()).await?;
    stream.write_all(&BodyFrame::End.encode()).await?;
    while called.status == 0 {
        match read_message(&mut stream).await? {
            RelayAnswer::Accepted { seq } => {
                called.seq = Some(seq);
                let t = &mut memory.lock().unwrap().timeline;
                t.highest = t.highest.max(seq);
            }
            RelayAnswer::Head { status, .. } => called.status = status,
            RelayAnswer::Refused { status, code, message } => {
                (called.status, called.refused) = (status, Some((code, message)));
                return Ok(());
            }
            other => return Err(std::io::Error::other(format!("{other:?}"))),
        }
    }
    let mut text = Vec::new();
    loop {
        let mut header = [0; FRAME_HEADER_BYTES];
        stream.read_exact(&mut header).await?;
        let (kind, len) = BodyFrame::header(header).map_err(std::io::Error::other)?;
        let mut payload = vec![0; len];
        stream.read_exact(&mut payload).await?;
        match BodyFrame::from_parts(kind, payload).map_err(std::io::Error::other)? {
            BodyFrame::Data(d) => text.extend(d),
            BodyFrame::End => break,
            other => {
                called.cut = Some(format!("{other:?}"));
                break;
            }
        }
    }
    called.body = String::from_utf8(text).map_err(std::io::Error::other)?;
    Ok(())
}

#[derive(Clone)]
pub struct FakeGuest {
    pub memory: Arc<Mutex<Memory>>,
    /// Files here switch faults on.
    pub faults: PathBuf,
}

impl FakeGuest {
    pub async fn serve(self, socket: UnixStream) {
        let mut connection = yamux::Connection::new(socket.compat(), yamux::Config::default(), yamux::Mode::Server);
        let (opens, mut wanted) = mpsc::channel::<oneshot::Sender<yamux::Stream>>(8);
        let mut waiting: Option<oneshot::Sender<yamux::Stream>> = None;
        poll_fn(|cx| {
            loop {
                if waiting.is_none()
                    && let Poll::Ready(Some(next)) = wanted.poll_recv(cx)
                {
                    waiting = Some(next);
                }
                if waiting.is_some()
                    && let Poll::Ready(Ok(stream)) = connection.poll_new_outbound(cx)
                {
                    let _ = waiting.take().map(|to| to.send(stream));
                    continue;
                }
                match connection.poll_next_inbound(cx) {
                    Poll::Ready(Some(Ok(stream))) => {
                        let (this, opens) = (self.clone(), opens.clone());
                        tokio::spawn(async move {
                            let _ = this.stream(stream.compat(), opens).await;
                        });
                    }
                    Poll::Ready(_) => return Poll::Ready(()),
                    Poll::Pending => return Poll::Pending,
                }
            }
        })
        .await;
    }

    async fn stream(&self, mut s: impl AsyncRead + AsyncWrite + Unpin, opens: Opens) -> std::io::Result<()> {
        let request: GuestRequest = read_message(&mut s).await?;
        if self.faults.join("silent-guest").exists() {
            return std::future::pending().await;
        }
        let ok = GuestAnswer::Ok {};
        match request {
            GuestRequest::Hello { .. } => {
                let clocksource = if self.faults.join("wrong-clock").exists() { "hpet" } else { "tsc" };
                let answer = GuestAnswer::Hello {
                    protocol: PROTOCOL,
                    agent_version: "fake".into(),
                    boot_id: "b".into(),
                    kernel: "k".into(),
                    clocksource: clocksource.into(),
                };
                write_message(&mut s, &answer).await
            }
            GuestRequest::Hook { kind, entropy_hex, hostname, machine_id_hex, .. } => {
                assert_eq!(entropy_hex.len(), 128);
                {
                    let mut m = self.memory.lock().unwrap();
                    m.hooks.push(format!("{kind:?}"));
                    if kind != HookKind::AfterPause {
                        m.timeline.restored(&entropy_hex[..32]);
                    }
                    if kind == HookKind::Fork {
                        (m.hostname, m.machine_id) = (hostname, machine_id_hex);
                    }
                    m.frozen &= kind == HookKind::AfterPause;
                }
                write_message(&mut s, &ok).await
            }
            GuestRequest::Freeze {} | GuestRequest::Thaw {} => {
                self.memory.lock().unwrap().frozen = matches!(request, GuestRequest::Freeze {});
                write_message(&mut s, &ok).await
            }
            GuestRequest::StartMain { argv, .. } => {
                self.memory.lock().unwrap().main = argv;
                write_message(&mut s, &ok).await
            }
            GuestRequest::Exec { argv, .. } if ["relay", "call"].contains(&argv[0].as_str()) => {
                write_message(&mut s, &ok).await?;
                let answer = match argv.as_slice() {
                    [_, path, body] => serde_json::to_vec(&call(&opens, &self.memory, path, body).await)?,
                    _ => relay(&opens, &argv[1]).await?,
                };
                s.write_all(&ExecFrame::Stdout(answer).encode()).await?;
                s.write_all(&ExecFrame::Exit { code: 0, signal: 0 }.encode()).await?;
                s.shutdown().await
            }
            GuestRequest::Exec { argv, .. } => self.exec(&mut s, argv).await,
            GuestRequest::Attach { .. } | GuestRequest::PutTar { .. } | GuestRequest::GetTar { .. } => {
                self.transfer(&mut s, request).await
            }
            GuestRequest::Logs { lines } => {
                write_message(&mut s, &ok).await?;
                s.write_all(format!("log of {lines} lines").as_bytes()).await?;
                s.shutdown().await
            }
            GuestRequest::Doctor { .. } => {
                let check = Check { name: "clock".into(), ok: true, detail: "0 ms off".into(), fix: String::new() };
                write_message(&mut s, &GuestAnswer::Doctor { checks: vec![check] }).await
            }
            GuestRequest::ListFiles { hash, paths, .. } => {
                write_message(&mut s, &ok).await?;
                s.write_all(self.listing(hash, &paths).as_bytes()).await?;
                s.shutdown().await
            }
            GuestRequest::RelayGo {} | GuestRequest::Sync {} | GuestRequest::PowerOff {} => write_message(&mut s, &ok).await,
        }
    }

    /// One entry a line; with the fault `old-agent` as an agent that knows no times and no choice. Marks `listed`.
    fn listing(&self, hash: bool, paths: &[String]) -> String {
        use std::io::Write;
        let old = self.faults.join("old-agent").exists();
        let mut log = std::fs::OpenOptions::new().create(true).append(true).open(self.faults.join("listed")).unwrap();
        // One write: two guests append to this file at once.
        log.write_all(format!("hash {hash} {}\n", paths.join(" ")).as_bytes()).unwrap();
        let m = self.memory.lock().unwrap().clone();
        let mut out = String::new();
        for (path, text) in m.files.iter().filter(|(p, _)| old || paths.is_empty() || paths.contains(p)) {
            let told = if hash || old { blake3::hash(text.as_bytes()).to_hex().to_string() } else { String::new() };
            let time = if old { 0 } else { m.ctimes[path] };
            let entry = FileEntry {
                path: path.clone(),
                bytes: text.len() as u64,
                hash: told,
                mode: 0o644,
                mtime_ns: time,
                ctime_ns: time,
                ino: u64::from(!old),
            };
            out += &format!("{}\n", serde_json::to_string(&entry).unwrap());
        }
        out
    }

    fn set(&self, path: String, text: String, age: std::time::Duration) {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        let mut m = self.memory.lock().unwrap();
        m.ctimes.insert(path.clone(), i64::try_from((now - age).as_nanos()).unwrap());
        m.files.insert(path, text);
    }

    async fn transfer(&self, s: &mut (impl AsyncRead + AsyncWrite + Unpin), request: GuestRequest) -> std::io::Result<()> {
        let ok = GuestAnswer::Ok {};
        match request {
            GuestRequest::Attach { tty } => {
                write_message(s, &ok).await?;
                s.write_all(&ExecFrame::Stdout(format!("{} {}x{}", tty.term, tty.cols, tty.rows).into_bytes()).encode()).await?;
                while let Some(f) = read_exec_frame(s).await? {
                    if f == ExecFrame::Stdin(b"q".to_vec()) {
                        break;
                    }
                }
                s.write_all(&ExecFrame::Exit { code: 0, signal: 0 }.encode()).await
            }
            GuestRequest::PutTar { path } => {
                write_message(s, &ok).await?;
                let mut tar = Vec::new();
                s.read_to_end(&mut tar).await?;
                let answer = match untar(&tar) {
                    Some((name, text)) => {
                        self.set(format!("{path}/{name}"), text, std::time::Duration::ZERO);
                        ok
                    }
                    None => GuestAnswer::Refused {
                        code: "bad-request".into(),
                        what: "the archive".into(),
                        why: "cut short".into(),
                        next: "send it again".into(),
                    },
                };
                write_message(s, &answer).await
            }
            GuestRequest::GetTar { path } => {
                let text = self.memory.lock().unwrap().files.get(&path).cloned();
                match text {
                    Some(t) => {
                        write_message(s, &ok).await?;
                        let name = path.rsplit('/').next().unwrap().to_owned();
                        s.write_all(&ks_node::host::tar::one_file(&name, t.as_bytes()).unwrap()).await?;
                        s.shutdown().await
                    }
                    None => self.missing(s, &path).await,
                }
            }
            other => panic!("{other:?} is no transfer"),
        }
    }

    async fn missing(&self, s: &mut (impl AsyncWrite + Unpin), what: &str) -> std::io::Result<()> {
        let answer = GuestAnswer::Refused {
            code: "not-found".into(),
            what: what.into(),
            why: "no such file".into(),
            next: "look with ls".into(),
        };
        write_message(s, &answer).await
    }

    /// `set K V`, `set-long-ago K V`, `get K`, `dump`, `cat`, `yes`, `exit N`.
    async fn exec(&self, s: &mut (impl AsyncRead + AsyncWrite + Unpin), argv: Vec<String>) -> std::io::Result<()> {
        let words: Vec<&str> = argv.iter().map(String::as_str).collect();
        let mut code = 0;
        let mut out = Vec::new();
        match words.as_slice() {
            ["set", k, v] => self.set((*k).into(), (*v).into(), std::time::Duration::ZERO),
            ["set-long-ago", k, v] => self.set((*k).into(), (*v).into(), std::time::Duration::from_secs(3600)),
            ["get", k] => match self.memory.lock().unwrap().files.get(*k) {
                Some(v) => out = v.clone().into_bytes(),
                None => code = 1,
            },
            ["dump"] => out = serde_json::to_vec(&*self.memory.lock().unwrap())?,
            ["exit", n] => code = n.parse().unwrap(),
            ["cat" | "yes"] => {}
            _ => return self.missing(s, &argv[0]).await,
        }
        write_message(s, &GuestAnswer::Ok {}).await?;
        if words[0] == "yes" {
            loop {
                s.write_all(&ExecFrame::Stdout(vec![b'y'; 60_000]).encode()).await?;
            }
        }
        if words[0] == "cat" {
            while let Some(f) = read_exec_frame(s).await? {
                match f {
                    ExecFrame::Stdin(b) => s.write_all(&ExecFrame::Stdout(b).encode()).await?,
                    ExecFrame::StdinEof => break,
                    _ => {}
                }
            }
        }
        if !out.is_empty() {
            s.write_all(&ExecFrame::Stdout(out).encode()).await?;
        }
        s.write_all(&ExecFrame::Exit { code, signal: 0 }.encode()).await?;
        s.shutdown().await
    }
}

/// The first file of an archive.
pub fn untar(tar: &[u8]) -> Option<(String, String)> {
    let name = String::from_utf8(tar.get(..100)?.split(|b| *b == 0).next()?.to_vec()).ok()?;
    let size = usize::from_str_radix(std::str::from_utf8(&tar[124..135]).ok()?, 8).ok()?;
    Some((name, String::from_utf8(tar.get(512..512 + size)?.to_vec()).ok()?))
}
