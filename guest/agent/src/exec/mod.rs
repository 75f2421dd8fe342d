//! Programs that the node runs in the guest: accounts and environment, start, terminal, byte-exact streams, end.

mod account;
mod fds;
mod reaper;
mod session;
mod spawn;
mod term;

pub use account::Account;
pub use fds::Fd;
pub use reaper::{Ended, Reaper};
pub use session::run;
pub use spawn::{Command, Launch, Streams};
pub use term::known_term;

#[cfg(test)]
mod tests;
