//! `ksd` itself: opens everything, serves the API, ends on SIGTERM. Running VMs stay: they are adopted by the next ksd.

use crate::api::{App, Door, router, serve};
use crate::fleet::start::Mailboxes;
use crate::fleet::{self, Fleet};
use crate::host::engine::HostFacts;
use crate::host::events::EventLog;
use crate::host::files::{self, Layout};
use crate::host::membership;
use crate::host::state::StateStore;
use crate::host::vm::Supply;
use crate::node::Node;
use crate::ops::{facts, retain, scrub};
use anyhow::{Context, Result, anyhow};
use axum::Router;
use ks_blobs::{KeyFile, Store};
use ks_proto::api::ApiFile;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::net::TcpListener;

/// What the command line says.
#[derive(Debug, Clone)]
pub struct Config {
    /// Data folder.
    pub data_dir: PathBuf,
    /// Address to listen on; port 0 takes the last one again if it is free.
    pub listen: SocketAddr,
    /// Another place for `api.json`.
    pub api_file: Option<PathBuf>,
    /// Address of the fleet's planes and HTTPS API; port 0 takes the last one again, or any. None: the last address, or loopback.
    pub fleet_address: Option<SocketAddr>,
    /// Bytes per second that the bulk plane may send, and receive; None is no limit.
    pub bulk_bytes_per_s: Option<u64>,
}

/// Exit code of a ksd that wants to be started again at once: its place in a fleet changed.
pub const START_AGAIN: u8 = 75;

/// Between two attempts to get the fleet's certificate authority from a member.
const AUTHORITY_AGAIN: Duration = Duration::from_millis(500);
/// The same when it starts again by itself: everything that was asked is answered.
const GRACE_AGAIN: Duration = Duration::from_millis(200);
/// How long a start waits for the newest state before it goes on without.
const NEWEST_STATE: Duration = Duration::from_secs(2);
/// Set when everything was served and ksd goes down in order.
static GOING: AtomicBool = AtomicBool::new(false);
/// How long open calls may go on after SIGTERM.
const GRACE: Duration = Duration::from_secs(5);

/// Runs until SIGTERM or SIGINT.
///
/// # Errors
/// Whatever keeps the node from starting, with what to do.
pub async fn run(config: Config) -> Result<u8> {
    if !config.listen.ip().is_loopback() {
        return Err(anyhow!("{} is not a loopback address; the API of a lone node listens on loopback only", config.listen));
    }
    raise_file_limit();
    let layout = Layout::open(&config.data_dir).map_err(|e| anyhow!(e))?;
    let _lock = files::lock(&layout).map_err(|e| anyhow!(e))?;
    let _ = std::fs::remove_dir_all(layout.tmp()).and_then(|()| std::fs::create_dir(layout.tmp()));
    if let Some(done) = membership::carry_out(&layout).map_err(|e| anyhow!(e))? {
        tracing::info!("{done}");
    }
    let (deadline, lease) = tokio::sync::watch::channel(0);
    let supply = open_supply(&layout, lease)?;
    let events = open_events(&layout, &supply)?;
    let token = files::token(&layout).map_err(|e| anyhow!(e))?;
    let (fleet, mail) = open_fleet(&config, &layout, &supply, deadline, &events).await?;
    let state = StateStore::new(fleet.consensus().clone(), events.clone());
    events.forget_earlier_state().context("cannot forget the earlier state")?;
    abort_on_panic();
    let node = Node::new(layout.clone(), state, supply, fleet);
    for warning in node.supply.store.warnings() {
        node.state.event("", "store-warning", warning);
    }
    // After a restart the applied state is older than what was committed; a lone node has all of it in a moment.
    match tokio::time::timeout(NEWEST_STATE, node.fleet.consensus().catch_up()).await {
        Ok(Ok(())) => end_strays(&node).await,
        // A VM that this state does not know may be a session's: it stays, and its lease ends it if nobody takes it up.
        Ok(Err(_)) | Err(_) => {
            tracing::warn!("the newest state of the fleet is not here yet; strays of an earlier ksd are not looked for")
        }
    }
    let api_path = config.api_file.clone().unwrap_or_else(|| layout.api_file());
    let listener = listen(config.listen, &api_path).await?;
    let port = listener.local_addr()?.port();
    let router = router(App { node: node.clone() });
    tasks(&node, mail, &router);
    let url = format!("http://{}", listener.local_addr()?);
    let api =
        ApiFile { url: url.clone(), token: token.clone(), pid: std::process::id(), fleet: vec![], fingerprint: String::new() };
    if let Err(e) = files::write_atomic(&last_port_file(&api_path), port.to_string().as_bytes()) {
        tracing::warn!("the port is not noted: {e}");
    }
    files::write_atomic(&api_path, &serde_json::to_vec_pretty(&api)?)
        .with_context(|| format!("cannot write {}", api_path.display()))?;
    node.state.event("", "node-up", &format!("ksd {} listens on {url}", env!("CARGO_PKG_VERSION")));
    let door = Door::Local { port, token: token.into() };
    serve(&node, listener, serve::through(&router, door)).await?;
    GOING.store(true, Ordering::Release);
    let leaves_vms = node.handles().iter().any(|h| h.view.borrow().vm.is_some());
    if !leaves_vms && !node.restart.load(Ordering::Acquire) {
        node.gateway.end().await;
    }
    node.fleet.shutdown().await;
    if let Err(e) = node.state.flush_events() {
        tracing::warn!("the last events are not on the disk: {e}");
    }
    // Nobody is to be sent to a node that has ended in good order. The port is kept for the next one.
    if !node.restart.load(Ordering::Acquire)
        && let Err(e) = std::fs::remove_file(&api_path)
    {
        tracing::warn!("{} stays: {e}", api_path.display());
    }
    Ok(if node.restart.load(Ordering::Acquire) { START_AGAIN } else { 0 })
}

