//! The processes that are measured, and what `/proc` says of them.

use anyhow::{Context, Result, ensure};
use ks_proto::gateway::{AdminAnswer, AdminAsk, Began, GatewayAsk, PROTOCOL, Provider, ReplayMode, Secret, Stamp};
use ks_proto::relay::{decode_message, encode_message, message_length};
use ks_proto::{RunToken, SessionId};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The key that the gateway holds here.
const KEY: &str = "sk-bench-0123456789abcdef";

/// A process that ends with the benchmark.
pub struct Process {
    /// It.
    pub child: Child,
    /// What it is.
    pub name: &'static str,
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Process {
    /// Starts one.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start(name: &'static str, command: &mut Command) -> Result<Self> {
        let child = command.stdin(Stdio::null()).spawn().with_context(|| format!("starting {name}"))?;
        Ok(Self { child, name })
    }

    /// Starts one that prints its address as its first line.
    ///
    /// # Errors
    /// If it does not.
    pub fn with_address(name: &'static str, command: &mut Command) -> Result<(Self, SocketAddr)> {
        let mut process = Self::start(name, command.stdout(Stdio::piped()))?;
        let out = process.child.stdout.take().context("its output")?;
        let mut line = String::new();
        BufReader::new(out).read_line(&mut line)?;
        let address = line.trim().parse().with_context(|| format!("{name} said {line:?} in place of its address"))?;
        Ok((process, address))
    }

    fn status(&self, field: &str) -> Result<u64> {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = text.lines().find(|l| l.starts_with(field)).with_context(|| format!("no {field} of {}", self.name))?;
        let kib: u64 = line.split_whitespace().nth(1).context("a number")?.parse()?;
        Ok(kib * 1024)
    }
    /// Memory that is its own: anonymous pages, bytes.
    ///
    /// # Errors
    /// If /proc does not say.
    pub fn memory(&self) -> Result<u64> {
        self.status("RssAnon:")
    }
    /// Its largest resident set since [`Process::forget_peak`], bytes.
    ///
    /// # Errors
    /// If /proc does not say.
    pub fn peak(&self) -> Result<u64> {
        self.status("VmHWM:")
    }
    /// Its resident set, bytes.
    ///
    /// # Errors
    /// If /proc does not say.
    pub fn resident(&self) -> Result<u64> {
        self.status("VmRSS:")
    }
    /// Begins a new peak.
    ///
    /// # Errors
    /// If the kernel does not let it.
    pub fn forget_peak(&self) -> Result<()> {
        Ok(std::fs::write(format!("/proc/{}/clear_refs", self.child.id()), "5")?)
    }
    /// CPU seconds that it used so far.
    ///
    /// # Errors
    /// If /proc does not say.
    pub fn cpu_s(&self) -> Result<f64> {
        let text = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()))?;
        let rest = text.rsplit_once(") ").context("stat")?.1;
        let fields: Vec<&str> = rest.split(' ').collect();
        let ticks: u64 = fields.get(11).context("utime")?.parse::<u64>()? + fields.get(12).context("stime")?.parse::<u64>()?;
        Ok(ticks as f64 / 100.0)
    }
}

/// A program beside this one.
///
/// # Errors
/// If it is not there.
pub fn beside(name: &str) -> Result<PathBuf> {
    let here = std::env::current_exe()?;
    let path = here.parent().context("a folder")?.join(name);
    ensure!(path.exists(), "{} is missing; ./dev build makes it", path.display());
    Ok(path)
}

/// An admin connection.
pub struct Admin(UnixStream);

