//! Opening this node's part in the fleet: keys, addresses, certificates, then control plane, consensus, bulk plane and gossip.

use super::wire::{Answerer, ControlWire};
use super::{Addresses, Book, Fleet, placing, renewal};
use crate::host::files::{self, Layout};
use crate::host::membership::{self, FOUNDER, Membership};
use crate::host::vm::Supply;
use ks_bulk::{Bulk, BulkConfig, BulkEvent, BulkLimits, Fetcher, NoImages};
use ks_net::tls::{ApiKey, FleetCa};
use ks_net::{ControlConfig, ControlPlane, Gossip, GossipTiming, Keypair, control_addr};
use ks_proto::FleetId;
use ks_proto::api::ApiError;
use ks_raft::host::{Consensus, ConsensusConfig, OfflineError, Timing};
use ks_raft::{Command, FleetState, Member, MemberChange};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;
use tokio::sync::{Notify, mpsc, watch};

/// Tries to find a free row of ports.
const PORT_TRIES: u32 = 64;
/// How long a founder may take to become the leader of its one-node fleet.
const FOUND: Duration = Duration::from_secs(20);

/// What of the fleet's certificate authority is here.
pub struct Authority {
    /// Certificate in DER; empty before there is one.
    pub cert: Vec<u8>,
    /// The whole, on nodes that may admit others.
    pub ca: Option<FleetCa>,
}

impl Authority {
    /// Fingerprint for pins, hex; "" without one.
    pub fn fingerprint(&self) -> String {
        if self.cert.is_empty() { String::new() } else { hex::encode(self.fingerprint_bytes()) }
    }
    /// The same as bytes.
    pub fn fingerprint_bytes(&self) -> [u8; 32] {
        ks_net::tls::fingerprint(&self.cert)
    }
}

/// The authority as one member gives it to another.
#[derive(Debug, Serialize, Deserialize)]
pub struct AuthorityFile {
    /// Certificate and key.
    pub ca: FleetCa,
}

/// Takes a kind and a text.
pub type Tell = Arc<dyn Fn(&str, &str) + Send + Sync>;

/// What a start of the fleet needs.
pub struct Opening<'a> {
    /// Data folder.
    pub layout: &'a Layout,
    /// `--fleet-address`: port 0 takes the one it had, or any. None takes the address it had as well, or loopback.
    pub address: Option<SocketAddr>,
    /// Caps of the bulk plane.
    pub limits: BulkLimits,
    /// Store and keys.
    pub supply: &'a Supply,
    /// Where the node's lease is announced.
    pub deadline: watch::Sender<u64>,
    /// CPU profiles that run here.
    pub profiles: Vec<String>,
    /// What a lone node of an earlier version kept.
    pub earlier: Option<FleetState>,
    /// Told of what people should hear.
    pub event: Tell,
}

/// The tasks' mailboxes, to be given to them.
pub struct Mailboxes {
    /// Of the lease.
    pub lease: mpsc::Receiver<renewal::Message>,
    /// Of the placement.
    pub placing: mpsc::Receiver<placing::Notice>,
    /// The HTTPS door.
    pub https: TcpListener,
    /// Its configuration.
    pub tls: Arc<tokio_rustls::rustls::ServerConfig>,
}

