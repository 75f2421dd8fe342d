//! One purchase whose answer is on its way to the journal, or is there whole: what its pump tells and its readers follow.
//!
//! The file is the only buffer: a reader that is slow, or gone, holds nothing up and costs no memory.

use super::journal::StoredHead;
use std::fs::File;
use std::sync::Arc;
use tokio::sync::watch;

/// How far an answer is.
#[derive(Debug, Clone, Default)]
pub struct Progress {
    /// Status and headers, once they came.
    pub head: Option<Arc<StoredHead>>,
    /// Bytes of the body that are stored.
    pub stored: u64,
    /// Bytes of the body that readers may have.
    pub free: u64,
    /// How it ended, once the completed line is durable.
    pub end: Option<End>,
}

/// How an answer ends for its readers.
#[derive(Debug, Clone)]
pub enum End {
    /// It is whole.
    Whole,
    /// It never will be.
    Abort(Arc<str>),
    /// No head ever came.
    Refused(Arc<Refusal>),
}

/// Why a client gets an error of ours in place of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// HTTP status.
    pub status: u16,
    /// Stable, kebab-case.
    pub code: &'static str,
    /// What, why, and what next.
    pub message: String,
}

impl Refusal {
    /// Of this status and code.
    pub fn new(status: u16, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, code, message: message.into() }
    }
}

/// What a pump is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Read on, however long it takes.
    Run,
    /// Read on for the usage until this moment.
    Drain(tokio::time::Instant),
    /// Stop.
    Abort,
}

/// An answer.
pub struct Live {
    /// Number of its intent line.
    pub seq: u64,
    /// Its body.
    pub file: File,
    /// Progress, sent by the pump.
    pub progress: watch::Sender<Progress>,
    /// Orders to the pump.
    pub order: watch::Sender<Order>,
}

impl Live {
    /// Nothing has come yet.
    pub fn new(seq: u64, file: File) -> Self {
        Self { seq, file, progress: watch::Sender::default(), order: watch::Sender::new(Order::Run) }
    }
    /// Whole, from the journal.
    pub fn stored(seq: u64, file: File, head: StoredHead, len: u64, end: End) -> Self {
        let progress = Progress { head: Some(Arc::new(head)), stored: len, free: len, end: Some(end) };
        Self { seq, file, progress: watch::Sender::new(progress), order: watch::Sender::new(Order::Run) }
    }
}
