//! A ledger beside a provider's usage export: day by day and model by model, what each says, and what that means for purchases whose
//! end is unknown. Nothing is decided here: a proposal becomes true when its line is appended.

use super::query::{Purchase, day_of};
use super::{Export, Resolution};
use crate::dialect::Outcome;
use crate::price::{PriceTable, without_date};
use crate::usage::Usage;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// One model on one UTC day.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Compared {
    /// `YYYY-MM-DD`.
    pub day: String,
    /// Without its date.
    pub model: String,
    /// Tokens that the ledger has.
    pub ours: Usage,
    /// Tokens that the provider billed.
    pub theirs: Usage,
    /// Purchases whose end is unknown, as session and line.
    pub unknown: Vec<(String, u64)>,
    /// In words.
    pub verdict: &'static str,
}

/// What an unknown purchase seems to be.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Proposal {
    /// Whose journal.
    pub session: String,
    /// The `intent` line.
    pub of: u64,
    /// What to append.
    pub resolution: Resolution,
}

/// Figures agree.
const AGREE: &str = "agrees";
/// The provider billed more: other clients of the same account, or unknown purchases.
const MORE: &str = "the provider billed more than the ledger has";
/// The ledger has more.
const LESS: &str = "the ledger has more than the provider billed";
/// Nothing can be said of a day that the export does not have.
const NO_DAY: &str = "the export does not have this day";
/// It does not name the model, and more was billed under other names on this day or the next.
const OTHER_NAME: &str = "the export does not name this model; it may be billed under another name";
/// The difference is one unknown purchase.
const ONE: &str = "the difference is taken to be the one purchase whose end is unknown";

/// Compares purchases from one provider, whose export this is. Days and models that only one side has are compared with nothing. The export
/// should be of an account or key that only these sessions use; else the provider's figures are higher.
pub fn reconcile(provider: &str, purchases: &[Purchase], export: &Export, table: &PriceTable) -> (Vec<Compared>, Vec<Proposal>) {
    let base = |m: &str| without_date(m).unwrap_or(m).to_owned();
    let mut all: BTreeMap<(String, String), Compared> = BTreeMap::new();
    let row = |all: &mut BTreeMap<_, Compared>, day: String, model: String| -> (String, String) {
        let key = (day.clone(), model.clone());
        let (ours, theirs) = (Usage::default(), Usage::default());
        all.entry(key.clone()).or_insert(Compared { day, model, ours, theirs, unknown: vec![], verdict: AGREE });
        key
    };
    let (mut days, mut named) = (BTreeSet::new(), BTreeSet::new());
    for r in &export.rows {
        let key = row(&mut all, r.day.clone(), base(&r.model));
        days.insert(r.day.clone());
        named.insert(key.clone());
        if let Some(c) = all.get_mut(&key) {
            c.theirs = c.theirs.plus(&r.usage);
        }
    }
    for p in purchases.iter().filter(|p| p.provider == provider) {
        let key = row(&mut all, day_of(p.at_ms), base(&p.model));
        let Some(c) = all.get_mut(&key) else { continue };
        if p.outcome == Some(Outcome::Unknown) && !p.resolved {
            c.unknown.push((p.session.clone(), p.seq));
        }
        // Exports do not tell reasoning apart, and some not what was written to caches.
        let mut usage = Usage { reasoning: 0, ..p.usage.unwrap_or_default() };
        if !export.tells_writes {
            usage.input = usage.input.saturating_add(std::mem::take(&mut usage.cache_write_5m));
        }
        c.ours = c.ours.plus(&usage);
    }
    let excess: BTreeSet<String> = all
        .values()
        .filter(|c| minus(&c.theirs, &c.ours).is_some_and(|rest| rest != Usage::default()))
        .map(|c| c.day.clone())
        .collect();
    let mut proposals = Vec::new();
    for c in all.values_mut() {
        let rest = minus(&c.theirs, &c.ours);
        // A call that is sent at midnight may be billed on the next day.
        let near = |day: &String| excess.contains(day) || next_day(day).is_some_and(|d| excess.contains(&d));
        let listed = named.contains(&(c.day.clone(), c.model.clone()));
        c.verdict = match (&rest, c.unknown.len()) {
            _ if !days.contains(&c.day) => NO_DAY,
            (None, _) => LESS,
            (Some(_), unknown) if unknown > 0 && !listed && near(&c.day) => OTHER_NAME,
            (Some(r), _) if *r == Usage::default() => AGREE,
            (Some(_), 1) => ONE,
            (Some(_), _) => MORE,
        };
        for (session, of) in &c.unknown {
            let resolution = match (&rest, c.verdict) {
                (Some(_), AGREE) => Resolution::NotBilled,
                (Some(usage), ONE) => {
                    let cost = table.cost(provider, &c.model, None, usage);
                    Resolution::Billed { usage: *usage, cost, price_table: table.hash() }
                }
                (Some(_) | None, _) => continue,
            };
            proposals.push(Proposal { session: session.clone(), of: *of, resolution });
        }
    }
    (all.into_values().collect(), proposals)
}

/// The day after `YYYY-MM-DD`.
fn next_day(day: &str) -> Option<String> {
    let mut parts = day.splitn(3, '-').map(|p| p.parse::<u32>().ok());
    let (y, m, d) = (parts.next()??, parts.next()??, parts.next()??);
    let leap = (y.is_multiple_of(4) && !y.is_multiple_of(100)) || y.is_multiple_of(400);
    let last = match m {
        2 if leap => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    };
    let (y, m, d) = if d < last {
        (y, m, d + 1)
    } else if m < 12 {
        (y, m + 1, 1)
    } else {
        (y + 1, 1, 1)
    };
    Some(format!("{y:04}-{m:02}-{d:02}"))
}

/// None if any bucket would be negative.
fn minus(a: &Usage, b: &Usage) -> Option<Usage> {
    Some(Usage {
        input: a.input.checked_sub(b.input)?,
        cache_read: a.cache_read.checked_sub(b.cache_read)?,
        cache_write_5m: a.cache_write_5m.checked_sub(b.cache_write_5m)?,
        cache_write_1h: a.cache_write_1h.checked_sub(b.cache_write_1h)?,
        output: a.output.checked_sub(b.output)?,
        reasoning: 0,
    })
}
