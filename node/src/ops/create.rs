//! Making a session: a fork of its image's golden checkpoint.

use super::place::Asked;
use super::{describe, names};
use crate::fleet::{call, view};
use crate::host::engine::EngineChoice;
use crate::host::golden::{self, Shape};
use crate::host::session::{First, SessionHandle, start};
use crate::host::{clock, files, image};
use crate::node::Node;
use crate::progress::Steps;
use crate::session::Request;
use ks_fleet::FactsView;
use ks_proto::api::{ApiError, CreateSession, Session, SessionState, StartMain};
use ks_proto::{SessionId, SessionName};
use ks_raft::limits::COPIES_MAX;
use ks_raft::{Command, SessionParams};
use std::sync::Arc;
use std::time::Duration;

/// Memory of a session that does not say, MiB.
pub const MEMORY_MIB: u64 = 2048;
/// The same on software KVM, where a boot touches every page at a cost.
pub const SOFT_MEMORY_MIB: u64 = 512;
/// Seconds between cadence checkpoints of a session that does not say.
pub const CADENCE_S: u64 = 60;
/// How long this node may take to hear of a session that another one has just made for it.
const HEARD: Duration = Duration::from_secs(5);
/// How long a new session waits for word of the node that it is to begin on, when that node is connected again: a node that starts is
/// heard of within two rounds of gossip.
const NAMED_PATIENCE: Duration = Duration::from_secs(8);
/// How long when it is not: a node that starts dials the others at once, and one that does not is down.
const LINK_PATIENCE: Duration = Duration::from_millis(500);
/// How often it looks meanwhile.
const NAMED_LOOK: Duration = Duration::from_millis(200);

fn usage(what: &str, why: String, next: &str) -> ApiError {
    ApiError::new("usage", what, why, next)
}

fn engine_of(node: &Node, c: &CreateSession) -> Result<EngineChoice, ApiError> {
    match c.engine.as_deref() {
        None | Some("auto" | "") => node.engine.clone(),
        Some(wanted) => node.facts.choose(wanted),
    }
}

fn shape(node: &Node, c: &CreateSession) -> Result<Shape, ApiError> {
    let engine = engine_of(node, c)?;
    let memory_mib = c.memory_mib.unwrap_or(if engine.profile == image::SOFT { SOFT_MEMORY_MIB } else { MEMORY_MIB });
    if !(128..=1 << 20).contains(&memory_mib) || !memory_mib.is_multiple_of(2) {
        return Err(usage(
            "the memory size",
            format!("{memory_mib} MiB is not an even number from 128 to 1048576"),
            "use --memory 2048",
        ));
    }
    let here = super::facts::memory_total_mib();
    if here.is_some_and(|total| memory_mib > total) {
        let why = format!("{memory_mib} MiB is more than all memory of this machine, {} MiB", here.unwrap_or(0));
        return Err(usage("the memory size", why, "use less --memory, or a larger machine (--node)"));
    }
    let vcpus = c.vcpus.unwrap_or(1);
    if !(1..=64).contains(&vcpus) {
        return Err(usage("the number of CPUs", format!("{vcpus} is not from 1 to 64"), "use --vcpus 1"));
    }
    let image = image::find(node, c.image.as_deref().unwrap_or(image::default_for(&engine.profile)))?;
    image::check_fits(&image, &engine)?;
    Ok(Shape { image, memory_mib, vcpus, engine })
}

/// Changes the replicated state.
///
/// # Errors
/// As the state says.
pub async fn apply(node: &Arc<Node>, command: Command) -> Result<ks_raft::Response, ApiError> {
    node.state.propose(command).await
}

/// The first session of a node makes the default image; others that come meanwhile wait for it.
async fn first_image(node: &Arc<Node>, steps: &Steps) -> Result<(), ApiError> {
    static ONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());
    let _one = ONE.lock().await;
    if image::find(node, image::DEFAULT).is_err() {
        steps.step("making the default image (once on a node, about a minute)", 0, 0);
        image::make(node, image::DEFAULT, vec!["build".to_owned()], steps).await?;
    }
    Ok(())
}

