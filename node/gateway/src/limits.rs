//! Every limit of the gateway process, by name.

use std::time::Duration;

/// Guest streams and admin connections open at once.
pub const CONNECTIONS_MAX: usize = 8192;
/// Calls under way at once, of all sessions.
pub const CALLS_MAX: usize = 4096;
/// Bytes of request bodies held in memory at once, of all sessions.
pub const REQUEST_BYTES_MAX: usize = 256 << 20;
/// Of which one session may hold so many; above it its calls wait for each other.
pub const SESSION_REQUEST_BYTES_MAX: usize = 64 << 20;
/// Streams of one session at once: what a relay may open, and some that end meanwhile.
pub const STREAMS_MAX: usize = 2048;
/// Timelines that one run may begin; an honest relay begins one.
pub const TIMELINES_MAX: u32 = 64;
/// Refused egress connections of a session that are written down in one minute.
pub const REFUSALS_MAX: u32 = 120;
/// A request's body comes at least so fast, after a first half minute; a slower one is refused.
pub const BODY_BYTES_PER_S_MIN: u64 = 256 << 10;
/// A guest has so long for its first message and for each frame of a request's body.
pub const GUEST_PATIENCE: Duration = Duration::from_secs(30);
/// After a refusal, what a guest still sends is read and dropped for at most so long.
pub const LAST_WORDS: Duration = Duration::from_secs(5);
/// A reader that takes nothing for so long is cut; it may rejoin.
pub const READER_PATIENCE: Duration = Duration::from_secs(120);
/// While an answer is only read for its usage, at most so many bytes of it are.
pub const DRAIN_BYTES_MAX: u64 = 8 << 20;
/// A provider has so long to accept a connection.
pub const CONNECT_PATIENCE: Duration = Duration::from_secs(15);
/// Idle connections to a provider are kept for so long.
pub const POOL_IDLE: Duration = Duration::from_secs(55);
/// And so many of them.
pub const POOL_IDLE_MAX: usize = 256;
/// A replica has so long to take an intent; then the call is refused, unsent.
pub const INTENT_PATIENCE: Duration = Duration::from_secs(2);
/// Replicas have so long to take a finished answer; then it is released and marked single-copy.
pub const FINISH_PATIENCE: Duration = Duration::from_secs(10);
/// Journal space taken for an answer before its call is sent, and again whenever it is used up.
pub const ANSWER_SPACE_BYTES: u64 = 1 << 20;
/// Journal space taken for lines ahead of the last one.
pub const LEDGER_SPACE_BYTES: u64 = 256 << 10;
/// Space that calls leave free on the journal's disk.
pub const FREE_SPACE_BYTES: u64 = 64 << 20;
/// Largest answer that is kept.
pub const ANSWER_BYTES_MAX: u64 = 256 << 20;
/// Lines that wait for one session's disk at once.
pub const COMMITS_MAX: usize = 1024;
/// Header lines of a provider's answer that are read; more fail the call.
pub const ANSWER_HEADERS_MAX: usize = 1000;
/// Bytes of a provider's answer header.
pub const ANSWER_HEADER_BYTES_MAX: usize = 512 << 10;
/// Decoded bytes of a request's body.
pub const DECODED_BYTES_MAX: usize = 128 << 20;
/// Egress connections of one session at once.
pub const EGRESS_MAX: usize = 256;
/// Entries of one allow-list.
pub const ALLOW_MAX: usize = 1024;
/// Keys in the vault.
pub const KEYS_MAX: usize = 4096;
/// A node that takes over a session's journal waits so long for the nodes that may have a copy; then its calls are refused.
pub const TAKEOVER_PATIENCE: Duration = Duration::from_secs(5);
/// The largest ledger that is fetched from another node.
pub const COPY_BYTES_MAX: usize = 256 << 20;
