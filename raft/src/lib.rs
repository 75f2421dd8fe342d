//! What a fleet agrees on: members, sessions and their owners, checkpoint records, images, golden checkpoints.
//!
//! Pure: [`FleetState::apply`] is the one entrance, and the same commands in the same order give the same state on
//! every node. No clock, no randomness, no I/O; time and fresh ids come inside the commands. On a lone node the node's
//! host module keeps the log and a snapshot in redb; with more nodes openraft drives the same function.

mod apply;
mod assign;
mod command;
mod error;
mod fleet;
pub mod host;
pub mod limits;
mod members;
mod proposal;
mod record;
mod remove;
mod sessions;
mod state;

pub use command::{Assignment, Command, MemberChange, Response};
pub use error::Refusal;
pub use fleet::{Durability, FleetPolicy, Member, MemberState, Role, TokenRecord, UserRecord};
pub use proposal::{Applied, Proposal, ProposalId};
pub use record::{CheckpointRecord, GoldenRecord, ImageRecord, Lapse, Lost, SessionParams, SessionRecord, Wanted};
pub use sessions::SessionMap;
pub use state::FleetState;

#[cfg(test)]
mod tests;
