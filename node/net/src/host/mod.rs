//! Everything here that touches a file, a socket or a clock; what it decides comes from the pure modules above.

pub mod call;
pub mod control;
pub mod gossip;
mod gossip_wire;
pub mod identity;
pub mod stream;
mod swarm;
pub mod tls;
mod wire;

#[cfg(test)]
mod hostile_tests;