/// Everything that goes on beside the API.
fn tasks(node: &Arc<Node>, mail: Mailboxes, router: &Router) {
    let weak = || Arc::downgrade(node);
    node.supply.store.set_peers(node.fleet.repair_source(weak()));
    let _ = node.fleet.node.set(weak());
    tokio::spawn(crate::host::gateway::peers::run(weak()));
    tokio::spawn(crate::host::gateway::peers::sweep(weak()));
    tokio::spawn(fleet::renewal::run(weak(), node.fleet.clone(), mail.lease));
    tokio::spawn(fleet::placing::run(weak(), mail.placing));
    tokio::spawn(fleet::voting::run(weak()));
    tokio::spawn(fleet::copying::run(weak()));
    tokio::spawn(fleet::owning::run(weak()));
    tokio::spawn(fleet::follow(node.fleet.clone()));
    tokio::spawn(fleet::follow_lineage(weak(), node.fleet.clone()));
    tokio::spawn(facts::run(weak()));
    tokio::spawn(retain::run(weak()));
    tokio::spawn(scrub::run(weak()));
    tokio::spawn(fleet::serve_members(node.fleet.clone(), router.clone()));
    match TcpListener::from_std(mail.https) {
        Ok(door) => drop(tokio::spawn(serve::https(door, mail.tls, router.clone()))),
        Err(e) => tracing::error!("the HTTPS door stays closed: {e}"),
    }
    let node = node.clone();
    tokio::spawn(async move {
        let profiles = facts::profiles(&node);
        fleet::start::announce(&node.fleet, profiles).await;
        while node.fleet.authority_file().is_err() {
            node.fleet.get_authority().await;
            tokio::time::sleep(AUTHORITY_AGAIN).await;
        }
    });
}

async fn open_fleet(
    config: &Config,
    layout: &Layout,
    supply: &Supply,
    deadline: tokio::sync::watch::Sender<u64>,
    events: &EventLog,
) -> Result<(Arc<Fleet>, Mailboxes)> {
    let facts = HostFacts::probe();
    let profiles = ["kvm", "qemu"].into_iter().filter_map(|e| facts.choose(e).ok()).map(|c| c.profile).collect();
    let told = events.clone();
    let opening = fleet::start::Opening {
        layout,
        address: config.fleet_address,
        limits: ks_bulk::BulkLimits { send_bytes_per_s: config.bulk_bytes_per_s, receive_bytes_per_s: config.bulk_bytes_per_s },
        supply,
        deadline,
        profiles,
        earlier: events.earlier_state().context("cannot read the state of an earlier version")?,
        event: Arc::new(move |kind, text| told.record("", kind, text)),
    };
    fleet::start::open(opening).await.map_err(|e| anyhow!(e))
}

async fn serve(node: &Arc<Node>, listener: TcpListener, app: Router) -> Result<()> {
    let stop = {
        let node = node.clone();
        async move {
            end_signal().await;
            node.ending.store(true, Ordering::Release);
            node.shutdown.notify_waiters();
        }
    };
    let mut stopped = std::pin::pin!(node.shutdown.notified());
    stopped.as_mut().enable();
    let serving = axum::serve(listener, app).with_graceful_shutdown(stop);
    tokio::select! {
        done = serving => done.context("the API ended")?,
        // Terminals stay attached for ever: they get a short while, then the process ends.
        () = async {
            stopped.await;
            tokio::time::sleep(if node.restart.load(Ordering::Acquire) { GRACE_AGAIN } else { GRACE }).await;
        } => {}
    }
    node.state.event("", "node-down", "ksd ends; running sessions stay and are adopted by the next one");
    Ok(())
}

async fn end_signal() {
    use tokio::signal::unix::{SignalKind, signal};
    match (signal(SignalKind::terminate()), signal(SignalKind::interrupt())) {
        (Ok(mut term), Ok(mut int)) => tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
        },
        _ => std::future::pending().await,
    }
}