/// Opens everything. A node without a fleet founds one of its own.
///
/// # Errors
/// What is missing or taken, with what to do.
pub async fn open(mut o: Opening<'_>) -> Result<(Arc<Fleet>, Mailboxes), String> {
    let layout = o.layout;
    let me = membership::load(layout)?;
    let key = ks_net::identity::load_or_create(&layout.root).map_err(|e| e.to_string())?;
    let (addresses, https) = take_ports(layout, o.address)?;
    let (authority, api_key) = authority(layout, &me)?;
    let (book, answerer) = (Book::default(), Arc::new(Answerer::default()));
    book.set(me.members.iter().filter_map(|m| Some((m.number, m.peer_id.parse().ok()?))).collect());
    let config = ControlConfig::new(key.clone(), vec![control_addr(addresses.control)]);
    let control = ControlPlane::start(config, answerer.clone()).await.map_err(|e| chain(&e))?;
    let first = me
        .members
        .iter()
        .filter_map(|m| Some((m.peer_id.parse().ok()?, m.control.iter().filter_map(|a| a.parse().ok()).collect())));
    control.allow(first.collect());
    let wire = Arc::new(ControlWire::new(OnceLock::from(control.clone()).into(), book.clone()));
    let dir = membership::raft_dir(layout);
    if let Some(state) = o.earlier.take() {
        match ks_raft::host::import_alone(&dir, &state).await {
            // A start that was cut short had taken it over already.
            Ok(()) | Err(OfflineError::NotEmpty { .. }) => {}
            Err(e) => return Err(chain(&e)),
        }
    }
    if let Some(done) = membership::carry_out_raft(layout, me.number).await? {
        (o.event)("consensus", &done);
    }
    let process = u64::from_le_bytes(files::random());
    let config = ConsensusConfig { number: me.number, incarnation: process, dir, timing: Timing::default() };
    let consensus = Consensus::open(config, wire).await.map_err(|e| chain(&e))?;
    let leaf = leaf(layout, &authority, &api_key, &addresses, me.number == FOUNDER)?;
    let tls = ks_net::tls::server_config(&api_key, &leaf, &authority.cert).map_err(|e| chain(&e))?;
    let bulk = bulk(&o, &key, addresses.bulk, &book)?;
    let fetcher = Fetcher::new(bulk.clone());
    let incarnation = incarnation(&layout.root);
    if me.number == FOUNDER && me.fleet_id.is_empty() {
        found(&consensus, &key, &addresses, &authority, o.profiles.clone(), incarnation).await?;
    }
    let state = consensus.state();
    let fleet_id = state.fleet_id.map_or_else(|| me.fleet_id.clone(), |i| i.to_hex());
    let gossip = Gossip::start(control.clone(), &fleet_id, GossipTiming::default());
    let (lease_tx, lease) = mpsc::channel(renewal::MAILBOX_MAX);
    let (placing_tx, placing) = mpsc::channel(placing::MAILBOX_MAX);
    let fleet = Arc::new(Fleet {
        number: me.number,
        incarnation,
        addresses,
        layout: layout.clone(),
        key,
        control,
        gossip,
        bulk,
        fetcher,
        consensus,
        book,
        deadline: o.deadline,
        board: o.supply.board.clone(),
        ca: Mutex::new(authority),
        api_key,
        lease_tx,
        placing_tx,
        owning: Notify::new(),
        node: std::sync::OnceLock::new(),
    });
    fleet.follow_members(&state, &BTreeMap::new());
    answerer.serve(&fleet);
    Ok((fleet, Mailboxes { lease, placing, https, tls }))
}

fn chain(e: &dyn std::error::Error) -> String {
    let mut text = e.to_string();
    let mut at = e.source();
    while let Some(s) = at {
        let more = s.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        at = s.source();
    }
    text
}

/// The same for every start of this node on this machine since its boot; a copy of the data folder, here or elsewhere, has
/// another one. So ksd may be restarted without waiting for its lease, and two copies are still told apart.
fn incarnation(root: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let machine = std::fs::read_to_string("/etc/machine-id").unwrap_or_default();
    let place = std::fs::metadata(root).map(|m| (m.dev(), m.ino())).unwrap_or_default();
    let mut h = blake3::Hasher::new_derive_key("keepstate 2026-11 node incarnation");
    h.update(boot.as_bytes()).update(machine.as_bytes()).update(&place.0.to_le_bytes()).update(&place.1.to_le_bytes());
    let mut out = [0; 8];
    h.finalize_xof().fill(&mut out);
    u64::from_le_bytes(out)
}

