//! `ksgw`: the process between a node's guests and the providers of models.
//!
//! ```text
//! relay in a guest ──► ksd ──gw.sock──► call ──► replay machine ──► serve or join: reader ◄── journal
//!                                                     └──► live: reserve, intent durable ──► upstream ──► pump ──► journal
//! ```
//!
//! Owns gw.sock, the providers' keys, the journals and the connections to providers. Refuses to be told by a guest who it is or where
//! a call goes. It survives ksd: a call in flight goes on while VM and daemon die, and its client rejoins at its byte.

pub mod allow;
pub mod coding;
pub mod crash;
pub mod headers;
pub mod host;
pub mod lease;
pub mod limits;
pub mod scrub;
