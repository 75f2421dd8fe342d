//! A node in miniature for tests: a yamux client over any pipe, and an agent to talk to.

use std::{future::poll_fn, sync::Arc, task::Poll, time::Duration};

use futures::io::{AsyncRead, AsyncWrite};
use ks_proto::guest::{ExecFrame, GuestAnswer, GuestRequest, Tty};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    sync::{mpsc, oneshot},
};
use tokio_util::compat::TokioAsyncReadCompatExt as _;

use crate::{
    agent::Agent,
    channel::serve_connection,
    exec::Ended,
    wire::{self, Reader, Writer},
};

/// Longer than any step takes on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

/// Waits for an event with a deadline.
pub async fn within<T>(what: &str, event: impl Future<Output = T>) -> T {
    match tokio::time::timeout(LIMIT, event).await {
        Ok(value) => value,
        Err(_) => panic!("not within {LIMIT:?}: {what}"),
    }
}

/// The node's end of one yamux connection.
pub struct Client {
    opens: mpsc::Sender<oneshot::Sender<yamux::Stream>>,
    driver: tokio::task::JoinHandle<()>,
}

impl Drop for Client {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl Client {
    /// Speaks over `io`; a stream that the guest opens is reset.
    pub fn over(io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> Self {
        Self::with_inbound(io).0
    }

    /// Speaks over `io`, and gives the streams that the guest opens.
    pub fn with_inbound(io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> (Self, mpsc::Receiver<yamux::Stream>) {
        let (tx, inbound) = mpsc::channel(16);
        let (opens, mut wanted) = mpsc::channel::<oneshot::Sender<yamux::Stream>>(1);
        let driver = tokio::spawn(async move {
            let mut connection = yamux::Connection::new(io, yamux::Config::default(), yamux::Mode::Client);
            let mut waiting: Option<oneshot::Sender<yamux::Stream>> = None;
            poll_fn(move |cx| {
                loop {
                    if waiting.is_none()
                        && let Poll::Ready(Some(next)) = wanted.poll_recv(cx)
                    {
                        waiting = Some(next);
                    }
                    if waiting.is_some()
                        && let Poll::Ready(opened) = connection.poll_new_outbound(cx)
                    {
                        let (Ok(stream), Some(to)) = (opened, waiting.take()) else { return Poll::Ready(()) };
                        let _ = to.send(stream);
                        continue;
                    }
                    match connection.poll_next_inbound(cx) {
                        Poll::Ready(Some(Ok(stream))) => drop(tx.try_send(stream)),
                        Poll::Ready(_) => return Poll::Ready(()),
                        Poll::Pending => return Poll::Pending,
                    }
                }
            })
            .await;
        });
        (Self { opens, driver }, inbound)
    }

    /// Opens a stream with a request.
    pub async fn open(&self, request: &GuestRequest) -> (Reader, Writer) {
        self.open_raw(&serde_json::to_vec(request).unwrap()).await
    }

    /// Opens a stream with any first message.
    pub async fn open_raw(&self, message: &[u8]) -> (Reader, Writer) {
        let (to, stream) = oneshot::channel();
        self.opens.send(to).await.expect("the connection lives");
        let (reader, mut writer) = wire::split(within("a stream", stream).await.expect("the connection lives"));
        wire::write_message(&mut writer, message).await.unwrap();
        (reader, writer)
    }

    /// One request and its answer.
    pub async fn ask(&self, request: &GuestRequest) -> GuestAnswer {
        let (mut reader, _writer) = self.open(request).await;
        within("an answer", answer(&mut reader)).await
    }

    /// Starts a program; the code of the refusal if it is refused.
    pub async fn exec(&self, argv: &[&str], tty: Option<Tty>) -> Result<(Reader, Writer), String> {
        self.program(&exec_request(argv, tty)).await
    }

    /// Starts what the request names.
    pub async fn program(&self, request: &GuestRequest) -> Result<(Reader, Writer), String> {
        let (mut reader, writer) = self.open(request).await;
        match within("an answer", answer(&mut reader)).await {
            GuestAnswer::Ok {} => Ok((reader, writer)),
            GuestAnswer::Refused { code, .. } => Err(code),
            other => panic!("{other:?}"),
        }
    }

    /// Runs a program to its end.
    pub async fn run(&self, argv: &[&str], stdin: &[u8], tty: Option<Tty>) -> Finished {
        let (mut reader, mut writer) = self.exec(argv, tty).await.expect("started");
        let send = async {
            for piece in stdin.chunks(50_000) {
                writer.write_all(&ExecFrame::Stdin(piece.to_vec()).encode()).await.unwrap();
            }
            writer.write_all(&ExecFrame::StdinEof.encode()).await.unwrap();
        };
        within("the program's end", async { tokio::join!(send, finish(&mut reader)).1 }).await
    }
}

/// A request to run `argv` in `/`.
pub fn exec_request(argv: &[&str], tty: Option<Tty>) -> GuestRequest {
    let argv = argv.iter().map(|a| (*a).to_owned()).collect();
    GuestRequest::Exec { argv, env: vec![], cwd: Some("/".into()), user: None, tty }
}

/// A terminal of this size.
pub fn tty(cols: u16, rows: u16) -> Option<Tty> {
    Some(Tty { term: "xterm-256color".into(), cols, rows })
}

/// Reads an answer.
pub async fn answer(reader: &mut Reader) -> GuestAnswer {
    serde_json::from_slice(&wire::read_message(reader).await.expect("an answer")).expect("an answer")
}

/// What a program wrote and how it ended.
#[derive(Debug, PartialEq, Eq)]
pub struct Finished {
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    pub ended: Ended,
}

/// Reads frames to the last one, after which the stream must end.
pub async fn finish(reader: &mut Reader) -> Finished {
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    loop {
        match wire::read_frame(reader).await.expect("frames").expect("an exit frame before the end") {
            ExecFrame::Stdout(data) => stdout.extend(data),
            ExecFrame::Stderr(data) => stderr.extend(data),
            ExecFrame::Exit { code, signal } => {
                assert_eq!(reader.read(&mut [0; 1]).await.expect("the end"), 0);
                return Finished { stdout, stderr, ended: Ended { code, signal } };
            }
            other => panic!("{other:?} from the guest"),
        }
    }
}

/// Reads output until it holds `wanted`.
pub async fn until(reader: &mut Reader, wanted: &[u8]) -> Vec<u8> {
    let mut seen: Vec<u8> = Vec::new();
    while !seen.windows(wanted.len()).any(|w| w == wanted) {
        match tokio::time::timeout(LIMIT, wire::read_frame(reader)).await {
            Ok(Ok(Some(ExecFrame::Stdout(data)))) => seen.extend(data),
            other => {
                panic!("{other:?} instead of {:?}, after {:?}", String::from_utf8_lossy(wanted), String::from_utf8_lossy(&seen))
            }
        }
    }
    seen
}

/// An agent outside a VM, reaping.
pub fn agent(dir: &tempfile::TempDir) -> Arc<Agent> {
    let agent = Agent::outside(dir.path());
    let reaping = agent.clone();
    tokio::spawn(async move { reaping.reaper.run().await });
    agent
}

/// An agent and a client that are connected in memory.
pub fn connected() -> (tempfile::TempDir, Client) {
    let dir = tempfile::tempdir().unwrap();
    let agent = agent(&dir);
    let (ours, theirs) = tokio::io::duplex(64 * 1024);
    tokio::spawn(async move { serve_connection(agent, theirs.compat()).await });
    (dir, Client::over(ours.compat()))
}
