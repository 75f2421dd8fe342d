//! `ks node`: join, list, drain, leave, remove.

use super::fleet::info;
use super::{node_names, now_ms};
use crate::args;
use crate::context::join_token;
use crate::failure::{Failure, Res};
use crate::host::http::{Node, encode};
use crate::human;
use crate::output::{Ctx, with_schema};
use crate::table::clean;
use ks_proto::fleet::{Drained, FleetInfo, Join, JoinToken, Joined, Leave, Left, MakeToken, NodeView};
use serde_json::json;
use std::io::Read;

/// Longest join token that is read from standard input.
const TOKEN_MAX: u64 = 4096;

/// Does what `ks node ...` asks.
pub async fn run(ctx: &Ctx, verb: args::Node) -> Res<u8> {
    match verb {
        args::Node::Token { ttl } => token(ctx, ttl).await,
        args::Node::Join(a) => join(ctx, a).await,
        args::Node::Ls => ls(ctx).await,
        args::Node::Show { node } => show(ctx, &node).await,
        args::Node::Drain { node } => drain(ctx, &node).await,
        args::Node::Undrain { node } => undrain(ctx, &node).await,
        args::Node::Leave { force } => leave(ctx, force).await,
        args::Node::Rm { node, force } => rm(ctx, &node, force).await,
    }
}

async fn token(ctx: &Ctx, ttl_s: u64) -> Res<u8> {
    let t: JoinToken = Node::find(ctx)?.call("/v1/fleet/token", &MakeToken { ttl_s }, &mut ctx.bar()).await?;
    ctx.result(&t, || format!("{}\n", clean(&t.token)))?;
    let left = human::seconds(t.expires_unix_ms.saturating_sub(now_ms()).div_ceil(1000));
    ctx.note(&format!(
        "one use, good for {left}; fleet fingerprint {}\non the new machine: ks up --fleet-address IP, then ks node join TOKEN",
        clean(&t.fingerprint)
    ));
    if only_here(&t.addr) {
        ctx.note(&format!(
            "note: {} is loopback, so only this machine can join with it; `ks down`, then `ks up --fleet-address IP` with an address that the others reach",
            clean(&t.addr)
        ));
    }
    Ok(0)
}

