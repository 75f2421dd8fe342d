//! A node in a temporary folder, its stand-ins, and a client.

use futures::{SinkExt, StreamExt};
use ks_node::host::process;
use ks_proto::api::{ApiError, ApiFile, Event, ExecStart, Session};
use ks_proto::guest::ExecFrame;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;

/// Everything that is waited for has this long.
pub const DEADLINE: Duration = Duration::from_secs(120);

pub struct TestNode {
    dir: tempfile::TempDir,
    ksd: Option<Child>,
    supervised: bool,
    http: reqwest::Client,
}

/// A client. What else is in the build gives reqwest a TLS backend, which wants a provider even for plain loopback.
pub fn http() -> reqwest::Client {
    drop(tokio_rustls::rustls::crypto::ring::default_provider().install_default());
    reqwest::Client::new()
}

fn script(path: &Path, text: &str) {
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

const IMAGE_SCRIPT: &str = r#"#!/bin/sh
while [ $# -gt 0 ]; do [ "$1" = --out ] && out=$2; [ "$1" = --kernel ] && kernel=$2; shift; done
[ "$kernel" = /bad ] && { echo "ks-image: no such kernel" >&2; exit 1; }
mkdir "$out" && echo kernel >"$out/kernel" && echo initrd >"$out/initrd"
head -c 200000 /dev/zero | tr '\0' x >"$out/root.ext4" && truncate -s 1048576 "$out/root.ext4"
echo '{"schema":"ks.image.progress.v1","step":"root disk","n":1,"of":1,"detail":"made"}'
echo '{"schema":"ks.image.v1","name":"x","id":"dev0","kernel_release":"6.1-fake","cmdline":"quiet"}' | tee "$out/image.json"
"#;

impl TestNode {
    /// A running node with the image `default`.
    pub async fn with_image() -> Self {
        let mut n = Self::start(false);
        n.up().await;
        n.call("images/build", json!({})).await.1.unwrap();
        n
    }

    /// A folder with stand-ins, nothing started.
    pub fn start(supervised: bool) -> Self {
        let dir = tempfile::Builder::new().prefix("ksn").tempdir_in("/tmp").unwrap();
        for sub in ["bin", "faults"] {
            std::fs::create_dir(dir.path().join(sub)).unwrap();
        }
        let this = std::env::current_exe().unwrap();
        let main = "fake_vmm::main_when_started_as_ks_vmm";
        let vmm = format!("#!/bin/sh\nexec {} --exact {main} --nocapture --test-threads=1 -- \"$@\"\n", this.display());
        script(&dir.path().join("bin/ks-vmm"), &vmm);
        let main = "fake_gateway::main_when_started_as_ksgw";
        let ksgw = format!("#!/bin/sh\nexec {} --exact {main} --nocapture --test-threads=1 -- \"$@\"\n", this.display());
        script(&dir.path().join("bin/ksgw"), &ksgw);
        script(&dir.path().join("bin/ks-image"), IMAGE_SCRIPT);
        script(&dir.path().join("bin/qemu"), "#!/bin/sh\necho 'QEMU emulator version 0 (fake)'\n");
        Self { dir, ksd: None, supervised, http: http() }
    }

    pub fn data(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    /// A program of the node.
    pub fn bin(&self, name: &str) -> PathBuf {
        self.dir.path().join("bin").join(name)
    }

    pub fn fault(&self, name: &str, on: bool) {
        let path = self.dir.path().join("faults").join(name);
        if on { std::fs::write(path, "").unwrap() } else { drop(std::fs::remove_file(path)) }
    }

    /// What the stand-ins have written into this mark.
    pub fn fault_text(&self, name: &str) -> String {
        std::fs::read_to_string(self.dir.path().join("faults").join(name)).unwrap_or_default()
    }

    /// Waits until a stand-in has left this mark.
    pub async fn faulted(&self, name: &str) {
        let path = self.dir.path().join("faults").join(name);
        let end = Instant::now() + DEADLINE;
        while !path.exists() {
            assert!(Instant::now() < end, "no {name}\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Starts ksd and waits until it listens.
    pub async fn up(&mut self) {
        assert!(self.ksd.is_none());
        let before = self.api().map(|a| a.pid);
        let mut c = Command::new(env!("CARGO_BIN_EXE_ksd"));
        if self.supervised {
            c.args(["supervise", "--"]);
        }
        c.arg("--data-dir").arg(self.data()).env("KS_LIBEXEC", self.dir.path().join("bin"));
        c.env("KS_QEMU", self.dir.path().join("bin/qemu")).env("KS_FAKE_FAULTS", self.dir.path().join("faults"));
        let log = std::fs::OpenOptions::new().create(true).append(true).open(self.dir.path().join("ksd.log")).unwrap();
        c.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        self.ksd = Some(c.spawn().unwrap());
        self.wait_other_pid(before).await;
    }

    /// Starts ksd, which must refuse to; its exit code.
    pub fn refuses_to_start(&self) -> Option<i32> {
        let mut c = Command::new(env!("CARGO_BIN_EXE_ksd"));
        c.arg("--data-dir").arg(self.data()).env("KS_LIBEXEC", self.dir.path().join("bin"));
        let log = std::fs::OpenOptions::new().create(true).append(true).open(self.dir.path().join("ksd.log")).unwrap();
        c.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).status().unwrap().code()
    }

    /// Waits until a ksd with another pid than `before` answers.
    pub async fn wait_other_pid(&self, before: Option<u32>) {
        let end = Instant::now() + DEADLINE;
        loop {
            let fresh = self.api().is_some_and(|a| Some(a.pid) != before);
            if fresh && self.try_get("node").await.is_ok() {
                return;
            }
            assert!(Instant::now() < end, "ksd does not come up:\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// From its next start on the gateway is the real one.
    pub fn real_gateway(&self) {
        let this = std::env::current_exe().unwrap();
        let main = "real_gateway::main_when_started_as_the_real_ksgw";
        let ksgw = format!("#!/bin/sh\nexec {} --exact {main} --nocapture --test-threads=1 -- \"$@\"\n", this.display());
        script(&self.bin("ksgw"), &ksgw);
    }

    /// SIGKILL to the gateway's processes, real or not.
    pub fn kill_gateway(&self) {
        let folder = self.data().join("gateway").display().to_string();
        for pid in self.fault_text("gateway-pids").lines().filter_map(|l| l.parse().ok()) {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            if let Some(p) = process::Proc::of(pid).filter(|_| String::from_utf8_lossy(&line).contains(&folder)) {
                process::kill_group(p);
                while p.alive() {
                    std::thread::yield_now();
                }
            }
        }
    }

    /// What the gateway has logged.
    pub fn gateway_log(&self) -> String {
        std::fs::read_to_string(self.data().join("gateway/ksgw.log")).unwrap_or_default()
    }

    /// SIGKILL to every process of the node at once: VMs, ksd, its supervisor, its gateway. The folder stays while the value lives.
    pub fn kill_everything(mut self) -> Self {
        self.kill_supervised();
        for pid in self.vmms() {
            if let Some(p) = process::Proc::of(pid) {
                process::kill_group(p);
            }
        }
        self.kill_gateway();
        self
    }

    /// SIGKILL to the supervisor and to ksd; VMs live on.
    pub fn kill_supervised(&mut self) {
        let ksd = self.api().map(|a| a.pid);
        if let Some(mut c) = self.ksd.take() {
            c.kill().unwrap();
            c.wait().unwrap();
        }
        if let Some(p) = ksd.and_then(process::Proc::of) {
            process::kill_group(p);
            while p.alive() {
                std::thread::yield_now();
            }
        }
    }

    /// Makes the image and a session on this node.
    pub async fn create_image_and_session(&self, name: &str) {
        self.ok("images/build", json!({})).await;
        self.create(name).await;
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("ksd.log")).unwrap_or_default()
    }

    pub fn ksd_pid(&self) -> u32 {
        self.ksd.as_ref().unwrap().id()
    }

    /// SIGKILL to ksd.
    pub fn kill_ksd(&mut self) {
        let mut c = self.ksd.take().unwrap();
        c.kill().unwrap();
        c.wait().unwrap();
    }

    /// SIGTERM to ksd; its exit status.
    pub fn end_ksd(&mut self) -> std::process::ExitStatus {
        let mut c = self.ksd.take().unwrap();
        Command::new("kill").arg(c.id().to_string()).status().unwrap();
        c.wait().unwrap()
    }

    pub fn api(&self) -> Option<ApiFile> {
        serde_json::from_slice(&std::fs::read(self.data().join("api.json")).ok()?).ok()
    }

    pub fn request(&self, method: &str, path: &str) -> reqwest::RequestBuilder {
        let a = self.api().unwrap();
        self.http.request(method.parse().unwrap(), format!("{}/v1/{path}", a.url)).bearer_auth(a.token)
    }

    async fn try_get(&self, path: &str) -> reqwest::Result<reqwest::Response> {
        self.request("GET", path).send().await?.error_for_status()
    }

    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ApiError> {
        let r = self.request("GET", path).send().await.unwrap();
        let ok = r.status().is_success();
        let text = r.text().await.unwrap();
        if ok { Ok(serde_json::from_str(&text).unwrap()) } else { Err(serde_json::from_str(&text).unwrap()) }
    }

    /// As [`Self::get`] while the node may be starting again: None for whatever is no answer.
    pub async fn maybe<T: DeserializeOwned>(&self, path: &str) -> Option<T> {
        let text = self.try_get(path).await.ok()?.text().await.ok()?;
        serde_json::from_str(&text).ok()
    }

    /// A long call: its steps and its result.
    pub async fn call(&self, path: &str, body: Value) -> (Vec<String>, Result<Value, ApiError>) {
        let r = self.request("POST", path).json(&body).send().await.unwrap();
        let text = r.text().await.unwrap();
        let mut steps = vec![];
        for line in text.lines() {
            let v: Value = serde_json::from_str(line).unwrap();
            match v["type"].as_str() {
                Some("step") => steps.push(v["what"].as_str().unwrap().to_owned()),
                Some("result") => return (steps, Ok(v["result"].clone())),
                Some("error") => return (steps, Err(serde_json::from_value(v["error"].clone()).unwrap())),
                _ => return (steps, serde_json::from_value(v.clone()).map_or(Ok(v), Err)),
            }
        }
        panic!("no result: {text}\n{}", self.log());
    }

    pub async fn ok(&self, path: &str, body: Value) -> Value {
        let (_, r) = self.call(path, body).await;
        r.unwrap_or_else(|e| panic!("{path}: {e}\n{}", self.log()))
    }

    pub async fn refused(&self, path: &str, body: Value) -> ApiError {
        self.call(path, body).await.1.expect_err("it must be refused")
    }

    pub async fn create(&self, name: &str) -> Session {
        let body = json!({ "name": name, "memory_mib": 128, "main": { "command": ["agent"] } });
        serde_json::from_value(self.ok("sessions", body).await).unwrap()
    }

    pub async fn show(&self, name: &str) -> Session {
        self.get(&format!("sessions/{name}")).await.unwrap()
    }

    /// Waits for an event of the session at or after `from`; gives its text.
    pub async fn event(&self, session: &str, kind: &str) -> Event {
        self.event_from(0, session, kind).await
    }

    pub async fn event_from(&self, from: u64, session: &str, kind: &str) -> Event {
        let work = async {
            let r = self.request("GET", &format!("events?follow=1&from={from}")).send().await.unwrap();
            let mut bytes = r.bytes_stream();
            let mut buf = Vec::new();
            while let Some(b) = bytes.next().await {
                buf.extend_from_slice(&b.unwrap());
                while let Some(n) = buf.iter().position(|c| *c == b'\n') {
                    let line: Vec<u8> = buf.drain(..=n).collect();
                    let e: Event = serde_json::from_slice(&line).unwrap();
                    if e.session == session && e.kind == kind {
                        return e;
                    }
                }
            }
            panic!("the events ended");
        };
        let found = tokio::time::timeout(DEADLINE, work).await;
        found.unwrap_or_else(|_| panic!("no event {kind} of {session}\n{}", self.log()))
    }

    /// Number of the newest event.
    pub async fn last_event(&self) -> u64 {
        let text = self.request("GET", "events").send().await.unwrap().text().await.unwrap();
        let last: Event = serde_json::from_str(text.lines().last().unwrap()).unwrap();
        last.seq
    }

    pub async fn socket(
        &self,
        path: &str,
    ) -> tokio_tungstenite::WebSocketStream<tokio_tungstenite::MaybeTlsStream<tokio::net::TcpStream>> {
        let a = self.api().unwrap();
        let url = format!("{}/v1/{path}", a.url.replace("http", "ws"));
        let mut request = url.into_client_request().unwrap();
        request.headers_mut().insert("authorization", format!("Bearer {}", a.token).parse().unwrap());
        tokio_tungstenite::connect_async(request).await.unwrap().0
    }

    /// Runs a command: (exit code, stdout), or the refusal.
    pub async fn exec(&self, name: &str, argv: &[&str], stdin: &[u8]) -> Result<(u8, Vec<u8>), ApiError> {
        let mut ws = self.socket(&format!("sessions/{name}/exec")).await;
        let start = ExecStart { argv: argv.iter().map(|s| (*s).to_owned()).collect(), ..ExecStart::default() };
        ws.send(Message::Text(serde_json::to_string(&start).unwrap().into())).await.unwrap();
        for c in stdin.chunks(60_000) {
            ws.send(Message::Binary(ExecFrame::Stdin(c.to_vec()).encode_message().into())).await.unwrap();
        }
        let _ = ws.send(Message::Binary(ExecFrame::StdinEof.encode_message().into())).await;
        let mut out = vec![];
        while let Some(m) = tokio::time::timeout(DEADLINE, ws.next()).await.unwrap() {
            match m.unwrap() {
                Message::Text(t) => return Err(serde_json::from_str(&t).unwrap()),
                Message::Binary(b) => match ExecFrame::decode_message(&b).unwrap() {
                    ExecFrame::Stdout(b) => out.extend(b),
                    ExecFrame::Exit { code, .. } => return Ok((code, out)),
                    other => panic!("{other:?}"),
                },
                Message::Close(_) => break,
                _ => {}
            }
        }
        panic!("the link ended without an exit code\n{}", self.log());
    }

    pub async fn set(&self, name: &str, key: &str, value: &str) {
        assert_eq!(self.exec(name, &["set", key, value], b"").await.unwrap().0, 0);
    }

    pub async fn value(&self, name: &str, key: &str) -> Option<String> {
        let (code, out) = self.exec(name, &["get", key], b"").await.unwrap();
        (code == 0).then(|| String::from_utf8(out).unwrap())
    }

    pub async fn dump(&self, name: &str) -> crate::fake_guest::Memory {
        serde_json::from_slice(&self.exec(name, &["dump"], b"").await.unwrap().1).unwrap()
    }

    /// Live VM processes of this node.
    pub fn vmms(&self) -> Vec<u32> {
        let dirs = std::fs::read_dir(self.data().join("run")).into_iter().flatten().flatten();
        dirs.flat_map(|d| process::of_run_dir(&d.path().canonicalize().unwrap_or(d.path()))).map(|p| p.pid).collect()
    }
}

impl Drop for TestNode {
    fn drop(&mut self) {
        if let Some(mut c) = self.ksd.take() {
            let _ = Command::new("kill").arg(c.id().to_string()).status();
            let _ = c.wait();
        }
        for pid in self.vmms() {
            if let Some(p) = process::Proc::of(pid) {
                process::kill_group(p);
            }
        }
        self.kill_gateway();
    }
}
