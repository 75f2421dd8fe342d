//! Messages between the node and `ks-guest`, PID 1 inside the VM, on streams of the guest channel.
//!
//! The node opens every stream but the relay's (see [`crate::relay`]). It begins with one length-prefixed JSON [`GuestRequest`] and is answered with one
//! length-prefixed JSON [`GuestAnswer`]; after that Exec and Attach carry [`ExecFrame`]s both ways, PutTar carries a
//! raw tar stream to the guest until half-close and then one more answer, GetTar a raw tar stream from it.

use serde::{Deserialize, Serialize};

/// The largest JSON message on a stream.
pub const MESSAGE_BYTES_MAX: usize = 1024 * 1024;
/// The largest payload of one exec frame.
pub const EXEC_PAYLOAD_MAX: usize = 64 * 1024;
/// The name of the virtio-serial port of the guest channel.
pub const PORT_NAME: &str = "ks.channel";
/// Spoken by both ends.
pub const PROTOCOL: u32 = 1;

/// Why the restore hook runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HookKind {
    /// After a boot, before the golden checkpoint.
    Boot,
    /// The same session goes on (after a crash, park, move or user's restore).
    Resume,
    /// A new session begins from a checkpoint (of a golden image or of another session): new identity.
    Fork,
    /// The guest goes on after a checkpoint's pause: only the clock is stepped.
    AfterPause,
}

/// Terminal wanted by exec or attach.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tty {
    /// TERM as the client has it; unknown ones fall back to xterm-256color.
    pub term: String,
    /// Columns and rows, set before the first byte.
    pub cols: u16,
    /// See `cols`.
    pub rows: u16,
}

/// First message on a stream.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "kebab-case")]
pub enum GuestRequest {
    /// Who is there?
    Hello { protocol: u32 },
    /// Restore hook: entropy (64 bytes, hex) into the pool and reseed, wall clock set; on a fork also machine id,
    /// hostname, ssh host keys, boot id note. Thaws the user's processes at the end.
    Hook { kind: HookKind, wall_unix_ns: u64, entropy_hex: String, hostname: String, machine_id_hex: String },
    /// The relay may open streams on this connection: nothing was restored since the last hook, the connection is only a
    /// new one. A hook on it says the same. Guests of an earlier version refuse it, and open no streams.
    RelayGo {},
    /// Freeze the user's processes (cgroup freezer) before a golden or fork-point capture; answered once all are frozen.
    Freeze {},
    /// Let them go on.
    Thaw {},
    /// Create the tmux session `main` running `argv` (a login shell if empty) in `cwd`, unless it exists.
    StartMain { argv: Vec<String>, env: Vec<(String, String)>, cwd: String, cols: u16, rows: u16 },
    /// Run a program. With `tty` it gets a PTY (stderr joins stdout).
    Exec { argv: Vec<String>, env: Vec<(String, String)>, cwd: Option<String>, user: Option<String>, tty: Option<Tty> },
    /// A client of the tmux session `main`, on a PTY.
    Attach { tty: Tty },
    /// Unpack a tar stream beneath `path` (made if missing), as the user `agent`; entries never leave `path`.
    PutTar { path: String },
    /// Pack `path` into a tar stream; a file becomes an archive with that one entry.
    GetTar { path: String },
    /// The main window's scrollback, as text (raw bytes follow the answer).
    Logs { lines: u32 },
    /// Self-checks: clock, disk, memory, entropy, network, tmux. `wall_unix_ns` is the host's clock.
    Doctor { wall_unix_ns: u64 },
    /// All regular files and links of the root disk below `path` (NDJSON [`FileEntry`] follow the answer); with `paths`
    /// only these, in their order, without those that are not there. Without `hash` no file is opened: entries have
    /// no hash, but for names that are not UTF-8, which could not be asked for in `paths`.
    ListFiles {
        path: String,
        #[serde(default = "yes")]
        hash: bool,
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        paths: Vec<String>,
    },
    /// Flush file systems; answered when done.
    Sync {},
    /// Power off: user processes get SIGTERM, then file systems are synced.
    PowerOff {},
}

/// Answer on a stream.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "kebab-case")]
pub enum GuestAnswer {
    /// To Hello.
    Hello { protocol: u32, agent_version: String, boot_id: String, kernel: String, clocksource: String },
    /// Done, or: go on with the stream's data.
    Ok {},
    /// To Doctor.
    Doctor { checks: Vec<Check> },
    /// Refused. `code`: `not-found`, `not-executable`, `bad-request`, `io`, `busy`.
    Refused { code: String, what: String, why: String, next: String },
}

/// One self-check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    /// Short name: `clock`, `disk`, …
    pub name: String,
    /// Passed?
    pub ok: bool,
    /// What was seen.
    pub detail: String,
    /// What to do if it failed ("" when ok).
    pub fix: String,
}