/// Is this `HOST:PORT` one that no other machine reaches?
fn only_here(address: &str) -> bool {
    let host = address.rsplit_once(':').map_or(address, |a| a.0).trim_matches(['[', ']']);
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

async fn join(ctx: &Ctx, a: args::Join) -> Res<u8> {
    let token = if a.token == "-" { from_stdin()? } else { a.token };
    let (fingerprint, address) = join_token(token.trim())?;
    let at = a.at.map(|t| crate::config::Address::read(&t).map(|a| a.host)).transpose()?;
    let node = Node::here(ctx)?;
    ctx.note(&format!("joining at {}, fingerprint {fingerprint}", at.as_deref().unwrap_or(&address)));
    let body = Join { token: token.trim().to_owned(), addr: at, name: a.name, domain: a.domain };
    let j: Joined = node.call("/v1/fleet/join", &body, &mut ctx.bar()).await?;
    if super::fleet::back(ctx, "starting again as a member", |i| i.me == j.number && i.quorum).await.is_none() {
        ctx.note("it is admitted, but has not heard from the fleet yet: look with `ks fleet status`, and at the firewall (UDP)");
    }
    ctx.result(&j, || format!("{} is node {} of fleet {}\n", clean(&j.name), j.number, clean(&j.fleet_id)))?;
    warn(ctx, &j.warning);
    Ok(0)
}

fn from_stdin() -> Res<String> {
    let mut text = String::new();
    let read = std::io::stdin().lock().take(TOKEN_MAX).read_to_string(&mut text);
    read.map_err(|e| Failure::local("cannot read the token from standard input", e, "pipe it in, or give it as an argument"))?;
    Ok(text)
}

fn warn(ctx: &Ctx, warning: &str) {
    if !warning.is_empty() {
        ctx.note(&format!("note: {}", clean(warning)));
    }
}

async fn ls(ctx: &Ctx) -> Res<u8> {
    let f = info(&Node::find(ctx)?).await?;
    let value = json!({"schema": "ks.nodes.v1", "fleet_id": f.fleet_id, "me": f.me, "quorum": f.quorum, "nodes": f.nodes, "warning": f.warning});
    ctx.result(&value, || node_names::table(&f).render())?;
    if f.fleet_id.is_empty() {
        ctx.note("this node is alone; `ks node token` makes it the first of a fleet");
    } else if !f.quorum {
        ctx.note(&super::fleet::no_quorum(&f));
    }
    warn(ctx, &f.warning);
    Ok(0)
}

async fn named(node: &Node, text: &str) -> Res<(FleetInfo, NodeView)> {
    node_names::check(text.trim_start_matches('#'))?;
    let f = info(node).await?;
    let view = node_names::find(&f, text)?.clone();
    Ok((f, view))
}

async fn show(ctx: &Ctx, text: &str) -> Res<u8> {
    let (f, n) = named(&Node::find(ctx)?, text).await?;
    let value = with_schema("ks.node-view.v1", serde_json::to_value(&n).unwrap_or_default());
    ctx.result(&value, || node_names::facts(&n, f.me, now_ms()))?;
    Ok(0)
}

async fn drain(ctx: &Ctx, text: &str) -> Res<u8> {
    let node = Node::find(ctx)?;
    let (_, n) = named(&node, text).await?;
    let name = clean(&n.name);
    let path = format!("/v1/fleet/nodes/{}/drain", n.number);
    let (mut bar, nothing) = (ctx.bar(), json!({}));
    let d: Drained = tokio::select! {
        done = node.call(&path, &nothing, &mut bar) => done?,
        _ = tokio::signal::ctrl_c() => {
            return Err(Failure::interrupted(
                format!("stopped waiting; the drain of {name} goes on"),
                format!("look with `ks node show {name}`; wait for it again with `ks node drain {name}`"),
            ));
        }
    };
    ctx.result(&d, || {
        let mut text = format!("{name} is drained: {} moved\n", human::count(d.moved.len() as u64, "session"));
        for s in &d.stuck {
            text.push_str(&format!("  {} stays: {}\n", clean(&s.session), clean(&s.why)));
        }
        text
    })?;
    if d.stuck.is_empty() {
        ctx.note(&format!("it takes no sessions now; remove it with `ks node rm {name}`, run `ks node leave` there, or let it take some again: `ks node undrain {name}`"));
        return Ok(0);
    }
    ctx.note("stop or remove these sessions, or give them a compatible node; then drain again");
    Ok(crate::failure::VERDICT_NO)
}

async fn undrain(ctx: &Ctx, text: &str) -> Res<u8> {
    let node = Node::find(ctx)?;
    let (_, n) = named(&node, text).await?;
    let path = format!("/v1/fleet/nodes/{}/undrain", n.number);
    let n: NodeView = node.call(&path, &json!({}), &mut ctx.bar()).await?;
    let value = with_schema("ks.node-view.v1", serde_json::to_value(&n).unwrap_or_default());
    ctx.result(&value, || format!("{} takes sessions again\n", clean(&n.name)))?;
    ctx.note("what has moved away stays where it is");
    Ok(0)
}

async fn leave(ctx: &Ctx, force: bool) -> Res<u8> {
    let node = Node::here(ctx)?;
    let f = info(&node).await?;
    if f.fleet_id.is_empty() && !force {
        return Err(Failure::new("usage", "nothing to leave", "the node on this machine is in no fleet", "see `ks node ls`"));
    }
    let left: Left = node.call("/v1/fleet/leave", &Leave { force }, &mut ctx.bar()).await?;
    if super::fleet::back(ctx, "starting again alone", |i| i.fleet_id != f.fleet_id).await.is_none() {
        ctx.note("it has left, but does not answer yet: look with `ks fleet status`");
    }
    ctx.result(&left, || format!("node {} has left; {} moved\n", left.number, human::count(left.moved.len() as u64, "session")))?;
    warn(ctx, &left.warning);
    Ok(0)
}

async fn rm(ctx: &Ctx, text: &str, force: bool) -> Res<u8> {
    let node = Node::find(ctx)?;
    let (_, n) = named(&node, text).await?;
    if force && n.live && n.sessions > 0 {
        let why = format!("{} answers and runs {}", clean(&n.name), human::count(n.sessions, "session"));
        return Err(Failure::new(
            "running",
            "a live node is not removed by force",
            why,
            format!("`ks node drain {}` first", clean(&n.name)),
        ));
    }
    let query = if force { "?force=1" } else { "" };
    node.delete(&format!("/v1/fleet/nodes/{}{query}", encode(&n.number.to_string()))).await?;
    let value = json!({"schema": "ks.node-rm.v1", "node": n.name, "number": n.number, "removed": true});
    ctx.result(&value, || format!("{} (#{}) is removed\n", clean(&n.name), n.number))?;
    ctx.note("its number and key are never used again; a machine that was wiped joins as a new node");
    Ok(0)
}
