//! Samples and their order statistics.

use serde_json::{Map, Value, json};

/// Samples of one figure.
#[derive(Debug, Clone, Default)]
pub struct Samples(Vec<f64>);

impl Samples {
    /// One more.
    pub fn push(&mut self, v: f64) {
        self.0.push(v);
    }
    /// The smallest sample that at least `p` percent of all do not exceed (nearest rank); None without samples.
    pub fn percentile(&self, p: f64) -> Option<f64> {
        let mut v = self.0.clone();
        v.sort_by(f64::total_cmp);
        let rank = (p / 100.0 * v.len() as f64).ceil() as usize;
        v.get(rank.saturating_sub(1)).copied()
    }
    /// Puts `NAME_p50UNIT` and `NAME_p95UNIT` into `out`.
    pub fn report(&self, name: &str, unit: &str, out: &mut Map<String, Value>) {
        for p in [50.0, 95.0] {
            out.insert(format!("{name}_p{p}{unit}"), self.percentile(p).map_or(Value::Null, |v| json!((v * 1e6).round() / 1e6)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_by_nearest_rank() {
        let mut s = Samples::default();
        assert_eq!(s.percentile(95.0), None);
        for i in (1..=20).rev() {
            s.push(f64::from(i));
        }
        assert_eq!((s.percentile(50.0), s.percentile(95.0), s.percentile(100.0)), (Some(10.0), Some(19.0), Some(20.0)));
        let mut out = Map::new();
        s.report("ready", "_s", &mut out);
        assert_eq!(out["ready_p95_s"], json!(19.0));
    }
}