/// One file of a listing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Absolute path; bytes that are not UTF-8 are replaced.
    pub path: String,
    /// Size in bytes.
    pub bytes: u64,
    /// BLAKE3 of the contents, hex ("" for what cannot be read or was not asked for); for links the target's text.
    #[serde(default)]
    pub hash: String,
    /// Unix mode.
    pub mode: u32,
    /// Last change of the contents, Unix nanoseconds (0 from an agent that does not tell).
    #[serde(default)]
    pub mtime_ns: i64,
    /// Last change of the inode, Unix nanoseconds (0 from an agent that does not tell).
    #[serde(default)]
    pub ctime_ns: i64,
    /// Inode number (0 from an agent that does not tell).
    #[serde(default)]
    pub ino: u64,
}

fn yes() -> bool {
    true
}

/// Frames of exec and attach: type(1) length(4, little endian) payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExecFrame {
    /// To the program's standard input.
    Stdin(Vec<u8>),
    /// From standard output, or the PTY.
    Stdout(Vec<u8>),
    /// From standard error.
    Stderr(Vec<u8>),
    /// Close standard input.
    StdinEof,
    /// New terminal size: columns, rows.
    Resize(u16, u16),
    /// Send this signal number to the program's process group.
    Signal(u8),
    /// The program ended with this code; by signal n: 128+n with `signal` n. Always the last frame.
    Exit { code: u8, signal: u8 },
}

impl ExecFrame {
    /// Type byte and payload.
    pub fn parts(&self) -> (u8, Vec<u8>) {
        match self {
            Self::Stdin(b) => (0, b.clone()),
            Self::Stdout(b) => (1, b.clone()),
            Self::Stderr(b) => (2, b.clone()),
            Self::StdinEof => (3, vec![]),
            Self::Resize(c, r) => (4, [c.to_le_bytes(), r.to_le_bytes()].concat()),
            Self::Signal(n) => (5, vec![*n]),
            Self::Exit { code, signal } => (6, vec![*code, *signal]),
        }
    }
    /// From type byte and payload; None if they are not a frame.
    pub fn from_parts(kind: u8, payload: &[u8]) -> Option<Self> {
        if payload.len() > EXEC_PAYLOAD_MAX {
            return None;
        }
        Some(match (kind, payload) {
            (0, b) => Self::Stdin(b.to_vec()),
            (1, b) => Self::Stdout(b.to_vec()),
            (2, b) => Self::Stderr(b.to_vec()),
            (3, []) => Self::StdinEof,
            (4, [a, b, c, d]) => Self::Resize(u16::from_le_bytes([*a, *b]), u16::from_le_bytes([*c, *d])),
            (5, [n]) => Self::Signal(*n),
            (6, [code, signal]) => Self::Exit { code: *code, signal: *signal },
            _ => return None,
        })
    }
    /// As on a stream of the guest channel: type, length, payload.
    pub fn encode(&self) -> Vec<u8> {
        let (kind, payload) = self.parts();
        let mut out = Vec::with_capacity(payload.len() + 5);
        out.push(kind);
        out.extend_from_slice(&u32::try_from(payload.len()).unwrap_or(u32::MAX).to_le_bytes());
        out.extend_from_slice(&payload);
        out
    }
    /// As one binary WebSocket message: type, payload.
    pub fn encode_message(&self) -> Vec<u8> {
        let (kind, mut payload) = self.parts();
        payload.insert(0, kind);
        payload
    }
    /// From one binary WebSocket message.
    pub fn decode_message(m: &[u8]) -> Option<Self> {
        let (kind, payload) = m.split_first()?;
        Self::from_parts(*kind, payload)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listings_of_older_ends_are_understood() {
        let asked: GuestRequest = serde_json::from_str(r#"{"op":"list-files","path":"/"}"#).unwrap();
        assert!(matches!(asked, GuestRequest::ListFiles { hash: true, paths, .. } if paths.is_empty()));
        let told: FileEntry = serde_json::from_str(r#"{"path":"/a","bytes":1,"hash":"h","mode":33188}"#).unwrap();
        assert_eq!((told.hash.as_str(), told.mtime_ns, told.ctime_ns, told.ino), ("h", 0, 0, 0));
    }

    #[test]
    fn exec_frames_round_trip_and_refuse_other_shapes() {
        let all = [
            ExecFrame::Stdin(vec![1, 2]),
            ExecFrame::Stdout(vec![]),
            ExecFrame::Stderr(vec![0xff]),
            ExecFrame::StdinEof,
            ExecFrame::Resize(200, 50),
            ExecFrame::Signal(2),
            ExecFrame::Exit { code: 130, signal: 2 },
        ];
        for f in all {
            assert_eq!(ExecFrame::decode_message(&f.encode_message()), Some(f.clone()));
            let e = f.encode();
            assert_eq!(ExecFrame::from_parts(e[0], &e[5..]), Some(f));
        }
        assert_eq!(ExecFrame::decode_message(&[]), None);
        assert_eq!(ExecFrame::decode_message(&[4, 1]), None);
        assert_eq!(ExecFrame::decode_message(&[9]), None);
    }
}
