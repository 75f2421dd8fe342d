//! The node: sessions' life cycles, VM processes, the local API. The binary is `ksd`.

pub mod api;
pub mod daemon;
pub mod fleet;
pub mod host;
pub mod node;
pub mod ops;
pub mod progress;
pub mod session;
pub mod supervise;
