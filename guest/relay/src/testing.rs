//! A scripted gateway and a plain client, connected to a relay in memory.

use std::{io, time::Duration};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::{Request, Response, body::Incoming};
use hyper_util::rt::TokioIo;
use ks_proto::relay::{BodyFrame, RelayAnswer, RelayAsk, encode_message, message_length};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream},
    sync::{Mutex, mpsc},
};

use crate::{Dial, Relay, wire};

/// Nothing here takes longer.
pub const LIMIT: Duration = Duration::from_secs(20);

/// Fails loudly instead of hanging.
pub async fn within<T>(what: &str, f: impl Future<Output = T>) -> T {
    tokio::time::timeout(LIMIT, f).await.unwrap_or_else(|_| panic!("{what} did not come"))
}

/// Hands the far end of each stream to the test.
pub struct Scripted(mpsc::Sender<DuplexStream>);

impl Dial for Scripted {
    type Stream = DuplexStream;
    async fn open(&self) -> io::Result<DuplexStream> {
        let (near, far) = tokio::io::duplex(8 * 1024);
        self.0.send(far).await.map_err(|_| io::Error::other("no way out"))?;
        Ok(near)
    }
}

/// The test's gateway.
pub struct Gateway(pub Mutex<mpsc::Receiver<DuplexStream>>);

/// One accepted stream.
pub struct Stream(pub DuplexStream);

impl Gateway {
    /// The next stream.
    pub async fn accept(&self) -> Stream {
        Stream(within("a stream", async { self.0.lock().await.recv().await }).await.expect("a relay"))
    }

    /// The next stream's ask, and its body if it is a call.
    pub async fn ask(&self) -> (Stream, RelayAsk, Vec<u8>) {
        let mut stream = self.accept().await;
        let ask = stream.ask().await;
        let body = if matches!(ask, RelayAsk::Call(_)) { stream.body().await } else { vec![] };
        (stream, ask, body)
    }
}

impl Stream {
    pub async fn ask(&mut self) -> RelayAsk {
        within("an ask", async {
            let mut length = [0; 4];
            self.0.read_exact(&mut length).await.unwrap();
            let mut json = vec![0; message_length(length).unwrap()];
            self.0.read_exact(&mut json).await.unwrap();
            RelayAsk::decode(&json).unwrap()
        })
        .await
    }
    pub async fn frame(&mut self) -> BodyFrame {
        within("a frame", wire::read_frame(&mut self.0)).await.unwrap()
    }
    pub async fn body(&mut self) -> Vec<u8> {
        let mut body = Vec::new();
        loop {
            match self.frame().await {
                BodyFrame::Data(d) => body.extend(d),
                BodyFrame::End => return body,
                other => panic!("{other:?}"),
            }
        }
    }
    pub async fn say(&mut self, answer: RelayAnswer) {
        self.0.write_all(&encode_message(&answer).unwrap()).await.unwrap();
    }
    pub async fn head(&mut self, seq: u64, body_bytes: Option<u64>) {
        let headers = vec![("content-type".into(), "text/event-stream".into()), ("connection".into(), "close".into())];
        self.say(RelayAnswer::Head { status: 200, headers, seq, body_bytes }).await;
    }
    pub async fn send(&mut self, frame: BodyFrame) {
        self.0.write_all(&frame.encode()).await.unwrap();
    }
    /// What is left to read, to the end.
    pub async fn read_end(&mut self) -> usize {
        self.0.read_to_end(&mut Vec::new()).await.unwrap_or(0)
    }
    /// A byte that comes although none should, within a moment.
    pub async fn unasked(&mut self) -> Option<u8> {
        tokio::time::timeout(Duration::from_millis(50), self.0.read_u8()).await.ok()?.ok()
    }
    pub async fn data(&mut self, data: &[u8]) {
        self.send(BodyFrame::Data(data.to_vec())).await;
    }
}

/// A relay in timeline 01…, and its gateway.
pub fn relay() -> (Relay<Scripted>, Gateway, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let (tx, rx) = mpsc::channel(2000);
    (Relay::new(Scripted(tx), [1; 16], dir.path().join("spool")), Gateway(Mutex::new(rx)), dir)
}

/// A client's connection.
pub struct Client(pub hyper::client::conn::http1::SendRequest<Full<Bytes>>);

/// Connects to the relay.
pub async fn client(relay: &Relay<Scripted>) -> Client {
    let (ours, theirs) = tokio::io::duplex(64 * 1024);
    let relay = relay.clone();
    tokio::spawn(async move { relay.serve_connection(theirs).await });
    let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(ours)).await.unwrap();
    tokio::spawn(async move {
        let _ = connection.await;
    });
    Client(sender)
}

/// A POST of `body`.
pub fn post(path: &str, body: impl Into<Bytes>) -> Request<Full<Bytes>> {
    let request = Request::post(path).header("host", "127.0.0.1:4180").header("x-one", "1");
    request.body(Full::new(body.into())).unwrap()
}

impl Client {
    /// Sends it and waits for the head.
    pub async fn send(&mut self, request: Request<Full<Bytes>>) -> Response<Incoming> {
        within("an answer", self.0.send_request(request)).await.unwrap()
    }
}

/// The whole body, or the error at its end.
pub async fn all(response: Response<Incoming>) -> Result<Vec<u8>, String> {
    let body = within("the body", response.into_body().collect()).await;
    body.map(|b| b.to_bytes().to_vec()).map_err(|e| e.to_string())
}
