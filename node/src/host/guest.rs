//! What the node asks of `ks-guest`, each with a deadline: a guest that never answers is an error, not a hang.

use super::channel::{Channel, GuestStream, Inbound};
use ks_proto::api::ApiError;
use ks_proto::guest::{Check, FileEntry, GuestAnswer, GuestRequest, HookKind, MESSAGE_BYTES_MAX, PROTOCOL};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt};

/// A short request's deadline. Guests on software KVM on a busy host took 5 s for one that starts a program.
pub const SHORT: Duration = Duration::from_secs(30);
/// Deadline of the guest's self-checks, which took 11 s there; the client waits for 60 s in all.
const DOCTOR: Duration = Duration::from_secs(50);
/// Deadline of a restored guest's first answer.
pub const HELLO_RESTORED: Duration = Duration::from_secs(30);
/// Deadline of a booting guest's first answer.
pub const HELLO_BOOTED: Duration = Duration::from_secs(300);
/// Lines of one listing at most.
const LISTING_LINES_MAX: usize = 2_000_000;
/// Bytes of paths in one request: JSON makes at most six of one.
const BATCH_BYTES_MAX: usize = MESSAGE_BYTES_MAX / 8;

/// Who the guest is.
#[derive(Debug, Clone, Default)]
pub struct GuestInfo {
    /// Version of its agent.
    pub agent_version: String,
    /// Kernel release.
    pub kernel: String,
    /// Clock source in force.
    pub clocksource: String,
}

/// The guest of one VM. Reconnects the channel when it was cut.
#[derive(Clone)]
pub struct Guest {
    inner: Arc<Inner>,
}

struct Inner {
    socket: PathBuf,
    console: PathBuf,
    channel: tokio::sync::Mutex<Option<Channel>>,
    /// Where streams that the guest opens go.
    inbound: OnceLock<Inbound>,
    /// A hook was answered: this VM is in its present timeline, and a new connection changes nothing of that.
    hooked: AtomicBool,
}

impl Guest {
    /// The guest behind the channel socket of the run folder `dir`; nothing is connected yet.
    pub fn of(dir: &Path) -> Self {
        let inner = Inner {
            socket: dir.join("channel.sock"),
            console: dir.join("console.log"),
            channel: tokio::sync::Mutex::new(None),
            inbound: OnceLock::new(),
            hooked: AtomicBool::new(false),
        };
        Self { inner: Arc::new(inner) }
    }

    /// From the next connection on, streams that the guest opens go there. Only the first call counts.
    pub fn carry_to(&self, inbound: Inbound) {
        let _ = self.inner.inbound.set(inbound);
    }

    async fn channel(&self) -> io::Result<Channel> {
        let mut held = self.inner.channel.lock().await;
        match held.as_ref().filter(|c| !c.is_closed()) {
            Some(c) => Ok(c.clone()),
            None => {
                let c = Channel::connect(&self.inner.socket, self.inner.inbound.get().cloned()).await?;
                *held = Some(c.clone());
                if self.inner.hooked.load(Ordering::Acquire) {
                    tokio::spawn(relay_go(c.clone()));
                }
                Ok(c)
            }
        }
    }

    /// Drops the connection; the next request makes a new one, with a new generation.
    pub async fn disconnect(&self) {
        self.inner.channel.lock().await.take();
    }

    /// The error of a guest that did not answer, with the end of its console.
    fn silent(&self, what: &str, why: impl std::fmt::Display) -> ApiError {
        let tail = tail(&self.inner.console, 12);
        let why = if tail.is_empty() { why.to_string() } else { format!("{why}; the end of its console:\n{tail}") };
        let next = format!("see {}; `ks kill NAME` brings it back from its latest checkpoint", self.inner.console.display());
        ApiError::new("guest-silent", format!("the guest did not answer ({what})"), why, next)
    }

    /// Opens a stream, sends `request`, and reads the answer. The stream goes on with the request's data.
    ///
    /// # Errors
    /// `guest-silent` after `deadline`, or the guest's refusal.
    pub async fn open(&self, request: &GuestRequest, deadline: Duration) -> Result<(GuestAnswer, GuestStream), ApiError> {
        let what = word(request);
        let work = async {
            let mut s = self.channel().await?.stream().await?;
            write_message(&mut s, request).await?;
            let answer: GuestAnswer = read_message(&mut s).await?;
            Ok::<_, io::Error>((answer, s))
        };
        match tokio::time::timeout(deadline, work).await {
            Err(_) => {
                // The connection may be stuck for good: the next request begins a new one.
                self.disconnect().await;
                Err(self.silent(&what, format!("nothing came in {} s", deadline.as_secs())))
            }
            Ok(Err(e)) => {
                self.disconnect().await;
                Err(self.silent(&what, e))
            }
            Ok(Ok((GuestAnswer::Refused { code, what, why, next }, _))) => Err(ApiError::new(guest_code(&code), what, why, next)),
            Ok(Ok(ok)) => Ok(ok),
        }
    }

