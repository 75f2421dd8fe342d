//! What the JSON of an answer says, in each dialect: usage, model, ends, errors. Figures of an event count only once the
//! event is whole.

use super::{Dialect, Family};
use crate::json::{Path, Scalar, Sink};
use crate::usage::{Usage, UsageError};

/// Choices whose ends are followed; an answer with more is never taken as complete.
const CHOICES_MAX: usize = 256;

/// Token figures as they were said.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Counts {
    /// Prompt, or input.
    input: Option<u64>,
    cached: Option<u64>,
    /// All cache writes, where they are not told apart.
    written: Option<u64>,
    written_5m: Option<u64>,
    written_1h: Option<u64>,
    output: Option<u64>,
    reasoning: Option<u64>,
    /// Gemini's prompt of tool results.
    tool_prompt: Option<u64>,
}

impl Counts {
    /// Later figures replace earlier ones, each by itself: they are cumulative.
    fn merge(&mut self, later: &Counts) {
        for (mine, theirs) in [
            (&mut self.input, later.input),
            (&mut self.cached, later.cached),
            (&mut self.written, later.written),
            (&mut self.written_5m, later.written_5m),
            (&mut self.written_1h, later.written_1h),
            (&mut self.output, later.output),
            (&mut self.reasoning, later.reasoning),
            (&mut self.tool_prompt, later.tool_prompt),
        ] {
            if theirs.is_some() {
                *mine = theirs;
            }
        }
    }
    fn usage(&self, family: Family) -> Option<Result<Usage, UsageError>> {
        if *self == Self::default() {
            return None;
        }
        let n = |c: Option<u64>| c.unwrap_or(0);
        Some(match family {
            Family::Openai => Usage::openai(n(self.input), n(self.cached), n(self.written), n(self.output), n(self.reasoning)),
            Family::Anthropic => {
                // Writes that no lifetime is given for are taken as the default lifetime, five minutes.
                let rest = n(self.written).saturating_sub(n(self.written_5m).saturating_add(n(self.written_1h)));
                let written_5m = n(self.written_5m).saturating_add(rest);
                Ok(Usage::anthropic(n(self.input), n(self.cached), written_5m, n(self.written_1h), n(self.output)))
            }
            Family::Gemini => {
                let prompt = n(self.input).saturating_add(n(self.tool_prompt));
                Usage::gemini(prompt, n(self.cached), n(self.output), n(self.reasoning))
            }
        })
    }
}

/// Which of the choices 0 to 255 are in a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Choices([u64; CHOICES_MAX / 64]);

impl Choices {
    fn put(&mut self, i: u64) {
        if let Ok(i) = usize::try_from(i)
            && i < CHOICES_MAX
        {
            self.0[i / 64] |= 1 << (i % 64);
        }
    }
    fn len(&self) -> u64 {
        self.0.iter().map(|w| u64::from(w.count_ones())).sum()
    }
}

/// What one event says.
#[derive(Debug, Clone, Default)]
struct Event {
    kind: Option<String>,
    counts: Counts,
    usage: bool,
    choices: bool,
    any_choice: bool,
    seen: Choices,
    done: Choices,
    /// The choice that is being read.
    index: Option<u64>,
    finish: bool,
    position: u64,
    too_many: bool,
    error: Option<String>,
    stop: bool,
}

/// What the answer has said so far.
#[derive(Debug, Clone)]
pub(super) struct Facts {
    dialect: Dialect,
    /// Events, not one document.
    events: bool,
    counts: Counts,
    seen: Choices,
    done: Choices,
    too_many: bool,
    ended: bool,
    pub(super) model: Option<String>,
    pub(super) id: Option<String>,
    pub(super) tier: Option<String>,
    pub(super) error: Option<String>,
    event: Event,
}

/// What an event was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Verdict {
    /// It finishes (a part of) the answer, or reports its failure.
    pub finishing: bool,
    /// OpenAI's last chunk: usage and no choices.
    pub usage_only: bool,
}

