//! What `ksd` says to `ksgw` on `gw.sock`, and what it is answered.
//!
//! The socket is 0600 in ksd's data folder. A connection begins with one [`GatewayAsk`], framed as the relay's messages
//! are (see [`crate::relay`]):
//!
//! - `Stream`: the bytes after the stamp are those of one stream that the guest of that session opened, untouched.
//!   Nothing of the guest comes before the stamp, and nothing that the guest says changes it.
//! - `Admin`: asks and answers alternate on the connection until it is closed. An answer is one [`AdminAnswer`]; only
//!   `Lines` may be followed by more of them (`more`).

use crate::copies::{CopyAnswer, CopyAsk};
use crate::ids::{RunToken, SessionId};
use serde::{Deserialize, Serialize};

/// Spoken by both ends.
pub const PROTOCOL: u32 = 1;
/// Name of the socket in ksd's data folder's `gateway`.
pub const SOCKET: &str = "gw.sock";
/// Lines in one [`AdminAnswer::Lines`].
pub const LINES_MAX: usize = 1000;

/// First message of a connection; on an admin connection also each later one.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "ask", content = "with", rename_all = "kebab-case")]
pub enum GatewayAsk {
    /// One stream of a guest follows.
    Stream(Box<Stamp>),
    /// A question or an order.
    Admin(Box<AdminAsk>),
}

/// Whose stream it is and how its run began. From the node, never from the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stamp {
    /// The session.
    pub session: SessionId,
    /// Its current run. One that is older than another that was seen is refused.
    pub token: RunToken,
    /// How the run began.
    pub began: Began,
    /// Set whenever this run began at a checkpoint of another session, hence also when a fork crashed before its own first
    /// checkpoint. The position that the guest tells then counts in that session's journal, from whose numbers its own go on.
    pub origin: Option<Origin>,
    /// Whether entries after the position are served again; for a fork those of its parent (`--replay parent`).
    pub replay: ReplayMode,
    /// Whose keys and budget.
    pub user: String,
    /// Numbers of the nodes of its replica set; empty on a lone node.
    pub replicas: Vec<u64>,
}

/// How a run began.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Began {
    /// From a boot, before any checkpoint of its own: there is no past.
    Boot,
    /// The session went on: after a crash, a move, or a park.
    Resume,
    /// A person chose an earlier checkpoint.
    Rewind,
    /// A child of a checkpoint.
    Fork,
}

/// A fork's parent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// The parent session (the image's golden one for the first run of an ordinary session is not told).
    pub session: SessionId,
    /// The checkpoint's journal position, if the node knows it; else the relay's own is used.
    pub at_seq: Option<u64>,
}

/// Whether a timeline is served from its ancestors' entries after the position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReplayMode {
    /// Served (a crash resume, a move, a wake; a fork that opted in).
    On,
    /// Only calls that were open at the position are joined: other samples are wanted (a user's restore or fork). Entries after the
    /// position are abandoned for ever.
    Off,
}

/// Which things a person may do with the gateway. `user` is the caller; "" is the node's own operator.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "kebab-case")]
pub enum AdminAsk {
    /// First on a standing connection.
    Hello { protocol: u32 },
    /// The key under which secrets are sealed at rest: 32 bytes, hex. Before it, keys cannot be added or used.
    Unseal { key_hex: String },
    /// Nothing of the session is sent upstream or released past this moment of CLOCK_BOOTTIME (None: never ends).
    Lease { session: SessionId, token: RunToken, deadline_boottime_ms: Option<u64> },
    /// The session is removed: its journal goes.
    Forget { session: SessionId },
    /// Adds or replaces a key of `user` for a provider.
    KeyAdd { user: String, provider: String, secret: Secret },
    /// Fingerprints of the keys of `user`; of everybody's with "".
    KeyList { user: String },
    /// Drops a key.
    KeyRemove { user: String, provider: String },
    /// Asks the provider something that costs nothing with the key.
    KeyTest { user: String, provider: String },
    /// Adds or replaces a provider.
    ProviderAdd { provider: Provider },
    /// All providers.
    ProviderList {},
    /// Drops an added provider.
    ProviderRemove { name: String },
    /// Replaces the session's allow-list: `host`, `host:port`, `*.domain`, or an address.
    EgressSet { session: SessionId, allow: Vec<String> },
    /// The session's allow-list.
    EgressList { session: SessionId },
    /// Entries of the journal as JSON lines, oldest first, from entry `from` on.
    Ledger { session: SessionId, from: u64 },
    /// Checks chains and sums of these sessions (parents first).
    Verify { sessions: Vec<SessionId> },
    /// Compares with a provider's usage export.
    Reconcile { sessions: Vec<SessionId>, provider: String, export: String, apply: bool },
    /// A person says what became of an `unknown` entry.
    Resolve { session: SessionId, seq: u64, outcome: String, cost: Option<String>, note: String },
    /// Costs of these sessions: one line each (a JSON object), with days.
    Cost { sessions: Vec<SessionId> },
    /// Limits in dollars (decimal); None is no limit. `session` None is the user's.
    BudgetSet { user: String, session: Option<SessionId>, limit: Option<String> },
    /// Limits and what is used of them.
    BudgetList { user: String, sessions: Vec<SessionId> },
    /// Asked by another node, whose daemon this one's has found to own the session at that epoch: about the copy here.
    Copy { session: SessionId, epoch: u64, copy: CopyAsk },
    /// Sessions of which a copy is kept here.
    CopyList {},
    /// Calls under way and counters, for tests and `ks doctor`.
    Stats {},
}

