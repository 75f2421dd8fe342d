//! The scan of one answer: takes the decoded bytes in any pieces, hands the client's bytes on, and says how far a reader may
//! be let, and at the end what was used. Memory is bounded whatever comes: one event of at most [`HOLD_MAX`] bytes is held, and only
//! where a usage chunk must be hidden.

use super::facts::Facts;
use super::{Dialect, Family, Outcome, Report};
use crate::json::Scan;
use crate::sse::{Piece, Splitter};

/// Bytes of an event that are held back until it is known whether it is the usage chunk; a longer one is not.
pub const HOLD_MAX: usize = 64 * 1024;

/// What is known when an answer begins.
#[derive(Debug, Clone, Copy)]
pub struct Head<'a> {
    /// How it is read.
    pub dialect: Dialect,
    /// HTTP status.
    pub status: u16,
    /// Its `content-type`.
    pub content_type: Option<&'a str>,
    /// The request asked for a stream.
    pub stream: bool,
    /// Choices that were asked for.
    pub choices: u64,
    /// The usage chunk was asked for by us: the client must not see it.
    pub hide_usage: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// Events.
    Sse,
    /// One JSON document.
    Json,
    /// Anything else.
    Opaque,
}

/// The scan.
#[derive(Debug, Clone)]
pub struct ResponseScan {
    form: Form,
    status: u16,
    choices: u64,
    dialect: Dialect,
    sse: Splitter,
    json: Scan,
    facts: Facts,
    /// Bytes that the client gets: of finished events, and of the one that is read.
    before: u64,
    within: u64,
    finishing_at: Option<u64>,
    hide: bool,
    held: Vec<u8>,
    /// The event that is read is too long to be hidden.
    flushed: bool,
    /// The event that ended last was hidden: so is its LF.
    hid: bool,
    hidden: u64,
}

