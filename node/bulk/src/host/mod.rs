//! What acts: sockets, files, streams.

pub mod call;
pub mod endpoint;
pub mod fetch;
pub mod image;
pub mod pace;
pub mod peers;
pub mod provider;
pub mod receive;
pub mod tls;