/// Makes a session and waits until it runs, here or on the node that it belongs on. When the caller goes away meanwhile, nothing
/// of it stays.
///
/// # Errors
/// What was refused; nothing of it stays.
pub async fn create(node: &Arc<Node>, c: CreateSession, steps: &Steps) -> Result<Session, ApiError> {
    if let Some(n) = c.copies.filter(|n| !(1..=COPIES_MAX).contains(n)) {
        return Err(usage("the number of copies", format!("{n} is not from 1 to {COPIES_MAX}"), "use --copies 2"));
    }
    // A member that passes this on may know more than this node, which may have joined a moment ago: itself as a member, the image.
    if c.node == Some(format!("#{}", node.fleet.number())) {
        // Without a quorum nothing is created anyway, and that is said then.
        let _ = node.fleet.consensus().catch_up().await;
    }
    let to = place_when_heard(node, &c, steps).await?;
    if to == node.fleet.number() { create_here(node, c, steps).await } else { create_there(node, to, c, steps).await }
}

/// A node that was named, has fallen silent and is connected again is waited for: it is coming back. One without a connection is
/// refused.
async fn place_when_heard(node: &Arc<Node>, c: &CreateSession, steps: &Steps) -> Result<u64, ApiError> {
    let begun = tokio::time::Instant::now();
    let patience = || {
        let named = c.node.as_deref().and_then(|n| super::fleet::find(&node.state.read(), n).ok().map(|m| m.number));
        let linked = named.and_then(|n| node.fleet.link_of(n)).is_some_and(|l| l.connected);
        if linked { NAMED_PATIENCE } else { LINK_PATIENCE }
    };
    let mut told = false;
    loop {
        match place(node, c) {
            Err(e) if e.code == "unreachable" && begun.elapsed() < patience() => {
                if !told {
                    steps.step(format!("waiting for word of {}", c.node.as_deref().unwrap_or_default()), 0, 0);
                    told = true;
                }
                tokio::select! {
                    () = tokio::time::sleep(NAMED_LOOK) => {}
                    () = steps.abandoned() => return Err(given_up()),
                }
            }
            decided => return decided,
        }
    }
}

fn place(node: &Arc<Node>, c: &CreateSession) -> Result<u64, ApiError> {
    let (state, mut facts) = (node.state.read(), view::facts(node));
    for number in state.members.keys().copied() {
        if let Some(seen_ms_ago) = node.fleet.seen_ms_ago(number) {
            facts.entry(number).or_insert(FactsView { seen_ms_ago, ..FactsView::default() });
        }
    }
    let (me, engine) = (node.fleet.number(), engine_of(node, c).is_ok());
    let asked = Asked { state: &state, facts: &facts, me, engine, liveness_ms: node.fleet.liveness_ms() };
    asked.choose(c.node.as_deref(), c.memory_mib.unwrap_or(SOFT_MEMORY_MIB))
}

/// Has a member make it, and waits until this node has heard of it too: the caller's next word about it comes here.
async fn create_there(node: &Arc<Node>, to: u64, c: CreateSession, steps: &Steps) -> Result<Session, ApiError> {
    steps.step(format!("on {}", node.fleet.name_of(to)), 0, 0);
    let c = CreateSession { node: Some(format!("#{to}")), ..c };
    // Dropping the call tells the member that nobody waits any more: it takes the session back.
    let made: Session = tokio::select! {
        made = call::post_long(&node.fleet, to, "/v1/sessions", &c, steps) => made?,
        () = steps.abandoned() => return Err(given_up()),
    };
    let mut changes = node.fleet.changes();
    let _ = tokio::time::timeout(HEARD, changes.wait_for(|s| s.sessions.contains_key(&made.id))).await;
    Ok(made)
}

