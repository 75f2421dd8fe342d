//! The node's gateway process, `ksgw`: found or started when it is first needed, left running when ksd ends.
//!
//! ```text
//!   guest's stream ──► carry: stamp ──► gw.sock ──► ksgw (own process, own folder, outlives ksd)
//!   API, CLI       ──► admin asks   ──►
//! ```
//!
//! A node whose sessions call no model and whose people add no key has no such process. Refuses to read what a guest says
//! to the gateway: it only tells whose stream it is.

pub mod began;
pub mod carry;
pub mod peers;
mod process;

use super::files::Layout;
use ks_blobs::{KeyRing, USER_DOMAIN};
use ks_proto::SessionId;
use ks_proto::api::ApiError;
use ks_proto::gateway::{AdminAnswer, AdminAsk, GatewayAsk, PROTOCOL, SOCKET, Stamp};
use ks_proto::relay::{decode_message, encode_message, message_length};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::Mutex;
use zeroize::Zeroizing;

/// How long an admin ask may take; a key is tested over the network.
const ASK_DEADLINE: Duration = Duration::from_secs(60);

/// How long a process that is to end may take to say who it is.
const FAREWELL: Duration = Duration::from_secs(2);

/// See the module.
pub struct Gateway {
    dir: PathBuf,
    /// Key under which it seals what it keeps, hex.
    data_key: Option<Zeroizing<String>>,
    /// One start at a time; true once the process that listens now was greeted.
    greeted: Mutex<bool>,
    /// Rises with each process that was greeted: what one was told must be told to the next.
    generation: AtomicU64,
}

impl Gateway {
    /// Of this data folder. Nothing is started.
    pub fn new(layout: &Layout, keys: &KeyRing) -> Arc<Self> {
        let derived = |master: &[u8; 32]| blake3::derive_key("keystate 2026-11 gateway vault", master);
        let data_key = keys.get(USER_DOMAIN).map(|k| Zeroizing::new(hex::encode(derived(k.master()))));
        Arc::new(Self { dir: layout.root.join("gateway"), data_key, greeted: Mutex::new(false), generation: AtomicU64::new(0) })
    }

    /// Its folder.
    pub fn dir(&self) -> &std::path::Path {
        &self.dir
    }

    /// A connection to the process, which is started if need be, and a number that is another one for each process that was greeted,
    /// and never 0.
    ///
    /// # Errors
    /// `engine-missing` without the program; why it does not answer.
    async fn connect(&self) -> Result<(UnixStream, u64), ApiError> {
        let socket = self.dir.join(SOCKET);
        let mut greeted = self.greeted.lock().await;
        if *greeted && let Ok(stream) = UnixStream::connect(&socket).await {
            return Ok((stream, self.generation.load(Ordering::Acquire)));
        }
        *greeted = false;
        if UnixStream::connect(&socket).await.is_err() {
            process::start(&self.dir).await?;
        }
        self.greet().await?;
        *greeted = true;
        let generation = self.generation.fetch_add(1, Ordering::AcqRel) + 1;
        let stream = UnixStream::connect(&socket).await.map_err(|e| absent(&e.to_string()))?;
        Ok((stream, generation))
    }

    /// The first words with a process: versions, and the key to its vault.
    async fn greet(&self) -> Result<(), ApiError> {
        let mut stream = UnixStream::connect(self.dir.join(SOCKET)).await.map_err(|e| absent(&e.to_string()))?;
        let hello = ask(&mut stream, AdminAsk::Hello { protocol: PROTOCOL }).await?;
        let AdminAnswer::Hello { unsealed, pid, version, .. } = hello else { return Err(unexpected(&hello)) };
        tracing::info!("the gateway is process {pid}, version {version}");
        match (&self.data_key, unsealed) {
            (_, true) => Ok(()),
            (Some(key), false) => ask(&mut stream, AdminAsk::Unseal { key_hex: key.to_string() }).await.map(drop),
            (None, false) => Err(absent("this node has no data key to open its vault with")),
        }
    }

    /// Asks it something with one answer.
    ///
    /// # Errors
    /// `engine-missing` without the program; its own refusal.
    pub async fn admin(&self, question: AdminAsk) -> Result<AdminAnswer, ApiError> {
        let (mut stream, _) = self.connect().await?;
        ask(&mut stream, question).await
    }

