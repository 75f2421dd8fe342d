//! What the data folder says of this node's place in a fleet, and the two moments that change it: joining and leaving.
//!
//! Both are a durable order first (`join.json`, `leave.json`), carried out at the next start before anything is opened, step by
//! step, each of which may be done again. The order is removed last, so a crash at any point finds it again.
//!
//! ```text
//!   lone ──join.json──► start: old state, store and keys go, the fleet's come ──► node.json (number, members)
//!   member ──leave.json──► start: everything of the fleet goes, the node's key too ──► lone, a new node
//! ```

use super::files::{self, Layout};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ks_proto::fleet::{Admitted, MemberAddrs};
use serde::{Deserialize, Serialize};
use std::io;
use std::path::{Path, PathBuf};

/// Number of the node that founds a fleet.
pub const FOUNDER: u64 = 1;

/// Contents of `node.json`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Membership {
    /// This node's number.
    pub number: u64,
    /// Fleet that it joined, hex; "" on a founder, who has it in the state.
    #[serde(default)]
    pub fleet_id: String,
    /// Members as they were when it joined: who to ask first. Empty on a founder.
    #[serde(default)]
    pub members: Vec<MemberRow>,
}

/// One of [`Membership::members`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberRow {
    /// Number.
    pub number: u64,
    /// PeerId.
    pub peer_id: String,
    /// Control addresses.
    pub control: Vec<String>,
    /// Bulk addresses.
    pub bulk: Vec<String>,
}

impl From<&MemberAddrs> for MemberRow {
    fn from(m: &MemberAddrs) -> Self {
        Self { number: m.number, peer_id: m.peer_id.clone(), control: m.control.clone(), bulk: m.bulk.clone() }
    }
}

fn node_file(l: &Layout) -> PathBuf {
    l.root.join("node.json")
}
fn join_file(l: &Layout) -> PathBuf {
    l.root.join("join.json")
}
fn leave_file(l: &Layout) -> PathBuf {
    l.root.join("leave.json")
}
/// The fleet's certificate authority, certificate in DER.
pub fn ca_file(l: &Layout) -> PathBuf {
    l.root.join("fleet-ca.der")
}
/// This node's HTTPS leaf in DER.
pub fn leaf_file(l: &Layout) -> PathBuf {
    l.root.join("api-cert.der")
}
/// The authority with its key, for nodes that admit others.
pub fn authority_file(l: &Layout) -> PathBuf {
    l.root.join("fleet-ca.json")
}
/// This node's HTTPS key.
pub fn api_key_file(l: &Layout) -> PathBuf {
    l.root.join("api-key.json")
}
/// Folder of the replicated state.
pub fn raft_dir(l: &Layout) -> PathBuf {
    l.root.join("raft")
}

fn said<T>(path: &Path, r: io::Result<T>) -> Result<T, String> {
    r.map_err(|e| format!("{}: {e}", path.display()))
}

fn gone(path: &Path) -> Result<(), String> {
    let done = if path.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) };
    match done {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(format!("cannot remove {}: {e}", path.display())),
        _ => Ok(()),
    }
}

/// This node's place: of `node.json`, or a founder's.
///
/// # Errors
/// If the file cannot be read.
pub fn load(l: &Layout) -> Result<Membership, String> {
    let path = node_file(l);
    match std::fs::read(&path) {
        Ok(bytes) => {
            serde_json::from_slice(&bytes).map_err(|e| format!("{} is damaged: {e}; put it back from a copy", path.display()))
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Membership { number: FOUNDER, ..Membership::default() }),
        Err(e) => Err(format!("{}: {e}", path.display())),
    }
}

/// Writes `node.json`: the node is a member of a fleet that it must not found anew, whatever its log holds.
///
/// # Errors
/// As the disk says.
pub fn save(l: &Layout, m: &Membership) -> Result<(), String> {
    let text = serde_json::to_vec_pretty(m).map_err(|e| e.to_string())?;
    said(&node_file(l), files::write_atomic(&node_file(l), &text))
}