fn given_up() -> ApiError {
    ApiError::new("busy", "the session was given up", "the caller went away", "run it again")
}

async fn create_here(node: &Arc<Node>, c: CreateSession, steps: &Steps) -> Result<Session, ApiError> {
    let profile = engine_of(node, &c)?.profile;
    if profile != image::SOFT && c.image.as_deref().is_none_or(|i| i == image::DEFAULT) {
        first_image(node, steps).await?;
    }
    let shape = shape(node, &c)?;
    let taken = |n: &str| node.state.read().sessions.values().any(|s| !s.tombstone && s.name.as_str() == n);
    if let Some(n) = c.name.as_ref().filter(|n| taken(n.as_str())) {
        let next = format!("ks attach {n} shows it; or choose another --name");
        return Err(ApiError::new("exists", "the session cannot be made", format!("the name {n} is taken"), next));
    }
    let head = golden::ensure(node, &shape, steps).await?;
    let id = SessionId(files::random());
    let name = match &c.name {
        Some(n) => n.clone(),
        None => parse_name(&names::pick(files::random(), taken))?,
    };
    let params = SessionParams {
        image: shape.image.name.clone(),
        image_id: shape.image.id,
        memory_mib: shape.memory_mib,
        vcpus: shape.vcpus,
        engine: shape.engine.engine,
        profile: shape.engine.profile.clone(),
        engine_why: shape.engine.why.clone(),
    };
    let _making = node.make(id);
    let command = Command::CreateSession {
        id,
        name,
        owner: node.fleet.number(),
        params,
        cadence_s: c.cadence_s.unwrap_or(CADENCE_S),
        idle_park_s: c.idle_park_s.unwrap_or(0),
        command: None,
        forked_from: None,
        head,
        now_unix_ms: clock::unix_ms(),
    };
    apply(node, command).await?;
    steps.step("restoring the golden checkpoint", 0, 0);
    let record = node.record(&id.to_hex())?;
    let handle = start(node, &record, SessionState::Creating, First::Begin(vec![]));
    let work = async {
        if let Some(copies) = c.copies {
            apply(node, Command::SetCopies { session: id, copies }).await?;
        }
        handle.ask(Request::AwaitRunning).await?;
        if let Some(main) = &c.main {
            steps.step("starting the main window", 0, 0);
            start_main(node, &handle, main).await?;
        }
        Ok(())
    };
    finish(node, &handle, work, steps).await?;
    describe::by_id(node, &id)
}

/// Waits for `work`; when it fails or the caller goes away, the new session is removed.
///
/// # Errors
/// What `work` failed with.
pub async fn finish(
    node: &Arc<Node>,
    handle: &SessionHandle,
    work: impl Future<Output = Result<(), ApiError>>,
    steps: &Steps,
) -> Result<(), ApiError> {
    let result = tokio::select! {
        r = work => r,
        () = steps.abandoned() => Err(given_up()),
    };
    if let Err(e) = result {
        let _ = handle.ask(Request::Remove).await;
        node.state.event("", "create-failed", &e.to_string());
        return Err(e);
    }
    Ok(())
}

/// A checked name.
///
/// # Errors
/// `usage`, with the rule.
pub fn parse_name(text: &str) -> Result<SessionName, ApiError> {
    text.parse().map_err(|e: ks_proto::ids::IdError| usage("the session's name", e.to_string(), "choose another --name"))
}

/// Starts the main window; the first checkpoint follows in the background.
///
/// # Errors
/// What the guest refused.
pub async fn start_main(node: &Arc<Node>, handle: &SessionHandle, main: &StartMain) -> Result<(), ApiError> {
    let vm = handle.running().await?;
    vm.guest.start_main(main).await?;
    apply(node, Command::SetCommand { id: handle.id, command: main.command.clone() }).await?;
    let (message, pin, freeze) = (String::new(), false, false);
    handle.ask_quietly(Request::Checkpoint { reason: "start".into(), message, pin, freeze });
    Ok(())
}