/// Ports in a row: UDP P control, UDP P+1 bulk, TCP P API.
fn row(ip: IpAddr, port: u16) -> io::Result<(Addresses, TcpListener)> {
    let (control, bulk, api) = (SocketAddr::new(ip, port), SocketAddr::new(ip, port + 1), SocketAddr::new(ip, port));
    // Held for a moment only: the planes bind them next.
    let _probe = (UdpSocket::bind(control)?, UdpSocket::bind(bulk)?);
    let https = TcpListener::bind(api)?;
    https.set_nonblocking(true)?;
    Ok((Addresses { control, bulk, api }, https))
}

/// The row it had, else the wanted one, else any. What it took is kept, so that peers find it again, and `ks up` alone is enough
/// after an upgrade.
fn take_ports(layout: &Layout, wanted: Option<SocketAddr>) -> Result<(Addresses, TcpListener), String> {
    let (path, ip_path) = (layout.root.join("fleet-port"), layout.root.join("fleet-ip"));
    let kept_ip = || std::fs::read_to_string(&ip_path).ok().and_then(|t| t.trim().parse().ok());
    let wanted = wanted.unwrap_or_else(|| SocketAddr::new(kept_ip().unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)), 0));
    let kept: Option<u16> = std::fs::read_to_string(&path).ok().and_then(|t| t.trim().parse().ok());
    let first = if wanted.port() == 0 { kept } else { Some(wanted.port()) };
    let said = |port: u16, e: &io::Error| {
        format!(
            "cannot listen on {}:{port} (UDP {port} and {}, TCP {port}): {e}; is another node running there, and is the address this machine's? choose with --fleet-address IP[:PORT]",
            wanted.ip(),
            port + 1
        )
    };
    let taken = match first {
        Some(port) => match retry(wanted.ip(), port) {
            Ok(t) => Ok(t),
            // A port that was only picked may be picked anew; one that was asked for, or that peers know, may not.
            Err(_) if wanted.port() == 0 && !layout.root.join("node.json").exists() && wanted.ip().is_loopback() => {
                any(wanted.ip())
            }
            Err(e) => return Err(said(port, &e)),
        },
        None => any(wanted.ip()),
    };
    let (addresses, https) = taken.map_err(|e| said(0, &e))?;
    for (path, text) in [(&path, addresses.api.port().to_string()), (&ip_path, addresses.api.ip().to_string())] {
        files::write_atomic(path, text.as_bytes()).map_err(|e| format!("{}: {e}", path.display()))?;
    }
    Ok((addresses, https))
}

/// A ksd that was just killed holds its ports until the kernel has taken it down.
fn retry(ip: IpAddr, port: u16) -> io::Result<(Addresses, TcpListener)> {
    let end = std::time::Instant::now() + Duration::from_secs(2);
    loop {
        match row(ip, port) {
            Err(e) if std::time::Instant::now() < end && e.kind() == io::ErrorKind::AddrInUse => {
                std::thread::sleep(Duration::from_millis(20));
            }
            other => return other,
        }
    }
}

fn any(ip: IpAddr) -> io::Result<(Addresses, TcpListener)> {
    let mut last = io::Error::from(io::ErrorKind::AddrInUse);
    for _ in 0..PORT_TRIES {
        let port = UdpSocket::bind(SocketAddr::new(ip, 0))?.local_addr()?.port();
        if port == u16::MAX {
            continue;
        }
        match row(ip, port) {
            Ok(t) => return Ok(t),
            Err(e) => last = e,
        }
    }
    Err(last)
}

