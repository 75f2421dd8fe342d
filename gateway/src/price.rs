//! What a model's tokens cost: a dated table, an operator's overlay, the exact cost of one call's usage. A model that is in neither is
//! *unpriced*, which is not nothing.

use crate::money::Money;
use crate::names::Digest;
use crate::usage::Usage;
use serde::Deserialize;
use std::collections::BTreeMap;

/// The table that comes with the program.
const BUILT_IN: &str = include_str!("../prices.json");
/// Bytes of a table that are read.
const TABLE_BYTES_MAX: usize = 4 * 1024 * 1024;

/// Prices in micro-dollars per million tokens, so that 3.75 is 3,750,000.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Price {
    /// Uncached input.
    pub input: u64,
    /// Read from a cache.
    pub cache_read: u64,
    /// Written to a 5-minute cache.
    pub cache_write_5m: u64,
    /// Written to a 1-hour cache.
    pub cache_write_1h: u64,
    /// Output.
    pub output: u64,
}

impl Price {
    /// Anthropic's ratios: writes at 1.25 and 2 times the input price, reads at a tenth. `input` must be a multiple of 20
    /// micro-dollars, as all published prices are; other prices are written out bucket by bucket.
    pub fn anthropic(input: u64, output: u64) -> Option<Self> {
        input.is_multiple_of(20).then(|| Self {
            input,
            cache_read: input / 10,
            cache_write_5m: input / 4 * 5,
            cache_write_1h: input * 2,
            output,
        })
    }
    /// The exact cost of `usage`. Reasoning is inside output already.
    pub fn cost(&self, usage: &Usage) -> Money {
        [
            (usage.input, self.input),
            (usage.cache_read, self.cache_read),
            (usage.cache_write_5m, self.cache_write_5m),
            (usage.cache_write_1h, self.cache_write_1h),
            (usage.output, self.output),
        ]
        .into_iter()
        .map(|(tokens, price)| Money::of_tokens(tokens, price))
        .sum()
    }
    /// The most that so many tokens can cost, in whichever bucket the input falls.
    fn most(&self, input: u64, output: u64) -> Money {
        let dearest = self.input.max(self.cache_read).max(self.cache_write_5m).max(self.cache_write_1h);
        Money::of_tokens(input, dearest) + Money::of_tokens(output, self.output)
    }
}

