//! A session's journal of model calls as people read it. Pure: lines in, calls and sums out.
//!
//! Money stays exact: whole picodollars, as the journal writes it.

use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;

/// Picodollars in a dollar.
const DOLLAR: u128 = 1_000_000_000_000;

/// An amount in picodollars.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Money(pub u128);

impl Money {
    /// From `0.054399`.
    pub fn parse(text: &str) -> Option<Self> {
        let (whole, frac) = text.split_once('.').unwrap_or((text, ""));
        if frac.len() > 12 || whole.is_empty() || !whole.bytes().chain(frac.bytes()).all(|b| b.is_ascii_digit()) {
            return None;
        }
        let frac: u128 = format!("{frac:0<12}").parse().ok()?;
        Some(Self(whole.parse::<u128>().ok()?.checked_mul(DOLLAR)?.checked_add(frac)?))
    }
}
impl std::fmt::Display for Money {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let frac = format!("{:012}", self.0 % DOLLAR);
        write!(f, "{}.{:0<2}", self.0 / DOLLAR, frac.trim_end_matches('0'))
    }
}
impl Serialize for Money {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

/// Tokens in buckets that do not overlap.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Tokens {
    /// Input that no cache served.
    pub input: u64,
    /// Input from a cache.
    pub cache_read: u64,
    /// Input written to a cache.
    pub cache_write: u64,
    /// Output, reasoning included.
    pub output: u64,
}

impl Tokens {
    fn read(v: &Value) -> Option<Self> {
        let n = |k: &str| v[k].as_u64().unwrap_or(0);
        v.is_object().then(|| Self {
            input: n("input"),
            cache_read: n("cache_read"),
            cache_write: n("cache_write_5m").saturating_add(n("cache_write_1h")),
            output: n("output"),
        })
    }
    /// All of them.
    pub fn total(&self) -> u64 {
        self.input.saturating_add(self.cache_read).saturating_add(self.cache_write).saturating_add(self.output)
    }
    fn add(&mut self, o: &Self, times: u64) {
        let put = |a: &mut u64, b: u64| *a = a.saturating_add(b.saturating_mul(times));
        put(&mut self.input, o.input);
        put(&mut self.cache_read, o.cache_read);
        put(&mut self.cache_write, o.cache_write);
        put(&mut self.output, o.output);
    }
}

/// A purchase, or a call that was served what another session had bought.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Call {
    /// Number of its line.
    pub seq: u64,
    /// Unix milliseconds.
    pub at_ms: u64,
    /// Provider.
    pub provider: String,
    /// Model that answered, else the one asked for.
    pub model: String,
    /// HTTP status; None while it is open.
    pub status: Option<u64>,
    /// `open`, `complete`, `failed`, `partial`, `aborted`, `unknown`, `billed`, `not-billed`, or `served` (bought elsewhere).
    pub outcome: String,
    /// Billed.
    pub tokens: Option<Tokens>,
    /// Cost; None is unpriced, or not known.
    pub cost: Option<Money>,
    /// How often it was served again without being bought.
    pub served: u64,
    /// Milliseconds from sending to the end.
    pub took_ms: Option<u64>,
    /// Whose purchase it was, for `served`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bought_by: Option<String>,
}

/// A journal, read.
#[derive(Debug, Default)]
pub struct Book {
    /// Calls by number.
    pub calls: BTreeMap<u64, Call>,
    /// Hosts that were asked for, and how often that was refused.
    pub egress: (u64, u64),
    /// Timelines whose calls differed from what had been asked before.
    pub diverged: u64,
}

/// Sums of some calls.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Sum {
    /// Purchases, unknown ones included.
    pub bought: u64,
    /// Purchases whose cost is not known.
    pub unpriced: u64,
    /// Purchases whose end is not known.
    pub unknown: u64,
    /// Errors that nothing was billed for.
    pub failed: u64,
    /// Calls that were served without buying.
    pub served: u64,
    /// Bought.
    pub tokens: Tokens,
    /// Served and not bought.
    pub tokens_served: Tokens,
    /// Of the priced ones.
    pub cost: Money,
}

impl Book {
    /// Reads lines. One that is not understood is left out: a newer journal may have more kinds.
    pub fn read(lines: impl IntoIterator<Item = Value>) -> Self {
        let mut book = Self::default();
        for line in lines {
            book.line(&line);
        }
        book
    }

    fn line(&mut self, v: &Value) {
        let seq = v["seq"].as_u64().unwrap_or(0);
        let text = |k: &str| v[k].as_str().unwrap_or_default().to_owned();
        match v["kind"].as_str() {
            Some("intent") => {
                let (provider, model) = (text("provider"), text("model"));
                let at_ms = v["at_ms"].as_u64().unwrap_or(0);
                self.calls.insert(seq, Call { seq, at_ms, provider, model, outcome: "open".into(), ..Call::default() });
            }
            Some("completed") => {
                let Some(call) = v["of"].as_u64().and_then(|of| self.calls.get_mut(&of)) else { return };
                call.status = v["status"].as_u64();
                call.outcome = text("outcome");
                call.tokens = Tokens::read(&v["usage"]);
                call.cost = v["cost"].as_str().and_then(Money::parse);
                call.took_ms = v["took_ms"].as_u64();
                if let Some(model) = v["model"].as_str() {
                    call.model = model.to_owned();
                }
            }
            Some("served") => match (v["of"]["session"].as_str(), v["of"]["seq"].as_u64()) {
                (None, Some(of)) => {
                    if let Some(call) = self.calls.get_mut(&of) {
                        call.served += 1;
                    }
                }
                (Some(by), _) => {
                    let at_ms = v["at_ms"].as_u64().unwrap_or(0);
                    let (outcome, bought_by) = ("served".into(), Some(by.to_owned()));
                    self.calls.insert(seq, Call { seq, at_ms, outcome, bought_by, served: 1, ..Call::default() });
                }
                (None, None) => {}
            },
            Some("resolved") => {
                let Some(call) = v["of"].as_u64().and_then(|of| self.calls.get_mut(&of)) else { return };
                let r = &v["resolution"];
                call.outcome = r["found"].as_str().unwrap_or("unknown").to_owned();
                call.tokens = Tokens::read(&r["usage"]);
                call.cost = r["cost"].as_str().and_then(Money::parse);
            }
            Some("egress") => {
                self.egress.0 += 1;
                self.egress.1 += u64::from(v["allowed"] == false);
            }
            Some("diverged") => self.diverged += 1,
            _ => {}
        }
    }
}

