//! One purchase, from its durable intent to its durable end: send, pump, price, book, release.
//!
//! Owned by a task of its own: nothing that happens to the guest, its VM or ksd reaches it.

use super::journal::{Bodies, StoredHead};
use super::live::{End, Live, Refusal};
use super::node::Node;
use super::pump::{Ended, Pass, Pump, Pumped, ms};
use super::session::Session;
use super::upstream::{Outgoing, UpstreamError};
use crate::coding::Decoder;
use crate::crash;
use crate::headers;
use crate::scrub;
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::Response;
use hyper::body::Incoming;
use ks_gateway::dialect::{Head, Outcome, Report, RequestFacts, ResponseScan};
use ks_gateway::ledger::{Completed, Entry};
use ks_gateway::money::Money;
use ks_gateway::names::{CallId, Digest};
use ks_proto::RunToken;
use ks_proto::gateway::Provider;
use std::sync::Arc;
use std::time::{Duration, Instant};
use zeroize::Zeroizing;

/// The largest error body that is passed on; it is read whole, for the key that it may repeat.
const ERROR_BYTES_MAX: usize = 1 << 20;

/// What is bought.
pub struct Purchase {
    /// The session that asks.
    pub session: Arc<Session>,
    /// Its run.
    pub token: RunToken,
    /// The call.
    pub call: CallId,
    /// What it asks.
    pub facts: RequestFacts,
    /// Of whom.
    pub provider: Provider,
    /// Method.
    pub method: String,
    /// Path and query.
    pub path: String,
    /// Headers as they leave, without a key.
    pub headers: Vec<(String, String)>,
    /// Body as it leaves.
    pub body: Bytes,
    /// The key.
    pub key: Zeroizing<String>,
    /// Where the answer goes.
    pub live: Arc<Live>,
}

/// What is known at the end of a purchase.
struct Result_ {
    status: u16,
    outcome: Outcome,
    report: Option<Report>,
    error: Option<String>,
    head_hash: Digest,
    len: u64,
    hash: Digest,
    request_id: Option<String>,
    first_byte_ms: Option<u64>,
    end: End,
    /// Nothing of it reached the provider.
    unsent: bool,
}

impl Purchase {
    /// Runs it to its end.
    pub async fn run(mut self, node: Arc<Node>) {
        let started = Instant::now();
        crash::point("intent-durable");
        let answer = match self.session.may_pass(self.token) {
            Ok(()) => self.send(&node).await,
            Err(lapse) => Err(UpstreamError::Unsent { provider: self.provider.name.clone(), why: lapse.to_string() }),
        };
        let result = match answer {
            Ok(answer) => self.receive(answer, started).await,
            Err(e) => failed(&e),
        };
        // The key is not needed any more.
        drop(std::mem::take(&mut self.key));
        self.body = Bytes::new();
        crash::point("finished");
        self.book(&node, result, started).await;
    }

    async fn send(&self, node: &Node) -> Result<Response<Incoming>, UpstreamError> {
        let (method, path, headers) = (self.method.as_str(), self.path.as_str(), self.headers.as_slice());
        node.upstreams.send(&self.provider, Outgoing { method, path, headers, body: self.body.clone(), key: &self.key }).await
    }

