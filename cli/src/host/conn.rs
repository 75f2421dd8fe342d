//! Connections to the nodes of one fleet: the first address that answers wins, so that a dead node costs nothing once a
//! live one is known, and at most [`STAGGER`] else. A connection is made before anything is sent over it; what fails
//! up to there may be tried again with another address whatever the request is.

use super::alive::Watch;
use super::tls::OTHER_FLEET;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use rustls::pki_types::ServerName;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// Head start of one address over the next.
const STAGGER: Duration = Duration::from_millis(250);
/// For TCP and TLS together: a host that is stopped completes the first and never the second.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A peer that is asked and answers nothing for so long is gone.
const SILENCE: Duration = Duration::from_secs(8);

/// A byte stream to a node. Who waits for it, to read or to write, is told when the peer is gone (alive.rs).
#[derive(Debug)]
pub struct Wire {
    io: Io,
    reading: Watch,
    writing: Watch,
}

#[derive(Debug)]
enum Io {
    /// To the node on this machine.
    Plain(TcpStream),
    /// To a fleet.
    Tls(Box<TlsStream<TcpStream>>),
}

impl Io {
    fn tcp(&self) -> &TcpStream {
        match self {
            Self::Plain(t) => t,
            Self::Tls(t) => t.get_ref().0,
        }
    }
}

macro_rules! either {
    ($me:ident, $watch:ident, $cx:ident, $io:ident => $call:expr) => {{
        let done = match &mut $me.io {
            Io::Plain($io) => {
                let $io = Pin::new($io);
                $call
            }
            Io::Tls($io) => {
                let $io = Pin::new($io.as_mut());
                $call
            }
        };
        match done {
            Poll::Ready(done) => Poll::Ready(done),
            Poll::Pending => $me.$watch.poll($cx, $me.io.tcp()).map(Err),
        }
    }};
}

impl AsyncRead for Wire {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<std::io::Result<()>> {
        let me = self.get_mut();
        either!(me, reading, cx, io => io.poll_read(cx, buf))
    }
}
impl AsyncWrite for Wire {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<std::io::Result<usize>> {
        let me = self.get_mut();
        either!(me, writing, cx, io => io.poll_write(cx, buf))
    }
    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        let me = self.get_mut();
        either!(me, writing, cx, io => io.poll_flush(cx))
    }
    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        let me = self.get_mut();
        either!(me, writing, cx, io => io.poll_shutdown(cx))
    }
}

/// The addresses of one fleet, or the one of a lone node.
#[derive(Debug)]
pub struct Endpoints {
    urls: Vec<String>,
    tls: Option<Arc<rustls::ClientConfig>>,
    /// The address that answered last.
    good: AtomicUsize,
    /// Where that is remembered for the next `ks`.
    memory: Option<PathBuf>,
}

/// Why no address could be had.
#[derive(Debug)]
pub struct Unreachable {
    /// URL and why, in the order of trying.
    pub failures: Vec<(String, String)>,
}

impl Unreachable {
    /// Did any of them show another fleet's certificate?
    pub fn other_fleet(&self) -> bool {
        self.failures.iter().any(|(_, why)| why.contains(OTHER_FLEET))
    }
    /// In words.
    pub fn words(&self) -> String {
        match &self.failures[..] {
            [(_, why)] => why.clone(),
            all => all.iter().map(|(url, why)| format!("{url}: {why}")).collect::<Vec<_>>().join("\n"),
        }
    }
}

impl Endpoints {
    /// At least one URL; `tls` is needed when any is https.
    pub fn new(urls: Vec<String>, tls: Option<rustls::ClientConfig>, memory: Option<PathBuf>) -> Self {
        assert!(!urls.is_empty(), "a node has an address");
        let remembered = memory.as_ref().and_then(|p| std::fs::read_to_string(p).ok());
        let good = remembered.and_then(|text| urls.iter().position(|u| *u == text.trim())).unwrap_or(0);
        Self { urls, tls: tls.map(Arc::new), good: AtomicUsize::new(good), memory }
    }
    /// The URL that answered last, else the first.
    pub fn url(&self) -> &str {
        &self.urls[self.good.load(Ordering::Relaxed).min(self.urls.len() - 1)]
    }
    /// All of them.
    pub fn urls(&self) -> &[String] {
        &self.urls
    }