fn authority(layout: &Layout, me: &Membership) -> Result<(Authority, ApiKey), String> {
    let read = |p: &Path| match std::fs::read(p) {
        Ok(b) => Ok(Some(b)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(format!("{}: {e}", p.display())),
    };
    let key_path = membership::api_key_file(layout);
    let api_key = api_key(layout)?;
    let _ = key_path;
    let path = membership::authority_file(layout);
    let ca: Option<FleetCa> = match read(&path)? {
        Some(b) => {
            Some(serde_json::from_slice(&b).map_err(|e| format!("{} is damaged: {e}; put it back from a copy", path.display()))?)
        }
        None if me.number == FOUNDER && me.members.is_empty() => {
            let ca = FleetCa::create().map_err(|e| chain(&e))?;
            let bytes = serde_json::to_vec(&ca).map_err(|e| e.to_string())?;
            files::write_atomic(&path, &bytes).map_err(|e| format!("{}: {e}", path.display()))?;
            Some(ca)
        }
        None => None,
    };
    let cert = match &ca {
        Some(ca) => ca.cert_der().to_vec(),
        None => read(&membership::ca_file(layout))?.ok_or_else(|| {
            format!("{} is missing: put it back from a copy, or join the fleet again", membership::ca_file(layout).display())
        })?,
    };
    Ok((Authority { cert, ca }, api_key))
}

/// This node's HTTPS key, made once.
///
/// # Errors
/// As the disk says.
pub fn api_key(layout: &Layout) -> Result<ApiKey, String> {
    let path = membership::api_key_file(layout);
    match std::fs::read(&path) {
        Ok(b) => {
            serde_json::from_slice(&b).map_err(|e| format!("{} is damaged: {e}; remove it to get a new one", path.display()))
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            let key = ApiKey::create().map_err(|e| chain(&e))?;
            let bytes = serde_json::to_vec(&key).map_err(|e| e.to_string())?;
            files::write_atomic(&path, &bytes).map_err(|e| format!("{}: {e}", path.display()))?;
            Ok(key)
        }
        Err(e) => Err(format!("{}: {e}", path.display())),
    }
}

/// The HTTPS leaf: kept from the admission; a node with the authority makes its own.
fn leaf(layout: &Layout, a: &Authority, key: &ApiKey, addresses: &Addresses, founder: bool) -> Result<Vec<u8>, String> {
    let path = membership::leaf_file(layout);
    if !founder && let Ok(kept) = std::fs::read(&path) {
        return Ok(kept);
    }
    let ca = a.ca.as_ref().ok_or_else(|| format!("{} is missing: join the fleet again", path.display()))?;
    ca.issue(key.public(), &[addresses.api.ip().to_string()]).map_err(|e| chain(&e))
}

fn bulk(o: &Opening<'_>, key: &Keypair, listen: SocketAddr, book: &Book) -> Result<Bulk, String> {
    let keypair =
        ks_bulk::Keypair::from_protobuf_encoding(&key.to_protobuf_encoding().map_err(|e| chain(&e))?).map_err(|e| chain(&e))?;
    let (members, keys, event) = (book.clone(), o.supply.keys.clone(), o.event.clone());
    let config = BulkConfig {
        keypair,
        listen,
        allow: Arc::new(move |peer| members.number(peer).is_some()),
        store: o.supply.store.clone(),
        keys: Arc::new(move || keys.clone()),
        images: Arc::new(NoImages),
        limits: o.limits,
        events: Arc::new(move |e| match e {
            BulkEvent::WrongBytes { peer, wrong } => event("wrong-bytes", &format!("{peer} sent what does not verify: {wrong}")),
            BulkEvent::Damaged { pack, faults } => {
                event("damaged", &format!("pack {pack}: {} objects are damaged on this node", faults.len()));
            }
        }),
    };
    Bulk::start(config).map_err(|e| chain(&e))
}

/// How this node is described to the fleet.
pub fn member(key: &Keypair, addresses: &Addresses, profiles: Vec<String>, incarnation: u64, name: &str, domain: &str) -> Member {
    Member {
        number: 0,
        peer_id: key.public().to_peer_id().to_string(),
        name: name.to_owned(),
        control: vec![control_addr(addresses.control).to_string()],
        bulk: vec![addresses.bulk],
        api: vec![format!("https://{}", addresses.api)],
        profiles,
        domain: domain.to_owned(),
        joined_unix_ms: 0,
        state: ks_raft::MemberState::Active,
        incarnation,
    }
}

/// The host's name, as a node's.
pub fn host_name() -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().to_lowercase();
    let clean: String =
        name.chars().map(|c| if c.is_ascii_lowercase() || c.is_ascii_digit() { c } else { '-' }).take(40).collect();
    if clean.trim_matches('-').is_empty() { "node".into() } else { clean.trim_matches('-').to_owned() }
}