impl Facts {
    pub(super) fn new(dialect: Dialect, events: bool) -> Self {
        Self {
            dialect,
            events,
            counts: Counts::default(),
            seen: Choices::default(),
            done: Choices::default(),
            too_many: false,
            ended: false,
            model: None,
            id: None,
            tier: None,
            error: None,
            event: Event::default(),
        }
    }
    fn family(&self) -> Family {
        match self.dialect {
            Dialect::OpenaiChat | Dialect::OpenaiResponses => Family::Openai,
            Dialect::Anthropic => Family::Anthropic,
            Dialect::Gemini => Family::Gemini,
            Dialect::Other(f) => f,
        }
    }
    pub(super) fn usage(&self) -> Option<Result<Usage, UsageError>> {
        self.counts.usage(self.family())
    }
    /// Whether a stream said that it is whole; `choices` is how many were asked for.
    pub(super) fn complete(&self, choices: u64) -> bool {
        match self.dialect {
            Dialect::OpenaiChat | Dialect::Gemini => {
                // A blocked prompt has no candidates, and ends.
                let all = self.seen.len() > 0 && self.seen == self.done && !self.too_many;
                self.ended || (all && self.seen.len() >= if self.dialect == Dialect::OpenaiChat { choices } else { 1 })
            }
            Dialect::OpenaiResponses | Dialect::Anthropic => self.ended,
            Dialect::Other(_) => false,
        }
    }
    /// The event, or the whole document, ended; `name` is the event's.
    pub(super) fn event_ended(&mut self, name: &str) -> Verdict {
        let e = std::mem::take(&mut self.event);
        if self.dialect == Dialect::Gemini && e.usage {
            // Every event may carry all of it: the last one counts, whole.
            self.counts = e.counts;
        } else {
            self.counts.merge(&e.counts);
        }
        let mut finishing = e.done != Choices::default() || e.stop;
        for (mine, theirs) in [(&mut self.seen, e.seen), (&mut self.done, e.done)] {
            for (m, t) in mine.0.iter_mut().zip(theirs.0) {
                *m |= t;
            }
        }
        self.too_many |= e.too_many;
        let kind = e.kind.as_deref().unwrap_or(name);
        let mut error = e.error;
        match self.dialect {
            Dialect::OpenaiResponses => match kind {
                "response.completed" | "response.incomplete" => self.ended = true,
                "response.failed" | "error" => error = error.or(Some(kind.to_owned())),
                _ => {}
            },
            Dialect::Anthropic => match kind {
                "message_stop" => self.ended = true,
                "error" => error = error.or(Some(kind.to_owned())),
                _ => {}
            },
            Dialect::Gemini => self.ended |= e.stop,
            Dialect::OpenaiChat | Dialect::Other(_) => {}
        }
        finishing |=
            error.is_some() || (self.ended && matches!(kind, "response.completed" | "response.incomplete" | "message_stop"));
        if error.is_some() {
            self.error = error;
        }
        Verdict { finishing, usage_only: e.choices && !e.any_choice && e.usage }
    }
    fn set_count(&mut self, name: &[&str], value: Option<u64>) {
        let Some(v) = value else { return };
        let c = &mut self.event.counts;
        let slot = match (self.dialect, name) {
            (Dialect::Gemini | Dialect::Other(Family::Gemini), [n]) => match *n {
                "promptTokenCount" => &mut c.input,
                "cachedContentTokenCount" => &mut c.cached,
                "candidatesTokenCount" => &mut c.output,
                "thoughtsTokenCount" => &mut c.reasoning,
                "toolUsePromptTokenCount" => &mut c.tool_prompt,
                _ => return,
            },
            (Dialect::Anthropic | Dialect::Other(Family::Anthropic), n) => match n {
                ["input_tokens"] => &mut c.input,
                ["cache_read_input_tokens"] => &mut c.cached,
                ["cache_creation_input_tokens"] => &mut c.written,
                ["cache_creation", "ephemeral_5m_input_tokens"] => &mut c.written_5m,
                ["cache_creation", "ephemeral_1h_input_tokens"] => &mut c.written_1h,
                ["output_tokens"] => &mut c.output,
                _ => return,
            },
            (Dialect::OpenaiChat | Dialect::OpenaiResponses | Dialect::Other(Family::Openai), n) => match n {
                ["prompt_tokens" | "input_tokens"] => &mut c.input,
                ["prompt_tokens_details" | "input_tokens_details", "cached_tokens"] => &mut c.cached,
                ["prompt_tokens_details" | "input_tokens_details", "cache_write_tokens"] => &mut c.written,
                ["completion_tokens" | "output_tokens"] => &mut c.output,
                ["completion_tokens_details" | "output_tokens_details", "reasoning_tokens"] => &mut c.reasoning,
                _ => return,
            },
            (Dialect::Gemini | Dialect::Other(Family::Gemini), _) => return,
        };
        *slot = Some(v);
    }
    /// The path without what only wraps it.
    fn inner<'a>(&self, path: &'a [&'a str]) -> &'a [&'a str] {
        match (self.dialect, path) {
            (Dialect::OpenaiResponses, ["response", rest @ ..]) => rest,
            (Dialect::Anthropic, ["message", rest @ ..]) => rest,
            // A stream that is one array of events.
            (Dialect::Gemini, ["#", rest @ ..]) => rest,
            _ => path,
        }
    }
    /// Facts of the answer itself are inside `response` and `message` in a stream of these dialects.
    fn at_top(&self, path: &[&str], inner: &[&str]) -> bool {
        match self.dialect {
            Dialect::OpenaiResponses | Dialect::Anthropic => !self.events || path.len() != inner.len(),
            Dialect::OpenaiChat | Dialect::Gemini | Dialect::Other(_) => true,
        }
    }
    fn open_at(&mut self, path: &[&str]) {
        match path {
            ["usage" | "usageMetadata"] => self.event.usage = true,
            ["choices" | "candidates"] => self.event.choices = true,
            ["choices" | "candidates", "#", ..] => {
                self.event.any_choice = true;
                if path.len() == 2 {
                    self.event.index = None;
                    self.event.finish = false;
                }
            }
            ["error"] if self.event.error.is_none() => self.event.error = Some("error".into()),
            _ => {}
        }
    }
    fn choice_closed(&mut self) {
        let e = &mut self.event;
        let i = e.index.take().unwrap_or(e.position);
        e.position += 1;
        e.too_many |= i >= CHOICES_MAX as u64;
        e.seen.put(i);
        if std::mem::take(&mut e.finish) {
            e.done.put(i);
        }
    }
    fn scalar_at(&mut self, path: &[&str], inner: &[&str], value: &Scalar<'_>) {
        let top = self.at_top(path, inner);
        let keep = |slot: &mut Option<String>| {
            if let Some(t) = value.text() {
                *slot = Some(t.to_owned());
            }
        };
        match inner {
            ["type"] if path.len() == 1 => self.event.kind = value.text().map(str::to_owned),
            ["model"] if top => keep(&mut self.model),
            ["modelVersion"] => keep(&mut self.model),
            ["id"] if top => keep(&mut self.id),
            ["responseId"] => keep(&mut self.id),
            ["service_tier"] if top => keep(&mut self.tier),
            ["usage", "service_tier"] if self.family() == Family::Anthropic => keep(&mut self.tier),
            ["usage", "speed"] if value.text() == Some("fast") => self.tier = Some("fast".into()),
            ["usage" | "usageMetadata", name @ ..] => self.set_count(name, value.count()),
            ["choices" | "candidates", "#", "index"] => self.event.index = value.count(),
            ["choices" | "candidates", "#", "finish_reason" | "finishReason"] => {
                self.event.finish |= value.text().is_some();
            }
            ["choices" | "candidates", ..] => self.event.any_choice = true,
            ["promptFeedback", "blockReason"] => self.event.stop |= value.text().is_some(),
            ["delta", "stop_reason"] if self.dialect == Dialect::Anthropic => self.event.stop |= value.text().is_some(),
            ["status"] if self.dialect == Dialect::OpenaiResponses && top && value.text() == Some("failed") => {
                self.event.error.get_or_insert_with(|| "failed".into());
            }
            ["error"] => {
                if let Some(t) = value.text() {
                    self.event.error = Some(t.to_owned());
                }
            }
            ["error", "type" | "status"] => {
                if let Some(t) = value.text() {
                    self.event.error = Some(t.to_owned());
                }
            }
            ["error", "code"] => {
                if let (Some(t), Some("error")) = (value.text(), self.event.error.as_deref()) {
                    self.event.error = Some(t.to_owned());
                }
            }
            _ => {}
        }
    }
}

impl Sink for Facts {
    fn open(&mut self, path: &Path<'_>, _array: bool) {
        let mut room = [""; 8];
        let names = path.names(&mut room);
        let from = names.len() - self.inner(names).len();
        self.open_at(&names[from..]);
    }
    fn close(&mut self, path: &Path<'_>) {
        let mut room = [""; 8];
        if matches!(self.inner(path.names(&mut room)), ["choices" | "candidates", "#"]) {
            self.choice_closed();
        }
    }
    fn scalar(&mut self, path: &Path<'_>, value: &Scalar<'_>) {
        let mut room = [""; 8];
        let names = path.names(&mut room);
        let from = names.len() - self.inner(names).len();
        self.scalar_at(names, &names[from..], value);
    }
}
