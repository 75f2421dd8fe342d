//! Everything that crosses a process boundary: ids, byte formats and messages. Pure: no I/O, no clock, no randomness.
//!
//! Refuses to hold policy. Layouts are described once, in docs/formats.md; every decoder here takes hostile bytes
//! and answers with a typed error, never a panic or an allocation on an unchecked length.

pub mod api;
pub mod blobs;
pub mod bytes;
pub mod channel;
pub mod chunk;
pub mod control;
pub mod copies;
pub mod fleet;
pub mod gateway;
pub mod guest;
pub mod ids;
pub mod manifest;
pub mod pack;
pub mod plan;
pub mod relay;

pub use bytes::DecodeError;
pub use chunk::{CHUNK_BYTES, DomainKey, ObjectKind};
pub use ids::{CheckpointId, ChunkId, FleetId, ImageId, PackId, RunToken, SessionId, SessionName};
pub use manifest::Manifest;
