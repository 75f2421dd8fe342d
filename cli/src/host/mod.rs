//! Everything of `ks` that touches the world: the node's API, terminals, files, processes. Holds no policy.

pub mod alive;
pub mod checks;
pub mod conn;
pub mod contexts;
pub mod daemon;
pub mod files;
pub mod git;
pub mod guard;
pub mod http;
pub mod link;
pub mod names;
pub mod pump;
pub mod settings;
pub mod tarball;
pub mod terminal;
pub mod tls;
pub mod unpack;
