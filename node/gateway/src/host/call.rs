//! A guest's call, from its first message to its last byte: read, decided, bought or served, and followed.

use super::live::{Live, Refusal};
use super::node::Node;
use super::purchase::Purchase;
use super::reader::{self, Left, Place};
use super::session::{FoundEntry, Session, Verdict};
use super::wire::{WireError, drain, read_frame, write_message};
use crate::coding::accepted;
use crate::crash;
use crate::headers;
use crate::limits::{BODY_BYTES_PER_S_MIN, DECODED_BYTES_MAX, GUEST_PATIENCE, TIMELINES_MAX};
use bytes::Bytes;
use ks_gateway::codec::{self, CodecError, Encoding};
use ks_gateway::dialect::{Family, Profile, RequestFacts, inject_usage, request_facts, scrub_path};
use ks_gateway::key::{Keys, Request};
use ks_gateway::ledger::{Entry, Intent};
use ks_gateway::names::{CallId, Digest, EntryRef, Nonce};
use ks_gateway::replay::{Gone, Input, Why};
use ks_proto::gateway::{Provider, Stamp};
use ks_proto::relay::{self, BodyFrame, RelayAnswer};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};

/// What became of a decision: an answer to follow, and the number to tell of it.
struct Followed {
    live: Arc<Live>,
    told: u64,
    offset: u64,
    /// Keeps another session's purchase from being given up while this client reads it.
    hold: Option<Hold>,
}

struct Hold {
    owner: Arc<Session>,
    seq: u64,
}

impl Hold {
    fn new(owner: Arc<Session>, seq: u64) -> Self {
        owner.step(Input::Held { entry: EntryRef::own(seq) });
        Self { owner, seq }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.owner.step(Input::LetGo { entry: EntryRef::own(self.seq) });
    }
}

/// Why a call goes no further.
enum Stop {
    /// The client is told.
    Refused(Refusal),
    /// Nothing is known of it.
    Unknown,
    /// The stream is gone.
    Gone,
}

impl From<Refusal> for Stop {
    fn from(r: Refusal) -> Self {
        Self::Refused(r)
    }
}

/// One stream with a call on it.
pub struct Calling {
    /// The node.
    pub node: Arc<Node>,
    /// Whose.
    pub session: Arc<Session>,
    /// The node's word about it.
    pub stamp: Stamp,
}

fn refuse(status: u16, code: &'static str, message: impl Into<String>) -> Stop {
    Stop::Refused(Refusal::new(status, code, message))
}

fn call_id(id: &relay::CallId) -> Result<CallId, Stop> {
    Ok(CallId { nonce: nonce(&id.nonce_hex)?, counter: id.counter })
}

fn nonce(text: &str) -> Result<Nonce, Stop> {
    text.parse().map_err(|e: ks_gateway::names::HexError| refuse(400, "bad-request", e.to_string()))
}

fn digest(text: &str) -> Result<Digest, Stop> {
    text.parse().map_err(|e: ks_gateway::names::HexError| refuse(400, "bad-request", e.to_string()))
}

impl Calling {
    /// A new call.
    pub async fn call(&self, call: relay::Call, read: &mut (impl AsyncRead + Unpin), write: &mut (impl AsyncWrite + Unpin)) {
        let id = match call_id(&call.call) {
            Ok(id) => id,
            Err(stop) => return self.stop(stop, read, write).await,
        };
        match self.decide(id, call, read).await {
            Ok(followed) => self.follow(id, followed, read, write).await,
            Err(stop) => self.stop(stop, read, write).await,
        }
    }

    /// The rest of an answer.
    pub async fn rejoin(
        &self,
        rejoin: relay::Rejoin,
        read: &mut (impl AsyncRead + Unpin),
        write: &mut (impl AsyncWrite + Unpin),
    ) {
        let id = match call_id(&rejoin.call) {
            Ok(id) => id,
            Err(stop) => return self.stop(stop, read, write).await,
        };
        match self.decide_rejoin(id, &rejoin, read).await {
            Ok(followed) => self.follow(id, followed, read, write).await,
            Err(stop) => self.stop(stop, read, write).await,
        }
    }

    async fn stop(&self, stop: Stop, read: &mut (impl AsyncRead + Unpin), write: &mut (impl AsyncWrite + Unpin)) {
        let answer = match stop {
            Stop::Gone => return,
            Stop::Unknown => RelayAnswer::Unknown {},
            Stop::Refused(r) => RelayAnswer::Refused { status: r.status, code: r.code.to_owned(), message: r.message },
        };
        if let Ok(Ok(())) = tokio::time::timeout(GUEST_PATIENCE, write_message(write, &answer)).await {
            drain(read).await;
        }
    }

