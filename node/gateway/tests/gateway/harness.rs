//! A gateway in this process or as a process, a test provider, and a client that speaks the relay's frames over gw.sock.

use ks_gwd::host::node::{Config, Node};
use ks_gwd::host::{socket, wire};
use ks_proto::gateway::{AdminAnswer, AdminAsk, Began, GatewayAsk, PROTOCOL, Provider as Settings, ReplayMode, Secret, Stamp};
use ks_proto::relay::{BodyFrame, Call, CallId, Rejoin, RelayAnswer, RelayAsk};
use ks_proto::{RunToken, SessionId};
use ks_test_provider::{Provider, Tls};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;

/// The key that no guest, journal, log or error may ever show.
pub const MARKED: &str = "sk-marked-KEYOUTSIDE-0123456789abcdef";
/// Everything ends within this, or the test fails.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// Fails the test when `work` does not end.
pub async fn soon<T>(what: &str, work: impl Future<Output = T>) -> T {
    tokio::time::timeout(DEADLINE, work).await.unwrap_or_else(|_| panic!("{what} did not happen within {DEADLINE:?}"))
}

/// Waits until `holds`, looking again and again.
pub async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    soon(what, async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

/// A gateway with everything it needs.
pub struct World {
    pub dir: tempfile::TempDir,
    pub provider: Provider,
    pub serving: Option<tokio::task::JoinHandle<()>>,
    pub node: Option<Arc<Node>>,
}

impl World {
    /// A gateway in this process with the key `MARKED` for the provider `test` of this dialect.
    pub async fn new(dialect: &str) -> Self {
        Self::with(dialect, None, |_| {}).await
    }

    pub async fn with(dialect: &str, tls: Option<&Tls>, change: impl FnOnce(&mut Config)) -> Self {
        let provider = ks_test_provider::start("127.0.0.1:0".parse().unwrap(), tls).await.unwrap();
        let dir = tempfile::tempdir().unwrap();
        let mut world = Self { dir, provider, serving: None, node: None };
        world.start(change);
        let base_url = match tls {
            None => format!("http://{}", world.provider.address),
            Some(_) => format!("https://localhost:{}", world.provider.address.port()),
        };
        world.set_up(dialect, base_url, tls.map(|t| t.ca_pem.clone())).await;
        world
    }

    /// Starts the gateway on the folder as it is.
    pub fn start(&mut self, change: impl FnOnce(&mut Config)) {
        let mut config = Config::alone(self.dir.path());
        config.free_bytes = 1 << 20;
        change(&mut config);
        let node = Node::start(config).unwrap();
        let listener = socket::bind(&self.socket()).unwrap();
        tokio::spawn(node.clone().tick());
        self.node = Some(node.clone());
        self.serving = Some(tokio::spawn(async move { drop(socket::serve(node, listener).await) }));
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("gw.sock")
    }

    async fn set_up(&self, dialect: &str, base_url: String, ca_pem: Option<String>) {
        let mut admin = Admin::connect(&self.socket()).await;
        admin.done(AdminAsk::Unseal { key_hex: "07".repeat(32) }).await;
        let provider = Settings {
            name: "test".into(),
            dialect: dialect.into(),
            base_url,
            include_usage: dialect == "openai",
            ca_pem,
            builtin: false,
        };
        admin.done(AdminAsk::ProviderAdd { provider }).await;
        let add = AdminAsk::KeyAdd { user: "alice".into(), provider: "test".into(), secret: Secret(MARKED.into()) };
        assert!(matches!(admin.ask(add).await, AdminAnswer::Keys { .. }));
    }

    pub fn ledger(&self, session: SessionId) -> Vec<serde_json::Value> {
        ledger(self.dir.path(), session)
    }

    /// Asks whether the ledgers are in order.
    pub async fn in_order(&self, sessions: &[SessionId]) {
        let answer = Admin::connect(&self.socket()).await.ask(AdminAsk::Verify { sessions: sessions.to_vec() }).await;
        let AdminAnswer::Report { report } = answer else { panic!("{answer:?}") };
        assert_eq!((&report["ok"], &report["problems"]), (&true.into(), &serde_json::json!([])));
    }

    /// Lines of one kind.
    pub fn kind(&self, session: SessionId, kind: &str) -> Vec<serde_json::Value> {
        self.ledger(session).into_iter().filter(|l| l["kind"] == kind).collect()
    }
}

pub fn ledger(dir: &Path, session: SessionId) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(dir.join("journal").join(session.to_hex()).join("ledger.jsonl")).unwrap_or_default();
    text.lines().map(|l| serde_json::from_str(l).unwrap()).collect()
}

/// An admin connection.
pub struct Admin(UnixStream);

