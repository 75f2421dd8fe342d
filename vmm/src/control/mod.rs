//! The control socket: frames, the connection to the node, and the requests that come over it.

pub mod link;
pub mod server;
pub mod wire;
