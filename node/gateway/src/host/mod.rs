//! Sockets, TLS, files and processes of the gateway: all that acts. What is decided is decided in `ks_gateway`.

pub mod admin;
pub mod books;
pub mod call;
pub mod copies;
pub mod egress;
pub mod files;
pub mod journal;
pub mod live;
pub mod node;
pub mod peers;
pub mod providers;
pub mod pump;
pub mod purchase;
pub mod reader;
pub mod replica;
pub mod session;
pub mod socket;
pub mod takeover;
pub mod tls;
pub mod upstream;
pub mod vault;
pub mod wire;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Takes a lock; what a thread that panicked under it left is taken as it is.
fn locked<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}