/// The event database, and a look whether the replicated state is where the store says it should be: one that is gone while
/// the store holds checkpoints is a refusal, never a blank node.
fn open_events(layout: &Layout, supply: &Supply) -> Result<EventLog> {
    let (path, raft) = (layout.database(), membership::raft_dir(layout));
    let held = supply.store.stats().manifests;
    // A lone node of an earlier version kept its state beside its events.
    let earlier = || path.exists() && EventLog::open(&path).is_ok_and(|e| matches!(e.earlier_state(), Ok(Some(_))));
    if held > 0 && !raft.exists() && !layout.root.join("node.json").exists() && !earlier() {
        return Err(anyhow!(
            "{} is missing, but the chunk store beside it holds {held} checkpoints and images: put it back from a copy; to begin anew, \
             move the whole data folder away first (nothing in it was touched)",
            raft.display()
        ));
    }
    for name in ["log.redb", "state.redb"] {
        let file = raft.join(name);
        if held > 0 && raft.exists() && !std::fs::metadata(&file).is_ok_and(|m| m.len() > 0) {
            return Err(anyhow!(
                "{} is missing or empty, but the chunk store beside it holds {held} checkpoints and images: put it back from a copy; to \
                 begin anew, move the whole data folder away first (nothing in it was touched)",
                file.display()
            ));
        }
    }
    // redb panics on some kinds of damage inside a page.
    let opened = std::panic::catch_unwind(|| EventLog::open(&path));
    let damaged = format!("{} (this node's events) cannot be opened: move it away; nothing else is in it", path.display());
    match opened {
        Ok(done) => done.context(damaged),
        Err(_) => Err(anyhow!("{damaged} (the database's own reader gave up on it: it is damaged)")),
    }
}

/// A task that panics must not leave a node that only looks alive: ksd ends, its supervisor starts it again, and the VMs, which
/// are other processes, are taken over.
fn abort_on_panic() {
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        default(info);
        // On its way out nothing is left to look alive: what breaks then must not make an orderly end a crash.
        if !GOING.load(Ordering::Acquire) {
            std::process::abort();
        }
    }));
}

fn open_supply(layout: &Layout, lease: tokio::sync::watch::Receiver<u64>) -> Result<Supply> {
    let store = Store::open(&layout.store()).context("cannot open the chunk store")?;
    // A key that is lost while objects are sealed under it must not be replaced in silence.
    let fresh = store.stats().packs == 0;
    let keys = KeyFile::in_dir(&layout.root).load_or_create(fresh).context("cannot open the key file")?;
    Ok(Supply { store, keys, board: fleet::board::Board::default(), lease })
}

/// VMs that belong to no session of this node are ended: a golden boot or a diff that an earlier ksd left, or a session that went to
/// another node meanwhile. The state must be the newest.
async fn end_strays(node: &Arc<Node>) {
    let ours: Vec<String> = {
        let (state, me) = (node.state.read(), node.fleet.number());
        state.sessions.values().filter(|s| !s.tombstone && s.owner == me).map(|s| format!("{}.", &s.id.to_hex()[..12])).collect()
    };
    for entry in std::fs::read_dir(node.layout.run()).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if ours.iter().any(|o| name.starts_with(o.as_str())) {
            continue;
        }
        if let Err(why) = crate::host::process::end_run_dir(&entry.path(), Duration::from_secs(15)).await {
            node.state.event("", "process-stays", &why);
        } else {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// Where the port is noted for the next start.
fn last_port_file(api_path: &Path) -> PathBuf {
    api_path.with_extension("port")
}

/// With port 0 the last port is taken again when it is free, so that clients which wait find the node where it was.
async fn listen(wanted: SocketAddr, api_path: &Path) -> Result<TcpListener> {
    if wanted.port() == 0 {
        let port = std::fs::read_to_string(last_port_file(api_path)).ok().and_then(|t| t.trim().parse::<u16>().ok());
        if let Some(port) = port
            && let Ok(l) = TcpListener::bind(SocketAddr::new(wanted.ip(), port)).await
        {
            return Ok(l);
        }
    }
    TcpListener::bind(wanted).await.with_context(|| format!("cannot listen on {wanted}"))
}

/// A restore may need a file for each pack.
fn raise_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let now = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: now.maximum, maximum: now.maximum });
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    const CHILD: &str = "KS_TEST_PANICS";

    /// The child's part: a task of the runtime panics while the main task waits for something else.
    #[test]
    fn panics_in_a_task_when_told_to() {
        if std::env::var_os(CHILD).is_none() {
            return;
        }
        super::abort_on_panic();
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            tokio::spawn(async { panic!("a task gives up") });
            std::future::pending::<()>().await;
        });
    }

    #[test]
    fn a_task_that_panics_ends_the_node_for_its_supervisor_to_start_again() {
        let out = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "daemon::tests::panics_in_a_task_when_told_to", "--nocapture"])
            .env(CHILD, "1")
            .output()
            .unwrap();
        assert_eq!(out.status.signal(), Some(6), "{}", String::from_utf8_lossy(&out.stderr));
        assert!(String::from_utf8_lossy(&out.stderr).contains("a task gives up"), "the cause is in the log");
    }
}