async fn found(
    consensus: &Consensus,
    key: &Keypair,
    addresses: &Addresses,
    authority: &Authority,
    profiles: Vec<String>,
    incarnation: u64,
) -> Result<(), String> {
    let state = consensus.state();
    if state.is_founded() {
        return Ok(());
    }
    consensus.found().await.map_err(|e| chain(&e))?;
    let command = Command::Found {
        fleet_id: FleetId(files::random()),
        member: member(key, addresses, profiles, incarnation, &host_name(), ""),
        ca_cert_hex: hex::encode(&authority.cert),
        now_unix_ms: crate::host::clock::unix_ms(),
    };
    let done = tokio::time::timeout(FOUND, consensus.propose(command)).await;
    let said = done.map_err(|_| format!("the node did not become its own fleet in {} s", FOUND.as_secs()))?;
    said.map_err(|e| chain(&e))?.ok().map_err(|e| e.to_string()).map(drop)
}

/// Tells the fleet where this node is now, if that changed.
pub async fn announce(fleet: &Fleet, profiles: Vec<String>) {
    let state = fleet.state();
    let Some(m) = state.members.get(&fleet.number) else { return };
    let now = member(&fleet.key, &fleet.addresses, profiles, fleet.incarnation, &m.name, &m.domain);
    if (&m.control, &m.bulk, &m.api, &m.profiles) == (&now.control, &now.bulk, &now.api, &now.profiles) {
        return;
    }
    let change = MemberChange {
        control: Some(now.control),
        bulk: Some(now.bulk),
        api: Some(now.api),
        profiles: Some(now.profiles),
        ..MemberChange::default()
    };
    if let Err(e) = fleet.consensus.propose(Command::UpdateMember { number: fleet.number, change }).await {
        tracing::warn!("the fleet was not told of this node's new addresses: {e}");
    }
}

impl Fleet {
    /// The authority, for a member that asks.
    ///
    /// # Errors
    /// `not-found` on a node that does not have it yet.
    pub fn authority_file(&self) -> Result<AuthorityFile, ApiError> {
        let ca = self.ca.lock().unwrap_or_else(std::sync::PoisonError::into_inner).ca.clone();
        ca.map(|ca| AuthorityFile { ca }).ok_or_else(|| {
            ApiError::new("not-found", "the fleet's certificate authority", "this node does not have it yet", "ask another node")
        })
    }

    /// Gets the authority from a member, so that this node can admit others when those are gone.
    pub async fn get_authority(&self) {
        if self.authority_file().is_ok() {
            return;
        }
        for peer in self.state().members.keys().copied().filter(|n| *n != self.number) {
            let Ok(got) = super::call::get::<AuthorityFile>(self, peer, "/v1/internal/authority").await else { continue };
            let mut mine = self.ca.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            if got.ca.cert_der() != mine.cert {
                tracing::warn!("node {peer} gave another certificate authority than this fleet's");
                continue;
            }
            let path = membership::authority_file(&self.layout);
            let kept = serde_json::to_vec(&got.ca).map_err(io::Error::from).and_then(|b| files::write_atomic(&path, &b));
            match kept {
                Ok(()) => mine.ca = Some(got.ca),
                Err(e) => tracing::warn!("{}: {e}", path.display()),
            }
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_without_an_address_takes_the_one_it_had() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::open(dir.path()).unwrap();
        let take = |wanted: Option<&str>| take_ports(&layout, wanted.map(|w| w.parse().unwrap())).unwrap().0.api;
        assert_eq!(take(None).ip(), Ipv4Addr::LOCALHOST);
        let second = take(Some("127.0.0.2:0"));
        assert_eq!(second.ip(), Ipv4Addr::new(127, 0, 0, 2));
        assert_eq!(take(None), second, "as after `ks down`, an upgrade, `ks up`");
        let third = take(Some("127.0.0.3:0"));
        assert_eq!((third.ip(), third.port()), (Ipv4Addr::new(127, 0, 0, 3).into(), second.port()), "the machine has moved");
        assert_eq!(take(None), third);
    }
}