    async fn receive(&self, answer: Response<Incoming>, started: Instant) -> Result_ {
        let (parts, body) = answer.into_parts();
        let status = parts.status.as_u16();
        let all: Vec<(String, String)> = parts
            .headers
            .iter()
            .map(|(n, v)| (n.as_str().to_owned(), String::from_utf8_lossy(v.as_bytes()).into_owned()))
            .collect();
        let request_id = ["x-request-id", "request-id", "x-goog-request-id"].iter().find_map(|n| headers::value(&all, n));
        let request_id = request_id.map(|v| v.chars().take(200).collect());
        let coding = headers::value(&all, "content-encoding").map(str::to_owned);
        let mut passing = headers::downward(&all);
        if let Err(e) = ks_proto::relay::check_headers(&passing) {
            // Too many for a client: those that it needs.
            tracing::warn!(error = %e, "an answer's headers were cut to those that clients need");
            passing = headers::needed(&passing);
        }
        let content_type = headers::value(&all, "content-type").map(str::to_owned);
        let scan = ResponseScan::new(&Head {
            dialect: self.facts.dialect,
            status,
            content_type: content_type.as_deref(),
            stream: self.facts.stream,
            choices: self.facts.choices,
            hide_usage: self.facts.inject_usage,
        });
        let (head, pumped) = if status >= 400 {
            self.error(status, passing, coding.as_deref(), body, scan, started).await
        } else {
            let decoder = Decoder::new(coding.as_deref());
            let pass = if self.facts.inject_usage && !matches!(decoder, Decoder::Opaque) { Pass::Scanned } else { Pass::Raw };
            if pass == Pass::Scanned {
                passing.retain(|(n, _)| !n.eq_ignore_ascii_case("content-encoding"));
            }
            let head = StoredHead { status, headers: passing };
            self.head(&head).await;
            (head, Pump::new(&self.live, scan, decoder, pass).run(body, started).await)
        };
        let head_json = serde_json::to_vec(&head).unwrap_or_default();
        self.result(status, pumped, Digest::of(&head_json), request_id)
    }

    /// Stores the head and shows it to readers; its sync goes on beside the body.
    async fn head(&self, head: &StoredHead) {
        let json = serde_json::to_vec(head).unwrap_or_default();
        if let Err(e) = self.session.journal().bodies().put_head(self.live.seq, &json) {
            tracing::warn!(session = %self.session.id(), seq = self.live.seq, error = %e, "an answer's head was not stored");
        }
        self.live.progress.send_modify(|p| p.head = Some(Arc::new(head.clone())));
        crash::point("head");
    }

    /// An error is read whole before any of it passes: it may repeat the key.
    async fn error(
        &self,
        status: u16,
        mut passing: Vec<(String, String)>,
        coding: Option<&str>,
        body: Incoming,
        scan: ResponseScan,
        started: Instant,
    ) -> (StoredHead, Pumped) {
        let (bytes, broken) = match Limited::new(body, ERROR_BYTES_MAX).collect().await {
            Ok(all) => (all.to_bytes(), None),
            Err(e) => (Bytes::new(), Some(e.to_string())),
        };
        let clean = scrub::error_body(status, self.facts.dialect, coding, &bytes, &self.key);
        if let scrub::Clean::Replaced(_) = clean {
            passing = headers::needed(&passing);
            passing.push(("content-type".to_owned(), "application/json".to_owned()));
        }
        let bytes = match clean {
            scrub::Clean::Same => bytes,
            scrub::Clean::Replaced(b) => Bytes::from(b),
        };
        for (_, value) in &mut passing {
            scrub::header(value, &self.key);
        }
        let coding = coding.filter(|_| headers::value(&passing, "content-encoding").is_some());
        let decoder = Decoder::new(coding);
        let head = StoredHead { status, headers: passing };
        self.head(&head).await;
        let mut pumped = Pump::new(&self.live, scan, decoder, Pass::Raw).run(Full::new(bytes), started).await;
        if let Some(why) = broken {
            pumped.ended = Ended::Cut(why);
        }
        (head, pumped)
    }

    fn result(&self, status: u16, pumped: Pumped, head_hash: Digest, request_id: Option<String>) -> Result_ {
        let report = pumped.report;
        let (outcome, error, end) = match pumped.ended {
            Ended::Whole => (report.outcome, report.error.clone(), End::Whole),
            Ended::Cut(why) => {
                let why = format!("{} ended the answer before its end: {why}", self.provider.name);
                // Whole all the same, if the answer's own end came before the connection's.
                let end = if report.outcome == Outcome::Complete { End::Whole } else { End::Abort(why.clone().into()) };
                (report.outcome, Some(why), end)
            }
            Ended::Aborted => (Outcome::Aborted, None, End::Abort("given up: nobody wanted the answer any more".into())),
            Ended::Unstored(why) => {
                let why = format!("the answer could not be stored: {why}");
                (Outcome::Partial, Some(why.clone()), End::Abort(why.into()))
            }
        };
        Result_ {
            status,
            outcome,
            error: error.or_else(|| report.usage_error.clone()),
            head_hash,
            len: pumped.len,
            hash: ks_gateway::names::Hex(*pumped.hash.as_bytes()),
            request_id,
            first_byte_ms: pumped.first_byte_ms,
            end,
            report: Some(report),
            unsent: false,
        }
    }

