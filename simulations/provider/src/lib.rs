//! A provider of models for tests and demos: answers each request the same way every time, fails as asked, and counts what was
//! bought.
//!
//! `GET /purchases` says how often each request (by BLAKE3 of its body as JSON with sorted keys, without `stream_options`) was accepted, which is when a real provider
//! would bill it. `POST /go` lets all stalled answers go on. It refuses nothing but requests it cannot read; a key must be there.

pub mod answer;
pub mod fault;
mod serve;

pub use serve::{Provider, Tls, start};
