//! The store of a node, as people look after it.
//!
//! ```text
//! POST   /v1/blobs/verify                 VerifyBlobs -> Progress NDJSON, result BlobReport
//! ```

use serde::{Deserialize, Serialize};

/// Rows of [`BlobReport::damaged`] at most; the counts go on.
pub const DAMAGED_MAX: usize = 1000;

/// Read every pack of a node now and check it against its name.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct VerifyBlobs {
    /// Name or number of the node; None is the one that is asked.
    pub node: Option<String>,
}

/// What was read, found and mended.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct BlobReport {
    /// `ks.blobs.v1`.
    pub schema: String,
    /// Name of the node.
    pub node: String,
    /// Packs read.
    pub packs: u64,
    /// Bytes read.
    pub bytes: u64,
    /// Milliseconds that it took.
    pub took_ms: u64,
    /// Objects that were found damaged.
    pub damaged_objects: u64,
    /// How many of them peers gave again: verified, and stored here.
    pub mended_objects: u64,
    /// The first [`DAMAGED_MAX`] of them.
    pub damaged: Vec<DamagedObject>,
}

/// One damaged object.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DamagedObject {
    /// Its name, hex.
    pub object: String,
    /// The pack that it was damaged in, hex; None if no pack is known.
    pub pack: Option<String>,
    /// That pack's file on the node.
    pub file: Option<String>,
    /// What is wrong.
    pub why: String,
    /// A peer gave it again.
    pub mended: bool,
}