impl Admin {
    pub async fn connect(socket: &Path) -> Self {
        let mut admin = Self(UnixStream::connect(socket).await.unwrap());
        assert!(matches!(admin.ask(AdminAsk::Hello { protocol: PROTOCOL }).await, AdminAnswer::Hello { .. }));
        admin
    }
    pub async fn ask(&mut self, ask: AdminAsk) -> AdminAnswer {
        wire::write_message(&mut self.0, &GatewayAsk::Admin(Box::new(ask))).await.unwrap();
        soon("an admin answer", wire::read_message(&mut self.0)).await.unwrap().unwrap()
    }
    pub async fn done(&mut self, ask: AdminAsk) {
        let answer = self.ask(ask).await;
        assert!(matches!(answer, AdminAnswer::Done {}), "{answer:?}");
    }
}

/// One guest: a session, a run, a timeline.
#[derive(Clone)]
pub struct Guest {
    pub socket: PathBuf,
    pub stamp: Stamp,
    pub nonce: u8,
    pub prior: Option<u8>,
    pub position: u64,
}

pub fn nonce_hex(n: u8) -> String {
    format!("{n:02x}").repeat(16)
}

impl Guest {
    pub fn new(socket: &Path, session: u8) -> Self {
        let stamp = Stamp {
            session: SessionId([session; 16]),
            token: RunToken { generation: 0, epoch: 1, run: 1 },
            began: Began::Boot,
            origin: None,
            replay: ReplayMode::On,
            user: "alice".into(),
            replicas: vec![],
        };
        Self { socket: socket.to_owned(), stamp, nonce: 1, prior: None, position: 0 }
    }

    /// The guest after a crash, restored from a checkpoint at which it knew of `position`.
    pub fn resumed(&self, nonce: u8, position: u64) -> Self {
        let mut g = self.clone();
        g.stamp.token.run += 1;
        g.stamp.began = Began::Resume;
        (g.prior, g.nonce, g.position) = (Some(self.nonce), nonce, position);
        g
    }

    pub fn session(&self) -> SessionId {
        self.stamp.session
    }

    pub async fn open(&self) -> UnixStream {
        let mut s = UnixStream::connect(&self.socket).await.unwrap();
        wire::write_message(&mut s, &GatewayAsk::Stream(Box::new(self.stamp.clone()))).await.unwrap();
        s
    }

    pub fn call_id(&self, counter: u64) -> CallId {
        CallId { nonce_hex: nonce_hex(self.nonce), counter }
    }

    /// The ask of a call.
    pub fn asking(&self, counter: u64, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Call {
        Call {
            call: self.call_id(counter),
            position: self.position,
            prior: self.prior.map(nonce_hex),
            provider: "test".into(),
            method: "POST".into(),
            path: path.into(),
            headers: headers.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect(),
            body_bytes: body.len() as u64,
            body_hash: blake3::hash(body).to_hex().to_string(),
        }
    }

    /// Sends a call; its answer is read by the caller.
    pub async fn send(&self, call: Call, body: &[u8]) -> Answer {
        let mut s = self.open().await;
        wire::write_message(&mut s, &RelayAsk::Call(call)).await.unwrap();
        for part in body.chunks(60_000) {
            // A gateway that refuses need not read on.
            let _ = s.write_all(&BodyFrame::Data(part.to_vec()).encode()).await;
        }
        let _ = s.write_all(&BodyFrame::End.encode()).await;
        Answer::new(s)
    }

    pub async fn call(&self, counter: u64, path: &str, body: &[u8]) -> Answer {
        self.send(self.asking(counter, path, &[("content-type", "application/json")], body), body).await
    }

    /// Wants the rest of a call that was made in timeline `made_in`.
    pub async fn rejoin(&self, made_in: u8, counter: u64, before: &Answer, body: &[u8]) -> Answer {
        let mut s = self.open().await;
        let ask = RelayAsk::Rejoin(Rejoin {
            call: CallId { nonce_hex: nonce_hex(made_in), counter },
            timeline: nonce_hex(self.nonce),
            prior: self.prior.map(nonce_hex),
            position: self.position,
            seq: before.seq,
            offset: before.body.len() as u64,
            head_sent: before.head.is_some(),
            body_hash: blake3::hash(body).to_hex().to_string(),
        });
        wire::write_message(&mut s, &ask).await.unwrap();
        Answer::new(s)
    }
}

/// What came of an answer so far.
pub struct Answer {
    pub stream: UnixStream,
    pub seq: Option<u64>,
    pub head: Option<(u16, Vec<(String, String)>)>,
    pub refused: Option<(u16, String, String)>,
    pub unknown: bool,
    pub body: Vec<u8>,
    pub end: Option<Result<(), String>>,
}

impl Answer {
    fn new(stream: UnixStream) -> Self {
        Self { stream, seq: None, head: None, refused: None, unknown: false, body: Vec::new(), end: None }
    }