/// Sums of these calls.
pub fn sum<'a>(calls: impl IntoIterator<Item = &'a Call>) -> Sum {
    let mut s = Sum::default();
    for c in calls {
        s.served += c.served;
        if c.bought_by.is_some() || c.outcome == "not-billed" {
            continue;
        }
        if c.outcome == "failed" && c.tokens.is_none() {
            s.failed += 1;
            continue;
        }
        s.bought += 1;
        s.unknown += u64::from(c.outcome == "unknown" || c.outcome == "open");
        match c.cost {
            Some(cost) => s.cost.0 = s.cost.0.saturating_add(cost.0),
            None => s.unpriced += 1,
        }
        if let Some(t) = &c.tokens {
            s.tokens.add(t, 1);
            s.tokens_served.add(t, c.served);
        }
    }
    s
}

/// The UTC day of Unix milliseconds, `2026-11-30`.
pub fn day(unix_ms: u64) -> String {
    // Days to a date (Howard Hinnant's civil_from_days), for years after 1970.
    let z = i64::try_from(unix_ms / 86_400_000).unwrap_or(0) + 719_468;
    let era = z / 146_097;
    let doe = z - era * 146_097;
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let (d, m) = (doy - (153 * mp + 2) / 5 + 1, if mp < 10 { mp + 3 } else { mp - 9 });
    let y = yoe + era * 400 + i64::from(m <= 2);
    format!("{y:04}-{m:02}-{d:02}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn calls_are_joined_with_their_ends_and_summed_exactly() {
        let usage =
            json!({"input": 3, "cache_read": 1, "cache_write_5m": 12_304, "cache_write_1h": 0, "output": 550, "reasoning": 5});
        let book = Book::read([
            json!({"seq": 1, "at_ms": 5, "kind": "timeline"}),
            json!({"seq": 2, "at_ms": 5, "kind": "intent", "provider": "anthropic", "model": "m"}),
            json!({"seq": 3, "at_ms": 6, "kind": "completed", "of": 2, "status": 200, "outcome": "complete", "usage": usage, "cost": "0.054399", "took_ms": 9}),
            json!({"seq": 4, "at_ms": 7, "kind": "served", "of": {"seq": 2}, "matched": "raw"}),
            json!({"seq": 5, "at_ms": 7, "kind": "served", "of": {"session": "aa", "seq": 2}, "matched": "raw"}),
            json!({"seq": 6, "at_ms": 8, "kind": "intent", "provider": "openai"}),
            json!({"seq": 7, "at_ms": 8, "kind": "completed", "of": 6, "status": 0, "outcome": "unknown", "took_ms": 1}),
            json!({"seq": 8, "at_ms": 8, "kind": "intent", "provider": "openai", "model": "x"}),
            json!({"seq": 9, "at_ms": 8, "kind": "completed", "of": 8, "status": 0, "outcome": "unknown", "took_ms": 1}),
            json!({"seq": 10, "at_ms": 8, "kind": "resolved", "of": 8, "by": "hand", "resolution": {"found": "not-billed"}}),
            json!({"seq": 11, "at_ms": 8, "kind": "egress", "allowed": false}),
            json!({"seq": 13, "at_ms": 8, "kind": "intent", "provider": "openai", "model": "x"}),
            json!({"seq": 14, "at_ms": 8, "kind": "completed", "of": 13, "status": 429, "outcome": "failed", "took_ms": 1}),
            json!({"seq": 12, "kind": "of-the-future"}),
        ]);
        assert_eq!(book.calls.len(), 5);
        assert_eq!((book.calls[&2].served, book.calls[&2].cost), (1, Money::parse("0.054399")));
        assert_eq!((book.calls[&5].outcome.as_str(), book.egress), ("served", (1, 1)));
        let s = sum(book.calls.values());
        assert_eq!((s.bought, s.unpriced, s.unknown, s.failed, s.served), (2, 1, 1, 1, 2));
        assert_eq!((s.cost.to_string(), s.tokens.total(), s.tokens_served.total()), ("0.054399".into(), 12_858, 12_858));
    }

    #[test]
    fn days_and_money_are_written_as_people_expect() {
        assert_eq!(
            (day(0), day(1_709_164_800_000), day(1_796_083_199_999)),
            ("1970-01-01".into(), "2024-02-29".into(), "2026-11-30".into())
        );
        for text in ["0.00", "7.75", "0.054399", "123.000000000001"] {
            assert_eq!(Money::parse(text).unwrap().to_string(), text);
        }
        assert!(["", ".5", "-1", "1.0000000000001", "x"].iter().all(|t| Money::parse(t).is_none()));
    }
}
