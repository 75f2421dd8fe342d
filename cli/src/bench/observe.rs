//! What an outsider sees of a session: a guest counter whose lines leave through one run's link, each with the guest's own
//! time. Two runs overlap when the older one wrote a line later than the newer one's first.

use anyhow::{Context, Result};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The program in the guest: a line every 20 ms with its number and the time.
const COUNTER: &str = "import time\nn=0\nwhile 1:\n n+=1\n print(n, time.time(), flush=True)\n time.sleep(0.02)";

/// A line as it came.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Line {
    /// The guest's time, Unix seconds.
    pub stamp: f64,
    /// When it came.
    pub seen: Instant,
}

/// A running observer; ends when dropped.
#[derive(Debug)]
pub struct Stream {
    child: Child,
    lines: Arc<Mutex<Vec<Line>>>,
}

impl Stream {
    /// Starts the counter in a session through the link of this `ks`.
    pub fn open(mut ks: Command, session: &str) -> Result<Self> {
        ks.args(["exec", session, "--", "python3", "-u", "-c", COUNTER]).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = ks.spawn().context("starting ks")?;
        let out = child.stdout.take().context("a pipe")?;
        let lines: Arc<Mutex<Vec<Line>>> = Arc::default();
        let into = lines.clone();
        std::thread::spawn(move || {
            for text in BufReader::new(out).lines().map_while(Result::ok) {
                if let Some(stamp) = text.split(' ').nth(1).and_then(|s| s.parse().ok()) {
                    into.lock().unwrap_or_else(PoisonError::into_inner).push(Line { stamp, seen: Instant::now() });
                }
            }
        });
        Ok(Self { child, lines })
    }
    /// What came so far.
    pub fn lines(&self) -> Vec<Line> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
    /// Waits until at least `n` lines came.
    pub fn reach(&self, n: usize, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        while self.lines().len() < n {
            if Instant::now() > until {
                return false;
            }
            std::thread::park_timeout(Duration::from_millis(20));
        }
        true
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Seconds from the older run's last line to the newer one's first; negative when both were at work. None when one is silent.
pub fn gap(older: &[Line], newer: &[Line]) -> Option<f64> {
    let last = older.iter().map(|l| l.stamp).reduce(f64::max)?;
    let first = newer.iter().map(|l| l.stamp).reduce(f64::min)?;
    Some(first - last)
}

/// Seconds by which the older run was still at work after the newer one had begun; None when they do not overlap.
pub fn overlap(older: &[Line], newer: &[Line]) -> Option<f64> {
    gap(older, newer).filter(|g| *g < 0.0).map(|g| -g)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_overlap_only_when_the_older_one_wrote_after_the_newer_began() {
        let at = |all: &[f64]| all.iter().map(|s| Line { stamp: *s, seen: Instant::now() }).collect::<Vec<_>>();
        assert_eq!(overlap(&at(&[1.0, 2.0]), &at(&[3.0, 4.0])), None);
        assert_eq!(overlap(&at(&[1.0, 3.5]), &at(&[3.0, 4.0])), Some(0.5));
        assert_eq!(overlap(&at(&[1.0]), &[]), None);
        assert_eq!(overlap(&[], &at(&[1.0])), None);
    }
}
