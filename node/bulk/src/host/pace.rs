//! The bandwidth cap: the pure bucket, with a clock and a timer.

use crate::bucket::Bucket;
use std::sync::{Mutex, PoisonError};
use tokio::time::{Duration, Instant};

/// Lets bytes pass at a rate, or all at once without one.
pub struct Pace {
    bucket: Option<Mutex<Bucket>>,
    begin: Instant,
}

impl Pace {
    /// Of so many bytes per second; None: no cap.
    pub fn new(rate: Option<u64>) -> Self {
        Self { bucket: rate.map(|r| Mutex::new(Bucket::new(r))), begin: Instant::now() }
    }
    /// Returns when `bytes` may pass.
    pub async fn pass(&self, bytes: usize) {
        let Some(bucket) = &self.bucket else { return };
        let wait_us = {
            let now = u64::try_from(self.begin.elapsed().as_micros()).unwrap_or(u64::MAX);
            bucket.lock().unwrap_or_else(PoisonError::into_inner).take(now, bytes as u64)
        };
        if wait_us > 0 {
            tokio::time::sleep(Duration::from_micros(wait_us)).await;
        }
    }
}
