//! What a ledger adds up to.

use super::{Entry, Ledger, Resolution};
use crate::dialect::Outcome;
use crate::money::Money;
use crate::usage::Usage;
use serde::Serialize;
use std::collections::BTreeMap;

/// One purchase, as a row of `ks ledger`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Purchase {
    /// Whose journal.
    pub session: String,
    /// Its `intent` line.
    pub seq: u64,
    /// When it was sent, Unix milliseconds.
    pub at_ms: u64,
    /// Who pays.
    pub user: String,
    /// Provider by name.
    pub provider: String,
    /// Model that answered, or was asked for.
    pub model: String,
    /// How it ended; none while under way.
    pub outcome: Option<Outcome>,
    /// HTTP status.
    pub status: u16,
    /// Tokens.
    pub usage: Option<Usage>,
    /// Cost; none with usage is unpriced.
    pub cost: Option<Money>,
    /// It was unknown, and was resolved.
    pub resolved: bool,
    /// How often its answer was served without buying.
    pub served: u64,
    /// There is one copy only.
    pub single_copy: bool,
}

/// Sums over purchases. A purchase whose end is unknown is counted by itself: it may have been bought.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Totals {
    /// Purchases.
    pub purchases: u64,
    /// Of which failed, cut off or given up.
    pub not_whole: u64,
    /// Of which nobody knows whether they were billed: possible purchases.
    pub unknown: u64,
    /// Of which have usage and no price.
    pub unpriced: u64,
    /// Billed tokens.
    pub usage: Usage,
    /// What the priced ones cost.
    pub cost: Money,
    /// Calls that were answered without buying.
    pub served: u64,
    /// Tokens that were not bought again.
    pub saved: Usage,
    /// What they would have cost.
    pub saved_cost: Money,
}

impl Totals {
    /// One purchase more.
    pub fn add(&mut self, p: &Purchase) {
        self.purchases += 1;
        match p.outcome {
            Some(Outcome::Unknown) if !p.resolved => self.unknown += 1,
            Some(Outcome::Failed | Outcome::Partial | Outcome::Aborted) => self.not_whole += 1,
            Some(Outcome::Complete | Outcome::Unknown) | None => {}
        }
        if p.usage.is_some() && p.cost.is_none() {
            self.unpriced += 1;
        }
        let (usage, cost) = (p.usage.unwrap_or_default(), p.cost.unwrap_or_default());
        self.usage = self.usage.plus(&usage);
        self.cost = self.cost + cost;
        self.served += p.served;
        self.saved_cost = self.saved_cost + cost.times(p.served);
        self.saved = self.saved.plus(&usage.times(p.served));
    }
    /// Sums of many.
    pub fn of<'a>(purchases: impl IntoIterator<Item = &'a Purchase>) -> Self {
        let mut t = Self::default();
        for p in purchases {
            t.add(p);
        }
        t
    }
    /// Sums by any name: user, provider, model, session, or [`day_of`].
    pub fn by<'a>(
        purchases: impl IntoIterator<Item = &'a Purchase>,
        name: impl Fn(&Purchase) -> String,
    ) -> BTreeMap<String, Totals> {
        let mut all: BTreeMap<String, Totals> = BTreeMap::new();
        for p in purchases {
            all.entry(name(p)).or_default().add(p);
        }
        all
    }
}

impl Ledger {
    /// Purchases in their order. Answers that a fork was served from its parent are counted in [`Ledger::served_of_others`].
    pub fn purchases(&self) -> Vec<Purchase> {
        let mut all: BTreeMap<u64, Purchase> = BTreeMap::new();
        for (line, _) in &self.lines {
            match &line.entry {
                Entry::Intent(i) => {
                    let p = Purchase {
                        session: self.session.clone(),
                        seq: line.seq,
                        at_ms: line.at_ms,
                        user: i.user.clone(),
                        provider: i.provider.clone(),
                        model: i.model.clone().unwrap_or_default(),
                        outcome: None,
                        status: 0,
                        usage: None,
                        cost: None,
                        resolved: false,
                        served: 0,
                        single_copy: false,
                    };
                    all.insert(line.seq, p);
                }
                Entry::Completed(c) => {
                    if let Some(p) = all.get_mut(&c.of) {
                        p.outcome = Some(c.outcome);
                        p.status = c.status;
                        p.usage = c.usage;
                        p.cost = c.cost;
                        p.single_copy = c.single_copy;
                        if let Some(m) = &c.model {
                            p.model = m.clone();
                        }
                    }
                }
                Entry::Served { of, .. } => {
                    if let (None, Some(p)) = (&of.session, all.get_mut(&of.seq)) {
                        p.served += 1;
                    }
                }
                Entry::Resolved { of, resolution, .. } => {
                    if let Some(p) = all.get_mut(of) {
                        p.resolved = true;
                        if let Resolution::Billed { usage, cost, .. } = resolution {
                            p.usage = Some(*usage);
                            p.cost = *cost;
                        }
                    }
                }
                Entry::Origin { .. } | Entry::Timeline { .. } | Entry::Diverged { .. } | Entry::Egress { .. } => {}
            }
        }
        all.into_values().collect()
    }
    /// Calls that this session was served from other sessions' purchases, by session and line.
    pub fn served_of_others(&self) -> BTreeMap<(String, u64), u64> {
        let mut all = BTreeMap::new();
        for (line, _) in &self.lines {
            if let Entry::Served { of, .. } = &line.entry
                && let Some(session) = &of.session
            {
                *all.entry((session.clone(), of.seq)).or_insert(0) += 1;
            }
        }
        all
    }
}

/// The UTC day of a moment, `YYYY-MM-DD`. Source: the usual conversion of days to the civil calendar (Hinnant).
pub fn day_of(unix_ms: u64) -> String {
    let days = unix_ms / 86_400_000 + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let in_year = day - (365 * year + year / 4 - year / 100);
    let m = (5 * in_year + 2) / 153;
    let month = if m < 10 { m + 3 } else { m - 9 };
    format!("{:04}-{:02}-{:02}", era * 400 + year + u64::from(month <= 2), month, in_year - (153 * m + 2) / 5 + 1)
}