/// A secret on its way to the vault. Debug does not show it.
#[derive(Clone, Serialize, Deserialize, zeroize::Zeroize, zeroize::ZeroizeOnDrop)]
#[serde(transparent)]
pub struct Secret(pub String);
impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// A provider of models.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Provider {
    /// First segment of the guest's path.
    pub name: String,
    /// `openai`, `anthropic` or `gemini`.
    pub dialect: String,
    /// `https://host[:port][/prefix]`; `http://` only to loopback addresses.
    pub base_url: String,
    /// It knows `stream_options.include_usage`.
    #[serde(default)]
    pub include_usage: bool,
    /// PEM certificates to trust instead of the public ones.
    #[serde(default)]
    pub ca_pem: Option<String>,
    /// Came with the program.
    #[serde(default)]
    pub builtin: bool,
}

/// A key as listed: never the key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyInfo {
    /// Whose.
    pub user: String,
    /// For which provider.
    pub provider: String,
    /// First 12 hex digits of a keyed hash.
    pub fingerprint: String,
    /// Added, Unix milliseconds.
    pub added_unix_ms: u64,
}

/// Answer to an [`AdminAsk`].
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "kebab-case")]
pub enum AdminAnswer {
    /// To Hello.
    Hello { protocol: u32, version: String, pid: u32, unsealed: bool },
    /// Done.
    Done {},
    /// To KeyAdd and KeyList.
    Keys { keys: Vec<KeyInfo> },
    /// To ProviderList.
    Providers { providers: Vec<Provider> },
    /// To EgressList.
    Egress { allow: Vec<String> },
    /// JSON objects as text, one each; `more` of them follow in another answer.
    Lines { lines: Vec<String>, more: bool },
    /// To Copy.
    Copy { copy: CopyAnswer },
    /// To CopyList.
    Copies { sessions: Vec<SessionId> },
    /// One JSON object.
    Report { report: serde_json::Value },
    /// Not done.
    Refused { code: String, what: String, why: String, next: String },
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::relay::{decode_message, encode_message};

    #[test]
    fn a_stamp_round_trips_and_a_secret_is_not_shown() {
        let stamp = Stamp {
            session: SessionId([3; 16]),
            token: RunToken { generation: 0, epoch: 1, run: 2 },
            began: Began::Resume,
            origin: Some(Origin { session: SessionId([4; 16]), at_seq: Some(5) }),
            replay: ReplayMode::On,
            user: "alice".into(),
            replicas: vec![1, 2],
        };
        let bytes = encode_message(&GatewayAsk::Stream(Box::new(stamp.clone()))).unwrap();
        match decode_message::<GatewayAsk>(&bytes[4..]).unwrap() {
            GatewayAsk::Stream(got) => assert_eq!(*got, stamp),
            GatewayAsk::Admin(_) => panic!("another ask"),
        }
        let ask = AdminAsk::KeyAdd { user: String::new(), provider: "openai".into(), secret: Secret("sk-marked".into()) };
        assert!(!format!("{ask:?}").contains("sk-marked"));
        let bytes = encode_message(&GatewayAsk::Admin(Box::new(ask))).unwrap();
        match decode_message::<GatewayAsk>(&bytes[4..]).unwrap() {
            GatewayAsk::Admin(got) => assert!(matches!(*got, AdminAsk::KeyAdd { secret, .. } if secret.0 == "sk-marked")),
            GatewayAsk::Stream(_) => panic!("another ask"),
        }
    }
}