/// Why a table is refused.
#[derive(Debug, thiserror::Error)]
pub enum PriceError {
    /// Too large.
    #[error("the price table has {0} bytes, at most {TABLE_BYTES_MAX} are read")]
    Large(usize),
    /// Not a table.
    #[error("the price table is not what docs/formats.md describes")]
    Format(#[source] serde_json::Error),
    /// A price.
    #[error("{text:?}, the {bucket} price of {model}, is not dollars per million tokens with at most six digits after the point")]
    Amount {
        /// Whose.
        model: String,
        /// Which.
        bucket: &'static str,
        /// As written.
        text: String,
    },
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TableFile {
    date: String,
    #[serde(default)]
    #[allow(dead_code)]
    #[serde(rename = "note")]
    _note: String,
    models: Vec<ModelRow>,
}
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ModelRow {
    provider: String,
    models: Vec<String>,
    #[serde(default)]
    tier: String,
    input: String,
    cache_read: String,
    cache_write_5m: String,
    cache_write_1h: String,
    output: String,
    #[serde(default)]
    above: Option<AboveRow>,
}
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct AboveRow {
    input_tokens: u64,
    prices: Option<PriceRow>,
}
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PriceRow {
    input: String,
    cache_read: String,
    cache_write_5m: String,
    cache_write_1h: String,
    output: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Row {
    price: Price,
    /// Above so many tokens of input all tokens have another price, or none that is known.
    above: Option<(u64, Option<Price>)>,
}

/// Prices of models, by provider, model and tier.
#[derive(Debug, Clone)]
pub struct PriceTable {
    rows: BTreeMap<(String, String, String), Row>,
    date: String,
    hash: Digest,
}

impl PriceTable {
    /// The one that comes with the program.
    pub fn built_in() -> Self {
        Self::parse(BUILT_IN).expect("a test reads the built-in table")
    }
    /// From JSON (docs/formats.md).
    pub fn parse(text: &str) -> Result<Self, PriceError> {
        if text.len() > TABLE_BYTES_MAX {
            return Err(PriceError::Large(text.len()));
        }
        let file: TableFile = serde_json::from_str(text).map_err(PriceError::Format)?;
        let mut rows = BTreeMap::new();
        for m in file.models {
            let name = m.models.first().cloned().unwrap_or_default();
            let price = price_of(&name, [&m.input, &m.cache_read, &m.cache_write_5m, &m.cache_write_1h, &m.output])?;
            let above = match &m.above {
                None => None,
                Some(AboveRow { input_tokens, prices: None }) => Some((*input_tokens, None)),
                Some(AboveRow { input_tokens, prices: Some(p) }) => {
                    let p = price_of(&name, [&p.input, &p.cache_read, &p.cache_write_5m, &p.cache_write_1h, &p.output])?;
                    Some((*input_tokens, Some(p)))
                }
            };
            for model in m.models {
                rows.insert((m.provider.clone(), model, m.tier.clone()), Row { price, above });
            }
        }
        Ok(Self { rows, date: file.date, hash: Digest::of(text.as_bytes()) })
    }
    /// This table with an operator's rows in place of its own; the hash is of both.
    pub fn overlay(&self, text: &str) -> Result<Self, PriceError> {
        let over = Self::parse(text)?;
        let mut rows = self.rows.clone();
        rows.extend(over.rows);
        let hash = Digest::of(&[self.hash.0, over.hash.0].concat());
        Ok(Self { rows, date: over.date, hash })
    }
    /// Names this table in the ledger.
    pub fn hash(&self) -> Digest {
        self.hash
    }
    /// The day that its author wrote on it.
    pub fn date(&self) -> &str {
        &self.date
    }
    /// The exact cost of a call; none is unpriced. `tier` is none for the standard one.
    pub fn cost(&self, provider: &str, model: &str, tier: Option<&str>, usage: &Usage) -> Option<Money> {
        let row = self.row(provider, model, tier)?;
        match row.above {
            Some((limit, price)) if usage.input_total() > limit => Some(price?.cost(usage)),
            Some(_) | None => Some(row.price.cost(usage)),
        }
    }
    /// The most that a call may cost: what is reserved before it is sent. None is unpriced.
    pub fn reserve(&self, provider: &str, model: &str, input: u64, output: u64) -> Option<Money> {
        let row = self.row(provider, model, None)?;
        match row.above {
            Some((limit, price)) if input > limit => Some(price?.most(input, output)),
            Some(_) | None => Some(row.price.most(input, output)),
        }
    }
    fn row(&self, provider: &str, model: &str, tier: Option<&str>) -> Option<&Row> {
        let get = |m: &str| self.rows.get(&(provider.to_owned(), m.to_owned(), tier.unwrap_or("").to_owned()));
        let model = model.strip_prefix("models/").unwrap_or(model);
        get(model).or_else(|| get(without_date(model)?))
    }
}

/// `name` of `name-YYYY-MM-DD` and `name-YYYYMMDD`: a dated version has its model's price unless it has a row of its own.
pub(crate) fn without_date(model: &str) -> Option<&str> {
    let digits = |s: &str, n: usize| s.len() == n && s.bytes().all(|b| b.is_ascii_digit());
    let (rest, last) = model.rsplit_once('-')?;
    if digits(last, 8) {
        return Some(rest);
    }
    let (rest, month) = rest.rsplit_once('-')?;
    let (rest, year) = rest.rsplit_once('-')?;
    (digits(last, 2) && digits(month, 2) && digits(year, 4)).then_some(rest)
}

fn price_of(model: &str, texts: [&String; 5]) -> Result<Price, PriceError> {
    const BUCKETS: [&str; 5] = ["input", "cache_read", "cache_write_5m", "cache_write_1h", "output"];
    let mut n = [0; 5];
    for ((n, text), bucket) in n.iter_mut().zip(texts).zip(BUCKETS) {
        *n = micro(text).ok_or_else(|| PriceError::Amount { model: model.to_owned(), bucket, text: text.clone() })?;
    }
    let [input, cache_read, cache_write_5m, cache_write_1h, output] = n;
    Ok(Price { input, cache_read, cache_write_5m, cache_write_1h, output })
}

/// Micro-dollars of a decimal text.
fn micro(text: &str) -> Option<u64> {
    let (whole, frac) = text.split_once('.').unwrap_or((text, "0"));
    let digits = |s: &str, max: usize| (1..=max).contains(&s.len()) && s.bytes().all(|b| b.is_ascii_digit());
    if !digits(whole, 9) || !digits(frac, 6) {
        return None;
    }
    Some(whole.parse::<u64>().ok()? * 1_000_000 + format!("{frac:0<6}").parse::<u64>().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worked_prices_hold_to_the_last_digit() {
        let sonnet = Price::anthropic(3_000_000, 15_000_000).unwrap();
        assert_eq!(sonnet.cost(&Usage::anthropic(3, 0, 12_304, 0, 550)).to_string(), "0.054399");
        let opus = Price::anthropic(5_000_000, 25_000_000).unwrap();
        assert_eq!(opus.cost(&Usage::anthropic(0, 0, 600_000, 400_000, 0)).to_string(), "7.75");
        assert_eq!(Price::anthropic(7, 1), None);
        // The same from the table, by the dated name that an answer has.
        let t = PriceTable::built_in();
        let u = Usage::anthropic(3, 0, 12_304, 0, 550);
        assert_eq!(t.cost("anthropic", "claude-sonnet-4-6", None, &u).unwrap().to_string(), "0.054399");
        let u = Usage::anthropic(0, 0, 600_000, 400_000, 0);
        assert_eq!(t.cost("anthropic", "claude-opus-4-5-20251101", None, &u).unwrap().to_string(), "7.75");
        let u = Usage::gemini(41, 0, 5, 343).unwrap();
        assert_eq!(t.cost("gemini", "models/gemini-2.5-flash", None, &u).unwrap().to_string(), "0.0008823");
    }

    #[test]
    fn the_built_in_table_is_dated_and_whole() {
        let t = PriceTable::parse(BUILT_IN).unwrap();
        assert_eq!(t.date(), "2026-11-30");
        for p in ["openai", "anthropic", "gemini"] {
            assert!(t.rows.keys().filter(|(provider, _, _)| provider == p).count() >= 5, "{p}");
        }
        for (name, row) in &t.rows {
            assert!(row.price.cache_read <= row.price.input && row.price.input <= row.price.output, "{name:?}");
            assert!(row.price.input <= row.price.cache_write_5m && row.price.cache_write_5m <= row.price.cache_write_1h);
        }
    }

    #[test]
    fn a_long_prompt_has_another_price_and_an_unknown_model_has_none() {
        let t = PriceTable::built_in();
        let u = |input| Usage { input, output: 1_000_000, ..Usage::default() };
        let cost = |m: &str, input| t.cost("anthropic", m, None, &u(input)).map(|m| m.to_string());
        assert_eq!(cost("claude-haiku-5-5", 100_000).as_deref(), Some("0.51"));
        assert_eq!(cost("claude-haiku-5-5", 100_001).as_deref(), Some("2.5500005"));
        assert_eq!(cost("claude-haiku-99", 1), None);
        assert_eq!(t.cost("openai", "claude-haiku-5-5", None, &u(1)), None, "of another provider");
        assert_eq!(t.cost("anthropic", "claude-haiku-5-5", Some("priority"), &u(1)), None, "in another tier");
        assert_eq!(t.cost("openai", "gpt-6-sol", None, &u(272_001)), None, "its long price is not known");
        // What is reserved is never less than what may be billed.
        let most = t.reserve("anthropic", "claude-haiku-5-5", 1_000, 500).unwrap();
        assert!(most >= t.cost("anthropic", "claude-haiku-5-5", None, &Usage::anthropic(0, 0, 0, 1_000, 500)).unwrap());
    }

    #[test]
    fn an_overlay_replaces_rows_and_changes_the_hash() {
        let t = PriceTable::built_in();
        let over = r#"{"date":"2026-12-24","models":[{"provider":"mine","models":["m"],"input":"1","cache_read":"0.5","cache_write_5m":"1","cache_write_1h":"1","output":"2.000001"},
            {"provider":"anthropic","models":["claude-haiku-5-5"],"tier":"priority","input":"1","cache_read":"1","cache_write_5m":"1","cache_write_1h":"1","output":"1"}]}"#;
        let o = t.overlay(over).unwrap();
        assert_ne!(o.hash(), t.hash());
        assert_eq!(o.date(), "2026-12-24");
        let u = Usage { input: 1, output: 1, ..Usage::default() };
        assert_eq!(o.cost("mine", "m", None, &u).unwrap().to_string(), "0.000003000001");
        assert!(o.cost("anthropic", "claude-haiku-5-5", Some("priority"), &u).is_some());
        assert!(o.cost("anthropic", "claude-opus-5", None, &u).is_some(), "the rest stays");
        for (bad, why) in [
            (over.replace("\"0.5\"", "\"-1\""), "\"-1\", the cache_read price of m"),
            (over.replace("\"0.5\"", "0.5"), "not what docs/formats.md describes"),
            (over.replace("2.000001", "2.0000001"), "output price of m"),
            ("[]".into(), "not what docs/formats.md describes"),
        ] {
            let e = t.overlay(&bad).unwrap_err().to_string();
            assert!(e.contains(why), "{e}");
        }
    }
}