    /// Reads one message or frame; false at the end.
    pub async fn next(&mut self) -> bool {
        let done = self.refused.is_some() || self.unknown || self.end.is_some();
        if done {
            return false;
        }
        if self.head.is_some() {
            match soon("a frame", wire::read_frame(&mut self.stream)).await {
                Ok(Some(BodyFrame::Data(d))) => self.body.extend(d),
                Ok(Some(BodyFrame::End)) => self.end = Some(Ok(())),
                Ok(Some(BodyFrame::Abort(why))) => self.end = Some(Err(why)),
                Ok(Some(BodyFrame::Gone)) => panic!("a gateway is never gone"),
                Ok(None) | Err(_) => self.end = Some(Err("the stream ended".into())),
            }
            return true;
        }
        match soon("a message", wire::read_message(&mut self.stream)).await {
            Ok(Some(RelayAnswer::Accepted { seq })) => self.seq = Some(seq),
            Ok(Some(RelayAnswer::Head { status, headers, seq, .. })) => {
                assert_eq!(Some(seq), self.seq);
                self.head = Some((status, headers));
            }
            Ok(Some(RelayAnswer::Unknown {})) => self.unknown = true,
            Ok(Some(RelayAnswer::Refused { status, code, message })) => self.refused = Some((status, code, message)),
            Ok(Some(RelayAnswer::Ok {})) => panic!("no egress was asked for"),
            Ok(None) | Err(_) => self.end = Some(Err("the stream ended".into())),
        }
        true
    }

    pub async fn to_end(mut self) -> Self {
        while self.next().await {}
        self
    }

    /// Reads until the body has `n` bytes.
    pub async fn at_least(&mut self, n: usize) {
        while self.body.len() < n {
            assert!(self.next().await, "the answer ended after {} bytes: {:?} {:?}", self.body.len(), self.end, self.refused);
        }
    }

    pub fn status(&self) -> u16 {
        self.head.as_ref().map(|(s, _)| *s).or(self.refused.as_ref().map(|r| r.0)).unwrap_or(0)
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        let (_, all) = self.head.as_ref()?;
        all.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str())
    }
}

/// What the provider says to this request when it is asked directly: the answers are the same every time.
pub async fn reference(path: &str, body: &[u8]) -> Vec<u8> {
    reference_with(path, &[], body).await
}

pub async fn reference_with(path: &str, headers: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    use http_body_util::{BodyExt, Full};
    let other = ks_test_provider::start("127.0.0.1:0".parse().unwrap(), None).await.unwrap();
    let client = hyper_util::client::legacy::Client::builder(hyper_util::rt::TokioExecutor::new()).build_http();
    let mut request = hyper::Request::post(format!("http://{}{path}", other.address)).header("x-api-key", "reference");
    for (n, v) in headers {
        request = request.header(*n, *v);
    }
    let sent = client.request(request.body(Full::new(bytes::Bytes::copy_from_slice(body))).unwrap());
    let answer = tokio::select! {
        a = sent => a.unwrap(),
        () = async { loop { other.go(); tokio::time::sleep(Duration::from_millis(5)).await } } => unreachable!(),
    };
    let all = answer.into_body().collect();
    let all = tokio::select! {
        a = all => a.unwrap(),
        () = async { loop { other.go(); tokio::time::sleep(Duration::from_millis(5)).await } } => unreachable!(),
    };
    all.to_bytes().to_vec()
}

/// A streamed request of a dialect, with faults in the model's name: path and body.
pub fn streamed(dialect: &str, faults: &str) -> (String, Vec<u8>) {
    let model = format!("test-model!{faults}");
    let json = match dialect {
        "chat" => serde_json::json!({"model": model, "stream": true, "messages": [{"role": "user", "content": "größer?"}]}),
        "responses" => serde_json::json!({"model": model, "stream": true, "store": false, "input": "größer?"}),
        "anthropic" => {
            serde_json::json!({"model": model, "stream": true, "max_tokens": 100, "messages": [{"role": "user", "content": "größer?"}]})
        }
        _ => serde_json::json!({"contents": [{"parts": [{"text": "größer?"}]}]}),
    };
    let path = match dialect {
        "chat" => "/v1/chat/completions".to_owned(),
        "responses" => "/v1/responses".to_owned(),
        "anthropic" => "/v1/messages".to_owned(),
        _ => format!("/v1beta/models/{model}:streamGenerateContent?alt=sse"),
    };
    (path, json.to_string().into_bytes())
}

/// The provider setting's dialect for a dialect of requests.
pub fn family(dialect: &str) -> &str {
    match dialect {
        "chat" | "responses" => "openai",
        other => other,
    }
}