/// Orders the join; it is carried out at the next start.
///
/// # Errors
/// As the disk says.
pub fn order_join(l: &Layout, admitted: &Admitted) -> Result<(), String> {
    let path = join_file(l);
    let bytes = serde_json::to_vec(admitted).map_err(|e| e.to_string())?;
    said(&path, files::write_atomic(&path, &bytes))
}

/// Orders the leave; it is carried out at the next start.
///
/// # Errors
/// As the disk says.
pub fn order_leave(l: &Layout) -> Result<(), String> {
    let path = leave_file(l);
    said(&path, files::write_atomic(&path, b"{}"))
}

/// An order about consensus that the next start carries out, before it is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Become the only voter of a new generation.
    Recover,
    /// Give the log up and come back as an empty learner: the fleet was recovered without this node, and is of this lineage now.
    Forget {
        /// Lineage.
        lineage: u64,
    },
}

fn order_file(l: &Layout, o: Order) -> PathBuf {
    l.root.join(match o {
        Order::Recover => "recover.json",
        Order::Forget { .. } => "forget.json",
    })
}

/// Gives the order.
///
/// # Errors
/// As the disk says.
pub fn order(l: &Layout, o: Order) -> Result<(), String> {
    let path = order_file(l, o);
    let text = match o {
        Order::Recover => "{}".to_owned(),
        Order::Forget { lineage } => lineage.to_string(),
    };
    said(&path, files::write_atomic(&path, text.as_bytes()))
}

/// Carries out what was ordered about consensus. Returns what was done, for the log.
///
/// # Errors
/// As the disk says; the order stays.
pub async fn carry_out_raft(l: &Layout, number: u64) -> Result<Option<String>, String> {
    let (recover, forget) = (order_file(l, Order::Recover), order_file(l, Order::Forget { lineage: 0 }));
    if recover.exists() {
        let done = ks_raft::host::recover_alone(&raft_dir(l), number).await.map_err(|e| e.to_string())?;
        gone(&recover)?;
        sync(l)?;
        return Ok(Some(format!(
            "generation {} begins with this node alone; members to remove if they are lost: {:?}",
            done.generation, done.members
        )));
    }
    if forget.exists() {
        let text = said(&forget, std::fs::read_to_string(&forget))?;
        let lineage = text.trim().parse().map_err(|e| format!("{}: {e}", forget.display()))?;
        ks_raft::host::forget(&raft_dir(l), number, lineage).await.map_err(|e| e.to_string())?;
        gone(&forget)?;
        sync(l)?;
        return Ok(Some("the fleet was recovered without this node: it starts again from the others' state".into()));
    }
    Ok(None)
}

/// Carries out an order that waits. Returns what was done, for the log.
///
/// # Errors
/// As the disk says; the order stays.
pub fn carry_out(l: &Layout) -> Result<Option<String>, String> {
    let (join, leave) = (join_file(l), leave_file(l));
    if leave.exists() {
        wipe(l)?;
        for path in [node_file(l), ca_file(l), leaf_file(l), l.root.join("node.key"), authority_file(l), api_key_file(l)] {
            gone(&path)?;
        }
        gone(&join)?;
        gone(&leave)?;
        sync(l)?;
        return Ok(Some("this node left its fleet: it is alone, with a new identity and an empty store".into()));
    }
    let bytes = match std::fs::read(&join) {
        Ok(b) => b,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(format!("{}: {e}", join.display())),
    };
    let admitted: Admitted =
        serde_json::from_slice(&bytes).map_err(|e| format!("{} is damaged: {e}; remove it, then join again", join.display()))?;
    let decode = |what: &str, text: &str| STANDARD.decode(text).map_err(|e| format!("{}: {what}: {e}", join.display()));
    let (keys, ca, leaf) =
        (decode("keys", &admitted.keys)?, decode("ca", &admitted.ca)?, decode("certificate", &admitted.certificate)?);
    wipe(l)?;
    gone(&authority_file(l))?; // the lone node's own; the fleet's is fetched from a member
    for (path, bytes) in [(l.keys(), &keys), (ca_file(l), &ca), (leaf_file(l), &leaf)] {
        said(&path, files::write_atomic(&path, bytes))?;
    }
    let membership = Membership {
        number: admitted.number,
        fleet_id: admitted.fleet_id.clone(),
        members: admitted.members.iter().map(MemberRow::from).collect(),
    };
    save(l, &membership)?;
    gone(&join)?;
    sync(l)?;
    Ok(Some(format!("this node is member {} ({}) of fleet {}", admitted.number, admitted.name, admitted.fleet_id)))
}