    /// Asks it something that is answered in lines.
    ///
    /// # Errors
    /// As [`Self::admin`].
    pub async fn lines(&self, question: AdminAsk) -> Result<Vec<String>, ApiError> {
        let (mut stream, _) = self.connect().await?;
        let mut answer = ask(&mut stream, question).await?;
        let mut all = Vec::new();
        loop {
            match answer {
                AdminAnswer::Lines { lines, more } => {
                    all.extend(lines);
                    if !more {
                        return Ok(all);
                    }
                }
                other => return Err(unexpected(&other)),
            }
            answer = next_answer(&mut stream).await?;
        }
    }

    /// Ends the process, when ksd ends in good order and leaves no VM behind. Calls under way get the time that it gives them.
    pub async fn end(&self) {
        let hello = async {
            let mut stream = UnixStream::connect(self.dir.join(SOCKET)).await.ok()?;
            match ask(&mut stream, AdminAsk::Hello { protocol: PROTOCOL }).await {
                Ok(AdminAnswer::Hello { pid, .. }) => Some(pid),
                Ok(_) | Err(_) => None,
            }
        };
        if let Ok(Some(pid)) = tokio::time::timeout(FAREWELL, hello).await {
            process::end(pid, &self.dir);
        }
    }

    /// True if something of the session is kept here: a question about any other one starts no process.
    pub fn knows(&self, session: &SessionId) -> bool {
        self.dir.join("journal").join(session.to_hex()).exists()
    }

    /// A session is gone, and its journal goes.
    pub async fn forget(&self, session: SessionId) {
        if self.knows(&session)
            && let Err(e) = self.admin(AdminAsk::Forget { session }).await
        {
            tracing::warn!(session = %session, "its journal of model calls stays: {e}");
        }
    }

    /// A child gets its parent's allow-list.
    ///
    /// # Errors
    /// As [`Self::admin`].
    pub async fn inherit_egress(&self, parent: SessionId, child: SessionId) -> Result<(), ApiError> {
        if !self.knows(&parent) {
            return Ok(());
        }
        match self.admin(AdminAsk::EgressList { session: parent }).await? {
            AdminAnswer::Egress { allow } if allow.is_empty() => Ok(()),
            AdminAnswer::Egress { allow } => self.admin(AdminAsk::EgressSet { session: child, allow }).await.map(drop),
            other => Err(unexpected(&other)),
        }
    }
}

/// Says whose stream this connection is: what follows is the guest's.
async fn stamp(stream: &mut UnixStream, stamp: &Stamp) -> Result<(), ApiError> {
    write(stream, &GatewayAsk::Stream(Box::new(stamp.clone()))).await.map_err(|e| absent(&e.to_string()))
}

async fn ask(stream: &mut UnixStream, question: AdminAsk) -> Result<AdminAnswer, ApiError> {
    write(stream, &GatewayAsk::Admin(Box::new(question))).await.map_err(|e| absent(&e.to_string()))?;
    next_answer(stream).await
}

async fn next_answer(stream: &mut UnixStream) -> Result<AdminAnswer, ApiError> {
    match tokio::time::timeout(ASK_DEADLINE, read(stream)).await {
        Ok(Ok(AdminAnswer::Refused { code, what, why, next })) => Err(ApiError::new(api_code(&code), what, why, next)),
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(e)) => Err(absent(&e.to_string())),
        Err(_) => Err(absent(&format!("no answer in {} s", ASK_DEADLINE.as_secs()))),
    }
}

/// The gateway's codes in the API's words.
fn api_code(code: &str) -> &'static str {
    match code {
        "no-key" | "no-provider" | "not-found" | "no-session" | "no-entry" => "not-found",
        "pattern" | "amount" | "provider" | "usage" | "export" | "outcome" => "usage",
        "disk" | "disk-full" => "disk-full",
        "unreached" => "unreachable",
        "protocol" => "incompatible",
        "damaged" | "journal" => "corrupt",
        _ => "internal",
    }
}

fn absent(why: &str) -> ApiError {
    ApiError::new("internal", "the node's gateway does not answer", why, "see gateway/ksgw.log in the data folder; try again")
}

fn unexpected(answer: &AdminAnswer) -> ApiError {
    ApiError::new("internal", "the gateway's answer", format!("unexpected {answer:?}"), "install programs of one version")
}

async fn write<T: Serialize>(stream: &mut UnixStream, message: &T) -> io::Result<()> {
    let bytes = Zeroizing::new(encode_message(message).map_err(io::Error::other)?);
    stream.write_all(&bytes).await
}

async fn read<T: DeserializeOwned>(stream: &mut UnixStream) -> io::Result<T> {
    let mut length = [0; 4];
    stream.read_exact(&mut length).await?;
    let mut json = vec![0; message_length(length).map_err(io::Error::other)?];
    stream.read_exact(&mut json).await?;
    decode_message(&json).map_err(io::Error::other)
}
