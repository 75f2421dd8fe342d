//! Providers' usage exports, read by the names of their columns: OpenAI's and Anthropic's usage APIs (JSON) and dashboards (CSV).
//! The bytes come from a person's file: nothing is assumed of them.

use super::query::day_of;
use crate::usage::Usage;
use serde_json::Value;
use std::collections::BTreeMap;

/// Bytes of an export that are read.
const EXPORT_BYTES_MAX: usize = 64 * 1024 * 1024;

/// Tokens of one model on one UTC day.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportRow {
    /// `YYYY-MM-DD`.
    pub day: String,
    /// As the provider names it.
    pub model: String,
    /// Tokens; reasoning is not told apart.
    pub usage: Usage,
}

/// An export.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Export {
    /// Rows as they came.
    pub rows: Vec<ExportRow>,
    /// It tells what was written to caches apart; else that is in the input.
    pub tells_writes: bool,
}

/// Why an export is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExportError {
    /// Too large.
    #[error("the export has {0} bytes, at most {EXPORT_BYTES_MAX} are read; export fewer days")]
    Large(usize),
    /// Neither of the known forms.
    #[error(
        "the export is none that is known ({0}); use the usage API's JSON or the dashboard's CSV of OpenAI or Anthropic, grouped by model"
    )]
    Form(String),
    /// A row.
    #[error("row {row} of the export: {why}")]
    Row {
        /// Counted from 1, without the header.
        row: usize,
        /// What is wrong.
        why: String,
    },
}

impl Export {
    /// Reads JSON or CSV, whichever it is.
    pub fn parse(text: &str) -> Result<Self, ExportError> {
        if text.len() > EXPORT_BYTES_MAX {
            return Err(ExportError::Large(text.len()));
        }
        let text = text.trim_start_matches('\u{feff}').trim_start();
        if text.starts_with('{') { Self::json(text) } else { Self::csv(text) }
    }
    fn json(text: &str) -> Result<Self, ExportError> {
        let form = |why: &str| ExportError::Form(why.to_owned());
        let page: Value = serde_json::from_str(text).map_err(|e| ExportError::Form(e.to_string()))?;
        let buckets = page["data"].as_array().ok_or_else(|| form("no list `data`"))?;
        if page["has_more"].as_bool() == Some(true) {
            return Err(form("it has more pages: `has_more` is true"));
        }
        let (mut rows, mut tells_writes) = (Vec::new(), false);
        for bucket in buckets {
            let day = bucket["start_time"].as_u64().map(|s| day_of(s.saturating_mul(1000)));
            let day = day.or_else(|| day_text(bucket["starting_at"].as_str()?)).ok_or_else(|| form("a bucket has no start"))?;
            for r in bucket["results"].as_array().ok_or_else(|| form("a bucket has no list `results`"))? {
                let row = rows.len() + 1;
                let model = r["model"].as_str().ok_or(ExportError::Row { row, why: "it has no model; group by model".into() })?;
                let n = |v: &Value| v.as_u64().unwrap_or(0);
                let usage = if r.get("uncached_input_tokens").is_some() {
                    let w = &r["cache_creation"];
                    tells_writes = true;
                    let (w5, w1) = (n(&w["ephemeral_5m_input_tokens"]), n(&w["ephemeral_1h_input_tokens"]));
                    Usage::anthropic(
                        n(&r["uncached_input_tokens"]),
                        n(&r["cache_read_input_tokens"]),
                        w5,
                        w1,
                        n(&r["output_tokens"]),
                    )
                } else {
                    openai(row, n(&r["input_tokens"]), n(&r["input_cached_tokens"]), n(&r["output_tokens"]))?
                };
                rows.push(ExportRow { day: day.clone(), model: model.to_owned(), usage });
            }
        }
        Ok(Self { rows, tells_writes })
    }
    fn csv(text: &str) -> Result<Self, ExportError> {
        let mut records = records(text).into_iter();
        let header = records.next().unwrap_or_default();
        let at: BTreeMap<&str, usize> = header.iter().enumerate().map(|(i, n)| (n.trim(), i)).collect();
        let anthropic = at.contains_key("usage_input_tokens_no_cache");
        let openai_columns = at.contains_key("input_tokens") && at.contains_key("output_tokens");
        if !anthropic && !openai_columns {
            return Err(ExportError::Form("its first line names no columns of token counts".into()));
        }
        let mut rows = Vec::new();
        for (i, record) in records.enumerate() {
            let row = i + 1;
            let text = |names: &[&str]| names.iter().find_map(|n| record.get(*at.get(n)?)).map(|s| s.trim());
            let count = |name: &str| match text(&[name]) {
                None | Some("") => Ok(0),
                Some(t) => t.parse::<u64>().map_err(|_| ExportError::Row { row, why: format!("{name} is {t:?}, not a count") }),
            };
            let bad = |why: &str| ExportError::Row { row, why: why.to_owned() };
            let day = text(&["usage_date_utc", "start_time_iso", "start_time", "date"]).and_then(day_text);
            let day = day.ok_or_else(|| bad("it has no day"))?;
            let model = text(&["model_version", "model"]).filter(|m| !m.is_empty());
            let model = model.ok_or_else(|| bad("it has no model; group by model"))?.to_owned();
            let usage = if anthropic {
                Usage::anthropic(
                    count("usage_input_tokens_no_cache")?,
                    count("usage_input_tokens_cache_read")?,
                    count("usage_input_tokens_cache_write_5m")?,
                    count("usage_input_tokens_cache_write_1h")?,
                    count("usage_output_tokens")?,
                )
            } else {
                openai(row, count("input_tokens")?, count("input_cached_tokens")?, count("output_tokens")?)?
            };
            rows.push(ExportRow { day, model, usage });
        }
        Ok(Self { rows, tells_writes: anthropic })
    }
}

fn openai(row: usize, input: u64, cached: u64, output: u64) -> Result<Usage, ExportError> {
    Usage::openai(input, cached, 0, output, 0).map_err(|e| ExportError::Row { row, why: e.to_string() })
}

/// A day from a date, a date and time, or Unix seconds.
fn day_text(text: &str) -> Option<String> {
    if let Ok(seconds) = text.parse::<u64>() {
        return Some(day_of(seconds.saturating_mul(1000)));
    }
    let day = text.get(..10)?;
    let shape = day.bytes().enumerate().all(|(i, b)| if matches!(i, 4 | 7) { b == b'-' } else { b.is_ascii_digit() });
    shape.then(|| day.to_owned())
}

/// Records of a CSV text (RFC 4180): quoted fields may have commas, line ends and doubled quotes.
fn records(text: &str) -> Vec<Vec<String>> {
    let (mut all, mut record, mut field, mut quoted) = (Vec::new(), Vec::new(), String::new(), false);
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '"' if quoted && chars.peek() == Some(&'"') => {
                chars.next();
                field.push('"');
            }
            '"' if quoted || field.is_empty() => quoted = !quoted,
            ',' if !quoted => record.push(std::mem::take(&mut field)),
            '\r' if !quoted && chars.peek() == Some(&'\n') => {}
            '\n' if !quoted => {
                record.push(std::mem::take(&mut field));
                all.push(std::mem::take(&mut record));
            }
            c => field.push(c),
        }
    }
    if !field.is_empty() || !record.is_empty() {
        record.push(field);
        all.push(record);
    }
    all.retain(|r| r.iter().any(|f| !f.trim().is_empty()));
    all
}