    async fn order(&self, request: &GuestRequest, deadline: Duration) -> Result<GuestAnswer, ApiError> {
        Ok(self.open(request, deadline).await?.0)
    }

    /// Waits for the guest's first answer, trying again until `deadline`.
    ///
    /// # Errors
    /// `guest-silent`, or `incompatible` when it speaks another protocol.
    pub async fn hello(&self, deadline: Duration) -> Result<GuestInfo, ApiError> {
        let end = tokio::time::Instant::now() + deadline;
        let mut pause = Duration::from_millis(5);
        loop {
            let left = end.saturating_duration_since(tokio::time::Instant::now());
            match self.order(&GuestRequest::Hello { protocol: PROTOCOL }, left).await {
                Ok(GuestAnswer::Hello { protocol: PROTOCOL, agent_version, kernel, clocksource, .. }) => {
                    return Ok(GuestInfo { agent_version, kernel, clocksource });
                }
                Ok(other) => {
                    let why = format!("it answered {other:?} to protocol {PROTOCOL}");
                    return Err(ApiError::new("incompatible", "the guest's agent", why, "build the image again: ks image build"));
                }
                Err(e) if e.code != "guest-silent" || tokio::time::Instant::now() + pause >= end => return Err(e),
                Err(_) => {
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(Duration::from_millis(200));
                }
            }
        }
    }