    /// Makes the end durable, books it, and releases the rest.
    async fn book(&self, node: &Node, r: Result_, started: Instant) {
        let report = r.report.as_ref();
        let usage = report.and_then(|s| s.usage);
        let model = report.and_then(|s| s.model.clone()).or_else(|| self.facts.model.clone());
        let tier = report.and_then(|s| s.tier.clone());
        let cost = usage.as_ref().and_then(|u| node.price(&self.provider, model.as_deref(), tier.as_deref(), u));
        let single_copy = !self.copied(node.patience().1).await;
        let entry = Completed {
            of: self.live.seq,
            status: r.status,
            outcome: r.outcome,
            usage,
            model,
            tier,
            cost,
            price_table: node.price_table(),
            head_hash: r.head_hash,
            body_bytes: r.len,
            body_hash: r.hash,
            single_copy,
            provider_request_id: r.request_id,
            response_id: report.and_then(|s| s.response_id.clone()),
            error: r.error,
            first_byte_ms: r.first_byte_ms,
            took_ms: ms(started),
        };
        let session = self.session.name();
        if r.unsent {
            node.budgets().release(session, self.call);
        } else {
            // An error that bills nothing says so by saying nothing; anything else without figures counts as what it reserved.
            let refused = usage.is_none() && r.outcome == Outcome::Failed && r.status >= 400;
            node.budgets().settle(session, self.call, if refused { Some(Money::ZERO) } else { cost });
        }
        let end = match self.session.journal().append(Entry::Completed(Box::new(entry.clone()))).await {
            Ok(done) => {
                if !single_copy {
                    let _ = self.session.replicated(done.lines, node.patience().1).await;
                }
                crash::point("completed-durable");
                self.session.ended(&entry);
                let outcome = Some(entry.outcome);
                node.changed(&self.session, self.live.seq, entry.body_bytes, outcome);
                if entry.outcome == Outcome::Complete {
                    node.tell_bought(&self.session);
                }
                r.end
            }
            // Its end is not in the journal: the next start finds it unknown, and so do the readers.
            Err(e) => End::Abort(format!("the end of the answer could not be journaled: {e}").into()),
        };
        self.live.progress.send_modify(|p| {
            if !matches!(end, End::Abort(_)) || entry.outcome != Outcome::Unknown {
                p.stored = entry.body_bytes;
                p.free = entry.body_bytes;
            }
            p.end = Some(end);
        });
        self.session.forget_live(self.live.seq);
    }

    /// Makes the answer durable, here and on the replica set; false if there is no second copy.
    async fn copied(&self, patience: Duration) -> bool {
        let bodies = self.session.journal().bodies().clone();
        let (live, seq) = (self.live.clone(), self.live.seq);
        let synced = tokio::task::spawn_blocking(move || {
            Bodies::sync_answer(&live.file)?;
            bodies.sync_early(seq)
        });
        match synced.await {
            Ok(Ok(())) => {}
            Ok(Err(e)) => tracing::warn!(session = %self.session.id(), seq, error = %e, "an answer could not be synced"),
            Err(e) => tracing::warn!(session = %self.session.id(), seq, error = %e, "an answer's sync died"),
        }
        self.session.copy_bodies(seq, patience).await
    }
}

/// No head ever came.
fn failed(e: &UpstreamError) -> Result_ {
    let unsent = matches!(e, UpstreamError::Unsent { .. });
    let (code, next) = if unsent {
        ("unreached", "nothing was sent and nothing bought; try again")
    } else {
        ("lost", "it may have been bought; the ledger shows it as such")
    };
    Result_ {
        status: 0,
        outcome: if unsent { Outcome::Failed } else { Outcome::Unknown },
        report: None,
        error: Some(e.to_string()),
        head_hash: Digest::of(b""),
        len: 0,
        hash: Digest::of(b""),
        request_id: None,
        first_byte_ms: None,
        end: End::Refused(Arc::new(Refusal::new(502, code, format!("{e}; {next}")))),
        unsent,
    }
}