    async fn follow(
        &self,
        id: CallId,
        followed: Followed,
        read: &mut (impl AsyncRead + Unpin),
        write: &mut (impl AsyncWrite + Unpin),
    ) {
        let seq = followed.told;
        let accepted = tokio::time::timeout(GUEST_PATIENCE, write_message(write, &RelayAnswer::Accepted { seq })).await;
        let left = match accepted {
            Ok(Ok(())) => {
                let may_pass = || self.session.may_pass(self.stamp.token).is_ok();
                reader::serve(read, write, &followed.live, Place { seq, offset: followed.offset }, may_pass).await
            }
            Ok(Err(_)) | Err(_) => Left::Cut,
        };
        let input = match left {
            Left::Delivered => Input::Delivered { call: id },
            Left::Closed => Input::ClientGone { call: id, how: Gone::Closed },
            Left::Cut => Input::ClientGone { call: id, how: Gone::Cut },
        };
        self.session.step(input);
        drop(followed.hold);
    }

    async fn decide(&self, id: CallId, mut call: relay::Call, read: &mut (impl AsyncRead + Unpin)) -> Result<Followed, Stop> {
        if headers::wants_upgrade(&call.headers) {
            return Err(refuse(
                426,
                "upgrade",
                "this gateway speaks HTTP requests and event streams, not WebSocket; ask again over HTTP",
            ));
        }
        let provider = self.node.provider(&call.provider).ok_or_else(|| {
            let name = &call.provider;
            refuse(404, "no-provider", format!("there is no provider {name:?}; an operator can add it: ks provider add {name}"))
        })?;
        // A session's own share first: one that holds it up holds up nobody else.
        let share = u32::try_from(call.body_bytes).unwrap_or(u32::MAX);
        let _share = self.session.room().clone().acquire_many_owned(share).await;
        let _room = self.node.request_room(call.body_bytes).await;
        let patience = GUEST_PATIENCE + Duration::from_secs(call.body_bytes / BODY_BYTES_PER_S_MIN);
        let body = tokio::time::timeout(patience, self.body(&call, read));
        let body = body.await.map_err(|_| refuse(408, "too-slow", format!("the body did not come within {patience:?}")))??;
        let plain = decoded(&call.headers, &body)?;
        let family = family(&provider);
        let profile = Profile { name: provider.name.clone(), family, include_usage: provider.include_usage };
        let facts = request_facts(&profile, &call.method, &call.path, &plain);
        let keys = Keys::of(&Request {
            provider: &profile.name,
            family,
            method: &call.method,
            path: &call.path,
            headers: &call.headers,
            body: &plain,
        });
        self.open_timeline(id.nonce, call.prior.as_deref(), call.position)?;
        crash::point("accepted");
        let body_hash = digest(&call.body_hash)?;
        let ask = Input::Ask { call: id, timeline: id.nonce, keys, body_hash, stateful: facts.stateful };
        let done = match self.ask(id, ask, read).await? {
            Verdict::Entry(found) => self.served(id, id.nonce, body_hash, found).await,
            Verdict::Live(why) => {
                // What leaves: with usage asked for, uncoded then.
                let out = outgoing(&mut call.headers, &facts, body.clone(), &plain);
                drop(plain);
                self.buy(id, &call, Asked { facts, keys, body_hash, provider, body, out, why }).await
            }
            Verdict::Unknown => return Err(Stop::Unknown),
        };
        done.inspect_err(|_| self.session.step(Input::Withdrawn { call: id }))
    }

    /// The machine's word about a call, which may have to wait for another call's line.
    async fn ask(&self, id: CallId, input: Input, read: &mut (impl AsyncRead + Unpin)) -> Result<Verdict, Stop> {
        let mut word = self.session.ask(id, input);
        let closed = tokio::select! {
            biased;
            word = &mut word => return word.map_err(|_| Stop::Gone),
            frame = read_frame(read) => matches!(frame, Ok(Some(BodyFrame::Gone))),
        };
        let how = if closed { Gone::Closed } else { Gone::Cut };
        self.session.step(Input::ClientGone { call: id, how });
        Err(Stop::Gone)
    }