impl ResponseScan {
    /// A scan of an answer that begins so.
    pub fn new(head: &Head<'_>) -> Self {
        let kind = head.content_type.unwrap_or("").to_ascii_lowercase();
        let form = match kind.split(';').next().unwrap_or("").trim() {
            "text/event-stream" => Form::Sse,
            "" if head.stream && head.status < 300 => Form::Sse,
            t if t == "application/json" || t.ends_with("+json") || t == "text/json" => Form::Json,
            _ => Form::Opaque,
        };
        Self {
            form,
            status: head.status,
            choices: head.choices,
            dialect: head.dialect,
            sse: Splitter::default(),
            json: Scan::default(),
            facts: Facts::new(head.dialect, form == Form::Sse),
            before: 0,
            within: 0,
            finishing_at: None,
            hide: head.hide_usage && form == Form::Sse && head.dialect == Dialect::OpenaiChat,
            held: Vec::new(),
            flushed: false,
            hid: false,
            hidden: 0,
        }
    }
    /// The next decoded bytes; what the client gets is appended to `out`.
    pub fn push(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        match self.form {
            Form::Sse => self.events(bytes, out),
            Form::Json => {
                out.extend_from_slice(bytes);
                self.document(bytes);
            }
            Form::Opaque => {
                out.extend_from_slice(bytes);
                self.before += bytes.len() as u64;
            }
        }
    }
    fn document(&mut self, bytes: &[u8]) {
        self.json.push(bytes, &mut self.facts);
        self.before += bytes.len() as u64;
        if self.finishing_at.is_none()
            && let Some(end) = self.json.end()
        {
            self.finishing_at = Some(end - 1);
        }
    }
    fn events(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        let mut at = 0;
        while at < bytes.len() {
            let (n, piece) = self.sse.next(&bytes[at..]);
            let raw = &bytes[at..at + n];
            at += n;
            match piece {
                Piece::Data(data) => {
                    self.json.push(data, &mut self.facts);
                    self.pass(raw, out);
                }
                Piece::Newline => {
                    self.json.push(b"\n", &mut self.facts);
                    self.pass(raw, out);
                }
                Piece::Other => self.pass(raw, out),
                Piece::End => {
                    self.pass(raw, out);
                    self.event_ended(out);
                }
                Piece::Tail if self.hid => self.hidden += n as u64,
                Piece::Tail => {
                    out.extend_from_slice(raw);
                    self.before += n as u64;
                }
            }
        }
    }
    /// Bytes of the event that is being read.
    fn pass(&mut self, raw: &[u8], out: &mut Vec<u8>) {
        self.within += raw.len() as u64;
        if !self.hide || self.flushed {
            out.extend_from_slice(raw);
            return;
        }
        self.held.extend_from_slice(raw);
        if self.held.len() > HOLD_MAX {
            self.flush(out);
            self.flushed = true;
        }
    }
    fn flush(&mut self, out: &mut Vec<u8>) {
        out.append(&mut self.held);
        self.held.shrink_to(HOLD_MAX);
    }
    fn event_ended(&mut self, out: &mut Vec<u8>) {
        self.json.reset();
        let verdict = self.facts.event_ended(self.sse.event());
        if verdict.finishing && self.finishing_at.is_none() {
            self.finishing_at = Some(self.before);
        }
        self.hid = self.hide && !self.flushed && verdict.usage_only;
        if self.hid {
            self.held.clear();
            self.hidden += self.within;
        } else {
            self.flush(out);
            self.before += self.within;
        }
        self.within = 0;
        self.flushed = false;
    }
    /// First byte, in the client's body, of the first finishing event.
    pub fn finishing_at(&self) -> Option<u64> {
        self.finishing_at
    }
    /// Bytes of the client's body that may be released before the `completed` line is durable: whole events before the first
    /// finishing one; all but the last byte of anything else. Never falls.
    pub fn releasable(&self) -> u64 {
        match (self.finishing_at, self.form) {
            (Some(at), _) => at,
            (None, Form::Sse) => self.before,
            (None, Form::Json | Form::Opaque) => self.before.saturating_sub(1),
        }
    }
    /// Bytes that were kept from the client.
    pub fn hidden(&self) -> u64 {
        self.hidden
    }
    /// The answer ended: what is still held is appended to `out`. `clean` says that the transport ended as HTTP says it must
    /// (length reached, last chunk seen) and not by a broken connection.
    pub fn finish(mut self, clean: bool, out: &mut Vec<u8>) -> Report {
        let half = self.form == Form::Sse && self.sse.in_event();
        self.flush(out);
        if self.form == Form::Json {
            // A number is told only when it is whole, so the figures of a cut document are right as far as they go.
            self.facts.event_ended("");
        }
        let outcome = self.outcome(clean, half);
        let (usage, usage_error) = match self.facts.usage() {
            Some(Ok(u)) => (Some(u), None),
            Some(Err(e)) => (None, Some(e.to_string())),
            None => (None, None),
        };
        Report {
            outcome,
            usage,
            usage_error,
            model: self.facts.model,
            response_id: self.facts.id,
            tier: self.facts.tier.filter(|t| !matches!(t.as_str(), "default" | "standard" | "auto")),
            error: self.facts.error,
        }
    }
    fn outcome(&self, clean: bool, half: bool) -> Outcome {
        if !(200..300).contains(&self.status) || self.facts.error.is_some() {
            return Outcome::Failed;
        }
        let whole = match (self.form, self.dialect) {
            (Form::Sse, Dialect::Other(_)) | (Form::Opaque, _) => clean && !half,
            // A proxy may cut the connection after the last event; it is whole all the same, unless one was begun.
            (Form::Sse, _) => self.facts.complete(self.choices) && (clean || !half),
            (Form::Json, _) => clean && (self.json.end().is_some() || self.json.is_empty()),
        };
        if whole { Outcome::Complete } else { Outcome::Partial }
    }
}

/// The provider's id of the request, from the answer's head.
pub fn provider_request_id<'a>(family: Family, headers: impl IntoIterator<Item = (&'a str, &'a str)>) -> Option<String> {
    let wanted: &[&str] = match family {
        Family::Openai => &["x-request-id"],
        Family::Anthropic => &["request-id", "anthropic-request-id"],
        Family::Gemini => &["x-goog-request-id"],
    };
    headers
        .into_iter()
        .find(|(name, _)| wanted.iter().any(|w| name.eq_ignore_ascii_case(w)))
        .map(|(_, value)| value.chars().filter(|c| !c.is_control()).take(200).collect())
}
