//! The bulk plane: packs, manifests and image files between nodes, verified.
//!
//! One QUIC endpoint per node, apart from the control plane, so that bulk never delays control. Both ends prove their
//! [`PeerId`] in the handshake, and whoever the allow-list does not name is refused in it. Packs travel in iroh-blobs'
//! protocol (a pack's name is the BLAKE3 of its file) straight out of the store's own files; small requests travel beside
//! them. Layouts: docs/formats.md, "Bulk plane".
//!
//! ```text
//!   Bulk::start(BulkConfig) ── serves peers ──┐
//!     ├── Fetcher::fetch_checkpoint(id, holders, keys, pin, progress) -> Fetched: durable and pinned here
//!     ├── Bulk::have_closure(holder, id), Bulk::fetch_image_file(holder, ..)
//!     └── BulkPeers (a PeerSource): damaged or missing objects come from other holders (NO-ROT, V11)
//! ```
//! Deciding code is pure ([`plan`], [`bucket`], [`wire`]); all I/O is in `host/`.
//!
//! Everything async runs on the tokio runtime that [`Bulk::start`] was called on; the store's blocking calls run on its
//! blocking threads. Memory is bounded: at most [`SERVE_MAX`] packs are read at a time, and of each fetch
//! [`PACKS_AT_ONCE`] arrive while [`PACKS_FINISHING`] that have arrived are opened and synced.
//!
//! For the node around it:
//! - A holder answers "I have it" only after `fetch_checkpoint` returned `Ok`; when the fleet's records show that the decision
//!   fell (the holder was added, or the checkpoint was dropped), it calls [`ks_blobs::Store::decided`]. After a restart
//!   [`ks_blobs::Store::pins`] lists what is still undecided.
//! - Collections need no more care: receptions, pins, and decisions younger than the caller's list of roots are roots.
//! - When members change, [`Bulk::recheck_allowed`] closes the connections of those that left.
//! - [`FetchError::code`] is stable; `no-holder` is worth another attempt later, `disk-full` is not before there is room.

pub mod bench;
pub mod bucket;
mod error;
mod host;
pub mod plan;
pub mod wire;

pub use error::{CallError, FetchError, StartError, Wrong};
pub use host::endpoint::{Bulk, BulkConfig, BulkEvent, BulkLimits, Holder, ImageFiles, NoImages};
pub use host::fetch::{Fetched, Fetcher, PACKS_AT_ONCE, PACKS_FINISHING, Progress};
pub use host::image::ImageFileGot;
pub use host::peers::BulkPeers;
pub use host::provider::SERVE_MAX;
pub use ks_blobs::PinKey;
pub use libp2p_identity::{Keypair, PeerId};

/// The protocol's name in the handshake.
pub const ALPN: &[u8] = b"ks-bulk/1";

#[cfg(test)]
mod tests;
