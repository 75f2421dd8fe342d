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

/// Wilson's 95 % interval of a share, as fractions.
pub fn wilson(good: u32, of: u32) -> (f64, f64) {
    if of == 0 {
        return (0.0, 1.0);
    }
    let (n, z) = (f64::from(of), 1.959_964_f64);
    let p = f64::from(good) / n;
    let middle = p + z * z / (2.0 * n);
    let spread = z * (p * (1.0 - p) / n + z * z / (4.0 * n * n)).sqrt();
    let scale = 1.0 + z * z / n;
    let round = |v: f64| (v.clamp(0.0, 1.0) * 1e4).round() / 1e4;
    (round((middle - spread) / scale), round((middle + spread) / scale))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wilsons_interval_is_the_known_one() {
        assert_eq!(wilson(25, 25), (0.8668, 1.0));
        assert_eq!(wilson(0, 0), (0.0, 1.0));
        let (low, high) = wilson(15, 20);
        assert!((low - 0.5313).abs() < 2e-3 && (high - 0.8881).abs() < 2e-3, "{low} {high}");
    }

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