    /// The restore hook: fresh entropy, the wall clock, and on a fork a new identity.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub async fn hook(&self, kind: HookKind, hostname: &str, machine_id: &[u8; 16]) -> Result<(), ApiError> {
        let request = GuestRequest::Hook {
            kind,
            wall_unix_ns: super::clock::unix_ns(),
            entropy_hex: hex::encode(super::files::random::<64>()),
            hostname: hostname.to_owned(),
            machine_id_hex: hex::encode(machine_id),
        };
        self.order(&request, SHORT).await?;
        self.inner.hooked.store(true, Ordering::Release);
        Ok(())
    }

    /// Freezes the user's processes.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub async fn freeze(&self) -> Result<(), ApiError> {
        self.order(&GuestRequest::Freeze {}, SHORT).await.map(drop)
    }

    /// Lets them go on.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub async fn thaw(&self) -> Result<(), ApiError> {
        self.order(&GuestRequest::Thaw {}, SHORT).await.map(drop)
    }

    /// Flushes the guest's file systems.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub async fn sync(&self) -> Result<(), ApiError> {
        self.order(&GuestRequest::Sync {}, Duration::from_secs(60)).await.map(drop)
    }

    /// Starts the main window.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub async fn start_main(&self, m: &ks_proto::api::StartMain) -> Result<(), ApiError> {
        let or = |v: u16, d: u16| if v == 0 { d } else { v };
        let cwd = if m.cwd.is_empty() { "/workspace".to_owned() } else { m.cwd.clone() };
        let (argv, env, cols, rows) = (m.command.clone(), m.env.clone(), or(m.cols, 80), or(m.rows, 24));
        self.order(&GuestRequest::StartMain { argv, env, cwd, cols, rows }, Duration::from_secs(60)).await.map(drop)
    }

    /// The guest's self-checks.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub async fn doctor(&self) -> Result<Vec<Check>, ApiError> {
        match self.order(&GuestRequest::Doctor { wall_unix_ns: super::clock::unix_ns() }, DOCTOR).await? {
            GuestAnswer::Doctor { checks } => Ok(checks),
            other => Err(self.silent("doctor", format!("unexpected {other:?}"))),
        }
    }

    /// The main window's last lines.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub async fn logs(&self, lines: u32) -> Result<Vec<u8>, ApiError> {
        let (_, s) = self.open(&GuestRequest::Logs { lines }, SHORT).await?;
        let mut out = Vec::new();
        let mut s = s.take(64 * 1024 * 1024);
        let read = s.read_to_end(&mut out);
        match tokio::time::timeout(Duration::from_secs(30), read).await {
            Ok(Ok(_)) => Ok(out),
            Ok(Err(e)) => Err(self.silent("logs", e)),
            Err(_) => Err(self.silent("logs", "the text did not end in 30 s")),
        }
    }

    /// All files below `path`, with sizes and times; hashes only as [`GuestRequest::ListFiles`] says.
    ///
    /// # Errors
    /// As [`Self::open`]; a listing that is cut short is an error.
    pub async fn list_files(&self, path: &str, deadline: Duration) -> Result<Vec<FileEntry>, ApiError> {
        let request = GuestRequest::ListFiles { path: path.to_owned(), hash: false, paths: vec![] };
        self.listing(&request, LISTING_LINES_MAX, deadline).await
    }

    /// The entries of these files, with hashes; those that are not there are left out.
    ///
    /// # Errors
    /// As [`Self::list_files`].
    pub async fn hash_files(&self, paths: &[String], deadline: Duration) -> Result<Vec<FileEntry>, ApiError> {
        let mut out = Vec::with_capacity(paths.len());
        for batch in batches(paths) {
            let request = GuestRequest::ListFiles { path: "/".into(), hash: true, paths: batch.to_vec() };
            out.extend(self.listing(&request, batch.len(), deadline).await?);
        }
        Ok(out)
    }

    async fn listing(&self, request: &GuestRequest, lines_max: usize, deadline: Duration) -> Result<Vec<FileEntry>, ApiError> {
        let (_, s) = self.open(request, SHORT).await?;
        let read = async {
            let mut lines = tokio::io::BufReader::with_capacity(64 * 1024, s).lines();
            let mut out = Vec::new();
            while let Some(line) = lines.next_line().await? {
                if out.len() >= lines_max || line.len() > MESSAGE_BYTES_MAX {
                    return Err(io::Error::other("the listing is above its limits"));
                }
                out.push(serde_json::from_str::<FileEntry>(&line)?);
            }
            Ok(out)
        };
        match tokio::time::timeout(deadline, read).await {
            Ok(Ok(files)) => Ok(files),
            Ok(Err(e)) => Err(self.silent("list-files", e)),
            Err(_) => Err(self.silent("list-files", format!("the listing did not end in {} s", deadline.as_secs()))),
        }
    }

    /// Puts one file into the guest.
    ///
    /// # Errors
    /// As [`Self::open`], or the guest's refusal at the end.
    pub async fn put_file(&self, path: &str, bytes: &[u8]) -> Result<(), ApiError> {
        let (dir, name) = path.rsplit_once('/').unwrap_or(("/workspace", path));
        let archive = super::tar::one_file(name, bytes)?;
        let dir = if dir.is_empty() { "/" } else { dir };
        let (_, mut s) = self.open(&GuestRequest::PutTar { path: dir.to_owned() }, SHORT).await?;
        let send = async {
            s.write_all(&archive).await?;
            s.shutdown().await?;
            read_message::<GuestAnswer>(&mut s).await
        };
        match tokio::time::timeout(Duration::from_secs(60), send).await {
            Ok(Ok(answer)) => end_of_put(answer),
            Ok(Err(e)) => Err(self.silent("put", e)),
            Err(_) => Err(self.silent("put", "not done in 60 s")),
        }
    }

    /// Runs a program to its end and gives its exit code; its output is dropped.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub async fn run(&self, argv: &[&str], deadline: Duration) -> Result<u8, ApiError> {
        let argv = argv.iter().map(|s| (*s).to_owned()).collect();
        let request = GuestRequest::Exec { argv, env: vec![], cwd: None, user: None, tty: None };
        let (_, mut s) = self.open(&request, SHORT).await?;
        let work = async {
            s.write_all(&ks_proto::guest::ExecFrame::StdinEof.encode()).await?;
            loop {
                if let Some(ks_proto::guest::ExecFrame::Exit { code, .. }) = read_exec_frame(&mut s).await? {
                    return Ok::<u8, io::Error>(code);
                }
            }
        };
        match tokio::time::timeout(deadline, work).await {
            Ok(Ok(code)) => Ok(code),
            Ok(Err(e)) => Err(self.silent("exec", e)),
            Err(_) => Err(self.silent("exec", format!("not done in {} s", deadline.as_secs()))),
        }
    }
}

/// Lets the guest's relay use a connection that took the place of a broken one. Older guests refuse it; they have no relay.
async fn relay_go(channel: Channel) {
    let go = async {
        let mut s = channel.stream().await?;
        write_message(&mut s, &GuestRequest::RelayGo {}).await?;
        read_message::<GuestAnswer>(&mut s).await
    };
    // A guest that does not answer is noticed by whoever asks it next.
    let _ = tokio::time::timeout(SHORT, go).await;
}

/// Pure: runs of paths that fit a message each, whatever JSON makes of their characters.
fn batches(paths: &[String]) -> impl Iterator<Item = &[String]> {
    let mut rest = paths;
    std::iter::from_fn(move || {
        let mut bytes = 0;
        let fits = rest.iter().take_while(|p| {
            bytes += p.len() + 3;
            bytes <= BATCH_BYTES_MAX
        });
        // One that is too long by itself goes alone and is refused by name.
        let n = fits.count().max(1).min(rest.len());
        let (batch, left) = rest.split_at(n);
        rest = left;
        (!batch.is_empty()).then_some(batch)
    })
}