    /// Says where a timeline lives on from, if this is its first word. A call that waits for its turn may come before that is
    /// durable, but no line of the timeline does.
    fn open_timeline(&self, timeline: Nonce, prior: Option<&str>, position: u64) -> Result<(), Stop> {
        match self.session.is_new(timeline, self.stamp.token) {
            Some(false) => return Ok(()),
            Some(true) => {}
            None => {
                return Err(refuse(429, "timelines", format!("this run began {TIMELINES_MAX} timelines; a relay begins one")));
            }
        }
        let prior = prior.map(nonce).transpose()?;
        // A fork's lines go on from its fork point; its relay counts from there only when it has been told of one.
        let position = position.max(self.session.forked_at());
        let (mode, began) = (self.stamp.replay, self.stamp.began);
        self.session.step(Input::OpenTimeline { nonce: timeline, prior, position, mode, began });
        let entry = Entry::Timeline { nonce: timeline, prior, position, mode, began, token: self.stamp.token };
        // In the file before every line of the timeline, because it is handed in before.
        self.session.append_later(entry);
        Ok(())
    }

    /// Reads the request's body as it was announced.
    async fn body(&self, call: &relay::Call, read: &mut (impl AsyncRead + Unpin)) -> Result<Bytes, Stop> {
        let announced = usize::try_from(call.body_bytes).unwrap_or(usize::MAX);
        let mut body = Vec::with_capacity(announced.min(1 << 20));
        loop {
            let frame = tokio::time::timeout(GUEST_PATIENCE, read_frame(read)).await.map_err(|_| Stop::Gone)?;
            match frame {
                Ok(Some(BodyFrame::Data(data))) if body.len() + data.len() <= announced => {
                    if body.capacity() - body.len() < data.len() {
                        body.reserve_exact((announced - body.len()).min(body.len().max(1 << 20)));
                    }
                    body.extend_from_slice(&data);
                }
                Ok(Some(BodyFrame::Data(_))) => return Err(refuse(400, "bad-request", "the body is longer than was announced")),
                Ok(Some(BodyFrame::End)) => break,
                Ok(Some(BodyFrame::Gone | BodyFrame::Abort(_)) | None) | Err(WireError::Io(_)) => return Err(Stop::Gone),
                Err(WireError::Decode(e)) => return Err(refuse(400, "bad-request", e.to_string())),
            }
        }
        if body.len() != announced || blake3::hash(&body).to_hex().as_str() != call.body_hash {
            return Err(refuse(400, "bad-request", "the body is not the one that was announced"));
        }
        Ok(Bytes::from(body))
    }

    async fn decide_rejoin(
        &self,
        id: CallId,
        rejoin: &relay::Rejoin,
        read: &mut (impl AsyncRead + Unpin),
    ) -> Result<Followed, Stop> {
        let timeline = nonce(&rejoin.timeline)?;
        self.open_timeline(timeline, rejoin.prior.as_deref(), rejoin.position)?;
        let body_hash = digest(&rejoin.body_hash)?;
        self.node.tell_stored(&self.session);
        let (offset, head_sent) = (rejoin.offset, rejoin.head_sent);
        match self.ask(id, Input::Rejoin { call: id, timeline, offset, head_sent, body_hash }, read).await? {
            Verdict::Entry(found) => self.served(id, timeline, body_hash, found).await,
            // Its request is not at hand here: the relay sends it again, or cuts its client off.
            Verdict::Live(_) => {
                self.session.step(Input::Withdrawn { call: id });
                Err(Stop::Unknown)
            }
            Verdict::Unknown => Err(Stop::Unknown),
        }
    }

    /// The answer of an entry, with its `served` line durable where one is due.
    async fn served(&self, id: CallId, timeline: Nonce, body_hash: Digest, found: FoundEntry) -> Result<Followed, Stop> {
        let FoundEntry { entry, matched, offset, told, note } = found;
        let owner = match &entry.session {
            None => self.session.clone(),
            Some(other) => {
                let id = other.parse().map_err(|_| Stop::Unknown)?;
                self.node.known(id).await.ok_or(Stop::Unknown)?
            }
        };
        let live = owner.answer(entry.seq).ok_or(Stop::Unknown)?;
        let hold = entry.session.is_some().then(|| Hold::new(owner, entry.seq));
        let mut seq = told;
        if note {
            let line = Entry::Served { call: id, timeline, of: entry.clone(), matched, body_hash };
            let done = self.session.journal().append(line).await.map_err(|e| refuse(507, "disk-full", e.to_string()))?;
            self.session.step(Input::Noted { call: id, seq: done.line.seq });
            seq = seq.or(Some(done.line.seq));
        }
        Ok(Followed { live, told: seq.unwrap_or(entry.seq), offset, hold })
    }

