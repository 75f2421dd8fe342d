//! The chunk store of one node: packs, manifests, uploads, verified reading, repair, retention and collection.
//!
//! It owns one folder (layout in `store.rs` and docs/formats.md) and refuses to hand out a byte whose hash did not match.
//! All I/O goes through `host/`; the rest decides. Source: DESIGN sections 5 and 7, promises NO-TORN and NO-ROT.

mod closure;
mod error;
mod gc;
pub mod host;
mod index;
mod ingest;
mod keys;
mod load;
mod mend;
mod peers;
mod pins;
mod read;
mod receive;
mod retention;
mod segments;
mod serve;
mod staging;
mod store;
mod upload;
mod verify;

pub use error::{ObjectFault, StoreError};
pub use gc::{COMPACT_BELOW_PERCENT, GcReport};
pub use host::keyfile::KeyFile;
pub use ingest::Ingested;
pub use keys::{IMAGE_DOMAIN, KeyRing, USER_DOMAIN};
pub use peers::{FetchedObject, NoPeers, PeerSource};
pub use pins::PinKey;
pub use read::Located;
pub use receive::{Missing, Reception};
pub use retention::{Kept, Retention};
pub use serve::PackPlace;
pub use staging::Part;
pub use store::{Store, StoreStats};
pub use upload::{OPEN_PACKS_MAX, Upload, UploadScope};
pub use verify::{ScrubStep, VerifyReport};

#[cfg(test)]
mod tests;