/// The answer after a PutTar's stream, as a result.
///
/// # Errors
/// The guest's refusal.
pub fn end_of_put(answer: GuestAnswer) -> Result<(), ApiError> {
    match answer {
        GuestAnswer::Refused { code, what, why, next } => Err(ApiError::new(guest_code(&code), what, why, next)),
        GuestAnswer::Ok {} | GuestAnswer::Hello { .. } | GuestAnswer::Doctor { .. } => Ok(()),
    }
}

fn guest_code(code: &str) -> &'static str {
    match code {
        "not-found" => "not-found",
        "not-executable" => "not-executable",
        "bad-request" => "usage",
        "busy" => "busy",
        _ => "internal",
    }
}

fn word(request: &GuestRequest) -> String {
    format!("{request:?}").split([' ', '{']).next().unwrap_or_default().to_lowercase()
}

/// Writes one length-prefixed JSON message.
///
/// # Errors
/// If the stream is lost or the message too long.
pub async fn write_message<T: serde::Serialize>(s: &mut (impl AsyncWriteExt + Unpin), m: &T) -> io::Result<()> {
    let body = serde_json::to_vec(m)?;
    if body.len() > MESSAGE_BYTES_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("a message of {} bytes", body.len())));
    }
    let mut bytes = u32::try_from(body.len()).unwrap_or(u32::MAX).to_le_bytes().to_vec();
    bytes.extend_from_slice(&body);
    s.write_all(&bytes).await?;
    s.flush().await
}

/// Reads one length-prefixed JSON message.
///
/// # Errors
/// If the stream is lost, or the bytes are not one.
pub async fn read_message<T: serde::de::DeserializeOwned>(s: &mut (impl AsyncReadExt + Unpin)) -> io::Result<T> {
    let len = s.read_u32_le().await? as usize;
    if len > MESSAGE_BYTES_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("a message of {len} bytes")));
    }
    let mut body = vec![0; len];
    s.read_exact(&mut body).await?;
    Ok(serde_json::from_slice(&body)?)
}

/// Reads one exec frame; None for one that is not known.
///
/// # Errors
/// If the stream is lost or a frame is too long.
pub async fn read_exec_frame(s: &mut (impl AsyncReadExt + Unpin)) -> io::Result<Option<ks_proto::guest::ExecFrame>> {
    let kind = s.read_u8().await?;
    let len = s.read_u32_le().await? as usize;
    if len > ks_proto::guest::EXEC_PAYLOAD_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("an exec frame of {len} bytes")));
    }
    let mut payload = vec![0; len];
    s.read_exact(&mut payload).await?;
    Ok(ks_proto::guest::ExecFrame::from_parts(kind, &payload))
}

/// The last lines of a text file, printable characters only.
pub fn tail(path: &Path, lines: usize) -> String {
    use std::io::{Read, Seek, SeekFrom};
    let read = || -> io::Result<Vec<u8>> {
        let mut f = std::fs::File::open(path)?;
        let len = f.metadata()?.len();
        f.seek(SeekFrom::Start(len.saturating_sub(8192)))?;
        let mut out = Vec::new();
        f.take(8192).read_to_end(&mut out)?;
        Ok(out)
    };
    let text = String::from_utf8_lossy(&read().unwrap_or_default()).into_owned();
    let clean: String = text.chars().filter(|c| *c == '\n' || !c.is_control()).collect();
    let all: Vec<&str> = clean.lines().filter(|l| !l.trim().is_empty()).collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_path_is_in_one_batch_and_every_batch_fits_a_message() {
        let paths: Vec<String> = (0..5000).map(|i| format!("/{i}{}", "\u{1}".repeat(i % 300))).collect();
        let mut joined = Vec::new();
        for batch in batches(&paths) {
            let request = GuestRequest::ListFiles { path: "/".into(), hash: true, paths: batch.to_vec() };
            assert!(serde_json::to_vec(&request).unwrap().len() <= MESSAGE_BYTES_MAX);
            joined.extend_from_slice(batch);
        }
        assert_eq!(joined, paths);
        assert!(batches(&paths).count() < 10, "batches are filled");
        assert_eq!(batches(&[]).count(), 0);
        let huge = ["x".repeat(BATCH_BYTES_MAX + 1), "y".into()];
        assert_eq!(batches(&huge).map(<[String]>::len).collect::<Vec<_>>(), [1, 1]);
    }
}
