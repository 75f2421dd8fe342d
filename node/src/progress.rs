//! Steps of a long call, on their way to whoever waits for it.

use ks_proto::api::{ApiError, Progress};
use tokio::sync::mpsc;

/// Lines that may wait for a slow reader; more steps are dropped, never the result.
const WAITING_MAX: usize = 64;

/// Where steps go. Cheap to clone; a caller that went away is no error.
#[derive(Clone)]
pub struct Steps {
    tx: mpsc::Sender<Progress<serde_json::Value>>,
}

impl Steps {
    /// A sink and its reader.
    pub fn channel() -> (Self, mpsc::Receiver<Progress<serde_json::Value>>) {
        let (tx, rx) = mpsc::channel(WAITING_MAX);
        (Self { tx }, rx)
    }
    /// One step: `done` of `total` (0 when unknown).
    pub fn step(&self, what: impl Into<String>, done: u64, total: u64) {
        let _ = self.tx.try_send(Progress::Step { what: what.into(), done, total });
    }
    /// The end.
    pub async fn end<T: serde::Serialize>(&self, result: Result<T, ApiError>) {
        let json = result.and_then(|r| {
            serde_json::to_value(r).map_err(|e| ApiError::new("internal", "the answer", e.to_string(), "report this"))
        });
        let line = match json {
            Ok(result) => Progress::Result { result },
            Err(error) => Progress::Error { error },
        };
        let _ = self.tx.send(line).await;
    }
    /// Waits until nobody reads any more.
    pub async fn abandoned(&self) {
        self.tx.closed().await;
    }
    /// True if nobody reads any more.
    pub fn is_abandoned(&self) -> bool {
        self.tx.is_closed()
    }
}
