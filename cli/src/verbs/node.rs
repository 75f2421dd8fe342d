//! `ks up` and `ks down`.

use crate::args;
use crate::failure::{Failure, Res};
use crate::host::daemon;
use crate::host::http::{Node, read_api_file};
use crate::output::{Ctx, with_schema};
use crate::table::clean;
use ks_proto::api::{NodeInfo, Session, SessionState};
use serde_json::json;
use std::time::{Duration, Instant};

const POLL: Duration = Duration::from_millis(50);

async fn answering(node: &Node) -> Option<NodeInfo> {
    tokio::time::timeout(Duration::from_secs(2), node.get("/v1/node")).await.ok()?.ok()
}

/// Starts the node of this machine unless it runs.
pub async fn up(ctx: &Ctx, a: args::Up) -> Res<u8> {
    let file = ctx.data_dir.join("api.json");
    let running = match Node::from_file(&file) {
        Ok(n) => answering(&n).await.map(|i| (n, i)),
        Err(_) => None,
    };
    if let Some((node, info)) = running {
        ctx.note("a node is running already");
        if daemon::unattended(&ctx.data_dir) {
            ctx.note(
                "its supervisor is gone: nothing starts it again when it ends. `ks down` (sessions go on), then `ks up` gives it one",
            );
        }
        if a.fleet_address.is_some() || a.bulk_mib_s.is_some() {
            ctx.note("its options were not changed: `ks down` first, then `ks up` with them again");
        }
        return said(ctx, &node, &info, false);
    }
    daemon::make_data_dir(&ctx.data_dir)?;
    let options = daemon::Options { fleet_address: a.fleet_address.as_deref(), bulk_mib_s: a.bulk_mib_s };
    if a.foreground {
        match daemon::become_node(&ctx.data_dir, options)? {}
    }
    let log_from = daemon::log_end(&ctx.data_dir);
    let mut child = daemon::start(&ctx.data_dir, options)?;
    let until = Instant::now() + Duration::from_secs(a.timeout);
    let mut bar = ctx.bar();
    loop {
        bar.step("starting the node", 0, 0);
        if let Ok(node) = Node::from_file(&file)
            && let Some(info) = answering(&node).await
        {
            bar.clear();
            return said(ctx, &node, &info, true);
        }
        let log = daemon::log_file(&ctx.data_dir);
        let next = format!("read {}, then `ks doctor`", log.display());
        if let Ok(Some(status)) = child.try_wait() {
            bar.clear();
            let tail = daemon::log_tail(&ctx.data_dir, log_from, 5);
            return Err(Failure::new("node-down", "the node ended while starting", format!("{status}\n{tail}"), next));
        }
        if Instant::now() >= until {
            bar.clear();
            let why = format!("it did not answer in {} s; it goes on starting", a.timeout);
            return Err(Failure::new("timeout", "the node is not up yet", why, next));
        }
        tokio::time::sleep(POLL).await;
    }
}

fn said(ctx: &Ctx, node: &Node, info: &NodeInfo, started: bool) -> Res<u8> {
    let value = serde_json::to_value(info).unwrap_or_default();
    let mut value = with_schema("ks.up.v1", value);
    value["started"] = started.into();
    value["url"] = node.base().into();
    ctx.result(&value, || {
        format!(
            "node up at {}  engine {} ({}): {}\n",
            node.base(),
            engine(info.engine),
            clean(&info.profile),
            clean(&info.engine_why)
        )
    })?;
    if !info.warning.is_empty() {
        ctx.note(&format!("note: {}", clean(&info.warning)));
    }
    Ok(0)
}

/// An engine's name as it is written in options.
pub fn engine(e: ks_proto::manifest::EngineKind) -> String {
    serde_json::to_value(e).ok().and_then(|v| v.as_str().map(str::to_owned)).unwrap_or_else(|| "?".into())
}

/// How many sessions have a VM; None if the node does not tell in a short while.
async fn running(node: &Node) -> Option<usize> {
    let all: Vec<Session> = tokio::time::timeout(Duration::from_secs(2), node.get("/v1/sessions")).await.ok()?.ok()?;
    Some(all.iter().filter(|s| s.vmm_pid.is_some()).count())
}

/// Checkpoints and stops, one after the other, what runs on the node of this machine; the worst exit code of all.
async fn stop_all(ctx: &Ctx) -> Res<u8> {
    let node = Node::from_file(&ctx.data_dir.join("api.json"))?;
    let all: Vec<Session> = node.get("/v1/sessions").await?;
    let f = super::fleet::info(&node).await?;
    let me = f.nodes.iter().find(|n| n.number == f.me).map(|n| n.name.as_str()).unwrap_or_default();
    let at_rest = |s: &Session| matches!(s.state, SessionState::Parked | SessionState::Stopped | SessionState::Failed);
    let here = all.iter().filter(|s| !at_rest(s) && (s.node.is_empty() || s.node == me));
    let names: Vec<String> = here.map(|s| s.name.to_string()).collect();
    ctx.note(&match names.len() {
        0 => "no session runs here".to_owned(),
        n => format!("stopping {}: {}", crate::human::count(n as u64, "session"), names.join(", ")),
    });
    super::sessions::each_at(ctx, &node, "stop", &names).await
}

/// Stops the node of this machine.
pub async fn down(ctx: &Ctx, a: args::Down) -> Res<u8> {
    if a.all {
        match stop_all(ctx).await? {
            0 => {}
            code => {
                ctx.note("the node stays up: not every session could be stopped");
                return Ok(code);
            }
        }
    }
    let api = read_api_file(&ctx.data_dir.join("api.json")).ok();
    let daemon_pid = api.map(|f| f.pid);
    let supervisor = daemon::supervisor(&ctx.data_dir, daemon_pid);
    let running = match Node::from_file(&ctx.data_dir.join("api.json")) {
        Ok(node) => running(&node).await,
        Err(_) => None,
    };
    // The supervisor first: it would start another daemon.
    let all: Vec<u32> = supervisor.into_iter().chain(daemon_pid).filter(|p| daemon::alive(*p)).collect();
    if all.is_empty() {
        ctx.note("no node is running here");
        ctx.result(&json!({"schema": "ks.down.v1", "stopped": []}), String::new)?;
        return Ok(0);
    }
    all.iter().for_each(|p| _ = daemon::signal(*p, false));
    let mut until = Instant::now() + Duration::from_secs(10);
    let mut forced = false;
    let mut bar = ctx.bar();
    while all.iter().any(|p| daemon::alive(*p)) {
        bar.step("stopping the node", 0, 0);
        if Instant::now() >= until {
            if !a.force || forced {
                let next = if a.force { "look at the processes" } else { "`ks down --force` kills it" };
                return Err(Failure::new("timeout", "the node has not ended", "it was told to 10 s ago", next));
            }
            forced = true;
            until = Instant::now() + Duration::from_secs(5);
            all.iter().for_each(|p| _ = daemon::signal(*p, true));
        }
        tokio::time::sleep(POLL).await;
    }
    bar.clear();
    // Only a node that says so has none.
    if running != Some(0) {
        ctx.note("sessions that were running keep running without checkpoints; `ks up` takes them over again, and `ks down --all` checkpoints and stops them before the node");
    }
    ctx.result(&json!({"schema": "ks.down.v1", "stopped": all}), || "node down\n".to_owned())?;
    Ok(0)
}