    /// Connects to the first address that answers, but for those in `not`; gives its place in the list.
    pub async fn connect(&self, not: &[usize]) -> Result<(usize, Wire), Unreachable> {
        let good = self.good.load(Ordering::Relaxed);
        let n = self.urls.len();
        let mut order = (0..n).map(|i| (good + i) % n).filter(|i| !not.contains(i)).peekable();
        let mut running = FuturesUnordered::new();
        let mut failures = vec![];
        loop {
            if running.is_empty() {
                match order.next() {
                    Some(i) => running.push(self.one(i)),
                    None => return Err(Unreachable { failures }),
                }
            }
            tokio::select! {
                Some((i, done)) = running.next() => match done {
                    Ok(wire) => {
                        self.remember(i);
                        return Ok((i, wire));
                    }
                    Err(why) => {
                        failures.push((self.urls[i].clone(), why));
                        if let Some(next) = order.next() {
                            running.push(self.one(next));
                        }
                    }
                },
                () = tokio::time::sleep(STAGGER), if order.peek().is_some() => {
                    if let Some(next) = order.next() {
                        running.push(self.one(next));
                    }
                }
            }
        }
    }

    async fn one(&self, i: usize) -> (usize, Result<Wire, String>) {
        let done = match tokio::time::timeout(CONNECT_TIMEOUT, self.open(&self.urls[i])).await {
            Ok(done) => done.map_err(|e| super::http::root_cause(&e)),
            Err(_) => Err(format!("no answer in {} s", CONNECT_TIMEOUT.as_secs())),
        };
        (i, done)
    }

    async fn open(&self, url: &str) -> std::io::Result<Wire> {
        let (scheme, host) = url.split_once("://").unwrap_or(("http", url));
        let tcp = TcpStream::connect(host).await?;
        if scheme != "https" {
            return Wire::plain(tcp, SILENCE);
        }
        tune(&tcp)?;
        let Some(tls) = &self.tls else {
            return Err(std::io::Error::other("HTTPS needs the fleet's fingerprint (`ks login`, or KS_FINGERPRINT)"));
        };
        let name = ServerName::try_from(ks_proto::fleet::NODE_SERVER_NAME).map_err(std::io::Error::other)?;
        let stream = TlsConnector::from(tls.clone()).connect(name, tcp).await?;
        Ok(Wire::new(Io::Tls(Box::new(stream)), SILENCE))
    }

    fn remember(&self, i: usize) {
        let before = self.good.swap(i, Ordering::Relaxed);
        if let Some(path) = self.memory.as_ref().filter(|p| before != i || !p.exists()).filter(|_| self.urls.len() > 1) {
            // Only a hint: without it the next `ks` looks again.
            let dir = path.parent().map(std::fs::create_dir_all);
            let _ = dir.transpose().and_then(|_| std::fs::write(path, &self.urls[i]));
        }
    }
}

/// A dead peer is noticed by the kernel where nothing is to be sent: after 8 s. Else alive.rs looks.
fn tune(tcp: &TcpStream) -> std::io::Result<()> {
    use rustix::net::sockopt;
    sockopt::set_tcp_nodelay(tcp, true)?;
    sockopt::set_socket_keepalive(tcp, true)?;
    sockopt::set_tcp_keepidle(tcp, Duration::from_secs(2))?;
    sockopt::set_tcp_keepintvl(tcp, Duration::from_secs(2))?;
    sockopt::set_tcp_keepcnt(tcp, 3)?;
    Ok(())
}

impl Wire {
    /// Over this connection as it is; the peer may be silent for `limit` when it is asked.
    pub fn plain(tcp: TcpStream, limit: Duration) -> std::io::Result<Self> {
        tune(&tcp)?;
        Ok(Self::new(Io::Plain(tcp), limit))
    }
    fn new(io: Io, limit: Duration) -> Self {
        Self { io, reading: Watch::new(limit), writing: Watch::new(limit) }
    }
    /// The TCP connection below.
    pub fn tcp(&self) -> &TcpStream {
        self.io.tcp()
    }
}
