//! From the provider to the journal, independent of every reader: stores bytes, scans a decoded copy, and says how far readers may go.
//!
//! Ends when the answer does, when it is told to, or when the journal's disk is full; in the last case it reads on without storing,
//! for the usage.

use super::journal::Bodies;
use super::live::{Live, Order};
use crate::coding::Decoder;
use crate::limits::{ANSWER_BYTES_MAX, ANSWER_SPACE_BYTES, DRAIN_BYTES_MAX};
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::Body;
use ks_gateway::codec::OffsetMap;
use ks_gateway::dialect::{Report, ResponseScan};
use std::io;
use std::os::unix::fs::FileExt;
use std::time::Instant;

/// How the transfer of a body ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
    /// By the provider, whole as HTTP sees it.
    Whole,
    /// The connection broke.
    Cut(String),
    /// We gave it up.
    Aborted,
    /// The journal could not hold it.
    Unstored(String),
}

/// What was pumped.
pub struct Pumped {
    /// How it ended.
    pub ended: Ended,
    /// What the answer said.
    pub report: Report,
    /// BLAKE3 of what is stored.
    pub hash: blake3::Hash,
    /// Its length.
    pub len: u64,
    /// Milliseconds from `started` to the first byte.
    pub first_byte_ms: Option<u64>,
}

/// What of a coded answer clients get.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pass {
    /// The bytes as they came.
    Raw,
    /// What the scan hands on: decoded, and without a chunk that is hidden.
    Scanned,
}

/// One transfer.
pub struct Pump<'a> {
    live: &'a Live,
    scan: ResponseScan,
    decoder: Decoder,
    pass: Pass,
    map: OffsetMap,
    hash: blake3::Hasher,
    raw: u64,
    decoded: u64,
    len: u64,
    space: u64,
    unstored: Option<String>,
    opaque: bool,
}

impl<'a> Pump<'a> {
    /// Into `live`'s file.
    pub fn new(live: &'a Live, scan: ResponseScan, decoder: Decoder, pass: Pass) -> Self {
        let opaque = matches!(decoder, Decoder::Opaque);
        Self {
            live,
            scan,
            decoder,
            pass,
            map: OffsetMap::default(),
            hash: blake3::Hasher::new(),
            raw: 0,
            decoded: 0,
            len: 0,
            space: ANSWER_SPACE_BYTES,
            unstored: None,
            opaque,
        }
    }

    /// Reads `body` to its end.
    pub async fn run<B: Body<Data = Bytes> + Unpin>(mut self, mut body: B, started: Instant) -> Pumped
    where
        B::Error: std::error::Error + 'static,
    {
        let mut orders = self.live.order.subscribe();
        let (mut first_byte_ms, mut drained_from) = (None, None);
        let ended = loop {
            let order = *orders.borrow_and_update();
            if let Order::Drain(_) = order
                && self.raw - *drained_from.get_or_insert(self.raw) > DRAIN_BYTES_MAX
            {
                break Ended::Aborted;
            }
            let deadline = async {
                match order {
                    Order::Run => std::future::pending().await,
                    Order::Drain(until) => tokio::time::sleep_until(until).await,
                    Order::Abort => {}
                }
            };
            let frame = tokio::select! {
                frame = body.frame() => frame,
                () = deadline => break Ended::Aborted,
                Ok(()) = orders.changed() => continue,
            };
            match frame {
                None => break Ended::Whole,
                Some(Err(e)) => break Ended::Cut(super::upstream::chain(&e)),
                Some(Ok(frame)) => {
                    let Ok(data) = frame.into_data() else { continue };
                    if !data.is_empty() {
                        first_byte_ms.get_or_insert_with(|| ms(started));
                        self.take(&data);
                    }
                }
            }
        };
        self.done(ended, first_byte_ms)
    }

    fn done(mut self, ended: Ended, first_byte_ms: Option<u64>) -> Pumped {
        let mut out = Vec::new();
        let report = self.scan.clone().finish(ended == Ended::Whole, &mut out);
        if self.passes_scanned() {
            self.store(&out);
        }
        let ended = match self.unstored {
            Some(why) => Ended::Unstored(why),
            None => ended,
        };
        Pumped { ended, report, hash: self.hash.finalize(), len: self.len, first_byte_ms }
    }

    /// Clients get what the scan hands on: the answer is not coded, or its coding was taken off.
    fn passes_scanned(&self) -> bool {
        !self.opaque && (self.pass == Pass::Scanned || matches!(self.decoder, Decoder::Plain))
    }

    fn take(&mut self, data: &[u8]) {
        self.raw += data.len() as u64;
        let mut out = Vec::with_capacity(data.len());
        if matches!(self.decoder, Decoder::Plain) {
            self.scan.push(data, &mut out);
        } else {
            let (scan, decoded, scanned) = (&mut self.scan, &mut self.decoded, self.pass == Pass::Scanned);
            let read = self.decoder.push(data, &mut |plain| {
                scan.push(plain, &mut out);
                *decoded += plain.len() as u64;
                // What nobody gets need not be kept, however much it unpacks to.
                if !scanned {
                    out.clear();
                }
            });
            // Not what it says it is: passed on unread from here.
            self.opaque |= read.is_err();
            self.map.note(self.raw, self.decoded);
        }
        let may = if self.passes_scanned() {
            self.store(&out);
            self.scan.releasable()
        } else {
            self.store(data);
            let last = self.raw.saturating_sub(1);
            if self.opaque { last } else { self.map.raw_for(self.scan.releasable()).min(last) }
        };
        let (stored, free) = (self.len, may.min(self.len));
        self.live.progress.send_if_modified(|p| {
            p.stored = stored;
            let moved = p.free < free;
            p.free = p.free.max(free);
            moved
        });
    }

    fn store(&mut self, data: &[u8]) {
        if self.unstored.is_some() || data.is_empty() {
            return;
        }
        if let Err(e) = self.try_store(data) {
            self.unstored = Some(e.to_string());
            return;
        }
        self.hash.update(data);
        self.len += data.len() as u64;
    }

    fn try_store(&mut self, data: &[u8]) -> io::Result<()> {
        let end = self.len + data.len() as u64;
        if end > ANSWER_BYTES_MAX {
            return Err(io::Error::other(format!("the answer is longer than {ANSWER_BYTES_MAX} bytes")));
        }
        while end > self.space {
            Bodies::grow(&self.live.file, self.space)?;
            self.space += ANSWER_SPACE_BYTES;
        }
        self.live.file.write_all_at(data, self.len)
    }
}

/// Milliseconds since a moment.
pub fn ms(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX)
}
