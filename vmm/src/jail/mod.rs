//! Jails: of this process ([`own`], with the filters of its threads in [`filter`] and what happens on a forbidden call
//! in [`trap`]), and of an engine's process ([`engine`]).

pub mod engine;
pub mod filter;
pub mod own;
pub mod trap;

pub use engine::{Jail, Visible};