    /// Reserves, makes the intent durable, and starts the purchase.
    async fn buy(&self, id: CallId, call: &relay::Call, asked: Asked) -> Result<Followed, Stop> {
        let (name, user) = (&asked.provider.name, &self.stamp.user);
        let key = self.node.key(user, name).map_err(|e| refuse(503, "sealed", e.to_string()))?;
        let key = key.ok_or_else(|| {
            refuse(401, "no-key", format!("no key is stored for {name}; its user can add one: ks key add {name}"))
        })?;
        self.session.may_pass(self.stamp.token).map_err(|e| refuse(503, "lapsed", e.to_string()))?;
        let slot =
            self.node.call_slot().ok_or_else(|| refuse(503, "busy", "too many calls are under way on this node; try again"))?;
        let reserved = self.node.reservation(&asked.provider, &asked.facts);
        self.node.budgets().reserve(self.session.name(), user, id, reserved).map_err(|e| refuse(402, "budget", e.to_string()))?;
        let undo = |stop: Stop| {
            self.node.budgets().release(self.session.name(), id);
            stop
        };
        let facts = &asked.facts;
        let intent = Intent {
            call: id,
            timeline: id.nonce,
            user: user.clone(),
            token: self.stamp.token,
            provider: name.clone(),
            dialect: facts.dialect,
            model: facts.model.clone(),
            method: call.method.clone(),
            path: scrub_path(&call.path),
            keys: asked.keys,
            body_hash: asked.body_hash,
            body_bytes: call.body_bytes,
            stateful: facts.stateful,
            stream: facts.stream,
            input_estimate: facts.input_estimate,
            max_output: facts.max_output,
            reserved,
            why: asked.why,
        };
        let done = self.session.journal().intent(Entry::Intent(Box::new(intent)), asked.body).await;
        let done = done.map_err(|e| undo(refuse(507, "disk-full", e.to_string())))?;
        let seq = done.line.seq;
        let file = done.answer.ok_or_else(|| undo(refuse(500, "journal", "the journal made no place for the answer")))?;
        let live = Arc::new(Live::new(seq, file));
        self.session.add_live(live.clone());
        self.session.step(Input::Bought { call: id, seq });
        if let Err(e) = self.session.replicated(done.lines, self.node.patience().0).await {
            self.node.budgets().release(self.session.name(), id);
            self.session.unsent(seq, &format!("not sent: {e}"), self.node.price_table()).await;
            return Err(refuse(503, "replica", format!("{e}; nothing was sent; try again")));
        }
        let purchase = Purchase {
            session: self.session.clone(),
            token: self.stamp.token,
            call: id,
            facts: asked.facts,
            provider: asked.provider,
            method: call.method.clone(),
            path: call.path.clone(),
            headers: call.headers.clone(),
            body: asked.out,
            key,
            live: live.clone(),
        };
        let node = self.node.clone();
        tokio::spawn(async move {
            purchase.run(node).await;
            drop(slot);
        });
        Ok(Followed { live, told: seq, offset: 0, hold: None })
    }
}

struct Asked {
    facts: RequestFacts,
    keys: Keys,
    body_hash: Digest,
    provider: Provider,
    /// As the client sent it.
    body: Bytes,
    /// As it leaves.
    out: Bytes,
    why: Why,
}

/// A provider's family.
pub fn family(provider: &Provider) -> Family {
    match provider.dialect.as_str() {
        "anthropic" => Family::Anthropic,
        "gemini" => Family::Gemini,
        _ => Family::Openai,
    }
}

/// The body without its content coding.
fn decoded(all: &[(String, String)], raw: &Bytes) -> Result<Bytes, Stop> {
    let bad = |e: CodecError| match e {
        CodecError::Unknown(_) => refuse(415, "bad-request", e.to_string()),
        CodecError::Broken(..) => refuse(400, "bad-request", e.to_string()),
        CodecError::TooLong { .. } => refuse(413, "too-large", e.to_string()),
    };
    match Encoding::parse(headers::value(all, "content-encoding")).map_err(bad)? {
        Encoding::Identity => Ok(raw.clone()),
        coding => codec::decode_all(coding, raw, DECODED_BYTES_MAX).map(Bytes::from).map_err(bad),
    }
}

/// The body as it leaves, and the headers that go with it.
fn outgoing(all: &mut Vec<(String, String)>, facts: &RequestFacts, body: Bytes, plain: &Bytes) -> Bytes {
    let coding = accepted(headers::value(all, "accept-encoding"), facts.inject_usage);
    all.retain(|(n, _)| !n.eq_ignore_ascii_case("accept-encoding"));
    all.push(("accept-encoding".to_owned(), coding));
    match facts.inject_usage.then(|| inject_usage(plain)).flatten() {
        Some(out) => {
            all.retain(|(n, _)| !n.eq_ignore_ascii_case("content-encoding"));
            Bytes::from(out)
        }
        None => body,
    }
}