impl Admin {
    /// To the gateway at `socket`, which may be starting.
    ///
    /// # Errors
    /// If it does not come up.
    pub fn connect(socket: &Path) -> Result<Self> {
        let end = Instant::now() + Duration::from_secs(20);
        let stream = loop {
            match UnixStream::connect(socket) {
                Ok(s) => break s,
                Err(e) if Instant::now() > end => return Err(e).context("the gateway did not come up"),
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        };
        let mut admin = Self(stream);
        admin.ask(AdminAsk::Hello { protocol: PROTOCOL })?;
        Ok(admin)
    }

    /// Asks.
    ///
    /// # Errors
    /// If it refuses.
    pub fn ask(&mut self, ask: AdminAsk) -> Result<AdminAnswer> {
        self.0.write_all(&encode_message(&GatewayAsk::Admin(Box::new(ask)))?)?;
        let mut head = [0; 4];
        self.0.read_exact(&mut head)?;
        let mut json = vec![0; message_length(head)?];
        self.0.read_exact(&mut json)?;
        let answer = decode_message(&json)?;
        ensure!(!matches!(answer, AdminAnswer::Refused { .. }), "the gateway refused: {answer:?}");
        Ok(answer)
    }
}

/// A gateway with its key and provider set, and a relay before it.
pub struct Ours {
    /// The gateway.
    pub gateway: Process,
    /// The relay.
    pub relay: Process,
    /// Where clients connect.
    pub address: SocketAddr,
    socket: PathBuf,
    run: u64,
}

impl Ours {
    /// With its folder at `dir`.
    ///
    /// # Errors
    /// If a process does not start.
    pub fn start(dir: &Path, provider: SocketAddr) -> Result<Self> {
        let socket = dir.join(ks_proto::gateway::SOCKET);
        let mut command = Command::new(beside("ksgw")?);
        command.arg("--dir").arg(dir).args(["--free-space", "16777216"]).env("KS_LOG", "warn").stdout(Stdio::null());
        let gateway = Process::start("ksgw", &mut command)?;
        let mut admin = Admin::connect(&socket)?;
        admin.ask(AdminAsk::Unseal { key_hex: "07".repeat(32) })?;
        let base_url = format!("http://{provider}");
        let add = Provider {
            name: "bench".into(),
            dialect: "openai".into(),
            base_url,
            include_usage: true,
            ca_pem: None,
            builtin: false,
        };
        admin.ask(AdminAsk::ProviderAdd { provider: add })?;
        admin.ask(AdminAsk::KeyAdd { user: String::new(), provider: "bench".into(), secret: Secret(KEY.into()) })?;
        let (relay, address) = start_relay(&socket, 1)?;
        Ok(Self { gateway, relay, address, socket, run: 1 })
    }

    /// The guest as it was at its start, in another run: a relay that knows of nothing.
    ///
    /// # Errors
    /// If it does not start.
    pub fn restore(&mut self) -> Result<()> {
        self.run += 1;
        (self.relay, self.address) = start_relay(&self.socket, self.run)?;
        Ok(())
    }
}

fn start_relay(socket: &Path, run: u64) -> Result<(Process, SocketAddr)> {
    let mut command = Command::new(std::env::current_exe()?);
    Process::with_address("relay", command.arg("relay").arg("--socket").arg(socket).arg("--run").arg(run.to_string()))
}

/// The way of a guest's stream through ksd: a connection to gw.sock that begins with the node's word.
struct ToGateway {
    socket: PathBuf,
    stamp: Vec<u8>,
}

impl ks_relay::Dial for ToGateway {
    type Stream = tokio::net::UnixStream;
    async fn open(&self) -> io::Result<tokio::net::UnixStream> {
        use tokio::io::AsyncWriteExt;
        let mut stream = tokio::net::UnixStream::connect(&self.socket).await?;
        stream.write_all(&self.stamp).await?;
        Ok(stream)
    }
}

/// The relay's process: prints its address, serves until it is killed.
///
/// # Errors
/// If it cannot listen.
pub async fn relay(socket: PathBuf, run: u64) -> Result<()> {
    let mut random = [0; 16];
    getrandom::fill(&mut random).map_err(|e| anyhow::anyhow!("random bytes: {e}"))?;
    let stamp = Stamp {
        session: SessionId([7; 16]),
        token: RunToken { generation: 0, epoch: 1, run },
        began: if run == 1 { Began::Boot } else { Began::Resume },
        origin: None,
        replay: ReplayMode::On,
        user: String::new(),
        replicas: vec![],
    };
    let stamp = encode_message(&GatewayAsk::Stream(Box::new(stamp)))?;
    let spool = tempfile::tempdir()?;
    let relay = ks_relay::Relay::new(ToGateway { socket, stamp }, random, spool.path().to_owned());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    println!("{}", listener.local_addr()?);
    Err(relay.serve(listener).await.into())
}

/// A sync of a short append at `dir`, median of 50, milliseconds.
///
/// # Errors
/// As the disk says.
pub fn sync_ms(dir: &Path) -> Result<f64> {
    let mut file = tempfile::tempfile_in(dir)?;
    let mut all = Vec::new();
    for _ in 0..50 {
        file.write_all(&[1; 500])?;
        let t = Instant::now();
        file.sync_data()?;
        all.push(t.elapsed().as_secs_f64() * 1e3);
    }
    Ok(crate::load::percentile(&mut all, 50.0))
}
