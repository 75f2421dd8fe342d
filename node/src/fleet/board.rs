//! Which deadline each VM of this node has taken last: the step from a lone node's endless lease to a finite one is done only
//! when all have.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Row {
    /// Process group of its VMM; 0 while it is looked for.
    pid: u32,
    /// None before the first.
    deadline_ms: Option<u64>,
}

/// See the module. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct Board {
    inner: Arc<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    rows: Mutex<(u64, BTreeMap<u64, Row>)>,
    changed: Notify,
}

/// One VM's row; it goes with this value.
#[derive(Debug)]
pub struct Place {
    board: Board,
    id: u64,
}

impl Board {
    /// A row for the VM of process `pid`; 0 for one that an earlier ksd left and that is still looked for.
    pub fn enter(&self, pid: u32) -> Place {
        let mut rows = self.inner.rows.lock().unwrap_or_else(PoisonError::into_inner);
        rows.0 += 1;
        let id = rows.0;
        rows.1.insert(id, Row { pid, deadline_ms: None });
        Place { board: self.clone(), id }
    }

    /// Those that may run for ever, or whose deadline is not known.
    fn open(&self) -> Vec<u32> {
        let rows = self.inner.rows.lock().unwrap_or_else(PoisonError::into_inner);
        rows.1.values().filter(|r| r.deadline_ms.is_none_or(|d| d == u64::MAX)).map(|r| r.pid).collect()
    }

    /// Waits until every VM has a finite deadline, at most `bound`; those that have not are given back (0 left out).
    pub async fn finite(&self, bound: Duration) -> Vec<u32> {
        let end = tokio::time::Instant::now() + bound;
        loop {
            let changed = self.inner.changed.notified();
            let open = self.open();
            if open.is_empty() {
                return open;
            }
            if open.contains(&0) {
                // It is found or ended within the bounds of those who look for it.
                changed.await;
            } else if tokio::time::timeout_at(end, changed).await.is_err() {
                return open;
            }
        }
    }
}

impl Place {
    /// The VM took this deadline.
    pub fn took(&self, deadline_ms: u64) {
        let mut rows = self.board.inner.rows.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(r) = rows.1.get_mut(&self.id) {
            r.deadline_ms = Some(deadline_ms);
        }
        drop(rows);
        self.board.inner.changed.notify_waiters();
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.board.inner.rows.lock().unwrap_or_else(PoisonError::into_inner).1.remove(&self.id);
        self.board.inner.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn finite_waits_for_every_vm_and_names_those_that_do_not_follow() {
        let board = Board::default();
        assert!(board.finite(Duration::from_secs(1)).await.is_empty());
        let (a, b) = (board.enter(10), board.enter(20));
        a.took(u64::MAX);
        assert_eq!(board.finite(Duration::from_secs(1)).await, [10, 20]);
        a.took(5000);
        assert_eq!(board.finite(Duration::from_secs(1)).await, [20]);
        let later = tokio::spawn({
            let board = board.clone();
            async move { board.finite(Duration::from_secs(60)).await }
        });
        tokio::task::yield_now().await;
        drop(b);
        assert!(later.await.unwrap().is_empty(), "a VM that ended runs nothing");
    }
}
