//! One call from the client's request to the end of its answer, over as many streams as it takes.
//!
//! ```text
//!   new ──Call──► sent ──Accepted──► (seq) ──Head──► answering ──END──► done
//!                  │ stream breaks: Rejoin {call, offset}        ABORT: the client's connection is cut
//!                  │ Unknown: nothing reached the client → a new call; else its connection is cut
//!                  └ the client closes: GONE, once
//! ```
//!
//! Refuses to splice two answers: an entry other than the one whose bytes the client has ends its connection.

use std::{
    io,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use hyper::Response;
use ks_proto::relay::{BodyFrame, Call, CallId, Rejoin, RelayAnswer, RelayAsk};
use tokio::{
    io::{AsyncRead, AsyncWriteExt as _, BufReader},
    sync::{mpsc, oneshot, watch},
};

use crate::{
    Dial, Inner, PAUSES,
    answer::{self, AnswerBody, Cut, Refusal},
    spool::Spool,
    wire,
};

/// How long the gateway may be sought to tell it that a client is gone.
const FAREWELL: Duration = Duration::from_secs(30);
/// After a failed write the gateway's reason is waited for this long.
const LAST_WORDS: Duration = Duration::from_secs(5);
/// What is read ahead on a stream: small, because many streams stand still.
const READ_AHEAD: usize = 4 * 1024;

/// What the client asked for.
#[derive(Debug)]
pub(crate) struct Wanted {
    pub provider: String,
    pub method: String,
    pub path: String,
    pub headers: Vec<(String, String)>,
    pub body: Spool,
}

/// The way back to the client.
pub(crate) struct Client {
    head: Option<oneshot::Sender<Response<AnswerBody>>>,
    body: Option<mpsc::Sender<Result<Bytes, Cut>>>,
    gone: watch::Receiver<()>,
}

impl Client {
    /// `gone` ends when the client's connection does.
    pub fn new(head: oneshot::Sender<Response<AnswerBody>>, gone: watch::Receiver<()>) -> Self {
        Self { head: Some(head), body: None, gone }
    }

    /// Ready once the client is gone.
    fn gone(&self) -> impl Future<Output = ()> + use<> {
        let mut gone = self.gone.clone();
        async move { while gone.changed().await.is_ok() {} }
    }

    fn begin(&mut self, status: u16, headers: Vec<(String, String)>, length: Option<u64>) {
        let (tx, body) = AnswerBody::new(length);
        if let Some(head) = self.head.take() {
            // A client that is gone is noticed by `gone`.
            let _ = head.send(answer::head(status, headers, body));
        }
        self.body = Some(tx);
    }

    fn refuse(&mut self, refusal: &Refusal, wanted: &Wanted) {
        if let Some(head) = self.head.take() {
            let _ = head.send(refusal.response(&wanted.provider, &wanted.path));
        }
    }

    /// Ends the client's connection in the middle of the answer.
    async fn cut(&mut self, why: String) {
        if let Some(body) = self.body.take() {
            let _ = body.send(Err(Cut(why))).await;
        }
    }
}

/// Where the call stands. All of it is guest memory: a restore brings it back together with what the client has got.
struct Standing {
    call: CallId,
    /// An ask of this call may have reached the gateway.
    sent: bool,
    seq: Option<u64>,
    head_sent: bool,
    offset: u64,
    length: Option<u64>,
    /// The client has all of it, though the last frame may not have come. Shared with the half that says GONE: a client
    /// that has what it was promised may go.
    whole: Arc<AtomicBool>,
}

impl Standing {
    /// A call without a name: it gets one when there is a way out, because a hook may come before.
    fn new() -> Self {
        let call = CallId { nonce_hex: String::new(), counter: 0 };
        let whole = Arc::new(AtomicBool::new(false));
        Self { call, sent: false, seq: None, head_sent: false, offset: 0, length: None, whole }
    }

    fn is_whole(&self) -> bool {
        self.whole.load(Ordering::Relaxed)
    }

    fn has(&mut self, bytes: u64) {
        self.offset += bytes;
        self.whole.store(self.length.is_some_and(|l| self.offset >= l), Ordering::Relaxed);
    }
}

/// How an attempt over one stream ended.
enum Step {
    /// Nothing is left to do.
    Done,
    /// The stream broke.
    Lost { progress: bool },
    /// The gateway does not know the call, and the client has nothing of an answer.
    Anew,
}

/// Carries the call out.
pub(crate) async fn drive<D: Dial>(inner: &Inner<D>, wanted: Wanted, mut client: Client) {
    let mut standing = Standing::new();
    let mut pause = PAUSES.0;
    loop {
        let opened = tokio::select! {
            opened = inner.dial.open() => opened,
            () = client.gone() => {
                if standing.sent {
                    let _ = tokio::time::timeout(FAREWELL, farewell(inner, &wanted, &standing)).await;
                }
                return;
            }
        };
        let step = match opened {
            Ok(stream) => attempt(inner, &wanted, &mut standing, &mut client, stream).await,
            Err(_) => Step::Lost { progress: false },
        };
        match step {
            Step::Done => return,
            Step::Anew => standing = Standing::new(),
            Step::Lost { progress: true } => pause = PAUSES.0,
            Step::Lost { progress: false } => {
                tokio::select! {
                    () = tokio::time::sleep(pause) => {}
                    // The next turn of the loop says good-bye.
                    () = client.gone() => {}
                }
                pause = (pause * 2).min(PAUSES.1);
            }
        }
    }
}

fn rejoin<D>(inner: &Inner<D>, wanted: &Wanted, standing: &Standing) -> RelayAsk {
    let facts = inner.timeline(|t| t.facts());
    RelayAsk::Rejoin(Rejoin {
        call: standing.call.clone(),
        timeline: facts.nonce,
        prior: facts.prior,
        position: facts.position,
        seq: standing.seq,
        offset: standing.offset,
        head_sent: standing.head_sent,
        body_hash: wanted.body.hash.clone(),
    })
}

fn first_ask<D>(inner: &Inner<D>, wanted: &Wanted, standing: &Standing) -> RelayAsk {
    let facts = inner.timeline(|t| t.facts());
    RelayAsk::Call(Call {
        call: standing.call.clone(),
        position: facts.position,
        prior: facts.prior,
        provider: wanted.provider.clone(),
        method: wanted.method.clone(),
        path: wanted.path.clone(),
        headers: wanted.headers.clone(),
        body_bytes: wanted.body.len,
        body_hash: wanted.body.hash.clone(),
    })
}

/// Tells the gateway that the client is gone, after the stream of the call had broken.
async fn farewell<D: Dial>(inner: &Inner<D>, wanted: &Wanted, standing: &Standing) -> io::Result<()> {
    let mut stream = inner.dial.open().await?;
    wire::write_ask(&mut stream, &rejoin(inner, wanted, standing)).await?;
    wire::write_frame(&mut stream, &BodyFrame::Gone).await?;
    stream.shutdown().await
}

async fn attempt<D: Dial>(
    inner: &Inner<D>,
    wanted: &Wanted,
    standing: &mut Standing,
    client: &mut Client,
    stream: D::Stream,
) -> Step {
    let (reader, mut writer) = tokio::io::split(stream);
    let again = standing.sent;
    if !again {
        standing.call = inner.timeline(|t| t.next_call());
    }
    let ask = if again { rejoin(inner, wanted, standing) } else { first_ask(inner, wanted, standing) };
    standing.sent = true;
    let (gone, whole) = (client.gone(), standing.whole.clone());
    let send = async {
        wire::write_ask(&mut writer, &ask).await?;
        if !again {
            wanted.body.send(&mut writer).await?;
            wire::write_frame(&mut writer, &BodyFrame::End).await?;
        }
        writer.flush().await?;
        gone.await;
        if whole.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
        wire::write_frame(&mut writer, &BodyFrame::Gone).await?;
        writer.shutdown().await
    };
    let before = (standing.seq, standing.head_sent, standing.offset);
    let mut step = {
        let mut send = pin!(send);
        let mut receive = pin!(receive(inner, wanted, standing, client, reader));
        tokio::select! {
            biased;
            step = &mut receive => step,
            sent = &mut send => match sent {
                Ok(()) => Step::Done,
                // The gateway may have said why before the stream broke.
                Err(_) => tokio::time::timeout(LAST_WORDS, &mut receive).await.unwrap_or(Step::Lost { progress: false }),
            },
        }
    };
    if let Step::Lost { progress } = &mut step {
        *progress = before != (standing.seq, standing.head_sent, standing.offset);
        if standing.is_whole() {
            step = Step::Done;
        }
    }
    step
}

/// Reads answers and passes them on until the call ends or the stream breaks.
async fn receive<D, R: AsyncRead + Unpin>(
    inner: &Inner<D>,
    wanted: &Wanted,
    standing: &mut Standing,
    client: &mut Client,
    reader: R,
) -> Step {
    let mut reader = BufReader::with_capacity(READ_AHEAD, reader);
    loop {
        let Ok(answer) = wire::read_answer(&mut reader).await else { return Step::Lost { progress: false } };
        match answer {
            RelayAnswer::Accepted { seq } => {
                if let Some(step) = entry(inner, standing, client, seq).await {
                    return step;
                }
            }
            RelayAnswer::Head { status, headers, seq, body_bytes } => {
                if let Some(step) = entry(inner, standing, client, seq).await {
                    return step;
                }
                if !standing.head_sent {
                    standing.head_sent = true;
                    standing.length = body_bytes;
                    standing.has(0);
                    client.begin(status, headers, body_bytes);
                }
                return body(standing, client, reader).await;
            }
            RelayAnswer::Unknown {} if standing.head_sent => {
                client.cut("the gateway does not have the rest of this answer".into()).await;
                return Step::Done;
            }
            RelayAnswer::Unknown {} => return Step::Anew,
            RelayAnswer::Refused { status, message, .. } if standing.head_sent => {
                // The rest may come when the node may act again.
                if status == 503 {
                    return Step::Lost { progress: false };
                }
                client.cut(message).await;
                return Step::Done;
            }
            RelayAnswer::Refused { status, code, message } => {
                client.refuse(&Refusal { status, code, message }, wanted);
                return Step::Done;
            }
            // No answer to a call: the other end is confused, and another stream may do better.
            RelayAnswer::Ok {} => return Step::Lost { progress: false },
        }
    }
}

/// Notes the call's entry; another one than before ends a client's connection that has some of the first.
async fn entry<D>(inner: &Inner<D>, standing: &mut Standing, client: &mut Client, seq: u64) -> Option<Step> {
    inner.timeline(|t| t.told(seq));
    if standing.head_sent && standing.seq.is_some_and(|had| had != seq) {
        client.cut("the gateway went on with another answer".into()).await;
        return Some(Step::Done);
    }
    standing.seq = Some(seq);
    None
}

async fn body<R: AsyncRead + Unpin>(standing: &mut Standing, client: &mut Client, mut reader: R) -> Step {
    loop {
        match wire::read_frame(&mut reader).await {
            Ok(BodyFrame::Data(data)) if data.is_empty() => {}
            Ok(BodyFrame::Data(data)) => {
                let len = data.len() as u64;
                let Some(body) = &client.body else { return Step::Done };
                if body.send(Ok(Bytes::from(data))).await.is_err() {
                    // The client is gone: the other half says so. It may also have all that it was promised.
                    return if standing.is_whole() { Step::Done } else { std::future::pending().await };
                }
                standing.has(len);
            }
            Ok(BodyFrame::End) => {
                client.body = None;
                return Step::Done;
            }
            Ok(BodyFrame::Abort(why)) => {
                client.cut(why).await;
                return Step::Done;
            }
            Ok(BodyFrame::Gone) | Err(_) => return Step::Lost { progress: false },
        }
    }
}
