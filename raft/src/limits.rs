//! Named bounds of the replicated state. Apply refuses what goes beyond them, so that no member can grow it at will.

/// Members that are not gone.
pub const MEMBERS_MAX: usize = 256;
/// Members that left, kept so that their number still has a name; the oldest are forgotten first.
pub const GONE_MEMBERS_MAX: usize = 256;
/// Join tokens, used and expired ones included.
pub const TOKENS_MAX: usize = 1024;
/// Milliseconds that an expired token is kept, so that a late joiner is told why.
pub const TOKEN_KEPT_MS: u64 = 24 * 3600 * 1000;
/// Users of the fleet.
pub const USERS_MAX: usize = 4096;
/// Access tokens of one user.
pub const USER_TOKENS_MAX: usize = 32;
/// Addresses of one kind of one member.
pub const ADDRESSES_MAX: usize = 16;
/// CPU profiles of one member.
pub const PROFILES_MAX: usize = 32;
/// Entries of one session's list of what it may reach outside.
pub const ALLOW_MAX: usize = 1024;
/// Bytes of them together.
pub const ALLOW_BYTES_MAX: usize = 32 << 10;
/// Bytes of a name, an address, a profile or a peer id.
pub const TEXT_MAX: usize = 256;
/// Copies of a checkpoint, and members of a replica set.
pub const COPIES_MAX: u16 = 7;
/// Sessions that one [`crate::Command::AssignMany`] moves.
pub const MOVES_MAX: usize = 512;
/// Proposals of one node whose answers are not known to it yet.
pub const IN_FLIGHT_MAX: u64 = 256;
/// Answers kept for one proposer: a proposal further ahead of the oldest unanswered one is refused.
pub const WINDOW: u64 = 16 * IN_FLIGHT_MAX;
/// Shortest and longest node lease, milliseconds.
pub const LEASE_MS: std::ops::RangeInclusive<u32> = 1_000..=60_000;