/// What a lone node, or a member, kept of its former life.
fn wipe(l: &Layout) -> Result<(), String> {
    for path in [raft_dir(l), l.store(), l.database(), l.keys()] {
        gone(&path)?;
    }
    for entry in std::fs::read_dir(l.images()).into_iter().flatten().flatten() {
        gone(&entry.path())?;
    }
    Ok(())
}

fn sync(l: &Layout) -> Result<(), String> {
    said(&l.root, std::fs::File::open(&l.root).and_then(|d| d.sync_all()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder() -> (tempfile::TempDir, Layout) {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::open(&dir.path().join("d")).unwrap();
        (dir, layout)
    }

    fn admitted() -> Admitted {
        Admitted {
            number: 7,
            keys: STANDARD.encode(b"keys"),
            ca: STANDARD.encode(b"ca"),
            certificate: STANDARD.encode(b"leaf"),
            members: vec![MemberAddrs { number: 1, peer_id: "p".into(), ..MemberAddrs::default() }],
            ..Admitted::default()
        }
    }

    #[test]
    fn a_folder_without_an_order_is_a_founders_and_nothing_is_touched() {
        let (_d, l) = folder();
        std::fs::write(l.keys(), b"mine").unwrap();
        assert_eq!(carry_out(&l).unwrap(), None);
        assert_eq!(load(&l).unwrap(), Membership { number: FOUNDER, ..Membership::default() });
        assert_eq!(std::fs::read(l.keys()).unwrap(), b"mine");
    }

    #[test]
    fn a_join_replaces_the_lone_nodes_state_whatever_step_it_was_cut_at() {
        for cut in 0..4 {
            let (_d, l) = folder();
            std::fs::create_dir_all(l.store()).unwrap();
            std::fs::write(l.store().join("pack"), b"old").unwrap();
            std::fs::write(l.keys(), b"old").unwrap();
            order_join(&l, &admitted()).unwrap();
            // A crash after some of the steps: what was done is found done.
            if cut > 0 {
                std::fs::remove_dir_all(l.store()).unwrap();
            }
            if cut > 1 {
                std::fs::write(l.keys(), b"keys").unwrap();
            }
            if cut > 2 {
                std::fs::write(node_file(&l), br#"{"number":7}"#).unwrap();
            }
            assert!(carry_out(&l).unwrap().unwrap().contains("member 7"));
            assert!(!l.store().join("pack").exists(), "cut {cut}");
            assert_eq!(std::fs::read(l.keys()).unwrap(), b"keys");
            let m = load(&l).unwrap();
            assert_eq!((m.number, m.members.len()), (7, 1));
            assert_eq!(carry_out(&l).unwrap(), None, "once");
        }
    }

    #[test]
    fn a_damaged_order_is_refused_and_leaves_everything() {
        let (_d, l) = folder();
        std::fs::write(l.keys(), b"mine").unwrap();
        std::fs::write(join_file(&l), b"{").unwrap();
        assert!(carry_out(&l).unwrap_err().contains("damaged"));
        let bad = Admitted { keys: "not base64!".into(), ..admitted() };
        order_join(&l, &bad).unwrap();
        assert!(carry_out(&l).is_err());
        assert_eq!(std::fs::read(l.keys()).unwrap(), b"mine");
    }

    #[test]
    fn leaving_makes_a_new_lone_node() {
        let (_d, l) = folder();
        order_join(&l, &admitted()).unwrap();
        carry_out(&l).unwrap();
        std::fs::write(l.root.join("node.key"), b"secret").unwrap();
        order_leave(&l).unwrap();
        assert!(carry_out(&l).unwrap().unwrap().contains("alone"));
        assert_eq!(load(&l).unwrap().number, FOUNDER);
        for gone in [l.keys(), ca_file(&l), l.root.join("node.key")] {
            assert!(!gone.exists(), "{}", gone.display());
        }
    }
}
